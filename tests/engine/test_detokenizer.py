"""Incremental text equals text decoded at once, whole characters only; stop strings in pieces."""

import itertools
import random

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from jaxserve.checkpoint.tokenizer import Tokenizer
from jaxserve.engine.detokenizer import DetokenizerFactory, StopChecker
from tests.fakes_engine import byte_level_tokenizer

TEXTS = (
    "The quick brown fox, isn't it?\n\n\tindented",
    "日本語のテキスト 中文测试字符串 한국어 문장입니다",
    "🙂🚀👩‍👩‍👧‍👦 emoji 😀 in text",
    "naïve café ½ ¾ Straße Привет مرحبا שלום",
    "<|im_start|>user\nHi<|im_end|>\n",
    "\u200bzero\u200bwidth \x00ctrl \ufffd replaced",
)


@pytest.fixture(scope="module")
def byte_backend() -> tokenizers.Tokenizer:
    return byte_level_tokenizer().backend


@pytest.fixture(scope="module")
def spm_backend() -> tokenizers.Tokenizer:
    """Words with a space mark and single bytes as a fallback, like SentencePiece's."""
    words = ["<unk>", "<s>", "</s>", "▁", "▁the", "▁Hello", "Hello", "▁a", "b", "."]
    vocab = {word: i for i, word in enumerate(words)}
    vocab |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>")])
    return backend


