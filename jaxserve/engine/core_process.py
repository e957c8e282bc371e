"""The engine core process: `python -m jaxserve.engine.core_process`, started by the client.

Input thread: receive, decode, hash prompt blocks, have grammars compiled -> `EngineCore.inputs`.
Main thread: `EngineCore.run`, and sending what it gives, through one socket an API server
(`framing.py`) and a ZeroMQ socket to the coordinator, where there is one. The last message of an
engine core that fails is EngineDead; it then exits with code 1, or 2 when the operator's settings
are at fault.
"""

import gc
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable

import zmq

from jaxserve import processes
from jaxserve.config import decode_config, encode_config
from jaxserve.engine.core import EngineCore, ExecutorFailed, InputFailed
from jaxserve.engine.executor import Executor, make_executor
from jaxserve.engine.executor.in_process import describe_error
from jaxserve.engine.framing import FrameWriter
from jaxserve.errors import EngineDeadError, UserError
from jaxserve.grammars.pieces import STACK_BYTES
from jaxserve.logs import setup_logging
from jaxserve.messages import (
    EngineCoreRequest,
    EngineCoreStart,
    EngineDead,
    EngineOutput,
    EngineReady,
    decode_engine_core_start,
    decode_engine_input,
    encode,
)

logger = logging.getLogger(__name__)

_LAST_WORDS_TIMEOUT_S = 1.0


class Outputs:
    """Sends messages, in order, for one thread.

    That is the loop's own: a thread more would take longer to wake up than messages take to send.
    """

    def __init__(self, context: zmq.Context, fds: list[int], coordinator_address: str):
        """fds: sockets to the API servers.
        coordinator_address: of the client that comes after them; empty where there is none.
        """
        self._writers = [FrameWriter(fd) for fd in fds]
        self._senders: list[Callable[[bytes], object]] = [writer.send for writer in self._writers]
        self._coordinator: zmq.Socket | None = None
        if coordinator_address:
            coordinator = self._coordinator = context.socket(zmq.PUSH)
            coordinator.set_hwm(0)
            coordinator.connect(coordinator_address)
            self._senders.append(coordinator.send)

    def send(self, client_idx: int, message: EngineOutput) -> None:
        """To one client; never blocks."""
        self._senders[client_idx](encode(message))

    def send_to_all(self, message: EngineOutput) -> None:
        """To every client."""
        for client_idx in range(len(self._senders)):
            self.send(client_idx, message)

    def close(self) -> None:
        """Sends what is left, for a while."""
        if self._coordinator is not None:  # ZeroMQ goes on by itself
            self._coordinator.close(linger=round(1000 * _LAST_WORDS_TIMEOUT_S))
        deadline_s = time.monotonic() + _LAST_WORDS_TIMEOUT_S
        for writer in self._writers:
            writer.close(deadline_s - time.monotonic())


class InputThread:
    """Receives messages for an engine core and watches its executor."""

    def __init__(self, context: zmq.Context, address: str, core: EngineCore, executor: Executor):
        self._core = core
        self._failure_fds = executor.failure_fds()
        self._socket = context.socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._stop_fd, self._stopper_fd = os.pipe()
        self._thread = threading.Thread(target=self._run, name="input", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends it, whatever has come."""
        os.close(self._stopper_fd)
        self._thread.join()
        os.close(self._stop_fd)

    def _run(self) -> None:
        try:
            self._receive()
        except BaseException as error:
            self._core.inputs.put(InputFailed(error))
        finally:
            self._socket.close(linger=0)

    def _receive(self) -> None:
        poller = zmq.Poller()
        for watched in (self._socket, self._stop_fd, *self._failure_fds):
            poller.register(watched, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stop_fd in ready:
                return
            if self._socket in ready:
                message = decode_engine_input(self._socket.recv())
                if isinstance(message, EngineCoreRequest):
                    message = self._core.make_request(message)
                self._core.inputs.put(message)
            for fd in self._failure_fds:
                if fd in ready:
                    poller.unregister(fd)
                    self._core.inputs.put(ExecutorFailed())


def run_engine_core(start: EngineCoreStart) -> int:
    """Runs an engine core from start to end; returns the process' exit code."""
    context = zmq.Context()
    outputs = Outputs(context, start.output_fds, start.coordinator_address)
    executor = input_thread = core = None
    try:
        executor = make_executor(decode_config(start.config), start.worker_class)
        config = executor.start()
        core = EngineCore(
            config,
            executor,
            outputs.send,
            num_clients=len(start.output_fds),
            reports_steps=bool(start.coordinator_address),
        )
        input_thread = InputThread(context, start.input_address, core, executor)
        outputs.send_to_all(EngineReady(config=encode_config(config)))
        # What start-up made stays; the collector need not look at it again and again.
        gc.collect()
        gc.freeze()
        core.run()
        exit_code = 0
    except Exception as error:
        dead, exit_code = _last_message(error)
        outputs.send_to_all(dead)
    if input_thread is not None:
        input_thread.close()
    if core is not None:
        core.shutdown()
    if executor is not None:
        executor.shutdown()
    outputs.close()
    context.term()
    return exit_code


def _last_message(error: Exception) -> tuple[EngineDead, int]:
    """What the clients hear of a failure, and the exit code; logs what they do not hear."""
    if isinstance(error, UserError):
        return EngineDead(reason=error.problem, fix=error.fix), 2
    if isinstance(error, EngineDeadError):
        logger.error("engine core failed: %s", error)
        return EngineDead(reason=str(error)), 1
    logger.error("engine core failed", exc_info=error)
    return EngineDead(reason=f"engine core failed: {describe_error(error)}"), 1


def main() -> None:
    start_message, life_fd = processes.become_child()
    start = decode_engine_core_start(start_message)
    config = decode_config(start.config)
    name = f"core{config.parallel.suffix}"
    # The first process made the directory of the sockets. When it is gone, nobody else removes it.
    processes.exit_with_parent(
        life_fd, f"engine {name}", lambda: shutil.rmtree(start.socket_dir, ignore_errors=True)
    )
    setup_logging(config.server.log_level, name.replace(" ", "-"))
    threading.stack_size(STACK_BYTES)  # of threads to come, which compile grammars
    sys.exit(run_engine_core(start))


if __name__ == "__main__":
    main()
