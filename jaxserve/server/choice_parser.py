"""One choice's text, as it comes, taken apart into reasoning, content and tool calls."""

from collections.abc import Callable, Sequence

from msgspec import Struct

from jaxserve.server.reasoning import AnswerParser
from jaxserve.server.tools import (
    CallArguments,
    CallStart,
    ContentDelta,
    ReasoningDelta,
    ToolEvent,
)


class ToolCallDelta(Struct, frozen=True):
    """What one call gained. id, name: with the call's first piece only, both.

    index: of the call within the choice, from 0.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


class Delta(Struct, frozen=True):
    """What a choice gained. All deltas of a choice added up are its message."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = []

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)

    def __add__(self, later: "Delta") -> "Delta":
        """Both; each call once."""
        calls = {call.index: call for call in self.tool_calls}
        for call in later.tool_calls:
            before = calls.get(call.index)
            calls[call.index] = (
                call
                if before is None
                else ToolCallDelta(
                    call.index, before.id, before.name, before.arguments + call.arguments
                )
            )
        return Delta(
            self.content + later.content, self.reasoning + later.reasoning, list(calls.values())
        )


class ChoiceParser:
    """Gives what a parser finds in a choice's text the form that clients get.

    Args:
      make_call_id: gives each call its id.
      count_tokens: of a text.
      max_calls: calls behind these are dropped; None is no limit.
      calls_only: the answer is held to calls; what else is in it is one that was cut off, and is
        dropped.
      reasoning_end_id: the token that ends the reasoning, where it is always one.

    Attributes:
      has_tool_calls: whether a call has begun.
    """

    def __init__(
        self,
        parser: AnswerParser,
        *,
        make_call_id: Callable[[], str],
        count_tokens: Callable[[str], int],
        max_calls: int | None = None,
        calls_only: bool = False,
        reasoning_end_id: int | None = None,
    ):
        self._parser = parser
        self._make_call_id = make_call_id
        self._count_tokens = count_tokens
        self._max_calls = max_calls
        self._calls_only = calls_only
        self._reasoning_end_id = reasoning_end_id
        self._num_tokens_to_end = 0
        self._is_ended = False
        self._reasoning_texts: list[str] = []
        self.has_tool_calls = False

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning so far; of its markers too, where those are tokens."""
        if not self._reasoning_texts:
            return 0
        if self._reasoning_end_id is not None:
            return self._num_tokens_to_end
        return self._count_tokens("".join(self._reasoning_texts))

    def feed(self, text: str, token_ids: Sequence[int]) -> Delta:
        """What the next piece of the text says for sure. token_ids: the tokens of the piece."""
        if self._reasoning_end_id is not None and not self._is_ended:
            self._count_to_end(token_ids)
        return self._delta(self._parser.feed(text))

    def finish(self) -> Delta:
        """The rest, when the text has ended."""
        return self._delta(self._parser.finish())

    def _count_to_end(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._num_tokens_to_end += 1
            if token_id == self._reasoning_end_id:
                self._is_ended = True
                return

    def _delta(self, events: Sequence[ToolEvent]) -> Delta:
        content, reasoning = [], []
        calls: dict[int, ToolCallDelta] = {}
        for event in events:
            match event:
                case ContentDelta(text) if not self._calls_only:
                    content.append(text)
                case ReasoningDelta(text):
                    reasoning.append(text)
                case CallStart(index, name) if self._takes(index):
                    self.has_tool_calls = True
                    calls[index] = ToolCallDelta(index, self._make_call_id(), name, "")
                case CallArguments(index, text) if self._takes(index):
                    before = calls.get(index, ToolCallDelta(index, None, None, ""))
                    text = before.arguments + text
                    calls[index] = ToolCallDelta(index, before.id, before.name, text)
        self._reasoning_texts += reasoning
        return Delta("".join(content), "".join(reasoning), list(calls.values()))

    def _takes(self, index: int) -> bool:
        return self._max_calls is None or index < self._max_calls
