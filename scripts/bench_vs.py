#!/usr/bin/env python3
"""The workloads of bench_load.py on jaxserve and on other servers, in turn: medians and ratios.

    .venv/bin/python scripts/bench_vs.py [--rounds 3] [--peers FILE] [--only NAMES] [flags...]

FILE names other servers that are installed here, as JSON:

    {"llama-bf16": {"command": ["llama-server", "-m", "$PEERS/smollm2-bf16.gguf", "--port", "8111"],
                    "port": 8111, "model": "smol", "fields": {"ignore_eos": true}, "env": {}}}

NAMES are those to run of jaxserve, jaxserve-int8 (with weights of 8 bits) and FILE's; flags go to
`jaxserve serve`. Each round starts every
server anew, so that what else the machine does falls on all alike. In the first round jaxserve has
no compiled programs. Memory is the sum of PSS over a server's processes, at its peak; jaxserve gets
a cache of 32k tokens. Before and after, what the machine can do: bytes read a second, and products
of bfloat16.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import psutil
from bench_load import Client, run_workloads

_READY_S = 600.0
_PORT = 8199
_FIGURES = {
    "W1 decode, tokens/s": ("W1", "decode_tokens_per_s"),
    "W1 first token, ms": ("W1", "first_token_p50_ms"),
    "W2 output, tokens/s": ("W2", "output_tokens_per_s"),
    "W2 first token p50, ms": ("W2", "first_token_p50_ms"),
    "W2 first token p99, ms": ("W2", "first_token_p99_ms"),
    "W2 gap p99, ms": ("W2", "gap_p99_ms"),
    "W3 first token, ms": ("W3", "first_token_p50_ms"),
    "W4 in all, s": ("W4", "wall_s"),
    "W5 output, tokens/s": ("W5", "output_tokens_per_s"),
    "P50 gap p99 / p50": ("P50", "gap_spread"),
    "P80 gap p99 / p50": ("P80", "gap_spread"),
    "start, s": ("start", "s"),
    "peak memory, MiB": ("memory", "mib"),
}


class Server:
    """One that was started and answers; start_s: how long that took."""

    def __init__(self, name: str, peer: dict, log: Path):
        self._peer, self._peak = peer, 0
        command = [os.path.expandvars(word) for word in peer["command"]]
        env = os.environ | {k: os.path.expandvars(v) for k, v in peer.get("env", {}).items()}
        began_s = time.monotonic()
        with log.open("wb") as sink:
            self._process = psutil.Popen(command, stdout=sink, stderr=sink, env=env)
        self._is_running = True
        self._watch = threading.Thread(target=self._watch_memory, daemon=True)
        self._watch.start()
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() - began_s > _READY_S:
                self.close()
                raise SystemExit(f"bench_vs: {name} does not start: {log.read_text()[-2000:]}")
            time.sleep(0.05)
        self.start_s = time.monotonic() - began_s

    def load(self, workloads: list[str], run: int) -> dict[str, dict]:
        peer = self._peer
        client = Client(peer["port"], peer["model"], peer.get("fields", {"ignore_eos": True}))
        results = asyncio.run(run_workloads(client, workloads, run))
        for figures in results.values():
            figures["gap_spread"] = figures["gap_p99_ms"] / figures["gap_p50_ms"]
        return results | {"start": {"s": self.start_s}, "memory": {"mib": self._peak / 2**20}}

    def close(self) -> None:
        self._is_running = False
        processes = self._tree()
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended by itself
            self._process.terminate()
        for alive in psutil.wait_procs(processes, timeout=20)[1]:
            alive.kill()
        self._watch.join()

    def _answers(self) -> bool:
        body = json.dumps({"model": self._peer["model"], "prompt": "Hello", "max_tokens": 1})
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._peer['port']}/v1/completions",
            body.encode(),
            {"Content-Type": "application/json"},
        )
        try:
            return urllib.request.urlopen(request, timeout=120).status == 200
        except OSError:
            return False

    def _tree(self) -> list[psutil.Process]:
        try:
            return [self._process, *self._process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _watch_memory(self) -> None:
        while self._is_running:
            total = 0
            for process in self._tree():
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:
                    continue
            self._peak = max(self._peak, total)
            time.sleep(0.5)


def _limits() -> str:
    """Measured in a process of its own, as JAX's threads would stay."""
    code = """
import threading, time, numpy as np, jax, jax.numpy as jnp
def rate(amount, run):
    run(); best = 1e9
    for _ in range(5):
        t = time.perf_counter(); run(); best = min(best, time.perf_counter() - t)
    return amount / best / 1e9
halves = np.split(np.ones(2**27, np.float32), 2)
def read():
    threads = [threading.Thread(target=h.max) for h in halves]
    [t.start() for t in threads]; [t.join() for t in threads]
x = jnp.ones((2048, 2048), jnp.bfloat16)
matmul = jax.jit(lambda x: x @ x)
print(f"reads {rate(2**29, read):.1f} GB/s, bfloat16 products "
      f"{rate(2 * 2048**3, lambda: matmul(x).block_until_ready()):.0f} GFLOP/s")
"""
    return subprocess.check_output([sys.executable, "-c", code], text=True).strip()


