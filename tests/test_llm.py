"""The offline LLM over the real engine core, scheduler and tokenizer, with a fake worker."""

import asyncio
import functools
from collections.abc import Iterator

import pytest

import jaxserve
from jaxserve import LLM, SamplingParams
from jaxserve.engine.core_client import InProcClient
from jaxserve.errors import EngineDeadError, RequestError, UserError
from tests.conftest import ROOT
from tests.fakes import FakeWorker, fake_next_token

VOCAB_SIZE = 320
TINY_LLAMA = str(ROOT / "tests" / "goldens" / "tiny_llama")
FIELDS = {
    "block_size": 16,
    "num_kv_blocks": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "dtype": "float32",
    "attention": "reference",
    "compilation_cache_dir": "none",
}


def next_token(token_ids: list[int]) -> int:
    """What SmallWorker samples after these tokens."""
    return 3 + fake_next_token(token_ids) % (VOCAB_SIZE - 3)


class SmallWorker(FakeWorker):
    """Samples from tiny_llama's vocabulary, without its special tokens."""

    def _run_row(self, row_idx: int, num_tokens: int) -> int | None:
        if super()._run_row(row_idx, num_tokens) is None:
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
