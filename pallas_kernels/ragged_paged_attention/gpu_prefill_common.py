"""What the prefill kernels for GPUs share: work items, and the softmax between two products.

Both kernels walk over work items (a tile of queries and a KV head) and over the blocks of an item's
context. They have matrices in the layout in which wgmma leaves its result, which is also that of
`mma.sync` when each of four warps has 16 rows of 64.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Bool, Float, Float32, Int32

from pallas_kernels.ragged_paged_attention import gpu_ring
from pallas_kernels.ragged_paged_attention.gpu_call import GpuCall
from pallas_kernels.ragged_paged_attention.gpu_tiles import Tiles, Tiling
from pallas_kernels.ragged_paged_attention.specs import AttentionCall

MATRIX = plgpu.Layout.WGMMA
ROWS = MATRIX.reduce(1)  # one number a matrix row
_NO_PEAK = -1e30  # of a row that has seen nothing; finite, as inf - inf is NaN
_LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a kernel is compiled for.

    context: tokens in a block.
    num_blocks: thread blocks.
    """

    call: AttentionCall
    tiling: Tiling
    scale: float
    context: int
    num_blocks: int

    @property
    def unit(self) -> int:
        """Tokens of one copy, all of the same page."""
        return math.gcd(self.call.layout.page_size, self.context)

    @property
    def scores_are_scaled(self) -> bool:
        """Whether scores are scaled before they are masked, not by the fused multiply of exp2."""
        return self.call.soft_cap is not None or self.call.has_scales or self.scale <= 0


class Item(NamedTuple):
    """A tile and a KV head: what of the context it sees, cut into blocks."""

    tile: Int32[Array, ""]
    head: Int32[Array, ""]
    row: Int32[Array, ""]
    query: Int32[Array, ""]
    position: Int32[Array, ""]
    first: Int32[Array, ""]  # position of the first block
    end: Int32[Array, ""]
    num_blocks: Int32[Array, ""]


def inputs_of(
    call: GpuCall, tiling: Tiling, tiles: Tiles, queries: Float[Array, "K Q H"]
) -> dict[str, Array]:
    """By name, what a kernel is given; in what follows `refs` has these names and "out"."""
    num_kv_heads = call.call.layout.num_kv_heads
    k, v = gpu_ring.source_of(call)
    inputs = {
        "queries": queries,
        "keys": k,
        "values": v,
        "layer": jnp.asarray(call.layer, jnp.int32)[None],
        "pages": call.pages,
        **tiles._asdict(),
    }
    if call.sinks is not None:  # of each matrix row, as logarithms to base 2
        heads = jnp.arange(tiling.rows) % tiling.group
        inputs["sinks"] = call.sinks.reshape(num_kv_heads, -1)[:, heads] * _LOG2E
    for name, scale in (("k_scale", call.k_scale), ("v_scale", call.v_scale)):
        if scale is not None:
            inputs[name] = scale
    return inputs


def output_of(call: GpuCall, tiling: Tiling, tiles: Tiles) -> jax.ShapeDtypeStruct:
    """[W, K, M, H], M = tiling.rows, in the dtype of the queries."""
    layout = call.call.layout
    shape = tiles.row.shape[0], layout.num_kv_heads, tiling.rows, layout.head_dim
    return jax.ShapeDtypeStruct(shape, call.q.dtype)


def for_items(
    problem: Problem, refs: dict[str, Any], work: Callable[[Item, Int32[Array, ""]], None]
) -> Int32[Array, ""]:
    """Calls work(item, blocks before it) for each item of this thread block; all their blocks.

    Items come longest first and are dealt out back and forth, so that all get about as much.
    """
    layout, num = problem.call.layout, jnp.int32(problem.num_blocks)
    block = lax.axis_index("block")
    num_items = refs["num_live"][0] * layout.num_kv_heads
    num_rounds = lax.div(num_items, num)

    def place(i: Int32[Array, ""]) -> Int32[Array, ""]:
        return jnp.where(lax.rem(i, jnp.int32(2)) == 0, block, num - 1 - block)

    is_in_last = place(num_rounds) < num_items - num_rounds * num

    def visit(i: Int32[Array, ""], step: Int32[Array, ""]) -> Int32[Array, ""]:
        index = i * num + place(i)
        tile = lax.div(index, jnp.int32(layout.num_kv_heads))
        unit = jnp.int32(problem.unit)
        first = lax.div(refs["begin"][tile], unit) * unit
        end = refs["end"][tile]
        item = Item(
            tile=tile,
            head=index - tile * layout.num_kv_heads,
            row=refs["row"][tile],
            query=refs["query"][tile],
            position=refs["position"][tile],
            first=first,
            end=end,
            num_blocks=lax.div(end - first + problem.context - 1, problem.context),
        )
        work(item, step)
        return step + item.num_blocks

    return lax.fori_loop(0, num_rounds + is_in_last.astype(jnp.int32), visit, jnp.int32(0))


