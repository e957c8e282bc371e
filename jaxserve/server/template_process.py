"""Renders chat templates that clients send, in a process of its own.

A template is a program. One that loops for ever, or builds a text without end, ends this process by
its limits on time and memory, and nothing else; the next template gets a new one.

    parent --{template, variables, limits}--> child --{text} or {error, param}--> parent

as JSON behind 8 bytes of length, over the child's standard input and output. The child exits when
its input ends, so it never outlives its parent.
"""

import contextlib
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import IO, Any

import msgspec

from jaxserve.checkpoint.chat_template import ChatTemplate
from jaxserve.errors import RequestError, UserError

TEMPLATE_TIMEOUT_S = 5.0
TEMPLATE_MEMORY_BYTES = 2**30
MAX_TEMPLATE_TEXT = 2**25
_LENGTH = struct.Struct("=Q")


class _Job(msgspec.Struct):
    template: str
    variables: dict[str, Any]
    wanted: dict[str, str]
    timeout_s: float


class _Result(msgspec.Struct):
    text: str = ""
    error: str = ""
    param: str = ""


class TemplateProcess:
    """The parent's side. The process starts with the first template and is kept for the next.

    Rendering blocks the calling thread; calls from several threads take turns.
    """

    def __init__(self, timeout_s: float = TEMPLATE_TIMEOUT_S):
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._popen: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def render(self, template: str, variables: Mapping[str, Any], wanted: Mapping[str, str]) -> str:
        """The text of `template`.

        wanted: variables that it must read, as in `ChatTemplate.check_takes`.

        Raises:
          RequestError: the template is not valid, refuses the variables, does not read what is
            wanted, or takes too much time or memory.
        """
        job = msgspec.json.encode(_Job(template, dict(variables), dict(wanted), self._timeout_s))
        with self._lock:
            if self._is_closed:
                raise RequestError("The server is shutting down.", status=503)
            popen = self._popen or self._start()
            assert popen.stdin is not None and popen.stdout is not None
            try:
                _write(popen.stdin, job)
                answer = _read(popen.stdout)
            except OSError:
                answer = None
            if answer is None:
                self._end()
        if answer is None:
            raise RequestError(
                f"The chat template takes more than {self._timeout_s:g} s or too much memory.",
                param="chat_template",
            )
        result = msgspec.json.decode(answer, type=_Result)
        if result.error:
            raise RequestError(result.error, param=result.param)
        return result.text

    def close(self) -> None:
        """Ends the process, also while it renders. Nothing is rendered any more."""
        self._is_closed = True
        popen = self._popen
        if popen is not None:
            popen.kill()
        with self._lock:
            if self._popen is not None:
                self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        return self._popen

    def _end(self) -> None:
        popen, self._popen = self._popen, None
        assert popen is not None
        popen.kill()
        with contextlib.suppress(OSError):  # what could not be written any more
            popen.__exit__(None, None, None)


def _write(file: IO[bytes], data: bytes) -> None:
    file.write(_LENGTH.pack(len(data)))
    file.write(data)
    file.flush()


def _read(file: IO[bytes]) -> bytes | None:
    """One message; None at the end."""
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = file.read(length)
    return data if len(data) == length else None


def main() -> None:
    """The child's loop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _limit(resource.RLIMIT_AS, TEMPLATE_MEMORY_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    while data := _read(sys.stdin.buffer):
        job = msgspec.json.decode(data, type=_Job)
        signal.setitimer(signal.ITIMER_REAL, job.timeout_s)  # its signal ends the process
        result = _render(job)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(sys.stdout.buffer, msgspec.json.encode(result))


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, hard))


def _render(job: _Job) -> _Result:
    try:
        template = ChatTemplate(job.template, "chat_template")
        template.check_takes(job.wanted)
        text = template.render(job.variables)
    except UserError as error:
        return _Result(error=error.problem, param="chat_template")
    except RequestError as error:
        return _Result(error=error.message, param=error.param or "chat_template")
    except Exception as error:  # the template is a program, and the client's data runs it
        return _Result(error=f"The chat template fails: {error!r}"[:300], param="chat_template")
    if len(text) > MAX_TEMPLATE_TEXT:
        return _Result(error="The chat template writes too long a text.", param="chat_template")
    return _Result(text)


if __name__ == "__main__":
    main()
