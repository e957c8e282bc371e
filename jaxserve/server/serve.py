"""`jaxserve serve`: starts an engine core, serves HTTP when it is ready, and ends both together."""

import asyncio
import contextlib
import gc
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
from jaxserve.checkpoint.tokenizer import Tokenizer
from jaxserve.config import ChatConfig, EngineConfig, replace, resolve_for_model
from jaxserve.engine.async_llm import AsyncLLM
from jaxserve.engine.core_client import AsyncCoreClient
from jaxserve.engine.detokenizer import DetokenizerFactory
from jaxserve.engine.executor import WORKER_CLASS
from jaxserve.engine.executor.host_agent import run_host
from jaxserve.engine.input_processor import InputProcessor
from jaxserve.engine.output_processor import OutputProcessor
from jaxserve.errors import EngineDeadError
from jaxserve.grammars.pieces import STACK_BYTES
from jaxserve.hosts import detect_hosts
from jaxserve.logs import setup_logging
from jaxserve.metrics import ServerMetrics
from jaxserve.server.app import build_app
from jaxserve.server.chat_settings import ChatSettings, make_chat_settings
from jaxserve.server.connection import HttpServer
from jaxserve.server.generation import ServerContext
from jaxserve.server.listener import Listener
from jaxserve.server.load_log import log_load
from jaxserve.server.renderer import Renderer
from jaxserve.server.security import check_server_config, make_ssl_context

logger = logging.getLogger(__name__)

# How long /health answers 503 after the engine's death, so that a probe can see it.
_DEAD_GRACE_S = 2.0


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
    client = AsyncCoreClient(config, worker_class=worker_class)
    try:
        started = await _unless(stop, _start(config.chat, client, path))
        if started is None:
            logger.info("stopped while starting")
            return 0
        config, tokenizer, chat = started
        return await _run(config, tokenizer, chat, client, listener, ssl_context, stop, started_s)
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


async def _start(
    config: ChatConfig, client: AsyncCoreClient, path: Path
) -> tuple[EngineConfig, Tokenizer, ChatSettings]:
    """Starts the engine core and loads the tokenizer at the same time.

    Raises:
      UserError, EngineDeadError: one of them cannot.
    """
    engine = asyncio.create_task(client.start())
    try:
        tokenizer = await asyncio.to_thread(checkpoint.load_tokenizer, path, config.chat_template)
        chat = make_chat_settings(config, tokenizer)
        return await engine, tokenizer, chat
    except BaseException:
        engine.cancel()
        await asyncio.wait({engine})
        raise


async def _run(
    config: EngineConfig,
    tokenizer: Tokenizer,
    chat: ChatSettings,
    client: AsyncCoreClient,
    listener: Listener,
    ssl_context: ssl.SSLContext | None,
    stop: asyncio.Event,
    started_s: float,
) -> int:
    """Serves with a ready engine until it dies or `stop` is set.

    Raises:
      UserError: the port was taken while the engine started.
    """
    listener.listen()
    metrics = ServerMetrics(config.model.served_model_name)
    detokenizers = DetokenizerFactory(tokenizer.backend)
    output_processor = OutputProcessor(detokenizers, metrics, config.info.eos_token_ids)
    llm = AsyncLLM(
        client,
        output_processor,
        max_num_queued=config.server.max_num_queued_reqs,
        max_num_queued_tokens=config.server.max_num_queued_tokens,
    )
    llm.start()
    context = ServerContext(
        config=config,
        llm=llm,
        input_processor=InputProcessor(config, tokenizer),
        renderer=Renderer(tokenizer, config.model.max_model_len, chat.template_kwargs),
        chat=chat,
        detokenizers=detokenizers,
        metrics=metrics,
        created_s=int(time.time()),
    )
    server = HttpServer(
        build_app(context),
        lambda: _log_ready(config, listener, started_s),
        request_timeout_s=config.server.request_timeout_s,
        ssl_context=ssl_context,
    )
    gc.collect()
    gc.freeze()  # what start-up made stays; the collector need not look at it again and again
    serving = asyncio.create_task(server.serve([listener.socket]))
    dying = asyncio.create_task(llm.wait_dead())
    stopping = asyncio.create_task(stop.wait())
    logging_load = asyncio.create_task(log_load(metrics))
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
    logging_load.cancel()
    dying.cancel()
    stopping.cancel()
    if llm.dead_error is None:
        logger.info("stopped")
        return 0
    logger.error("the engine died: %s", llm.dead_error)
    return 1


def _log_ready(config: EngineConfig, listener: Listener, started_s: float) -> None:
    server, name, url = config.server, config.model.served_model_name, listener.url()
    body = {"model": name, "messages": [{"role": "user", "content": "Hello!"}]}
    options = f" --unix-socket {shlex.quote(server.uds)}" if server.uds else ""
    if server.api_key:
        options += " -H 'Authorization: Bearer KEY'"
    seconds = time.monotonic() - started_s
    where = f"{url} on {server.uds}" if server.uds else url
    logger.info("ready after %.1f s: %s at %s", seconds, name, where)
    logger.info(
        "try: curl %s/v1/chat/completions%s -H 'Content-Type: application/json' -d '%s'",
        url,
        options,
        json.dumps(body),
    )
