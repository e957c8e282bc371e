"""Options, log-probabilities and pooled vectors of whole requests, through the model runner."""

import random
from collections.abc import Iterator

import jax
import msgspec
import numpy as np
import pytest

from jaxserve.messages import RowExtras, SamplingParams, TokenLogprobs
from jaxserve.worker import model_runner, programs, prompt_outputs
from jaxserve.worker.model_runner import ModelRunner
from jaxserve.worker.programs import RunnerState
from jaxserve.worker.token_scores import top_sizes
from tests.worker import tiny
from tests.worker.numpy_options import log_softmax, shaped_logits

VOCAB = tiny.INFO.vocab_size
# Log-probabilities are differences of logits and of a sum over them.
TOLERANCE = 4 * tiny.LOGITS_TOLERANCE


def make_runner(state: RunnerState | None = None, **programs: object) -> ModelRunner:
    """A runner that is not warmed up. programs: instead of those that all tests share."""
    return ModelRunner(
        tiny.compiled_programs()._replace(**programs),
        tiny.params(),
        state or tiny.fresh_state(),
        tiny.OPTIONS,
        tiny.BLOCKS_PER_ROW,
    )


@pytest.fixture(scope="module", autouse=True)
def _small_extra_writes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "EXTRA_WRITES", tiny.EXTRA_WRITES)
        yield


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    """An empty batch; every test releases its rows."""
    runner = make_runner()
    runner.warm_up()
    return runner


def run(
    runner: ModelRunner,
    requests: dict[int, tuple[list[int], SamplingParams]],
    chunks: dict[int, list[int]] | None = None,
    num_steps: int = 1,
) -> tuple[dict[int, list[int]], dict[int, list[RowExtras]]]:
    """Tokens and extras of requests that run together, their prompts in chunks, at least
    `num_steps` steps. All steps are dispatched before the first is collected."""
    planner, plans = tiny.Planner(), []
    for row, (prompt, sampling) in requests.items():
        planner.admit(row, prompt, sampling)
    chunks = chunks or {row: [len(prompt)] for row, (prompt, _) in requests.items()}
    num_steps = max(num_steps, *(len(c) for c in chunks.values()))
    for step in range(num_steps):
        counts = {row: c[step] for row, c in chunks.items() if step < len(c) and c[step] != 1}
        plans.append(planner.plan(counts))
        runner.execute(plans[-1][0])
    tokens: dict[int, list[int]] = {row: [] for row in requests}
    extras: dict[int, list[RowExtras]] = {row: [] for row in requests}
    for plan, rows in plans:
        output = runner.collect()
        assert (output.step_id, output.num_compiles) == (plan.step_id, 0)
        for row, token in zip(rows, output.sampled_token_ids, strict=True):
            tokens[row].append(token)
        assert [e.row for e in output.extras] == sorted({e.row for e in output.extras})
        for extra in output.extras:
            extras[extra.row].append(extra)
    planner.release(*requests)
    runner.execute(planner.plan()[0])
    assert runner.collect().extras == []
    return tokens, extras


def arrays_of(scores: TokenLogprobs, num_chosen: int = 0) -> dict[str, np.ndarray]:
    """As a client of the message reads it."""
    n, k = scores.num_tokens, scores.num_top
    return {
        "logprobs": np.frombuffer(scores.logprobs, "<f4", n),
        "ranks": np.frombuffer(scores.ranks, "<i4", n),
        "top_ids": np.frombuffer(scores.top_ids, "<i4").reshape(n, k),
        "top_logprobs": np.frombuffer(scores.top_logprobs, "<f4").reshape(n, k),
        "chosen": np.frombuffer(scores.chosen_logprobs, "<f4").reshape(n, num_chosen),
    }


