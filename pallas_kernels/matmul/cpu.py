"""The op for a few tokens on a CPU, in C: it reads bfloat16 weights as fast as memory gives them.

XLA's products of few tokens are slower than that.
"""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32

from pallas_kernels import native
from pallas_kernels.matmul.specs import MatmulCall

_MAX_TOKENS = 32  # XLA's products of more tokens are as fast
_MAX_TOKENS_WITH_BFLOAT16 = 16  # where the CPU multiplies bfloat16, which XLA makes use of
_SOURCE = Path(__file__).with_suffix(".c")
_TARGET = "jaxserve_matmul"


def unsupported_reason(call: MatmulCall) -> str | None:
    """Serves products of few tokens with whole matrices of bfloat16, where it can be compiled."""
    if call.chip.platform != "cpu":
        return "runs on CPUs"
    if call.num_devices > 1:
        return "does not cut arrays over devices"
    if call.weight_dtype != jnp.bfloat16:
        return f"multiplies with weights of bfloat16, not {call.weight_dtype.name}"
    if call.shape[0] > (most := max_tokens()):
        return f"is for up to {most} tokens"
    return native.problem(_SOURCE, _TARGET)


def matmul(
    x: Float[Array, "M D"],
    weights: Float[Array, "L F D"],
    layer: int | Int32[Array, ""],
    num_tokens: int | Int32[Array, ""],
) -> Float32[Array, "M F"]:
    """See `pallas_kernels.matmul.matmul`; rows past num_tokens are zeros."""
    where = jnp.stack([jnp.asarray(layer, jnp.int32), jnp.asarray(num_tokens, jnp.int32)])
    out = jax.ShapeDtypeStruct((x.shape[0], weights.shape[1]), jnp.float32)
    return jax.ffi.ffi_call(_TARGET, out)(x.astype(jnp.float32), weights, where)


@functools.cache
def max_tokens() -> int:
    """Most tokens whose products are faster than XLA's on this CPU."""
    has_bfloat16 = re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", native.cpu()) is not None
    return _MAX_TOKENS_WITH_BFLOAT16 if has_bfloat16 else _MAX_TOKENS
