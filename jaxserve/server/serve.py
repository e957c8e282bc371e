"""`jaxserve serve`: starts an engine, serves HTTP when it is ready, and ends both together."""

import asyncio
import contextlib
import json
import logging
import os
import shlex
import signal
import ssl
import threading
import time
from collections.abc import Coroutine
from pathlib import Path

import uvloop

from jaxserve import __version__, checkpoint
from jaxserve.config import EngineConfig, replace, resolve_for_model
from jaxserve.engine.core_client import AsyncCoreClient
from jaxserve.engine.executor import WORKER_CLASS
from jaxserve.engine.executor.host_agent import run_host
from jaxserve.errors import EngineDeadError
from jaxserve.grammars.pieces import STACK_BYTES
from jaxserve.hosts import detect_hosts
from jaxserve.logs import setup_logging
from jaxserve.server.api_server import ApiServer, load_text
from jaxserve.server.listener import Listener
from jaxserve.server.security import check_server_config, make_ssl_context

logger = logging.getLogger(__name__)


def serve(config: EngineConfig, *, worker_class: str = WORKER_CLASS) -> int:
    """Serves until SIGTERM, SIGINT or the engine's death; returns the exit code.

    0 after a signal; 1 when the engine died, with the root cause as the last line of the log.

    Args:
      worker_class: "module:Class" of the worker.

    Raises:
      UserError: the port, the model or a setting cannot be used.
    """
    threading.stack_size(STACK_BYTES)  # of threads to come, which check grammars
    setup_logging(config.server.log_level, "api")
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # not what odd clients send
    config = _with_hosts(config)
    if config.parallel.host_id:
        setup_logging(config.server.log_level, f"host-{config.parallel.host_id}")
        try:
            return run_host(_resolve(config)[0], worker_class)
        except EngineDeadError as error:
            logger.error("host %d ends: %s", config.parallel.host_id, error)
            return 1
    check_server_config(config.server)
    ssl_context = make_ssl_context(config.server)
    with contextlib.closing(Listener(config.server)) as listener:
        config, path = _resolve(config)
        try:
            return asyncio.run(
                _serve(config, path, listener, ssl_context, worker_class),
                loop_factory=uvloop.new_event_loop,
            )
        except EngineDeadError as error:
            logger.error("the engine could not start: %s", error)
            return 1


def _with_hosts(config: EngineConfig) -> EngineConfig:
    """With the hosts of the environment, where flags name none."""
    hosts = None if config.parallel.num_hosts else detect_hosts(os.environ)
    if hosts is None:
        return config
    coordinator = config.parallel.coordinator or hosts.coordinator
    logger.info(
        "host_id = %d of %d, coordinator = %s: %s",
        hosts.host_id,
        hosts.num_hosts,
        coordinator,
        hosts.source,
    )
    return replace(
        config, num_hosts=hosts.num_hosts, host_id=hosts.host_id, coordinator=coordinator
    )


def _resolve(config: EngineConfig) -> tuple[EngineConfig, Path]:
    """With what the checkpoint says, and where that is."""
    path = checkpoint.resolve_model(config.model.model)
    return resolve_for_model(config, checkpoint.load_model_info(path)), path


async def _serve(
    config: EngineConfig,
    path: Path,
    listener: Listener,
    ssl_context: ssl.SSLContext | None,
    worker_class: str,
) -> int:
    started_s = time.monotonic()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    logger.info("jaxserve %s starts %s", __version__, config.model.served_model_name)
    listen_fd = listener.socket.fileno()
    client = AsyncCoreClient(config, worker_class=worker_class, listen_fd=listen_fd)
    try:
        server = await _unless(stop, _start(config, client, path))
        if server is None:
            logger.info("stopped while starting")
            return 0
        listener.listen()
        client.connection.tell_peers_to_serve()
        dead_error = await server.run(
            listener.socket,
            ssl_context,
            stop,
            on_listening=lambda: _log_ready(config, listener, started_s),
            end_engine=client.shutdown,
        )
    finally:
        await client.shutdown()
    if dead_error is None:
        logger.info("stopped")
        return 0
    logger.error("the engine died: %s", dead_error)
    return 1


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


async def _start(config: EngineConfig, client: AsyncCoreClient, path: Path) -> ApiServer:
    """Starts the engine and loads the tokenizer at the same time.

    Raises:
      UserError, EngineDeadError: one of them cannot.
    """
    engine = asyncio.create_task(client.start())
    try:
        tokenizer, chat = await load_text(config, path)
        return ApiServer(await engine, tokenizer, chat, client.connection)
    except BaseException:
        engine.cancel()
        await asyncio.wait({engine})
        raise


def _log_ready(config: EngineConfig, listener: Listener, started_s: float) -> None:
    server, name, url = config.server, config.model.served_model_name, listener.url()
    body = {"model": name, "messages": [{"role": "user", "content": "Hello!"}]}
    options = f" --unix-socket {shlex.quote(server.uds)}" if server.uds else ""
    if server.api_key:
        options += " -H 'Authorization: Bearer KEY'"
    seconds = time.monotonic() - started_s
    where = f"{url} on {server.uds}" if server.uds else url
    num_api_servers, num_cores = server.api_server_count, config.parallel.data_parallel_size
    if num_api_servers > 1 or num_cores > 1:
        where += f" (API servers: {num_api_servers}, engine cores: {num_cores})"
    logger.info("ready after %.1f s: %s at %s", seconds, name, where)
    logger.info(
        "try: curl %s/v1/chat/completions%s -H 'Content-Type: application/json' -d '%s'",
        url,
        options,
        json.dumps(body),
    )
