"""The sampler against a NumPy definition of each filter, and against its own distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.messages import MAX_STOP_TOKEN_IDS, SamplingParams
from jaxserve.worker.batch_state import NUM_FIELDS, Field, RowFields, admission_fields, read_rows
from jaxserve.worker.sampler import sample
from jaxserve.worker.sharding import make_mesh
from tests.worker.numpy_options import kept_tokens

NUM_ROWS, VOCAB = 8, 300  # not a multiple of the sampler's tile
_MESH = make_mesh(jax.local_devices()[:1])
_sample = jax.jit(lambda logits, rows, num_tokens: sample(logits, rows, num_tokens, _MESH))


def rows_of(params: list[SamplingParams], num_prompt_tokens: int = 4) -> RowFields:
    """Row fields as the worker makes them: through the batch state's own encoding."""
    table = np.zeros((len(params), NUM_FIELDS + 1), np.int32)
    for line, sampling in zip(table, params, strict=True):
        fields = admission_fields(sampling, num_prompt_tokens, 0)
        line[: len(fields)] = fields
    return read_rows(jnp.asarray(table), jnp.arange(len(params), dtype=jnp.int32))


params_strategy = st.builds(
    SamplingParams,
    max_tokens=st.just(8),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 50, VOCAB, VOCAB + 9]),
    top_p=st.sampled_from([1.0, 0.99, 0.7, 0.3, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(params_strategy, min_size=NUM_ROWS, max_size=NUM_ROWS), st.integers(0, 2**31))
def test_tokens_come_from_what_the_filters_keep(params, seed):
    logits = np.random.default_rng(seed).normal(0, 3, (NUM_ROWS, VOCAB)).astype(np.float32)
    for position in range(3):
        tokens = _sample(logits, rows_of(params), jnp.full(NUM_ROWS, 5 + position, jnp.int32))
        for row, (token, p) in enumerate(zip(np.asarray(tokens), params, strict=True)):
            assert int(token) in kept_tokens(logits[row], p), (row, p)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"temperature": 2.0, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    ],
    ids=str,
)
def test_frequencies_are_those_of_the_distribution(options):
    draws_per_row, num_rows, vocab = 400, 50, 40
    rng = np.random.default_rng(7)
    logits = rng.normal(0, 1.5, vocab).astype(np.float32)
    params = [SamplingParams(max_tokens=8, seed=1000 + i, **options) for i in range(num_rows)]
    rows = rows_of(params)
    draw = jax.jit(
        lambda start: jax.lax.map(
            lambda at: sample(
                jnp.broadcast_to(logits, (num_rows, vocab)), rows, jnp.full(num_rows, at), _MESH
            ),
            start + jnp.arange(draws_per_row, dtype=jnp.int32),
        )
    )
    counts = np.bincount(np.asarray(draw(jnp.int32(10))).ravel(), minlength=vocab)
    kept = kept_tokens(logits, params[0])
    weights = np.exp(logits.astype(np.float64) / params[0].temperature)
    expected = np.array([w if i in kept else 0 for i, w in enumerate(weights)])
    expected /= expected.sum()
    num_draws = draws_per_row * num_rows
    sigma = np.sqrt(num_draws * expected * (1 - expected))
    # 40 cells x 6 cases: 5 sigma happens by chance about once in 7,000 such suites, and the seeds
    # are fixed.
    assert (np.abs(counts - num_draws * expected) <= 5 * sigma + 1e-9).all()


def test_a_token_does_not_depend_on_the_batch():
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 2, (NUM_ROWS, VOCAB)).astype(np.float32)
    params = [
        SamplingParams(
            max_tokens=8, seed=i * 2**33 + 1, top_k=i, top_p=1 - i / 20, temperature=i / 4
        )
        for i in range(NUM_ROWS)
    ]
    positions = np.arange(20, 20 + NUM_ROWS, dtype=np.int32)
    together = np.asarray(_sample(logits, rows_of(params), positions))
    order = rng.permutation(NUM_ROWS)
    shuffled = np.asarray(
        _sample(logits[order], rows_of([params[i] for i in order]), positions[order])
    )
    np.testing.assert_array_equal(shuffled, together[order])
    for i in range(NUM_ROWS):
        alone = _sample(logits[i : i + 1], rows_of([params[i]]), positions[i : i + 1])
        assert int(alone[0]) == together[i]


def test_seed_halves_and_position_each_change_the_draw():
    logits = np.zeros((4, VOCAB), np.float32)
    seeds = [5, 6, 5 + 2**32, 5]
    params = [SamplingParams(max_tokens=8, seed=s) for s in seeds]
    tokens = np.asarray(_sample(logits, rows_of(params), np.array([9, 9, 9, 10], np.int32)))
    assert len(set(tokens.tolist())) == 4, tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_tokens_are_barred_until_min_tokens(temperature):
    logits = np.full((2, VOCAB), -40, np.float32)
    stops = tuple(range(MAX_STOP_TOKEN_IDS))
    logits[:, stops] = 5.0
    logits[:, 77] = 1.0
    with_min = SamplingParams(
        max_tokens=8, temperature=temperature, min_tokens=3, stop_token_ids=stops
    )
    without = SamplingParams(max_tokens=8, temperature=temperature, stop_token_ids=stops)
    rows = rows_of([with_min, without], num_prompt_tokens=4)
    for num_tokens in (4, 5, 6):  # the 1st to 3rd output token
        barred, free = np.asarray(_sample(logits, rows, np.full(2, num_tokens, np.int32)))
        assert barred == 77 and free in stops
    allowed, _ = np.asarray(_sample(logits, rows, np.full(2, 7, np.int32)))
    assert allowed in stops


def test_greedy_takes_the_first_of_equal_maxima():
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [40, 90]] = 2.0
    rows = rows_of([SamplingParams(max_tokens=8, temperature=0.0)])
    assert int(_sample(logits, rows, np.array([4], np.int32))[0]) == 40


def test_extreme_logits_never_give_a_token_without_weight():
    logits = np.full((2, VOCAB), -3e38, np.float32)
    logits[0, 299] = 3e38
    logits[1, 0] = 0.0
    rows = rows_of([SamplingParams(max_tokens=8, seed=s, top_p=0.9) for s in (1, 2)])
    for position in range(20):
        tokens = np.asarray(_sample(logits, rows, np.full(2, position, np.int32)))
        assert tokens.tolist() == [299, 0]


def test_fields_fit_their_columns():
    assert [f.value for f in Field] == list(range(len(Field)))
    sampling = SamplingParams(max_tokens=1, min_tokens=1, stop_token_ids=(7,))
    assert len(admission_fields(sampling, 1, 0)) == NUM_FIELDS
