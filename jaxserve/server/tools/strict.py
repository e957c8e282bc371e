"""A grammar for text, calls, or text and then calls, in which every call is a valid one."""

import json
from collections.abc import Mapping, Sequence

from jaxserve.server.tools.format import ToolFormat
from jaxserve.server.tools.tool import FunctionTool

_ANYTHING = "/(?s:.*)/"


def text_or_calls_grammar(
    tool_format: ToolFormat,
    tools: Sequence[FunctionTool],
    *,
    parallel: bool,
    special_tokens: Mapping[str, int],
) -> str | None:
    """An llguidance grammar in Lark's syntax; None where the format has no grammar.

    Calls that a marker begins may come behind a text. Without a marker they are the whole answer,
    and a text that is none cannot begin as they do.
    """
    lark = tool_format.grammar(tools, parallel=parallel)
    if lark is None:
        return None
    marker = tool_format.marker
    no_text = [f"{_ANYTHING} {json.dumps(m)} {_ANYTHING}" for m in tool_format.other_markers]
    if tool_format.may_be_bare or not marker:
        no_text.append(f"/\\s*/ {json.dumps(_first_char(lark))} {_ANYTHING}")
    if not marker:
        return f"start: TEXT | calls\n{_text(no_text)}{_rule('calls', lark)}"
    calls = _rule("calls", _behind_marker(lark, json.dumps(marker)[:-1]))
    if marker in special_tokens:
        return f"start: TEXT (<[{special_tokens[marker]}]> calls)?\n{_text(no_text)}{calls}"
    no_text.append(f"{_ANYTHING} {json.dumps(marker)} {_ANYTHING}")
    return (
        "start: TEXT | text-and-marker calls\n"
        "text-and-marker[lazy]: TEXT-AND-MARKER\n"
        f"TEXT-AND-MARKER: {_ANYTHING} {json.dumps(marker)}\n"
        f"{_text(no_text)}{calls}"
    )


def _text(excluded: Sequence[str]) -> str:
    return "".join([f"TEXT: {_ANYTHING}", *(f" & ~({regex})" for regex in excluded), "\n"])


def _rule(name: str, lark: str) -> str:
    return f"{name}: %lark {{\n{lark}\n}}\n"


def _first_char(lark: str) -> str:
    """What every sentence of the grammar begins with."""
    start, *rules = lark.splitlines()
    first = start if start.startswith('start: "') else _call_rule(rules)
    return json.loads(f'"{first.split(chr(34))[1].removesuffix(chr(92))[:1]}"')


def _call_rule(rules: Sequence[str]) -> str:
    (call,) = (rule for rule in rules if rule.startswith("call: "))
    return call


def _behind_marker(lark: str, opening: str) -> str:
    """The grammar without the marker at the beginning of its sentences, if they have it.

    opening: a quotation mark and the marker, as the grammar has them.
    """
    start, *rules = lark.splitlines()
    if start.startswith(f"start: {opening}"):
        return "\n".join([start.replace(opening, '"', 1), *rules])
    call = _call_rule(rules)
    if opening not in call:
        return lark
    first = call.replace("call: ", "first-call: ", 1).replace(opening, '"')
    return "\n".join([start.replace("call", "first-call", 1), first, *rules])
