"""A step's two programs: against a NumPy model, and with padding poisoned."""

import random

import jax
import numpy as np
import pytest

from jaxserve.messages import SamplingParams, SchedulerOutput
from jaxserve.worker import warmup
from jaxserve.worker.batch_mirror import BatchMirror
from jaxserve.worker.batch_state import NUM_FIELDS, Field, num_columns, unpack_delta
from jaxserve.worker.step import DeviceState
from pallas_kernels.ragged_paged_attention import KVCache
from tests.worker import tiny

# So hot that another random number nearly always means another token.
SEEDED = SamplingParams(
    max_tokens=99, temperature=5.0, top_k=50, top_p=0.98, min_p=0.01, seed=2**63 + 5
)
BARRED = SamplingParams(
    max_tokens=99, temperature=0.0, min_tokens=3, stop_token_ids=tuple(range(32))
)
PROMPTS = {0: tiny.prompt(6), 1: tiny.prompt(1), 2: tiny.prompt(9), 3: tiny.prompt(3)}
LARGEST = np.iinfo(np.int32).max
TABLE_SIZE = tiny.NUM_ROWS * num_columns(tiny.BLOCKS_PER_ROW)


def scenario() -> list[tuple[SchedulerOutput, list[int]]]:
    """Chunked prompts, decoding rows, rows that sit out, a row that ends and is used again."""
    planner, plans = tiny.Planner(), []
    planner.admit(0, PROMPTS[0])
    planner.admit(2, PROMPTS[2], SEEDED)
    plans.append(planner.plan({0: 4, 2: 3}))
    planner.admit(3, PROMPTS[3], BARRED)
    plans.append(planner.plan({0: 2, 2: 3, 3: 3}))
    plans.append(planner.plan({2: 3}))
    planner.admit(1, PROMPTS[1], SEEDED)
    plans.append(planner.plan())
    plans.append(planner.plan({0: 0}))
    planner.release(3)
    planner.admit(3, PROMPTS[3][::-1])
    plans.append(planner.plan({3: 3}))
    plans += [planner.plan() for _ in range(4)]
    return plans


def uploads_of(plans: list[tuple[SchedulerOutput, list[int]]]) -> list[np.ndarray]:
    """The plans as the host uploads them."""
    mirror = BatchMirror(tiny.NUM_ROWS, tiny.BLOCKS_PER_ROW)
    uploads = []
    for plan, _ in plans:
        uploads.append(np.empty(tiny.SMALL.delta_len, np.int32))
        mirror.apply(plan).fill(uploads[-1], tiny.SMALL, tiny.NUM_ROWS)
    return uploads


def bits(array: jax.Array) -> np.ndarray:
    return np.array(array).view(np.int32)


def run_step(state: DeviceState, buffer: np.ndarray) -> tuple[jax.Array, jax.Array, DeviceState]:
    """Logits, tokens and the state after a step."""
    logits, rows, state = tiny.compiled_forward()(tiny.params(), state, buffer)
    sampled, table = tiny.compiled_sample()(logits, rows, state.table)
    return logits, sampled, state._replace(table=table)


def run(state: DeviceState, uploads: list[np.ndarray]) -> tuple[list[np.ndarray], DeviceState]:
    """Each step's tokens of the rows that sample."""
    tokens = []
    for buffer in uploads:
        _, sampled, state = run_step(state, buffer)
        delta = unpack_delta(buffer, tiny.SMALL)
        samples = delta.samples[: delta.num_rows[0]].astype(bool)
        tokens.append(np.asarray(sampled)[: len(samples)][samples])
    return tokens, state


def test_logits_are_those_of_the_whole_sequence_from_scratch():
    """Every row that samples, in every step of the scenario: prompts, chunks, decoding."""
    state, num_checked = tiny.fresh_state().step, 0
    params, prompt_lens, sequences = {}, {}, {}
    plans = scenario()
    for (plan, sampling_rows), buffer in zip(plans, uploads_of(plans), strict=True):
        for admitted in plan.admitted:
            params[admitted.row] = admitted.sampling
            prompt_lens[admitted.row] = len(admitted.token_ids)
            sequences[admitted.row] = list(admitted.token_ids)
        logits, sampled, state = run_step(state, buffer)
        rows = unpack_delta(buffer, tiny.SMALL).rows.tolist()
        for row in sampling_rows:
            idx = rows.index(row)
            want = tiny.expected_logits(sequences[row])
            np.testing.assert_allclose(
                np.asarray(logits)[idx], want, rtol=0, atol=tiny.LOGITS_TOLERANCE
            )
            if params[row] is not SEEDED:
                num_outputs = len(sequences[row]) - prompt_lens[row]
                is_barred = num_outputs < params[row].min_tokens
                allowed = want[len(BARRED.stop_token_ids) :] if is_barred else want
                assert want[sampled[idx]] == allowed.max()
            sequences[row].append(int(sampled[idx]))
            num_checked += 1
    assert num_checked == 32
    for row, sequence in sequences.items():
        line = np.asarray(state.table)[row]
        assert line[Field.LAST_TOKEN] == sequence[-1]
        assert line[Field.NUM_COMPUTED] == len(sequence) - 1


def test_a_decode_step_equals_one_that_computes_everything_anew():
    planner = tiny.Planner()
    planner.admit(1, PROMPTS[0], SEEDED)
    plans = [planner.plan({1: 6})] + [planner.plan() for _ in range(8)]
    decoded = [int(tokens[0]) for tokens in run(tiny.fresh_state().step, uploads_of(plans))[0]]
    assert len(decoded) == 9 and len(set(decoded)) > 4
    for num_known in range(1, 9):
        # What was decoded so far is given, in another row, in two chunks.
        anew = tiny.Planner()
        anew.admit(3, PROMPTS[0] + decoded[:num_known], SEEDED, num_prompt_tokens=6)
        plans = [anew.plan({3: 6}), anew.plan({3: num_known} if num_known != 1 else {})]
        tokens, _ = run(tiny.fresh_state().step, uploads_of(plans))
        assert [t.tolist() for t in tokens] == [[], [decoded[num_known]]]


