"""What talks to an engine core: `AsyncCoreClient` to one in a process of its own, for servers, and
`InProcClient` to one in the caller's process, for the offline class `LLM`.
"""

import asyncio
import contextlib
import shutil
import signal
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import zmq

from jaxserve import processes
from jaxserve.config import EngineConfig, decode_config, encode_config
from jaxserve.engine.core import EngineCore
from jaxserve.engine.executor import WORKER_CLASS, make_executor
from jaxserve.errors import EngineDeadError, UserError
from jaxserve.messages import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreStart,
    EngineDead,
    EngineInput,
    EngineOutput,
    EngineReady,
    SchedulerStats,
    Shutdown,
    UtilityCall,
    UtilityResult,
    decode_engine_output,
    encode,
)

# Shutdown: the engine core is asked, then told (its life pipe), then killed.
_ASK_TIMEOUT_S = 2.0
_TELL_TIMEOUT_S = 1.0
# What a dead engine core sent before is in the kernel; reading it takes no longer than this.
_LAST_WORDS_TIMEOUT_S = 0.3
_CONNECT_POLL_S = 0.002
# A socket's whole path may have 103 characters on some systems.
_MAX_SOCKET_DIR_LEN = 90


class _CoreProcess:
    """The engine core process as an event loop sees it.

    exited: done when the process is dead.
    """

    def __init__(self, config: EngineConfig, worker_class: str):
        socket_dir = tempfile.mkdtemp(prefix="jaxserve-")
        if len(socket_dir) > _MAX_SOCKET_DIR_LEN:
            shutil.rmtree(socket_dir)
            socket_dir = tempfile.mkdtemp(prefix="jaxserve-", dir="/tmp")
        # Called when both sides are connected, else by `end`, else when the interpreter exits.
        self.remove_sockets = weakref.finalize(self, shutil.rmtree, socket_dir, ignore_errors=True)
        self.input_address = f"ipc://{socket_dir}/input"
        self.output_address = f"ipc://{socket_dir}/output-0"
        start = EngineCoreStart(
            config=encode_config(config),
            input_address=self.input_address,
            output_addresses=[self.output_address],
            socket_dir=socket_dir,
            worker_class=worker_class,
        )
        self.child = processes.spawn("jaxserve.engine.core_process", "engine core", encode(start))
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self.child.death_fd, self._on_exit)

    def _on_exit(self) -> None:
        self._loop.remove_reader(self.child.death_fd)
        self.exited.set_result(None)

    async def wait(self, timeout_s: float) -> None:
        """Returns when it is dead, or after that time."""
        await asyncio.wait({self.exited}, timeout=timeout_s)

    async def end(self, timeout_s: float) -> None:
        """Tells it to exit, kills it if it lives on."""
        self.child.release()
        await self.wait(timeout_s)
        self._loop.remove_reader(self.child.death_fd)
        processes.stop_all([self.child], timeout_s=0.0)
        self.remove_sockets()


