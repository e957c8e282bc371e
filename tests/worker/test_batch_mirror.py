"""The batch mirror against a row-by-row simulation over random plans, and what it refuses."""

import dataclasses
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from jaxserve.messages import AdmittedRow, SamplingParams, SchedulerOutput
from jaxserve.worker.batch_mirror import BatchMirror, StepInput
from jaxserve.worker.batch_state import NUM_FIELDS, Field, num_columns
from jaxserve.worker.buckets import Bucket

NUM_ROWS, BLOCKS_PER_ROW = 4, 5
NUM_COLUMNS = num_columns(BLOCKS_PER_ROW)
GARBAGE = -77
STOPS = slice(Field.FIRST_STOP, NUM_FIELDS)


@dataclasses.dataclass
class SimRow:
    """One live row, in the open: what was said when it was admitted, and how far it is."""

    known: list[int]
    computed: int
    num_tokens: int
    num_blocks: int


@dataclasses.dataclass
class SimStep:
    """What one step must look like."""

    rows: list[int] = dataclasses.field(default_factory=list)
    num_computed: list[int] = dataclasses.field(default_factory=list)
    q_lens: list[int] = dataclasses.field(default_factory=list)
    samples: list[bool] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)


class Simulation:
    """Draws possible plans, and says one row at a time what becomes of them."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self.live: dict[int, SimRow] = {}
        self.table = np.full((NUM_ROWS, NUM_COLUMNS), GARBAGE, np.int32)
        self.bars_stops = np.zeros(NUM_ROWS, bool)
        self.happened: Counter[str] = Counter()

    def next_plan(self, step_id: int) -> tuple[SchedulerOutput, SimStep]:
        """Changes this simulation; the plan says the same in the wire's terms."""
        rng = self._rng
        released = [row for row in self.live if rng.random() < 0.2]
        for row in released:
            del self.live[row]
        old = list(self.live)
        free = [row for row in range(NUM_ROWS) if row not in self.live and rng.random() < 0.5]
        rng.shuffle(free)
        admitted = [self._admit(row) for row in free]
        self.happened["re-admitted at once"] += len(set(free) & set(released))
        forced = [self._force(row) for row in old if rng.random() < 0.15]
        new_blocks = self._add_blocks(old)
        num_tokens, step = self._compute()
        plan = SchedulerOutput(step_id, released, admitted, new_blocks, num_tokens, forced)
        return plan, step

    def _force(self, row: int) -> tuple[int, list[int]]:
        sim = self.live[row]
        token_ids = [self._rng.randrange(1000) for _ in range(self._rng.randint(1, 4))]
        sim.known += [-1] * (sim.num_tokens - len(sim.known)) + token_ids
        sim.num_tokens += len(token_ids)
        self.happened["forced"] += 1
        return row, token_ids

    def _admit(self, row: int) -> AdmittedRow:
        rng = self._rng
        known = [rng.randrange(1000) for _ in range(rng.randint(1, 12))]
        num_prompt_tokens = rng.randint(1, len(known))
        computed = rng.choice([0, 0, rng.randrange(len(known))])
        blocks = [rng.randint(1, 99) for _ in range(rng.randint(0, BLOCKS_PER_ROW))]
        sampling = SamplingParams(
            max_tokens=9,
            temperature=rng.choice([0.0, 0.5]),
            top_k=rng.choice([0, 7]),
            top_p=rng.choice([1.0, 0.25]),
            min_p=rng.choice([0.0, 0.125]),
            seed=rng.choice([0, 5, 2**64 - 2, 2**33 + 1]),
            min_tokens=rng.choice([0, 3]),
            presence_penalty=rng.choice([0.0, 0.5]),
            stop_token_ids=tuple(range(rng.randrange(5))),
        )
        self.live[row] = SimRow(known, computed, len(known), len(blocks))

        line = self.table[row]
        line[Field.LAST_TOKEN] = 0
        line[Field.NUM_COMPUTED] = computed
        line[Field.TOP_K] = sampling.top_k
        for field, value in (
            (Field.TEMPERATURE, sampling.temperature),
            (Field.TOP_P, sampling.top_p),
            (Field.MIN_P, sampling.min_p),
        ):
            line[field] = int.from_bytes(np.float32(value).tobytes(), "little")
        low, high = np.frombuffer(sampling.seed.to_bytes(8, "little"), np.int32)
        line[Field.SEED_LOW], line[Field.SEED_HIGH] = low, high
        self.bars_stops[row] = sampling.min_tokens > 0
        line[Field.HAS_OPTIONS] = bool(sampling.presence_penalty)
        line[Field.MIN_LEN] = num_prompt_tokens + 3 if sampling.min_tokens else 0
        line[STOPS] = -1
        for i, stop in enumerate(sampling.stop_token_ids):
            line[Field.FIRST_STOP + i] = stop
        for i, block in enumerate(blocks):
            line[NUM_FIELDS + i] = block
        return AdmittedRow(row, known, num_prompt_tokens, computed, blocks, sampling)

    def _add_blocks(self, rows: list[int]) -> list[int]:
        flat = []
        for _ in range(self._rng.randint(0, 4)):
            row = self._rng.choice(rows) if rows else None
            if row is None or self.live[row].num_blocks == BLOCKS_PER_ROW:
                continue
            block = self._rng.randint(1, 99)
            self.table[row, NUM_FIELDS + self.live[row].num_blocks] = block
            self.live[row].num_blocks += 1
            flat += [row, block]
        self.happened["new blocks"] += len(flat) // 2
        return flat

    def _compute(self) -> tuple[list[int], SimStep]:
        flat, step = [], SimStep()
        for row in sorted(self.live):
            sim = self.live[row]
            remaining = sim.num_tokens - sim.computed
            count = self._rng.choice([0, 1, remaining, self._rng.randint(0, remaining)])
            if count != 1:
                flat += [row, count]
            if count == 0:
                self.happened["sits out"] += 1
                continue
            positions = range(sim.computed, sim.computed + count)
            step.rows.append(row)
            step.num_computed.append(sim.computed)
            step.q_lens.append(count)
            step.token_ids += [sim.known[p] if p < len(sim.known) else -1 for p in positions]
            sim.computed += count
            samples = sim.computed == sim.num_tokens
            step.samples.append(samples)
            sim.num_tokens += samples
            self.happened["samples" if samples else "part of a prompt"] += 1
        return flat, step


