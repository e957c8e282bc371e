"""Frames: cut anywhere, read by nobody for a while or ever, and the last words."""

import contextlib
import itertools
import os
import random
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from jaxserve.engine import framing
from jaxserve.engine.framing import FrameReader, FrameWriter

WAIT_S = 10.0


class Pair:
    """Both ends of one socket pair."""

    def __init__(self) -> None:
        ends = socket.socketpair()
        self.writer = FrameWriter(ends[0].detach())
        self.reader = FrameReader(ends[1].detach(), bytes)

    def received(self, count: int) -> list[bytes]:
        """The next messages, which must come in time."""
        messages: list[bytes] = []
        while len(messages) < count:
            assert select.select([self.reader.fd], [], [], WAIT_S)[0], "nothing came"
            new = self.reader.read()
            assert new is not None, "the writer is gone"
            messages += new
        assert len(messages) == count
        return messages

    def ends(self) -> bool:
        """Whether the reader hears next that the writer is gone."""
        return self.reader.read() is None


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.writer.close(0.0)
    pair.reader.close()
    assert sending_threads() == []


def sending_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "outputs"]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def in_time(work: Callable[[], None]) -> None:
    """Runs what would block for ever if it blocked at all."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive(), "blocked"


def messages_of(rng: random.Random, count: int, most_bytes: int) -> list[bytes]:
    """Each differs from all others; some are empty."""
    sizes = [
        rng.choice((0, 1, rng.randrange(100), rng.randrange(most_bytes))) for _ in range(count)
    ]
    return [rng.randbytes(size) for size in sizes]


@pytest.mark.parametrize("most_piece_bytes", [1, 9, 5_000, 100_000])
def test_a_stream_may_be_cut_anywhere(most_piece_bytes: int) -> None:
    """Frames in pieces and many at once, none, one or several to a `read`."""
    rng = random.Random(most_piece_bytes)
    sent = messages_of(rng, 200, 10 * most_piece_bytes)
    stream = b"".join(struct.pack("=Q", len(message)) + message for message in sent)
    source, sink = socket.socketpair()
    source.setblocking(False)
    reader = FrameReader(sink.detach(), bytes)
    received: list[bytes] = []
    left = memoryview(stream)
    with source:
        while left:
            with contextlib.suppress(BlockingIOError):
                left = left[source.send(left[: rng.randint(1, most_piece_bytes)]) :]
            received += reader.read() or []
    while (new := reader.read()) is not None:
        received += new
    assert received == sent
    reader.close()


def test_one_read_takes_many(pair: Pair) -> None:
    sent = [bytes([i]) * i for i in range(200)]
    for message in sent:
        pair.writer.send(message)
    assert pair.reader.read() == sent
    assert pair.reader.read() == []


def test_large_frames_are_received_in_place(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into one buffer, not into a new one with every piece."""
    allocated: list[int] = []

    def counting(size: int) -> bytearray:
        allocated.append(size)
        return bytearray(size)

    monkeypatch.setattr(framing, "bytearray", counting, raising=False)
    large = [b"ab" * 10_000_000, b"cd" * 10_000_000, b"ef" * 5_000_000]
    sent = [b"before", large[0], b"", large[1], large[2], b"behind"]
    for message in sent:
        pair.writer.send(message)
    assert pair.received(len(sent)) == sent
    assert allocated == [8 + len(large[0])]  # the first one's room is enough for the others


def test_a_reader_that_does_not_read_never_blocks_the_writer(pair: Pair) -> None:
    rng = random.Random(1)
    sent = messages_of(rng, 4_000, 20_000)  # 100 times what the kernel holds

    def send() -> None:
        for message in sent:
            pair.writer.send(message)

    in_time(send)
    assert len(sending_threads()) == 1
    assert pair.received(len(sent)) == sent
    wait_until(lambda: sending_threads() == [])  # nothing is left
    pair.writer.send(b"and then")
    assert pair.received(1) == [b"and then"]
    assert sending_threads() == []


def test_a_reader_that_lags_gets_all_in_order(pair: Pair) -> None:
    """Whatever is sent by whom: by the caller, or by the thread that has what was left."""
    rng = random.Random(2)
    num_threads = 0
    received: list[bytes] = []
    sent = [struct.pack("=I", i) * rng.randrange(1, 5_000) for i in range(3_000)]
    for chunk in itertools.batched(sent, 30):
        for message in chunk:
            pair.writer.send(message)
        num_threads += len(sending_threads())
        if rng.random() < 0.5:
            for _ in range(rng.randrange(12)):
                received += pair.reader.read() or []
    assert num_threads, "the reader never lagged"
    received += pair.received(len(sent) - len(received))
    assert received == sent


@pytest.mark.parametrize("lags", [False, True])
def test_a_reader_that_is_gone_fails_nobody(pair: Pair, lags: bool) -> None:
    if lags:
        for _ in range(10):
            pair.writer.send(b"x" * 100_000)
        assert len(sending_threads()) == 1
    pair.reader.close()
    wait_until(lambda: sending_threads() == [])
    started_s = time.monotonic()
    for _ in range(10):
        pair.writer.send(b"x" * 100_000)
    assert sending_threads() == []  # nothing is kept
    pair.writer.close(WAIT_S)
    assert time.monotonic() - started_s < WAIT_S / 2


def test_last_words_arrive(pair: Pair) -> None:
    sent = [b"x" * 1_000_000 for _ in range(5)]
    for message in sent:
        pair.writer.send(message)
    pair.writer.send(b"last words")
    closing = threading.Thread(target=pair.writer.close, args=(WAIT_S,))
    closing.start()
    assert pair.received(6) == [*sent, b"last words"]
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert pair.ends()


def test_closing_waits_no_longer_than_it_is_told(pair: Pair) -> None:
    for _ in range(10):
        pair.writer.send(b"x" * 100_000)
    started_s = time.monotonic()
    pair.writer.close(0.2)
    assert 0.2 <= time.monotonic() - started_s < WAIT_S
    assert sending_threads() == []
    while (new := pair.reader.read()) is not None:  # what the kernel has is not lost
        assert set(new) <= {b"x" * 100_000}


def test_what_a_killed_process_has_sent_arrives() -> None:
    code = """if True:
        import os, sys
        from jaxserve.engine.framing import FrameWriter

        writer = FrameWriter(int(sys.argv[1]))
        writer.send(b"x" * 50_000)
        writer.send(b"last words")
        os.kill(os.getpid(), 9)
    """
    source, sink = socket.socketpair()
    with source:
        fd = source.fileno()
        done = subprocess.run([sys.executable, "-c", code, str(fd)], pass_fds=[fd], check=False)
    assert done.returncode == -9
    reader = FrameReader(sink.detach(), bytes)
    assert reader.read() == [b"x" * 50_000, b"last words"]
    assert reader.read() is None
    reader.close()


def test_no_child_inherits_what_was_inherited() -> None:
    ends = socket.socketpair()
    for end in ends:
        end.set_inheritable(True)
    fds = [end.detach() for end in ends]
    writer, reader = FrameWriter(fds[0]), FrameReader(fds[1], bytes)
    assert [os.get_inheritable(fd) for fd in fds] == [False, False]
    writer.close(0.0)
    reader.close()
