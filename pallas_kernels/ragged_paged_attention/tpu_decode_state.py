"""What the TPU's decode kernel works on: its refs, the rows and blocks it walks over."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32

from pallas_kernels.ragged_paged_attention import tpu_common as common
from pallas_kernels.ragged_paged_attention.layout import KVCacheLayout
from pallas_kernels.ragged_paged_attention.specs import AttentionCall

ROW_SLOTS = 4  # rows whose queries are on their way or in use: more than blocks are in flight
OUT_SLOTS = 2  # rows whose results are on their way out or being made


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """pages_per_block: pages that are computed with at a time.
    num_buffers: blocks in VMEM, all but two of them on their way; 3 to 5.
    chunk: tokens of a block in one product.
    """

    pages_per_block: int
    num_buffers: int
    chunk: int

    def __post_init__(self) -> None:
        assert 3 <= self.num_buffers <= ROW_SLOTS + 1, self


class Refs(NamedTuple):
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
    q_buffer: Any  # [ROW_SLOTS, N, H] VMEM
    new_buffer: Any  # [ROW_SLOTS, 2, X] i32 VMEM
    out_buffer: Any  # [OUT_SLOTS, N, H] VMEM
    write_buffer: Any  # [OUT_SLOTS, 2, tokens of a tile, X] VMEM
    wide_q: Any  # [N, X] compute dtype VMEM
    acc: Any  # [N, X] f32 VMEM
    weights: Any  # [N, tokens of a block] compute dtype VMEM
    peak: Any  # [N, 128] f32 VMEM, the same in all lanes
    fade: Any  # [N, 128] f32 VMEM: what becomes of sums of earlier blocks
    total: Any  # [2, N, 128] f32 VMEM: its lanes' sum is the total
    table: Any  # [2, C, 128] i32 SMEM
    rows: Any  # [R] i32 SMEM: the rows of one new token, as many as there are
    last_page: Any  # [num_buffers] i32 SMEM: id of the last page in each buffer
    block_sems: Any  # [num_buffers, 2] DMA
    table_sems: Any  # [2] DMA
    row_sems: Any  # [ROW_SLOTS] DMA
    out_sems: Any  # [OUT_SLOTS] DMA
    write_sems: Any  # [OUT_SLOTS] DMA


class Row(NamedTuple):
    """Where the pages of a row lie that its token attends to."""

    id: Int32[Array, ""]
    kv_len: Int32[Array, ""]
    first_page: Int32[Array, ""]  # in the block table
    num_pages: Int32[Array, ""]
    num_blocks: Int32[Array, ""]


class Cursor(NamedTuple):
    """A block: of which decode row, which of its blocks, and the buffer for it."""

    row: Int32[Array, ""]
    block: Int32[Array, ""]
    buffer: Int32[Array, ""]


class Pending(NamedTuple):
    """A block whose weights are known, but have not met its values yet."""

    row: Int32[Array, ""]
    buffer: Int32[Array, ""]
    is_last: Int32[Array, ""]  # of its row
    is_short: Int32[Array, ""]  # no tokens after the first `_SHORT`; so it is the last


class Kernel(NamedTuple):
    """The static facts, the refs, and this core's share of the rows: every `num_cores`-th."""

    call: AttentionCall
    sizes: BlockSizes
    refs: Refs
    core: Int32[Array, ""]
    num_rows: Int32[Array, ""]

    @property
    def layout(self) -> KVCacheLayout:
        return self.call.layout

    def row(self, i: Int32[Array, ""]) -> Row:
        refs, size = self.refs, self.layout.page_size
        index = refs.rows[i * self.call.chip.num_cores + self.core]
        kv_len = refs.kv_lens[index]
        first = jnp.int32(0)
        if self.call.sliding_window is not None:
            first = common.divide(jnp.maximum(kv_len - self.call.sliding_window, 0), size)
        num_pages = common.divide(kv_len + (size - 1), size) - first
        per_block = self.sizes.pages_per_block
        num_blocks = common.divide(num_pages + (per_block - 1), per_block)
        return Row(index, kv_len, first, num_pages, num_blocks)

    def pages_in_block(self, row: Row, block: Int32[Array, ""]) -> Int32[Array, ""]:
        per_block = self.sizes.pages_per_block
        return jnp.minimum(row.num_pages - block * per_block, per_block)
