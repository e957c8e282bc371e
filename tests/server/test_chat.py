"""Bodies of chats: messages of every kind, and what each option does to prompt and answer."""

import asyncio
import time
from typing import Any

import pytest

from tests.fakes_engine import FakeServer, echoes, says
from tests.server.chats import CHAT, HI, TIME, both, chat, error, prompt_of, run, streamed


@pytest.mark.parametrize(
    ("messages", "prompt"),
    (
        ([{"role": "tool", "content": "x", "tool_call_id": "c1"}], "[tool] x<id>c1</id>"),
        ([{"role": "critic", "content": "x"}], "[critic] x"),
        ([{"role": "user", "content": "x", "name": "Ann"}], "[user Ann] x"),
        (
            [{"role": "assistant", "content": "x", "reasoning": "hm", "refusal": None}],
            "[assistant] x<thought>hm</thought>",
        ),
        (
            [{"role": "assistant", "reasoning_content": "hm"}],
            "[assistant] <thought>hm</thought>",
        ),
        (
            [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "f", "arguments": '{"é": [1]}'},
                        },
                        {"function": {"name": "g", "arguments": ""}},
                        {"function": {"name": "h", "arguments": {"a": 1}}},
                    ],
                }
            ],
            '[assistant] <calls>[{"id": "c1", "type": "function", "function": '
            '{"name": "f", "arguments": {"é": [1]}}}, {"type": "function", "function": '
            '{"name": "g", "arguments": {}}}, {"type": "function", "function": '
            '{"name": "h", "arguments": {"a": 1}}}]</calls>',
        ),
        (
            [
                {
                    "role": "assistant",
                    "content": [
                        {"type": "text", "text": "a"},
                        {"type": "refusal", "refusal": "b"},
                    ],
                }
            ],
            "[assistant] a\nb",
        ),
    ),
)
def test_messages(messages: list[dict], prompt: str) -> None:
    async def test(server: FakeServer) -> None:
        await chat(server, messages=messages)
        assert prompt_of(server) == f"{prompt}<|im_end|>\n[assistant] "

    run(test, says("x"))


