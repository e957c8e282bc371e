"""A scheduler, requests for it, and its steps as lines of text."""

from collections.abc import Callable
from typing import Any

from jaxserve.engine.kv_cache_manager import KVCacheManager
from jaxserve.engine.request import Request
from jaxserve.engine.scheduler import Scheduler, StepPlan
from jaxserve.messages import EngineCoreOutput, EngineCoreRequest, SamplingParams


def make_scheduler(
    *, blocks: int = 100, block_size: int = 4, caching: bool = True, **settings
) -> Scheduler:
    kv = KVCacheManager(num_kv_blocks=blocks, block_size=block_size, enable_prefix_caching=caching)
    defaults: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
    }
    return Scheduler(**(defaults | settings), kv=kv)


def add(
    scheduler: Scheduler, name: str, prompt: int | list[int], max_tokens: int = 20, **fields
) -> Request:
    """Adds a request; a prompt given as a length has tokens nobody else has."""
    if isinstance(prompt, int):
        prompt = [1000 * ord(name[0]) + idx for idx in range(prompt)]
    sampling = {key: fields.pop(key) for key in ("stop_token_ids", "min_tokens") if key in fields}
    message = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        arrival_time_s=fields.pop("arrival_time_s", 0.0),
        **fields,
    )
    kv = scheduler.kv
    request = Request.from_message(
        message, now_s=5.0, block_size=kv.block_size, hash_blocks=kv.enable_prefix_caching
    )
    scheduler.add_request(request)
    return request


def plan_step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule(7.0)
    scheduler.check_invariants()
    assert plan is not None
    return plan


def finish_step(scheduler: Scheduler, plan: StepPlan, token_of=None) -> list[EngineCoreOutput]:
    """Brings a step's tokens: token_of(request), 0 unless given."""
    requests = [row.request for row in plan.scheduled if row.samples]
    tokens = [token_of(request) if token_of else 0 for request in requests]
    outputs = scheduler.update_from_output(plan, tokens, 9.0)
    scheduler.check_invariants()
    return [output for _, output in outputs]


def describe(plan: StepPlan, outputs: list[EngineCoreOutput], counts: dict[str, int]) -> str:
    """One line for a step: tokens computed, then the output count of whoever got one."""
    for output in outputs:
        counts[output.request_id] = counts.get(output.request_id, 0) + 1
    events = [f"{output.request_id}→{counts[output.request_id]}" for output in outputs]
    events += [f"{o.request_id} done" for o in outputs if o.finish_reason is not None]
    computed = " ".join(f"{row.request.request_id}:{row.num_tokens}" for row in plan.scheduled)
    return f"{computed} ({', '.join(events)})"


def run(scheduler: Scheduler, *, depth: int = 0, token_of: Callable | None = None) -> list[str]:
    """Runs to the end with `depth` steps in flight besides the next; one line a step."""
    lines, in_flight, counts = [], [], {}
    while scheduler.has_unfinished or in_flight:
        plan = scheduler.schedule(7.0)
        scheduler.check_invariants()
        if plan:
            in_flight.append(plan)
        if len(in_flight) > depth or not plan:
            done = in_flight.pop(0)
            outputs = finish_step(scheduler, done, token_of)
            lines.append(describe(done, outputs, counts))
    return lines
