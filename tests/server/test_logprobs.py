"""Log-probabilities in answers: numbers, tokens, offsets; whole, streamed and echoed."""

import json
from typing import Any

import numpy as np
import pytest

from jaxserve.engine.detokenizer import DetokenizerFactory
from jaxserve.messages import TokenLogprobs
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.logprobs import LogprobsWriter, TextOffsets, scores
from tests.engine.test_detokenizer import spm_backend as spm_backend
from tests.fakes_engine import (
    EOS,
    IM_START,
    FakeServer,
    byte_level_tokenizer,
    fake_logprob,
    fake_logprobs,
    says,
)
from tests.server.test_options import COMPLETIONS, run
from tests.server.test_routes import events

TEXT = "né the"
TEXT_IDS = [*"né".encode(), 258]
TOKENS = ["n", "\ufffd", "\ufffd", " the", "<|im_end|>"]
OFFSETS = [0, 1, 1, 2, 6]
SAYS_TEXT = [*TEXT_IDS, EOS]


def logprob(place: int, token_id: int) -> float:
    return -9999.0 if token_id == 13 else fake_logprob(place, token_id)


async def ask(server: FakeServer, *, stream: bool = False, **options: Any) -> dict:
    """A completion's only choice; a stream's is put together."""
    response = await server.post(COMPLETIONS, stream=stream, **options)
    assert response.status_code == 200, response.text
    if not stream:
        return response.json()["choices"][0]
    whole: dict = {"text": "", "logprobs": None}
    for chunk in events(response.text):
        (choice,) = chunk["choices"]
        lists = choice["logprobs"]
        if lists is not None and whole["logprobs"] is not None:
            lists = {name: whole["logprobs"][name] + lists[name] for name in lists}
        whole |= choice | {"text": whole["text"] + choice["text"], "logprobs": lists}
    return whole


@pytest.mark.parametrize("stream", (False, True))
@pytest.mark.parametrize("num_top", (0, 3))
def test_of_a_completion(stream: bool, num_top: int) -> None:
    async def test(server: FakeServer) -> None:
        choice = await ask(server, prompt="ab", logprobs=num_top, stream=stream)
        assert choice["text"] == TEXT
        found = choice["logprobs"]
        assert found["tokens"] == TOKENS
        assert found["text_offset"] == OFFSETS
        places = list(enumerate(SAYS_TEXT, 2))
        assert found["token_logprobs"] == [logprob(*place) for place in places]
        for (place, token_id), token, top in zip(
            places, TOKENS, found["top_logprobs"], strict=True
        ):
            assert top[token] == logprob(place, token_id)
            assert len(top) in (num_top, num_top + 1), "the token itself may be one of them"
            assert sum(value == 0 for value in top.values()) >= min(num_top, 1)

    run(test, lambda request: SAYS_TEXT)


def test_the_whole_vocabulary() -> None:
    async def test(server: FakeServer) -> None:
        choice = await ask(server, prompt="ab", logprobs=-1, return_tokens_as_token_ids=True)
        for place, top in enumerate(choice["logprobs"]["top_logprobs"], 2):
            assert top == {f"token_id:{i}": logprob(place, i) for i in range(300)}
        assert choice["logprobs"]["tokens"][0] == f"token_id:{ord('n')}"

    run(test, lambda request: SAYS_TEXT, max_logprobs=-1)


def test_chosen_tokens_are_in_the_place_of_the_likeliest() -> None:
    async def test(server: FakeServer) -> None:
        choice = await ask(server, prompt="ab", logprobs=5, logprob_token_ids=[65, 13, 65])
        for place, token, top in zip(
            range(2, 7), TOKENS, choice["logprobs"]["top_logprobs"], strict=True
        ):
            assert set(top) == {token, "A", "\r"}
            assert (top["A"], top["\r"]) == (logprob(place, 65), -9999.0)

    run(test, lambda request: SAYS_TEXT)


def test_minus_infinity_is_a_number() -> None:
    async def test(server: FakeServer) -> None:
        response = await server.post(COMPLETIONS, prompt="ab", logprobs=1, prompt_logprobs=1)
        choice = json.loads(response.text, parse_constant=pytest.fail)["choices"][0]
        assert choice["logprobs"]["token_logprobs"][0] == -9999.0
        assert choice["logprobs"]["top_logprobs"][0]["\r"] == -9999.0

    run(test, says("\r"))


