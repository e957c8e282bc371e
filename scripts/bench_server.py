#!/usr/bin/env python3
"""What the API server alone costs: output tokens per second of its process's CPU time.

    PYTHONPATH=. .venv/bin/python scripts/bench_server.py [--streams 256] [--tokens 200] [--chat]

Server, engine core (with a worker that sleeps through a step) and client are three processes;
only the first one's CPU time counts, so a busy machine changes little. Exit code 1 when it is under
the limit.
"""

import argparse
import json
import selectors
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
from msgspec.structs import replace

from jaxserve.checkpoint import load_tokenizer
from jaxserve.config import EngineConfig
from jaxserve.messages import ModelRunnerOutput
from tests.fakes import FakeWorker

ROOT = Path(__file__).parent.parent
LIMIT_TOKENS_PER_S = 20_000
PROMPT_TOKENS = 8
SERVE = """
import json, sys
from jaxserve.cli_flags import config_from_kwargs
from jaxserve.server.serve import serve
config = config_from_kwargs(**json.loads(sys.argv[1]))
sys.exit(serve(config, worker_class="scripts.bench_server:TextWorker"))
"""


class TextWorker(FakeWorker):
    """A step takes 20 ms; every token is a piece of text that is whole."""

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        tokenizer = load_tokenizer(Path(config.model.model))
        self._token_ids = tokenizer.encode("one two three four five", add_special_tokens=False)

    def collect(self) -> ModelRunnerOutput:
        result = super().collect()
        time.sleep(0.02)
        token_id = self._token_ids[result.step_id % len(self._token_ids)]
        return replace(result, sampled_token_ids=[token_id] * len(result.sampled_token_ids))


class Server:
    """An API server on a free port over a worker whose steps take 20 ms."""

    def __init__(self, num_streams: int, num_tokens: int):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        block_size = 32
        blocks_a_stream = -(-(PROMPT_TOKENS + 8 + num_tokens) // block_size) + 1
        config = {
            "model": str(ROOT / "tests" / "goldens" / "tiny_llama"),
            "served_model_name": "m",
            "port": self.port,
            "log_level": "error",
            "executor": "in_process",
            "block_size": block_size,
            "num_kv_blocks": 1 + num_streams * blocks_a_stream,
            "max_num_seqs": num_streams,
            "max_num_batched_tokens": max(2048, num_streams),
            "dtype": "float32",
            "attention": "reference",
            "compilation_cache_dir": "none",
        }
        self._popen = subprocess.Popen([sys.executable, "-c", SERVE, json.dumps(config)], cwd=ROOT)
        self._process = psutil.Process(self._popen.pid)
        while not self._listens():
            if self._popen.poll() is not None:
                raise SystemExit("the server did not start")
            time.sleep(0.05)

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port)).close()
        except OSError:
            return False
        return True

    def cpu_s(self) -> float:
        """CPU time of the API server's process, without its children."""
        times = self._process.cpu_times()
        return times.user + times.system

    def close(self) -> None:
        self._popen.terminate()
        self._popen.wait()


def open_stream(port: int, num_tokens: int, is_chat: bool) -> socket.socket:
    """Asks for one stream."""
    body: dict = {"model": "m", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    if is_chat:
        body["messages"] = [{"role": "user", "content": "a b"}]
    else:
        body["prompt"] = list(range(5, 5 + PROMPT_TOKENS))
    path, data = "/v1/chat/completions" if is_chat else "/v1/completions", json.dumps(body)
    client = socket.create_connection(("127.0.0.1", port))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}"
    client.sendall(f"{head}\r\n\r\n{data}".encode())
    client.setblocking(False)
    return client


def count_events(clients: list[socket.socket]) -> int:
    """Reads all streams to their ends; returns how many events had a choice."""
    num_events = num_done = 0
    with selectors.DefaultSelector() as selector:
        for client in clients:
            selector.register(client, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                client = key.fileobj
                assert isinstance(client, socket.socket)
                data = client.recv(1 << 18)
                num_events += data.count(b'"choices":[{')
                num_done += data.count(b"[DONE]")
                if not data:
                    selector.unregister(client)
                    client.close()
    assert num_done == len(clients), f"{len(clients) - num_done} streams failed"
    return num_events


def main() -> int:
    """Prints a line a round; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chat", action="store_true")
    options = parser.parse_args()
    server = Server(options.streams, options.tokens)
    rates = []
    try:
        for _ in range(options.rounds):
            before_s, started_s = server.cpu_s(), time.monotonic()
            clients = [
                open_stream(server.port, options.tokens, options.chat)
                for _ in range(options.streams)
            ]
            num_events = count_events(clients)
            used_s, took_s = server.cpu_s() - before_s, time.monotonic() - started_s
            num_tokens = options.streams * options.tokens
            rates.append(num_tokens / used_s)
            print(
                f"{num_tokens} tokens in {num_events} events: {used_s:.2f} s of CPU, "
                f"{took_s:.2f} s; {rates[-1]:,.0f} tokens per second of CPU",
                flush=True,
            )
    finally:
        server.close()
    return int(max(rates) < LIMIT_TOKENS_PER_S)


if __name__ == "__main__":
    sys.exit(main())
