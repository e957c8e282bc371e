"""Messages through a Unix stream socket, from an engine core to an API server.

A frame is 8 bytes of length, then the message. The thread that has a message sends it and the one
that wants it receives it, in one system call each: a step wakes nobody but the receiver. That is
why this is no ZeroMQ socket, which has a thread on each side that must wake up first, on cores that
the model computes on too.

The writer never blocks. What the kernel does not take is kept, in order, and sent by a thread that
exists only while something is left. What is for a reader that is gone is dropped.

Each pair of sockets is made before the processes are and inherited, so there is no name, nothing to
connect to, and nothing to wait for. What was sent arrives even if the sender is killed after it.
"""

import os
import select
import socket
import struct
import threading
from collections.abc import Callable

_LENGTH = struct.Struct("=Q")
# More than the kernel holds by default, so one `read` takes all that a dead process left.
_BUFFER_BYTES = 1 << 18


class FrameWriter:
    """Sends messages, in order. One thread sends and closes."""

    def __init__(self, fd: int):
        """fd: of the socket; the writer's own from now on."""
        self._socket = _take_socket(fd)
        self._lock = threading.Lock()  # of what follows, and of sending
        self._unsent = bytearray()
        self._thread: threading.Thread | None = None  # as long as something is unsent

    def send(self, message: bytes) -> None:
        """Never blocks."""
        frame = _LENGTH.pack(len(message)) + message
        with self._lock:
            if self._unsent:
                self._unsent += frame
                return
            num_sent = self._send(frame)
            if num_sent < len(frame):
                self._unsent += memoryview(frame)[num_sent:]
                self._thread = threading.Thread(
                    target=self._send_unsent, name="outputs", daemon=True
                )
                self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Sends what is left; what then still is after that time is lost."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                self._socket.shutdown(socket.SHUT_RDWR)  # its next `send` is in vain
                thread.join()
        self._socket.close()

    def _send(self, data: bytes | bytearray) -> int:
        """How many bytes are done with: sent, or of no use to anybody."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except ConnectionError:  # the reader is gone
            return len(data)

    def _send_unsent(self) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLOUT)
        while True:
            poller.poll()
            with self._lock:
                del self._unsent[: self._send(self._unsent)]
                if not self._unsent:
                    self._thread = None
                    return


class FrameReader[T]:
    """Receives messages, for whoever waits until `fd` is readable."""

    def __init__(self, fd: int, decode: Callable[[memoryview], T]):
        """fd: of the socket; the reader's own from now on.
        decode: makes a message of its bytes, which are overwritten later.
        """
        self.fd = fd
        self._socket = _take_socket(fd)
        self._decode = decode
        # Bytes of frames not yet decoded: the first `_num_held` of a buffer that has room for more,
        # and for the whole of the first frame.
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._num_held = 0

    def read(self) -> list[T] | None:
        """The messages that what has come completes, perhaps none; None: the writer is gone.

        Receives once. Never blocks.

        Raises:
          Exception: what `decode` raises. There is no way on.
        """
        try:
            num_received = self._socket.recv_into(self._buffer[self._num_held :])
        except BlockingIOError:
            return []
        except ConnectionError:
            return None
        if not num_received:
            return None
        return self._take_frames(self._num_held + num_received)

    def close(self) -> None:
        """Closes the descriptor."""
        self._socket.close()

    def _take_frames(self, stop: int) -> list[T]:
        """Decodes whole frames in the first `stop` bytes and moves what is left to the front: each
        byte once, and once more if its frame needs a larger buffer."""
        messages: list[T] = []
        start = size = 0
        while stop - start >= _LENGTH.size:
            size = _LENGTH.size + _LENGTH.unpack_from(self._buffer, start)[0]
            if start + size > stop:
                break
            messages.append(self._decode(self._buffer[start + _LENGTH.size : start + size]))
            start += size
        held = self._buffer[start:stop]
        self._num_held = len(held)
        if size > len(self._buffer):
            self._buffer = memoryview(bytearray(size))
            self._buffer[: len(held)] = held
        elif held and start:
            self._buffer[: len(held)] = held
        return messages


def _take_socket(fd: int) -> socket.socket:
    """An inherited descriptor: no child of this process inherits it."""
    os.set_inheritable(fd, False)
    taken = socket.socket(fileno=fd)
    taken.setblocking(False)
    return taken
