"""Rows of one new token on a TPU: one pass over each row's live pages, the KV write fused into it.

All KV heads of a token take part in one product, as they lie side by side in the cache: a query is
zero but for the lanes of its own KV head. That costs more multiplications than there must be, but
reading the pages is what takes the time, and so they are read once, as they lie.
"""

import functools
import math
from typing import Any

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
from pallas_kernels.ragged_paged_attention.tpu_decode_state import (
    OUT_SLOTS,
    ROW_SLOTS,
    BlockSizes,
    Cursor,
    Kernel,
    Pending,
    Refs,
    Row,
)

_LOG2_E = math.log2(math.e)  # the softmax is to base 2
_BLOCK_S = 1.3e-6  # seconds that the DMAs of a block take
_SHORT = LANES  # tokens of a block that is cheaper
_UNROLL = 8  # pages in one turn of the loop that starts DMAs, rows in one that looks at rows


def block_sizes(call: AttentionCall) -> BlockSizes:
    """Tuned ones, else blocks that take the memory `_BLOCK_S`, as far as VMEM has room."""
    tuned = call.tuned_sizes("tpu_decode")
    if tuned is not None:
        return BlockSizes(**tuned)
    layout, chip, num_buffers = call.layout, call.chip, 4
    token_bytes = 2 * layout.token_width * layout.storage_dtype.itemsize
    room = vmem_limit(chip) // 2 // (num_buffers * token_bytes)
    tokens = min(int(_BLOCK_S * chip.hbm_bytes_per_s / chip.num_cores) // token_bytes, 2048, room)
    size = layout.page_size
    for chunk in (2 * LANES, LANES):  # a block is some chunks and some pages
        unit = math.lcm(chunk, size)
        if tokens >= unit:
            return BlockSizes(tokens // unit * unit // size, num_buffers, chunk)
    return BlockSizes(math.lcm(LANES, size) // size, num_buffers, LANES)


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
    if tpu.sinks is not None:
        others[1] = tpu.sinks * _LOG2_E
    factor = _LOG2_E if call.soft_cap is None else 1 / call.soft_cap
    heads = jnp.stack([tpu.score_factors * factor, *others])
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
                pltpu.VMEM((ROW_SLOTS, num_heads, head_dim), tpu.q.dtype),
                pltpu.VMEM((ROW_SLOTS, 2, width), jnp.int32),
                pltpu.VMEM((OUT_SLOTS, num_heads, head_dim), out.dtype),
                pltpu.VMEM((OUT_SLOTS, 2, _tile_rows(layout), width), layout.storage_dtype),
                pltpu.VMEM((num_heads, width), common.compute_dtype(call)),
                pltpu.VMEM((num_heads, width), jnp.float32),
                pltpu.VMEM((num_heads, tokens), common.compute_dtype(call)),
                pltpu.VMEM((num_heads, LANES), jnp.float32),
                pltpu.VMEM((num_heads, LANES), jnp.float32),
                pltpu.VMEM((2, num_heads, LANES), jnp.float32),
                pltpu.SMEM((2, *table), jnp.int32),
                pltpu.SMEM((num_rows,), jnp.int32),
                pltpu.SMEM((sizes.num_buffers,), jnp.int32),
                dma((sizes.num_buffers, 2)),
                *(dma((slots,)) for slots in (2, ROW_SLOTS, OUT_SLOTS, OUT_SLOTS)),
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
    refs = Refs(*args_ref[:num_inputs], *args_ref[num_inputs + 3 :])
    core = pl.program_id(0)
    num_decode = _find_rows(refs)
    mine = common.divide(num_decode - core + (call.chip.num_cores - 1), call.chip.num_cores)
    kernel = Kernel(call, sizes, refs, core, mine)

    # Where weights are zero, values must be finite: they are those of some row, or these zeros.
    def clear(i: Int32[Array, ""], _: None) -> None:
        at = pl.ds(pl.multiple_of(i * LANES, LANES), LANES)
        for buffer in range(sizes.num_buffers):
            shape = (LANES, refs.v_buffer.shape[2])
            refs.v_buffer[buffer, at, :] = jnp.zeros(shape, refs.v_buffer.dtype)

    jax.lax.fori_loop(0, refs.v_buffer.shape[1] // LANES, clear, None)

    for ref in (refs.weights, refs.fade, refs.acc):
        ref[...] = jnp.zeros(ref.shape, ref.dtype)

    @pl.when(mine > 0)
    def _() -> None:
        zero = jnp.int32(0)
        _table_copies(kernel, zero, lambda copy: copy.start())
        first = fetch = Cursor(zero, zero, zero)
        for _ahead in range(sizes.num_buffers - 2):
            fetch = _fetch(kernel, fetch)
        pending = Pending(zero, jnp.int32(sizes.num_buffers - 1), zero, zero)
        state = jax.lax.while_loop(
            lambda state: state[1].row < mine,
            functools.partial(_turn, kernel),
            (fetch, first, pending),
        )
        pending = state[2]
        _add_values(kernel, pending.buffer, refs.weights.shape[1])
        _finish_row(kernel, pending.row)
        for slot in range(OUT_SLOTS):

            @pl.when(mine > slot)
            def _(slot: int = slot) -> None:
                _wait_results(kernel, slot)


def _find_rows(refs: Refs) -> Int32[Array, ""]:
    """Lists the rows of one new token in `refs.rows`; returns how many there are."""

    num_rows, max_rows = refs.num_rows[0], refs.rows.shape[0]

    def look(r: Int32[Array, ""], count: Int32[Array, ""]) -> Int32[Array, ""]:
        refs.rows[count] = r
        is_one = refs.cu_q_lens[r + 1] - refs.cu_q_lens[r] == 1
        return count + (is_one & (r < num_rows)).astype(jnp.int32)

    unroll = math.gcd(max_rows, _UNROLL)
    return jax.lax.fori_loop(0, max_rows, look, jnp.int32(0), unroll=unroll)


def _table_copies(kernel: Kernel, i: Int32[Array, ""], do: Any) -> None:
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


def _row_copies(kernel: Kernel, i: Int32[Array, ""], row: Row) -> list[Any]:
    """DMAs of what the i-th decode row needs beside its pages."""
    refs, slot = kernel.refs, i & (ROW_SLOTS - 1)
    token, sem = refs.cu_q_lens[row.id], refs.row_sems.at[slot]
    return [
        pltpu.make_async_copy(refs.q.at[token], refs.q_buffer.at[slot], sem),
        pltpu.make_async_copy(refs.kv_new.at[row.id], refs.new_buffer.at[slot], sem),
    ]


def _fetch(kernel: Kernel, cursor: Cursor) -> Cursor:
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

    return _next(kernel, cursor, row)


def _next(kernel: Kernel, cursor: Cursor, row: Row) -> Cursor:
    """The block after one of `row`."""
    is_last = cursor.block + 1 >= row.num_blocks
    return Cursor(
        jnp.where(is_last, cursor.row + 1, cursor.row),
        jnp.where(is_last, 0, cursor.block + 1),
        jnp.where(cursor.buffer == kernel.sizes.num_buffers - 1, 0, cursor.buffer + 1),
    )


def _wait_block(kernel: Kernel, buffer: Int32[Array, ""], num_pages: Int32[Array, ""]) -> None:
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


def _turn(kernel: Kernel, state: tuple[Cursor, Cursor, Pending]) -> tuple[Cursor, Cursor, Pending]:
    """Starts one block's DMAs, weighs another's keys and adds up the values of the one before that.

    The last two do not wait for each other, so the matrix units work on one while the vector units
    work on the other.
    """
    fetch, here, pending = state
    i, block, buffer = here
    row = kernel.row(i)
    fetch = _fetch(kernel, fetch)
    num_pages = kernel.pages_in_block(row, block)
    start = (row.first_page + block * kernel.sizes.pages_per_block) * kernel.layout.page_size
    is_last = block == row.num_blocks - 1
    is_short = (row.kv_len - start <= _SHORT).astype(jnp.int32)

    @pl.when(block == 0)
    def _() -> None:
        _start_row(kernel, i, row)

    _wait_block(kernel, buffer, num_pages)

    @pl.when(is_last)
    def _() -> None:
        _write_token(kernel, i, row.kv_len - 1 - start, num_pages, buffer)

    def attend(tokens: int) -> None:
        # In this order the matrix units have work while the scores become weights.
        scores = _scores(kernel, buffer, row, start, tokens)
        _add_values(kernel, pending.buffer, tokens)
        _set_weights(kernel, here, scores)

    are_short = (is_short & pending.is_short) == 1

    @pl.when(are_short)
    def _() -> None:
        attend(_SHORT)
        _finish_row(kernel, pending.row)

    @pl.when(~are_short)
    def _() -> None:
        attend(kernel.refs.weights.shape[1])

        @pl.when(pending.is_last == 1)
        def _() -> None:
            _finish_row(kernel, pending.row)

    pending = Pending(i, buffer, is_last.astype(jnp.int32), is_short)
    return fetch, _next(kernel, here, row), pending


def _finish_row(kernel: Kernel, i: Int32[Array, ""]) -> None:
    """Sends the output of the i-th decode row on its way."""
    refs, slot = kernel.refs, i & (OUT_SLOTS - 1)
    refs.out_buffer[slot] = _result(kernel, i).astype(refs.out_buffer.dtype)
    token = refs.cu_q_lens[kernel.row(i).id]
    pltpu.make_async_copy(
        refs.out_buffer.at[slot], refs.out.at[token], refs.out_sems.at[slot]
    ).start()


def _wait_results(kernel: Kernel, slot: int | Int32[Array, ""]) -> None:
    """Until a row's output and its token's K and V have left their buffers."""
    refs = kernel.refs
    written = refs.write_buffer.at[slot, :, pl.ds(0, common.write_group(kernel.layout))]
    for place, sem in ((refs.out_buffer.at[slot], refs.out_sems), (written, refs.write_sems)):
        pltpu.make_async_copy(place, place, sem.at[slot]).wait()


def _start_row(kernel: Kernel, i: Int32[Array, ""], row: Row) -> None:
    """Spreads the queries of the i-th decode row over their KV heads' lanes; nothing seen yet."""
    refs, layout = kernel.refs, kernel.layout
    for copy in _row_copies(kernel, i, row):
        copy.wait()

    @pl.when(i >= OUT_SLOTS)
    def _() -> None:
        _wait_results(kernel, i & (OUT_SLOTS - 1))

    q = refs.q_buffer[i & (ROW_SLOTS - 1)].astype(jnp.float32)
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
    has_sinks = kernel.call.has_sinks
    refs.peak[...] = refs.heads[2] if has_sinks else jnp.full(refs.peak.shape, MASKED)
    refs.total[i & 1] = jnp.full(refs.peak.shape, 1 / LANES if has_sinks else 0.0)


def _write_token(
    kernel: Kernel,
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
    slot = i & (OUT_SLOTS - 1)
    start = pl.multiple_of(common.divide(token, rows) * rows, rows)
    tile = pl.ds(start, rows)
    new = refs.new_buffer[i & (ROW_SLOTS - 1)]
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


def _scores(
    kernel: Kernel, buffer: Int32[Array, ""], row: Row, start: Int32[Array, ""], tokens: int
) -> list[Float32[Array, "N c"]]:
    """Scores, to base 2, of the first `tokens` of a block that begins at `start`, by chunk."""
    refs, call = kernel.refs, kernel.call
    scores = []
    for at, end in _chunks(kernel, tokens):
        keys = _elements(kernel, refs.k_buffer, buffer, at, end)
        part = _dot(refs.wide_q[...], keys, rhs_axis=1) * refs.heads[0, :, :1]
        if call.soft_cap is not None:
            part = jnp.tanh(part) * (call.soft_cap * _LOG2_E)
        position = start + at + jax.lax.broadcasted_iota(jnp.int32, part.shape, 1)
        is_seen = position < row.kv_len
        if call.sliding_window is not None:
            is_seen &= position >= row.kv_len - call.sliding_window
        scores.append(jnp.where(is_seen, part, MASKED))
    return scores


def _set_weights(kernel: Kernel, here: Cursor, scores: list[Float32[Array, "N c"]]) -> None:
    """Makes scores of the first tokens of a block its weights, zero for the other tokens."""
    refs = kernel.refs
    old_peak = refs.peak[...]
    peaks = functools.reduce(jnp.maximum, [old_peak, *_lane_tiles(scores)])
    peak = jnp.max(peaks, axis=1, keepdims=True)
    fade = jnp.exp2(old_peak - peak)
    slot, end = here.row & 1, 0
    total = refs.total[slot] * fade
    for part in scores:
        weights = jnp.exp2(part - peak)
        total = functools.reduce(jnp.add, _lane_tiles([weights]), total)
        at, end = end, end + part.shape[1]
        refs.weights[:, at:end] = weights.astype(refs.weights.dtype)
    if end < refs.weights.shape[1]:
        shape = (fade.shape[0], refs.weights.shape[1] - end)
        refs.weights[:, end:] = jnp.zeros(shape, refs.weights.dtype)
    refs.peak[...] = jnp.broadcast_to(peak, fade.shape)
    refs.fade[...] = jnp.where(here.block == 0, 0, fade)
    refs.total[slot] = total


def _add_values(kernel: Kernel, buffer: Int32[Array, ""], tokens: int) -> None:
    """Multiplies the weights with the first `tokens` values of their block, and adds them up."""
    refs = kernel.refs
    acc = refs.acc[...] * refs.fade[:, :1]
    for at, end in _chunks(kernel, tokens):
        values = _elements(kernel, refs.v_buffer, buffer, at, end)
        acc += _dot(refs.weights[:, at:end], values, rhs_axis=0)
    refs.acc[...] = acc


def _chunks(kernel: Kernel, tokens: int) -> list[tuple[int, int]]:
    chunk = min(kernel.sizes.chunk, tokens)
    return [(at, at + chunk) for at in range(0, tokens, chunk)]


def _elements(
    kernel: Kernel, block_ref: Any, buffer: Int32[Array, ""], at: int, end: int
) -> Float[Array, "c X"]:
    """One chunk of a block, ready to be multiplied."""
    elements = block_ref[buffer, at:end, :]
    return common.dequantize(elements, kernel.layout, common.compute_dtype(kernel.call))


def _dot(
    lhs: Float[Array, "N c"], rhs: Float[Array, "a b"], rhs_axis: int
) -> Float32[Array, "N d"]:
    return jax.lax.dot_general(
        lhs,
        rhs,
        (((1,), (rhs_axis,)), ((), ())),
        precision=common.precision(lhs.dtype),
        preferred_element_type=jnp.float32,
    )


def _lane_tiles(parts: list[Float32[Array, "N c"]]) -> list[Float32[Array, "N 128"]]:
    return [p[:, at : at + LANES] for p in parts for at in range(0, p.shape[1], LANES)]


def _result(kernel: Kernel, i: Int32[Array, ""]) -> Float32[Array, "N H"]:
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
    for place in range(1, heads_per_tile):
        is_own = kv_head[:, : layout.head_dim] % heads_per_tile == place
        out = jnp.where(is_own, own[:, place * padded :][:, : layout.head_dim], out)
    out = out / jnp.sum(refs.total[i & 1], axis=1, keepdims=True)
    return out * refs.heads[1, :, :1] if kernel.call.has_scales else out
