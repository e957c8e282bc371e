"""Prefill attention on Hopper: TMA, wgmma and a running softmax, as FlashAttention-3 arranges them.

A persistent grid of one thread block a multiprocessor walks over work items (a tile of queries and
a KV head). Of its three warpgroups, two consume: each has 64 of the tile's 128 matrix rows, and
they take turns, so that one multiplies while the other has its softmax. The third produces: it
brings the pages of the context by TMA into a ring of blocks of K and V, and puts 8-bit ones into
the dtype of the queries on the way.

Sizes. 128 matrix rows and blocks of 128 tokens are what registers hold (64 x 128 float32 scores and
as many of the output are 128 of a consumer's 240). A block is 2 * 2 * 128 * 128 * 128 multiply-adds
with a head of 128, some 1.1 us of an H100's multiprocessor, which is also about what a read of
device memory takes: with two stages one block is in flight while one is computed. Heads above 128
have blocks of 64, as the output alone takes 128 registers and more.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Float32, Int32, Shaped

from pallas_kernels.ragged_paged_attention import gpu_prefill_common as common
from pallas_kernels.ragged_paged_attention.gpu_call import GpuCall
from pallas_kernels.ragged_paged_attention.gpu_prefill_common import Item, Problem, Softmax
from pallas_kernels.ragged_paged_attention.gpu_tiles import Tiles, Tiling, tiling_of
from pallas_kernels.ragged_paged_attention.layout import QUANTIZED_DTYPES
from pallas_kernels.ragged_paged_attention.specs import AttentionCall

_TILE_ROWS = 128
_WARPGROUP_ROWS = 64
_NUM_CONSUMERS = _TILE_ROWS // _WARPGROUP_ROWS
_PRODUCER = _NUM_CONSUMERS
_PIECE_ROWS = 32  # one tile of 8 a warp
_RESERVED_BYTES = 2048  # barriers, what CUDA keeps


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Tokens of context in a block, and blocks of K and V in the ring."""

    context: int
    num_stages: int


