"""Mutated bodies of chats with every option: never a 5xx."""

import asyncio
import json
import random
from typing import Any

from tests.fakes_engine import MODEL, FakeServer, echoes
from tests.server.chats import CHAT, HI, TIME, WEATHER, chat, run
from tests.server.test_bad_input import _mutate

STRICT = {"type": "function", "function": TIME["function"] | {"strict": True}}
CALL = {"id": "c1", "function": {"name": "weather", "arguments": '{"city": "x"}'}}
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "pattern": "^a+$"},
        "b": {"type": "array", "items": {"$ref": "#/$defs/q"}, "maxItems": 2},
        "c": {"anyOf": [{"type": "null"}, {"type": "number", "minimum": 1}]},
    },
    "$defs": {"q": {"enum": ["é", 1, None]}},
}
BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "x", "name": "n"},
        *HI,
        {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sun"}]},
    ],
    "reasoning_effort": "low",
    "include_reasoning": True,
    "echo": True,
    "documents": [{"a": "b"}],
    "chat_template_kwargs": {"think": True},
    "logprobs": True,
    "top_logprobs": 2,
    "return_token_ids": True,
    "n": 2,
    "max_tokens": 5,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
ALLOWED = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "time"}}]}
STREAM = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
BODIES = (
    BODY | {"response_format": FORMAT, "tools": [WEATHER, STRICT]} | STREAM,
    BODY | {"tools": [WEATHER, STRICT], "tool_choice": "required", "parallel_tool_calls": False},
    BODY
    | {
        "tools": [WEATHER, STRICT],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED},
    },
    BODY | {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}} | STREAM,
    BODY | {"structured_outputs": {"grammar": 'start: "x" | /a+/'}},
    BODY
    | {
        "messages": [*HI, {"role": "assistant", "content": "x"}],
        "continue_final_message": True,
        "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}{{ think }}{{ documents"
        " }}{{ reasoning_effort }}",
    },
)


def test_no_body_gives_a_500() -> None:
    async def test(server: FakeServer) -> None:
        counts: dict[int, int] = {}
        for body in BODIES:
            response = await server.client.post(CHAT, json=body)
            assert response.status_code == 200, response.text
        for seed in range(150):
            rng = random.Random(seed)
            value: Any = rng.choice(BODIES)
            for _ in range(rng.choice((1, 1, 2, 4))):
                value = _mutate(rng, value)
            data = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()
            response = await asyncio.wait_for(server.client.post(CHAT, content=data), 20)
            status = response.status_code
            assert status in (200, 400, 404), (seed, data, response.text)
            if status != 200:
                assert response.json()["error"]["message"], (seed, data)
            counts[status] = counts.get(status, 0) + 1
        assert min(counts[200], counts[400]) > 15, counts
        await chat(server)

    options: dict[str, Any] = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    run(test, echoes, timeout_s=120, trust_request_chat_template=True, **options)
