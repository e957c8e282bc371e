"""/v1/responses over a scripted engine core; what it says is read with the openai SDK's types."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.fakes_engine import MODEL, TOOLS_TEMPLATE, FakeServer, fake_server, says

PATH = "/v1/responses"
EVENT = TypeAdapter(ResponseStreamEvent)
TOOL = {
    "type": "function",
    "name": "look",
    "description": "Looks.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
ALL = "<think>\nhm</think>\n\nI look." + CALL + "\n" + CALL.replace("é", "b")


def run(test: Callable[[FakeServer], Awaitable[None]], *args: Any, **config: object) -> None:
    """Runs `test(server)` over a fake server that knows calls and reasoning."""
    parsers = {
        "chat_template": TOOLS_TEMPLATE,
        "tool_call_parser": "hermes",
        "reasoning_parser": "deepseek_r1",
    }

    async def main() -> None:
        async with fake_server(*args, **parsers | config) as server:
            await asyncio.wait_for(test(server), 10)

    asyncio.run(main())


def plain(text: str) -> Any:
    """A script: no reasoning, then the text."""
    return says(f"</think>{text}")


def checked(response: httpx.Response) -> dict:
    """The response object; the SDK's type accepts it."""
    assert response.status_code == 200, response.text
    Response.model_validate_json(response.content, strict=True)
    return response.json()


def parsed_events(text: str) -> list[dict]:
    """The events of a stream; each has its name, its number and a type of the SDK."""
    assert text.endswith("\n\n")
    events = []
    for i, block in enumerate(text[:-2].split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == i
        assert type(EVENT.validate_json(data[6:])).__name__ != "dict"
        events.append(event)
    return events


def accumulated(text: str) -> Any:
    """The response as the SDK's stream helper, which checks the order, puts it together."""
    state = ResponseStreamState(input_tools=omit, text_format=omit)
    for block in text[:-2].split("\n\n"):
        state.handle_event(EVENT.validate_json(block.split("data: ", 1)[1]))
    return state._completed_response


def usage(prompt: int, output: int, reasoning: int = 0, cached: int = 3) -> dict:
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": prompt + output,
    }


def without_ids(items: list[dict]) -> list[dict]:
    """Items without ids, which are there and differ."""
    ids = [item["id"] for item in items]
    assert len(set(ids)) == len(ids) and all(ids)
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


def message(text: str, status: str = "completed") -> dict:
    content = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "role": "assistant", "status": status, "content": [content]}


def reasoning(text: str) -> dict:
    return {
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "encrypted_content": None,
    }


def call(arguments: str, status: str = "completed") -> dict:
    return {"type": "function_call", "status": status, "name": "look", "arguments": arguments}


EVERYTHING = [reasoning("hm"), message("I look."), call('{"at": "é"}'), call('{"at": "b"}')]


async def rendered(server: FakeServer, **body: object) -> str:
    """The prompt that a body comes to."""
    response = await server.post(PATH, **body)
    assert response.status_code == 200, response.text
    ids = server.core.requests[-1].prompt_token_ids
    return server.context.renderer.tokenizer.decode(ids, skip_special_tokens=False)


def test_a_text() -> None:
    async def test(server: FakeServer) -> None:
        response = await server.post(PATH, input="hi", request_id="abc", user="u")
        assert response.headers["x-request-id"] == "resp-abc"
        body = checked(response)
        assert isinstance(body.pop("created_at"), int)
        assert isinstance(body.pop("completed_at"), int)
        assert without_ids(body.pop("output")) == [message("Grüße")]
        assert body == {
            "id": "resp-abc",
            "object": "response",
            "status": "completed",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "max_output_tokens": None,
            "max_tool_calls": None,
            "metadata": {},
            "model": MODEL,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "prompt_cache_key": None,
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": None,
            "service_tier": "default",
            "store": True,
            "temperature": 1.0,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": 0,
            "top_p": 1.0,
            "truncation": "disabled",
            "usage": usage(21, 8),
            "user": "u",
        }

    run(test, says("Grüße"), reasoning_parser="")