def _call(**fields: Any) -> list[dict]:
    call = {"function": {"name": "f", "arguments": "{}"}} | fields
    return [{"role": "assistant", "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("messages", "param", "text"),
    (
        ([{"role": "king", "content": "x"}], "messages", "no kings"),
        (_call(type="custom"), "messages[0].tool_calls[0].type", "function"),
        (
            _call(function={"name": "f", "arguments": "{'a': 1}"}),
            "messages[0].tool_calls[0].function.arguments",
            "JSON object",
        ),
        (
            _call(function={"name": "f", "arguments": "[1]"}),
            "messages[0].tool_calls[0].function.arguments",
            "JSON object",
        ),
        ([_call()[0] | {"role": "user", "content": "x"}], "messages[0].tool_calls", "assistant"),
        ([{"role": "assistant"}], "messages[0].content", "string"),
        ([{"role": "user", "content": "x", "tool_call_id": "c"}], "messages[0].tool_call_id", ""),
        ([{"role": "user", "content": "x", "reasoning": "r"}], "messages[0].reasoning", ""),
        (
            [{"role": "assistant", "content": "x", "reasoning": "r", "reasoning_content": "s"}],
            "messages[0].reasoning_content",
            "differ",
        ),
        (
            [{"role": "assistant", "content": "x", "function_call": {"name": "f"}}],
            "messages[0].function_call",
            "tool_calls",
        ),
        ([{"role": "assistant", "content": "x", "audio": {}}], "messages[0].audio", "text only"),
        ([{"role": "assistant", "content": "x", "refusal": "no"}], "messages[0].refusal", "text"),
        (
            [{"role": "user", "content": [{"type": "input_audio"}]}],
            "messages[0].content[0].type",
            "input_audio",
        ),
    ),
)
def test_bad_messages(messages: list[dict], param: str, text: str) -> None:
    async def test(server: FakeServer) -> None:
        found = await error(server, messages=messages)
        assert found["param"] == param
        assert text in found["message"]

    run(test)


PREFILL = [*HI, {"role": "assistant", "content": " The answer: "}]


@pytest.mark.parametrize(
    ("options", "prompt"),
    (
        ({}, "[user] hi<|im_end|>\n[assistant]  The answer: "),
        ({"chat_template_kwargs": {"trim": True}}, "[user] hi<|im_end|>\n[assistant] The answer:"),
        ({"add_generation_prompt": False}, "[user] hi<|im_end|>\n[assistant]  The answer: "),
    ),
)
def test_the_last_message_is_continued(options: dict, prompt: str) -> None:
    async def test(server: FakeServer) -> None:
        options["continue_final_message"] = True
        (choice,) = await both(server, messages=PREFILL, **options)
        assert prompt_of(server) == prompt
        assert choice["message"] == {"role": "assistant", "content": "42", "refusal": None}
        (choice,) = await both(server, messages=PREFILL, echo=True, **options)
        assert choice["message"]["content"] == " The answer: 42"

    run(test, says("42"))


def test_echo_needs_a_message_of_the_answers_role() -> None:
    async def test(server: FakeServer) -> None:
        (choice,) = await both(server, echo=True)
        assert choice["message"]["content"] == "42"
        (choice,) = await both(server, echo=True, add_generation_prompt=False)
        assert choice["message"] == {"role": "user", "content": "hi42", "refusal": None}

    run(test, says("42"))


@pytest.mark.parametrize(
    ("options", "param"),
    (
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        (
            {
                "continue_final_message": True,
                "messages": [{"role": "assistant", "content": "", "reasoning": "x"}],
            },
            "messages[0].content",
        ),
        ({"chat_template_kwargs": {"nobody": 1}}, "chat_template_kwargs.nobody"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
        ({"chat_template_kwargs": {"documents": []}}, "chat_template_kwargs.documents"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ),
)
def test_bad_options(options: dict, param: str) -> None:
    async def test(server: FakeServer) -> None:
        assert (await error(server, **options))["param"] == param

    run(test)


def test_old_names_of_tools_are_told_the_new_ones() -> None:
    async def test(server: FakeServer) -> None:
        assert "Use tools" in (await error(server, functions=[{"name": "f"}]))["message"]
        message = (await error(server, function_call={"name": "f"}))["message"]
        assert "Use tool_choice" in message

    run(test)


def test_what_the_template_is_given() -> None:
    async def test(server: FakeServer) -> None:
        await chat(server, documents=[{"title": "t", "text": "é"}], reasoning_effort="low")
        assert prompt_of(server) == (
            '<documents>[{"title": "t", "text": "é"}]</documents>\n<effort>low</effort>\n'
            "[user] hi<|im_end|>\n[assistant] "
        )
        await chat(server, documents=[], chat_template_kwargs={"think": True})
        assert prompt_of(server) == "[user] hi<|im_end|>\n[assistant] <think>\n"

    run(test, says("x"))


@pytest.mark.parametrize(
    ("option", "value"),
    (
        ("documents", [{"text": "x"}]),
        ("reasoning_effort", "low"),
        ("reasoning_effort", "none"),
        ("tools", [TIME]),
    ),
)
def test_what_the_template_does_not_read_is_refused(option: str, value: Any) -> None:
    async def test(server: FakeServer) -> None:
        found = await error(server, **{option: value})
        assert found["param"] == option
        assert "has no effect" in found["message"]

    run(test, chat_template="{{ messages[0].content }}", tool_call_parser="hermes")


def test_no_effort_turns_thinking_off_where_a_template_calls_it_so() -> None:
    async def test(server: FakeServer) -> None:
        await chat(server, reasoning_effort="none")
        assert prompt_of(server) == "hi"
        await chat(server)
        assert prompt_of(server) == "hi<think>"
        assert (await error(server, reasoning_effort="high"))["param"] == "reasoning_effort"

    template = "{{ messages[0].content }}{% if enable_thinking is not false %}<think>{% endif %}"
    run(test, says("x"), chat_template=template)


def test_default_template_kwargs() -> None:
    async def test(server: FakeServer) -> None:
        await chat(server)
        assert prompt_of(server).endswith("<think>\n")
        await chat(server, chat_template_kwargs={"think": False})
        assert prompt_of(server).endswith("[assistant] ")

    run(test, says("x"), default_chat_template_kwargs='{"think": true}')


def test_a_template_of_the_request() -> None:
    async def test(server: FakeServer) -> None:
        template = "{{ messages[0].content }}{% if tools %}{{ tools[0].function.name }}{% endif %}"
        await chat(server, chat_template=template)
        assert prompt_of(server) == "hi"
        tools = [TIME]
        await chat(server, chat_template=template, tools=tools, tool_choice="required")
        assert prompt_of(server) == "hitime"
        for bad, param, text in (
            ("{% if %}", "chat_template", "not valid"),
            ("{{ raise_exception('never') }}", "messages", "never"),
            ("{{ 1 + 'a' }}", "messages", "unsupported"),
        ):
            found = await error(server, chat_template=bad)
            assert (found["param"], text in found["message"]) == (param, True), found
        kwargs = {"a": 1}
        found = await error(server, chat_template=template, chat_template_kwargs=kwargs)
        assert found["param"] == "chat_template_kwargs.a"

    run(test, says("x"), trust_request_chat_template=True)


def test_a_template_that_never_ends_holds_nobody_up() -> None:
    async def test(server: FakeServer) -> None:
        server.context.renderer._templates._timeout_s = 1.0
        begin_s = time.monotonic()
        loops = "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4
        slow = [
            asyncio.ensure_future(server.post(CHAT, messages=HI, chat_template=loops))
            for _ in range(3)
        ]
        await asyncio.sleep(0.2)
        for _ in range(5):
            await chat(server)
        assert time.monotonic() - begin_s < 0.9, "the others waited"
        for response in await asyncio.gather(*slow):
            assert response.json()["error"]["param"] == "chat_template"
        await chat(server, chat_template="{{ messages[0].content }}")

    run(test, says("x"), trust_request_chat_template=True)


@pytest.mark.parametrize("top", (0, 2, -1))
def test_logprobs(top: int) -> None:
    async def test(server: FakeServer) -> None:
        (choice,) = await both(server, logprobs=True, top_logprobs=top, return_token_ids=True)
        entries = choice["logprobs"]["content"]
        assert "".join(entry["token"] for entry in entries[:2]) == "ab"
        assert len(entries) == len(choice["token_ids"]) == 3
        assert server.core.requests[-1].sampling.logprobs == top
        if top >= 0:
            assert all(len(entry["top_logprobs"]) == top for entry in entries)

    run(test, says("ab"), max_logprobs=-1)


def test_token_ids() -> None:
    async def test(server: FakeServer) -> None:
        whole = await chat(server, return_token_ids=True)
        pieces = await streamed(server, return_token_ids=True)
        prompt = server.core.requests[-1].prompt_token_ids
        assert whole["prompt_token_ids"] == prompt
        assert pieces["chunks"][0]["prompt_token_ids"] == prompt
        assert all("prompt_token_ids" not in chunk for chunk in pieces["chunks"][1:])
        assert whole["choices"][0]["token_ids"] == pieces["choices"][0]["token_ids"]

    run(test)


def test_prompt_logprobs_and_truncation() -> None:
    async def test(server: FakeServer) -> None:
        answer = await chat(server, prompt_logprobs=1, truncate_prompt_tokens=4)
        assert len(server.core.requests[-1].prompt_token_ids) == 4
        assert len(answer["prompt_logprobs"]) == 4
        assert answer["usage"]["prompt_tokens"] == 4
        long = [{"role": "user", "content": "x" * 50_000}]
        assert (await error(server, messages=long))["param"] == "messages"
        await chat(server, messages=long, truncate_prompt_tokens=-1, max_tokens=10)
        assert len(server.core.requests[-1].prompt_token_ids) == 4000 - 10

    run(test, echoes)


def test_continuous_usage() -> None:
    async def test(server: FakeServer) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        answer = await streamed(server, n=2, stream_options=options)
        counts = [chunk["usage"]["completion_tokens"] for chunk in answer["chunks"]]
        assert counts == [1] * 2 * 2 + [2] * 2 + [3] * 2
        assert answer["usage"]["completion_tokens"] == 6

    run(test, says("ab"))
