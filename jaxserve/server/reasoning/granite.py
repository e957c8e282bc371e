"""Granite: sentences around the reasoning, in newer models tags."""

from jaxserve.server.reasoning.format import ReasoningFormat, parser_of
from jaxserve.server.reasoning.output import ReasoningOutput
from jaxserve.server.tools.reader import Markers, Reader, Waiting

_STARTS = ("Here is my thought process:", "Here's my thought process:", "<think>")
_ENDS = Markers("Here is my response:", "Here's my response:", "</think>")
_RESPONSE = "<response>"
_RESPONSE_ENDS = Markers("</response>")


def _steps(r: Reader, out: ReasoningOutput, inside: bool) -> Waiting[None]:
    r.keep()
    yield from r.whitespace()
    if (yield from r.literal(*_STARTS)):
        r.forget()
        out.begin_reasoning()
        end = yield from r.until(_ENDS, out.reasoning)
        r.take(r.pos + len(end))
        out.end_reasoning()
        yield from r.whitespace()
        if (yield from r.literal(_RESPONSE)):
            end = yield from r.until(_RESPONSE_ENDS, out.content)
            r.take(r.pos + len(end))
            yield from r.whitespace()
    else:
        out.content(r.kept())
    yield from r.rest(out.content)


FORMAT = ReasoningFormat(lambda tail: parser_of(_steps, False))
