"""Where the tokens of a call belong, and the KV write where XLA does it."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Float32, Int32

from pallas_kernels.ragged_paged_attention.layout import KVCache, KVCacheLayout


class Rows(NamedTuple):
    """The rows of a call, garbage in padding replaced; the same in every layer.

    pages: in range everywhere.
    kv_lens: tokens of each row, 0 for rows without new ones; what its pages cannot hold is cut off.
    q_lens: new tokens of each row, 0 for padding.  starts: the first token of each row.
    row_of_token: in range everywhere.  is_live: of tokens that are not padding.
    token_pages, token_slots: where a token's K and V go; page P, which there is not, for padding.
    """

    pages: Int32[Array, "R B"]
    kv_lens: Int32[Array, " R"]
    q_lens: Int32[Array, " R"]
    starts: Int32[Array, " R"]
    row_of_token: Int32[Array, " T"]
    is_live: Bool[Array, " T"]
    token_pages: Int32[Array, " T"]
    token_slots: Int32[Array, " T"]


def find_rows(
    layout: KVCacheLayout,
    num_tokens: int,
    num_pages: int,
    block_tables: Int32[Array, "R B"],
    kv_lens: Int32[Array, " R"],
    cu_q_lens: Int32[Array, " R+1"],
    num_rows: int | Int32[Array, ""],
) -> Rows:
    """The rows of calls with `num_tokens` tokens, on caches of `num_pages` pages.

    The arrays are those of `ragged_paged_attention`.
    """
    max_rows, row_capacity = kv_lens.shape[0], block_tables.shape[1] * layout.page_size
    is_live_row = jnp.arange(max_rows) < num_rows
    q_lens = jnp.where(is_live_row, cu_q_lens[1:] - cu_q_lens[:-1], 0)
    kv_lens = jnp.where(q_lens > 0, jnp.minimum(kv_lens, row_capacity), 0)
    ends = jnp.cumsum(q_lens)
    pages = jnp.clip(block_tables, 0, num_pages - 1)

    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    row_of_token = jnp.sum(ends[None] <= tokens[:, None], axis=1)
    is_live = row_of_token < max_rows
    row_of_token = jnp.minimum(row_of_token, max_rows - 1)
    positions = jnp.where(is_live, kv_lens[row_of_token] - ends[row_of_token] + tokens, 0)
    token_pages = pages[row_of_token, positions // layout.page_size]
    return Rows(
        pages=pages,
        kv_lens=kv_lens,
        q_lens=q_lens,
        starts=ends - q_lens,
        row_of_token=row_of_token,
        is_live=is_live,
        token_pages=jnp.where(is_live, token_pages, num_pages),
        token_slots=positions % layout.page_size,
    )


def write_new_tokens(
    layout: KVCacheLayout,
    rows: Rows,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    kv_cache: KVCache,
    layer: int | Int32[Array, ""],
    *,
    k_scale: Float32[Array, " K"] | None,
    v_scale: Float32[Array, " K"] | None,
) -> KVCache:
    """The cache with this step's K and V in their slots."""
    return layout.write_tokens(
        kv_cache,
        layer,
        rows.token_pages,  # P: dropped
        rows.token_slots,
        layout.encode(k, k_scale),
        layout.encode(v, v_scale),
    )
