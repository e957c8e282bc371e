"""Writes random checkpoints like `tiny.INFO`."""

import json
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from safetensors.numpy import save_file

from jaxserve.config import ModelInfo
from jaxserve.models.registry import model_for
from tests.worker import tiny


def write_checkpoint(directory: Path, **changes: object) -> ModelInfo:
    """A random model like `tiny.INFO`, written in Hugging Face's names."""
    info = replace(tiny.INFO, path=str(directory), **changes)
    rng = np.random.default_rng(3)
    whole = model_for(info).param_specs(info)
    q_len, kv_len = (n * info.head_dim for n in (info.num_heads, info.num_kv_heads))
    sizes = {
        "q_proj": (q_len, info.hidden_size),
        "k_proj": (kv_len, info.hidden_size),
        "v_proj": (kv_len, info.hidden_size),
        "o_proj": (info.hidden_size, q_len),
        "gate_proj": (info.intermediate_size, info.hidden_size),
        "up_proj": (info.intermediate_size, info.hidden_size),
        "down_proj": (info.hidden_size, info.intermediate_size),
        "embed_tokens": (info.vocab_size, info.hidden_size),
        "lm_head": (info.vocab_size, info.hidden_size),
    }
    tensors = {}
    for source in [source for spec in whole.values() for source in spec.sources]:
        *_, part, kind = source.split(".")
        shape = sizes.get(part, (info.hidden_size,))
        shape = shape[:1] if kind == "bias" else shape
        for i in range(info.num_layers if "{i}" in source else 1):
            values = rng.normal(0, shape[-1] ** -0.5 if len(shape) == 2 else 0.3, shape)
            values = values + ("norm" in part)
            values = values * (info.hidden_size**0.5 if part == "embed_tokens" else 1)
            tensors[source.format(i=i)] = values.astype(np.float32)
    save_file(tensors, directory / "model.safetensors")
    described = {"tie_word_embeddings": info.tie_word_embeddings}
    (directory / "config.json").write_text(json.dumps(described))
    return info
