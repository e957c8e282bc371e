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


@dataclasses.dataclass(frozen=True)
class MatmulCall:
    """What is known of a call when it is traced.

    chip: what the call will run on.
    shape: tokens, D, F.
    num_devices: over which the arrays may be cut.
    """

    chip: Chip
    shape: tuple[int, int, int]
    weight_dtype: np.dtype
    num_devices: int
