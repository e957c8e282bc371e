"""How many bytes a step sends to the workers: deltas beside resending everything.

The real scheduler and the real encoder, 256 decoding requests with prompts of 500 to 8,000 tokens
and blocks of 16, as in the reference program (JSON). Also prints the host time of a step.
"""

import random
import statistics
import time
from typing import NamedTuple

from jaxserve.engine.kv_cache_manager import KVCacheManager
from jaxserve.engine.request import Request
from jaxserve.engine.scheduler import Scheduler
from jaxserve.messages import EngineCoreOutputs, EngineCoreRequest, SamplingParams, encode

NUM_REQUESTS = 256
BLOCK_SIZE = 16
PROMPT_LEN = (500, 8_000)
VOCAB_SIZE = 150_000
MAX_TOKENS = 512
LIMIT_BYTES = 512
REFERENCE_FULL_BYTES, REFERENCE_DELTA_BYTES = 8_380_000, 5_100


class Measured(NamedTuple):
    """One entry a decode step. full_bytes: every running request resent; only every 32nd step."""

    message_bytes: list[int]
    full_bytes: list[int]
    schedule_s: list[float]
    update_s: list[float]
    encode_s: list[float]


def make_scheduler(rng: random.Random) -> Scheduler:
    """256 waiting requests and a pool that holds them all."""
    most = PROMPT_LEN[1] + MAX_TOKENS
    kv = KVCacheManager(num_kv_blocks=1 + NUM_REQUESTS * most // BLOCK_SIZE, block_size=BLOCK_SIZE)
    scheduler = Scheduler(
        max_num_seqs=NUM_REQUESTS, max_num_batched_tokens=65_536, max_model_len=most, kv=kv
    )
    for idx in range(NUM_REQUESTS):
        message = EngineCoreRequest(
            request_id=f"req-{idx}",
            prompt_token_ids=[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(*PROMPT_LEN))],
            sampling=SamplingParams(
                max_tokens=MAX_TOKENS, temperature=0.7, top_p=0.95, stop_token_ids=(VOCAB_SIZE,)
            ),
            arrival_time_s=float(idx),
        )
        scheduler.add_request(
            Request.from_message(message, now_s=0.0, block_size=BLOCK_SIZE, hash_blocks=True)
        )
    return scheduler


def measure(num_steps: int, *, seed: int = 1) -> Measured:
    """Runs `num_steps` steps with one step in flight, once all requests decode."""
    rng = random.Random(seed)
    scheduler = make_scheduler(rng)
    measured = Measured([], [], [], [], [])
    in_flight = scheduler.schedule(0.0)
    while len(measured.message_bytes) < num_steps:
        start_s = time.perf_counter()
        plan = scheduler.schedule(0.0)
        scheduled_s = time.perf_counter()
        assert plan is not None and in_flight is not None
        message = encode(plan.message)
        encoded_s = time.perf_counter()
        tokens = [rng.randrange(VOCAB_SIZE) for row in in_flight.scheduled if row.samples]
        sampled_s = time.perf_counter()
        outputs = scheduler.update_from_output(in_flight, tokens, 0.0)
        updated_s = time.perf_counter()
        encode(EngineCoreOutputs([output for _, output in outputs], scheduler.stats(), 0.0))
        done_s = time.perf_counter()
        if len(outputs) == NUM_REQUESTS and not plan.message.admitted:
            measured.message_bytes.append(len(message))
            measured.schedule_s.append(scheduled_s - start_s)
            measured.update_s.append(updated_s - sampled_s)
            measured.encode_s.append(encoded_s - scheduled_s + done_s - updated_s)
            if len(measured.message_bytes) % 32 == 1:
                measured.full_bytes.append(full_message_bytes([r.request for r in plan.scheduled]))
        in_flight = plan
    return measured


def full_message_bytes(requests: list[Request]) -> int:
    """Size of a step message, same encoder, that repeats all a worker must know of each request."""
    return len(encode([(r.request_id, r.token_ids, r.block_ids, r.sampling) for r in requests]))


def p99(values: list[float]) -> float:
    """The 99th percentile."""
    return statistics.quantiles(values, n=100)[98]


def main() -> int:
    """Prints the table; 1 when the median message is over the limit."""
    measured = measure(num_steps=400)
    median_bytes = statistics.median(measured.message_bytes)
    full_bytes = statistics.median(measured.full_bytes)
    print(f"{NUM_REQUESTS} decoding requests, {len(measured.message_bytes)} steps, bytes a step")
    print(f"  {'':24}{'reference (JSON)':>20}{'jaxserve (msgpack)':>20}")
    print(f"  {'resending everything':24}{REFERENCE_FULL_BYTES:>20,}{full_bytes:>20,.0f}")
    print(f"  {'deltas, median':24}{REFERENCE_DELTA_BYTES:>20,}{median_bytes:>20,.0f}")
    print(f"  {'deltas, p99':24}{'':>20}{p99([float(b) for b in measured.message_bytes]):>20,.0f}")
    print("host time a step, microseconds, median and p99")
    for name in ("schedule", "update", "encode"):
        values = [1e6 * value for value in getattr(measured, f"{name}_s")]
        print(f"  {name:24}{statistics.median(values):>20,.0f}{p99(values):>20,.0f}")
    return int(median_bytes > LIMIT_BYTES)


if __name__ == "__main__":
    raise SystemExit(main())
