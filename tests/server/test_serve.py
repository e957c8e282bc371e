"""`serve` as a process: start, ports, signals, and the engine's death. The workers are fakes."""

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from jaxserve.checkpoint import load_tokenizer
from jaxserve.config import ServerConfig
from jaxserve.errors import UserError
from jaxserve.server.listener import Listener
from tests.conftest import ROOT

_TIMEOUT_S = 30
_SCRIPT = """
import sys
from jaxserve.cli_flags import config_from_kwargs
from jaxserve.errors import UserError
from jaxserve.logs import print_user_error
from jaxserve.server.serve import serve
import json
try:
    config = config_from_kwargs(**json.loads(sys.argv[2]))
    sys.exit(serve(config, worker_class=f"tests.fakes:{sys.argv[1]}"))
except UserError as error:
    print_user_error(error)
    sys.exit(2)
"""


class Serve:
    """A running `serve`."""

    def __init__(self, popen: subprocess.Popen, port: int):
        self.popen = popen
        self.url = f"http://127.0.0.1:{port}"
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        self.lines += (line.rstrip("\n") for line in self.popen.stderr)

    def _saw(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    def wait_for_log(self, text: str) -> None:
        deadline_s = time.monotonic() + _TIMEOUT_S
        while not self._saw(text):
            assert self.popen.poll() is None and time.monotonic() < deadline_s, self.lines
            time.sleep(0.02)

    def family(self) -> list[psutil.Process]:
        """The process, the engine core, the worker."""
        process = psutil.Process(self.popen.pid)
        return [process, *process.children(recursive=True)]

    def end(self) -> int:
        """Waits for the end; returns the exit code."""
        code = self.popen.wait(_TIMEOUT_S)
        self._reader.join()
        return code


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def serving(worker: str, *, port: int = 0, **fields: object) -> Iterator[Serve]:
    port = port or free_port()
    config = {
        "model": str(ROOT / "tests" / "goldens" / "tiny_llama"),
        "served_model_name": "tiny",
        "port": port,
        "block_size": 16,
        "num_kv_blocks": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_num_mixed_tokens": 64,
        "jump_ahead_tokens": 64,
        "dtype": "float32",
        "attention": "reference",
        "matmul": "xla",
        "compilation_cache_dir": "none",
        **fields,
    }
    popen = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, worker, json.dumps(config)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    server = Serve(popen, port)
    try:
        yield server
    finally:
        if popen.poll() is None:
            popen.kill()
        server.end()
        assert popen.stderr is not None
        popen.stderr.close()


def body(**fields: object) -> dict:
    request = {"model": "tiny", "prompt": [5, 6, 7], "ignore_eos": True, "max_tokens": 400}
    return request | fields


def wait_until_gone(server: Serve, family: list[psutil.Process], timeout_s: float) -> int:
    """Waits for all processes; returns the exit code of the first."""
    deadline_s = time.monotonic() + timeout_s
    code = server.end()
    _, alive = psutil.wait_procs(family[1:], max(0, deadline_s - time.monotonic()))
    assert not alive, alive
    assert time.monotonic() < deadline_s
    return code


def test_serve_until_sigterm() -> None:
    with serving("SlowWorker") as server, httpx.Client(base_url=server.url) as client:
        server.wait_for_log("try: curl")
        assert server._saw(f"tiny at {server.url}")
        family = server.family()
        assert len(family) == 3
        assert client.get("/health").status_code == 200
        short = client.post("/v1/completions", json=body(max_tokens=3))
        assert short.json()["usage"]["completion_tokens"] == 3
        with client.stream("POST", "/v1/completions", json=body(stream=True)) as response:
            lines = response.iter_lines()
            assert '"finish_reason":null' in next(lines)
            server.popen.send_signal(signal.SIGTERM)
            last = [line for line in lines if line][-1]
        assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert wait_until_gone(server, family, 5) == 0
        assert "stopped" in server.lines[-1]


def test_death_of_the_worker() -> None:
    with serving("SlowWorker") as server, httpx.Client(base_url=server.url) as client:
        server.wait_for_log("try: curl")
        family = server.family()
        with client.stream("POST", "/v1/completions", json=body(stream=True)) as response:
            lines = response.iter_lines()
            next(lines)
            family[2].kill()
            last = [line for line in lines if line][-1]
        message = json.loads(last.removeprefix("data: "))["error"]["message"]
        assert "SIGKILL" in message
        time.sleep(1)  # a probe comes when it comes
        health = client.get("/health")
        assert health.status_code == 503
        assert "SIGKILL" in health.json()["error"]["message"]
        assert client.post("/v1/completions", json=body()).status_code == 503
        assert wait_until_gone(server, family, 6) == 1
        assert "the engine died" in server.lines[-1], server.lines
        assert "SIGKILL" in server.lines[-1], server.lines


def test_sigint_while_starting_and_the_port_is_closed_until_ready() -> None:
    with serving("StuckLoadWorker") as server:
        server.wait_for_log("starts tiny")
        while len(server.family()) < 3:
            time.sleep(0.02)
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url + "/health")
        family = server.family()
        server.popen.send_signal(signal.SIGINT)
        assert wait_until_gone(server, family, 5) == 0


