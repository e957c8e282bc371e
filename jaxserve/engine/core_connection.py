"""An API server's sockets: to the engine cores, or their coordinator, and to its peers."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from jaxserve.config import EngineConfig, decode_config
from jaxserve.errors import EngineDeadError, UserError
from jaxserve.messages import (
    ApiServerInput,
    ApiServerReady,
    EngineCoreOutputs,
    EngineDead,
    EngineInput,
    EngineOutput,
    EngineReady,
    MetricsRequest,
    PeerMessage,
    StartServing,
    UtilityCall,
    UtilityResult,
    decode_api_server_input,
    encode,
)

_CONNECT_POLL_S = 0.002
_PING_ID = 0  # not one of AsyncLLM's


class CoreConnection:
    """Exchanges messages, for one event loop and one receiving task.

    `wait_ready`, then `send` and `recv`, then `close`. It watches no process: whoever does says so
    with `announce`.
    """

    def __init__(
        self,
        client_idx: int,
        input_address: str,
        output_addresses: Sequence[str],
        num_engines: int,
    ):
        """input_address: where EngineInput goes.  output_addresses: of all API servers; this one
        binds its own."""
        self.client_idx = client_idx
        self.num_engines = num_engines
        self.on_peer_message: Callable[[PeerMessage], None] | None = None
        self._context = zmq.Context()
        self._output = self._socket(zmq.PULL)
        self._output.bind(output_addresses[client_idx])
        self._input = self._socket(zmq.PUSH)
        self._input.connect(input_address)
        self._peers: dict[int, zmq.Socket] = {}
        for peer_idx, address in enumerate(output_addresses):
            if peer_idx != client_idx:
                self._peers[peer_idx] = self._socket(zmq.PUSH)
                self._peers[peer_idx].connect(address)
        self._received: deque[bytes] = deque()
        self._early: deque[ApiServerInput] = deque()  # what came before anybody could use it
        self._arrival: asyncio.Future[None] | None = None  # what `recv` waits for
        self._is_ready = False
        self.dead: EngineDead | None = None
        asyncio.get_running_loop().add_reader(self._output.fileno(), self._take_messages)

    @property
    def peer_idxs(self) -> list[int]:
        """The other API servers."""
        return list(self._peers)

    async def wait_ready(self) -> EngineConfig:
        """Until all engine cores are warm and all processes connected; returns the resolved config.

        Raises:
          UserError: the config cannot be served.
          EngineDeadError: a process failed.
        """
        configs: dict[int, EngineConfig] = {}
        others = set(self._peers) if self.client_idx == 0 else set()
        while len(configs) < self.num_engines or others:
            message = await self._recv_start()
            if isinstance(message, EngineReady):
                config = decode_config(message.config)
                configs[config.parallel.data_parallel_rank] = config
            elif isinstance(message, ApiServerReady):
                others.remove(message.client_idx)
        await self._wait_connected()
        self._is_ready = True
        if self.client_idx == 0:
            await self._ping()
        return configs[0]

    async def wait_to_serve(self) -> None:
        """In an API server that is not the first: says that it is ready, waits for the word.

        Raises:
          EngineDeadError: a process failed.
        """
        self.send_to_peer(0, ApiServerReady(self.client_idx))
        while not isinstance(await self._recv_start(), StartServing):
            pass

    def tell_peers_to_serve(self) -> None:
        """In the first API server: ends `wait_to_serve` in all others."""
        for peer_idx in self._peers:
            self.send_to_peer(peer_idx, StartServing())

    def send(self, message: EngineInput) -> None:
        """Sends a message; never blocks.

        Raises:
          EngineDeadError: `recv` has said so already, or `close` was called.
        """
        assert self._is_ready, "not started"
        if self.dead is not None:
            raise EngineDeadError(self.dead.reason)
        # Refused only when the other side is gone, which `recv` tells.
        with contextlib.suppress(zmq.Again):
            self._input.send(encode(message), zmq.NOBLOCK)

    def send_to_peer(self, peer_idx: int, message: PeerMessage) -> None:
        """Sends a message to another API server; never blocks."""
        with contextlib.suppress(zmq.Again):  # it is gone, which the first process tells
            self._peers[peer_idx].send(encode(message), zmq.NOBLOCK)

    async def recv(self) -> EngineOutput:
        """The next message of an engine core. When one is dead, in whatever way, it is EngineDead,
        and stays it. May be cancelled; nothing is lost.
        """
        while True:
            message = self._early.popleft() if self._early else await self._recv()
            if not isinstance(message, PeerMessage):
                return message
            if self.on_peer_message is not None:
                self.on_peer_message(message)

    def announce(self, message: EngineDead) -> None:
        """A process has died: tells the other API servers, and whoever calls `recv` here."""
        for socket in self._peers.values():
            with contextlib.suppress(zmq.Again):  # not connected yet, and about to be ended
                socket.send(encode(message), zmq.NOBLOCK)
        self._received.append(encode(message))
        self._wake()

    def close(self) -> None:
        """Frees everything; from now on `recv` says that the engine is dead."""
        if self._context.closed:
            return
        self.dead = self.dead or EngineDead(reason="the engine was shut down")
        self._wake()
        asyncio.get_running_loop().remove_reader(self._output.fileno())
        for socket in (self._input, self._output, *self._peers.values()):
            socket.close()
        self._context.term()

    async def _recv(self) -> ApiServerInput:
        if self.dead is not None:
            return self.dead
        if not self._received:
            self._arrival = asyncio.get_running_loop().create_future()
            self._take_messages()  # what came before the first call has woken nobody
            try:
                await self._arrival
            finally:
                self._arrival = None
        if self.dead is not None:
            return self.dead
        message = decode_api_server_input(self._received.popleft())
        if isinstance(message, EngineDead):
            self.dead = message
        return message

    async def _recv_start(self) -> ApiServerInput:
        """As `_recv`, but a death is raised, and what is for later is kept."""
        message = await self._recv()
        if isinstance(message, EngineDead):
            if message.fix is not None:
                raise UserError(message.reason, fix=message.fix)
            raise EngineDeadError(message.reason)
        if isinstance(message, EngineCoreOutputs | MetricsRequest):
            self._early.append(message)
        return message

    async def _ping(self) -> None:
        """Returns when a message has come through to every engine core, and back."""
        self.send(UtilityCall(_PING_ID, "ping"))
        num_answers = 0
        while num_answers < self.num_engines:
            message = await self._recv_start()
            num_answers += isinstance(message, UtilityResult) and message.call_id == _PING_ID

    async def _wait_connected(self) -> None:
        for socket in (self._input, *self._peers.values()):
            while not socket.poll(0, zmq.POLLOUT):
                self._take_messages()
                if self._received:  # perhaps why it will never be
                    await self._recv_start()
                await asyncio.sleep(_CONNECT_POLL_S)

    def _take_messages(self) -> None:
        """Takes all that has come. ZeroMQ wakes us for the first message after none was left."""
        with contextlib.suppress(zmq.Again):
            while True:
                self._received.append(self._output.recv(zmq.NOBLOCK))
        if self._received:
            self._wake()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _socket(self, kind: int) -> zmq.Socket[Any]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.linger = 0
        socket.immediate = True  # writable means connected
        return socket
