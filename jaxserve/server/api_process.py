"""An API server that is not the first process: `python -m jaxserve.server.api_process`.

It serves once the first process says so, on the socket that it got from there, and until that
closes its life pipe.
"""

import asyncio
import logging
import os
import select
import socket
import sys
import threading
from pathlib import Path

import uvloop
import zmq

from jaxserve import processes
from jaxserve.config import EngineConfig, decode_config
from jaxserve.engine.core_connection import CoreConnection
from jaxserve.errors import EngineDeadError, UserError
from jaxserve.grammars.pieces import STACK_BYTES
from jaxserve.logs import setup_logging
from jaxserve.messages import ApiServerStart, decode_api_server_start
from jaxserve.server.api_server import ApiServer, load_text
from jaxserve.server.security import make_ssl_context

logger = logging.getLogger(__name__)


async def _serve(start: ApiServerStart, life_fd: int) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_released() -> None:
        loop.remove_reader(life_fd)
        stop.set()

    loop.add_reader(life_fd, on_released)
    config = decode_config(start.config)
    connection = CoreConnection(
        start.client_idx,
        start.input_address,
        start.peer_addresses,
        start.output_fds,
    )
    starting = asyncio.create_task(_start(config, connection))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        os._exit(0)  # a thread may be reading the tokenizer; there is nothing to be lost
    server = starting.result()

    async def end_engine() -> None:
        """The first process does."""

    with socket.socket(fileno=start.listen_fd) as sock:
        await server.run(
            sock,
            make_ssl_context(config.server),
            stop,
            on_listening=lambda: None,
            end_engine=end_engine,
        )
    connection.close()


async def _start(config: EngineConfig, connection: CoreConnection) -> ApiServer:
    """Returns when the first process says that all shall serve."""
    tokenizer, chat = await load_text(config, Path(config.info.path))
    config = await connection.wait_ready()
    server = ApiServer(config, tokenizer, chat, connection)
    await connection.wait_to_serve()
    return server


def main() -> None:
    start_message, life_fd = processes.become_child()
    start = decode_api_server_start(start_message)
    processes.name_process(f"API server {start.client_idx}")
    threading.stack_size(STACK_BYTES)  # of threads to come, which check grammars
    level = decode_config(start.config).server.log_level
    setup_logging(level, f"api-{start.client_idx}")
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # not what odd clients send
    try:
        asyncio.run(_serve(start, life_fd), loop_factory=uvloop.new_event_loop)
    except UserError as error:  # the first process has it too, and says how to mend it
        logger.debug("not started: %s", error.problem)
        sys.exit(2)
    except zmq.ZMQError:
        if select.select([life_fd], [], [], 0)[0]:  # told to exit: the sockets are gone
            sys.exit(0)
        raise
    except EngineDeadError as error:
        logger.error("not started: %s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
