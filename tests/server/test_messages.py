"""/v1/messages over a scripted engine core; what it says is read with the anthropic SDK's types."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic.types as anthropic
import httpx
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types.shared import ErrorResponse
from pydantic import TypeAdapter

from tests.fakes_engine import EOS, MODEL, TOOLS_TEMPLATE, FakeServer, fake_server, says

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
EVENT = TypeAdapter(anthropic.RawMessageStreamEvent)
HI = [{"role": "user", "content": "hi"}]
TOOL = {
    "name": "look",
    "description": "Looks.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
ALL = "<think>\nhm</think>\n\nI look." + CALL + "\n" + CALL.replace("é", "b")


def run(test: Callable[[FakeServer], Awaitable[None]], *args: Any, **config: object) -> None:
    """Runs `test(server)` over a fake server that knows calls and reasoning."""
    parsers = {
        "chat_template": TOOLS_TEMPLATE,
        "tool_call_parser": "hermes",
        "reasoning_parser": "deepseek_r1",
        "max_model_len": 2000,
    }

    async def main() -> None:
        async with fake_server(*args, **parsers | config) as server:
            await asyncio.wait_for(test(server), 10)

    asyncio.run(main())


def plain(text: str) -> Any:
    """A script: no reasoning, then the text."""
    return says(f"</think>{text}")


async def post(server: FakeServer, **body: object) -> httpx.Response:
    return await server.post(PATH, **{"messages": HI, "max_tokens": 300} | body)


def checked(response: httpx.Response) -> dict:
    """The message; the SDK's type accepts it."""
    assert response.status_code == 200, response.text
    anthropic.Message.model_validate_json(response.content, strict=True)
    return response.json()


def parsed_events(text: str) -> list[dict]:
    """The events of a stream; each has its name, and a type of the SDK."""
    assert text.endswith("\n\n")
    events = []
    for block in text[:-2].split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] not in ("ping", "error"):
            EVENT.validate_json(data[6:])
        events.append(event)
    return events


def accumulated(events: list[dict]) -> dict:
    """The message as the SDK puts it together."""
    message, buffers = None, {}
    for event in events:
        if event["type"] != "ping":
            message = accumulate_event(
                event=EVENT.validate_python(event), current_snapshot=message, json_bufs=buffers
            )
    assert message is not None
    return message.to_dict()


def without_ids(blocks: list[dict]) -> list[dict]:
    """Blocks without the ids of tool uses, which are there and differ."""
    ids = [block["id"] for block in blocks if block["type"] == "tool_use"]
    assert len(set(ids)) == len(ids)
    assert all(i.startswith("toolu_") for i in ids)
    return [{k: v for k, v in block.items() if k != "id"} for block in blocks]


def usage(read: int, output: int, thinking: int = 0) -> dict:
    return {
        "input_tokens": read,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "output_tokens": output,
        "output_tokens_details": {"thinking_tokens": thinking},
        "service_tier": "standard",
    }


EVERYTHING = [
    {"type": "thinking", "thinking": "hm", "signature": ""},
    {"type": "text", "text": "I look.", "citations": None},
    {"type": "tool_use", "name": "look", "input": {"at": "é"}},
    {"type": "tool_use", "name": "look", "input": {"at": "b"}},
]


async def rendered(server: FakeServer, **body: object) -> str:
    """The prompt that a body comes to."""
    response = await post(server, **body)
    assert response.status_code == 200, response.text
    ids = server.core.requests[-1].prompt_token_ids
    return server.context.renderer.tokenizer.decode(ids, skip_special_tokens=False)


