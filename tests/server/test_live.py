"""Over real sockets: the openai SDK, disconnects, slow readers, death and shutdown mid-stream."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tests.fakes_engine import MODEL, says
from tests.server.live import Live, live_server, run

HI: Any = [{"role": "user", "content": "hi"}]


def test_the_openai_sdk() -> None:
    async def test(live: Live) -> None:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="key") as client:
            models = await client.models.list()
            assert [model.id for model in models.data] == [MODEL]
            chat = await client.chat.completions.create(model=MODEL, messages=HI)
            assert chat.choices[0].message.content == "Grüße 😀"
            assert chat.choices[0].finish_reason == "stop"
            assert chat.usage is not None
            assert chat.usage.completion_tokens == len("Grüße 😀".encode()) + 1
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=HI,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"top_k": 3},
            )
            chunks = [chunk async for chunk in stream]
            deltas = [c.choices[0].delta for c in chunks if c.choices]
            assert deltas[0].role == "assistant"
            assert "".join(delta.content or "" for delta in deltas) == "Grüße 😀"
            assert chunks[-1].usage == chat.usage
            assert live.core.requests[-1].sampling.top_k == 3
            completion = await client.completions.create(
                model=MODEL, prompt=["a", "b"], n=2, max_tokens=3, stop=["zz"]
            )
            assert [c.text for c in completion.choices] == ["Gr\ufffd"] * 4
            assert [c.index for c in completion.choices] == [0, 1, 2, 3]
            pieces = await client.completions.create(model=MODEL, prompt="a", stream=True)
            assert "".join([p.choices[0].text async for p in pieces]) == "Grüße 😀"
            with pytest.raises(openai.BadRequestError) as bad:
                await client.chat.completions.create(model=MODEL, messages=HI, temperature=-1)
            assert bad.value.param == "temperature"
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model="other", messages=HI)
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="no") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()

    run(test, says("Grüße 😀"), api_key=("key",))


def test_pieces_arrive_while_the_rest_is_generated() -> None:
    async def test(live: Live) -> None:
        live.core.allow_steps(2)
        reader, _ = await live.connect("/v1/completions", prompt="abcd", stream=True)
        await reader.readuntil(b'"text":"b"')
        assert len(live.core.running) == 1
        live.core.allow_steps(None)
        await reader.readuntil(b"[DONE]")

    run(test)


@pytest.mark.parametrize("stream", (False, True))
@pytest.mark.parametrize("num_steps", (0, 3))
def test_a_client_that_goes_away_aborts_its_choices(stream: bool, num_steps: int) -> None:
    """Before the first token and later; others go on."""

    async def test(live: Live) -> None:
        live.core.allow_steps(num_steps)
        _, writer = await live.connect("/v1/completions", prompt="a" * 40, n=2, stream=stream)
        await live.until(lambda: len(live.core.running) == 2)
        other_reader, _ = await live.connect(
            "/v1/completions", prompt="xyz", max_tokens=50, request_id="other"
        )
        await live.until(lambda: live.core.num_steps == num_steps and len(live.core.requests) == 3)
        writer.close()
        await live.until(lambda: live.core.aborted)
        assert sorted(live.core.aborted) == ["1", "2"]
        assert list(live.core.running) == ["3"]
        live.core.allow_steps(None)
        assert b"xyz" in await other_reader.readuntil(b'"text":"xyz"')
        metrics = live.context.metrics.render().decode()
        assert 'finished_reason="abort",model_name="tiny"} 2.0' in metrics
        assert 'num_requests_running{engine="0",model_name="tiny"} 0.0' in metrics

    run(test)


def test_an_abort_comes_within_a_step() -> None:
    async def test(live: Live) -> None:
        reader, writer = await live.connect(
            "/v1/completions", prompt="a", max_tokens=180, stream=True
        )
        await reader.readuntil(b'"text":"x"')
        num_steps = live.core.num_steps
        writer.close()
        await live.until(lambda: live.core.aborted)
        assert live.core.num_steps <= num_steps + 2

    run(test, says("x" * 500), step_s=0.03)


def test_a_client_that_does_not_read_holds_nobody_up() -> None:
    """Its text piles up merged while others stream; then it gets everything."""
    text = "0123456789abcdef" * 4000

    async def test(live: Live) -> None:
        reader, writer = await live.connect(
            "/v1/completions", prompt="a", max_tokens=64_000, stream=True
        )
        transport: Any = writer.transport
        transport.pause_reading()
        await live.until(lambda: live.core.num_steps > 500)
        async with httpx.AsyncClient(base_url=live.url) as client:
            body = {"model": MODEL, "prompt": "b", "max_tokens": 5}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        await live.until(lambda: not live.core.running)
        transport.resume_reading()
        data = b""
        while b"[DONE]" not in data[-100:]:
            data += await reader.read(1_000_000)
        found, num_events = "", 0
        for line in data.splitlines():
            if line.startswith(b'data: {"id"'):
                found += json.loads(line[6:])["choices"][0]["text"]
                num_events += 1
        assert found == text
        assert num_events < 60_000

    run(test, says(text), max_model_len=100_000)


def test_a_keep_alive_connection_survives_a_413() -> None:
    async def test(live: Live) -> None:
        async with httpx.AsyncClient(base_url=live.url) as client:
            big = {"model": MODEL, "prompt": "x" * 200_000}
            assert (await client.post("/v1/completions", json=big)).status_code == 413
            ok = await client.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
            assert ok.status_code == 200

    run(test, max_body_bytes=100_000)


def test_a_body_over_the_limit_in_chunks_is_413() -> None:
    async def test(live: Live) -> None:
        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(40):
                yield b" " * 50_000

        async with httpx.AsyncClient(base_url=live.url) as client:
            response = await client.post("/v1/completions", content=chunks())
            assert response.status_code == 413

    run(test, max_body_bytes=100_000)


def test_death_mid_stream_is_an_error_event_and_the_end() -> None:
    async def test(live: Live) -> None:
        live.core.allow_steps(2)
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="key") as client:
            stream = await client.completions.create(model=MODEL, prompt="abcd", stream=True)
            await anext(stream)
            live.core.die("worker 0 was killed by signal 9")
            with pytest.raises(openai.APIError, match="worker 0 was killed by signal 9"):
                async for _ in stream:
                    pass
        async with httpx.AsyncClient(base_url=live.url) as client:
            health = await client.get("/health")
        assert health.status_code == 503
        assert "worker 0 was killed by signal 9" in health.text

    run(test)


def test_shutdown_ends_a_stream_with_an_error_event() -> None:
    async def main() -> None:
        async with live_server() as live:
            live.core.allow_steps(1)
            reader, _ = await live.connect("/v1/completions", prompt="ab", stream=True)
            waiting_reader, _ = await live.connect("/v1/completions", prompt="ab")
            await reader.readuntil(b'"text":"a"')
            await live.until(lambda: len(live.core.running) == 2)
        assert b"shutting down" in await reader.read()
        answer = await waiting_reader.read()
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"shutting down" in answer

    asyncio.run(asyncio.wait_for(main(), 10))
