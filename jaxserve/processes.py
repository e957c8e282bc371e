"""Child processes: how they start, how each side learns of the other's death, how they end.

A child is `python -m module LIFE_FD`. LIFE_FD is the read end of its *life pipe*, whose write end
only the parent holds: the start message comes through it first, and its end of file is the parent's
word to exit. It comes when the parent closes the pipe, and by itself when the parent dies in any
way; a grandchild hangs on the child's own pipe in turn, so no process outlives the first one.

Children ignore SIGINT and SIGTERM: Ctrl-C and service managers signal the whole group, and only the
first process decides what that means.
"""

import contextlib
import logging
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

_LENGTH = struct.Struct("=Q")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_COMM_LEN = 15


class Child:
    """A running child process, in the parent.

    death_fd: becomes readable when the process is dead, for poll() and event loops.
    """

    def __init__(self, name: str, popen: subprocess.Popen, life_fd: int, death_fd: int):
        self.name = name
        self.pid = popen.pid
        self.death_fd = death_fd
        self._popen = popen
        self._life_fd = life_fd

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number if a signal killed it."""
        return self._popen.poll()

    def describe_exit(self) -> str:
        """How it ended, in words. Only for a dead process."""
        code = self._popen.wait()
        if code >= 0:
            return f"{self.name} exited with code {code}"
        try:
            signal_name = signal.Signals(-code).name
        except ValueError:
            signal_name = "unknown"
        return f"{self.name} was killed by signal {-code} ({signal_name})"

    def wait(self, timeout_s: float) -> bool:
        """Whether it died within that time. Idle while waiting."""
        poller = select.poll()
        poller.register(self.death_fd, select.POLLIN)
        if not poller.poll(max(0.0, timeout_s) * 1000):
            return False
        self._popen.wait()
        return True

    def release(self) -> None:
        """Tells it to exit, by closing its life pipe. Returns at once."""
        if self._life_fd >= 0:
            os.close(self._life_fd)
            self._life_fd = -1

    def kill(self) -> None:
        """SIGKILL; returns when it is dead."""
        self._popen.kill()
        self._popen.wait()

    def close(self) -> None:
        """Closes the descriptors of a dead process."""
        assert self.exit_code is not None, f"{self.name} runs"
        self.release()
        if self.death_fd >= 0:
            os.close(self.death_fd)
            self.death_fd = -1


def spawn(
    module: str,
    name: str,
    start_message: bytes,
    *,
    inherited_fds: Sequence[int] = (),
    stderr_fd: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Child:
    """Runs `python -m module` with these descriptors (same numbers) and this first message.

    name: for people, such as "worker 0".  stderr_fd: its standard error; None: the parent's.
    environment: what it has beside the parent's.
    """
    life_read_fd, life_write_fd = os.pipe()
    inherited = [life_read_fd, *inherited_fds]
    death_pipe = None if hasattr(os, "pidfd_open") else os.pipe()
    if death_pipe:
        inherited.append(death_pipe[1])
    # -P: nothing in the working directory shadows a module. What the parent can import, the child
    # can: the package may be on sys.path only.
    path = [os.path.abspath(entry) for entry in sys.path]
    with _signals_blocked():
        popen = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(life_read_fd)],
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            stderr=stderr_fd,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path), **(environment or {})},
        )
    os.close(life_read_fd)
    if death_pipe:
        os.close(death_pipe[1])
        death_fd = death_pipe[0]
    else:
        death_fd = os.pidfd_open(popen.pid)
    # A child that dies before it has read everything is found out through death_fd.
    with contextlib.suppress(BrokenPipeError):
        _write_all(life_write_fd, _LENGTH.pack(len(start_message)) + start_message)
    return Child(name, popen, life_write_fd, death_fd)


def stop_all(children: Sequence[Child], timeout_s: float, *, level: int = logging.WARNING) -> None:
    """Releases all; those that still live after timeout_s are killed, and that is logged. All are
    dead afterwards."""
    deadline_s = time.monotonic() + timeout_s
    for child in children:
        child.release()
    for child in children:
        if not child.wait(deadline_s - time.monotonic()):
            logging.getLogger(__name__).log(level, "%s does not exit; killing it", child.name)
            child.kill()
        child.close()


def become_child() -> tuple[bytes, int]:
    """In a child, first thing in its main thread: the start message and the life pipe."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    life_fd = int(sys.argv[1])
    os.set_inheritable(life_fd, False)
    (size,) = _LENGTH.unpack(_read_exactly(life_fd, _LENGTH.size))
    return _read_exactly(life_fd, size), life_fd


def exit_with_parent(
    life_fd: int, name: str, on_parent_gone: Callable[[], None] = lambda: None
) -> None:
    """Names this child and has it exit with code 0 once the parent closes the life pipe or dies.

    on_parent_gone: called first, in another thread.
    """
    name_process(name)
    arguments = (life_fd, on_parent_gone)
    threading.Thread(target=_wait_for_parent, args=arguments, name="life", daemon=True).start()


def name_process(name: str) -> None:
    """What `ps -o comm` and `top` show, where /proc exists."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as comm:
        comm.write(name[:_COMM_LEN])


def _wait_for_parent(life_fd: int, on_parent_gone: Callable[[], None]) -> None:
    os.read(life_fd, 1)
    try:
        on_parent_gone()
    finally:
        # The main thread may be deep in device code, and nobody is left to tell.
        os._exit(0)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """A child started meanwhile has the signals blocked until it ignores them itself."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read_exactly(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = os.read(fd, size - len(data))
        if not piece:
            # The parent died while it started this process.
            sys.exit(1)
        data += piece
    return data
