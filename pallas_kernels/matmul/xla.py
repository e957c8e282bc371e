"""The op as XLA's own product."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32, Shaped

from pallas_kernels.matmul.specs import NOTHING_FUSED, Fused, Int8Weights, MatmulCall, Weights


def unsupported_reason(call: MatmulCall) -> str | None:
    """Serves every call."""
    del call
    return None


def matmul(
    x: Float[Array, "M *D"],
    weights: Weights,
    layer: int | Int32[Array, ""],
    num_tokens: int | Int32[Array, ""],
    out_dtype: jax.typing.DTypeLike,
    fused: Fused = NOTHING_FUSED,
) -> Float[Array, "M F"]:
    """See `pallas_kernels.matmul.matmul`; all rows are live."""
    del num_tokens
    if fused.norm is not None:
        x = rms_norm(x, of_layer(fused.norm, layer), fused.eps)
    if fused.is_gated:
        x = _pass_gates(x)
    weight = jax.tree.map(lambda array: of_layer(array, layer), weights)
    if isinstance(weight, Int8Weights):
        product = _product(x, weight.values.astype(x.dtype)) * weight.scales
    else:
        product = _product(x, weight)
    product = product.astype(out_dtype)
    return product if fused.residual is None else (fused.residual + product).astype(out_dtype)


def rms_norm(x: Float[Array, "T D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "T D"]:
    """Root mean square norm (Zhang and Sennrich, 2019), computed in float32, in x's dtype."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (normed * weight.astype(jnp.float32)).astype(x.dtype)


def _pass_gates(x: Float[Array, "M P 2 C"]) -> Float[Array, "M D"]:
    """In float32: CPUs have no other arithmetic, and would round after each operation. Cut before,
    as TPUs would write the product that gave x in float32."""
    gate, up = x[:, :, 0].astype(jnp.float32), x[:, :, 1].astype(jnp.float32)
    return (jax.nn.silu(gate) * up).astype(x.dtype).reshape(len(x), -1)


def of_layer(stack: Shaped[Array, "L *S"], layer: int | Int32[Array, ""]) -> Shaped[Array, "*S"]:
    """One of a stack of arrays, by an index from 0 on."""
    return jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False, allow_negative_indices=False)


def _product(x: Float[Array, "M D"], weight: Float[Array, "F D"]) -> Float32[Array, "M F"]:
    return jax.lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision="highest" if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
