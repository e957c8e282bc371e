"""Reasoning between two tags at the start of the answer, as most models write it."""

from jaxserve.server.reasoning.format import ReasoningFormat, ReasoningSteps, parser_of
from jaxserve.server.reasoning.output import ReasoningOutput
from jaxserve.server.tools.grammar import quoted
from jaxserve.server.tools.reader import Markers, Reader, Waiting

_START = "<think>"
_END = "</think>"
_REASONING = f"""\
reasoning[suffix={quoted(_END)}]: /(?s:.*)/
space: /\\n{{0,2}}/
"""


def between(start: str, end: str) -> ReasoningSteps:
    """Reads reasoning that a tag opens, unless the prompt has, and another one closes."""
    markers = Markers(end)

    def steps(r: Reader, out: ReasoningOutput, inside: bool) -> Waiting[None]:
        r.keep()
        yield from r.whitespace()
        if (yield from r.literal(start)) or inside:
            r.forget()
            out.begin_reasoning()
            if (yield from r.until(markers, out.reasoning)):
                r.take(r.pos + len(end))
            out.end_reasoning()
        else:
            out.content(r.kept())
        yield from r.rest(out.content)

    return steps


def is_opened(prompt_tail: str) -> bool:
    """Whether the prompt has opened the reasoning."""
    return prompt_tail.rstrip().endswith(_START)


def _is_open_unless_closed(prompt_tail: str) -> bool:
    return not prompt_tail.rstrip().endswith(_END)


def _before_answer(inside: bool) -> str:
    if inside:
        return f"before: reasoning space\n{_REASONING}"
    return f"before: ({quoted(_START)} reasoning space)?\n{_REASONING}"


# The model begins with its reasoning, whether or not the prompt or the answer has the first tag.
DEEPSEEK_R1 = ReasoningFormat(
    lambda tail: parser_of(between(_START, _END), _is_open_unless_closed(tail)),
    lambda tail: _before_answer(_is_open_unless_closed(tail)),
    end=_END,
)
# The prompt or the answer opens the reasoning, or there is none.
QWEN3 = ReasoningFormat(
    lambda tail: parser_of(between(_START, _END), is_opened(tail)),
    lambda tail: _before_answer(is_opened(tail)),
    end=_END,
)
# The tags are special tokens, which a grammar cannot ask for by their text.
MISTRAL = ReasoningFormat(
    lambda tail: parser_of(between("[THINK]", "[/THINK]"), False),
    needs_special_tokens=True,
    end="[/THINK]",
)
