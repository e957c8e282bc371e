"""Collects the events of a tool parser: numbers calls, drops whitespace before them."""

from jaxserve.server.tools.events import (
    CallArguments,
    CallStart,
    ContentDelta,
    ReasoningDelta,
    ToolEvent,
)
from jaxserve.server.tools.reader import WHITESPACE


class ToolOutput:
    """With calls, whitespace at the end of the content is dropped."""

    def __init__(self) -> None:
        self.events: list[ToolEvent] = []
        self.num_calls = 0
        self._held: list[str] = []

    def content(self, text: str) -> None:
        """Text for the user."""
        body = text.rstrip(WHITESPACE)
        if body:
            self.events.append(ContentDelta("".join([*self._held, body])))
            self._held.clear()
        if len(body) < len(text):
            self._held.append(text[len(body) :])

    def reasoning(self, text: str) -> None:
        """Text that precedes the answer."""
        self.events.append(ReasoningDelta(text))

    def start(self, name: str) -> None:
        """A call begins."""
        self.events.append(CallStart(self.num_calls, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """A piece of the arguments of the last call that began."""
        self.events.append(CallArguments(self.num_calls - 1, text))

    def end(self) -> None:
        """The text is over."""
        if self._held and not self.num_calls:
            self.events.append(ContentDelta("".join(self._held)))
        self._held.clear()
