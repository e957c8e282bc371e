"""From what a client says of its output to a grammar. Large schemas take long: use a thread."""

from collections.abc import Mapping

from jaxserve.errors import RequestError
from jaxserve.grammars import (
    grammar_from_choice,
    grammar_from_json_object,
    grammar_from_json_schema,
    grammar_from_lark,
    grammar_from_regex,
    grammar_from_structural_tag,
)
from jaxserve.server.protocol.structured_output import ResponseFormat, StructuredOutputs

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_WHITESPACE = ("disable_any_whitespace", "whitespace_pattern")


def grammar_of(
    response_format: ResponseFormat | None,
    structured_outputs: StructuredOutputs | None,
    special_tokens: Mapping[str, int],
) -> str | None:
    """The grammar of a request's output; None when anything goes.

    special_tokens: the tokenizer's, by name; a structural tag may contain them.

    Raises:
      RequestError: it is not valid, or both ask for something; `param` names the field.
    """
    grammar = None
    if response_format is not None:
        grammar = _of_response_format(response_format, special_tokens)
    if structured_outputs is None or structured_outputs == StructuredOutputs():
        return grammar
    if grammar is not None:
        raise RequestError(
            "structured_outputs and response_format exclude each other.",
            param="structured_outputs",
        )
    return _of_structured_outputs(structured_outputs, special_tokens)


def _of_response_format(wanted: ResponseFormat, special_tokens: Mapping[str, int]) -> str | None:
    if wanted.schema is not None:
        raise RequestError(
            "response_format.schema is not supported; use the type json_schema and "
            "json_schema.schema.",
            param="response_format.schema",
        )
    parts = {
        "json_schema": wanted.json_schema,
        "format": wanted.format,
        "structures": wanted.structures,
        "triggers": wanted.triggers,
    }
    known = {
        "json_schema": ("json_schema",),
        "structural_tag": ("format", "structures", "triggers"),
    }
    for name, value in parts.items():
        if value is not None and name not in known.get(wanted.type, ()):
            raise RequestError(
                f"response_format.{name} does not go with type {wanted.type[:100]!r}.",
                param=f"response_format.{name}",
            )
    match wanted.type:
        case "text":
            return None
        case "json_object":
            return grammar_from_json_object(param="response_format")
        case "json_schema":
            if wanted.json_schema is None or wanted.json_schema.schema is None:
                param = "response_format.json_schema"
                if wanted.json_schema is not None:
                    param += ".schema"
                raise RequestError(f"{param} is missing.", param=param)
            return grammar_from_json_schema(
                wanted.json_schema.schema, param="response_format.json_schema.schema"
            )
        case "structural_tag":
            given = {k: v for k, v in parts.items() if v is not None}
            return grammar_from_structural_tag(
                {"type": "structural_tag"} | given,
                special_tokens=special_tokens,
                param="response_format",
            )
    raise RequestError(
        "response_format.type must be text, json_object, json_schema or structural_tag, got "
        f"{wanted.type[:100]!r}.",
        param="response_format.type",
    )


def _of_structured_outputs(wanted: StructuredOutputs, special_tokens: Mapping[str, int]) -> str:
    if wanted.json_object is False:
        raise RequestError(
            "structured_outputs.json_object can only be true.",
            param="structured_outputs.json_object",
        )
    kinds = [name for name in _KINDS if getattr(wanted, name) is not None]
    if len(kinds) != 1:
        raise RequestError(
            f"structured_outputs takes exactly one of {', '.join(_KINDS)}, got "
            f"{' and '.join(kinds) or 'none'}.",
            param="structured_outputs",
        )
    kind = kinds[0]
    param = f"structured_outputs.{kind}"
    _check_options(wanted, kind)
    any_whitespace = not wanted.disable_any_whitespace
    if wanted.json is not None:
        return grammar_from_json_schema(
            wanted.json,
            any_whitespace=any_whitespace,
            whitespace_pattern=wanted.whitespace_pattern,
            additional_properties=not wanted.disable_additional_properties,
            param=param,
        )
    if wanted.json_object:
        return grammar_from_json_object(
            any_whitespace=any_whitespace,
            whitespace_pattern=wanted.whitespace_pattern,
            param=param,
        )
    if wanted.regex is not None:
        return grammar_from_regex(wanted.regex, param=param)
    if wanted.choice is not None:
        return grammar_from_choice(wanted.choice, param=param)
    if wanted.grammar is not None:
        return grammar_from_lark(wanted.grammar, special_tokens=special_tokens, param=param)
    assert wanted.structural_tag is not None
    return grammar_from_structural_tag(
        wanted.structural_tag, special_tokens=special_tokens, param=param
    )


def _check_options(wanted: StructuredOutputs, kind: str) -> None:
    """Options of JSON are refused elsewhere, where they would do nothing."""
    refused = []
    if kind not in ("json", "json_object"):
        refused += [name for name in _WHITESPACE if getattr(wanted, name)]
    if kind != "json" and wanted.disable_additional_properties:
        refused.append("disable_additional_properties")
    if refused:
        param = f"structured_outputs.{refused[0]}"
        raise RequestError(f"{param} does not go with {kind}.", param=param)
    if wanted.disable_any_whitespace and wanted.whitespace_pattern is not None:
        raise RequestError(
            "structured_outputs.whitespace_pattern does not go with disable_any_whitespace.",
            param="structured_outputs.whitespace_pattern",
        )
