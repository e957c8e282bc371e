"""What the two GPU kernels of ragged paged attention are given of a call."""

from typing import NamedTuple

from jax import Array
from jaxtyping import Float, Float32, Int32

from pallas_kernels.ragged_paged_attention.layout import KVCache
from pallas_kernels.ragged_paged_attention.specs import AttentionCall


class GpuCall(NamedTuple):
    """A call as `gpu.py` hands it on; this step's K and V are in the cache already.

    q: padding tokens may hold anything.
    kv_cache: axes [L, P, S, K, H]; slots that no live token owns may hold anything, NaN too.
    pages: in range everywhere, also where the block table holds garbage.
    scale, sinks, k_scale, v_scale: as `ragged_paged_attention` has them.
    """

    q: Float[Array, "T N H"]
    kv_cache: KVCache
    layer: Int32[Array, ""]
    pages: Int32[Array, "R B"]
    call: AttentionCall
    scale: float
    sinks: Float32[Array, " N"] | None
    k_scale: Float32[Array, " K"] | None
    v_scale: Float32[Array, " K"] | None
