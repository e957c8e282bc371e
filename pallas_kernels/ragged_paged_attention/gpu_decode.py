"""Rows of one new token on a GPU: split-KV attention in Pallas Mosaic GPU, then a merge.

The work of a row is cut at run time into chunks of its context, so that chunks times KV heads fill
the chip whatever the rows' lengths are (flash-decoding). A thread block does one (chunk, KV head):

- A ring of `stages` blocks of K and V in shared memory. The warpgroup that computes also refills
  it: TMA with barriers from Hopper on, cp.async before. While a block is computed on, the other
  `stages - 1` are in flight.
- `mma.sync` m16n8k16, which all of these cards have: the G query heads of the KV head are rows of
  its 16 (the others compute on whatever follows in q, and nobody reads them), tokens are columns.
  Four warps share the tokens in q.K and the head dim in P.V; P crosses between them in shared
  memory. 8-bit K and V are widened in registers on their way to a second buffer.
- Softmax in float32, base 2, running over blocks; each chunk leaves its unnormalized output, its
  maximum and its sum. `_merge` adds them up per row.

Depth of the ring: a streaming multiprocessor must keep bandwidth x latency bytes in flight, on an
H100 3.35e12 B/s x 1 us / 132 = 25 KB, on a B200 52 KB. Two thread blocks a multiprocessor hold two
rings of about 96 KB (16-bit caches: 3 stages of 32 KB), 128 KB of it in flight when both compute.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float32, Int32

from pallas_kernels.ragged_paged_attention.gpu_call import GpuCall
from pallas_kernels.ragged_paged_attention.specs import AttentionCall

_LOG2E = math.log2(math.e)
_SECTOR = 32  # float32 in a line of the L2 cache
_STAGED_BYTES = 16 * 1024  # of K or V in a block, as 16-bit numbers
_MAX_STAGES = 6
_MIN_CHUNK = 4  # blocks in a chunk, fewer only where the row has fewer
_MERGE_UNROLL = 4  # chunks whose loads a merge has in flight at once
_RESERVED_BYTES = 4 * 1024  # barriers, scratch of reductions, what CUDA keeps
_COMPILER_PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """How a chip computes a call.

    tokens: of context in a block.
    stages: blocks in a ring.
    per_core: thread blocks, each with a ring, that share a multiprocessor.
    unit: tokens of one copy, all of one page.
    swizzle: bytes of a line of the tiles that 16-bit K and V lie in.
    """

    tokens: int
    stages: int
    per_core: int
    unit: int
    swizzle: int


def block_sizes(call: AttentionCall) -> BlockSizes | None:
    """The largest blocks of which two rings fit a multiprocessor, or one; None if none does."""
    layout = call.layout
    lane_bytes = 2 * layout.head_dim
    largest = min(128, 2 ** int(math.log2(_STAGED_BYTES // lane_bytes)))
    for per_core, tokens in itertools.product((2, 1), (largest, largest // 2)):
        if tokens < 32:  # all four warps have tokens, and the tiles of a block divide among them
            continue
        unit = math.gcd(layout.page_size, tokens)
        is_wide = layout.dtype.itemsize == 2
        if not (is_wide or _has_tma(call)) and unit * layout.head_dim % (4 * 128):
            continue  # each of the 128 threads copies 4 bytes at least
        swizzle = _swizzle(lane_bytes, unit if is_wide and not _has_tma(call) else tokens)
        staged = 0 if is_wide else tokens * lane_bytes
        fixed = staged + _num_rows(call) * tokens * 2 + _RESERVED_BYTES
        stage = 2 * tokens * layout.head_dim * layout.dtype.itemsize
        stages = (call.chip.core_memory_bytes // per_core - fixed) // stage
        if stages >= 2 and swizzle is not None:
            return BlockSizes(tokens, min(stages, _MAX_STAGES), per_core, unit, swizzle)
    return None


def _swizzle(lane_bytes: int, rows: int) -> int | None:
    """The longest line of tiles that a warpgroup can copy `rows` rows into; None if there is none.

    A tile is 8 rows of one line. The four warps take 4 x 1, 2 x 2 or 1 x 4 tiles at a time.
    """
    columns_at_once = {0: 1, 2: 2}.get(rows // 8 % 4, 4)
    for line in (128, 64, 32):
        if lane_bytes % (line * columns_at_once) == 0:
            return line
    return None


def _has_tma(call: AttentionCall) -> bool:
    return call.chip.capability >= (9, 0)


def unsupported_reason(call: AttentionCall) -> str | None:
    """Why `decode_rows` cannot serve `call`, or None when it can."""
    layout, chip = call.layout, call.chip
    is_float8 = layout.dtype != layout.storage_dtype
    if is_float8 and chip.capability < (8, 9):
        return f"{chip.name} has no conversions of float8, as GPUs from compute capability 8.9 have"
    if block_sizes(call) is None:
        return (
            f"{chip.name} cannot copy heads of {layout.head_dim} from pages of {layout.page_size} "
            "to tiles that four warps share, or has too little shared memory for them"
        )
    return None


def decode_rows(gpu_call: GpuCall) -> Float32[Array, "R N H"]:
    """Attention of the one query of each row of q_lens 1; other rows: unspecified."""
    call, layout = gpu_call.call, gpu_call.call.layout
    num_rows, num_heads, num_kv_heads = (
        gpu_call.kv_lens.shape[0],
        call.num_heads,
        layout.num_kv_heads,
    )
    chunks = _split(gpu_call)
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


class _Chunks(NamedTuple):
    """How the rows' contexts are cut; chunk c of C, chunks of a row are neighbours.

    row, begin, end: the chunk's tokens begin..end of its row; none where it is not used.
    visible: the first token that the query of its row sees.
    first, num: the chunks of a row.
    """

    row: Int32[Array, " C"]
    begin: Int32[Array, " C"]
    end: Int32[Array, " C"]
    visible: Int32[Array, " C"]
    first: Int32[Array, " R"]
    num: Int32[Array, " R"]


def _split(gpu_call: GpuCall) -> _Chunks:
    """Cuts contexts into at most R + E chunks of about equal numbers of blocks.

    E KV heads' worth of chunks fill the chip once. A chunk has `size` blocks or fewer, so there are
    at most total / size + R of them. Less than a whole wave more is no loss: what is left of the
    thread blocks can still use the memory's full bandwidth.
    """
    call = gpu_call.call
    sizes = block_sizes(call)
    assert sizes is not None
    kv_lens, window = gpu_call.kv_lens, call.sliding_window
    num_rows, num_kv_heads = kv_lens.shape[0], call.layout.num_kv_heads
    extra = pl.cdiv(sizes.per_core * call.chip.num_cores, num_kv_heads)

    visible = jnp.zeros_like(kv_lens) if window is None else jnp.maximum(kv_lens - window, 0)
    origins = (
        visible // sizes.unit * sizes.unit
    )  # so that nothing before the window's first page is read
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
    return _Chunks(
        row=row,
        begin=jnp.where(is_used, begin, 0),
        end=jnp.where(is_used, jnp.minimum(begin + length, kv_lens[row]), 0),
        visible=visible[row],
        first=ends - count,
        num=count,
    )


@dataclasses.dataclass(frozen=True)
class _Ring:
    """Blocks of K and V of one chunk and KV head on their way through shared memory."""

    call: AttentionCall
    sizes: BlockSizes
    caches: tuple[Any, Any]  # K, V: [L * P * S, K * H] storage dtype, device memory
    buffers: tuple[Any, Any]  # K, V: [stages, tokens, H] storage dtype
    barriers: tuple[Any, Any] | None  # K, V: [stages]; none where copies are cp.async
    pages: Any  # [R, B] int32, device memory
    layer: Int32[Array, ""]
    row: Int32[Array, ""]
    head: Int32[Array, ""]
    begin: Int32[Array, ""]
    end: Int32[Array, ""]

    def fetch(self, block: Int32[Array, ""]) -> None:
        """Starts to read what is live of a block. With cp.async, which counts copies: any block."""
        slot = jax.lax.rem(block, self.sizes.stages)
        for i in range(self.sizes.tokens // self.sizes.unit):
            position = self.begin + block * self.sizes.tokens + i * self.sizes.unit
            if self.barriers is None:
                last = jax.lax.div(self.end - 1, self.sizes.unit) * self.sizes.unit
                self._copy(jnp.minimum(position, last), slot, i)
                continue
            is_live = position < self.end
            pl.when(is_live)(functools.partial(self._copy, position, slot, i))

            @pl.when(jnp.logical_not(is_live))
            def _(slot=slot, barriers=self.barriers):
                for barrier in barriers:
                    plgpu.barrier_arrive(barrier.at[slot])

    def _copy(self, position: Int32[Array, ""], slot: Int32[Array, ""], i: int) -> None:
        """Starts to read K and V of one unit; position is a multiple of unit."""
        layout, unit = self.call.layout, self.sizes.unit
        page = self.pages[self.row, jax.lax.div(position, layout.page_size)]
        num_pages = self.caches[0].shape[0] // (layout.num_layers * layout.page_size)
        token = (self.layer * num_pages + page) * layout.page_size
        token += jax.lax.rem(position, layout.page_size)
        for j, (cache, buffer) in enumerate(zip(self.caches, self.buffers, strict=True)):
            dims = pl.ds(0, layout.head_dim)
            source = cache.at[
                pl.ds(token, unit), pl.ds(self.head * layout.head_dim, layout.head_dim)
            ]
            target = buffer.at[slot, pl.ds(i * unit, unit), dims]
            if self.barriers is None:
                in_bounds = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
                plgpu.copy_gmem_to_smem(source, target, oob_mode=in_bounds)
            else:
                plgpu.copy_gmem_to_smem(source, target, self.barriers[j].at[slot])

    def wait(self, which: int, slot: Int32[Array, ""]) -> Any:
        """The K (0) or V (1) of the block that is oldest, [tokens, H], once it is there."""
        if self.barriers is not None:
            plgpu.barrier_wait(self.barriers[which].at[slot])
        else:
            # Copies end in order, and K and V of a unit are next to each other: the block is there
            # when only those of the blocks behind it are still on their way.
            plgpu.wait_gmem_to_smem(
                (self.sizes.stages - 1) * 2 * (self.sizes.tokens // self.sizes.unit)
            )
        return self.buffers[which].at[slot]


def _attend_chunks(
    gpu_call: GpuCall, chunks: _Chunks
) -> tuple[Float32[Array, "C K M H"], Float32[Array, "C K M 2 _"]]:
    """Of each chunk the sum of weights * values, and of the weights their maximum and sum.

    A weight is exp2(score * log2(e) - maximum). Chunks that are not used: unspecified.
    """
    call, layout = gpu_call.call, gpu_call.call.layout
    sizes = block_sizes(call)
    assert sizes is not None
    num_kv_heads, head_dim = layout.num_kv_heads, layout.head_dim
    num_chunks, rows = chunks.row.shape[0], _num_rows(call)

    queries = gpu_call.q[gpu_call.starts].reshape(-1, head_dim)
    queries = jnp.pad(queries, ((0, rows - call.num_heads // num_kv_heads), (0, 0)))
    k, v = (x.reshape(-1, num_kv_heads * head_dim) for x in gpu_call.kv_cache)
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
            ring = _Ring(
                *(call, sizes),
                *((k_ref, v_ref), (scratch.k, scratch.v), scratch.barriers),
                *(pages_ref, layer_ref[0], row, head, begin, end),
            )
            group = call.num_heads // num_kv_heads
            scale = jnp.float32(factor) * (1 if k_scale_ref is None else k_scale_ref[head])
            q = q_ref.at[pl.ds(row * call.num_heads + head * group, rows)]
            peak, total, acc = _attend_chunk(ring, scratch, q, scale, visible_ref[chunk])
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
        *(gpu_call.layer.reshape(1), gpu_call.k_scale, queries, k, v),
    )


class _Scratch(NamedTuple):
    """Shared memory of a thread block."""

    k: Any  # [stages, tokens, H] storage dtype
    v: Any  # [stages, tokens, H] storage dtype
    barriers: tuple[Any, Any] | None  # K, V: [stages]
    weights: Any  # [M, tokens] q dtype
    widened: Any  # [tokens, H] q dtype; none where the cache has 16 bits


def _scratch(call: AttentionCall, sizes: BlockSizes) -> _Scratch:
    layout, tokens = call.layout, sizes.tokens
    is_wide = layout.dtype.itemsize == 2
    tiled = _tiled(sizes.swizzle)
    ring = plgpu.SMEM(
        (sizes.stages, tokens, layout.head_dim),
        layout.storage_dtype,
        transforms=tiled if is_wide else (),
    )
    barrier = plgpu.Barrier(num_arrivals=tokens // sizes.unit, num_barriers=sizes.stages)
    return _Scratch(
        k=ring,
        v=ring,
        barriers=(barrier, barrier) if _has_tma(call) else None,
        weights=plgpu.SMEM(
            (_num_rows(call), tokens), call.q_dtype, transforms=_tiled(min(128, 2 * tokens))
        ),
        widened=None
        if is_wide
        else plgpu.SMEM((tokens, layout.head_dim), call.q_dtype, transforms=tiled),
    )


def _tiled(swizzle: int) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """Tiles of a 16-bit matrix that any part of a product is read from without bank conflicts."""
    return (
        plgpu.TilingTransform((8, swizzle // 2)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(swizzle),  # pyright: ignore[reportAbstractUsage]
    )


def _attend_chunk(
    ring: _Ring,
    scratch: _Scratch,
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
    num_blocks = pl.cdiv(ring.end - ring.begin, tokens)

    def zeros(*shape: int) -> Float32[Array, "..."]:
        return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), out)

    def across(x: Float32[Array, " M"], columns: int) -> Float32[Array, "M columns"]:
        return plgpu.layout_cast(jax.lax.broadcast_in_dim(x, (rows, columns), [0]), out)

    for block in range(ring.sizes.stages):
        if ring.barriers is None:
            ring.fetch(jnp.int32(block))
        else:
            pl.when(block < num_blocks)(functools.partial(ring.fetch, jnp.int32(block)))
    q = plgpu.load(q_ref, layout=lhs, optimized=False)

    def step(block: Int32[Array, ""], carry: Any) -> Any:
        peak, total, acc = carry
        slot = jax.lax.rem(block, ring.sizes.stages)
        first = ring.begin + block * tokens

        keys = ring.wait(0, slot)
        if scratch.widened is not None:
            keys = _widen(ring, keys, scratch.widened, None)
        keys = plgpu.load(keys.transpose((1, 0)), layout=rhs)
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
        scratch.weights[...] = weights.astype(dtype)

        values = ring.wait(1, slot)
        if scratch.widened is not None:
            values = _widen(ring, values, scratch.widened, ring.end - first)
        else:
            _clear(ring, values, ring.end - first)
        weights = plgpu.load(scratch.weights, layout=lhs)
        values = plgpu.load(values, layout=rhs)
        acc = plgpu.mma(acc * across(fade, head_dim), weights, values)

        following = block + ring.sizes.stages
        if ring.barriers is None:
            ring.fetch(following)
        else:

            @pl.when(following < num_blocks)
            def _():
                plgpu.commit_smem()  # the block has been read: TMA, another proxy, may overwrite it
                ring.fetch(following)

        return new_peak, total, acc

    peak = plgpu.layout_cast(jnp.full((rows,), -jnp.inf, jnp.float32), out.reduce(1))
    carry = peak, zeros(rows, tokens), zeros(rows, head_dim)
    peak, total, acc = jax.lax.fori_loop(0, num_blocks, step, carry)
    return peak, total.sum(axis=1), acc


def _clear(
    ring: _Ring,
    values: Any,  # [tokens, H] q dtype
    num_live: Int32[Array, ""],
) -> None:
    """Zeros for the tokens from num_live on: what lies there may be NaN, and 0 * NaN is NaN."""

    @pl.when(num_live < ring.sizes.tokens)
    def _():
        dtype, swizzle = ring.call.q_dtype, ring.sizes.swizzle
        layout = plgpu.Layout.SMEM_GMEM_COPY(values.shape, dtype, swizzle)
        x = plgpu.load(values, layout=layout)
        token = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=layout)
        values[...] = jnp.where(token < num_live, x, jnp.zeros_like(x))


def _widen(
    ring: _Ring,
    stored: Any,  # [tokens, H] storage dtype
    widened: Any,  # [tokens, H] q dtype
    num_live: Int32[Array, ""] | None,
) -> Any:
    """`widened` filled with the 8-bit numbers of a block; with zeros from token num_live on."""
    call = ring.call
    layout = plgpu.Layout.SMEM_GMEM_COPY(stored.shape, call.q_dtype, ring.sizes.swizzle)
    x = plgpu.load(stored, layout=layout, optimized=False)
    if call.layout.dtype != call.layout.storage_dtype:
        x = jax.lax.bitcast_convert_type(x, call.layout.dtype)
    if call.layout.dtype != jnp.int8 or not _has_tma(call):  # what these cards convert to
        x = x.astype(jnp.float32)
    x = x.astype(call.q_dtype)
    if num_live is not None:
        token = plgpu.broadcasted_iota(jnp.int32, stored.shape, 0, layout=layout)
        x = jnp.where(token < num_live, x, jnp.zeros_like(x))
    widened[...] = x
    return widened


def _merge(
    gpu_call: GpuCall,
    chunks: _Chunks,
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
