"""`jaxserve serve`: starts an engine core, serves HTTP when it is ready, and ends both together."""

import asyncio
import contextlib
import errno
import gc
import json
import logging
import re
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path

import uvicorn
import uvloop
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jaxserve import __version__, checkpoint
from jaxserve.checkpoint.tokenizer import Tokenizer
from jaxserve.config import EngineConfig, resolve_for_model
from jaxserve.engine.async_llm import AsyncLLM
from jaxserve.engine.core_client import AsyncCoreClient
from jaxserve.engine.detokenizer import DetokenizerFactory
from jaxserve.engine.executor import WORKER_CLASS
from jaxserve.engine.input_processor import InputProcessor
from jaxserve.engine.output_processor import OutputProcessor
from jaxserve.errors import EngineDeadError, UserError
from jaxserve.logs import setup_logging
from jaxserve.metrics import ServerMetrics
from jaxserve.server.app import build_app
from jaxserve.server.generation import ServerContext
from jaxserve.server.renderer import Renderer

logger = logging.getLogger(__name__)

# How long /health answers 503 after the engine's death, so that a probe can see it.
_DEAD_GRACE_S = 2.0
_CONNECTION_GRACE_S = 1
_KEEP_ALIVE_S = 60
_BACKLOG = 2048  # connections that wait to be accepted
_UPGRADE_HEADER = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
_WILDCARD_HOSTS = ("", "0.0.0.0", "::")


def serve(config: EngineConfig, *, worker_class: str = WORKER_CLASS) -> int:
    """Serves until SIGTERM, SIGINT or the engine's death; returns the exit code.

    0 after a signal; 1 when the engine died, with the root cause as the last line of the log.

    Args:
      worker_class: "module:Class" of the worker.

    Raises:
      UserError: the port, the model or a setting cannot be used.
    """
    setup_logging(config.server.log_level, "api")
    with bind(config.server.host, config.server.port) as listener:
        path = checkpoint.resolve_model(config.model.model)
        config = resolve_for_model(config, checkpoint.load_model_info(path))
        try:
            return asyncio.run(
                _serve(config, path, listener, worker_class), loop_factory=uvloop.new_event_loop
            )
        except EngineDeadError as error:
            logger.error("the engine could not start: %s", error)
            return 1


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: clients are refused until the server is ready.

    Raises:
      UserError: the address or port cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"--host {host} is not an address: {error}.", fix="Use --host 127.0.0.1."
        ) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _bind_error(host, port, error) from error
    return listener


def listen(listener: socket.socket, host: str, port: int) -> None:
    """Makes a bound socket listen; of two servers that bound the same port, the second fails here.

    Raises:
      UserError: the port was taken since `bind`.
    """
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        raise _bind_error(host, port, error) from error


def _bind_error(host: str, port: int, error: OSError) -> UserError:
    if error.errno == errno.EADDRINUSE:
        return UserError(
            f"--port {port} is taken: another program listens there.",
            fix=f"Use another one, such as --port {_free_port(host, port)}.",
        )
    if error.errno == errno.EACCES:
        return UserError(f"--port {port} needs root.", fix="Use --port 8000.")
    return UserError(
        f"--host {host} cannot be listened on: {error.strerror}.",
        fix="Use --host 127.0.0.1, or --host 0.0.0.0 for every network.",
    )


