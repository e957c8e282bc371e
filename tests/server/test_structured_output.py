"""What an output must look like: each kind reaches the engine core as a grammar, or is a 400."""

import json
from typing import Any

import pytest

from tests.fakes_engine import FakeServer, says
from tests.server.chats import CHAT, HI, both, run
from tests.server.test_chat_tools import is_match

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f>"],
}
ROUTES = pytest.mark.parametrize(
    ("path", "prompt"), ((CHAT, {"messages": HI}), ("/v1/completions", {"prompt": "x"}))
)
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@ROUTES
@pytest.mark.parametrize(
    ("options", "good", "bad"),
    (
        ({"response_format": {"type": "json_object"}}, '{"x": [1]}', "[1]"),
        ({"response_format": JSON_SCHEMA}, '{"a": 1}', '{"b": 1}'),
        ({"response_format": TAG}, 'hi <f>{"a": 1}</f>', "<f>[]</f>"),
        ({"structured_outputs": {"json": SCHEMA}}, '{ "a": 1}', '{"a": "1"}'),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, '{"a": 1}', "{}"),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            '{"a":1}',
            '{ "a": 1}',
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "_"}},
            '{_"a":_1_}',
            '{ "a": 1}',
        ),
        (
            {"structured_outputs": {"json": {"properties": {}}, "json_object": None}},
            "[]",
            "x",
        ),
        (
            {
                "structured_outputs": {
                    "json": {"type": "object"},
                    "disable_additional_properties": True,
                }
            },
            "{}",
            '{"b": 1}',
        ),
        ({"structured_outputs": {"json_object": True}}, '{"x": 1}', "1"),
        ({"structured_outputs": {"regex": "[ab]{2}"}}, "ab", "abc"),
        ({"structured_outputs": {"choice": ["yes", "nö"]}}, "nö", "maybe"),
        ({"structured_outputs": {"grammar": 'start: "x" "y"*'}}, "xyy", "yx"),
        ({"structured_outputs": {"grammar": 'root ::= "x" "y"*'}}, "xyy", "yx"),
        ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, "a", "<f>1</f>"),
    ),
)
def test_a_grammar(path: str, prompt: dict, options: dict, good: str, bad: str) -> None:
    async def test(server: FakeServer) -> None:
        response = await server.post(path, **prompt, **options, n=2)
        assert response.status_code == 200, response.text
        grammars = [request.grammar for request in server.core.requests]
        assert len(grammars) == 2
        for grammar in grammars:
            assert is_match(grammar, good)
            assert not is_match(grammar, bad)

    run(test, says(good))


@ROUTES
@pytest.mark.parametrize(
    "options",
    (
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"response_format": {"type": "text"}, "structured_outputs": {"json": None}},
    ),
)
def test_nothing_is_asked_for(path: str, prompt: dict, options: dict) -> None:
    async def test(server: FakeServer) -> None:
        response = await server.post(path, **prompt, **options)
        assert response.status_code == 200, response.text
        assert server.core.requests[0].grammar is None

    run(test, says("x"))


@ROUTES
@pytest.mark.parametrize(
    ("options", "param"),
    (
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "nothing"}},
                }
            },
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": JSON_SCHEMA | {"type": "json_object"}},
            "response_format.json_schema",
        ),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            "response_format.schema",
        ),
        ({"response_format": {"type": "text", "triggers": []}}, "response_format.triggers"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {"$ref": "#/nowhere"}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "(?=x)"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": "start: <|nobody|>"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "[]"}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"regex": "x", "whitespace_pattern": "x"}},
            "structured_outputs.whitespace_pattern",
        ),
        (
            {"structured_outputs": {"choice": ["x"], "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        (
            {"structured_outputs": {"json_object": True, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
        ),
        (
            {
                "structured_outputs": {
                    "json": {},
                    "disable_any_whitespace": True,
                    "whitespace_pattern": "x",
                }
            },
            "structured_outputs.whitespace_pattern",
        ),
        (
            {"response_format": JSON_SCHEMA, "structured_outputs": {"regex": "x"}},
            "structured_outputs",
        ),
    ),
)
def test_what_is_not_valid(path: str, prompt: dict, options: dict[str, Any], param: str) -> None:
    async def test(server: FakeServer) -> None:
        response = await server.post(path, **prompt, **options)
        assert response.status_code == 400, response.text
        found = response.json()["error"]
        assert found["param"] == param
        assert len(found["message"]) < 500
        assert server.core.requests == []

    run(test)


@ROUTES
def test_special_tokens_in_a_grammar(path: str, prompt: dict) -> None:
    async def test(server: FakeServer) -> None:
        wanted = {"grammar": 'start: <|im_start|> "x"'}
        response = await server.post(path, **prompt, structured_outputs=wanted)
        assert response.status_code == 200, response.text
        tag = TAG | {"triggers": ["<|im_start|>"]}
        tag["structures"] = [{"begin": "<|im_start|>", "schema": SCHEMA, "end": "<|im_end|>"}]
        response = await server.post(path, **prompt, response_format=tag)
        assert response.status_code == 200, response.text
        assert "<[256]>" in (server.core.requests[-1].grammar or "")

    run(test, says("x"))


def test_json_in_a_stream() -> None:
    async def test(server: FakeServer) -> None:
        choices = await both(server, response_format=JSON_SCHEMA, n=2, logprobs=True)
        assert [choice["message"]["content"] for choice in choices] == ['{"a": 1}'] * 2
        assert len(choices[1]["logprobs"]["content"]) == len('{"a": 1}') + 1

    run(test, says('{"a": 1}'))