class AsyncCoreClient:
    """Starts an engine core process and exchanges messages with it; for one event loop.

    `start`, then `send` and `recv` (one task receives), then `shutdown`. However this process ends,
    the engine core and its workers end too. The sockets have names only while the engine starts.
    """

    def __init__(self, config: EngineConfig, *, worker_class: str = WORKER_CLASS):
        """config: resolved for its model.  worker_class: "module:Class"."""
        self._config = config
        self._worker_class = worker_class
        self._context = zmq.Context()
        self._output = self._context.socket(zmq.PULL)
        self._input = self._context.socket(zmq.PUSH)
        for socket in (self._input, self._output):
            socket.set_hwm(0)
            socket.linger = 0
        self._input.immediate = True  # writable means connected
        self._process: _CoreProcess | None = None
        self._received: deque[bytes] = deque()
        self._arrival: asyncio.Future[None] | None = None  # what `recv` waits for
        self._shutdown_lock = asyncio.Lock()
        self._is_ready = False
        self._dead: EngineDead | None = None

    @property
    def pid(self) -> int:
        """Of the engine core."""
        return self._started_process.child.pid

    @property
    def exit_code(self) -> int | None:
        """Of the engine core: None while it runs, minus the signal's number if one killed it."""
        return self._started_process.child.exit_code

    async def start(self) -> EngineConfig:
        """Starts the engine core, waits until its workers are warm; returns the resolved config.

        Raises:
          UserError: the config cannot be served.
          EngineDeadError: the engine failed. After either, or if cancelled, everything is shut
            down.
        """
        try:
            self._process = _CoreProcess(self._config, self._worker_class)
            self._output.bind(self._process.output_address)
            asyncio.get_running_loop().add_reader(self._output.fileno(), self._take_messages)
            message = await self.recv()
            if isinstance(message, EngineDead):
                if message.fix is not None:
                    raise UserError(message.reason, fix=message.fix)
                raise EngineDeadError(message.reason)
            assert isinstance(message, EngineReady), message
            await self._connect_input()
            self._is_ready = True
            return decode_config(message.config)
        except BaseException:
            await self.shutdown()
            raise

    def send(self, message: EngineInput) -> None:
        """Sends a message; never blocks.

        Raises:
          EngineDeadError: `recv` has said so already, or `shutdown` was called.
        """
        assert self._is_ready, "not started"
        if self._dead is not None:
            raise EngineDeadError(self._dead.reason)
        # Refused only when the other side is gone, which `recv` tells.
        with contextlib.suppress(zmq.Again):
            self._input.send(encode(message), zmq.NOBLOCK)

    async def recv(self) -> EngineOutput:
        """The next message. When the engine core is dead, in whatever way, it is EngineDead, and
        stays it. May be cancelled; nothing is lost.
        """
        if self._dead is not None:
            return self._dead
        data = await self._receive()
        if self._dead is not None:
            return self._dead
        if data is None:
            message = EngineDead(reason=self._started_process.child.describe_exit())
        else:
            message = decode_engine_output(data)
        if isinstance(message, EngineDead):
            self._dead = message
        return message

    async def shutdown(self) -> None:
        """Ends engine core and workers, within 4 s; frees everything. May be called twice."""
        async with self._shutdown_lock:
            if not self._context.closed:
                await self._shutdown()

    @property
    def _started_process(self) -> _CoreProcess:
        assert self._process is not None, "not started"
        return self._process

    async def _connect_input(self) -> None:
        """Returns when connected, and then removes the names of the sockets."""
        process = self._started_process
        self._input.connect(process.input_address)
        while not self._input.poll(0, zmq.POLLOUT):
            if process.exited.done():
                raise EngineDeadError(process.child.describe_exit())
            await asyncio.sleep(_CONNECT_POLL_S)
        process.remove_sockets()

    async def _receive(self) -> bytes | None:
        """The next message; None when the engine core is dead and all it sent has been received."""
        exited = self._started_process.exited
        if not self._received:
            self._arrival = asyncio.get_running_loop().create_future()
            exited.add_done_callback(self._stop_waiting)
            self._take_messages()  # what came before the first call has woken nobody
            try:
                await self._arrival
            finally:
                self._arrival = None
                exited.remove_done_callback(self._stop_waiting)
        if not self._received:
            await asyncio.sleep(_LAST_WORDS_TIMEOUT_S)
            self._take_messages()
        return self._received.popleft() if self._received else None

    def _take_messages(self) -> None:
        """Takes all that has come. ZeroMQ wakes us for the first message after none was left."""
        with contextlib.suppress(zmq.Again):
            while True:
                self._received.append(self._output.recv(zmq.NOBLOCK))
        if self._received:
            self._stop_waiting()

    def _stop_waiting(self, exited: asyncio.Future[None] | None = None) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def _shutdown(self) -> None:
        if self._process is not None:
            if self._is_ready and self._dead is None:
                self.send(Shutdown())
            if self._is_ready or self._dead is not None:
                await self._process.wait(_ASK_TIMEOUT_S)
            self._dead = self._dead or EngineDead(reason="the engine was shut down")
            await self._process.end(_TELL_TIMEOUT_S)
        asyncio.get_running_loop().remove_reader(self._output.fileno())
        self._input.close()
        self._output.close()
        self._context.term()