def apply_writes(table: np.ndarray, step: StepInput) -> None:
    """As the device does: no place is written twice, none outside the table."""
    assert len(set(step.addresses.tolist())) == len(step.addresses) == len(step.values)
    for address, value in zip(step.addresses, step.values, strict=True):
        assert 0 <= address < table.size
        table[address // NUM_COLUMNS, address % NUM_COLUMNS] = value


@settings(max_examples=80, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 15))
def test_random_plans_against_a_simulation(rng, num_steps):
    simulation = Simulation(rng)
    mirror = BatchMirror(NUM_ROWS, BLOCKS_PER_ROW)
    table = simulation.table.copy()
    for step_id in range(num_steps):
        plan, expected = simulation.next_plan(step_id)
        step = mirror.apply(plan)
        for name in ("rows", "num_computed", "q_lens", "samples", "token_ids"):
            assert getattr(step, name).tolist() == getattr(expected, name), (name, plan)
        apply_writes(table, step)
        # Stop ids are not looked at where the row has no minimum length.
        is_free = np.zeros(table.shape, bool)
        is_free[~simulation.bars_stops, STOPS] = True
        np.testing.assert_array_equal(
            np.where(is_free, 0, table), np.where(is_free, 0, simulation.table), str(plan)
        )
    for name in simulation.happened:
        event(name)


def test_the_simulation_reaches_every_kind_of_plan():
    simulation = Simulation(random.Random(0))
    for step_id in range(200):
        simulation.next_plan(step_id)
    assert all(
        simulation.happened[name] > 20
        for name in (
            "re-admitted at once",
            "new blocks",
            "forced",
            "sits out",
            "samples",
            "part of a prompt",
        )
    ), simulation.happened


# --- fill ----------------------------------------------------------------------------------------


def a_step() -> StepInput:
    return StepInput(
        rows=np.array([1, 3], np.int32),
        q_lens=np.array([2, 1], np.int32),
        samples=np.array([False, True]),
        token_ids=np.array([11, 12, -1], np.int32),
        addresses=np.array([5, 4], np.int32),
        values=np.array([50, 40], np.int32),
        num_computed=np.array([0, 7], np.int32),
    )


