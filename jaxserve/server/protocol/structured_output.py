"""What an output must look like: `response_format` (OpenAI's) and `structured_outputs` (vLLM's)."""

from typing import Annotated, Any

from msgspec import Struct

from jaxserve.server.protocol.common import doc


class JsonSchemaFormat(Struct, frozen=True):
    """`response_format.json_schema`. The schema always holds, whatever `strict` says."""

    name: str
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True):
    """`response_format`: text, json_object, json_schema or structural_tag.

    format: of a structural tag; older clients give structures and triggers instead.
    schema: other servers' place for it, refused; json_schema.schema is the one here.
    """

    type: str
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    schema: Any = None


class StructuredOutputs(Struct, frozen=True, kw_only=True):
    """`structured_outputs`: exactly one of the first six."""

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    disable_fallback: bool | None = None


# Fields of the bodies that take them.
ResponseFormatField = Annotated[
    ResponseFormat | None,
    doc("What the text must be: JSON, JSON of a schema.", default="text", error="not valid"),
]
StructuredOutputsField = Annotated[
    StructuredOutputs | None,
    doc(
        "What the text must be: a schema, regex, choice or grammar.",
        default="any text",
        error="not valid, or with a response_format that asks for something",
    ),
]
