"""Arguments that models write as plain text, read by the types that the schema names."""

import json
from typing import Any

from jaxserve.server.tools.json_text import is_json
from jaxserve.server.tools.literals import literal_as_json
from jaxserve.server.tools.tool import FunctionTool

_MAX_REFERENCES = 32
_NULL_WORDS = ("null", "none")
_NUMBER_START = "-0123456789"


class ParameterTypes:
    """The types of one tool's parameters."""

    def __init__(self, tool: FunctionTool):
        root = tool.arguments_schema()
        properties = root.get("properties")
        self._types: dict[str, frozenset[str]] = {}
        if isinstance(properties, dict):
            for name, schema in properties.items():
                self._types[name] = frozenset(_types_of(schema, root))

    def as_json(self, name: str, text: str) -> str:
        """The value that the text stands for, as JSON: a string where the schema allows no other.

        Text that does not fit its types is a string too. Without types it is any JSON value, or
        else a string.
        """
        types = self._types.get(name, frozenset())
        stripped = text.strip()
        if stripped.lower() in _NULL_WORDS and (not types or "null" in types):
            return "null"
        if "string" not in types:
            for value in (stripped if is_json(stripped) else None, literal_as_json(stripped)):
                if value is not None and (not types or _fits(value, types)):
                    return value
            if types and stripped.lower() in ("true", "false") and "boolean" in types:
                return stripped.lower()
        return json.dumps(text, ensure_ascii=False)


def _fits(value: str, types: frozenset[str]) -> bool:
    if value[0] in _NUMBER_START:
        return "number" in types or ("integer" in types and _is_whole(value))
    kinds = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean"}
    return kinds.get(value[0], "null") in types


def _is_whole(number: str) -> bool:
    return not number.strip("-0123456789") or float(number).is_integer()


def _types_of(schema: Any, root: dict[str, Any]) -> set[str]:
    """All types that a value may have as far as the schema says; empty: any."""
    types: set[str] = set()
    waiting = [schema]
    num_references = 0
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, dict):
            continue
        kind = schema.get("type")
        kinds = [kind] if isinstance(kind, str) else kind
        if isinstance(kinds, list):
            types.update(k for k in kinds if isinstance(k, str))
            continue
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        if isinstance(values, list):
            types.update(_type_of(value) for value in values)
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(schema.get(key), list):
                waiting += schema[key]
        if "$ref" in schema and num_references < _MAX_REFERENCES:
            num_references += 1
            waiting.append(_resolved(schema["$ref"], root))
    return types


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def _resolved(reference: Any, root: dict[str, Any]) -> Any:
    """What a reference within the schema names; None when there is no such place."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    place: Any = root
    for step in reference[2:].split("/"):
        step = step.replace("~1", "/").replace("~0", "~")
        place = place.get(step) if isinstance(place, dict) else None
    return place
