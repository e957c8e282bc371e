"""Raw sockets: slow, half-closed and odd clients, mutated bodies, many clients that leave."""

import asyncio
import contextlib
import itertools
import json
import random
import re
import time
from typing import Any

import httpx
import pytest

from jaxserve.server.connection import MAX_HEAD_BYTES
from tests.fakes_engine import MODEL, echoes
from tests.server.live import Live, raw_post, run

GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
BODY = json.dumps({"model": MODEL, "prompt": "ab"}).encode()


async def read_response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body of one response with a content-length."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    assert length is not None, head
    return int(head.split()[1]), await reader.readexactly(int(length[1]))


# --- slow clients --------------------------------------------------------------------------------


def test_slow_clients_are_cut_off_and_hold_nobody_up() -> None:
    """100 connections send a byte now and then, half of them in the head, half in the body."""

    async def trickle(live: Live, data: bytes, rest: bytes) -> bytes:
        reader, writer = await live.open(data)

        async def send() -> None:
            for i in range(len(rest)):
                writer.write(rest[i : i + 1])
                await asyncio.sleep(0.1)

        sending = asyncio.ensure_future(send())
        answer = b""
        with contextlib.suppress(ConnectionResetError):  # a byte was on its way
            while data := await reader.read(1000):
                answer += data
        sending.cancel()
        return answer

    async def test(live: Live) -> None:
        rest = b"x" * 1000
        started_s = time.monotonic()
        heads = [trickle(live, b"POST /v1/completions HTTP/1.1\r\nx: ", rest) for _ in range(50)]
        bodies = [trickle(live, raw_post("/v1/completions", rest)[:-990], rest) for _ in range(50)]
        slow = [asyncio.ensure_future(each) for each in (*heads, *bodies)]
        await asyncio.sleep(0.2)
        async with httpx.AsyncClient(base_url=live.url) as client:
            for _ in range(20):
                response = await client.post("/v1/completions", content=BODY)
                assert response.status_code == 200
        assert not any(each.done() for each in slow)
        answers = await asyncio.gather(*slow)
        assert 2 <= time.monotonic() - started_s < 12
        assert answers[:50] == [b""] * 50
        assert all(a.startswith(b"HTTP/1.1 408 Request Timeout") for a in answers[50:])
        assert all(b"did not come whole within 2 s" in a for a in answers[50:])
        assert len(live.core.requests) == 20

    run(test, timeout_s=20, request_timeout_s=2.0)


def test_an_idle_connection_is_not_late() -> None:
    async def test(live: Live) -> None:
        reader, writer = await live.open(GET)
        for _ in range(3):
            assert (await read_response(reader))[0] == 200
            await asyncio.sleep(0.4)
            writer.write(GET)
        assert (await read_response(reader))[0] == 200
        writer.write(GET[:-5])  # the time of a later request runs too
        assert await asyncio.wait_for(reader.read(), 2) == b""

    run(test, request_timeout_s=0.3)


def test_a_connection_that_sends_nothing_is_closed() -> None:
    async def test(live: Live) -> None:
        reader, _ = await live.open()
        assert await asyncio.wait_for(reader.read(), 2) == b""

    run(test, request_timeout_s=0.2)


def test_empty_lines_do_not_keep_a_connection() -> None:
    async def test(live: Live) -> None:
        reader, writer = await live.open(GET)
        await read_response(reader)
        reading = asyncio.ensure_future(reader.read())
        started_s = time.monotonic()
        while not reading.done() and time.monotonic() - started_s < 5:
            writer.write(b"\r\n")
            await asyncio.sleep(0.05)
        assert reading.done()
        await asyncio.gather(reading, return_exceptions=True)  # closed or reset

    run(test, request_timeout_s=0.3)


def test_a_slow_answer_is_not_a_slow_request() -> None:
    """Nor is what waits behind it on the same connection."""

    async def test(live: Live) -> None:
        live.core.allow_steps(0)
        reader, _ = await live.open(raw_post("/v1/completions", BODY) + GET[:20])
        await live.until(lambda: live.core.running)
        writer = live.writers[0]
        await asyncio.sleep(0.7)
        writer.write(GET[20:])
        live.core.allow_steps(None)
        status, body = await read_response(reader)
        assert (status, json.loads(body)["choices"][0]["text"]) == (200, "ab")
        assert (await read_response(reader))[0] == 200

    run(test, request_timeout_s=0.2)


def test_no_timeout() -> None:
    async def test(live: Live) -> None:
        reader, writer = await live.open(GET[:10])
        await asyncio.sleep(0.3)
        writer.write(GET[10:])
        assert (await read_response(reader))[0] == 200

    run(test, request_timeout_s=0.0)


# --- half-closed connections ---------------------------------------------------------------------


@pytest.mark.parametrize("stream", (False, True))
def test_a_client_that_closes_its_side_has_left(stream: bool) -> None:
    async def test(live: Live) -> None:
        live.core.allow_steps(1)
        body = json.dumps({"model": MODEL, "prompt": "abcdef", "stream": stream}).encode()
        reader, writer = await live.open(raw_post("/v1/completions", body))
        await live.until(lambda: live.core.num_steps)
        writer.write_eof()
        await live.until(lambda: live.core.aborted)
        await reader.read()
        assert not live.core.running
        await live.until(lambda: not live.context.metrics.num_generating)

    run(test)


@pytest.mark.parametrize("sent", (b"", GET[:10], raw_post("/v1/completions", BODY)[:-3]))
def test_half_a_request_and_a_closed_side(sent: bytes) -> None:
    async def test(live: Live) -> None:
        reader, writer = await live.open(sent)
        await asyncio.sleep(0.05)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 2) == b""
        assert live.core.requests == []
        reader, _ = await live.open(GET)
        assert (await read_response(reader))[0] == 200

    run(test)


