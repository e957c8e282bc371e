"""The scheduler's rules one by one, with golden steps and messages."""

import importlib.util
import statistics
from pathlib import Path

import pytest

from jaxserve.engine.request import Request, RequestStatus
from jaxserve.engine.scheduler import Scheduler
from jaxserve.messages import (
    AdmittedRow,
    EngineCoreOutput,
    FinishReason,
    SamplingParams,
    SchedulerOutput,
)
from tests.engine.schedules import add, finish_step, make_scheduler, plan_step, run

STOP = 99


def add_reference_requests(scheduler: Scheduler) -> None:
    add(scheduler, "A", 5, 3)
    add(scheduler, "B", 12, 2)
    add(scheduler, "C", 3, 4)


# --- whole schedules ---


def test_reference_schedule():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add_reference_requests(scheduler)
    assert run(scheduler) == [
        "A:5 B:3 (A→1)",
        "A:1 B:7 (A→2)",
        "A:1 B:2 C:3 (A→3, B→1, C→1, A done)",
        "B:1 C:1 (B→2, C→2, B done)",
        "C:1 (C→3)",
        "C:1 (C→4, C done)",
    ]
    assert scheduler.kv.num_used_blocks == 0


def test_prompts_are_cut_smaller_while_a_request_decodes():
    scheduler = make_scheduler(max_num_batched_tokens=32, max_num_mixed_tokens=8)
    add(scheduler, "A", 20, 3)
    add(scheduler, "B", 14, 1)
    assert run(scheduler) == [
        "A:20 B:12 (A→1)",
        "A:1 B:2 (A→2, B→1, B done)",
        "A:1 (A→3, A done)",
    ]
    add(scheduler, "C", 4, 5)
    finish_step(scheduler, plan_step(scheduler))
    add(scheduler, "D", 30, 1)
    assert run(scheduler) == [
        "C:1 D:7 (C→1)",
        "C:1 D:7 (C→2)",
        "C:1 D:7 (C→3)",
        "C:1 D:7 (C→4, C done)",
        "D:2 (D→1, D done)",
    ]


def test_prompts_get_as_many_tokens_as_there_are_requests_that_decode():
    scheduler = make_scheduler(max_num_batched_tokens=32, max_num_mixed_tokens=4, max_num_seqs=7)
    for name in "ABCDEF":
        add(scheduler, name, 3, 10)
    finish_step(scheduler, plan_step(scheduler))
    add(scheduler, "G", 20, 1)
    sizes = [[row.num_tokens for row in plan_step(scheduler).scheduled] for _ in range(3)]
    assert sizes == [[1, 1, 1, 1, 1, 1, 6], [1, 1, 1, 1, 1, 1, 8], [1, 1, 1, 1, 1, 1, 6]]


def test_reference_schedule_with_a_step_in_flight_is_the_same():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add_reference_requests(scheduler)
    assert run(scheduler, depth=1) == [
        "A:5 B:3 (A→1)",
        "A:1 B:7 (A→2)",
        "A:1 B:2 C:3 (A→3, B→1, C→1, A done)",
        "B:1 C:1 (B→2, C→2, B done)",
        "C:1 (C→3)",
        "C:1 (C→4, C done)",
    ]


def test_reference_schedule_as_messages():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add_reference_requests(scheduler)
    plans = []
    while scheduler.has_unfinished:
        plans.append(plan_step(scheduler))
        finish_step(scheduler, plans[-1])
    a, b, c = (
        [1000 * ord(name) + i for i in range(n)] for name, n in (("A", 5), ("B", 12), ("C", 3))
    )
    row_a = AdmittedRow(0, a, 5, 0, [1, 2], SamplingParams(max_tokens=3))
    row_b = AdmittedRow(1, b, 12, 0, [3], SamplingParams(max_tokens=2))
    row_c = AdmittedRow(2, c, 3, 0, [6], SamplingParams(max_tokens=4))
    assert [plan.message for plan in plans] == [
        SchedulerOutput(0, admitted=[row_a, row_b], num_tokens=[0, 5, 1, 3]),
        SchedulerOutput(1, new_blocks=[1, 4, 1, 5], num_tokens=[1, 7]),
        SchedulerOutput(2, admitted=[row_c], num_tokens=[1, 2, 2, 3]),
        SchedulerOutput(3, released_rows=[0], new_blocks=[1, 2]),
        SchedulerOutput(4, released_rows=[1], new_blocks=[2, 2]),
        SchedulerOutput(5),
    ]


# --- budget, queue and rows ---


def test_prompts_are_chunked_by_the_budget_and_sample_at_their_end():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    add(scheduler, "A", 10, 2)
    assert run(scheduler) == ["A:4 ()", "A:4 ()", "A:2 (A→1)", "A:1 (A→2, A done)"]


