"""Granite 3: `<|tool_call|>`, a special token, and a list of {"name": …, "arguments": {…}}.

Granite 20b: `<function_call>` and one such object a call.
"""

from collections.abc import Sequence

from jaxserve.server.tools.format import ToolFormat
from jaxserve.server.tools.grammar import calls_grammar, json_call
from jaxserve.server.tools.json_calls import marked_calls
from jaxserve.server.tools.tool import FunctionTool

_FUNCTION_CALL = "<function_call>"


def _lark(tools: Sequence[FunctionTool], parallel: bool) -> str:
    # Without the marker, whose token has no text that a grammar could ask for.
    call = json_call("arguments")
    return calls_grammar(tools, call, first="[", between=", ", last="]", parallel=parallel)


def _lark_20b(tools: Sequence[FunctionTool], parallel: bool) -> str:
    return calls_grammar(
        tools, json_call("arguments", f"{_FUNCTION_CALL} "), between="\n", parallel=parallel
    )


FORMAT = ToolFormat(
    marked_calls("<|tool_call|>", "<tool_call>", ends=("</tool_call>",), may_be_bare=True),
    _lark,
    needs_special_tokens=True,
    marker="<|tool_call|>",
    other_markers=("<tool_call>",),
    may_be_bare=True,
)
FORMAT_20B = ToolFormat(marked_calls(_FUNCTION_CALL), _lark_20b, marker=_FUNCTION_CALL)
