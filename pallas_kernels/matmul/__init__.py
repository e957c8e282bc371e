"""The op: activations times a matrix as it is stored, or as one of a stack of them."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from pallas_kernels import dispatch
from pallas_kernels.chips import Chip
from pallas_kernels.matmul import cpu, xla
from pallas_kernels.matmul.specs import Int8Weights, MatmulCall, Weights

__all__ = [
    "AUTO_ORDER",
    "IMPLEMENTATIONS",
    "Int8Weights",
    "MatmulCall",
    "Weights",
    "explain",
    "matmul",
]


@runtime_checkable
class MatmulImplementation(dispatch.Implementation[MatmulCall], Protocol):
    """What a module of this package must hold to be an implementation."""

    def matmul(
        self,
        x: Float[Array, "M D"],
        weights: Weights,
        layer: int | Int32[Array, ""],
        num_tokens: int | Int32[Array, ""],
        out_dtype: jax.typing.DTypeLike,
    ) -> Float[Array, "M F"]:
        """See `pallas_kernels.matmul.matmul`; arguments are checked."""
        ...


IMPLEMENTATIONS: Mapping[str, MatmulImplementation] = {"cpu": cpu, "xla": xla}
AUTO_ORDER = ("cpu", "xla")


def explain(call: MatmulCall) -> dispatch.Explanation:
    """What "auto" chooses for `call`, and why the others were refused."""
    return dispatch.explain(IMPLEMENTATIONS, AUTO_ORDER, call)


def matmul(
    x: Float[Array, "M D"],
    weights: Weights,
    layer: int | Int32[Array, ""] = 0,
    num_tokens: int | Int32[Array, ""] | None = None,
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
    out_dtype: what the sums are rounded to.
    num_devices: over which a compiler may cut the arrays.

    Raises:
        ValueError: arguments that do not fit each other.
        UnsupportedError: `implementation` cannot serve the call.
    """
    matrices = weights.values if isinstance(weights, Int8Weights) else weights
    if x.shape[1] != matrices.shape[2]:
        raise ValueError(f"x {x.shape} and weights {matrices.shape} do not fit each other")
    if isinstance(weights, Int8Weights) and weights.scales.shape != matrices.shape[:2]:
        raise ValueError(f"scales {weights.scales.shape} are not for weights {matrices.shape}")
    shape = (x.shape[0], x.shape[1], matrices.shape[1])
    call = MatmulCall(chip, shape, matrices.dtype, num_devices)
    chosen = dispatch.choose(IMPLEMENTATIONS, AUTO_ORDER, implementation, call)
    live = x.shape[0] if num_tokens is None else num_tokens
    return IMPLEMENTATIONS[chosen].matmul(x, weights, layer, live, out_dtype)
