"""A real `jaxserve serve` with the demo model, its processes and its metrics."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent.parent
MODEL = "smollm2-135m"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class LiveServer:
    """One server process group, run by `python -m module`. Its log goes to a file."""

    def __init__(
        self,
        log: Path,
        *flags: str,
        model: str = MODEL,
        python: str = sys.executable,
        module: str = "jaxserve",
    ):
        self.port = free_port()
        self._log = log
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                [
                    python,
                    "-m",
                    module,
                    "serve",
                    model,
                    "--port",
                    str(self.port),
                    *flags,
                ],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                cwd=ROOT,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8", errors="replace")

    def wait_ready(self, timeout_s: float = 240) -> None:
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            assert self.process.poll() is None, self.log
            with contextlib.suppress(OSError):
                if self.get("/health")[0] == 200:
                    return
            time.sleep(0.1)
        raise AssertionError(f"not ready after {timeout_s} s\n{self.log}")

    def family(self) -> list[psutil.Process]:
        """All its processes, the first API server first."""
        me = psutil.Process(self.process.pid)
        return [me, *me.children(recursive=True)]

    def connect(self, timeout_s: float = 60) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)

    def get(self, path: str) -> tuple[int, bytes]:
        with contextlib.closing(self.connect(5)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()

    def post(self, path: str, body: object, timeout_s: float = 60) -> tuple[int, dict]:
        """Status and JSON answer; {} where the answer is a stream."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        with contextlib.closing(self.connect(timeout_s)) as connection:
            connection.request("POST", path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            data = response.read()
            is_stream = response.headers["Content-Type"].startswith("text/event-stream")
            return response.status, {} if is_stream else json.loads(data)

    def metric(self, name: str) -> float:
        """The sum over labels of one metric."""
        lines = self.get("/metrics")[1].decode().splitlines()
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith((f"jaxserve:{name}{{", f"jaxserve:{name} "))
        ]
        assert values, f"no metric {name}"
        return sum(values)

    def wait_metric(self, name: str, wanted: float, timeout_s: float = 10) -> float:
        """Seconds until the metric has the value."""
        started_s = time.monotonic()
        while (value := self.metric(name)) != wanted:
            assert time.monotonic() - started_s < timeout_s, f"{name} is {value}, not {wanted}"
            time.sleep(0.02)
        return time.monotonic() - started_s

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def live_server(log: Path, *flags: str, **options: str) -> Iterator[LiveServer]:
    """A server that is ready; killed at the end if it still runs."""
    server = LiveServer(log, *flags, **options)
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill()


def wait_gone(server: LiveServer, family: list[psutil.Process], timeout_s: float) -> int:
    """Asserts that all processes end in time; returns the server's exit code."""
    started_s = time.monotonic()
    exit_code = server.process.wait(timeout_s)  # before psutil can take it
    left_s = max(0.0, started_s + timeout_s - time.monotonic())
    _, alive = psutil.wait_procs(family[1:], timeout=left_s)
    assert not alive, f"still there after {timeout_s} s: {alive}"
    return exit_code