def _free_port(host: str, taken: int) -> int:
    """The next port that nobody listens on."""
    for port in range(taken + 1, min(taken + 50, 65536)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    return 8000 if taken != 8000 else 8080


class _Protocol(HttpToolsProtocol):
    """Ignores `Upgrade`, as a server may (RFC 9110, 7.8); the parser would stop before the body."""

    def data_received(self, data: bytes) -> None:
        super().data_received(_UPGRADE_HEADER.sub(b"\r\nignored:", data))


class _UvicornServer(uvicorn.Server):
    """A uvicorn server that leaves signals to us and says when it listens."""

    def __init__(self, app: ASGIApp, on_listening: Callable[[], None]):
        super().__init__(
            uvicorn.Config(
                app,
                http=_Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_CONNECTION_GRACE_S,
            )
        )
        self._on_listening = on_listening

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_listening()


async def _serve(
    config: EngineConfig, path: Path, listener: socket.socket, worker_class: str
) -> int:
    started_s = time.monotonic()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    logger.info("jaxserve %s starts %s", __version__, config.model.served_model_name)
    client = AsyncCoreClient(config, worker_class=worker_class)
    try:
        started = await _unless(stop, _start(client, path))
        if started is None:
            logger.info("stopped while starting")
            return 0
        config, tokenizer = started
        return await _run(config, tokenizer, client, listener, stop, started_s)
    finally:
        await client.shutdown()


async def _unless[T](stop: asyncio.Event, work: Coroutine[None, None, T]) -> T | None:
    """The result of `work`; None, and `work` cancelled, when `stop` is set before."""
    task = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.wait({task})
    return None


async def _start(client: AsyncCoreClient, path: Path) -> tuple[EngineConfig, Tokenizer]:
    """Starts the engine core and loads the tokenizer at the same time.

    Raises:
      UserError, EngineDeadError: one of them cannot.
    """
    engine = asyncio.create_task(client.start())
    try:
        tokenizer = await asyncio.to_thread(checkpoint.load_tokenizer, path)
        return await engine, tokenizer
    except BaseException:
        engine.cancel()
        await asyncio.wait({engine})
        raise


async def _run(
    config: EngineConfig,
    tokenizer: Tokenizer,
    client: AsyncCoreClient,
    listener: socket.socket,
    stop: asyncio.Event,
    started_s: float,
) -> int:
    """Serves with a ready engine until it dies or `stop` is set.

    Raises:
      UserError: the port was taken while the engine started.
    """
    listen(listener, config.server.host, config.server.port)
    metrics = ServerMetrics(config.model.served_model_name)
    detokenizers = DetokenizerFactory(tokenizer.backend)
    output_processor = OutputProcessor(detokenizers, metrics, config.info.eos_token_ids)
    llm = AsyncLLM(client, output_processor)
    llm.start()
    context = ServerContext(
        config=config,
        llm=llm,
        input_processor=InputProcessor(config, tokenizer),
        renderer=Renderer(tokenizer, config.model.max_model_len),
        detokenizers=detokenizers,
        metrics=metrics,
        created_s=int(time.time()),
    )
    server = _UvicornServer(build_app(context), lambda: _log_ready(config, started_s))
    gc.collect()
    gc.freeze()  # what start-up made stays; the collector need not look at it again and again
    serving = asyncio.create_task(server.serve([listener]))
    dying = asyncio.create_task(llm.wait_dead())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, dying, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if dying.done():
        logger.error("the engine is dead; ending in %g s: %s", _DEAD_GRACE_S, dying.result())
        await asyncio.wait({serving, stopping}, timeout=_DEAD_GRACE_S)
    else:
        logger.info("stopping")
    llm.close()
    server.should_exit = True
    await asyncio.gather(serving, client.shutdown())
    context.renderer.close()
    dying.cancel()
    stopping.cancel()
    if llm.dead_error is None:
        logger.info("stopped")
        return 0
    logger.error("the engine died: %s", llm.dead_error)
    return 1


def _log_ready(config: EngineConfig, started_s: float) -> None:
    server, name = config.server, config.model.served_model_name
    host = "127.0.0.1" if server.host in _WILDCARD_HOSTS else server.host
    url = f"http://{f'[{host}]' if ':' in host else host}:{server.port}"
    body = {"model": name, "messages": [{"role": "user", "content": "Hello!"}]}
    key = " -H 'Authorization: Bearer KEY'" if server.api_key else ""
    seconds = time.monotonic() - started_s
    logger.info("ready after %.1f s: %s at %s", seconds, name, url)
    logger.info(
        "try: curl %s/v1/chat/completions%s -H 'Content-Type: application/json' -d '%s'",
        url,
        key,
        json.dumps(body),
    )
