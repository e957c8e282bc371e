"""The table on the device: what goes in comes out, and nothing else moves."""

import struct

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.messages import FLOAT_EPS, MAX_STOP_TOKEN_IDS, SamplingParams
from jaxserve.worker.batch_state import (
    NUM_FIELDS,
    Field,
    StepDelta,
    admission_fields,
    advance,
    apply_writes,
    num_columns,
    read_rows,
    set_last_tokens,
    unpack_delta,
)
from jaxserve.worker.buckets import Bucket

NUM_LINES, NUM_BLOCKS = 6, 3
NUM_COLUMNS = num_columns(NUM_BLOCKS)
GARBAGE = -77
LARGEST = np.iinfo(np.int32).max

_read_rows = jax.jit(read_rows)
_apply_writes = jax.jit(apply_writes, donate_argnums=0)
_advance = jax.jit(advance)
_set_last_tokens = jax.jit(set_last_tokens)


def garbage_table() -> np.ndarray:
    """Every cell differs from every other."""
    return -1000 - np.arange(NUM_LINES * NUM_COLUMNS, dtype=np.int32).reshape(NUM_LINES, -1)


def float_bits(value: float) -> bytes:
    return struct.pack("<f", value)


# --- unpack_delta --------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 20), st.integers(0, 30))
def test_the_delta_covers_its_buffer_once(num_tokens, num_rows, num_writes):
    bucket = Bucket(num_tokens, num_rows, num_writes)
    buffer = np.arange(bucket.delta_len, dtype=np.int32)
    delta = unpack_delta(buffer, bucket)
    assert np.concatenate(delta).tolist() == buffer.tolist()
    assert [len(part) for part in delta] == [
        *(num_tokens, num_rows, num_rows + 1, num_rows, 1, num_writes, num_writes)
    ]
    delta.values[:] = GARBAGE  # a view
    assert (buffer == GARBAGE).sum() == num_writes


# --- admission_fields, apply_writes, read_rows ---------------------------------------------------

probabilities = st.floats(0, 1, width=32)
sampling_params = st.builds(
    SamplingParams,
    max_tokens=st.just(8),
    temperature=st.one_of(st.just(0.0), st.floats(0, 100)),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.one_of(probabilities, st.floats(0, 1)),
    min_p=st.one_of(probabilities, st.floats(0, 1)),
    seed=st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([2**31, 2**32, 2**63, 2**64 - 1])),
    min_tokens=st.integers(0, 50),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=MAX_STOP_TOKEN_IDS).map(tuple),
)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(sampling_params, min_size=3, max_size=3),
    st.permutations(range(NUM_LINES)),
    st.integers(1, 4000),
    st.integers(0, 4000),
)
def test_every_field_comes_back_as_it_was(params, order, num_prompt_tokens, num_computed):
    rows = np.array(order[:3], np.int32)
    writes = np.full((2, 3 * NUM_COLUMNS), LARGEST, np.int32)
    used = 0
    for row, sampling in zip(rows, params, strict=True):
        fields = admission_fields(sampling, num_prompt_tokens, num_computed)
        assert Field.FIRST_STOP <= len(fields) <= NUM_FIELDS
        blocks = np.array([row, 7, row + 1], np.int32)
        for start, part in ((0, fields), (NUM_FIELDS, blocks)):
            at = slice(used, used + len(part))
            writes[0, at] = row * NUM_COLUMNS + start + np.arange(len(part))
            writes[1, at] = part
            used += len(part)
    table = _apply_writes(jax.device_put(garbage_table()), *writes)
    got = jax.tree.map(np.asarray, _read_rows(table, rows))

    for i, sampling in enumerate(params):
        assert got.last_token[i] == 0
        assert got.num_computed[i] == num_computed
        wanted = 0.0 if sampling.temperature < FLOAT_EPS else sampling.temperature
        assert got.temperature[i].tobytes() == float_bits(wanted)
        assert got.top_p[i].tobytes() == float_bits(sampling.top_p)
        assert got.min_p[i].tobytes() == float_bits(sampling.min_p)
        assert got.top_k[i] == sampling.top_k
        assert got.seed[i].dtype == np.uint32
        assert int(got.seed[i, 0]) + (int(got.seed[i, 1]) << 32) == sampling.seed
        assert got.block_tables[i].tolist() == [rows[i], 7, rows[i] + 1]
        assert got.has_options[i] == (sampling.frequency_penalty != 0)
        if sampling.min_tokens:
            assert got.min_len[i] == num_prompt_tokens + sampling.min_tokens
            unused = MAX_STOP_TOKEN_IDS - len(sampling.stop_token_ids)
            assert got.stop_token_ids[i].tolist() == [*sampling.stop_token_ids, *[-1] * unused]
        else:
            assert got.min_len[i] == 0  # so that stop ids are never looked at
    others = [line for line in range(NUM_LINES) if line not in rows]
    np.testing.assert_array_equal(np.asarray(table)[others], garbage_table()[others])