def test_everything_at_once() -> None:
    async def test(server: FakeServer) -> None:
        body = checked(await server.post(PATH, input="hi", tools=[TOOL]))
        assert without_ids(body["output"]) == EVERYTHING
        assert body["output"][2]["call_id"] != body["output"][3]["call_id"]
        assert body["output"][0]["id"].startswith("rs_")
        assert body["output"][1]["id"].startswith("msg_")
        assert body["output"][2]["id"].startswith("fc_")
        assert body["output"][2]["call_id"].startswith("call_")
        assert body["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        assert body["tools"][0].items() >= TOOL.items()

    run(test, says(ALL), max_model_len=2000)


def test_everything_streamed() -> None:
    async def test(server: FakeServer) -> None:
        body = {"input": "hi", "tools": [TOOL], "metadata": {"a": "b"}}
        text = (await server.post(PATH, **body, stream=True)).text
        events = parsed_events(text)
        kinds = [event["type"].removeprefix("response.") for event in events]
        once = [kind for i, kind in enumerate(kinds) if kinds[i - 1 : i] != [kind]]
        in_item = ["output_item.added", "content_part.added"]
        item_done = ["content_part.done", "output_item.done"]
        a_call = ["output_item.added", "function_call_arguments.delta"]
        a_call += ["function_call_arguments.done", "output_item.done"]
        assert once == [
            "created",
            "in_progress",
            *(*in_item, "reasoning_text.delta", "reasoning_text.done", *item_done),
            *(*in_item, "output_text.delta", "output_text.done", *item_done),
            *(*a_call, *a_call),
            "completed",
        ]
        deltas = [e for e in events if e["type"].endswith("arguments.delta")]
        assert len(deltas) > 4, "arguments come in pieces"
        final = events[-1]["response"]
        assert without_ids(final["output"]) == EVERYTHING
        assert final["metadata"] == {"a": "b"}
        for event in events[:2]:
            assert event["response"]["status"] == "in_progress"
            assert event["response"]["output"] == []
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == final["output"]
        added = [event for event in events if event["type"] == "response.output_item.added"]
        assert [event["output_index"] for event in added] == [0, 1, 2, 3]
        assert [event["item"]["id"] for event in added] == [item["id"] for item in done]
        assert accumulated(text).output_text == "I look."
        again = checked(await server.client.get(f"{PATH}/{final['id']}"))
        assert again == final

    run(test, says(ALL), max_model_len=2000)


def test_deltas_add_up() -> None:
    async def test(server: FakeServer) -> None:
        text = (await server.post(PATH, input="hi", tools=[TOOL], stream=True)).text
        whole: dict[int, str] = {}
        for event in parsed_events(text):
            if event["type"].endswith(".delta"):
                index = event["output_index"]
                whole[index] = whole.get(index, "") + event["delta"]
            elif event["type"].endswith(("_text.done", "arguments.done")):
                said = event.get("text", event.get("arguments"))
                assert whole[event["output_index"]] == said
                if "arguments" in event:
                    assert event["name"] == "look"
        assert whole == {0: "hm", 1: "I look.", 2: '{"at": "é"}', 3: '{"at": "b"}'}

    run(test, says(ALL), max_model_len=2000)


@pytest.mark.parametrize("stream", (False, True))
def test_an_answer_that_is_cut_off(stream: bool) -> None:
    async def test(server: FakeServer) -> None:
        response = await server.post(PATH, input="hi", max_output_tokens=12, stream=stream)
        if stream:
            last = parsed_events(response.text)[-1]
            assert last["type"] == "response.incomplete"
            body = last["response"]
        else:
            body = checked(response)
        assert body["status"] == "incomplete"
        assert body["incomplete_details"] == {"reason": "max_output_tokens"}
        assert without_ids(body["output"]) == [message("abcd", "incomplete")]
        assert body["completed_at"] is None

    run(test, plain("abcdef"))


@pytest.mark.parametrize("stream", (False, True))
def test_an_empty_answer_is_an_empty_message(stream: bool) -> None:
    async def test(server: FakeServer) -> None:
        response = await server.post(PATH, input="hi", stream=stream)
        body = parsed_events(response.text)[-1]["response"] if stream else checked(response)
        assert without_ids(body["output"]) == [message("")]

    run(test, says(""), reasoning_parser="")


@pytest.mark.parametrize("stream", (False, True))
@pytest.mark.parametrize("options", ({"include": ["message.output_text.logprobs"]}, {}))
def test_logprobs(stream: bool, options: dict) -> None:
    async def test(server: FakeServer) -> None:
        top = {} if options else {"top_logprobs": 2}
        response = await server.post(PATH, input="hi", stream=stream, **options, **top)
        body = parsed_events(response.text)[-1]["response"] if stream else checked(response)
        (part,) = body["output"][0]["content"]
        assert [entry["token"] for entry in part["logprobs"]] == ["a", "b", " the"]
        assert part["logprobs"][2]["bytes"] == [*b" the"]
        assert all(entry["logprob"] <= 0 for entry in part["logprobs"])
        assert all(len(e["top_logprobs"]) == (0 if options else 2) for e in part["logprobs"])
        if stream:
            deltas = [e for e in parsed_events(response.text) if e["type"].endswith("text.delta")]
            assert [entry for e in deltas for entry in e["logprobs"]] == part["logprobs"]

    run(test, lambda request: [97, 98, 258, 257], reasoning_parser="")


def test_options_reach_the_engine() -> None:
    async def test(server: FakeServer) -> None:
        options = {"temperature": 0.5, "top_p": 0.25, "seed": 7, "max_output_tokens": 9}
        body = checked(await server.post(PATH, input="hi", **options, top_k=3, cache_salt="s"))
        request = server.core.requests[-1]
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.25, 7)
        assert (sampling.max_tokens, sampling.top_k, request.cache_salt) == (9, 3, "s")
        assert (body["temperature"], body["top_p"], body["max_output_tokens"]) == (0.5, 0.25, 9)
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        text = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
        body = checked(await server.post(PATH, input="hi", text=text))
        assert "integer" in (server.core.requests[-1].grammar or "")
        assert body["text"] == text
        choice = {"type": "function", "name": "look"}
        body = checked(await server.post(PATH, input="hi", tools=[TOOL], tool_choice=choice))
        assert "look" in (server.core.requests[-1].grammar or "")
        assert body["tool_choice"] == choice

    run(test, says("x"), reasoning_parser="")


