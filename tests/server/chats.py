"""What tests of chats share: posting, and reading whole and streamed answers alike."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from jaxserve.messages import EngineCoreRequest
from tests.fakes_engine import FakeServer, fake_server

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}"
    "{% if documents %}<documents>{{ documents | tojson }}</documents>\n{% endif %}"
    "{% if reasoning_effort %}<effort>{{ reasoning_effort }}</effort>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'king' %}{{ raise_exception('no kings') }}{% endif %}"
    "[{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}] "
    "{% if trim %}{{ m.content | trim }}{% else %}{{ m.content }}{% endif %}"
    "{% if m.reasoning %}<thought>{{ m.reasoning }}</thought>{% endif %}"
    "{% if m.tool_calls %}<calls>{{ m.tool_calls | tojson }}</calls>{% endif %}"
    "{% if m.tool_call_id %}<id>{{ m.tool_call_id }}</id>{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% if think %}<think>\n{% endif %}{% endif %}"
)

type Script = Callable[[EngineCoreRequest], Iterable[int]]


def run(
    test: Callable[[FakeServer], Awaitable[None]],
    *args: Any,
    timeout_s: float = 20,
    **config: Any,
) -> None:
    """Runs `test(server)` over a fake server whose template takes everything."""

    async def main() -> None:
        options = {"chat_template": TEMPLATE, "max_model_len": 4000} | config
        async with fake_server(*args, **options) as server:
            await asyncio.wait_for(test(server), timeout_s)

    asyncio.run(main())


def call(name: str, arguments: str) -> str:
    """A call as hermes writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def prompt_of(server: FakeServer) -> str:
    """The prompt of the last request that the engine core got."""
    token_ids = server.core.requests[-1].prompt_token_ids
    return server.context.renderer.tokenizer.decode(token_ids, skip_special_tokens=False)


async def chat(server: FakeServer, **options: Any) -> dict[str, Any]:
    """The answer of a chat, whole."""
    response = await server.post(CHAT, **{"messages": HI} | options)
    assert response.status_code == 200, response.text
    return response.json()


async def error(server: FakeServer, **options: Any) -> dict[str, Any]:
    """The error of a chat that never reaches the engine core."""
    num_requests = len(server.core.requests)
    response = await server.post(CHAT, **{"messages": HI} | options)
    assert response.status_code == 400, response.text
    assert len(server.core.requests) == num_requests
    return response.json()["error"]


async def streamed(server: FakeServer, **options: Any) -> dict[str, Any]:
    """The answer of a chat, put together from its stream, in the form of a whole one."""
    body = {"messages": HI, "stream": True, "stream_options": {"include_usage": True}} | options
    response = await server.post(CHAT, **body)
    assert response.status_code == 200, response.text
    *lines, done = response.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    *chunks, last = chunks
    assert last["choices"] == []
    answer = {"usage": last["usage"], "chunks": chunks, "choices": []}
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        index = choice["index"]
        if index not in choices:
            assert choice["delta"] == {"role": choice["delta"]["role"], "content": ""}
            message = {"role": choice["delta"]["role"], "content": "", "refusal": None}
            choices[index] = {"index": index, "message": message, "finish_reason": None}
            continue
        assert choices[index]["finish_reason"] is None, "nothing comes behind the finish"
        _add_delta(choices[index]["message"], choice["delta"])
        if choice["logprobs"] is not None:
            logprobs = choices[index].setdefault("logprobs", {"content": [], "refusal": None})
            logprobs["content"] += choice["logprobs"]["content"]
        if "token_ids" in choice:
            choices[index].setdefault("token_ids", []).extend(choice["token_ids"])
        choices[index]["finish_reason"] = choice["finish_reason"]
        choices[index]["stop_reason"] = choice.get("stop_reason")
    for choice in choices.values():
        choice.setdefault("logprobs", None)
        if "tool_calls" in choice["message"] and not choice["message"]["content"]:
            choice["message"]["content"] = None
    answer["choices"] = [choices[index] for index in sorted(choices)]
    return answer


def _add_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    assert "role" not in delta
    for name in ("content", "reasoning", "reasoning_content"):
        if name in delta:
            assert delta[name]
            message[name] = message.get(name, "") + delta[name]
    for piece in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if "id" in piece:
            assert piece["index"] == len(calls)
            assert piece["function"]["arguments"] == ""
            calls.append(
                {"id": piece["id"], "type": piece["type"], "function": dict(piece["function"])}
            )
        else:
            assert set(piece) == {"index", "function"}
            assert set(piece["function"]) == {"arguments"}
            assert piece["function"]["arguments"]
            function = calls[piece["index"]]["function"]
            function["arguments"] += piece["function"]["arguments"]


async def both(server: FakeServer, **options: Any) -> list[dict[str, Any]]:
    """The choices of a chat, whole; streamed they are the same, but for the ids of calls."""
    whole, pieces = await chat(server, **options), await streamed(server, **options)
    assert whole["usage"] == pieces["usage"]
    assert _without_ids(whole["choices"]) == _without_ids(pieces["choices"])
    return whole["choices"]


def _without_ids(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    copy = json.loads(json.dumps(choices))
    for choice in copy:
        for one in choice["message"].get("tool_calls", ()):
            del one["id"]
    return copy
