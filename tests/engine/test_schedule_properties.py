"""Random loads through the scheduler, the wire format and a fake worker, against the simulation."""

import itertools
from collections import deque
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.kv_cache_manager import KVCacheManager
from jaxserve.engine.request import Request
from jaxserve.engine.scheduler import Scheduler, StepPlan
from jaxserve.messages import (
    AdmittedRow,
    EngineCoreRequest,
    FinishReason,
    SamplingParams,
    SchedulerOutput,
    decode_worker_input,
    encode,
)
from tests.engine.scheduler_simulation import SimRequest, Simulation, generate

VOCAB_SIZE = 6
NUM_SEEDS = 2
LAST_ARRIVAL = 8
KEYS = [(None, None), ("salt", None), (None, "lora")]


def sample(seed: int, position: int) -> int:
    """The token at `position`: like the sampler's, a function of the seed and the position."""
    return (seed * 31 + position * position * 7 + position // 3) % VOCAB_SIZE


@dataclass(frozen=True)
class Arrival:
    """A request of the load and when it comes and goes (steps); keys: an index into KEYS.

    forces: None without a grammar, else what the number of forced tokens depends on.
    """

    prompt: list[int]
    max_tokens: int
    stop_ids: tuple[int, ...]
    min_tokens: int
    seed: int
    keys: int
    priority: int
    step: int
    arrival_s: float
    abort_after: int | None
    abort_before_update: bool
    forces: int | None


@dataclass(frozen=True)
class Load:
    """A scheduler's settings and what it gets to do. depth: steps in flight besides the next."""

    arrivals: list[Arrival]
    block_size: int
    spare_blocks: int
    budget: int
    rows: int
    max_model_len: int
    policy: str
    caching: bool
    depth: int


STEMS = [[0, 1, 2, 3, 4, 5] * 2, [5, 4, 4, 4, 0, 1] * 2]
prompts = st.builds(
    lambda stem, length, tail: STEMS[stem][:length] + tail,
    st.integers(0, 1),
    st.integers(0, 12),
    st.lists(st.integers(0, 1), min_size=1, max_size=3),
)
arrivals = st.builds(
    Arrival,
    prompt=prompts,
    max_tokens=st.integers(1, 14),
    stop_ids=st.sampled_from([(), (), (), (0,), (4,), (1, 5)]),
    min_tokens=st.integers(0, 4),
    seed=st.integers(0, NUM_SEEDS - 1),
    keys=st.sampled_from([0, 0, 0, 1, 2]),
    priority=st.integers(0, 2),
    step=st.integers(0, LAST_ARRIVAL),
    arrival_s=st.floats(0, 2),
    abort_after=st.sampled_from([None] * 40 + list(range(12))),
    abort_before_update=st.booleans(),
    forces=st.sampled_from([None, None, 0, 1, 2]),
)
loads = st.builds(
    Load,
    arrivals=st.lists(arrivals, min_size=2, max_size=10),
    block_size=st.integers(1, 4),
    spare_blocks=st.integers(0, 5),
    budget=st.integers(1, 16),
    rows=st.integers(1, 5),
    max_model_len=st.integers(16, 28),
    policy=st.sampled_from(["fcfs", "priority"]),
    caching=st.booleans(),
    depth=st.integers(0, 2),
)


def pairs(flat: list[int]) -> list[tuple[int, int]]:
    """[a, b, c, d] -> [(a, b), (c, d)]."""
    return list(zip(flat[::2], flat[1::2], strict=True))


@dataclass
class WorkerRow:
    """What a worker knows of a row."""

    tokens: list[int]
    computed: int
    table: list[int]
    seed: int
    keys: int


@dataclass
class FakeWorker:
    """Applies step messages to rows and to KV slots whose value is all that the KV depends on."""

    block_size: int
    rows: dict[int, WorkerRow] = field(default_factory=dict)
    slots: dict[tuple[int, int], object] = field(default_factory=dict)

    def execute(self, message: SchedulerOutput) -> list[int]:
        """Runs a step; returns the sampled tokens by ascending row."""
        for row in message.released_rows:
            del self.rows[row]
        for admitted in message.admitted:
            self.admit(admitted)
        for row, tokens in message.forced_tokens:
            assert tokens and row not in [admitted.row for admitted in message.admitted]
            self.rows[row].tokens += tokens
        for row, block in pairs(message.new_blocks):
            assert row not in [admitted.row for admitted in message.admitted]
            self.rows[row].table.append(block)
            self.poison(block)
        counts = dict.fromkeys(self.rows, 1) | dict(pairs(message.num_tokens))
        assert counts.keys() == self.rows.keys()
        assert 1 not in message.num_tokens[1::2], "1 is the default"
        written: dict[int, int] = {}
        for row, count in counts.items():
            self.write(row, count, written)
        return [self.step_row(row, counts[row]) for row in sorted(self.rows) if self.is_full(row)]

    def admit(self, admitted: AdmittedRow) -> None:
        """A row starts; its blocks that are not cached hold garbage."""
        assert admitted.row not in self.rows
        keys, seed = divmod(admitted.sampling.seed, NUM_SEEDS)
        table = list(admitted.block_ids)
        row = WorkerRow(admitted.token_ids, admitted.num_computed_tokens, table, seed, keys)
        assert row.computed < len(row.tokens) and row.computed % self.block_size == 0
        self.rows[admitted.row] = row
        for block in table[row.computed // self.block_size :]:
            self.poison(block)

    def poison(self, block: int) -> None:
        """A block changes hands: nobody else may hold it, its slots must be written before read."""
        assert block != 0
        assert sum(row.table.count(block) for row in self.rows.values()) == 1, f"{block} is shared"
        for offset in range(self.block_size):
            self.slots[block, offset] = None

    def write(self, row_idx: int, count: int, written: dict[int, int]) -> None:
        """Computes the row's next tokens into their slots."""
        row = self.rows[row_idx]
        assert 0 <= count <= len(row.tokens) - row.computed
        for position in range(row.computed, row.computed + count):
            block = row.table[position // self.block_size]
            assert written.setdefault(block, row_idx) == row_idx, f"two rows write block {block}"
            holders = [idx for idx, other in self.rows.items() if block in other.table]
            assert holders == [row_idx], f"row {row_idx} writes block {block} of {holders}"
            self.slots[block, position % self.block_size] = self.expected(row, position)
        row.computed += count

    def expected(self, row: WorkerRow, position: int) -> object:
        """What the KV at a position depends on: all tokens up to it, LoRA; the salt counts too."""
        return (row.keys, tuple(row.tokens[: position + 1]))

    def is_full(self, row_idx: int) -> bool:
        """Attends to everything computed; whether the row samples."""
        row = self.rows[row_idx]
        for position in range(row.computed):
            slot = row.table[position // self.block_size], position % self.block_size
            assert self.slots[slot] == self.expected(row, position), (row_idx, position)
        return row.computed == len(row.tokens)

    def step_row(self, row_idx: int, count: int) -> int:
        """Samples the row's next token, known to later steps at once."""
        assert count > 0, f"row {row_idx} has nothing to sample from"
        row = self.rows[row_idx]
        row.tokens.append(sample(row.seed, len(row.tokens)))
        return row.tokens[-1]


class Driver:
    """Runs a load step by step and checks each."""

    def __init__(self, load: Load):
        self.load = load
        size = load.block_size
        totals = [self.max_total(arrival) for arrival in load.arrivals]
        blocks = 1 + max(len(range(0, total - 1, size)) for total in totals) + load.spare_blocks
        self.kv = KVCacheManager(
            num_kv_blocks=blocks, block_size=size, enable_prefix_caching=load.caching
        )
        self.scheduler = Scheduler(
            max_num_seqs=load.rows,
            max_num_batched_tokens=load.budget,
            max_model_len=load.max_model_len,
            kv=self.kv,
            policy=load.policy,  # pyright: ignore[reportArgumentType]
        )
        self.simulation = Simulation(
            rows=load.rows,
            budget=load.budget,
            blocks=blocks,
            block_size=size,
            caching=load.caching,
            policy=load.policy,
        )
        self.worker = FakeWorker(size)
        self.in_flight: deque[tuple[StepPlan, list[int]]] = deque()
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}

    @property
    def depth(self) -> int:
        """Steps in flight besides the next. A mask needs the results of all steps before."""
        has_grammar = any(arrival.forces is not None for arrival in self.load.arrivals)
        return min(self.load.depth, 1) if has_grammar else self.load.depth

    def max_total(self, arrival: Arrival) -> int:
        """Longest prompt plus output."""
        return min(len(arrival.prompt) + arrival.max_tokens, self.load.max_model_len)

    def run(self) -> None:
        """Until every request has ended, within a bound that a starving request would miss."""
        work = sum(self.max_total(arrival) for arrival in self.load.arrivals)
        last_step = 25 + (self.load.depth + 2) * work
        for step in itertools.count():
            assert step < last_step, f"starved: {self.simulation.waiting()}"
            self.arrive(step)
            self.abort(step, before_update=False)
            planned = self.plan(step)
            self.abort(step, before_update=True)
            if self.in_flight and (len(self.in_flight) > max(self.depth, 1) or not planned):
                self.collect()
            if planned:
                self.force(self.in_flight[-1][0])
            if len(self.in_flight) > self.depth:
                self.collect()
            if step > LAST_ARRIVAL and not self.scheduler.has_unfinished:
                break
        while self.in_flight:
            self.collect()
        self.check_end()

    def arrive(self, step: int) -> None:
        """Adds the requests of this step."""
        for idx, arrival in enumerate(self.load.arrivals):
            if arrival.step != step:
                continue
            salt, lora = KEYS[arrival.keys]
            message = EngineCoreRequest(
                request_id=f"r{idx}",
                prompt_token_ids=arrival.prompt,
                sampling=SamplingParams(
                    max_tokens=arrival.max_tokens,
                    min_tokens=arrival.min_tokens,
                    stop_token_ids=arrival.stop_ids,
                    seed=arrival.keys * NUM_SEEDS + arrival.seed,
                ),
                arrival_time_s=arrival.arrival_s,
                priority=arrival.priority,
                cache_salt=salt,
                lora_name=lora,
                client_idx=idx % 2,
                grammar=None if arrival.forces is None else "any",
            )
            request = Request.from_message(
                message,
                now_s=float(step),
                block_size=self.load.block_size,
                hash_blocks=self.load.caching,
            )
            self.requests[request.request_id] = request
            self.outputs[request.request_id] = []
            self.scheduler.add_request(request)
            twin = SimRequest(
                name=request.request_id,
                tokens=list(arrival.prompt),
                max_total=self.max_total(arrival),
                stop_ids=arrival.stop_ids,
                min_tokens=arrival.min_tokens,
                keys=arrival.keys,
            )
            self.simulation.add(twin, arrival.priority, arrival.arrival_s)

    def abort(self, step: int, *, before_update: bool) -> None:
        """Aborts the requests whose time has come."""
        for idx, arrival in enumerate(self.load.arrivals):
            name = f"r{idx}"
            if arrival.abort_after is None or arrival.abort_before_update != before_update:
                continue
            if arrival.step + arrival.abort_after == step and name in self.requests:
                live = name not in self.ended
                ended = self.scheduler.finish_requests([name, "unknown"], FinishReason.ABORT)
                assert ended == [self.requests[name]] * live
                self.simulation.abort(name)
                if live:
                    self.ended[name] = "abort"
                self.scheduler.check_invariants()

    def plan(self, step: int) -> bool:
        """Plans a step both ways and sends it to the worker; whether there was one."""
        num_preemptions = self.scheduler.stats().num_preemptions
        plan = self.scheduler.schedule(float(step))
        parts = self.simulation.schedule()
        num_preempted = self.scheduler.stats().num_preemptions - num_preemptions
        assert num_preempted == len(self.simulation.preempted)
        planned = plan.scheduled if plan else []
        assert parts == {r.row: (r.request_id, n, samples) for r, n, samples in planned}
        assert [row.request.row for row in planned] == sorted(parts)
        self.check_state()
        if plan:
            message = decode_worker_input(encode(plan.message))
            self.in_flight.append((plan, self.worker.execute(message)))
            self.check_worker()
        return plan is not None

    def force(self, plan: StepPlan) -> None:
        """What a grammar says of the step just planned, as the core asks it: between its plan and
        its mask all earlier results came, and perhaps aborts."""
        masked = [
            (row.request.row, row.request.request_id)
            for row in plan.scheduled
            if row.samples and row.request.grammar is not None and row.request.row >= 0
        ]
        live = [(row, r.request_id) for row, r in plan.masked if r.request_id not in self.ended]
        assert live == masked and plan.message.awaits_mask == bool(plan.masked)
        for _, name in live:
            arrival = self.load.arrivals[int(name[1:])]
            start = self.requests[name].num_tokens
            assert arrival.forces is not None
            num_forced = (start * 5 + arrival.forces) % 4
            forced = [sample(arrival.seed, start + i) for i in range(1 + num_forced)]
            stops = [i for i, token in enumerate(forced) if token in arrival.stop_ids]
            forced = forced[: stops[0]] if stops else forced
            self.scheduler.force_tokens(self.requests[name], forced[1:])
            self.simulation.force(name, forced[1:])
        self.check_state()

    def check_state(self) -> None:
        """Scheduler and simulation agree on every table."""
        self.scheduler.check_invariants()
        for twin in self.simulation.requests:
            assert self.requests[twin.name].block_ids == twin.blocks
        stats = self.scheduler.stats()
        assert stats.num_running == len(self.simulation.running)
        assert stats.num_waiting == len(self.simulation.waiting())
        assert stats.num_used_kv_blocks == stats.num_kv_blocks - 1 - len(self.simulation.free)
        assert stats.prefix_cache_queries == self.simulation.queries
        assert stats.prefix_cache_hits == self.simulation.hits

    def check_worker(self) -> None:
        """The deltas have brought the worker to the scheduler's state."""
        running = {r.row: r for r in self.requests.values() if r.row >= 0}
        assert running.keys() == self.worker.rows.keys()
        for row_idx, row in self.worker.rows.items():
            request = running[row_idx]
            assert row.table == request.block_ids
            assert row.computed == request.num_computed_tokens
            assert len(row.tokens) == request.num_planned_tokens
            assert row.tokens[: request.num_tokens] == request.token_ids

    def collect(self) -> None:
        """Takes in the oldest step in flight."""
        plan, tokens = self.in_flight.popleft()
        sampling = [row.request.request_id for row in plan.scheduled if row.samples]
        expected = self.simulation.update(list(zip(sampling, tokens, strict=True)))
        outputs = self.scheduler.update_from_output(plan, tokens, 0.0)
        assert len(outputs) == len(expected)
        for (client_idx, output), (name, new_tokens, reason) in zip(outputs, expected, strict=True):
            assert client_idx == self.requests[name].client_idx
            assert (output.request_id, output.new_token_ids) == (name, new_tokens)
            assert output.finish_reason == (FinishReason[reason.upper()] if reason else None)
            assert output.stop_reason == (new_tokens[-1] if reason == "stop" else None)
            twin = next(r for r in self.simulation.requests if r.name == name)
            is_first = len(twin.tokens) == twin.prompt_len + len(new_tokens)
            assert output.num_cached_tokens == (twin.first_cached if is_first else 0)
            assert name not in self.ended
            self.outputs[name] += new_tokens
            if reason:
                self.ended[name] = reason
        self.check_state()

    def check_end(self) -> None:
        """Nothing is lost, and everyone got the output that only seed and positions decide."""
        assert self.ended.keys() == self.requests.keys()
        assert len(self.requests) == len(self.load.arrivals)
        assert self.kv.num_used_blocks == 0
        assert self.kv.reset_prefix_cache()
        self.scheduler.check_invariants()
        for idx, arrival in enumerate(self.load.arrivals):
            output = self.outputs[f"r{idx}"]
            expected = generate(
                len(arrival.prompt),
                self.max_total(arrival),
                arrival.stop_ids,
                arrival.min_tokens,
                lambda position, seed=arrival.seed: sample(seed, position),
            )
            if self.ended[f"r{idx}"] == "abort":
                assert output == expected[: len(output)]
            else:
                assert output == expected


@settings(max_examples=500, deadline=None)
@given(loads)
def test_random_loads(load: Load):
    Driver(load).run()
