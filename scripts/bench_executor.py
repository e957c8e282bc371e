#!/usr/bin/env python3
"""What a worker process costs: output tokens/s of an engine core with one, beside one without.

    .venv/bin/python scripts/bench_executor.py [--rounds 3] [--runs 2] [--batch 32] [flags...]

The demo model, all rows decoding, asynchronous scheduling, no HTTP. `worker` sends step plans and
results through ring buffers to a process of its own; `in_process` calls the worker. Every round
starts both engines anew (where a process's memory happens to lie changes its speed for as long as
it lives), and they run in turn, one idle while the other runs; a round's ratio is of the medians
of its runs, the last line the median over rounds.
Wanted: worker / in_process of 0.95 or more at a batch of 32.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench_engine import MODEL, decoding_requests, rate_while_all

from jaxserve import checkpoint
from jaxserve.cli_flags import config_from_kwargs
from jaxserve.config import EngineConfig, resolve_for_model
from jaxserve.engine.in_proc_client import InProcClient

OUTPUT_TOKENS = 40  # a row: fewer in a run, and more runs in turn
EXECUTORS = ("in_process", "worker")


class Engine:
    """The process of one executor's engine."""

    def __init__(self, flags: list[str]):
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--engine", *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "")},
        )
        assert self._readline() == "ready"

    def _readline(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def tokens_per_s(self, rows: int, executor: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{executor} {rows}\n")
        self._process.stdin.flush()
        return float(self._readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def engine_config(flags: list[str]) -> EngineConfig:
    """The demo model's, with flags such as --max-num-seqs=32; no more of it is resolved."""
    pairs = dict(flag.removeprefix("--").replace("-", "_").split("=", 1) for flag in flags)
    numbers = {k: int(v) if v.isdigit() else v for k, v in pairs.items()}
    config = config_from_kwargs(model=MODEL, log_level="error", **numbers)
    return resolve_for_model(config, checkpoint.load_model_info(checkpoint.resolve_model(MODEL)))


def engine_main(flags: list[str]) -> None:
    """One engine, in a process of its own: answers each line "EXECUTOR ROWS" with tokens/s."""
    client = InProcClient(engine_config(flags))
    config = client.start()
    print("ready", flush=True)
    try:
        for seed, line in enumerate(sys.stdin):
            executor, rows = line.split()
            assert executor == config.worker.executor
            print(_rate(client, int(rows), seed), flush=True)
    finally:
        client.shutdown()


def _rate(client: InProcClient, rows: int, seed: int) -> float:
    """Output tokens/s while all rows decode."""
    stamps: dict[str, list[float]] = {}
    for request in decoding_requests(rows, seed=seed, max_tokens=OUTPUT_TOKENS):
        stamps[request.request_id] = []
        client.add_request(request)
    while client.has_work:
        for output in client.step():
            stamps[output.request_id] += [time.perf_counter()] * len(output.new_token_ids)
    return rate_while_all(stamps.values())


def bench_round(rows: int, num_runs: int, flags: list[str], *, is_odd: bool) -> dict[str, float]:
    """Tokens/s of each executor, the median of its runs."""
    order = EXECUTORS[::-1] if is_odd else EXECUTORS
    rates: dict[str, list[float]] = {executor: [] for executor in EXECUTORS}
    with contextlib.ExitStack() as stack:
        engines = {}
        for executor in order:
            engine = Engine([*flags, f"--executor={executor}"])
            engines[executor] = stack.enter_context(contextlib.closing(engine))
        for run_idx in range(num_runs + 1):
            for executor in order if run_idx % 2 else order[::-1]:
                rate = engines[executor].tokens_per_s(rows, executor)
                if run_idx:  # the first one is not counted
                    rates[executor].append(rate)
    return {executor: statistics.median(rates[executor]) for executor in EXECUTORS}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=2, help="of each engine in a round")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    options, flags = parser.parse_known_args()
    if options.engine:
        engine_main(flags)
        return
    ratios = []
    print(f"{options.batch} rows decoding: tok/s     in_process   worker   worker / in_process")
    for idx in range(options.rounds):
        rates = bench_round(options.batch, options.runs, flags, is_odd=bool(idx % 2))
        ratios.append(rates["worker"] / rates["in_process"])
        print(
            f"{f'round {idx}':34}{rates['in_process']:10.1f} {rates['worker']:8.1f} "
            f"{ratios[-1]:21.3f}",
            flush=True,
        )
    print(f"{'median':53}{statistics.median(ratios):22.3f}")


if __name__ == "__main__":
    main()