# --- padding -------------------------------------------------------------------------------------


def poison(buffer: np.ndarray, rng: random.Random) -> np.ndarray:
    """The upload with its padding as bad as `StepDelta` and `Model.forward` let it be."""
    buffer = buffer.copy()
    delta = unpack_delta(buffer, tiny.SMALL)
    num_rows, num_tokens = int(delta.num_rows[0]), int(delta.cu_q_lens[-1])
    num_writes = int((delta.addresses < TABLE_SIZE).sum())

    def fill(part: np.ndarray, low: int, high: int) -> None:
        part[:] = [rng.choice([low, high, rng.randint(low, high)]) for _ in part]

    fill(delta.token_ids[num_tokens:], 0, tiny.INFO.vocab_size - 1)
    fill(delta.rows[num_rows:], tiny.NUM_ROWS, LARGEST)
    fill(delta.samples[num_rows:], 0, 1)
    fill(delta.addresses[num_writes:], TABLE_SIZE, LARGEST)
    fill(delta.values[num_writes:], -LARGEST, LARGEST)
    return buffer


def poisoned_state(rng: random.Random) -> DeviceState:
    """NaN in every place of the cache, any bits in every place of the table."""
    clean = tiny.fresh_state().step
    values = [rng.randint(-LARGEST, LARGEST) for _ in range(TABLE_SIZE)]
    table = np.array(values, np.int32).reshape(clean.table.shape)
    # The line that padding rows read.
    table[-1, [Field.TEMPERATURE, Field.TOP_P, Field.MIN_P]] = np.float32(np.nan).view(np.int32)
    cache = [np.full(leaf.shape, np.nan, leaf.dtype) for leaf in clean.kv_cache]
    hidden = np.full(clean.hidden.shape, np.nan, clean.hidden.dtype)
    arrays = jax.tree.map(jax.device_put, (table, KVCache(*cache), hidden))
    return DeviceState(*arrays)


@pytest.mark.parametrize("seed", range(3))
def test_what_padding_holds_does_not_matter(seed):
    rng = random.Random(seed)
    uploads = uploads_of(scenario())
    expected, clean = run(tiny.fresh_state().step, uploads)
    dirty = poisoned_state(rng)
    table_before = np.array(dirty.table)
    tokens, dirty = run(dirty, [poison(buffer, rng) for buffer in uploads])
    assert [t.tolist() for t in tokens] == [t.tolist() for t in expected]

    is_live = np.zeros(clean.kv_cache.k.shape[1:3], bool)
    for row, line in enumerate(np.asarray(clean.table)):
        num_computed = int(line[Field.NUM_COMPUTED])
        num_used = NUM_FIELDS + -(-num_computed // tiny.BLOCK_SIZE)
        got = np.asarray(dirty.table)[row]
        used = np.r_[: Field.FIRST_STOP, NUM_FIELDS:num_used]
        assert got[used].tolist() == line[used].tolist()
        assert got[num_used:].tolist() == table_before[row, num_used:].tolist()
        for position in range(num_computed):
            block = line[NUM_FIELDS + position // tiny.BLOCK_SIZE]
            is_live[block, position % tiny.BLOCK_SIZE] = True
    assert is_live.sum() > 40
    for got, want in zip(dirty.kv_cache, clean.kv_cache, strict=True):
        np.testing.assert_array_equal(bits(got)[:, is_live], bits(want)[:, is_live])
        is_free = ~is_live
        is_free[0] = False  # the null block
        is_free[1 + 3 * tiny.BLOCKS_PER_ROW :] = False  # of row 3's first life
        assert np.isnan(np.asarray(got)[:, is_free]).all()


# --- memory --------------------------------------------------------------------------------------


def num_bytes(state: DeviceState) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def test_the_state_is_updated_in_place():
    state = tiny.fresh_state().step
    compiled = tiny.compiled_forward()
    assert compiled.memory_analysis().alias_size_in_bytes >= num_bytes(state)
    leaves = jax.tree.leaves(state)
    places = [leaf.unsafe_buffer_pointer() for leaf in leaves]
    buffer = uploads_of(scenario())[0]
    *_, state = compiled(tiny.params(), state, buffer)
    assert all(leaf.is_deleted() for leaf in leaves)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)] == places


def test_the_table_is_updated_in_place():
    table = tiny.fresh_state().step.table
    place = table.unsafe_buffer_pointer()
    nothing = np.full(tiny.EXTRA_WRITES, LARGEST, np.int32)
    written = tiny.compiled_writes()(table, nothing, nothing)
    assert table.is_deleted() and written.unsafe_buffer_pointer() == place
    logits = np.zeros((tiny.NUM_ROWS, tiny.INFO.vocab_size), np.float32)
    rows = np.arange(tiny.NUM_ROWS, dtype=np.int32)
    _, advanced = tiny.compiled_sample()(logits, rows, written)
    assert written.is_deleted() and advanced.unsafe_buffer_pointer() == place


def test_temporaries_do_not_grow_with_the_cache():
    few, many = (
        warmup.temp_bytes(tiny.compiled_forward(tiny.SMALL, n)) for n in (tiny.NUM_BLOCKS, 4000)
    )
    assert few == many
