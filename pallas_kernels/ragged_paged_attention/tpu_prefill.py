"""The TPU's kernel for rows of more than one new token: writes their K and V, then attends.

One program walks through those rows. A row's new K and V go to its pages first; then its queries
are taken in tiles, and each tile goes through the pages that it can see in blocks, which DMAs bring
while the block before is computed on, with a running softmax (Dao et al., 2022). Queries, of all
heads that share a lane tile of K, are one operand: [heads x tokens, lanes]. Heads that are narrower
than a lane tile are zero in the lanes of the others, which costs nothing on a matrix unit as deep.
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
from jaxtyping import Float, Float32, Int32, Shaped

from pallas_kernels.ragged_paged_attention.layout import KVCache, KVCacheLayout
from pallas_kernels.ragged_paged_attention.specs import AttentionCall
from pallas_kernels.ragged_paged_attention.tpu_common import (
    LANES,
    MASKED,
    TpuCall,
    compute_dtype,
    copy_page,
    copy_table_chunk,
    dequantize,
    page_id,
    precision,
    table_chunks,
)
from pallas_kernels.ragged_paged_attention.tpu_kv_write import (
    RowWrite,
    WriteRefs,
    WriteSizes,
    pad_new,
    write_row,
    write_scratch,
    write_sizes,
)

_LOG2_E = math.log2(math.e)
_SUBLANES = 16  # of the smallest tile of queries, also of bfloat16


@dataclasses.dataclass(frozen=True)
class PrefillSizes:
    """num_queries: tokens of a tile of queries. num_keys: about as many tokens in a block of K."""

    num_queries: int = 256
    num_keys: int = 512


@dataclasses.dataclass(frozen=True)
class _Shape:
    """The static facts of the kernel.

    width: lanes of a group of KV heads that are computed on together, one or more whole tiles.
    num_groups: such groups in a token's K.
    group_heads: query heads of a group; with pad heads where K has some.
    token_heads: query heads of a token in memory, padded so that a token is whole tiles.
    num_queries: tokens of a tile of queries.
    block_pages: pages of a block of K.
    """

    call: AttentionCall
    width: int
    num_groups: int
    group_heads: int
    token_heads: int
    num_queries: int
    block_pages: int
    write: WriteSizes

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

    def place(self, head: int) -> tuple[int, Any]:
        """The group of a query head, and its rows there."""
        group, i = divmod(head, self.group_heads)
        return group, pl.ds(i * self.num_queries, self.num_queries)


class _Refs(NamedTuple):
    """The kernel's operands; memory spaces as `prefill` gives them."""

    layer: Any  # [1] int32
    num_rows: Any  # [1] int32
    kv_lens: Any  # [R] int32
    cu_q_lens: Any  # [R + 1] int32
    score_factors: Any  # [token_heads] float32
    out_factors: Any  # [token_heads] float32
    sinks: Any  # [token_heads] float32
    tables_hbm: Any  # [R, C, 128] int32
    q_hbm: Any  # [T * token_heads, width]
    k_new: Any  # [T2, X]
    v_new: Any  # [T2, X]
    out_in: Any  # the same memory as `out`
    k_in: Any
    v_in: Any
    out: Any  # [T * token_heads, width]
    k_cache: Any  # [L, P, S, X]
    v_cache: Any  # [L, P, S, X]
    table: Any  # [C, 128] int32
    q_tokens: Any  # [num_queries * token_heads, width] as in memory
    out_tokens: Any  # [num_queries * token_heads, width] as in memory
    words: Any  # one of these as 32-bit words: two heads in one, if they are of 16 bits
    q: Any  # [num_groups, rows, width] in the compute dtype
    keys: Any  # [2, block_pages, S, X]
    values: Any  # [2, block_pages, S, X]
    peak: Any  # [num_groups, rows, 128] float32, the same in all lanes
    total: Any  # [num_groups, rows, 128] float32, the sum is that of the lanes
    acc: Any  # [num_groups, rows, width] float32
    sems: Any  # [3] of the table, of queries and of outputs
    block_sems: Any  # [2]
    chunks: Any  # these four: see `WriteRefs`
    sources: Any
    read_sems: Any
    write_sems: Any


class _Row(NamedTuple):
    """A row of the call; its first new token is token `start`, at position `position`."""

    start: Int32[Array, ""]
    position: Int32[Array, ""]
    q_len: Int32[Array, ""]


