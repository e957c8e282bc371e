"""A host that only runs workers: takes their messages from host 0 and says how they are."""

import collections
import logging
import os
import queue
import signal
import socket
import sys
import threading
import zlib
from typing import NoReturn

import zmq

from jaxserve.config import EngineConfig, encode_config
from jaxserve.engine.executor.in_process import describe_error
from jaxserve.engine.executor.remote_hosts import (
    ALIVE_INTERVAL_MS,
    NUMBER,
    STOP,
    agreed_digest,
    plan_address,
    report_address,
)
from jaxserve.engine.executor.workers import WorkersExecutor
from jaxserve.errors import EngineDeadError, UserError
from jaxserve.messages import (
    HostAlive,
    HostFailed,
    HostHello,
    HostReady,
    HostReport,
    encode,
)

logger = logging.getLogger(__name__)

_NUM_LOG_LINES = 20
_LAST_WORDS_MS = 2000
_HOST_0_GONE = "host 0 is gone, or the network to it"


class _Stopped(BaseException):
    """Host 0 or a signal wants this host to end.

    No Exception: logging, for one, which a signal may interrupt, takes those for its own.
    """

    def __init__(self, exit_code: int, by_signal: bool = False):
        super().__init__(exit_code)
        self.exit_code = exit_code
        self.by_signal = by_signal


def run_host(config: EngineConfig, worker_class: str) -> int:
    """Runs this host's workers until host 0 or a signal ends it; returns the exit code.

    Raises:
      UserError: the workers cannot do what the config asks for.
      EngineDeadError: a worker failed, or host 0 is gone.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    parallel = config.parallel
    logger.info(
        "host %d of %d: its workers start, and wait for those of host 0 at %s",
        parallel.host_id,
        parallel.num_hosts,
        parallel.coordinator,
    )
    context = zmq.Context()
    reporter = Reporter(context, config)
    log = WorkerLog()
    executor = WorkersExecutor(config, worker_class, stderr_fd=log.write_fd)
    failure: Exception | None = None
    try:
        _warn_if_unknown(parallel.coordinator)
        plans, lost = _subscribe(context, config)
        watch = _StartWatch(plans, lost)
        try:
            config = executor.start(watch)
        finally:
            watch.stop()
        reporter.send(HostReady(parallel.host_id, encode_config(config)))
        logger.info("ready: the workers of host %d wait for host 0", parallel.host_id)
        _relay(plans, lost, executor, reporter)
    except _Stopped as stopped:
        logger.info("stopped")
        if stopped.by_signal:  # before the workers go, so that this is the reason that is given
            reporter.send(HostFailed(parallel.host_id, "it was stopped by a signal", None, []))
        return stopped.exit_code
    except Exception as error:
        failure = error
        raise
    finally:
        executor.shutdown()
        log.close()
        reporter.close(_last_words(failure, parallel.host_id, log))
        context.destroy(linger=0)


def _subscribe(context: zmq.Context, config: EngineConfig) -> tuple[zmq.Socket, zmq.Socket]:
    """Messages to workers, and the news that host 0 is gone. A silent host 0 is taken for gone."""
    plans = context.socket(zmq.SUB)
    plans.set_hwm(0)
    plans.setsockopt(zmq.HEARTBEAT_IVL, ALIVE_INTERVAL_MS)
    plans.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(config.worker.step_timeout_s * 1000))
    plans.subscribe(b"")
    lost = plans.get_monitor_socket(zmq.EVENT_DISCONNECTED)  # first: host 0 may go at once
    plans.connect(plan_address(config.parallel))
    return plans, lost


class _StartWatch:
    """Ends the start of workers, which wait for those of host 0, when that ends or is gone.

    fd: becomes readable then; `check` says how.
    """

    def __init__(self, plans: zmq.Socket, lost: zmq.Socket):
        self._plans = plans
        self._lost = lost
        self._end: _Stopped | EngineDeadError | None = None
        self.fd, self._end_fd = os.pipe()
        self._stop_fd, self._stopper_fd = os.pipe()
        self._thread = threading.Thread(target=self._run, name="start watch", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises as `_relay` if host 0 has ended or is gone."""
        if self._end is not None:
            raise self._end

    def stop(self) -> None:
        """Leaves the sockets to the caller; then checks once more."""
        os.close(self._stopper_fd)
        self._thread.join()
        os.close(self._stop_fd)
        self.check()

    def _run(self) -> None:
        poller = zmq.Poller()
        for watched in (self._plans, self._lost, self._stop_fd):
            poller.register(watched, zmq.POLLIN)
        ready = dict(poller.poll())
        if self._stop_fd in ready:
            return
        if self._plans in ready:  # no steps before this host is ready
            self._end = _Stopped(self._plans.recv()[NUMBER.size])
        else:
            self._end = EngineDeadError(_HOST_0_GONE)
        os.write(self._end_fd, b"!")


