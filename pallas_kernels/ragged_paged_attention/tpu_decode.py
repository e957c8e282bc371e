"""Rows of one new token on a TPU: one pass over each row's live pages, the KV write fused into it.

All KV heads of a token take part in one product, as they lie side by side in the cache: a query is
zero but for the lanes of its own KV head. That costs more multiplications than there must be, but
reading the pages is what takes the time, and so they are read once, as they lie.
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
from jaxtyping import Float, Float32, Int32, Shaped

from pallas_kernels.chips import Chip
from pallas_kernels.ragged_paged_attention import tpu_common as common
from pallas_kernels.ragged_paged_attention.layout import KVCache, KVCacheLayout
from pallas_kernels.ragged_paged_attention.specs import AttentionCall
from pallas_kernels.ragged_paged_attention.tpu_common import LANES, MASKED, TpuCall

_ROW_SLOTS = 4  # rows whose queries are on their way or in use: more than blocks are in flight
_OUT_SLOTS = 2  # rows whose results are on their way out or being made
_BLOCK_BYTES = 2**20  # of K in a block
_UNROLL = 8  # pages in one turn of the loop that starts DMAs, rows in one that looks at rows


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """pages_per_block: pages that are computed with at a time.
    num_buffers: blocks in VMEM, all but one of them on their way; 2 to 4.
    chunk: tokens of a block in one product.
    """

    pages_per_block: int
    num_buffers: int
    chunk: int


def block_sizes(call: AttentionCall) -> BlockSizes:
    """Tuned ones, else blocks of `_BLOCK_BYTES` of K, as far as VMEM has room for them."""
    tuned = call.tuned_sizes("tpu_decode")
    if tuned is not None:
        return BlockSizes(**tuned)
    layout, num_buffers = call.layout, 3
    token_bytes = layout.token_width * layout.storage_dtype.itemsize
    room = vmem_limit(call.chip) // 2 // (2 * num_buffers * token_bytes)
    tokens = min(_BLOCK_BYTES // token_bytes, 2048, room)
    unit = LANES // math.gcd(LANES, layout.page_size)  # pages of whole lanes of scores
    pages = max(tokens // (layout.page_size * unit), 1) * unit
    return BlockSizes(pages, num_buffers, math.gcd(pages * layout.page_size, 256))


def vmem_limit(chip: Chip) -> int:
    """Bytes of VMEM that the kernel may use."""
    return chip.core_memory_bytes * 7 // 8


def vmem_bytes(call: AttentionCall) -> int:
    """Bytes of VMEM that it takes: the blocks, and what there is of a row as wide as a token."""
    layout, sizes = call.layout, block_sizes(call)
    tokens = sizes.pages_per_block * layout.page_size
    blocks = 2 * sizes.num_buffers * tokens * layout.token_width * layout.storage_dtype.itemsize
    heads = call.num_heads + 8  # queries in their lanes, sums, and a product on its way to them
    return blocks + heads * (layout.token_width * 3 + tokens * 2 + 16 * LANES) * 4


class _Refs(NamedTuple):
    """Everything the kernel reads and writes, in the order that it is handed over."""

    layer: Any  # [1] i32 SMEM
    num_rows: Any  # [1] i32 SMEM
    kv_lens: Any  # [R] i32 SMEM
    cu_q_lens: Any  # [R+1] i32 SMEM
    tables: Any  # [R, C, 128] i32 HBM
    q: Any  # [T, N, H] HBM
    kv_new: Any  # [R, 2, X] i32 HBM: the bits of K and V, repeated to fill 32
    heads: Any  # [3, N, 128] f32 VMEM: score factors, out factors, sinks
    out: Any  # [T, N, H] HBM
    k_cache: Any  # [L, P, S, X] HBM
    v_cache: Any  # [L, P, S, X] HBM
    k_buffer: Any  # [num_buffers, tokens of a block, X] VMEM
    v_buffer: Any  # [num_buffers, tokens of a block, X] VMEM
    q_buffer: Any  # [_ROW_SLOTS, N, H] VMEM
    new_buffer: Any  # [_ROW_SLOTS, 2, X] i32 VMEM
    out_buffer: Any  # [_OUT_SLOTS, N, H] VMEM
    write_buffer: Any  # [_OUT_SLOTS, 2, tokens of a tile, X] VMEM
    wide_q: Any  # [N, X] compute dtype VMEM
    acc: Any  # [N, X] f32 VMEM
    peak: Any  # [N, 128] f32 VMEM
    total: Any  # [N, 128] f32 VMEM: its lanes' sum is the total
    table: Any  # [2, C, 128] i32 SMEM
    rows: Any  # [R] i32 SMEM: the rows of one new token, as many as there are
    last_page: Any  # [num_buffers] i32 SMEM: id of the last page in each buffer
    block_sems: Any  # [num_buffers, 2] DMA
    table_sems: Any  # [2] DMA
    row_sems: Any  # [_ROW_SLOTS] DMA
    out_sems: Any  # [_OUT_SLOTS] DMA
    write_sems: Any  # [_OUT_SLOTS] DMA


class _Row(NamedTuple):
    """Where the pages of a row lie that its token attends to."""

    id: Int32[Array, ""]
    kv_len: Int32[Array, ""]
    first_page: Int32[Array, ""]  # in the block table
    num_pages: Int32[Array, ""]
    num_blocks: Int32[Array, ""]


class _Cursor(NamedTuple):
    """The next block to fetch: of which decode row, which of its blocks, into which buffer."""

    row: Int32[Array, ""]
    block: Int32[Array, ""]
    buffer: Int32[Array, ""]


class _Kernel(NamedTuple):
    """The static facts, the refs, and this core's share of the rows: every `num_cores`-th."""

    call: AttentionCall
    sizes: BlockSizes
    refs: _Refs
    core: Int32[Array, ""]
    num_rows: Int32[Array, ""]

    @property
    def layout(self) -> KVCacheLayout:
        return self.call.layout

    def row(self, i: Int32[Array, ""]) -> _Row:
        refs, size = self.refs, self.layout.page_size
        index = refs.rows[i * self.call.chip.num_cores + self.core]
        kv_len = refs.kv_lens[index]
        first = jnp.int32(0)
        if self.call.sliding_window is not None:
            first = common.divide(jnp.maximum(kv_len - self.call.sliding_window, 0), size)
        num_pages = common.divide(kv_len + (size - 1), size) - first
        per_block = self.sizes.pages_per_block
        num_blocks = common.divide(num_pages + (per_block - 1), per_block)
        return _Row(index, kv_len, first, num_pages, num_blocks)

    def pages_in_block(self, row: _Row, block: Int32[Array, ""]) -> Int32[Array, ""]:
        per_block = self.sizes.pages_per_block
        return jnp.minimum(row.num_pages - block * per_block, per_block)


