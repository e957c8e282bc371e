"""The openai SDK: chat, tools, parse(), completions, embeddings, models, errors, cancellation."""

import asyncio
import base64
import json

import numpy as np
import pytest

from tests.clients.shared import (
    MODEL,
    QUESTION,
    TIME_SCHEMA,
    WEATHER_SCHEMA,
    Trip,
    is_time,
    is_weather,
)

openai = pytest.importorskip("openai", reason="the package openai is not installed")
pytestmark = pytest.mark.client("openai")

GREEDY = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_completion_tokens": 24}


def function(name: str, schema: dict) -> dict:
    return {
        "type": "function",
        "function": {"name": name, "description": f"The {name} of a city.", "parameters": schema},
    }


TOOLS = [function("weather", WEATHER_SCHEMA), function("time", TIME_SCHEMA)]
IS_VALID = {"weather": is_weather, "time": is_time}


@pytest.fixture(scope="module")
def client(base_url):
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


# --- chat ----------------------------------------------------------------------------------------


def test_chat(client):
    answer = client.chat.completions.create(**GREEDY)
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and "Paris" in choice.message.content
    assert choice.message.tool_calls is None and choice.message.refusal is None
    assert choice.finish_reason == "stop"
    usage = answer.usage
    assert usage.prompt_tokens > 10 and usage.completion_tokens > 3
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert answer.object == "chat.completion" and answer.model == MODEL


def test_chat_stream(client):
    whole = client.chat.completions.create(**GREEDY)
    stream = client.chat.completions.create(
        **GREEDY, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    first, last = chunks[0], chunks[-1]
    assert first.choices[0].delta.role == "assistant"
    assert last.choices == [] and last.usage == whole.usage
    choices = [chunk.choices[0] for chunk in chunks[:-1]]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert "".join(c.delta.content or "" for c in choices) == whole.choices[0].message.content
    assert [c.finish_reason for c in choices if c.finish_reason] == ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1 and len(choices) > 4


def test_chat_stream_helper(client):
    whole = client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=2)
    with client.chat.completions.stream(**GREEDY, logprobs=True, top_logprobs=2) as stream:
        types = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.done"} <= types
    assert final.choices[0].message.content == whole.choices[0].message.content
    got, wanted = (c.choices[0].logprobs.content for c in (final, whole))
    assert [entry.token for entry in got] == [entry.token for entry in wanted]
    assert all(len(entry.top_logprobs) == 2 for entry in got)
    assert [e.logprob for e in got] == pytest.approx([e.logprob for e in wanted], abs=1e-4)


def test_several_choices_and_a_seed(client):
    asked = GREEDY | {"temperature": 1.0, "n": 3, "seed": 7}
    first, second = (client.chat.completions.create(**asked) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in second.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]


# --- tools ---------------------------------------------------------------------------------------


def test_a_required_tool_and_its_answer(client):
    answer = client.chat.completions.create(
        **GREEDY | {"max_completion_tokens": 100}, tools=TOOLS, tool_choice="required"
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    for call in choice.message.tool_calls:
        assert call.type == "function" and call.id
        assert IS_VALID[call.function.name](json.loads(call.function.arguments)), call
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "It is sunny in Paris."}
        for call in choice.message.tool_calls
    ]
    again = client.chat.completions.create(
        **GREEDY | {"messages": [*QUESTION, choice.message, *results]}, tools=TOOLS
    )
    assert again.choices[0].message.content


@pytest.mark.parametrize("name", ["weather", "time"])
def test_a_named_tool(client, name):
    answer = client.chat.completions.create(
        **GREEDY | {"max_completion_tokens": 100},
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": name}},
        parallel_tool_calls=False,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == name
    assert IS_VALID[name](json.loads(call.function.arguments))


def test_tools_in_a_stream(client):
    asked = GREEDY | {"max_completion_tokens": 100, "tools": TOOLS, "tool_choice": "required"}
    whole = client.chat.completions.create(**asked).choices[0].message.tool_calls
    chunks = [c for c in client.chat.completions.create(**asked, stream=True) if c.choices]
    deltas = [d for c in chunks for d in c.choices[0].delta.tool_calls or []]
    calls: dict[int, list] = {}
    for delta in deltas:
        calls.setdefault(delta.index, []).append(delta)
    assert list(calls) == list(range(len(whole)))
    for call, parts in zip(whole, calls.values(), strict=True):
        assert parts[0].id and parts[0].type == "function"
        assert parts[0].function.name == call.function.name
        assert all(part.function.name is None for part in parts[1:])
        arguments = "".join(part.function.arguments or "" for part in parts)
        assert json.loads(arguments) == json.loads(call.function.arguments)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0].message.tool_calls
    assert [call.function.name for call in final] == [call.function.name for call in whole]
    assert len(deltas) > 2 * len(whole), "arguments came in one piece"


# --- parse() -------------------------------------------------------------------------------------


