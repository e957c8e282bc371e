#!/usr/bin/env python3
"""How long a step's message takes to the last of its workers: the ring buffer beside ZMQ PUB/SUB.

    .venv/bin/python scripts/bench_fanout.py [--rounds 5] [--messages 200] [--readers 1 2 4 8]

One writer process and 1 to 8 reader processes that block in read, as an engine core and its workers
do. From before write() to when the last reader has the message, by the clock that all processes
share; and how long write() itself takes. A message every 5 ms, so that all sleep in between, and
back to back: the next once all have the last. 124 bytes are a decode step of a few rows, 512 the
most that one of 256 rows may take, 100 kB a long prompt. In each round both transports run every
case in turn; p50, p99 and the ratios ring / ZMQ are medians over rounds.
Wanted: ratios below 1.
"""

import argparse
import functools
import gc
import itertools
import mmap
import multiprocessing
import os
import select
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import zmq

sys.path.insert(0, str(Path(__file__).parent.parent))

from jaxserve.engine.executor.ring_buffer import RingBuffer

RING_BYTES = 1 << 23  # as that of step plans
NUM_WARM_UP = 20
BACK_TO_BACK_FACTOR = 5  # as many more messages, where they take no time
LOST_S = 20.0
SIDES = ("ring", "ZMQ")
INDEX = struct.Struct("=Q")


class Transport(Protocol):
    """Made before the readers are forked; each of the others is called in one process."""

    def open_writer(self) -> Callable[[bytes], None]:
        """Returns once no message can be missed."""
        ...

    def open_reader(self, reader_idx: int) -> Callable[[], bytes]: ...

    def close(self) -> None: ...


class RingTransport:
    def __init__(self, num_readers: int):
        self._ring = RingBuffer.create(RING_BYTES, num_readers)

    def open_writer(self) -> Callable[[bytes], None]:
        return self._ring.writer().write

    def open_reader(self, reader_idx: int) -> Callable[[], bytes]:
        return self._ring.reader(reader_idx).read

    def close(self) -> None:
        self._ring.close()


class ZmqTransport:
    """PUB as XPUB, which is told of its subscribers."""

    def __init__(self, num_readers: int):
        self._num_readers = num_readers
        self._dir = tempfile.TemporaryDirectory()
        self._address = f"ipc://{self._dir.name}/plans"
        self._context: zmq.Context | None = None
        self._socket: zmq.Socket | None = None

    def open_writer(self) -> Callable[[bytes], None]:
        self._context = zmq.Context()
        self._socket = socket = self._context.socket(zmq.XPUB)
        socket.set_hwm(0)
        socket.set(zmq.XPUB_VERBOSE, 1)
        socket.bind(self._address)
        for _ in range(self._num_readers):
            if not socket.poll(1000 * LOST_S):
                raise SystemExit("a reader did not subscribe")
            socket.recv()
        return socket.send

    def open_reader(self, reader_idx: int) -> Callable[[], bytes]:
        del reader_idx
        self._context = zmq.Context()
        self._socket = socket = self._context.socket(zmq.SUB)
        socket.set_hwm(0)
        socket.set(zmq.RECONNECT_IVL, 1)
        socket.subscribe(b"")
        socket.connect(self._address)
        return socket.recv

    def close(self) -> None:
        if self._context is not None:
            self._context.destroy(linger=0)
        self._dir.cleanup()


TRANSPORTS: dict[str, Callable[[int], Transport]] = {"ring": RingTransport, "ZMQ": ZmqTransport}


class Case(NamedTuple):
    """pace_s: from one message to the next; 0: back to back."""

    message_bytes: int
    pace_s: float
    num_readers: int


class Measured(NamedTuple):
    """Microseconds."""

    p50: float
    p99: float
    write_p50: float


def measure(side: str, case: Case, num_messages: int) -> Measured:
    """Runs a case with processes of its own. The first few messages are not counted."""
    num_messages = NUM_WARM_UP + num_messages * (1 if case.pace_s else BACK_TO_BACK_FACTOR)
    transport = TRANSPORTS[side](case.num_readers)
    shared = mmap.mmap(-1, case.num_readers * num_messages * 8)
    stamps = np.frombuffer(shared, np.int64).reshape(case.num_readers, num_messages)
    done_fd, done_write_fd = os.pipe()
    target = functools.partial(_read_all, transport, case.message_bytes, stamps, done_write_fd)
    fork = multiprocessing.get_context("fork")
    readers = [
        fork.Process(target=target, args=(idx,), daemon=True) for idx in range(case.num_readers)
    ]
    for reader in readers:
        reader.start()
    starts, writes = _write_all(transport.open_writer(), case, num_messages, done_fd)
    for reader in readers:
        reader.join()
    latencies = (stamps.max(axis=0) - starts)[NUM_WARM_UP:] / 1000
    transport.close()
    os.close(done_fd)
    os.close(done_write_fd)
    p50, p99 = np.percentile(latencies, (50, 99))
    return Measured(float(p50), float(p99), float(np.median(writes[NUM_WARM_UP:]) / 1000))


