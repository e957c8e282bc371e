"""The op as XLA's own product."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32

from pallas_kernels.matmul.specs import Int8Weights, MatmulCall, Weights


def unsupported_reason(call: MatmulCall) -> str | None:
    """Serves every call."""
    del call
    return None


def matmul(
    x: Float[Array, "M D"],
    weights: Weights,
    layer: int | Int32[Array, ""],
    num_tokens: int | Int32[Array, ""],
    out_dtype: jax.typing.DTypeLike,
) -> Float[Array, "M F"]:
    """See `pallas_kernels.matmul.matmul`; all rows are live."""
    del num_tokens
    weight = jax.tree.map(
        lambda array: jax.lax.dynamic_index_in_dim(
            array, layer, keepdims=False, allow_negative_indices=False
        ),
        weights,
    )
    if isinstance(weight, Int8Weights):
        return (_product(x, weight.values.astype(x.dtype)) * weight.scales).astype(out_dtype)
    return _product(x, weight).astype(out_dtype)


def _product(x: Float[Array, "M D"], weight: Float[Array, "F D"]) -> Float32[Array, "M F"]:
    return jax.lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision="highest" if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
