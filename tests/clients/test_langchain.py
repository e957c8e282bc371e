"""langchain-openai: chat, stream, structured output, embeddings, and a step of an agent."""

from typing import Literal

import pytest
from pydantic import BaseModel

from tests.clients.shared import MODEL, QUESTION, Trip

langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
messages = pytest.importorskip("langchain_core.messages", reason="langchain-core is not installed")
tools = pytest.importorskip("langchain_core.tools", reason="langchain-core is not installed")
pytestmark = pytest.mark.client("langchain-openai")


@pytest.fixture(scope="module")
def access(base_url):
    return {"base_url": f"{base_url}/v1", "api_key": "none", "model": MODEL, "max_retries": 0}


@pytest.fixture(scope="module")
def chat(access):
    return langchain.ChatOpenAI(**access, temperature=0, max_tokens=100)


def test_chat_and_stream(chat):
    answer = chat.invoke(QUESTION)
    assert "Paris" in answer.content
    chunks = list(chat.stream(QUESTION, stream_usage=True))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.content == answer.content and len(chunks) > 4
    assert total.usage_metadata["total_tokens"] == answer.usage_metadata["total_tokens"]
    assert total.response_metadata["finish_reason"] == "stop"


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat, method):
    # Strict: without additionalProperties false a small model finds ever more of them.
    trip = chat.with_structured_output(Trip, method=method, strict=True).invoke(QUESTION)
    assert isinstance(trip, Trip)


class Place(BaseModel):
    """Where to look."""

    city: Literal["Paris", "Oslo", "Rome"]
    celsius: bool


@tools.tool(args_schema=Place)
def weather(city: str, celsius: bool) -> str:
    """Weather of a city."""
    return f"It is sunny in {city}, at 20 {'Celsius' if celsius else 'something else'}."


@pytest.mark.parametrize("use_responses_api", [False, True], ids=["chat", "responses"])
def test_a_step_of_an_agent(access, use_responses_api):
    """The model calls a tool, the tool runs, the model speaks."""
    chat = langchain.ChatOpenAI(
        **access, temperature=0, max_tokens=100, use_responses_api=use_responses_api
    )
    history = [messages.HumanMessage("How is the weather in Paris?")]
    history.append(chat.bind_tools([weather], tool_choice="any", strict=True).invoke(history))
    calls = history[-1].tool_calls
    assert calls
    for call in calls:
        history.append(weather.invoke(call))
        assert isinstance(history[-1], messages.ToolMessage)
        assert history[-1].content.startswith(f"It is sunny in {call['args']['city']}")
    answer = chat.bind_tools([weather], tool_choice="none").invoke(history)
    assert answer.text and not answer.tool_calls


def test_tool_calls_in_a_stream(chat):
    bound = chat.bind_tools([Trip], tool_choice="Trip", strict=True)
    whole = bound.invoke(QUESTION)
    chunks = list(bound.stream(QUESTION))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert [call["args"] for call in total.tool_calls] == [c["args"] for c in whole.tool_calls]
    assert total.tool_calls[0]["name"] == "Trip"
    assert sum(len(chunk.tool_call_chunks) for chunk in chunks) > 2


def test_embeddings(access):
    # Otherwise it sends the token ids of OpenAI's own models.
    embeddings = langchain.OpenAIEmbeddings(**access, check_embedding_ctx_length=False)
    first, second = embeddings.embed_documents(["A cat sleeps.", "Ein Hund bellt."])
    assert len(first) == len(second) == 576 and first != second
    assert embeddings.embed_query("A cat sleeps.") == pytest.approx(first, abs=1e-5)
