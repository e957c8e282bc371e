"""The static facts of a matmul."""

import dataclasses

import numpy as np

from pallas_kernels.chips import Chip


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
