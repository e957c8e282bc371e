"""gpt-oss, where no calls are asked for: reasoning is in the channel analysis."""

from jaxserve.server.reasoning.format import ReasoningFormat
from jaxserve.server.reasoning.output import ReasoningEvent
from jaxserve.server.tools import harmony
from jaxserve.server.tools.events import ContentDelta, ReasoningDelta, ToolEvent


class _Parser:
    def __init__(self) -> None:
        self._parser = harmony.NO_CALLS_FORMAT.make_parser(())

    def feed(self, text: str) -> list[ReasoningEvent]:
        return _without_calls(self._parser.feed(text))

    def finish(self) -> list[ReasoningEvent]:
        return _without_calls(self._parser.finish())


def _without_calls(events: list[ToolEvent]) -> list[ReasoningEvent]:
    kept = [event for event in events if isinstance(event, ContentDelta | ReasoningDelta)]
    assert len(kept) == len(events)
    return kept


FORMAT = ReasoningFormat(
    lambda tail: _Parser(), lambda tail: harmony.BEFORE_FINAL, needs_special_tokens=True
)
