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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Bool, Float, Float32, Int32, Shaped

from pallas_kernels.chips import Chip
from pallas_kernels.ragged_paged_attention.layout import KVCache
from pallas_kernels.ragged_paged_attention.specs import AttentionCall
from pallas_kernels.ragged_paged_attention.tpu_common import (
    LANES,
    TpuCall,
    compute_dtype,
    copy_page,
    copy_table_chunk,
    page_id,
    table_chunks,
)
from pallas_kernels.ragged_paged_attention.tpu_kv_write import (
    RowWrite,
    WriteRefs,
    keep_tokens,
    pad_new,
    write_row,
    write_scratch,
    write_sizes,
)
from pallas_kernels.ragged_paged_attention.tpu_prefill_tile import (
    LOG2_E,
    Refs,
    Shape,
    Tile,
    attend_block,
    put_outputs,
    start_softmax,
    take_queries,
)

_BUFFERS = 2  # blocks of K and V: one is used, one awaited
_MAX_QUERIES, _MAX_ROWS, _MAX_KEYS = 512, 2048, 1024  # by default
_FEW_QUERIES = 16  # of a tile of a row that has few: at most this share of a large tile
_FEW_SHARE = 8
_SUBLANES = 16  # of the smallest tile of queries, also of bfloat16


@dataclasses.dataclass(frozen=True)
class PrefillSizes:
    """num_queries: tokens of a tile of queries. num_keys: about as many tokens in a block of K."""

    num_queries: int
    num_keys: int


class _Row(NamedTuple):
    """A row of the call; its first new token is token `start`, at position `position`."""

    start: Int32[Array, ""]
    position: Int32[Array, ""]
    q_len: Int32[Array, ""]


def default_sizes(call: AttentionCall, num_tokens: int) -> PrefillSizes:
    """Tuned ones; else as many rows as keep the matrix units busy, and all keys that fit VMEM."""
    return _sizes(call, num_tokens, "tpu_prefill", _MAX_QUERIES)


def few_sizes(call: AttentionCall, num_tokens: int) -> PrefillSizes:
    """The same of rows that have few new tokens."""
    return _sizes(call, num_tokens, "tpu_prefill_few", _FEW_QUERIES)


