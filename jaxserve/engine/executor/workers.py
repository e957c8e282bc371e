"""The executor that runs every worker in a process of its own.

One ring buffer carries each plan and mask to all workers of this host; every worker has a ring
back, on which all report that they are ready or have failed, and only rank 0 sends results. The
workers of other hosts are `RemoteHosts`' matter; there, `host_agent` feeds them with this class.
"""

import os
import socket
import time
from typing import Protocol

from jaxserve import processes
from jaxserve.config import EngineConfig, ParallelConfig, decode_config, encode_config
from jaxserve.engine.executor.remote_hosts import RemoteHosts, jax_address
from jaxserve.engine.executor.ring_buffer import (
    ReaderDiedError,
    RingBuffer,
    RingReader,
    RingWriter,
    WatchedFdError,
)
from jaxserve.errors import EngineDeadError, UserError
from jaxserve.messages import (
    GrammarMask,
    ModelRunnerOutput,
    ProcessGroup,
    SchedulerOutput,
    WorkerFailed,
    WorkerOutput,
    WorkerReady,
    WorkerStart,
    decode_worker_output,
    encode,
)

# A message may be larger; then its sender waits while the reader makes room. These hold the masks
# of 256 rows of a vocabulary of 200,000, and 20 log-probabilities each of 8,192 prompt tokens.
_PLAN_RING_BYTES = 1 << 23
_RESULT_RING_BYTES = 1 << 21
_STOP_TIMEOUT_S = 1.0
_CAUSE_S = 1.0  # a worker fails when another host does, and is the first to say so
_SILENT_S = 3.0  # a host that says nothing for so long is worth a word


class StartWatch(Protocol):
    """fd: becomes readable when workers need not start any more; `check` then raises why."""

    fd: int

    def check(self) -> None: ...


