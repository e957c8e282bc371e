"""The static facts of an attention call, and the named real shapes that tests and benches use."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import tuning
from pallas_kernels.chips import Chip
from pallas_kernels.ragged_paged_attention.layout import KVCacheLayout


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """What is known of a call when it is traced: all that an implementation may refuse it for.

    chip: what the call will run on.
    """

    layout: KVCacheLayout
    chip: Chip
    num_heads: int
    q_dtype: np.dtype
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    has_scales: bool = False

    @property
    def tuning_shape(self) -> tuning.Shape:
        """What the best block sizes of the op's kernels depend on, beside the chip."""
        layout = self.layout
        return tuning.Shape(
            exact={
                "q_dtype": self.q_dtype.name,
                "kv_dtype": layout.dtype.name,
                "num_kv_heads": layout.num_kv_heads,
                "head_dim": layout.head_dim,
                "page_size": layout.page_size,
            },
            near={"num_heads": self.num_heads},
        )

    def tuned_sizes(self, kernel: str) -> tuning.Sizes | None:
        """Sizes of one of the op's kernels, such as "tpu_decode", tuned for a call like this."""
        return tuning.tuned_sizes(Path(__file__).parent, kernel, self.chip, self.tuning_shape)


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The attention of a released model."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def call(
        self, chip: Chip, dtype: jax.typing.DTypeLike = jnp.bfloat16, page_size: int = 16
    ) -> AttentionCall:
        """The call this model makes on one chip with activations and cache in `dtype`."""
        layout = KVCacheLayout.for_platform(
            chip.platform, self.num_layers, self.num_kv_heads, self.head_dim, dtype, page_size
        )
        return AttentionCall(layout, chip, self.num_heads, jnp.dtype(dtype))


MODEL_SHAPES = {
    "SmolLM2-135M": ModelShape(num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64),
    "Llama-3-8B": ModelShape(num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128),
    "Qwen3-32B": ModelShape(num_layers=64, num_heads=64, num_kv_heads=8, head_dim=128),
    "Llama-3.3-70B": ModelShape(num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128),
}
