"""Collects the events of a reasoning parser, without the whitespace around the reasoning."""

from jaxserve.server.tools.events import ContentDelta, ReasoningDelta
from jaxserve.server.tools.reader import WHITESPACE

type ReasoningEvent = ReasoningDelta | ContentDelta


class ReasoningOutput:
    """Whitespace at both ends of the reasoning is dropped, and before the content behind it."""

    def __init__(self) -> None:
        self.events: list[ReasoningEvent] = []
        self._held: list[str] = []
        self._is_start = False  # whitespace is dropped until something else comes

    def begin_reasoning(self) -> None:
        """Reasoning follows."""
        self._is_start = True

    def reasoning(self, text: str) -> None:
        """A piece of the reasoning."""
        text = self._without_start(text)
        body = text.rstrip(WHITESPACE)
        if body:
            self.events.append(ReasoningDelta("".join([*self._held, body])))
            self._held.clear()
        if len(body) < len(text):
            self._held.append(text[len(body) :])

    def end_reasoning(self) -> None:
        """Content follows."""
        self._held.clear()
        self._is_start = True

    def content(self, text: str) -> None:
        """A piece of the content."""
        text = self._without_start(text)
        if text:
            self.events.append(ContentDelta(text))

    def _without_start(self, text: str) -> str:
        if self._is_start:
            text = text.lstrip(WHITESPACE)
            self._is_start = not text
        return text
