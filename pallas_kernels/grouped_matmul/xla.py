"""The op by `jax.lax.ragged_dot`.

On TPUs XLA has a kernel for it, which reads the weights of groups that have tokens, once, in their
own dtype; but int8 on a TPU7x, whose units do not multiply it, is written out in float32 before. On
GPUs and CPUs it multiplies every token, or zeros, with every group.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32, Shaped

from pallas_kernels.grouped_matmul.specs import GroupedCall


def unsupported_reason(call: GroupedCall) -> str | None:
    """Serves every call."""
    del call
    return None


def grouped_matmul(
    x: Float[Array, "M D"],
    weights: Shaped[Array, "E D F"],
    group_sizes: Int32[Array, " E"],
    scales: Float32[Array, "E F"] | None,
    *,
    call: GroupedCall,
) -> Float[Array, "M F"]:
    """See `pallas_kernels.grouped_matmul.grouped_matmul`."""
    ends = jnp.cumsum(group_sizes)
    tokens = jnp.arange(x.shape[0])
    is_live = (tokens < ends[-1])[:, None]
    out = jax.lax.ragged_dot(
        jnp.where(is_live, x, 0),
        weights,
        group_sizes,
        precision="highest" if call.x_dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    if scales is not None:
        group = jnp.sum(tokens[:, None] >= ends, axis=1).clip(max=call.num_groups - 1)
        out *= scales[group]
    return jnp.where(is_live, out, 0).astype(x.dtype)
