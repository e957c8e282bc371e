"""Stand-ins that tests share: a worker without a model, and a config that needs nothing derived."""

import queue
import threading
import time
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.config import EngineConfig, ModelInfo, replace
from jaxserve.errors import UserError
from jaxserve.messages import (
    ALONE,
    EngineCoreRequest,
    GrammarMask,
    ModelRunnerOutput,
    ProcessGroup,
    RowExtras,
    SamplingParams,
    SchedulerOutput,
    TokenLogprobs,
)

FAKE_VOCAB_SIZE = 1000


def fake_config(**flat: object) -> EngineConfig:
    """A resolved config of a small engine; `flat` changes fields by name, as `replace` does."""
    info = ModelInfo(
        path="fake",
        format="gguf",
        architecture="fake",
        num_layers=1,
        hidden_size=8,
        intermediate_size=8,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        vocab_size=FAKE_VOCAB_SIZE,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
    )
    fields: dict[str, object] = {
        "model": "fake",
        "served_model_name": "fake",
        "dtype": "float32",
        "max_model_len": 4096,
        "info": info,
        "block_size": 16,
        "num_kv_blocks": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_num_mixed_tokens": 64,
        "jump_ahead_tokens": 64,
        "attention": "reference",
        "matmul": "xla",
        "compilation_cache_dir": "none",
        "step_timeout_s": 30.0,
        "num_hosts": 1,
    }
    return replace(EngineConfig(), **(fields | flat))


def fake_request(
    request_id: str,
    prompt: list[int],
    *,
    max_tokens: int = 4,
    client_idx: int = 0,
    grammar: str | None = None,
    **sampling: Any,
) -> EngineCoreRequest:
    """A request as an API server would send it."""
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        arrival_time_s=0.0,
        client_idx=client_idx,
        grammar=grammar,
    )


def fake_next_token(token_ids: list[int]) -> int:
    """What the fake model samples after these tokens: depends on every one of them."""
    return zlib.crc32(repr(token_ids).encode()) % FAKE_VOCAB_SIZE


def fake_output(prompt: list[int], max_tokens: int) -> list[int]:
    """What the fake model generates for a prompt."""
    token_ids = list(prompt)
    for _ in range(max_tokens):
        token_ids.append(fake_next_token(token_ids))
    return token_ids[len(prompt) :]


def fake_logprobs(token_ids: list[int]) -> TokenLogprobs:
    """Stands for the log-probabilities of these tokens: the ranks are the tokens."""
    return TokenLogprobs(len(token_ids), 0, b"", np.array(token_ids, "<i4").tobytes(), b"", b"")


def fake_embedding(token_ids: list[int]) -> bytes:
    """Stands for the pooled vector of a prompt."""
    return np.array([sum(token_ids)], "<f4").tobytes()


@dataclass
class _Row:
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    sampling: SamplingParams


