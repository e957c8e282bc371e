"""Penalties, bias, allowed tokens, bad words, grammar masks and logits processors, alone and
together, against a NumPy definition."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.messages import (
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    AdmittedRow,
    SamplingParams,
)
from jaxserve.worker.batch_state import NUM_FIELDS, admission_fields, read_rows
from jaxserve.worker.row_options import (
    OptionSpec,
    OptionState,
    encode_options,
    has_options,
    pack_bits,
    read_options,
    shape_logits,
    write_options,
)
from jaxserve.worker.sampler import apply_options
from jaxserve.worker.step import sample_step_with_options
from tests.worker import tiny
from tests.worker.numpy_options import ends_with, kept_tokens, shaped_logits

NUM_ROWS, VOCAB = 6, 75  # the last word of a mask is not full
SPEC = OptionSpec(VOCAB, tiny.OPTIONS.processors)
STOPS = (3, 70)
# A logit goes through at most 8 float32 operations, each on values below 100.
TOLERANCE = 8 * 100 * 2**-24

OPTIONS: dict[str, dict] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.75},
    "repetition": {"repetition_penalty": 1.8},
    "repetition below 1": {"repetition_penalty": 0.4},
    "bias": {"logit_bias": ((7, 4.0), (0, -100.0), (74, 2.5))},
    "allowed": {"allowed_token_ids": (0, 31, 32, 63, 64, 74)},
    "bad word": {"bad_words": ((5,), (0,), (74,))},
    "bad words": {"bad_words": ((1, 2), (2, 2, 1), (1, 1, 2, 2, 1, 1, 2, 2), (2, 70))},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": STOPS},
    "processor": {"logits_processors": (("scale", (-2.0,)),)},
    "processors": {
        "logits_processors": (("add_to_id", (5, 3.0)), ("scale", (0.5,)), ("add_to_id", (6, 2.0)))
    },
}


def params_of(*names: str) -> SamplingParams:
    options = {key: value for name in names for key, value in OPTIONS[name].items()}
    return SamplingParams(max_tokens=99, temperature=0.0, **options)


class Row:
    """A request with its tokens so far; few ids, so that words and counts happen."""

    def __init__(self, rng: random.Random, sampling: SamplingParams, has_grammar: bool = False):
        self.sampling = sampling
        self.prompt = [rng.choice([1, 2, 9, 74]) for _ in range(rng.randint(1, 5))]
        self.output = [rng.choice([0, 1, 1, 2, 2, 74]) for _ in range(rng.randint(0, 14))]
        self.grammar = set(rng.sample(range(VOCAB), rng.randint(1, 40))) if has_grammar else None

    @property
    def token_ids(self) -> list[int]:
        return self.prompt + self.output

    def expected(self, logits: np.ndarray) -> np.ndarray:
        return shaped_logits(logits, self.sampling, self.prompt, self.output, self.grammar)


_write_options = jax.jit(write_options, donate_argnums=0)


def state_of(rows: list[Row], num_lines: int = NUM_ROWS) -> tuple[np.ndarray, OptionState]:
    """The table and the options as the worker makes them, over what other rows have left."""
    garbage = np.random.default_rng(0).integers(1, 2**31 - 1, (num_lines, SPEC.line_len))
    state = OptionState(
        jnp.asarray(garbage, jnp.int32), jnp.full((num_lines, VOCAB), 2**29 + 3, jnp.int32)
    )
    table = np.zeros((num_lines, NUM_FIELDS + 1), np.int32)
    for line, row in enumerate(rows):
        fields = admission_fields(row.sampling, len(row.prompt), len(row.token_ids))
        table[line, : len(fields)] = fields
        if has_options(row.sampling):
            admitted = AdmittedRow(line, row.token_ids, len(row.prompt), 0, [], row.sampling)
            encoded = encode_options(admitted, SPEC)
            state = _write_options(state, np.int32(line), encoded)
    return table, state


def masks_of(rows: list[Row]) -> np.ndarray:
    masks = np.zeros((len(rows), SPEC.mask_words), np.int32)
    for mask, row in zip(masks, rows, strict=True):
        if row.grammar is not None:
            mask[:] = pack_bits(tuple(row.grammar), VOCAB)
    return masks


@jax.jit
def device_logits(logits, table, state, mask):
    lines = jnp.arange(len(logits), dtype=jnp.int32)
    rows = read_rows(table, lines)
    option_rows = jnp.where(rows.has_options != 0, lines, table.shape[0])
    options = read_options(state.lines, option_rows, SPEC)
    return apply_options(
        logits,
        rows,
        rows.num_computed,
        options,
        mask,
        lambda x: shape_logits(x, options, state.counts, option_rows, SPEC),
        tiny.SPEC.mesh,
    )


def check(rows: list[Row], seed: int) -> np.ndarray:
    """The device's logits are those of the definition."""
    logits = np.random.default_rng(seed).normal(0, 3, (len(rows), VOCAB)).astype(np.float32)
    got = np.asarray(device_logits(logits, *state_of(rows), masks_of(rows)))
    for idx, row in enumerate(rows):
        want = row.expected(logits[idx])
        np.testing.assert_array_equal(np.isneginf(got[idx]), np.isneginf(want))
        may = np.isfinite(want)
        np.testing.assert_allclose(
            got[idx][may], want[may], rtol=2**-21, atol=TOLERANCE, err_msg=str(row.sampling)
        )
    return got


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("has_grammar", [False, True])
def test_each_option_alone(name, has_grammar):
    rng = random.Random(name)
    for seed in range(4):
        others = [params_of()] * (NUM_ROWS - 2)
        rows = [Row(rng, p, has_grammar) for p in (params_of(name), *others, params_of(name))]
        check(rows, seed)


