"""The op on a CPU, in C: few tokens take the time of reading the weights, many that of the unit for
tiles (AMX), or else of float32.

XLA's products of few tokens are slower than that; those of many where it emulates bfloat16, or does
not ask for weights ahead.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int32

from pallas_kernels import native
from pallas_kernels.matmul.specs import Fused, Int8Weights, MatmulCall, Weights

_FEW_TOKENS = 16  # of more, XLA's products are faster where the CPU multiplies bfloat16
_MOST_INT8 = 1 << 17  # of whose products a sum fits in 32 bits
_TARGET = "jaxserve_matmul"
_NOTHING = np.zeros(0, np.float32)


def unsupported_reason(call: MatmulCall) -> str | None:
    """Serves products with whole matrices of bfloat16 or int8, where it can be compiled."""
    if call.chip.platform != "cpu":
        return "runs on CPUs"
    if call.num_devices > 1:
        return "does not cut arrays over devices"
    if call.weight_dtype not in (jnp.bfloat16, jnp.int8):
        return f"multiplies with weights of bfloat16 or int8, not {call.weight_dtype.name}"
    if call.weight_dtype == jnp.int8 and call.shape[1] > _MOST_INT8:
        return f"sums up {_MOST_INT8:,} products of int8 at most"
    if call.num_gated > 1:
        return "takes gates of one part"
    if problem := native.problem(_TARGET):
        return problem
    if call.shape[0] > _FEW_TOKENS and multiplies_bfloat16() and not has_tiles():
        return f"is for up to {_FEW_TOKENS} tokens where the CPU multiplies bfloat16, not by tiles"
    return None


def matmul(
    x: Float[Array, "M *D"],
    weights: Weights,
    layer: int | Int32[Array, ""],
    num_tokens: int | Int32[Array, ""],
    out_dtype: jax.typing.DTypeLike,
    fused: Fused,
) -> Float[Array, "M F"]:
    """See `pallas_kernels.matmul.matmul`; rows past num_tokens are zeros.

    Norm, gates and what is added are part of the call: XLA would run them as operations of
    their own, on one thread.
    """
    matrices, scales = weights if isinstance(weights, Int8Weights) else (weights, _NOTHING)
    norm = _NOTHING if fused.norm is None else _real(fused.norm)
    residual = _NOTHING if fused.residual is None else _real(fused.residual)
    out = jax.ShapeDtypeStruct(
        (x.shape[0], matrices.shape[1]),
        jnp.bfloat16 if jnp.dtype(out_dtype) == jnp.bfloat16 else jnp.float32,
    )
    by_tiles = x.dtype == jnp.bfloat16 and has_tiles()
    where = (jnp.asarray(layer, jnp.int32), jnp.asarray(num_tokens, jnp.int32))
    others = (norm, np.float32(fused.eps), residual, np.int32(by_tiles))
    call = jax.ffi.ffi_call(_TARGET, out)
    return call(_real(x), matrices, scales, *where, *others).astype(out_dtype)


def _real(array: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """As C takes it."""
    return array if array.dtype in (jnp.bfloat16, jnp.float32) else array.astype(jnp.float32)


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for that, which XLA makes use of."""
    return re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", native.cpu()) is not None


def has_tiles() -> bool:
    """Whether this CPU has a unit that multiplies tiles of bfloat16, and a compiler made use of it.

    Then each token's result is the same whatever tokens are around it.
    """
    return native.problem(_TARGET) is None and native.has_tiles()
