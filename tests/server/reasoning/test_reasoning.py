"""Reasoning is told apart from the answer, however the text is cut."""

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.server.reasoning import (
    REASONING_PARSERS,
    detect_reasoning_parser,
    make_answer_parser,
)
from jaxserve.server.tools import JSON_FORMAT, TOOL_PARSERS
from tests.server.tools.reading import TOOLS, Answer, cut, read_with

# Format, end of the prompt, text, reasoning, content.
CASES = [
    ("deepseek_r1", "", "", "", ""),
    ("deepseek_r1", "", "\n Hm <b>\n</think>\n\nYes. \n", "Hm <b>", "Yes. \n"),
    ("deepseek_r1", "", "<think>\nHm\n\n</think>Yes.</think>", "Hm", "Yes.</think>"),
    ("deepseek_r1", "x<think>\n", "Hm</thin", "Hm</thin", ""),
    ("deepseek_r1", "x</think>", " Yes.", "", " Yes."),
    ("deepseek_r1", "", "</think>\n", "", ""),
    ("deepseek_v3", "<think>", "Hm</think>Yes.", "Hm", "Yes."),
    ("deepseek_v3", "</think>", "Yes.", "", "Yes."),
    ("olmo3", "<think>", "Hm</think>Yes.", "Hm", "Yes."),
    ("qwen3", "", "<think>\n\n</think>\n\nYes.", "", "Yes."),
    ("qwen3", "", "\n<think>\na\n\nb\n</think>\n\nYes.", "a\n\nb", "Yes."),
    ("qwen3", "", "\nYes. <think>Hm</think>", "", "\nYes. <think>Hm</think>"),
    ("qwen3", "", "<thin", "", "<thin"),
    ("qwen3", "", " \n", "", " \n"),
    ("qwen3", "<think>\n", "Hm</think></think>", "Hm", "</think>"),
    ("qwen3", "<think>\n\n</think>\n\n", "Yes.", "", "Yes."),
    ("mistral", "", "[THINK]Hm[/THINK]Yes.", "Hm", "Yes."),
    ("mistral", "", "Yes [THINK]", "", "Yes [THINK]"),
    ("granite", "", "Here is my thought process: Hm. Here is my response: Yes.", "Hm.", "Yes."),
    ("granite", "", "Here's my thought process:Hm. Here's", "Hm. Here's", ""),
    ("granite", "", "Here's my answer:Yes.", "", "Here's my answer:Yes."),
    ("granite", "", "<think>Hm</think>\n<response>Yes.</response>\n", "Hm", "Yes."),
    ("granite", "", "<think>Hm</think> Yes.", "Hm", "Yes."),
    ("granite", "", "<think>Hm</think><response>Yes.", "Hm", "Yes."),
    (
        "openai_gptoss",
        "",
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        "Hm",
        "Yes.",
    ),
    ("openai_gptoss", "", "<|channel|>commentary to=functions.f<|message|>{}<|call|>", "", "{}"),
    ("openai_gptoss", "", "Yes.", "", "Yes."),
]


@pytest.mark.parametrize(("name", "tail", "text", "reasoning", "content"), CASES)
def test_reads(name, tail, text, reasoning, content):
    expected = Answer(content, [], reasoning)
    assert read_with(REASONING_PARSERS[name](tail), [text]) == expected
    assert read_with(REASONING_PARSERS[name](tail), text) == expected
    for place in range(len(text)):
        assert read_with(REASONING_PARSERS[name](tail), cut(text, [place])) == expected


def test_every_format_has_cases():
    assert {case[0] for case in CASES} == set(REASONING_PARSERS)


FRAGMENTS = ["<think>", "</think>", "<", "think>", " ", "\n", "a", "[THINK]", "[/THINK]", "Here is",
             " my response:", "Here's my thought process:", "<response>", "</response>",
             "<|channel|>", "analysis", "<|message|>", "<|end|>", "<|start|>"]  # fmt: skip


