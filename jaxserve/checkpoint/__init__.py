"""Checkpoints: where a model's files are, what they say, their weights and their tokenizer.

Nothing here imports jax; what a function needs is imported when it is called, since every process
of a server starts through here and none needs all of it.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.config import ModelInfo
from jaxserve.errors import UserError

if TYPE_CHECKING:
    from jaxserve.checkpoint.tokenizer import Tokenizer
    from jaxserve.checkpoint.weights import WeightReader

_PATH_STARTS = ("/", "./", "../", "~")


def resolve_model(model: str) -> Path:
    """The local file or directory that `model` names.

    In this order: a known name ("smollm2-135m", fetched when it is not here), a GGUF file, a
    directory (Hugging Face layout, or holding exactly one GGUF file), a hub id such as `org/name`.

    Raises:
      UserError: nothing of the kind exists, or it cannot be fetched.
    """
    from jaxserve.checkpoint import demo

    if not model:
        raise UserError(
            "No model was named.",
            fix=f"Name one: {demo.NAME}, a .gguf file, a directory or a hub id.",
        )
    if model.lower() == demo.NAME:
        return demo.find_or_fetch()
    path = Path(model).expanduser()
    if path.is_file():
        return path.resolve()
    if path.is_dir():
        return _resolve_directory(path.resolve())
    if model.startswith(_PATH_STARTS) or path.suffix in (".gguf", ".safetensors"):
        raise UserError(
            f"Model {model!r}: no such file or directory.",
            fix=f"Give the path of an existing .gguf file or model directory, or try {demo.NAME}.",
        )
    from jaxserve.checkpoint import hf

    return hf.fetch_snapshot(model)


def _resolve_directory(path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        raise UserError(
            f"Model directory {path} holds {len(ggufs)} GGUF files.",
            fix=f"Name one of them, such as {ggufs[0]}.",
        )
    raise UserError(
        f"Model directory {path} has no config.json and no GGUF file.",
        fix="Give a directory with config.json, *.safetensors and tokenizer.json, or a .gguf file.",
    )


def load_model_info(path: Path | str) -> ModelInfo:
    """What the checkpoint at `path` (of `resolve_model`) says of itself.

    Also checks that every weight file is there, whole and readable, without reading the weights.

    Raises:
      UserError: missing, truncated or damaged files; an architecture or a feature of it (rope
        scaling, sliding window, ...) that the models here do not compute.
    """
    path = Path(path)
    if path.is_dir():
        from jaxserve.checkpoint import hf

        return hf.load_model_info(path)
    from jaxserve.checkpoint import gguf_llama

    return gguf_llama.load_model_info(path)


def open_weights(path: Path | str) -> "WeightReader":
    """A lazy reader of the weights at `path`; raises UserError like `load_model_info`."""
    path = Path(path)
    if path.is_dir():
        from jaxserve.checkpoint import hf

        return hf.SafetensorsReader(path)
    from jaxserve.checkpoint import gguf_llama

    return gguf_llama.GGUFReader(path)


def load_tokenizer(path: Path | str, chat_template: str = "") -> "Tokenizer":
    """The tokenizer and chat template at `path`.

    chat_template: instead of the checkpoint's: a file, or the template itself.

    Raises:
      UserError: there is none, or it is of a kind that would be tokenized wrongly; the template
        is not valid.
    """
    path = Path(path)
    if path.is_dir():
        from jaxserve.checkpoint import hf_tokenizer

        tokenizer = hf_tokenizer.load_tokenizer(path)
    else:
        from jaxserve.checkpoint import gguf_tokenizer

        tokenizer = gguf_tokenizer.load_tokenizer(path)
    if not chat_template:
        return tokenizer
    return tokenizer.with_chat_template(_template_text(chat_template), "--chat-template")


def _template_text(file_or_text: str) -> str:
    """The file's text; what has braces or line breaks is the text itself."""
    if any(char in file_or_text for char in "{}\n"):
        return file_or_text
    try:
        return Path(file_or_text).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(
            f"--chat-template {file_or_text} cannot be read: {error}.",
            fix="Give the path of a Jinja file, or the template itself.",
        ) from error