class InProcClient:
    """An engine core in the caller's process, stepped by the caller: no sockets, no threads.

    `start`, then any of the others, then `shutdown`. One thread.
    """

    def __init__(self, config: EngineConfig, *, worker_class: str = WORKER_CLASS):
        """config: resolved for its model; `worker.executor` says where the model runs.
        worker_class: "module:Class".
        """
        self._executor = make_executor(config, worker_class)
        self._core: EngineCore | None = None
        self._is_shut_down = False
        self._emitted: list[EngineOutput] = []
        self.stats = SchedulerStats()

    def start(self) -> EngineConfig:
        """Waits until the workers are warm; returns the resolved config.

        Raises:
          UserError: the config cannot be served.
          EngineDeadError: a worker failed. After either, everything is shut down.
        """
        try:
            config = self._executor.start()
            self._core = EngineCore(config, self._executor, self._emit)
        except BaseException:
            self.shutdown()
            raise
        return config

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        core = self._running_core
        return core.has_work or core.is_compiling or not core.inputs.empty()

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queues a sequence; its id is unique among the unfinished ones."""
        core = self._running_core
        core.inputs.put(core.make_request(request))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests; unknown ids are ignored. Nothing more comes for them."""
        self._running_core.inputs.put(AbortRequests(list(request_ids)))

    def call(self, method: str, *args: Any) -> Any:
        """Runs a utility method of the engine core, such as `reset_prefix_cache`."""
        core = self._running_core
        core.inputs.put(UtilityCall(0, method, list(args)))
        core.take_inputs()
        core.run_utility_calls()
        result = self._emitted.pop()
        assert isinstance(result, UtilityResult), result
        if result.error is not None:
            raise ValueError(result.error)
        return result.value

    def step(self) -> list[EngineCoreOutput]:
        """Runs until the results of a step are in and returns them, perhaps none; [] without work.

        Ctrl-C takes effect between two steps, so that it leaves the engine usable: abort what runs
        and go on. A second Ctrl-C does not wait.

        Raises:
          EngineDeadError: no further step can be run; `str()` is the root cause.
        """
        core = self._running_core
        with _interrupt_deferred():
            core.take_inputs()
            while (core.has_work or core.is_compiling) and not self._emitted:
                core.step() if core.has_work else core.sleep()
        outputs: list[EngineCoreOutput] = []
        for message in self._emitted:
            assert isinstance(message, EngineCoreOutputs), message
            outputs += message.outputs
            self.stats = message.stats
        self._emitted.clear()
        return outputs

    def shutdown(self) -> None:
        """Ends the workers. May be called twice."""
        if self._core is not None:
            self._core.shutdown()
        self._core = None
        if not self._is_shut_down:
            self._is_shut_down = True
            self._executor.shutdown()

    @property
    def _running_core(self) -> EngineCore:
        assert self._core is not None, "not started, or shut down"
        return self._core

    def _emit(self, client_idx: int, message: EngineOutput) -> None:
        self._emitted.append(message)


@contextlib.contextmanager
def _interrupt_deferred() -> Iterator[None]:
    """Holds a KeyboardInterrupt back until the block has ended; a second one is not held back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return
    was_interrupted = False

    def defer(number: int, frame: FrameType | None) -> None:
        nonlocal was_interrupted
        if was_interrupted:
            raise KeyboardInterrupt
        was_interrupted = True

    signal.signal(signal.SIGINT, defer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if was_interrupted:
        raise KeyboardInterrupt
