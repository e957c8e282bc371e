"""Sixty JSON schemas, each with a bounded set of documents, so that every output can end."""

from typing import Any

_NAME = {"type": "string", "minLength": 1, "maxLength": 12}
_WORD = {"type": "string", "pattern": "^[a-z]{1,8}$"}
_SMALL = {"type": "integer", "minimum": 0, "maximum": 99}


def _object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    } | more


def _list(items: Any, low: int = 1, high: int = 3, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high} | more


def _text(form: str) -> dict[str, Any]:
    return {"type": "string", "format": form}


_PERSON = _object({"name": _NAME, "age": {"type": "integer", "minimum": 0, "maximum": 120}})
_ADDRESS = _object(
    {"street": _NAME, "number": _SMALL, "zip": {"pattern": "^[0-9]{5}$", "type": "string"}}
)

SCHEMAS: dict[str, dict[str, Any]] = {
    # scalars
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "integer": {"type": "integer", "minimum": -1000, "maximum": 1000},
    "integer above 5": {"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 20},
    "multiple of 5": {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 5},
    "number": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.01},
    "negative number": {"type": "number", "minimum": -3, "maximum": 0, "multipleOf": 0.5},
    "string": {"type": "string", "maxLength": 20},
    "string of 5": {"type": "string", "minLength": 5, "maxLength": 5},
    "const": {"const": "yes"},
    "const object": {"const": {"a": [1, 2, None], "b": "ü"}},
    "enum of strings": {"enum": ["red", "green", "blue"]},
    "enum of mixed": {"enum": [1, "one", None, True, [1], {"one": 1}]},
    "type list": {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    # patterns and formats
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    "pattern with choice": {"type": "string", "pattern": "^(cat|dog|bird)s?$"},
    "date": _text("date"),
    "time": {"type": "string", "format": "time", "maxLength": 30},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": _text("uuid"),
    "ipv4": _text("ipv4"),
    "email": {
        "type": "object",
        "properties": {
            "email": {"type": "string", "pattern": "^[a-z]{1,9}@[a-z]{1,9}\\.(com|org)$"}
        },
        "required": ["email"],
        "additionalProperties": False,
    },
    # objects
    "person": _PERSON,
    "nested": _object({"person": _PERSON, "address": _ADDRESS}),
    "deeply nested": _object({"a": _object({"b": _object({"c": _object({"d": _SMALL})})})}),
    "optional": _object({"a": _SMALL, "b": _WORD, "c": {"type": "boolean"}}, required=["b"]),
    "all optional": _object({"a": _SMALL, "b": _WORD}, required=[]),
    "empty object": _object({}),
    "unicode keys": _object({"größe": _SMALL, "名前": _WORD, "emoji 😀": {"type": "boolean"}}),
    "keys to escape": _object({'a"b': _SMALL, "c\\d": _SMALL, "e\nf": _SMALL}),
    "unicode enum": _object({"city": {"enum": ["Zürich", "東京", "Ñuñoa", "🗽"]}}),
    "map of integers": {
        "type": "object",
        "additionalProperties": _SMALL,
        "properties": {"total": _SMALL},
        "required": ["total"],
        "maxProperties": 1,
    },
    "many fields": _object({f"field_{i}": {"type": "boolean"} for i in range(12)}),
    # arrays
    "list of integers": _list(_SMALL, 2, 5),
    "list of exactly 3": _list({"type": "boolean"}, 3, 3),
    "list or empty": _list(_WORD, 0, 2),
    "list of lists": _list(_list(_SMALL, 1, 2), 1, 2),
    "list of objects": _list(_PERSON, 1, 2),
    "tuple": {
        "type": "array",
        "prefixItems": [_SMALL, _WORD, {"type": "boolean"}],
        "items": False,
        "minItems": 3,
    },
    "tuple and more": {
        "type": "array",
        "prefixItems": [_WORD],
        "items": _SMALL,
        "minItems": 2,
        "maxItems": 4,
    },
    "list of enums": _list({"enum": ["a", "b", "c"]}, 1, 6),
    # references
    "$ref": {"$defs": {"person": _PERSON}, "$ref": "#/$defs/person"},
    "$ref twice": _object({"from": {"$ref": "#/$defs/place"}, "to": {"$ref": "#/$defs/place"}})
    | {"$defs": {"place": _object({"x": _SMALL, "y": _SMALL})}},
    "definitions": _object({"a": {"$ref": "#/definitions/small"}})
    | {"definitions": {"small": _SMALL}},
    "$ref to a property": _object({"a": _WORD, "b": {"$ref": "#/properties/a"}}),
    "recursive": {
        "$defs": {
            "leaf": _object({"value": _SMALL}),
            "tree": _object({"value": _SMALL, "children": _list({"$ref": "#/$defs/leaf"}, 0, 2)}),
        },
        "$ref": "#/$defs/tree",
    },
    # combinations
    "anyOf scalars": {"anyOf": [_SMALL, {"type": "null"}, _WORD]},
    "anyOf objects": {"anyOf": [_object({"cat": _WORD}), _object({"dog": _SMALL})]},
    "anyOf in a field": _object(
        {"id": {"anyOf": [_SMALL, {"type": "string", "pattern": "^x[0-9]$"}]}}
    ),
    "optional by null": _object({"nickname": {"anyOf": [_WORD, {"type": "null"}]}}),
    "oneOf by constant": {
        "oneOf": [
            _object({"kind": {"const": "circle"}, "radius": _SMALL}),
            _object({"kind": {"const": "square"}, "side": _SMALL}),
        ]
    },
    "allOf": {"allOf": [{"type": "integer", "minimum": 10}, {"type": "integer", "maximum": 50}]},
    # what people send
    "pydantic model": {
        "title": "Order",
        "description": "What a customer wants.",
        "type": "object",
        "properties": {
            "item": {"title": "Item", "type": "string", "maxLength": 15},
            "quantity": {"title": "Quantity", "type": "integer", "minimum": 1, "maximum": 10},
            "gift": {"title": "Gift", "type": "boolean", "default": False},
        },
        "required": ["item", "quantity", "gift"],
        "additionalProperties": False,
    },
    "classification": _object(
        {
            "label": {"enum": ["positive", "negative", "neutral"]},
            "confidence": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.01},
        }
    ),
    "tool call": _object(
        {
            "name": {"const": "get_weather"},
            "arguments": _object({"city": _WORD, "unit": {"enum": ["C", "F"]}}),
        }
    ),
    "extraction": _object({"people": _list(_PERSON, 0, 2), "places": _list(_WORD, 0, 2)}),
    "chain of thought": _object(
        {"reasoning": {"type": "string", "maxLength": 60}, "answer": _SMALL}
    ),
    "calendar": _object({"title": _NAME, "day": _text("date"), "guests": _list(_WORD, 0, 3)}),
    "chess move": {"type": "string", "pattern": "^[KQRBN]?[a-h][1-8][+#]?$"},
    "money": _object(
        {
            "amount": {"type": "string", "pattern": "^[0-9]{1,4}\\.[0-9]{2}$"},
            "currency": {"enum": ["EUR", "USD", "CHF", "JPY"]},
        }
    ),
}
assert len(SCHEMAS) == 60, len(SCHEMAS)
