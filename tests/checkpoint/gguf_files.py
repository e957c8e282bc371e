"""GGUF files for the tests, written with the gguf package: small ones, and tiny_llama as GGUF."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (gives numpy the bfloat16 of the stored weights)
import numpy as np
import safetensors
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType, GGUFWriter, quantize

GOLDENS = Path(__file__).parent.parent / "goldens"
TINY_LLAMA = GOLDENS / "tiny_llama"

LLAMA_METADATA: dict[str, Any] = {
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "llama.rope.freq_base": 500.0,
    "llama.rope.dimension_count": 16,
    "llama.rope.scaling.original_context_length": 64,
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.eot_token_id": 2,
}
_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray] | None = None,
    kind: Kind = Kind.F32,
    architecture: str = "llama",
) -> Path:
    """Matrices are stored as `kind`, vectors as float32."""
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        writer.add_key_value(key, value, _value_type(value))
    for name, tensor in (tensors or {}).items():
        stored = kind if tensor.ndim > 1 else Kind.F32
        writer.add_tensor(name, quantize(tensor.astype(np.float32), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _value_type(value: Any) -> GGUFValueType:
    # bool first: it is an int as well.
    for kind, value_type in (
        (bool, GGUFValueType.BOOL),
        (int, GGUFValueType.UINT32),
        (float, GGUFValueType.FLOAT32),
        (str, GGUFValueType.STRING),
        (list, GGUFValueType.ARRAY),
    ):
        if isinstance(value, kind):
            return value_type
    raise AssertionError(value)


def tiny_weights() -> dict[str, np.ndarray]:
    """Every weight of tiny_llama as float32, read with safetensors alone."""
    out = {}
    for shard in TINY_LLAMA.glob("*.safetensors"):
        with safetensors.safe_open(shard, framework="numpy") as file:
            names = file.keys()  # the file itself cannot be looped over
            out |= {name: file.get_tensor(name).astype(np.float32) for name in names}
    return out


def tiny_gguf_tensors() -> dict[str, np.ndarray]:
    """The same weights as a converter to GGUF names and orders them."""
    heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}
    out = {}
    for name, weight in tiny_weights().items():
        if not name.startswith("model.layers."):
            gguf_name = {
                "model.embed_tokens.weight": "token_embd.weight",
                "model.norm.weight": "output_norm.weight",
                "lm_head.weight": "output.weight",
            }[name]
            out[gguf_name] = weight
            continue
        index, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
        if part in heads:
            weight = _interleave(weight, heads[part])
        out[f"blk.{index}.{_PARTS[part]}.weight"] = weight
    out["rope_freqs.weight"] = llama3_factors()
    return out


def _interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a head (0, d/2, 1, d/2 + 1, ...): rotary partners side by side."""
    head_dim = len(weight) // num_heads
    order = [i // 2 + (i % 2) * (head_dim // 2) for i in range(head_dim)]
    rows = [head * head_dim + i for head in range(num_heads) for i in order]
    return weight[rows]


def llama3_factors() -> np.ndarray:
    """Of tiny_llama's config, one frequency at a time as the Llama 3.1 reference code does."""
    rope = json.loads((TINY_LLAMA / "config.json").read_text())["rope_parameters"]
    low_wavelength = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high_wavelength = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    factors = []
    for i in range(0, 16, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / 16)
        if wavelength < high_wavelength:
            factors.append(1.0)
        elif wavelength > low_wavelength:
            factors.append(rope["factor"])
        else:
            smooth = (
                rope["original_max_position_embeddings"] / wavelength - rope["low_freq_factor"]
            ) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def tiny_gguf(
    path: Path,
    *,
    kind: Kind = Kind.F32,
    metadata: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
    more: dict[str, np.ndarray] | None = None,
) -> Path:
    """tiny_llama in a GGUF file; a metadata value of None removes the key."""
    merged = LLAMA_METADATA | (metadata or {})
    tensors = {k: v for k, v in tiny_gguf_tensors().items() if k not in without}
    return write_gguf(
        path,
        {k: v for k, v in merged.items() if v is not None},
        tensors | (more or {}),
        kind,
    )
