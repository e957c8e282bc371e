"""Jamba: a list of {"name": …, "arguments": {…}} between `<tool_calls>` and `</tool_calls>`."""

from collections.abc import Sequence

from jaxserve.server.tools.format import ToolFormat
from jaxserve.server.tools.grammar import calls_grammar, json_call
from jaxserve.server.tools.json_calls import marked_calls
from jaxserve.server.tools.tool import FunctionTool

_START = "<tool_calls>"
_END = "</tool_calls>"


def _lark(tools: Sequence[FunctionTool], parallel: bool) -> str:
    return calls_grammar(
        tools,
        json_call("arguments"),
        first=f"{_START}[",
        between=", ",
        last=f"]{_END}",
        parallel=parallel,
    )


FORMAT = ToolFormat(marked_calls(_START, ends=(_END,)), _lark, marker=_START)
