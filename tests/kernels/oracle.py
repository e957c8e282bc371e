"""What ragged paged attention must return, in NumPy float64 and without pages.

A row is its contiguous history of keys and values as the cache stores them; where tokens lie in
pages is the business of `cases.py`. The functions here are small so that the mutation tests can
replace one of them with a broken one.
"""

import dataclasses

import ml_dtypes
import numpy as np
from jaxtyping import Float, Shaped

U32 = 2.0**-24  # unit roundoff of float32


@dataclasses.dataclass(frozen=True)
class Row:
    """One row after the step: the stored values of all its tokens, and how many are new."""

    q_len: int
    keys: Float[np.ndarray, "kv_len K H"]  # float64, dequantized
    values: Float[np.ndarray, "kv_len K H"]


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of the op as a caller gives them."""

    scale: float
    sliding_window: int | None
    soft_cap: float | None
    sinks: Float[np.ndarray, " N"] | None


@dataclasses.dataclass(frozen=True)
class Expected:
    """The exact output, and how far from it a right implementation may be, element by element."""

    out: Float[np.ndarray, "T N H"]
    tolerance: Float[np.ndarray, "T N H"]


def is_visible(query_position: int, key_position: int, sliding_window: int | None) -> bool:
    """Whether a token attends to another of its row."""
    if key_position > query_position:
        return False
    return sliding_window is None or key_position > query_position - sliding_window


def kv_head_of(head: int, num_heads: int, num_kv_heads: int) -> int:
    """The KV head that a query head reads."""
    return head // (num_heads // num_kv_heads)


def position_of(token: int, row: Row) -> int:
    """The position in its row of the row's `token`-th new token."""
    return len(row.keys) - row.q_len + token


def cap(scores: Float[np.ndarray, " C"], soft_cap: float | None) -> Float[np.ndarray, " C"]:
    """Scores after the logit soft cap."""
    return scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)


def denominator_of(weights: Float[np.ndarray, " C"], sink_weight: float) -> float:
    """The softmax's denominator."""
    return weights.sum() + sink_weight


def encode(
    x: Float[np.ndarray, "T K H"], scale: Float[np.ndarray, " K"] | None, dtype: np.dtype
) -> Shaped[np.ndarray, "T K H"]:
    """What the cache stores for x. Scales are powers of two: dividing by them is exact."""
    scaled = x.astype(np.float32)
    if scale is not None:
        scaled = scaled / scale[:, None].astype(np.float32)
    if dtype == np.int8:
        return np.clip(np.rint(scaled), -128, 127).astype(np.int8)
    if dtype.itemsize == 1:
        largest = float(ml_dtypes.finfo(dtype).max)
        return np.clip(scaled, -largest, largest).astype(dtype)
    return scaled.astype(dtype)


def decode(
    stored: Shaped[np.ndarray, "C K H"], scale: Float[np.ndarray, " K"] | None
) -> Float[np.ndarray, "C K H"]:
    """The values that the cache's content stands for."""
    values = stored.astype(np.float64)
    return values if scale is None else values * scale[:, None]


def attend(
    q: Float[np.ndarray, "T N H"], rows: list[Row], options: Options, unit_roundoff: float
) -> Expected:
    """The op's output for the new tokens `q` of all rows, one after the other.

    `unit_roundoff` is that of q's dtype. Tokens of `q` that no row owns are padding: zeros.
    """
    out = np.zeros(q.shape)
    tolerance = np.zeros(q.shape)
    token = 0
    for row in rows:
        for i in range(row.q_len):
            position = position_of(i, row)
            visible = [
                key
                for key in range(len(row.keys))
                if is_visible(position, key, options.sliding_window)
            ]
            for head in range(q.shape[1]):
                kv_head = kv_head_of(head, q.shape[1], row.keys.shape[1])
                sink = None if options.sinks is None else float(options.sinks[head])
                out[token, head], tolerance[token, head] = _attend_one(
                    q[token, head].astype(np.float64),
                    row.keys[visible, kv_head],
                    row.values[visible, kv_head],
                    sink,
                    options,
                    unit_roundoff,
                )
            token += 1
    return Expected(out, tolerance)


def _attend_one(
    q: Float[np.ndarray, " H"],
    keys: Float[np.ndarray, "C H"],
    values: Float[np.ndarray, "C H"],
    sink: float | None,
    options: Options,
    unit_roundoff: float,
) -> tuple[Float[np.ndarray, " H"], Float[np.ndarray, " H"]]:
    """One query of one head: the output and its tolerance.

    The tolerance is the first-order error bound of a computation that keeps scores, softmax and
    sums in float32 (unit roundoff U32) and rounds only the weights, before they meet the values,
    and the output to q's dtype:
    - a score is a sum of H products, each off by U32, and H - 1 additions; then scale, soft cap
      and the subtraction of the maximum, a few U32 of the score's size each;
    - an error d of the scores changes each weight by a factor of at most exp(2 d): once through
      its numerator, once through the denominator;
    - the sums of the denominator and of the output have C terms, exp is good to a few U32;
    - rounding the weights moves the output by unit_roundoff * sum(weight * |value|), rounding the
      output by unit_roundoff * |out|.
    """
    num_keys, head_dim = keys.shape
    scores = cap(options.scale * (keys @ q), options.soft_cap)
    magnitudes = abs(options.scale) * (np.abs(keys) @ np.abs(q))
    score_error = U32 * ((head_dim + 8) * magnitudes.max() + 8 * np.abs(scores).max())

    peak = scores.max() if sink is None else max(scores.max(), sink)
    weights = np.exp(scores - peak)
    weights /= denominator_of(weights, 0.0 if sink is None else float(np.exp(sink - peak)))
    out = weights @ values

    relative = 2 * score_error + (2 * num_keys + 16) * U32 + unit_roundoff
    return out, relative * (weights @ np.abs(values)) + unit_roundoff * np.abs(out)
