"""The definition of the op in plain JAX: one row at a time, its pages gathered densely."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Float32, Int32

from pallas_kernels.ragged_paged_attention.layout import KVCache
from pallas_kernels.ragged_paged_attention.specs import AttentionCall


def unsupported_reason(call: AttentionCall) -> str | None:
    """The definition serves every call."""
    del call
    return None


def ragged_paged_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    kv_cache: KVCache,
    layer: int | Int32[Array, ""],
    block_tables: Int32[Array, "R B"],
    kv_lens: Int32[Array, " R"],
    cu_q_lens: Int32[Array, " R+1"],
    num_rows: int | Int32[Array, ""],
    *,
    call: AttentionCall,
    scale: float,
    sinks: Float32[Array, " N"] | None,
    k_scale: Float32[Array, " K"] | None,
    v_scale: Float32[Array, " K"] | None,
) -> tuple[Float[Array, "T N H"], KVCache]:
    """See `pallas_kernels.ragged_paged_attention.ragged_paged_attention`.

    Work is R * T * B * S whatever the rows hold.
    """
    layout, sliding_window, soft_cap = call.layout, call.sliding_window, call.soft_cap
    num_pages = layout.num_pages(kv_cache)
    row_of_token, positions = _locate(kv_lens, cu_q_lens, num_rows, q.shape[0])
    is_live = row_of_token >= 0

    pages = block_tables[jnp.maximum(row_of_token, 0), positions // layout.page_size]
    kv_cache = layout.write_tokens(
        kv_cache,
        layer,
        jnp.where(is_live, pages, num_pages),  # num_pages: dropped
        positions % layout.page_size,
        layout.encode(k, k_scale),
        layout.encode(v, v_scale),
    )

    context = jnp.arange(block_tables.shape[1] * layout.page_size)

    def attend_row(row: Int32[Array, ""], out: Float32[Array, "T N H"]) -> Float32[Array, "T N H"]:
        row_pages = jnp.clip(block_tables[row], 0, num_pages - 1)[context // layout.page_size]
        keys, values = layout.read_tokens(kv_cache, layer, row_pages, context % layout.page_size)
        is_stored = (context < kv_lens[row])[:, None, None]
        keys = jnp.where(is_stored, layout.decode(keys, k_scale), 0)
        values = jnp.where(is_stored, layout.decode(values, v_scale), 0)

        mask = context <= positions[:, None]
        if sliding_window is not None:
            mask &= context > positions[:, None] - sliding_window
        row_out = _attend(q.astype(jnp.float32), keys, values, mask, scale, soft_cap, sinks)
        return jnp.where((row_of_token == row)[:, None, None], row_out, out)

    rows = jnp.clip(num_rows, 0, kv_lens.shape[0])
    out = jax.lax.fori_loop(0, rows, attend_row, jnp.zeros(q.shape, jnp.float32))
    return out.astype(q.dtype), kv_cache


def _locate(
    kv_lens: Int32[Array, " R"],
    cu_q_lens: Int32[Array, " R+1"],
    num_rows: int | Int32[Array, ""],
    num_tokens: int,
) -> tuple[Int32[Array, " T"], Int32[Array, " T"]]:
    """The row of each token and its position in that row; -1 and 0 for padding."""
    tokens = jnp.arange(num_tokens)[:, None]
    owns = (cu_q_lens[:-1] <= tokens) & (tokens < cu_q_lens[1:])
    owns &= jnp.arange(kv_lens.shape[0]) < num_rows
    row_of_token = jnp.where(owns.any(axis=1), jnp.argmax(owns, axis=1), -1)
    positions = kv_lens[row_of_token] - cu_q_lens[row_of_token + 1] + tokens[:, 0]
    return row_of_token, jnp.where(row_of_token >= 0, positions, 0)


def _attend(
    q: Float32[Array, "T N H"],
    keys: Float32[Array, "C K H"],
    values: Float32[Array, "C K H"],
    mask: Bool[Array, "T C"],
    scale: float,
    soft_cap: float | None,
    sinks: Float32[Array, " N"] | None,
) -> Float32[Array, "T N H"]:
    """Masked softmax attention of T queries to C keys; unspecified where the mask is empty."""
    group = q.shape[1] // keys.shape[1]
    keys = jnp.repeat(keys, group, axis=1)
    values = jnp.repeat(values, group, axis=1)
    scores = scale * jnp.einsum("tnh,cnh->tnc", q, keys, precision="highest")
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(mask[:, None, :], scores, -jnp.inf)
    if sinks is not None:  # one more logit, whose value is zero
        sink_scores = jnp.broadcast_to(sinks[None, :, None], (*q.shape[:2], 1))
        scores = jnp.concatenate([scores, sink_scores], axis=2)
    weights = jax.nn.softmax(scores, axis=2)[:, :, : keys.shape[0]]
    return jnp.einsum("tnc,cnh->tnh", weights, values, precision="highest")