def check_scores(
    scores: TokenLogprobs, context: list[int], tokens: list[int], num_top: int, chosen=()
) -> None:
    """`tokens` follow `context` one by one."""
    got = arrays_of(scores, len(chosen))
    assert scores.num_tokens == len(tokens) and scores.num_top == num_top
    for i, token in enumerate(tokens):
        want = log_softmax(tiny.expected_logits(context + tokens[:i]))
        order = np.argsort(-want, kind="stable")
        np.testing.assert_allclose(got["logprobs"][i], want[token], rtol=0, atol=TOLERANCE)
        assert got["ranks"][i] == 1 + (want > want[token]).sum()
        assert got["top_ids"][i].tolist() == order[:num_top].tolist()
        np.testing.assert_allclose(
            got["top_logprobs"][i], want[order[:num_top]], rtol=0, atol=TOLERANCE
        )
        np.testing.assert_allclose(got["chosen"][i], want[list(chosen)], rtol=0, atol=TOLERANCE)


def params(**options: object) -> SamplingParams:
    return msgspec.structs.replace(tiny.GREEDY, **options)


# --- options -------------------------------------------------------------------------------------

OPTIONS = {
    "presence_penalty": 9.0,
    "frequency_penalty": 9.0,
    "repetition_penalty": 9.0,
    "logit_bias": ((17, 40.0),),
    "allowed_token_ids": (17, 33),
    "bad_words": "from the greedy tokens",
    "logits_processors": (("add_to_id", (17, 40.0)),),
    "min_tokens": 6,
    "temperature": 20.0,
}
PROMPT = tiny.prompt(7)


def option(name: str) -> SamplingParams:
    value = OPTIONS[name]
    greedy = tiny.greedy_tokens(PROMPT, 4)
    if name == "bad_words":
        return params(bad_words=(tuple(greedy[1:4]), tuple(greedy[:2])))
    if name == "min_tokens":
        return params(min_tokens=6, stop_token_ids=(greedy[2],))
    return params(**{name: value})


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_changes_the_output(runner, name):
    tokens, _ = run(runner, {1: (PROMPT, option(name))}, num_steps=6)
    assert tokens[1] != tiny.greedy_tokens(PROMPT, 6)


def some_requests() -> dict[int, tuple[list[int], SamplingParams]]:
    return {
        0: (
            tiny.prompt(5),
            params(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.7),
        ),
        1: (
            PROMPT,
            params(
                bad_words=(*((t,) for t in range(20, 30)), tuple(tiny.greedy_tokens(PROMPT, 2))),
                logit_bias=((3, 2.0), (60, -50.0)),
            ),
        ),
        2: (
            tiny.prompt(6),
            params(
                allowed_token_ids=tuple(range(0, VOCAB, 3)),
                logits_processors=(("add_to_id", (9, 4.0)), ("scale", (-1.0,))),
                min_tokens=4,
                stop_token_ids=(0, 3, 12),
                frequency_penalty=2.0,
            ),
        ),
        3: (tiny.prompt(4), tiny.GREEDY),
    }


def test_tokens_follow_the_definition_and_not_the_batch(runner):
    requests = some_requests()
    chunks = {0: [5], 1: [3, 4], 2: [0, 6], 3: [2, 1, 1]}
    together, _ = run(runner, requests, chunks, num_steps=11)
    for row, (prompt, sampling) in requests.items():
        output: list[int] = []
        for token in together[row]:
            logits = tiny.expected_logits(prompt + output)
            want = shaped_logits(logits, sampling, prompt, output)
            # Penalties and processors multiply errors, by 2 at most here.
            assert want[token] >= want.max() - 4 * tiny.LOGITS_TOLERANCE, (row, output)
            output.append(token)
        alone, _ = run(runner, {row: (prompt, sampling)}, num_steps=len(output))
        assert alone[row] == output


