"""What the TPU's prefill kernel computes on a tile of queries and a block of K and V, all in VMEM.

Queries are sorted by head, so that those of all heads that share a lane tile of K are one operand,
[heads x tokens, lanes], and back again. In between is a running softmax (Dao et al., 2022).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Bool, Float, Float32, Int32

from pallas_kernels.ragged_paged_attention.specs import AttentionCall
from pallas_kernels.ragged_paged_attention.tpu_common import (
    LANES,
    MASKED,
    compute_dtype,
    dequantize,
    precision,
)
from pallas_kernels.ragged_paged_attention.tpu_kv_write import WriteSizes

LOG2_E = math.log2(math.e)
_ROWS = 1024  # rows of a product of weights and values
_KEYS = 256  # and keys: as deep as a matrix unit is at most
_EDGE_KEYS = 512  # of the parts of a block in which something is masked


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static facts of the kernel.

    width: lanes of a group of KV heads that are computed on together, one or more whole tiles.
    num_groups: such groups in a token's K.
    group_heads: query heads of a group; with pad heads where K has some.
    token_heads: query heads of a token in memory, padded so that a token is whole tiles.
    num_queries: tokens of a tile of queries.
    q_lens: the fewest and the most new tokens of the rows that it is for.
    block_pages: pages of a block of K.
    """

    call: AttentionCall
    width: int
    num_groups: int
    group_heads: int
    token_heads: int
    num_queries: int
    q_lens: tuple[int, int]
    block_pages: int
    write: WriteSizes

    def takes(self, q_len: Int32[Array, "..."]) -> Bool[Array, "..."]:
        """Whether rows of so many new tokens are this one's."""
        return (q_len >= self.q_lens[0]) & (q_len <= self.q_lens[1])

    @property
    def num_keys(self) -> int:
        return self.block_pages * self.call.layout.page_size

    @property
    def rows(self) -> int:
        """Rows of the operand that holds the queries of a group."""
        return self.group_heads * self.num_queries

    @property
    def num_heads(self) -> int:
        """Query heads that are computed: all but those of `token_heads` that no group has."""
        return self.num_groups * self.group_heads

    @property
    def pack(self) -> int:
        """Elements of q, of one lane, in a 32-bit word."""
        return 4 // self.call.q_dtype.itemsize

    @property
    def edge_pages(self) -> int:
        """Pages of the parts of a block in which something is masked."""
        return math.gcd(self.block_pages, self.pages_of(_EDGE_KEYS))

    @property
    def part_pages(self) -> int:
        """Pages of the parts in which weights meet values."""
        return math.gcd(self.edge_pages, self.pages_of(_KEYS))

    def pages_of(self, num_keys: int) -> int:
        """Pages of about as many keys, whole lane tiles of scores."""
        page_size = self.call.layout.page_size
        unit = LANES // math.gcd(LANES, page_size)
        return max(1, num_keys // (unit * page_size)) * unit

    def keys_of(self, page: int, num_pages: int) -> slice:
        """The keys of some pages of a block."""
        return slice(
            page * self.call.layout.page_size, (page + num_pages) * self.call.layout.page_size
        )

    @property
    def parts(self) -> list[slice]:
        """Rows that are computed on together: of whole heads."""
        heads = max(1, min(_ROWS // self.num_queries, self.group_heads))
        while self.group_heads % heads:
            heads -= 1
        size = heads * self.num_queries
        return [slice(start, start + size) for start in range(0, self.rows, size)]

    @property
    def delays_weights(self) -> bool:
        """Whether the compiler must be kept from making weights long before they are used.

        On tpu7x it makes so many while the matrix units are given their first values that not all
        can wait in registers, and that many wait until the end. Elsewhere results of products take
        registers and time in between.
        """
        return self.call.chip.name == "tpu7x"

    def place(self, head: int) -> tuple[int, Any]:
        """The group of a query head, and its rows there."""
        group, i = divmod(head, self.group_heads)
        return group, pl.ds(i * self.num_queries, self.num_queries)


class Refs(NamedTuple):
    """The kernel's operands; memory spaces as `prefill` gives them."""

    layer: Any  # [1] int32
    num_rows: Any  # [1] int32
    kv_lens: Any  # [R] int32
    cu_q_lens: Any  # [R + 1] int32
    score_factors: Any  # [token_heads] float32
    out_factors: Any  # [token_heads] float32
    sinks: Any  # [token_heads] float32
    tables_hbm: Any  # [R, C, 128] int32
    q_hbm: Any  # [T, token_heads, width]
    k_new: Any  # [T2, X]
    v_new: Any  # [T2, X]
    out_in: Any  # the same memory as `out`
    k_in: Any
    v_in: Any
    out: Any  # [T, token_heads, width]
    k_cache: Any  # [L, P, S, X]
    v_cache: Any  # [L, P, S, X]
    table: Any  # [C, 128] int32
    tokens: Any  # [num_queries, token_heads, width] as in memory: queries, then outputs
    words: Any  # [lane tiles, _, 128] these as 32-bit words: two heads each, if of 16 bits
    q: Any  # [num_groups, rows, width] in the compute dtype
    keys: Any  # [_BUFFERS, block_pages, S, X]; these two are finite everywhere
    values: Any  # [_BUFFERS, block_pages, S, X]
    peak: Any  # [num_groups, rows, 128] float32, the same in all lanes
    total: Any  # [num_groups, rows, 128] float32, the sum is that of the lanes
    acc: Any  # [num_groups, rows, width] float32
    scores: Any  # [rows, num_keys] float32
    weights: Any  # [rows, num_keys] in the compute dtype
    limits: Any  # [num_queries, keys of edge_pages] float32: see `_set_limits`
    sems: Any  # [3] of the table, of queries and of outputs
    block_sems: Any  # [_BUFFERS]
    chunks: Any  # these four: see `WriteRefs`
    sources: Any
    read_sems: Any
    write_sems: Any


class Tile(NamedTuple):
    """A tile of queries: tokens token..token + num_queries, of which the row owns own_from..own_to.

    position: that of its first token, which may be one of another row: then, any number.
    low, high: the positions of its first and last own token.
    first_page, end_page: the pages that it can see.
    """

    token: Int32[Array, ""]
    own_from: Int32[Array, ""]
    own_to: Int32[Array, ""]
    position: Int32[Array, ""]
    low: Int32[Array, ""]
    high: Int32[Array, ""]
    first_page: Int32[Array, ""]
    end_page: Int32[Array, ""]


def take_queries(shape: Shape, refs: Refs) -> None:
    """Sorts a tile's queries by head: strided loads, which only 32-bit words have."""

    def copy(tokens: Any, rows: Any) -> None:
        x = refs.tokens[tokens]
        x = pltpu.bitcast(x.reshape(x.shape[0] * x.shape[1], x.shape[2]), jnp.uint32)
        for i, lanes in enumerate(_lane_tiles(shape)):
            refs.words[i, rows] = x[:, lanes]

    _for_words(shape, copy)
    for word, heads in _words_of_heads(shape):
        at = pl.ds(word, shape.num_queries, shape.token_heads // shape.pack)
        for i, lanes in enumerate(_lane_tiles(shape)):
            bits = refs.words[i, at]
            parts = [bits] if shape.pack == 1 else [bits << 16, bits & jnp.uint32(0xFFFF0000)]
            for head, part in zip(heads, parts, strict=False):
                group, rows = shape.place(head)
                refs.q[group, rows, lanes] = pltpu.bitcast(part, jnp.float32).astype(refs.q.dtype)


def put_outputs(shape: Shape, refs: Refs) -> None:
    """Sorts finished outputs by token; the inverse of `take_queries`."""
    for word, heads in _words_of_heads(shape):
        at = pl.ds(word, shape.num_queries, shape.token_heads // shape.pack)
        for i, lanes in enumerate(_lane_tiles(shape)):
            parts = []
            for head in heads:
                group, rows = shape.place(head)
                total = jnp.sum(refs.total[group, rows], axis=1, keepdims=True)
                output = refs.acc[group, rows, lanes] * (refs.out_factors[head] / total)
                output = output.astype(refs.tokens.dtype).astype(jnp.float32)
                parts.append(pltpu.bitcast(output, jnp.uint32))
            if shape.pack == 2:
                parts[0] >>= 16
            refs.words[i, at] = functools.reduce(jnp.bitwise_or, parts)

    def copy(tokens: Any, rows: Any) -> None:
        x = jnp.concatenate([refs.words[i, rows] for i in range(refs.words.shape[0])], axis=1)
        x = pltpu.bitcast(x, refs.tokens.dtype)
        refs.tokens[tokens] = x.reshape(-1, *refs.tokens.shape[1:])

    _for_words(shape, copy)


def _lane_tiles(shape: Shape) -> list[slice]:
    return [slice(lane, lane + LANES) for lane in range(0, shape.width, LANES)]


def _words_of_heads(shape: Shape) -> list[tuple[int, range]]:
    """Words of a token, and the heads in each."""
    starts = range(0, shape.num_heads, shape.pack)
    return [(s // shape.pack, range(s, min(s + shape.pack, shape.num_heads))) for s in starts]


def _for_words(shape: Shape, copy: Callable[[Any, Any], None]) -> None:
    """Calls `copy` with parts of a tile's tokens and where these are in `words`."""
    tokens = math.gcd(shape.num_queries, 8)
    rows = tokens * shape.token_heads // shape.pack

    def turn(i: Int32[Array, ""], _: None) -> None:
        copy(pl.ds(i * tokens, tokens), pl.ds(pl.multiple_of(i * rows, rows), rows))

    jax.lax.fori_loop(0, shape.num_queries // tokens, turn, None)


def start_softmax(shape: Shape, refs: Refs) -> None:
    """Nothing seen yet but the sinks."""
    if not shape.call.has_sinks:
        refs.peak[...] = jnp.full(refs.peak.shape, MASKED, jnp.float32)
        refs.total[...] = jnp.zeros(refs.total.shape, jnp.float32)
    else:
        part = (shape.num_queries, LANES)
        lane = jax.lax.broadcasted_iota(jnp.int32, part, 1)
        for head in range(shape.num_heads):
            group, at = shape.place(head)
            refs.peak[group, at] = jnp.full(part, refs.sinks[head] * np.float32(LOG2_E))
            refs.total[group, at] = jnp.where(lane == 0, 1.0, 0.0)
    refs.acc[...] = jnp.zeros(refs.acc.shape, jnp.float32)


def attend_block(
    shape: Shape, refs: Refs, tile: Tile, block: Int32[Array, ""], buffer: Int32[Array, ""]
) -> None:
    """One turn of the running softmax of all heads.

    Where something is masked, a block is taken in parts, up to the last that any query sees.
    """
    window, page_size = shape.call.sliding_window, shape.call.layout.page_size
    key = (tile.first_page + block * shape.block_pages) * page_size
    is_inside = key + shape.num_keys - 1 <= tile.low
    if window is not None:
        is_inside &= key > tile.high - window

    def all_groups(page: Int32[Array, ""] | int, pages: int, is_edge: bool) -> None:
        def one(group: Int32[Array, ""], _: None) -> None:
            _attend_group(shape, refs, (buffer, page, pages), group, is_edge)

        jax.lax.fori_loop(0, shape.num_groups, one, None)

    pages = shape.edge_pages

    def one_part(i: Int32[Array, ""], _: None) -> None:
        _set_limits(shape, refs, tile.position - key - i * pages * page_size)
        all_groups(i * pages, pages, is_edge=True)

    @pl.when(is_inside)
    def _() -> None:
        all_groups(0, shape.block_pages, is_edge=False)

    @pl.when(~is_inside)
    def _() -> None:
        num_parts = (tile.high - key) // (pages * page_size) + 1
        num_parts = jnp.minimum(num_parts, shape.block_pages // pages)
        jax.lax.fori_loop(0, num_parts, one_part, None)


def _set_limits(shape: Shape, refs: Refs, to_query: Int32[Array, ""]) -> None:
    """Sets what scores are at most: infinity, or `MASKED` where a query does not see a key.

    to_query: the position of the tile's first query minus that of the first key.
    """
    window, part = shape.call.sliding_window, refs.limits.shape
    key = jax.lax.broadcasted_iota(jnp.int32, part, 1)
    query = jax.lax.broadcasted_iota(jnp.int32, part, 0) + to_query
    is_seen = key <= query
    if window is not None:
        is_seen &= key > query - window
    refs.limits[...] = jnp.where(is_seen, jnp.inf, MASKED)


def _attend_group(
    shape: Shape,
    refs: Refs,
    where: tuple[Int32[Array, ""], Int32[Array, ""] | int, int],
    group: Int32[Array, ""],
    is_edge: bool,
) -> None:
    """One turn of the running softmax of a group of heads.

    Scores of all rows come first; meanwhile older sums fade. Then weights and products with values
    alternate, in parts: the vector units make the weights of a part while the matrix units are busy
    with those of the part before.

    where: the buffer, the first page in it and how many.
    is_edge: `limits` hold.
    """
    buffer, page, num_pages = where
    lanes = pl.ds(pl.multiple_of(group * shape.width, shape.width), shape.width)

    # Two conditions that always hold: what is in one of them is put in order by itself, and the
    # compiler no longer lets weights wait in registers for scores that are not there yet. It knows
    # the group where there is but one, and the conditions with it; the buffer it never knows.
    unknown = buffer if shape.num_groups == 1 else group

    @pl.when(unknown >= 0)
    def _() -> None:
        for rows in shape.parts:
            keys = _elements(shape, refs.keys.at[buffer, pl.ds(page, num_pages), :, lanes])
            _score(shape, refs, group, rows, keys, is_edge)

    part_pages = math.gcd(num_pages, shape.part_pages)
    parts = [(rows, i) for i in range(0, num_pages, part_pages) for rows in shape.parts]

    @pl.when(unknown <= max(1, shape.num_groups))
    def _() -> None:
        for done, todo in zip([None, *parts], [*parts, None], strict=True):
            if todo is not None:
                _weigh(shape, refs, group, todo[0], shape.keys_of(todo[1], part_pages))
            if done is not None:
                rows, pages = done[0], pl.ds(page + done[1], part_pages)
                values = _elements(shape, refs.values.at[buffer, pages, :, lanes])
                _add_values(refs, group, rows, shape.keys_of(done[1], part_pages), values)


def _score(
    shape: Shape,
    refs: Refs,
    group: Int32[Array, ""],
    rows: slice,
    keys: Float[Array, "C W"],
    is_edge: bool,
) -> None:
    """Scores of some rows, the largest of each row so far, and older sums relative to that."""
    scores = _product(refs.q[group, rows], keys, (1, 1))
    head = group * shape.group_heads + rows.start // shape.num_queries
    scores = _scale(shape, refs, head, scores)
    if is_edge:
        heads = jnp.split(scores, scores.shape[0] // shape.num_queries)
        scores = jnp.concatenate([jnp.minimum(x, refs.limits[...]) for x in heads], axis=0)
    refs.scores[rows, : keys.shape[0]] = scores
    old_peak = refs.peak[group, rows]
    peak = jnp.maximum(old_peak, jnp.max(scores, axis=1, keepdims=True))
    refs.peak[group, rows] = peak
    fading = jnp.exp2(old_peak - peak)
    refs.total[group, rows] *= fading
    refs.acc[group, rows] *= jnp.concatenate([fading] * (shape.width // LANES), axis=1)


def _weigh(shape: Shape, refs: Refs, group: Int32[Array, ""], rows: slice, keys: slice) -> None:
    """Weights of some rows and keys, and their sum so far."""
    repeats = (keys.stop - keys.start) // LANES
    peak = refs.peak[group, rows]
    if shape.delays_weights:
        peak = pltpu.roll(peak, 1, 1)  # the same in all lanes: only takes time
    peak = jnp.concatenate([peak] * repeats, axis=1)
    weights = jnp.exp2(refs.scores[rows, keys] - peak)
    refs.weights[rows, keys] = weights.astype(refs.weights.dtype)
    # Lane tiles are added to each other first: they do not wait in registers for the sum so far.
    refs.total[group, rows] += functools.reduce(jnp.add, jnp.split(weights, repeats, axis=1))


def _add_values(
    refs: Refs, group: Int32[Array, ""], rows: slice, keys: slice, values: Float[Array, "C W"]
) -> None:
    """Adds the weighted values of some rows and keys."""
    refs.acc[group, rows] += _product(refs.weights[rows, keys], values, (1, 0))


def _elements(shape: Shape, ref: Any) -> Float[Array, "C W"]:
    """K or V of some pages and a group of heads, in the compute dtype, not scaled."""
    elements = dequantize(ref[...], shape.call.layout, compute_dtype(shape.call))
    return elements.reshape(-1, shape.width)


def _product(
    a: Float[Array, "M _"], b: Float[Array, "..."], contract: tuple[int, int]
) -> Float32[Array, "M _"]:
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=precision(a.dtype),
        preferred_element_type=jnp.float32,
    )


def _scale(
    shape: Shape, refs: Refs, head: Int32[Array, ""], scores: Float32[Array, "M C"]
) -> Float32[Array, "M C"]:
    """Scores of query heads from `head` on as what 2 is raised to."""
    soft_cap, size = shape.call.soft_cap, shape.num_queries
    parts = []
    for i in range(scores.shape[0] // size):
        part = scores[i * size : (i + 1) * size] * refs.score_factors[head + i]
        if soft_cap is not None:
            part = jnp.tanh(part) * np.float32(soft_cap * LOG2_E)
        parts.append(part)
    return jnp.concatenate(parts, axis=0)
