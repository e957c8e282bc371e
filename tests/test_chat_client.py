"""`jaxserve chat` against a small fake server: through a pipe, on a terminal, and when it fails."""

import http.server
import io
import json
import os
import pty
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve import cli
from jaxserve.chat_client import ChatClient

ROOT = Path(__file__).parent.parent


class FakeServer(http.server.ThreadingHTTPServer):
    """Answers "echo: <question>" in two pieces, or as the question's first word says."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.bodies: list[dict[str, Any]] = []
        self.api_key = ""
        self.models: Any = {"data": [{"id": "tiny"}, {"id": "other"}]}
        self.client_left = threading.Event()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self._answer(self.server.models) if self._is_allowed() else None

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._is_allowed():
            return
        self.server.bodies.append(body)
        question = body["messages"][-1]["content"]
        if question == "refuse":
            self._answer({"error": {"message": "messages is too long."}}, status=400)
            return
        self.send_response(200)
        self.end_headers()
        self._send({"role": "assistant", "content": ""})
        self._send({"content": "echo: "})
        if question == "fail":
            self._line(json.dumps({"error": {"message": "The worker died."}}))
        elif question == "slow":
            self._wait_until_the_client_leaves()
        elif question == "garbage":
            self._line("{")
        elif question != "break":
            self._send({"content": question})
            self._send({})
            self._line("[DONE]")

    def _is_allowed(self) -> bool:
        key = self.server.api_key
        allowed = not key or self.headers["Authorization"] == f"Bearer {key}"
        if not allowed:
            self._answer({"error": {"message": "Wrong key."}}, status=401)
        return allowed

    def _answer(self, body: object, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _send(self, delta: dict[str, str]) -> None:
        self._line(json.dumps({"choices": [{"delta": delta}]}))

    def _line(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())

    def _wait_until_the_client_leaves(self) -> None:
        for _ in range(500):
            try:
                self.wfile.write(b": wait\n\n")
            except OSError:
                self.server.client_left.set()
                return
            time.sleep(0.02)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        thread = threading.Thread(target=fake.serve_forever, args=(0.01,))
        thread.start()
        yield fake
        fake.shutdown()
        thread.join()


def piped(monkeypatch: pytest.MonkeyPatch, question: str | bytes, *argv: str) -> int:
    """Runs `jaxserve chat` with this on its standard input; returns the exit code."""
    data = question.encode() if isinstance(question, str) else question
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
    return cli.main(["chat", *argv])


def test_a_piped_question_is_answered(server, monkeypatch, capsys):
    assert piped(monkeypatch, "why\nnot?\n", "--url", server.url) == 0
    assert capsys.readouterr() == ("echo: why\nnot?\n", "")
    messages = [{"role": "user", "content": "why\nnot?"}]
    assert server.bodies == [{"model": "tiny", "messages": messages, "stream": True}]


def test_options_reach_the_server(server, monkeypatch):
    server.api_key = "secret"
    options = ["--system", "Be brief.", "--max-tokens", "5", "--temperature", "0"]
    options += ["--model", "other", "--api-key", "secret", "--url", server.url + "/v1/"]
    assert piped(monkeypatch, "hi", *options) == 0
    (body,) = server.bodies
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("other", 5, 0.0)
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}


def test_bytes_that_are_no_text_and_escape_sequences(server, monkeypatch, capsys):
    assert piped(monkeypatch, b"\xff\x1b[31m", "--url", server.url) == 0
    assert server.bodies[0]["messages"][0]["content"] == "\ufffd\x1b[31m"
    assert capsys.readouterr().out == "echo: \ufffd\u241b[31m\n"


def test_a_terminal_that_is_not_utf8(server):
    client = ChatClient(server.url)
    client.connect()
    assert "".join(client.ask("a\udcff")) == "echo: a?"

    done = subprocess.run(
        [sys.executable, "-m", "jaxserve", "chat", "--url", server.url],
        cwd=ROOT,
        input="é".encode(),
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"echo: ?\n", b"")


@pytest.mark.parametrize(
    ("question", "out", "err"),
    [
        ("refuse", "\n", "jaxserve chat: messages is too long (status 400).\n"),
        ("fail", "echo: \n", "jaxserve chat: The worker died.\n"),
        ("break", "echo: \n", "jaxserve chat: the answer broke off.\n"),
        ("garbage", "echo: \n", "jaxserve chat: the answer is not a model server's.\n"),
    ],
)
def test_failures_are_told(server, monkeypatch, capsys, question, out, err):
    assert piped(monkeypatch, question, "--url", server.url) == 1
    assert capsys.readouterr() == (out, err)


def test_two_lines_when_no_server_answers(monkeypatch, capsys):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert piped(monkeypatch, "hi", "--url", url, "--model", "m") == 2
    problem, fix = capsys.readouterr().err.splitlines()
    assert problem == f"error: No server answers at {url}: Connection refused."
    assert "jaxserve serve MODEL" in fix


@pytest.mark.parametrize(
    ("models", "api_key", "question", "problem"),
    [
        ({"data": [{"id": "tiny"}]}, "secret", "hi", "refused: Wrong key (status 401)."),
        ({"data": []}, "", "hi", "does not answer as a model server."),
        (["x"], "", "hi", "does not answer as a model server."),
        ({"data": [{"id": "tiny"}]}, "", " \n", "The question is empty."),
    ],
)
def test_two_lines_when_the_server_refuses(
    server, monkeypatch, capsys, models, api_key, question, problem
):
    server.models, server.api_key = models, api_key
    assert piped(monkeypatch, question, "--url", server.url) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[0].endswith(problem)


# Makes standard input the terminal that Ctrl-C is typed on.
_IN_FOREGROUND = """
import fcntl, sys, termios
from jaxserve.cli import main
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.exit(main())
"""


class Terminal:
    """`jaxserve chat` on a terminal of its own."""

    def __init__(self, *argv: str):
        self._fd, child_fd = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _IN_FOREGROUND, "chat", *argv],
            cwd=ROOT,
            stdin=child_fd,
            stdout=child_fd,
            stderr=child_fd,
            start_new_session=True,
            env=os.environ | {"TERM": "dumb"},
        )
        os.close(child_fd)
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, text: str) -> None:
        """Reads until `text` appears after what was waited for before."""
        while text not in self._seen:
            try:
                data = os.read(self._fd, 4096)
            except OSError:  # the other side is closed
                data = b""
            assert data, f"{text!r} did not come: {self._seen!r}"
            self._seen += data.decode()
        self._seen = self._seen.partition(text)[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


def test_a_conversation_on_a_terminal(server):
    terminal = Terminal("--url", server.url)
    try:
        terminal.wait_for("> ")
        terminal.type("\n")
        terminal.wait_for("> ")
        terminal.type("one\n")
        terminal.wait_for("echo: one")
        terminal.wait_for("> ")
        terminal.type("refuse\n")
        terminal.wait_for("messages is too long")
        terminal.wait_for("> ")
        terminal.type("slow\n")
        terminal.wait_for("echo: ")
        terminal.type("\x03")
        terminal.wait_for("(stopped)")
        assert server.client_left.wait(10)
        terminal.wait_for("> ")
        terminal.type("\x03")
        terminal.wait_for("(Ctrl-D leaves)")
        terminal.wait_for("> ")
        terminal.type("two\n")
        terminal.wait_for("echo: two")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.process.wait(10) == 0
    finally:
        terminal.close()
    talk = [(m["role"], m["content"]) for m in server.bodies[-1]["messages"]]
    assert talk == [
        ("user", "one"),
        ("assistant", "echo: one"),
        ("user", "slow"),
        ("assistant", "echo: "),
        ("user", "two"),
    ]