# --- odd heads -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "status", "message"),
    [
        (b"hello there\r\n\r\n", 400, "not valid HTTP"),
        (b"GET /health HTTP/1.1\r\nbad header\r\n\r\n", 400, "not valid HTTP"),
        (b"POST /x HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400, "not valid"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", 400, "not valid HTTP"),
        (b"GET /health HTTP/1.1\r\nx: " + b"y" * 2 * MAX_HEAD_BYTES, 431, "longer than 65536"),
        (b"GET /" + b"y" * 2 * MAX_HEAD_BYTES, 431, "longer than 65536"),
    ],
)
def test_what_is_no_request(data: bytes, status: int, message: str) -> None:
    async def test(live: Live) -> None:
        reader, _ = await live.open(data)
        found, body = await read_response(reader)
        assert found == status
        assert message in json.loads(body)["error"]["message"]
        assert await reader.read() == b""

    run(test)


def test_many_requests_have_no_long_head() -> None:
    """The length counts for each request, and bodies do not count."""

    async def test(live: Live) -> None:
        padding = b"x: %b\r\n" % (b"y" * 5000)
        reader, writer = await live.open()
        for _ in range(20):
            writer.write(raw_post("/v1/completions", BODY + b" " * 5000, padding))
            assert (await read_response(reader))[0] == 200

    run(test)


# --- mutated bodies ------------------------------------------------------------------------------

SEEDS: list[dict[str, Any]] = [
    {"model": MODEL, "prompt": "abc", "max_tokens": 3, "stop": ["x"], "seed": 1, "stream": True},
    {"model": MODEL, "prompt": [97, 98], "temperature": 0.5, "top_k": 3, "n": 2, "logprobs": 1},
    {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    {
        "model": MODEL,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 4,
    },
]
ODD = [None, True, -1, 0, 2**63, 2**70, 1e308, "", "é\ud83d", [], [[]], {}, {"a": None}, ["x", 1]]


def mutated(rng: random.Random) -> tuple[str, bytes]:
    """A path, and a body that is a little or very wrong."""
    seed = json.loads(json.dumps(rng.choice(SEEDS)))
    path = "/v1/chat/completions" if "messages" in seed else "/v1/completions"
    for _ in range(rng.randint(0, 2)):
        holder = rng.choice([seed, *(v[0] for v in seed.values() if v and type(v) is list)])
        if not isinstance(holder, dict):
            holder = seed
        holder[rng.choice([*holder, "top_p", "logit_bias", "n", "best_of", "tools"])] = rng.choice(
            ODD
        )
    data = bytearray(json.dumps(seed).encode())
    for _ in range(rng.choice((0, 0, 1, 1, 4))):
        position = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[position] = rng.randrange(256)
            case 1:
                del data[position : position + rng.randint(1, 8)]
            case 2:
                data[position:position] = rng.randbytes(rng.randint(1, 8))
            case 3:
                data[position:position] = data[rng.randrange(len(data)) :][:40]
        if not data:
            break
    return path, bytes(data)


@pytest.mark.parametrize("seed", range(4))
def test_500_mutated_bodies(seed: int) -> None:
    """On one connection; no answer is a 5xx, and the server stays as it was."""

    async def test(live: Live) -> None:
        rng = random.Random(seed)
        statuses: dict[int, int] = {}
        async with httpx.AsyncClient(base_url=live.url) as client:
            for i in range(500):
                path, body = mutated(rng)
                response = await client.post(path, content=body)
                assert response.status_code in (200, 400, 404), (seed, i, body, response.text)
                statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
                if response.status_code != 200:
                    assert response.json()["error"]["message"]
            assert min(statuses[200], statuses[400]) > 20, statuses
            metrics = (await client.get("/metrics")).text
        assert sum(statuses.values()) == 500
        assert not re.search(r'http_requests_total{.*status="5', metrics)
        assert live.core.running == {}
        assert live.context.metrics.num_generating == 0

    run(test, echoes, timeout_s=60)


# --- many that leave -----------------------------------------------------------------------------


def test_200_long_requests_that_leave() -> None:
    async def test(live: Live) -> None:
        body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 9000, "stream": True})
        opened = [await live.open(raw_post("/v1/completions", body.encode())) for _ in range(200)]
        await live.until(lambda: len(live.core.running) == 200)
        await asyncio.sleep(0.5)
        assert live.context.metrics.num_generating == 200
        for _, writer in opened:
            writer.close()
        started_s = time.monotonic()
        async with httpx.AsyncClient(base_url=live.url) as client:
            answer = await client.post(
                "/v1/completions", json={"model": MODEL, "prompt": "b", "max_tokens": 5}
            )
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] == 5
            assert time.monotonic() - started_s < 5
            await live.until(lambda: not live.core.running)
            load = (await client.get("/load")).json()
            metrics = (await client.get("/metrics")).text
        assert load == {"server_load": 0}
        assert 'num_requests_running{engine="0",model_name="tiny"} 0.0' in metrics
        assert 'finished_reason="abort",model_name="tiny"} 200.0' in metrics
        processor = live.context.llm._output_processor
        assert (processor.num_unfinished, processor.num_queued) == (0, 0)
        assert processor.num_queued_tokens == 0

    run(
        test,
        lambda request: itertools.repeat(97),
        step_s=0.002,
        timeout_s=30,
        max_model_len=10_000,
    )
