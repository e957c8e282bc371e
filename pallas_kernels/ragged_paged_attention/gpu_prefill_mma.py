"""Prefill attention by `mma.sync`, for every GPU from Ampere on.

A persistent grid walks over work items (a tile of queries and a KV head). One warpgroup does all of
an item: it brings blocks of K and V through a ring (`gpu_ring.py`), multiplies, and has the softmax
in registers, where what one product leaves is what the next one takes. A second thread block of the
multiprocessor multiplies in the meantime.

Sizes are what 255 registers a thread hold with some to spare: 64 float32 of the output each for
heads up to 128, in tiles of 64 matrix rows, or of 128 where heads are short; 128 for longer ones.
Each of the four warps reads all of K and V from shared memory, so a tile of 64 rows reads the 128
bytes a cycle that there are in the time in which an A100 multiplies them; of 128 rows, half.
"""

import functools
import itertools
from typing import Any, NamedTuple

from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Float32, Int32

from pallas_kernels.ragged_paged_attention import gpu_prefill_common as common
from pallas_kernels.ragged_paged_attention import gpu_ring
from pallas_kernels.ragged_paged_attention.gpu_call import GpuCall
from pallas_kernels.ragged_paged_attention.gpu_prefill_common import Item, Problem, Softmax
from pallas_kernels.ragged_paged_attention.gpu_tiles import Tiles, Tiling, tiling_of
from pallas_kernels.ragged_paged_attention.specs import AttentionCall

_MAX_STAGES = 3
_RESERVED_BYTES = 1536  # barriers, what CUDA keeps


def tile_rows(call: AttentionCall) -> int:
    """Matrix rows of a tile."""
    return 128 if call.layout.head_dim <= 80 else 64


def block_sizes(call: AttentionCall) -> gpu_ring.BlockSizes | None:
    """The largest blocks of which two rings fit a multiprocessor, or one; None if none does."""
    head_dim = call.layout.head_dim
    queries = tile_rows(call) * head_dim * 2
    largest = 16 if head_dim > 128 else 32
    if 80 < head_dim <= 128 and gpu_ring.has_tma(call):  # cp.async has addresses in registers
        largest = 64
    for per_core, tokens in itertools.product((2, 1), (largest, min(largest, 32))):
        sizes = gpu_ring.fit(call, tokens, per_core, _MAX_STAGES, queries + _RESERVED_BYTES)
        if sizes is not None:
            return sizes
    return None


def unsupported_reason(call: AttentionCall) -> str | None:
    """Why this kernel cannot serve `call`, or None when it can."""
    layout, chip = call.layout, call.chip
    reason = gpu_ring.unsupported_reason(call)
    if reason is not None:
        return reason
    if block_sizes(call) is None:
        return (
            f"{chip.name} cannot copy heads of {layout.head_dim} from pages of {layout.page_size} "
            "to tiles that four warps share, or has too little shared memory for them"
        )
    if tiling_of(call, tile_rows(call)) is None:
        return f"{call.num_heads} query heads over {layout.num_kv_heads} KV heads are too many"
    return None


class _Scratch(NamedTuple):
    """Shared memory of a thread block."""

    ring: gpu_ring.Memory
    queries: Any  # [M, H] q dtype; at the end the output


def attend(
    call: GpuCall, tiling: Tiling, tiles: Tiles, queries: Float[Array, "K Q H"]
) -> Float[Array, "W K M H"]:
    """Attention of live tiles, M = tile_rows matrix rows each; anything in dead tiles and rows."""
    layout, chip = call.call.layout, call.call.chip
    sizes = block_sizes(call.call)
    assert sizes is not None
    num_items = tiles.row.shape[0] * layout.num_kv_heads
    num_blocks = min(sizes.per_core * chip.num_cores, num_items)
    problem = Problem(call.call, tiling, call.scale, sizes.tokens, num_blocks)
    inputs = common.inputs_of(call, tiling, tiles, queries)
    tile = plgpu.SMEM(
        (tiling.rows, layout.head_dim), queries.dtype, transforms=gpu_ring.tiled(sizes.swizzle)
    )

    def body(*refs: Any, scratch: _Scratch) -> None:
        named = dict(zip((*inputs, "out"), refs, strict=True))
        common.for_items(problem, named, functools.partial(_attend, problem, sizes, named, scratch))

    return plgpu.kernel(
        body,
        out_type=common.output_of(call, tiling, tiles),
        scratch_types=dict(scratch=_Scratch(gpu_ring.memory(call.call, sizes), tile)),
        grid=(num_blocks,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=0,  # no row is more than one warp's
        ),
        kernel_name="ragged_paged_prefill",
    )(*inputs.values())