@pytest.mark.parametrize("stream", (False, True))
@pytest.mark.parametrize("max_tokens", (0, 2, 9))
@pytest.mark.parametrize("prompt", ("né the", [*"né".encode(), 258], [97]))
def test_of_an_echo(stream: bool, max_tokens: int, prompt: Any) -> None:
    """One token of a prompt has none, as nothing comes before it."""

    async def test(server: FakeServer) -> None:
        choice = await ask(
            server, prompt=prompt, echo=True, logprobs=2, max_tokens=max_tokens, stream=stream
        )
        prompt_ids = [97] if prompt == [97] else TEXT_IDS
        said = SAYS_TEXT[:max_tokens]
        found = choice["logprobs"]
        assert found["token_logprobs"] == [
            None,
            *(logprob(place, i) for place, i in enumerate(prompt_ids[1:], 1)),
            *(logprob(place, i) for place, i in enumerate(said, len(prompt_ids))),
        ]
        head, start = (["a"], 1) if prompt == [97] else (TOKENS[:4], 6)
        assert found["tokens"] == head + TOKENS[: len(said)]
        offsets = [0] if prompt == [97] else OFFSETS[:4]
        assert found["text_offset"] == offsets + [start + i for i in OFFSETS[: len(said)]]
        assert found["top_logprobs"][0] is None
        assert all(2 <= len(top) <= 3 for top in found["top_logprobs"][1:])
        for name, values in found.items():
            assert len(values) == len(prompt_ids) + len(said), name
        for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
            if "\ufffd" not in token and token != "<|im_end|>":
                assert choice["text"][offset : offset + len(token)] == token

    run(test, lambda request: SAYS_TEXT)


@pytest.mark.parametrize(("skip", "offsets"), ((True, [0, 1, 1]), (False, [0, 1, 13])))
def test_offsets_of_an_echo_with_special_tokens(skip: bool, offsets: list) -> None:
    async def test(server: FakeServer) -> None:
        choice = await ask(
            server,
            prompt=[97, 256, 98],
            echo=True,
            logprobs=0,
            max_tokens=1,
            skip_special_tokens=skip,
        )
        assert choice["text"] == ("abx" if skip else f"a{IM_START}bx")
        assert choice["logprobs"]["tokens"] == ["a", IM_START, "b", "x"]
        assert choice["logprobs"]["text_offset"] == [*offsets, offsets[-1] + 1]

    run(test, says("xy"))


def test_prompt_logprobs() -> None:
    async def test(server: FakeServer) -> None:
        choice = await ask(server, prompt="abc", prompt_logprobs=2, n=1)
        first, *others = choice["prompt_logprobs"]
        assert first is None
        assert len(others) == 2
        for place, (token_id, entry) in enumerate(zip((98, 99), others, strict=True), 1):
            own = entry[str(token_id)]
            better = [i for i in range(300) if logprob(place, i) > logprob(place, token_id)]
            earlier = [i for i in range(token_id) if logprob(place, i) == own["logprob"]]
            assert own == {
                "logprob": logprob(place, token_id),
                "rank": len(better) + len(earlier) + 1,
                "decoded_token": chr(token_id),
            }
            likeliest = {i: e for i, e in entry.items() if e["rank"] <= 2}
            assert sorted(e["rank"] for e in likeliest.values()) == [1, 2]
            assert all(e["logprob"] == logprob(place, int(i)) for i, e in likeliest.items())
        assert choice["logprobs"] is None, "nobody asked for those of the output"
        plain = await ask(server, prompt="abc")
        assert "prompt_logprobs" not in plain

    run(test, says("x"))


def test_every_prompt_has_its_own() -> None:
    async def test(server: FakeServer) -> None:
        response = await server.post(COMPLETIONS, prompt=["ab", "c"], prompt_logprobs=0, n=2)
        found = [choice["prompt_logprobs"] for choice in response.json()["choices"]]
        assert [len(entries) for entries in found] == [2, 2, 1, 1]
        assert [list(entries[-1] or ()) for entries in found] == [["98"], ["98"], [], []]

    run(test, says("x"))


