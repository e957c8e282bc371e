"""A ring of shared memory through which one writer sends messages to many readers.

The engine core broadcasts step plans to its workers through one ring, and each worker answers
through a ring with one reader. A ring is a stream of frames (8 bytes of length, then the message)
in a buffer that wraps around. A message that does not fit into the free part is written piece by
piece while the readers consume it, so no message is too large. Nobody takes a lock; a reader with
nothing to read and a writer without room sleep in poll().

Counters. Each reader has two: bytes *published* to it and bytes *consumed* by it. Both live in the
kernel: an eventfd (a 64-bit counter that adds on write and is emptied by a read), or a pipe of
8-byte numbers where there is no eventfd. One system call moves the counter and wakes the sleeper.

Memory ordering. Python has no fences, so nobody polls a position in shared memory: on a weakly
ordered CPU the position could be seen before the bytes it announces. Bytes are announced only
through a counter. write(2) and read(2) on one eventfd or pipe take the same kernel lock, so what a
process stored before adding n is visible to whoever has read a count that includes that n. Thus
    writer: store the bytes    -> add to `published` | reader: read `published` -> load the bytes
    reader: load the bytes     -> add to `consumed`  | writer: read `consumed`  -> reuse the space
and neither side touches a byte that the other still owns.

The memory is anonymous (memfd, or an unlinked temporary file) and reaches children as inherited
file descriptors: nothing has a name, so nothing is left behind however the processes end.
"""

import mmap
import os
import select
import struct
import tempfile
import time
from collections.abc import Sequence

from jaxserve.messages import RingHandle

_LENGTH = struct.Struct("=Q")
_PIPE_READ_BYTES = 1 << 16


class ReaderDiedError(Exception):
    """The writer needs room, and a reader that will never make any has died."""

    def __init__(self, reader_idx: int):
        super().__init__(f"reader {reader_idx} of the ring buffer has died")
        self.reader_idx = reader_idx


class WatchedFdError(Exception):
    """A watched file descriptor became ready while there was no message to read."""

    def __init__(self, fd: int):
        super().__init__(f"file descriptor {fd} became ready")
        self.fd = fd


class _EventCounter:
    """A counter shared between two processes, as an eventfd."""

    unsent = 0

    def __init__(self, fds: Sequence[int]):
        self.fds = list(fds)
        self.read_fd = self.write_fd = fds[0]

    def add(self, amount: int) -> None:
        os.eventfd_write(self.write_fd, amount)

    def take(self) -> int:
        """What was added since the last call; 0 if nothing was."""
        try:
            return os.eventfd_read(self.read_fd)
        except BlockingIOError:
            return 0


class _PipeCounter:
    """A counter shared between two processes, as a pipe that carries what is added.

    A full pipe takes no more: `unsent` is then what the next `add` must deliver.
    """

    def __init__(self, fds: Sequence[int]):
        self.fds = list(fds)
        self.read_fd, self.write_fd = fds
        self.unsent = 0

    def add(self, amount: int) -> None:
        self.unsent += amount
        try:
            os.write(self.write_fd, _LENGTH.pack(self.unsent))
        except BlockingIOError:
            return
        self.unsent = 0

    def take(self) -> int:
        """What was added since the last call; 0 if nothing was."""
        try:
            data = os.read(self.read_fd, _PIPE_READ_BYTES)
        except BlockingIOError:
            return 0
        return sum(amount for (amount,) in _LENGTH.iter_unpack(data))


_Counter = _EventCounter | _PipeCounter


