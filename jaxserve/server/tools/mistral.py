"""Mistral: `[TOOL_CALLS]`, a special token, and calls.

Older tokenizers: a list of {"name": …, "arguments": {…}}. Newer ones, a call a token:
`[TOOL_CALLS]name{…}` or `[TOOL_CALLS]name[CALL_ID]id[ARGS]{…}`.
"""

import re
from collections.abc import Sequence

from jaxserve.server.tools.format import ToolFormat
from jaxserve.server.tools.grammar import calls_grammar, json_call
from jaxserve.server.tools.json_calls import (
    any_name,
    begins_with,
    give_back,
    read_call_list,
    read_named_arguments,
)
from jaxserve.server.tools.output import ToolOutput
from jaxserve.server.tools.reader import MAX_NAME_CHARS, Markers, Reader, Waiting
from jaxserve.server.tools.tool import FunctionTool

_START = "[TOOL_CALLS]"
_MARKERS = Markers(_START)
_NAME = re.compile(r"[^\s\[\]{}\"<>]")


def _steps(r: Reader, out: ToolOutput, tools: Sequence[FunctionTool]) -> Waiting[None]:
    names = frozenset(tool.name for tool in tools)
    # The grammar has no marker, whose token has no text that it could ask for.
    r.keep()
    if not (yield from r.peek(_START)):
        yield from read_call_list(r, out, names.__contains__)
    give_back(r, out)
    while marker := (yield from r.until(_MARKERS, out.content)):
        r.keep()
        r.take(r.pos + len(marker))
        yield from r.whitespace()
        if (yield from r.peek(_START)):
            pass
        elif (yield from begins_with(r, "[")):
            yield from read_call_list(r, out, any_name)
        else:
            yield from _read_named(r, out)
        give_back(r, out)
    out.end()


def _read_named(r: Reader, out: ToolOutput) -> Waiting[bool]:
    name = yield from r.matching(_NAME, MAX_NAME_CHARS)
    yield from r.whitespace()
    if (yield from r.literal("[CALL_ID]")):
        yield from r.matching(_NAME, MAX_NAME_CHARS)
    yield from r.literal("[ARGS]")
    yield from r.whitespace()
    return (yield from read_named_arguments(r, out, name))


def _lark(tools: Sequence[FunctionTool], parallel: bool) -> str:
    call = json_call("arguments")
    return calls_grammar(tools, call, first="[", between=", ", last="]", parallel=parallel)


FORMAT = ToolFormat(_steps, _lark, needs_special_tokens=True, marker=_START, may_be_bare=True)
