"""The layers that architectures share: functions of arrays, no state."""

import math
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32, Int32

from jaxserve.config import ModelInfo
from pallas_kernels.matmul import NOTHING_FUSED, Fused, Int8Weights, Weights, xla
from pallas_kernels.ragged_paged_attention import RopeTables


@runtime_checkable
class Matmul(Protocol):
    """x times a layer's transposed weight; see `pallas_kernels.matmul`."""

    def __call__(
        self,
        x: Float[Array, "T *I"],
        weights: Weights,
        layer: int | Int32[Array, ""],
        *,
        fused: Fused = NOTHING_FUSED,
        out_dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> Float[Array, "T O"]: ...


def matmul_by_xla(
    x: Float[Array, "T *I"],
    weights: Weights,
    layer: int | Int32[Array, ""],
    *,
    fused: Fused = NOTHING_FUSED,
    out_dtype: jax.typing.DTypeLike = jnp.float32,
) -> Float[Array, "T O"]:
    """See `Matmul`."""
    return xla.matmul(x, weights, layer, x.shape[0], out_dtype, fused)


def linear(
    x: Float[Array, "T *I"],
    weights: Float[Array, "L *O I"] | Int8Weights,
    layer: int | Int32[Array, ""],
    fused: Fused = NOTHING_FUSED,
    matmul: Matmul = matmul_by_xla,
) -> Float[Array, "T *O"]:
    """x times a layer's weight [*O, I], which is stored as published, output axes first;
    accumulates in float32. The weights of all layers are one argument, as a slice might be a copy.

    fused: what is done to x first, and to the result last.
    """
    shape = (weights.values if isinstance(weights, Int8Weights) else weights).shape
    matrices = (shape[0], -1, shape[-1])  # as they lie
    if isinstance(weights, Int8Weights):
        values, scales = weights
        weights = Int8Weights(values.reshape(matrices), scales.reshape(matrices[:2]))
    else:
        weights = weights.reshape(matrices)
    product = matmul(x, weights, layer, fused=fused, out_dtype=x.dtype)
    return product.reshape(x.shape[0], *shape[1:-1])


def look_up(
    table: Float[Array, "V D"] | Int8Weights,
    token_ids: Int32[Array, " T"],
    dtype: jax.typing.DTypeLike,
) -> Float[Array, "T D"]:
    """Rows of an embedding, which may be quantized: values [V, D], scales [V]."""
    if not isinstance(table, Int8Weights):
        return table[token_ids]
    rows = table.values[token_ids].astype(jnp.float32) * table.scales[token_ids][:, None]
    return rows.astype(dtype)


def rope_frequencies(info: ModelInfo) -> Float32[np.ndarray, " h"]:
    """Angle per position of each of the H/2 rotated pairs, long-context scaling included.

    `rope_scaling` holds the fields of a Hugging Face config: rope_type default, linear or llama3
    (the piecewise interpolation of the Llama 3.1 report).
    """
    exponents = np.arange(0, info.head_dim, 2, dtype=np.float64) / info.head_dim
    frequencies = 1.0 / info.rope_theta**exponents
    scaling = info.rope_scaling
    kind = scaling.get("rope_type", "default")
    if kind == "linear":
        frequencies = frequencies / float(scaling["factor"])
    elif kind == "llama3":
        factor, low, high, original = (
            float(scaling[key])
            for key in (
                "factor",
                "low_freq_factor",
                "high_freq_factor",
                "original_max_position_embeddings",
            )
        )
        wavelengths = 2 * math.pi / frequencies
        smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
        frequencies = (1 - smooth) * frequencies / factor + smooth * frequencies
    else:
        assert kind == "default", f"rope_type {kind!r}"
    return frequencies.astype(np.float32)


def rope_tables(
    positions: Int32[Array, " T"], frequencies: Float32[np.ndarray, " h"]
) -> RopeTables:
    """Cosine and sine of each position's angles."""
    angles = positions[:, None].astype(jnp.float32) * frequencies
    return RopeTables(jnp.cos(angles), jnp.sin(angles))
