"""The op on NVIDIA GPUs: the KV write by XLA, then a kernel for decode rows and one for others."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32

from pallas_kernels.ragged_paged_attention import gpu_decode, gpu_prefill
from pallas_kernels.ragged_paged_attention.gpu_call import GpuCall
from pallas_kernels.ragged_paged_attention.layout import QUANTIZED_DTYPES, KVCache
from pallas_kernels.ragged_paged_attention.rows import write_new_tokens
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
    rows, kv_cache = write_new_tokens(
        *(call.layout, k, v, kv_cache, layer, block_tables, kv_lens, cu_q_lens, num_rows),
        k_scale=k_scale,
        v_scale=v_scale,
    )

    def part(takes_part: Array) -> GpuCall:
        return GpuCall(
            *(q, kv_cache, jnp.asarray(layer, jnp.int32), rows.pages),
            kv_lens=jnp.where(takes_part, kv_lens, 0),
            starts=jnp.where(takes_part, rows.starts, 0),
            q_lens=jnp.where(takes_part, rows.q_lens, 0),
            call=call,
            scale=scale,
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    decoded = gpu_decode.decode_rows(part(rows.q_lens == 1))
    is_decoded = rows.is_live & (rows.q_lens[rows.row_of_token] == 1)
    out = jnp.where(
        is_decoded[:, None, None],
        decoded[rows.row_of_token].astype(q.dtype),
        gpu_prefill.prefill_rows(part(rows.q_lens > 1)),
    )
    return out, kv_cache