def block_sizes(call: AttentionCall) -> BlockSizes:
    """Blocks of 128 tokens, of 64 for heads above 128, and as many stages up to 3 as fit."""
    layout = call.layout
    context = 128 if layout.head_dim <= 128 else 64
    block_bytes = context * layout.head_dim * 2
    free = call.chip.core_memory_bytes - _RESERVED_BYTES - _TILE_ROWS * layout.head_dim * 2
    if layout.dtype in QUANTIZED_DTYPES:
        free -= block_bytes  # K and V as stored, a byte an element
    return BlockSizes(context, min(3, free // (2 * block_bytes)))


def tile_rows(call: AttentionCall) -> int:
    """Matrix rows of a tile."""
    del call  # for every call as many
    return _TILE_ROWS


def unsupported_reason(call: AttentionCall) -> str | None:
    """Why this kernel cannot serve `call`, or None when it can."""
    layout = call.layout
    if call.chip.capability != (9, 0):
        return f"wgmma is for compute capability 9.0, {call.chip.name} has {call.chip.capability}"
    if call.q_dtype not in (jnp.bfloat16, jnp.float16):
        return f"multiplies bfloat16 and float16, not {call.q_dtype.name} queries"
    if layout.dtype != call.q_dtype and layout.dtype not in QUANTIZED_DTYPES:
        return f"{call.q_dtype.name} queries do not meet a {layout.dtype.name} cache"
    if layout.page_size % 8:
        return f"copies 8 tokens at once, pages are of {layout.page_size}"
    if layout.head_dim % 16 or layout.head_dim > 256:
        return f"head dims are multiples of 16 up to 256, not {layout.head_dim}"
    if tiling_of(call, _TILE_ROWS) is None:
        return f"{call.num_heads} query heads over {layout.num_kv_heads} KV heads are too many"
    return None


class _Static(NamedTuple):
    """What the kernel is compiled for."""

    problem: Problem
    num_stages: int
    num_pages: int

    @property
    def call(self) -> AttentionCall:
        return self.problem.call

    @property
    def num_copies(self) -> int:
        """Copies that bring a block."""
        return self.problem.context // self.problem.unit

    @property
    def is_quantized(self) -> bool:
        return self.call.layout.dtype in QUANTIZED_DTYPES

    @property
    def tile_columns(self) -> int:
        """Columns of a tile of shared memory: as many 16-bit ones as can be swizzled."""
        return plgpu.find_swizzle(self.call.layout.head_dim * 16) // 2


def attend(
    call: GpuCall, tiling: Tiling, tiles: Tiles, queries: Float[Array, "K Q H"]
) -> Float[Array, "W K M H"]:
    """Attention of live tiles, M = _TILE_ROWS matrix rows each; anything in dead tiles and rows."""
    layout, sizes = call.call.layout, block_sizes(call.call)
    num_blocks = min(call.call.chip.num_cores, tiles.row.shape[0] * layout.num_kv_heads)
    problem = Problem(call.call, tiling, call.scale, sizes.context, num_blocks)
    static = _Static(problem, sizes.num_stages, layout.num_pages(call.kv_cache))
    inputs = common.inputs_of(call, tiling, tiles, queries)

    def body(*refs: Any, **scratch: Any) -> None:
        _run(static, {**dict(zip((*inputs, "out"), refs, strict=True)), **scratch})

    return plgpu.kernel(
        body,
        out_type=common.output_of(call, tiling, tiles),
        scratch_types=_scratch(static, queries.dtype),
        grid=(num_blocks,),
        grid_names=("block",),
        num_threads=_NUM_CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,  # no row is more than one warp's
        ),
        kernel_name="ragged_paged_prefill",
    )(*inputs.values())


def _scratch(static: _Static, dtype: np.dtype) -> dict[str, Any]:
    """Shared memory and barriers. A copy, and `barrier_arrive`, are one arrival."""
    layout, columns, num_stages = static.call.layout, static.tile_columns, static.num_stages
    ring = (num_stages, static.problem.context, layout.head_dim)
    num_arrivals = 1 if static.is_quantized else static.num_copies
    free = plgpu.Barrier(num_arrivals=_NUM_CONSUMERS, num_barriers=num_stages)
    scratch = {
        # A consumer's queries, and then its output.
        "q_smem": _tiled((_NUM_CONSUMERS, _WARPGROUP_ROWS, layout.head_dim), dtype, columns),
        "k_smem": _tiled(ring, dtype, columns),
        "v_smem": _tiled(ring, dtype, columns),
        "q_ready": plgpu.Barrier(num_barriers=_NUM_CONSUMERS),
        "k_ready": plgpu.Barrier(num_arrivals=num_arrivals, num_barriers=num_stages),
        # The last is for the values at the end of a context, which the producer itself awaits.
        "v_ready": plgpu.Barrier(num_arrivals=num_arrivals, num_barriers=num_stages + 1),
        "k_free": free,
        "v_free": free,
        "turn": plgpu.Barrier(num_barriers=_NUM_CONSUMERS),
    }
    if static.is_quantized:
        scratch["k_stored"] = _tiled(ring[1:], layout.storage_dtype, columns)
        scratch["v_stored"] = _tiled(ring[1:], layout.storage_dtype, columns)
        scratch["k_arrived"] = plgpu.Barrier(num_arrivals=static.num_copies)
        scratch["v_arrived"] = plgpu.Barrier(num_arrivals=static.num_copies)
    return scratch


def _tiled(shape: tuple[int, ...], dtype: np.dtype, columns: int) -> Any:
    """Shared memory in tiles of 8 rows and `columns`, as TMA writes it and wgmma reads it."""
    width = columns * dtype.itemsize
    if width < 32:  # as it lies: none of what wgmma reads
        return plgpu.SMEM(shape, dtype)
    transforms = (
        plgpu.TilingTransform((8, columns)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(width),  # pyright: ignore[reportAbstractUsage]
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _run(static: _Static, refs: dict[str, Any]) -> None:
    """One thread block: every warpgroup walks over the same items."""
    warpgroup = lax.axis_index("warpgroup")
    consumer_registers, producer_registers = _registers(static)

    @pl.when(warpgroup < _NUM_CONSUMERS)
    def _consumer() -> None:
        plgpu.set_max_registers(consumer_registers, action="increase")
        pl.when(warpgroup == 1)(lambda: plgpu.barrier_arrive(refs["turn"].at[0]))
        common.for_items(static.problem, refs, functools.partial(_consume, static, refs, warpgroup))
        pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(refs["turn"].at[0]))

    @pl.when(warpgroup == _PRODUCER)
    def _producer() -> None:
        plgpu.set_max_registers(producer_registers, action="decrease")
        produce = _produce_quantized if static.is_quantized else _produce
        num_steps = common.for_items(static.problem, refs, functools.partial(produce, static, refs))
        for i in range(static.num_stages):  # until all that was brought is consumed
            _await_free(static, refs["k_free"], num_steps + i)
            _await_free(static, refs["v_free"], num_steps + i)


def _registers(static: _Static) -> tuple[int, int]:
    """Of a consumer's thread and of the producer's; at most 512 for one of each warpgroup.

    Those with which ptxas spills nothing, and with some to spare on both sides: the output of a
    long head takes more of a consumer's; the addresses of many small pages, of the producer's.
    """
    return (216, 80) if static.call.layout.head_dim > 128 else (200, 112)


def _slot(static: _Static, step: Int32[Array, ""]) -> Int32[Array, ""]:
    return lax.rem(step, jnp.int32(static.num_stages))


class _Block(NamedTuple):
    """A block of an item's context: its tokens that are live, and where the parts of it lie."""

    start: Int32[Array, ""]  # position of the first token
    num_live: Int32[Array, ""]  # of its tokens are before the item's end
    first_rows: list[Int32[Array, ""]]  # of each copy, in the cache as a matrix [L*P*S, K*H]


def _find(static: _Static, refs: dict[str, Any], item: Item, i: Int32[Array, ""]) -> _Block:
    """The i-th block of an item."""
    page_size, start = static.call.layout.page_size, item.first + i * static.problem.context
    first_page = refs["layer"][0] * static.num_pages
    first_rows = []
    for offset in range(0, static.problem.context, static.problem.unit):
        position = jnp.minimum(start + offset, item.end - 1)  # some live page, where it has none
        index = lax.div(position, jnp.int32(page_size))
        page = first_page + refs["pages"][item.row, index]
        first_rows.append(page * page_size + (start + offset - index * page_size))
    return _Block(start, item.end - start, first_rows)


def _load(
    static: _Static,
    refs: dict[str, Any],
    item: Item,
    block: _Block,
    name: str,
    destination: Any,
    barrier: Any,
) -> None:
    """Starts the copies of a block of "keys" or "values"; dead parts are not read.

    destination: [context, H] in shared memory. barrier: gets static.num_copies arrivals.
    """
    head_dim, unit = static.call.layout.head_dim, static.problem.unit
    columns = pl.ds(item.head * head_dim, head_dim)
    for i, first_row in enumerate(block.first_rows):
        is_live = i * unit < block.num_live

        @pl.when(is_live)
        def _copy(i=i, first_row=first_row) -> None:
            plgpu.copy_gmem_to_smem(
                refs[name].at[pl.ds(pl.multiple_of(first_row, 8), unit), columns],
                destination.at[pl.ds(i * unit, unit)],
                barrier,
            )

        @pl.when(jnp.logical_not(is_live))
        def _no_copy() -> None:
            plgpu.barrier_arrive(barrier)


def _await_free(static: _Static, free: Any, step: Int32[Array, ""]) -> None:
    pl.when(step >= static.num_stages)(lambda: plgpu.barrier_wait(free.at[_slot(static, step)]))


def _produce(static: _Static, refs: dict[str, Any], item: Item, step: Int32[Array, ""]) -> None:
    """Brings the blocks of an item, of a dtype that wgmma takes."""

    def block(i: Int32[Array, ""], _: None) -> None:
        slot, found = _slot(static, step + i), _find(static, refs, item, i)
        keys, values = refs["k_smem"].at[slot], refs["v_smem"].at[slot]
        is_last = i == item.num_blocks - 1
        _await_free(static, refs["k_free"], step + i)
        _load(static, refs, item, found, "keys", keys, refs["k_ready"].at[slot])
        _await_free(static, refs["v_free"], step + i)
        arrived = jnp.where(is_last, static.num_stages, slot)
        _load(static, refs, item, found, "values", values, refs["v_ready"].at[arrived])

        @pl.when(is_last)
        def _clear_end() -> None:
            plgpu.barrier_wait(refs["v_ready"].at[static.num_stages])
            _clear(static, values, found.num_live)
            plgpu.commit_smem()
            for _ in range(static.num_copies):
                plgpu.barrier_arrive(refs["v_ready"].at[slot])

    lax.fori_loop(0, item.num_blocks, block, None)


def _pieces(static: _Static) -> list[tuple[Any, Any, int]]:
    """A block in parts that few registers hold: rows, columns, and the first row."""
    head_dim = static.call.layout.head_dim
    width = static.tile_columns
    return [
        (pl.ds(first, _PIECE_ROWS), pl.ds(column, width), first)
        for first in range(0, static.problem.context, _PIECE_ROWS)
        for column in range(0, head_dim, width)
    ]


def _piece_layout(static: _Static) -> Any:
    """How a warpgroup has a piece in registers."""
    width = static.tile_columns
    return plgpu.Layout.SMEM_GMEM_COPY((_PIECE_ROWS, width), static.call.q_dtype, 2 * width)


def _clear(static: _Static, block: Any, num_live: Int32[Array, ""]) -> None:
    """Zeros in all but the first rows of a block: a weight of 0 does not hide what a NaN is."""
    layout = _piece_layout(static)
    for rows, columns, first in _pieces(static):

        @pl.when(num_live < first + _PIECE_ROWS)
        def _clear_piece(rows=rows, columns=columns, first=first) -> None:
            ref = block.at[rows, columns]
            x = plgpu.load(ref, layout=layout)
            row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=layout)
            ref[...] = jnp.where(row < num_live - first, x, jnp.zeros_like(x))


def _produce_quantized(
    static: _Static, refs: dict[str, Any], item: Item, step: Int32[Array, ""]
) -> None:
    """Brings the blocks of an item of 8-bit elements, in the dtype of the queries.

    What is stored arrives in one buffer of K and one of V, so that K of the next block is on its
    way while V of this one is converted.
    """

    def convert(i: Int32[Array, ""], name: str) -> None:
        short, slot = name[0], _slot(static, step + i)
        plgpu.barrier_wait(refs[f"{short}_arrived"])
        _await_free(static, refs[f"{short}_free"], step + i)
        out = refs[f"{short}_smem"].at[slot]
        for rows, columns, _ in _pieces(static):
            stored = refs[f"{short}_stored"].at[rows, columns]
            stored = plgpu.load(stored, layout=_piece_layout(static), optimized=False)
            out.at[rows, columns][...] = _decode(stored, static.call.layout.dtype, out.dtype)
        if name == "values":
            num_live = item.end - item.first - i * static.problem.context
            pl.when(i == item.num_blocks - 1)(lambda: _clear(static, out, num_live))
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs[f"{short}_ready"].at[slot])

    def load(i: Int32[Array, ""], name: str) -> None:
        stored, arrived = refs[f"{name[0]}_stored"], refs[f"{name[0]}_arrived"]
        _load(static, refs, item, _find(static, refs, item, i), name, stored, arrived)

    def turn(i: Int32[Array, ""], _: None) -> None:
        for name in ("keys", "values"):
            convert(i, name)
            pl.when(i + 1 < item.num_blocks)(lambda name=name: load(i + 1, name))

    load(jnp.int32(0), "keys")
    load(jnp.int32(0), "values")
    lax.fori_loop(0, item.num_blocks, turn, None)


