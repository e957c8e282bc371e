"""The static facts of a matmul."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from jax import Array
from jaxtyping import Float

from pallas_kernels.chips import Chip


class Int8Weights(NamedTuple):
    """A stack of matrices values * scales, with a scale for each channel; a pytree.

    Models may have several axes of channels, or one matrix without a stack. Its leaves are arrays,
    or what stands for arrays in JAX.
    """

    values: Any  # Int8[Array, "*F D"]
    scales: Any  # Float32[Array, "*F"]


type Weights = Float[Array, "L F D"] | Int8Weights


class Fused(NamedTuple):
    """What is done to x before a product, and to its sums after it.

    norm: weights of all layers [L, D] of an RMS norm (Zhang and Sennrich, 2019) with `eps`, which x
      goes through first.
    is_gated: x is [M, P, 2, D / P], gates and what they let through (SwiGLU; Shazeer, 2020), P
      times; the product is with silu(gate) * up.  Not with a norm.
    residual: [M, F], which is added to the sums.
    """

    norm: Float[Array, "L D"] | None = None
    eps: float = 0.0
    is_gated: bool = False
    residual: Float[Array, "M F"] | None = None


NOTHING_FUSED = Fused()


@dataclasses.dataclass(frozen=True)
class MatmulCall:
    """What is known of a call when it is traced.

    chip: what the call will run on.
    shape: tokens, D, F.
    num_devices: over which the arrays may be cut.
    num_gated: P of `Fused` where x is gated, else 0.
    """

    chip: Chip
    shape: tuple[int, int, int]
    weight_dtype: np.dtype
    num_devices: int
    num_gated: int = 0