@pytest.mark.parametrize("seed", range(25))
def test_options_together_in_one_batch(seed):
    rng = random.Random(seed)
    names = list(OPTIONS)
    rows = [
        Row(rng, params_of(*rng.sample(names, rng.randint(0, len(names)))), rng.random() < 0.4)
        for _ in range(NUM_ROWS)
    ]
    together = check(rows, seed)
    logits = np.random.default_rng(seed).normal(0, 3, (NUM_ROWS, VOCAB)).astype(np.float32)
    idx = rng.randrange(NUM_ROWS)
    table, state = state_of(rows[idx : idx + 1])
    alone = device_logits(logits[idx : idx + 1], table, state, masks_of(rows[idx : idx + 1]))
    np.testing.assert_array_equal(alone[0], together[idx])


def test_the_rows_of_these_tests_complete_words_and_repeat_tokens():
    rng = random.Random(1)
    rows = [Row(rng, params_of("bad words", "frequency")) for _ in range(60)]
    for word in OPTIONS["bad words"]["bad_words"][:2]:
        assert sum(ends_with(row.output, word[:-1]) for row in rows) > 5
    assert sum(max((row.output.count(i) for i in range(3)), default=0) > 2 for row in rows) > 20


def test_each_option_changes_the_logits():
    logits = np.linspace(-4, 4, VOCAB, dtype=np.float32)
    for name in OPTIONS:
        row = Row(random.Random(3), params_of(name))
        row.output = [1, 1, 2, 2, 1][: 5 if name != "min_tokens" else 2]
        got = device_logits(logits[None], *state_of([row]), masks_of([row]))
        assert not np.array_equal(got[0], logits), name


