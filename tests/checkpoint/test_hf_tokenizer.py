"""Tokenizers of Hugging Face directories, and what the files beside tokenizer.json change."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxserve.checkpoint import load_tokenizer
from jaxserve.checkpoint.tokenizer import Tokenizer
from jaxserve.errors import UserError
from tests.checkpoint.gguf_files import GOLDENS, TINY_LLAMA
from tests.checkpoint.test_hf import change_json

GOLDEN = json.loads((GOLDENS / "tiny_llama.json").read_text())


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY_LLAMA, tmp_path / "model"))


def test_equals_reference() -> None:
    tokenizer = load_tokenizer(TINY_LLAMA)
    assert len(GOLDEN["strings"]) == 20
    for entry in GOLDEN["strings"]:
        text, ids = entry["text"], entry["ids"]
        assert ids[0] == tokenizer.bos_token_id == 0
        assert tokenizer.encode(text, add_special_tokens=True) == ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids[1:]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert tokenizer.decode(ids, skip_special_tokens=False) == "<|begin|>" + text


def test_chat_equals_reference() -> None:
    rendered = load_tokenizer(TINY_LLAMA).apply_chat_template(
        GOLDEN["messages"], add_generation_prompt=True
    )
    assert rendered == GOLDEN["rendered_chat"]


def test_demo_model_saved_as_a_directory(demo_tokenizer: Tokenizer, tmp_path: Path) -> None:
    """What is built from GGUF survives being written as tokenizer.json."""
    demo_tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    config = demo_tokenizer.special_tokens | {"chat_template": demo_tokenizer.chat_template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.special_tokens == demo_tokenizer.special_tokens
    assert tokenizer.special_ids == demo_tokenizer.special_ids
    assert tokenizer.chat_template == demo_tokenizer.chat_template
    strings = json.loads((GOLDENS / "smollm2_tokenizer.json").read_text())["strings"]
    for entry in strings[::4]:
        assert tokenizer.encode(entry["text"], add_special_tokens=True) == entry["ids"]


def test_settings_of_a_training_run_are_dropped(directory: Path) -> None:
    path = str(directory / "tokenizer.json")
    backend = load_tokenizer(directory).backend
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(path)
    ids = load_tokenizer(directory).encode("a b c d e f g h", add_special_tokens=False)
    assert 4 < len(ids) < 64


def test_special_tokens_map_and_objects(directory: Path) -> None:
    config = directory / "tokenizer_config.json"
    change_json(config, bos_token=None, eos_token={"content": "<|pad|>", "lstrip": False})
    special = {"bos_token": {"content": "<|end|>"}, "eos_token": "<|begin|>"}
    (directory / "special_tokens_map.json").write_text(json.dumps(special))
    tokenizer = load_tokenizer(directory)
    assert tokenizer.special_tokens == {
        "bos_token": "<|end|>",
        "eos_token": "<|pad|>",
        "pad_token": "<|pad|>",
    }
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_no_config_at_all(directory: Path) -> None:
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (directory / name).unlink()
    tokenizer = load_tokenizer(directory)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, None)
    assert tokenizer.chat_template is None
    assert len(tokenizer.encode("x", add_special_tokens=True)) == 2


def added(content: str, **more: Any) -> dict[str, Any]:
    return {"content": content, "special": True, "normalized": False, "lstrip": False} | more


def test_tokens_that_only_the_config_knows(directory: Path) -> None:
    declared = {
        "0": added("<|begin|>"),
        "321": added("<|x|>", special=False),
        "320": added("<|call|>"),
    }
    change_json(directory / "tokenizer_config.json", added_tokens_decoder=declared)
    tokenizer = load_tokenizer(directory)
    assert tokenizer.encode("<|call|><|x|>", add_special_tokens=False) == [320, 321]
    assert tokenizer.decode([320, 321], skip_special_tokens=True) == "<|x|>"
    assert tokenizer.vocab_size == 322


def test_tokens_that_do_not_follow(directory: Path) -> None:
    declared = {"400": added("<|call|>")}
    change_json(directory / "tokenizer_config.json", added_tokens_decoder=declared)
    with pytest.raises(UserError, match=r"'<\|call\|>' at 400"):
        load_tokenizer(directory)


@pytest.mark.parametrize("add_bos", [True, False])
def test_bos_is_what_tokenizer_json_says(directory: Path, add_bos: bool) -> None:
    """Like transformers 5, which reads add_bos_token only where there is no tokenizer.json."""
    change_json(directory / "tokenizer_config.json", add_bos_token=add_bos)
    assert load_tokenizer(directory).encode("x", add_special_tokens=True)[0] == 0


def test_places_of_chat_templates(directory: Path) -> None:
    config = directory / "tokenizer_config.json"
    named = [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "T"}]
    change_json(config, chat_template=named)
    assert load_tokenizer(directory).chat_template != "old"
    (directory / "chat_template.jinja").unlink()
    tokenizer = load_tokenizer(directory)
    assert tokenizer.chat_template == "old"
    assert tokenizer.apply_chat_template([], add_generation_prompt=True, tools=[{}]) == "T"
    change_json(config, chat_template="single")
    more = directory / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("file")
    tokenizer = load_tokenizer(directory)
    assert tokenizer.chat_template == "single"
    assert tokenizer.apply_chat_template([], add_generation_prompt=True, tools=[{}]) == "file"


def test_no_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        load_tokenizer(directory)


@pytest.mark.parametrize("content", ["", "{}", '{"model": {"type": "Nope"}}'])
def test_damaged_tokenizer(directory: Path, content: str) -> None:
    (directory / "tokenizer.json").write_text(content)
    with pytest.raises(UserError) as caught:
        load_tokenizer(directory)
    assert f"{directory / 'tokenizer.json'} is not a tokenizer" in caught.value.problem
    assert len(str(caught.value).splitlines()) == 2


def test_special_token_outside_the_vocabulary(directory: Path) -> None:
    change_json(directory / "tokenizer_config.json", eos_token="<|nowhere|>")
    with pytest.raises(UserError, match=r"the eos_token '<\|nowhere\|>' is not in the vocabulary"):
        load_tokenizer(directory)


def test_broken_chat_template(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(UserError) as caught:
        load_tokenizer(directory)
    assert f"{directory}: chat template 'default' is not valid" in caught.value.problem
    assert len(str(caught.value).splitlines()) == 2
