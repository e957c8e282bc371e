"""The API server on a socket of its own, over a scripted engine core."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import msgspec
import uvloop

from jaxserve.messages import EngineCoreRequest
from jaxserve.server.app import build_app
from jaxserve.server.connection import HttpServer
from jaxserve.server.listener import Listener
from jaxserve.server.security import make_ssl_context
from tests.fakes_engine import (
    MODEL,
    FakeCoreClient,
    ServerContext,
    echoes,
    make_config,
    make_context,
)


class Live:
    """A server on a port of its own; `port` is 0 with a Unix socket."""

    def __init__(self, core: FakeCoreClient, context: ServerContext, url: str, port: int):
        self.core = core
        self.context = context
        self.port = port
        self.url = url
        self.writers: list[asyncio.StreamWriter] = []

    async def open(self, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection on which `data` was sent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        writer.write(data)
        await writer.drain()
        return reader, writer

    async def connect(
        self, path: str, **body: object
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Sends a request; the caller reads the response as it comes."""
        return await self.open(raw_post(path, json.dumps({"model": MODEL} | body).encode()))

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def live_server(
    script: Callable[[EngineCoreRequest], Iterable[int]] = echoes,
    *,
    step_s: float = 0,
    **config: object,
) -> AsyncIterator[Live]:
    core = FakeCoreClient(script, step_s=step_s)
    context = make_context(core, make_config(**config))
    server_config = context.config.server
    if not server_config.uds:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        server_config = msgspec.structs.replace(server_config, port=port)
    listener = Listener(server_config)
    listener.listen()
    listening = asyncio.Event()
    server = HttpServer(
        build_app(context),
        listening.set,
        request_timeout_s=server_config.request_timeout_s,
        ssl_context=make_ssl_context(server_config),
    )
    serving = asyncio.create_task(server.serve([listener.socket]))
    await listening.wait()
    live = Live(core, context, listener.url(), 0 if server_config.uds else server_config.port)
    try:
        yield live
    finally:
        context.llm.close()
        server.should_exit = True
        await serving
        listener.close()
        context.renderer.close()
        for writer in live.writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


def run(
    test: Callable[[Live], Awaitable[None]], *args: Any, timeout_s: float = 10, **config: Any
) -> None:
    """Runs `test(live)` over a server with such a script and config."""

    async def main() -> None:
        async with live_server(*args, **config) as live:
            await asyncio.wait_for(test(live), timeout_s)

    uvloop.run(main())


def raw_post(path: str, body: bytes, headers: bytes = b"") -> bytes:
    """A request as it goes over the wire."""
    head = b"POST %b HTTP/1.1\r\nhost: x\r\n%b" % (path.encode(), headers)
    return head + b"content-length: %d\r\n\r\n" % len(body) + body
