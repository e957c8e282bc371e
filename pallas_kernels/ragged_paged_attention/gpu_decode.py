"""Rows of one new token on a GPU: split-KV attention in Pallas Mosaic GPU, then a merge.

The work of a row is cut at run time into chunks of its context, so that chunks times KV heads fill
the chip whatever the rows' lengths are (flash-decoding). A thread block does one (chunk, KV head):

- Blocks of K and V come through a ring in shared memory (`gpu_ring.py`).
- `mma.sync` m16n8k16, which all of these cards have: the G query heads of the KV head are rows of
  its 16 (the others compute on whatever follows in q, and nobody reads them), tokens are columns.
  Four warps share the tokens in q.K and the head dim in P.V; P crosses between them in shared
  memory.
- Softmax in float32, base 2, running over blocks; each chunk leaves its unnormalized output, its
  maximum and its sum. `_merge` adds them up per row.

Depth of the ring: a streaming multiprocessor must keep bandwidth x latency bytes in flight, on an
H100 3.35e12 B/s x 1 us / 132 = 25 KB, on a B200 52 KB. Two thread blocks a multiprocessor hold two
rings of about 96 KB (16-bit caches: 3 stages of 32 KB), 128 KB of it in flight when both compute.
"""

import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float32, Int32

from pallas_kernels.ragged_paged_attention import gpu_ring
from pallas_kernels.ragged_paged_attention.gpu_call import GpuCall
from pallas_kernels.ragged_paged_attention.rows import Rows
from pallas_kernels.ragged_paged_attention.specs import AttentionCall

_LOG2E = math.log2(math.e)
_NO_WINDOW = 2**30  # tokens: longer than any context
_SECTOR = 32  # float32 in a line of the L2 cache
_STAGED_BYTES = 16 * 1024  # of K or V in a block, as 16-bit numbers
_MAX_STAGES = 6
_MIN_CHUNK = 4  # blocks in a chunk, fewer only where the row has fewer
_MERGE_UNROLL = 4  # chunks whose loads a merge has in flight at once
_RESERVED_BYTES = 4 * 1024  # barriers, scratch of reductions, what CUDA keeps
_COMPILER_PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


