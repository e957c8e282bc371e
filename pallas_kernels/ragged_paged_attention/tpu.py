"""The op on TPUs: a kernel for rows of one new token, then one for longer ones."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32

from pallas_kernels.ragged_paged_attention import tpu_decode, tpu_prefill
from pallas_kernels.ragged_paged_attention.layout import KVCache, join_heads
from pallas_kernels.ragged_paged_attention.specs import AttentionCall
from pallas_kernels.ragged_paged_attention.tpu_common import TpuCall, factors, pack_tables

_DTYPES = tuple(jnp.dtype(d) for d in (jnp.float32, jnp.bfloat16))
_SUBLANES = 8


def unsupported_reason(call: AttentionCall) -> str | None:
    """Serves TPUs, but for what does not fit their tiles or vector units."""
    layout, chip = call.layout, call.chip
    if chip.platform != "tpu" or layout.platform != "tpu":
        return f"is for TPUs, not for a {chip.platform}"
    if layout.axes != "LPSX":
        return f"reads caches of axes LPSX, not {layout.axes}"
    if call.q_dtype not in _DTYPES:
        return f"computes in float32 or bfloat16, not in {call.q_dtype}"
    if layout.dtype == jnp.float16:
        return f"TPUs have no {layout.dtype}, in which the cache is"
    if layout.page_size % _SUBLANES:
        return f"pages of {layout.page_size} tokens are no multiple of {_SUBLANES}"
    needed, room = tpu_decode.vmem_bytes(call), chip.core_memory_bytes
    if needed > tpu_decode.vmem_limit(chip):
        return f"{needed} bytes for {call.num_heads} query heads do not fit VMEM of {room}"
    return None


def ragged_paged_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    kv_cache: KVCache,
    layer: int | Int32[Array, ""],
    block_tables: Int32[Array, "R B"],
    kv_lens: Int32[Array, " R"],
    cu_q_lens: Int32[Array, " R+1"],
    num_rows: int | Int32[Array, ""],
    *,
    call: AttentionCall,
    scale: float,
    sinks: Float32[Array, " N"] | None,
    k_scale: Float32[Array, " K"] | None,
    v_scale: Float32[Array, " K"] | None,
) -> tuple[Float[Array, "T N H"], KVCache]:
    """See `pallas_kernels.ragged_paged_attention.ragged_paged_attention`."""
    layout = call.layout
    score_factors, out_factors = factors(call, scale, k_scale, v_scale)
    tpu_call = TpuCall(
        call=call,
        layer=jnp.asarray(layer, jnp.int32).reshape(1),
        num_rows=jnp.clip(jnp.asarray(num_rows, jnp.int32), 0, kv_lens.shape[0]).reshape(1),
        kv_lens=kv_lens,
        cu_q_lens=cu_q_lens,
        tables=pack_tables(block_tables, layout.num_pages(kv_cache)),
        q=q,
        k_new=join_heads(layout, layout.encode(k, k_scale)),
        v_new=join_heads(layout, layout.encode(v, v_scale)),
        sinks=sinks,
        score_factors=score_factors,
        out_factors=out_factors,
    )
    out, kv_cache = tpu_decode.decode(tpu_call, jnp.zeros_like(q), kv_cache)
    return tpu_prefill.prefill(tpu_call, out, kv_cache)
