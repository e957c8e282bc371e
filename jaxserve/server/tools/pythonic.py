"""Llama 4, Llama 3.2 and Olmo 3: calls in Python, `[f(a=1, b="x"), g()]`.

Olmo marks them: `<function_calls>`, a call a line, `</function_calls>`. Where nothing marks them,
they stand at the start of the answer and are of known functions.
"""

import json
import re
from collections.abc import Sequence

from jaxserve.server.tools.flat import flat_parameters
from jaxserve.server.tools.format import ToolFormat
from jaxserve.server.tools.grammar import json_value, quoted
from jaxserve.server.tools.json_calls import Accepts, any_name, begins_with, give_back
from jaxserve.server.tools.literals import read_literal
from jaxserve.server.tools.output import ToolOutput
from jaxserve.server.tools.reader import MAX_NAME_CHARS, Markers, Reader, Waiting
from jaxserve.server.tools.tool import FunctionTool

_FUNCTION = re.compile(r"[\w.-]")
_ARGUMENT = re.compile(r"\w")
_OLMO_START = "<function_calls>"
_OLMO_END = "</function_calls>"
_OLMO_MARKERS = Markers(_OLMO_START)


def _steps(r: Reader, out: ToolOutput, tools: Sequence[FunctionTool]) -> Waiting[None]:
    accepts = frozenset(tool.name for tool in tools).__contains__
    r.keep()
    yield from r.whitespace()
    yield from r.literal("<|python_start|>")
    yield from r.whitespace()
    if (yield from r.literal("[")):
        yield from r.whitespace()
        while (yield from _read_call(r, out, accepts)):
            r.keep()
            yield from r.whitespace()
            separator = yield from r.literal(",", "]")
            yield from r.whitespace()
            if separator == "]":
                yield from r.literal("<|python_end|>")
                r.forget()
            if separator != ",":
                break
    give_back(r, out)
    yield from r.rest(out.content)
    out.end()


def _olmo_steps(r: Reader, out: ToolOutput, tools: Sequence[FunctionTool]) -> Waiting[None]:
    while marker := (yield from r.until(_OLMO_MARKERS, out.content)):
        r.keep()
        r.take(r.pos + len(marker))
        yield from r.whitespace()
        while (yield from _read_call(r, out, any_name)):
            r.keep()
            yield from r.whitespace()
            if (yield from r.literal(_OLMO_END)):
                r.forget()
                break
        give_back(r, out)
    out.end()


def _read_call(r: Reader, out: ToolOutput, accepts: Accepts) -> Waiting[bool]:
    """Reads `f(…)`. False where it stops being a call; the reader keeps what was not told."""
    name = yield from r.matching(_FUNCTION, MAX_NAME_CHARS)
    if not name or not accepts(name) or not (yield from r.literal("(")):
        return False
    out.start(name)
    out.arguments("{")
    separator = ""
    while True:
        r.keep()
        yield from r.whitespace()
        if (yield from r.literal(")")):
            break
        key = yield from r.matching(_ARGUMENT, MAX_NAME_CHARS)
        yield from r.whitespace()
        if not key or not (yield from r.literal("=")):
            return False
        yield from r.whitespace()
        value = yield from read_literal(r)
        if value is None:
            return False
        yield from r.whitespace()
        if not (yield from r.literal(",")) and not (yield from begins_with(r, ")")):
            return False
        out.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: {value}")
        separator = ", "
    out.arguments("}")
    r.forget()
    return True


def _lark(tools: Sequence[FunctionTool], parallel: bool) -> str | None:
    rules = _call_rules(tools)
    more = ' (", " call)*' if parallel else ""
    return rules and f'start: "[" call{more} "]"\n{rules}'


def _olmo_lark(tools: Sequence[FunctionTool], parallel: bool) -> str | None:
    rules = _call_rules(tools)
    more = ' ("\\n" call)*' if parallel else ""
    first, last = quoted(f"{_OLMO_START}\n"), quoted(f"\n{_OLMO_END}")
    return rules and f"start: {first} call{more} {last}\n{rules}"


def _call_rules(tools: Sequence[FunctionTool]) -> str | None:
    calls, rules = [], []
    for i, tool in enumerate(tools):
        if not re.fullmatch(r"[\w.-]{1,256}", tool.name):
            return None
        arguments = _arguments_rules(tool, f"tool-{i}")
        if arguments is None:
            return None
        rules += arguments
        calls.append(f'{quoted(f"{tool.name}(")} tool-{i}-first-0 ")"')
    return "\n".join([f"call: {' | '.join(calls)}", *rules]) + "\n"


def _arguments_rules(tool: FunctionTool, prefix: str) -> list[str] | None:
    """Rules of the arguments from the i-th on: with none before (first), or with some (more)."""
    parameters = flat_parameters(tool)
    if parameters is None or not all(
        re.fullmatch(r"[^\W\d]\w{0,255}", parameter.name) for parameter in parameters
    ):
        return None
    rules = []
    for i, parameter in enumerate(parameters):
        rest = f"{prefix}-more-{i + 1}"
        rules.append(f"{prefix}-value-{i}: {json_value(parameter.schema)}")
        for place, before in (("first", ""), ("more", ", ")):
            rule = f"{quoted(f'{before}{parameter.name}=')} {prefix}-value-{i} {rest}"
            if not parameter.required:
                rule += f" | {prefix}-{place}-{i + 1}"
            rules.append(f"{prefix}-{place}-{i}: {rule}")
    return [*rules, *(f'{prefix}-{place}-{len(parameters)}: ""' for place in ("first", "more"))]


FORMAT = ToolFormat(_steps, _lark)
OLMO_FORMAT = ToolFormat(_olmo_steps, _olmo_lark, marker=_OLMO_START)