def decode(
    tpu: TpuCall, out: Float[Array, "T N H"], kv_cache: KVCache, sizes: BlockSizes | None = None
) -> tuple[Float[Array, "T N H"], KVCache]:
    """`out` and the cache, both updated in place, with the results of rows of one new token.

    Other rows are left alone. `out` must be zero, or anything else, where such a row has its token.
    """
    call = tpu.call
    layout, chip = call.layout, call.chip
    sizes = sizes or block_sizes(call)
    num_rows, (_, num_heads, head_dim) = tpu.kv_lens.shape[0], tpu.q.shape
    width = layout.token_width
    tokens = sizes.pages_per_block * layout.page_size
    table = tpu.tables.shape[1:]

    ones = jnp.ones(num_heads, jnp.float32)
    others = [ones if array is None else array for array in (tpu.out_factors, tpu.sinks)]
    heads = jnp.stack([tpu.score_factors, *others])
    heads = jnp.broadcast_to(heads[:, :, None], (*heads.shape, LANES))
    starts = jnp.clip(tpu.cu_q_lens[:-1], 0, tpu.q.shape[0] - 1)
    kv_new = jnp.stack([_repeat_bits(tpu.k_new[starts]), _repeat_bits(tpu.v_new[starts])], axis=1)

    hbm, vmem = (pl.BlockSpec(memory_space=space) for space in (pl.ANY, pltpu.VMEM))
    buffer = pltpu.VMEM((sizes.num_buffers, tokens, width), layout.storage_dtype)
    dma = pltpu.SemaphoreType.DMA
    arrays = (tpu.tables, tpu.q, kv_new, heads, out, kv_cache.k, kv_cache.v)
    scalars = (tpu.layer, tpu.num_rows, tpu.kv_lens, tpu.cu_q_lens)
    updated = {len(scalars) + 4 + i: i for i in range(3)}
    out, k, v = pl.pallas_call(
        functools.partial(_kernel, call=call, sizes=sizes),
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays[4:]],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(chip.num_cores,),
            in_specs=[hbm, hbm, hbm, vmem, hbm, hbm, hbm],
            out_specs=[hbm, hbm, hbm],
            scratch_shapes=[
                buffer,
                buffer,
                pltpu.VMEM((_ROW_SLOTS, num_heads, head_dim), tpu.q.dtype),
                pltpu.VMEM((_ROW_SLOTS, 2, width), jnp.int32),
                pltpu.VMEM((_OUT_SLOTS, num_heads, head_dim), out.dtype),
                pltpu.VMEM((_OUT_SLOTS, 2, _tile_rows(layout), width), layout.storage_dtype),
                pltpu.VMEM((num_heads, width), common.compute_dtype(call)),
                pltpu.VMEM((num_heads, width), jnp.float32),
                pltpu.VMEM((num_heads, LANES), jnp.float32),
                pltpu.VMEM((num_heads, LANES), jnp.float32),
                pltpu.SMEM((2, *table), jnp.int32),
                pltpu.SMEM((num_rows,), jnp.int32),
                pltpu.SMEM((sizes.num_buffers,), jnp.int32),
                dma((sizes.num_buffers, 2)),
                *(dma((slots,)) for slots in (2, _ROW_SLOTS, _OUT_SLOTS, _OUT_SLOTS)),
            ],
        ),
        input_output_aliases=updated,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=vmem_limit(chip),
            # Page ids are in range; the checks cost more than all else that starts a DMA.
            disable_bounds_checks=True,
        ),
        name="ragged_paged_attention_decode",
    )(*scalars, *arrays)
    return out, KVCache(k, v)


