"""What a parser finds in the model's text."""

import itertools
from typing import Any

import msgspec


class ContentDelta(msgspec.Struct, frozen=True):
    """A piece of the text for the user."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True):
    """A piece of the reasoning that precedes the answer."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """The index-th call of the answer begins, from 0."""

    index: int
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """A piece of the arguments of a call that has begun.

    All pieces of one call added up are a JSON object when the model's call was one.
    """

    index: int
    text: str


# Reasoning comes only from formats that read it themselves.
ToolEvent = ContentDelta | ReasoningDelta | CallStart | CallArguments


def merged[E: Any](events: list[E]) -> list[E]:
    """The events, with neighbours that differ in their text only made one."""
    result = []
    for _, group in itertools.groupby(events, _without_text):
        same = list(group)
        first = same[0]
        if len(same) > 1:
            first = msgspec.structs.replace(first, text="".join(event.text for event in same))
        result.append(first)
    return result


def _without_text(event: Any) -> Any:
    # Every CallStart has an index of its own, so that none is like its neighbour.
    return type(event), getattr(event, "index", None)