def _warn_if_unknown(coordinator: str) -> None:
    """A name may become known later, as those of pods do, or be mistyped."""
    name = coordinator.rpartition(":")[0]
    try:
        socket.getaddrinfo(name.strip("[]"), None)
    except OSError as error:
        logger.warning("--coordinator %s: %s is not known here yet: %s", coordinator, name, error)


def _relay(
    plans: zmq.Socket, lost: zmq.Socket, executor: WorkersExecutor, reporter: "Reporter"
) -> NoReturn:
    """Hands messages to the workers for ever.

    Raises:
      _Stopped: host 0 says so.
      EngineDeadError: a worker failed, or host 0 is gone.
    """
    failure_fds = executor.failure_fds()
    poller = zmq.Poller()
    for watched in (plans, lost, *failure_fds):
        poller.register(watched, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if any(fd in ready for fd in failure_fds):
            executor.check()
        if plans in ready:
            number, message = NUMBER.unpack_from(data := plans.recv())[0], data[NUMBER.size :]
            if number == STOP:
                raise _Stopped(message[0])
            if number != reporter.num_messages + 1:
                raise EngineDeadError(
                    f"message {reporter.num_messages + 1} of host 0 was lost; {number} came"
                )
            executor.send(message)
            reporter.count(message)
        elif lost in ready:
            raise EngineDeadError(_HOST_0_GONE)


def _last_words(failure: Exception | None, host_id: int, log: "WorkerLog") -> HostFailed | None:
    if failure is None:
        return None
    if isinstance(failure, UserError):
        return HostFailed(host_id, failure.problem, failure.fix, log.last_lines())
    reason = str(failure) if isinstance(failure, EngineDeadError) else describe_error(failure)
    return HostFailed(host_id, reason, None, log.last_lines())


class Reporter:
    """Tells host 0 what is sent here and, every second, how far this host is."""

    def __init__(self, context: zmq.Context, config: EngineConfig):
        self._handed_over = (0, 0)  # number of messages, and their digest
        self._host_id = config.parallel.host_id
        self._reports: queue.SimpleQueue[HostReport | None] = queue.SimpleQueue()
        self._socket = context.socket(zmq.PUSH)
        self._socket.set_hwm(0)
        self._socket.connect(report_address(config.parallel))
        self.send(HostHello(self._host_id, socket.gethostname(), agreed_digest(config)))
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)
        self._thread.start()

    @property
    def num_messages(self) -> int:
        """Those that were handed to the workers."""
        return self._handed_over[0]

    def send(self, report: HostReport) -> None:
        """Queues a report; never blocks."""
        self._reports.put(report)

    def count(self, message: bytes) -> None:
        """Notes that a message was handed to the workers."""
        number, digest = self._handed_over
        self._handed_over = (number + 1, zlib.crc32(message, digest))

    def close(self, last: HostReport | None) -> None:
        """Sends what is queued, and `last`."""
        if last is not None:
            self.send(last)
        self._reports.put(None)
        self._thread.join()
        self._socket.close(linger=_LAST_WORDS_MS)

    def _run(self) -> None:
        while True:
            try:
                report = self._reports.get(timeout=ALIVE_INTERVAL_MS / 1000)
            except queue.Empty:
                report = HostAlive(self._host_id, *self._handed_over)
            if report is None:
                return
            self._socket.send(encode(report))


class WorkerLog:
    """Passes on what workers write to standard error, and keeps the last lines of it."""

    def __init__(self) -> None:
        read_fd, self.write_fd = os.pipe()
        self._lines: collections.deque[str] = collections.deque(maxlen=_NUM_LOG_LINES)
        self._thread = threading.Thread(target=self._run, args=(read_fd,), name="log", daemon=True)
        self._thread.start()

    def last_lines(self) -> list[str]:
        return list(self._lines)

    def close(self) -> None:
        """The workers are dead: what they wrote is passed on."""
        os.close(self.write_fd)
        self._thread.join()

    def _run(self, read_fd: int) -> None:
        with open(read_fd, encoding="utf-8", errors="replace") as file:
            for line in file:
                sys.stderr.write(line)
                sys.stderr.flush()
                self._lines.append(line.rstrip("\n"))


def _stop(number: int, frame: object) -> None:
    del number, frame
    for again in (signal.SIGINT, signal.SIGTERM):
        signal.signal(again, signal.SIG_IGN)
    raise _Stopped(0, by_signal=True)