@settings(deadline=None)
@given(
    st.sampled_from(sorted(REASONING_PARSERS)),
    st.sampled_from(["", "<think>", "</think>"]),
    st.lists(st.sampled_from(FRAGMENTS)),
    st.sets(st.integers(0, 80)),
)
def test_takes_any_text(name, tail, fragments, places):
    text = "".join(fragments)
    whole = read_with(REASONING_PARSERS[name](tail), [text])
    assert read_with(REASONING_PARSERS[name](tail), cut(text, places)) == whole
    if name != "openai_gptoss":
        num_letters = text.replace("Here is", "").count("a")
        assert (whole.reasoning + whole.content).count("a") >= num_letters


def test_reasoning_comes_as_it_is_written():
    parser = REASONING_PARSERS["qwen3"]("<think>")
    assert [event.text for event in parser.feed("Hm, so")] == ["Hm, so"]
    assert parser.feed("</thi") == []
    assert [event.text for event in parser.feed("s")] == ["</this"]


CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("reasoning", "tools", "text", "expected"),
    [
        ("qwen3", "hermes", f"{CALL}</think>\n\nOk.\n{CALL}\n", ("Ok.", [("now", "{}")], CALL)),
        ("qwen3", "hermes", "Hm</think>Ok <tool_c", ("Ok <tool_c", [], "Hm")),
        ("qwen3", None, f"Hm</think>{CALL}", (CALL, [], "Hm")),
        (None, "hermes", f"Hm</think>{CALL}", ("Hm</think>", [("now", "{}")], "")),
        ("qwen3", "json", 'Hm</think>\n[{"name": "now"}]', ("", [("now", "{}")], "Hm")),
        (
            "openai_gptoss",
            "openai",
            "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary "
            "to=functions.now<|message|>{}<|call|>",
            ("", [("now", "{}")], "Hm"),
        ),
    ],
)
def test_whole_answers(reasoning, tools, text, expected):
    make_reasoning = REASONING_PARSERS[reasoning] if reasoning else None
    tool_format = {**TOOL_PARSERS, "json": JSON_FORMAT}[tools] if tools else None
    for pieces in ([text], text, cut(text, range(0, len(text), 7))):
        parser = make_answer_parser(make_reasoning, tool_format, TOOLS, "<think>\n")
        assert read_with(parser, pieces) == Answer(*expected)


def test_without_formats_there_is_no_parser():
    assert make_answer_parser(None, None, TOOLS, "") is None


GRAMMAR = 'start: "yes" start | "{" b\nb: %json {"type": "integer"}\n'


def accepts(grammar: str, text: str) -> bool:
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("name", "tail", "text", "expected"),
    [
        ("qwen3", "<think>\n", "Hm yes{\n</think>\n\nyesyes{1", True),
        ("qwen3", "<think>\n", "yes{1", False),
        ("qwen3", "", "yes{1", True),
        ("qwen3", "", "<think>Hm</think>yes{1", True),
        ("qwen3", "", "Hm</think>yes{1", False),
        ("qwen3", "</think>", "{1", True),
        ("deepseek_r1", "", "Hm</think>yes{1", True),
        ("deepseek_r1", "", "Hm</think>\n\n\nyes{1", False),
        ("deepseek_r1", "", "Hm</think>no", False),
        ("mistral", "", "yes{1", True),
        ("mistral", "", "Hm", False),
    ],
)
def test_grammars_begin_behind_the_reasoning(name, tail, text, expected):
    assert accepts(REASONING_PARSERS[name].with_reasoning(GRAMMAR, tail), text) == expected


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ messages }}", None),
        ("<think>\n\n</think>\n\n", "qwen3"),
        ("<\uff5cAssistant\uff5c><think>\n </think>", "deepseek_r1"),
        ("[THINK]", "mistral"),
        ("<|start_of_role|> your thought process", "granite"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "openai_gptoss"),
    ],
)
def test_detects(template, name):
    assert detect_reasoning_parser(template) == name
