#!/usr/bin/env python3
"""What the engine costs around the programs of a step: ratios, both sides measured in one run.

    .venv/bin/python scripts/bench_engine.py [--rounds 3] [--runs 3] [--concurrency 1,8,32]
        [serve flags...]

Prints: start-up with an empty and a filled compilation cache; output tokens/s over HTTP beside the
bare programs of a step in a loop at the same batch and context; async beside synchronous
scheduling, by an engine core in the worker's process.

All sides run in turn on the worker of one server, whose speed depends on where its memory happens
to lie: by up to a tenth, for as long as it lives. Ratios are medians of those of each turn. Every
round starts a new server.
"""

import argparse
import contextlib
import functools
import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import numpy as np

from jaxserve import cli
from jaxserve.config import EngineConfig, replace
from jaxserve.engine.core import EngineCore
from jaxserve.engine.executor.in_process import InProcessExecutor
from jaxserve.messages import (
    AdmittedRow,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineOutput,
    SamplingParams,
    SchedulerOutput,
)
from jaxserve.server import serve as serving
from jaxserve.worker.batch_mirror import StepInput
from jaxserve.worker.buckets import bucket_for
from jaxserve.worker.worker import Worker

PROMPT_TOKENS = 32
OUTPUT_TOKENS = 160
MODEL = "smollm2-135m"
SIDES = ("HTTP", "bare", "async", "sync")  # what is measured, in turn
_SOCKET = "JAXSERVE_BENCH_SOCKET"  # of the environment: where a MeasuredWorker listens


class Server:
    """A `jaxserve serve` on a free port; start_s is the time to /health 200."""

    def __init__(self, flags: list[str], run: tuple[str, ...] = ("-m", "jaxserve")):
        """run: what Python runs."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._num_calls = 0
        started_s = time.monotonic()
        command = [sys.executable, *run, "serve", MODEL, "--port", str(self.port)]
        self._process = subprocess.Popen([*command, "--log-level=error", *flags])
        while not self._is_healthy():
            if self._process.poll() is not None:
                raise SystemExit("the server did not start")
            time.sleep(0.02)
        self.start_s = time.monotonic() - started_s

    def _is_healthy(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as client:
                client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                return client.recv(64).startswith(b"HTTP/1.1 200")
        except OSError:
            return False

    def tokens_per_s(self, concurrency: int) -> float:
        """Over HTTP; every call has prompts of its own, so that nothing is cached."""
        self._num_calls += 1
        return _stream_rate(self.port, concurrency, self._num_calls)

    @property
    def pid(self) -> int:
        """Of the first process."""
        return self._process.pid

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def _open_stream(port: int, prompt: list[int]) -> socket.socket:
    """Asks for one streamed completion of OUTPUT_TOKENS tokens."""
    body = json.dumps(
        {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": OUTPUT_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "skip_special_tokens": False,
        }
    )
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    client.setblocking(False)
    return client


def _stream_rate(port: int, concurrency: int, seed: int) -> float:
    """Output tokens/s while all streams decode, which is what the bare step does.

    One thread that only counts: the client takes its time from the same cores.
    """
    stamps: dict[socket.socket, list[float]] = {}
    with selectors.DefaultSelector() as selector:
        for i in range(concurrency):
            client = _open_stream(port, _prompt(seed, i))
            stamps[client] = []
            selector.register(client, selectors.EVENT_READ, client)
        while selector.get_map():
            for key, _ in selector.select():
                client = key.data
                data = client.recv(65536)
                stamps[client] += [time.perf_counter()] * data.count(b"data: {")
                if not data:
                    selector.unregister(client)
                    client.close()
    return rate_while_all(stamps.values())


def rate_while_all(stamps: Collection[list[float]]) -> float:
    """From the first token of the last stream to begin to the last token of the first to end."""
    start_s = max(stream[0] for stream in stamps)
    end_s = min(stream[-1] for stream in stamps)
    num_tokens = sum(start_s < s <= end_s for stream in stamps for s in stream)
    return num_tokens / (end_s - start_s)


def _prompt(seed: int, row: int) -> list[int]:
    return [(seed * 7919 + row * 131 + j * 17) % 40000 + 100 for j in range(PROMPT_TOKENS)]


def decoding_requests(
    rows: int, *, seed: int = 0, max_tokens: int = OUTPUT_TOKENS
) -> list[EngineCoreRequest]:
    """One a row, named by its number; those of a seed have prompts of their own."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    return [
        EngineCoreRequest(
            request_id=str(row),
            prompt_token_ids=_prompt(seed, row),
            sampling=params,
            arrival_time_s=time.time(),
        )
        for row in range(rows)
    ]


