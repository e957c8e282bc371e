"""The scheduler when blocks run out."""

from jaxserve.engine.request import RequestStatus
from jaxserve.messages import FinishReason, SchedulerOutput
from tests.engine.schedules import add, finish_step, make_scheduler, plan_step

STOP = 99


def test_out_of_blocks_preempts_the_latest_which_computes_its_tokens_again():
    scheduler = make_scheduler(blocks=6, block_size=4, caching=False)
    first = add(scheduler, "A", 7, 4)
    second = add(scheduler, "B", 8, 8)
    plans = [plan_step(scheduler)]
    finish_step(scheduler, plans[-1])
    plans.append(plan_step(scheduler))
    finish_step(scheduler, plans[-1])
    assert [repr(plan) for plan in plans] == ["step 0: A:7 B:8", "step 1: A:1 B:1"]
    assert (len(first.block_ids), len(second.block_ids)) == (2, 3)
    plan = plan_step(scheduler)
    assert repr(plan) == "step 2: A:1"
    assert second.status is RequestStatus.PREEMPTED
    assert plan.message == SchedulerOutput(2, released_rows=[1], new_blocks=[0, 3])
    assert scheduler.stats().num_preemptions == 1
    add(scheduler, "C", 1, 1)
    finish_step(scheduler, plan)
    plan = plan_step(scheduler)
    assert repr(plan) == "step 3: A:1"
    finish_step(scheduler, plan)
    plan = plan_step(scheduler)
    assert repr(plan) == "step 4: B:10 C:1"
    prompt = [1000 * ord("B") + idx for idx in range(8)]
    assert plan.message.admitted[0].token_ids == [*prompt, 0, 0]
    assert plan.message.admitted[0].num_prompt_tokens == 8
    assert finish_step(scheduler, plan)[0].num_cached_tokens == 0


def test_a_preempted_request_waits_for_its_tokens_in_flight():
    scheduler = make_scheduler(blocks=5, block_size=2, caching=False)
    add(scheduler, "A", 2, 6)
    second = add(scheduler, "B", 2, 6)
    plans = [plan_step(scheduler) for _ in range(3)]
    assert second.num_in_flight == 3
    plans.append(plan_step(scheduler))
    assert repr(plans[-1]) == "step 3: A:1"
    assert (second.status, second.num_in_flight) == (RequestStatus.PREEMPTED, 3)
    scheduler.finish_requests(["A"], FinishReason.ABORT)
    assert scheduler.schedule(0.0) is None
    for plan in plans[:3]:
        assert scheduler.schedule(0.0) is None
        outputs = finish_step(scheduler, plan, lambda request: request.num_output_tokens)
        assert [output.request_id for output in outputs] == ["B"]
    assert second.token_ids[2:] == [0, 1, 2]
    plan = plan_step(scheduler)
    assert repr(plan) == "step 4: B:5"
    assert plan.message.released_rows == [0]
    assert plan.message.admitted[0].token_ids == second.token_ids


def test_a_token_in_flight_can_end_a_preempted_request():
    scheduler = make_scheduler(blocks=5, block_size=2)
    add(scheduler, "A", 2, 6)
    second = add(scheduler, "B", 2, 6, stop_token_ids=(STOP,))
    plans = [plan_step(scheduler) for _ in range(4)]
    assert second.status is RequestStatus.PREEMPTED
    outputs = finish_step(scheduler, plans[0], lambda _: STOP)
    assert [output.finish_reason for output in outputs] == [None, FinishReason.STOP]
    assert scheduler.stats().num_waiting == 0
    assert [o.request_id for o in finish_step(scheduler, plans[1])] == ["A"]


def test_priority_preempts_the_lowest_even_if_it_was_planned_already():
    scheduler = make_scheduler(blocks=6, block_size=2, policy="priority", caching=False)
    low = add(scheduler, "L", 2, 6, priority=9)
    mid = add(scheduler, "M", 4, 5, priority=5)
    top = add(scheduler, "T", 3, 4, priority=1)
    first = plan_step(scheduler)
    assert [row.token_ids[0] // 1000 for row in first.message.admitted] == [*map(ord, "TML")]
    assert [top.row, mid.row, low.row] == [0, 1, 2]
    finish_step(scheduler, first)
    plan = plan_step(scheduler)
    assert repr(plan) == "step 1: T:1 M:1"
    assert plan.message == SchedulerOutput(1, released_rows=[2], new_blocks=[1, 5])


def test_a_planned_victim_gives_its_budget_and_new_block_to_others():
    scheduler = make_scheduler(
        blocks=6, block_size=2, policy="priority", caching=False, max_num_batched_tokens=9
    )
    low = add(scheduler, "L", 2, 6, priority=9)
    finish_step(scheduler, plan_step(scheduler))
    add(scheduler, "T", 6, 5, priority=1)
    finish_step(scheduler, plan_step(scheduler))
    assert len(low.block_ids) == 2
    plan = plan_step(scheduler)
    assert repr(plan) == "step 2: T:1"
    assert plan.message == SchedulerOutput(
        2, released_rows=[0], new_blocks=[1, plan.message.new_blocks[1]]
    )
    assert (low.num_in_flight, low.num_computed_tokens) == (0, 0)
    assert low.num_tokens == 4


def test_a_planned_victim_gives_its_budget_back():
    scheduler = make_scheduler(blocks=7, block_size=2, policy="priority")
    add(scheduler, "L", 2, 6, priority=9)
    finish_step(scheduler, plan_step(scheduler))
    add(scheduler, "T", 4, 5, priority=1)
    add(scheduler, "U", 3, 5, priority=2)
    plan = plan_step(scheduler)
    assert repr(plan) == "step 1: L:1 T:4 U:3"
    finish_step(scheduler, plan)
    scheduler.max_num_batched_tokens = 2
    assert repr(plan_step(scheduler)) == "step 2: T:1 U:1"


def test_nobody_is_admitted_in_a_step_that_preempts():
    scheduler = make_scheduler(blocks=5, block_size=2, policy="priority")
    add(scheduler, "A", 4, 4, priority=5)
    add(scheduler, "L", 3, 3, priority=9)
    finish_step(scheduler, plan_step(scheduler))
    add(scheduler, "H", 1, 1, priority=0)
    plans = []
    for _ in range(2):
        plans.append(plan_step(scheduler))
        finish_step(scheduler, plans[-1])
    assert [repr(plan) for plan in plans] == ["step 1: A:1", "step 2: A:1 H:1"]
