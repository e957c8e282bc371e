"""Tokenizers out of GGUF metadata, against the reference tokenizers' own encodings."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import ByteLevel

from jaxserve.checkpoint import load_tokenizer
from jaxserve.checkpoint.gguf_tokenizer import build_tokenizer
from jaxserve.checkpoint.tokenizer import Tokenizer
from jaxserve.errors import UserError
from tests.checkpoint.gguf_files import GOLDENS, write_gguf

BYTES = sorted(ByteLevel.alphabet())
SPECIAL = ["<|begin|>", "<|end|>", "<|user|>"]


def byte_level(pre: str | None, learned: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """Metadata of a byte-level BPE with two control tokens and a user-defined one at the start."""
    tokens = [*SPECIAL, *BYTES, *(merge.replace(" ", "") for merge in learned)]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 4] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": list(learned),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in more.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def spm_metadata(**more: Any) -> dict[str, Any]:
    golden = json.loads((GOLDENS / "tiny_spm.json").read_text())
    metadata = {
        "model": "llama",
        "pre": "default",
        "tokens": golden["tokens"],
        "scores": golden["scores"],
        "token_type": golden["token_types"],
        "bos_token_id": golden["bos_id"],
        "eos_token_id": golden["eos_id"],
        "unknown_token_id": golden["unk_id"],
    }
    merged = metadata | more
    return {f"tokenizer.ggml.{k}": v for k, v in merged.items() if v is not None}


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    """How the text is split before merging, as text."""
    backend: Backend = tokenizer.backend
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    assert backend.pre_tokenizer is not None
    parts = (part for part, _ in backend.pre_tokenizer.pre_tokenize_str(text))
    byte_of = {char: byte for byte, char in _byte_chars().items()}
    return [bytes(byte_of[c] for c in part).decode() for part in parts]


def _byte_chars() -> dict[int, str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}


def test_demo_model_equals_reference(demo_tokenizer: Tokenizer) -> None:
    strings = json.loads((GOLDENS / "smollm2_tokenizer.json").read_text())["strings"]
    assert len(strings) == 200
    for entry in strings:
        text, ids = entry["text"], entry["ids"]
        assert demo_tokenizer.encode(text, add_special_tokens=True) == ids
        assert demo_tokenizer.encode(text, add_special_tokens=False) == ids
        assert demo_tokenizer.decode(ids, skip_special_tokens=False) == text
        skipped = entry.get("without_special", text)
        assert demo_tokenizer.decode(ids, skip_special_tokens=True) == skipped


def test_demo_model_prompts_and_chats(demo_tokenizer: Tokenizer) -> None:
    prompts = json.loads((GOLDENS / "smollm2_greedy.json").read_text())["prompts"]
    assert sum("messages" in p for p in prompts) == 3
    for prompt in prompts:
        text = prompt["text"]
        assert demo_tokenizer.encode(text, add_special_tokens=False) == prompt["prompt_ids"]
        if "messages" in prompt:
            assert text == demo_tokenizer.apply_chat_template(
                prompt["messages"], add_generation_prompt=True
            )


def test_demo_model_special_tokens(demo_tokenizer: Tokenizer) -> None:
    assert demo_tokenizer.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    assert (demo_tokenizer.bos_token_id, demo_tokenizer.eos_token_id) == (1, 2)
    assert demo_tokenizer.special_ids == frozenset(range(17))
    assert demo_tokenizer.vocab_size == 49152
    assert demo_tokenizer.chat_template is not None
    assert demo_tokenizer.chat_template.startswith("{% for message in messages %}")


# Written by hand from what each pattern says of digits, contractions, newlines and capitals.
SPLITS = {
    "gpt-2": [
        ("I'm 12345 I'M", ["I", "'m", " 12345", " I", "'", "M"]),
        ("a\n\n b  c", ["a", "\n\n", " b", " ", " c"]),
        ("x!!\n", ["x", "!!", "\n"]),
    ],
    "smollm": [
        ("I'm 1234 I'M", ["I", "'m", " ", "1", "2", "3", "4", " I", "'", "M"]),
        ("v2.5²", ["v", "2", ".", "5", "²"]),
    ],
    "llama-bpe": [
        ("I'm 1234567 I'M", ["I", "'m", " ", "123", "456", "7", " I", "'M"]),
        ("a\n\n b  c", ["a", "\n\n", " b", " ", " c"]),
        ("x!!\n (y)", ["x", "!!\n", " (", "y", ")"]),
        ("cafe\u0301", ["cafe", "\u0301"]),
    ],
    "qwen2": [
        ("I'm 123 I'M", ["I", "'m", " ", "1", "2", "3", " I", "'M"]),
        ("x!!\n (y)", ["x", "!!\n", " (", "y", ")"]),
        ("cafe\u0301", ["caf\u00e9"]),
    ],
    "tekken": [
        ("I'm 123", ["I", "'m", " ", "1", "2", "3"]),
        ("helloWorld HTTPServer", ["hello", "World", " HTTPServer"]),
        ("a!!/\n/b", ["a", "!!/\n/", "b"]),
        ("cafe\u0301", ["cafe\u0301"]),
    ],
}


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [(pre, text, expected) for pre, cases in SPLITS.items() for text, expected in cases],
)
def test_splits(pre: str, text: str, expected: list[str]) -> None:
    assert pieces(build_tokenizer(byte_level(pre), "x"), text) == expected


def test_ignore_merges() -> None:
    """Llama 3 takes a whole word that is a token, even when no merges lead to it."""
    word = "Ġhello"
    for pre, expected in (("llama-bpe", 1), ("qwen2", 6)):
        metadata = byte_level(pre)
        metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], word]
        metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
        tokenizer = build_tokenizer(metadata, "x")
        assert len(tokenizer.encode(" hello", add_special_tokens=False)) == expected


def test_merge_order() -> None:
    tokenizer = build_tokenizer(byte_level("gpt-2", ("b c", "a b", "a bc")), "x")
    ids = tokenizer.encode("abc ab", add_special_tokens=False)
    assert [tokenizer.backend.id_to_token(i) for i in ids] == ["abc", "Ġ", "ab"]


def test_control_and_user_defined_tokens() -> None:
    tokenizer = build_tokenizer(byte_level("gpt-2"), "x")
    ids = tokenizer.encode("<|user|>a<|end|>", add_special_tokens=False)
    assert (ids[0], ids[-1], len(ids)) == (2, 1, 3)
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<|user|>a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|user|>a<|end|>"


@pytest.mark.parametrize(
    ("pre", "more", "before", "after"),
    [
        ("gpt-2", {}, [], []),
        ("gpt-2", {"add_bos_token": True}, [0], []),
        ("gpt-2", {"add_eos_token": True}, [], [1]),
        ("llama-bpe", {}, [0], []),
        ("llama-bpe", {"add_bos_token": False, "add_eos_token": True}, [], [1]),
        ("tekken", {"add_eos_token": True}, [0], [1]),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True, "eos_token_id": 0}, [0], [0]),
    ],
)
def test_bos_and_eos(pre: str, more: dict[str, Any], before: list[int], after: list[int]) -> None:
    tokenizer = build_tokenizer(byte_level(pre, **more), "x")
    plain = tokenizer.encode("a", add_special_tokens=False)
    assert len(plain) == 1
    assert tokenizer.encode("a", add_special_tokens=True) == before + plain + after


def test_sentencepiece_equals_its_own_encoding() -> None:
    tokenizer = build_tokenizer(spm_metadata(), "x")
    strings = json.loads((GOLDENS / "tiny_spm.json").read_text())["strings"]
    assert len(strings) > 150
    for entry in strings:
        assert tokenizer.encode(entry["text"], add_special_tokens=False) == entry["ids"]
        assert tokenizer.decode(entry["ids"], skip_special_tokens=False) == entry["decoded"]
        assert tokenizer.encode(entry["text"], add_special_tokens=True) == [1, *entry["ids"]]


def test_sentencepiece_without_space_prefix() -> None:
    tokenizer = build_tokenizer(spm_metadata(add_space_prefix=False, add_bos_token=False), "x")
    ids = tokenizer.encode("the river", add_special_tokens=True)
    assert not str(tokenizer.backend.id_to_token(ids[0])).startswith("▁")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the river"
    spaced = tokenizer.encode(" the", add_special_tokens=True)
    assert tokenizer.decode(spaced, skip_special_tokens=True) == " the"


@pytest.mark.parametrize(("kind", "ids"), [(1, [2]), (2, [0, 1]), (5, [0, 1]), (6, [0, 1])])
def test_only_normal_pieces_are_merged(kind: int, ids: list[int]) -> None:
    """Unknown, unused and byte tokens are not what text that looks like them becomes."""
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["q", "z", "qz"],
        "tokenizer.ggml.scores": [0.0, 0.0, 1.0],
        "tokenizer.ggml.token_type": [1, 1, kind],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
    }
    assert build_tokenizer(metadata, "x").encode("qz", add_special_tokens=False) == ids


def test_sentencepiece_special_tokens_are_not_merged() -> None:
    tokenizer = build_tokenizer(spm_metadata(add_bos_token=False), "x")
    user, eos = tokenizer.backend.token_to_id("<|user|>"), tokenizer.eos_token_id
    ids = tokenizer.encode("<|user|>the</s>", add_special_tokens=False)
    assert (ids[0], ids[-1]) == (user, eos)
    assert [tokenizer.backend.id_to_token(i) for i in ids[1:-1]] == ["▁the"]
    assert tokenizer.special_ids == {1, 2}


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({}, "tokenizer.ggml.model is missing"),
        (byte_level("gpt-2", tokens=None), "tokenizer.ggml.tokens is missing"),
        (byte_level("gpt-2", merges=None), "tokenizer.ggml.merges is missing"),
        (byte_level("gpt-2", model="bert"), "of kind 'bert'"),
        (byte_level("no-such-pre"), "tokenizer.ggml.pre = 'no-such-pre'"),
        (byte_level("default"), "tokenizer.ggml.pre = 'default'"),
        (byte_level(None), "tokenizer.ggml.pre = None"),
        (byte_level("gpt-2", add_space_prefix=True), "add_space_prefix"),
        (byte_level("gpt-2", merges=["a nothing"]), "its merges do not fit"),
        (byte_level("gpt-2", merges=["ab"]), "'ab' is no merge"),
        (byte_level("gpt-2", tokens=["a", "b", "a"], token_type=[1] * 3), "1 tokens are there"),
        (byte_level("gpt-2", token_type=[1]), "token types differ in number"),
        (byte_level("gpt-2", add_bos_token=True, bos_token_id=None), "adds a bos_token"),
        (byte_level("gpt-2", add_eos_token=True, eos_token_id=9999), "adds a eos_token"),
        (spm_metadata(scores=None), "tokenizer.ggml.scores is missing"),
        (spm_metadata(scores=[0.0]), "differ in number"),
    ],
)
def test_refused(metadata: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as caught:
        build_tokenizer(metadata, "models/x.gguf")
    assert problem in caught.value.problem
    assert "models/x.gguf" in caught.value.problem
    assert len(str(caught.value).splitlines()) == 2


def test_chat_templates(tmp_path: Path) -> None:
    metadata = byte_level("gpt-2", ("a b",)) | {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_template.tool_use": "tools",
    }
    tokenizer = load_tokenizer(write_gguf(tmp_path / "x.gguf", metadata))
    assert tokenizer.chat_template == "plain"
    assert tokenizer.apply_chat_template([], add_generation_prompt=False) == "plain"
    assert tokenizer.apply_chat_template([], add_generation_prompt=False, tools=[{}]) == "tools"
