"""What a model's name stands for, and what importing and loading must not import."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.checkpoint import resolve_model
from jaxserve.errors import UserError
from tests.checkpoint.gguf_files import TINY_LLAMA


def test_known_name(demo_model_path: Path) -> None:
    assert resolve_model("SmolLM2-135M") == demo_model_path
    assert demo_model_path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_file_and_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "m.gguf"
    file.touch()
    assert resolve_model("m.gguf") == resolve_model(str(file)) == file
    assert resolve_model(str(TINY_LLAMA)) == TINY_LLAMA
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/m.gguf") == file


def test_directory_with_gguf(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json and no GGUF file"):
        resolve_model(str(tmp_path))
    (tmp_path / "b.gguf").touch()
    assert resolve_model(str(tmp_path)) == tmp_path / "b.gguf"
    (tmp_path / "a.gguf").touch()
    with pytest.raises(UserError) as caught:
        resolve_model(str(tmp_path))
    assert "holds 2 GGUF files" in caught.value.problem
    assert str(tmp_path / "a.gguf") in caught.value.fix
    (tmp_path / "config.json").touch()
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["/no/such/model", "./none", "../none", "~/none", "org/x.gguf"])
def test_missing_path_never_reaches_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*args: object, **options: object) -> None:
        raise AssertionError("asked the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unexpected)
    with pytest.raises(UserError) as caught:
        resolve_model(name)
    assert f"{name!r}: no such file or directory" in caught.value.problem
    assert len(str(caught.value).splitlines()) == 2


def test_no_name() -> None:
    with pytest.raises(UserError, match="No model was named"):
        resolve_model("")


LOAD = """
import sys
from jaxserve import checkpoint
light = {"numpy", "gguf", "tokenizers", "jinja2", "safetensors", "huggingface_hub"}
assert not light & sys.modules.keys(), light & sys.modules.keys()
for path in sys.argv[1:]:
    tokenizer = checkpoint.load_tokenizer(path)
    messages = [{"role": "user", "content": "hi"}]
    tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    reader = checkpoint.open_weights(checkpoint.load_model_info(path).path)
    reader.read("model.norm.weight")
heavy = {"jax", "jaxlib", "torch", "transformers", "huggingface_hub"}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
"""


def test_nothing_heavy_is_imported(demo_model_path: Path) -> None:
    """No process waits for what reading a checkpoint does not need."""
    command = [sys.executable, "-W", "error", "-c", LOAD, str(demo_model_path), str(TINY_LLAMA)]
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
