"""What the body of /v1/responses comes to, and what is wrong with it; fuzz of both new surfaces."""

import asyncio
import json
import random
from typing import Any

import pytest
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from jaxserve.server.protocol.chat import ChatMessage, ContentPart, FunctionCall, MessageToolCall
from jaxserve.server.protocol.responses import (
    UNSUPPORTED_IN_RESPONSES,
    InputItem,
    ResponsesRequest,
    decode_responses_request,
)
from jaxserve.server.responses.conversion import answered, chat_request, continued
from tests.fakes_engine import MODEL, TOOLS_TEMPLATE, FakeServer, fake_server, says

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}


def decoded(**fields: object) -> ResponsesRequest:
    return decode_responses_request(json.dumps({"model": MODEL, "input": "x"} | fields).encode())


def converted(*items: dict) -> list[ChatMessage]:
    given = decoded(input=list(items)).input
    assert not isinstance(given, str)
    return list(continued((), given))


def call(call_id: str) -> dict:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"}


def a_call(call_id: str) -> MessageToolCall:
    return MessageToolCall(id=call_id, function=FunctionCall("f", "{}"))


def think(text: str) -> dict:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs", "summary": [], "content": content}


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


THOUGHT = ChatMessage(role="assistant", reasoning="a")


@pytest.mark.parametrize(
    ("items", "messages"),
    (
        ([{"role": "user", "content": "a"}], [ChatMessage(role="user", content="a")]),
        (
            [{"type": "message", "role": "developer", "content": "a", "status": "completed"}],
            [ChatMessage(role="developer", content="a")],
        ),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]}],
            [ChatMessage(role="user", content=[ContentPart("text", t) for t in "ab"])],
        ),
        (
            [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
            [ChatMessage(role="assistant", content=[ContentPart("refusal", None, "no")])],
        ),
        # What belongs to one turn of the assistant.
        (
            [think("a"), said("b"), call("1"), call("2")],
            [
                ChatMessage(
                    role="assistant",
                    reasoning="a",
                    content="b",
                    tool_calls=[a_call("1"), a_call("2")],
                )
            ],
        ),
        (
            [think("a"), call("1"), said("b")],
            [
                ChatMessage(role="assistant", reasoning="a", tool_calls=[a_call("1")]),
                ChatMessage(role="assistant", content="b"),
            ],
        ),
        ([think("a"), think("a")], [THOUGHT, THOUGHT]),
        (
            [think("a"), said("b"), said("c")],
            [
                ChatMessage(role="assistant", reasoning="a", content="b"),
                ChatMessage(role="assistant", content="c"),
            ],
        ),
        (
            [said("a"), said("b")],
            [
                ChatMessage(role="assistant", content="a"),
                ChatMessage(role="assistant", content="b"),
            ],
        ),
        ([call("1")], [ChatMessage(role="assistant", tool_calls=[a_call("1")])]),
        (
            [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]}],
            [THOUGHT],
        ),
        (
            [{"type": "function_call_output", "call_id": "1", "output": "x"}],
            [ChatMessage(role="tool", tool_call_id="1", content="x")],
        ),
        (
            [
                {
                    "type": "function_call_output",
                    "call_id": "1",
                    "output": [{"type": "input_text", "text": "x"}],
                }
            ],
            [ChatMessage(role="tool", tool_call_id="1", content=[ContentPart("text", "x")])],
        ),
        (
            [{"type": "function_call_output", "call_id": "1", "output": ""}],
            [ChatMessage(role="tool", tool_call_id="1", content="")],
        ),
    ),
)
def test_items(items: list[dict], messages: list[ChatMessage]) -> None:
    assert converted(*items) == messages


def test_what_was_said_before_is_not_changed() -> None:
    history = (ChatMessage(role="assistant", content="a"),)
    longer = continued(history, [InputItem(**call("1"))])
    assert history == (ChatMessage(role="assistant", content="a"),)
    assert longer[0].tool_calls == [a_call("1")]
    assert answered(history, []) == history


def test_options_of_the_chat() -> None:
    request = decoded(
        instructions="I",
        max_output_tokens=7,
        reasoning={"effort": "low"},
        parallel_tool_calls=False,
        tools=[TOOL | {"strict": True, "description": "d"}],
        tool_choice={
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "look"}],
        },
        top_logprobs=3,
        chat_template_kwargs={"a": 1},
        stop=["x"],
        structured_outputs={"regex": "x+"},
    )
    chat = chat_request(request, (ChatMessage(role="user", content="x"),))
    assert chat.messages[0] == ChatMessage(role="system", content="I")
    assert (chat.max_tokens, chat.reasoning_effort, chat.stop) == (7, "low", ["x"])
    assert (chat.logprobs, chat.top_logprobs) == (True, 3)
    assert chat.structured_outputs is not None and chat.structured_outputs.regex == "x+"
    assert chat.parallel_tool_calls is False
    assert chat.chat_template_kwargs == {"a": 1}
    assert chat.tools is not None and chat.tools[0].function is not None
    function = chat.tools[0].function
    assert (function.name, function.strict, function.description) == ("look", True, "d")
    assert chat.tool_choice is not None and not isinstance(chat.tool_choice, str)
    allowed = chat.tool_choice.allowed_tools
    assert allowed is not None
    assert (allowed.mode, [t.function and t.function.name for t in allowed.tools]) == (
        "required",
        ["look"],
    )
    assert chat_request(decoded(), ()).logprobs is None


