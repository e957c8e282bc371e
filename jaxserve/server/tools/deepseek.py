"""DeepSeek V3 and V3.1: calls between tokens of their own, the arguments in JSON.

V3 writes the kind of tool, the name behind a separator and the arguments in a fenced block; V3.1
the name and, behind the separator, the arguments.
"""

import dataclasses
import re
from collections.abc import Sequence

from jaxserve.server.tools.format import ToolFormat
from jaxserve.server.tools.grammar import calls_grammar, quoted
from jaxserve.server.tools.json_calls import (
    begins_with,
    give_back,
    read_end,
    read_named_arguments,
)
from jaxserve.server.tools.output import ToolOutput
from jaxserve.server.tools.reader import MAX_NAME_CHARS, Markers, Reader, Waiting
from jaxserve.server.tools.tool import FunctionTool


def _token(name: str) -> str:
    return f"<\uff5ctool\u2581{name}\uff5c>"


CALLS_BEGIN = _token("calls\u2581begin")
_CALLS_END = _token("calls\u2581end")
_CALL_BEGIN = _token("call\u2581begin")
_CALL_END = _token("call\u2581end")
_SEPARATOR = _token("sep")
_KIND = "function"
_FENCE = "```"
_MARKERS = Markers(CALLS_BEGIN, _CALL_BEGIN)
_NAME = re.compile(r"[^\s{}\"<>`]")


def _steps(r: Reader, out: ToolOutput, tools: Sequence[FunctionTool]) -> Waiting[None]:
    while marker := (yield from r.until(_MARKERS, out.content)):
        r.keep()
        r.take(r.pos + len(marker))
        if marker == CALLS_BEGIN:
            yield from r.whitespace()
            if not (yield from r.literal(_CALL_BEGIN)):
                give_back(r, out)
                continue
        yield from _read_call(r, out)
        if r.keeping:
            give_back(r, out)
            continue
        r.keep()
        yield from r.whitespace()
        yield from r.literal(_FENCE)
        yield from r.whitespace()
        if (yield from r.literal(_CALL_END)):
            r.forget()
            yield from read_end(r, out, _CALLS_END)
        else:
            give_back(r, out)
    out.end()


def _read_call(r: Reader, out: ToolOutput) -> Waiting[bool]:
    yield from r.whitespace()
    name = yield from r.matching(_NAME, MAX_NAME_CHARS)
    yield from r.whitespace()
    if not (yield from r.literal(_SEPARATOR)):
        return False
    yield from r.whitespace()
    if name == _KIND and not (yield from begins_with(r, "{")):
        name = yield from r.matching(_NAME, MAX_NAME_CHARS)
        yield from r.whitespace()
        if not (yield from r.literal(f"{_FENCE}json", _FENCE)):
            return False
        yield from r.whitespace()
    return (yield from read_named_arguments(r, out, name))


def _lark_v3(tools: Sequence[FunctionTool], parallel: bool) -> str | None:
    def call(tool: FunctionTool, arguments: str) -> str:
        head = f"{_CALL_BEGIN}{_KIND}{_SEPARATOR}{tool.name}\n{_FENCE}json\n"
        return f"{quoted(head)} {arguments} {quoted(f'\n{_FENCE}{_CALL_END}')}"

    return _lark(tools, call, "\n", parallel)


def _lark_v31(tools: Sequence[FunctionTool], parallel: bool) -> str | None:
    def call(tool: FunctionTool, arguments: str) -> str:
        head = f"{_CALL_BEGIN}{tool.name}{_SEPARATOR}"
        return f"{quoted(head)} {arguments} {quoted(_CALL_END)}"

    return _lark(tools, call, "", parallel)


def _lark(tools: Sequence[FunctionTool], call, between: str, parallel: bool) -> str | None:
    if not all(_is_readable(tool.name) for tool in tools):
        return None
    first, last = CALLS_BEGIN, _CALLS_END
    return calls_grammar(tools, call, first=first, between=between, last=last, parallel=parallel)


def _is_readable(name: str) -> bool:
    return 0 < len(name) <= MAX_NAME_CHARS and all(map(_NAME.match, name))


V3_FORMAT = ToolFormat(
    _steps,
    _lark_v3,
    needs_special_tokens=True,
    marker=CALLS_BEGIN,
    other_markers=(_CALL_BEGIN,),
)
V31_FORMAT = dataclasses.replace(V3_FORMAT, lark=_lark_v31)
