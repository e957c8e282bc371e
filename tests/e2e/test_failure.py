"""How a real server ends: by signal, by the death of one of its processes, or before it starts."""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import gettempdir

import pytest

from tests.e2e.live_server import MODEL, ROOT, LiveServer, free_port, live_server, wait_gone
from tests.e2e.sizes import SIZES, flags_of


@pytest.fixture
def server(tmp_path):
    with live_server(tmp_path / "log", *flags_of(SIZES)) as running:
        yield running


def left_behind() -> set[str]:
    """Names in shared memory, and directories of sockets."""
    return {*os.listdir("/dev/shm"), *(n for n in os.listdir(gettempdir()) if "jaxserve" in n)}


@contextlib.contextmanager
def open_stream(server: LiveServer) -> Iterator[http.client.HTTPResponse]:
    """A stream that would run for 400 tokens, after its first chunk."""
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with contextlib.closing(server.connect()) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body))
        with connection.getresponse() as response:
            assert response.readline().startswith(b"data: ")
            yield response


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_everything(server, number):
    family = server.family()
    before = left_behind()
    with open_stream(server):
        if number == signal.SIGINT:
            os.killpg(server.process.pid, number)  # Ctrl-C reaches the whole group
        else:
            server.process.send_signal(number)
        assert wait_gone(server, family, 5) == 0, server.log
    assert "Traceback" not in server.log
    assert left_behind() <= before


@pytest.mark.parametrize("victim", ["core_process", "worker_process"])
def test_a_killed_process_fails_requests_loudly(tmp_path, victim):
    before = left_behind()
    with live_server(tmp_path / "log", *flags_of(SIZES)) as server:
        family = server.family()
        answers = []
        body = {"model": MODEL, "prompt": "Twice", "max_tokens": 400, "ignore_eos": True}
        pending = threading.Thread(
            target=lambda: answers.append(server.post("/v1/completions", body))
        )
        with open_stream(server) as stream:
            pending.start()
            server.wait_metric("num_requests_running", 2)
            next(p for p in family if victim in " ".join(p.cmdline())).send_signal(signal.SIGKILL)
            rest = stream.read().decode()
        pending.join(10)
        assert answers and answers[0][0] in (500, 503), answers
        assert "SIGKILL" in answers[0][1]["error"]["message"], answers
        last_event = json.loads(rest.strip().split("\n\n")[-1].removeprefix("data: "))
        assert "SIGKILL" in last_event["error"]["message"], rest[-500:]
        status, health = server.get("/health")
        assert status == 503 and b"SIGKILL" in health
        assert wait_gone(server, family, 10) == 1, server.log
        assert "SIGKILL" in server.log.strip().splitlines()[-1]
    assert left_behind() <= before


def run_serve(*arguments: str, timeout_s: float = 60) -> tuple[int, list[str]]:
    """Exit code and the lines of stderr that are no log lines."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxserve", "serve", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=timeout_s,
    )
    assert "Traceback" not in done.stderr, done.stderr
    lines = [
        line for line in done.stderr.splitlines() if not re.match(r"\d{4}-\d\d-\d\d \d\d:", line)
    ]
    return done.returncode, lines


def test_a_taken_port(server):
    code, lines = run_serve(MODEL, "--port", str(server.port))
    assert code == 2 and len(lines) == 2 and str(server.port) in lines[0], lines


def test_a_length_that_does_not_fit(tmp_path):
    code, lines = run_serve(
        MODEL, "--port", str(free_port()), "--num-kv-blocks=20", "--max-model-len=8192"
    )
    assert code == 2 and len(lines) == 2 and "--max-model-len 8192" in lines[0], lines
    suggested = re.search(r"--max-model-len (\d+)", lines[1])
    assert suggested, lines
    code, lines = run_serve(MODEL, "--max-model-len=9000000", "--port", str(free_port()))
    assert code == 2 and len(lines) == 2 and "8192" in lines[1], lines


def test_broken_model_files(tmp_path: Path, demo_model_path: Path):
    port = ("--port", str(free_port()))
    truncated = tmp_path / "truncated.gguf"
    with demo_model_path.open("rb") as source:
        truncated.write_bytes(source.read(5_000_000))
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    for model, word in ((truncated, "truncated.gguf"), (other, "MambaForCausalLM")):
        code, lines = run_serve(str(model), *port)
        assert code == 2 and len(lines) == 2 and word in lines[0], lines
    code, lines = run_serve(str(tmp_path / "missing.gguf"), *port)
    assert code == 2 and len(lines) == 2 and "missing.gguf" in lines[0], lines


def test_a_server_that_starts_can_be_stopped(tmp_path):
    server = LiveServer(tmp_path / "log", *flags_of(SIZES))
    try:
        while "Device" not in server.log:
            assert server.process.poll() is None, server.log
            time.sleep(0.05)
        family = server.family()
        server.process.send_signal(signal.SIGTERM)
        assert wait_gone(server, family, 5) == 0, server.log
    finally:
        server.kill()