def test_parse_with_pydantic(client):
    answer = client.chat.completions.parse(
        **GREEDY | {"max_completion_tokens": 100}, response_format=Trip
    )
    assert isinstance(answer.choices[0].message.parsed, Trip)
    with client.chat.completions.stream(
        **GREEDY | {"max_completion_tokens": 100}, response_format=Trip
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed


def test_parse_a_pydantic_tool(client):
    answer = client.chat.completions.parse(
        **GREEDY | {"max_completion_tokens": 100},
        tools=[openai.pydantic_function_tool(Trip)],
        parallel_tool_calls=False,
        tool_choice="required",
    )
    for call in answer.choices[0].message.tool_calls:
        assert isinstance(call.function.parsed_arguments, Trip)


def test_parse_what_was_cut(client):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**GREEDY | {"max_completion_tokens": 2}, response_format=Trip)


# --- completions, embeddings, models -------------------------------------------------------------


def test_completions(client):
    answer = client.completions.create(
        model=MODEL, prompt=["The capital of France is", "One, two,"], max_tokens=4, temperature=0,
        logprobs=2, echo=True,
    )  # fmt: skip
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice, prompt in zip(answer.choices, ("The capital", "One, two,"), strict=True):
        assert choice.text.startswith(prompt)
        logprobs = choice.logprobs
        assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
        assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset)
        assert all(value <= 0 for value in logprobs.token_logprobs[1:])
        for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
            assert choice.text[offset:].startswith(token)
    stream = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=4, temperature=0, stream=True
    )
    text = "".join(chunk.choices[0].text for chunk in stream)
    assert answer.choices[0].text == "The capital of France is" + text


def vectors(answer) -> np.ndarray:
    assert [entry.index for entry in answer.data] == list(range(len(answer.data)))
    return np.array([entry.embedding for entry in answer.data])


def test_embeddings(client):
    texts = ["A cat sleeps.", "Ein Hund bellt.", "A cat sleeps."]
    asked = {"model": MODEL, "input": texts}
    by_default = vectors(client.embeddings.create(**asked))  # the SDK asks for base64
    as_floats = vectors(client.embeddings.create(**asked, encoding_format="float"))
    raw = client.embeddings.create(**asked, encoding_format="base64")
    as_base64 = [np.frombuffer(base64.b64decode(e.embedding), "<f4") for e in raw.data]
    assert by_default.shape == (3, 576)
    assert np.allclose(by_default, as_floats, atol=1e-6)
    assert np.allclose(by_default, as_base64, atol=1e-6)
    assert np.allclose(np.linalg.norm(by_default, axis=1), 1, atol=1e-5)
    assert np.allclose(by_default[0], by_default[2], atol=1e-5)
    assert by_default[0] @ by_default[1] < 0.999
    assert raw.usage.prompt_tokens == raw.usage.total_tokens > 6


def test_shorter_embeddings(client):
    whole = vectors(client.embeddings.create(model=MODEL, input="A cat sleeps."))[0]
    cut = vectors(client.embeddings.create(model=MODEL, input="A cat sleeps.", dimensions=64))[0]
    assert cut.shape == (64,)
    assert np.allclose(cut, whole[:64] / np.linalg.norm(whole[:64]), atol=1e-5)


def test_models(client):
    (listed,) = client.models.list().data
    assert listed.id == MODEL and listed.object == "model" and listed.owned_by
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no/such-model")


# --- errors and cancellation ---------------------------------------------------------------------


def test_errors_are_the_sdks_exceptions(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**GREEDY | {"temperature": -1})
    assert caught.value.param == "temperature" and caught.value.status_code == 400
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(**GREEDY | {"model": "other"})
    assert "other" in caught.value.message and caught.value.request_id
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**GREEDY, response_format=schema)


def test_async_streams_that_are_left(base_url, server):
    asked = GREEDY | {"max_completion_tokens": 800, "temperature": 1, "stream": True}

    async def leave_early(client, how: str) -> None:
        stream = await client.chat.completions.create(**asked, extra_body={"ignore_eos": True})
        num_chunks = 0
        async for _ in stream:
            num_chunks += 1
            if num_chunks == 3 and how == "close":
                await stream.close()
                return
        raise AssertionError("the stream came to its end")

    async def run() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{base_url}/v1", api_key="none", max_retries=0
        ) as client:
            closed = [asyncio.create_task(leave_early(client, "close")) for _ in range(3)]
            others = [asyncio.create_task(leave_early(client, "cancel")) for _ in range(3)]
            await asyncio.gather(*closed)
            await asyncio.to_thread(server.wait_metric, "num_requests_running", 3)
            for task in others:
                task.cancel()
            ended = await asyncio.gather(*others, return_exceptions=True)
            assert all(isinstance(error, asyncio.CancelledError) for error in ended), ended
            await asyncio.to_thread(server.wait_metric, "num_requests_running", 0, 5)
            answer = await client.chat.completions.create(**GREEDY)
            assert "Paris" in answer.choices[0].message.content

    asyncio.run(run())
    assert server.metric("kv_cache_usage_perc") == 0
