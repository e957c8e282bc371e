"""Hermes and Qwen: `<tool_call>` {"name": …, "arguments": {…}} `</tool_call>`, one or more."""

from collections.abc import Sequence

from jaxserve.server.tools.format import ToolFormat
from jaxserve.server.tools.grammar import calls_grammar, json_call
from jaxserve.server.tools.json_calls import any_name, read_call, read_end
from jaxserve.server.tools.output import ToolOutput
from jaxserve.server.tools.reader import Markers, Reader, Waiting
from jaxserve.server.tools.tool import FunctionTool

_START = "<tool_call>"
_END = "</tool_call>"
_MARKERS = Markers(_START)


def _steps(r: Reader, out: ToolOutput, tools: Sequence[FunctionTool]) -> Waiting[None]:
    while marker := (yield from r.until(_MARKERS, out.content)):
        r.keep()
        r.take(r.pos + len(marker))
        yield from r.whitespace()
        yield from read_call(r, out, any_name)
        yield from read_end(r, out, _END)
    out.end()


def _lark(tools: Sequence[FunctionTool], parallel: bool) -> str:
    call = json_call("arguments", f"{_START}\n", f"\n{_END}")
    return calls_grammar(tools, call, between="\n", parallel=parallel)


FORMAT = ToolFormat(_steps, _lark)
