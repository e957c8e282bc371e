"""Block sizes that were found best for a chip and a shape: `tuned/<chip>.json` beside each op.

A file holds what its sizes were ranked by and a list of entries, each a kernel's name, the shape it
was tuned for and the sizes. `scripts/tune.py` writes it. A kernel asks for the sizes of the nearest
entry, and has a heuristic of its own where there is none.
"""

import contextlib
import contextvars
import functools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from pallas_kernels.chips import Chip

Sizes = Mapping[str, int]

_FARTHEST = 1.0  # doublings or halvings, of any field
_forced: contextvars.ContextVar[Mapping[str, Sizes] | None] = contextvars.ContextVar("forced")


class Shape(NamedTuple):
    """What a kernel's best sizes depend on.

    exact: fields that an entry must have the same values of.
    near: fields that an entry may have other values of.
    """

    exact: Mapping[str, str | int]
    near: Mapping[str, int]


class Entry(NamedTuple):
    """Sizes of a kernel, tuned for a shape."""

    kernel: str
    shape: Shape
    sizes: Sizes


def tuned_sizes(op: Path, kernel: str, chip: Chip, shape: Shape) -> Sizes | None:
    """Sizes of the entry nearest to `shape`, or None when none is near.

    The nearest has the same `exact` fields and the least sum of |log2(its value / the value asked
    for)| over the `near` fields, none of which is more than a factor of two away.

    op: the folder of the op's package.
    """
    forced = _forced.get(None) or {}
    if kernel in forced:
        return forced[kernel]
    entries = [entry for entry in load(op, chip.name) if entry.kernel == kernel]
    found = [(_distance(entry.shape, shape), entry) for entry in entries]
    near = [(distance, entry) for distance, entry in found if distance is not None]
    return min(near, key=lambda pair: pair[0])[1].sizes if near else None


@functools.cache
def load(op: Path, chip_name: str) -> tuple[Entry, ...]:
    """The entries for a chip; none where there is no file."""
    path = op / "tuned" / f"{chip_name}.json"
    if not path.is_file():
        return ()
    return tuple(
        Entry(entry["kernel"], Shape(**entry["shape"]), entry["sizes"])
        for entry in json.loads(path.read_text(encoding="utf-8"))["entries"]
    )


@contextlib.contextmanager
def forced_sizes(sizes: Mapping[str, Sizes]) -> Iterator[None]:
    """Within it, what is traced takes these sizes, kernel -> sizes, whatever its shape."""
    token = _forced.set(sizes)
    try:
        yield
    finally:
        _forced.reset(token)


def _distance(entry: Shape, shape: Shape) -> float | None:
    if entry.exact != shape.exact or entry.near.keys() != shape.near.keys():
        return None
    parts = [abs(math.log2(entry.near[name] / value)) for name, value in shape.near.items()]
    return sum(parts) if max(parts, default=0.0) <= _FARTHEST else None