def test_the_response_says_what_was_asked() -> None:
    async def test(server: FakeServer) -> None:
        first = checked(await server.post(PATH, input="hi"))
        asked = {
            "instructions": "I",
            "max_output_tokens": 9,
            "metadata": {"a": "b"},
            "parallel_tool_calls": False,
            "previous_response_id": first["id"],
            "prompt_cache_key": "k",
            "safety_identifier": "s",
            "store": False,
            "temperature": 0.5,
            "text": {"format": {"type": "json_object"}},
            "tool_choice": "none",
            "top_logprobs": 2,
            "top_p": 0.5,
            "user": "u",
        }
        effort = {"reasoning": {"effort": "low"}}
        body = checked(await server.post(PATH, input="hi", tools=[TOOL], **asked, **effort))
        assert {name: body[name] for name in asked} == asked
        assert body["reasoning"] == {"effort": "low", "summary": None}

    run(test, plain("x"), max_model_len=2000)


def test_instructions_come_first_and_are_not_carried_over() -> None:
    async def test(server: FakeServer) -> None:
        first = await rendered(server, input="hi", instructions="Be kind.", request_id="one")
        assert first.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi")
        second = await rendered(server, input="and?", previous_response_id="resp-one")
        assert second == (
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
            "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
        )

    run(test, plain("yes"))


def test_a_conversation_goes_on_from_the_store_or_from_the_client() -> None:
    async def test(server: FakeServer) -> None:
        first = checked(await server.post(PATH, input="hi", tools=[TOOL]))
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "a tree"}
            for item in first["output"]
            if item["type"] == "function_call"
        ]
        assert len(results) == 2
        stored = await rendered(
            server, input=results, tools=[TOOL], previous_response_id=first["id"]
        )
        given = [{"role": "user", "content": "hi"}, *first["output"], *results]
        assert await rendered(server, input=given, tools=[TOOL], store=False) == stored
        assert stored.count("<|im_start|>tool\na tree[call_") == 2
        assert stored.count("<|im_start|>assistant") == 2, "calls belong to one message"
        assert "<think>hm</think>I look.<call_" in stored
        assert stored.count(':look {"at": "') == 2

    run(test, says(ALL), max_model_len=2000)