def test_a_text() -> None:
    async def test(server: FakeServer) -> None:
        response = await post(server, request_id="abc")
        assert response.headers["request-id"] == response.headers["x-request-id"] == "msg-abc"
        assert checked(response) == {
            "id": "msg-abc",
            "type": "message",
            "role": "assistant",
            "model": MODEL,
            "content": [{"type": "text", "text": "Grüße", "citations": None}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": usage(18, 8),
        }

    run(test, says("Grüße"), reasoning_parser="")


def test_everything_at_once() -> None:
    async def test(server: FakeServer) -> None:
        body = checked(await post(server, tools=[TOOL]))
        assert without_ids(body["content"]) == EVERYTHING
        assert body["stop_reason"] == "tool_use"
        assert body["usage"]["output_tokens_details"]["thinking_tokens"] > 0

    run(test, says(ALL))


def test_everything_streamed() -> None:
    async def test(server: FakeServer) -> None:
        events = parsed_events((await post(server, tools=[TOOL], stream=True)).text)
        kinds = [event["type"] for event in events]
        once = [kind for i, kind in enumerate(kinds) if kinds[i - 1 : i] != [kind]]
        block = ["content_block_start", "content_block_delta", "content_block_stop"]
        assert once == ["message_start", "ping", *block * 4, "message_delta", "message_stop"]
        message = events[0]["message"]
        assert (message["content"], message["stop_reason"]) == ([], None)
        assert message["usage"] == usage(message["usage"]["input_tokens"], 0)
        starts = [event for event in events if event["type"] == "content_block_start"]
        assert [event["index"] for event in starts] == [0, 1, 2, 3]
        assert [event["content_block"].get("input") for event in starts] == [None, None, {}, {}]
        whole = accumulated(events)
        assert without_ids(whole["content"]) == EVERYTHING
        assert whole["stop_reason"] == "tool_use"
        again = checked(await post(server, tools=[TOOL]))
        assert whole["usage"] == again["usage"]

    run(test, says(ALL))


@pytest.mark.parametrize("stream", (False, True))
@pytest.mark.parametrize(
    ("options", "text", "reason", "sequence"),
    (
        ({"stop_sequences": ["zz", "lo"]}, "hel", "stop_sequence", "lo"),
        ({"max_tokens": 12}, "hell", "max_tokens", None),
        ({}, "hello", "end_turn", None),
    ),
)
def test_how_a_message_ends(
    stream: bool, options: dict, text: str, reason: str, sequence: str | None
) -> None:
    async def test(server: FakeServer) -> None:
        response = await post(server, stream=stream, **options)
        body = accumulated(parsed_events(response.text)) if stream else checked(response)
        assert [block["text"] for block in body["content"]] == [text]
        assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)

    run(test, plain("hello"))


@pytest.mark.parametrize("stream", (False, True))
def test_an_empty_answer(stream: bool) -> None:
    async def test(server: FakeServer) -> None:
        response = await post(server, stream=stream)
        body = accumulated(parsed_events(response.text)) if stream else checked(response)
        assert (body["content"], body["stop_reason"]) == ([], "end_turn")

    run(test, says(""), reasoning_parser="")


@pytest.mark.parametrize("arguments", ("", "{}", '{"at": '))
def test_an_input_is_always_an_object(arguments: str) -> None:
    async def test(server: FakeServer) -> None:
        body = checked(await post(server, tools=[TOOL]))
        (block,) = body["content"]
        assert block["name"] == "look"
        assert block["input"] == ({"invalid_json": arguments} if len(arguments) > 2 else {})

    text = '<tool_call>{"name": "look"' + (f', "arguments": {arguments}' if arguments else "")
    text += "}</tool_call>" if arguments != '{"at": ' else ""
    run(test, plain(text))


def test_options_reach_the_engine() -> None:
    async def test(server: FakeServer) -> None:
        options = {"temperature": 0.5, "top_p": 0.25, "top_k": 3, "max_tokens": 9, "seed": 7}
        checked(await post(server, **options))
        sampling = server.core.requests[-1].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 3)
        assert (sampling.max_tokens, sampling.seed) == (9, 7)
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        output = {"format": {"type": "json_schema", "schema": schema}}
        checked(await post(server, output_config=output))
        assert "integer" in (server.core.requests[-1].grammar or "")
        for choice in ({"type": "any"}, {"type": "tool", "name": "look"}):
            checked(await post(server, tools=[TOOL], tool_choice=choice))
            assert "look" in (server.core.requests[-1].grammar or "")
        for choice in ({"type": "auto"}, {"type": "none"}):
            checked(await post(server, tools=[TOOL], tool_choice=choice))
            assert server.core.requests[-1].grammar is None

    run(test, says("x"), reasoning_parser="")


def test_disable_parallel_tool_use() -> None:
    async def test(server: FakeServer) -> None:
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        body = checked(await post(server, tools=[TOOL], tool_choice=choice))
        assert without_ids(body["content"]) == EVERYTHING[:3]

    run(test, says(ALL))


