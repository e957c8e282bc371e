"""Grammars that an output must match, in llguidance's JSON form (`EngineCoreRequest.grammar`).

The API server makes and validates them; the engine core compiles them for its tokenizer
(`engine/structured_output.py`).

Every function that makes a grammar raises RequestError, with llguidance's words, when it cannot.
Text in a grammar matches text only: a token that the tokenizer calls special is never part of it,
and must be named as such (`<|name|>` in Lark).
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from jaxserve.checkpoint.tokenizer import Tokenizer
from jaxserve.errors import RequestError
from jaxserve.grammars.pieces import (
    check,
    checked,
    describe_error,
    json_schema_text,
    lark_any_text,
    lark_from_any,
    lark_grammar,
    lark_string,
    require_unicode,
    special_tokens_by_id,
    try_grammar,
)
from jaxserve.grammars.structural_tag import grammar_from_structural_tag

__all__ = [
    "describe_error",
    "grammar_after_text",
    "grammar_from_choice",
    "grammar_from_json_object",
    "grammar_from_json_schema",
    "grammar_from_lark",
    "grammar_from_regex",
    "grammar_from_structural_tag",
    "make_grammar_tokenizer",
    "try_grammar",
    "validate_grammar",
]

_PRIVATE = "\ue000"  # Unicode leaves it to private use; no text has it


def grammar_from_json_schema(
    schema: Mapping[str, Any] | bool | str,
    *,
    any_whitespace: bool = True,
    whitespace_pattern: str | None = None,
    additional_properties: bool = True,
    param: str | None = "response_format.json_schema.schema",
) -> str:
    """JSON that is valid under `schema`, which may be JSON text.

    any_whitespace: blanks may stand between JSON tokens, else none do.
    whitespace_pattern: a regex of what may stand there instead.
    additional_properties: False adds `additionalProperties: false` to every object that does not
      say.
    """
    if isinstance(schema, str):
        schema = _parse_json(schema, param)
    body = json_schema_text(
        schema,
        any_whitespace=any_whitespace,
        whitespace_pattern=whitespace_pattern,
        additional_properties=additional_properties,
        param=param,
    )
    return checked('{"grammars":[{"json_schema":' + body + "}]}", param)


def grammar_from_json_object(
    *,
    any_whitespace: bool = True,
    whitespace_pattern: str | None = None,
    param: str | None = "response_format",
) -> str:
    """Any JSON object."""
    return grammar_from_json_schema(
        {"type": "object"},
        any_whitespace=any_whitespace,
        whitespace_pattern=whitespace_pattern,
        param=param,
    )


def grammar_from_regex(regex: str, *, param: str | None = "structured_outputs.regex") -> str:
    """Text that the whole regex matches (syntax of the Rust crate `regex`, no look-around)."""
    return checked(LLMatcher.grammar_from_regex(require_unicode(regex, param)), param)


def grammar_from_choice(
    choices: Sequence[str], *, param: str | None = "structured_outputs.choice"
) -> str:
    """Exactly one of these texts."""
    if not choices:
        raise RequestError("There must be at least one choice.", param=param)
    for choice in choices:
        if not isinstance(choice, str):
            raise RequestError(f"Every choice must be a string, not {choice!r}.", param=param)
        require_unicode(choice, param)
    alternatives = " | ".join(lark_string(choice) for choice in choices)
    return checked(lark_grammar(f"start: CHOICE\nCHOICE: {alternatives}\n"), param)


def grammar_from_lark(
    text: str,
    *,
    special_tokens: Mapping[str, int] | None = None,
    param: str | None = "structured_outputs.grammar",
) -> str:
    """Text that a grammar matches: Lark as llguidance reads it, or GBNF (`root ::= ...`).

    special_tokens: the tokenizer's (name -> id), which Lark may name, as `<|im_end|>`.
    """
    lark = special_tokens_by_id(lark_from_any(text, param), special_tokens or {})
    return checked(lark_grammar(lark), param)


def grammar_after_text(
    grammar: str, end: str, *, special_tokens: Mapping[str, int] | None = None
) -> str:
    """Any text up to and with `end`, such as a reasoning's end marker, then `grammar`.

    special_tokens: the tokenizer's special tokens, whose names `end` may contain.
    """
    assert end, "nothing ends the text"
    head = lark_any_text("head", [end], special_tokens or {})
    grammars = json.loads(grammar)["grammars"]
    grammars[0]["name"] = "after_text"
    start = {"lark_grammar": f"start: head @after_text\n{head}"}
    return checked(json.dumps({"grammars": [start, *grammars]}, ensure_ascii=False), None)


def validate_grammar(
    grammar: str, tokenizer: Tokenizer | None = None, vocab_size: int = 0
) -> str | None:
    """Why the grammar cannot be used, or None.

    tokenizer, vocab_size: the model's. They are looked at only when the grammar names special
      tokens, and then take a second the first time; without them such a grammar is refused.
    """
    problem, names_tokens = check(grammar)
    if problem is not None or not names_tokens:
        return problem
    if tokenizer is None:
        return "The grammar names special tokens, which cannot be checked here."
    return try_grammar(grammar, make_grammar_tokenizer(tokenizer, vocab_size))[1]


@lru_cache(maxsize=1)
def make_grammar_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    """llguidance's view of a tokenizer; takes about a second.

    vocab_size: of the model's logits, which may have more entries than the tokenizer has tokens.
    Text that spells a special token is only text there: a grammar that demands it does not get the
    token, which might end the output. Grammars name special tokens by id, as `<[2]>`.
    """
    eos = tokenizer.eos_token_id
    num_tokens = max(vocab_size, tokenizer.vocab_size)
    return LLTokenizer(
        _with_unspeakable_special_tokens(tokenizer.backend.to_str()),
        n_vocab=num_tokens,
        eos_token=None if eos is None else [eos],
    )


def _with_unspeakable_special_tokens(tokenizer_json: str) -> str:
    """The tokenizer with a private character in the name of each special token: llguidance would
    read the name in a text as the token."""
    parts = json.loads(tokenizer_json)
    model, vocab = parts["model"], parts["model"].get("vocab")
    parts["post_processor"] = None  # names them too, and only adds them around a text
    for token in parts["added_tokens"]:
        if token["special"]:
            name = token["content"]
            token["content"] = f"{name[:-1]}{_PRIVATE}{name[-1:]}"
            if isinstance(vocab, dict) and name in vocab:
                vocab[token["content"]] = vocab.pop(name)
            if model.get("unk_token") == name:
                model["unk_token"] = token["content"]
    if isinstance(vocab, list):  # a Unigram model: (name, score) by id
        new_names = {token["id"]: token["content"] for token in parts["added_tokens"]}
        model["vocab"] = [(new_names.get(i, name), score) for i, (name, score) in enumerate(vocab)]
    return json.dumps(parts, ensure_ascii=False)


def _parse_json(text: str, param: str | None) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The JSON schema is not JSON: {error}", param=param) from error