def test_fill_lays_the_step_out_and_pads_it():
    buffer = np.full(5 + 4 + 5 + 4 + 1 + 3 + 3, GARBAGE, np.int32)
    a_step().fill(buffer, Bucket(5, 4, 3), num_lines=9)
    past_the_end = np.iinfo(np.int32).max
    assert buffer.tolist() == [
        *(11, 12, -1, 0, 0),  # token ids
        *(1, 3, 9, 9),  # rows
        *(0, 2, 3, 3, 3),  # cu_q_lens
        *(0, 1, 0, 0),  # samples
        2,  # rows that are real
        *(5, 4, past_the_end),  # addresses
        *(50, 40, 0),  # values
    ]


def test_fill_with_no_padding_and_with_nothing_but_padding():
    buffer = np.full(Bucket(3, 2, 2).delta_len, GARBAGE, np.int32)
    a_step().fill(buffer, Bucket(3, 2, 2), num_lines=9)
    assert buffer.tolist() == [11, 12, -1, 1, 3, 0, 2, 3, 0, 1, 2, 5, 4, 50, 40]
    nothing = StepInput(*(field[:0] for field in a_step()))
    nothing.fill(buffer, Bucket(3, 2, 2), num_lines=9)
    largest = np.iinfo(np.int32).max
    assert buffer.tolist() == [0, 0, 0, 9, 9, 0, 0, 0, 0, 0, 0, largest, largest, 0, 0]


@pytest.mark.parametrize(
    "bucket", [Bucket(2, 4, 4), Bucket(4, 1, 4), Bucket(4, 4, 1)], ids=["tokens", "rows", "writes"]
)
def test_fill_refuses_a_bucket_that_is_too_small(bucket):
    with pytest.raises(ValueError, match="broadcast"):
        a_step().fill(np.zeros(bucket.delta_len, np.int32), bucket, num_lines=9)


# --- impossible plans ----------------------------------------------------------------------------


def admitted(row: int, num_tokens: int = 3) -> AdmittedRow:
    return AdmittedRow(row, [7] * num_tokens, num_tokens, 0, [1], SamplingParams(max_tokens=1))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (SchedulerOutput(8, released_rows=[0]), "row 0 is released but not live in step 8"),
        (SchedulerOutput(8, released_rows=[1, 1]), "row 1 is released but not live in step 8"),
        (SchedulerOutput(8, admitted=[admitted(1)]), "row 1 is admitted twice"),
        (SchedulerOutput(8, admitted=[admitted(2), admitted(2)]), "row 2 is admitted twice"),
        (SchedulerOutput(8, num_tokens=[1, 4]), "step 8 computes tokens that no live row has"),
        (SchedulerOutput(8, num_tokens=[0, 1]), "step 8 computes tokens that no live row has"),
        (
            SchedulerOutput(8, released_rows=[1], num_tokens=[1, 1]),
            "step 8 computes tokens that no live row has",
        ),
        (SchedulerOutput(8, forced_tokens=[(0, [5])]), "row 0 is forced but not live"),
        (SchedulerOutput(8, new_blocks=[0, 5]), "row 0 gets a block but is not live"),
        (SchedulerOutput(8, new_blocks=[1, 5] * BLOCKS_PER_ROW), "row 1 has no place left"),
    ],
)
def test_impossible_plans_are_refused(plan, message):
    mirror = BatchMirror(NUM_ROWS, BLOCKS_PER_ROW)
    mirror.apply(SchedulerOutput(7, admitted=[admitted(1)], num_tokens=[1, 0]))
    with pytest.raises(AssertionError, match=message):
        mirror.apply(plan)


def test_a_row_computes_one_token_a_step_once_it_decodes():
    mirror = BatchMirror(NUM_ROWS, BLOCKS_PER_ROW)
    mirror.apply(SchedulerOutput(1, admitted=[admitted(1)], num_tokens=[1, 3]))
    assert mirror.apply(SchedulerOutput(2)).token_ids.tolist() == [-1]
    with pytest.raises(AssertionError, match="no live row has"):
        mirror.apply(SchedulerOutput(3, num_tokens=[1, 2]))