def test_rows_without_budget_sit_out_and_are_listed_with_count_0():
    scheduler = make_scheduler(max_num_batched_tokens=2)
    add(scheduler, "A", 1)
    add(scheduler, "B", 1)
    finish_step(scheduler, plan_step(scheduler))
    scheduler.max_num_batched_tokens = 1
    plan = plan_step(scheduler)
    assert (repr(plan), plan.message.num_tokens) == ("step 1: A:1", [1, 0])


def test_no_more_rows_than_max_num_seqs_and_the_smallest_free_row_first():
    scheduler = make_scheduler(max_num_seqs=3)
    for name in "ABCDE":
        add(scheduler, name, 2)
    first = plan_step(scheduler)
    assert [row.row for row in first.message.admitted] == [0, 1, 2]
    finish_step(scheduler, first)
    scheduler.finish_requests(["C", "A"], FinishReason.ABORT)
    second = plan_step(scheduler)
    assert second.message.released_rows == [2, 0]
    assert [(row.row, row.token_ids[0] // 1000) for row in second.message.admitted] == [
        (0, ord("D")),
        (2, ord("E")),
    ]
    assert repr(second) == "step 1: D:2 B:1 E:2"
    assert second.message.num_tokens == [0, 2, 2, 2]


def test_nobody_overtakes_the_head_of_the_queue():
    scheduler = make_scheduler(blocks=6, block_size=4)
    add(scheduler, "A", 12, 4)
    add(scheduler, "B", 12, 4)
    add(scheduler, "C", 1, 2)
    plan = plan_step(scheduler)
    assert repr(plan) == "step 0: A:12"


def test_a_request_is_admitted_only_when_all_its_tokens_have_room():
    scheduler = make_scheduler(blocks=9, block_size=4, max_num_batched_tokens=8)
    add(scheduler, "A", 8, 2)
    add(scheduler, "B", 20, 2)
    lines = run(scheduler)
    assert lines[:3] == ["A:8 (A→1)", "A:1 B:7 (A→2, A done)", "B:8 ()"]
    scheduler = make_scheduler(blocks=8, block_size=4, max_num_batched_tokens=8)
    add(scheduler, "A", 8, 2)
    add(scheduler, "B", 20, 2)
    lines = run(scheduler)
    assert lines[:3] == ["A:8 (A→1)", "A:1 (A→2, A done)", "B:8 ()"]


def test_fcfs_ignores_priorities():
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, "A", 2, 1, priority=3, arrival_time_s=3.0)
    add(scheduler, "B", 2, 1, priority=1, arrival_time_s=1.0)
    assert run(scheduler) == ["A:2 (A→1, A done)", "B:2 (B→1, B done)"]


def test_priority_then_arrival_then_order_of_adding():
    scheduler = make_scheduler(max_num_seqs=1, policy="priority")
    add(scheduler, "A", 2, 1, priority=1, arrival_time_s=1.0)
    add(scheduler, "B", 2, 1, priority=0, arrival_time_s=4.0)
    add(scheduler, "C", 2, 1, priority=0, arrival_time_s=3.0)
    add(scheduler, "D", 2, 1, priority=0, arrival_time_s=4.0)
    add(scheduler, "E", 2, 1, priority=-1, arrival_time_s=9.0)
    assert [line[0] for line in run(scheduler)] == ["E", "C", "B", "D", "A"]


def test_a_waiting_request_of_higher_priority_evicts_nobody():
    scheduler = make_scheduler(max_num_seqs=1, policy="priority")
    add(scheduler, "A", 2, 3, priority=5)
    finish_step(scheduler, plan_step(scheduler))
    add(scheduler, "B", 2, 1, priority=0)
    assert [line[0] for line in run(scheduler)] == ["A", "A", "B"]
    assert scheduler.stats().num_preemptions == 0


# --- the end of a request ---


def test_stop_token_ends_with_its_id_as_the_reason():
    scheduler = make_scheduler()
    request = add(scheduler, "A", 2, stop_token_ids=(STOP, 98))
    outputs = finish_step(scheduler, plan_step(scheduler), lambda _: 98)
    assert outputs == [EngineCoreOutput("A", [98], FinishReason.STOP, 98, 0, 5.0, 7.0)]
    assert request.finish_reason is FinishReason.STOP
    assert not scheduler.has_unfinished and scheduler.kv.num_used_blocks == 0


def test_stop_tokens_count_only_after_min_tokens():
    scheduler = make_scheduler()
    add(scheduler, "A", 2, stop_token_ids=(STOP,), min_tokens=2)
    assert run(scheduler, token_of=lambda _: STOP) == [
        "A:2 (A→1)",
        "A:1 (A→2)",
        "A:1 (A→3, A done)",
    ]


