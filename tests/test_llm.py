"""The offline LLM over the real engine core, scheduler and tokenizer, with a fake worker."""

import asyncio
import functools
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

import jaxserve
from jaxserve import LLM, SamplingParams
from jaxserve.engine.in_proc_client import InProcClient
from jaxserve.errors import EngineDeadError, RequestError, UserError
from jaxserve.messages import ModelRunnerOutput, RowExtras, TokenLogprobs
from tests.conftest import ROOT
from tests.fakes import FakeWorker, fake_next_token
from tests.fakes_engine import fake_logprob, fake_logprobs

VOCAB_SIZE = 320
TINY_LLAMA = str(ROOT / "tests" / "goldens" / "tiny_llama")
FIELDS = {
    "block_size": 16,
    "num_kv_blocks": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_num_mixed_tokens": 64,
    "jump_ahead_tokens": 64,
    "dtype": "float32",
    "attention": "reference",
    "matmul": "xla",
    "compilation_cache_dir": "none",
}


def next_token(token_ids: list[int]) -> int:
    """What SmallWorker samples after these tokens."""
    return 3 + fake_next_token(token_ids) % (VOCAB_SIZE - 3)


class SmallWorker(FakeWorker):
    """Samples from tiny_llama's vocabulary, without its special tokens."""

    def _run_row(self, row_idx: int, num_tokens: int, mask: np.ndarray | None) -> int | None:
        if super()._run_row(row_idx, num_tokens, mask) is None:
            return None
        token_ids = self.rows[row_idx].token_ids
        token_ids[-1] = next_token(token_ids[:-1])
        return token_ids[-1]


class DyingWorker(SmallWorker):
    """Fails in its second step."""

    def execute(self, plan) -> None:
        if self.num_steps == 1:
            raise RuntimeError("out of device memory")
        super().execute(plan)


class ScoringWorker(SmallWorker):
    """Reports the log-probabilities of tests/fakes_engine.py, as if nothing came before."""

    def collect(self) -> ModelRunnerOutput:
        result = super().collect()
        extras = [self._scored(extra) for extra in result.extras]
        return msgspec.structs.replace(result, extras=extras)

    def _scored(self, extra: RowExtras) -> RowExtras:
        sampling = self.rows[extra.row].sampling
        chosen = sampling.logprob_token_ids
        return msgspec.structs.replace(
            extra,
            logprobs=_scores(extra.logprobs, sampling.logprobs, chosen),
            prompt_logprobs=_scores(extra.prompt_logprobs, sampling.prompt_logprobs, ()),
        )


def _scores(
    piece: TokenLogprobs | None, num_top: int | None, chosen: tuple[int, ...]
) -> TokenLogprobs | None:
    """FakeWorker writes the tokens in place of their ranks."""
    if piece is None:
        return None
    token_ids = np.frombuffer(piece.ranks, "<i4").tolist()
    return fake_logprobs(0, token_ids, num_top or 0, chosen, VOCAB_SIZE)


def expected_tokens(prompt: list[int], num_tokens: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


def make_llm(monkeypatch: pytest.MonkeyPatch, worker: type, **fields: object) -> LLM:
    worker_class = f"{__name__}:{worker.__name__}"
    client = functools.partial(InProcClient, worker_class=worker_class)
    monkeypatch.setattr("jaxserve.llm.InProcClient", client)
    return LLM(TINY_LLAMA, **FIELDS | fields)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    with make_llm(monkeypatch, SmallWorker) as llm:
        yield llm


def test_texts_and_token_ids(llm: LLM) -> None:
    prompt_ids = llm.tokenizer.encode("Hello there", add_special_tokens=True)
    params = SamplingParams(max_tokens=9)
    for prompts in ("Hello there", ["Hello there"], prompt_ids, [prompt_ids]):
        (result,) = llm.generate(prompts, params, use_tqdm=False)
        assert result.prompt_token_ids == prompt_ids
        (choice,) = result.outputs
        assert choice.token_ids == expected_tokens(prompt_ids, 9)
        assert choice.text == llm.tokenizer.decode(choice.token_ids, skip_special_tokens=True)
        assert (choice.finish_reason, choice.stop_reason, choice.index) == ("length", None, 0)
        assert result.text == choice.text


def test_log_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = list(range(3, 100))  # computed in two steps
    params = SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=0, n=2)
    with make_llm(monkeypatch, ScoringWorker) as llm:
        (result,) = llm.generate(prompt, params, use_tqdm=False)
        assert result.prompt_logprobs is not None
        assert result.prompt_logprobs[0] is None
        for place, (token_id, entry) in enumerate(
            zip(prompt[1:], result.prompt_logprobs[1:], strict=True)
        ):
            assert entry is not None and list(entry) == [token_id]
            # The second step starts anew, 64 tokens on.
            logprob = fake_logprob(place % 64, token_id) if token_id != 13 else -9999.0
            assert entry[token_id].logprob == logprob
        for choice in result.outputs:
            assert choice.logprobs is not None
            for token_id, entry in zip(choice.token_ids, choice.logprobs, strict=True):
                assert entry[token_id].logprob == fake_logprob(0, token_id)
                likeliest = [e for e in entry.values() if e.rank in (1, 2)]
                assert [e.logprob for e in likeliest] == [0.0, 0.0]
        chosen = SamplingParams(max_tokens=1, logprob_token_ids=[5])
        (entry,) = llm.generate([3], chosen, use_tqdm=False)[0].outputs[0].logprobs or [{}]
        assert (entry[5].logprob, entry[5].rank) == (fake_logprob(0, 5), None)