def _attend(
    problem: Problem,
    sizes: gpu_ring.BlockSizes,
    refs: dict[str, Any],
    scratch: _Scratch,
    item: Item,
    _: Int32[Array, ""],
) -> None:
    """Attention of an item."""
    call, rows = problem.call, problem.tiling.rows
    source = gpu_ring.Source(refs["keys"], refs["values"], refs["pages"], refs["layer"][0])
    ring = gpu_ring.Ring(
        *(call, sizes, source, scratch.ring, item.row, item.head, item.first, item.end)
    )
    ring.start()
    first = pl.multiple_of(item.query, 8)
    copy = plgpu.Layout.SMEM_GMEM_COPY(scratch.queries.shape, call.q_dtype, sizes.swizzle)
    queries = refs["queries"].at[item.head, pl.ds(first, rows)]
    scratch.queries[...] = plgpu.load(queries, layout=copy, optimized=False)
    factor = common.score_factor(problem, refs, item)

    def block(
        i: Int32[Array, ""], carry: tuple[Softmax, Float32[Array, "M H"]]
    ) -> tuple[Softmax, Float32[Array, "M H"]]:
        softmax, acc = carry
        scores = _multiply_keys(scratch.queries, ring.keys(i), sizes.swizzle // 2)
        start = item.first + i * problem.context
        weights, rescale, softmax = common.weigh(problem, item, 0, start, scores, factor, softmax)
        acc = acc * lax.broadcast_in_dim(rescale, acc.shape, [0])
        acc = _multiply_values(acc, weights.astype(call.q_dtype), ring.values(i))
        ring.refill(i)
        return softmax, acc

    softmax = common.initial_softmax(rows)
    acc = common.full((rows, call.layout.head_dim), 0.0, common.MATRIX)
    softmax, acc = lax.fori_loop(0, item.num_blocks, block, (softmax, acc))
    ring.finish()
    scratch.queries[...] = common.normalized(refs, item, 0, softmax, acc).astype(call.q_dtype)
    refs["out"].at[item.tile, item.head][...] = plgpu.load(scratch.queries, layout=copy)


def _multiply_keys(queries: Any, keys: Any, columns: int) -> Float32[Array, "M S"]:
    """Products of queries [M, H] and keys [S, H], both in tiles of so many columns."""
    scores = common.full((queries.shape[0], keys.shape[0]), 0.0, common.MATRIX)
    for first in range(0, queries.shape[1], columns):
        part = pl.ds(first, columns)
        q = plgpu.load(queries.at[:, part], layout=plgpu.Layout.MMA_LHS(queries.dtype))
        k = keys.at[:, part].transpose((1, 0))
        scores = plgpu.mma(scores, q, plgpu.load(k, layout=plgpu.Layout.MMA_RHS(queries.dtype)))
    return scores


def _multiply_values(
    acc: Float32[Array, "M H"], weights: Float[Array, "M S"], values: Any
) -> Float32[Array, "M H"]:
    """acc + weights @ values, values [S, H] in shared memory."""
    right = plgpu.load(values, layout=plgpu.Layout.MMA_RHS(weights.dtype))
    return plgpu.mma(acc, _left_operand(weights), right)


def _left_operand(x: Float[Array, "M S"]) -> Float[Array, "M S"]:
    """What one product leaves, as what another takes: each thread has the same numbers in order."""
    left = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=plgpu.Layout.MMA_LHS(x.dtype))

    def relabel(_: Any, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        layout = mgpu.MMALayouts(x.mlir_dtype).lhs
        registers = x.registers.reshape(layout.registers_shape(x.shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return plgpu.inline_mgpu(arg_types=(common.MATRIX,), return_type=left)(relabel)(x)