def test_store() -> None:
    async def test(server: FakeServer) -> None:
        kept = checked(await server.post(PATH, input="hi"))
        assert checked(await server.client.get(f"{PATH}/{kept['id']}")) == kept
        not_kept = checked(await server.post(PATH, input="hi", store=False))
        assert not_kept["store"] is False
        for response in (
            await server.client.get(f"{PATH}/{not_kept['id']}"),
            await server.client.delete(f"{PATH}/{not_kept['id']}"),
            await server.client.post(f"{PATH}/{not_kept['id']}/cancel"),
            await server.post(PATH, input="x", previous_response_id=not_kept["id"]),
        ):
            assert response.status_code == 404
            assert not_kept["id"] in response.json()["error"]["message"]
        again = await server.post(PATH, input="x", request_id=kept["id"].removeprefix("resp-"))
        assert (again.status_code, again.json()["error"]["param"]) == (400, "request_id")
        deleted = await server.client.delete(f"{PATH}/{kept['id']}")
        assert deleted.json() == {"id": kept["id"], "object": "response", "deleted": True}
        assert (await server.client.get(f"{PATH}/{kept['id']}")).status_code == 404

    run(test, plain("x"))


def test_the_store_has_a_limit() -> None:
    async def test(server: FakeServer) -> None:
        ids = []
        for _ in range(6):
            ids.append(checked(await server.post(PATH, input="x" * 50))["id"])
            await server.client.get(f"{PATH}/{ids[0]}")
        found = [(await server.client.get(f"{PATH}/{i}")).status_code for i in ids]
        assert found == [200, 404, 404, 404, 200, 200], "the least recently used go first"

    run(test, plain("x"), response_store_bytes=4500)


def test_a_server_that_keeps_nothing() -> None:
    async def test(server: FakeServer) -> None:
        body = checked(await server.post(PATH, input="x"))
        assert (await server.client.get(f"{PATH}/{body['id']}")).status_code == 404
        for name in ("store", "background"):
            response = await server.post(PATH, input="x", **{name: True})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == name

    run(test, plain("x"), response_store_bytes=0)


async def _ended(server: FakeServer, response_id: str) -> dict:
    while True:
        body = checked(await server.client.get(f"{PATH}/{response_id}"))
        if body["status"] not in ("queued", "in_progress"):
            return body
        await asyncio.sleep(0.001)


def test_background() -> None:
    async def test(server: FakeServer) -> None:
        server.core.allow_steps(0)
        options = {"cache_salt": "s", "priority": -3, "seed": 7}
        body = checked(await server.post(PATH, input="hi", background=True, **options))
        (request,) = server.core.requests
        assert (request.cache_salt, request.priority, request.sampling.seed) == ("s", -3, 7)
        assert (body["status"], body["output"], body["background"]) == ("queued", [], True)
        early = await server.post(PATH, input="x", previous_response_id=body["id"])
        assert (early.status_code, early.json()["error"]["param"]) == (400, "previous_response_id")
        server.core.allow_steps(10)
        while server.core.num_steps < 10:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        running = checked(await server.client.get(f"{PATH}/{body['id']}"))
        assert running["status"] == "in_progress"
        server.core.allow_steps(None)
        ended = await _ended(server, body["id"])
        assert ended["status"] == "completed"
        assert without_ids(ended["output"]) == [message("answer")]
        assert ended["created_at"] == body["created_at"]
        cancelled = checked(await server.client.post(f"{PATH}/{body['id']}/cancel"))
        assert cancelled == ended, "what has ended stays as it is"
        assert "answer" in await rendered(server, input="x", previous_response_id=body["id"])

    run(test, plain("answer"), scheduling_policy="priority")


def test_background_bad_requests_are_refused_at_once() -> None:
    async def test(server: FakeServer) -> None:
        for wrong, param in (
            ({"max_output_tokens": 1000}, "max_output_tokens"),
            ({"store": False}, "store"),
            ({"input": "x" * 500}, "input"),
        ):
            response = await server.post(PATH, **{"input": "x", "background": True} | wrong)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param

    run(test)


