"""litellm: completion and streaming with api_base, tools, structured output, embeddings, errors."""

import json
import os
import re

import pytest

from tests.clients.shared import MODEL, QUESTION, WEATHER_SCHEMA, Trip, is_weather

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch the prices of models
litellm = pytest.importorskip("litellm", reason="the package litellm is not installed")
pytestmark = pytest.mark.client("litellm")

TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER_SCHEMA}}


@pytest.fixture(scope="module", params=["hosted_vllm", "openai"])
def access(request, base_url):
    return {
        "model": f"{request.param}/{MODEL}",
        "api_base": f"{base_url}/v1",
        "api_key": "none",
        "num_retries": 0,
    }


@pytest.fixture(scope="module")
def greedy(access):
    return access | {"messages": QUESTION, "temperature": 0, "max_tokens": 24}


def test_completion_and_stream(greedy):
    answer = litellm.completion(**greedy)
    text = answer.choices[0].message.content
    assert "Paris" in text and answer.choices[0].finish_reason == "stop"
    chunks = list(litellm.completion(**greedy, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    built = litellm.stream_chunk_builder(chunks)
    assert built.choices[0].finish_reason == "stop"
    assert built.usage.completion_tokens == answer.usage.completion_tokens
    assert built.usage.prompt_tokens == answer.usage.prompt_tokens


def test_logprobs(greedy):
    answer = litellm.completion(**greedy, logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    assert len(entries) >= answer.usage.completion_tokens - 1
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in entries)


def test_a_required_tool(greedy):
    answer = litellm.completion(
        **greedy | {"max_tokens": 100},
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    (choice,) = answer.choices
    call = choice.message.tool_calls[0].function
    assert call.name == "weather"
    if greedy["model"].startswith("hosted_vllm"):
        # It drops additionalProperties, and then a small model finds ever more of them.
        assert choice.finish_reason in ("tool_calls", "length")
        assert re.match(r'\{\s*"city":\s*"(Paris|Oslo|Rome)",\s*"celsius":', call.arguments)
    else:
        assert choice.finish_reason == "tool_calls" and is_weather(json.loads(call.arguments))


def test_structured_output(greedy):
    answer = litellm.completion(**greedy | {"max_tokens": 100}, response_format=Trip)
    assert Trip.model_validate_json(answer.choices[0].message.content)


def test_embedding(access):
    answer = litellm.embedding(**access, input=["A cat sleeps.", "Ein Hund bellt."])
    assert [len(entry["embedding"]) for entry in answer.data] == [576, 576]


def test_errors(greedy):
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**greedy | {"temperature": -1})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**greedy | {"model": greedy["model"] + "x"})