def test_the_conversation_reaches_the_template() -> None:
    async def test(server: FakeServer) -> None:
        system = [{"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}}]
        system += [{"type": "text", "text": "kind."}]
        first = checked(await post(server, tools=[TOOL]))
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": content} | error
            for block, content, error in zip(
                first["content"][2:],
                ("a tree", [{"type": "text", "text": "no"}]),
                ({}, {"is_error": True}),
                strict=True,
            )
        ]
        turns = [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [*results, {"type": "text", "text": "and?"}]},
        ]
        text = await rendered(server, messages=turns, tools=[TOOL], system=system)
        one, two = [block["id"] for block in first["content"][2:]]
        assert text == (
            "<look><|im_start|>system\nBe\nkind.<|im_end|>\n"
            "<|im_start|>user\nhi<|im_end|>\n"
            "<|im_start|>assistant\n<think>hm</think>I look."
            f'<{one}:look {{"at": "é"}}><{two}:look {{"at": "b"}}><|im_end|>\n'
            f"<|im_start|>tool\na tree[{one}]<|im_end|>\n"
            f"<|im_start|>tool\nError: no[{two}]<|im_end|>\n"
            "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
        )
        text = await rendered(server, system="Be kind.")
        assert text.startswith("<|im_start|>system\nBe kind.<|im_end|>")

    run(test, says(ALL))


def test_a_last_message_of_the_assistant_is_gone_on_with() -> None:
    async def test(server: FakeServer) -> None:
        text = await rendered(server, messages=[*HI, {"role": "assistant", "content": "It is"}])
        assert text.endswith("<|im_start|>assistant\nIt is")

    run(test, plain(" x"))


def test_thinking() -> None:
    async def test(server: FakeServer) -> None:
        assert (await rendered(server)).endswith("assistant\n")
        on = {"type": "adaptive", "display": "summarized"}
        assert (await rendered(server, thinking=on)).endswith("assistant\n")
        off = await rendered(server, thinking={"type": "disabled"})
        assert off.endswith("(none)")
        effort = await rendered(server, output_config={"effort": "low"})
        assert effort.endswith("(low)")
        switched = await rendered(server, chat_template_kwargs={"enable_thinking": False})
        assert switched.endswith("<think></think>")

    run(test, plain("x"))


def test_a_model_that_does_not_think_can_be_told_not_to() -> None:
    async def test(server: FakeServer) -> None:
        checked(await post(server, thinking={"type": "disabled"}))

    run(test, says("x"), reasoning_parser="", chat_template="")


def test_count_tokens() -> None:
    async def test(server: FakeServer) -> None:
        body = {"messages": HI, "system": "Be kind.", "tools": [TOOL]}
        response = await server.post(COUNT, **body)
        assert response.status_code == 200, response.text
        count = anthropic.MessageTokensCount.model_validate_json(response.content, strict=True)
        assert response.json().keys() == {"input_tokens"}
        assert server.core.requests == []
        await post(server, **body)
        assert count.input_tokens == len(server.core.requests[-1].prompt_token_ids)

    run(test, plain("x"))


def part(kind: str, **fields: object) -> dict:
    return {"messages": [{"role": "user", "content": [{"type": kind} | fields]}]}


def assistant(*blocks: dict) -> dict:
    return {"messages": [{"role": "assistant", "content": list(blocks)}, *HI]}