@pytest.mark.parametrize("row", range(3))
@pytest.mark.parametrize("num_known", [1, 3, 5])
def test_options_go_on_after_a_preemption(runner, row, num_known):
    prompt, sampling = some_requests()[row]
    whole, _ = run(runner, {row: (prompt, sampling)}, num_steps=9)
    planner, tokens = tiny.Planner(), []
    planner.admit(3, prompt + whole[row][:num_known], sampling, num_prompt_tokens=len(prompt))
    for counts in ({3: 4}, {3: len(prompt) + num_known - 4}, *[{}] * (8 - num_known)):
        runner.execute(planner.plan({r: n for r, n in counts.items() if n != 1})[0])
        tokens += runner.collect().sampled_token_ids
    planner.release(3)
    runner.execute(planner.plan()[0])
    runner.collect()
    assert tokens == whole[row][num_known:]


def test_a_row_without_options_has_none_of_the_row_before(runner):
    for _, sampling in list(some_requests().values())[:3]:
        run(runner, {2: (PROMPT, sampling)}, num_steps=3)
        other = {1: (tiny.prompt(3), params(presence_penalty=1.0))}  # so that options are looked at
        tokens, _ = run(runner, {2: (PROMPT, tiny.GREEDY)} | other, num_steps=6)
        assert tokens[2] == tiny.greedy_tokens(PROMPT, 6)


# --- log-probabilities ---------------------------------------------------------------------------


def test_logprobs_are_those_of_the_raw_logits(runner):
    """Whatever changes what is sampled; trimmed to what each row asks for."""
    chosen = (63, 0, 31)
    requests = {
        0: (tiny.prompt(5), params(logprobs=0)),
        1: (PROMPT, params(logprobs=5, presence_penalty=30.0, temperature=3.0, seed=5)),
        2: (tiny.prompt(6), params(logprob_token_ids=chosen, bad_words=((1,), (2,)))),
        3: (tiny.prompt(4), tiny.GREEDY),
    }
    tokens, extras = run(runner, requests, {0: [5], 1: [4, 3], 2: [6], 3: [4]}, num_steps=7)
    assert extras[3] == []
    for row, num_top in ((0, 0), (1, 5), (2, 0)):
        prompt, ids = requests[row][0], chosen if row == 2 else ()
        assert len(extras[row]) == len(tokens[row])
        for i, extra in enumerate(extras[row]):
            context = prompt + tokens[row][:i]
            check_scores(extra.logprobs, context, tokens[row][i : i + 1], num_top, ids)
            assert extra.prompt_logprobs is extra.embedding is None
    assert any(arrays_of(e.logprobs)["ranks"][0] > 1 for e in extras[1])


@pytest.mark.parametrize(("wanted", "num_top"), [(20, 20), (-1, VOCAB), (6, 6)])
def test_many_logprobs(runner, wanted, num_top):
    tokens, extras = run(runner, {1: (PROMPT, params(logprobs=wanted))}, num_steps=3)
    for i, extra in enumerate(extras[1]):
        context = PROMPT + tokens[1][:i]
        check_scores(extra.logprobs, context, tokens[1][i : i + 1], num_top)


def test_sizes_of_the_top():
    assert top_sizes(20, 500) == (20,)
    assert top_sizes(5, 500) == (5,)
    assert top_sizes(0, 500) == (0,)
    assert top_sizes(70, 500) == (20, 70)
    assert top_sizes(-1, 500) == (20, 500)
    assert top_sizes(-1, 9) == top_sizes(50, 9) == (9,)


def join(pieces: list[TokenLogprobs]) -> TokenLogprobs:
    fields = ("logprobs", "ranks", "top_ids", "top_logprobs", "chosen_logprobs")
    return TokenLogprobs(
        sum(p.num_tokens for p in pieces),
        pieces[0].num_top,
        *(b"".join(getattr(p, name) for p in pieces) for name in fields),
    )


