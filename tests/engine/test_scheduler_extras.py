"""The scheduler beyond plain tokens: forced ones, log-probabilities, pooled vectors."""

from typing import Any

import pytest

from jaxserve.engine.kv_cache_manager import KVCacheManager
from jaxserve.engine.request import Request
from jaxserve.engine.scheduler import Scheduler, StepPlan
from jaxserve.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    RowExtras,
    SamplingParams,
)
from tests.engine.schedules import plan_step
from tests.fakes import fake_embedding, fake_logprobs


def make_scheduler(*, blocks: int = 100, block_size: int = 4, **settings: int) -> Scheduler:
    kv = KVCacheManager(num_kv_blocks=blocks, block_size=block_size)
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64}
    return Scheduler(**(defaults | settings), kv=kv)


def add(
    scheduler: Scheduler,
    name: str,
    prompt: list[int],
    max_tokens: int = 20,
    grammar: str | None = None,
    **sampling: Any,
) -> Request:
    message = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        arrival_time_s=0.0,
        grammar=grammar,
    )
    request = Request.from_message(
        message, now_s=5.0, block_size=scheduler.kv.block_size, hash_blocks=True
    )
    scheduler.add_request(request)
    return request


def finish(scheduler: Scheduler, plan: StepPlan, *extras: RowExtras) -> list[EngineCoreOutput]:
    """Brings the step's tokens, all 0, and more."""
    num_tokens = sum(row.samples for row in plan.scheduled)
    outputs = scheduler.update_from_output(plan, [0] * num_tokens, 9.0, extras)
    scheduler.check_invariants()
    return [output for _, output in outputs]


def force(scheduler: Scheduler, request: Request, token_ids: list[int]) -> None:
    scheduler.force_tokens(request, token_ids)
    scheduler.check_invariants()


# --- grammars ---


def test_only_rows_that_sample_under_a_grammar_are_masked() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add(scheduler, "plain", [1])
    first = add(scheduler, "first", [2], grammar="g")
    second = add(scheduler, "second", list(range(10)), grammar="g")
    plan = plan_step(scheduler)
    assert (plan.masked, plan.message.awaits_mask) == ([(1, first)], True)
    finish(scheduler, plan)
    scheduler.finish_requests(["first"], FinishReason.ABORT)
    plan = plan_step(scheduler)
    assert (plan.masked, plan.message.awaits_mask) == ([(2, second)], True)
    scheduler.finish_requests(["second"], FinishReason.ABORT)
    finish(scheduler, plan)
    plan = plan_step(scheduler)
    assert (plan.masked, plan.message.awaits_mask) == ((), False)


@pytest.mark.parametrize("is_async", [True, False])
def test_forced_tokens_are_computed_with_the_one_before_them(is_async: bool) -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a", [1, 2, 3], grammar="g")
    first = plan_step(scheduler)
    force(scheduler, request, [7, 8, 9])
    outputs = [] if is_async else finish(scheduler, first)
    second = plan_step(scheduler)
    if is_async:
        outputs = finish(scheduler, first)
    # The token in flight and the three after it, of which one is in the second block.
    assert second.message.forced_tokens == [(0, [7, 8, 9])]
    assert second.message.num_tokens == [0, 4]
    assert len(second.message.new_blocks) == 2
    assert outputs == [EngineCoreOutput("a", [0, 7, 8, 9], None, None, 0, 5.0, 7.0)]
    assert request.token_ids == [1, 2, 3, 0, 7, 8, 9]
    assert finish(scheduler, second) == [EngineCoreOutput("a", [0])]
    assert plan_step(scheduler).message.forced_tokens == []


@pytest.mark.parametrize("is_async", [True, False])
def test_forced_tokens_end_where_the_request_must(is_async: bool) -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a", [1, 2, 3], max_tokens=3, grammar="g")
    plan = plan_step(scheduler)
    force(scheduler, request, [7, 8, 9])
    assert request.num_in_flight == 3
    if is_async:
        # Nobody will need the forced tokens computed.
        assert scheduler.schedule(7.0) is None
    outputs = finish(scheduler, plan)
    assert outputs[0].new_token_ids == [0, 7, 8]
    assert outputs[0].finish_reason is FinishReason.LENGTH
    assert not scheduler.has_unfinished