USE = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
# What a body changes, the status, and what the message says; the first word is the field.
BAD = (
    ({"max_tokens": None}, 400, "max_tokens is missing"),
    ({"max_tokens": 0}, 400, "max_tokens must be"),
    ({"max_tokens": 5000}, 400, "max_tokens"),
    ({"max_tokens": "x"}, 400, "max_tokens: Expected"),
    ({"model": "gpt-9"}, 404, "does not exist"),
    ({"messages": []}, 400, "messages must not be empty"),
    ({"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role must be one of"),
    ({"messages": [{"role": "user", "content": []}]}, 400, "messages[0].content must not be"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content: Expected"),
    ({"messages": [{"role": "user", "content": "x" * 3000}]}, 400, "2000 tokens"),
    (part("image", source={}), 400, "messages[0].content[0].type: 'image' is not supported"),
    (part("document", source={}), 400, "messages[0].content[0].type: 'document'"),
    (part("tool_use", id="x"), 400, "messages[0].content[0].type: 'tool_use'"),
    (part("text"), 400, "messages[0].content[0].text is missing"),
    (part("text", text="x", citations=[{}]), 400, "messages[0].content[0].citations is not"),
    (part("tool_result", content="x"), 400, "messages[0].content[0].tool_use_id is missing"),
    (
        part("tool_result", tool_use_id="x", content=[{"type": "image"}]),
        400,
        "messages[0].content[0].content[0].type: 'image'",
    ),
    (assistant({"type": "redacted_thinking", "data": "x"}), 400, "messages[0].content[0].type"),
    (assistant({"type": "thinking"}), 400, "messages[0].content[0].thinking is missing"),
    (assistant({"type": "tool_use", "name": "x"}), 400, "messages[0].content[0].input is missing"),
    (assistant(USE | {"id": None}), 400, "messages[0].content[0].id is missing"),
    (assistant(USE | {"name": None}), 400, "messages[0].content[0].name is missing"),
    (assistant(USE | {"input": "x"}), 400, "messages[0].content[0].input: Expected"),
    ({"messages": [{"role": "assistant", "content": [USE]}]}, 400, "messages must not end with"),
    ({"system": [{"type": "image"}]}, 400, "system[0].type: 'image'"),
    ({"stop_sequences": [""]}, 400, "stop_sequences[0] must not be empty"),
    ({"stop_sequences": ["x"] * 17}, 400, "stop_sequences takes up to 16"),
    ({"temperature": -1}, 400, "temperature must be"),
    ({"tools": [{"name": "x"}]}, 400, "tools[0].input_schema is missing"),
    (
        {"tools": [{"name": "f", "input_schema": {"type": "array"}}]},
        400,
        "tools[0].input_schema.type must be object",
    ),
    ({"tools": [{"name": "", "input_schema": {}}]}, 400, "tools[0].name must be"),
    ({"tools": [{"name": "x", "type": "bash_20250124"}]}, 400, "tools[0].type: only tools"),
    ({"tools": [TOOL | {"defer_loading": True}]}, 400, "tools[0].defer_loading is not"),
    ({"tools": [TOOL | {"input_examples": [{}]}]}, 400, "tools[0].input_examples is not"),
    ({"tools": [TOOL | {"allowed_callers": ["x"]}]}, 400, "tools[0].allowed_callers is not"),
    ({"tools": [TOOL | {"eager_input_streaming": False}]}, 400, "tools[0].eager_input_streaming"),
    ({"tools": [TOOL], "tool_choice": {"type": "x"}}, 400, "tool_choice.type must be auto"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, 400, "tool_choice.name is missing"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}},
        400,
        "tool_choice.name: there is no tool 'x'",
    ),
    ({"tool_choice": {"type": "any"}}, 400, "tool_choice is only allowed with tools"),
    ({"thinking": {"type": "enabled", "budget_tokens": 9}}, 400, "thinking.type enabled is not"),
    ({"thinking": {"type": "x"}}, 400, "thinking.type must be adaptive or disabled"),
    ({"thinking": {"type": "adaptive", "display": "omitted"}}, 400, "thinking.display is not"),
    (
        {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
        400,
        "output_config.effort does not go",
    ),
    ({"output_config": {"effort": "x"}}, 400, "output_config.effort must be one of"),
    ({"output_config": {"format": {"type": "x"}}}, 400, "output_config.format.type must be"),
    (
        {"output_config": {"format": {"type": "json_schema"}}},
        400,
        "output_config.format.schema is missing",
    ),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
        400,
        "not valid",
    ),
)


# What does not matter where nothing is generated.
NO_COUNT = {"max_tokens", "temperature", "stop_sequences"}


def test_bad_requests() -> None:
    async def test(server: FakeServer) -> None:
        for fields, status, text in BAD:
            response = await post(server, **fields)
            assert response.status_code == status, (fields, response.text)
            body = response.json()
            assert text in body["error"]["message"], fields
            assert body["type"] == "error"
            kind = "not_found_error" if status == 404 else "invalid_request_error"
            assert body["error"]["type"] == kind
            param = body["error"]["param"]
            assert param.split(".")[0].split("[")[0] in {*fields}, fields
            if body["error"]["message"].startswith(next(iter(fields))):
                assert body["error"]["message"].startswith(param), fields
            ErrorResponse.model_validate_json(response.content, strict=True)
            if text == "2000 tokens" or fields.keys() & NO_COUNT:
                continue
            counted = await server.post(COUNT, **{"messages": HI} | fields)
            assert (counted.status_code, counted.json()) == (status, body), fields
        assert server.core.requests == []

    run(test)


