"""Qwen3-Coder: a call in XML, its arguments as text, which the schema says how to read.

`<tool_call>` `<function=f>` `<parameter=a>` value `</parameter>` … `</function>` `</tool_call>`
"""

import json
import re
from collections.abc import Sequence

from jaxserve.server.tools.flat import Parameter, flat_parameters
from jaxserve.server.tools.format import ToolFormat
from jaxserve.server.tools.grammar import json_value, quoted
from jaxserve.server.tools.json_calls import give_back, read_end
from jaxserve.server.tools.output import ToolOutput
from jaxserve.server.tools.reader import MAX_NAME_CHARS, Markers, Reader, Waiting
from jaxserve.server.tools.tool import FunctionTool
from jaxserve.server.tools.typed_text import ParameterTypes

_CALL = "<tool_call>"
_CALL_END = "</tool_call>"
_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_PARAMETER_END = "</parameter>"
# Some models leave the outer tag out.
_MARKERS = Markers(_CALL, _FUNCTION)
_VALUE_MARKERS = Markers(_PARAMETER_END)
_NAME = re.compile(r"[^<>\n]")
# A string of the schema is any text; these ask for more, which a grammar of plain text cannot.
_OF_STRINGS = frozenset(("minLength", "maxLength", "pattern", "format", "contentEncoding"))
_COMBINING = frozenset(("anyOf", "oneOf", "allOf", "not", "if", "$ref"))


def _steps(r: Reader, out: ToolOutput, tools: Sequence[FunctionTool]) -> Waiting[None]:
    types = {tool.name: ParameterTypes(tool) for tool in tools}
    while marker := (yield from r.until(_MARKERS, out.content)):
        r.keep()
        r.take(r.pos + len(marker))
        if marker == _CALL:
            yield from r.whitespace()
            if not (yield from r.literal(_FUNCTION)):
                give_back(r, out)
                continue
        yield from _read_call(r, out, types)
        yield from read_end(r, out, _CALL_END)
    out.end()


def _read_call(r: Reader, out: ToolOutput, types: dict[str, ParameterTypes]) -> Waiting[None]:
    """Reads from the function's name to its end, or to where it stops being a call."""
    name = yield from r.matching(_NAME, MAX_NAME_CHARS)
    if not (name and (name := name.strip()) and (yield from r.literal(">"))):
        return
    out.start(name)
    out.arguments("{")
    separator = ""
    while True:
        r.keep()
        yield from r.whitespace()
        tag = yield from r.literal(_PARAMETER, _FUNCTION_END)
        if tag == _FUNCTION_END:
            out.arguments("}")
            r.forget()
        if tag != _PARAMETER:
            return
        key = yield from r.matching(_NAME, MAX_NAME_CHARS)
        if not (key and (key := key.strip()) and (yield from r.literal(">"))):
            return
        value = yield from _read_value(r)
        if value is None:
            return
        known = types.get(name)
        value = known.as_json(key, value) if known else json.dumps(value, ensure_ascii=False)
        out.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: {value}")
        separator = ", "


def _read_value(r: Reader) -> Waiting[str | None]:
    """A parameter's text; an end tag within it has no other tag behind it."""
    parts: list[str] = []
    while (yield from r.until(_VALUE_MARKERS, parts.append)):
        r.take(r.pos + len(_PARAMETER_END))
        space = yield from r.whitespace()
        followed = yield from r.peek(_PARAMETER, _FUNCTION_END)
        if followed or not (yield from r.more()):
            return "".join(parts).removeprefix("\n").removesuffix("\n")
        parts.append(_PARAMETER_END + space)
    return None


def _lark(tools: Sequence[FunctionTool], parallel: bool) -> str | None:
    calls, rules = [], []
    for i, tool in enumerate(tools):
        parameters = flat_parameters(tool)
        if parameters is None or not _is_readable(tool.name):
            return None
        parts = [quoted(f"{_CALL}\n{_FUNCTION}{tool.name}>\n")]
        for j, parameter in enumerate(parameters):
            rule = f"tool-{i}-parameter-{j}"
            value = _value_rule(parameter, f"{rule}-value")
            if value is None or not _is_readable(parameter.name):
                return None
            head = quoted(f"{_PARAMETER}{parameter.name}>\n")
            rules += [f"{rule}: {head} {rule}-value", value]
            parts.append(rule if parameter.required else f"{rule}?")
        parts.append(quoted(f"{_FUNCTION_END}\n{_CALL_END}"))
        calls.append(" ".join(parts))
    more = ' ("\\n" call)*' if parallel else ""
    lines = [f"start: call{more}", f"call: {' | '.join(calls)}", *rules, _TEXT_TERMINALS]
    return "\n".join(lines) + "\n"


# Any text but the end tag.
_TEXT_TERMINALS = r"TEXT: /(?s:.*)/ & ~/(?s:.*)<\/parameter>(?s:.*)/" + "\n"


def _value_rule(parameter: Parameter, name: str) -> str | None:
    """The rule of a value and its end tag; None when its text would not be read as that value."""
    schema = parameter.schema
    end = quoted(f"\n{_PARAMETER_END}\n")
    kind = schema.get("type")
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if schema.keys() & _COMBINING:
        return None
    if values is not None and kind in (None, "string"):
        if not values or not all(isinstance(v, str) and _PARAMETER_END not in v for v in values):
            return None
        return f"{name}: ({' | '.join(quoted(v) if v else '""' for v in values)}) {end}"
    if kind == "string":
        return None if schema.keys() & _OF_STRINGS else f"{name}[suffix={end}]: TEXT"
    if isinstance(kind, list) and "string" in kind:
        return None
    return f"{name}: {json_value(schema)} {end}"


def _is_readable(name: str) -> bool:
    return re.fullmatch(r"[^<>\s]([^<>\n]{0,254}[^<>\s])?", name) is not None


FORMAT = ToolFormat(_steps, _lark, marker=_CALL, other_markers=(_FUNCTION,))
