"""Host 0's view of the other hosts: each gets every message, and says every second that it lives.

Messages to workers go out on the coordinator's port, as [number, message]; what hosts report comes
in on the next one. TCP carries both, so a short break of the network delays and loses nothing. Each
host counts and checksums what it hands to its workers, and the two must agree here: a host that
runs other steps than the rest would have all of them wait for ever.
"""

import logging
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable

import msgspec
import zmq

from jaxserve import __version__
from jaxserve.config import EngineConfig, ParallelConfig, ServerConfig, decode_config
from jaxserve.errors import EngineDeadError, UserError
from jaxserve.messages import (
    HostAlive,
    HostFailed,
    HostHello,
    HostReady,
    HostReport,
    decode_host_report,
)

logger = logging.getLogger(__name__)

NUMBER = struct.Struct("=Q")
STOP = 0  # instead of a message's number; the exit code follows
ALIVE_INTERVAL_MS = 1000
_POLL_MS = 100
_WAITING_LOG_S = 30.0
_LAST_WORDS_MS = 1000


def plan_address(parallel: ParallelConfig) -> str:
    """ZMQ address where host 0 publishes messages to workers."""
    return f"tcp://{parallel.coordinator}"


def report_address(parallel: ParallelConfig) -> str:
    """ZMQ address where host 0 takes reports."""
    return f"tcp://{_other_port(parallel, 1)}"


def jax_address(parallel: ParallelConfig) -> str:
    """host:port where the worker of rank 0 waits for the others."""
    return _other_port(parallel, 2)


def agreed_digest(config: EngineConfig) -> str:
    """Of all that must be the same on every host, but not of what cannot: paths, HTTP."""
    same = msgspec.structs.replace(
        config,
        model=_without_path(config),
        server=ServerConfig(),
        parallel=msgspec.structs.replace(config.parallel, host_id=0),
        worker=msgspec.structs.replace(config.worker, compilation_cache_dir=""),
    )
    return f"{__version__} {zlib.crc32(msgspec.msgpack.encode(same)):08x}"


