"""A Llama forward pass in plain numpy, to see that weights and ModelInfo mean what they should."""

from collections.abc import Callable

import numpy as np

from jaxserve.config import ModelInfo


def last_logits(info: ModelInfo, read: Callable[[str], np.ndarray], ids: list[int]) -> np.ndarray:
    """float32 logits after the last of `ids`."""
    head = "model.embed_tokens.weight" if info.tie_word_embeddings else "lm_head.weight"
    return read(head).astype(np.float32, copy=False) @ hidden_states(info, read, ids)[-1]


def hidden_states(info: ModelInfo, read: Callable[[str], np.ndarray], ids: list[int]) -> np.ndarray:
    """float32 hidden states of `ids`, after the last norm."""

    def weight(name: str) -> np.ndarray:
        return read(name).astype(np.float32, copy=False)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        scale = 1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + info.rms_norm_eps)
        return x * scale * weight(name)

    cos, sin = _rotation(info, len(ids))
    group = info.num_heads // info.num_kv_heads
    mask = np.triu(np.full((len(ids), len(ids)), -np.inf, np.float32), 1)
    x = weight("model.embed_tokens.weight")[ids]
    for i in range(info.num_layers):
        layer = f"model.layers.{i}."
        h = norm(x, layer + "input_layernorm.weight")
        q, k, v = (
            (h @ weight(f"{layer}self_attn.{p}_proj.weight").T).reshape(len(ids), -1, info.head_dim)
            for p in "qkv"
        )
        q, k = _rotate(q, cos, sin), np.repeat(_rotate(k, cos, sin), group, axis=1)
        scores = np.einsum("qnh,knh->nqk", q, k) / np.sqrt(np.float32(info.head_dim)) + mask
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        out = np.einsum("nqk,knh->qnh", scores, np.repeat(v, group, axis=1))
        x = x + out.reshape(len(ids), -1) @ weight(layer + "self_attn.o_proj.weight").T
        h = norm(x, layer + "post_attention_layernorm.weight")
        gate = h @ weight(layer + "mlp.gate_proj.weight").T
        up = h @ weight(layer + "mlp.up_proj.weight").T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weight(layer + "mlp.down_proj.weight").T
    return norm(x, "model.norm.weight")


def _rotation(info: ModelInfo, length: int) -> tuple[np.ndarray, np.ndarray]:
    frequencies = np.array(
        [info.rope_theta ** (-i / info.head_dim) for i in range(0, info.head_dim, 2)]
    )
    scaling = info.rope_scaling
    if scaling.get("rope_type") == "llama3":
        factor, low, high, original = (
            float(scaling[key])
            for key in (
                "factor",
                "low_freq_factor",
                "high_freq_factor",
                "original_max_position_embeddings",
            )
        )
        for i, frequency in enumerate(frequencies):
            turns = original * frequency / (2 * np.pi)
            if turns < low:
                frequencies[i] = frequency / factor
            elif turns < high:
                smooth = (turns - low) / (high - low)
                frequencies[i] = (1 - smooth) * frequency / factor + smooth * frequency
    else:
        assert not scaling, scaling
    angles = np.arange(length)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    first, second = np.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
