"""Decides what every step computes: which requests run, how many tokens of each, on which row."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Literal, NamedTuple

from msgspec.structs import replace

from jaxserve.engine.kv_cache_manager import KVCacheManager
from jaxserve.engine.request import NO_ROW, Request, RequestStatus
from jaxserve.messages import (
    AdmittedRow,
    EngineCoreOutput,
    FinishReason,
    RowExtras,
    SchedulerOutput,
    SchedulerStats,
)

_RUNNING = RequestStatus.RUNNING
_FINISHED = RequestStatus.FINISHED
_order_of = attrgetter("order")


class ScheduledRow(NamedTuple):
    """A row's part in a step. samples: the step computes its last token, so it yields a new one."""

    request: Request
    num_tokens: int
    samples: bool


class StepPlan(NamedTuple):
    """One step; read only.

    scheduled: the rows that compute something, by ascending row.
    masked: the rows that sample under a grammar, by ascending row.
    extras: the live rows whose requests ask for more than tokens.
    """

    message: SchedulerOutput
    scheduled: list[ScheduledRow]
    masked: Sequence[tuple[int, Request]] = ()
    extras: Mapping[int, Request] = {}

    def __repr__(self) -> str:
        rows = (f"{row.request.request_id}:{row.num_tokens}" for row in self.scheduled)
        return f"step {self.message.step_id}: {' '.join(rows)}"


class _Draft:
    """A step while it is being planned.

    budget: tokens left.  order: the running requests as the step began.
    exceptions: row -> its part, for running rows that do not simply compute one token and sample.
    new_blocks: blocks given to requests that ran before this step.
    grown: requests that got tokens, save those for which `_schedule_running` is enough.
    """

    __slots__ = ("admitted", "budget", "exceptions", "grown", "new_blocks", "order", "preempted")

    def __init__(self, budget: int, order: list[Request]):
        self.budget = budget
        self.order = order
        self.exceptions: dict[int, ScheduledRow] = {}
        self.new_blocks: list[tuple[Request, list[int]]] = []
        self.grown: list[Request] = []
        self.admitted: list[AdmittedRow] = []
        self.preempted = False