def block_sizes(call: AttentionCall) -> gpu_ring.BlockSizes | None:
    """Tuned ones, else the largest blocks of which two rings fit a multiprocessor, or one.

    None if none does.
    """
    tuned = call.tuned_sizes("gpu_decode")
    if tuned is not None:
        return fit(call, **tuned)
    largest = min(128, 2 ** int(math.log2(_STAGED_BYTES // (2 * call.layout.head_dim))))
    tried = itertools.product((2, 1), (largest, largest // 2))
    found = (fit(call, tokens, per_core, _MAX_STAGES) for per_core, tokens in tried)
    return next(filter(None, found), None)


def fit(call: AttentionCall, tokens: int, per_core: int, stages: int) -> gpu_ring.BlockSizes | None:
    """Blocks of `tokens` in rings of at most `stages`; None where they do not fit."""
    if tokens < 32:  # all four warps have tokens, and the tiles of a block divide among them
        return None
    weights = _num_rows(call) * tokens * 2
    return gpu_ring.fit(call, tokens, per_core, stages, weights + _RESERVED_BYTES)


def unsupported_reason(call: AttentionCall) -> str | None:
    """Why `decode_rows` cannot serve `call`, or None when it can."""
    layout, chip = call.layout, call.chip
    reason = gpu_ring.unsupported_reason(call)
    if reason is None and block_sizes(call) is None:
        return (
            f"{chip.name} cannot copy heads of {layout.head_dim} from pages of {layout.page_size} "
            "to tiles that four warps share, or has too little shared memory for them"
        )
    return reason


class Chunks(NamedTuple):
    """How the rows' contexts are cut; chunk c of C, chunks of a row are neighbours.

    row, begin, end: the chunk's tokens begin..end of its row; none where it is not used.
    visible: the first token that the query of its row sees.
    first, num: the chunks of a row.  query: its token, any where it has no chunk.
    """

    row: Int32[Array, " C"]
    begin: Int32[Array, " C"]
    end: Int32[Array, " C"]
    visible: Int32[Array, " C"]
    first: Int32[Array, " R"]
    num: Int32[Array, " R"]
    query: Int32[Array, " R"]


def plan(call: AttentionCall, rows: Rows) -> Chunks:
    """Cuts the contexts of rows of one new token into chunks of about equal numbers of blocks.

    E of them, for all KV heads, fill the chip once. A chunk has `size` blocks or fewer, so there
    are at most total / size + R of them, R + E in all. Less than a whole wave more is no loss: what
    is left of the thread blocks can still use the memory's full bandwidth.
    """
    sizes = block_sizes(call)
    assert sizes is not None
    kv_lens = jnp.where(rows.q_lens == 1, rows.kv_lens, 0)
    num_rows, num_kv_heads = kv_lens.shape[0], call.layout.num_kv_heads
    extra = pl.cdiv(sizes.per_core * call.chip.num_cores, num_kv_heads)

    visible = jnp.maximum(kv_lens - (call.sliding_window or _NO_WINDOW), 0)
    origins = visible // sizes.unit * sizes.unit  # no page before the window's first is read
    blocks = pl.cdiv(kv_lens - origins, sizes.tokens)
    size = jnp.maximum(pl.cdiv(blocks.sum(), extra), _MIN_CHUNK)
    count = pl.cdiv(blocks, size)
    ends = jnp.cumsum(count)

    chunk = jnp.arange(num_rows + extra, dtype=jnp.int32)
    row = jnp.sum(ends[None] <= chunk[:, None], axis=1, dtype=jnp.int32)
    is_used, row = row < num_rows, jnp.minimum(row, num_rows - 1)
    j = chunk - (ends - count)[row]
    each, more = jnp.divmod(blocks[row], jnp.maximum(count[row], 1))
    begin = origins[row] + (j * each + jnp.minimum(j, more)) * sizes.tokens
    length = (each + (j < more)) * sizes.tokens
    return Chunks(
        row=row,
        begin=jnp.where(is_used, begin, 0),
        end=jnp.where(is_used, jnp.minimum(begin + length, kv_lens[row]), 0),
        visible=visible[row],
        first=ends - count,
        num=count,
        query=jnp.where(kv_lens > 0, rows.starts, 0),
    )


def decode_rows(gpu_call: GpuCall, chunks: Chunks) -> Float32[Array, "R N H"]:
    """Attention of the one query of each row that has one; other rows: unspecified."""
    call, layout = gpu_call.call, gpu_call.call.layout
    num_rows, num_heads, num_kv_heads = len(chunks.num), call.num_heads, layout.num_kv_heads
    acc, stats = _attend_chunks(gpu_call, chunks)
    out = _merge(gpu_call, chunks, acc, stats)
    out = out[:, :, : num_heads // num_kv_heads]
    return out.reshape(num_rows, num_heads, layout.head_dim)


def _warps_of_rows(call: AttentionCall) -> int:
    """How many of the four warps share the rows of a product; the others share its columns.

    A warp has 16 rows and 8 columns at a time, so one where four times 8 divide the head dim.
    """
    return 1 if call.layout.head_dim % 32 == 0 else 2


def _num_rows(call: AttentionCall) -> int:
    """Query heads of a KV head, padded to what a product takes."""
    step = 16 * _warps_of_rows(call)
    return pl.cdiv(call.num_heads // call.layout.num_kv_heads, step) * step


def _attend_chunks(
    gpu_call: GpuCall, chunks: Chunks
) -> tuple[Float32[Array, "C K M H"], Float32[Array, "C K M 2 _"]]:
    """Of each chunk the sum of weights * values, and of the weights their maximum and sum.

    A weight is exp2(score * log2(e) - maximum). Chunks that are not used: unspecified.
    """
    call, layout = gpu_call.call, gpu_call.call.layout
    sizes = block_sizes(call)
    assert sizes is not None
    num_kv_heads, head_dim = layout.num_kv_heads, layout.head_dim
    num_chunks, rows = chunks.row.shape[0], _num_rows(call)

    queries = gpu_call.q[chunks.query].reshape(-1, head_dim)
    queries = jnp.pad(queries, ((0, rows - call.num_heads // num_kv_heads), (0, 0)))
    factor = gpu_call.scale * (_LOG2E if call.soft_cap is None else 1 / call.soft_cap)

    def body(
        begin_ref: Any,  # [C] int32
        end_ref: Any,  # [C] int32
        visible_ref: Any,  # [C] int32
        row_ref: Any,  # [C] int32
        pages_ref: Any,  # [R, B] int32
        layer_ref: Any,  # [1] int32
        k_scale_ref: Any,  # [K] float32, or none
        q_ref: Any,  # [R * N + padding, H] q dtype
        k_ref: Any,  # [L * P * S, K * H] storage dtype
        v_ref: Any,  # [L * P * S, K * H] storage dtype
        acc_ref: Any,  # [C, K, M, H] float32
        stats_ref: Any,  # [C, K, M, 2, *] float32
        scratch: "_Scratch",
    ) -> None:
        chunk, head = jax.lax.axis_index("chunk"), jax.lax.axis_index("head")
        begin, end = begin_ref[chunk], end_ref[chunk]

        @pl.when(begin < end)
        def _():
            row = row_ref[chunk]
            source = gpu_ring.Source(k_ref, v_ref, pages_ref, layer_ref[0])
            ring = gpu_ring.Ring(call, sizes, source, scratch.ring, row, head, begin, end)
            group = call.num_heads // num_kv_heads
            scale = jnp.float32(factor) * (1 if k_scale_ref is None else k_scale_ref[head])
            q = q_ref.at[pl.ds(row * call.num_heads + head * group, rows)]
            peak, total, acc = _attend_chunk(ring, scratch.weights, q, scale, visible_ref[chunk])
            acc_ref.at[chunk, head][...] = acc
            for i, stat in enumerate((peak, total)):
                shape = stats_ref.shape[2], stats_ref.shape[4]
                stat = jax.lax.broadcast_in_dim(stat, shape, [0])
                stats_ref.at[chunk, head, :, i][...] = plgpu.layout_cast(
                    stat, plgpu.Layout.MMA_ACC(call.q_dtype, m_warps=_warps_of_rows(call))
                )

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((num_chunks, num_kv_heads, rows, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_chunks, num_kv_heads, rows, 2, _SECTOR), jnp.float32),
        ),
        scratch_types=(_scratch(call, sizes),),
        grid=(num_chunks, num_kv_heads),
        grid_names=("chunk", "head"),
        compiler_params=_COMPILER_PARAMS,
    )(
        *(chunks.begin, chunks.end, chunks.visible, chunks.row, gpu_call.pages),
        *(gpu_call.layer.reshape(1), gpu_call.k_scale, queries, *gpu_ring.source_of(gpu_call)),
    )


class _Scratch(NamedTuple):
    """Shared memory of a thread block."""

    ring: gpu_ring.Memory
    weights: Any  # [M, tokens] q dtype


def _scratch(call: AttentionCall, sizes: gpu_ring.BlockSizes) -> _Scratch:
    weights = plgpu.SMEM(
        (_num_rows(call), sizes.tokens),
        call.q_dtype,
        transforms=gpu_ring.tiled(min(128, 2 * sizes.tokens)),
    )
    return _Scratch(gpu_ring.memory(call, sizes), weights)


def _attend_chunk(
    ring: gpu_ring.Ring,
    weights_ref: Any,  # [M, tokens] q dtype
    q_ref: Any,  # [M, H] q dtype
    scale: Float32[Array, ""],
    visible: Int32[Array, ""],
) -> tuple[Float32[Array, " M"], Float32[Array, " M"], Float32[Array, "M H"]]:
    """Maximum and sum of the weights, and sum of weights * values, of one chunk and KV head."""
    call, dtype = ring.call, ring.call.q_dtype
    rows, tokens, head_dim = q_ref.shape[0], ring.sizes.tokens, q_ref.shape[1]
    warps = _warps_of_rows(call)
    lhs = plgpu.Layout.MMA_LHS(dtype, m_warps=warps)
    rhs = plgpu.Layout.MMA_RHS(dtype, m_warps=warps)
    out = plgpu.Layout.MMA_ACC(dtype, m_warps=warps)

    def zeros(*shape: int) -> Float32[Array, "..."]:
        return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), out)

    def across(x: Float32[Array, " M"], columns: int) -> Float32[Array, "M columns"]:
        return plgpu.layout_cast(jax.lax.broadcast_in_dim(x, (rows, columns), [0]), out)

    ring.start()
    q = plgpu.load(q_ref, layout=lhs, optimized=False)

    def step(block: Int32[Array, ""], carry: Any) -> Any:
        peak, total, acc = carry
        first = ring.begin + block * tokens

        keys = plgpu.load(ring.keys(block).transpose((1, 0)), layout=rhs)
        scores = plgpu.mma(zeros(rows, tokens), q, keys) * scale
        if call.soft_cap is not None:
            scores = (call.soft_cap * _LOG2E) * jnp.tanh(scores)
        position = first + plgpu.broadcasted_iota(jnp.int32, (rows, tokens), 1, layout=out)
        is_seen = (position < ring.end) & (position >= visible)
        scores = jnp.where(is_seen, scores, -jnp.inf)

        new_peak = jnp.maximum(peak, scores.max(axis=1))
        fade = jnp.exp2(peak - new_peak)
        weights = jnp.exp2(scores - across(new_peak, tokens))
        total = total * across(fade, tokens) + weights
        weights_ref[...] = weights.astype(dtype)

        values = plgpu.load(ring.values(block), layout=rhs)
        weights = plgpu.load(weights_ref, layout=lhs)
        acc = plgpu.mma(acc * across(fade, head_dim), weights, values)

        ring.refill(block)
        return new_peak, total, acc

    peak = plgpu.layout_cast(jnp.full((rows,), -jnp.inf, jnp.float32), out.reduce(1))
    carry = peak, zeros(rows, tokens), zeros(rows, head_dim)
    peak, total, acc = jax.lax.fori_loop(0, ring.num_blocks, step, carry)
    return peak, total.sum(axis=1), acc


def _merge(
    gpu_call: GpuCall,
    chunks: Chunks,
    acc: Float32[Array, "C K M H"],
    stats: Float32[Array, "C K M 2 _"],
) -> Float32[Array, "R K M H"]:
    """The output of each row from those of its chunks; rows of no chunk: unspecified."""
    call = gpu_call.call
    num_kv_heads, rows, head_dim = acc.shape[1:]
    out_layout = plgpu.Layout.MMA_ACC(call.q_dtype, m_warps=_warps_of_rows(call))
    sinks = gpu_call.sinks
    if sinks is not None:
        sinks = sinks.reshape(num_kv_heads, -1) * _LOG2E
        sinks = jnp.pad(sinks, ((0, 0), (0, rows - sinks.shape[1])))

    def body(
        first_ref: Any,  # [R] int32
        num_ref: Any,  # [R] int32
        sinks_ref: Any,  # [K, M] float32, or none
        v_scale_ref: Any,  # [K] float32, or none
        acc_ref: Any,  # [C, K, M, H] float32
        stats_ref: Any,  # [C, K, M, 2, *] float32
        out_ref: Any,  # [R, K, M, H] float32
    ) -> None:
        row, head = jax.lax.axis_index("row"), jax.lax.axis_index("head")
        first, num = first_ref[row], num_ref[row]

        def across(x: Float32[Array, " M"]) -> Float32[Array, "M H"]:
            return plgpu.layout_cast(jax.lax.broadcast_in_dim(x, (rows, head_dim), [0]), out_layout)

        def load(ref: Any) -> Float32[Array, "..."]:
            layout = out_layout if len(ref.shape) == 2 else out_layout.reduce(1)
            return plgpu.load(ref, layout=layout, optimized=False)

        def step(turn: Int32[Array, ""], carry: Any) -> Any:
            loaded = []
            for i in range(_MERGE_UNROLL):
                j = turn * _MERGE_UNROLL + i
                chunk = first + jnp.minimum(j, num - 1)
                peak, total = (load(stats_ref.at[chunk, head, :, k, 0]) for k in range(2))
                peak = jnp.where(j < num, peak, -jnp.inf)
                loaded.append((peak, total, load(acc_ref.at[chunk, head])))
            for other in loaded:
                carry = join(carry, other)
            return carry

        def join(one: Any, other: Any) -> Any:
            peak = jnp.maximum(one[0], other[0])
            fades = jnp.exp2(one[0] - peak), jnp.exp2(other[0] - peak)
            total = one[1] * fades[0] + other[1] * fades[1]
            return peak, total, one[2] * across(fades[0]) + other[2] * across(fades[1])

        @pl.when(num > 0)
        def _():
            # A sink is a weight of 1 whose value is zero. One of -inf is none: it fades to zero.
            peak = jnp.full((rows,), -jnp.inf, jnp.float32)
            peak = plgpu.layout_cast(peak, out_layout.reduce(1))
            if sinks_ref is not None:
                peak = load(sinks_ref.at[head])
            total = plgpu.layout_cast(jnp.ones((rows,), jnp.float32), out_layout.reduce(1))
            zeros = plgpu.layout_cast(jnp.zeros((rows, head_dim), jnp.float32), out_layout)
            turns = pl.cdiv(num, _MERGE_UNROLL)
            _, total, acc = jax.lax.fori_loop(0, turns, step, (peak, total, zeros))
            out = acc / across(total)
            out_ref.at[row, head][...] = out if v_scale_ref is None else out * v_scale_ref[head]

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((chunks.first.shape[0], *acc.shape[1:]), jnp.float32),
        grid=(chunks.first.shape[0], num_kv_heads),
        grid_names=("row", "head"),
        compiler_params=_COMPILER_PARAMS,
    )(chunks.first, chunks.num, sinks, gpu_call.v_scale, acc, stats)
