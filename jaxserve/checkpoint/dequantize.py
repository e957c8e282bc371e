"""Stored GGUF blocks to arrays, bit for bit what `gguf.dequantize` gives, several times as fast."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize as gguf_dequantize

from jaxserve.errors import UserError

_PLAIN = {
    Kind.F32: np.dtype(np.float32),
    Kind.F16: np.dtype(np.float16),
    Kind.BF16: np.dtype(ml_dtypes.bfloat16),
}
_BLOCK = 32
_CHUNK_BLOCKS = 4096  # 512 KiB of float32: stays in a core's cache


def stored_dtype(kind: Kind) -> np.dtype:
    """What `dequantize` returns for this type."""
    return _PLAIN.get(kind, np.dtype(np.float32))


def dequantize(data: np.ndarray, kind: Kind) -> np.ndarray:
    """uint8 [rows, bytes a row] to [rows, values a row].

    float32, float16 and bfloat16 are returned as they are stored (views of `data`), all others as
    float32.

    Raises:
      UserError: a type that the gguf package cannot dequantize.
    """
    if kind in _PLAIN:
        return data.view(_PLAIN[kind])
    if kind in _FAST:
        fill, block_bytes = _FAST[kind]
        blocks = data.reshape(-1, block_bytes)
        out = np.empty((len(blocks), _BLOCK), np.float32)
        for i in range(0, len(blocks), _CHUNK_BLOCKS):
            fill(blocks[i : i + _CHUNK_BLOCKS], out[i : i + _CHUNK_BLOCKS])
        return out.reshape(len(data), -1)
    return _by_gguf(data, kind)


def _fill_q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """float16 d, int8 q[32]: d * q."""
    np.multiply(blocks[:, 2:].view(np.int8), _halves(blocks, 1), out=out, dtype=np.float32)


def _fill_q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """float16 d, 4-bit q[32]: d * (q - 8). The low halves of the bytes are the first 16."""
    scale = _halves(blocks, 1)
    low, high = _nibbles(blocks[:, 2:])
    for i, q in enumerate((low, high)):
        signed = q.view(np.int8)
        signed -= 8
        np.multiply(signed, scale, out=out[:, 16 * i : 16 * i + 16], dtype=np.float32)


def _fill_q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    """float16 d, float16 m, 4-bit q[32]: d * q + m."""
    scales = _halves(blocks, 2)
    for i, q in enumerate(_nibbles(blocks[:, 4:])):
        np.multiply(q, scales[:, :1], out=out[:, 16 * i : 16 * i + 16], dtype=np.float32)
    out += scales[:, 1:]


def _halves(blocks: np.ndarray, count: int) -> np.ndarray:
    """The `count` float16 at the start of each block as float32 [blocks, count]."""
    return blocks[:, : 2 * count].view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.bitwise_and(packed, 15), np.right_shift(packed, 4)


_FAST: dict[Kind, tuple[Callable[[np.ndarray, np.ndarray], None], int]] = {
    Kind.Q8_0: (_fill_q8_0, 34),
    Kind.Q4_0: (_fill_q4_0, 18),
    Kind.Q4_1: (_fill_q4_1, 20),
}


def _by_gguf(data: np.ndarray, kind: Kind) -> np.ndarray:
    """Every other type, K-quants among them (5 to 10 ns a value)."""
    try:
        return gguf_dequantize(data, kind)
    except NotImplementedError as e:
        raise UserError(
            f"Weights of GGUF type {kind.name} cannot be read.",
            fix="Use a file with types F32, F16, BF16, Q8_0, Q4_0, Q4_1 or Q2_K to Q6_K.",
        ) from e
