#!/usr/bin/env python3
"""What API servers alone cost: output tokens per second of their processes' CPU time.

    PYTHONPATH=. .venv/bin/python scripts/bench_server.py [--streams 256] [--tokens 200] [--chat]
        [--api-server-count 1 2 4] [--clients 1]

API servers, engine core, a worker that sleeps through a step, and clients are processes of their
own; only the first ones' CPU time counts, so a busy machine changes little. With several counts, a
server of each is up all the time and they run in turn; the table's ratio is the median over rounds
of tokens per CPU second, beside the first count. Near 1 means that API servers add up: the work
for a token does not grow with their count, whether or not there are CPU cores for all of them here.
`connections` is what each API server held of the streams. Where API servers fall behind, several
tokens share an event and cost less: see tokens/event before comparing.
Exit code 1 when the first count is under the limit.
"""

import argparse
import contextlib
import functools
import json
import multiprocessing
import multiprocessing.pool
import selectors
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil
from msgspec.structs import replace

from jaxserve.checkpoint import load_tokenizer
from jaxserve.config import EngineConfig
from jaxserve.messages import ALONE, ModelRunnerOutput, ProcessGroup
from tests.fakes import FakeWorker

ROOT = Path(__file__).parent.parent
LIMIT_TOKENS_PER_S = 20_000
PROMPT_TOKENS = 8
LOOK_S = 0.2
# Processes of a server by what they run; the first one is an API server, too.
KINDS = {
    "API servers": "jaxserve.server.api_process",
    "engine core": "jaxserve.engine.core_process",
    "worker": "jaxserve.worker.worker_process",
}
SERVE = """
import json, sys
from jaxserve.cli_flags import config_from_kwargs
from jaxserve.server.serve import serve
config = config_from_kwargs(**json.loads(sys.argv[1]))
sys.exit(serve(config, worker_class="scripts.bench_server:TextWorker"))
"""


class TextWorker(FakeWorker):
    """A step takes 20 ms; every token is a piece of text that is whole."""

    def __init__(self, config: EngineConfig, group: ProcessGroup = ALONE):
        super().__init__(config, group)
        tokenizer = load_tokenizer(Path(config.model.model))
        self._token_ids = tokenizer.encode("one two three four five", add_special_tokens=False)

    def collect(self) -> ModelRunnerOutput:
        result = super().collect()
        time.sleep(0.02)
        token_id = self._token_ids[result.step_id % len(self._token_ids)]
        return replace(result, sampled_token_ids=[token_id] * len(result.sampled_token_ids))


class Sample(NamedTuple):
    """One round of a server. CPU seconds by kind of process; connections: of each API server."""

    num_tokens: int
    num_events: int
    took_s: float
    cpu_s: dict[str, float]
    client_cpu_s: float
    connections: list[int]

    @property
    def tokens_per_cpu_s(self) -> float:
        return self.num_tokens / self.cpu_s["API servers"]


class Server:
    """API servers on a free port over an engine core and a worker whose steps take 20 ms."""

    def __init__(self, num_streams: int, num_tokens: int, num_api_servers: int):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        block_size = 32
        blocks_a_stream = -(-(PROMPT_TOKENS + 8 + num_tokens) // block_size) + 1
        config = {
            "model": str(ROOT / "tests" / "goldens" / "tiny_llama"),
            "served_model_name": "m",
            "port": self.port,
            "api_server_count": num_api_servers,
            "log_level": "error",
            "block_size": block_size,
            "num_kv_blocks": 1 + num_streams * blocks_a_stream,
            "max_num_seqs": num_streams,
            "max_num_batched_tokens": max(2048, num_streams),
            "max_num_mixed_tokens": num_streams,
            "jump_ahead_tokens": num_streams,
            "dtype": "float32",
            "attention": "reference",
            "matmul": "xla",
            "compilation_cache_dir": "none",
        }
        self._popen = subprocess.Popen([sys.executable, "-c", SERVE, json.dumps(config)], cwd=ROOT)
        while not self._listens():
            if self._popen.poll() is not None:
                raise SystemExit("the server did not start")
            time.sleep(0.05)
        first = psutil.Process(self._popen.pid)
        self._kinds = {kind: [] for kind in KINDS} | {"API servers": [first]}
        for process in first.children(recursive=True):
            line = " ".join(process.cmdline())
            (kind,) = (kind for kind, module in KINDS.items() if f"{module} " in line)
            self._kinds[kind].append(process)
        assert [len(self._kinds[kind]) for kind in KINDS] == [num_api_servers, 1, 1]

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port)).close()
        except OSError:
            return False
        return True

    def cpu_s(self) -> dict[str, float]:
        """CPU time of all processes of each kind."""
        return {
            kind: sum(sum(process.cpu_times()[:2]) for process in processes)
            for kind, processes in self._kinds.items()
        }

    def connections(self) -> list[int]:
        """How many each API server holds, the first process first."""
        return [
            sum(link.status == psutil.CONN_ESTABLISHED for link in process.net_connections("tcp"))
            for process in self._kinds["API servers"]
        ]

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