class FakeWorker:
    """Keeps the state that a worker keeps, from the deltas alone, and checks every delta.

    Its model is `fake_next_token`, so a lost, doubled or misplaced token changes all that follow;
    under a mask the next token is as arbitrary, among those allowed.
    """

    def __init__(self, config: EngineConfig, group: ProcessGroup = ALONE):
        del group
        self.config = config
        self.rows: dict[int, _Row] = {}
        self.num_steps = 0
        self._results: queue.SimpleQueue[ModelRunnerOutput] = queue.SimpleQueue()
        self._awaits_mask: SchedulerOutput | None = None

    def load(self) -> EngineConfig:
        return self.config

    def execute(self, plan: SchedulerOutput) -> None:
        assert self._awaits_mask is None, f"{plan.step_id} came before the mask"
        self._apply(plan)
        if plan.awaits_mask:
            self._awaits_mask = plan
        else:
            self._sample(plan, {})

    def sample(self, mask: GrammarMask) -> None:
        plan, self._awaits_mask = self._awaits_mask, None
        assert plan is not None and plan.step_id == mask.step_id, (plan, mask)
        assert mask.rows == sorted(set(mask.rows)) and mask.rows, mask
        words = np.frombuffer(mask.bits, "<u4").reshape(len(mask.rows), -1)
        assert words.shape[1] == -(-FAKE_VOCAB_SIZE // 32), words.shape
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        self._sample(plan, dict(zip(mask.rows, bits[:, :FAKE_VOCAB_SIZE], strict=True)))

    def collect(self) -> ModelRunnerOutput:
        return self._results.get()

    def _apply(self, plan: SchedulerOutput) -> None:
        for row in plan.released_rows:
            del self.rows[row]
        for admitted in plan.admitted:
            assert admitted.row not in self.rows, (admitted.row, plan)
            self.rows[admitted.row] = _Row(
                list(admitted.token_ids),
                admitted.num_prompt_tokens,
                admitted.num_computed_tokens,
                list(admitted.block_ids),
                admitted.sampling,
            )
        for row, token_ids in plan.forced_tokens:
            assert token_ids and row not in [admitted.row for admitted in plan.admitted], plan
            self.rows[row].token_ids += token_ids
        new_blocks = iter(plan.new_blocks)
        for row, block_id in zip(new_blocks, new_blocks, strict=True):
            self.rows[row].block_ids.append(block_id)

    def _sample(self, plan: SchedulerOutput, masks: dict[int, np.ndarray]) -> None:
        counts = iter(plan.num_tokens)
        num_tokens = dict.fromkeys(self.rows, 1) | dict(zip(counts, counts, strict=True))
        assert num_tokens.keys() == self.rows.keys(), (self.rows.keys(), plan)
        sampled, extras = [], []
        for idx in sorted(self.rows):
            row = self.rows[idx]
            start = row.num_computed_tokens
            token_id = self._run_row(idx, num_tokens[idx], masks.get(idx))
            if token_id is not None:
                sampled.append(token_id)
            if num_tokens[idx]:
                extras += _row_extras(idx, row, start, token_id)
        self._results.put(ModelRunnerOutput(plan.step_id, sampled, extras=extras))
        self.num_steps += 1

    def _run_row(self, row_idx: int, num_tokens: int, mask: np.ndarray | None) -> int | None:
        row = self.rows[row_idx]
        row.num_computed_tokens += num_tokens
        num_slots = len(row.block_ids) * self.config.cache.block_size
        assert row.num_computed_tokens <= min(len(row.token_ids), num_slots), (row_idx, row)
        if not num_tokens or row.num_computed_tokens < len(row.token_ids):
            assert mask is None, (row_idx, row)
            return None
        token_id = fake_next_token(row.token_ids)
        if mask is not None:
            allowed = np.flatnonzero(mask)
            assert len(allowed), f"row {row_idx} may sample nothing"
            token_id = int(allowed[token_id % len(allowed)])
        row.token_ids.append(token_id)
        return token_id


def _row_extras(idx: int, row: _Row, start: int, token_id: int | None) -> list[RowExtras]:
    """What a worker sends beside the row's token; start: tokens computed before this step."""
    logprobs = prompt_logprobs = embedding = None
    sampling, end = row.sampling, row.num_computed_tokens
    if token_id is not None and (sampling.logprobs is not None or sampling.logprob_token_ids):
        logprobs = fake_logprobs([token_id])
    following = row.token_ids[start + 1 : min(end + 1, row.num_prompt_tokens)]
    if sampling.prompt_logprobs is not None and following:
        prompt_logprobs = fake_logprobs(following)
    if sampling.pooling and end == row.num_prompt_tokens:
        embedding = fake_embedding(row.token_ids[: row.num_prompt_tokens])
    if logprobs is None and prompt_logprobs is None and embedding is None:
        return []
    return [RowExtras(idx, logprobs, prompt_logprobs, embedding)]


class SlowWorker(FakeWorker):
    """A step takes 20 ms."""

    def collect(self) -> ModelRunnerOutput:
        result = super().collect()
        time.sleep(0.02)
        return result


class UnservableWorker(FakeWorker):
    """Cannot do what the operator asked for."""

    def load(self) -> EngineConfig:
        raise UserError("--num-kv-blocks 512 does not fit.", fix="Use --num-kv-blocks 100.")


class BrokenLoadWorker(FakeWorker):
    """Fails while it loads."""

    def load(self) -> EngineConfig:
        raise RuntimeError("no such device")


class StuckLoadWorker(FakeWorker):
    """Never becomes ready."""

    def load(self) -> EngineConfig:
        threading.Event().wait()
        raise AssertionError


class BrokenExecuteWorker(FakeWorker):
    """Fails as it starts its third step."""

    def execute(self, plan: SchedulerOutput) -> None:
        if self.num_steps == 2:
            raise RuntimeError("out of device memory")
        super().execute(plan)


class BrokenCollectWorker(FakeWorker):
    """Fails as it reads its third step back."""

    def collect(self) -> ModelRunnerOutput:
        result = super().collect()
        if result.step_id == 2:
            raise RuntimeError("device reset")
        return result


class HangingWorker(FakeWorker):
    """The third step never ends."""

    def collect(self) -> ModelRunnerOutput:
        result = super().collect()
        if result.step_id == 2:
            threading.Event().wait()
        return result


class CompilingWorker(FakeWorker):
    """Compiles something in its third step."""

    def collect(self) -> ModelRunnerOutput:
        result = super().collect()
        num_compiles = int(result.step_id >= 2)
        return ModelRunnerOutput(result.step_id, result.sampled_token_ids, num_compiles)
