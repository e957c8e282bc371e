"""What grammars are made of: Lark text, JSON schemas, and llguidance's check of the whole."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from jaxserve.errors import RequestError

# Between the tokens of JSON: some blanks, or a line break and an indentation. Without the bounds a
# model may go on with blanks for ever.
JSON_WHITESPACE = r"[ \t]{1,40}|\r?\n[ \t]{0,40}"

# llguidance follows rules and references by recursion, at up to 25 KB of stack each. A grammar that
# overflows the stack kills the process: so there is a limit, and room for what it lets through.
MAX_GRAMMAR_LINES = 2000
MAX_SCHEMA_REFS = 2000
MAX_GRAMMAR_LEN = 65_536
STACK_BYTES = 64 * 2**20

# Errors in words, without the parser's state.
_LIMITS = LLParserLimits(verbose_errors=False)
_REF = re.compile(r'"\$ref": *"((?:[^"\\]|\\.)*)"')
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_GBNF_ESCAPE = re.compile(
    r"(?P<kept>\\[^xuU])|\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8}))"
)


def checked(grammar: str, param: str | None) -> str:
    """`grammar` itself; special tokens that it names are for `validate_grammar` to look up.

    Raises:
      RequestError: llguidance refuses it.
    """
    problem, _ = check(grammar)
    if problem is not None:
        raise RequestError(problem, param=param)
    return grammar


def check(grammar: str) -> tuple[str | None, bool]:
    """Why llguidance refuses the grammar, and whether it names special tokens.

    One that names none is tried on a vocabulary of bytes, which shows whether anything matches it.
    """
    if (problem := _too_deep(grammar)) is not None:
        return problem, False
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        return refusal(messages[0]), False
    if any("no tokenizer" in message for message in messages):
        return None, True
    return try_grammar(grammar, _byte_tokenizer())[1], False


def _too_deep(grammar: str) -> str | None:
    """Whether the parts of a grammar could lead from one to the next more often than it may."""
    try:
        parts = json.loads(grammar)["grammars"]
    except ValueError:  # no grammar list; llguidance says so
        return None
    for part in parts:
        lark = part.get("lark_grammar", "")
        text = lark + json.dumps(part.get("json_schema"))
        if lark.count("\n") > MAX_GRAMMAR_LINES:
            return refusal(f"it has over {MAX_GRAMMAR_LINES} lines")
        if len(set(_REF.findall(text))) > MAX_SCHEMA_REFS:
            return refusal(f"its schemas have over {MAX_SCHEMA_REFS} different $ref")
    return None


def try_grammar(grammar: str, tokenizer: LLTokenizer) -> tuple[LLMatcher, str | None]:
    """A matcher that has seen no token, and why it cannot be used."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        # The first mask takes longest: what it computes is shared by the copies.
        matcher.compute_bitmask()
    return matcher, refusal(describe_error(matcher)) if matcher.is_error() else None


def describe_error(matcher: LLMatcher) -> str:
    """What is wrong with a matcher that is in its error state."""
    message = matcher.get_error().replace("<non-verbose/>", "").strip()
    return "nothing matches it" if message in ("NoExtension", "NoExtensionBias") else message


@lru_cache(maxsize=1)
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def refusal(message: str) -> str:
    """llguidance's words as a problem."""
    return f"The grammar is not valid: {message.strip()}"


def require_unicode(text: str, param: str | None) -> str:
    """`text` itself; a lone surrogate is a RequestError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"The text is not Unicode: {error}", param=param) from error
    return text


def lark_grammar(lark: str) -> str:
    """The grammar of a Lark text."""
    return json.dumps({"grammars": [{"lark_grammar": lark}]}, ensure_ascii=False)


def lark_string(text: str) -> str:
    """`text` as a Lark string."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def lark_literal(text: str, special_tokens: Mapping[str, int]) -> str:
    """`text` in a Lark rule; names of special tokens in it stand for the tokens.

    Not for terminals, unless it names no special token. The empty text is the empty string literal.
    """
    pieces = _split_at(text, special_tokens)
    return " ".join(
        f"<[{special_tokens[piece]}]>" if piece in special_tokens else lark_string(piece)
        for piece in pieces
    )


