"""One request gives the same tokens whatever runs beside it and however it is cut up."""

import pytest

from jaxserve.messages import SamplingParams
from tests.e2e.engine import GOLDENS

PROMPTS = [g["prompt_ids"] for g in GOLDENS["prompts"] if len(g["prompt_ids"]) < 100]
NUM_TOKENS = 20
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=NUM_TOKENS, temperature=0),
    "seeded": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, top_p=0.95, seed=2**40 + 7),
    "filtered": SamplingParams(
        max_tokens=NUM_TOKENS, temperature=1.2, top_k=40, min_p=0.02, seed=5, min_tokens=3
    ),
}
# The request under test, and what runs beside it where something does.
CASES = [(3, "greedy"), (9, "seeded"), (13, "filtered")]
NEIGHBOURS = [(prompt, list(SAMPLINGS.values())[i % 3]) for i, prompt in enumerate(PROMPTS[:16])]


# In every run only one of both: a batch of 16 is there with both.
both_slowly = pytest.mark.parametrize(
    "async_scheduling",
    [pytest.param(True, id="async"), pytest.param(False, id="sync", marks=pytest.mark.slow)],
)


@pytest.fixture(scope="module")
def alone(make_engine):
    """Each case by itself, synchronously, on an engine of its own."""
    return {
        case: make_engine(async_scheduling=False).generate(
            [PROMPTS[case[0]]], [SAMPLINGS[case[1]]]
        )[0]
        for case in CASES
    }


def run_cases(engine) -> dict:
    """All cases among their neighbours, 16 requests at once."""
    requests = list(NEIGHBOURS)
    for prompt_idx, name in CASES:
        requests[prompt_idx] = (PROMPTS[prompt_idx], SAMPLINGS[name])
    outputs = engine.generate([r[0] for r in requests], [r[1] for r in requests])
    return {case: outputs[case[0]] for case in CASES}


def test_the_cases_tell_apart(alone):
    assert len({tuple(tokens) for tokens in alone.values()}) == len(CASES)
    assert all(len(tokens) == NUM_TOKENS for tokens in alone.values())


@pytest.mark.parametrize("async_scheduling", [True, False], ids=["async", "sync"])
def test_in_a_batch_of_16(make_engine, alone, async_scheduling):
    assert run_cases(make_engine(async_scheduling=async_scheduling)) == alone


@both_slowly
def test_chunked_at_7_tokens_a_step(make_engine, alone, async_scheduling):
    for case in CASES:
        engine = make_engine(
            max_num_batched_tokens=7, max_num_seqs=7, async_scheduling=async_scheduling
        )
        prompt = PROMPTS[case[0]]
        assert engine.generate([prompt], [SAMPLINGS[case[1]]])[0] == alone[case]
        assert engine.executor.num_steps >= len(prompt) / 7 + NUM_TOKENS - 1


def test_with_its_prefix_cached(make_engine, alone):
    engine = make_engine()
    for case in CASES:
        request = [PROMPTS[case[0]]], [SAMPLINGS[case[1]]]
        assert engine.generate(*request)[0] == alone[case]
        assert engine.generate(*request)[0] == alone[case]
    first, second = (list(engine.num_cached_tokens.values())[i::2] for i in (0, 1))
    assert first == [0, 0, 0] and all(cached >= 16 for cached in second), (first, second)


@both_slowly
def test_after_forced_preemption(make_engine, alone, async_scheduling):
    engine = make_engine(
        num_kv_blocks=14,  # 13 blocks of 16 tokens for 16 requests of 21 to 80 tokens
        max_model_len=128,
        enable_prefix_caching=False,
        async_scheduling=async_scheduling,
    )
    assert run_cases(engine) == alone
    assert engine.stats.num_preemptions > 3
