"""Log-probabilities and pooled vectors against goldens that transformers made in float32."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from jaxserve.messages import EngineCoreOutput, FinishReason, SamplingParams, TokenLogprobs
from tests.e2e.engine import Engine

GOLDENS = json.loads(
    (Path(__file__).parent.parent / "goldens" / "smollm2_logprobs.json").read_text("utf-8")
)
PROMPTS = GOLDENS["prompts"]
POOLED = GOLDENS["pooled"]
VOCAB_SIZE = 49152
NUM_TOKENS = 8
NUM_TOP = 5
TIE = GOLDENS["rank_tie"]

# One sigma of a float32 logit's error is 1e-5 of the largest logit (test_right_tokens.py says why).
# A log-probability is the difference of two values with that error. The worst of 2,000 lies within
# 4 sigma: 4 * sqrt(2) * 1e-5 * 43 = 2.4e-3 for the largest of these logits, 1.8e-3 for most; the
# goldens are rounded to 5e-6.
SIGMA = 2**0.5 * 1e-5
# A pooled vector's error, relative to its length, is that of a hidden state: the same 1e-5.
VECTOR_SIGMA = 1e-5


class Arrays(NamedTuple):
    """The TokenLogprobs of n tokens: [n], [n], [n, top], [n, top], [n, chosen]."""

    logprobs: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    chosen: np.ndarray


def arrays(pieces: Sequence[TokenLogprobs], num_top: int, num_chosen: int = 0) -> Arrays:
    """All pieces in a row; every one has the shapes it says."""
    parts = []
    for piece in pieces:
        assert piece.num_top == num_top and piece.num_tokens > 0, piece
        n, ints = piece.num_tokens, np.dtype("<i4")
        floats = np.dtype("<f4")
        part = Arrays(
            np.frombuffer(piece.logprobs, floats),
            np.frombuffer(piece.ranks, ints),
            np.frombuffer(piece.top_ids, ints).reshape(n, num_top),
            np.frombuffer(piece.top_logprobs, floats).reshape(n, num_top),
            np.frombuffer(piece.chosen_logprobs, floats).reshape(n, num_chosen),
        )
        assert part.logprobs.shape == part.ranks.shape == (n,)
        parts.append(part)
    return Arrays(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def assert_right(got: Arrays, golden: dict, max_logit: float, what: str) -> None:
    """Values within tolerance; ranks and ids equal but where values closer than TIE change places.

    Least and greatest right rank are in the golden.
    """
    wanted = np.array(golden["logprobs"])
    assert got.logprobs.shape == wanted.shape, what
    top = np.array(golden["top_logprobs"])
    num_top = got.top_ids.shape[1]
    errors = np.concatenate(
        [got.logprobs - wanted, (got.top_logprobs - top[:, :num_top]).ravel()]
    ) / (SIGMA * max_logit)
    assert np.abs(errors).max() < 4, (what, np.abs(errors).max())
    assert np.sqrt(np.mean(errors**2)) < 1, what
    for i, (least, greatest) in enumerate(golden["ranks"]):
        assert least <= got.ranks[i] <= greatest, (what, i, got.ranks[i], golden["ranks"][i])
    for i, ids in enumerate(got.top_ids):
        for j, token_id in enumerate(ids):
            near = np.abs(top[i] - top[i, j]) < TIE
            assert token_id in np.array(golden["top_ids"][i])[near], (what, i, j, token_id)


def run(engine: Engine, prompts: Sequence[list[int]], *sampling: SamplingParams) -> list:
    """Outputs of each request, in order; requests arrive together."""
    before = len(engine.outputs)
    engine.generate(prompts, sampling * len(prompts) if len(sampling) == 1 else sampling)
    return [engine.outputs[f"r{i}"] for i in range(before, len(engine.outputs))]


def token_ids(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def of_output(outputs: list[EngineCoreOutput], num_top: int, num_chosen: int = 0) -> Arrays:
    """The log-probabilities that came with each output, as many as it has tokens."""
    pieces = []
    for output in outputs:
        num = 0 if output.logprobs is None else output.logprobs.num_tokens
        assert num == len(output.new_token_ids)
        if output.logprobs is not None:
            pieces.append(output.logprobs)
    return arrays(pieces, num_top, num_chosen)


def of_prompt(outputs: list[EngineCoreOutput], num_top: int) -> Arrays:
    """Those of the prompt: with the first output, all at once."""
    assert outputs[0].prompt_logprobs is not None
    assert all(output.prompt_logprobs is None for output in outputs[1:])
    return arrays(outputs[0].prompt_logprobs, num_top)


@pytest.fixture(scope="module", params=["whole", "chunked", "cached", "sync"])
def engine(request, make_engine) -> Engine:
    """An engine that computes prompts at once, or 7 tokens a step, or finds them in its cache."""
    if request.param == "chunked":
        return make_engine(max_num_batched_tokens=7, max_num_seqs=7)
    engine = make_engine(async_scheduling=request.param != "sync")
    if request.param == "cached":
        known = [golden["prompt_ids"] for golden in PROMPTS + POOLED]
        run(engine, known, SamplingParams(max_tokens=1))
    return engine


def test_prompt_and_output(engine):
    params = SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0, logprobs=NUM_TOP, prompt_logprobs=NUM_TOP
    )
    results = run(engine, [golden["prompt_ids"] for golden in PROMPTS], params)
    for golden, outputs in zip(PROMPTS, results, strict=True):
        name, max_logit = golden["name"], golden["max_logit"]
        assert token_ids(outputs) == golden["output_ids"]
        assert_right(of_prompt(outputs, NUM_TOP), golden["prompt"], max_logit, f"{name} prompt")
        assert_right(of_output(outputs, NUM_TOP), golden["output"], max_logit, f"{name} output")
        assert outputs[-1].finish_reason == FinishReason.LENGTH


def test_requests_that_ask_for_different_things(engine):
    """Side by side: nothing, the own only, some, some of named tokens, of the prompt only."""
    probes = tuple(GOLDENS["probe_ids"])
    asked = [
        SamplingParams(max_tokens=NUM_TOKENS, temperature=0, **wishes)
        for wishes in (
            {},
            {"logprobs": 0},
            {"logprobs": 3},
            {"logprobs": 1, "logprob_token_ids": probes},
            {"prompt_logprobs": 0},
            {"prompt_logprobs": 2, "logprobs": 1},
        )
    ]
    goldens = PROMPTS[: len(asked)]
    nothing, own, three, probed, prompt, both = run(
        engine, [golden["prompt_ids"] for golden in goldens], *asked
    )
    for golden, outputs in zip(goldens, (nothing, own, three, probed, prompt, both), strict=True):
        assert token_ids(outputs) == golden["output_ids"]
    for outputs in (nothing, prompt):
        assert all(output.logprobs is None for output in outputs)
    for outputs in (nothing, own, three, probed):
        assert all(output.prompt_logprobs is None for output in outputs)

    def check(i: int, part: str, got: Arrays) -> None:
        assert_right(got, goldens[i][part], goldens[i]["max_logit"], f"request {i}, {part}")

    check(1, "output", of_output(own, 0))
    check(2, "output", of_output(three, 3))
    got = of_output(probed, 1, len(probes))
    check(3, "output", got)
    wanted = np.array(goldens[3]["output"]["probe_logprobs"])
    assert np.abs(got.chosen - wanted).max() < 4 * SIGMA * goldens[3]["max_logit"]
    check(4, "prompt", of_prompt(prompt, 0))
    check(5, "prompt", of_prompt(both, 2))
    check(5, "output", of_output(both, 1))


def test_the_whole_vocabulary(engine):
    golden = PROMPTS[0]
    params = SamplingParams(max_tokens=2, temperature=0, logprobs=-1)
    (outputs,) = run(engine, [golden["prompt_ids"]], params)
    got = of_output(outputs, VOCAB_SIZE)
    for ids, logprobs in zip(got.top_ids, got.top_logprobs, strict=True):
        assert np.array_equal(np.sort(ids), np.arange(VOCAB_SIZE))
        assert (np.diff(logprobs) <= 0).all()
        # Each of the 49,152 terms has a relative error of at most the worst log-probability's.
        total = np.exp(logprobs.astype(np.float64)).sum()
        assert abs(total - 1) < 4 * SIGMA * golden["max_logit"]
    likeliest = Arrays(*got[:2], got.top_ids[:, :NUM_TOP], got.top_logprobs[:, :NUM_TOP], got[4])
    cut = {k: v[:2] if isinstance(v, list) else v for k, v in golden["output"].items()}
    assert_right(likeliest, cut, golden["max_logit"], "whole vocabulary")


def test_sampled_tokens_have_the_models_own_logprobs(engine):
    """Neither temperature nor filters nor penalties change what is reported."""
    golden = PROMPTS[1]
    probes = tuple(GOLDENS["probe_ids"])
    params = SamplingParams(
        max_tokens=1,
        temperature=1.7,
        top_k=50,
        seed=3,
        logit_bias=((probes[0], 100.0),),
        presence_penalty=1.0,
        logprobs=NUM_TOP,
    )
    (outputs,) = run(engine, [golden["prompt_ids"]], params)
    got = of_output(outputs, NUM_TOP)
    assert token_ids(outputs) == [probes[0]]
    wanted = golden["output"]
    tolerance = 4 * SIGMA * golden["max_logit"]
    assert abs(got.logprobs[0] - wanted["probe_logprobs"][0][0]) < tolerance
    assert got.top_ids[0].tolist() == wanted["top_ids"][0][:NUM_TOP]
    assert np.abs(got.top_logprobs[0] - wanted["top_logprobs"][0][:NUM_TOP]).max() < tolerance
    assert got.ranks[0] > NUM_TOP


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_pooled_vectors(engine, pooling):
    params = SamplingParams(max_tokens=1, pooling=pooling)
    results = run(engine, [golden["prompt_ids"] for golden in POOLED], params)
    for golden, outputs in zip(POOLED, results, strict=True):
        (output,) = outputs
        assert output.embedding is not None and output.finish_reason is not None
        got = np.frombuffer(output.embedding, "<f4")
        wanted = np.frombuffer(base64.b64decode(golden[pooling]), "<f4")
        assert got.shape == wanted.shape
        error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
        assert error < VECTOR_SIGMA, (golden["name"], error)


def test_cached_prefixes_are_read_for_outputs_only(make_engine):
    """Log-probabilities of outputs are right over cached blocks; those of prompts need no cache."""
    engine, golden = make_engine(), PROMPTS[6]
    assert len(golden["prompt_ids"]) > 32
    output_only = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, logprobs=NUM_TOP)
    with_prompt = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=NUM_TOP)
    cached = []
    for params in (with_prompt, output_only, with_prompt):
        (outputs,) = run(engine, [golden["prompt_ids"]], params)
        cached.append(max(output.num_cached_tokens for output in outputs))
        if params.logprobs is not None:
            assert_right(
                of_output(outputs, NUM_TOP), golden["output"], golden["max_logit"], "output"
            )
        else:
            assert_right(
                of_prompt(outputs, NUM_TOP), golden["prompt"], golden["max_logit"], "prompt"
            )
    assert cached[0] == cached[2] == 0 and cached[1] >= 32, cached
