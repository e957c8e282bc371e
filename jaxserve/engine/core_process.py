"""The engine core process: `python -m jaxserve.engine.core_process`, started by the client.

Input thread: receive, decode, hash prompt blocks, have grammars compiled -> `EngineCore.inputs`.
Main thread: `EngineCore.run`. Output thread: encode, send, one socket an API server and one to the
coordinator, where there is one. The last message of an engine core that fails is EngineDead; it
then exits with code 1, or 2 when the operator's settings are at fault.
"""

import gc
import logging
import os
import queue
import shutil
import sys
import threading

import zmq

from jaxserve import processes
from jaxserve.config import decode_config, encode_config
from jaxserve.engine.core import EngineCore, ExecutorFailed, InputFailed
from jaxserve.engine.executor import Executor, make_executor
from jaxserve.engine.executor.in_process import describe_error
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

_LAST_WORDS_TIMEOUT_MS = 1000


class OutputThread:
    """Encodes and sends messages, in order."""

    def __init__(self, context: zmq.Context, addresses: list[str]):
        self._context = context
        self._addresses = addresses
        self._messages: queue.SimpleQueue[tuple[int, EngineOutput] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def send(self, client_idx: int, message: EngineOutput) -> None:
        """Queues a message for one client; never blocks."""
        self._messages.put((client_idx, message))

    def send_to_all(self, message: EngineOutput) -> None:
        """Queues a message for every client."""
        for client_idx in range(len(self._addresses)):
            self.send(client_idx, message)

    def close(self) -> None:
        """Sends what is queued, then ends."""
        self._messages.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._send_messages()
        except BaseException as error:
            # Nobody can be told any more, but the clients see the process end.
            logger.error("the output thread failed", exc_info=error)
            os._exit(1)

    def _send_messages(self) -> None:
        sockets = [self._context.socket(zmq.PUSH) for _ in self._addresses]
        for socket, address in zip(sockets, self._addresses, strict=True):
            socket.set_hwm(0)
            socket.connect(address)
        while (item := self._messages.get()) is not None:
            client_idx, message = item
            sockets[client_idx].send(encode(message))
        for socket in sockets:
            socket.close(linger=_LAST_WORDS_TIMEOUT_MS)


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
    coordinator = [start.coordinator_address] if start.coordinator_address else []
    output_thread = OutputThread(context, [*start.output_addresses, *coordinator])
    executor = input_thread = core = None
    try:
        executor = make_executor(decode_config(start.config), start.worker_class)
        config = executor.start()
        core = EngineCore(
            config,
            executor,
            output_thread.send,
            num_clients=len(start.output_addresses),
            reports_steps=bool(coordinator),
        )
        input_thread = InputThread(context, start.input_address, core, executor)
        output_thread.send_to_all(EngineReady(config=encode_config(config)))
        # What start-up made stays; the collector need not look at it again and again.
        gc.collect()
        gc.freeze()
        core.run()
        exit_code = 0
    except Exception as error:
        dead, exit_code = _last_message(error)
        output_thread.send_to_all(dead)
    if input_thread is not None:
        input_thread.close()
    if core is not None:
        core.shutdown()
    if executor is not None:
        executor.shutdown()
    output_thread.close()
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
