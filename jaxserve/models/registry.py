"""Which architecture is served by which model functions, and what a model must provide."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from jax import Array
from jaxtyping import Float, Float32, Int32

from jaxserve.config import ModelInfo
from jaxserve.models.layers import Matmul, linear, matmul_by_xla
from pallas_kernels.matmul import NOTHING_FUSED, Fused, Int8Weights
from pallas_kernels.ragged_paged_attention import KVCache, RopeTables

type Params = Mapping[str, Array | Int8Weights]
type Attend = Callable[
    [Float[Array, "T K C H"], RopeTables, KVCache, Int32[Array, ""]],
    tuple[Float[Array, "T N H"], KVCache],
]


@runtime_checkable
class Linear(Protocol):
    """`layers.linear`, or what does the same on a mesh."""

    def __call__(
        self,
        x: Float[Array, "T *I"],
        weights: Float[Array, "L *O I"] | Int8Weights,
        layer: Int32[Array, ""],
        fused: Fused = NOTHING_FUSED,
    ) -> Float[Array, "T *O"]: ...


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter array: its shape, what its axes mean, and where its values come from.

    axes: a logical name an axis, or None: "layers", "embed", "heads", "kv_heads", "mlp", "parts",
      "vocab". `worker/sharding.py` says which of them a mesh splits.
    sources: one group of checkpoint tensor names (Hugging Face names, "{i}" is the layer) that
      together fill one layer. With "layers" as first axis there is one such group a layer.
    assemble: turns one group's tensors into the array (of one layer); None: the single tensor.
    is_quantized: by `--quantization`; then the model takes `Int8Weights` too. Products sum over the
      last axis.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    sources: tuple[str, ...]
    assemble: Callable | None = None
    is_quantized: bool = False

    @property
    def is_stacked(self) -> bool:
        return self.axes[0] == "layers"


@runtime_checkable
class Model(Protocol):
    """What an architecture's module must hold."""

    def param_specs(self, info: ModelInfo, num_parts: int = 1) -> dict[str, ParamSpec]:
        """Every parameter of the model, by name, such that `num_parts` divides the axes "heads",
        "kv_heads", "mlp" and "parts", and each part of them belongs together: see `partition`.

        `forward` takes the parameters of any number of parts.
        """
        ...

    def forward(
        self,
        params: Params,
        info: ModelInfo,
        token_ids: Int32[Array, " T"],
        positions: Int32[Array, " T"],
        kv_cache: KVCache,
        attend: Attend,
        linear: Linear = linear,
        sum_linear: Linear = linear,
    ) -> tuple[Float[Array, "T D"], KVCache]:
        """Hidden states after the last norm; padding tokens may hold any valid id.

        attend: `ragged_paged_attention.attend_packed`, of a KV head's G queries, key and value.
        linear: `layers.linear`, for all but the next.
        sum_linear: for weights whose last axis a mesh may split; sums over devices.
        """
        ...

    def logits(
        self,
        params: Params,
        info: ModelInfo,
        hidden: Float[Array, "R D"],
        matmul: Matmul = matmul_by_xla,
    ) -> Float32[Array, "R V"]:
        """Next-token scores."""
        ...


def model_for(info: ModelInfo) -> Model:
    """The model functions for a checkpoint; `checkpoint.load_model_info` has refused others."""
    from jaxserve.models import llama

    assert info.architecture == "LlamaForCausalLM", info.architecture
    return llama
