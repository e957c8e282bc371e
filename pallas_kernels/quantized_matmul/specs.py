"""The static facts of a quantized matmul, how activations are quantized, and real shapes."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32, Shaped

from pallas_kernels.chips import Chip

INTEGER_DTYPES = (jnp.dtype(jnp.int8), jnp.dtype(jnp.int4))
FLOAT8_DTYPES = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))


class QuantizedWeight(NamedTuple):
    """A matrix [D, F] of values * scales; a pytree.

    values: int8, int4 or float8. Devices keep two int4 in a byte.
    scales: row b is for the b-th of B equal blocks of D; B = 1 is one scale for a channel of F.
    """

    values: Shaped[Array, "D F"]
    scales: Float32[Array, "B F"]


@dataclasses.dataclass(frozen=True)
class QuantizedCall:
    """What is known of a call when it is traced.

    chip: what the call will run on.
    shape: tokens, D, F.
    num_blocks: of scales along D.
    """

    chip: Chip
    shape: tuple[int, int, int]
    x_dtype: np.dtype
    weight_dtype: np.dtype
    num_blocks: int
    quantizes_x: bool

    @property
    def token_dtype(self) -> np.dtype:
        """What activations are quantized to: the 8-bit type that a chip multiplies weights with."""
        is_integer = self.weight_dtype in INTEGER_DTYPES
        return jnp.dtype(jnp.int8 if is_integer else jnp.float8_e4m3fn)


def quantize_tokens(
    x: Float[Array, "M D"], call: QuantizedCall
) -> tuple[Shaped[Array, "M B d"], Float32[Array, "M B"]]:
    """x as values * scales, a scale for each token and block: the largest |x| / the largest value.

    Computed in float32: x * (largest value / largest |x|), integers rounded to the nearest even.
    """
    blocks = x.astype(jnp.float32).reshape(x.shape[0], call.num_blocks, -1)
    peaks = jnp.abs(blocks).max(axis=2)
    if call.token_dtype == jnp.int8:
        largest = np.float32(127)
    else:
        largest = np.float32(jnp.finfo(call.token_dtype).max)
    inverses = jnp.where(peaks > 0, largest / peaks, 0)
    scaled = jnp.clip(blocks * inverses[:, :, None], -largest, largest)
    if call.token_dtype == jnp.int8:
        scaled = jnp.round(scaled)
    return scaled.astype(call.token_dtype), peaks * (1 / largest)


# D and F of the weights of released models.
WEIGHT_SHAPES = {
    "Llama-3-8B gate_up": (4096, 28672),
    "Llama-3-8B down": (14336, 4096),
    "Qwen3-32B gate_up": (5120, 51200),
}
