"""Rotary embedding scaling as checkpoints describe it: what is understood, what is refused."""

import math

import numpy as np

from jaxserve.errors import UserError

LLAMA3_DEFAULTS = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192.0,
}
_PARAMETERS = {"linear": ("factor",), "llama3": ("factor", *LLAMA3_DEFAULTS)}


def check_rope_scaling(scaling: dict, source: str) -> dict[str, float | str]:
    """{"rope_type": ..., its parameters as floats}, or {} when nothing is scaled.

    Raises:
      UserError: a type that the models here do not compute, or a parameter is missing.
    """
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return {}
    if kind not in _PARAMETERS:
        raise UserError(
            f"{source}: rope scaling of type {kind!r} is not supported.",
            fix="Use a model with rope scaling of type default, linear or llama3.",
        )
    out: dict[str, float | str] = {"rope_type": kind}
    for name in _PARAMETERS[kind]:
        value = scaling.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise UserError(
                f"{source}: rope scaling of type {kind!r} has {name} = {value!r}.",
                fix=f"Give {name} as a positive number.",
            )
        out[name] = float(value)
    return out


def llama3_factors(scaling: dict, theta: float, head_dim: int) -> np.ndarray:
    """What each of the head_dim / 2 frequencies is divided by, float32 (Llama 3.1 report)."""
    frequencies = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    wavelengths = 2 * math.pi / frequencies
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = float(scaling["original_max_position_embeddings"]) / wavelengths
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - keep) / float(scaling["factor"]) + keep)).astype(np.float32)
