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

from pallas_kernels.chips import Chip
from pallas_kernels.ragged_paged_attention.layout import KVCache
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
    keep_tokens,
    pad_new,
    write_row,
    write_scratch,
    write_sizes,
)

_LOG2_E = math.log2(math.e)
_BUFFERS = 2  # blocks of K and V: one is used, one awaited
_MAX_QUERIES, _MAX_ROWS, _MAX_KEYS = 256, 1024, 1024  # by default
_ROWS = 256  # rows of a product of weights and values
_KEYS = 256  # and keys: what the registers hold
_SUBLANES = 16  # of the smallest tile of queries, also of bfloat16


@dataclasses.dataclass(frozen=True)
class PrefillSizes:
    """num_queries: tokens of a tile of queries. num_keys: about as many tokens in a block of K."""

    num_queries: int
    num_keys: int


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

    @property
    def edge_pages(self) -> int:
        """Pages of the parts of a block in which something is masked."""
        half, rest = divmod(self.block_pages, 2)
        is_whole = half and not rest and half * self.call.layout.page_size % LANES == 0
        return half if is_whole else self.block_pages

    @property
    def part_pages(self) -> int:
        """Pages of the parts in which weights meet values."""
        page_size = self.call.layout.page_size
        unit = LANES // math.gcd(LANES, page_size)
        return max(1, _KEYS // (unit * page_size)) * unit

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
    q_tokens: Any  # [num_queries, token_heads, width] as in memory
    out_tokens: Any  # [num_queries, token_heads, width] as in memory
    words: Any  # [lane tiles, _, 128] one of these as 32-bit words: two heads each, if of 16 bits
    q: Any  # [num_groups, rows, width] in the compute dtype
    keys: Any  # [_BUFFERS, block_pages, S, X]
    values: Any  # [_BUFFERS, block_pages, S, X]; finite everywhere
    peak: Any  # [num_groups, rows, 128] float32, the same in all lanes
    total: Any  # [num_groups, rows, 128] float32, the sum is that of the lanes
    acc: Any  # [num_groups, rows, width] float32
    scores: Any  # [rows, num_keys] float32
    weights: Any  # [rows, num_keys] in the compute dtype
    new_peak: Any  # [rows, 128] float32: `peak` after the turn
    fading: Any  # [rows, 128] float32: what the turn multiplies older sums by
    sems: Any  # [3] of the table, of queries and of outputs
    block_sems: Any  # [_BUFFERS]
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


def default_sizes(call: AttentionCall, num_tokens: int) -> PrefillSizes:
    """As many rows as keep the matrix units busy, and as large a block as VMEM has room for."""
    room = _vmem_limit(call.chip) * 9 // 10
    sizes = PrefillSizes(_MAX_QUERIES, _MAX_KEYS)

    def shape() -> _Shape:
        return _shape_of(call, num_tokens, sizes)

    while shape().rows > _MAX_ROWS and sizes.num_queries > _SUBLANES:
        sizes = dataclasses.replace(sizes, num_queries=sizes.num_queries // 2)
    while _vmem_bytes(shape()) > room and sizes.num_keys > LANES:
        sizes = dataclasses.replace(sizes, num_keys=sizes.num_keys // 2)
    while _vmem_bytes(shape()) > room and sizes.num_queries > _SUBLANES:
        sizes = dataclasses.replace(sizes, num_queries=sizes.num_queries // 2)
    return sizes


def prefill(
    tpu_call: TpuCall,
    out: Float[Array, "T N H"],
    kv_cache: KVCache,
    sizes: PrefillSizes | None = None,
) -> tuple[Float[Array, "T N H"], KVCache]:
    """Of rows of more than one new token: writes K and V to the cache and the outputs to `out`.

    Both are updated in place; nothing else in them changes.
    """
    call, num_tokens = tpu_call.call, tpu_call.q.shape[0]
    shape = _shape_of(call, num_tokens, sizes or default_sizes(call, num_tokens))
    tiled_tokens = max(-(-num_tokens // _SUBLANES) * _SUBLANES, shape.num_queries)
    q = _pack_heads(shape, tpu_call.q, tiled_tokens)
    is_packed = q.shape == out.shape
    packed_out = out if is_packed else jnp.zeros(q.shape, out.dtype)

    factor = _LOG2_E if call.soft_cap is None else 1 / call.soft_cap
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


def _vmem_limit(chip: Chip) -> int:
    return chip.core_memory_bytes * 15 // 16


def _vmem_scratch(shape: _Shape) -> list[Any]:
    """What `_Refs` has in VMEM, from `q_tokens` to `fading`."""
    call, layout = shape.call, shape.call.layout
    compute = compute_dtype(call)
    groups = (shape.num_groups, shape.rows)
    block = (_BUFFERS, shape.block_pages, layout.page_size, layout.token_width)
    tokens = (shape.num_queries, shape.token_heads, shape.width)
    words = (shape.width // LANES, tokens[0] * tokens[1] // shape.pack, LANES)
    return [
        pltpu.VMEM(tokens, call.q_dtype),
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
        pltpu.VMEM((shape.rows, LANES), jnp.float32),
        pltpu.VMEM((shape.rows, LANES), jnp.float32),
    ]


def _vmem_bytes(shape: _Shape) -> int:
    """VMEM that the kernel asks for."""
    writes = write_scratch(shape.write, shape.call.layout)[:2]
    buffers = [*_vmem_scratch(shape), *writes]
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in buffers)


def _lane_of_heads(shape: _Shape) -> np.ndarray:
    """[token_heads, heads of a lane tile]: whether a query head's KV head has that place in it."""
    layout = shape.call.layout
    group = shape.call.num_heads // layout.num_kv_heads
    places = shape.width // layout.padded_head_dim
    head = np.arange(shape.token_heads)[:, None]
    return head // group % places == np.arange(places)


def _pack_heads(
    shape: _Shape, q: Float[Array, "T N H"], num_tokens: int
) -> Float[Array, "T2 N2 W"]:
    """Queries as the kernel reads them; no copy where heads fill lane tiles and tokens tiles."""
    layout = shape.call.layout
    padding = [num_tokens, shape.token_heads, layout.padded_head_dim]
    q = jnp.pad(q, [(0, to - have) for to, have in zip(padding, q.shape, strict=True)])
    if shape.width != layout.padded_head_dim:
        q = jnp.where(_lane_of_heads(shape)[:, :, None], q[:, :, None], 0)
    return q.reshape(num_tokens, shape.token_heads, shape.width)


def _unpack_heads(
    shape: _Shape, out: Float[Array, "T2 N2 W"], num_tokens: int
) -> Float[Array, "T N H"]:
    """The inverse of `_pack_heads`."""
    call = shape.call
    out = out[:num_tokens]
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

    def one_row(r: Int32[Array, ""], num_done: Int32[Array, ""]) -> Int32[Array, ""]:
        start = refs.cu_q_lens[r]
        q_len = refs.cu_q_lens[r + 1] - start

        @pl.when((q_len > 1) & (num_done == 0))
        def _() -> None:
            refs.values[...] = jnp.zeros(refs.values.shape, refs.values.dtype)

        @pl.when(q_len > 1)
        def _() -> None:
            row = _Row(start, refs.kv_lens[r] - q_len, q_len)
            _load_table(shape, refs, r, refs.kv_lens[r])
            write_row(write_refs, shape.write, layer, refs.table, RowWrite(*row))
            _attend_row(shape, refs, layer, row)

        return num_done + (q_len > 1).astype(jnp.int32)

    jax.lax.fori_loop(0, refs.num_rows[0], one_row, jnp.int32(0))


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
    num_tokens = refs.q_hbm.shape[0]
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
        _copy_queries(refs, tile).start()
        _copy_queries(refs, tile).wait()
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
            _clean_values(shape, refs, row, tile, block, buffer)
            _attend_block(shape, refs, tile, block, buffer)
            return 1 - buffer

        buffer = jax.lax.fori_loop(0, num_blocks, one_block, buffer)
        _finish_tile(shape, refs, tile)
        return buffer

    first_tile = _tile_at(shape, refs, row, jnp.int32(0))
    _block_dmas(shape, refs, layer, first_tile, jnp.int32(0), jnp.int32(0), "start")
    jax.lax.fori_loop(0, num_tiles, one_tile, jnp.int32(0))


def _clean_values(
    shape: _Shape,
    refs: _Refs,
    row: _Row,
    tile: _Tile,
    block: Int32[Array, ""],
    buffer: Int32[Array, ""],
) -> None:
    """Zeroes values of the row's last page that are no token's: a weight of 0 does not hide NaN."""
    page_size = shape.call.layout.page_size
    kv_len = row.position + row.q_len
    last_page = (kv_len - 1) // page_size
    page = last_page - tile.first_page - block * shape.block_pages
    is_here = (page >= 0) & (page < shape.block_pages) & (last_page < tile.end_page)

    @pl.when(is_here & (kv_len % page_size != 0))
    def _() -> None:
        keep_tokens(refs.values.at[buffer, page], kv_len % page_size)


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


def _copy_queries(refs: _Refs, tile: _Tile) -> Any:
    tokens = pl.ds(tile.token, refs.q_tokens.shape[0])
    return pltpu.make_async_copy(refs.q_hbm.at[tokens], refs.q_tokens, refs.sems.at[1])


def _take_queries(shape: _Shape, refs: _Refs) -> None:
    """Sorts a tile's queries by head: strided loads, which only 32-bit words have."""

    def copy(tokens: Any, rows: Any) -> None:
        x = refs.q_tokens[tokens]
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


def _put_outputs(shape: _Shape, refs: _Refs) -> None:
    """Sorts finished outputs by token; the inverse of `_take_queries`."""
    for word, heads in _words_of_heads(shape):
        at = pl.ds(word, shape.num_queries, shape.token_heads // shape.pack)
        for i, lanes in enumerate(_lane_tiles(shape)):
            parts = []
            for head in heads:
                group, rows = shape.place(head)
                total = jnp.sum(refs.total[group, rows], axis=1, keepdims=True)
                output = refs.acc[group, rows, lanes] * (refs.out_factors[head] / total)
                output = output.astype(refs.out_tokens.dtype).astype(jnp.float32)
                parts.append(pltpu.bitcast(output, jnp.uint32))
            if shape.pack == 2:
                parts[0] >>= 16
            refs.words[i, at] = functools.reduce(jnp.bitwise_or, parts)

    def copy(tokens: Any, rows: Any) -> None:
        x = jnp.concatenate([refs.words[i, rows] for i in range(refs.words.shape[0])], axis=1)
        x = pltpu.bitcast(x, refs.out_tokens.dtype)
        refs.out_tokens[tokens] = x.reshape(-1, *refs.out_tokens.shape[1:])

    _for_words(shape, copy)


def _lane_tiles(shape: _Shape) -> list[slice]:
    return [slice(lane, lane + LANES) for lane in range(0, shape.width, LANES)]


def _words_of_heads(shape: _Shape) -> list[tuple[int, range]]:
    """Words of a token, and the heads in each."""
    starts = range(0, shape.num_heads, shape.pack)
    return [(s // shape.pack, range(s, min(s + shape.pack, shape.num_heads))) for s in starts]


def _for_words(shape: _Shape, copy: Callable[[Any, Any], None]) -> None:
    """Calls `copy` with parts of a tile's tokens and where these are in `words`."""
    tokens = math.gcd(shape.num_queries, 8)
    rows = tokens * shape.token_heads // shape.pack

    def turn(i: Int32[Array, ""], _: None) -> None:
        copy(pl.ds(i * tokens, tokens), pl.ds(pl.multiple_of(i * rows, rows), rows))

    jax.lax.fori_loop(0, shape.num_queries // tokens, turn, None)


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
    """One turn of the running softmax of all heads.

    Where something is masked, a block is taken in parts, up to the last that any query sees.
    """
    window, page_size = shape.call.sliding_window, shape.call.layout.page_size
    key = (tile.first_page + block * shape.block_pages) * page_size
    is_inside = key + shape.num_keys - 1 <= tile.low
    if window is not None:
        is_inside &= key > tile.high - window

    def all_groups(page: Int32[Array, ""] | int, pages: int, edge: Int32[Array, ""] | None) -> None:
        def one(group: Int32[Array, ""], _: None) -> None:
            _attend_group(shape, refs, (buffer, page, pages), group, edge)

        jax.lax.fori_loop(0, shape.num_groups, one, None)

    pages = shape.edge_pages

    def one_part(i: Int32[Array, ""], _: None) -> None:
        all_groups(i * pages, pages, tile.position - key - i * pages * page_size)

    @pl.when(is_inside)
    def _() -> None:
        all_groups(0, shape.block_pages, None)

    @pl.when(~is_inside)
    def _() -> None:
        num_parts = (tile.high - key) // (pages * page_size) + 1
        num_parts = jnp.minimum(num_parts, shape.block_pages // pages)
        jax.lax.fori_loop(0, num_parts, one_part, None)


def _attend_group(
    shape: _Shape,
    refs: _Refs,
    where: tuple[Int32[Array, ""], Int32[Array, ""] | int, int],
    group: Int32[Array, ""],
    edge: Int32[Array, ""] | None,
) -> None:
    """One turn of the running softmax of a group of heads.

    Scores of all rows come first. Then weights and products with values alternate, in parts whose
    weights the registers hold: the vector units make those of a part while the matrix units are
    busy with those of the part before.

    where: the buffer, the first page in it and how many.
    edge: as `_mask` takes it; None where all is seen.
    """
    buffer, page, num_pages = where
    lanes = pl.ds(pl.multiple_of(group * shape.width, shape.width), shape.width)

    # Two conditions that always hold: what is in one of them is put in order by itself, and the
    # compiler no longer lets weights wait in registers for scores that are not there yet.
    @pl.when(group >= 0)
    def _() -> None:
        for rows in shape.parts:
            keys = _elements(shape, refs.keys.at[buffer, pl.ds(page, num_pages), :, lanes])
            _score(shape, refs, group, rows, keys, edge)

    part_pages = math.gcd(num_pages, shape.part_pages)
    parts = [(rows, i) for i in range(0, num_pages, part_pages) for rows in shape.parts]

    @pl.when(group <= shape.num_groups)
    def _() -> None:
        for done, todo in zip([None, *parts], [*parts, None], strict=True):
            if todo is not None:
                _weigh(refs, group, todo[0], shape.keys_of(todo[1], part_pages))
            if done is not None:
                rows, pages = done[0], pl.ds(page + done[1], part_pages)
                values = _elements(shape, refs.values.at[buffer, pages, :, lanes])
                _add_values(refs, group, rows, shape.keys_of(done[1], part_pages), values)


def _score(
    shape: _Shape,
    refs: _Refs,
    group: Int32[Array, ""],
    rows: slice,
    keys: Float[Array, "C W"],
    edge: Int32[Array, ""] | None,
) -> None:
    """Scores of some rows, and the largest of each row so far."""
    scores = _product(refs.q[group, rows], keys, (1, 1))
    scores = _scale(
        shape, refs, group * shape.group_heads + rows.start // shape.num_queries, scores
    )
    if edge is not None:
        scores = _mask(shape, scores, edge)
    refs.scores[rows, : keys.shape[0]] = scores
    old_peak = refs.peak[group, rows]
    peak = jnp.maximum(old_peak, jnp.max(scores, axis=1, keepdims=True))
    refs.peak[group, rows] = peak
    refs.new_peak[rows] = peak
    refs.fading[rows] = jnp.exp2(old_peak - peak)


def _weigh(refs: _Refs, group: Int32[Array, ""], rows: slice, keys: slice) -> None:
    """Weights of some rows and keys, and their sum so far."""
    repeats = (keys.stop - keys.start) // LANES
    peak = jnp.concatenate([refs.new_peak[rows]] * repeats, axis=1)
    weights = jnp.exp2(refs.scores[rows, keys] - peak)
    refs.weights[rows, keys] = weights.astype(refs.weights.dtype)
    total = refs.total[group, rows]
    if keys.start == 0:
        total *= refs.fading[rows]
    for i in range(repeats):
        total += weights[:, i * LANES : (i + 1) * LANES]
    refs.total[group, rows] = total


def _add_values(
    refs: _Refs, group: Int32[Array, ""], rows: slice, keys: slice, values: Float[Array, "C W"]
) -> None:
    """Adds the weighted values of some rows and keys."""
    acc = refs.acc[group, rows]
    if keys.start == 0:
        acc *= jnp.concatenate([refs.fading[rows]] * (acc.shape[1] // LANES), axis=1)
    refs.acc[group, rows] = acc + _product(refs.weights[rows, keys], values, (1, 0))


def _elements(shape: _Shape, ref: Any) -> Float[Array, "C W"]:
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
    shape: _Shape, refs: _Refs, head: Int32[Array, ""], scores: Float32[Array, "M C"]
) -> Float32[Array, "M C"]:
    """Scores of query heads from `head` on as what 2 is raised to."""
    soft_cap, size = shape.call.soft_cap, shape.num_queries
    parts = []
    for i in range(scores.shape[0] // size):
        part = scores[i * size : (i + 1) * size] * refs.score_factors[head + i]
        if soft_cap is not None:
            part = jnp.tanh(part) * np.float32(soft_cap * _LOG2_E)
        parts.append(part)
    return jnp.concatenate(parts, axis=0)


def _mask(
    shape: _Shape, scores: Float32[Array, "M C"], to_query: Int32[Array, ""]
) -> Float32[Array, "M C"]:
    """Scores, masked where a query does not see a key.

    to_query: the position of the tile's first query minus that of the first key.
    """
    window, size = shape.call.sliding_window, shape.num_queries
    part = (size, scores.shape[1])
    ahead = jax.lax.broadcasted_iota(jnp.int32, part, 1)
    ahead -= jax.lax.broadcasted_iota(jnp.int32, part, 0)
    is_seen = ahead <= to_query
    if window is not None:
        is_seen &= ahead > to_query - window
    heads = [scores[i : i + size] for i in range(0, scores.shape[0], size)]
    return jnp.concatenate([jnp.where(is_seen, head, MASKED) for head in heads], axis=0)


def _finish_tile(shape: _Shape, refs: _Refs, tile: _Tile) -> None:
    """Divides by the softmax's denominators and writes the outputs of the tile's own tokens."""
    _put_outputs(shape, refs)
    count = tile.own_to - tile.own_from
    size = 1
    while size <= shape.num_queries:
        done = count // (2 * size) * (2 * size)  # larger pieces come first

        @pl.when(count // size % 2 == 1)
        def _(size: int = size, done: Int32[Array, ""] = done) -> None:
            here = pl.ds(tile.own_from + done, size)
            there = pl.ds(tile.token + tile.own_from + done, size)
            dma = pltpu.make_async_copy(
                refs.out_tokens.at[here], refs.out.at[there], refs.sems.at[2]
            )
            dma.start()
            dma.wait()

        size *= 2
