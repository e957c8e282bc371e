"""Phi-4-mini: `functools` and a list of {"name": …, "arguments": {…}}.

Also between the special tokens `<|tool_call|>` and `<|/tool_call|>`, of which the text may have
only what they enclose.
"""

from collections.abc import Sequence

from jaxserve.server.tools.format import ToolFormat
from jaxserve.server.tools.grammar import calls_grammar, json_call
from jaxserve.server.tools.json_calls import marked_calls
from jaxserve.server.tools.tool import FunctionTool


def _lark(tools: Sequence[FunctionTool], parallel: bool) -> str:
    call = json_call("arguments")
    first, between, last = "functools[", ", ", "]"
    return calls_grammar(tools, call, first=first, between=between, last=last, parallel=parallel)


FORMAT = ToolFormat(
    marked_calls("functools", "<|tool_call|>", ends=("<|/tool_call|>",), may_be_bare=True),
    _lark,
    marker="functools",
    other_markers=("<|tool_call|>",),
    may_be_bare=True,
)
