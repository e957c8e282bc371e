"""The op on NVIDIA GPUs: the KV write by XLA, then a kernel for decode rows and one for others."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Float32, Int32

from pallas_kernels.ragged_paged_attention import gpu_decode, gpu_prefill
from pallas_kernels.ragged_paged_attention.gpu_call import GpuCall
from pallas_kernels.ragged_paged_attention.layout import QUANTIZED_DTYPES, KVCache
from pallas_kernels.ragged_paged_attention.rows import Rows, find_rows, write_new_tokens
from pallas_kernels.ragged_paged_attention.specs import AttentionCall

_DTYPES = tuple(jnp.dtype(d) for d in (jnp.bfloat16, jnp.float16))
_HEAD_DIMS = (64, 80, 96, 128, 256)


def unsupported_reason(call: AttentionCall) -> str | None:
    """Serves 16-bit activations on NVIDIA GPUs from Ampere on; xla serves the rest."""
    layout = call.layout
    if layout.platform != "gpu" or call.chip.platform != "gpu":
        return f"is for GPUs, not for a {call.chip.platform}"
    if call.chip.capability < (8, 0):
        return f"needs a GPU of compute capability 8.0 or more; {call.chip.name} has none such"
    if layout.axes != "LPSKH":
        return f"reads caches of axes LPSKH, not {layout.axes}"
    if call.q_dtype not in _DTYPES:
        return f"multiplies in bfloat16 or float16, not in {call.q_dtype}"
    if layout.dtype not in (call.q_dtype, *QUANTIZED_DTYPES):
        return f"a cache of {layout.dtype} does not go with activations of {call.q_dtype}"
    if layout.head_dim not in _HEAD_DIMS:
        return f"head dim {layout.head_dim} is none of {', '.join(map(str, _HEAD_DIMS))}"
    if layout.page_size % 16:
        return f"pages of {layout.page_size} tokens are no multiple of 16"
    if call.num_heads // layout.num_kv_heads > 16:
        return f"{call.num_heads // layout.num_kv_heads} query heads a KV head are more than 16"
    return gpu_decode.unsupported_reason(call) or gpu_prefill.unsupported_reason(call)


class Plan(NamedTuple):
    """What of a call depends on its rows alone.

    is_decoded: tokens whose row has no other new one.
    """

    rows: Rows
    is_decoded: Bool[Array, " T"]
    decode: gpu_decode.Chunks
    prefill: gpu_prefill.Plan


def plan(
    call: AttentionCall,
    num_tokens: int,
    num_pages: int,
    block_tables: Int32[Array, "R B"],
    kv_lens: Int32[Array, " R"],
    cu_q_lens: Int32[Array, " R+1"],
    num_rows: int | Int32[Array, ""],
) -> Plan:
    """See `PlanningImplementation.plan`."""
    where = (block_tables, kv_lens, cu_q_lens, num_rows)
    rows = find_rows(call.layout, num_tokens, num_pages, *where)
    is_decoded = rows.is_live & (rows.q_lens[rows.row_of_token] == 1)
    return Plan(rows, is_decoded, gpu_decode.plan(call, rows), gpu_prefill.plan(call, rows))


def ragged_paged_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    kv_cache: KVCache,
    layer: int | Int32[Array, ""],
    plan: Plan,
    *,
    call: AttentionCall,
    scale: float,
    sinks: Float32[Array, " N"] | None,
    k_scale: Float32[Array, " K"] | None,
    v_scale: Float32[Array, " K"] | None,
) -> tuple[Float[Array, "T N H"], KVCache]:
    """See `PlanningImplementation.ragged_paged_attention`."""
    rows = plan.rows
    kv_cache = write_new_tokens(
        *(call.layout, rows, k, v, kv_cache, layer), k_scale=k_scale, v_scale=v_scale
    )
    gpu_call = GpuCall(
        *(q, kv_cache, jnp.asarray(layer, jnp.int32), rows.pages),
        call=call,
        scale=scale,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    decoded = gpu_decode.decode_rows(gpu_call, plan.decode)
    out = jnp.where(
        plan.is_decoded[:, None, None],
        decoded[rows.row_of_token].astype(q.dtype),
        gpu_prefill.prefill_rows(gpu_call, plan.prefill),
    )
    return out, kv_cache
