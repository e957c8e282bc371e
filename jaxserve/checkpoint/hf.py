"""Hugging Face directories: config.json as ModelInfo, safetensors (single or sharded), the hub."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (gives numpy the bfloat16 that safetensors asks it for)
import numpy as np
import safetensors

from jaxserve.checkpoint.rope import check_rope_scaling
from jaxserve.config import ModelInfo
from jaxserve.errors import UserError

ARCHITECTURE = "LlamaForCausalLM"
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_WANTED, _UNWANTED = ["*.json", "*.safetensors", "*.jinja"], ["original/*", "consolidated*"]
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_TIED = "lm_head.weight"
_BUFFER = ".rotary_emb.inv_freq"  # old checkpoints store what follows from the config
_DEFAULT_ROPE_THETA = 10000.0
_PLAIN_VALUES = {"hidden_act": "silu", "mlp_bias": False, "quantization_config": None}


def fetch_snapshot(model: str) -> Path:
    """The local snapshot of a hub repository, downloaded when needed.

    Raises:
      UserError: not a repository id, no such repository, no access, offline.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(model, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except HFValidationError as e:
        raise UserError(
            f"Model {model!r} is no known name, file, directory or hub id.",
            fix="Give smollm2-135m, a .gguf file, a model directory or a hub id such as org/name.",
        ) from e
    except Exception as e:  # of the hub, of its HTTP library, of the file system: no common base
        reason = str(e).strip().splitlines() or [type(e).__name__]
        raise UserError(
            f"Model {model!r} is no local file or directory and not to be had from the hub: "
            f"{reason[0]}",
            fix="Check the spelling, the network and your hub token (HF_TOKEN), or give a path.",
        ) from e


def load_model_info(path: Path) -> ModelInfo:
    """See `checkpoint.load_model_info`."""
    config = read_json(path / "config.json")
    _check_features(config, str(path / "config.json"))
    reader = SafetensorsReader(path)
    embedding = "model.embed_tokens.weight"
    if embedding not in reader.names():
        raise UserError(
            f"Model directory {path} has no weight {embedding}.",
            fix="Use a complete checkpoint, not an adapter or a part.",
        )
    return _model_info(path, config, reader.dtype(embedding))


class SafetensorsReader:
    """WeightReader of a directory with model.safetensors, or an index and its shards."""

    def __init__(self, path: Path):
        self.path = path
        self._files: dict[str, Any] = {}
        for shard in _shards(path):
            try:
                file = safetensors.safe_open(shard, framework="numpy")
                names = file.keys()
            except FileNotFoundError as e:
                raise UserError(
                    f"Weight file {shard} is missing.",
                    fix=f"Download all the files that {_INDEX} names.",
                ) from e
            except (safetensors.SafetensorError, OSError) as e:
                raise UserError(
                    f"Weight file {shard} is truncated or damaged: {e}.",
                    fix="Download the file again and compare its size or checksum.",
                ) from e
            self._files |= dict.fromkeys(names, file)
        tied = bool(read_json(path / "config.json").get("tie_word_embeddings", False))
        for name in list(self._files):
            if name.endswith(_BUFFER) or (tied and name == _TIED):
                del self._files[name]

    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """As numpy names it."""
        stored = self._files[name].get_slice(name).get_dtype()
        if stored not in _DTYPES:
            raise UserError(
                f"Weight {name} in {self.path} has the type {stored}.",
                fix="Use a checkpoint in bfloat16, float16 or float32.",
            )
        return _DTYPES[stored]

    def read(self, name: str) -> np.ndarray:
        self.dtype(name)
        return self._files[name].get_tensor(name)


def _shards(path: Path) -> list[Path]:
    if (path / _INDEX).is_file():
        weight_map = read_json(path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(
                f"File {path / _INDEX} has no weight_map.", fix="Download the file again."
            )
        return [path / name for name in sorted(set(weight_map.values()))]
    if (path / _SINGLE).is_file():
        return [path / _SINGLE]
    raise UserError(
        f"Model directory {path} has neither {_SINGLE} nor {_INDEX}.",
        fix="Give a checkpoint with safetensors weights; pickled weights (*.bin) are not read.",
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the checkpoint; raises UserError when it is not one."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as e:
        raise UserError(
            f"File {path} cannot be read: {e.strerror}.",
            fix="Give a complete model directory that you may read.",
        ) from e
    except ValueError as e:
        raise UserError(
            f"File {path} is not valid JSON: {e}.", fix="Download the file again."
        ) from e
    if not isinstance(value, dict):
        raise UserError(f"File {path} is not a JSON object.", fix="Download the file again.")
    return value


def _check_features(config: dict[str, Any], source: str) -> None:
    architectures = config.get("architectures") or [config.get("model_type")]
    if architectures not in ([ARCHITECTURE], ["llama"]):
        raise UserError(
            f"{source}: the architecture is {', '.join(map(str, architectures))}.",
            fix=f"Use a model of the architecture {ARCHITECTURE}.",
        )
    for key, plain in _PLAIN_VALUES.items():
        if config.get(key) not in (plain, None):
            raise UserError(
                f"{source}: {key} = {config[key]!r} is not supported.",
                fix=f"Use a Llama-family model with {key} = {json.dumps(plain)}.",
            )


def _model_info(path: Path, config: dict[str, Any], dtype: str) -> ModelInfo:
    source = str(path / "config.json")
    theta, scaling = _rope(config, source)
    num_heads = _count(config, "num_attention_heads", source)
    hidden_size = _count(config, "hidden_size", source)
    return ModelInfo(
        path=str(path),
        format="safetensors",
        architecture=ARCHITECTURE,
        num_layers=_count(config, "num_hidden_layers", source),
        hidden_size=hidden_size,
        intermediate_size=_count(config, "intermediate_size", source),
        num_heads=num_heads,
        num_kv_heads=_count(config, "num_key_value_heads", source, num_heads),
        head_dim=_count(config, "head_dim", source, hidden_size // num_heads),
        vocab_size=_count(config, "vocab_size", source),
        max_position_embeddings=_count(config, "max_position_embeddings", source, 2048),
        rms_norm_eps=_number(config, "rms_norm_eps", source, 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        checkpoint_dtype=dtype,
        eos_token_ids=_eos_token_ids(path, config),
        bos_token_id=next(iter(_ids(config.get("bos_token_id"), source, "bos_token_id")), None),
    )


def _number(config: dict[str, Any], key: str, source: str, default: float | None = None) -> float:
    """A positive number; a default (LlamaConfig's own) where the key is absent or null."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise UserError(
            f"{source}: {key} is {value!r}, not a positive number.",
            fix=f"Use a checkpoint whose config.json has {key}.",
        )
    return float(value)


def _count(config: dict[str, Any], key: str, source: str, default: int | None = None) -> int:
    value = _number(config, key, source, default)
    if value != int(value):
        raise UserError(
            f"{source}: {key} is {value}, not a whole number.",
            fix=f"Use a checkpoint whose config.json has a whole {key}.",
        )
    return int(value)


def _rope(config: dict[str, Any], source: str) -> tuple[float, dict[str, float | str]]:
    """Theta and scaling: rope_parameters (transformers 5), or rope_theta with rope_scaling."""
    parameters = config.get("rope_parameters") or {}
    scaling = parameters or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict) or scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(
            f"{source}: rope parameters {scaling!r} are not supported.",
            fix="Use a model that rotates whole heads, alike in all layers.",
        )
    holder = parameters if "rope_theta" in parameters else config
    theta = _number(holder, "rope_theta", source, _DEFAULT_ROPE_THETA)
    return theta, check_rope_scaling(scaling, source)


def _eos_token_ids(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Those of generation_config.json, which know of chats; else those of config.json."""
    generation = path / "generation_config.json"
    if generation.is_file():
        ids = _ids(read_json(generation).get("eos_token_id"), str(generation), "eos_token_id")
        if ids:
            return ids
    return _ids(config.get("eos_token_id"), str(path / "config.json"), "eos_token_id")


def _ids(value: Any, source: str, key: str) -> tuple[int, ...]:
    """One id, a list of them or null."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and i >= 0 for i in ids):
        raise UserError(
            f"{source}: {key} = {value!r} is neither a token id nor a list of them.",
            fix="Use an unmodified checkpoint.",
        )
    return tuple(dict.fromkeys(ids))
