"""Values written as Python literals, as plain text and as JSON."""

import ast
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.server.tools import FunctionTool
from jaxserve.server.tools.json_text import is_json
from jaxserve.server.tools.literals import literal_as_json
from jaxserve.server.tools.typed_text import ParameterTypes

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)  # fmt: skip


@settings(deadline=None)
@given(VALUES)
def test_reads_what_python_writes(value):
    text = literal_as_json(repr(value))
    assert text is not None
    assert json.loads(text) == value
    assert ast.literal_eval(repr(value)) == value


@settings(deadline=None)
@given(VALUES, st.sampled_from([None, 1]))
def test_reads_what_json_writes(value, indent):
    for ascii_only in (False, True):
        written = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
        text = literal_as_json(written)
        assert text is not None
        assert json.loads(text) == value
        assert is_json(written)


@settings(deadline=None)
@given(st.text(st.sampled_from('{}[]",:\\utrue0123456789.eE+- \nnfals')))
def test_knows_json(text):
    try:
        json.loads(text, parse_constant=lambda name: json.loads("?"))
        valid = True
    except json.JSONDecodeError:
        valid = False
    assert is_json(text) == (valid and text == text.strip(" \n"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0x1F", "31"),
        ("1_000", "1000"),
        ("+7", "7"),
        ("1.", "1.0"),
        (".5", "0.5"),
        ("-1_0.5e1", "-105.0"),
        ("()", "[]"),
        ("{1: 2, None: (3,)}", '{"1": 2, "null": [3]}'),
        (r"'\x41\101\q\/'", r'"A\\101\\q/"'),
        (r"'\ud83d\ude00'", r'"\ud83d\ude00"'),
        ("'a\\\nb'", '"ab"'),
        ("''''a'''", '"\'a"'),
    ],
)
def test_literals(text, expected):
    assert literal_as_json(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "a", "nan", "inf", ".5e999", "--1", "1 2", "[1", "[,]", "{1}", "{1:}", "{[]: 1}", "'a",
     "f()", "1+", "٣", "[1)", "'\\", "b'x'", "0x", "1__0"],
)  # fmt: skip
def test_no_literals(text):
    assert literal_as_json(text) is None


SCHEMA = {
    "properties": {
        "s": {"type": "string"},
        "maybe": {"type": ["string", "null"]},
        "i": {"type": "integer"},
        "n": {"type": "number"},
        "b": {"type": "boolean"},
        "null": {"type": "null"},
        "a": {"type": "array"},
        "o": {"anyOf": [{"type": "object"}, {"type": "null"}]},
        "e": {"enum": ["x", "2"]},
        "mixed": {"enum": ["x", 2]},
        "c": {"const": 3},
        "r": {"$ref": "#/$defs/n~1umber"},
        "loop": {"$ref": "#/properties/loop"},
        "lost": {"$ref": "#/x/y"},
        "any": {},
        "odd": True,
    },
    "$defs": {"n/umber": {"oneOf": [{"type": "integer"}, {"type": "boolean"}]}},
}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("s", "12", '"12"'),
        ("s", " null\t", '" null\\t"'),
        ("maybe", "null", "null"),
        ("maybe", "None", "null"),
        ("maybe", "nullify", '"nullify"'),
        ("i", " 12 ", "12"),
        ("i", "12.0", "12.0"),
        ("i", "12.5", '"12.5"'),
        ("i", "12345678901234567890123", "12345678901234567890123"),
        ("i", "true", '"true"'),
        ("i", "null", '"null"'),
        ("i", "twelve", '"twelve"'),
        ("n", "-1e3", "-1e3"),
        ("n", "NaN", '"NaN"'),
        ("b", "True", "true"),
        ("b", "FALSE", "false"),
        ("b", "1", '"1"'),
        ("null", "null", "null"),
        ("a", "[1, {}]", "[1, {}]"),
        ("a", "['x', True]", '["x", true]'),
        ("a", "{}", '"{}"'),
        ("o", '{"a": "b"}', '{"a": "b"}'),
        ("o", "null", "null"),
        ("o", "[]", '"[]"'),
        ("e", "2", '"2"'),
        ("mixed", "2", '"2"'),
        ("c", "3", "3"),
        ("r", "4", "4"),
        ("r", "false", "false"),
        ("r", "4.5", '"4.5"'),
        ("loop", "5", "5"),
        ("lost", '"x"', '"x"'),
        ("any", "[1]", "[1]"),
        ("any", "x y", '"x y"'),
        ("odd", "6", "6"),
        ("unknown", "7", "7"),
    ],
)
def test_text_is_read_by_its_types(name, text, expected):
    assert ParameterTypes(FunctionTool("f", parameters=SCHEMA)).as_json(name, text) == expected


@pytest.mark.parametrize("parameters", [None, {}, {"properties": 3}, {"properties": {"i": 3}}])
def test_schemas_without_types(parameters):
    assert ParameterTypes(FunctionTool("f", parameters=parameters)).as_json("i", "7") == "7"
