"""Attention of the rows with more than one new token, on GPUs."""

from jax import Array
from jaxtyping import Float

from pallas_kernels.ragged_paged_attention import gpu_prefill_wgmma
from pallas_kernels.ragged_paged_attention.gpu_call import GpuCall
from pallas_kernels.ragged_paged_attention.gpu_tiles import (
    align_queries,
    pick_output,
    plan,
    tiling_of,
)
from pallas_kernels.ragged_paged_attention.specs import AttentionCall


def unsupported_reason(call: AttentionCall) -> str | None:
    """Why `prefill_rows` cannot serve `call`, or None when it can."""
    return gpu_prefill_wgmma.unsupported_reason(call)


def prefill_rows(call: GpuCall) -> Float[Array, "T N H"]:
    """Attention of the rows of call.q_lens > 0, none of which is 1; zeros for other tokens."""
    kernel = gpu_prefill_wgmma
    tiling = tiling_of(call.call, kernel.TILE_ROWS)
    assert tiling is not None, call.call
    tiles, order = plan(call, tiling)
    queries = align_queries(call.q, order, call.call.layout.num_kv_heads)
    return pick_output(kernel.attend(call, tiling, tiles, queries), order, tiling)