# Every option of the API that has no effect here, and one that asks for something.
UNSUPPORTED = {
    "container": "x",
    "context_management": {"edits": [{}]},
    "diagnostics": {},
    "inference_geo": "us",
    "mcp_servers": [{}],
    "n": 2,
    "prompt_logprobs": 1,
    "response_format": {"type": "text"},
    "service_tier": "x",
    "speed": "fast",
    "stop": ["x"],
    "top_logprobs": 2,
    "user_profile_id": "x",
    "workspace_id": "x",
}
NEUTRAL = {
    "cache_control": {"type": "ephemeral"},
    "metadata": {"user_id": "x"},
    "service_tier": "standard_only",
    "speed": "standard",
    "an_unknown_field": [1],
    "tools": [TOOL | {"type": "custom", "cache_control": None, "eager_input_streaming": True}],
    "thinking": None,
}


def test_what_is_not_supported_is_refused_by_name() -> None:
    async def test(server: FakeServer) -> None:
        for name, value in UNSUPPORTED.items():
            response = await post(server, **{name: value})
            assert response.status_code == 400, name
            assert response.json()["error"]["message"].startswith(f"{name} is not supported")
        checked(await post(server, **NEUTRAL))

    run(test, plain("x"))


def test_every_parameter_of_the_sdk_is_known() -> None:
    from anthropic.types.message_create_params import MessageCreateParamsBase

    from jaxserve.server.protocol.anthropic import UNSUPPORTED_IN_MESSAGES, MessagesRequest

    known = {*MessagesRequest.__struct_fields__, *UNSUPPORTED_IN_MESSAGES}
    assert set(MessageCreateParamsBase.__annotations__) - known == set()


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    (
        (b"", 400, "invalid_request_error"),
        (b"{", 400, "invalid_request_error"),
        (b"[]", 400, "invalid_request_error"),
        (b" " * 2000, 413, "request_too_large"),
    ),
)
def test_bodies_that_do_not_decode(body: bytes, status: int, kind: str) -> None:
    async def test(server: FakeServer) -> None:
        for path in (PATH, COUNT):
            response = await server.client.post(path, content=body)
            assert (response.status_code, response.json()["type"]) == (status, "error")
            assert response.json()["error"]["type"] == kind

    run(test, max_body_bytes=1024)


def test_a_method_that_the_routes_do_not_take() -> None:
    async def test(server: FakeServer) -> None:
        for path in (PATH, COUNT):
            response = await server.client.get(path)
            assert (response.status_code, response.json()["type"]) == (405, "error")
            assert response.json()["error"]["type"] == "invalid_request_error"

    run(test)


def test_the_key() -> None:
    async def test(server: FakeServer) -> None:
        for headers, status in (
            ({}, 401),
            ({"x-api-key": "no"}, 401),
            ({"x-api-key": "key"}, 200),
            ({"authorization": "Bearer key"}, 200),
        ):
            headers |= {"anthropic-version": "2023-06-01"}
            body = {"model": MODEL, "messages": HI, "max_tokens": 9}
            response = await server.client.post(PATH + "?beta=true", json=body, headers=headers)
            assert response.status_code == status
            if status == 401:
                assert response.json()["type"] == "error"
                assert response.json()["error"]["type"] == "authentication_error"

    run(test, plain("x"), api_key=("key",))


@pytest.mark.parametrize("stream", (False, True))
def test_death_while_generating(stream: bool) -> None:
    async def test(server: FakeServer) -> None:
        server.core.allow_steps(11)
        posted = asyncio.ensure_future(post(server, stream=stream))
        while server.core.num_steps < 11:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        server.core.die("worker 0 was killed")
        response = await posted
        if stream:
            error = parsed_events(response.text)[-1]
        else:
            assert response.status_code == 503
            error = response.json()
        assert error["type"] == "error"
        assert error["error"]["type"] == "api_error"
        assert "worker 0 was killed" in error["error"]["message"]

    run(test, plain("abcdef"))


def test_a_full_queue_is_an_overloaded_error() -> None:
    async def test(server: FakeServer) -> None:
        server.core.allow_steps(0)
        first = asyncio.ensure_future(post(server))
        while not server.core.requests:
            await asyncio.sleep(0.001)
        response = await post(server)
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "overloaded_error"
        assert response.headers["retry-after"]
        server.core.allow_steps(None)
        checked(await first)

    run(test, lambda request: [97, EOS], max_num_queued_reqs=1)