def _jaxserve(flags: list[str], cache: Path) -> dict:
    command = [sys.executable, "-m", "jaxserve", "serve", "smollm2-135m", "--port", str(_PORT)]
    command += [f"--compilation-cache-dir={cache}", *flags]
    if not any(flag.startswith("--num-kv-blocks") for flag in flags):
        command += ["--block-size=16", "--num-kv-blocks=2049"]
    return {"command": command, "port": _PORT, "model": "smollm2-135m"}


def _print_table(results: dict[str, list[dict]]) -> None:
    """results: by server, of each round."""
    print("| | " + " | ".join(results) + " |\n|" + "---|" * (len(results) + 1))
    for title, (section, figure) in _FIGURES.items():
        cells = []
        for rounds in results.values():
            if section == "start" and len(rounds) > 1:
                warm = statistics.median(r["start"]["s"] for r in rounds[1:])
                cells.append(f"{rounds[0]['start']['s']:.1f} first, then {warm:.1f}")
                continue
            values = [r[section][figure] for r in rounds if section in r]
            if values:
                middle = statistics.median(values)
                cells.append(f"{middle:.4g} [{min(values):.4g}, {max(values):.4g}]")
            else:
                cells.append("")
        if any(cells):
            print(f"| {title} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", type=Path, help="other servers")
    parser.add_argument("--only", default="", help="of all servers, these")
    parser.add_argument("--workloads", default="W1,W2,W3,W4,W5")
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as directory:
        cache = Path(directory) / "cache"
        servers = {"jaxserve": _jaxserve(flags, cache / "jaxserve")}
        if not any(flag.startswith("--quantization") for flag in flags):
            in_int8 = [*flags, "--quantization=int8"]
            servers["jaxserve-int8"] = _jaxserve(in_int8, cache / "jaxserve-int8")
        if args.peers is not None:
            servers |= json.loads(args.peers.read_text("utf-8"))
        if args.only:
            servers = {name: servers[name] for name in args.only.split(",")}
        results: dict[str, list[dict]] = {name: [] for name in servers}
        print(f"before: {_limits()}", flush=True)
        for run in range(1, args.rounds + 1):
            for name, peer in servers.items():
                print(f"round {run}: {name}", file=sys.stderr, flush=True)
                server = Server(name, peer, Path(directory) / f"{name}.log")
                try:
                    results[name].append(server.load(args.workloads.split(","), run))
                finally:
                    server.close()
        print(f"after: {_limits()}\n")
        _print_table(results)
        shutil.rmtree(cache, ignore_errors=True)


if __name__ == "__main__":
    main()
