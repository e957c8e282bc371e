"""The ring buffer: what is written arrives, whole and in order, and nobody waits for the dead."""

import os
import random
import select
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxserve.engine.executor.ring_buffer import ReaderDiedError, RingBuffer, WatchedFdError

WAIT_S = 20.0
STILL_BLOCKED_S = 0.1

MakeRing = Callable[..., RingBuffer]


@pytest.fixture(params=[True, False], ids=["eventfd", "pipe"])
def make_ring(request: pytest.FixtureRequest) -> Iterator[MakeRing]:
    rings: list[RingBuffer] = []

    def make(capacity_bytes: int, num_readers: int = 1) -> RingBuffer:
        ring = RingBuffer.create(capacity_bytes, num_readers, use_eventfd=request.param)
        rings.append(ring)
        return ring

    yield make
    for ring in rings:
        ring.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def assert_blocked(future: Future) -> None:
    with pytest.raises(TimeoutError):
        future.result(STILL_BLOCKED_S)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("capacity_bytes", [1, 9, 64, 4096])
def test_every_reader_gets_every_message(
    make_ring: MakeRing, pool: ThreadPoolExecutor, capacity_bytes: int, seed: int
) -> None:
    rng = random.Random(seed)
    most = [0, 1, capacity_bytes, 3 * capacity_bytes + 1]
    messages = [rng.randbytes(rng.randint(0, rng.choice(most))) for _ in range(100)]
    ring = make_ring(capacity_bytes, num_readers=3)

    def read_all(reader_idx: int) -> list[bytes]:
        # A process of its own would attach like this.
        reader = RingBuffer(ring.handle).reader(reader_idx)
        return [reader.read(WAIT_S) for _ in messages]

    futures = [pool.submit(read_all, idx) for idx in range(3)]
    writer = ring.writer()
    for message in messages:
        writer.write(message, WAIT_S)
    for future in futures:
        assert future.result(WAIT_S) == messages


def test_a_full_ring_blocks_the_writer_until_the_slowest_reader_moves(
    make_ring: MakeRing, pool: ThreadPoolExecutor
) -> None:
    ring = make_ring(32, num_readers=2)
    writer, fast, slow = ring.writer(), ring.reader(0), ring.reader(1)
    writer.write(b"a" * 16)
    future = pool.submit(writer.write, b"b" * 16, WAIT_S)
    assert_blocked(future)
    assert fast.read(WAIT_S) == b"a" * 16
    assert_blocked(future)
    assert slow.read(WAIT_S) == b"a" * 16
    future.result(WAIT_S)
    assert fast.read(WAIT_S) == slow.read(WAIT_S) == b"b" * 16


def test_many_small_messages_may_wait(make_ring: MakeRing, pool: ThreadPoolExecutor) -> None:
    """More messages than a pipe has room for counts, in both directions."""
    num_messages = 20_000
    ring = make_ring(1 << 20)
    writer, reader = ring.writer(), ring.reader()

    def write_all() -> None:
        for i in range(num_messages):
            writer.write(b"%d" % i, WAIT_S)

    future = pool.submit(write_all)
    time.sleep(STILL_BLOCKED_S)
    assert [int(reader.read(WAIT_S)) for _ in range(num_messages)] == list(range(num_messages))
    future.result(WAIT_S)
    # The acknowledgements were not lost either: a message that needs the whole ring goes through.
    future = pool.submit(writer.write, bytes(1 << 20), WAIT_S)
    assert reader.read(WAIT_S) == bytes(1 << 20)
    future.result(WAIT_S)


def test_the_writer_names_the_dead_reader(make_ring: MakeRing, pool: ThreadPoolExecutor) -> None:
    ring = make_ring(32, num_readers=2)
    lives = [os.pipe(), os.pipe()]
    writer = ring.writer(death_fds=[read_fd for read_fd, _ in lives])
    writer.write(b"a" * 16)
    ring.reader(0).read(WAIT_S)
    future = pool.submit(writer.write, b"b" * 16, WAIT_S)
    assert_blocked(future)
    os.close(lives[1][1])
    with pytest.raises(ReaderDiedError) as error:
        future.result(WAIT_S)
    assert error.value.reader_idx == 1
    for fd in (lives[0][0], lives[0][1], lives[1][0]):
        os.close(fd)