def test_nobody_asked_for_log_probabilities(llm: LLM) -> None:
    (result,) = llm.generate([5, 6], SamplingParams(max_tokens=2), use_tqdm=False)
    assert result.prompt_logprobs is None
    assert result.outputs[0].logprobs is None


def test_only_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_llm(monkeypatch, ScoringWorker) as llm:
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        (result,) = llm.generate([5, 6], params, use_tqdm=False)
        assert (result.text, result.outputs[0].token_ids) == ("", [])
        assert len(result.prompt_logprobs or ()) == 2


def test_truncation(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, truncate_prompt_tokens=3)
    (result,) = llm.generate(list(range(3, 300)) * 3, params, use_tqdm=False)
    assert result.prompt_token_ids == [297, 298, 299]
    assert result.outputs[0].token_ids == expected_tokens([297, 298, 299], 2)


def test_embeddings(llm: LLM) -> None:
    """The fake's vector is the sum of the prompt's tokens."""
    results = llm.embed([[5, 6], [7]], normalize=False, use_tqdm=False)
    assert [result.embedding for result in results] == [[11.0], [7.0]]
    assert [result.prompt_token_ids for result in results] == [[5, 6], [7]]
    assert llm.embed([5, 6], use_tqdm=False)[0].embedding == [1.0]
    wrong: list[dict[str, Any]] = [{"dimensions": 0}, {"dimensions": 999}, {"pooling": "max"}]
    for options in wrong:
        (param,) = options
        with pytest.raises(RequestError) as caught:
            llm.embed([5], **options)
        assert caught.value.param == param
    with pytest.raises(RequestError):
        llm.embed([[1] * 600])


def test_many_prompts_with_params_of_their_own(llm: LLM) -> None:
    prompts = [[i, 5] for i in range(3, 23)]
    params = [SamplingParams(max_tokens=i % 7 + 1, n=i % 3 + 1) for i in range(20)]
    results = llm.generate(prompts, params, use_tqdm=False)
    for prompt, prompt_params, result in zip(prompts, params, results, strict=True):
        assert result.prompt_token_ids == prompt
        assert [choice.index for choice in result.outputs] == list(range(prompt_params.n))
        for choice in result.outputs:
            assert choice.token_ids == expected_tokens(prompt, prompt_params.max_tokens or 0)


def test_default_lengths(llm: LLM) -> None:
    (plain,) = llm.generate([5, 6], use_tqdm=False)
    assert len(plain.outputs[0].token_ids) == 16
    messages = [{"role": "user", "content": "hi"}]
    (chat,) = llm.chat(messages, SamplingParams(ignore_eos=True), use_tqdm=False)
    assert len(chat.prompt_token_ids) + len(chat.outputs[0].token_ids) == 512


