"""Every format reads its texts alike, however they are cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.server.tools import JSON_FORMAT, TOOL_PARSERS
from tests.server.tools.cases import CASES
from tests.server.tools.reading import Answer, cut, read

FORMATS = {**TOOL_PARSERS, "json": JSON_FORMAT}
ALL_CASES = [(name, *case) for name, cases in CASES.items() for case in cases]


@pytest.mark.parametrize(("name", "text", "content", "calls"), ALL_CASES)
def test_reads(name, text, content, calls):
    expected = Answer(content, calls)
    assert read(FORMATS[name], [text]) == expected
    assert read(FORMATS[name], text) == expected
    for place in range(len(text)):
        assert read(FORMATS[name], cut(text, [place])) == expected


@given(st.sampled_from(ALL_CASES), st.sets(st.integers(0, 200)))
def test_reads_alike_in_random_pieces(case, places):
    name, text, content, calls = case
    assert read(FORMATS[name], cut(text, places)) == Answer(content, calls)


# Texts of nearly valid calls: pieces of valid ones, in any order.
FRAGMENTS = {
    name: sorted(
        {
            text[i : i + n]
            for text, _, _ in cases
            for n in (1, 7, 23)
            for i in range(0, len(text), n)
        }
    )
    for name, cases in CASES.items()
}


@settings(max_examples=400)
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


@pytest.mark.parametrize("name", CASES)
def test_every_beginning_of_a_call_keeps_its_text(name):
    """What was told as a call starts with the same arguments; else the text is all there."""
    for text, _, calls in CASES[name]:
        for end in range(len(text)):
            answer = read(FORMATS[name], [text[:end]])
            if not answer.calls:
                assert answer.content == text[:end]
            for (call, part), (expected, whole) in zip(answer.calls, calls, strict=False):
                assert call == expected
                assert whole.startswith(part)