def run_client(port: int, num_tokens: int, is_chat: bool, num_streams: int) -> tuple[int, float]:
    """All of a client process: how many events came, and its CPU seconds."""
    started_s = time.process_time()
    clients = [open_stream(port, num_tokens, is_chat) for _ in range(num_streams)]
    return count_events(clients), time.process_time() - started_s


def measure(server: Server, options: argparse.Namespace, pool: multiprocessing.pool.Pool) -> Sample:
    """Runs all streams at once."""
    counts = [len(range(i, options.streams, options.clients)) for i in range(options.clients)]
    client = functools.partial(run_client, server.port, options.tokens, options.chat)
    before_s, started_s = server.cpu_s(), time.monotonic()
    running = pool.map_async(client, counts, chunksize=1)
    connections: list[int] = []
    while not running.ready() and sum(connections) < options.streams:
        running.wait(LOOK_S)
        connections = max(connections, server.connections(), key=sum)
    num_events, client_cpu_s = (sum(values) for values in zip(*running.get(), strict=True))
    return Sample(
        options.streams * options.tokens,
        int(num_events),
        time.monotonic() - started_s,
        {kind: after_s - before_s[kind] for kind, after_s in server.cpu_s().items()},
        client_cpu_s,
        connections,
    )


def print_table(results: dict[int, list[Sample]]) -> None:
    """A line for each count of API servers, of medians over rounds."""
    kinds = "".join(f"{kind:>13}" for kind in (*KINDS, "clients"))
    print(f"API                                             {'CPU seconds':>20}")
    print(f"servers    tok/s   tok/CPU s   ratio  tokens/event{kinds}   connections")
    first, median = next(iter(results.values())), statistics.median
    for count, samples in results.items():
        cpu_s = [median(s.cpu_s[kind] for s in samples) for kind in KINDS]
        cpu_s.append(median(s.client_cpu_s for s in samples))
        pairs = zip(samples, first, strict=True)
        print(
            f"{count:7} {median(s.num_tokens / s.took_s for s in samples):8,.0f} "
            f"{median(s.tokens_per_cpu_s for s in samples):11,.0f} "
            f"{median(s.tokens_per_cpu_s / f.tokens_per_cpu_s for s, f in pairs):7.2f} "
            f"{median(s.num_tokens / s.num_events for s in samples):13.2f}"
            f"{''.join(f'{value:13.2f}' for value in cpu_s)}"
            f"   {' '.join(map(str, samples[-1].connections))}"
        )


def main() -> int:
    """Prints a line a round, then the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--api-server-count", type=int, nargs="+", default=[1])
    parser.add_argument("--clients", type=int, default=1, help="processes")
    options = parser.parse_args()
    results: dict[int, list[Sample]] = {count: [] for count in options.api_server_count}
    with contextlib.ExitStack() as stack:
        fork = multiprocessing.get_context("fork")
        pool = stack.enter_context(fork.Pool(options.clients))
        servers = {}
        for count in results:
            server = Server(options.streams, options.tokens, count)
            servers[count] = stack.enter_context(contextlib.closing(server))
        for round_idx in range(options.rounds):
            for count in list(results)[:: -1 if round_idx % 2 else 1]:
                sample = measure(servers[count], options, pool)
                results[count].append(sample)
                print(
                    f"{count} API server{'s' if count > 1 else ''}: {sample.num_tokens} tokens in "
                    f"{sample.num_events} events: {sample.cpu_s['API servers']:.2f} s of CPU, "
                    f"{sample.took_s:.2f} s; {sample.tokens_per_cpu_s:,.0f} tokens per second "
                    f"of CPU",
                    flush=True,
                )
    print_table(results)
    first = next(iter(results.values()))
    return int(max(sample.tokens_per_cpu_s for sample in first) < LIMIT_TOKENS_PER_S)


if __name__ == "__main__":
    sys.exit(main())
