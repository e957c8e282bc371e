"""The anthropic SDK: messages, streams, tools, parse(), count_tokens, errors."""

import json

import pytest

from tests.clients.shared import (
    MODEL,
    QUESTION,
    TIME_SCHEMA,
    WEATHER_SCHEMA,
    Stay,
    is_time,
    is_weather,
)

anthropic = pytest.importorskip("anthropic", reason="the package anthropic is not installed")
pytestmark = pytest.mark.client("anthropic")

# The SDK has no argument for the temperature any more.
GREEDY = {
    "model": MODEL,
    "messages": QUESTION,
    "max_tokens": 24,
    "extra_body": {"temperature": 0},
}
LONG = GREEDY | {"max_tokens": 100}
TOOLS = [
    {"name": "weather", "description": "The weather of a city.", "input_schema": WEATHER_SCHEMA},
    {"name": "time", "description": "The time in a city.", "input_schema": TIME_SCHEMA},
]
IS_VALID = {"weather": is_weather, "time": is_time}


@pytest.fixture(scope="module")
def client(base_url):
    with anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def answer(client):
    return client.messages.create(**GREEDY)


def test_create(answer):
    assert answer.type == "message" and answer.role == "assistant" and answer.model == MODEL
    (block,) = answer.content
    assert block.type == "text" and "Paris" in block.text
    assert answer.stop_reason == "end_turn" and answer.stop_sequence is None
    assert answer.usage.input_tokens >= 0 and answer.usage.output_tokens > 3
    assert answer._request_id


def test_a_system_prompt_and_blocks(client, answer):
    question = {"role": "user", "content": [{"type": "text", "text": "Who are you?"}]}
    pirate = {"type": "text", "text": "You are a pirate.", "cache_control": {"type": "ephemeral"}}
    other = client.messages.create(**GREEDY | {"messages": [question]}, system=[pirate])
    assert other.content[0].text not in ("", answer.content[0].text)


def test_why_it_stopped(client, answer):
    cut = client.messages.create(**GREEDY | {"max_tokens": 2})
    assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 2
    word = answer.content[0].text.split()[1]
    stopped = client.messages.create(**GREEDY, stop_sequences=["never occurs", word])
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == word
    assert word not in stopped.content[0].text


def test_stream(client, answer):
    with client.messages.stream(**GREEDY) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(texts) > 3 and "".join(texts) == answer.content[0].text
    assert final.content[0].text == answer.content[0].text
    assert final.stop_reason == answer.stop_reason
    total = final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)
    assert total == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert final.usage.output_tokens == answer.usage.output_tokens


def test_events_of_a_stream(client):
    types = [event.type for event in client.messages.create(**GREEDY, stream=True)]
    assert types[:2] == ["message_start", "content_block_start"]
    assert types[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(types[2:-3]) == {"content_block_delta"}


def test_a_tool_and_its_answer(client):
    first = client.messages.create(**LONG, tools=TOOLS, tool_choice={"type": "any"})
    calls = [block for block in first.content if block.type == "tool_use"]
    assert first.stop_reason == "tool_use" and calls
    assert all(IS_VALID[call.name](call.input) for call in calls), calls
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": "It is sunny in Paris."}
        for call in calls
    ]
    again = client.messages.create(
        **GREEDY
        | {"messages": [*QUESTION, first.to_param(), {"role": "user", "content": results}]},
        tools=TOOLS,
        tool_choice={"type": "none"},
    )
    assert again.content[0].type == "text" and again.content[0].text


def test_a_named_tool_in_a_stream(client):
    asked = LONG | {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "time"}}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    (call,) = (block for block in final.content if block.type == "tool_use")
    assert call.name == "time" and is_time(call.input)
    assert json.loads("".join(parts)) == call.input
    assert [block.input for block in whole.content if block.type == "tool_use"] == [call.input]
    assert final.stop_reason == "tool_use"


def test_parse(client):
    parsed = client.messages.parse(**LONG, output_format=Stay)
    assert isinstance(parsed.parsed_output, Stay)
    with client.messages.stream(**LONG, output_format=Stay) as stream:
        assert stream.get_final_message().parsed_output == parsed.parsed_output


def test_count_tokens(client, answer):
    asked = {"model": MODEL, "messages": QUESTION}
    counted = client.messages.count_tokens(**asked).input_tokens
    usage = answer.usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    longer = client.messages.count_tokens(**asked, system="You are a pirate.")
    assert longer.input_tokens != counted


def test_errors_are_the_sdks_exceptions(client):
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**GREEDY | {"max_tokens": 0})
    assert caught.value.type == "invalid_request_error"
    assert "max_tokens" in caught.value.api_message
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**GREEDY | {"model": "other"})
    assert caught.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError):
        client.messages.count_tokens(model=MODEL, messages=[])


def test_a_stream_that_is_left(client, server):
    asked = GREEDY | {"max_tokens": 900, "extra_body": {"temperature": 1, "ignore_eos": True}}
    with client.messages.stream(**asked) as stream:
        next(iter(stream.text_stream))
        server.wait_metric("num_requests_running", 1)
    server.wait_metric("num_requests_running", 0, 5)
