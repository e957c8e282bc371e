"""The op: activations times a matrix of 8-bit or 4-bit weights with scales."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from jax import Array
from jaxtyping import Float

from pallas_kernels import dispatch
from pallas_kernels.chips import Chip
from pallas_kernels.quantized_matmul import reference, xla
from pallas_kernels.quantized_matmul.specs import (
    FLOAT8_DTYPES,
    INTEGER_DTYPES,
    QuantizedCall,
    QuantizedWeight,
)

__all__ = [
    "AUTO_ORDER",
    "IMPLEMENTATIONS",
    "QuantizedCall",
    "QuantizedWeight",
    "explain",
    "quantized_matmul",
]


@runtime_checkable
class QuantizedImplementation(dispatch.Implementation[QuantizedCall], Protocol):
    """What a module of this package must hold to be an implementation."""

    def quantized_matmul(
        self, x: Float[Array, "M D"], weight: QuantizedWeight, *, call: QuantizedCall
    ) -> Float[Array, "M F"]:
        """See `pallas_kernels.quantized_matmul.quantized_matmul`; arguments are checked."""
        ...


IMPLEMENTATIONS: Mapping[str, QuantizedImplementation] = {"xla": xla, "reference": reference}
AUTO_ORDER = ("xla", "reference")


def explain(call: QuantizedCall) -> dispatch.Explanation:
    """What "auto" chooses for `call`, and why the others were refused."""
    return dispatch.explain(IMPLEMENTATIONS, AUTO_ORDER, call)


def quantized_matmul(
    x: Float[Array, "M D"],
    weight: QuantizedWeight,
    *,
    chip: Chip,
    quantize_x: bool = False,
    implementation: str = "auto",
) -> Float[Array, "M F"]:
    """x @ (values * scales), summed up in float32 and rounded to x's dtype.

    With `quantize_x` (w8a8) each token's part of each block of the weight is first rounded to 8
    bits, by `specs.quantize_tokens`; without (w8a16, w4a16) x is taken as it is, and a weight with
    several blocks may be rounded to x's dtype once its scales are applied. A token that holds NaN
    has no effect on others.

    Raises:
        ValueError: arguments that do not fit each other.
        UnsupportedError: `implementation` cannot serve the call, or with "auto" nothing can.
    """
    values, scales = weight
    width, num_channels = values.shape
    call = QuantizedCall(
        *(chip, (x.shape[0], width, num_channels), x.dtype, values.dtype, scales.shape[0]),
        quantizes_x=quantize_x,
    )
    if values.dtype not in INTEGER_DTYPES + FLOAT8_DTYPES:
        names = ", ".join(d.name for d in INTEGER_DTYPES + FLOAT8_DTYPES)
        raise ValueError(f"weights of {values.dtype} are not one of {names}")
    if x.shape[1] != width or scales.shape[1] != num_channels or width % scales.shape[0]:
        raise ValueError(
            f"x {x.shape}, values {values.shape} and scales {scales.shape} do not fit each other"
        )
    chosen = dispatch.choose(IMPLEMENTATIONS, AUTO_ORDER, implementation, call)
    return IMPLEMENTATIONS[chosen].quantized_matmul(x, weight, call=call)
