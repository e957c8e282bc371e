"""Tools whose arguments can be written one by one: for formats that write them so."""

from typing import Any

import msgspec

from jaxserve.server.tools.tool import FunctionTool

# Nothing else of a schema says what arguments there may be, or says it of several at once.
_KNOWN_KEYS = frozenset(
    (
        *("$defs", "$schema", "additionalProperties", "definitions", "description"),
        *("properties", "required", "strict", "title", "type"),
    )
)


class Parameter(msgspec.Struct, frozen=True):
    """schema: whole, with the definitions that it may refer to."""

    name: str
    schema: dict[str, Any]
    required: bool


def flat_parameters(tool: FunctionTool) -> list[Parameter] | None:
    """The parameters in order; None when the schema is not just a list of them."""
    schema = tool.arguments_schema()
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if (
        schema.keys() - _KNOWN_KEYS
        or not isinstance(properties, dict)
        or not isinstance(required, list)
        or not all(isinstance(name, str) and name in properties for name in required)
        or not all(isinstance(value, dict) for value in properties.values())
    ):
        return None
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return [
        Parameter(name, {**value, **definitions}, name in required)
        for name, value in properties.items()
    ]