class MeasuredServer(Server):
    """One whose worker runs the other sides, too, while no request does."""

    def __init__(self, flags: list[str]):
        self._directory = tempfile.TemporaryDirectory()
        path = str(Path(self._directory.name) / "sides")
        os.environ[_SOCKET] = path
        super().__init__(flags, run=(__file__,))
        self._sides = socket.socket(socket.AF_UNIX)
        self._sides.connect(path)

    def rate(self, side: str, rows: int) -> float:
        """Output tokens/s of one of SIDES."""
        if side == "HTTP":
            return self.tokens_per_s(rows)
        self._sides.sendall(f"{side} {rows}".encode())
        return float(self._sides.recv(100))

    def close(self) -> None:
        self._sides.close()
        super().close()
        self._directory.cleanup()


class MeasuredWorker(Worker):
    """Answers "SIDE ROWS" with tokens/s, on a socket. "bare": the programs of a step in a loop;
    "async" and "sync": an engine core that calls them."""

    def load(self) -> EngineConfig:
        config = super().load()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(os.environ[_SOCKET])
        listener.listen()
        threading.Thread(target=self._answer, args=(listener, config), daemon=True).start()
        return config

    def _answer(self, listener: socket.socket, config: EngineConfig) -> None:
        client, _ = listener.accept()
        while command := client.recv(100):
            side, rows = command.decode().split()
            with _empty_batch(self):
                if side == "bare":
                    rate = _bare_rate(self, config.cache.block_size, int(rows))
                else:
                    is_async = side == "async"
                    rate = _core_rate(self, replace(config, async_scheduling=is_async), int(rows))
            client.sendall(str(rate).encode())


@contextlib.contextmanager
def _empty_batch(worker: Worker) -> Iterator[None]:
    """For a side. The server's engine core still has rows, which the next plan releases."""
    assert worker._runner is not None
    mirror = worker._runner._mirror
    of_server = mirror._is_live.copy()
    _release_rows(worker)
    yield
    _release_rows(worker)
    mirror._is_live[:] = of_server


def _bare_rate(worker: Worker, block_size: int, rows: int) -> float:
    runner = worker._runner
    assert runner is not None
    per_row = -(-(PROMPT_TOKENS + OUTPUT_TOKENS) // block_size)
    admitted = [
        AdmittedRow(
            row,
            _prompt(0, row),
            PROMPT_TOKENS,
            0,
            [1 + row * per_row + b for b in range(per_row)],
            SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0),
        )
        for row in range(rows)
    ]
    for request in admitted:  # prefill one by one; those before sit out
        counts = [n for row in range(request.row) for n in (row, 0)]
        counts += [request.row, PROMPT_TOKENS]
        runner.execute(SchedulerOutput(0, admitted=[request], num_tokens=counts))
        runner.collect()
    ones = np.ones(rows, np.int32)
    empty = np.zeros(0, np.int32)
    step = StepInput(
        np.arange(rows, dtype=np.int32), ones, ones.astype(bool), -ones, empty, empty, ones
    )
    bucket = bucket_for(runner._buckets, rows, rows)
    buffer = np.empty(bucket.delta_len, np.int32)
    step.fill(buffer, bucket, runner._num_lines)
    upload = jax.device_put(buffer)
    forward = runner._programs.forwards[bucket]
    sample = runner._programs.samples[bucket.num_rows]
    started_s = time.perf_counter()
    for _ in range(OUTPUT_TOKENS - 1):
        state = runner._state.step
        logits, sampling_rows, state = forward(runner._params, state, upload)
        _, table = sample(logits, sampling_rows, state.table)
        runner._state = runner._state._replace(step=state._replace(table=table))
    jax.block_until_ready(runner._state.step.table)
    return rows * (OUTPUT_TOKENS - 1) / (time.perf_counter() - started_s)