@pytest.mark.parametrize(
    "chunks", [[20], [1, 19], [19, 1], [7, 0, 6, 7], [1] * 20], ids=lambda c: str(c[:4])
)
@pytest.mark.parametrize("num_top", [0, 3, 9])
def test_prompt_logprobs_by_any_chunks(runner, chunks, num_top):
    prompt, other = tiny.prompt(20, seed=3), tiny.prompt(3)
    requests = {
        0: (other, params(prompt_logprobs=4)),
        2: (prompt, params(prompt_logprobs=num_top)),
    }
    tokens, extras = run(runner, requests, {0: [0, 3][-len(chunks) :], 2: chunks}, num_steps=3)
    pieces = [e.prompt_logprobs for e in extras[2]]
    check_scores(join(pieces), prompt[:1], prompt[1:], num_top)
    check_scores(join([e.prompt_logprobs for e in extras[0]]), other[:1], other[1:], 4)
    assert len(pieces) == sum(n > 0 for n in chunks) - (chunks[-1] == 1)
    assert all(e.logprobs is None for e in extras[2])
    assert len(tokens[2]) > 0


def test_more_prompt_tokens_than_are_scored_at_once(monkeypatch):
    """Three pieces, and two rows in the second of them."""
    monkeypatch.setattr(prompt_outputs, "_MAX_PIECE", 5)
    prompts = {1: tiny.prompt(7, seed=5), 3: tiny.prompt(8, seed=6)}
    small = programs.compile_prompt_scores(
        tiny.SPEC, tiny.params(), tiny.shapes().step, tiny.TOPS[0]
    )
    small_runner = make_runner(prompt_scores={tiny.TOPS[0]: small})
    requests = {row: (prompt, params(prompt_logprobs=2)) for row, prompt in prompts.items()}
    _, extras = run(small_runner, requests)
    for row, prompt in prompts.items():
        check_scores(extras[row][0].prompt_logprobs, prompt[:1], prompt[1:], 2)


def test_prompt_logprobs_are_not_sent_again_after_a_preemption(runner):
    sampling = params(prompt_logprobs=2, logprobs=1)
    tokens, _ = run(runner, {1: (PROMPT, sampling)}, num_steps=4)
    planner = tiny.Planner()
    planner.admit(2, PROMPT + tokens[1][:2], sampling, num_prompt_tokens=len(PROMPT))
    runner.execute(planner.plan({2: 9})[0])
    (extra,) = runner.collect().extras
    assert extra.prompt_logprobs is None
    check_scores(extra.logprobs, PROMPT + tokens[1][:2], tokens[1][2:3], 1)
    # Preempted within its prompt, all of it is sent again.
    planner.release(2)
    planner.admit(0, PROMPT, sampling)
    runner.execute(planner.plan({0: 4})[0])
    runner.collect()
    planner.release(0)
    planner.admit(0, PROMPT, sampling)
    runner.execute(planner.plan({0: 7})[0])
    (extra,) = runner.collect().extras
    check_scores(extra.prompt_logprobs, PROMPT[:1], PROMPT[1:], 2)
    planner.release(0)
    runner.execute(planner.plan()[0])
    runner.collect()


# --- pooling -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
@pytest.mark.parametrize(
    "chunks", [[20], [1, 19], [19, 1], [7, 0, 6, 7], [1] * 20], ids=lambda c: str(c[:4])
)
def test_pooled_vectors_by_any_chunks(runner, pooling, chunks):
    """Beside another pooled row and one that is not; each row twice, the second time over what the
    first has left."""
    prompts = {0: tiny.prompt(20, seed=8), 1: tiny.prompt(3), 3: tiny.prompt(2)}
    requests = {
        0: (prompts[0], params(pooling=pooling)),
        1: (prompts[1], params(pooling="mean")),
        3: (prompts[3], tiny.GREEDY),
    }
    for _ in range(2):
        waits = [0] if len(chunks) > 1 else []
        _, extras = run(runner, requests, {0: chunks, 1: [*waits, 1, 2], 3: [*waits, 2]})
        assert extras[3] == []
        for row, kind in ((0, pooling), (1, "mean")):
            hidden = tiny.expected_hidden(prompts[row])
            want = {"last": hidden[-1], "mean": hidden.mean(axis=0), "cls": hidden[0]}[kind]
            (extra,) = extras[row]
            got = np.frombuffer(extra.embedding, "<f4")
            np.testing.assert_allclose(got, want, rtol=0, atol=tiny.LOGITS_TOLERANCE)
            assert extra.logprobs is extra.prompt_logprobs is None


