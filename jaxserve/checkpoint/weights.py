"""The interface of everything weights are read from, and the check that none is missing."""

from collections.abc import Set
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from jaxserve.errors import UserError

_MAX_NAMED = 6


@runtime_checkable
class WeightReader(Protocol):
    """Weights of one checkpoint, by their Hugging Face names, read one at a time.

    A matrix has the shape [out, in]. Query and key projections are ordered for the rotary embedding
    that pairs element i with i + head_dim / 2. `read` may be called from several threads.
    """

    path: Path

    def names(self) -> set[str]:
        """Every weight, without those that repeat another one (a tied LM head)."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Without reading the weight."""
        ...

    def read(self, name: str) -> np.ndarray:
        """As stored when that is float32, float16 or bfloat16, else dequantized to float32.

        May be a read-only view of the file.
        """
        ...


def check_weight_names(expected: Set[str], reader: WeightReader) -> None:
    """Checks that the checkpoint has exactly the weights that the model uses.

    Raises:
      UserError: names the weights that are missing and those that nothing would use.
    """
    names = reader.names()
    problems = [
        f"{label} {_some(found)}"
        for label, found in (("misses", expected - names), ("has unused", names - expected))
        if found
    ]
    if problems:
        raise UserError(
            f"The checkpoint {reader.path} {' and '.join(problems)}.",
            fix="Use a complete checkpoint of a supported architecture, not an adapter or a part.",
        )


def _some(names: Set[str]) -> str:
    shown = ", ".join(sorted(names)[:_MAX_NAMED])
    more = len(names) - _MAX_NAMED
    return f"{shown} and {more} more" if more > 0 else shown