class Softmax(NamedTuple):
    """A running softmax, to base 2."""

    peak: Float32[Array, " M"]
    total: Float32[Array, " M"]


def full(shape: tuple[int, ...], value: float, layout: Any) -> Float32[Array, "..."]:
    """An array of one value, in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def initial_softmax(num_rows: int) -> Softmax:
    """Nothing seen yet."""
    return Softmax(full((num_rows,), _NO_PEAK, ROWS), full((num_rows,), 0.0, ROWS))


def score_factor(problem: Problem, refs: dict[str, Any], item: Item) -> float | Float32[Array, ""]:
    """What products of queries and stored keys are multiplied with."""
    return problem.scale * (refs["k_scale"][item.head] if "k_scale" in refs else 1.0)


def weigh(
    problem: Problem,
    item: Item,
    rows: int | Int32[Array, ""],
    start: Int32[Array, ""],
    products: Float32[Array, "M S"],
    factor: float | Float32[Array, ""],
    softmax: Softmax,
) -> tuple[Float32[Array, "M S"], Float32[Array, " M"], Softmax]:
    """Weights of the block at `start`, by what older weights shrink, and the softmax after it.

    rows: the first matrix row. factor: `score_factor`.
    """
    scores = lax.cond(
        _needs_mask(problem, item, start),
        lambda scores: _masked(problem, item, rows, start, scores),
        lambda scores: scores,
        _scaled(problem, products, factor),
    )
    base = 1.0 if problem.scores_are_scaled else problem.scale * _LOG2E
    peak = jnp.maximum(softmax.peak, scores.max(axis=1) * base)
    weights = jnp.exp2(scores * base - lax.broadcast_in_dim(peak, scores.shape, [0]))
    rescale = jnp.exp2(softmax.peak - peak)
    return weights, rescale, Softmax(peak, softmax.total * rescale + weights.sum(axis=1))


def normalized(
    refs: dict[str, Any],
    item: Item,
    rows: int | Int32[Array, ""],
    softmax: Softmax,
    acc: Float32[Array, "M H"],
) -> Float32[Array, "M H"]:
    """The output of matrix rows from `rows` on, of the sum of weights * stored values."""
    factor = 1 / softmax.total
    if "sinks" in refs:
        ref = refs["sinks"].at[item.head, pl.ds(rows, acc.shape[0])]
        sinks = plgpu.load(ref, layout=ROWS, optimized=False)
        peak = jnp.maximum(softmax.peak, sinks)
        shrink = jnp.exp2(softmax.peak - peak)
        factor = shrink / (softmax.total * shrink + jnp.exp2(sinks - peak))
    if "v_scale" in refs:
        factor = factor * refs["v_scale"][item.head]
    return acc * lax.broadcast_in_dim(factor, acc.shape, [0])


def _scaled(
    problem: Problem, scores: Float32[Array, "M S"], factor: float | Float32[Array, ""]
) -> Float32[Array, "M S"]:
    """Scores after scale and soft cap, to base 2, where the exponential does not scale them."""
    if not problem.scores_are_scaled:
        return scores
    soft_cap = problem.call.soft_cap
    if soft_cap is None:
        return scores * (factor * _LOG2E)
    # tanh(x) = 1 - 2 / (exp(2 x) + 1); the hardware's own is good to 11 bits only.
    powers = jnp.exp2(scores * (factor * (2 * _LOG2E / soft_cap)))
    return soft_cap * _LOG2E - (2 * soft_cap * _LOG2E) / (powers + 1)


def _needs_mask(problem: Problem, item: Item, start: Int32[Array, ""]) -> Bool[Array, ""]:
    """Whether some token of the tile does not see all of the block at `start`."""
    needs_mask = start + problem.context - 1 > item.position
    if problem.call.sliding_window is not None:
        needs_mask |= start <= item.end - 1 - problem.call.sliding_window
    return needs_mask


def _masked(
    problem: Problem,
    item: Item,
    rows: int | Int32[Array, ""],
    start: Int32[Array, ""],
    scores: Float32[Array, "M S"],
) -> Float32[Array, "M S"]:
    """Scores, with -inf where a token does not see another."""
    # In steps of a matrix row, of which a token has `group`, so that nothing has to be divided.
    group, window = problem.tiling.group, problem.call.sliding_window
    row = plgpu.broadcasted_iota(jnp.int32, scores.shape[:1], 0, layout=ROWS)
    last = lax.broadcast_in_dim((item.position - start) * group + rows + row, scores.shape, [0])
    column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=MATRIX) * group
    sees = column <= last
    if window is not None:
        sees &= column > last - window * group
    return jnp.where(sees, scores, -jnp.inf)