def test_chat(llm: LLM) -> None:
    hello = [{"role": "user", "content": [{"type": "text", "text": "Hello there"}]}]
    bye = [{"role": "system", "content": "x"}, {"role": "user", "content": "bye"}]
    params = SamplingParams(max_tokens=3)
    (one,) = llm.chat(hello, params, use_tqdm=False)
    text = llm.tokenizer.decode(one.prompt_token_ids, skip_special_tokens=False)
    assert text.endswith("user: Hello there<|end|>\nassistant:")
    assert llm.chat([hello, bye], params, use_tqdm=False)[0].outputs == one.outputs
    (bare,) = llm.chat(hello, params, use_tqdm=False, add_generation_prompt=False)
    assert not llm.tokenizer.decode(bare.prompt_token_ids, skip_special_tokens=False).endswith(":")


def test_a_stop_string_ends_the_sequence_in_the_engine_too(llm: LLM) -> None:
    (whole,) = llm.generate([5, 6], SamplingParams(max_tokens=40), use_tqdm=False)
    stop = whole.text[10:13]
    (cut,) = llm.generate([5, 6], SamplingParams(max_tokens=40, stop=stop), use_tqdm=False)
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    assert len(cut.outputs[0].token_ids) < 40
    llm.generate([5], SamplingParams(max_tokens=1), use_tqdm=False)
    assert llm._client.stats.num_running == 0


def test_a_running_event_loop_is_no_obstacle(llm: LLM) -> None:
    """As in a notebook."""

    async def main() -> str:
        return llm.generate("Hello", SamplingParams(max_tokens=3), use_tqdm=False)[0].text

    assert asyncio.run(main()) == llm.generate("Hello", SamplingParams(max_tokens=3))[0].text


def test_progress(llm: LLM, capsys: pytest.CaptureFixture) -> None:
    llm.generate([[5], [6]], SamplingParams(max_tokens=2))
    assert "2/2" in capsys.readouterr().err
    llm.generate([[5], [6]], SamplingParams(max_tokens=2), use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_an_interrupt_leaves_a_usable_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, num_steps = llm._client.step, 0

    def interrupted_step():
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm._client, "step", interrupted_step)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5], [6]], SamplingParams(max_tokens=50), use_tqdm=False)
    assert llm._output_processor.num_unfinished == 0
    (result,) = llm.generate([5, 6], SamplingParams(max_tokens=5), use_tqdm=False)
    assert result.outputs[0].token_ids == expected_tokens([5, 6], 5)
    assert llm._client.stats.num_running == 0


def test_the_prefix_cache(llm: LLM) -> None:
    prompt = list(range(3, 53))
    params = SamplingParams(max_tokens=1)
    assert llm.generate(prompt, params, use_tqdm=False)[0].num_cached_tokens == 0
    assert llm.generate(prompt, params, use_tqdm=False)[0].num_cached_tokens == 48
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, params, use_tqdm=False)[0].num_cached_tokens == 0


@pytest.mark.parametrize(
    ("prompts", "params", "param"),
    (
        ([], None, "prompt"),
        (["a", [1]], None, "prompt[1]"),
        ([[1], [VOCAB_SIZE]], None, "prompt[1][0]"),
        ([[1] * 600], None, "prompt[0]"),
        (["a", "b"], [SamplingParams()], "sampling_params"),
    ),
)
def test_bad_requests(llm: LLM, prompts: list, params: list | None, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(prompts, params)
    assert caught.value.param == param
    assert not llm._client.has_work


@pytest.mark.parametrize("messages", ([], [{"role": "user"}], [{"role": "user", "content": 5}]))
def test_bad_chats(llm: LLM, messages: list) -> None:
    with pytest.raises(RequestError):
        llm.chat(messages)


def test_it_runs_in_this_process_unless_told_otherwise(llm: LLM) -> None:
    assert llm.config.worker.executor == "in_process"


def test_bad_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="max_model_length"):
        make_llm(monkeypatch, SmallWorker, max_model_length=5)
    with pytest.raises(UserError, match="has one engine core, not 2"):
        make_llm(monkeypatch, SmallWorker, mesh="2x1")
    with pytest.raises(UserError, match="512"):
        make_llm(monkeypatch, SmallWorker, max_model_len=5000)


def test_death(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(monkeypatch, DyingWorker)
    with pytest.raises(EngineDeadError, match="out of device memory"):
        llm.generate([5], SamplingParams(max_tokens=5), use_tqdm=False)
    llm.close()
    llm.close()


def test_lazy_exports() -> None:
    assert jaxserve.LLM is LLM
    with pytest.raises(AttributeError, match="nonsense"):
        jaxserve.nonsense  # noqa: B018  (the access is the test)
