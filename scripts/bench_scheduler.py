#!/usr/bin/env python3
"""Host time of an engine core's step on a fake executor: how it grows, and with what.

    .venv/bin/python scripts/bench_scheduler.py [--num-steps 1000] [--sync] [--profile]

A step is all that the engine core process does in it: schedule, encode the plan and write it to the
ring buffer, read and decode the tokens, apply them, encode the outputs for the API server. The
worker's side is faked and not counted.
"""

import argparse
import cProfile
import gc
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

from jaxserve.config import EngineConfig, ModelInfo, replace
from jaxserve.engine.core import EngineCore
from jaxserve.engine.executor.ring_buffer import RingBuffer
from jaxserve.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineOutput,
    ModelRunnerOutput,
    SamplingParams,
    SchedulerOutput,
    decode_worker_output,
    encode,
)

MAX_MODEL_LEN = 16_384
BLOCK_SIZE = 16
VOCAB_SIZE = 150_000
MAX_NUM_BATCHED_TOKENS = 8_192
NUM_WARM_UP_STEPS = 100


class Case(NamedTuple):
    """Requests that run and that wait; target_ms: of the median, where there is one.

    prompt_len: from, to.  renew: requests end after 64 to 512 tokens and new ones come.
    """

    name: str
    num_running: int
    num_waiting: int = 0
    prompt_len: tuple[int, int] = (500, 8_000)
    renew: bool = False
    target_ms: float | None = None


CASES = (
    Case("256 decode", 256, target_ms=0.6),
    Case("1,024 decode", 1024, target_ms=2.5),
    Case("256 decode, short contexts", 256, prompt_len=(16, 64)),
    Case("256 decode, 10,000 wait", 256, num_waiting=10_000),
    Case("256 that come and go", 256, renew=True),
)


class FakeExecutor:
    """Brings a token for every row that has computed all its tokens, computing nothing.

    excluded_s: time spent on the worker's side, so far.
    """

    def __init__(self, config: EngineConfig):
        self.excluded_s = 0.0
        self._config = config
        self._plan_ring = RingBuffer.create(1 << 22, 1)
        self._result_ring = RingBuffer.create(1 << 18, 1)
        self._plan_writer, self._plan_reader = self._plan_ring.writer(), self._plan_ring.reader()
        self._result_writer = self._result_ring.writer()
        self._result_reader = self._result_ring.reader()
        # For each live row: tokens it knows and has not computed.
        self._gaps: dict[int, int] = {}

    def start(self) -> EngineConfig:
        return self._config

    def execute(self, plan: SchedulerOutput) -> None:
        self._plan_writer.write(encode(plan))
        started_s = time.perf_counter()
        self._plan_reader.read()
        self._result_writer.write(encode(self._run(plan)))
        self.excluded_s += time.perf_counter() - started_s

    def collect(self) -> ModelRunnerOutput:
        output = decode_worker_output(self._result_reader.read())
        assert isinstance(output, ModelRunnerOutput)
        return output

    def failure_fds(self) -> list[int]:
        return []

    def check(self) -> None:
        pass

    def shutdown(self) -> None:
        self._plan_ring.close()
        self._result_ring.close()

    def _run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        for row in plan.released_rows:
            del self._gaps[row]
        for admitted in plan.admitted:
            self._gaps[admitted.row] = len(admitted.token_ids) - admitted.num_computed_tokens
        counts = iter(plan.num_tokens)
        num_tokens = dict.fromkeys(self._gaps, 1) | dict(zip(counts, counts, strict=True))
        tokens = []
        for row in sorted(self._gaps):
            self._gaps[row] -= num_tokens[row]
            if num_tokens[row] and not self._gaps[row]:
                self._gaps[row] = 1
                tokens.append((plan.step_id * 7919 + row * 104_729) % VOCAB_SIZE)
        return ModelRunnerOutput(plan.step_id, tokens)


