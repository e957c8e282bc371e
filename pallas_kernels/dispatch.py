"""How every op chooses its implementation: asked, never caught; used or refused, never swapped."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class Implementation[Call](Protocol):
    """A module that implements an op; it also holds the op's function itself."""

    def unsupported_reason(self, call: Call) -> str | None:
        """Why this implementation cannot serve `call`, or None when it can."""
        ...


class UnsupportedError(ValueError):
    """No implementation, or not the one asked for by name, can serve the call."""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What "auto" chose, and why each implementation that cannot serve the call was refused.

    `chosen` is None when nothing can serve it. `refused` covers every implementation there is,
    also those that stand behind the chosen one.
    """

    chosen: str | None
    refused: Mapping[str, str]

    def __str__(self) -> str:
        refused = "; ".join(f"{name} refused: {reason}" for name, reason in self.refused.items())
        return f"{self.chosen or 'none'} ({refused})" if refused else str(self.chosen or "none")


def unsupported_reason[Call](
    implementations: Mapping[str, Implementation[Call]], name: str, call: Call
) -> str | None:
    """Why the implementation called `name` cannot serve `call`, or None when it can."""
    if name not in implementations:
        return f"there is no such implementation; there are {', '.join(implementations)}"
    return implementations[name].unsupported_reason(call)


def explain[Call](
    implementations: Mapping[str, Implementation[Call]], order: Sequence[str], call: Call
) -> Explanation:
    """What "auto" does with `call`: the first of `order` that has no reason to refuse it."""
    reasons = {name: unsupported_reason(implementations, name, call) for name in implementations}
    chosen = next((name for name in order if reasons[name] is None), None)
    refused = {name: reason for name, reason in reasons.items() if reason is not None}
    return Explanation(chosen, refused)


def choose[Call](
    implementations: Mapping[str, Implementation[Call]], order: Sequence[str], name: str, call: Call
) -> str:
    """The implementation to use: `name` itself, or for "auto" the first of `order` that can.

    Raises:
        UnsupportedError: `name` cannot serve `call`, or with "auto" nothing can; says why.
    """
    if name == "auto":
        explanation = explain(implementations, order, call)
        if explanation.chosen is None:
            raise UnsupportedError(f"no implementation can serve the call: {explanation}")
        return explanation.chosen
    reason = unsupported_reason(implementations, name, call)
    if reason is not None:
        raise UnsupportedError(f"implementation {name!r} refused: {reason}")
    return name
