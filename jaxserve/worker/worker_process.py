"""The worker process: `python -m jaxserve.worker.worker_process`, started by the executor.

Main loop: read a plan -> execute it; read a mask -> sample with it. Output thread: collect a
result -> send it. A worker exits when the engine core says so or dies (`jaxserve.processes`), and
with code 1 when it fails itself; its last message then says why.
"""

import gc
import logging
import os
import queue
import threading

from jaxserve import processes
from jaxserve.config import decode_config, encode_config
from jaxserve.engine.executor import load_class
from jaxserve.engine.executor.in_process import Worker, describe_error
from jaxserve.engine.executor.ring_buffer import RingBuffer, RingReader
from jaxserve.errors import UserError
from jaxserve.logs import setup_logging
from jaxserve.messages import (
    GrammarMask,
    WorkerFailed,
    WorkerOutput,
    WorkerReady,
    WorkerStart,
    decode_worker_input,
    decode_worker_start,
    encode,
)

logger = logging.getLogger(__name__)


class WorkerProcess:
    """Joins a worker to its rings."""

    def __init__(self, start: WorkerStart):
        self._start = start
        plan_ring, result_ring = RingBuffer(start.plan_ring), RingBuffer(start.result_ring)
        for fd in [*plan_ring.fds(), *result_ring.fds()]:
            os.set_inheritable(fd, False)
        # No death descriptors: when the engine core is gone, so is this process.
        self._plans: RingReader = plan_ring.reader(start.reader_idx)
        self._results = result_ring.writer()
        self._results_lock = threading.Lock()
        self._num_executed: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run(self) -> None:
        """Loads the worker, then runs plans for ever. Any failure ends the process."""
        try:
            gc.disable()  # loading makes a million objects that stay, and no garbage to speak of
            worker_class = load_class(self._start.worker_class)
            worker: Worker = worker_class(decode_config(self._start.config), self._start.group)
            config = worker.load()
            # What loading made stays; the collector need not look at it again and again.
            gc.collect()
            gc.freeze()
            gc.enable()
            threading.Thread(
                target=self._run_output_loop, args=(worker,), name="output", daemon=True
            ).start()
            self._send(WorkerReady(config=encode_config(config)))
            self._run_plan_loop(worker)
        except BaseException as error:
            self._fail(error)

    def _run_plan_loop(self, worker: Worker) -> None:
        while True:
            message = decode_worker_input(self._plans.read())
            if isinstance(message, GrammarMask):
                worker.sample(message)
            else:
                worker.execute(message)
                if message.awaits_mask:
                    continue
            self._num_executed.put(None)

    def _run_output_loop(self, worker: Worker) -> None:
        try:
            while True:
                self._num_executed.get()
                output = worker.collect()
                if self._start.group.rank == 0:
                    self._send(output)
        except BaseException as error:
            self._fail(error)

    def _send(self, message: WorkerOutput) -> None:
        with self._results_lock:
            self._results.write(encode(message))

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, UserError):
            self._send(WorkerFailed(reason=error.problem, fix=error.fix))
        else:
            logger.error("the worker failed", exc_info=error)
            self._send(WorkerFailed(reason=describe_error(error)))
        # The other thread may be deep in device code; there is nothing to wait for.
        os._exit(1)


def main() -> None:
    start_message, life_fd = processes.become_child()
    start = decode_worker_start(start_message)
    config = decode_config(start.config)
    processes.exit_with_parent(life_fd, start.name)
    level, parallel = config.server.log_level, config.parallel
    # All would log the same; what is not, such as what went wrong, is more than info.
    is_first = start.group.rank == 0 and parallel.data_parallel_rank == 0
    name = start.name.replace(" ", "-")
    setup_logging(level if is_first or level != "info" else "warning", name)
    WorkerProcess(start).run()


if __name__ == "__main__":
    main()
