"""The Llama family in GGUF: its metadata as ModelInfo, its tensors under Hugging Face names."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.checkpoint.dequantize import dequantize, stored_dtype
from jaxserve.checkpoint.gguf import GGUFFile, TensorInfo
from jaxserve.checkpoint.rope import LLAMA3_DEFAULTS, check_rope_scaling, llama3_factors
from jaxserve.config import ModelInfo
from jaxserve.errors import UserError

ARCHITECTURE = "llama"
_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROTATED = re.compile(r"blk\.\d+\.attn_(q|k)\.(weight|bias)")
_FEATURES = {
    "expert_count": "mixture-of-experts layers",
    "attention.sliding_window": "sliding window attention",
    "attention.clamp_kqv": "clamped queries, keys and values",
    "logit_scale": "scaled logits",
    "residual_scale": "scaled residuals",
    "embedding_scale": "scaled embeddings",
    "attention.scale": "an attention scale of its own",
}


def load_model_info(path: Path) -> ModelInfo:
    """See `checkpoint.load_model_info`."""
    return _model_info(GGUFFile(path))


class GGUFReader:
    """WeightReader of a GGUF file."""

    def __init__(self, path: Path):
        self.path = path
        self._file = GGUFFile(path)
        info = _model_info(self._file)
        self._num_heads = {"q": info.num_heads, "k": info.num_kv_heads}
        self._tensors = {
            _hf_name(name): tensor
            for name, tensor in self._file.tensors.items()
            if name != _ROPE_FACTORS
        }

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def read(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        out = dequantize(self._file.read_bytes(tensor.name), tensor.type).reshape(tensor.shape)
        rotated = _ROTATED.fullmatch(tensor.name)
        return _split_halves(out, self._num_heads[rotated[1]]) if rotated else out


def _split_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """From GGUF's rotary order (pairs side by side) to Hugging Face's (first half, second half)."""
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _hf_name(name: str) -> str:
    """The Hugging Face name; a tensor that has none keeps its own (and is reported as unused)."""
    if layer := _LAYER.fullmatch(name):
        index, part, suffix = layer.groups()
        if part in _LAYER_NAMES:
            return f"model.layers.{index}.{_LAYER_NAMES[part]}.{suffix}"
    part, _, suffix = name.rpartition(".")
    return f"{_TOP_NAMES[part]}.{suffix}" if part in _TOP_NAMES else name


def _model_info(file: GGUFFile) -> ModelInfo:
    architecture = file.metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise UserError(
            f"Model file {file.path} has the architecture {architecture!r}.",
            fix=f"Use a GGUF file whose general.architecture is {ARCHITECTURE!r}.",
        )
    if file.metadata.get("split.count", 1) > 1:
        raise UserError(
            f"Model file {file.path} is one of {file.metadata['split.count']} parts.",
            fix="Merge the parts into one file (llama-gguf-split --merge).",
        )
    _check_features(file)
    num_heads, hidden_size = _count(file, "attention.head_count"), _count(file, "embedding_length")
    head_dim = _count(file, "attention.key_length", hidden_size // num_heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if _count(file, key, head_dim) != head_dim:
            raise _unsupported(file, key, f"other than the head dimension {head_dim}")
    embedding = _tensor(file, "token_embd.weight")
    theta = _float(file, "rope.freq_base", 10000.0)
    return ModelInfo(
        path=str(file.path),
        format="gguf",
        architecture="LlamaForCausalLM",
        num_layers=_count(file, "block_count"),
        hidden_size=hidden_size,
        intermediate_size=_count(file, "feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=_count(file, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=embedding.shape[0],
        max_position_embeddings=_count(file, "context_length"),
        rms_norm_eps=_float(file, "attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        rope_scaling=_rope_scaling(file, theta, head_dim),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        checkpoint_dtype=stored_dtype(_tensor(file, "blk.0.attn_q.weight").type).name,
        eos_token_ids=_eos_token_ids(file),
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
    )


def _check_features(file: GGUFFile) -> None:
    for key, feature in _FEATURES.items():
        if file.metadata.get(f"{ARCHITECTURE}.{key}"):
            raise _unsupported(file, key, f"({feature})")


def _unsupported(file: GGUFFile, key: str, what: str) -> UserError:
    value = file.metadata[f"{ARCHITECTURE}.{key}"]
    return UserError(
        f"Model file {file.path}: {ARCHITECTURE}.{key} = {value} {what} is not supported.",
        fix="Use a plain Llama-family model.",
    )


def _value(file: GGUFFile, key: str, default: Any = None) -> Any:
    value = file.metadata.get(f"{ARCHITECTURE}.{key}", default)
    if value is None:
        raise UserError(
            f"Model file {file.path} lacks the metadata {ARCHITECTURE}.{key}.",
            fix="Convert the model again with a current converter.",
        )
    return value


def _count(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = _value(file, key, default)
    if not isinstance(value, int) or value < 1:
        shown = "a value for each layer" if isinstance(value, list) else repr(value)
        raise UserError(
            f"Model file {file.path}: {ARCHITECTURE}.{key} is {shown}, not one positive number.",
            fix="Use a Llama-family model whose layers are all alike.",
        )
    return value


def _float(file: GGUFFile, key: str, default: float | None = None) -> float:
    """The shortest decimal that rounds to the stored float32: 1e-5, not 9.99999974e-06."""
    return float(str(np.float32(_value(file, key, default))))


def _tensor(file: GGUFFile, name: str) -> TensorInfo:
    if name not in file.tensors:
        raise UserError(
            f"Model file {file.path} has no tensor {name}.",
            fix="Use a complete model file, not a vocabulary, an adapter or a part.",
        )
    return file.tensors[name]


def _eos_token_ids(file: GGUFFile) -> tuple[int, ...]:
    ids = (file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _rope_scaling(file: GGUFFile, theta: float, head_dim: int) -> dict[str, float | str]:
    """The scaling as Hugging Face configs name it; {} is none."""
    kind = _value(file, "rope.scaling.type", "none")
    if _ROPE_FACTORS in file.tensors:
        if kind not in ("none", "llama3"):
            raise _unsupported(file, "rope.scaling.type", f"together with {_ROPE_FACTORS}")
        return _llama3_scaling(file, theta, head_dim)
    if kind == "none":
        factor = _float(file, "rope.scale_linear", 1.0)
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else {}
    factor = _float(file, "rope.scaling.factor", 1.0)
    return check_rope_scaling({"rope_type": kind, "factor": factor}, str(file.path))


def _llama3_scaling(file: GGUFFile, theta: float, head_dim: int) -> dict[str, float | str]:
    """The parameters behind the stored factors (what frequencies are divided by), verified.

    The file holds only the factors. The largest is the parameter `factor`; the other parameters are
    those of every published Llama 3 model, or the factors come out different and are refused.
    """
    tensor = _tensor(file, _ROPE_FACTORS)
    stored = dequantize(file.read_bytes(_ROPE_FACTORS), tensor.type).astype(np.float32).ravel()
    if np.all(stored == 1.0):
        return {}
    original = _value(file, "rope.scaling.original_context_length", 0)
    scaling = {"rope_type": "llama3", "factor": float(stored.max()), **LLAMA3_DEFAULTS}
    if original:
        scaling["original_max_position_embeddings"] = float(original)
    expected = llama3_factors(scaling, theta, head_dim)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise UserError(
            f"Model file {file.path}: the factors in {_ROPE_FACTORS} are not those of Llama 3.",
            fix="Use the model's Hugging Face directory, whose config.json has the parameters.",
        )
    return scaling