def test_what_earlier_steps_have_left_does_not_matter():
    """NaN in all hidden states and sums, and in options and counts that nobody has."""
    clean = tiny.fresh_state()
    nan = [
        jax.device_put(np.full(a.shape, np.nan, a.dtype)) for a in (clean.step.hidden, clean.pooled)
    ]
    options = jax.tree.map(
        lambda a: jax.device_put(np.full(a.shape, 2**30 + 7, a.dtype)), clean.options
    )
    state = clean._replace(step=clean.step._replace(hidden=nan[0]), pooled=nan[1], options=options)
    requests = {
        1: (PROMPT, params(pooling="mean", prompt_logprobs=1)),
        2: (tiny.prompt(4), params(presence_penalty=9.0, bad_words=((1, 2), (3,)))),
        3: (tiny.prompt(6), tiny.GREEDY),
    }
    chunks = {1: [7], 2: [0, 4], 3: [0, 0, 6]}  # the smaller bucket
    want, want_extras = run(make_runner(), requests, chunks, num_steps=6)
    got, got_extras = run(make_runner(state), requests, chunks, num_steps=6)
    assert (got, got_extras) == (want, want_extras)
    assert want_extras[1][0].embedding is not None


def test_a_pooled_row_with_a_cached_prefix_is_refused(runner):
    planner = tiny.Planner()
    planner.admit(1, PROMPT, params(pooling="mean"))
    plan, _ = planner.plan({1: 3})
    admitted = msgspec.structs.replace(plan.admitted[0], num_computed_tokens=4)
    with pytest.raises(AssertionError, match="the prefix cache does not have"):
        make_runner().execute(msgspec.structs.replace(plan, admitted=[admitted]))


# --- all at once ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_random_requests_together_and_alone(runner, seed):
    """Tokens and extras are the same, but for rounding, whoever else is in the batch."""
    rng = random.Random(seed)
    requests = {}
    for row in range(tiny.NUM_ROWS):
        sampling = params(
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(2**64),
            top_k=rng.choice([0, 9]),
            presence_penalty=rng.choice([0.0, 0.5]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            logprobs=rng.choice([None, 0, 2, 7]),
            prompt_logprobs=rng.choice([None, 0, 3]),
            pooling=rng.choice(["", "mean", "last"]),
            logit_bias=tuple((i, rng.uniform(-2, 2)) for i in range(rng.choice([0, 30]))),
        )
        requests[row] = (tiny.prompt(rng.randint(1, 5), seed=seed), sampling)
    together = run(runner, requests, num_steps=5)
    for row, request in requests.items():
        tokens, extras = run(runner, {row: request}, num_steps=5)
        assert tokens[row] == together[0][row]
        assert len(extras[row]) == len(together[1][row])
        for one, other in zip(extras[row], together[1][row], strict=True):
            for name in ("logprobs", "prompt_logprobs"):
                a, b = getattr(one, name), getattr(other, name)
                assert (a is None) == (b is None)
                if a is not None:
                    for x, y in zip(arrays_of(a).values(), arrays_of(b).values(), strict=True):
                        np.testing.assert_allclose(x, y, rtol=0, atol=TOLERANCE)
            assert (one.embedding is None) == (other.embedding is None)
            if one.embedding is not None:
                np.testing.assert_allclose(
                    np.frombuffer(one.embedding, "<f4"),
                    np.frombuffer(other.embedding, "<f4"),
                    rtol=0,
                    atol=tiny.LOGITS_TOLERANCE,
                )