@pytest.mark.parametrize("end", ("cancel", "delete"))
def test_background_can_be_ended(end: str) -> None:
    async def test(server: FakeServer) -> None:
        server.core.allow_steps(12)
        body = checked(await server.post(PATH, input="hi", background=True))
        path = f"{PATH}/{body['id']}"
        while server.core.num_steps < 12:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        if end == "cancel":
            cancelled = checked(await server.client.post(f"{path}/cancel"))
            assert cancelled["status"] == "cancelled"
            assert without_ids(cancelled["output"]) == [message("abcd", "incomplete")]
            assert cancelled == checked(await server.client.post(f"{path}/cancel"))
            assert cancelled == checked(await server.client.get(path))
        else:
            assert (await server.client.delete(path)).status_code == 200
            assert (await server.client.get(path)).status_code == 404
        assert len(server.core.aborted) == 1
        assert server.core.running == {}

    run(test, plain("abcdefgh"))


def test_only_a_background_response_can_be_cancelled() -> None:
    async def test(server: FakeServer) -> None:
        body = checked(await server.post(PATH, input="hi"))
        response = await server.client.post(f"{PATH}/{body['id']}/cancel")
        assert response.status_code == 400
        assert "background" in response.json()["error"]["message"]

    run(test, plain("x"))


def test_background_streams_again() -> None:
    async def test(server: FakeServer) -> None:
        text = (await server.post(PATH, input="hi", background=True, stream=True)).text
        events = parsed_events(text)
        kinds = [event["type"] for event in events]
        assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
        assert [e["response"]["status"] for e in events[:3]] == ["queued", "queued", "in_progress"]
        assert accumulated(text).output_text == "abc"
        path = f"{PATH}/{events[0]['response']['id']}"
        assert (await server.client.get(f"{path}?stream=true")).text == text
        rest = (await server.client.get(f"{path}?stream=true&starting_after=4")).text
        assert text.endswith(rest)
        assert json.loads(rest.split("data: ")[1].split("\n")[0])["sequence_number"] == 5
        for query, param in (
            ("starting_after=4", "starting_after"),
            ("stream=true&starting_after=x", "starting_after"),
            ("stream=1", "stream"),
            ("include[]=message.output_text.logprobs", "include"),
            ("include_obfuscation=true", "include_obfuscation"),
        ):
            response = await server.client.get(f"{path}?{query}")
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        plain_one = checked(await server.post(PATH, input="hi", background=True))
        response = await server.client.get(f"{PATH}/{plain_one['id']}?stream=true")
        assert (response.status_code, response.json()["error"]["param"]) == (400, "stream")

    run(test, plain("abc"))


def test_a_client_that_leaves_does_not_end_a_background_stream() -> None:
    async def test(server: FakeServer) -> None:
        server.core.allow_steps(9)
        app = server.app
        body = {"input": "hi", "background": True, "stream": True, "request_id": "a"}
        body["model"] = MODEL
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}]
        left = asyncio.Event()

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if b"in_progress" in message.get("body", b""):
                left.set()

        scope = {"type": "http", "method": "POST", "path": PATH, "headers": [], "query_string": b""}
        await app(scope, receive, send)
        assert server.core.running != {}
        server.core.allow_steps(None)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            server.client = client
            assert (await _ended(server, f"resp-{body['request_id']}"))["status"] == "completed"
        assert server.core.aborted == []

    run(test, plain("abc"))


@pytest.mark.parametrize("stream", (False, True))
@pytest.mark.parametrize("background", (False, True))
def test_death_while_generating(stream: bool, background: bool) -> None:
    async def test(server: FakeServer) -> None:
        server.core.allow_steps(11)
        body = {"input": "hi", "stream": stream, "background": background}
        posted = asyncio.ensure_future(server.post(PATH, **body))
        while server.core.num_steps < 11:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        server.core.die("worker 0 was killed")
        response = await posted
        if not stream and not background:
            assert response.status_code == 503
            return
        if stream:
            last = parsed_events(response.text)[-1]
            assert last["type"] == "response.failed"
            failed = last["response"]
        else:
            failed = await _ended(server, response.json()["id"])
        assert failed["status"] == "failed"
        assert "worker 0 was killed" in failed["error"]["message"]
        assert failed["error"]["code"] == "server_error"
        assert without_ids(failed["output"]) == [message("abc", "incomplete")]

    run(test, plain("abcdef"))
