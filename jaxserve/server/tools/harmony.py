"""gpt-oss: messages with a channel, `<|channel|>analysis<|message|>…<|end|>`, and a recipient.

Reasoning is in the channel analysis, the answer in final and commentary, and a call is a message
to=functions.NAME whose text is the arguments. This parser reads all of it, so a reasoning parser
before it is neither needed nor possible. The markers are special tokens.
"""

import re
from collections.abc import Callable, Sequence

from jaxserve.server.tools.format import Steps, ToolFormat
from jaxserve.server.tools.grammar import calls_grammar, quoted
from jaxserve.server.tools.json_calls import give_back, read_named_arguments
from jaxserve.server.tools.output import ToolOutput
from jaxserve.server.tools.reader import Markers, Reader, Waiting
from jaxserve.server.tools.tool import FunctionTool

_START = "<|start|>"
_CHANNEL = "<|channel|>"
_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTIONS = "functions."
_MAX_HEADER_CHARS = 1024
_HEADERS = Markers(_START, _CHANNEL, _MESSAGE)
_BODY_ENDS = Markers(_START, *_ENDS)
_HEADER_ENDS = Markers(_MESSAGE, *_ENDS)
_NAME = re.compile(r"[^\s<>]+")


def _steps(with_calls: bool) -> Steps:
    def steps(r: Reader, out: ToolOutput, tools: Sequence[FunctionTool]) -> Waiting[None]:
        names = frozenset(tool.name for tool in tools)
        messages = _Messages(r, out, names if with_calls else None)
        # The recipient may stand in the role's place, which the prompt has begun.
        r.keep()
        if (yield from r.peek(" to=")):
            yield from messages.read()
        else:
            give_back(r, out)
        while (yield from r.until(_HEADERS, out.content)):
            r.keep()
            yield from messages.read()
        out.end()

    return steps


class _Messages:
    """Reads message after message. names: of the tools; None: calls are content."""

    def __init__(self, r: Reader, out: ToolOutput, names: frozenset[str] | None):
        self._r = r
        self._out = out
        self._names = names
        self._num_reasoning = 0
        self._num_content = 0

    def read(self) -> Waiting[None]:
        """Reads one message; what has no complete header is content."""
        r = self._r
        header = yield from self._read_header()
        if header is None:
            give_back(r, self._out)
            return
        channel = _CHANNEL_NAME.search(header)
        recipient = _RECIPIENT.search(header)
        name = self._function(recipient[1]) if recipient else None
        if name:
            yield from self._read_call(name)
        elif (channel and channel[1] == "analysis") or (recipient and self._names is not None):
            yield from self._read_reasoning()
        else:
            yield from self._read_content()

    def _read_header(self) -> Waiting[str | None]:
        r = self._r
        header = ""
        while True:
            end, marker = _HEADER_ENDS.search(r.text, r.pos, at_end=r.ended)
            header += r.take(min(end, r.pos + _MAX_HEADER_CHARS - len(header)))
            if r.pos < end:
                return None
            if marker == _MESSAGE:
                r.take(r.pos + len(marker))
                return header
            if marker or r.ended:
                return None
            yield

    def _function(self, recipient: str) -> str | None:
        """The name of the function that is called; models forget the prefix of known ones."""
        if self._names is None:
            return None
        if recipient.startswith(_FUNCTIONS):
            return recipient.removeprefix(_FUNCTIONS)
        return recipient if recipient in self._names else None

    def _read_call(self, name: str) -> Waiting[None]:
        r, out = self._r, self._out
        yield from r.whitespace()
        if (yield from r.peek(_START, *_ENDS)):
            out.start(name)
            out.arguments("{}")
            r.forget()
        else:
            yield from read_named_arguments(r, out, name)
        if r.keeping:
            give_back(r, out)
        else:
            r.keep()
            yield from r.whitespace()
            if (yield from r.peek(_START, *_ENDS)) or not (yield from r.more()):
                r.forget()
                yield from self._read_body(out.content)
                return
            give_back(r, out)
        yield from self._read_rest_as_content()

    def _read_reasoning(self) -> Waiting[None]:
        self._r.forget()
        if self._num_reasoning:
            self._out.reasoning("\n")
        self._num_reasoning += 1
        yield from self._read_body(self._out.reasoning)

    def _read_content(self) -> Waiting[None]:
        self._r.forget()
        if self._num_content:
            self._out.content("\n")
        yield from self._read_rest_as_content()

    def _read_rest_as_content(self) -> Waiting[None]:
        self._num_content += 1
        yield from self._read_body(self._out.content)

    def _read_body(self, sink: Callable[[str], None]) -> Waiting[None]:
        end = yield from self._r.until(_BODY_ENDS, sink)
        if end != _START:
            self._r.take(self._r.pos + len(end))


def _lark(tools: Sequence[FunctionTool], parallel: bool) -> str | None:
    if not all(_NAME.fullmatch(tool.name) for tool in tools):
        return None

    def call(tool: FunctionTool, arguments: str) -> str:
        head = quoted(f"commentary to={_FUNCTIONS}{tool.name} ")
        return f'{_CHANNEL} {head} <|constrain|> "json" {_MESSAGE} {arguments}'

    rules = calls_grammar(tools, call, between_rule=_NEXT, parallel=parallel)
    return rules.replace("start: ", "start: reasoning? ", 1) + _REASONING


# The end of a message and the beginning of the next one.
_NEXT = f'<|end|> {_START} "assistant"'
_REASONING = f'reasoning: {_CHANNEL} "analysis" {_MESSAGE} /(?s:.*)/ {_NEXT}\n'
# Where a grammar of the answer's text begins.
BEFORE_FINAL = f'before: reasoning? {_CHANNEL} "final" {_MESSAGE}\n{_REASONING}'

FORMAT = ToolFormat(_steps(True), _lark, needs_special_tokens=True, reads_reasoning=True)
# For answers that may have no calls.
NO_CALLS_FORMAT = ToolFormat(
    _steps(False), lambda tools, parallel: None, needs_special_tokens=True, reads_reasoning=True
)