def test_there_may_be_no_room_for_forced_tokens() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a", [1], max_tokens=1, grammar="g")
    plan = plan_step(scheduler)
    force(scheduler, request, [7])
    assert finish(scheduler, plan)[0].new_token_ids == [0]


def test_forced_tokens_of_a_preempted_request_come_with_its_row() -> None:
    """It loses its row before the workers know them."""
    scheduler = make_scheduler(blocks=5, block_size=2)
    add(scheduler, "a", [1, 2, 3, 4], max_tokens=4)
    request = add(scheduler, "b", [5, 6], max_tokens=6, grammar="g")
    plan = plan_step(scheduler)
    force(scheduler, request, [7, 8])
    later = plan_step(scheduler)
    assert [row.request.request_id for row in later.scheduled] == ["a"]
    assert later.message.released_rows == [1] and later.message.forced_tokens == []
    assert [output.new_token_ids for output in finish(scheduler, plan)] == [[0], [0, 7, 8]]
    finish(scheduler, later)
    scheduler.finish_requests(["a"], FinishReason.ABORT)
    (admitted,) = plan_step(scheduler).message.admitted
    assert admitted.token_ids == [5, 6, 0, 7, 8]


def test_a_request_that_ends_between_two_steps() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a", [1], grammar="g")
    plan = plan_step(scheduler)
    expected = EngineCoreOutput("a", [], FinishReason.STOP, None, 0, 5.0, 7.0)
    assert scheduler.end(request, FinishReason.STOP) == (0, expected)
    assert finish(scheduler, plan) == []
    request = add(scheduler, "b", [1], grammar="g")
    finish(scheduler, plan_step(scheduler))
    plan_step(scheduler)
    expected = EngineCoreOutput("b", [], FinishReason.ABORT)
    assert scheduler.end(request, FinishReason.ABORT) == (0, expected)


# --- what comes beside the tokens ---


def test_logprobs_go_with_their_token() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", [1])
    add(scheduler, "b", [2], logprobs=3)
    add(scheduler, "c", [3], logprob_token_ids=(4,))
    for _ in range(2):
        plan = plan_step(scheduler)
        outputs = finish(
            scheduler,
            plan,
            RowExtras(1, logprobs=fake_logprobs([10])),
            RowExtras(2, logprobs=fake_logprobs([20])),
        )
        found = [output.logprobs for output in outputs]
        assert found == [None, fake_logprobs([10]), fake_logprobs([20])]


def test_what_comes_for_an_ended_request_is_dropped() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", [1], logprobs=3)
    add(scheduler, "b", [2], logprobs=3)
    plan = plan_step(scheduler)
    scheduler.finish_requests(["a"], FinishReason.ABORT)
    extras = [RowExtras(row, logprobs=fake_logprobs([row])) for row in (0, 1)]
    (output,) = finish(scheduler, plan, *extras)
    assert (output.request_id, output.logprobs) == ("b", fake_logprobs([1]))


def test_prompt_logprobs_come_once_with_the_first_output() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    add(scheduler, "a", [1, 2, 3, 4, 5, 6], prompt_logprobs=0)
    pieces = [fake_logprobs([2, 3, 4, 5]), fake_logprobs([6])]
    assert finish(scheduler, plan_step(scheduler), RowExtras(0, None, pieces[0])) == []
    (output,) = finish(scheduler, plan_step(scheduler), RowExtras(0, None, pieces[1]))
    assert output.prompt_logprobs == pieces
    (output,) = finish(scheduler, plan_step(scheduler))
    assert output.prompt_logprobs is None


