"""The model runner: tokens of random plans, more writes than a step holds, order, compilations."""

import random
import threading
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from jaxserve.messages import GrammarMask, SamplingParams
from jaxserve.worker import model_runner
from jaxserve.worker.buckets import Bucket
from jaxserve.worker.model_runner import ModelRunner
from jaxserve.worker.programs import Programs
from tests.worker import tiny

# So hot that another random number nearly always means another token.
SEEDED = SamplingParams(max_tokens=99, temperature=5.0, top_k=50, top_p=0.98, seed=2**40 + 9)
MAX_LEN = tiny.BLOCK_SIZE * tiny.BLOCKS_PER_ROW


class Counted:
    """A program that counts its calls."""

    def __init__(self, program: jax.stages.Compiled):
        self._program = program
        self.count = 0

    def __call__(self, *args: object) -> object:
        self.count += 1
        return self._program(*args)


@pytest.fixture(autouse=True)
def _small_extra_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that one surplus takes several uploads."""
    monkeypatch.setattr(model_runner, "EXTRA_WRITES", tiny.EXTRA_WRITES)


def counted_programs(buckets: tuple[Bucket, ...] = tiny.BUCKETS) -> Programs:
    """Programs that all tests share, with counters of their own."""
    programs = tiny.compiled_programs()
    forwards = {bucket: programs.forwards[bucket] for bucket in buckets}
    return Programs(*(count_calls(field) for field in programs._replace(forwards=forwards)))


def count_calls(field: dict | jax.stages.Compiled) -> dict | Counted:
    if isinstance(field, dict):
        return {key: Counted(program) for key, program in field.items()}
    return Counted(field)


def make_runner(programs: Programs | None = None) -> ModelRunner:
    """A runner with an empty batch."""
    return ModelRunner(
        programs or counted_programs(),
        tiny.params(),
        tiny.fresh_state(),
        tiny.OPTIONS,
        tiny.BLOCKS_PER_ROW,
    )


def generate(
    runner: ModelRunner,
    prompt: list[int],
    sampling: SamplingParams,
    chunks: list[int],
    row: int = 0,
    num_tokens: int = 8,
) -> list[int]:
    """One request alone, its prompt in `chunks`."""
    planner, tokens = tiny.Planner(), []
    planner.admit(row, prompt, sampling)
    for step in range(len(chunks) + num_tokens - 1):
        plan, _ = planner.plan({row: chunks[step]} if step < len(chunks) else {})
        runner.execute(plan)
        tokens += runner.collect().sampled_token_ids
    planner.release(row)
    runner.execute(planner.plan()[0])
    assert runner.collect().sampled_token_ids == []
    return tokens


# --- right tokens --------------------------------------------------------------------------------


def random_counts(rng: random.Random, planner: tiny.Planner) -> dict[int, int]:
    """What each row computes, within the larger bucket; rows that need much get chunks of it."""
    budget, counts = tiny.LARGE.num_tokens, {}
    for row in planner.rows:
        count = rng.choice([0, 1, planner.missing(row), rng.randint(0, planner.missing(row))])
        count = min(count, budget)
        budget -= count
        if count != 1:
            counts[row] = count
    return counts


def test_random_plans_give_the_tokens_of_the_numpy_model():
    """Rows come, sit out, end and come again; greedy requests, each known by its prompt."""
    rng = random.Random(11)
    runner, planner = make_runner(), tiny.Planner()
    runner.warm_up()
    sequences: dict[int, list[int]] = {}
    finished: list[tuple[int, list[int]]] = []
    prompt_lens: dict[int, int] = {}
    for step in range(60):
        for row in range(tiny.NUM_ROWS):
            ends = row in planner.rows and rng.random() < 0.12
            if ends or len(sequences.get(row, [])) > MAX_LEN - 2:
                finished.append((prompt_lens[row], sequences.pop(row)))
                planner.release(row)
            if row not in planner.rows and rng.random() < 0.4:
                sequences[row] = tiny.prompt(rng.randint(1, 20), seed=step * 10 + row)
                prompt_lens[row] = len(sequences[row])
                planner.admit(row, list(sequences[row]))
        plan, sampling_rows = planner.plan(random_counts(rng, planner))
        runner.execute(plan)
        output = runner.collect()
        assert output.step_id == plan.step_id
        for row, token in zip(sampling_rows, output.sampled_token_ids, strict=True):
            sequences[row].append(token)
    finished += [(prompt_lens[row], tokens) for row, tokens in sequences.items()]
    num_outputs = 0
    for prompt_len, tokens in finished:
        prompt, outputs = tokens[:prompt_len], tokens[prompt_len:]
        assert outputs == tiny.greedy_tokens(prompt, len(outputs))
        num_outputs += len(outputs)
    assert num_outputs > 60 and len(finished) > 10


@pytest.mark.parametrize("sampling", [tiny.GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_request_goes_on_in_another_row(sampling):
    """As after a preemption: its output so far is given with the prompt."""
    prompt = tiny.prompt(7)
    whole = generate(
        make_runner(counted_programs((tiny.SMALL,))), prompt, sampling, [7], num_tokens=8
    )
    runner, planner = make_runner(counted_programs((tiny.SMALL,))), tiny.Planner()
    planner.admit(3, tiny.prompt(3))
    planner.admit(2, prompt + whole[:3], sampling, num_prompt_tokens=7)
    tokens = []
    for counts in ({2: 5, 3: 3}, {2: 5}, {}, {}, {}, {}):
        plan, rows = planner.plan(counts)
        runner.execute(plan)
        sampled = dict(zip(rows, runner.collect().sampled_token_ids, strict=True))
        tokens += [sampled[2]] if 2 in sampled else []
    assert tokens == whole[3:]


# --- more writes than a bucket holds -------------------------------------------------------------


@pytest.mark.parametrize("sampling", [tiny.GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_more_writes_than_the_bucket_holds(sampling):
    prompt = tiny.prompt(20)
    inside, outside = counted_programs((tiny.SMALL,)), counted_programs((tiny.LARGE,))
    expected = generate(make_runner(inside), prompt, sampling, [8, 8, 4])
    assert inside.writes.count == 0
    # 10 fields and 5 blocks, or with stop ids 42 and 5; 8 writes ride on the step.
    runner = make_runner(outside)
    assert generate(runner, prompt, sampling, [20]) == expected
    assert outside.writes.count == 1
    stops = SamplingParams(
        max_tokens=99,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        min_tokens=5,
        stop_token_ids=(expected[2],),
    )
    barred = generate(runner, prompt, stops, [20], row=3)
    assert outside.writes.count == 1 + 3
    assert expected[2] not in barred[:5]
    assert barred == generate(
        make_runner(counted_programs((tiny.SMALL,))), prompt, stops, [8, 8, 4]
    )


# --- order ---------------------------------------------------------------------------------------


def plans(num_steps: int) -> Iterator[tuple]:
    """Two rows, one of which sits out every third step and never samples in the first two."""
    planner = tiny.Planner()
    planner.admit(1, tiny.prompt(7), SEEDED)
    planner.admit(2, tiny.prompt(2))
    yield planner.plan({1: 3, 2: 2})
    yield planner.plan({1: 2})
    yield planner.plan({1: 2})
    for step in range(num_steps - 3):
        yield planner.plan({1: 0} if step % 3 == 0 else {})


def test_many_steps_are_dispatched_before_any_is_collected():
    one_by_one, together = make_runner(), make_runner()
    expected = []
    for plan, _ in plans(16):
        one_by_one.execute(plan)
        expected.append(one_by_one.collect())
    for plan, _ in plans(16):
        together.execute(plan)
    assert [together.collect() for _ in range(16)] == expected
    assert [output.step_id for output in expected] == list(range(1, 17))
    assert [len(o.sampled_token_ids) for o in expected[:6]] == [1, 1, 2, 1, 2, 2]


def test_one_thread_executes_and_another_collects():
    reference, runner = make_runner(), make_runner()
    expected, collected = [], []
    for plan, _ in plans(16):
        reference.execute(plan)
        expected.append(reference.collect())
    thread = threading.Thread(
        target=lambda: collected.extend(runner.collect() for _ in range(16)), daemon=True
    )
    thread.start()
    for plan, _ in plans(16):
        runner.execute(plan)
    thread.join(timeout=60)
    assert collected == expected


def test_only_steps_with_sampling_rows_that_have_options_take_the_longer_program():
    programs = counted_programs()
    runner, planner = make_runner(programs), tiny.Planner()
    plain, longer = programs.samples[tiny.NUM_ROWS], programs.option_samples[tiny.NUM_ROWS]
    counts = []

    def step(num_tokens: dict[int, int]) -> None:
        runner.execute(planner.plan(num_tokens)[0])
        runner.collect()
        counts.append((plain.count, longer.count))

    planner.admit(0, tiny.prompt(2))
    planner.admit(1, tiny.prompt(4), SamplingParams(max_tokens=9, presence_penalty=1.0))
    step({0: 2, 1: 3})  # row 1 does not sample yet
    step({})
    step({1: 0})
    planner.release(1)
    step({})
    planner.admit(1, tiny.prompt(4))
    step({1: 4})
    assert counts == [(1, 0), (1, 1), (2, 1), (3, 1), (4, 1)]
    assert programs.option_writes.count == 1


# --- masks and forced tokens ---------------------------------------------------------------------


def mask_for(step_id: int, allowed: dict[int, list[int]]) -> GrammarMask:
    """A mask that lets each row sample its tokens only."""
    bits = np.zeros((len(allowed), 64), bool)
    for line, token_ids in zip(bits, allowed.values(), strict=True):
        line[token_ids] = True
    packed = np.packbits(bits, axis=1, bitorder="little")
    return GrammarMask(step_id, list(allowed), packed.tobytes())


@pytest.mark.parametrize("sampling", [tiny.GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_masked_rows_sample_what_they_may_and_others_as_always(sampling):
    expected = generate(make_runner(), tiny.prompt(5), sampling, [5], row=2)
    runner, planner, free = make_runner(), tiny.Planner(), []
    planner.admit(2, tiny.prompt(5), sampling)
    planner.admit(1, tiny.prompt(6), sampling)
    planner.admit(3, tiny.prompt(9), sampling)
    masked: dict[int, list[int]] = {1: [], 3: []}
    for step in range(8):
        counts = {1: 6, 2: 5, 3: 4} if step == 0 else {3: 5} if step == 1 else {}
        plan, rows = planner.plan(counts, awaits_mask=True)
        allowed = {r: [r, 31, 32, 63 - step] for r in rows if r != 2}
        runner.execute(plan)
        runner.sample(mask_for(plan.step_id, allowed))
        output = runner.collect()
        assert output.step_id == plan.step_id
        for row, token in zip(rows, output.sampled_token_ids, strict=True):
            if row == 2:
                free.append(token)
            else:
                assert token in allowed[row]
                masked[row].append(token)
    assert free == expected
    assert len(masked[1]) == 8 and len(masked[3]) == 7


def test_a_mask_with_one_token_left_forces_it():
    runner, planner = make_runner(), tiny.Planner()
    planner.admit(0, tiny.prompt(4), SEEDED)
    for token in (0, 31, 32, 63, 7):
        plan, _ = planner.plan({0: planner.missing(0)})
        plan = msgspec.structs.replace(plan, awaits_mask=True)
        runner.execute(plan)
        runner.sample(mask_for(plan.step_id, {0: [token]}))
        assert runner.collect().sampled_token_ids == [token]


def test_a_mask_must_be_the_awaited_one():
    runner, planner = make_runner(), tiny.Planner()
    planner.admit(0, tiny.prompt(4))
    with pytest.raises(AssertionError, match="no step awaits the mask of step 1"):
        runner.sample(mask_for(1, {0: [1]}))
    runner.execute(planner.plan({0: 4}, awaits_mask=True)[0])
    with pytest.raises(AssertionError, match="no step awaits the mask of step 7"):
        runner.sample(mask_for(7, {0: [1]}))
    with pytest.raises(AssertionError, match="step 2 comes before a mask"):
        runner.execute(planner.plan()[0])
    with pytest.raises(AssertionError, match="masks rows that do not compute"):
        runner.sample(mask_for(1, {2: [1]}))


@pytest.mark.parametrize("sampling", [tiny.GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("chunks", [[4], [2, 2], [1, 3], [3, 0, 1]], ids=str)
def test_forced_tokens_follow_the_one_in_flight(sampling, chunks):
    """The same tokens come as when all were known from the start."""
    prompt, forced = tiny.prompt(5), [9, 8, 7]
    runner, planner, tokens = make_runner(), tiny.Planner(), []
    planner.admit(0, tiny.prompt(3, seed=4))
    planner.admit(1, prompt, sampling)
    plans = [planner.plan({0: 3, 1: 5})]  # not collected before the next is there
    planner.force(1, forced)
    plans += [planner.plan({1: count} if count != 1 else {}) for count in chunks]
    plans += [planner.plan() for _ in range(3)]
    for plan, _ in plans:
        runner.execute(plan)
    for _, rows in plans:
        sampled = dict(zip(rows, runner.collect().sampled_token_ids, strict=True))
        tokens += [sampled[1]] if 1 in sampled else []
    first = generate(make_runner(), prompt, sampling, [5], num_tokens=1)
    anew, planner, expected = make_runner(), tiny.Planner(), []
    planner.admit(1, prompt + first + forced, sampling, num_prompt_tokens=5)
    for _ in range(4):
        missing = planner.missing(1)
        anew.execute(planner.plan({1: missing} if missing != 1 else {})[0])
        expected += anew.collect().sampled_token_ids
    assert tokens == first + expected


# --- compilations --------------------------------------------------------------------------------


def test_nothing_compiles_after_warm_up_and_what_does_is_counted():
    programs = counted_programs()
    runner = make_runner(programs)
    runner.warm_up()
    counts = {
        name: [p.count for p in (field.values() if isinstance(field, dict) else [field])]
        for name, field in programs._asdict().items()
    }
    assert counts == {
        "forwards": [1, 1],
        "samples": [1],
        "option_samples": [1],
        "scores": [1, 1],
        "prompt_scores": [1, 1],
        "pool": [1],
        "writes": [1],
        "option_writes": [1],
    }
    planner = tiny.Planner()
    planner.admit(0, tiny.prompt(20))
    planner.admit(3, tiny.prompt(2), SEEDED)
    for counts in ({0: 17, 3: 2}, {0: 3}, {}):
        runner.execute(planner.plan(counts)[0])
        assert runner.collect().num_compiles == 0
    assert programs.writes.count == 1 + 2 and programs.forwards[tiny.LARGE].count == 2
    compile_something(3)  # somebody else's program in the same process
    runner.execute(planner.plan()[0])
    assert runner.collect().num_compiles == 0
    small = programs.forwards[tiny.SMALL]

    def compiling(*args):
        compile_something(5)
        return small(*args)

    programs.forwards[tiny.SMALL] = compiling
    runner.execute(planner.plan()[0])
    assert runner.collect().num_compiles == 1


def compile_something(factor: int) -> None:
    """A program like no other."""
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    jax.jit(lambda x: x * factor + 17).lower(shape).compile()
