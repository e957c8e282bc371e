"""How the prefill kernels for GPUs cut queries into tiles, and the way there and back.

The new tokens of a row are cut into tiles of `Tiling.tokens`. A tile and a KV head are a work item:
a matrix with a row for each token and each query head of the group, which meets the keys and values
of the tile's own row. XLA brings the queries into the order in which kernels read them and picks
each token's output from its tile; that costs what T tokens cost, however many tiles there could be.
"""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from pallas_kernels.ragged_paged_attention.rows import Rows
from pallas_kernels.ragged_paged_attention.specs import AttentionCall

_ALIGNMENT = 8  # matrix rows: a copy to swizzled shared memory starts at a multiple
_NO_WINDOW = 2**30  # tokens: longer than any context


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The static side: `group` query heads a KV head, tiles of `tokens` tokens.

    A tile has tokens * group of `rows` matrix rows: a multiple of 8, and at most `rows`. A row of
    the batch starts at a multiple of `token_alignment` tokens, so that each of its tiles starts at
    a multiple of 8 matrix rows.
    """

    group: int
    rows: int

    @property
    def token_alignment(self) -> int:
        return _ALIGNMENT // math.gcd(self.group, _ALIGNMENT)

    @property
    def tokens(self) -> int:
        return self.rows // self.group // self.token_alignment * self.token_alignment

    def num_tiles(self, num_tokens: int, num_rows: int) -> int:
        """The most tiles that rows of two and more tokens can need."""
        return num_tokens // self.tokens + min(num_rows, num_tokens // 2)

    def aligned_tokens(self, num_tokens: int, num_rows: int) -> int:
        """Tokens with the gaps between aligned rows, and a tile's worth to read past the end."""
        gaps = (self.token_alignment - 1) * min(num_rows, num_tokens // 2)
        return -(-(num_tokens + gaps) // _ALIGNMENT) * _ALIGNMENT + 2 * self.tokens


def tiling_of(call: AttentionCall, rows: int) -> Tiling | None:
    """Tiles of at most `rows` matrix rows, or None when a KV head has too many query heads."""
    tiling = Tiling(call.num_heads // call.layout.num_kv_heads, rows)
    return tiling if tiling.tokens > 0 else None


class Tiles(NamedTuple):
    """Where each tile's queries are and what they see; of `num_live` tiles, the others are dead.

    Rows are in reverse, and so are the tiles of a row: long contexts come first.

    row: of the batch.
    query: first matrix row, within one KV head, of the aligned queries.
    position: of the first token in its row.
    begin, end: the context that some token of the tile sees.
    """

    num_live: Int32[Array, " 1"]
    row: Int32[Array, " W"]
    query: Int32[Array, " W"]
    position: Int32[Array, " W"]
    begin: Int32[Array, " W"]
    end: Int32[Array, " W"]


class Order(NamedTuple):
    """The way of the queries into aligned order, and of the output back to tokens.

    source: the token at each aligned place; any token where none is.
    tile, place: where the output of each token is; -1 for tokens that are in no tile.
    """

    source: Int32[Array, " A"]
    tile: Int32[Array, " T"]
    place: Int32[Array, " T"]


def cut_tiles(call: AttentionCall, tiling: Tiling, rows: Rows) -> tuple[Tiles, Order]:
    """Tiles of the rows of more than one new token."""
    num_tokens, max_rows = rows.is_live.shape[0], rows.kv_lens.shape[0]
    q_lens = jnp.where(rows.q_lens > 1, rows.q_lens, 0)
    kv_lens, starts = rows.kv_lens, rows.starts
    num_tiles = -(-q_lens // tiling.tokens)
    cu_tiles = jnp.cumsum(num_tiles)
    aligned_lens = -(-q_lens // tiling.token_alignment) * tiling.token_alignment
    cu_aligned = jnp.cumsum(aligned_lens)
    first_aligned = cu_aligned - aligned_lens

    num_live = cu_tiles[-1]
    slots = num_live - 1 - jnp.arange(tiling.num_tiles(num_tokens, max_rows))
    row = _row_of(slots, cu_tiles)
    first_token = (slots - (cu_tiles - num_tiles)[row]) * tiling.tokens
    position = kv_lens[row] - q_lens[row] + first_token
    tiles = Tiles(
        num_live=num_live[None],
        row=row,
        query=(first_aligned[row] + first_token) * tiling.group,
        position=position,
        begin=jnp.maximum(position - (call.sliding_window or _NO_WINDOW) + 1, 0),
        end=jnp.minimum(position + tiling.tokens, kv_lens[row]),
    )

    places = jnp.arange(tiling.aligned_tokens(num_tokens, max_rows))
    row = _row_of(places, cu_aligned)
    source = jnp.clip(starts[row] + places - first_aligned[row], 0, num_tokens - 1)

    tokens = jnp.arange(num_tokens)[:, None]
    owns = (starts <= tokens) & (tokens < starts + q_lens)
    row = jnp.argmax(owns, axis=1)
    offset = tokens[:, 0] - starts[row]
    tile = num_live - 1 - ((cu_tiles - num_tiles)[row] + offset // tiling.tokens)
    tile = jnp.where(owns.any(axis=1), tile, -1)
    return tiles, Order(source, tile, offset % tiling.tokens)


def align_queries(
    q: Float[Array, "T N H"], order: Order, num_kv_heads: int
) -> Float[Array, "K Q H"]:
    """The queries in the order in which tiles lie; what is in the gaps is some query."""
    aligned = q.reshape(q.shape[0], num_kv_heads, -1, q.shape[2])[order.source]
    return aligned.transpose(1, 0, 2, 3).reshape(num_kv_heads, -1, q.shape[2])


def pick_output(
    tiles: Float[Array, "W K M H"], order: Order, tiling: Tiling
) -> Float[Array, "T N H"]:
    """The output of each token; zeros for tokens that are in no tile."""
    num_tiles, num_kv_heads, _, head_dim = tiles.shape
    used = tiles[:, :, : tiling.tokens * tiling.group]
    used = used.reshape(num_tiles, num_kv_heads, tiling.tokens, tiling.group, head_dim)
    out = used[order.tile, :, order.place]  # [T, K, G, H]
    out = jnp.where((order.tile >= 0)[:, None, None, None], out, 0)
    return out.reshape(-1, num_kv_heads * tiling.group, head_dim)


def _row_of(index: Int32[Array, " W"], cu_counts: Int32[Array, " R"]) -> Int32[Array, " W"]:
    """The row that owns each of the cu_counts[-1] things; some row for any other index."""
    row = jnp.sum(index[:, None] >= cu_counts, axis=1)
    return jnp.minimum(row, cu_counts.shape[0] - 1)
