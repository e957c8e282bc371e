"""The op: activations times a matrix as it is stored, or as one of a stack of them."""

import math
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from pallas_kernels import dispatch
from pallas_kernels.chips import Chip
from pallas_kernels.matmul import cpu, xla
from pallas_kernels.matmul.specs import NOTHING_FUSED, Fused, Int8Weights, MatmulCall, Weights
from pallas_kernels.matmul.xla import of_layer, rms_norm

__all__ = [
    "AUTO_ORDER",
    "IMPLEMENTATIONS",
    "NOTHING_FUSED",
    "Fused",
    "Int8Weights",
    "MatmulCall",
    "Weights",
    "explain",
    "matmul",
    "of_layer",
    "rms_norm",
]


@runtime_checkable
class MatmulImplementation(dispatch.Implementation[MatmulCall], Protocol):
    """What a module of this package must hold to be an implementation."""

    def matmul(
        self,
        x: Float[Array, "M *D"],
        weights: Weights,
        layer: int | Int32[Array, ""],
        num_tokens: int | Int32[Array, ""],
        out_dtype: jax.typing.DTypeLike,
        fused: Fused,
    ) -> Float[Array, "M F"]:
        """See `pallas_kernels.matmul.matmul`; arguments are checked."""
        ...


IMPLEMENTATIONS: Mapping[str, MatmulImplementation] = {"cpu": cpu, "xla": xla}
AUTO_ORDER = ("cpu", "xla")


def explain(call: MatmulCall) -> dispatch.Explanation:
    """What "auto" chooses for `call`, and why the others were refused."""
    return dispatch.explain(IMPLEMENTATIONS, AUTO_ORDER, call)


def matmul(
    x: Float[Array, "M *D"],
    weights: Weights,
    layer: int | Int32[Array, ""] = 0,
    num_tokens: int | Int32[Array, ""] | None = None,
    fused: Fused = NOTHING_FUSED,
    *,
    out_dtype: jax.typing.DTypeLike = jnp.float32,
    chip: Chip,
    num_devices: int = 1,
    implementation: str = "auto",
) -> Float[Array, "M F"]:
    """x @ weights[layer].T, summed up in float32; inputs of float32 are not rounded.

    Next to int8 weights bfloat16 may become integers of 16 bits with a scale a token; then they are
    off by up to half of 1 / 32,639 of the token's largest entry, tokens below 1e-34 are zeros, and
    an entry that is not finite makes all results of its token NaN.

    num_tokens: live rows of x, the first ones; None: all. What comes of others is finite if they
      are, and unspecified.
    fused: what is done to x first, and to the sums last; each may be rounded to its array's dtype.
    out_dtype: what the sums are rounded to.
    num_devices: over which a compiler may cut the arrays.

    Raises:
        ValueError: arguments that do not fit each other.
        UnsupportedError: `implementation` cannot serve the call.
    """
    matrices = weights.values if isinstance(weights, Int8Weights) else weights
    width = math.prod(x.shape[2:]) * x.shape[1] // (2 if fused.is_gated else 1)
    is_packed = x.ndim == 4 and x.shape[2] == 2
    if (not is_packed if fused.is_gated else x.ndim != 2) or width != matrices.shape[2]:
        raise ValueError(f"x {x.shape} and weights {matrices.shape} do not fit each other")
    if isinstance(weights, Int8Weights) and weights.scales.shape != matrices.shape[:2]:
        raise ValueError(f"scales {weights.scales.shape} are not for weights {matrices.shape}")
    shape = (x.shape[0], width, matrices.shape[1])
    _check_fused(fused, matrices.shape[0], shape)
    num_gated = x.shape[1] if fused.is_gated else 0
    call = MatmulCall(chip, shape, matrices.dtype, num_devices, num_gated)
    chosen = dispatch.choose(IMPLEMENTATIONS, AUTO_ORDER, implementation, call)
    live = x.shape[0] if num_tokens is None else num_tokens
    return IMPLEMENTATIONS[chosen].matmul(x, weights, layer, live, out_dtype, fused)


def _check_fused(fused: Fused, num_layers: int, shape: tuple[int, int, int]) -> None:
    num_tokens, width, num_channels = shape
    if fused.norm is not None and fused.norm.shape != (num_layers, width):
        raise ValueError(f"a norm {fused.norm.shape} is not for {num_layers} layers of {width}")
    if fused.norm is not None and fused.is_gated:
        raise ValueError("x is gated, or goes through a norm, not both")
    if fused.residual is not None and fused.residual.shape != (num_tokens, num_channels):
        raise ValueError(f"{fused.residual.shape} is added to {(num_tokens, num_channels)}")
