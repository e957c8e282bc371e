"""Logits processors that other packages bring, as entry points of one group.

An entry point is an object with `num_args: int`, at most MAX_PROCESSOR_ARGS, and
`__call__(logits: Float32[Array, "R V"], args: Float32[Array, "R num_args"])`, which returns new
logits of the same shape and type. It is traced by jax, once for each number of rows.
"""

import dataclasses
import importlib.metadata
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxserve.errors import UserError
from jaxserve.messages import MAX_PROCESSOR_ARGS

GROUP = "jaxserve.logits_processors"


@dataclasses.dataclass(frozen=True)
class LogitsProcessor:
    """One of them, by the name that requests use."""

    name: str
    num_args: int
    function: Callable


def load_logits_processors(vocab_size: int) -> tuple[LogitsProcessor, ...]:
    """All that are installed, by name.

    Raises:
      UserError: one that cannot be loaded, or is not what the group asks for; names it.
    """
    entry_points = importlib.metadata.entry_points(group=GROUP)
    return tuple(_load(entry, vocab_size) for entry in sorted(entry_points, key=lambda e: e.name))


def _load(entry: importlib.metadata.EntryPoint, vocab_size: int) -> LogitsProcessor:
    try:
        function = entry.load()
        num_args = function.num_args
        problem = _problem(function, num_args, vocab_size)
    except Exception as error:  # whatever a foreign package may raise
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise _refused(entry, problem) from error
    if problem:
        raise _refused(entry, problem)
    return LogitsProcessor(entry.name, num_args, function)


def _problem(function: Callable, num_args: object, vocab_size: int) -> str:
    """What is wrong with a processor; "" if nothing is."""
    if not isinstance(num_args, int) or not 0 <= num_args <= MAX_PROCESSOR_ARGS:
        return f"its num_args is {num_args!r}, not 0 to {MAX_PROCESSOR_ARGS}"
    logits = jax.ShapeDtypeStruct((1, vocab_size), jnp.float32)
    args = jax.ShapeDtypeStruct((1, num_args), jnp.float32)
    with jax.enable_x64(False):
        result = jax.eval_shape(function, logits, args)
    if (getattr(result, "shape", None), getattr(result, "dtype", None)) != (
        logits.shape,
        logits.dtype,
    ):
        return f"it returns {result}, not logits of the shape and type that it gets"
    return ""


def _refused(entry: importlib.metadata.EntryPoint, problem: str) -> UserError:
    package = entry.dist.name if entry.dist else entry.value
    return UserError(
        f"The logits processor {entry.name!r} of {package} cannot be used: {problem}.",
        fix=f"Repair or uninstall {package}.",
    )