def _decode(
    stored: Shaped[Array, "M C"], dtype: np.dtype, out_dtype: np.dtype
) -> Float[Array, "M C"]:
    """The stored numbers, exactly, in bfloat16 or float16."""
    if dtype == jnp.int8:
        return stored.astype(out_dtype)
    halves = lax.bitcast_convert_type(stored, dtype).astype(jnp.float16)
    return halves if out_dtype == jnp.float16 else halves.astype(jnp.float32).astype(out_dtype)


def _consume(
    static: _Static,
    refs: dict[str, Any],
    consumer: Int32[Array, ""],
    item: Item,
    step: Int32[Array, ""],
) -> None:
    """Attention of a consumer's matrix rows of an item."""
    queries, ready = refs["q_smem"].at[consumer], refs["q_ready"].at[consumer]
    turn, next_turn = refs["turn"].at[consumer], refs["turn"].at[1 - consumer]
    rows = consumer * _WARPGROUP_ROWS
    first_query = pl.multiple_of(item.query + rows, 8)
    source = refs["queries"].at[item.head, pl.ds(first_query, _WARPGROUP_ROWS)]
    plgpu.copy_gmem_to_smem(source, queries, ready)
    factor = common.score_factor(static.problem, refs, item)
    plgpu.barrier_wait(ready)

    def block(
        i: Int32[Array, ""], carry: tuple[Softmax, Float32[Array, "M H"]]
    ) -> tuple[Softmax, Float32[Array, "M H"]]:
        softmax, acc = carry
        slot, start = _slot(static, step + i), item.first + i * static.problem.context
        # Asked anew in each turn: descriptors of the queries that outlive it, 2 registers for each
        # 16 columns, do not fit beside the output of a long head.
        queries = refs["q_smem"].at[lax.axis_index("warpgroup")]
        plgpu.barrier_wait(refs["k_ready"].at[slot])

        def multiply_keys(acc_ref: Any) -> Float32[Array, "M S"]:
            plgpu.wgmma(acc_ref, queries, refs["k_smem"].at[slot].transpose((1, 0)))
            plgpu.barrier_arrive(next_turn)
            return acc_ref[...]

        shape = (_WARPGROUP_ROWS, static.problem.context)
        scores = pl.run_scoped(multiply_keys, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
        plgpu.barrier_arrive(refs["k_free"].at[slot])
        weights, rescale, softmax = common.weigh(
            static.problem, item, rows, start, scores, factor, softmax
        )
        weights = weights.astype(queries.dtype)

        plgpu.barrier_wait(refs["v_ready"].at[slot])
        plgpu.barrier_wait(turn)

        def multiply_values(acc_ref: Any) -> None:
            plgpu.wgmma(acc_ref, weights, refs["v_smem"].at[slot])

        acc = acc * lax.broadcast_in_dim(rescale, acc.shape, [0])
        init: Any = plgpu.WGMMAAccumulatorRef.init(acc)
        acc = pl.run_state(multiply_values)(init)
        plgpu.barrier_arrive(refs["v_free"].at[slot])
        return softmax, acc

    plgpu.barrier_wait(turn)
    acc = common.full((_WARPGROUP_ROWS, static.call.layout.head_dim), 0.0, common.MATRIX)
    carry = common.initial_softmax(_WARPGROUP_ROWS), acc
    softmax, acc = lax.fori_loop(0, item.num_blocks, block, carry)
    plgpu.barrier_arrive(next_turn)

    out = common.normalized(refs, item, rows, softmax, acc)
    queries[...] = out.astype(queries.dtype)
    plgpu.commit_smem()
    out_ref = refs["out"].at[item.tile, item.head, pl.ds(rows, _WARPGROUP_ROWS)]
    plgpu.copy_smem_to_gmem(queries, out_ref)
    plgpu.wait_smem_to_gmem(0)