class _Tile(NamedTuple):
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


def prefill(
    tpu_call: TpuCall,
    out: Float[Array, "T N H"],
    kv_cache: KVCache,
    sizes: PrefillSizes | None = None,
) -> tuple[Float[Array, "T N H"], KVCache]:
    """Rows of more than one new token: writes their K and V to the cache and their outputs to `out`.

    Both are updated in place; nothing else in them changes.
    """
    call, layout = tpu_call.call, tpu_call.call.layout
    num_tokens = tpu_call.q.shape[0]
    shape = _shape_of(call, num_tokens, sizes or PrefillSizes())
    tiled_tokens = max(-(-num_tokens // _SUBLANES) * _SUBLANES, shape.num_queries)
    q = _pack_heads(shape, tpu_call.q, tiled_tokens)
    is_packed = q.shape == (out.shape[0] * out.shape[1], out.shape[2])
    flat_out = out.reshape(q.shape) if is_packed else jnp.zeros(q.shape, out.dtype)

    factor = _LOG2_E if call.soft_cap is None else 1 / call.soft_cap
    flat_out, k_cache, v_cache = _call_kernel(
        shape,
        tpu_call.layer,
        tpu_call.num_rows,
        tpu_call.kv_lens,
        tpu_call.cu_q_lens,
        _pad_heads(shape, tpu_call.score_factors * np.float32(factor)),
        _pad_heads(shape, tpu_call.out_factors),
        _pad_heads(shape, tpu_call.sinks),
        tpu_call.tables,
        q,
        pad_new(shape.write, tpu_call.k_new),
        pad_new(shape.write, tpu_call.v_new),
        flat_out,
        *kv_cache,
    )
    if is_packed:
        return flat_out.reshape(out.shape), KVCache(k_cache, v_cache)
    unpacked = _unpack_heads(shape, flat_out, num_tokens)
    tokens = jnp.arange(num_tokens)[:, None]
    is_row = jnp.arange(tpu_call.kv_lens.shape[0]) < tpu_call.num_rows[0]
    starts, ends = tpu_call.cu_q_lens[:-1], tpu_call.cu_q_lens[1:]
    is_own = (is_row & (ends - starts > 1) & (starts <= tokens) & (tokens < ends)).any(axis=1)
    out = jnp.where(is_own[:, None, None], unpacked, out)
    return out, KVCache(k_cache, v_cache)


def _shape_of(call: AttentionCall, num_tokens: int, sizes: PrefillSizes) -> _Shape:
    layout = call.layout
    width = max(layout.padded_head_dim, LANES)
    heads_together = width // layout.padded_head_dim
    num_groups = layout.token_width // width
    group_heads = call.num_heads // layout.num_kv_heads * heads_together
    # Blocks of whole lane tiles of scores.
    unit = LANES // math.gcd(LANES, layout.page_size)
    block_pages = max(1, sizes.num_keys // (unit * layout.page_size)) * unit
    return _Shape(
        call=call,
        width=width,
        num_groups=num_groups,
        group_heads=group_heads,
        token_heads=-(-num_groups * group_heads // 8) * 8,
        num_queries=min(sizes.num_queries, -(-num_tokens // _SUBLANES) * _SUBLANES),
        block_pages=block_pages,
        write=write_sizes(layout),
    )


def _lane_of_heads(shape: _Shape) -> np.ndarray:
    """[token_heads, heads of a lane tile]: whether a query head's KV head has that place in it."""
    layout = shape.call.layout
    group = shape.call.num_heads // layout.num_kv_heads
    places = shape.width // layout.padded_head_dim
    head = np.arange(shape.token_heads)[:, None]
    return head // group % places == np.arange(places)


def _pack_heads(shape: _Shape, q: Float[Array, "T N H"], num_tokens: int) -> Float[Array, "M W"]:
    """Queries as the kernel reads them; no copy where heads fill lane tiles and tokens tiles."""
    layout = shape.call.layout
    padding = [num_tokens, shape.token_heads, layout.padded_head_dim]
    q = jnp.pad(q, [(0, to - have) for to, have in zip(padding, q.shape, strict=True)])
    if shape.width != layout.padded_head_dim:
        q = jnp.where(_lane_of_heads(shape)[:, :, None], q[:, :, None], 0)
    return q.reshape(num_tokens * shape.token_heads, shape.width)


def _unpack_heads(
    shape: _Shape, out: Float[Array, "M W"], num_tokens: int
) -> Float[Array, "T N H"]:
    """The inverse of `_pack_heads`."""
    call = shape.call
    out = out.reshape(-1, shape.token_heads, shape.width)[:num_tokens]
    if shape.width != call.layout.padded_head_dim:
        out = out.reshape(*out.shape[:2], -1, call.layout.padded_head_dim)
        out = jnp.where(_lane_of_heads(shape)[:, :, None], out, 0).sum(axis=2, dtype=out.dtype)
    return out[:, : call.num_heads, : call.layout.head_dim]


def _pad_heads(shape: _Shape, values: Float32[Array, " N"] | None) -> Float32[Array, " N2"]:
    """One number a head; ones where there are none."""
    if values is None:
        return jnp.ones(shape.token_heads, jnp.float32)
    return jnp.pad(values, (0, shape.token_heads - values.shape[0]))


def _call_kernel(
    shape: _Shape, *operands: Shaped[Array, "..."]
) -> tuple[Shaped[Array, "..."], ...]:
    """`operands` are those of `_Refs` up to the outputs, the last three are updated in place."""
    call, layout = shape.call, shape.call.layout
    out, k_cache = operands[-3:-1]
    compute = compute_dtype(call)
    smem, hbm = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pl.ANY)
    rows = (shape.num_groups, shape.rows)
    block = (2, shape.block_pages, layout.page_size, layout.token_width)
    tokens = (shape.num_queries * shape.token_heads, shape.width)
    num_smem = 7
    num_operands = len(operands)
    call_kernel = pl.pallas_call(
        functools.partial(_kernel, shape),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[-3:]],
        in_specs=[smem] * num_smem + [hbm] * (num_operands - num_smem),
        out_specs=[hbm] * 3,
        input_output_aliases={num_operands - 3 + i: i for i in range(3)},
        scratch_shapes=[
            pltpu.SMEM(operands[num_smem].shape[1:], jnp.int32),
            pltpu.VMEM(tokens, out.dtype),
            pltpu.VMEM(tokens, out.dtype),
            pltpu.VMEM((tokens[0] * out.dtype.itemsize // 4, shape.width), jnp.uint32),
            pltpu.VMEM((*rows, shape.width), compute),
            pltpu.VMEM(block, k_cache.dtype),
            pltpu.VMEM(block, k_cache.dtype),
            pltpu.VMEM((*rows, LANES), jnp.float32),
            pltpu.VMEM((*rows, LANES), jnp.float32),
            pltpu.VMEM((*rows, shape.width), jnp.float32),
            pltpu.SemaphoreType.DMA((3,)),
            pltpu.SemaphoreType.DMA((2,)),
            *write_scratch(shape.write, layout),
        ],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=call.chip.core_memory_bytes * 3 // 4),
        name="ragged_paged_prefill",
    )
    return tuple(call_kernel(*operands))


def _kernel(shape: _Shape, *all_refs: Any) -> None:
    refs = _Refs(*all_refs)
    layer = refs.layer[0]
    write_refs = WriteRefs(
        (refs.k_new, refs.v_new),
        (refs.k_cache, refs.v_cache),
        *(refs.chunks, refs.sources, refs.read_sems, refs.write_sems),
    )

    def one_row(r: Int32[Array, ""], _: None) -> None:
        start = refs.cu_q_lens[r]
        q_len = refs.cu_q_lens[r + 1] - start

        @pl.when(q_len > 1)
        def _() -> None:
            row = _Row(start, refs.kv_lens[r] - q_len, q_len)
            _load_table(shape, refs, r, refs.kv_lens[r])
            write_row(write_refs, shape.write, layer, refs.table, RowWrite(*row))
            _attend_row(shape, refs, layer, row)

    jax.lax.fori_loop(0, refs.num_rows[0], one_row, None)


def _load_table(
    shape: _Shape, refs: _Refs, row: Int32[Array, ""], kv_len: Int32[Array, ""]
) -> None:
    """Brings the live part of a row's table to SMEM."""
    page_size = shape.call.layout.page_size
    chunks = table_chunks(refs.tables_hbm, (kv_len + page_size - 1) // page_size)

    def copy(chunk: Int32[Array, ""], _: None) -> None:
        dma = copy_table_chunk(refs.tables_hbm, row, chunk, refs.table, refs.sems.at[0])
        dma.start()
        dma.wait()

    jax.lax.fori_loop(0, chunks, copy, None)


def _tile_at(shape: _Shape, refs: _Refs, row: _Row, i: Int32[Array, ""]) -> _Tile:
    """The row's i-th tile; the last ones of the call are moved back to end with its tokens."""
    page_size, window = shape.call.layout.page_size, shape.call.sliding_window
    own = row.start + i * shape.num_queries
    own_end = jnp.minimum(own + shape.num_queries, row.start + row.q_len)
    num_tokens = refs.q_hbm.shape[0] // shape.token_heads
    token = jnp.minimum(own, num_tokens - shape.num_queries)
    low = row.position + own - row.start
    high = row.position + own_end - row.start - 1
    first = jnp.int32(0) if window is None else jnp.maximum(low - window + 1, 0)
    return _Tile(
        token=token,
        own_from=own - token,
        own_to=own_end - token,
        position=row.position + token - row.start,
        low=low,
        high=high,
        first_page=first // page_size,
        end_page=high // page_size + 1,
    )


def _attend_row(shape: _Shape, refs: _Refs, layer: Int32[Array, ""], row: _Row) -> None:
    num_tiles = (row.q_len + shape.num_queries - 1) // shape.num_queries

    def one_tile(i: Int32[Array, ""], buffer: Int32[Array, ""]) -> Int32[Array, ""]:
        tile = _tile_at(shape, refs, row, i)
        num_blocks = _num_blocks(shape, tile)
        _copy_queries(shape, refs, tile).start()
        _copy_queries(shape, refs, tile).wait()
        _take_queries(shape, refs)
        _start_softmax(shape, refs)

        def one_block(block: Int32[Array, ""], buffer: Int32[Array, ""]) -> Int32[Array, ""]:
            @pl.when(block + 1 < num_blocks)
            def _() -> None:
                _block_dmas(shape, refs, layer, tile, block + 1, 1 - buffer, "start")

            @pl.when((block + 1 == num_blocks) & (i + 1 < num_tiles))
            def _() -> None:
                next_tile = _tile_at(shape, refs, row, i + 1)
                _block_dmas(shape, refs, layer, next_tile, jnp.int32(0), 1 - buffer, "start")

            _block_dmas(shape, refs, layer, tile, block, buffer, "wait")
            _attend_block(shape, refs, tile, block, buffer)
            return 1 - buffer

        buffer = jax.lax.fori_loop(0, num_blocks, one_block, buffer)
        _finish_tile(shape, refs, tile)
        return buffer

    first_tile = _tile_at(shape, refs, row, jnp.int32(0))
    _block_dmas(shape, refs, layer, first_tile, jnp.int32(0), jnp.int32(0), "start")
    jax.lax.fori_loop(0, num_tiles, one_tile, jnp.int32(0))


def _num_blocks(shape: _Shape, tile: _Tile) -> Int32[Array, ""]:
    return (tile.end_page - tile.first_page + shape.block_pages - 1) // shape.block_pages


def _block_dmas(
    shape: _Shape,
    refs: _Refs,
    layer: Int32[Array, ""],
    tile: _Tile,
    block: Int32[Array, ""],
    buffer: Int32[Array, ""],
    method: str,
) -> None:
    """Starts or awaits the DMAs of a block's pages, those that the tile can see."""
    page = tile.first_page + block * shape.block_pages
    sem = refs.block_sems.at[buffer]

    def one_page(j: Int32[Array, ""], _: None) -> None:
        where = page_id(refs.table, page + j)
        for cache, buffers in ((refs.k_cache, refs.keys), (refs.v_cache, refs.values)):
            getattr(copy_page(cache, layer, where, buffers.at[buffer, j], sem), method)()

    num_pages = jnp.minimum(tile.end_page - page, shape.block_pages)
    jax.lax.fori_loop(0, num_pages, one_page, None)


def _copy_queries(shape: _Shape, refs: _Refs, tile: _Tile) -> Any:
    heads = shape.token_heads
    rows = pl.ds(pl.multiple_of(tile.token * heads, heads), shape.num_queries * heads)
    return pltpu.make_async_copy(refs.q_hbm.at[rows], refs.q_tokens, refs.sems.at[1])


def _take_queries(shape: _Shape, refs: _Refs) -> None:
    """Sorts a tile's queries by head: strided loads, which only 32-bit words have."""
    heads, num_queries, pack = shape.token_heads, shape.num_queries, shape.pack

    def copy(at: Any, words_at: Any) -> None:
        refs.words[words_at] = pltpu.bitcast(refs.q_tokens[at], jnp.uint32)

    _for_word_tiles(refs, copy)
    for word in range(-(-shape.num_heads // pack)):
        words = refs.words[pl.ds(word, num_queries, heads // pack)]
        parts = [words] if pack == 1 else [words << 16, words & jnp.uint32(0xFFFF0000)]
        for part, bits in enumerate(parts):
            if word * pack + part < shape.num_heads:
                group, rows = shape.place(word * pack + part)
                refs.q[group, rows] = pltpu.bitcast(bits, jnp.float32).astype(refs.q.dtype)


def _put_outputs(shape: _Shape, refs: _Refs, outputs: list[Float32[Array, "q W"]]) -> None:
    """Sorts heads by token; the inverse of `_take_queries`."""
    heads, num_queries, pack = shape.token_heads, shape.num_queries, shape.pack
    for word in range(-(-shape.num_heads // pack)):
        parts = outputs[word * pack : (word + 1) * pack]
        rounded = (part.astype(refs.out_tokens.dtype).astype(jnp.float32) for part in parts)
        bits = [pltpu.bitcast(part, jnp.uint32) for part in rounded]
        if pack == 2:
            bits[0] >>= 16
        refs.words[pl.ds(word, num_queries, heads // pack)] = functools.reduce(jnp.bitwise_or, bits)

    def copy(at: Any, words_at: Any) -> None:
        refs.out_tokens[at] = pltpu.bitcast(refs.words[words_at], refs.out_tokens.dtype)

    _for_word_tiles(refs, copy)


def _for_word_tiles(refs: _Refs, copy: Callable[[Any, Any], None]) -> None:
    """Calls `copy` for parts of tokens and the same parts of `words`."""
    pack = refs.q_tokens.shape[0] // refs.words.shape[0]
    rows = math.gcd(refs.words.shape[0], 64)

    def turn(i: Int32[Array, ""], _: None) -> None:
        size = rows * pack
        copy(
            pl.ds(pl.multiple_of(i * size, size), size), pl.ds(pl.multiple_of(i * rows, rows), rows)
        )

    jax.lax.fori_loop(0, refs.words.shape[0] // rows, turn, None)


def _start_softmax(shape: _Shape, refs: _Refs) -> None:
    """Nothing seen yet but the sinks."""
    if not shape.call.has_sinks:
        refs.peak[...] = jnp.full(refs.peak.shape, MASKED, jnp.float32)
        refs.total[...] = jnp.zeros(refs.total.shape, jnp.float32)
    else:
        part = (shape.num_queries, LANES)
        lane = jax.lax.broadcasted_iota(jnp.int32, part, 1)
        for head in range(shape.num_heads):
            group, at = shape.place(head)
            refs.peak[group, at] = jnp.full(part, refs.sinks[head] * np.float32(_LOG2_E))
            refs.total[group, at] = jnp.where(lane == 0, 1.0, 0.0)
    refs.acc[...] = jnp.zeros(refs.acc.shape, jnp.float32)


def _attend_block(
    shape: _Shape, refs: _Refs, tile: _Tile, block: Int32[Array, ""], buffer: Int32[Array, ""]
) -> None:
    """One turn of the running softmax of all heads; masks only where something is masked."""
    window = shape.call.sliding_window
    page_size = shape.call.layout.page_size
    key = (tile.first_page + block * shape.block_pages) * page_size
    is_inside = key + shape.num_keys - 1 <= tile.low
    if window is not None:
        is_inside &= key > tile.high - window

    def all_groups(edge: tuple[_Tile, Int32[Array, ""]] | None) -> None:
        def one(group: Int32[Array, ""], _: None) -> None:
            _attend_group(shape, refs, buffer, group, edge)

        jax.lax.fori_loop(0, shape.num_groups, one, None)

    pl.when(is_inside)(lambda: all_groups(None))
    pl.when(~is_inside)(lambda: all_groups((tile, key)))


def _attend_group(
    shape: _Shape,
    refs: _Refs,
    buffer: Int32[Array, ""],
    group: Int32[Array, ""],
    edge: tuple[_Tile, Int32[Array, ""]] | None,
) -> None:
    """One turn of the running softmax of a group of heads; `edge` as `_mask` takes it."""
    lanes = pl.ds(pl.multiple_of(group * shape.width, shape.width), shape.width)
    keys, values = (_elements(shape, ref, buffer, lanes) for ref in (refs.keys, refs.values))
    scores = _product(refs.q[group], keys, (1, 1))
    scores = _scale(shape, refs, group, scores)
    if edge is not None:
        scores, values = _mask(shape, scores, values, *edge)

    repeats = shape.num_keys // LANES
    old_peak = refs.peak[group]
    peak = jnp.maximum(old_peak, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp2(scores - jnp.concatenate([peak] * repeats, axis=1))
    faded = jnp.exp2(old_peak - peak)
    total = refs.total[group] * faded
    for i in range(repeats):
        total += weights[:, i * LANES : (i + 1) * LANES]
    refs.peak[group] = peak
    refs.total[group] = total
    new = _product(weights.astype(values.dtype), values, (1, 0))
    faded = jnp.concatenate([faded] * (shape.width // LANES), axis=1)
    refs.acc[group] = refs.acc[group] * faded + new


def _elements(shape: _Shape, ref: Any, buffer: Int32[Array, ""], lanes: Any) -> Float[Array, "C W"]:
    """K or V of a block and a group of heads, in the compute dtype, not scaled."""
    pages = ref[buffer, :, :, lanes]
    elements = dequantize(pages, shape.call.layout, compute_dtype(shape.call))
    return elements.reshape(shape.num_keys, shape.width)


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
    shape: _Shape, refs: _Refs, group: Int32[Array, ""], scores: Float32[Array, "M C"]
) -> Float32[Array, "M C"]:
    """Scores as what 2 is raised to."""
    soft_cap = shape.call.soft_cap
    parts = []
    for i in range(shape.group_heads):
        part = scores[i * shape.num_queries : (i + 1) * shape.num_queries]
        part = part * refs.score_factors[group * shape.group_heads + i]
        if soft_cap is not None:
            part = jnp.tanh(part) * np.float32(soft_cap * _LOG2_E)
        parts.append(part)
    return jnp.concatenate(parts, axis=0)


def _mask(
    shape: _Shape,
    scores: Float32[Array, "M C"],
    values: Float[Array, "C W"],
    tile: _Tile,
    key: Int32[Array, ""],
) -> tuple[Float32[Array, "M C"], Float[Array, "C W"]]:
    """Scores of what a query does not see masked, and values that are none zeroed.

    key: the position of the block's first key.
    """
    window = shape.call.sliding_window
    part = (shape.num_queries, shape.num_keys)
    ahead = jax.lax.broadcasted_iota(jnp.int32, part, 1)
    ahead -= jax.lax.broadcasted_iota(jnp.int32, part, 0)
    to_query = tile.position - key
    is_seen = ahead <= to_query
    if window is not None:
        is_seen &= ahead > to_query - window
    parts = [
        jnp.where(is_seen, scores[i * part[0] : (i + 1) * part[0]], MASKED)
        for i in range(shape.group_heads)
    ]
    position = key + jax.lax.broadcasted_iota(jnp.int32, values.shape, 0)
    values = jnp.where(position <= tile.high, values.astype(jnp.float32), 0.0).astype(values.dtype)
    return jnp.concatenate(parts, axis=0), values


def _finish_tile(shape: _Shape, refs: _Refs, tile: _Tile) -> None:
    """Divides by the softmax's denominators and writes the outputs of the tile's own tokens."""
    outputs = []
    for head in range(shape.num_heads):
        group, at = shape.place(head)
        total = jnp.sum(refs.total[group, at], axis=1, keepdims=True)
        factor = refs.out_factors[head] / total
        outputs.append(refs.acc[group, at] * factor)
    _put_outputs(shape, refs, outputs)

    heads = shape.token_heads
    count = tile.own_to - tile.own_from
    size = 1
    while size <= shape.num_queries:
        done = count // (2 * size) * (2 * size)  # larger pieces come first

        @pl.when(count // size % 2 == 1)
        def _(size: int = size, done: Int32[Array, ""] = done) -> None:
            rows = [
                pl.ds(pl.multiple_of((token + done) * heads, heads), size * heads)
                for token in (tile.own_from, tile.token + tile.own_from)
            ]
            dma = pltpu.make_async_copy(
                refs.out_tokens.at[rows[0]], refs.out.at[rows[1]], refs.sems.at[2]
            )
            dma.start()
            dma.wait()

        size *= 2