@pytest.mark.parametrize(
    ("worker", "code", "last"),
    (
        ("UnservableWorker", 2, "fix: Use --num-kv-blocks 100."),
        ("BrokenLoadWorker", 1, "no such device"),
    ),
)
def test_an_engine_that_cannot_start(worker: str, code: int, last: str) -> None:
    with serving(worker) as server:
        assert server.end() == code
        assert last in server.lines[-1], server.lines


def test_a_taken_port_is_noticed_before_the_engine_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with serving("StuckLoadWorker", port=port) as server:
            assert server.end() == 2
            assert len(server.lines) == 2
            assert f"--port {port} is taken" in server.lines[0]
            assert "such as --port" in server.lines[1]
            suggested = int(server.lines[1].split()[-1].rstrip("."))
            Listener(ServerConfig(port=suggested)).close()


@pytest.mark.parametrize("host", ("no such host", "192.0.2.1", "x" * 300))
def test_an_address_of_somebody_else(host: str) -> None:
    with pytest.raises(UserError) as caught:
        Listener(ServerConfig(host=host))
    assert "--host" in caught.value.problem


def test_a_bound_socket_refuses_until_it_listens() -> None:
    port = free_port()
    with contextlib.closing(Listener(ServerConfig(port=port))) as listener:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        listener.listen()
        socket.create_connection(("127.0.0.1", port)).close()


def test_of_two_servers_on_one_port_the_second_says_so():
    server = ServerConfig(port=free_port())
    with (
        contextlib.closing(Listener(server)) as first,
        contextlib.closing(Listener(server)) as second,
    ):
        first.listen()
        with pytest.raises(UserError, match=f"--port {server.port} is taken"):
            second.listen()


def test_a_wish_to_upgrade_is_ignored() -> None:
    with serving("SlowWorker") as server, httpx.Client(base_url=server.url) as client:
        server.wait_for_log("try: curl")
        headers = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c"}
        response = client.post("/v1/completions", json=body(max_tokens=2), headers=headers)
        assert response.status_code == 200, response.text


def test_a_long_text_does_not_stop_other_threads() -> None:
    """`tokenizers` lets go of the GIL in `encode_batch` only."""
    tokenizer = load_tokenizer(ROOT / "tests" / "goldens" / "tiny_llama")
    gaps, last = [0.0], time.perf_counter()
    thread = threading.Thread(
        target=tokenizer.encode, args=("word " * 400_000,), kwargs={"add_special_tokens": False}
    )
    started_s = time.perf_counter()
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
    took_s = time.perf_counter() - started_s
    assert took_s > 0.1, "too short a text to tell"
    assert max(gaps) < took_s / 2, (max(gaps), took_s)


def test_a_unix_socket_with_tls_and_two_keys(tmp_path: Path) -> None:
    tls = ROOT / "tests" / "goldens" / "tls"
    path = tmp_path / "s.sock"
    config = {
        "uds": str(path),
        "ssl_certfile": str(tls / "cert.pem"),
        "ssl_keyfile": str(tls / "key.pem"),
        "api_key": ["one", "two"],
    }
    with serving("SlowWorker", **config) as server:
        server.wait_for_log(f"try: curl https://localhost/v1/chat/completions --unix-socket {path}")
        trusted = ssl.create_default_context(cafile=str(tls / "cert.pem"))
        transport = httpx.HTTPTransport(uds=str(path), verify=trusted)
        with httpx.Client(transport=transport, base_url="https://localhost") as client:
            for key, status in (("one", 200), ("two", 200), ("three", 401)):
                headers = {"Authorization": f"Bearer {key}"}
                response = client.post("/v1/completions", json=body(max_tokens=3), headers=headers)
                assert response.status_code == status
        server.popen.send_signal(signal.SIGTERM)
        assert server.end() == 0
    assert not path.exists()


@pytest.mark.parametrize(
    ("fields", "problem"),
    (
        ({"ssl_certfile": "nowhere.pem"}, "--ssl-certfile nowhere.pem cannot be read"),
        ({"uds": "/nowhere/s.sock"}, "--uds /nowhere/s.sock cannot be used"),
        ({"allow_credentials": True}, "--allow-credentials does nothing"),
    ),
)
def test_mistakes_end_the_program_at_once(fields: dict, problem: str) -> None:
    with serving("StuckLoadWorker", **fields) as server:
        assert server.end() == 2
        assert len(server.lines) == 2
        assert problem in server.lines[0]
        assert server.lines[1].startswith("fix: ")


def test_slow_clients_are_cut_off_by_a_real_server() -> None:
    with serving("SlowWorker", request_timeout_s=0.5) as server:
        server.wait_for_log("try: curl")
        port = int(server.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\n\r\n{")
            assert client.recv(100).startswith(b"HTTP/1.1 408")
