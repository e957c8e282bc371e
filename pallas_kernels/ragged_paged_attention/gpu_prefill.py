"""Attention of the rows with more than one new token, on GPUs."""

from types import ModuleType
from typing import NamedTuple

from jax import Array
from jaxtyping import Float

from pallas_kernels.ragged_paged_attention import gpu_prefill_mma, gpu_prefill_wgmma
from pallas_kernels.ragged_paged_attention.gpu_call import GpuCall
from pallas_kernels.ragged_paged_attention.gpu_tiles import (
    Order,
    Tiles,
    Tiling,
    align_queries,
    cut_tiles,
    pick_output,
    tiling_of,
)
from pallas_kernels.ragged_paged_attention.rows import Rows
from pallas_kernels.ragged_paged_attention.specs import AttentionCall


class Plan(NamedTuple):
    """What a call computes, and in which order; the same in every layer."""

    tiles: Tiles
    order: Order


def unsupported_reason(call: AttentionCall) -> str | None:
    """Why `prefill_rows` cannot serve `call`, or None when it can."""
    return _kernel_for(call).unsupported_reason(call)


def plan(call: AttentionCall, rows: Rows) -> Plan:
    """For the rows of more than one new token."""
    return Plan(*cut_tiles(call, _tiling(call), rows))


def prefill_rows(call: GpuCall, plan: Plan) -> Float[Array, "T N H"]:
    """Attention of the rows of more than one new token; zeros for other tokens."""
    tiling = _tiling(call.call)
    queries = align_queries(call.q, plan.order, call.call.layout.num_kv_heads)
    out = _kernel_for(call.call).attend(call, tiling, plan.tiles, queries)
    return pick_output(out, plan.order, tiling)


def _tiling(call: AttentionCall) -> Tiling:
    tiling = tiling_of(call, _kernel_for(call).tile_rows(call))
    assert tiling is not None, call
    return tiling


def _kernel_for(call: AttentionCall) -> ModuleType:
    """wgmma where the chip has it, and mma.sync where it has not."""
    return gpu_prefill_wgmma if call.chip.capability == (9, 0) else gpu_prefill_mma
