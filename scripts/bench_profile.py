#!/usr/bin/env python3
"""Where the milliseconds of a second go: CPU time of every thread under a steady load.

    .venv/bin/python scripts/bench_profile.py [--streams 1,32] [--seconds 4] [flags...]

Streams of completions (prompts of 64 tokens for one, of 128 for more) keep a `jaxserve serve` busy;
CPU time is read from /proc before and after. A step is a message to a stream. "waits" is how long
threads were ready and had no core. Flags go to `jaxserve serve`.
"""

import argparse
import asyncio
import collections
import contextlib
import random
import time
from pathlib import Path

import psutil
from bench_engine import MODEL, Server
from bench_load import Client, words_of_one_token

_WARM_S = 3.0
# What a thread does, by its process and the begin of its name; the first that fits.
_PARTS = (
    ("worker_process", "tf_XLA", "worker: the device's programs (XLA's threads)"),
    ("worker_process", "main", "worker: plan taken in, dispatch"),
    ("worker_process", "", "worker: results read back"),
    ("core_process", "main", "engine core: schedule, results, messages encoded"),
    ("core_process", "ZMQ", "engine core: ZeroMQ"),
    ("core_process", "", "engine core: messages decoded"),
    ("serve", "main", "API server: detokenize, HTTP"),
    ("serve", "ZMQ", "API server: ZeroMQ"),
    ("serve", "", "API server: other threads"),
)


def thread_times(root: psutil.Process) -> dict[tuple[int, int], tuple[str, float, float]]:
    """By (process, thread): its part, ms that it ran, ms that it waited for a core."""
    times = {}
    for process in (root, *root.children(recursive=True)):
        command = " ".join(process.cmdline())
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                tid = int(task.name)
                name = "main" if tid == process.pid else (task / "comm").read_text()
                ran, waited, _ = map(int, (task / "schedstat").read_text().split())
                part = next((p for c, n, p in _PARTS if c in command and name.startswith(n)), None)
                times[process.pid, tid] = (part or "other processes", ran / 1e6, waited / 1e6)
    return times


async def load(client: Client, num_streams: int, seconds: float, root: psutil.Process) -> None:
    """Prints the table of some seconds under `num_streams` streams."""
    rng, words = random.Random(num_streams), words_of_one_token()
    prompt_len = 64 if num_streams == 1 else 128
    num_events, begun = 0, set[int]()

    async def stream(number: int) -> None:
        nonlocal num_events
        while True:
            prompt = "".join(" " + rng.choice(words) for _ in range(prompt_len))
            async for _ in client.events(prompt, 400):
                num_events += 1
                begun.add(number)

    streams = [asyncio.create_task(stream(number)) for number in range(num_streams)]
    while len(begun) < num_streams:  # until all decode
        for failed in filter(asyncio.Task.done, streams):
            failed.result()
        await asyncio.sleep(0.1)
    await asyncio.sleep(_WARM_S)
    before, events, own_s = thread_times(root), num_events, time.process_time()
    began_s = time.perf_counter()
    await asyncio.sleep(seconds)
    wall_s = time.perf_counter() - began_s
    after, own_s = thread_times(root), time.process_time() - own_s
    num_steps = (num_events - events) / num_streams
    for task in streams:
        task.cancel()
    await asyncio.gather(*streams, return_exceptions=True)

    sums: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for key, (part, ran, waited) in after.items():
        _, ran_before, waited_before = before.get(key, (part, 0.0, 0.0))
        sums[part][0] += ran - ran_before
        sums[part][1] += waited - waited_before
    sums["the client"][0] = own_s * 1e3
    rate = num_steps * num_streams / wall_s
    print(f"\n{num_streams} streams: {rate:.1f} tokens/s, {1e3 * wall_s / num_steps:.2f} ms a step")
    print(f"{'':50}{'ms a second':>12}{'ms a step':>12}{'waits, ms a step':>18}")
    for part, (ran, waited) in sorted(sums.items(), key=lambda item: -item[1][0]):
        print(f"{part:50}{ran / wall_s:12.1f}{ran / num_steps:12.3f}{waited / num_steps:18.3f}")
    total = sum(ran for ran, _ in sums.values())
    print(f"{'all':50}{total / wall_s:12.1f}{total / num_steps:12.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", default="1,32")
    parser.add_argument("--seconds", type=float, default=4.0)
    args, flags = parser.parse_known_args()
    with contextlib.closing(Server(flags)) as server:
        client = Client(server.port, MODEL, {"ignore_eos": True})
        for num_streams in map(int, args.streams.split(",")):
            asyncio.run(load(client, num_streams, args.seconds, psutil.Process(server.pid)))


if __name__ == "__main__":
    main()
