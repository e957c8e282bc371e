"""The definition of the op in plain JAX: every token times the whole weight of its group."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32, Shaped

from pallas_kernels.grouped_matmul.specs import GroupedCall


def unsupported_reason(call: GroupedCall) -> str | None:
    """The definition serves every call."""
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

    def add_group(group: Int32[Array, ""], out: Float32[Array, "M F"]) -> Float32[Array, "M F"]:
        is_mine = (tokens >= ends[group] - group_sizes[group]) & (tokens < ends[group])
        product = jnp.matmul(
            x.astype(jnp.float32), weights[group].astype(jnp.float32), precision="highest"
        )
        if scales is not None:
            product *= scales[group]
        return jnp.where(is_mine[:, None], product, out)

    zeros = jnp.zeros((x.shape[0], weights.shape[2]), jnp.float32)
    return jax.lax.fori_loop(0, call.num_groups, add_group, zeros).astype(x.dtype)
