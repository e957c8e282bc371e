"""What a format of tool calls is: how its text is read, and a grammar of its calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxserve.server.tools.events import ToolEvent, merged
from jaxserve.server.tools.output import ToolOutput
from jaxserve.server.tools.reader import GeneratorParser, Reader, Waiting
from jaxserve.server.tools.tool import FunctionTool


class ToolParser(Protocol):
    """Reads one answer of the model, as it comes."""

    def feed(self, text: str) -> list[ToolEvent]: ...

    def finish(self) -> list[ToolEvent]: ...


# Reads the text to its end and leaves the events in the output.
type Steps = Callable[[Reader, ToolOutput, Sequence[FunctionTool]], Waiting[None]]


@dataclass(frozen=True)
class ToolFormat:
    """One format.

    lark: an llguidance grammar of one call of the tools, or with True of one or more; each sentence
      is read as valid calls. None: these tools cannot be called in this format.
    needs_special_tokens: the text must have its special tokens.
    reads_reasoning: the text goes to this parser with its reasoning, which it finds too.
    marker: what stands before the first call, in the grammar or as a special token before it; "":
      calls are the whole answer.
    other_markers: those that are read, and no grammar writes.
    may_be_bare: a list of calls is read without any marker, too.
    """

    steps: Steps
    lark: Callable[[Sequence[FunctionTool], bool], str | None]
    needs_special_tokens: bool = False
    reads_reasoning: bool = False
    marker: str = ""
    other_markers: tuple[str, ...] = ()
    may_be_bare: bool = False

    def make_parser(self, tools: Sequence[FunctionTool]) -> ToolParser:
        """A parser for one answer."""
        reader, out = Reader(), ToolOutput()
        steps = self.steps(reader, out, tools)
        return GeneratorParser(reader, out.events, steps, merged)

    def grammar(self, tools: Sequence[FunctionTool], *, parallel: bool) -> str | None:
        """The grammar of one call, or with `parallel` of one or more."""
        return self.lark(tools, parallel)
