"""Blocks of K and V on their way from the paged cache to `mma.sync`, for any GPU from Ampere on.

A ring of `stages` blocks in shared memory. The warpgroup that computes also refills it: TMA with
barriers from Hopper on, cp.async before. While a block is computed on, the other `stages - 1` are
in flight. 8-bit K and V are widened in registers on their way to a second buffer.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32, Shaped

from pallas_kernels.ragged_paged_attention.gpu_call import GpuCall
from pallas_kernels.ragged_paged_attention.specs import AttentionCall


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


def fit(
    call: AttentionCall, tokens: int, per_core: int, max_stages: int, other_bytes: int
) -> BlockSizes | None:
    """Blocks of `tokens` in the longest ring, or None where none of two stages fits or is copied.

    other_bytes: shared memory that a thread block needs for anything but K and V.
    """
    layout = call.layout
    unit = math.gcd(layout.page_size, tokens)
    is_wide = layout.dtype.itemsize == 2
    if not (is_wide or has_tma(call)) and unit * layout.head_dim % (4 * 128):
        return None  # each of the 128 threads copies 4 bytes at least
    swizzle = swizzle_for(2 * layout.head_dim, unit if is_wide and not has_tma(call) else tokens)
    widened = 0 if is_wide else 2 * tokens * layout.head_dim
    stage = 2 * tokens * layout.head_dim * layout.dtype.itemsize
    stages = (call.chip.core_memory_bytes // per_core - widened - other_bytes) // stage
    if stages < 2 or swizzle is None:
        return None
    return BlockSizes(tokens, min(stages, max_stages), per_core, unit, swizzle)


def swizzle_for(lane_bytes: int, rows: int) -> int | None:
    """The longest line of tiles that a warpgroup can copy `rows` rows into; None if there is none.

    A tile is 8 rows of one line. The four warps take 4 x 1, 2 x 2 or 1 x 4 tiles at a time.
    """
    columns_at_once = {0: 1, 2: 2}.get(rows // 8 % 4, 4)
    for line in (128, 64, 32):
        if lane_bytes % (line * columns_at_once) == 0:
            return line
    return None


def has_tma(call: AttentionCall) -> bool:
    """Whether the chip copies by TMA, and not by cp.async."""
    return call.chip.capability >= (9, 0)


def unsupported_reason(call: AttentionCall) -> str | None:
    """Why no ring can bring the blocks of `call`, whatever their size; None when some can."""
    is_float8 = call.layout.dtype != call.layout.storage_dtype
    if is_float8 and call.chip.capability < (8, 9):
        return (
            f"{call.chip.name} has no conversions of float8, "
            "as GPUs from compute capability 8.9 have"
        )
    return None


class Memory(NamedTuple):
    """A ring's part of the shared memory of a thread block.

    k, v: [stages, tokens, H] storage dtype.
    barriers: of K and of V, [stages] each; none where copies are cp.async.
    widened: [tokens, H] q dtype; none where the cache has 16 bits.
    """

    k: Any
    v: Any
    barriers: tuple[Any, Any] | None
    widened: Any


def memory(call: AttentionCall, sizes: BlockSizes) -> Memory:
    """What a kernel has to ask for, among its scratch_types."""
    layout, tokens = call.layout, sizes.tokens
    is_wide = layout.dtype.itemsize == 2
    ring = plgpu.SMEM(
        (sizes.stages, tokens, layout.head_dim),
        layout.storage_dtype,
        transforms=tiled(sizes.swizzle) if is_wide else (),
    )
    barrier = plgpu.Barrier(num_arrivals=tokens // sizes.unit, num_barriers=sizes.stages)
    return Memory(
        k=ring,
        v=ring,
        barriers=(barrier, barrier) if has_tma(call) else None,
        widened=None
        if is_wide
        else plgpu.SMEM((tokens, layout.head_dim), call.q_dtype, transforms=tiled(sizes.swizzle)),
    )


def tiled(swizzle: int) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """Tiles of a 16-bit matrix that any part of a product is read from without bank conflicts."""
    return (
        plgpu.TilingTransform((8, swizzle // 2)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(swizzle),  # pyright: ignore[reportAbstractUsage]
    )


class Source(NamedTuple):
    """The cache in device memory, as a kernel has it.

    k, v: [L * P * S, K * H] storage dtype.
    pages: [R, B] int32.
    """

    k: Any
    v: Any
    pages: Any
    layer: Int32[Array, ""]


@dataclasses.dataclass(frozen=True)
class Ring:
    """Tokens begin..end of one row and KV head, block after block; begin is a multiple of unit."""

    call: AttentionCall
    sizes: BlockSizes
    source: Source
    memory: Memory
    row: Int32[Array, ""]
    head: Int32[Array, ""]
    begin: Int32[Array, ""]
    end: Int32[Array, ""]

    @property
    def num_blocks(self) -> Int32[Array, ""]:
        return pl.cdiv(self.end - self.begin, self.sizes.tokens)

    def start(self) -> None:
        """Starts to read the first blocks."""
        for block in range(self.sizes.stages):
            self._fetch_if_any(jnp.int32(block), is_free=True)

    def keys(self, block: Int32[Array, ""]) -> Any:
        """The keys [tokens, H], in the dtype of queries, of the block that is oldest.

        They are there until `values` is called; past the end they are anything.
        """
        keys = self._wait(0, block)
        return keys if self.memory.widened is None else self._widen(keys, None)

    def values(self, block: Int32[Array, ""]) -> Any:
        """Its values [tokens, H], zeros past the end: what lies there may be NaN, and 0 * NaN is.

        They are there until `refill` is called.
        """
        values = self._wait(1, block)
        num_live = self.end - self.begin - block * self.sizes.tokens
        if self.memory.widened is not None:
            return self._widen(values, num_live)
        self._clear(values, num_live)
        return values

    def refill(self, block: Int32[Array, ""]) -> None:
        """Starts to read another block to where `block` was, if there is one."""
        self._fetch_if_any(block + self.sizes.stages, is_free=False)

    def finish(self) -> None:
        """Leaves the memory to another ring: nothing is on its way and all has been read."""
        if self.memory.barriers is None:
            plgpu.wait_gmem_to_smem(0)
        else:
            plgpu.commit_smem()

    def _fetch_if_any(self, block: Int32[Array, ""], is_free: bool) -> None:
        if self.memory.barriers is None:
            self._fetch(block)  # copies are counted, so there is always one
            return

        @pl.when(block < self.num_blocks)
        def _():
            if not is_free:
                plgpu.commit_smem()  # the block has been read: TMA, another proxy, may overwrite it
            self._fetch(block)

    def _fetch(self, block: Int32[Array, ""]) -> None:
        """Starts to read what is live of a block. With cp.async, which counts copies: any block."""
        slot = jax.lax.rem(block, self.sizes.stages)
        for i in range(self.sizes.tokens // self.sizes.unit):
            position = self.begin + block * self.sizes.tokens + i * self.sizes.unit
            if self.memory.barriers is None:
                last = jax.lax.div(self.end - 1, self.sizes.unit) * self.sizes.unit
                self._copy(jnp.minimum(position, last), slot, i)
                continue
            is_live = position < self.end
            pl.when(is_live)(functools.partial(self._copy, position, slot, i))

            @pl.when(jnp.logical_not(is_live))
            def _(slot=slot, barriers=self.memory.barriers):
                for barrier in barriers:
                    plgpu.barrier_arrive(barrier.at[slot])

    def _copy(self, position: Int32[Array, ""], slot: Int32[Array, ""], i: int) -> None:
        """Starts to read K and V of one unit; position is a multiple of unit."""
        layout, unit = self.call.layout, self.sizes.unit
        page = self.source.pages[self.row, jax.lax.div(position, layout.page_size)]
        num_pages = self.source.k.shape[0] // (layout.num_layers * layout.page_size)
        token = (self.source.layer * num_pages + page) * layout.page_size
        token += jax.lax.rem(position, layout.page_size)
        columns = pl.ds(self.head * layout.head_dim, layout.head_dim)
        barriers = self.memory.barriers
        for j in range(2):
            source = (self.source.k, self.source.v)[j].at[pl.ds(token, unit), columns]
            buffer = (self.memory.k, self.memory.v)[j]
            target = buffer.at[slot, pl.ds(i * unit, unit), pl.ds(0, layout.head_dim)]
            if barriers is None:
                in_bounds = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
                plgpu.copy_gmem_to_smem(source, target, oob_mode=in_bounds)
            else:
                plgpu.copy_gmem_to_smem(source, target, barriers[j].at[slot])

    def _wait(self, which: int, block: Int32[Array, ""]) -> Any:
        """The K (0) or V (1) of the block that is oldest, as stored, once it is there."""
        slot = jax.lax.rem(block, self.sizes.stages)
        if self.memory.barriers is not None:
            plgpu.barrier_wait(self.memory.barriers[which].at[slot])
        else:
            # Copies end in order, and K and V of a unit are next to each other: the block is there
            # when only those of the blocks behind it are still on their way.
            plgpu.wait_gmem_to_smem(
                (self.sizes.stages - 1) * 2 * (self.sizes.tokens // self.sizes.unit)
            )
        return (self.memory.k, self.memory.v)[which].at[slot]

    def _clear(
        self,
        values: Any,  # [tokens, H] q dtype
        num_live: Int32[Array, ""],
    ) -> None:
        """Zeros for the tokens from num_live on."""

        @pl.when(num_live < self.sizes.tokens)
        def _():
            layout = plgpu.Layout.SMEM_GMEM_COPY(
                values.shape, self.call.q_dtype, self.sizes.swizzle
            )
            x = plgpu.load(values, layout=layout)
            token = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=layout)
            values[...] = jnp.where(token < num_live, x, jnp.zeros_like(x))

    def _widen(
        self,
        stored: Any,  # [tokens, H] storage dtype
        num_live: Int32[Array, ""] | None,
    ) -> Any:
        """The buffer of widened numbers, with those of a block; with zeros from num_live on."""
        call, widened = self.call, self.memory.widened
        layout = plgpu.Layout.SMEM_GMEM_COPY(stored.shape, call.q_dtype, self.sizes.swizzle)
        x = plgpu.load(stored, layout=layout, optimized=False)
        if call.layout.dtype != call.layout.storage_dtype:
            x = jax.lax.bitcast_convert_type(x, call.layout.dtype)
        if call.layout.dtype != jnp.int8 or not has_tma(call):  # what these cards convert to
            x = x.astype(jnp.float32)
        x = x.astype(call.q_dtype)
        if num_live is not None:
            token = plgpu.broadcasted_iota(jnp.int32, stored.shape, 0, layout=layout)
            x = jnp.where(token < num_live, x, jnp.zeros_like(x))
        widened[...] = x
        return widened


def source_of(
    gpu_call: GpuCall,
) -> tuple[Shaped[Array, "C X"], Shaped[Array, "C X"]]:
    """The cache as the matrices of `Source`."""
    layout = gpu_call.call.layout
    k, v = (x.reshape(-1, layout.num_kv_heads * layout.head_dim) for x in gpu_call.kv_cache)
    return k, v
