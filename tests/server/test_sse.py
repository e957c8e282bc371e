"""Comments in silent streams: when they come, and what they change."""

import asyncio
import json

import pytest
from starlette.types import Message

from jaxserve.server.sse import EventStream
from tests.fakes_engine import says
from tests.server.live import Live, raw_post, run

COMMENT = b": keep-alive\n\n"


class Sent:
    """Takes what a stream sends; while `gate` is closed, a client does not read."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, message: Message) -> None:
        await self.gate.wait()
        self.messages.append(message)

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.messages[1:]]


async def until(sent: Sent, num_bodies: int) -> None:
    while len(sent.messages) < num_bodies + 1:
        await asyncio.sleep(0.001)


def test_a_comment_comes_after_silence_only() -> None:
    async def main() -> None:
        sent = Sent()
        loop = asyncio.get_running_loop()
        events = EventStream(sent, [(b"x", b"y")], 0.2)
        for _ in range(8):  # longer than the period, but never silent for so long
            await events.write(b"data: a\n\n")
            await asyncio.sleep(0.06)
        assert sent.bodies == [b"data: a\n\n"] * 8
        started_s = loop.time()
        await until(sent, 9)
        assert 0.1 <= loop.time() - started_s < 1
        await until(sent, 10)
        assert loop.time() - started_s >= 0.1 + 0.2
        assert sent.bodies[8:] == [COMMENT, COMMENT]
        await events.end(b"data: [DONE]\n\n")
        await asyncio.sleep(0.5)
        assert sent.bodies[10:] == [b"data: [DONE]\n\n"]
        assert sent.messages[0]["status"] == 200
        assert (b"x", b"y") in sent.messages[0]["headers"]
        assert [m.get("more_body", False) for m in sent.messages[1:]] == [True] * 10 + [False]

    asyncio.run(main())


def test_no_comment_for_a_client_that_does_not_read() -> None:
    async def main() -> None:
        sent = Sent()
        events = EventStream(sent, [], 0.04)
        await events.write(b"data: a\n\n")
        sent.gate.clear()
        writing = asyncio.ensure_future(events.write(b"data: b\n\n"))
        await asyncio.sleep(0.3)
        sent.gate.set()
        await writing
        events.stop()
        await asyncio.sleep(0.1)
        assert sent.bodies == [b"data: a\n\n", b"data: b\n\n"]

    asyncio.run(main())


def test_comments_can_be_off() -> None:
    async def main() -> None:
        sent = Sent()
        num_tasks = len(asyncio.all_tasks())
        events = EventStream(sent, [], 0)
        await events.write(b"a")
        assert len(asyncio.all_tasks()) == num_tasks
        events.stop()

    asyncio.run(main())


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
TEXT = {"model": "tiny", "prompt": "abc", "stream": True}


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]
)
def test_comments_before_the_first_token_and_between(path: str, body: dict) -> None:
    async def test(live: Live) -> None:
        live.core.allow_steps(0)
        reader, _ = await live.open(raw_post(path, json.dumps(body).encode()))
        head = await reader.readuntil(COMMENT)
        assert b"200 OK" in head and b"text/event-stream" in head
        await reader.readuntil(COMMENT)
        live.core.allow_steps(1)
        assert COMMENT not in await reader.readuntil(b"data: ")
        await reader.readuntil(COMMENT)
        live.core.allow_steps(None)
        rest = await reader.readuntil(b"[DONE]\n\n")
        assert b'"finish_reason":"stop"' in rest

    run(test, says("abc"), sse_keepalive_s=0.1)


def test_what_fails_behind_a_comment_is_an_event() -> None:
    async def test(live: Live) -> None:
        live.core.allow_steps(0)
        reader, _ = await live.open(raw_post("/v1/completions", json.dumps(TEXT).encode()))
        await reader.readuntil(COMMENT)
        live.core.die("worker 0 was killed")
        error = json.loads((await reader.readuntil(b"}}\n\n")).partition(b"data: ")[2])
        assert "worker 0 was killed" in error["error"]["message"]
        assert await reader.readuntil(b"0\r\n\r\n") == b"\r\n0\r\n\r\n"

    run(test, sse_keepalive_s=0.1)


def test_no_comment_and_an_ordinary_error_without_keep_alive() -> None:
    async def test(live: Live) -> None:
        live.core.allow_steps(0)
        reader, _ = await live.open(raw_post("/v1/completions", json.dumps(TEXT).encode()))
        await asyncio.sleep(0.4)
        live.core.die("worker 0 was killed")
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 503")

    run(test, sse_keepalive_s=0.0)


def test_a_client_that_leaves_a_silent_stream_leaves_no_task() -> None:
    async def test(live: Live) -> None:
        num_tasks = len(asyncio.all_tasks())
        live.core.allow_steps(0)
        reader, writer = await live.open(raw_post("/v1/completions", json.dumps(TEXT).encode()))
        await reader.readuntil(COMMENT)
        writer.close()
        await live.until(lambda: len(asyncio.all_tasks()) <= num_tasks)

    run(test, sse_keepalive_s=0.1)