class RingBuffer:
    """The shared memory and counters of one ring, in the creating or an attached process.

    A process that attached uses either `writer()` or one `reader(...)`, once. Not thread-safe: one
    thread at a time writes, one thread at a time reads through a given reader.
    """

    def __init__(self, handle: RingHandle):
        """Attaches to a ring whose descriptors this process holds."""
        self.handle = handle
        self.memory = mmap.mmap(handle.memory_fd, handle.capacity_bytes)
        self._published = [_counter(fds) for fds in handle.published]
        self._consumed = [_counter(fds) for fds in handle.consumed]

    @classmethod
    def create(
        cls, capacity_bytes: int, num_readers: int, *, use_eventfd: bool = hasattr(os, "eventfd")
    ) -> "RingBuffer":
        """A new ring; its descriptors are closed by `close`."""
        assert capacity_bytes > 0 and num_readers > 0
        new_counter = _new_eventfd if use_eventfd else _new_pipe
        return cls(
            RingHandle(
                memory_fd=_anonymous_memory(capacity_bytes),
                capacity_bytes=capacity_bytes,
                published=[new_counter() for _ in range(num_readers)],
                consumed=[new_counter() for _ in range(num_readers)],
            )
        )

    def fds(self) -> list[int]:
        """All descriptors that a child needs to attach."""
        counters = [*self._published, *self._consumed]
        return [self.handle.memory_fd, *(fd for counter in counters for fd in counter.fds)]

    def writer(self, death_fds: Sequence[int] = ()) -> "RingWriter":
        """The one writer. death_fds: for each reader a descriptor that is ready once it is dead."""
        return RingWriter(self.memory, self._published, self._consumed, death_fds)

    def reader(self, reader_idx: int = 0, watch_fds: Sequence[int] = ()) -> "RingReader":
        """One of the readers. watch_fds: descriptors that interrupt a wait when ready."""
        return RingReader(
            self.memory, self._published[reader_idx], self._consumed[reader_idx], watch_fds
        )

    def close(self) -> None:
        """Closes this process' side; its writer and readers cannot be used any more."""
        self.memory.close()
        for fd in self.fds():
            os.close(fd)


class RingWriter:
    """Sends every message to every reader, in order; sleeps while the slowest has no room."""

    def __init__(
        self,
        memory: mmap.mmap,
        published: Sequence[_Counter],
        consumed: Sequence[_Counter],
        death_fds: Sequence[int],
    ):
        self._memory = memory
        self._capacity_bytes = len(memory)
        self._published = published
        self._consumed = consumed
        self._reader_of_death_fd = {fd: i for i, fd in enumerate(death_fds)}
        self._offset = 0
        self._num_unpublished = 0
        # For each reader: bytes written that it is not known to have consumed.
        self._num_held = [0] * len(published)
        self._num_free = self._capacity_bytes
        self._broken = False

    def write(self, message: bytes, timeout_s: float | None = None) -> None:
        """Copies `message` into the ring and wakes the readers.

        Raises:
          ReaderDiedError: there is no room, and a reader is dead.
          TimeoutError: there was no room for so long. After either the ring is broken: part of the
            message may have been sent, so nothing can follow it.
        """
        assert not self._broken, "a message was cut off"
        deadline_s = _deadline(timeout_s)
        self._broken = True
        self._put(_LENGTH.pack(len(message)), deadline_s)
        self._put(message, deadline_s)
        self._publish(deadline_s)
        self._broken = False

    def _put(self, data: bytes, deadline_s: float | None) -> None:
        done, size = 0, len(data)
        while done < size:
            if not self._num_free:
                self._publish(deadline_s)
                self._wait_for_room(deadline_s)
            start = self._offset
            count = min(size - done, self._num_free, self._capacity_bytes - start)
            piece = data if count == size else memoryview(data)[done : done + count]
            self._memory[start : start + count] = piece
            done += count
            self._offset = (start + count) % self._capacity_bytes
            self._num_free -= count
            self._num_unpublished += count

    def _publish(self, deadline_s: float | None) -> None:
        amount, self._num_unpublished = self._num_unpublished, 0
        for i, counter in enumerate(self._published):
            self._num_held[i] += amount
            counter.add(amount)
            while counter.unsent:
                self._sleep({counter.write_fd: select.POLLOUT}, deadline_s)
                counter.add(0)

    def _wait_for_room(self, deadline_s: float | None) -> None:
        while True:
            for i, counter in enumerate(self._consumed):
                self._num_held[i] -= counter.take()
            self._num_free = self._capacity_bytes - max(self._num_held)
            if self._num_free:
                return
            self._sleep({counter.read_fd: select.POLLIN for counter in self._consumed}, deadline_s)

    def _sleep(self, events: dict[int, int], deadline_s: float | None) -> None:
        watched = events | dict.fromkeys(self._reader_of_death_fd, select.POLLIN)
        for fd in _poll(_poller(watched), deadline_s):
            if fd in self._reader_of_death_fd:
                raise ReaderDiedError(self._reader_of_death_fd[fd])


