"""The op on a CPU, in C (`cpu.c`): work in proportion to what rows hold, and to nothing else.

XLA writes the new keys and values, as for `xla`.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32

from pallas_kernels import native
from pallas_kernels.ragged_paged_attention import xla
from pallas_kernels.ragged_paged_attention.layout import KVCache
from pallas_kernels.ragged_paged_attention.rows import Rows, write_new_tokens
from pallas_kernels.ragged_paged_attention.specs import AttentionCall

_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
_MAX_LANES = 16  # a head is whole vectors
_TARGET = "jaxserve_ragged_paged_attention"


def unsupported_reason(call: AttentionCall) -> str | None:
    """Serves caches of bfloat16 and float32 that keep all heads of a token together."""
    if call.chip.platform != "cpu":
        return f"is for CPUs, not for a {call.chip.name}"
    layout = call.layout
    if layout.axes != "LPSKH":
        return f"reads caches of axes LPSKH, not {layout.axes}"
    if layout.dtype not in _DTYPES:
        return f"reads caches of bfloat16 and float32, not {layout.dtype.name}"
    if call.has_scales:
        return "does not scale what it reads"
    if layout.head_dim % _MAX_LANES:
        return f"wants heads of a multiple of {_MAX_LANES}, not of {layout.head_dim}"
    return native.problem(_TARGET)


plan = xla.plan  # XLA writes, so it is told where


def ragged_paged_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    kv_cache: KVCache,
    layer: int | Int32[Array, ""],
    plan: Rows,
    *,
    call: AttentionCall,
    scale: float,
    sinks: Float32[Array, " N"] | None,
    k_scale: Float32[Array, " K"] | None,
    v_scale: Float32[Array, " K"] | None,
) -> tuple[Float[Array, "T N H"], KVCache]:
    """See `PlanningImplementation.ragged_paged_attention`."""
    rows = plan
    kv_cache = write_new_tokens(
        *(call.layout, rows, k, v, kv_cache, layer), k_scale=k_scale, v_scale=v_scale
    )
    window = jnp.int32(call.sliding_window or 0)
    whole = jnp.stack([jnp.asarray(layer, jnp.int32), window])
    real = jnp.array([scale, call.soft_cap or 0.0], jnp.float32)
    no_sinks = jnp.zeros(0, jnp.float32)
    by_tiles = _is_by_tiles(call)
    out = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct(q.shape, jnp.float32))(
        *(q if by_tiles else q.astype(jnp.float32), kv_cache.k, kv_cache.v),
        *(rows.pages, rows.kv_lens, rows.q_lens, rows.starts),
        *(no_sinks if sinks is None else sinks, whole, real),
    )
    return out.astype(q.dtype), kv_cache


def _is_by_tiles(call: AttentionCall) -> bool:
    """Whether the CPU's unit for tiles multiplies: 16 keys of one page with 32 dimensions each."""
    layout = call.layout
    is_bfloat16 = layout.dtype == call.q_dtype == jnp.bfloat16
    is_whole = layout.head_dim % 32 == 0 and layout.page_size % 16 == 0
    return is_bfloat16 and is_whole and native.has_tiles()