class WorkersExecutor:
    """Worker processes, fed through shared memory; with those of other hosts, if there are any.

    Workers are numbered by their place on this host; their ranks go over all hosts.
    """

    def __init__(
        self,
        config: EngineConfig,
        worker_class: str,
        hosts: RemoteHosts | None = None,
        stderr_fd: int | None = None,
    ):
        """hosts: the others.  stderr_fd: takes what workers write to standard error."""
        num_workers = config.parallel.workers_per_host
        self._config = config
        self._hosts = hosts
        self._stderr_fd = stderr_fd
        self._worker_class = worker_class
        self._step_timeout_s = config.worker.step_timeout_s
        self._plan_ring = RingBuffer.create(_PLAN_RING_BYTES, num_workers)
        self._result_rings = [
            RingBuffer.create(_RESULT_RING_BYTES, num_readers=1) for _ in range(num_workers)
        ]
        self._workers: list[processes.Child] = []
        self._readers: list[RingReader] = []
        self._writer: RingWriter | None = None
        self._ready: dict[int, WorkerReady] = {}
        self._dead: EngineDeadError | None = None
        self._watch: StartWatch | None = None

    @property
    def worker_pids(self) -> list[int]:
        """In order of rank."""
        return [worker.pid for worker in self._workers]

    def start(self, watch: StartWatch | None = None) -> EngineConfig:
        """watch: what else may end the start."""
        self._watch = watch
        coordinator = _jax_coordinator(self._config.parallel)
        for idx, result_ring in enumerate(self._result_rings):
            self._workers.append(self._spawn(idx, coordinator, result_ring))
        death_fds = [worker.death_fd for worker in self._workers]
        self._writer = self._plan_ring.writer(death_fds)
        # Who waits for rank 0 is woken by the death of any worker and by what the others say.
        others = [ring.reader(watch_fds=death_fds) for ring in self._result_rings[1:]]
        watch_fds = [*death_fds, *(reader.fd for reader in others)]
        if self._hosts is not None:
            watch_fds.append(self._hosts.failure_fd)
        if watch is not None:
            watch_fds.append(watch.fd)
        self._readers = [self._result_rings[0].reader(watch_fds=watch_fds), *others]
        configs = [self._wait_until_ready(idx) for idx in range(len(self._workers))]
        config = decode_config(configs[0])
        if self._hosts is not None:
            self._hosts.wait_until_ready(config, self.check)
        self._watch = None
        return config

    def execute(self, plan: SchedulerOutput) -> None:
        self.send(encode(plan))

    def sample(self, mask: GrammarMask) -> None:
        self.send(encode(mask))

    def collect(self) -> ModelRunnerOutput:
        self._raise_if_dead()
        try:
            output = self._receive(0, self._step_timeout_s)
        except TimeoutError:
            raise self._timed_out() from None
        assert isinstance(output, ModelRunnerOutput), output
        return output

    def failure_fds(self) -> list[int]:
        death_fds = [worker.death_fd for worker in self._workers]
        return [*death_fds, self._hosts.failure_fd] if self._hosts else death_fds

    def check(self) -> None:
        self._raise_if_dead()
        self._check_hosts()
        for idx, worker in enumerate(self._workers):
            if worker.wait(0.0):
                raise self._died(idx)

    def shutdown(self) -> None:
        if self._hosts is not None:
            has_failed = self._dead is not None or self._hosts.failure() is not None
            self._hosts.close(exit_code=int(has_failed))
        processes.stop_all(self._workers, _STOP_TIMEOUT_S)
        for ring in [self._plan_ring, *self._result_rings]:
            ring.close()

    def _spawn(self, idx: int, coordinator: str, result_ring: RingBuffer) -> processes.Child:
        parallel = self._config.parallel
        rank = parallel.host_id * parallel.workers_per_host + idx
        engine = f"{parallel.data_parallel_rank}." if parallel.data_parallel_size > 1 else ""
        name = f"worker {engine}{rank}"
        start = WorkerStart(
            config=encode_config(self._config),
            group=ProcessGroup(rank, parallel.num_workers, coordinator),
            reader_idx=idx,
            plan_ring=self._plan_ring.handle,
            result_ring=result_ring.handle,
            worker_class=self._worker_class,
            name=name,
        )
        return processes.spawn(
            "jaxserve.worker.worker_process",
            name,
            encode(start),
            inherited_fds=[*self._plan_ring.fds(), *result_ring.fds()],
            stderr_fd=self._stderr_fd,
            environment=_with_huge_pages(os.environ.get("GLIBC_TUNABLES", "")),
        )

    def send(self, message: bytes) -> None:
        """Hands an encoded WorkerInput to all workers; returns at once. Raises as `execute`."""
        assert self._writer is not None, "not started"
        self._raise_if_dead()
        if self._hosts is not None:
            self._hosts.send(message)
        try:
            self._writer.write(message, self._step_timeout_s)
        except ReaderDiedError as error:
            raise self._died(error.reader_idx) from None
        except TimeoutError:
            raise self._timed_out() from None

    def _wait_until_ready(self, idx: int) -> bytes:
        if idx not in self._ready:
            message = self._receive(idx, timeout_s=None)
            assert isinstance(message, WorkerReady), message
            self._ready[idx] = message
        return self._ready[idx].config

    def _receive(self, idx: int, timeout_s: float | None) -> WorkerOutput:
        """The next message of a worker; raises if any worker has failed."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            remaining_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            try:
                message = decode_worker_output(self._readers[idx].read(remaining_s))
            except WatchedFdError:
                self._attend_to_others()
                continue
            if isinstance(message, WorkerFailed):
                raise self._failed(idx, message)
            return message

    def _attend_to_others(self) -> None:
        """Takes what ranks other than 0 say, and finds out who has died."""
        if self._watch is not None:
            self._watch.check()
        for idx, reader in list(enumerate(self._readers))[1:]:
            message = _read_now(reader)
            if isinstance(message, WorkerFailed):
                raise self._failed(idx, message)
            assert not isinstance(message, ModelRunnerOutput), (idx, message)
            if message is not None:
                self._ready[idx] = message
        self.check()

    def _check_hosts(self, wait_s: float = 0.0) -> None:
        failure = self._hosts.failure(wait_s) if self._hosts is not None else None
        if isinstance(failure, EngineDeadError):
            self._dead = failure
        if failure is not None:
            raise failure

    def _raise_if_dead(self) -> None:
        if self._dead is not None:
            raise self._dead

    def _died(self, idx: int) -> EngineDeadError | UserError:
        """The failure of a dead worker: its last words, else how it ended."""
        while (message := _read_now(self._readers[idx])) is not None:
            if isinstance(message, WorkerFailed):
                return self._failed(idx, message)
        self._dead = EngineDeadError(self._workers[idx].describe_exit())
        return self._dead

    def _failed(self, idx: int, message: WorkerFailed) -> EngineDeadError | UserError:
        self._check_hosts(_CAUSE_S)
        self._dead = EngineDeadError(f"{self._workers[idx].name} failed: {message.reason}")
        if message.fix is not None:
            return UserError(message.reason, fix=message.fix)
        return self._dead

    def _timed_out(self) -> EngineDeadError:
        self._check_hosts()
        limit = f"{self._step_timeout_s:g} s (--step-timeout-s)"
        silent = self._hosts.silent(_SILENT_S) if self._hosts is not None else ""
        self._dead = EngineDeadError(
            f"{self._workers[0].name} did not finish a step within {limit}"
            + (f": {silent}" if silent else "")
        )
        return self._dead


def _jax_coordinator(parallel: ParallelConfig) -> str:
    """Where the workers meet, with rank 0, which listens."""
    if parallel.num_hosts > 1:
        return jax_address(parallel)
    if parallel.num_workers == 1:
        return ""
    with socket.socket() as probe:  # a port that is free, and will be taken in a moment
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def _with_huge_pages(tunables: str) -> dict[str, str]:
    """glibc then asks for them for large memory: a CPU that reads all weights in a step has fewer
    addresses to look up. What an operator has set stays."""
    if "hugetlb" in tunables:
        return {}
    return {"GLIBC_TUNABLES": ":".join(filter(None, [tunables, "glibc.malloc.hugetlb=1"]))}


def _read_now(reader: RingReader) -> WorkerOutput | None:
    """A message that has arrived already, else None."""
    try:
        return decode_worker_output(reader.read(0.0))
    except (TimeoutError, WatchedFdError):
        return None
