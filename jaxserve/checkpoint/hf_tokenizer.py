"""Tokenizers of Hugging Face directories: tokenizer.json and what the files beside it add."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from jaxserve.checkpoint.hf import read_json
from jaxserve.checkpoint.tokenizer import Tokenizer
from jaxserve.errors import UserError

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_tokenizer(path: Path) -> Tokenizer:
    """See `checkpoint.load_tokenizer`. What tokenizer.json says of bos and eos is what counts."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise UserError(
            f"Model directory {path} has no tokenizer.json.",
            fix="Save it with AutoTokenizer.from_pretrained(...).save_pretrained(...).",
        )
    try:
        backend = Backend.from_file(str(file))
    except Exception as e:  # the Rust library raises no narrower type
        raise UserError(
            f"File {file} is not a tokenizer: {e}.", fix="Download the file again."
        ) from e
    # Some published files carry the settings of a training run.
    backend.no_truncation()
    backend.no_padding()
    config = _read_optional(path / "tokenizer_config.json")
    _add_declared_tokens(backend, config, path)
    special = _special_tokens(config, path)
    return Tokenizer(
        backend,
        special_tokens=special,
        chat_templates=_chat_templates(config, path),
        source=str(path),
    )


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _text(token: Any) -> str | None:
    """A token is written as its text or as an object that holds it."""
    return token.get("content") if isinstance(token, dict) else token


def _special_tokens(config: dict[str, Any], path: Path) -> dict[str, str]:
    values = _read_optional(path / "special_tokens_map.json") | {
        role: config[role] for role in _ROLES if config.get(role) is not None
    }
    texts = {role: _text(values.get(role)) for role in _ROLES}
    return {role: text for role, text in texts.items() if text is not None}


def _add_declared_tokens(backend: Backend, config: dict[str, Any], path: Path) -> None:
    """Tokens that only tokenizer_config.json knows; their ids must be the next ones."""
    declared = config.get("added_tokens_decoder") or {}
    for index, token in sorted((int(i), t) for i, t in declared.items()):
        if backend.id_to_token(index) is not None:
            continue
        options = {k: v for k, v in token.items() if k not in ("content", "__type")}
        backend.add_tokens([AddedToken(token["content"], **options)])
        if backend.token_to_id(token["content"]) != index:
            raise UserError(
                f"{path}: tokenizer_config.json has the token {token['content']!r} at {index}, "
                "which does not follow on tokenizer.json.",
                fix="Use tokenizer files that belong together.",
            )


def _chat_templates(config: dict[str, Any], path: Path) -> dict[str, str]:
    """chat_template.jinja wins over tokenizer_config.json, as it is the newer place."""
    value = config.get("chat_template") or {}
    if isinstance(value, str):
        templates = {"default": value}
    elif isinstance(value, list):
        templates = {entry["name"]: entry["template"] for entry in value}
    else:
        templates = {}
    for file in (path / "additional_chat_templates").glob("*.jinja"):
        templates[file.stem] = file.read_text()
    if (path / "chat_template.jinja").is_file():
        templates["default"] = (path / "chat_template.jinja").read_text()
    return templates
