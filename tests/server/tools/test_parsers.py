"""Every format reads its texts alike, however they are cut."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.server.tools import JSON_FORMAT, TOOL_PARSERS, CallArguments, CallStart
from jaxserve.server.tools.reader import Reader
from tests.server.tools.cases import CASES
from tests.server.tools.reading import Answer, cut, read

FORMATS = {**TOOL_PARSERS, "json": JSON_FORMAT}
ALL_CASES = [(name, case[0], Answer(*case[1:])) for name in CASES for case in CASES[name]]
SAME_FORMATS = {
    "deepseek_v31": "deepseek_v3",
    "granite4": "hermes",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "qwen3_xml": "qwen3_coder",
}


def test_every_format_has_cases():
    assert set(FORMATS) == set(CASES) | set(SAME_FORMATS)
    for name, other in SAME_FORMATS.items():
        assert FORMATS[name].steps is FORMATS[other].steps


@pytest.mark.parametrize(("name", "text", "expected"), ALL_CASES)
def test_reads(name, text, expected):
    assert read(FORMATS[name], [text]) == expected
    assert read(FORMATS[name], text) == expected
    for place in range(len(text)):
        assert read(FORMATS[name], cut(text, [place])) == expected


@settings(deadline=None)
@given(st.sampled_from(ALL_CASES), st.sets(st.integers(0, 200)))
def test_reads_alike_in_random_pieces(case, places):
    name, text, expected = case
    assert read(FORMATS[name], cut(text, places)) == expected


# Texts of nearly valid calls: pieces of valid ones, in any order.
FRAGMENTS = {
    name: sorted(
        {
            text[i : i + n]
            for of, text, _ in ALL_CASES
            if of == name and len(text) < 400
            for n in (1, 7, 23)
            for i in range(0, len(text), n)
        }
    )
    for name in CASES
}


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_takes_any_text(data):
    name = data.draw(st.sampled_from(sorted(FRAGMENTS)))
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS[name]))))
    places = data.draw(st.sets(st.integers(0, len(text))))
    assert read(FORMATS[name], cut(text, places)) == read(FORMATS[name], [text])


@pytest.mark.parametrize("name", CASES)
def test_text_without_calls_is_told_whole_and_at_once(name):
    text = "What <b> can [ I ] do: {x}, `f(x)`?  Fine.\n"
    assert read(FORMATS[name], text) == Answer(text)
    parser = FORMATS[name].make_parser([])
    (event,) = parser.feed("Some plain text")
    assert event.text == "Some plain text"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("name", [name for name in CASES if name != "openai"])
def test_every_beginning_of_a_call_keeps_its_text(name):
    """What was told as a call starts with the same arguments; else the text is all there."""
    for text, expected in [(text, answer) for of, text, answer in ALL_CASES if of == name]:
        for end in range(len(text)):
            answer = read(FORMATS[name], [text[:end]])
            if not answer.calls:
                assert answer.content == text[:end]
            for (call, part), (whole_call, whole) in zip(
                answer.calls, expected.calls, strict=False
            ):
                assert call == whole_call
                # An end tag may turn out to be a part of the value, which only what follows tells.
                assert whole.startswith(part) or "</parameter>" in whole


def test_arguments_come_as_they_are_written():
    parser = TOOL_PARSERS["hermes"].make_parser(())
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"a') == [
        CallStart(0, "f"),
        CallArguments(0, '{"a'),
    ]
    assert parser.feed('": 1') == [CallArguments(0, '": 1')]


LONG = 5_000


@pytest.mark.parametrize(
    ("name", "before", "body", "after"),
    [
        ("hermes", "", "a" * LONG, ""),
        ("hermes", "", "<tool_cal" * (LONG // 9), ""),
        ("hermes", "", " " * LONG, ""),
        ("hermes", '<tool_call>{"x": "', "a" * LONG, '"'),
        ("hermes", '<tool_call>{"arguments": {"x": "', "\n" * LONG, '"}, "name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "[" * LONG, ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": "', "a" * LONG, ""),
        ("mistral", "[TOOL_CALLS]", "a" * LONG, ""),
        ("pythonic", "[now(a=", "[" * LONG, ""),
        ("pythonic", "[now(a='", "\\n" * (LONG // 2), "')]"),
        ("pythonic", "[", "now()," * (LONG // 6), ""),
        ("qwen3_coder", "<function=now><parameter=a>", "</parameter>" * (LONG // 12), ""),
        ("openai", "<|channel|>", "<|start|>" * (LONG // 9), ""),
        ("openai", "<|message|>", "a" * LONG, ""),
    ],
)
def test_unread_text_stays_short(name, before, body, after, monkeypatch):
    """So that a piece is not looked at again with every piece that follows."""
    add = Reader.add

    def checked_add(reader: Reader, text: str) -> None:
        assert len(reader.text) - reader.pos < 32
        add(reader, text)

    text = before + body + after
    expected = read(FORMATS[name], [text])
    monkeypatch.setattr(Reader, "add", checked_add)
    assert read(FORMATS[name], text) == expected


@pytest.mark.parametrize("value", ['"' + 100_000 * "a" + '"', 50_000 * "[" + 50_000 * "]"])
def test_takes_long_arguments_a_character_at_a_time(value):
    start = time.process_time()
    arguments = f'{{"a": {value}}}'
    text = f'<tool_call>{{"name": "now", "arguments": {arguments}}}</tool_call>'
    assert read(FORMATS["hermes"], text) == Answer("", [("now", arguments)])
    assert time.process_time() - start < 10
