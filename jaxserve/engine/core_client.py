"""The engine as the first process has it: it starts the others, talks to them and ends them."""

import asyncio
import logging
from collections.abc import Callable

from jaxserve.config import EngineConfig
from jaxserve.engine.core_connection import CoreConnection
from jaxserve.engine.engine_processes import EngineProcesses
from jaxserve.engine.executor import WORKER_CLASS
from jaxserve.messages import EngineDead, EngineInput, EngineOutput, Shutdown

# Shutdown: the engine cores are asked, then told (their life pipes), then killed.
_ASK_TIMEOUT_S = 2.0
_TELL_TIMEOUT_S = 1.0


class AsyncCoreClient:
    """Starts all processes of the engine and exchanges messages with them; for one event loop.

    `start`, then `send` and `start_receiving`, then `shutdown`. However this process ends, all
    others end too.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        worker_class: str = WORKER_CLASS,
        listen_fd: int | None = None,
    ):
        """config: resolved for its model.  worker_class: "module:Class".
        listen_fd: a bound socket for all of `--api-server-count`; None: there is only the caller.
        """
        self._config = config
        self._worker_class = worker_class
        self._listen_fd = listen_fd
        self._processes: EngineProcesses | None = None
        self._connection: CoreConnection | None = None
        self._shutdown_lock = asyncio.Lock()
        self._is_ready = False
        self._has_exited = False  # a process, by itself
        self._is_shut_down = False

    @property
    def pids(self) -> list[int]:
        """Of the engine cores."""
        assert self._processes is not None, "not started"
        return [core.pid for core in self._processes.cores]

    @property
    def exit_codes(self) -> list[int | None]:
        """Of the engine cores: None while one runs, minus the signal's number if one killed it."""
        assert self._processes is not None, "not started"
        return [core.exit_code for core in self._processes.cores]

    @property
    def connection(self) -> CoreConnection:
        """To the other processes."""
        assert self._connection is not None, "not started"
        return self._connection

    async def start(self) -> EngineConfig:
        """Starts the processes, waits until all are ready; returns the resolved config.

        Raises:
          UserError: the config cannot be served.
          EngineDeadError: a process failed. After either, or if cancelled, everything is shut down.
        """
        try:
            self._processes = EngineProcesses(
                self._config, self._worker_class, self._listen_fd, self._on_death
            )
            self._connection = CoreConnection(
                0,
                self._processes.input_address,
                self._processes.peer_addresses,
                self._processes.output_fds,
            )
            config = await self._connection.wait_ready()
            self._processes.remove_sockets()
            self._is_ready = True
            return config
        except BaseException:
            await self.shutdown()
            raise

    def send(self, message: EngineInput) -> None:
        """See `CoreConnection.send`."""
        self.connection.send(message)

    def start_receiving(self, handle: Callable[[EngineOutput], None]) -> None:
        """See `CoreConnection.start_receiving`."""
        self.connection.start_receiving(handle)

    async def shutdown(self) -> None:
        """Ends all processes, within 4 s; frees everything. May be called twice."""
        async with self._shutdown_lock:
            if not self._is_shut_down:
                await self._shutdown()
                self._is_shut_down = True

    def _on_death(self, how: str) -> None:
        self._has_exited = True
        self.connection.announce(EngineDead(reason=how))

    async def _shutdown(self) -> None:
        if self._processes is not None:
            self._processes.expect_exits()
            self._processes.release_api_servers()
            is_dead = self._connection is not None and self._connection.dead is not None
            if self._is_ready and not is_dead:
                self.send(Shutdown())
            if (self._is_ready or is_dead) and not self._has_exited:
                await self._processes.wait(_ASK_TIMEOUT_S, first_core_only=is_dead)
            # What is still being imported does not see that it shall exit.
            level = logging.WARNING if self._is_ready else logging.DEBUG
            await self._processes.end(_TELL_TIMEOUT_S, level=level)
        if self._connection is not None:
            self._connection.close()