@pytest.mark.parametrize("stream", (False, True))
@pytest.mark.parametrize(("include", "text"), ((False, "ab"), (True, "abcd")))
def test_a_stop_string_keeps_the_log_probabilities_of_its_own_tokens(
    stream: bool, include: bool, text: str
) -> None:
    """Those behind it are gone, as are the tokens."""

    async def test(server: FakeServer) -> None:
        choice = await ask(
            server,
            prompt="x",
            logprobs=0,
            stop="cd",
            include_stop_str_in_output=include,
            return_token_ids=True,
            stream=stream,
        )
        assert choice["text"] == text
        assert choice["logprobs"]["tokens"] == ["a", "b", "c", "d"]

    run(test, says("abcdef"))


def test_no_chunk_without_text_splits_a_character_from_its_tokens() -> None:
    async def test(server: FakeServer) -> None:
        response = await server.post(COMPLETIONS, prompt="x", logprobs=0, stream=True)
        pieces = [
            (choice["text"], choice["logprobs"]["tokens"])
            for chunk in events(response.text)
            for choice in chunk["choices"]
        ]
        assert pieces == [
            ("n", ["n"]),
            ("é", ["\ufffd", "\ufffd"]),
            (" the", [" the"]),
            ("", ["<|im_end|>"]),
        ]

    run(test, lambda request: SAYS_TEXT)


# --- the writer ----------------------------------------------------------------------------------


def writer(*, as_ids: bool = False, **params: Any) -> LogprobsWriter:
    factory = DetokenizerFactory(byte_level_tokenizer().backend)
    return LogprobsWriter(factory, SamplingParams(**params), as_ids=as_ids)


def test_of_a_chat() -> None:
    """Bytes are those of the token, a part of a character too."""
    pieces = [fake_logprobs(4, TEXT_IDS[:2], 2), fake_logprobs(6, TEXT_IDS[2:], 2)]
    content = writer(logprobs=2).chat(TEXT_IDS, pieces)
    assert [entry.token for entry in content] == TOKENS[:4]
    assert [entry.bytes for entry in content] == [[110], [0xC3], [0xA9], [*b" the"]]
    for place, (token_id, entry) in enumerate(zip(TEXT_IDS, content, strict=True), 4):
        assert entry.logprob == logprob(place, token_id)
        assert [top.logprob for top in entry.top_logprobs] == [0, 0]
        assert all(
            top.token == bytes(top.bytes).decode(errors="replace") for top in entry.top_logprobs
        )
    by_id = writer(logprobs=2, as_ids=True).chat(TEXT_IDS, pieces)
    assert [entry.token for entry in by_id] == [f"token_id:{i}" for i in TEXT_IDS]
    assert by_id[3].bytes == [*b" the"]
    none = writer(logprobs=0).chat(TEXT_IDS, [fake_logprobs(4, TEXT_IDS, 0)])
    assert [entry.top_logprobs for entry in none] == [[]] * 4


def test_pieces_that_go_on_behind_the_tokens() -> None:
    pieces = [fake_logprobs(0, [5, 6], 1), fake_logprobs(2, [7, 8, 9], 1)]
    assert [score.token_id for score in scores(pieces, [5, 6, 7])] == [5, 6, 7]
    assert [score.rank for score in scores(pieces, [5, 6, 7])] == [
        *np.frombuffer(pieces[0].ranks, "<i4"),
        np.frombuffer(pieces[1].ranks, "<i4")[0],
    ]


def test_not_a_number_is_the_lowest() -> None:
    bad = np.array([np.nan], "<f4").tobytes()
    piece = TokenLogprobs(1, 0, bad, np.array([1], "<i4").tobytes(), b"", b"")
    assert next(scores([piece], [3])).logprob == -9999.0


def test_tokens_of_a_sentencepiece_vocabulary(spm_backend) -> None:
    """A space at the start of a word is there, and a byte token is its byte."""
    factory = DetokenizerFactory(spm_backend)
    the, byte = spm_backend.token_to_id("▁the"), spm_backend.token_to_id("<0xC3>")
    special = spm_backend.token_to_id("</s>")
    assert factory.token_bytes(the) == b" the"
    assert factory.token_bytes(byte) == b"\xc3"
    assert factory.token_bytes(special) == b"</s>"
    assert factory.token_bytes(spm_backend.token_to_id("b")) == b"b"
    assert factory.token_bytes(9999) == b""
    offsets = TextOffsets(factory.make([the]), start=10)
    assert [offsets.next(i) for i in (the, byte, byte - 0xC3 + 0xA9, the)] == [10, 14, 14, 15]