def test_a_message_that_was_cut_off_is_the_last(make_ring: MakeRing) -> None:
    writer = make_ring(32).writer()
    with pytest.raises(TimeoutError):
        writer.write(b"a" * 100, timeout_s=0.01)
    with pytest.raises(AssertionError, match="cut off"):
        writer.write(b"b", timeout_s=0.01)


def test_a_read_that_timed_out_goes_on(make_ring: MakeRing, pool: ThreadPoolExecutor) -> None:
    ring = make_ring(16)
    writer, reader = ring.writer(), ring.reader()
    with pytest.raises(TimeoutError):
        reader.read(0.0)
    message = random.Random(0).randbytes(100)
    with pytest.raises(TimeoutError):
        writer.write(message, timeout_s=0.01)
    # Half of it is in the ring; the reader takes that, waits in vain, and keeps it.
    with pytest.raises(TimeoutError):
        reader.read(0.01)
    assert reader._pieces_len == 8

    ring = make_ring(16)
    writer, reader = ring.writer(), ring.reader()

    def read_patiently() -> bytes:
        while True:
            try:
                return reader.read(0.001)
            except TimeoutError:
                continue

    future = pool.submit(read_patiently)
    time.sleep(0.02)
    writer.write(message, WAIT_S)
    assert future.result(WAIT_S) == message


def test_a_watched_fd_interrupts_but_messages_go_first(
    make_ring: MakeRing, pool: ThreadPoolExecutor
) -> None:
    ring = make_ring(64)
    read_fd, write_fd = os.pipe()
    writer, reader = ring.writer(), ring.reader(watch_fds=[read_fd])
    future = pool.submit(reader.read, WAIT_S)
    assert_blocked(future)
    os.close(write_fd)
    with pytest.raises(WatchedFdError) as error:
        future.result(WAIT_S)
    assert error.value.fd == read_fd
    writer.write(b"last words")
    assert reader.read(WAIT_S) == b"last words"
    with pytest.raises(WatchedFdError):
        reader.read(WAIT_S)
    os.close(read_fd)


def test_last_words_between_poll_and_death_are_not_missed(
    make_ring: MakeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """poll() looks at one descriptor after the other: a writer may write and die in between."""
    ring = make_ring(64)
    read_fd, write_fd = os.pipe()
    writer, reader = ring.writer(), ring.reader(watch_fds=[read_fd])

    def poll(poller: select.poll, deadline_s: float | None) -> list[int]:
        writer.write(b"last words")
        return [read_fd]

    monkeypatch.setattr("jaxserve.engine.executor.ring_buffer._poll", poll)
    assert reader.read(WAIT_S) == b"last words"
    os.close(read_fd)
    os.close(write_fd)


def test_waiting_costs_no_cpu(make_ring: MakeRing, pool: ThreadPoolExecutor) -> None:
    ring = make_ring(32)
    writer, reader = ring.writer(), ring.reader()
    started = threading.Barrier(2)

    def cpu_s_of(wait: Callable[[], object]) -> float:
        started.wait()
        before_s = time.thread_time()
        wait()
        return time.thread_time() - before_s

    future = pool.submit(cpu_s_of, lambda: reader.read(WAIT_S))
    started.wait()
    time.sleep(0.5)
    writer.write(b"a" * 16)
    # 0.5 s of spinning would cost about 0.5 s.
    assert future.result(WAIT_S) < 0.02

    writer.write(b"b" * 24)
    future = pool.submit(cpu_s_of, lambda: writer.write(b"c", WAIT_S))
    started.wait()
    time.sleep(0.5)
    assert reader.read(WAIT_S) == b"b" * 24
    assert future.result(WAIT_S) < 0.02


def test_memory_without_memfd_has_no_name_either(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ring = RingBuffer.create(64, 1)
    assert list(tmp_path.iterdir()) == []
    ring.writer().write(b"message")
    assert RingBuffer(ring.handle).reader().read(WAIT_S) == b"message"
    ring.close()


def test_nothing_has_a_name_or_stays_open() -> None:
    fds_before, shm_before = set(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
    ring = RingBuffer.create(4096, 2)
    assert "(deleted)" in os.readlink(f"/proc/self/fd/{ring.handle.memory_fd}")
    assert set(os.listdir("/dev/shm")) == shm_before
    ring.close()
    assert set(os.listdir("/proc/self/fd")) == fds_before
