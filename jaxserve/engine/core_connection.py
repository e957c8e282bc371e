"""An API server's sockets: to the engine cores, or their coordinator, from the engine cores, and to
and from its peers."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from jaxserve.config import EngineConfig, decode_config
from jaxserve.engine.framing import FrameReader
from jaxserve.errors import EngineDeadError, UserError
from jaxserve.messages import (
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
    decode_engine_output,
    decode_peer_input,
    encode,
)

logger = logging.getLogger(__name__)

_CONNECT_POLL_S = 0.002
_PING_ID = 0  # not one of AsyncLLM's


class CoreConnection:
    """Exchanges messages, for one event loop, which receives them itself: no task waits for them.

    `wait_ready`, then `send` and `start_receiving`, then `close`. It watches no process: whoever
    does says so with `announce`.
    """

    def __init__(
        self,
        client_idx: int,
        input_address: str,
        peer_addresses: Sequence[str],
        output_fds: Sequence[int],
    ):
        """input_address: where EngineInput goes.
        peer_addresses: of all API servers; this one binds its own, if there are others.
        output_fds: sockets from the engine cores, in order; closed by `close`.
        """
        self.client_idx = client_idx
        self.on_peer_message: Callable[[PeerMessage], None] | None = None
        self.dead: EngineDead | None = None
        self._loop = asyncio.get_running_loop()
        self._handle: Callable[[EngineOutput], None] | None = None
        # What came before `start_receiving`: not looked at yet, and what nobody could use.
        self._received: deque[EngineOutput | PeerMessage] = deque()
        self._early: list[EngineOutput | PeerMessage] = []
        self._arrival: asyncio.Future[None] | None = None  # what `_recv_start` waits for
        self._is_ready = False
        self._readers = [FrameReader(fd, decode_engine_output) for fd in output_fds]
        for reader in self._readers:
            self._loop.add_reader(reader.fd, self._read_outputs, reader)
        self._context = zmq.Context()
        self._input = self._socket(zmq.PUSH)
        self._input.connect(input_address)
        self._peer_input: zmq.Socket[Any] | None = None
        self._peers: dict[int, zmq.Socket[Any]] = {}
        if len(peer_addresses) > 1:
            self._peer_input = self._socket(zmq.PULL)
            self._peer_input.bind(peer_addresses[client_idx])
            self._loop.add_reader(self._peer_input.fileno(), self._read_peers)
        for peer_idx, address in enumerate(peer_addresses):
            if peer_idx != client_idx:
                self._peers[peer_idx] = self._socket(zmq.PUSH)
                self._peers[peer_idx].connect(address)

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
        while len(configs) < len(self._readers) or others:
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
          EngineDeadError: an engine core has said so, or `announce` or `close` was called.
        """
        assert self._is_ready, "not started"
        if self.dead is not None:
            raise EngineDeadError(self.dead.reason)
        # Refused only when the other side is gone, which will be announced.
        with contextlib.suppress(zmq.Again):
            self._input.send(encode(message), zmq.NOBLOCK)

    def send_to_peer(self, peer_idx: int, message: PeerMessage) -> None:
        """Sends a message to another API server; never blocks."""
        with contextlib.suppress(zmq.Again):  # it is gone, which the first process tells
            self._peers[peer_idx].send(encode(message), zmq.NOBLOCK)

    def start_receiving(self, handle: Callable[[EngineOutput], None]) -> None:
        """From now on `handle` gets every message of an engine core as it comes; what came before,
        it gets now. EngineDead, when one is dead in whatever way, is the last.
        """
        assert self._handle is None, "somebody receives already"
        self._handle = handle
        for message in (*self._early, *self._received):
            if not isinstance(message, PeerMessage):
                handle(message)
            elif self.on_peer_message is not None:
                self.on_peer_message(message)
        self._early.clear()
        self._received.clear()

    def announce(self, message: EngineDead) -> None:
        """A process has died: tells the other API servers, and whoever receives here."""
        for socket in self._peers.values():
            with contextlib.suppress(zmq.Again):  # not connected yet, and about to be ended
                socket.send(encode(message), zmq.NOBLOCK)
        self._take_output(message)

    def close(self) -> None:
        """Frees everything; whoever receives hears that the engine is dead."""
        if self._context.closed:
            return
        self._take_output(EngineDead(reason="the engine was shut down"))
        for reader in self._readers:
            self._loop.remove_reader(reader.fd)
            reader.close()
        if self._peer_input is not None:
            self._loop.remove_reader(self._peer_input.fileno())
            self._peer_input.close()
        for socket in (self._input, *self._peers.values()):
            socket.close()
        self._context.term()

    def _read_outputs(self, reader: FrameReader[EngineOutput]) -> None:
        """For a socket that is readable. It stays so while anything is left."""
        try:
            messages = reader.read()
            if messages is None:  # whoever watches the process says why
                self._loop.remove_reader(reader.fd)
                return
            for message in messages:
                self._take_output(message)
        except Exception as error:
            self._loop.remove_reader(reader.fd)
            self._fail(error)

    def _read_peers(self) -> None:
        """Takes all that has come. ZeroMQ wakes us for the first message after none was left."""
        if self._peer_input is None:
            return
        try:
            while True:
                message = decode_peer_input(self._peer_input.recv(zmq.NOBLOCK))
                if isinstance(message, EngineDead):
                    self._take_output(message)
                else:
                    self._take_peer_message(message)
        except zmq.Again:
            return
        except Exception as error:
            self._fail(error)

    def _take_output(self, message: EngineOutput) -> None:
        if self.dead is not None:
            return
        if isinstance(message, EngineDead):
            self.dead = message
        if self._handle is None:
            self._keep(message)
        else:
            self._handle(message)

    def _take_peer_message(self, message: PeerMessage) -> None:
        if self._handle is None:
            self._keep(message)
        elif self.dead is None and self.on_peer_message is not None:
            self.on_peer_message(message)

    def _fail(self, error: Exception) -> None:
        logger.error("cannot process what was received", exc_info=error)
        self._take_output(EngineDead(reason=f"the API server failed: {error!r}"))

    def _keep(self, message: EngineOutput | PeerMessage) -> None:
        self._received.append(message)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def _recv_start(self) -> EngineOutput | PeerMessage:
        """The next message; a death is raised, and what is for later is kept."""
        if not self._received and self.dead is None:
            self._arrival = self._loop.create_future()
            self._read_peers()  # what came before the first call has woken nobody
            try:
                await self._arrival
            finally:
                self._arrival = None
        self._check_alive()
        message = self._received.popleft()
        if isinstance(message, EngineCoreOutputs | MetricsRequest):
            self._early.append(message)
        return message

    def _check_alive(self) -> None:
        if self.dead is None:
            return
        if self.dead.fix is not None:
            raise UserError(self.dead.reason, fix=self.dead.fix)
        raise EngineDeadError(self.dead.reason)

    async def _ping(self) -> None:
        """Returns when a message has come through to every engine core, and back."""
        self.send(UtilityCall(_PING_ID, "ping"))
        num_answers = 0
        while num_answers < len(self._readers):
            message = await self._recv_start()
            num_answers += isinstance(message, UtilityResult) and message.call_id == _PING_ID

    async def _wait_connected(self) -> None:
        for socket in (self._input, *self._peers.values()):
            while not socket.poll(0, zmq.POLLOUT):
                self._check_alive()  # perhaps why it will never be
                await asyncio.sleep(_CONNECT_POLL_S)

    def _socket(self, kind: int) -> zmq.Socket[Any]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.linger = 0
        socket.immediate = True  # writable means connected
        return socket