class RingReader:
    """Receives every message of the writer, in order; sleeps while there is none."""

    def __init__(
        self,
        memory: mmap.mmap,
        published: _Counter,
        consumed: _Counter,
        watch_fds: Sequence[int],
    ):
        self._memory = memory
        self._capacity_bytes = len(memory)
        self._published = published
        self._consumed = consumed
        self._watch_fds = list(watch_fds)
        self._poller = _poller(dict.fromkeys([self.fd, *watch_fds], select.POLLIN))
        self._offset = 0
        self._num_available = 0
        self._num_unacknowledged = 0
        # What is known of a message that has not arrived whole.
        self._message_len: int | None = None
        self._pieces: list[bytes] = []
        self._pieces_len = 0

    @property
    def fd(self) -> int:
        """Ready when something was written that no `read` has looked at."""
        return self._published.read_fd

    def read(self, timeout_s: float | None = None) -> bytes:
        """The next message.

        Raises:
          TimeoutError: it has not arrived whole; the next call goes on with it.
          WatchedFdError: likewise, and a watched descriptor is ready. Messages go first.
        """
        deadline_s = _deadline(timeout_s)
        message_len = self._message_len
        if message_len is None:
            (message_len,) = _LENGTH.unpack(self._take(_LENGTH.size, deadline_s))
            self._message_len = message_len
        message = self._take(message_len, deadline_s)
        self._message_len = None
        self._acknowledge()
        return message

    def _take(self, size: int, deadline_s: float | None) -> bytes:
        while self._pieces_len < size:
            if not self._num_available:
                self._wait_for_data(deadline_s)
            start = self._offset
            missing = size - self._pieces_len
            count = min(missing, self._num_available, self._capacity_bytes - start)
            self._pieces.append(self._memory[start : start + count])
            self._pieces_len += count
            self._offset = (start + count) % self._capacity_bytes
            self._num_available -= count
            self._num_unacknowledged += count
        pieces, self._pieces, self._pieces_len = self._pieces, [], 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _acknowledge(self) -> None:
        """What a full pipe does not take goes with the next one: then the writer has unread counts,
        so it finds room, writes, and has this reader acknowledge again.
        """
        amount, self._num_unacknowledged = self._num_unacknowledged, 0
        if amount:
            self._consumed.add(amount)

    def _wait_for_data(self, deadline_s: float | None) -> None:
        while True:
            self._acknowledge()
            self._num_available = self._published.take()
            if self._num_available:
                return
            ready = set(_poll(self._poller, deadline_s)).intersection(self._watch_fds)
            # A process that wrote and then died: what it wrote goes first.
            self._num_available = self._published.take() if ready else 0
            if self._num_available:
                return
            if ready:
                raise WatchedFdError(min(ready))


def _counter(fds: Sequence[int]) -> _Counter:
    return _EventCounter(fds) if len(fds) == 1 else _PipeCounter(fds)


def _new_eventfd() -> list[int]:
    return [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)]


def _new_pipe() -> list[int]:
    fds = list(os.pipe())
    for fd in fds:
        os.set_blocking(fd, False)
    return fds


def _anonymous_memory(size_bytes: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("jaxserve-ring", os.MFD_CLOEXEC)
    else:
        fd, path = tempfile.mkstemp(prefix="jaxserve-ring")
        os.unlink(path)
    os.truncate(fd, size_bytes)
    return fd


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


def _poller(events: dict[int, int]) -> select.poll:
    poller = select.poll()
    for fd, event in events.items():
        poller.register(fd, event)
    return poller


def _poll(poller: select.poll, deadline_s: float | None) -> list[int]:
    """Sleeps until one of its descriptors is ready (or closed at the other end); returns those."""
    timeout_ms = None
    if deadline_s is not None:  # poll() takes 32 bits
        timeout_ms = min(max(0.0, deadline_s - time.monotonic()) * 1000, 2**31 - 1)
    ready = [fd for fd, _ in poller.poll(timeout_ms)]
    if not ready:
        raise TimeoutError("nothing happened on the ring buffer in time")
    return ready