def item(**fields: object) -> dict:
    return {"input": [{"role": "user", "content": "a"}, fields]}


def part(**fields: object) -> dict:
    return item(role="user", content=[fields])


def text_format(**fields: object) -> dict:
    return {"text": {"format": fields}}


# What a body changes, the field at fault, and what the message says.
BAD: tuple[tuple[dict, str, str], ...] = (
    ({"input": None}, "input", "Expected"),
    ({"input": 5}, "input", "Expected"),
    ({"input": []}, "input", "empty"),
    ({"input": "x" * 500}, "input", "200 tokens"),
    (item(type="item_reference", id="x"), "input[1].type", "one of"),
    (item(type="computer_call_output"), "input[1].type", "one of"),
    (item(content="x"), "input[1].role", "missing"),
    (item(role="king", content="x"), "input[1].role", "one of"),
    (item(role="user"), "input[1].content", "missing"),
    (item(role="user", content=[]), "input[1].content", "empty"),
    (part(type="input_image", image_url="x"), "input[1].content[0].type", "text only"),
    (part(type="input_file"), "input[1].content[0].type", "text only"),
    (part(type="input_text"), "input[1].content[0].text", "missing"),
    (part(type="refusal"), "input[1].content[0].refusal", "missing"),
    (item(type="function_call", name="f", arguments=""), "input[1].call_id", "missing"),
    (item(type="function_call", call_id="1", arguments=""), "input[1].name", "missing"),
    (item(type="function_call", call_id="1", name="f"), "input[1].arguments", "missing"),
    (item(type="function_call", call_id="1", name="f", arguments="[]"), "input", "object"),
    (item(type="function_call_output", call_id="1"), "input[1].output", "missing"),
    (item(type="function_call_output", output="x"), "input[1].call_id", "missing"),
    (
        item(type="function_call_output", call_id="1", output=[{"type": "input_image"}]),
        "input[1].output[0].type",
        "text only",
    ),
    (item(type="reasoning", encrypted_content="x"), "input[1].encrypted_content", "cannot be"),
    ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
    ({"max_output_tokens": 500}, "max_output_tokens", "200"),
    ({"temperature": -1}, "temperature", "between"),
    ({"include": ["reasoning.encrypted_content"]}, "include[0]", "only message.output_text"),
    ({"top_logprobs": 21}, "top_logprobs", "20"),
    ({"top_logprobs": -2}, "top_logprobs", ""),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata", "16 pairs"),
    ({"metadata": {"x" * 65: "x"}}, "metadata", "64"),
    ({"metadata": {"x": "x" * 513}}, "metadata", "512"),
    ({"metadata": {"x": 5}}, "metadata[...]", "Expected"),
    ({"reasoning": {"effort": "x"}}, "reasoning.effort", "one of"),
    ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "not supported"),
    ({"reasoning": {"generate_summary": "auto"}}, "reasoning.generate_summary", "not supported"),
    ({"reasoning": {"context": "auto"}}, "reasoning.context", "not supported"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "not supported"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "not supported"),
    (text_format(type="x"), "text.format.type", "must be"),
    (text_format(type="json_schema", name="x"), "text.format.schema", "missing"),
    (text_format(type="json_schema", schema={}), "text.format.name", "missing"),
    (text_format(type="json_object", schema={}), "text.format.schema", "does not go"),
    (
        text_format(type="json_schema", name="x", schema={"type": "x"}),
        "text.format.schema",
        "not valid",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "only functions"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "missing"),
    ({"tools": [TOOL | {"name": ""}]}, "tools[0].name", "1 to 256"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name", "another tool"),
    ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading", "not supported"),
    ({"tool_choice": "required"}, "tool_choice", "tools"),
    ({"tools": [TOOL], "tool_choice": "x"}, "tool_choice", "must be"),
    ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice.type", "must be"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.name", "missing"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}},
        "tool_choice.name",
        "no tool 'x'",
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto"}},
        "tool_choice.tools",
        "missing",
    ),
    (
        {
            "tools": [TOOL],
            "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "x"}]},
        },
        "tool_choice.mode",
        "missing",
    ),
    (
        {
            "tools": [TOOL],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "x"}],
            },
        },
        "tool_choice.tools[0].name",
        "no tool 'x'",
    ),
    ({"store": False, "background": True}, "store", "background"),
    ({"stream_options": {}}, "stream_options", "stream"),
    ({"request_id": "a b"}, "request_id", "ASCII"),
)