def _repeat_bits(x: Shaped[Array, "R X"]) -> Int32[Array, "R X"]:
    """The bits of each element, side by side as often as 32 bits hold them."""
    bits = 8 * x.dtype.itemsize
    words = jax.lax.bitcast_convert_type(x, f"uint{bits}").astype(jnp.uint32)
    while bits < 32:
        words |= words << bits
        bits *= 2
    return jax.lax.bitcast_convert_type(words, jnp.int32)


def _kernel(*args_ref: Any, call: AttentionCall, sizes: BlockSizes) -> None:
    # Scalars, inputs, outputs and scratch; the last three inputs are the outputs.
    num_inputs = 4 + 4
    refs = _Refs(*args_ref[:num_inputs], *args_ref[num_inputs + 3 :])
    core = pl.program_id(0)
    num_decode = _find_rows(refs)
    mine = common.divide(num_decode - core + (call.chip.num_cores - 1), call.chip.num_cores)
    kernel = _Kernel(call, sizes, refs, core, mine)

    # Where weights are zero, values must be finite: they are those of some row, or these zeros.
    def clear(i: Int32[Array, ""], _: None) -> None:
        at = pl.ds(pl.multiple_of(i * LANES, LANES), LANES)
        for buffer in range(sizes.num_buffers):
            shape = (LANES, refs.v_buffer.shape[2])
            refs.v_buffer[buffer, at, :] = jnp.zeros(shape, refs.v_buffer.dtype)

    jax.lax.fori_loop(0, refs.v_buffer.shape[1] // LANES, clear, None)

    @pl.when(mine > 0)
    def _() -> None:
        _table_copies(kernel, jnp.int32(0), lambda copy: copy.start())
        cursor = _Cursor(jnp.int32(0), jnp.int32(0), jnp.int32(0))
        for _ahead in range(sizes.num_buffers - 1):
            cursor = _fetch(kernel, cursor)
        first = (cursor, jnp.int32(0))
        jax.lax.fori_loop(0, mine, functools.partial(_attend_row, kernel), first)
        for slot in range(_OUT_SLOTS):

            @pl.when(mine > slot)
            def _(slot: int = slot) -> None:
                _wait_results(kernel, slot)


def _find_rows(refs: _Refs) -> Int32[Array, ""]:
    """Lists the rows of one new token in `refs.rows`; returns how many there are."""

    num_rows, max_rows = refs.num_rows[0], refs.rows.shape[0]

    def look(r: Int32[Array, ""], count: Int32[Array, ""]) -> Int32[Array, ""]:
        refs.rows[count] = r
        is_one = refs.cu_q_lens[r + 1] - refs.cu_q_lens[r] == 1
        return count + (is_one & (r < num_rows)).astype(jnp.int32)

    unroll = math.gcd(max_rows, _UNROLL)
    return jax.lax.fori_loop(0, max_rows, look, jnp.int32(0), unroll=unroll)


def _table_copies(kernel: _Kernel, i: Int32[Array, ""], do: Any) -> None:
    """Does something with each DMA of the i-th decode row's block table."""
    refs, row = kernel.refs, kernel.row(i)

    def one(chunk: Int32[Array, ""], _: None) -> None:
        slot = i & 1
        do(
            common.copy_table_chunk(
                refs.tables, row.id, chunk, refs.table.at[slot], refs.table_sems.at[slot]
            )
        )

    chunks = common.table_chunks(refs.tables, row.first_page + row.num_pages)
    jax.lax.fori_loop(0, chunks, one, None)


def _row_copies(kernel: _Kernel, i: Int32[Array, ""], row: _Row) -> list[Any]:
    """DMAs of what the i-th decode row needs beside its pages."""
    refs, slot = kernel.refs, i & (_ROW_SLOTS - 1)
    token, sem = refs.cu_q_lens[row.id], refs.row_sems.at[slot]
    return [
        pltpu.make_async_copy(refs.q.at[token], refs.q_buffer.at[slot], sem),
        pltpu.make_async_copy(refs.kv_new.at[row.id], refs.new_buffer.at[slot], sem),
    ]


def _fetch(kernel: _Kernel, cursor: _Cursor) -> _Cursor:
    """Starts the DMAs of a block, and those of its row if it is the first; moves on."""
    refs, size = kernel.refs, kernel.layout.page_size
    i, block, buffer = cursor
    is_there = i < kernel.num_rows
    row = kernel.row(jnp.minimum(i, kernel.num_rows - 1))

    @pl.when(is_there & (block == 0))
    def _() -> None:
        _table_copies(kernel, i, lambda copy: copy.wait())
        for copy in _row_copies(kernel, i, row):
            copy.start()

        @pl.when(i + 1 < kernel.num_rows)
        def _() -> None:
            _table_copies(kernel, i + 1, lambda copy: copy.start())

    @pl.when(is_there)
    def _() -> None:
        num_pages = kernel.pages_in_block(row, block)
        first = row.first_page + block * kernel.sizes.pages_per_block
        layer, table = refs.layer[0], refs.table.at[i & 1]

        def one(p: Int32[Array, ""], _: None) -> None:
            page = common.page_id(table, first + p)
            place = pl.ds(pl.multiple_of(p * size, size), size)
            for cache, to, sem in (
                (refs.k_cache, refs.k_buffer, refs.block_sems.at[buffer, 0]),
                (refs.v_cache, refs.v_buffer, refs.block_sems.at[buffer, 1]),
            ):
                common.copy_page(cache, layer, page, to.at[buffer, place], sem).start()

        unroll = min(_UNROLL, kernel.sizes.pages_per_block)

        def some(turn: Int32[Array, ""], _: None) -> None:
            for p in range(unroll):
                one(turn * unroll + p, None)

        turns = common.divide(num_pages, unroll)
        jax.lax.fori_loop(0, turns, some, None)
        jax.lax.fori_loop(turns * unroll, num_pages, one, None)
        refs.last_page[buffer] = common.page_id(table, first + num_pages - 1)

    is_last = block + 1 >= row.num_blocks
    return _Cursor(
        jnp.where(is_last, i + 1, i),
        jnp.where(is_last, 0, block + 1),
        _next_buffer(kernel, buffer),
    )


def _next_buffer(kernel: _Kernel, buffer: Int32[Array, ""]) -> Int32[Array, ""]:
    return jnp.where(buffer == kernel.sizes.num_buffers - 1, 0, buffer + 1)


def _wait_block(kernel: _Kernel, buffer: Int32[Array, ""], num_pages: Int32[Array, ""]) -> None:
    refs, size = kernel.refs, kernel.layout.page_size

    def wait(part: Any) -> None:
        for i, to in enumerate((refs.k_buffer, refs.v_buffer)):
            place = to.at[buffer, part]
            pltpu.make_async_copy(place, place, refs.block_sems.at[buffer, i]).wait()

    def one(p: Int32[Array, ""], _: None) -> None:
        wait(pl.ds(0, size))

    is_full = num_pages == kernel.sizes.pages_per_block

    @pl.when(is_full)
    def _() -> None:
        wait(pl.ds(0, kernel.sizes.pages_per_block * size))

    @pl.when(~is_full)
    def _() -> None:
        jax.lax.fori_loop(0, num_pages, one, None)


def _attend_row(
    kernel: _Kernel, i: Int32[Array, ""], state: tuple[_Cursor, Int32[Array, ""]]
) -> tuple[_Cursor, Int32[Array, ""]]:
    """The i-th decode row; `state` is the block to fetch next and the buffer to compute with."""
    refs, row = kernel.refs, kernel.row(i)
    for copy in _row_copies(kernel, i, row):
        copy.wait()
    slot = i & (_OUT_SLOTS - 1)

    @pl.when(i >= _OUT_SLOTS)
    def _() -> None:
        _wait_results(kernel, slot)

    _start_softmax(kernel, i)

    def one(
        block: Int32[Array, ""], state: tuple[_Cursor, Int32[Array, ""]]
    ) -> tuple[_Cursor, Int32[Array, ""]]:
        cursor, buffer = state
        num_pages = kernel.pages_in_block(row, block)
        cursor = _fetch(kernel, cursor)
        _wait_block(kernel, buffer, num_pages)
        start = (row.first_page + block * kernel.sizes.pages_per_block) * kernel.layout.page_size

        @pl.when(block == row.num_blocks - 1)
        def _() -> None:
            _write_token(kernel, i, row.kv_len - 1 - start, num_pages, buffer)

        chunk = kernel.sizes.chunk
        is_short = row.kv_len - start <= chunk

        @pl.when(is_short)
        def _() -> None:
            _attend_block(kernel, row, start, buffer, chunk)

        @pl.when(~is_short)
        def _() -> None:
            _attend_block(kernel, row, start, buffer, refs.k_buffer.shape[1])

        return cursor, _next_buffer(kernel, buffer)

    state = jax.lax.fori_loop(0, row.num_blocks, one, state)
    refs.out_buffer[slot] = _result(kernel).astype(refs.out_buffer.dtype)
    token = refs.cu_q_lens[row.id]
    pltpu.make_async_copy(
        refs.out_buffer.at[slot], refs.out.at[token], refs.out_sems.at[slot]
    ).start()
    return state


def _wait_results(kernel: _Kernel, slot: int | Int32[Array, ""]) -> None:
    """Until a row's output and its token's K and V have left their buffers."""
    refs = kernel.refs
    written = refs.write_buffer.at[slot, :, pl.ds(0, common.write_group(kernel.layout))]
    for place, sem in ((refs.out_buffer.at[slot], refs.out_sems), (written, refs.write_sems)):
        pltpu.make_async_copy(place, place, sem.at[slot]).wait()


def _start_softmax(kernel: _Kernel, i: Int32[Array, ""]) -> None:
    """Spreads the queries of the i-th decode row over their KV heads' lanes; nothing seen yet."""
    refs, layout = kernel.refs, kernel.layout
    q = refs.q_buffer[i & (_ROW_SLOTS - 1)].astype(jnp.float32)
    num_heads, head_dim = q.shape
    padded = layout.padded_head_dim
    if padded > head_dim:
        q = jnp.pad(q, ((0, 0), (0, padded - head_dim)))
    if padded < LANES:
        q = jnp.concatenate([q] * (LANES // padded), axis=1)
    for at in range(0, layout.token_width, LANES):
        shape = (num_heads, LANES)
        lane_head = (at + jax.lax.broadcasted_iota(jnp.int32, shape, 1)) // padded
        is_own = lane_head == common.kv_head_of_rows(num_heads, layout.num_kv_heads, shape)
        part = q[:, at % q.shape[1] :][:, :LANES]
        refs.wide_q[:, at : at + LANES] = jnp.where(is_own, part, 0).astype(refs.wide_q.dtype)
    refs.acc[...] = jnp.zeros_like(refs.acc)
    if kernel.call.has_sinks:
        refs.peak[...] = refs.heads[2]
        refs.total[...] = jnp.full_like(refs.total, 1 / LANES)
    else:
        refs.peak[...] = jnp.full_like(refs.peak, MASKED)
        refs.total[...] = jnp.zeros_like(refs.total)


def _write_token(
    kernel: _Kernel,
    i: Int32[Array, ""],
    token: Int32[Array, ""],
    num_pages: Int32[Array, ""],
    buffer: Int32[Array, ""],
) -> None:
    """Puts the new token in its place, `token` in the row's last block, there and in the cache.

    Values past it, which may be anything, become zero in the block.
    """
    refs, layout = kernel.refs, kernel.layout
    size, rows = layout.page_size, _tile_rows(layout)
    slot = i & (_OUT_SLOTS - 1)
    start = pl.multiple_of(common.divide(token, rows) * rows, rows)
    tile = pl.ds(start, rows)
    new = refs.new_buffer[i & (_ROW_SLOTS - 1)]
    is_new, is_later = _word_masks(layout, token - start)

    for kind, block in enumerate((refs.k_buffer, refs.v_buffer)):
        words = pltpu.bitcast(block[buffer, tile, :], jnp.int32)
        words = (words & ~is_new) | (new[kind : kind + 1] & is_new)
        refs.write_buffer[slot, kind] = pltpu.bitcast(words, layout.storage_dtype)
        if kind == 1:
            words &= ~is_later
        block[buffer, tile, :] = pltpu.bitcast(words, layout.storage_dtype)

    def clear(i: Int32[Array, ""], _: None) -> None:
        at = pl.ds(pl.multiple_of(i * rows, rows), rows)
        refs.v_buffer[buffer, at, :] = jnp.zeros((rows, layout.token_width), layout.storage_dtype)

    first, last = common.divide(start, rows) + 1, common.divide(num_pages * size + (rows - 1), rows)
    jax.lax.fori_loop(first, last, clear, None)

    group = common.write_group(layout)
    begin = pl.multiple_of(common.divide(token, group) * group, group)
    in_tile = pl.ds(pl.multiple_of(begin - start, group), group)
    in_page = pl.ds(pl.multiple_of(begin - (num_pages - 1) * size, group), group)
    for kind, cache in enumerate((refs.k_cache, refs.v_cache)):
        pltpu.make_async_copy(
            refs.write_buffer.at[slot, kind, in_tile],
            cache.at[refs.layer[0], refs.last_page[buffer], in_page],
            refs.write_sems.at[slot],
        ).start()


def _tile_rows(layout: KVCacheLayout) -> int:
    """Tokens in a tile of a buffer: what is reached in VMEM at a place not known in advance."""
    return 8 * 4 // layout.storage_dtype.itemsize


def _word_masks(
    layout: KVCacheLayout, token: Int32[Array, ""]
) -> tuple[Int32[Array, "8 X"], Int32[Array, "8 X"]]:
    """The bits, in a tile's 32-bit words of several tokens each, of one token and of later ones."""
    per_word = 4 // layout.storage_dtype.itemsize
    bits = 32 // per_word
    word = jax.lax.broadcasted_iota(jnp.int32, (8, layout.token_width), 0)
    is_new, is_later = jnp.zeros_like(word), jnp.zeros_like(word)
    for i in range(per_word):
        mask = np.uint32((1 << bits) - 1 << (i * bits)).astype(np.int32)
        is_new |= jnp.where(word * per_word + i == token, mask, 0)
        is_later |= jnp.where(word * per_word + i > token, mask, 0)
    return is_new, is_later


def _attend_block(
    kernel: _Kernel, row: _Row, start: Int32[Array, ""], buffer: Int32[Array, ""], tokens: int
) -> None:
    """One turn of the running softmax, over the `tokens` from `start` on, which a buffer holds."""
    refs, call, layout = kernel.refs, kernel.call, kernel.layout
    chunk = kernel.sizes.chunk
    dtype = common.compute_dtype(call)
    dot = functools.partial(
        jax.lax.dot_general,
        precision=common.precision(dtype),
        preferred_element_type=jnp.float32,
    )
    factor = refs.heads[0, :, :1]

    scores = []
    for at in range(0, tokens, chunk):
        keys = common.dequantize(refs.k_buffer[buffer, at : at + chunk, :], layout, dtype)
        part = dot(refs.wide_q[...], keys, (((1,), (1,)), ((), ()))) * factor
        if call.soft_cap is not None:
            part = call.soft_cap * jnp.tanh(part / call.soft_cap)
        position = start + at + jax.lax.broadcasted_iota(jnp.int32, part.shape, 1)
        is_seen = position < row.kv_len
        if call.sliding_window is not None:
            is_seen &= position >= row.kv_len - call.sliding_window
        scores.append(jnp.where(is_seen, part, MASKED))

    peak = refs.peak[:, :1]
    new_peak = peak
    for part in scores:
        new_peak = jnp.maximum(new_peak, jnp.max(part, axis=1, keepdims=True))
    faded = jnp.exp(peak - new_peak)
    total, acc = refs.total[...] * faded, refs.acc[...] * faded
    for part, at in zip(scores, range(0, tokens, chunk), strict=True):
        weights = jnp.exp(part - new_peak)
        for lanes in range(0, chunk, LANES):
            total += weights[:, lanes : lanes + LANES]
        values = common.dequantize(refs.v_buffer[buffer, at : at + chunk, :], layout, dtype)
        acc += dot(weights.astype(dtype), values, (((1,), (0,)), ((), ())))
    refs.peak[...] = jnp.broadcast_to(new_peak, refs.peak.shape)
    refs.total[...] = total
    refs.acc[...] = acc


def _result(kernel: _Kernel) -> Float32[Array, "N H"]:
    """The finished output of the row: of each query head, the part of its own KV head's values."""
    refs, layout = kernel.refs, kernel.layout
    num_heads = refs.acc.shape[0]
    padded, width = layout.padded_head_dim, max(layout.padded_head_dim, LANES)
    heads_per_tile = width // padded
    shape = (num_heads, width)
    kv_head = common.kv_head_of_rows(num_heads, layout.num_kv_heads, shape)
    own = jnp.zeros(shape, jnp.float32)
    for tile in range(layout.token_width // width):
        is_own = kv_head // heads_per_tile == tile
        own = jnp.where(is_own, refs.acc[:, tile * width : (tile + 1) * width], own)
    out = own[:, : layout.head_dim]
    for i in range(1, heads_per_tile):
        is_own = kv_head[:, : layout.head_dim] % heads_per_tile == i
        out = jnp.where(is_own, own[:, i * padded :][:, : layout.head_dim], out)
    out = out / jnp.sum(refs.total[...], axis=1, keepdims=True)
    return out * refs.heads[1, :, :1] if kernel.call.has_scales else out
