"""One API server: HTTP in front of engine cores that are ready."""

import asyncio
import gc
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from jaxserve import checkpoint
from jaxserve.checkpoint.tokenizer import Tokenizer
from jaxserve.config import EngineConfig
from jaxserve.engine.async_llm import AsyncLLM, shutting_down
from jaxserve.engine.core_connection import CoreConnection
from jaxserve.engine.detokenizer import DetokenizerFactory
from jaxserve.engine.input_processor import InputProcessor
from jaxserve.engine.output_processor import OutputProcessor
from jaxserve.errors import EngineDeadError
from jaxserve.metrics import ServerMetrics
from jaxserve.server.app import build_app
from jaxserve.server.chat_settings import ChatSettings, make_chat_settings
from jaxserve.server.connection import HttpServer
from jaxserve.server.generation import ServerContext
from jaxserve.server.load_log import log_load
from jaxserve.server.peers import Peers
from jaxserve.server.renderer import Renderer

logger = logging.getLogger(__name__)

# How long /health answers 503 after the engine's death, so that a probe can see it.
DEAD_GRACE_S = 2.0


async def load_text(config: EngineConfig, path: Path) -> tuple[Tokenizer, ChatSettings]:
    """What turns chats into tokens, and tokens into answers.

    Raises:
      UserError: the checkpoint or a setting cannot be used.
    """
    chat = config.chat
    tokenizer = await asyncio.to_thread(checkpoint.load_tokenizer, path, chat.chat_template)
    return tokenizer, make_chat_settings(chat, tokenizer)


class ApiServer:
    """Answers requests with the engine that `connection` leads to."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        chat: ChatSettings,
        connection: CoreConnection,
    ):
        """config: resolved. Needs a running event loop."""
        num_engines = config.parallel.data_parallel_size
        metrics = ServerMetrics(config.model.served_model_name, num_engines)
        detokenizers = DetokenizerFactory(tokenizer.backend)
        server, num_servers = config.server, config.server.api_server_count
        self._llm = AsyncLLM(
            connection,
            OutputProcessor(detokenizers, metrics, config.info.eos_token_ids),
            client_idx=connection.client_idx,
            num_engines=num_engines,
            # Each API server knows its own queue only.
            max_num_queued=-(-server.max_num_queued_reqs // num_servers),
            max_num_queued_tokens=-(-server.max_num_queued_tokens // num_servers),
        )
        self._peers = Peers(connection, metrics)
        self._context = ServerContext(
            config=config,
            llm=self._llm,
            input_processor=InputProcessor(config, tokenizer, connection.client_idx),
            renderer=Renderer(tokenizer, config.model.max_model_len, chat.template_kwargs),
            chat=chat,
            detokenizers=detokenizers,
            metrics=metrics,
            created_s=int(time.time()),
            peers=self._peers,
        )

    async def run(
        self,
        sock: socket.socket,
        ssl_context: ssl.SSLContext | None,
        stop: asyncio.Event,
        *,
        on_listening: Callable[[], None],
        end_engine: Callable[[], Awaitable[None]],
    ) -> EngineDeadError | None:
        """Serves until the engine dies, which is returned, or `stop` is set.

        sock: bound.  end_engine: called while the last connections end.
        """
        context = self._context
        self._llm.start()
        server = HttpServer(
            build_app(context),
            on_listening,
            request_timeout_s=context.config.server.request_timeout_s,
            ssl_context=ssl_context,
        )
        gc.collect()
        gc.freeze()  # what start-up made stays; the collector need not look at it again and again
        serving = asyncio.create_task(server.serve([sock]))
        dying = asyncio.create_task(self._llm.wait_dead())
        stopping = asyncio.create_task(stop.wait())
        logging_load = asyncio.create_task(log_load(context.metrics))
        await asyncio.wait({serving, dying, stopping}, return_when=asyncio.FIRST_COMPLETED)
        self._peers.close(self._llm.dead_error or shutting_down())
        if dying.done():
            logger.error("the engine is dead; ending in %g s: %s", DEAD_GRACE_S, dying.result())
            await asyncio.wait({serving, stopping}, timeout=DEAD_GRACE_S)
        else:
            logger.info("stopping")
        self._llm.close()
        server.should_exit = True
        await asyncio.gather(serving, end_engine())
        context.renderer.close()
        for task in (logging_load, dying, stopping):
            task.cancel()
        return self._llm.dead_error
