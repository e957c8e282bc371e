"""The op in plain JAX, in the ways in which XLA does not first write out the weight dequantized.

What its compilers do with them is checked by `tests/compile/test_matmuls.py`.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Shaped

from pallas_kernels.quantized_matmul.specs import QuantizedCall, QuantizedWeight, quantize_tokens


def unsupported_reason(call: QuantizedCall) -> str | None:
    """Serves every call."""
    del call
    return None


def quantized_matmul(
    x: Float[Array, "M D"], weight: QuantizedWeight, *, call: QuantizedCall
) -> Float[Array, "M F"]:
    """See `pallas_kernels.quantized_matmul.quantized_matmul`."""
    num_blocks, (num_tokens, width, _) = call.num_blocks, call.shape
    block_len = width // num_blocks
    if call.quantizes_x:
        out = _of_quantized(x, weight, call)
    elif num_blocks == 1:
        out = _product(x, weight.values.astype(x.dtype)) * weight.scales
    elif call.chip.platform == "tpu" or 2 * num_tokens > block_len:
        # On a TPU part of the product. A GPU writes it out, which few tokens are not worth.
        blocks = weight.values.reshape(num_blocks, block_len, -1).astype(jnp.float32)
        matrix = (blocks * weight.scales[:, None]).astype(x.dtype)
        out = _product(x, matrix.reshape(width, -1))
    else:
        tokens = x.reshape(num_tokens, num_blocks, block_len)
        values = weight.values.reshape(num_blocks, block_len, -1).astype(x.dtype)
        parts = jnp.einsum(
            "mbd,bdf->bmf", tokens, values, precision="highest", preferred_element_type=jnp.float32
        )
        out = (parts * weight.scales[:, None]).sum(axis=0)
    return out.astype(x.dtype)


def _of_quantized(
    x: Float[Array, "M D"], weight: QuantizedWeight, call: QuantizedCall
) -> Float32[Array, "M F"]:
    """A block after the other, as the sums of all blocks at once would be B outputs in memory."""
    values, x_scales = quantize_tokens(x, call)
    if call.num_blocks == 1:
        return _product(values[:, 0], weight.values) * x_scales * weight.scales

    def add_block(
        out: Float32[Array, "M F"],
        block: tuple[
            Shaped[Array, "M d"], Float32[Array, " M"], Shaped[Array, "d F"], Float32[Array, " F"]
        ],
    ) -> tuple[Float32[Array, "M F"], None]:
        tokens, token_scales, matrix, scales = block
        return out + _product(tokens, matrix) * token_scales[:, None] * scales, None

    blocks = (
        values.swapaxes(0, 1),
        x_scales.T,
        weight.values.reshape(call.num_blocks, -1, weight.values.shape[1]),
        weight.scales,
    )
    zeros = jnp.zeros((x.shape[0], weight.values.shape[1]), jnp.float32)
    return jax.lax.scan(add_block, zeros, blocks)[0]


def _product(x: Shaped[Array, "M d"], matrix: Shaped[Array, "d F"]) -> Float32[Array, "M F"]:
    """Integers are summed up exactly, floats in float32."""
    is_integer = jnp.issubdtype(x.dtype, jnp.integer)
    out = jnp.matmul(
        x,
        matrix.astype(x.dtype) if is_integer else matrix,
        precision="highest" if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.int32 if is_integer else jnp.float32,
    )
    return out.astype(jnp.float32)
