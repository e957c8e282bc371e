"""The static facts of a grouped matmul, and real shapes."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels.chips import Chip

FLOAT_DTYPES = tuple(jnp.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16))
QUANTIZED_DTYPES = tuple(jnp.dtype(d) for d in (jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2))


@dataclasses.dataclass(frozen=True)
class GroupedCall:
    """What is known of a call when it is traced.

    chip: what the call will run on.
    shape: tokens, D, F.
    """

    chip: Chip
    shape: tuple[int, int, int]
    num_groups: int
    x_dtype: np.dtype
    weight_dtype: np.dtype
    has_scales: bool


@dataclasses.dataclass(frozen=True)
class ExpertShape:
    """The experts of a released model: how many, how many a token uses, hidden and inner size."""

    num_experts: int
    num_used: int
    hidden_size: int
    inner_size: int


EXPERT_SHAPES = {
    "Mixtral-8x7B": ExpertShape(8, 2, 4096, 14336),
    "Qwen3-30B-A3B": ExpertShape(128, 8, 2048, 768),
}
