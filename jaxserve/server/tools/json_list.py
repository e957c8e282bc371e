"""For any model: the answer is a JSON list of {"name": …, "parameters": {…}}.

The format of last resort for answers that must be calls: a grammar makes the model keep to it.
"""

from collections.abc import Sequence

from jaxserve.server.tools.format import ToolFormat
from jaxserve.server.tools.grammar import calls_grammar, json_call
from jaxserve.server.tools.json_calls import give_back, read_call_list
from jaxserve.server.tools.output import ToolOutput
from jaxserve.server.tools.reader import Reader, Waiting
from jaxserve.server.tools.tool import FunctionTool


def _steps(r: Reader, out: ToolOutput, tools: Sequence[FunctionTool]) -> Waiting[None]:
    names = frozenset(tool.name for tool in tools)
    r.keep()
    yield from r.whitespace()
    yield from read_call_list(r, out, names.__contains__)
    give_back(r, out)
    yield from r.rest(out.content)
    out.end()


def _lark(tools: Sequence[FunctionTool], parallel: bool) -> str:
    call = json_call("parameters")
    return calls_grammar(tools, call, first="[", between=", ", last="]", parallel=parallel)


FORMAT = ToolFormat(_steps, _lark)
