"""Tool calls in the model's text: a pure parser and a grammar for each format.

A parser gives events as the text comes. The calls of one answer are numbered from 0. What is no
call is content; a call that breaks off after its start was told keeps the arguments so far, and
the rest is content again. Of a format with `reads_reasoning` there are reasoning events too.
"""

from typing import Final

from jaxserve.server.tools import (
    deepseek,
    granite,
    harmony,
    hermes,
    jamba,
    json_list,
    llama3,
    mistral,
    phi4,
    pythonic,
    qwen3_coder,
)
from jaxserve.server.tools.detect import detect_tool_parser
from jaxserve.server.tools.events import (
    CallArguments,
    CallStart,
    ContentDelta,
    ReasoningDelta,
    ToolEvent,
)
from jaxserve.server.tools.format import ToolFormat, ToolParser
from jaxserve.server.tools.tool import FunctionTool

# By the names of --tool-call-parser.
TOOL_PARSERS: Final[dict[str, ToolFormat]] = {
    "deepseek_v3": deepseek.V3_FORMAT,
    "deepseek_v31": deepseek.V31_FORMAT,
    "granite": granite.FORMAT,
    "granite-20b-fc": granite.FORMAT_20B,
    "granite4": hermes.FORMAT,
    "hermes": hermes.FORMAT,
    "jamba": jamba.FORMAT,
    "llama3_json": llama3.FORMAT,
    "llama4_json": llama3.FORMAT,
    "llama4_pythonic": pythonic.FORMAT,
    "mistral": mistral.FORMAT,
    "olmo3": pythonic.OLMO_FORMAT,
    "openai": harmony.FORMAT,
    "phi4_mini_json": phi4.FORMAT,
    "pythonic": pythonic.FORMAT,
    "qwen3_coder": qwen3_coder.FORMAT,
    "qwen3_xml": qwen3_coder.FORMAT,
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
    "ReasoningDelta",
    "ToolEvent",
    "ToolFormat",
    "ToolParser",
    "detect_tool_parser",
]
