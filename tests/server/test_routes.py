"""Every route over a scripted engine core, whole and streamed."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from jaxserve import __version__
from jaxserve.messages import EngineCoreOutput, FinishReason
from jaxserve.server.protocol.chat import UNSUPPORTED_IN_CHAT, ChatCompletionRequest
from tests.fakes_engine import EOS, MODEL, FakeServer, echoes, fake_server, says

HI = [{"role": "user", "content": "hi"}]
HI_PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
NUM_HI_TOKENS = 21


def run(test: Callable[..., Awaitable[None]], *args: Any, **config: object) -> None:
    """Runs `test(server)` over a fake server."""

    async def main() -> None:
        async with fake_server(*args, **config) as server:
            await asyncio.wait_for(test(server), 10)

    asyncio.run(main())


def events(text: str) -> list[Any]:
    """The JSON of each server-sent event; the last one must be [DONE]."""
    assert text.endswith("\n\n")
    lines = text[:-2].split("\n\n")
    assert all(line.startswith("data: ") for line in lines), text
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def usage(prompt: int, completion: int, cached: int = 3) -> dict:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def test_chat() -> None:
    async def test(server: FakeServer) -> None:
        response = await server.post("/v1/chat/completions", messages=HI, request_id="abc")
        assert response.status_code == 200
        assert response.headers["content-type"] == "application/json"
        assert response.headers["x-request-id"] == "chatcmpl-abc"
        body = response.json()
        assert isinstance(body.pop("created"), int)
        assert body == {
            "id": "chatcmpl-abc",
            "object": "chat.completion",
            "model": MODEL,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "Grüße 😀", "refusal": None},
                    "finish_reason": "stop",
                    "stop_reason": None,
                    "logprobs": None,
                }
            ],
            "usage": usage(NUM_HI_TOKENS, len("Grüße 😀".encode()) + 1),
        }
        (request,) = server.core.requests
        assert request.prompt_token_ids[:5] == [256, *b"user"]
        assert request.sampling.max_tokens == 200 - NUM_HI_TOKENS
        assert request.sampling.stop_token_ids == (EOS,)
        assert server.core.aborted == []

    run(test, says("Grüße 😀"))


def test_chat_stream() -> None:
    async def test(server: FakeServer) -> None:
        response = await server.post(
            "/v1/chat/completions",
            messages=HI,
            stream=True,
            stream_options={"include_usage": True},
            request_id="abc",
        )
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-request-id"] == "chatcmpl-abc"
        chunks = events(response.text)
        created = chunks[0]["created"]
        same = {"id": "chatcmpl-abc", "object": "chat.completion.chunk", "model": MODEL}
        assert all(chunk.items() >= (same | {"created": created}).items() for chunk in chunks)
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == usage(NUM_HI_TOKENS, 5)
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"]]
        assert [choice["delta"] for choice in choices] == [
            {"role": "assistant", "content": ""},
            {"content": "é"},
            {"content": '"'},
            {"content": "\n"},
            {},
        ]
        assert [c["finish_reason"] for c in choices] == [None] * 4 + ["stop"]
        assert all(c["index"] == 0 and c["logprobs"] is None for c in choices)

    run(test, says('é"\n'))


def test_stream_without_usage() -> None:
    async def test(server: FakeServer) -> None:
        response = await server.post("/v1/completions", prompt="hi", stream=True)
        chunks = events(response.text)
        assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)

    run(test)


def test_completion() -> None:
    async def test(server: FakeServer) -> None:
        response = await server.post("/v1/completions", prompt="hi the", max_tokens=9)
        body = response.json()
        assert body["object"] == "text_completion"
        assert body["id"].startswith("cmpl-")
        assert body["choices"] == [
            {
                "index": 0,
                "text": "hi the",
                "finish_reason": "stop",
                "stop_reason": None,
                "logprobs": None,
            }
        ]
        assert body["usage"] == usage(3, 4)

    run(test)


def test_completion_default_is_16_tokens() -> None:
    async def test(server: FakeServer) -> None:
        body = (await server.post("/v1/completions", prompt="hi")).json()
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 16

    run(test, says("x" * 99))


@pytest.mark.parametrize(
    ("prompt", "texts"),
    (
        ("ab", ["ab"]),
        (["ab", "cd"], ["ab", "cd"]),
        ([97, 98, 256], ["ab"]),
        ([[97], [98, 99]], ["a", "bc"]),
    ),
)
@pytest.mark.parametrize("n", (1, 2))
@pytest.mark.parametrize("stream", (False, True))
def test_prompts_of_every_kind(prompt: object, texts: list[str], n: int, stream: bool) -> None:
    async def test(server: FakeServer) -> None:
        response = await server.post(
            "/v1/completions", prompt=prompt, n=n, stream=stream, seed=7, max_tokens=20
        )
        expected = [text for text in texts for _ in range(n)]
        if stream:
            chunks = events(response.text)
            found = [""] * len(expected)
            for chunk in chunks:
                for choice in chunk["choices"]:
                    found[choice["index"]] += choice["text"]
        else:
            choices = response.json()["choices"]
            assert [choice["index"] for choice in choices] == list(range(len(expected)))
            found = [choice["text"] for choice in choices]
        assert found == expected
        seeds = [request.sampling.seed for request in server.core.requests]
        assert seeds == [7 + i for _ in texts for i in range(n)]

    run(test)


def test_usage_counts_each_prompt_once_and_every_choice() -> None:
    async def test(server: FakeServer) -> None:
        request = {"prompt": ["abc", "d"], "n": 2, "max_tokens": 20}
        whole = (await server.post("/v1/completions", **request)).json()
        assert whole["usage"] == usage(4, 2 * 4 + 2 * 2, cached=6)
        streamed = await server.post(
            "/v1/completions", **request, stream=True, stream_options={"include_usage": True}
        )
        assert events(streamed.text)[-1]["usage"] == whole["usage"]

    run(test)


def test_streamed_choices_begin_with_their_role() -> None:
    async def test(server: FakeServer) -> None:
        response = await server.post("/v1/chat/completions", messages=HI, n=2, stream=True)
        first: dict[int, dict] = {}
        for chunk in events(response.text):
            for choice in chunk["choices"]:
                first.setdefault(choice["index"], choice["delta"])
        assert first == {i: {"role": "assistant", "content": ""} for i in range(2)}

    run(test, says("ab"))


@pytest.mark.parametrize("stream", (False, True))
def test_an_answer_without_tokens(stream: bool) -> None:
    async def test(server: FakeServer) -> None:
        response = await server.post("/v1/chat/completions", messages=HI, stream=stream)
        if stream:
            choices = [chunk["choices"][0] for chunk in events(response.text)]
            assert [c["delta"] for c in choices] == [{"role": "assistant", "content": ""}, {}]
            assert choices[-1]["finish_reason"] == "stop"
        else:
            assert response.json()["choices"][0]["message"]["content"] == ""

    run(test, says(""))


@pytest.mark.parametrize("stream", (False, True))
@pytest.mark.parametrize(
    ("options", "text", "reason", "stop_reason"),
    (
        ({"stop": "lo w"}, "hel", "stop", "lo w"),
        ({"stop": ["zzz", "h"]}, "", "stop", "h"),
        ({"stop": "wor", "include_stop_str_in_output": True}, "hello wor", "stop", "wor"),
        ({"stop": "l", "min_tokens": 5}, "hello wor", "stop", "l"),
        ({"stop": "world!"}, "hello world", "stop", None),
        ({"stop_token_ids": [ord("w")]}, "hello ", "stop", ord("w")),
        ({"max_tokens": 4}, "hell", "length", None),
    ),
)
def test_how_a_text_ends(
    options: dict, text: str, reason: str, stop_reason: object, stream: bool
) -> None:
    async def test(server: FakeServer) -> None:
        request = {"prompt": "x", "max_tokens": 50, "stream": stream} | options
        response = await server.post("/v1/completions", **request)
        choices = (
            [chunk["choices"][0] for chunk in events(response.text)]
            if stream
            else response.json()["choices"]
        )
        assert "".join(choice["text"] for choice in choices) == text
        assert choices[-1]["finish_reason"] == reason
        assert choices[-1]["stop_reason"] == stop_reason
        was_stopped_here = isinstance(stop_reason, str)
        assert bool(server.core.aborted) == was_stopped_here

    run(test, says("hello world"))


def test_ignore_eos() -> None:
    async def test(server: FakeServer) -> None:
        request = {"prompt": "x", "max_tokens": 5, "ignore_eos": True}
        kept = await server.post("/v1/completions", **request, skip_special_tokens=False)
        assert kept.json()["choices"][0]["text"] == "a<|im_end|>b<|im_end|>c"
        skipped = await server.post("/v1/completions", **request)
        assert skipped.json()["choices"][0]["text"] == "abc"

    run(test, lambda request: [97, EOS, 98, EOS, 99, 100])


def test_chat_options_reach_the_template() -> None:
    async def test(server: FakeServer) -> None:
        async def rendered(messages: list[dict], **options: object) -> str:
            await server.post("/v1/chat/completions", messages=messages, max_tokens=1, **options)
            ids = server.core.requests[-1].prompt_token_ids
            return server.context.renderer.tokenizer.decode(ids, skip_special_tokens=False)

        assert await rendered(HI) == HI_PROMPT
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert "user\na\nb<|im_end|>" in await rendered([{"role": "user", "content": parts}])
        without = HI_PROMPT.removesuffix("<|im_start|>assistant\n")
        assert await rendered(HI, add_generation_prompt=False) == without
        assert (await rendered(HI, chat_template_kwargs={"shout": True})).endswith("!")
        named = [{"role": "user", "content": "x", "name": "Ann"}]
        assert "user (Ann)\nx" in await rendered(named)

    run(test)


def test_null_is_the_same_as_absent() -> None:
    async def test(server: FakeServer) -> None:
        names = set(ChatCompletionRequest.__struct_fields__) | set(UNSUPPORTED_IN_CHAT)
        names -= {"model", "messages"}
        response = await server.post("/v1/chat/completions", messages=HI, **dict.fromkeys(names))
        assert response.status_code == 200, response.text

    run(test)


def test_neutral_values_of_what_is_not_implemented_are_accepted() -> None:
    async def test(server: FakeServer) -> None:
        neutral = {
            "tools": [],
            "tool_choice": "none",
            "response_format": {"type": "text"},
            "logprobs": False,
            "top_logprobs": 0,
            "frequency_penalty": 0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1,
            "logit_bias": {},
            "store": False,
            "metadata": {"a": "b"},
            "an_unknown_field": {"x": [1]},
        }
        chat = await server.post("/v1/chat/completions", messages=HI, **neutral)
        assert chat.status_code == 200, chat.text
        completion = await server.post(
            "/v1/completions", prompt="x", echo=False, suffix="", best_of=1
        )
        assert completion.status_code == 200, completion.text

    run(test)


def test_salt_and_priority_reach_the_engine_core() -> None:
    async def test(server: FakeServer) -> None:
        await server.post("/v1/completions", prompt="x", cache_salt="s", priority=-3)
        (request,) = server.core.requests
        assert (request.cache_salt, request.priority) == ("s", -3)

    run(test, scheduling_policy="priority")


def test_max_completion_tokens_is_max_tokens() -> None:
    async def test(server: FakeServer) -> None:
        for options in (
            {"max_completion_tokens": 7},
            {"max_completion_tokens": 7, "max_tokens": 7},
        ):
            await server.post("/v1/chat/completions", messages=HI, **options)
            assert server.core.requests[-1].sampling.max_tokens == 7

    run(test)


def test_models_version_and_health() -> None:
    async def test(server: FakeServer) -> None:
        models = (await server.client.get("/v1/models")).json()
        assert models["object"] == "list"
        (card,) = models["data"]
        assert card["id"] == "org/model"
        assert card["max_model_len"] == 200
        assert (await server.client.get("/v1/models/org/model")).json() == card
        assert (await server.client.get("/v1/models/other")).status_code == 404
        assert (await server.client.get("/version")).json() == {"version": __version__}
        health = await server.client.get("/health")
        assert (health.status_code, health.json()) == (200, {"status": "ok"})
        assert (await server.client.head("/health")).status_code == 200

    run(test, served_model_name="org/model")


def test_metrics() -> None:
    async def test(server: FakeServer) -> None:
        await server.post("/v1/completions", prompt="abc", n=2)
        response = await server.client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        lines = response.text.replace('engine="0",', "").splitlines()
        for name, value in (
            ("num_requests_running", 0),
            ("num_requests_waiting", 2),
            ("kv_cache_usage_perc", 0.25),
            ("prompt_tokens_total", 6),
            ("generation_tokens_total", 8),
            ("num_preemptions_total", 4),
            ("prefix_cache_queries_total", 50),
            ("prefix_cache_hits_total", 6),
            ("compiles_after_ready_total", 1),
            ("time_to_first_token_seconds_count", 2),
            ("inter_token_latency_seconds_count", 6),
            ("e2e_request_latency_seconds_count", 2),
        ):
            assert f'jaxserve:{name}{{model_name="tiny"}} {float(value)}' in lines, name
        reason = 'finished_reason="stop",model_name="tiny"'
        assert f"jaxserve:request_success_total{{{reason}}} 2.0" in lines

    run(test)


def test_reset_prefix_cache() -> None:
    async def test(server: FakeServer) -> None:
        assert (await server.client.post("/reset_prefix_cache")).status_code == 200
        server.core.can_reset = False
        assert (await server.client.post("/reset_prefix_cache")).status_code == 409

    run(test)


def test_api_key() -> None:
    async def test(server: FakeServer) -> None:
        async def status(path: str, key: str | None) -> int:
            headers = [] if key is None else [(b"authorization", key.encode())]
            return (await server.client.get(path, headers=headers)).status_code

        assert await status("/v1/models", None) == 401
        assert await status("/v1/models", "Bearer wrong") == 401
        assert await status("/v1/models", "Basic key") == 401
        assert await status("/v1/models", "Bearer ключ") == 401
        assert await status("/v1/models", "Bearer key") == 200
        assert await status("/v1/models", "bearer key") == 200
        for path in ("/health", "/version", "/metrics"):
            assert await status(path, None) == 200
        reset = await server.client.post("/reset_prefix_cache")
        assert reset.status_code == 401
        assert reset.json()["error"]["code"] == "invalid_api_key"

    run(test, api_key=("key",))


@pytest.mark.parametrize("stream", (False, True))
def test_death_while_generating(stream: bool) -> None:
    async def test(server: FakeServer) -> None:
        server.core.allow_steps(3)
        posted = asyncio.ensure_future(
            server.post("/v1/completions", prompt="abcdef", stream=stream)
        )
        while server.core.num_steps < 3:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        server.core.die("worker 0 was killed by signal 9")
        response = await posted
        if stream:
            assert response.status_code == 200
            *pieces, last, end = response.text.split("\n\n")
            assert "".join(json.loads(p[6:])["choices"][0]["text"] for p in pieces) == "abc"
            assert end == ""
            error = json.loads(last[6:])["error"]
        else:
            assert response.status_code == 503
            error = response.json()["error"]
        assert "worker 0 was killed by signal 9" in error["message"]
        assert error["code"] == "engine_dead"
        for later in (
            await server.client.get("/health"),
            await server.post("/v1/completions", prompt="x", stream=stream),
        ):
            assert later.status_code == 503
            assert "worker 0 was killed by signal 9" in later.json()["error"]["message"]

    run(test, echoes)


@pytest.mark.parametrize("stream", (False, True))
def test_a_request_that_the_engine_aborts_fails(stream: bool) -> None:
    """Nobody's client aborted it, so it must not look complete; nor as if a retry would help."""

    async def test(server: FakeServer) -> None:
        server.core.allow_steps(1)
        posted = asyncio.ensure_future(server.post("/v1/completions", prompt="ab", stream=stream))
        while server.core.num_steps < 1:
            await asyncio.sleep(0)
        output = EngineCoreOutput("1", [], FinishReason.ABORT)
        server.core._answers.append(server.core._outputs([output]))
        server.core._changed.set()
        response = await posted
        assert "aborted" in response.text
        assert response.status_code == (200 if stream else 400)

    run(test)


def test_concurrent_requests_do_not_mix() -> None:
    async def test(server: FakeServer) -> None:
        async def ask(i: int) -> None:
            text = f"<{i}>" * (i % 5 + 1)
            response = await server.post(
                "/v1/completions", prompt=text, stream=bool(i % 2), max_tokens=60
            )
            if i % 2:
                chunks = events(response.text)
                found = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            else:
                found = response.json()["choices"][0]["text"]
            assert found == text

        await asyncio.gather(*(ask(i) for i in range(60)))

    run(test)


def test_rendering_does_not_run_on_the_event_loop() -> None:
    async def test(server: FakeServer) -> None:
        tokenizer = server.context.renderer.tokenizer
        threads = []
        encode = tokenizer.encode

        def spying_encode(text: str, *, add_special_tokens: bool) -> list[int]:
            threads.append(threading.current_thread())
            return encode(text, add_special_tokens=add_special_tokens)

        tokenizer.encode = spying_encode
        await server.post("/v1/chat/completions", messages=HI)
        await server.post("/v1/completions", prompt=["a", "b"])
        assert len(threads) == 3
        assert threading.main_thread() not in threads

    run(test)
