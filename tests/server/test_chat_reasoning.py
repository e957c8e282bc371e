"""Reasoning in chats: a field of its own, counted, left out on demand, and before a grammar."""

from typing import Any

import pytest

from tests.fakes_engine import FakeServer, says
from tests.server.chats import TIME, both, call, chat, run, streamed
from tests.server.test_chat_tools import is_match

THOUGHT = "<think>\nWell, é…\n</think>\n\n"


def test_reasoning_and_content() -> None:
    async def test(server: FakeServer) -> None:
        (choice,) = await both(server)
        assert choice["message"] == {
            "role": "assistant",
            "content": "Hello",
            "refusal": None,
            "reasoning": "Well, é…",
            "reasoning_content": "Well, é…",
        }
        assert choice["finish_reason"] == "stop"

    run(test, says(THOUGHT + "Hello"), reasoning_parser="qwen3")


@pytest.mark.parametrize("text", ("Hello", "", "x < y <thin"))
def test_no_reasoning(text: str) -> None:
    async def test(server: FakeServer) -> None:
        (choice,) = await both(server)
        assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
        details = (await chat(server))["usage"]["completion_tokens_details"]
        assert details == {"reasoning_tokens": 0}

    run(test, says(text), reasoning_parser="qwen3")


def test_reasoning_that_the_prompt_opens() -> None:
    async def test(server: FakeServer) -> None:
        (choice,) = await both(server, chat_template_kwargs={"think": True})
        assert choice["message"]["reasoning"] == "hm"
        assert choice["message"]["content"] == "Hello"
        (choice,) = await both(server)
        assert choice["message"]["content"] == "hm</think>Hello"

    run(test, says("hm</think>Hello"), reasoning_parser="qwen3")


def test_reasoning_can_be_left_out() -> None:
    async def test(server: FakeServer) -> None:
        (choice,) = await both(server, include_reasoning=False)
        assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
        answer = await streamed(server, include_reasoning=False)
        assert "é" not in str(answer["chunks"])
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0

    run(test, says(THOUGHT + "Hello"), reasoning_parser="qwen3")


@pytest.mark.parametrize("n", (1, 2))
def test_reasoning_tokens(n: int) -> None:
    """Its text's tokens, as the tokenizer has no token that ends it."""

    async def test(server: FakeServer) -> None:
        usage = (await chat(server, n=n))["usage"]
        num_tokens = n * len("Well, é…".encode())
        assert usage["completion_tokens_details"] == {"reasoning_tokens": num_tokens}
        assert (await streamed(server, n=n))["usage"] == usage

    run(test, says(THOUGHT + "Hello"), reasoning_parser="qwen3")


def test_without_a_parser_there_is_no_reasoning() -> None:
    async def test(server: FakeServer) -> None:
        (choice,) = await both(server)
        assert choice["message"]["content"] == THOUGHT + "Hello"
        assert "completion_tokens_details" not in (await chat(server))["usage"]

    run(test, says(THOUGHT + "Hello"))


def test_the_format_is_told_from_the_template() -> None:
    async def test(server: FakeServer) -> None:
        (choice,) = await both(server)
        assert choice["message"]["reasoning"] == "Well, é…"

    template = "{{ messages[0].content }}{# </think> #}"
    run(test, says(THOUGHT + "x"), chat_template=template, reasoning_parser="auto")


def test_reasoning_then_calls() -> None:
    async def test(server: FakeServer) -> None:
        (choice,) = await both(server, tools=[TIME])
        message = choice["message"]
        assert (message["reasoning"], message["content"]) == ("Well, é…", None)
        assert message["tool_calls"][0]["function"]["name"] == "time"
        assert choice["finish_reason"] == "tool_calls"

    options: dict[str, Any] = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    run(test, says(THOUGHT + call("time", "{}")), **options)


def test_a_grammar_begins_behind_the_reasoning() -> None:
    async def test(server: FakeServer) -> None:
        await chat(server, response_format={"type": "json_object"})
        grammar = server.core.requests[-1].grammar
        assert is_match(grammar, "<think>any {text}</think>\n\n{}")
        assert is_match(grammar, "{}")
        assert not is_match(grammar, "<think>any {text}</think>\n\nHello")
        options = {"tools": [TIME], "tool_choice": "required"}
        await chat(server, **options, chat_template_kwargs={"think": True})
        grammar = server.core.requests[-1].grammar
        assert is_match(grammar, f"any text</think>\n\n{call('time', '{}')}")
        assert not is_match(grammar, call("time", "{}"))
        strict = [TIME | {"function": TIME["function"] | {"strict": True}}]
        await chat(server, tools=strict)
        grammar = server.core.requests[-1].grammar
        assert is_match(grammar, "<think>any</think>\n\nHello")
        assert is_match(grammar, f"<think>any</think>\n\nHello {call('time', '{}')}")
        assert not is_match(grammar, f"<think>any</think>\n\nHello {call('time', '1')}")

    run(test, says("{}"), tool_call_parser="hermes", reasoning_parser="qwen3")