class RemoteHosts:
    """The hosts but this one.

    failure_fd: becomes readable once one has failed; `failure` then says how.
    """

    def __init__(self, config: EngineConfig):
        """Binds the ports.

        Raises:
          UserError: they are taken.
        """
        parallel = config.parallel
        self._agreed = agreed_digest(config)
        self._silence_limit_s = config.worker.step_timeout_s
        self._context = zmq.Context()
        self._plans = self._context.socket(zmq.XPUB)
        self._reports = self._context.socket(zmq.PULL)
        for socket, address in (
            (self._plans, plan_address(parallel)),
            (self._reports, report_address(parallel)),
        ):
            socket.set_hwm(0)
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            # The name may be another machine's idea of this one, so all interfaces are taken.
            interface = "127.0.0.1" if host in ("127.0.0.1", "localhost") else "*"
            try:
                socket.bind(f"tcp://{interface}:{port}")
            except zmq.ZMQError as error:
                self._context.destroy(linger=0)
                raise UserError(
                    f"Port {port}, which --coordinator {parallel.coordinator} asks for, cannot be "
                    f"used: {error}.",
                    fix="Name a --coordinator with three free ports in a row, on all hosts.",
                ) from error
        self.failure_fd, self._failure_writer = os.pipe()
        self._waiting_for = set(range(1, parallel.num_hosts))
        self._names = {host: f"host {host}" for host in self._waiting_for}
        self._seen_s: dict[int, float] = {}
        self._configs: dict[int, EngineConfig] = {}
        self._digests = {0: 0}  # by number of messages sent; those that all hosts have passed go
        self._passed = dict.fromkeys(self._waiting_for, 0)
        self._num_sent = 0
        self._failure: EngineDeadError | UserError | None = None
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._listen, name="hosts", daemon=True)
        self._thread.start()

    def wait_until_ready(self, config: EngineConfig, check: Callable[[], None]) -> None:
        """Blocks until all workers of all hosts are warm.

        config: this host's, resolved.  check: called meanwhile; may raise.

        Raises:
          UserError, EngineDeadError: a host failed, or was started with other settings.
        """
        num_subscribed = 0
        while num_subscribed < len(self._names):  # who is not, would miss the first messages
            if self._plans.poll(_POLL_MS):
                num_subscribed += self._plans.recv()[:1] == b"\1"
            check()
        with self._changed:
            while not self._changed.wait_for(lambda: not self._waiting_for, _POLL_MS / 1000):
                check()
            check()  # what a host was refused for goes before what came of it
            for host, theirs in self._configs.items():
                if agreed_digest(theirs) != agreed_digest(config):
                    raise EngineDeadError(
                        f"{self._names[host]} derived other settings than host 0: "
                        f"{_first_difference(config, theirs)}"
                    )

    def send(self, message: bytes) -> None:
        """Hands a message to all workers of all hosts; never blocks."""
        digest = zlib.crc32(message, self._digests[self._num_sent])
        self._num_sent += 1
        self._digests[self._num_sent] = digest
        self._plans.send(NUMBER.pack(self._num_sent) + message)

    def failure(self, wait_s: float = 0.0) -> EngineDeadError | UserError | None:
        """Why no step can be run any more, if so; waits for a reason to come."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, wait_s)
            return self._failure

    def silent(self, limit_s: float) -> str:
        """Names a host that has said nothing for longer; "" if there is none."""
        for host, seen_s in list(self._seen_s.items()):
            silent_s = time.monotonic() - seen_s
            if silent_s > limit_s:
                name = self._names[host]
                return f"{name} has said nothing for {silent_s:.0f} s: it or the network is gone"
        return ""

    def close(self, exit_code: int) -> None:
        """Ends the workers of all hosts, whose first process then exits with this code."""
        self._is_closed = True
        self._thread.join()
        self._plans.send(NUMBER.pack(STOP) + bytes([exit_code]))
        self._plans.close(linger=_LAST_WORDS_MS)
        self._reports.close(linger=0)
        self._context.term()
        os.close(self.failure_fd)
        os.close(self._failure_writer)

    def _listen(self) -> None:
        logged_s = time.monotonic()
        while not self._is_closed:
            missing = [self._names[host] for host in self._names if host not in self._seen_s]
            if missing and time.monotonic() - logged_s > _WAITING_LOG_S:
                logged_s = time.monotonic()
                logger.info("waiting for %s to be started", ", ".join(missing))
            if self._reports.poll(_POLL_MS):
                report = decode_host_report(self._reports.recv())
                with self._changed:
                    self._take(report)
                    self._changed.notify_all()
            if silent := self.silent(self._silence_limit_s):
                with self._changed:
                    self._fail(EngineDeadError(f"{silent} (--step-timeout-s)"))
                    self._changed.notify_all()

    def _take(self, report: HostReport) -> None:
        host = report.host_id
        is_second = isinstance(report, HostHello) and host in self._seen_s
        self._seen_s[host] = time.monotonic()
        if is_second:
            self._fail(
                UserError(
                    f"Two hosts, or one that came back, say that they are number {host}.",
                    fix="Give each a --host-id of its own; when one ends, start all again.",
                )
            )
        match report:
            case HostHello(name=name, digest=digest):
                self._names[host] = f"host {host} ({name})"
                if digest != self._agreed:
                    self._fail(
                        UserError(
                            f"{self._names[host]} was started with other settings, or another "
                            "jaxserve, than host 0.",
                            fix="Give all hosts the same flags, --host-id aside.",
                        )
                    )
            case HostReady(config=config):
                self._configs[host] = decode_config(config)
                self._waiting_for.discard(host)
            case HostAlive(num_messages=count, digest=digest):
                self._compare(host, count, digest)
            case HostFailed(reason=reason, fix=fix, log=log):
                words = "".join(f"\n    {line}" for line in log)
                what = f"{self._names[host]}: {reason}"
                if fix is not None:
                    self._fail(UserError(what, fix=fix))
                else:
                    last = f"; its log ended with{words}" if words else ""
                    self._fail(EngineDeadError(what + last))

    def _compare(self, host: int, count: int, digest: int) -> None:
        if self._digests.get(count) != digest:
            self._fail(
                EngineDeadError(
                    f"{self._names[host]} has run other steps than host 0: after message {count} "
                    f"of {self._num_sent} the checksums differ"
                )
            )
        self._passed[host] = count
        for number in range(min(self._digests), min(self._passed.values())):
            del self._digests[number]

    def _fail(self, failure: EngineDeadError | UserError) -> None:
        if self._failure is None:
            self._failure = failure
            os.write(self._failure_writer, b"!")


def _other_port(parallel: ParallelConfig, offset: int) -> str:
    host, _, port = parallel.coordinator.rpartition(":")
    return f"{host}:{int(port) + offset}"


def _without_path(config: EngineConfig) -> msgspec.Struct:
    model = config.model
    info = model.info and msgspec.structs.replace(model.info, path="")
    return msgspec.structs.replace(model, model="", info=info)


def _first_difference(mine: EngineConfig, theirs: EngineConfig) -> str:
    """Such as "num_kv_blocks is 100 here, 90 there"."""
    for section in ("model", "cache", "scheduler", "worker"):
        ours, other = getattr(mine, section), getattr(theirs, section)
        for name in ours.__struct_fields__:
            a, b = getattr(ours, name), getattr(other, name)
            if a != b and name not in ("info", "model", "compilation_cache_dir"):
                return f"{name} is {a} here, {b} there"
    return "see the logs of both"
