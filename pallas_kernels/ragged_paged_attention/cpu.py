"""The op on a CPU, in C (`cpu.c`): work in proportion to what rows hold, and to nothing else.
The call rotates queries and keys and writes the new keys and values itself: XLA would run that as
operations of their own, on one thread.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32, Int32

from pallas_kernels import native
from pallas_kernels.ragged_paged_attention import xla
from pallas_kernels.ragged_paged_attention.layout import KVCache
from pallas_kernels.ragged_paged_attention.rope import RopeTables
from pallas_kernels.ragged_paged_attention.rows import Rows
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


plan = xla.plan


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
    assert k_scale is None and v_scale is None
    packed = [q.reshape(len(q), k.shape[1], -1, q.shape[2]), k[:, :, None], v[:, :, None]]
    widest = jnp.result_type(*packed)
    qkv = jnp.concatenate([part.astype(widest) for part in packed], axis=2)
    out, kv_cache = _attend(qkv, None, kv_cache, layer, plan, call, scale, sinks)
    return out.astype(q.dtype), kv_cache


def attend_packed(
    qkv: Float[Array, "T K C H"],
    tables: RopeTables,
    kv_cache: KVCache,
    layer: int | Int32[Array, ""],
    plan: Rows,
    *,
    call: AttentionCall,
    scale: float,
) -> tuple[Float[Array, "T N H"], KVCache]:
    """See `PackedImplementation.attend_packed`."""
    return _attend(qkv, tables, kv_cache, layer, plan, call, scale, None)


def _attend(
    qkv: Float[Array, "T K C H"],
    tables: RopeTables | None,
    kv_cache: KVCache,
    layer: int | Int32[Array, ""],
    plan: Rows,
    call: AttentionCall,
    scale: float,
    sinks: Float32[Array, " N"] | None,
) -> tuple[Float[Array, "T N H"], KVCache]:
    num_tokens, _, _, head_dim = qkv.shape
    dtype = qkv.dtype if qkv.dtype in _DTYPES else jnp.dtype(jnp.float32)
    no_tables = np.zeros((0, 0), np.float32)
    whole = np.array([_is_by_tiles(call), call.sliding_window or 0], np.int32)
    real = np.array([scale, call.soft_cap or 0.0], np.float32)
    results = [
        jax.ShapeDtypeStruct((num_tokens, call.num_heads, head_dim), dtype),
        *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in kv_cache),
    ]
    out, keys, values = jax.ffi.ffi_call(_TARGET, results, input_output_aliases={3: 1, 4: 2})(
        *(qkv.astype(dtype), *(tables or (no_tables, no_tables)), *kv_cache),
        *(plan.pages, plan.kv_lens, plan.q_lens, plan.starts),
        *(np.zeros(0, np.float32) if sinks is None else sinks, jnp.asarray(layer, jnp.int32)),
        *(whole, real),
    )
    return out.astype(qkv.dtype), KVCache(keys, values)


def _is_by_tiles(call: AttentionCall) -> bool:
    """Whether the CPU's unit for tiles multiplies: 16 keys of one page with 32 dimensions each."""
    layout = call.layout
    is_bfloat16 = layout.dtype == call.q_dtype == jnp.bfloat16
    is_whole = layout.head_dim % 32 == 0 and layout.page_size % 16 == 0
    return is_bfloat16 and is_whole and native.has_tiles()
