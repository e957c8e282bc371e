"""One parser for a whole answer: reasoning, content and calls."""

from collections.abc import Callable, Sequence
from typing import Protocol

from jaxserve.server.reasoning.format import ReasoningParser
from jaxserve.server.tools.events import ContentDelta, ToolEvent, merged
from jaxserve.server.tools.format import ToolFormat, ToolParser
from jaxserve.server.tools.tool import FunctionTool


class AnswerParser(Protocol):
    """Reads one answer of the model, as it comes."""

    def feed(self, text: str) -> list[ToolEvent]: ...

    def finish(self) -> list[ToolEvent]: ...


class _Chain:
    """The content that the first parser finds goes through the second one."""

    def __init__(self, reasoning: ReasoningParser, tools: ToolParser | None):
        self._reasoning = reasoning
        self._tools = tools

    def feed(self, text: str) -> list[ToolEvent]:
        return self._through_tools(self._reasoning.feed(text))

    def finish(self) -> list[ToolEvent]:
        events = self._through_tools(self._reasoning.finish())
        return merged(events + (self._tools.finish() if self._tools else []))

    def _through_tools(self, events: Sequence[ToolEvent]) -> list[ToolEvent]:
        if self._tools is None:
            return list(events)
        found: list[ToolEvent] = []
        for event in events:
            found += self._tools.feed(event.text) if isinstance(event, ContentDelta) else [event]
        return found


def make_answer_parser(
    make_reasoning: Callable[[str], ReasoningParser] | None,
    tool_format: ToolFormat | None,
    tools: Sequence[FunctionTool],
    prompt_tail: str,
) -> AnswerParser | None:
    """The parser of one answer; None when all of the text is content.

    A format of tools that reads the reasoning itself gets the text as it is.

    Args:
      make_reasoning: of REASONING_PARSERS, or None when the model has none.
      tool_format: None when the answer may have no calls.
      prompt_tail: the last characters of the prompt's text.
    """
    tool_parser = tool_format.make_parser(tools) if tool_format else None
    if make_reasoning is None or (tool_format and tool_format.reads_reasoning):
        return tool_parser
    return _Chain(make_reasoning(prompt_tail), tool_parser)
