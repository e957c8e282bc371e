"""Admission limits: what they count, what they refuse, and that the counts come back to 0."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.fakes_engine import MODEL, FakeServer, echoes, fake_server

PATHS = {
    "/v1/completions": {"prompt": "abc"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}


def run(test: Callable[[FakeServer], Awaitable[None]], **config: Any) -> None:
    async def main() -> None:
        async with fake_server(echoes, **config) as server:
            await asyncio.wait_for(test(server), 10)

    asyncio.run(main())


def queue(server: FakeServer) -> tuple[int, int]:
    """Sequences that wait, and their prompts' tokens."""
    processor = server.context.llm._output_processor
    return processor.num_queued, processor.num_queued_tokens


async def waiting(server: FakeServer, num_sequences: int, **body: object) -> asyncio.Future:
    """A request that waits for the engine; `num_sequences` do then."""
    posted = asyncio.ensure_future(server.post("/v1/completions", **body))
    while queue(server)[0] < num_sequences:
        assert not posted.done(), posted.result().text
        await asyncio.sleep(0)
    return posted


async def num_refused(server: FakeServer) -> int:
    text = (await server.client.get("/metrics")).text
    name = f'jaxserve:requests_refused_total{{model_name="{MODEL}"}} '
    return int(float(text.partition(name)[2].partition("\n")[0]))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", (False, True))
def test_too_many_requests(path: str, stream: bool) -> None:
    async def test(server: FakeServer) -> None:
        server.core.allow_steps(0)
        first = await waiting(server, 1, prompt="abc")
        second = await waiting(server, 2, prompt="de")
        assert queue(server) == (2, 5)
        for n in (1, 2):
            response = await server.post(path, stream=stream, **PATHS[path])
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            assert response.json()["error"] == {
                "message": "The server is busy: 2 sequences with 5 prompt tokens wait.",
                "type": "service_unavailable_error",
                "param": None,
                "code": "service_unavailable",
            }
            assert await num_refused(server) == n
        assert (await server.client.get("/v1/models")).status_code == 200
        server.core.allow_steps(None)
        assert [(await each).status_code for each in (first, second)] == [200, 200]
        assert queue(server) == (0, 0)
        assert (await server.post(path, stream=stream, **PATHS[path])).status_code == 200
        assert len(server.core.requests) == 3

    run(test, max_num_queued_reqs=2)


def test_requests_that_have_begun_do_not_count() -> None:
    async def test(server: FakeServer) -> None:
        server.core.allow_steps(0)
        first = await waiting(server, 1, prompt="abcdef")
        assert (await server.post("/v1/completions", prompt="a")).status_code == 503
        server.core.allow_steps(1)
        while queue(server)[0]:
            await asyncio.sleep(0)
        second = await waiting(server, 1, prompt="abc")
        server.core.allow_steps(None)
        assert [(await each).status_code for each in (first, second)] == [200, 200]

    run(test, max_num_queued_reqs=1)


def test_too_many_tokens() -> None:
    async def test(server: FakeServer) -> None:
        server.core.allow_steps(0)
        first = await waiting(server, 1, prompt="a" * 6)
        assert (await server.post("/v1/completions", prompt="b" * 5)).status_code == 503
        second = await waiting(server, 2, prompt="b" * 4)
        assert queue(server) == (2, 10)
        assert (await server.post("/v1/completions", prompt="c")).status_code == 503
        server.core.allow_steps(None)
        assert [(await each).status_code for each in (first, second)] == [200, 200]

    run(test, max_num_queued_tokens=10)


def test_every_choice_counts_and_an_empty_queue_takes_any() -> None:
    async def test(server: FakeServer) -> None:
        server.core.allow_steps(0)
        large = await waiting(server, 12, prompt=["a" * 20, "b" * 20], n=6)
        assert queue(server) == (12, 240)
        assert (await server.post("/v1/completions", prompt="a")).status_code == 503
        server.core.allow_steps(None)
        assert (await large).status_code == 200
        server.core.allow_steps(0)
        small = await waiting(server, 1, prompt="a")
        assert (await server.post("/v1/completions", prompt="a", n=3)).status_code == 503
        server.core.allow_steps(None)
        assert (await small).status_code == 200

    run(test, max_num_queued_reqs=3, max_num_queued_tokens=100)


def test_no_limit_by_default() -> None:
    async def test(server: FakeServer) -> None:
        server.core.allow_steps(0)
        posted = [await waiting(server, i + 1, prompt="abc") for i in range(100)]
        server.core.allow_steps(None)
        assert {(await each).status_code for each in posted} == {200}
        assert await num_refused(server) == 0

    run(test)


def test_what_is_cancelled_or_fails_waits_no_more() -> None:
    async def test(server: FakeServer) -> None:
        server.core.allow_steps(0)
        posted = await waiting(server, 1, prompt="abcd", n=1)
        posted.cancel()  # as a client that goes away
        await asyncio.gather(posted, return_exceptions=True)
        assert queue(server) == (0, 0)
        posted = await waiting(server, 3, prompt="abcd", n=3)
        server.core.die("gone")
        assert (await posted).status_code == 503
        assert queue(server) == (0, 0)

    run(test, max_num_queued_reqs=5)


def test_a_full_queue_reads_no_body() -> None:
    async def test(server: FakeServer) -> None:
        server.core.allow_steps(0)
        await waiting(server, 1, prompt="abc")
        sent: list[Any] = []

        async def receive() -> Any:
            raise AssertionError("the body was read")

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": [],
            "query_string": b"",
        }
        await server.app(scope, receive, send)
        assert sent[0]["status"] == 503

    run(test, max_num_queued_reqs=1)
