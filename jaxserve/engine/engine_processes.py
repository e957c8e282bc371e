"""The processes that the first one starts and ends: engine cores, coordinator, more API servers."""

import asyncio
import logging
import shutil
import socket
import tempfile
import weakref
from collections.abc import Callable

from jaxserve import processes
from jaxserve.config import EngineConfig, encode_config, replace
from jaxserve.messages import (
    ApiServerStart,
    CoordinatorStart,
    EngineCoreStart,
    encode,
)
from jaxserve.processes import Child

# What a dead process sent before is in the kernel; reading it takes no longer than this.
_LAST_WORDS_TIMEOUT_S = 0.3
# A socket's whole path may have 103 characters on some systems.
_MAX_SOCKET_DIR_LEN = 85


class EngineProcesses:
    """Starts them at once, and says so when one has died.

    For one event loop. ZeroMQ's sockets have names only until `remove_sockets`, which is called
    when all are connected, else by `end`, else when the interpreter exits.

    cores: the engine cores, in order.
    input_address: where EngineInput goes.
    output_fds: the caller's sockets from the engine cores, in order, which it closes.
    peer_addresses: where API servers take what others send them.
    """

    def __init__(
        self,
        config: EngineConfig,
        worker_class: str,
        listen_fd: int | None,
        on_death: Callable[[str], None],
    ):
        """listen_fd: what all API servers accept from; None: there is only the caller.
        on_death: gets how a process ended, a moment later, as its own last words count more.
        """
        self._config = config
        self._dir = tempfile.mkdtemp(prefix="jaxserve-")
        if len(self._dir) > _MAX_SOCKET_DIR_LEN:
            shutil.rmtree(self._dir)
            self._dir = tempfile.mkdtemp(prefix="jaxserve-", dir="/tmp")
        self.remove_sockets = weakref.finalize(self, shutil.rmtree, self._dir, ignore_errors=True)
        num_cores = config.parallel.data_parallel_size
        num_api_servers = 1 if listen_fd is None else config.server.api_server_count
        self.peer_addresses = self._addresses("api", num_api_servers)
        # Of each engine core, one pair an API server.
        pairs = [[socket.socketpair() for _ in range(num_api_servers)] for _ in range(num_cores)]
        core_addresses = self._addresses("input", num_cores)
        stats_address = ""
        if num_cores == 1:
            (self.input_address,) = core_addresses
            self._coordinators: list[Child] = []
        else:
            self.input_address, stats_address = self._addresses("coordinator", 2)
            self._coordinators = [self._spawn_coordinator(stats_address, core_addresses)]
        self.cores = [
            self._spawn_core(
                idx, address, [end.fileno() for end, _ in pairs[idx]], stats_address, worker_class
            )
            for idx, address in enumerate(core_addresses)
        ]
        self._api_servers: list[Child] = []
        if listen_fd is not None:
            self._api_servers = [
                self._spawn_api_server(idx, [row[idx][1].fileno() for row in pairs], listen_fd)
                for idx in range(1, num_api_servers)
            ]
        self.output_fds = [row[0][1].detach() for row in pairs]
        for end in (end for row in pairs for pair in row for end in pair):
            end.close()
        self._loop = asyncio.get_running_loop()
        self._exits = {child: self._loop.create_future() for child in self._all}
        self._on_death = on_death
        self._announcements: dict[Child, asyncio.TimerHandle] = {}
        self._is_ending = False
        for child in self._all:
            self._loop.add_reader(child.death_fd, self._on_exit, child)

    def release_api_servers(self) -> None:
        """Tells the others to stop serving; returns at once."""
        for child in self._api_servers:
            child.release()

    def expect_exits(self) -> None:
        """From now on nobody is told of a death."""
        self._is_ending = True
        for timer in self._announcements.values():
            timer.cancel()

    async def wait(self, timeout_s: float, *, first_core_only: bool = False) -> None:
        """Returns when all are dead, or one engine core is, or after that time."""
        if first_core_only:
            exits = [self._exits[core] for core in self.cores]
            await asyncio.wait(exits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.wait(self._exits.values(), timeout=timeout_s)

    async def end(self, timeout_s: float, *, level: int = logging.WARNING) -> None:
        """Tells all to exit, kills those that live on after that time, which is logged."""
        self.expect_exits()
        for child in self._all:
            child.release()
        await self.wait(timeout_s)
        for child in self._all:
            self._loop.remove_reader(child.death_fd)
        processes.stop_all(self._all, timeout_s=0.0, level=level)
        self.remove_sockets()

    @property
    def _all(self) -> list[Child]:
        return [*self._coordinators, *self.cores, *self._api_servers]

    def _addresses(self, name: str, count: int) -> list[str]:
        return [f"ipc://{self._dir}/{name}-{idx}" for idx in range(count)]

    def _spawn_core(
        self,
        idx: int,
        address: str,
        output_fds: list[int],
        stats_address: str,
        worker_class: str,
    ) -> Child:
        config = replace(self._config, data_parallel_rank=idx)
        start = EngineCoreStart(
            config=encode_config(config),
            input_address=address,
            output_fds=output_fds,
            socket_dir=self._dir,
            worker_class=worker_class,
            coordinator_address=stats_address,
        )
        name = f"engine core{config.parallel.suffix}"
        return processes.spawn(
            "jaxserve.engine.core_process", name, encode(start), inherited_fds=output_fds
        )

    def _spawn_coordinator(self, stats_address: str, core_addresses: list[str]) -> Child:
        start = CoordinatorStart(
            config=encode_config(self._config),
            input_address=self.input_address,
            stats_address=stats_address,
            engine_addresses=core_addresses,
        )
        return processes.spawn("jaxserve.engine.coordinator_process", "coordinator", encode(start))

    def _spawn_api_server(self, idx: int, output_fds: list[int], listen_fd: int) -> Child:
        start = ApiServerStart(
            config=encode_config(self._config),
            client_idx=idx,
            input_address=self.input_address,
            peer_addresses=self.peer_addresses,
            output_fds=output_fds,
            listen_fd=listen_fd,
        )
        return processes.spawn(
            "jaxserve.server.api_process",
            f"API server {idx}",
            encode(start),
            inherited_fds=[*output_fds, listen_fd],
        )

    def _on_exit(self, child: Child) -> None:
        self._loop.remove_reader(child.death_fd)
        self._exits[child].set_result(None)
        if not self._is_ending:
            self._announcements[child] = self._loop.call_later(
                _LAST_WORDS_TIMEOUT_S, lambda: self._on_death(child.describe_exit())
            )
