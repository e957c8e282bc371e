"""Tool calls in the model's text: a pure parser and a grammar for each format.

A parser gives events as the text comes. The calls of one answer are numbered from 0. What is no
call is content; a call that breaks off after its start was told keeps the arguments so far, and
the rest is content again.
"""

from typing import Final

from jaxserve.server.tools import hermes, json_list
from jaxserve.server.tools.events import CallArguments, CallStart, ContentDelta, ToolEvent
from jaxserve.server.tools.format import ToolFormat, ToolParser
from jaxserve.server.tools.tool import FunctionTool

# By the names of --tool-call-parser.
TOOL_PARSERS: Final[dict[str, ToolFormat]] = {
    "hermes": hermes.FORMAT,
}
# Where a format has no grammar for the tools: any model can be made to write this one.
JSON_FORMAT: Final = json_list.FORMAT

__all__ = [
    "JSON_FORMAT",
    "TOOL_PARSERS",
    "CallArguments",
    "CallStart",
    "ContentDelta",
    "FunctionTool",
    "ToolEvent",
    "ToolFormat",
    "ToolParser",
]