def test_a_prompt_of_one_token_has_no_prompt_logprobs() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", [1], prompt_logprobs=0)
    (output,) = finish(scheduler, plan_step(scheduler))
    assert output.prompt_logprobs == []


@pytest.mark.parametrize("is_async", [True, False])
def test_prompt_logprobs_of_a_lost_row_are_dropped(is_async: bool) -> None:
    """Its prompt is computed again from the start, in pieces that may differ."""
    scheduler = make_scheduler(blocks=7, block_size=2, max_num_batched_tokens=7)
    add(scheduler, "a", [1, 2, 3, 4], max_tokens=4)
    request = add(scheduler, "b", list(range(11, 19)), max_tokens=4, prompt_logprobs=0)
    first = plan_step(scheduler)
    lost = RowExtras(1, None, fake_logprobs([12, 13, 14]))
    if not is_async:
        finish(scheduler, first, lost)
    preempting = plan_step(scheduler)
    assert preempting.message.released_rows == [1] and request.row < 0
    if is_async:
        finish(scheduler, first, lost)
    finish(scheduler, preempting)
    scheduler.finish_requests(["a"], FinishReason.ABORT)
    again = plan_step(scheduler)
    assert finish(scheduler, again, RowExtras(0, None, fake_logprobs([12]))) == []
    (output,) = finish(scheduler, plan_step(scheduler), RowExtras(0, None, fake_logprobs([13])))
    assert output.prompt_logprobs == [fake_logprobs([12]), fake_logprobs([13])]


def test_prompt_logprobs_outlive_the_row_when_the_first_token_is_in_flight() -> None:
    scheduler = make_scheduler(blocks=6, block_size=2, max_num_batched_tokens=6)
    add(scheduler, "a", [1, 2, 3, 4], max_tokens=4)
    request = add(scheduler, "b", [5, 6, 7, 8], max_tokens=6, prompt_logprobs=0)
    pieces = [fake_logprobs([6, 7]), fake_logprobs([8])]
    finish(scheduler, plan_step(scheduler), RowExtras(1, None, pieces[0]))
    last_of_prompt = plan_step(scheduler)
    preempting = plan_step(scheduler)
    assert preempting.message.released_rows == [1]
    outputs = finish(scheduler, last_of_prompt, RowExtras(1, None, pieces[1]))
    assert outputs[1].prompt_logprobs == pieces
    finish(scheduler, preempting)
    scheduler.finish_requests(["a"], FinishReason.ABORT)
    # Computed again, reported again by the worker, not sent again.
    again = plan_step(scheduler)
    assert again.message.admitted[0].token_ids == request.token_ids == [5, 6, 7, 8, 0]
    (output,) = finish(scheduler, again, RowExtras(0, None, fake_logprobs([6, 7, 8])))
    assert output.prompt_logprobs is None


def test_an_embedding_comes_with_the_only_output() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    add(scheduler, "a", [1, 2, 3, 4, 5], max_tokens=1, pooling="mean")
    assert finish(scheduler, plan_step(scheduler)) == []
    vector = fake_embedding([1, 2, 3, 4, 5])
    (output,) = finish(scheduler, plan_step(scheduler), RowExtras(0, embedding=vector))
    assert (output.embedding, output.finish_reason) == (vector, FinishReason.LENGTH)


@pytest.mark.parametrize("wanted", [{"prompt_logprobs": 0}, {"pooling": "last"}])
def test_who_needs_the_whole_prompt_reads_no_cache_but_fills_it(wanted: dict) -> None:
    scheduler = make_scheduler()
    prompt = list(range(9))
    for sampling, num_cached in ((wanted, 0), (wanted, 0), ({"logprobs": 1}, 8)):
        add(scheduler, "a", prompt, max_tokens=1, **sampling)
        plan = plan_step(scheduler)
        assert plan.scheduled[0].num_tokens == 9 - num_cached
        (output,) = finish(scheduler, plan)
        assert output.num_cached_tokens == num_cached
    stats = scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (9, 8)
