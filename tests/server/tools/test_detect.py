"""The format is told from what chat templates write."""

import pytest

from jaxserve.server.tools import TOOL_PARSERS, detect_tool_parser
from jaxserve.server.tools.deepseek import CALLS_BEGIN


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ messages }}", None),
        ('<tool_call>\n{"name": <function-name>}\n</tool_call>', "hermes"),
        ("<tool_call>\n<function=f>\n<parameter=p>\n</tool_call>", "qwen3_coder"),
        ("<tool_call>name\n<arg_key>k</arg_key></tool_call>", None),
        ("[AVAILABLE_TOOLS] x [TOOL_CALLS]", "mistral"),
        (f"{CALLS_BEGIN}function ```json", "deepseek_v3"),
        (f"{CALLS_BEGIN}name", "deepseek_v31"),
        ("<|start_of_role|>assistant<|tool_call|>", "granite"),
        ("<|start_of_role|>assistant<tool_call></tool_call>", "hermes"),
        ("<|system|><|tool|>{{ tools }}<|/tool|>", "phi4_mini_json"),
        ("<|start_header_id|>ipython {'name': f, \"parameters\": x} <|python_tag|>", "llama3_json"),
        ("<|header_start|>assistant [func_name1(a=1)]", "llama4_pythonic"),
        ("<|start_header_id|>assistant [func_name1(a=1)] \"parameters\"", "pythonic"),
        ("<function_calls>f(a=1)</function_calls>", "olmo3"),
        ("<|start|>assistant<|channel|>commentary to=functions<|message|>", "openai"),
    ],
)  # fmt: skip
def test_detects(template, name):
    assert detect_tool_parser(template) == name
    assert name is None or name in TOOL_PARSERS