def _read_all(
    transport: Transport, message_bytes: int, stamps: np.ndarray, done_fd: int, reader_idx: int
) -> None:
    """A reader: notes when it has each message, then says that it has."""
    read, mine = transport.open_reader(reader_idx), stamps[reader_idx]
    for idx in range(len(mine)):
        message = read()
        mine[idx] = time.monotonic_ns()
        assert (len(message), INDEX.unpack_from(message)[0]) == (message_bytes, idx)
        os.write(done_fd, b".")


def _write_all(
    write: Callable[[bytes], None], case: Case, num_messages: int, done_fd: int
) -> tuple[np.ndarray, np.ndarray]:
    """The writer: when each write() began, and how long it took, in nanoseconds."""
    starts, ends = np.empty(num_messages, np.int64), np.empty(num_messages, np.int64)
    padding = bytes(case.message_bytes - INDEX.size)
    num_done = 0
    next_s = time.monotonic()
    for idx in range(num_messages):
        next_s += case.pace_s
        if case.pace_s:
            time.sleep(max(0.0, next_s - time.monotonic()))
        message = INDEX.pack(idx) + padding
        starts[idx] = time.monotonic_ns()
        write(message)
        ends[idx] = time.monotonic_ns()
        while not case.pace_s and num_done < (idx + 1) * case.num_readers:
            num_done += _num_done(done_fd)
    while num_done < num_messages * case.num_readers:
        num_done += _num_done(done_fd)
    return starts, ends - starts


def _num_done(done_fd: int) -> int:
    """Waits until readers have said something; how many messages they have read since."""
    if not select.select([done_fd], [], [], LOST_S)[0]:
        raise SystemExit("a message did not arrive")
    return len(os.read(done_fd, 1 << 16))


def bench(cases: list[Case], rounds: int, num_messages: int) -> dict[tuple[str, Case], list]:
    """For every side and case a `Measured` a round."""
    results: dict[tuple[str, Case], list[Measured]] = {}
    for round_idx in range(rounds):
        for case in cases:
            for side in SIDES if round_idx % 2 else SIDES[::-1]:
                results.setdefault((side, case), []).append(measure(side, case, num_messages))
    return results


def row(case: Case, ring: list[Measured], zmq: list[Measured]) -> str:
    """A line of the table."""
    columns = []
    for side in (ring, zmq):
        medians = [statistics.median(values) for values in zip(*side, strict=True)]
        columns.append(" ".join(f"{value:8.0f}" for value in medians))
    p50, p99 = (
        statistics.median(r[i] / z[i] for r, z in zip(ring, zmq, strict=True)) for i in (0, 1)
    )
    pace = f"{1000 * case.pace_s:g} ms" if case.pace_s else "back to back"
    return (
        f"{case.message_bytes:8,} {pace:>13} {case.num_readers:8} "
        f"{columns[0]}  {columns[1]}  {p50:9.2f} {p99:6.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=200, help="in a round of a case")
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--bytes", type=int, nargs="+", default=[124, 512, 100_000])
    parser.add_argument("--pace-ms", type=float, nargs="+", default=[5.0, 0.0])
    options = parser.parse_args()
    gc.freeze()  # as the processes of an engine do
    grid = itertools.product(options.bytes, options.pace_ms, options.readers)
    cases = [Case(size, pace_ms / 1000, readers) for size, pace_ms, readers in grid]
    results = bench(cases, options.rounds, options.messages)
    num_cpus = len(os.sched_getaffinity(0))
    print(f"write() to the last reader, and write() itself, microseconds, on {num_cpus} CPUs")
    if num_cpus <= max(options.readers):
        print(
            f"With {num_cpus} readers or more, they and the writer cannot all run at once here: "
            "the last one has also waited for a CPU."
        )
    heads = " ".join(f"{name:>8}" for name in ("p50", "p99", "write()"))
    print(f"{'':32}{'ring':>27} {'ZMQ PUB/SUB':>27}  {'ring / ZMQ':>16}")
    print(f"   bytes   one every  readers {heads}  {heads}        p50    p99")
    for case in cases:
        print(row(case, results["ring", case], results["ZMQ", case]))


if __name__ == "__main__":
    main()