def test_when_nothing_is_left_the_grammar_rules():
    logits = np.linspace(-4, 4, VOCAB, dtype=np.float32)
    cases = [
        ({"allowed_token_ids": (1, 2)}, {3, 4}, {3, 4}),
        ({"bad_words": ((3,), (4,))}, {3, 4}, {3, 4}),
        ({"min_tokens": 9, "stop_token_ids": (3,)}, {3}, {3}),
        ({"allowed_token_ids": (1, 2, 3), "bad_words": ((3,), (4,))}, {3, 4}, {3}),
        ({"allowed_token_ids": (8,), "bad_words": ((8,),)}, None, {8}),
    ]
    for options, grammar, left in cases:
        row = Row(random.Random(0), SamplingParams(max_tokens=99, temperature=0.0, **options))
        row.output, row.grammar = [1], grammar
        got = device_logits(logits[None], *state_of([row]), masks_of([row]))[0]
        assert set(np.flatnonzero(np.isfinite(got)).tolist()) == left, options


def test_the_most_of_everything():
    rng = random.Random(2)
    vocab = SPEC.vocab_size
    words = {tuple(rng.choices(range(vocab), k=MAX_BAD_WORD_LEN)) for _ in range(MAX_BAD_WORDS)}
    row = Row(
        rng,
        SamplingParams(
            max_tokens=99,
            temperature=0.0,
            logit_bias=tuple((i, rng.uniform(-100, 100)) for i in range(vocab)),
            bad_words=tuple(words),
            allowed_token_ids=tuple(range(vocab)),
        ),
    )
    row.output = list(sorted(words)[-1][:-1])
    assert vocab <= MAX_LOGIT_BIAS and len(words) == MAX_BAD_WORDS
    got = check([row], seed=5)
    assert np.isneginf(got[0, sorted(words)[-1][-1]])


# --- token by token ------------------------------------------------------------------------------

_sample = jax.jit(
    lambda logits, rows, table, state, mask: sample_step_with_options(
        SPEC, logits, rows, table, state, mask, tiny.SPEC.mesh
    ),
    donate_argnums=(2, 3),
)


@pytest.mark.parametrize("seed", range(4))
def test_counts_and_last_tokens_follow_what_is_sampled(seed):
    """Ten tokens a row, mostly of those that bad words are made of; in some steps some rows do not
    sample."""
    rng = random.Random(seed)
    names = list(OPTIONS)
    rows = []
    for i in range(NUM_ROWS):
        chosen = ["bad words", *rng.sample(names, i)]
        options = {k: v for n in chosen for k, v in OPTIONS[n].items()}
        rows.append(
            Row(
                rng,
                SamplingParams(
                    max_tokens=99, temperature=[0.0, 1.5][i % 2], top_k=3 * (i % 4), **options
                ),
            )
        )
    table, state = state_of(rows)
    table = jnp.asarray(table)
    numbers = np.random.default_rng(seed)
    for _ in range(10):
        logits = numbers.normal(0, 2, (NUM_ROWS, VOCAB)).astype(np.float32)
        logits[:, [1, 2, 70]] += 8
        samples = [rng.random() < 0.8 for _ in rows]
        lines = np.where(samples, np.arange(NUM_ROWS), NUM_ROWS).astype(np.int32)
        tokens, table, state = _sample(logits, lines, table, state, masks_of(rows))
        for idx, row in enumerate(rows):
            if not samples[idx]:
                continue
            want, token = row.expected(logits[idx]), int(tokens[idx])
            if row.sampling.temperature == 0:
                assert want[token] >= want.max() - 2 * TOLERANCE
            else:
                assert token in kept_tokens(want, row.sampling)
            row.output.append(token)
        table = table.at[:, 1].set([len(row.token_ids) for row in rows])


def test_the_state_is_updated_in_place():
    table, state = state_of([Row(random.Random(0), params_of("presence"))] * NUM_ROWS)
    table = jnp.asarray(table)
    before = [leaf.unsafe_buffer_pointer() for leaf in (table, *state)]
    logits, lines = np.zeros((NUM_ROWS, VOCAB), np.float32), np.arange(NUM_ROWS, dtype=np.int32)
    mask = np.zeros((NUM_ROWS, SPEC.mask_words), np.int32)
    _, table, state = _sample(logits, lines, table, state, mask)
    assert [leaf.unsafe_buffer_pointer() for leaf in (table, *state)] == before
