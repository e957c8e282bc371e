"""Host time of an engine core's step with 256 requests running, on a fake executor.

A step is all that the engine core process does in it: schedule, encode the plan and write it to the
ring buffer, read and decode the tokens, apply them, encode the outputs for the API server (in
reality its output thread does that last part). The worker's side is faked and not counted.

    python scripts/bench_core.py [--num-requests 256] [--num-steps 2000] [--profile]
"""

import argparse
import cProfile
import gc
import itertools
import random
import statistics
import time
from collections.abc import Iterator

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

TARGET_MEDIAN_MS = 1.5
PROMPT_LEN = (500, 8_000)
MAX_MODEL_LEN = 16_384
BLOCK_SIZE = 16
VOCAB_SIZE = 150_000
MAX_NUM_BATCHED_TOKENS = 8_192
NUM_WARM_UP_STEPS = 100


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

    def __init__(self, *, num_requests: int, async_scheduling: bool, renew: bool):
        """renew: requests end after 64 to 512 tokens and new ones come, else all run on."""
        config = make_config(num_requests, async_scheduling)
        self._executor = FakeExecutor(config)
        self._emitted: list[EngineOutput] = []
        self._core = EngineCore(config, self._executor, lambda _, m: self._emitted.append(m))
        self._requests = make_requests(renew)
        self._num_requests = num_requests
        self._num_alive = 0
        self.num_outputs = 0

    def run(self, num_steps: int) -> list[float]:
        """Seconds of each step once all requests are running."""
        while self.num_outputs < self._num_requests:
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
            self._num_alive -= sum(o.finish_reason is not None for o in message.outputs)
        self._emitted.clear()
        return step_s


def make_requests(renew: bool) -> Iterator[EngineCoreRequest]:
    rng = random.Random(0)
    for idx in itertools.count():
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(*PROMPT_LEN))]
        max_tokens = rng.randint(64, 512) if renew else MAX_MODEL_LEN - len(prompt)
        yield EngineCoreRequest(
            request_id=f"cmpl-{rng.randbytes(16).hex()}-{idx}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=(VOCAB_SIZE,)),
            arrival_time_s=0.0,
        )


def make_config(num_requests: int, async_scheduling: bool) -> EngineConfig:
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
        async_scheduling=async_scheduling,
        attention="reference",
        matmul="xla",
        compilation_cache_dir="none",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Host time of an engine core's step.")
    parser.add_argument("--num-requests", type=int, default=256)
    parser.add_argument("--num-steps", type=int, default=2000)
    parser.add_argument("--profile", action="store_true", help="where the time goes, by function")
    args = parser.parse_args()
    print(f"{args.num_requests} requests, prompts of {PROMPT_LEN[0]} to {PROMPT_LEN[1]} tokens")
    for renew, name in ((False, "all decode"), (True, "requests come and go")):
        for async_scheduling in (True, False):
            bench = Bench(
                num_requests=args.num_requests, async_scheduling=async_scheduling, renew=renew
            )
            profile = cProfile.Profile()
            if args.profile:
                profile.enable()
            times_ms = [1000 * step_s for step_s in bench.run(args.num_steps)]
            profile.disable()
            median_ms = statistics.median(times_ms)
            p99_ms = statistics.quantiles(times_ms, n=100)[98]
            print(
                f"{name:20} async {'on ' if async_scheduling else 'off'}"
                f"  median {median_ms:.3f} ms  p99 {p99_ms:.3f} ms"
                f"  ({bench.num_outputs / args.num_steps:.0f} tokens a step;"
                f" target: median <= {TARGET_MEDIAN_MS} ms)"
            )
            if args.profile:
                profile.print_stats("tottime")


if __name__ == "__main__":
    main()