def test_bad_requests() -> None:
    async def main() -> None:
        options: dict[str, Any] = {"chat_template": TOOLS_TEMPLATE, "tool_call_parser": "hermes"}
        async with fake_server(says("x"), **options) as server:
            for fields, param, text in BAD:
                response = await server.post(PATH, **{"input": "hi"} | fields)
                assert response.status_code == 400, (fields, response.text)
                error = response.json()["error"]
                assert error["param"] == param, (fields, error)
                assert text in error["message"], fields
            assert server.core.requests == []

    asyncio.run(main())


# A value that asks for something, for every option that is known and has no effect here.
ASKING: dict[str, Any] = {
    "background_options": {"completion_window": "2h"},
    "best_of": 2,
    "context_management": [{"type": "compaction"}],
    "image": {"context_compression": "auto"},
    "logprobs": True,
    "n": 2,
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "response_format": {"type": "json_object"},
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "service_tier": "flex",
    "stream_options": {"include_obfuscation": True},
    "truncation": "auto",
}
NEUTRAL: dict[str, Any] = {
    "background": False,
    "include": [],
    "metadata": {"a": "b"},
    "parallel_tool_calls": True,
    "prompt_cache_key": "x",
    "prompt_cache_retention": "in_memory",
    "reasoning": {"effort": None},
    "safety_identifier": "x",
    "service_tier": "auto",
    "stream": False,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
    "an_unknown_field": [1],
}


def test_what_is_not_supported_is_refused_by_name() -> None:
    async def main() -> None:
        async with fake_server(says("x")) as server:
            own = {*ASKING} | {
                name for name, neutral in UNSUPPORTED_IN_RESPONSES.items() if not neutral
            }
            for name in own:
                value = ASKING.get(name, 1)
                body = {"input": "x", "stream": name == "stream_options"}
                response = await server.post(PATH, **body | {name: value})
                assert response.status_code == 400, (name, response.text)
                assert response.json()["error"]["param"] == name
            assert server.core.requests == []
            response = await server.post(PATH, input="x", **NEUTRAL)
            assert response.status_code == 200, response.text
            names = {*ResponsesRequest.__struct_fields__} - {"model", "input"}
            nulls = dict.fromkeys(names | {*UNSUPPORTED_IN_RESPONSES} - {"input"})
            response = await server.post(PATH, input="x", **nulls)
            assert response.status_code == 200, response.text

    asyncio.run(main())


def test_every_parameter_of_the_sdk_is_known() -> None:
    known = {*ResponsesRequest.__struct_fields__, *UNSUPPORTED_IN_RESPONSES}
    assert set(ResponseCreateParamsBase.__annotations__) - known == set()


_SEEDS = (
    (
        PATH,
        {
            "model": MODEL,
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                call("1"),
            ],
            "tools": [TOOL],
            "tool_choice": {"type": "function", "name": "look"},
            "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
            "reasoning": {"effort": None},
            "metadata": {"a": "b"},
            "include": [],
            "stream": False,
            "previous_response_id": None,
        },
    ),
    (
        "/v1/messages",
        {
            "model": MODEL,
            "max_tokens": 5,
            "system": [{"type": "text", "text": "a"}],
            "messages": [
                {"role": "user", "content": "a"},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]},
            ],
            "tools": [{"name": "look", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "any"},
            "thinking": {"type": "adaptive"},
            "output_config": {"format": {"type": "json_schema", "schema": {}}},
            "stream": False,
        },
    ),
)
_VALUES = (None, True, 0, -1, 10**30, 1.5, "", "x", "auto", [], [None], {}, {"type": "x"}, [[{}]])


def _mutate(value: Any, rng: random.Random) -> Any:
    """The value with one part of it replaced, dropped or doubled."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        return rng.choice(_VALUES)
    changed: Any = value.copy()
    key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    if rng.random() < 0.1:
        del changed[key]
    elif isinstance(changed, list) and rng.random() < 0.1:
        changed.append(changed[key])
    else:
        changed[key] = _mutate(value[key], rng)
    return changed


def test_no_body_is_a_500() -> None:
    """An exception of the app would be raised here."""

    async def main() -> None:
        options: dict[str, Any] = {"chat_template": TOOLS_TEMPLATE, "tool_call_parser": "hermes"}
        async with fake_server(says("x"), **options) as server:
            statuses = []
            for seed in range(600):
                rng = random.Random(seed)
                path, body = _SEEDS[seed % 2]
                for _ in range(rng.randint(1, 3)):
                    body = _mutate(body, rng)
                response = await _post(server, path, body)
                assert response in (200, 400, 404), (seed, body)
                statuses.append(response)
            assert {200, 400, 404} <= {*statuses}

    asyncio.run(main())


async def _post(server: FakeServer, path: str, body: Any) -> int:
    response = await server.client.post(path, content=json.dumps(body).encode())
    return response.status_code