def test_lines_past_the_end_are_greedy():
    table = garbage_table()
    got = _read_rows(table, np.array([NUM_LINES - 1, NUM_LINES, LARGEST], np.int32))
    for field in map(np.asarray, got):
        assert not field[1:].any()
    assert np.asarray(got.block_tables)[0].any()


def test_writes_reach_their_cells_and_padding_none():
    table = garbage_table()
    expected = table.copy()
    addresses = [0, NUM_COLUMNS - 1, NUM_COLUMNS, table.size - 1]
    for address in addresses:
        expected[address // NUM_COLUMNS, address % NUM_COLUMNS] = address + 1
    padding = [table.size, table.size + 1, LARGEST, LARGEST]
    writes = np.array(addresses + padding, np.int32)
    before = jax.device_put(table)
    after = _apply_writes(before, writes, np.array([a + 1 for a in addresses] + [9] * 4, np.int32))
    np.testing.assert_array_equal(after, expected)
    assert before.is_deleted()


# --- advance -------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_counts_move_on_and_rows_that_sampled_have_new_tokens(data):
    max_rows = 5
    rows = sorted(data.draw(st.sets(st.integers(0, NUM_LINES - 1), max_size=max_rows)))
    q_lens = [data.draw(st.integers(1, 4)) for _ in rows]
    samples = [data.draw(st.booleans()) for _ in rows]
    sampled = np.arange(100, 100 + max_rows, dtype=np.int32)
    pad = max_rows - len(rows)
    # What stands in the samples of padding rows does not matter: their line is no line.
    padding_samples = [data.draw(st.booleans()) for _ in range(pad)]
    past_the_end = data.draw(st.sampled_from([NUM_LINES, LARGEST]))

    def array(values: list[int]) -> np.ndarray:
        return np.array(values, np.int32)

    delta = StepDelta(
        token_ids=array([3] * 8),
        rows=array(rows + [past_the_end] * pad),
        cu_q_lens=np.cumsum(array([0, *q_lens] + [0] * pad), dtype=np.int32),
        samples=array([*samples, *padding_samples]),
        num_rows=array([len(rows)]),
        addresses=array([0]),  # done before; not again
        values=array([GARBAGE]),
    )
    table = garbage_table()
    after = np.asarray(_advance(table, delta))
    sampling_rows = np.where(delta.samples, delta.rows, past_the_end).astype(np.int32)
    after = np.asarray(_set_last_tokens(after, sampling_rows, sampled))

    expected = table.copy()
    for i, row in enumerate(rows):
        expected[row, Field.NUM_COMPUTED] += q_lens[i]
        if samples[i]:
            expected[row, Field.LAST_TOKEN] = sampled[i]
    np.testing.assert_array_equal(after, expected)


def test_greedy_is_a_temperature_of_exactly_zero():
    table = garbage_table()
    for line, temperature in zip(table[:2], (FLOAT_EPS * 0.99, FLOAT_EPS), strict=True):
        fields = admission_fields(SamplingParams(max_tokens=1, temperature=temperature), 1, 0)
        line[: len(fields)] = fields
    below, at, _ = np.asarray(_read_rows(table, np.arange(3, dtype=np.int32)).temperature)
    assert below == 0 and at == np.float32(FLOAT_EPS)
