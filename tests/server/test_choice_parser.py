"""The deltas of a choice: calls get ids, and reasoning tokens are counted."""

import random

import pytest

from jaxserve.server.choice_parser import ChoiceParser, Delta
from jaxserve.server.reasoning import REASONING_PARSERS, make_answer_parser
from jaxserve.server.tools import TOOL_PARSERS, FunctionTool
from tests.server.chats import call

END_ID = 1000
TEXT = f"<think>\nhm\n</think>\n\nHi.\n{call('f', '{}')}"


def make_parser(*, max_calls: int | None = None, end_id: int | None = None) -> ChoiceParser:
    answer = make_answer_parser(
        REASONING_PARSERS["qwen3"], TOOL_PARSERS["hermes"], [FunctionTool("f")], ""
    )
    assert answer is not None
    ids = iter(("id0", "id1", "id2"))
    return ChoiceParser(
        answer,
        make_call_id=lambda: next(ids),
        count_tokens=lambda text: 100 * len(text),
        max_calls=max_calls,
        reasoning_end_id=end_id,
    )


def parts(rng: random.Random, text: str) -> list[str]:
    cuts = sorted(rng.sample(range(len(text)), rng.randint(0, 20)))
    return [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("seed", range(20))
def test_however_the_text_is_cut_the_message_is_the_same(seed: int) -> None:
    parser = make_parser()
    total = Delta()
    for piece in parts(random.Random(seed), TEXT):
        total += parser.feed(piece, [1])
    total += parser.finish()
    assert (total.reasoning, total.content) == ("hm", "Hi.")
    (first,) = [call for call in total.tool_calls if call.index == 0]
    assert (first.id, first.name, first.arguments) == ("id0", "f", "{}")
    assert parser.has_tool_calls


def test_only_so_many_calls() -> None:
    text = f"{call('f', '{}')}\n{call('f', '{}')}"
    for max_calls, num_calls in ((None, 2), (1, 1)):
        parser = make_parser(max_calls=max_calls)
        total = parser.feed(text, [1]) + parser.finish()
        assert len(total.tool_calls) == num_calls


def test_reasoning_tokens_are_those_up_to_its_end() -> None:
    parser = make_parser(end_id=END_ID)
    assert parser.num_reasoning_tokens == 0
    parser.feed("<think>hm", [1, 2])
    parser.feed("</think> Hi", [3, END_ID, 4])
    parser.feed("</think>", [END_ID, END_ID])
    parser.finish()
    assert parser.num_reasoning_tokens == 4


def test_reasoning_tokens_without_such_a_token_are_those_of_its_text() -> None:
    parser = make_parser()
    parser.feed("<think>hm</think> Hi", [1, 2, 3])
    parser.finish()
    assert parser.num_reasoning_tokens == 200


@pytest.mark.parametrize("end_id", (None, END_ID))
def test_no_reasoning_has_no_tokens(end_id: int | None) -> None:
    parser = make_parser(end_id=end_id)
    parser.feed("Hi", [1, 2, 3])
    parser.finish()
    assert parser.num_reasoning_tokens == 0
    assert not parser.has_tool_calls


def test_deltas_add_up() -> None:
    assert not Delta() and Delta("x") and Delta(reasoning="x")
    assert Delta("a", "b") + Delta("c", "d") == Delta("ac", "bd")