class Scheduler:
    """Plans steps and takes in their results. No clock, no I/O.

    There is no prefill and no decode: a request has num_planned_tokens (known ones and those that
    steps in flight will sample) and num_computed_tokens, and a step closes gaps between the two
    under a token budget, which is smaller while a request decodes: running requests first, in the
    order of their admission, then waiting ones while budget, rows and blocks last. When a running
    request finds no block, the running request that comes last (policy "fcfs": added last;
    "priority": highest number, then latest arrival) loses its row and blocks and waits to compute
    its tokens again.

    `schedule` may be called again before the results of earlier plans are in; results come in the
    order of the plans. Request ids are unique among unfinished requests.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_mixed_tokens: int | None = None,
        max_model_len: int,
        kv: KVCacheManager,
        policy: Literal["fcfs", "priority"] = "fcfs",
    ):
        assert max_num_seqs > 0 and max_num_batched_tokens > 0 and max_model_len > 1
        assert policy in ("fcfs", "priority"), policy
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_mixed_tokens = max_num_mixed_tokens or max_num_batched_tokens
        self.max_model_len = max_model_len
        self.kv = kv
        self.policy = policy
        self._requests: dict[str, Request] = {}
        self._waiting: list[Request] = []  # by Request.order
        self._running: dict[str, Request] = {}  # by admission
        self._rows: list[ScheduledRow | None] = [None] * max_num_seqs
        self._free_rows = list(range(max_num_seqs))
        self._released_rows: list[int] = []
        # Live rows of requests with a grammar, and with extras.
        self._grammar_rows: dict[int, Request] = {}
        self._extras_rows: dict[int, Request] = {}
        # Forced tokens that no plan has brought to the workers.
        self._unsent_forced: dict[Request, list[int]] = {}
        self._num_added = 0
        self._num_preemptions = 0
        self._next_step_id = 0
        self._next_result_id = 0

    # --- requests come and go ---

    def add_request(self, request: Request) -> None:
        """Queues a request, which must fit: one output token at least, its blocks in the pool."""
        assert request.request_id not in self._requests, f"request id in use: {request}"
        total = min(request.num_prompt_tokens + request.sampling.max_tokens, self.max_model_len)
        num_blocks = self.kv.num_blocks_for(total - 1)
        assert request.num_prompt_tokens < total, f"{request} leaves no room in {total} tokens"
        assert num_blocks < self.kv.num_kv_blocks, (
            f"{request} may need {num_blocks} KV blocks of {self.kv.num_kv_blocks - 1}"
        )
        request.max_total_tokens = total
        if self.policy == "priority":
            request.order = (request.priority, request.arrival_time_s, self._num_added)
        else:
            request.order = (0, 0.0, self._num_added)
        self._num_added += 1
        self._requests[request.request_id] = request
        insort(self._waiting, request, key=_order_of)

    def finish_requests(self, request_ids: Iterable[str], reason: FinishReason) -> list[Request]:
        """Ends requests from outside; unknown ids are ignored. Returns those that ended.

        What steps in flight still sample for them is dropped.
        """
        ended = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request, reason)
                ended.append(request)
        return ended

    def end(self, request: Request, reason: FinishReason) -> tuple[int, EngineCoreOutput]:
        """Ends a request between two steps; returns (client_idx, its last output), which brings no
        token."""
        self._finish(request, reason)
        output = EngineCoreOutput(request.request_id, [], reason)
        if not request.num_output_tokens:
            output = replace(
                output,
                num_cached_tokens=request.num_cached_tokens,
                queued_s=request.queued_s,
                scheduled_s=request.scheduled_s,
            )
        return request.client_idx, output

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._requests)

    # --- planning a step ---

    def schedule(self, now_s: float) -> StepPlan | None:
        """Plans the next step, or returns None when nothing can run before results come in."""
        running = list(self._running.values())
        draft = _Draft(self._token_budget(running), running)
        self._schedule_running(draft)
        if not draft.preempted:
            self._admit_waiting(draft, now_s)
        scheduled = self._collect_rows(draft)
        if not scheduled:
            in_flight = self._next_step_id - self._next_result_id
            assert in_flight or not self._requests, (
                f"no step can be planned; running {draft.order}, waiting {self._waiting[:8]}, "
                f"{self.kv.num_used_blocks} of {self.kv.num_kv_blocks - 1} KV blocks used"
            )
            return None
        for request in draft.grown:
            self.kv.cache_blocks(request)
        masked = self._masked_rows(draft) if self._grammar_rows else ()
        message = self._make_message(draft, awaits_mask=bool(masked))
        extras = self._extras_rows.copy() if self._extras_rows else self._extras_rows
        return StepPlan(message, scheduled, masked, extras)

    def force_tokens(self, request: Request, token_ids: Sequence[int]) -> None:
        """Plans tokens that must follow the one that `request` samples in the step just planned.

        They are computed like known ones, are cut where the request must end, and become known with
        that step's result. None of them may be a stop token.
        """
        assert request.status is _RUNNING and request.num_in_flight == 1, request
        room = request.max_total_tokens - request.num_planned_tokens
        if room and token_ids:
            request.forced_tokens = list(token_ids[:room])
            request.num_planned_tokens += len(request.forced_tokens)
            request.check_len = 0
            self._unsent_forced[request] = request.forced_tokens

    def _token_budget(self, running: list[Request]) -> int:
        """Tokens of the next step. While a request decodes it is what the others compute that its
        next token waits for: little, but no less than there are requests that may decode."""
        for request in running:
            if request.num_computed_tokens >= request.num_prompt_tokens:
                limit = max(self.max_num_mixed_tokens, 2 * len(running))
                return min(limit, self.max_num_batched_tokens)
        return self.max_num_batched_tokens

    def _schedule_running(self, draft: _Draft) -> None:
        """Gives every running request what it lacks. One token and no new block is the common
        case, and this loop is the engine core's hottest: it does that case in place."""
        budget = draft.budget
        for idx, request in enumerate(draft.order):
            planned = request.num_planned_tokens
            if (
                planned - request.num_computed_tokens == 1
                and planned < request.decode_until
                and budget
            ):
                request.num_computed_tokens = planned
                request.num_planned_tokens = planned + 1
                budget -= 1
            elif request.status is _RUNNING:
                draft.budget = budget
                self._schedule_running_request(request, idx, draft)
                budget = draft.budget
        draft.budget = budget

    def _schedule_running_request(self, request: Request, idx: int, draft: _Draft) -> None:
        num_tokens = 0
        if request.num_planned_tokens < request.max_total_tokens:
            gap = request.num_planned_tokens - request.num_computed_tokens
            num_tokens = min(gap, draft.budget)
        if num_tokens:
            new_blocks = self._allocate_or_preempt(request, num_tokens, idx, draft)
            if new_blocks is None:
                return
            if new_blocks:
                draft.new_blocks.append((request, new_blocks))
        self._advance(request, num_tokens, draft)

    def _allocate_or_preempt(
        self, request: Request, num_tokens: int, idx: int, draft: _Draft
    ) -> list[int] | None:
        """Blocks for `request`, the idx-th of draft.order, if need be others' blocks; None when it
        was itself the one to give way."""
        while True:
            new_blocks = self.kv.allocate_slots(request, num_tokens)
            if new_blocks is not None:
                return new_blocks
            victim = max(self._running.values(), key=_order_of)
            if draft.order.index(victim) < idx:
                self._retract(victim, draft)
            self._preempt(victim)
            draft.preempted = True
            if victim is request:
                return None

    def _advance(self, request: Request, num_tokens: int, draft: _Draft) -> None:
        """Puts a request that has room for them down for its next `num_tokens` tokens."""
        request.num_computed_tokens += num_tokens
        samples = num_tokens > 0 and request.num_computed_tokens == request.num_planned_tokens
        request.num_planned_tokens += samples
        num_slots = len(request.block_ids) * self.kv.block_size
        request.decode_until = min(request.max_total_tokens, num_slots + 1)
        draft.budget -= num_tokens
        if num_tokens:
            draft.grown.append(request)
        if num_tokens != 1 or not samples:
            draft.exceptions[request.row] = ScheduledRow(request, num_tokens, samples)

    def _retract(self, request: Request, draft: _Draft) -> None:
        """Takes back what this step had planned for a running request."""
        plain = self._rows[request.row]
        assert plain is not None, request
        _, num_tokens, samples = draft.exceptions.pop(request.row, plain)
        request.num_computed_tokens -= num_tokens
        request.num_planned_tokens -= samples
        draft.budget += num_tokens

    def _preempt(self, request: Request) -> None:
        if request.prompt_logprobs and not request.num_in_flight:
            request.prompt_logprobs.clear()
        if not request.num_in_flight:
            request.prompt_logprobs_since = self._next_step_id
        self._release(request)
        request.status = RequestStatus.PREEMPTED
        insort(self._waiting, request, key=_order_of)
        self._num_preemptions += 1

    def _admit_waiting(self, draft: _Draft, now_s: float) -> None:
        """Admits from the head of the queue, which nobody overtakes.

        The first chunk gets blocks now, but all known tokens must have room: a request that could
        not even finish its prompt is not let in to be preempted. One with tokens in flight (it was
        preempted) waits until they are known, since its row must start with all its tokens.
        """
        while self._waiting and draft.budget and self._free_rows:
            request = self._waiting[0]
            if request.num_in_flight:
                return
            computed_blocks = self.kv.get_computed_blocks(request)
            num_cached = len(computed_blocks) * self.kv.block_size
            num_tokens = min(request.num_tokens - num_cached, draft.budget)
            new_blocks = self.kv.allocate_slots(
                request,
                num_tokens,
                computed_blocks=computed_blocks,
                num_tokens_to_fit=request.num_tokens,
            )
            if new_blocks is None:
                return
            self._waiting.pop(0)
            self._admit(request, num_tokens, draft, now_s)

    def _admit(self, request: Request, num_tokens: int, draft: _Draft, now_s: float) -> None:
        request.row = heapq.heappop(self._free_rows)
        request.status = _RUNNING
        self._running[request.request_id] = request
        self._rows[request.row] = ScheduledRow(request, 1, True)
        if request.grammar is not None:
            self._grammar_rows[request.row] = request
        if request.has_extras:
            self._extras_rows[request.row] = request
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = request.num_computed_tokens
            request.scheduled_s = now_s
            self.kv.count_prefix_query(request)
        draft.admitted.append(
            AdmittedRow(
                row=request.row,
                token_ids=request.token_ids.copy(),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=request.num_computed_tokens,
                block_ids=request.block_ids.copy(),
                sampling=request.sampling,
            )
        )
        self._advance(request, num_tokens, draft)

    def _collect_rows(self, draft: _Draft) -> list[ScheduledRow]:
        """The rows of the step that compute something, by ascending row."""
        exceptions = draft.exceptions
        if not exceptions:
            return [row for row in self._rows if row is not None]
        rows = [exceptions.get(idx, row) for idx, row in enumerate(self._rows)]
        return [row for row in rows if row is not None and row.num_tokens]

    def _masked_rows(self, draft: _Draft) -> list[tuple[int, Request]]:
        """The rows that sample in this step and have a grammar."""
        rows = sorted(self._grammar_rows.items())
        exceptions = draft.exceptions
        return [item for item in rows if item[0] not in exceptions or exceptions[item[0]].samples]

    def _make_message(self, draft: _Draft, awaits_mask: bool) -> SchedulerOutput:
        new_blocks: list[int] = []
        for request, block_ids in draft.new_blocks:
            if request.status is _RUNNING:  # not preempted since by a later request of this step
                for block_id in block_ids:
                    new_blocks += (request.row, block_id)
        num_tokens: list[int] = []
        for row_idx in sorted(draft.exceptions):
            count = draft.exceptions[row_idx].num_tokens
            if count != 1:
                num_tokens += (row_idx, count)
        message = SchedulerOutput(
            step_id=self._next_step_id,
            released_rows=self._released_rows,
            admitted=draft.admitted,
            new_blocks=new_blocks,
            num_tokens=num_tokens,
            forced_tokens=[(request.row, ids) for request, ids in self._unsent_forced.items()],
            awaits_mask=awaits_mask,
        )
        self._released_rows = []
        if self._unsent_forced:
            self._unsent_forced = {}
        self._next_step_id += 1
        return message

    # --- taking in a step's result ---

    def update_from_output(
        self,
        plan: StepPlan,
        sampled_token_ids: Sequence[int],
        now_s: float,
        extras: Sequence[RowExtras] = (),
    ) -> list[tuple[int, EngineCoreOutput]]:
        """Takes in the tokens of the oldest plan in flight, one for each row that samples.

        Returns (client_idx, output) for every request that made progress.
        """
        step_id = plan.message.step_id
        assert step_id == self._next_result_id, (step_id, self._next_result_id)
        self._next_result_id += 1
        requests = [request for request, _, samples in plan.scheduled if samples]
        assert len(requests) == len(sampled_token_ids), (plan, len(sampled_token_ids))
        if extras:
            _keep_prompt_logprobs(plan, extras)
        outputs: list[tuple[int, EngineCoreOutput]] = []
        for request, token_id in zip(requests, sampled_token_ids, strict=True):
            if request.status is _FINISHED:
                continue
            token_ids = request.token_ids
            token_ids.append(token_id)
            if len(token_ids) >= request.check_len or token_id in request.stop_token_ids:
                output = self._look_closer(request, token_id, now_s)
            else:
                output = EngineCoreOutput(request.request_id, [token_id])
            outputs.append((request.client_idx, output))
        return _add_extras(plan, extras, outputs) if extras else outputs

    def _look_closer(self, request: Request, token_id: int, now_s: float) -> EngineCoreOutput:
        """The output for a token that may be the request's first or last, or bring others."""
        new_token_ids = [token_id, *request.forced_tokens]
        request.token_ids += request.forced_tokens
        request.forced_tokens = []
        reason = self._finish_reason(request, token_id)
        stop_reason = token_id if reason is FinishReason.STOP else None
        if reason is not None:
            self._finish(request, reason)
        request.check_len = request.max_total_tokens
        if request.num_output_tokens > len(new_token_ids):
            return EngineCoreOutput(request.request_id, new_token_ids, reason, stop_reason)
        request.first_token_s = now_s
        prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
        return EngineCoreOutput(
            request.request_id,
            new_token_ids,
            reason,
            stop_reason,
            request.num_cached_tokens,
            request.queued_s,
            request.scheduled_s,
            prompt_logprobs=prompt_logprobs,
        )

    def _finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        num_output_tokens = request.num_output_tokens
        if token_id in request.stop_token_ids and num_output_tokens > request.sampling.min_tokens:
            return FinishReason.STOP
        if request.num_tokens >= request.max_total_tokens:
            return FinishReason.LENGTH
        return None

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.status is _RUNNING:
            self._release(request)
        else:
            del self._waiting[bisect_left(self._waiting, request.order, key=_order_of)]
        request.status = _FINISHED
        request.finish_reason = reason
        del self._requests[request.request_id]

    def _release(self, request: Request) -> None:
        """Takes row and blocks of a running request back."""
        del self._running[request.request_id]
        self.kv.free(request)
        self._rows[request.row] = None
        self._released_rows.append(request.row)
        heapq.heappush(self._free_rows, request.row)
        self._grammar_rows.pop(request.row, None)
        self._extras_rows.pop(request.row, None)
        self._unsent_forced.pop(request, None)
        request.row = NO_ROW
        request.decode_until = 0

    # --- looking in from outside ---

    def stats(self) -> SchedulerStats:
        """A snapshot; what does not follow from the requests here is for the caller to add."""
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_kv_blocks=self.kv.num_kv_blocks,
            num_used_kv_blocks=self.kv.num_used_blocks,
            num_preemptions=self._num_preemptions,
            prefix_cache_queries=self.kv.prefix_cache_queries,
            prefix_cache_hits=self.kv.prefix_cache_hits,
            num_steps=self._next_step_id,
        )

    def reset_prefix_cache(self) -> bool:
        """Forgets every known prefix; False, changing nothing, while requests hold blocks."""
        return self.kv.reset_prefix_cache()

    def check_invariants(self) -> None:
        """Asserts that queues, rows and blocks agree with each other; slow, for tests."""
        running = list(self._running.values())
        rows = {row.request.row: row.request for row in self._rows if row is not None}
        assert rows == {request.row: request for request in running}, (rows, running)
        assert len(rows) == len(running)
        assert sorted([*self._free_rows, *rows]) == list(range(len(self._rows)))
        assert all(self._rows[idx] == (request, 1, True) for idx, request in rows.items())
        assert self._waiting == sorted(self._waiting, key=_order_of)
        by_id = {request.request_id: request for request in running + self._waiting}
        assert by_id == self._requests and len(by_id) == len(running) + len(self._waiting)
        for request in self._waiting:
            assert request.row == NO_ROW and not request.block_ids, request
            assert request.num_computed_tokens == request.decode_until == 0, request
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), request
        for request in running:
            assert request.status is _RUNNING, request
            num_sampled = request.num_in_flight - len(request.forced_tokens)
            assert 0 <= num_sampled <= self._next_step_id - self._next_result_id, request
            assert num_sampled or not request.forced_tokens, request
            assert request.num_computed_tokens < request.num_planned_tokens, request
            assert request.num_planned_tokens <= request.max_total_tokens, request
        assert self._grammar_rows == {
            idx: request for idx, request in rows.items() if request.grammar is not None
        }
        assert self._extras_rows == {
            idx: request for idx, request in rows.items() if request.has_extras
        }
        for request, token_ids in self._unsent_forced.items():
            assert request.status is _RUNNING and token_ids, request
        for request in self._requests.values():
            is_past_first = request.num_output_tokens > 0
            num_first = request.num_prompt_tokens + 1
            check_len = request.max_total_tokens if is_past_first else num_first
            assert request.check_len == (0 if request.forced_tokens else check_len), request
        self.kv.check_invariants(running)


def _keep_prompt_logprobs(plan: StepPlan, extras: Sequence[RowExtras]) -> None:
    """Adds the pieces of prompts to those that the requests' first outputs will carry."""
    for row in extras:
        request = plan.extras[row.row]
        if (
            row.prompt_logprobs is not None
            and request.prompt_logprobs is not None
            and plan.message.step_id >= request.prompt_logprobs_since
        ):
            request.prompt_logprobs.append(row.prompt_logprobs)


def _add_extras(
    plan: StepPlan, extras: Sequence[RowExtras], outputs: list[tuple[int, EngineCoreOutput]]
) -> list[tuple[int, EngineCoreOutput]]:
    """The outputs, with what the workers sent beside their tokens."""
    by_id = {plan.extras[row.row].request_id: row for row in extras}
    return [
        (
            client_idx,
            replace(output, logprobs=row.logprobs, embedding=row.embedding)
            if (row := by_id.get(output.request_id)) is not None
            else output,
        )
        for client_idx, output in outputs
    ]
