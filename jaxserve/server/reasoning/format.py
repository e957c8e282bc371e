"""What a format of reasoning is: how its text is read, and where a grammar of the answer begins."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from jaxserve.server.reasoning.output import ReasoningEvent, ReasoningOutput
from jaxserve.server.tools.events import merged
from jaxserve.server.tools.reader import GeneratorParser, Reader, Waiting


class ReasoningParser(Protocol):
    """Reads one answer of the model, as it comes."""

    def feed(self, text: str) -> list[ReasoningEvent]: ...

    def finish(self) -> list[ReasoningEvent]: ...


@dataclass(frozen=True)
class ReasoningFormat:
    """One format; calling it makes a parser of one answer.

    make_parser: from the last characters of the prompt's text, which may open the reasoning.
    before_answer: from the same, the Lark rules of what precedes the answer, the first of them
      `before`. None: a grammar of the answer needs nothing before it.
    needs_special_tokens: the text must have its special tokens.
    end: what always ends the reasoning; "": there are several ways.
    """

    make_parser: Callable[[str], ReasoningParser]
    before_answer: Callable[[str], str] | None = None
    needs_special_tokens: bool = False
    end: str = ""

    def __call__(self, prompt_tail: str) -> ReasoningParser:
        """A parser of one answer."""
        return self.make_parser(prompt_tail)

    def with_reasoning(self, grammar: str, prompt_tail: str) -> str:
        """A Lark grammar of an answer, made one of the reasoning and the answer.

        Without it a model that begins inside its reasoning would write its answer there.
        """
        if self.before_answer is None:
            return grammar
        before = self.before_answer(prompt_tail)
        return f"start: before %lark {{\n{grammar}\n}}\n{before}"


# With True the text begins inside the reasoning.
type ReasoningSteps = Callable[[Reader, ReasoningOutput, bool], Waiting[None]]


def parser_of(steps: ReasoningSteps, inside: bool) -> ReasoningParser:
    """A parser that runs the steps."""
    reader, out = Reader(), ReasoningOutput()
    return GeneratorParser(reader, out.events, steps(reader, out, inside), merged)