class Bench:
    """An engine core with its clients' side."""

    def __init__(self, case: Case, *, is_async: bool):
        config = make_config(case.num_running, is_async)
        self._executor = FakeExecutor(config)
        self._emitted: list[EngineOutput] = []
        self._core = EngineCore(config, self._executor, lambda _, m: self._emitted.append(m))
        self._requests = make_requests(case)
        self._num_running = case.num_running
        self._num_requests = case.num_running + case.num_waiting
        self._num_alive = 0
        self._started: set[str] = set()
        self.num_outputs = 0

    def run(self, num_steps: int) -> list[float]:
        """Seconds of each step once all requests are running."""
        while len(self._started) < self._num_running:
            self._step()
        for _ in range(NUM_WARM_UP_STEPS):
            self._step()
        self.num_outputs = 0
        # As the engine core process does when it is ready.
        gc.collect()
        gc.freeze()
        try:
            return [self._step() for _ in range(num_steps)]
        finally:
            gc.unfreeze()
            self._executor.shutdown()

    def _step(self) -> float:
        while self._num_alive < self._num_requests:
            self._num_alive += 1
            self._core.inputs.put(self._core.make_request(next(self._requests)))
        excluded_s, started_s = self._executor.excluded_s, time.perf_counter()
        self._core.take_inputs()
        self._core.run_utility_calls()
        self._core.step()
        for message in self._emitted:
            encode(message)
        step_s = time.perf_counter() - started_s - (self._executor.excluded_s - excluded_s)
        for message in self._emitted:
            assert isinstance(message, EngineCoreOutputs)
            self.num_outputs += len(message.outputs)
            self._started.update(output.request_id for output in message.outputs)
            self._num_alive -= sum(o.finish_reason is not None for o in message.outputs)
        self._emitted.clear()
        return step_s


def make_requests(case: Case) -> Iterator[EngineCoreRequest]:
    rng = random.Random(0)
    for idx in itertools.count():
        prompt_len = case.prompt_len if idx < case.num_running else (50, 100)
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(*prompt_len))]
        max_tokens = rng.randint(64, 512) if case.renew else MAX_MODEL_LEN - len(prompt)
        yield EngineCoreRequest(
            request_id=f"cmpl-{rng.randbytes(16).hex()}-{idx}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=(VOCAB_SIZE,)),
            arrival_time_s=0.0,
        )


def make_config(num_requests: int, is_async: bool) -> EngineConfig:
    info = ModelInfo(
        path="fake",
        format="gguf",
        architecture="fake",
        num_layers=1,
        hidden_size=1,
        intermediate_size=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_MODEL_LEN,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
    )
    return replace(
        EngineConfig(),
        model="fake",
        served_model_name="fake",
        dtype="float32",
        info=info,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        num_kv_blocks=1 + num_requests * MAX_MODEL_LEN // BLOCK_SIZE,
        max_num_seqs=num_requests,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_num_mixed_tokens=MAX_NUM_BATCHED_TOKENS,
        jump_ahead_tokens=MAX_NUM_BATCHED_TOKENS,
        num_hosts=1,
        async_scheduling=is_async,
        attention="reference",
        matmul="xla",
        compilation_cache_dir="none",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-steps", type=int, default=1000)
    parser.add_argument("--sync", action="store_true", help="without asynchronous scheduling")
    parser.add_argument("--profile", action="store_true", help="where the time goes, by function")
    args = parser.parse_args()
    print(f"{'ms a step':30}{'median':>10}{'p99':>10}{'wanted':>10}{'tokens a step':>16}")
    for case in CASES:
        bench = Bench(case, is_async=not args.sync)
        profile = cProfile.Profile()
        if args.profile:
            profile.enable()
        times_ms = [1000 * step_s for step_s in bench.run(args.num_steps)]
        profile.disable()
        p99_ms = statistics.quantiles(times_ms, n=100)[98]
        print(
            f"{case.name:30}{statistics.median(times_ms):10.3f}{p99_ms:10.3f}"
            f"{case.target_ms or '':>10}{bench.num_outputs / args.num_steps:16.0f}",
            flush=True,
        )
        if args.profile:
            profile.print_stats("tottime")


if __name__ == "__main__":
    main()
