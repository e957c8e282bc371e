"""Texts of every script come whole, streamed or not; stop strings are found wherever they begin."""

import random

import pytest
import tokenizers

from jaxserve.engine.detokenizer import DetokenizerFactory
from jaxserve.engine.input_processor import InputProcessor
from jaxserve.engine.output_processor import OutputProcessor
from jaxserve.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason, SchedulerStats
from jaxserve.metrics import ServerMetrics
from jaxserve.sampling_params import SamplingParams
from tests.engine.test_detokenizer import spm_backend as spm_backend
from tests.engine.test_output_processor import Sink
from tests.fakes_engine import FakeServer, byte_level_tokenizer, make_config, says
from tests.server.test_options import COMPLETIONS, run
from tests.server.test_routes import events

TEXTS = {
    "emoji": "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 🇺🇳, 👍🏽",
    "CJK": "日本語の文章。中文測試。한국어 문장.",
    "combining marks": "e\u0301 n\u0303 a\u030a\u0301 क्षि กำ \u0644\u0651",
    "from right to left": "مرحبا بالعالم שלום",
    "rare planes": "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𒀀 \U0010fffd",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("route", (COMPLETIONS, "/v1/chat/completions"))
def test_a_stream_has_whole_characters_that_add_up(route: str, text: str) -> None:
    """Each byte is a token of its own here."""
    body = (
        {"prompt": "x"}
        if route == COMPLETIONS
        else {"messages": [{"role": "user", "content": "x"}]}
    )

    async def test(server: FakeServer) -> None:
        streamed = await server.post(route, **body, max_tokens=150, stream=True)
        choices = [choice for chunk in events(streamed.text) for choice in chunk["choices"]]
        pieces = [choice.get("text", choice.get("delta", {}).get("content")) for choice in choices]
        pieces = [piece for piece in pieces if piece]
        assert not any("\ufffd" in piece for piece in pieces)
        assert pieces == list(text), "a piece a character"
        whole = (await server.post(route, **body, max_tokens=150)).json()["choices"][0]
        assert (whole.get("text") or whole["message"]["content"]) == text

    run(test, says(text))


def token_id(backend: tokenizers.Tokenizer, token: str) -> int:
    found = backend.token_to_id(token)
    assert found is not None
    return found


def spm_ids(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    """A byte token for each byte, but whole tokens for " the" and "Hello"."""
    ids: list[int] = []
    while text:
        for word, token in ((" the", "▁the"), ("Hello", "Hello")):
            if text.startswith(word):
                ids.append(token_id(backend, token))
                text = text[len(word) :]
                break
        else:
            ids += [token_id(backend, f"<0x{byte:02X}>") for byte in text[0].encode()]
            text = text[1:]
    return ids


def outputs_of(backend: tokenizers.Tokenizer, ids: list[int], **params) -> Sink:
    """What a sequence of these tokens, one a step, gives out behind a prompt."""
    processor = OutputProcessor(DetokenizerFactory(backend), ServerMetrics("m"))
    inputs = InputProcessor(make_config(), byte_level_tokenizer())
    (request,) = inputs.process([7], SamplingParams(**params), arrival_time_s=0.0)
    sink = Sink()
    processor.add(request, sink)
    for i, sampled_id in enumerate(ids, 1):
        finish = FinishReason.LENGTH if i == len(ids) else None
        output = EngineCoreOutput(request.core.request_id, [sampled_id], finish)
        processor.process(EngineCoreOutputs([output], SchedulerStats(), float(i)))
    return sink


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_byte_fallback_tokens_make_whole_characters(spm_backend, text: str) -> None:
    text = f"Hello the {text} the"
    sink = outputs_of(spm_backend, spm_ids(spm_backend, text))
    assert sink.text == text
    assert not any("\ufffd" in output.text for output in sink.outputs)


@pytest.mark.parametrize("include", (False, True))
@pytest.mark.parametrize(
    ("text", "stop"),
    (
        ("aXb", "X"),
        ("Xb", "X"),
        ("日本語の", "本語"),
        ("👩‍👧 family", "\u200d👧"),
        ("e\u0301te\u0301", "\u0301"),
        ("ab" * 150 + "c", "ab" * 100),
        ("ab" * 99 + "ba" * 120, "ba" * 100),
        ("x" + "né" * 100 + "!", "né" * 100),
    ),
    ids=("1 character", "the first", "CJK", "emoji", "a mark", "200", "200 later", "200 wide"),
)
@pytest.mark.parametrize("vocabulary", ("bytes", "sentencepiece"))
def test_a_stop_string_split_over_tokens(
    spm_backend, vocabulary: str, text: str, stop: str, include: bool
) -> None:
    is_bytes = vocabulary == "bytes"
    backend = byte_level_tokenizer().backend if is_bytes else spm_backend
    ids = list(text.encode()) if is_bytes else spm_ids(backend, text)
    sink = outputs_of(backend, ids, stop=stop, include_stop_str_in_output=include)
    end = text.index(stop)
    assert sink.text == text[: end + len(stop) if include else end]
    assert sink.outputs[-1].finish_reason is FinishReason.STOP
    assert sink.outputs[-1].stop_reason == stop
    kept = text[: end + len(stop)]
    assert len(sink.token_ids) == (
        len(kept.encode()) if is_bytes else len(spm_ids(spm_backend, kept))
    )


def test_random_stop_strings_are_found_where_they_first_end(spm_backend) -> None:
    """Of several that end at the same place, the longest."""
    rng = random.Random(7)
    for _ in range(100):
        text = "".join(rng.choice("aé日 ") for _ in range(rng.randint(1, 20)))
        stops = ["".join(rng.choice("aé日 ") for _ in range(rng.randint(1, 3))) for _ in range(2)]
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        for backend in (byte_level_tokenizer().backend, spm_backend):
            ids = list(text.encode()) if backend is not spm_backend else spm_ids(backend, text)
            sink = outputs_of(backend, ids, stop=stops)
            if not ends:
                assert sink.text == text, (text, stops)
                continue
            end = min(ends)
            stop = max((s for s in stops if text[:end].endswith(s)), key=len)
            assert sink.text == text[: end - len(stop)], (text, stops)
            assert sink.outputs[-1].stop_reason == stop, (text, stops)


@pytest.fixture(scope="module")
def spaced_backend() -> tokenizers.Tokenizer:
    """Words that decoding joins with spaces, special tokens too."""
    words = ("[A]", "[B]", "one", "two")
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="one")
    )
    backend.add_special_tokens([tokenizers.AddedToken(w, special=True) for w in words[:2]])
    return backend


@pytest.mark.parametrize(
    ("spaces", "skip", "text"),
    (
        (True, False, " [A] [B] [A] two one [B]"),
        (False, False, "[A][B][A] two one [B]"),
        (True, True, " two one"),
        (False, True, " two one"),
    ),
)
def test_spaces_between_special_tokens(spaced_backend, spaces: bool, skip: bool, text: str) -> None:
    """The prompt ends with a special token: the space behind it is one of those."""
    detokenizer = DetokenizerFactory(spaced_backend).make(
        [2, 1], skip_special_tokens=skip, spaces_between_special_tokens=spaces
    )
    assert detokenizer.feed([0, 1, 0, 3, 2, 1]) + detokenizer.flush() == text


def test_byte_level_vocabularies_have_no_such_spaces() -> None:
    factory = DetokenizerFactory(byte_level_tokenizer().backend)
    texts = {
        factory.make([], skip_special_tokens=False, spaces_between_special_tokens=spaces).feed(
            [256, 257, 32, 256]
        )
        for spaces in (True, False)
    }
    assert texts == {"<|im_start|><|im_end|> <|im_start|>"}