def _sizes(call: AttentionCall, num_tokens: int, kernel: str, num_queries: int) -> PrefillSizes:
    tuned = call.tuned_sizes(kernel)
    if tuned is not None:
        return PrefillSizes(**tuned)
    room = _vmem_limit(call.chip) * 9 // 10
    sizes = PrefillSizes(num_queries, _MAX_KEYS)

    def shape() -> Shape:
        return _shape_of(call, num_tokens, sizes)

    while shape().rows > _MAX_ROWS and sizes.num_queries > _SUBLANES:
        sizes = dataclasses.replace(sizes, num_queries=sizes.num_queries // 2)
    while _vmem_bytes(shape()) > room and sizes.num_keys > LANES:
        sizes = dataclasses.replace(sizes, num_keys=sizes.num_keys // 2)
    while _vmem_bytes(shape()) > room and sizes.num_queries > _SUBLANES:
        sizes = dataclasses.replace(sizes, num_queries=sizes.num_queries // 2)
    return sizes


def prefill(
    tpu_call: TpuCall, out: Float[Array, "T N H"], kv_cache: KVCache
) -> tuple[Float[Array, "T N H"], KVCache]:
    """Of rows of more than one new token: writes K and V to the cache and the outputs to `out`.

    Both are updated in place; nothing else in them changes. Where a tile of queries is large, rows
    that would fill little of it, as speculation and the ends of prompts make them, are taken by a
    program of their own, in small tiles.
    """
    call, num_tokens = tpu_call.call, tpu_call.q.shape[0]
    shape = _shape_of(call, num_tokens, default_sizes(call, num_tokens))
    few_shape = _shape_of(call, num_tokens, few_sizes(call, num_tokens))
    most = shape.num_queries // _FEW_SHARE
    if most >= few_shape.num_queries:
        few_shape = dataclasses.replace(few_shape, q_lens=(2, most))
        out, kv_cache = _prefill_rows(few_shape, tpu_call, out, kv_cache)
        shape = dataclasses.replace(shape, q_lens=(most + 1, num_tokens))
    return _prefill_rows(shape, tpu_call, out, kv_cache)


def _prefill_rows(
    shape: Shape, tpu_call: TpuCall, out: Float[Array, "T N H"], kv_cache: KVCache
) -> tuple[Float[Array, "T N H"], KVCache]:
    """`prefill` of the rows whose new tokens are within `q_lens`."""
    call, num_tokens = tpu_call.call, tpu_call.q.shape[0]
    tiled_tokens = max(-(-num_tokens // _SUBLANES) * _SUBLANES, shape.num_queries)
    q = _pack_heads(shape, tpu_call.q, tiled_tokens)
    is_packed = q.shape == out.shape
    packed_out = out if is_packed else jnp.zeros(q.shape, out.dtype)

    factor = LOG2_E if call.soft_cap is None else 1 / call.soft_cap
    packed_out, k_cache, v_cache = _call_kernel(
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
        packed_out,
        *kv_cache,
    )
    if is_packed:
        return packed_out, KVCache(k_cache, v_cache)
    unpacked = _unpack_heads(shape, packed_out, num_tokens)
    tokens = jnp.arange(num_tokens)[:, None]
    is_row = jnp.arange(tpu_call.kv_lens.shape[0]) < tpu_call.num_rows[0]
    starts, ends = tpu_call.cu_q_lens[:-1], tpu_call.cu_q_lens[1:]
    is_own = (is_row & shape.takes(ends - starts) & (starts <= tokens) & (tokens < ends)).any(
        axis=1
    )
    out = jnp.where(is_own[:, None, None], unpacked, out)
    return out, KVCache(k_cache, v_cache)


def _shape_of(call: AttentionCall, num_tokens: int, sizes: PrefillSizes) -> Shape:
    layout = call.layout
    width = max(layout.padded_head_dim, LANES)
    heads_together = width // layout.padded_head_dim
    num_groups = layout.token_width // width
    group_heads = call.num_heads // layout.num_kv_heads * heads_together
    # Blocks of whole lane tiles of scores.
    unit = LANES // math.gcd(LANES, layout.page_size)
    block_pages = max(1, sizes.num_keys // (unit * layout.page_size)) * unit
    return Shape(
        call=call,
        width=width,
        num_groups=num_groups,
        group_heads=group_heads,
        token_heads=-(-num_groups * group_heads // 8) * 8,
        num_queries=min(sizes.num_queries, -(-num_tokens // _SUBLANES) * _SUBLANES),
        q_lens=(2, num_tokens),
        block_pages=block_pages,
        write=write_sizes(layout),
    )


def _vmem_limit(chip: Chip) -> int:
    return chip.core_memory_bytes * 15 // 16


def _vmem_scratch(shape: Shape) -> list[Any]:
    """What `Refs` has in VMEM, from `tokens` to `limits`."""
    call, layout = shape.call, shape.call.layout
    compute = compute_dtype(call)
    groups = (shape.num_groups, shape.rows)
    block = (_BUFFERS, shape.block_pages, layout.page_size, layout.token_width)
    tokens = (shape.num_queries, shape.token_heads, shape.width)
    words = (shape.width // LANES, tokens[0] * tokens[1] // shape.pack, LANES)
    return [
        pltpu.VMEM(tokens, call.q_dtype),
        pltpu.VMEM(words, jnp.uint32),
        pltpu.VMEM((*groups, shape.width), compute),
        pltpu.VMEM(block, layout.storage_dtype),
        pltpu.VMEM(block, layout.storage_dtype),
        pltpu.VMEM((*groups, LANES), jnp.float32),
        pltpu.VMEM((*groups, LANES), jnp.float32),
        pltpu.VMEM((*groups, shape.width), jnp.float32),
        pltpu.VMEM((shape.rows, shape.num_keys), jnp.float32),
        pltpu.VMEM((shape.rows, shape.num_keys), compute),
        pltpu.VMEM((shape.num_queries, shape.edge_pages * layout.page_size), jnp.float32),
    ]


def _vmem_bytes(shape: Shape) -> int:
    """VMEM that the kernel asks for."""
    writes = write_scratch(shape.write, shape.call.layout)[:2]
    buffers = [*_vmem_scratch(shape), *writes]
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in buffers)


def _lane_of_heads(shape: Shape) -> Bool[np.ndarray, "N2 places"]:
    """[token_heads, heads of a lane tile]: whether a query head's KV head has that place in it."""
    layout = shape.call.layout
    group = shape.call.num_heads // layout.num_kv_heads
    places = shape.width // layout.padded_head_dim
    head = np.arange(shape.token_heads)[:, None]
    return head // group % places == np.arange(places)


def _pack_heads(shape: Shape, q: Float[Array, "T N H"], num_tokens: int) -> Float[Array, "T2 N2 W"]:
    """Queries as the kernel reads them; no copy where heads fill lane tiles and tokens tiles."""
    layout = shape.call.layout
    padding = [num_tokens, shape.token_heads, layout.padded_head_dim]
    q = jnp.pad(q, [(0, to - have) for to, have in zip(padding, q.shape, strict=True)])
    if shape.width != layout.padded_head_dim:
        q = jnp.where(_lane_of_heads(shape)[:, :, None], q[:, :, None], 0)
    return q.reshape(num_tokens, shape.token_heads, shape.width)


def _unpack_heads(
    shape: Shape, out: Float[Array, "T2 N2 W"], num_tokens: int
) -> Float[Array, "T N H"]:
    """The inverse of `_pack_heads`."""
    call = shape.call
    out = out[:num_tokens]
    if shape.width != call.layout.padded_head_dim:
        out = out.reshape(*out.shape[:2], -1, call.layout.padded_head_dim)
        out = jnp.where(_lane_of_heads(shape)[:, :, None], out, 0).sum(axis=2, dtype=out.dtype)
    return out[:, : call.num_heads, : call.layout.head_dim]


def _pad_heads(shape: Shape, values: Float32[Array, " N"] | None) -> Float32[Array, " N2"]:
    """One number a head; ones where there are none."""
    if values is None:
        return jnp.ones(shape.token_heads, jnp.float32)
    return jnp.pad(values, (0, shape.token_heads - values.shape[0]))


def _call_kernel(shape: Shape, *operands: Shaped[Array, "..."]) -> tuple[Shaped[Array, "..."], ...]:
    """`operands` are those of `Refs` up to the outputs, the last three are updated in place."""
    call = shape.call
    smem, hbm = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pl.ANY)
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
            *_vmem_scratch(shape),
            pltpu.SemaphoreType.DMA((3,)),
            pltpu.SemaphoreType.DMA((_BUFFERS,)),
            *write_scratch(shape.write, call.layout),
        ],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_vmem_limit(call.chip)),
        name="ragged_paged_prefill_{}_to_{}".format(*shape.q_lens),
    )
    return tuple(call_kernel(*operands))


def _kernel(shape: Shape, *all_refs: Any) -> None:
    refs = Refs(*all_refs)
    layer = refs.layer[0]
    write_refs = WriteRefs(
        (refs.k_new, refs.v_new),
        (refs.k_cache, refs.v_cache),
        *(refs.chunks, refs.sources, refs.read_sems, refs.write_sems),
    )

    def one_row(r: Int32[Array, ""], num_done: Int32[Array, ""]) -> Int32[Array, ""]:
        start = refs.cu_q_lens[r]
        q_len = refs.cu_q_lens[r + 1] - start
        is_own = shape.takes(q_len)

        @pl.when(is_own & (num_done == 0))
        def _() -> None:
            for buffers in (refs.keys, refs.values):
                buffers[...] = jnp.zeros(buffers.shape, buffers.dtype)

        @pl.when(is_own)
        def _() -> None:
            row = _Row(start, refs.kv_lens[r] - q_len, q_len)
            _load_table(shape, refs, r, refs.kv_lens[r])
            write_row(write_refs, shape.write, layer, refs.table, RowWrite(*row))
            _attend_row(shape, refs, layer, row)

        return num_done + is_own.astype(jnp.int32)

    jax.lax.fori_loop(0, refs.num_rows[0], one_row, jnp.int32(0))


def _load_table(shape: Shape, refs: Refs, row: Int32[Array, ""], kv_len: Int32[Array, ""]) -> None:
    """Brings the live part of a row's table to SMEM."""
    page_size = shape.call.layout.page_size
    chunks = table_chunks(refs.tables_hbm, (kv_len + page_size - 1) // page_size)

    def copy(chunk: Int32[Array, ""], _: None) -> None:
        dma = copy_table_chunk(refs.tables_hbm, row, chunk, refs.table, refs.sems.at[0])
        dma.start()
        dma.wait()

    jax.lax.fori_loop(0, chunks, copy, None)


def _tile_at(shape: Shape, refs: Refs, row: _Row, i: Int32[Array, ""]) -> Tile:
    """The row's i-th tile; the last ones of the call are moved back to end with its tokens."""
    page_size, window = shape.call.layout.page_size, shape.call.sliding_window
    own = row.start + i * shape.num_queries
    own_end = jnp.minimum(own + shape.num_queries, row.start + row.q_len)
    num_tokens = refs.q_hbm.shape[0]
    token = jnp.minimum(own, num_tokens - shape.num_queries)
    low = row.position + own - row.start
    high = row.position + own_end - row.start - 1
    first = jnp.int32(0) if window is None else jnp.maximum(low - window + 1, 0)
    return Tile(
        token=token,
        own_from=own - token,
        own_to=own_end - token,
        position=row.position + token - row.start,
        low=low,
        high=high,
        first_page=first // page_size,
        end_page=high // page_size + 1,
    )


def _attend_row(shape: Shape, refs: Refs, layer: Int32[Array, ""], row: _Row) -> None:
    num_tiles = (row.q_len + shape.num_queries - 1) // shape.num_queries

    def one_tile(i: Int32[Array, ""], buffer: Int32[Array, ""]) -> Int32[Array, ""]:
        tile = _tile_at(shape, refs, row, i)
        num_blocks = _num_blocks(shape, tile)
        _copy_queries(refs, tile).start()
        _copy_queries(refs, tile).wait()
        take_queries(shape, refs)
        start_softmax(shape, refs)

        def one_block(block: Int32[Array, ""], buffer: Int32[Array, ""]) -> Int32[Array, ""]:
            @pl.when(block + 1 < num_blocks)
            def _() -> None:
                _block_dmas(shape, refs, layer, tile, block + 1, 1 - buffer, "start")

            @pl.when((block + 1 == num_blocks) & (i + 1 < num_tiles))
            def _() -> None:
                next_tile = _tile_at(shape, refs, row, i + 1)
                _block_dmas(shape, refs, layer, next_tile, jnp.int32(0), 1 - buffer, "start")

            _block_dmas(shape, refs, layer, tile, block, buffer, "wait")
            _clean_page(shape, refs, row, tile, block, buffer)
            attend_block(shape, refs, tile, block, buffer)
            return 1 - buffer

        buffer = jax.lax.fori_loop(0, num_blocks, one_block, buffer)
        _finish_tile(shape, refs, tile)
        return buffer

    first_tile = _tile_at(shape, refs, row, jnp.int32(0))
    _block_dmas(shape, refs, layer, first_tile, jnp.int32(0), jnp.int32(0), "start")
    jax.lax.fori_loop(0, num_tiles, one_tile, jnp.int32(0))


def _clean_page(
    shape: Shape,
    refs: Refs,
    row: _Row,
    tile: Tile,
    block: Int32[Array, ""],
    buffer: Int32[Array, ""],
) -> None:
    """Zeroes what is no token's of the row's last page: limits and weights of 0 hide no NaN."""
    page_size = shape.call.layout.page_size
    kv_len = row.position + row.q_len
    last_page = (kv_len - 1) // page_size
    page = last_page - tile.first_page - block * shape.block_pages
    is_here = (page >= 0) & (page < shape.block_pages) & (last_page < tile.end_page)

    @pl.when(is_here & (kv_len % page_size != 0))
    def _() -> None:
        for buffers in (refs.keys, refs.values):
            keep_tokens(buffers.at[buffer, page], kv_len % page_size)


def _num_blocks(shape: Shape, tile: Tile) -> Int32[Array, ""]:
    return (tile.end_page - tile.first_page + shape.block_pages - 1) // shape.block_pages


def _block_dmas(
    shape: Shape,
    refs: Refs,
    layer: Int32[Array, ""],
    tile: Tile,
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


def _copy_queries(refs: Refs, tile: Tile) -> Any:
    tokens = pl.ds(tile.token, refs.tokens.shape[0])
    return pltpu.make_async_copy(refs.q_hbm.at[tokens], refs.tokens, refs.sems.at[1])


def _finish_tile(shape: Shape, refs: Refs, tile: Tile) -> None:
    """Divides by the softmax's denominators and writes the outputs of the tile's own tokens."""
    put_outputs(shape, refs)
    count = tile.own_to - tile.own_from
    size = 1
    while size <= shape.num_queries:
        done = count // (2 * size) * (2 * size)  # larger pieces come first

        @pl.when(count // size % 2 == 1)
        def _(size: int = size, done: Int32[Array, ""] = done) -> None:
            here = pl.ds(tile.own_from + done, size)
            there = pl.ds(tile.token + tile.own_from + done, size)
            dma = pltpu.make_async_copy(refs.tokens.at[here], refs.out.at[there], refs.sems.at[2])
            dma.start()
            dma.wait()

        size *= 2