@pytest.mark.parametrize(("max_tokens", "max_model_len", "num_outputs"), [(3, 64, 3), (9, 7, 2)])
def test_length_ends_at_max_tokens_or_max_model_len(max_tokens, max_model_len, num_outputs):
    scheduler = make_scheduler(max_model_len=max_model_len)
    request = add(scheduler, "A", 5, max_tokens, stop_token_ids=(STOP,))
    assert len(run(scheduler)) == num_outputs
    assert request.finish_reason is FinishReason.LENGTH
    assert request.num_output_tokens == num_outputs


def test_a_stop_token_as_the_last_allowed_token_is_a_stop():
    scheduler = make_scheduler()
    request = add(scheduler, "A", 5, 1, stop_token_ids=(STOP,))
    run(scheduler, token_of=lambda _: STOP)
    assert request.finish_reason is FinishReason.STOP


def test_no_step_is_planned_beyond_the_last_token_in_flight():
    scheduler = make_scheduler()
    add(scheduler, "A", 2, 2)
    add(scheduler, "B", 2, 9)
    plans = [plan_step(scheduler) for _ in range(3)]
    assert [repr(plan) for plan in plans] == ["step 0: A:2 B:2", "step 1: A:1 B:1", "step 2: B:1"]
    assert plans[2].message.num_tokens == [0, 0]
    scheduler.finish_requests(["B"], FinishReason.ABORT)
    assert scheduler.schedule(0.0) is None


def test_tokens_sampled_after_the_end_are_dropped():
    scheduler = make_scheduler()
    request = add(scheduler, "A", 2, stop_token_ids=(STOP,))
    plans = [plan_step(scheduler) for _ in range(3)]
    outputs = finish_step(scheduler, plans[0], lambda _: STOP)
    assert outputs[0].finish_reason is FinishReason.STOP
    assert finish_step(scheduler, plans[1]) == finish_step(scheduler, plans[2]) == []
    assert request.num_output_tokens == 1


def test_abort_of_waiting_running_and_unknown_requests():
    scheduler = make_scheduler(max_num_seqs=1)
    running, waiting = add(scheduler, "A", 5), add(scheduler, "B", 5)
    plan = plan_step(scheduler)
    ended = scheduler.finish_requests(["B", "nobody", "A", "A"], FinishReason.ABORT)
    scheduler.check_invariants()
    assert ended == [waiting, running]
    assert {r.finish_reason for r in ended} == {FinishReason.ABORT}
    assert not scheduler.has_unfinished and scheduler.kv.num_used_blocks == 0
    assert finish_step(scheduler, plan) == []
    assert scheduler.schedule(0.0) is None


def test_a_row_released_and_used_again_is_in_the_same_message():
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, "A", 2, 1)
    add(scheduler, "B", 3, 1)
    finish_step(scheduler, plan_step(scheduler))
    message = plan_step(scheduler).message
    assert message.released_rows == [0]
    assert [row.row for row in message.admitted] == [0]


# --- prefix cache ---


def test_a_prefix_is_shared_by_later_steps_only():
    scheduler = make_scheduler(block_size=2)
    prompt = [1, 2, 3, 4, 5]
    first, second = add(scheduler, "A", prompt), add(scheduler, "B", prompt)
    plan = plan_step(scheduler)
    assert repr(plan) == "step 0: A:5 B:5"
    assert not set(first.block_ids) & set(second.block_ids)
    third = add(scheduler, "C", prompt)
    plan = plan_step(scheduler)  # step 0 is still in flight
    assert repr(plan) == "step 1: A:1 B:1 C:1"
    assert third.block_ids[:2] == first.block_ids[:2]
    assert plan.message.admitted[0].num_computed_tokens == 4
    assert plan.message.num_tokens == []


def test_cached_tokens_are_reported_once_and_counted():
    scheduler = make_scheduler(block_size=2)
    add(scheduler, "A", [1, 2, 3, 4, 5], 1)
    run(scheduler)
    add(scheduler, "B", [1, 2, 3, 4, 5, 6], 3)
    outputs = [finish_step(scheduler, plan_step(scheduler))[0] for _ in range(3)]
    assert [output.num_cached_tokens for output in outputs] == [4, 0, 0]
    stats = scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (11, 4)


def test_a_preempted_request_finds_its_own_blocks_uncounted():
    scheduler = make_scheduler(blocks=7, block_size=2)
    add(scheduler, "A", 4, 3)
    second = add(scheduler, "B", 6, 2)
    finish_step(scheduler, plan_step(scheduler))
    plan = plan_step(scheduler)
    assert (repr(plan), second.status) == ("step 1: A:1", RequestStatus.PREEMPTED)
    finish_step(scheduler, plan)
    finish_step(scheduler, plan_step(scheduler))
    plan = plan_step(scheduler)
    assert repr(plan) == "step 3: B:1"
    assert plan.message.admitted[0].num_computed_tokens == 6
    stats = scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (10, 0)


