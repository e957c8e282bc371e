"""The openai SDK's responses: create, stream, retrieve, cancel, conversations, tools, parse()."""

import json
import time

import pytest

from tests.clients.shared import MODEL, WEATHER_SCHEMA, Trip, is_weather

openai = pytest.importorskip("openai", reason="the package openai is not installed")
pytestmark = pytest.mark.client("openai")

GREEDY = {
    "model": MODEL,
    "input": "What is the capital of France?",
    "temperature": 0,
    "max_output_tokens": 24,
}
TOOL = {"type": "function", "name": "weather", "parameters": WEATHER_SCHEMA, "strict": True}


@pytest.fixture(scope="module")
def client(base_url):
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def answer(client):
    return client.responses.create(**GREEDY)


def test_create(answer):
    assert answer.object == "response" and answer.status == "completed" and answer.error is None
    (message,) = answer.output
    assert message.type == "message" and message.role == "assistant"
    assert "Paris" in answer.output_text
    usage = answer.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens >= 0
    assert usage.output_tokens_details.reasoning_tokens == 0


def test_the_types_of_the_sdk_hold(answer):
    """Built without validation by the SDK; with it, every field must be what its type says."""
    again = openai.types.responses.Response.model_validate(json.loads(answer.to_json()))
    assert again.output_text == answer.output_text


def test_cut_by_length(client):
    answer = client.responses.create(**GREEDY | {"max_output_tokens": 2})
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 2


def test_stream(client, answer):
    events = list(client.responses.create(**GREEDY, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    types = [event.type for event in events]
    assert types[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert types[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(types[4:-4]) == {"response.output_text.delta"}
    assert "".join(event.delta for event in events[4:-4]) == answer.output_text
    assert events[-1].response.usage.output_tokens == answer.usage.output_tokens


def test_stream_helper(client, answer):
    with client.responses.stream(**GREEDY) as stream:
        deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == answer.output_text


def test_retrieve_and_delete(client, answer):
    assert client.responses.retrieve(answer.id).output_text == answer.output_text
    not_kept = client.responses.create(**GREEDY, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(not_kept.id)
    kept = client.responses.create(**GREEDY)
    client.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept.id)


def test_a_conversation(client, answer):
    """By the id of what came before, and by giving it all back: the same tokens."""
    by_id = client.responses.create(
        **GREEDY | {"input": "And of Norway?"}, previous_response_id=answer.id
    )
    whole = [
        {"role": "user", "content": GREEDY["input"]},
        *answer.output,
        {"role": "user", "content": [{"type": "input_text", "text": "And of Norway?"}]},
    ]
    by_items = client.responses.create(**GREEDY | {"input": whole})
    alone = client.responses.create(**GREEDY | {"input": "And of Norway?"})
    assert by_id.output_text == by_items.output_text
    assert by_id.usage.input_tokens == by_items.usage.input_tokens > alone.usage.input_tokens
    assert by_id.previous_response_id == answer.id


def test_instructions(client, answer):
    other = client.responses.create(**GREEDY, instructions="Answer in one word. Be a pirate.")
    assert other.instructions.startswith("Answer in one word")
    assert other.usage.input_tokens != answer.usage.input_tokens


def test_parse(client):
    parsed = client.responses.parse(**GREEDY | {"max_output_tokens": 100}, text_format=Trip)
    assert isinstance(parsed.output_parsed, Trip)
    with client.responses.stream(**GREEDY | {"max_output_tokens": 100}, text_format=Trip) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed


def test_a_tool_and_its_answer(client):
    one_call = {"tools": [TOOL], "parallel_tool_calls": False}
    asked = GREEDY | one_call | {"max_output_tokens": 100}
    first = client.responses.create(**asked, tool_choice="required")
    calls = [item for item in first.output if item.type == "function_call"]
    assert calls and all(
        call.name == "weather" and is_weather(json.loads(call.arguments)) for call in calls
    )
    with client.responses.stream(**asked, tool_choice="required") as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == "".join(call.arguments for call in calls)
    assert [item.arguments for item in final.output] == [call.arguments for call in calls]
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "It is sunny."}
        for call in calls
    ]
    history = [{"role": "user", "content": GREEDY["input"]}, *first.output, *results]
    again = client.responses.create(**asked | {"input": history}, tool_choice="none")
    assert again.output_text


def test_cancel(client, server):
    running = client.responses.create(
        **GREEDY | {"max_output_tokens": 900, "temperature": 1},
        background=True,
        extra_body={"ignore_eos": True},
    )
    assert running.status in ("queued", "in_progress")
    server.wait_metric("num_requests_running", 1)
    started_s = time.monotonic()
    while (status := client.responses.retrieve(running.id).status) == "queued":  # no token yet
        assert time.monotonic() - started_s < 10
        time.sleep(0.02)
    assert status == "in_progress"
    assert client.responses.cancel(running.id).status == "cancelled"
    server.wait_metric("num_requests_running", 0, 5)
    assert client.responses.retrieve(running.id).status == "cancelled"


def test_errors(client):
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_unknown")
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_unknown")
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**GREEDY | {"max_output_tokens": 0})
    assert caught.value.param == "max_output_tokens"
