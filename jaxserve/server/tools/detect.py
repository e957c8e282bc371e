"""Which format a model writes, told from its chat template."""

from typing import Final

from jaxserve.server.tools.deepseek import CALLS_BEGIN

# The first that fits is it: all of the texts stand in the template. None: a format that is not
# read here, but has a text of one that is.
_SIGNS: Final[tuple[tuple[str | None, tuple[str, ...]], ...]] = (
    ("openai", ("<|channel|>", "<|message|>")),
    (None, ("<arg_key>",)),
    (None, ("<invoke name=",)),
    (None, ("<seed:tool_call>",)),
    (None, ("<|tool_calls_section_begin|>",)),
    (None, ("<|plugin|>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("deepseek_v3", (CALLS_BEGIN, "```json")),
    ("deepseek_v31", (CALLS_BEGIN,)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("olmo3", ("<function_calls>",)),
    ("jamba", ("<tool_calls>", "jamba")),
    ("hermes", ("<tool_call>", "</tool_call>")),
    ("granite", ("<|tool_call|>", "<|start_of_role|>")),
    ("granite", ("<tool_call>", "<|start_of_role|>")),
    ("granite-20b-fc", ("<function_call>",)),
    ("phi4_mini_json", ("functools",)),
    ("phi4_mini_json", ("<|tool_call|>", "<|/tool_call|>")),
    ("phi4_mini_json", ("<|tool|>", "<|/tool|>")),
    ("llama4_pythonic", ("<|header_start|>", "<|python_start|>")),
    ("llama4_pythonic", ("<|header_start|>", "[func_name1(")),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ("<|start_header_id|>", '"parameters"')),
)


def detect_tool_parser(chat_template: str) -> str | None:
    """The name of the format that the template writes and asks for, in TOOL_PARSERS."""
    for name, signs in _SIGNS:
        if all(sign in chat_template for sign in signs):
            return name
    return None