def _core_rate(worker: Worker, config: EngineConfig, rows: int) -> float:
    """Output tokens/s while all rows decode, as `_stream_rate` counts them."""
    stamps: dict[str, list[float]] = {str(row): [] for row in range(rows)}

    def emit(client_idx: int, message: EngineOutput) -> None:
        del client_idx
        assert isinstance(message, EngineCoreOutputs)
        for output in message.outputs:
            stamps[output.request_id] += [time.perf_counter()] * len(output.new_token_ids)

    executor = InProcessExecutor(config, lambda _: worker)
    executor._worker = worker  # it is loaded
    core = EngineCore(config, executor, emit)
    for request in decoding_requests(rows):
        core.inputs.put(core.make_request(request))
    core.take_inputs()
    while core.has_work:
        core.step()
    core.shutdown()
    return rate_while_all(stamps.values())


def _release_rows(worker: Worker) -> None:
    """No plan to come knows of the rows in the batch."""
    assert worker._runner is not None
    mirror = worker._runner._mirror
    mirror.apply(SchedulerOutput(0, released_rows=mirror._is_live.nonzero()[0].tolist()))


def bench_start(flags: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        times_s = []
        for _ in range(3):
            server = Server([*flags, f"--compilation-cache-dir={directory}"])
            times_s.append(server.start_s)
            server.close()
    cold_s, warm_s = times_s[0], min(times_s[1:])
    print(f"start to /health: cold {cold_s:.1f} s, warm {warm_s:.1f} s: {warm_s / cold_s:.2f}")


def bench_rates(concurrencies: list[int], rounds: int, runs: int, flags: list[str]) -> None:
    rates = {(side, c): [] for side in SIDES for c in concurrencies}
    for round_idx in range(rounds):
        with contextlib.closing(MeasuredServer(flags)) as running:
            for concurrency in concurrencies:
                for run_idx in range(runs + 1):
                    order = SIDES if (round_idx + run_idx) % 2 else SIDES[::-1]
                    for side in order:
                        rate = running.rate(side, concurrency)
                        if run_idx:  # the first one is not counted
                            rates[side, concurrency].append(rate)
    print("tok/s: through HTTP (async); bare programs, engine core async and sync")
    print("concurrency     HTTP     bare    async     sync   HTTP/bare          async/sync")
    for concurrency in concurrencies:
        http, bare, with_async, sync = (rates[side, concurrency] for side in SIDES)
        medians = "".join(f"{statistics.median(s):9.1f}" for s in (http, bare, with_async, sync))
        ratios = _ratios(http, bare), _ratios(with_async, sync)
        print(f"{concurrency:11}{medians}   {'  '.join(ratios)}")


def _ratios(ones: list[float], others: list[float]) -> str:
    """The median of the ratios of each turn, and the middle half of them."""
    ratios = [one / other for one, other in zip(ones, others, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        measured = functools.partial(serving.serve, worker_class="bench_engine:MeasuredWorker")
        serving.serve = measured
        sys.exit(cli.main())
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=3, help="of each side in a round")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--skip-start", action="store_true")
    options, flags = parser.parse_known_args()
    concurrencies = [int(c) for c in options.concurrency.split(",")]
    os.environ["PYTHONPATH"] = str(Path(__file__).parent.parent)
    if not options.skip_start:
        bench_start(flags)
    bench_rates(concurrencies, options.rounds, options.runs, flags)


if __name__ == "__main__":
    main()
