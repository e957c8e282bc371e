"""Hermes and Qwen: `<tool_call>` {"name": …, "arguments": {…}} `</tool_call>`, one or more."""

from collections.abc import Sequence

from jaxserve.server.tools.format import ToolFormat
from jaxserve.server.tools.grammar import calls_grammar, json_call
from jaxserve.server.tools.json_calls import marked_calls
from jaxserve.server.tools.tool import FunctionTool

_START = "<tool_call>"
_END = "</tool_call>"


def _lark(tools: Sequence[FunctionTool], parallel: bool) -> str:
    call = json_call("arguments", f"{_START}\n", f"\n{_END}")
    return calls_grammar(tools, call, between="\n", parallel=parallel)


FORMAT = ToolFormat(marked_calls(_START, ends=(_END,)), _lark, marker=_START)
