"""The Llama family: pre-norm transformer, rotary positions, grouped queries, SwiGLU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32, Int32

from jaxserve.config import ModelInfo
from jaxserve.models.layers import (
    Matmul,
    linear,
    look_up,
    matmul_by_xla,
    rope_frequencies,
    rope_tables,
)
from jaxserve.models.partition import pad_to, partition, place_heads
from jaxserve.models.registry import Attend, Linear, Params, ParamSpec
from pallas_kernels.matmul import Fused, Int8Weights, of_layer, rms_norm
from pallas_kernels.ragged_paged_attention import KVCache

_LAYER = "model.layers.{i}."
_QUANTIZED = ("qkv", "attn_out", "gate_up", "down")


def param_specs(info: ModelInfo, num_parts: int = 1) -> dict[str, ParamSpec]:
    """See `registry.Model.param_specs`. What a part of the heads or of the MLP needs lies together:
    qkv is [L, K, G + 2, H, D], the G queries, the key and the value of one KV head, and gate_up is
    [L, parts, 2, F / parts, D]."""
    layers, embed, head_dim = info.num_layers, info.hidden_size, info.head_dim
    cut = partition(info, num_parts)
    num_places, group = cut.q_heads.shape

    def pack_qkv(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        q = place_heads(q.reshape(info.num_heads, head_dim, *q.shape[1:]), cut.q_heads)
        k, v = (a.reshape(info.num_kv_heads, head_dim, *a.shape[1:]) for a in (k, v))
        k, v = (place_heads(a, cut.kv_heads)[:, None] for a in (k, v))
        return np.concatenate([q, k, v], axis=1)

    def pack_attn_out(out: np.ndarray) -> np.ndarray:
        heads = out.reshape(len(out), info.num_heads, head_dim).swapaxes(0, 1)
        return place_heads(heads, cut.q_heads.ravel()).swapaxes(0, 1).reshape(len(out), -1)

    def pad_mlp(array: np.ndarray, axis: int) -> np.ndarray:
        return pad_to(array, axis, info.intermediate_size, cut.mlp)

    def pack_gate_up(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        both = pad_mlp(np.stack([gate, up]), 1)
        return both.reshape(2, num_parts, -1, *gate.shape[1:]).swapaxes(0, 1)

    def stacked(
        shape: tuple[int, ...], axes: tuple[str | None, ...], *names: str, assemble=None
    ) -> ParamSpec:
        sources = tuple(_LAYER + n for n in names)
        return ParamSpec((layers, *shape), ("layers", *axes), sources, assemble)

    qkv_names = [f"self_attn.{n}_proj" for n in "qkv"]
    specs = {
        "embed": ParamSpec(
            (info.vocab_size, embed), ("vocab", "embed"), ("model.embed_tokens.weight",)
        ),
        "final_norm": ParamSpec((embed,), ("embed",), ("model.norm.weight",)),
        "layers.attn_norm": stacked((embed,), ("embed",), "input_layernorm.weight"),
        "layers.qkv": stacked(
            (num_places, group + 2, head_dim, embed),
            ("kv_heads", None, None, "embed"),
            *[n + ".weight" for n in qkv_names],
            assemble=pack_qkv,
        ),
        "layers.attn_out": stacked(
            (embed, num_places * group * head_dim),
            ("embed", "heads"),
            "self_attn.o_proj.weight",
            assemble=pack_attn_out,
        ),
        "layers.mlp_norm": stacked((embed,), ("embed",), "post_attention_layernorm.weight"),
        "layers.gate_up": stacked(
            (num_parts, 2, cut.mlp // num_parts, embed),
            ("parts", None, None, "embed"),
            "mlp.gate_proj.weight",
            "mlp.up_proj.weight",
            assemble=pack_gate_up,
        ),
        "layers.down": stacked(
            (embed, cut.mlp),
            ("embed", "mlp"),
            "mlp.down_proj.weight",
            assemble=lambda down: pad_mlp(down, 1),
        ),
    }
    if info.attention_bias:
        specs["layers.qkv_bias"] = stacked(
            (num_places, group + 2, head_dim),
            ("kv_heads", None, None),
            *[n + ".bias" for n in qkv_names],
            assemble=pack_qkv,
        )
        specs["layers.attn_out_bias"] = stacked((embed,), ("embed",), "self_attn.o_proj.bias")
    if not info.tie_word_embeddings:
        specs["lm_head"] = ParamSpec(
            (info.vocab_size, embed), ("vocab", "embed"), ("lm_head.weight",)
        )
    quantized = {_head(info), *("layers." + name for name in _QUANTIZED)}
    return {n: dataclasses.replace(s, is_quantized=n in quantized) for n, s in specs.items()}


def forward(
    params: Params,
    info: ModelInfo,
    token_ids: Int32[Array, " T"],
    positions: Int32[Array, " T"],
    kv_cache: KVCache,
    attend: Attend,
    linear: Linear = linear,
    sum_linear: Linear = linear,
) -> tuple[Float[Array, "T D"], KVCache]:
    """See `registry.Model.forward`. One loop over the layers, whose weights stay in a stack."""
    tables = rope_tables(positions, rope_frequencies(info))
    num_tokens = token_ids.shape[0]

    def layer(
        carry: tuple[Int32[Array, ""], Float[Array, "T D"], KVCache],
    ) -> tuple[Int32[Array, ""], Float[Array, "T D"], KVCache]:
        layer_idx, x, kv_cache = carry
        qkv = linear(x, stacked["qkv"], layer_idx, norm("attn_norm"))
        if "qkv_bias" in small:
            qkv = qkv + of_layer(small["qkv_bias"], layer_idx)
        attended, kv_cache = attend(qkv, tables, kv_cache, layer_idx)
        if "attn_out_bias" in small:
            x = x + of_layer(small["attn_out_bias"], layer_idx)
        attended = attended.reshape(num_tokens, -1)
        x = sum_linear(attended, stacked["attn_out"], layer_idx, Fused(residual=x))
        gate_up = linear(x, stacked["gate_up"], layer_idx, norm("mlp_norm"))
        x = sum_linear(gate_up, stacked["down"], layer_idx, Fused(is_gated=True, residual=x))
        return layer_idx + 1, x, kv_cache

    def norm(name: str) -> Fused:
        return Fused(norm=small[name], eps=info.rms_norm_eps)

    prefix = "layers."
    stacked = {n.removeprefix(prefix): p for n, p in params.items() if n.startswith(prefix)}
    small = {n: p for n, p in stacked.items() if not isinstance(p, Int8Weights)}
    final_norm = params["final_norm"]
    assert not isinstance(final_norm, Int8Weights)
    embedded = look_up(params["embed"], token_ids, final_norm.dtype)
    # By the loop's own counter: XLA reads weights where they lie in the stack, on GPUs too.
    _, x, kv_cache = jax.lax.while_loop(
        lambda carry: carry[0] < info.num_layers,
        layer,
        (jnp.int32(0), embedded, kv_cache),
    )
    return rms_norm(x, final_norm, info.rms_norm_eps), kv_cache


def logits(
    params: Params,
    info: ModelInfo,
    hidden: Float[Array, "R D"],
    matmul: Matmul = matmul_by_xla,
) -> Float32[Array, "R V"]:
    """See `registry.Model.logits`."""
    head = jax.tree.map(lambda array: array[None], params[_head(info)])
    return matmul(hidden, head, 0)


def _head(info: ModelInfo) -> str:
    return "embed" if info.tie_word_embeddings else "lm_head"