def lark_any_text(name: str, ends: Sequence[str], special_tokens: Mapping[str, int]) -> str:
    """Lark rules, `name` the first: any text up to and with the first of `ends`, none empty."""
    alternatives, text_ends, terminals = [], [], ""
    for idx, end in enumerate(ends):
        pieces = _split_at(end, special_tokens)
        if pieces == [end] and end not in special_tokens:
            text_ends.append(lark_string(end))
            continue
        # A token is never part of text, so the text before it need not be lazy.
        terminal = f"{name}_{idx}".upper()
        before = "" if pieces[0] in special_tokens else lark_string(pieces.pop(0))
        terminals += f"{terminal}: /(?s:.*)/ {before}\n"
        alternatives.append(f"{terminal} {lark_literal(''.join(pieces), special_tokens)}")
    if text_ends:
        terminal = f"{name}_text".upper()
        terminals += f"{terminal}: /(?s:.*)/ ({' | '.join(text_ends)})\n"
        terminals += f"{name}_lazy[lazy]: {terminal}\n"
        alternatives.append(f"{name}_lazy")
    return f"{name}: {' | '.join(alternatives)}\n{terminals}"


def lark_from_any(text: str, param: str | None) -> str:
    """Lark text of a Lark or GBNF text; not validated."""
    require_unicode(text, param)
    if len(text) > MAX_GRAMMAR_LEN:
        raise RequestError(refusal(f"it has over {MAX_GRAMMAR_LEN} characters"), param=param)
    if not _GBNF_RULE.search(text):
        return text
    try:
        return gbnf_to_lark(_GBNF_ESCAPE.sub(_unescape_gbnf, text))
    except Exception as error:  # the converter raises what it meets
        raise RequestError(f"The GBNF grammar is not valid: {error}", param=param) from error


def json_schema_text(
    schema: Any,
    *,
    any_whitespace: bool = True,
    whitespace_pattern: str | None = None,
    additional_properties: bool = True,
    param: str | None,
) -> str:
    """A schema as JSON text that says what may stand between JSON tokens; not validated."""
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise RequestError("A JSON schema must be an object or true.", param=param)
    options: dict[str, Any] = {"whitespace_flexible": False}
    if whitespace_pattern is not None:
        options = {"whitespace_pattern": whitespace_pattern}
    elif any_whitespace:
        options = {"whitespace_pattern": JSON_WHITESPACE}
    own_options = schema.get("x-guidance", {})
    if not isinstance(own_options, Mapping):
        raise RequestError("x-guidance must be an object.", param=param)
    schema = {**schema, "x-guidance": {**options, **own_options}}
    try:
        if not additional_properties:
            schema = _without_additional_properties(schema)
        text = json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"The JSON schema is not JSON: {error}", param=param) from error
    return require_unicode(text, param)


_LARK_TOKEN = re.compile(
    r"""
    // [^\n]* | \# [^\n]*                 # a comment
    | " (?: \\. | [^"\\\n] )* "          # a string
    | / (?: \\. | [^/\\\n] )+ /          # a regex
    | < [^<>\s]+ >                        # a special token
    """,
    re.VERBOSE,
)


def special_tokens_by_id(lark: str, special_tokens: Mapping[str, int]) -> str:
    """The grammar with `<[id]>` for each special token that a rule names."""

    def by_id(match: re.Match[str]) -> str:
        token_id = special_tokens.get(match[0])
        return match[0] if token_id is None else f"<[{token_id}]>"

    return _LARK_TOKEN.sub(by_id, lark)


def _split_at(text: str, special_tokens: Mapping[str, int]) -> list[str]:
    """`text` cut around the names of special tokens; at least one piece."""
    if not special_tokens or not text:
        return [text]
    names = sorted(special_tokens, key=len, reverse=True)
    pieces = re.split("(" + "|".join(map(re.escape, names)) + ")", text)
    return [piece for piece in pieces if piece]


def _without_additional_properties(schema: Any) -> Any:
    """`schema` with every object closed that does not say whether it is open."""
    if isinstance(schema, list):
        return [_without_additional_properties(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {key: _without_additional_properties(value) for key, value in schema.items()}
    is_object = closed.get("type") == "object" or isinstance(closed.get("properties"), dict)
    if is_object and not {"additionalProperties", "patternProperties"} & closed.keys():
        closed["additionalProperties"] = False
    return closed


def _unescape_gbnf(match: re.Match[str]) -> str:
    r"""The character of an \x, \u or \U escape, unless it means something unescaped."""
    digits = match["x"] or match["u"] or match["U"]
    if digits is None:
        return match[0]
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f"{match[0]} is not a character")
    char = chr(code)
    is_plain = code >= 0x80 or char.isalnum() or char == " "
    return char if is_plain else f"\\x{code:02x}"
