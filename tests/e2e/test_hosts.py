"""Two hosts, as two network namespaces joined by a cable: one model, and what a cut does to it."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.e2e.engine import GOLDENS
from tests.e2e.live_server import MODEL, ROOT

STEP_TIMEOUT_S = 8
FLAGS = (
    "--mesh 1x2 --dtype float32 --max-model-len 256 --max-num-batched-tokens 16 --max-num-seqs 4 "
    f"--num-kv-blocks 40 --num-hosts 2 --coordinator jx0:8470 --step-timeout-s {STEP_TIMEOUT_S}"
)
GOLDEN = next(golden for golden in GOLDENS["prompts"] if golden["name"] == "english")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def can_make_networks() -> bool:
    """Whether this is root, with all it takes."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        return False
    try:
        ip("netns", "add", "jxprobe")
    except subprocess.CalledProcessError:
        return False
    ip("netns", "del", "jxprobe")
    return True


class Cable:
    """Joins the namespaces jx0 and jx1, in which each finds the other by name."""

    def __init__(self) -> None:
        for i in (0, 1):
            ip("netns", "add", f"jx{i}")
            names = Path(f"/etc/netns/jx{i}")
            names.mkdir(parents=True, exist_ok=True)
            (names / "hosts").write_text("127.0.0.1 localhost\n10.77.0.1 jx0\n10.77.0.2 jx1\n")
        ip("link", "add", "jxe0", "netns", "jx0", "type", "veth", "peer", "jxe1", "netns", "jx1")
        for i in (0, 1):
            ip("-n", f"jx{i}", "addr", "add", f"10.77.0.{i + 1}/24", "dev", f"jxe{i}")
            ip("-n", f"jx{i}", "link", "set", f"jxe{i}", "up")
            ip("-n", f"jx{i}", "link", "set", "lo", "up")

    def cut(self) -> None:
        ip("-n", "jx1", "link", "set", "jxe1", "down")

    def mend(self) -> None:
        ip("-n", "jx1", "link", "set", "jxe1", "up")

    def close(self) -> None:
        for i in (0, 1):
            ip("netns", "del", f"jx{i}")
            shutil.rmtree(f"/etc/netns/jx{i}")


class Host:
    """`jaxserve serve` in one of the namespaces."""

    def __init__(self, directory: Path, host_id: int):
        self.socket = directory / "http"
        self._log = directory / f"log{host_id}"
        serve = [sys.executable, "-m", "jaxserve", "serve", MODEL, *FLAGS.split()]
        serve += ["--host-id", str(host_id), "--uds", str(self.socket)]
        name = f"jx{host_id}"
        renamed = ["unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$@"', "sh", *serve]
        with self._log.open("wb") as sink:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", name, *renamed],
                stdout=sink,
                stderr=sink,
                cwd=ROOT,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8", errors="replace")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Client:
    """Asks host 0 through its Unix socket, which no network namespace hides."""

    def __init__(self, path: Path):
        self._path = path

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, dict]:
        connection = HTTPConnection("localhost", timeout=120)
        connection.sock = socket.socket(socket.AF_UNIX)
        with contextlib.closing(connection):
            connection.sock.settimeout(120)
            connection.sock.connect(str(self._path))
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, json.dumps(body) if body else None, headers)
            response = connection.getresponse()
            text = response.read()
            return response.status, json.loads(text) if text[:1] == b"{" else {}

    def answer(self, num_tokens: int) -> tuple[int, dict]:
        """A greedy continuation of the golden prompt."""
        body = {"model": MODEL, "prompt": GOLDEN["prompt_ids"], "max_tokens": num_tokens}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return self.ask("POST", "/v1/completions", body)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Cable, Host, Host]]:
    """Both, ready."""
    with contextlib.ExitStack() as stack:
        cable = stack.enter_context(contextlib.closing(Cable()))
        pair = [Host(tmp_path, host_id) for host_id in (1, 0)][::-1]
        for host in pair:
            stack.callback(host.kill)
        client, deadline_s = Client(tmp_path / "http"), time.monotonic() + 400
        while True:
            assert time.monotonic() < deadline_s, pair[0].log + pair[1].log
            assert all(host.process.poll() is None for host in pair), pair[0].log + pair[1].log
            with contextlib.suppress(OSError):
                if client.ask("GET", "/health")[0] == 200:
                    break
            time.sleep(0.2)
        yield cable, *pair


@pytest.mark.skipif(not can_make_networks(), reason="needs root, ip and unshare")
def test_a_short_cut_is_survived_and_a_long_one_ends_both_hosts(hosts):
    cable, host_0, host_1 = hosts
    client = Client(host_0.socket)
    status, answer = client.answer(32)
    assert status == 200, answer
    assert answer["choices"][0]["token_ids"] == GOLDEN["output_ids"][:32]

    answers: list[tuple[int, dict]] = []
    asking = threading.Thread(target=lambda: answers.append(client.answer(60)))
    asking.start()
    time.sleep(0.3)
    cable.cut()
    time.sleep(1.0)
    cable.mend()
    asking.join(110)
    (status, answer) = answers.pop()
    assert status == 200, answer
    assert answer["choices"][0]["token_ids"] == GOLDEN["output_ids"][:60]

    asking = threading.Thread(target=lambda: answers.append(client.answer(60)))
    asking.start()
    time.sleep(0.3)
    cable.cut()
    started_s = time.monotonic()
    asking.join(110)
    (status, answer) = answers.pop()
    assert status == 503, answer
    assert STEP_TIMEOUT_S - 2 < time.monotonic() - started_s < STEP_TIMEOUT_S + 10
    assert "host 1 (jx1) has said nothing" in answer["error"]["message"], answer
    assert host_0.process.wait(20) == 1
    assert host_1.process.wait(20) == 1
    assert "host 1 (jx1) has said nothing for" in host_0.log.splitlines()[-1]
    assert "host 0 is gone" in host_1.log
