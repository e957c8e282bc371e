"""Text or calls: what a grammar of strict tools takes, for every format."""

import pytest

from jaxserve.grammars.pieces import _byte_tokenizer, check, lark_grammar, try_grammar
from jaxserve.server.tools import JSON_FORMAT, TOOL_PARSERS, FunctionTool
from jaxserve.server.tools.strict import text_or_calls_grammar

TOOLS = (
    FunctionTool(
        "f",
        parameters={
            "type": "object",
            "properties": {"x": {"type": "integer"}},
            "required": ["x"],
            "additionalProperties": False,
        },
    ),
    FunctionTool("g", parameters={"type": "object", "properties": {}}),
)
# A call, with its argument to be filled in; a text that is read as a call and no grammar writes.
CASES = {
    "deepseek_v31": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": %s}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
    ),
    "granite": ('<|tool_call|>[{"name": "f", "arguments": {"x": %s}}]', "<tool_call>"),
    "granite-20b-fc": ('<function_call> {"name": "f", "arguments": {"x": %s}}', None),
    "hermes": ('<tool_call>\n{"name": "f", "arguments": {"x": %s}}\n</tool_call>', None),
    "jamba": ('<tool_calls>[{"name": "f", "arguments": {"x": %s}}]</tool_calls>', None),
    "llama3_json": ('{"name": "f", "parameters": {"x": %s}}', "{"),
    "llama4_pythonic": ("[f(x=%s)]", " ["),
    "mistral": ('[TOOL_CALLS][{"name": "f", "arguments": {"x": %s}}]', "["),
    "olmo3": ("<function_calls>\nf(x=%s)\n</function_calls>", None),
    "phi4_mini_json": ('functools[{"name": "f", "arguments": {"x": %s}}]', "<|tool_call|>"),
    "qwen3_coder": (
        "<tool_call>\n<function=f>\n<parameter=x>\n%s\n</parameter>\n</function>\n</tool_call>",
        "<function=",
    ),
}


def grammar_of(name: str, *, parallel: bool = True) -> str:
    lark = text_or_calls_grammar(TOOL_PARSERS[name], TOOLS, parallel=parallel, special_tokens={})
    assert lark is not None
    return lark_grammar(lark)


def takes(grammar: str, text: str) -> bool:
    matcher, problem = try_grammar(grammar, _byte_tokenizer())
    assert problem is None, problem
    return all(matcher.try_consume_tokens([byte]) for byte in text.encode()) and (
        matcher.is_accepting()
    )


@pytest.mark.parametrize("name", [name for name in TOOL_PARSERS if name != "openai"])
def test_every_format_has_one(name: str) -> None:
    assert check(grammar_of(name))[0] is None


@pytest.mark.parametrize("name", sorted(CASES))
def test_text_or_calls(name: str) -> None:
    call, unwritten = CASES[name]
    grammar = grammar_of(name)
    for text in ("", "Hello <tool there, é", "a [b] {c}\n", call % 1):
        assert takes(grammar, text), text
    assert not takes(grammar, call % '"s"')
    if TOOL_PARSERS[name].marker:
        assert takes(grammar, "Let me see.\n\n" + call % 1)
        assert not takes(grammar, "Let me see.\n\n" + call % '"s"')
    if unwritten is not None:
        assert not takes(grammar, unwritten)


def test_one_call_only() -> None:
    call = CASES["hermes"][0] % 1
    for parallel in (True, False):
        assert takes(grammar_of("hermes", parallel=parallel), f"{call}\n{call}") == parallel


def test_a_marker_that_is_a_special_token_is_named() -> None:
    special_tokens = {"[TOOL_CALLS]": 5}
    lark = text_or_calls_grammar(
        TOOL_PARSERS["mistral"], TOOLS, parallel=True, special_tokens=special_tokens
    )
    assert lark is not None and "<[5]>" in lark and '"[TOOL_CALLS]"' not in lark


def test_without_a_marker_calls_are_all() -> None:
    lark = text_or_calls_grammar(JSON_FORMAT, TOOLS, parallel=True, special_tokens={})
    assert lark is not None
    grammar = lark_grammar(lark)
    call = '[{"name": "f", "parameters": {"x": 1}}]'
    assert takes(grammar, call) and takes(grammar, f"See: {call}")
    assert not takes(grammar, f" {call}")