def pieces_of(
    backend: tokenizers.Tokenizer,
    token_ids: list[int],
    *,
    prompt: list[int] | None = None,
    skip_special_tokens: bool = True,
) -> list[str]:
    detokenizer = DetokenizerFactory(backend).make(
        prompt or [], skip_special_tokens=skip_special_tokens
    )
    return [*(detokenizer.feed([i]) for i in token_ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_demo_tokenizer_gives_the_text_in_whole_characters(
    demo_tokenizer: Tokenizer, text: str
) -> None:
    backend = demo_tokenizer.backend
    token_ids = demo_tokenizer.encode(text, add_special_tokens=False)
    pieces = pieces_of(backend, token_ids, skip_special_tokens=False)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    skipped = pieces_of(backend, token_ids)
    assert "".join(skipped) == backend.decode(token_ids, skip_special_tokens=True)


def test_a_character_in_four_tokens_comes_with_the_last(byte_backend) -> None:
    assert pieces_of(byte_backend, list("a😀b".encode())) == ["a", "", "", "", "😀", "b", ""]


def test_an_incomplete_last_character_is_flushed_as_replacement(byte_backend) -> None:
    assert pieces_of(byte_backend, [0x61, 0xE4, 0xB8]) == ["a", "", "", "\ufffd"]


def test_several_tokens_at_once(byte_backend) -> None:
    detokenizer = DetokenizerFactory(byte_backend).make([])
    data = "né😀".encode()
    assert detokenizer.feed(data[:2]) + detokenizer.feed(data[2:5]) + detokenizer.feed(
        data[5:]
    ) == ("né😀")


@settings(max_examples=150, deadline=None)
@given(
    token_ids=st.lists(st.integers(0, 262), max_size=24),
    skip_special_tokens=st.booleans(),
)
def test_byte_level_equals_decoding_at_once_for_any_bytes(
    byte_backend, token_ids: list[int], skip_special_tokens: bool
) -> None:
    """Valid text or not, unknown ids (261, 262) too."""
    pieces = pieces_of(byte_backend, token_ids, skip_special_tokens=skip_special_tokens)
    whole = byte_backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
    assert "".join(pieces) == whole


def test_demo_tokenizer_equals_decoding_at_once_for_random_ids(demo_tokenizer: Tokenizer) -> None:
    backend = demo_tokenizer.backend
    factory = DetokenizerFactory(backend)
    rng = random.Random(5)
    for _ in range(300):
        # Low ids are specials, single bytes and short pieces: many broken characters.
        top = rng.choice((300, 1000, backend.get_vocab_size()))
        token_ids = [rng.randrange(top) for _ in range(rng.randint(1, 16))]
        detokenizer = factory.make([])
        text = "".join(detokenizer.feed([i]) for i in token_ids) + detokenizer.flush()
        assert text == backend.decode(token_ids, skip_special_tokens=True), token_ids


@pytest.mark.parametrize("num_prompt", (0, 1, 2, 6, 12))
def test_sentencepiece_continues_its_prompt(spm_backend, num_prompt: int) -> None:
    """Spaces depend on the neighbours: the first token of a text loses its own."""
    encode = spm_backend.token_to_id
    words = ["<s>", "▁Hello", "▁the", ".", "▁a", "b", "▁", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    words += ["</s>", "▁the", "<0xC3>", "<0xA9>", "<0xC3>", "<0xA9>", ".", "▁Hello", "▁"]
    token_ids = [encode(word) for word in words]
    prompt, output = token_ids[:num_prompt], token_ids[num_prompt:]
    pieces = pieces_of(spm_backend, output, prompt=prompt)
    whole = spm_backend.decode(token_ids, skip_special_tokens=True)
    before = spm_backend.decode(prompt, skip_special_tokens=True)
    assert before + "".join(pieces) == whole
    assert not any("\ufffd" in piece for piece in pieces)


def test_sentencepiece_survives_bytes_that_are_no_text(spm_backend) -> None:
    """A good character, then a byte that never becomes one: the good one was given out."""
    words = ["▁a", "<0xC3>", "<0xA9>", "<0xC3>", "▁the"]
    pieces = pieces_of(spm_backend, [spm_backend.token_to_id(word) for word in words])
    assert "".join(pieces) == "aé\ufffd the"
    garbage = pieces_of(spm_backend, [spm_backend.token_to_id("<0xFF>")] * 40)
    assert "".join(garbage) == "\ufffd" * 40
    assert sum(map(bool, garbage)) > 3, "text is held for ever"


def test_sentencepiece_special_tokens_stay_when_asked(spm_backend) -> None:
    words = ["▁Hello", "</s>", "▁the"]
    token_ids = [spm_backend.token_to_id(word) for word in words]
    pieces = pieces_of(spm_backend, token_ids, skip_special_tokens=False)
    assert "".join(pieces) == spm_backend.decode(token_ids, skip_special_tokens=False)
    assert "</s>" in "".join(pieces)


# --- stop strings --------------------------------------------------------------------------------


def feed(checker: StopChecker, pieces: list[str]) -> list[str]:
    """What each piece gives out, up to the match; the flush last when there is none."""
    given_out = []
    for piece in pieces:
        given_out.append(checker.feed(piece))
        if checker.matched is not None:
            return given_out
    return [*given_out, checker.flush()]


def test_text_that_may_begin_a_stop_string_is_held_and_no_other() -> None:
    checker = StopChecker(["</end>"], include_in_output=False)
    pieces = ["a<", "b<", "/e", "n", "x", "</end", ">z"]
    assert feed(checker, pieces) == ["a", "<b", "", "", "</enx", "", ""]
    assert checker.matched == "</end>"


@pytest.mark.parametrize(("include", "text"), ((False, "ab"), (True, "abSTOP")))
def test_the_text_is_cut_at_the_stop_string(include: bool, text: str) -> None:
    checker = StopChecker(["STOP"], include_in_output=include)
    assert "".join(feed(checker, ["abST", "OPcd"])) == text


@pytest.mark.parametrize("stops", (["b", "ab"], ["ab", "b"]))
def test_of_two_that_end_together_the_longer_counts(stops: list[str]) -> None:
    checker = StopChecker(stops, include_in_output=False)
    assert "".join(feed(checker, ["xab"])) == "x"
    assert checker.matched == "ab"


def test_what_was_held_comes_at_the_end() -> None:
    checker = StopChecker(["STOP"], include_in_output=False)
    assert feed(checker, ["abST", "O"]) == ["ab", "", "STO"]
    assert checker.matched is None


def test_a_stop_string_that_overlaps_itself() -> None:
    checker = StopChecker(["aab"], include_in_output=False)
    assert "".join(feed(checker, ["x", "a", "a", "a", "b"])) == "xa"


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("abc", max_size=20),
    cuts=st.lists(st.integers(0, 20), max_size=6),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3),
    include=st.booleans(),
)
def test_the_result_does_not_depend_on_the_pieces(
    text: str, cuts: list[int], stops: list[str], include: bool
) -> None:
    """Against the definition: the match that ends first, of those the longest."""
    bounds = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    checker = StopChecker(stops, include_in_output=include)
    given_out = "".join(feed(checker, pieces))
    ends = [i for i in range(len(text) + 1) if text[:i].endswith(tuple(stops))]
    if not ends:
        assert (given_out, checker.matched) == (text, None)
        return
    matched = max((s for s in stops if text[: ends[0]].endswith(s)), key=len)
    assert checker.matched == matched
    assert given_out == text[: ends[0] - (0 if include else len(matched))]


def test_long_stop_strings_are_found_in_linear_time() -> None:
    """Text that always ends with half of each stop string."""
    stop = "a" * 500 + "b" + "a" * 523
    checker = StopChecker([stop] * 16, include_in_output=False)
    assert "".join(feed(checker, ["a"] * 5000)) == "a" * 5000
    checker = StopChecker([stop], include_in_output=False)
    assert "".join(feed(checker, list("x" + stop))) == "x"
    assert checker.matched == stop