def test_generated_blocks_are_found_by_the_next_turn():
    scheduler = make_scheduler(block_size=2)
    add(scheduler, "A", [1, 2, 3], 4)
    run(scheduler, token_of=lambda request: 50 + request.num_output_tokens)
    add(scheduler, "B", [1, 2, 3, 50, 51, 52, 53, 4])
    assert plan_step(scheduler).message.admitted[0].num_computed_tokens == 6


def test_reset_prefix_cache_only_while_nothing_is_held():
    scheduler = make_scheduler(block_size=2)
    add(scheduler, "A", [1, 2, 3, 4, 5], 1)
    plan = plan_step(scheduler)
    assert not scheduler.reset_prefix_cache()
    finish_step(scheduler, plan)
    assert scheduler.reset_prefix_cache()
    add(scheduler, "B", [1, 2, 3, 4, 5], 1)
    assert plan_step(scheduler).message.admitted[0].num_computed_tokens == 0


# --- what the engine core relies on ---


def test_outputs_carry_client_and_times():
    scheduler = make_scheduler()
    request = add(scheduler, "A", 2, 2, client_idx=3)
    plan = plan_step(scheduler)
    assert scheduler.update_from_output(plan, [7], 9.0) == [
        (3, EngineCoreOutput("A", [7], queued_s=5.0, scheduled_s=7.0))
    ]
    assert request.first_token_s == 9.0
    plan = scheduler.schedule(8.0)
    assert plan is not None
    last = EngineCoreOutput("A", [8], FinishReason.LENGTH)
    assert scheduler.update_from_output(plan, [8], 10.0) == [(3, last)]


def test_stats():
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, "A", 9)
    add(scheduler, "B", 9)
    finish_step(scheduler, plan_step(scheduler))
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_steps) == (1, 1, 1)
    assert (stats.num_used_kv_blocks, stats.num_kv_blocks) == (3, 100)


def test_messages_do_not_alias_the_request():
    scheduler = make_scheduler()
    prompt = [1, 2, 3]
    request = add(scheduler, "A", prompt)
    plan = plan_step(scheduler)
    finish_step(scheduler, plan)
    plan_step(scheduler)
    assert (request.num_tokens, len(prompt)) == (4, 3)
    assert plan.message.admitted[0].token_ids == [1, 2, 3]


def test_a_request_that_never_fits_is_refused_loudly():
    scheduler = make_scheduler(blocks=4, block_size=4, max_model_len=64)
    with pytest.raises(AssertionError, match="may need 4 KV blocks of 3"):
        add(scheduler, "A", 10, 4)
    assert not scheduler.has_unfinished
    add(scheduler, "B", 10, 3)
    assert len(run(scheduler)) == 3
    with pytest.raises(AssertionError, match="no room"):
        add(make_scheduler(max_model_len=8), "C", 8)


def test_schedule_fails_rather_than_spins():
    scheduler = make_scheduler(blocks=4, block_size=4)
    scheduler.kv.allocate_slots(Request("lost", [1], 1, SamplingParams(max_tokens=1)), 12)
    add(scheduler, "A", 10, 3)
    with pytest.raises(AssertionError, match=r"no step can be planned.*3 of 3 KV blocks used"):
        scheduler.schedule(0.0)


def test_request_ids_are_unique_while_unfinished():
    scheduler = make_scheduler()
    add(scheduler, "A", 2, 1)
    with pytest.raises(AssertionError, match="request id in use"):
        add(scheduler, "A", 2)
    run(scheduler)
    add(scheduler, "A", 2)


def test_results_must_come_in_order_and_complete():
    scheduler = make_scheduler()
    add(scheduler, "A", 2)
    plans = [plan_step(scheduler), plan_step(scheduler)]
    with pytest.raises(AssertionError):
        scheduler.update_from_output(plans[1], [0], 0.0)
    with pytest.raises(AssertionError):
        scheduler.update_from_output(plans[0], [], 0.0)


def test_step_messages_of_256_decoding_requests_are_small():
    path = Path(__file__).parents[2] / "scripts" / "bench_wire.py"
    spec = importlib.util.spec_from_file_location("bench_wire", path)
    assert spec is not None and spec.loader is not None
    bench_wire = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench_wire)
    measured = bench_wire.measure(num_steps=48)
    assert len(measured.message_bytes) == 48
    assert statistics.median(measured.message_bytes) <= bench_wire.LIMIT_BYTES == 512
    assert min(measured.full_bytes) > 1_000_000
