"""Writes the llguidance grammars (Lark's syntax, with JSON schemas inline) of calls."""

import json
from collections.abc import Callable, Sequence

from jaxserve.server.tools.tool import FunctionTool

# How models write JSON. Free whitespace would let them write nothing else.
_SPACED = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


def quoted(text: str) -> str:
    """A literal of the grammar."""
    return json.dumps(text)


def json_value(schema: object) -> str:
    """A value that fulfils the schema."""
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": _SPACED}
    return f"%json {json.dumps(schema)}"


def calls_grammar(
    tools: Sequence[FunctionTool],
    call: Callable[[FunctionTool, str], str],
    *,
    first: str = "",
    between: str = "",
    between_rule: str = "",
    last: str = "",
    parallel: bool,
) -> str:
    """A grammar of calls.

    call: the rule of one call, from the tool and the name of the rule of its arguments.
    first, between, last: literals around the calls.  between_rule: more than a literal.
    """
    between = quoted(between) if between else between_rule
    more = f"({between} call)*" if parallel else ""
    parts = [quoted(first) if first else "", "call", more, quoted(last) if last else ""]
    names = [f"arguments-{i}" for i in range(len(tools))]
    rules = [
        "start: " + " ".join(part for part in parts if part),
        "call: " + " | ".join(call(tool, name) for tool, name in zip(tools, names, strict=True)),
        *(
            f"{name}: {json_value(tool.arguments_schema())}"
            for tool, name in zip(tools, names, strict=True)
        ),
    ]
    return "\n".join(rules) + "\n"


def json_call(key: str, before: str = "", after: str = "") -> Callable[[FunctionTool, str], str]:
    """The rule of a call that is a JSON object. key: of its arguments."""

    def rule(tool: FunctionTool, arguments: str) -> str:
        head = f'{before}{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": '
        return f"{quoted(head)} {arguments} {quoted('}' + after)}"

    return rule
