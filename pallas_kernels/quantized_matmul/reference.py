"""The definition of the op in plain JAX: everything dequantized to float32."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from pallas_kernels.quantized_matmul.specs import QuantizedCall, QuantizedWeight, quantize_tokens


def unsupported_reason(call: QuantizedCall) -> str | None:
    """The definition serves every call."""
    del call
    return None


def quantized_matmul(
    x: Float[Array, "M D"], weight: QuantizedWeight, *, call: QuantizedCall
) -> Float[Array, "M F"]:
    """See `pallas_kernels.quantized_matmul.quantized_matmul`."""
    tokens = x.astype(jnp.float32)
    if call.quantizes_x:
        values, scales = quantize_tokens(x, call)
        tokens = (values.astype(jnp.float32) * scales[:, :, None]).reshape(x.shape)
    block_len = x.shape[1] // call.num_blocks
    scales = jnp.repeat(weight.scales, block_len, axis=0)
    matrix = weight.values.astype(jnp.float32) * scales
    return jnp.matmul(tokens, matrix, precision="highest").astype(x.dtype)
