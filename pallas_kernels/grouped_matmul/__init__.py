"""The op: each token times the matrix of its group, as the experts of a model need it."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from jax import Array
from jaxtyping import Float, Float32, Int32, Shaped

from pallas_kernels import dispatch
from pallas_kernels.chips import Chip
from pallas_kernels.grouped_matmul import reference, xla
from pallas_kernels.grouped_matmul.specs import FLOAT_DTYPES, QUANTIZED_DTYPES, GroupedCall

__all__ = ["AUTO_ORDER", "IMPLEMENTATIONS", "GroupedCall", "explain", "grouped_matmul"]


@runtime_checkable
class GroupedImplementation(dispatch.Implementation[GroupedCall], Protocol):
    """What a module of this package must hold to be an implementation."""

    def grouped_matmul(
        self,
        x: Float[Array, "M D"],
        weights: Shaped[Array, "E D F"],
        group_sizes: Int32[Array, " E"],
        scales: Float32[Array, "E F"] | None,
        *,
        call: GroupedCall,
    ) -> Float[Array, "M F"]:
        """See `pallas_kernels.grouped_matmul.grouped_matmul`; arguments are checked."""
        ...


IMPLEMENTATIONS: Mapping[str, GroupedImplementation] = {"xla": xla, "reference": reference}
AUTO_ORDER = ("xla", "reference")


def explain(call: GroupedCall) -> dispatch.Explanation:
    """What "auto" chooses for `call`, and why the others were refused."""
    return dispatch.explain(IMPLEMENTATIONS, AUTO_ORDER, call)


def grouped_matmul(
    x: Float[Array, "M D"],
    weights: Shaped[Array, "E D F"],
    group_sizes: Int32[Array, " E"],
    scales: Float32[Array, "E F"] | None = None,
    *,
    chip: Chip,
    implementation: str = "auto",
) -> Float[Array, "M F"]:
    """Each token times the weights of its group; tokens lie in the order of groups.

    Group e has the next group_sizes[e] tokens; none is fine. Tokens past the last group are
    padding: they may hold anything, NaN too, and their output is zero. 8-bit weights stand for
    weights * scales, a scale for each channel of a group; 1 when not given. Sums are float32; the
    output has x's dtype.

    Raises:
        ValueError: weights of another dtype, scales where there can be none.
        UnsupportedError: `implementation` cannot serve the call, or with "auto" nothing can.
    """
    num_groups, width, num_channels = weights.shape
    call = GroupedCall(
        *(chip, (x.shape[0], width, num_channels), num_groups, x.dtype, weights.dtype),
        has_scales=scales is not None,
    )
    if weights.dtype not in FLOAT_DTYPES + QUANTIZED_DTYPES:
        names = ", ".join(d.name for d in FLOAT_DTYPES + QUANTIZED_DTYPES)
        raise ValueError(f"weights of {weights.dtype} are not one of {names}")
    if scales is not None and weights.dtype not in QUANTIZED_DTYPES:
        raise ValueError(f"scales are for 8-bit weights, not {weights.dtype}")
    chosen = dispatch.choose(IMPLEMENTATIONS, AUTO_ORDER, implementation, call)
    return IMPLEMENTATIONS[chosen].grouped_matmul(x, weights, group_sizes, scales, call=call)
