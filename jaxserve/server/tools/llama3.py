"""Llama 3: the answer is {"name": …, "parameters": {…}}; more of them after a semicolon.

Nothing marks a call but, for some models, `<|python_tag|>` before it. So calls stand at the start
of the answer only, and are of known functions with parameters.
"""

from collections.abc import Sequence

from jaxserve.server.tools.format import ToolFormat
from jaxserve.server.tools.grammar import calls_grammar, json_call
from jaxserve.server.tools.json_calls import begins_with, give_back, read_call
from jaxserve.server.tools.output import ToolOutput
from jaxserve.server.tools.reader import Reader, Waiting
from jaxserve.server.tools.tool import FunctionTool


def _steps(r: Reader, out: ToolOutput, tools: Sequence[FunctionTool]) -> Waiting[None]:
    accepts = frozenset(tool.name for tool in tools).__contains__
    r.keep()
    yield from r.whitespace()
    yield from r.literal("<|python_tag|>")
    yield from r.whitespace()
    while (yield from begins_with(r, "{")):
        if not (yield from read_call(r, out, accepts, needs_arguments=True)):
            break
        r.keep()
        yield from r.whitespace()
        yield from r.literal(";")
        yield from r.whitespace()
    give_back(r, out)
    yield from r.rest(out.content)
    out.end()


def _lark(tools: Sequence[FunctionTool], parallel: bool) -> str:
    return calls_grammar(tools, json_call("parameters"), between="; ", parallel=parallel)


FORMAT = ToolFormat(_steps, _lark)
