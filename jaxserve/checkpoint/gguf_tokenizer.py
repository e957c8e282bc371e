"""Tokenizers out of GGUF metadata: byte-level BPE ("gpt2") and sentencepiece BPE ("llama")."""

from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from jaxserve.checkpoint.gguf import GGUFFile
from jaxserve.checkpoint.tokenizer import Tokenizer
from jaxserve.errors import UserError

_PREFIX = "tokenizer.ggml."
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE = "▁"
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}

_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_TEKKEN_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_START = r"[^\r\n\p{L}\p{N}]?"


class _Pre(NamedTuple):
    """How text is split before merging. pattern None: GPT-2's own, built into ByteLevel."""

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2 = _Pre()
_DIGITS = _Pre(single_digits=True)
_LLAMA3 = _Pre(rf"{_WORDS}|\p{{N}}{{1,3}}|{_TAIL}", ignore_merges=True, add_bos=True)
_QWEN2 = _Pre(rf"{_WORDS}|\p{{N}}|{_TAIL}", nfc=True)
_TEKKEN = _Pre(
    rf"{_TEKKEN_START}{_TEKKEN_UPPER}*{_TEKKEN_LOWER}+"
    rf"|{_TEKKEN_START}{_TEKKEN_UPPER}+{_TEKKEN_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ignore_merges=True,
    add_bos=True,
)
_PRES = {
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "tekken": _TEKKEN,
}


def load_tokenizer(path: Path) -> Tokenizer:
    """See `checkpoint.load_tokenizer`."""
    return build_tokenizer(GGUFFile(path).metadata, str(path))


def build_tokenizer(metadata: dict[str, Any], source: str) -> Tokenizer:
    """The tokenizer that the metadata describes; `source` names the file in errors."""
    kind = _required(metadata, "model", source)
    tokens = _required(metadata, "tokens", source)
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise _refuse(source, f"{len(tokens) - len(vocab)} tokens are there twice")
    if kind == "gpt2":
        backend, add_bos = _byte_level(metadata, vocab, source)
    elif kind == "llama":
        backend, add_bos = _sentencepiece(metadata, vocab, source)
    else:
        raise _refuse(source, f"a tokenizer of kind {kind!r} is not supported")
    _add_special(backend, metadata, tokens, source)
    special = {
        role: tokens[i]
        for key, role in _ROLES.items()
        if 0 <= (i := metadata.get(f"{_PREFIX}{key}_token_id", -1)) < len(tokens)
    }
    _set_post_processor(backend, metadata, special, vocab, add_bos, source)
    return Tokenizer(
        backend, special_tokens=special, chat_templates=_chat_templates(metadata), source=source
    )


def _byte_level(
    metadata: dict[str, Any], vocab: dict[str, int], source: str
) -> tuple[Backend, bool]:
    name = metadata.get(_PREFIX + "pre")
    if name not in _PRES:
        raise _refuse(
            source, f"how it splits text (tokenizer.ggml.pre = {name!r}) is not known here"
        )
    if metadata.get(_PREFIX + "add_space_prefix"):
        raise _refuse(source, "byte-level BPE with add_space_prefix is not supported")
    pre = _PRES[name]
    merges = [tuple(merge.split(" ", 1)) for merge in _required(metadata, "merges", source)]
    if wrong := next((merge for merge in merges if len(merge) != 2), None):
        raise _refuse(source, f"{wrong[0]!r} is no merge of two tokens")
    backend = _bpe(source, vocab, merges, ignore_merges=pre.ignore_merges)
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if pre.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.pattern:
        steps.append(pre_tokenizers.Split(Regex(pre.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _sentencepiece(
    metadata: dict[str, Any], vocab: dict[str, int], source: str
) -> tuple[Backend, bool]:
    """A space goes before the text and before what follows a special token, as in llama.cpp."""
    scores = _required(metadata, "scores", source)
    types = _required(metadata, "token_type", source)
    if not len(scores) == len(types) == len(vocab):
        raise _refuse(source, "tokens, scores and token types differ in number")
    tokens = list(vocab)
    unknown = metadata.get(_PREFIX + "unknown_token_id")
    backend = _bpe(
        source,
        vocab,
        _merges_from_scores(tokens, scores, types),
        byte_fallback=True,
        fuse_unk=True,
        unk_token=None if unknown is None else tokens[unknown],
    )
    prefix = metadata.get(_PREFIX + "add_space_prefix", True)
    replace = normalizers.Replace(" ", _SPACE)
    prepend = [normalizers.Prepend(_SPACE)] if prefix else []
    backend.normalizer = normalizers.Sequence([*prepend, replace])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend, True


def _merges_from_scores(
    tokens: list[str], scores: list[float], types: list[int]
) -> list[tuple[str, str]]:
    """Every way to make a normal piece from two others, best score first.

    Sentencepiece merges the neighbours whose union scores best. Pieces that are control, unknown,
    byte or user-defined tokens never come out of a merge.
    """
    normal = {t: i for i, t in enumerate(tokens) if types[i] == _NORMAL}
    ranked = []
    for piece, index in normal.items():
        for cut in range(1, len(piece)):
            left, right = normal.get(piece[:cut]), normal.get(piece[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[index], left, right))
    ranked.sort()
    return [(tokens[left], tokens[right]) for _, left, right in ranked]


def _bpe(source: str, vocab: dict[str, int], merges: list, **options: Any) -> Backend:
    try:
        return Backend(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as e:  # the Rust library raises no narrower type
        raise _refuse(source, f"its merges do not fit its tokens ({e})") from e


def _add_special(
    backend: Backend, metadata: dict[str, Any], tokens: list[str], source: str
) -> None:
    """Control tokens are special, user-defined ones are matched whole but shown."""
    types = metadata.get(_PREFIX + "token_type", [_NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise _refuse(source, "tokens and token types differ in number")
    control = [t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    user = [t for t, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    backend.add_tokens([AddedToken(t, normalized=False, special=False) for t in user])


def _set_post_processor(
    backend: Backend,
    metadata: dict[str, Any],
    special: dict[str, str],
    vocab: dict[str, int],
    add_bos: bool,
    source: str,
) -> None:
    add = {
        "bos_token": metadata.get(_PREFIX + "add_bos_token", add_bos),
        "eos_token": metadata.get(_PREFIX + "add_eos_token", False),
    }
    missing = [role for role, wanted in add.items() if wanted and role not in special]
    if missing:
        raise _refuse(source, f"it adds a {missing[0]} to every text but names none")
    bos, eos = (special[role] if add[role] else None for role in ("bos_token", "eos_token"))
    if bos or eos:
        backend.post_processor = processors.TemplateProcessing(
            single=[t for t in (bos, "$A", eos) if t],
            special_tokens=[(t, vocab[t]) for t in dict.fromkeys((bos, eos)) if t],
        )


def _chat_templates(metadata: dict[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    named = {k[len(key) + 1 :]: v for k, v in metadata.items() if k.startswith(key + ".")}
    return named | ({"default": metadata[key]} if key in metadata else {})


def _required(metadata: dict[str, Any], key: str, source: str) -> Any:
    if _PREFIX + key not in metadata:
        raise _refuse(source, f"the metadata {_PREFIX}{key} is missing")
    return metadata[_PREFIX + key]


def _refuse(source: str, what: str) -> UserError:
    return UserError(
        f"The tokenizer in {source} cannot be used: {what}.",
        fix="Use the model's Hugging Face directory (with tokenizer.json) instead of this file.",
    )
