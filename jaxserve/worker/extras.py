"""What rows give beside their tokens: which of them want it, in which step, and the reading back.

As `BatchMirror`, what a row wants follows from the plans alone.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
from jax import Array
from jaxtyping import Int32

from jaxserve.messages import (
    MAX_LOGPROB_TOKEN_IDS,
    AdmittedRow,
    RowExtras,
    SamplingParams,
    SchedulerOutput,
    TokenLogprobs,
)
from jaxserve.worker.batch_mirror import StepInput
from jaxserve.worker.token_scores import HostScores, TokenScores


class ScoredRow(NamedTuple):
    """Scores that a row is sent: `num_tokens` from `start` of those that were scored."""

    row: int
    start: int
    num_tokens: int
    num_top: int
    num_chosen: int = 0


class SampledPlan(NamedTuple):
    """Sampled tokens to score. chosen: other tokens to score beside, a line a batch row."""

    rows: list[ScoredRow]
    num_top: int
    chosen: Int32[np.ndarray, "R C"]


class PromptPlan(NamedTuple):
    """Prompt tokens to score: those that follow the step's tokens at `places`."""

    rows: list[ScoredRow]
    num_top: int
    places: Int32[np.ndarray, " N"]
    next_tokens: Int32[np.ndarray, " N"]


class PoolPlan(NamedTuple):
    """Hidden states to add up; see `prompt_outputs.add_pooled`.

    complete: (row, how many hidden states its sum has) for the rows that are done.
    """

    lines: Int32[np.ndarray, " T"]
    is_fresh: Int32[np.ndarray, " lines"]
    complete: list[tuple[int, int]]


@dataclasses.dataclass
class _Prompt:
    """A prompt that is not computed yet, of which something is wanted."""

    sampling: SamplingParams
    token_ids: Int32[np.ndarray, " N"]
    is_fresh: bool = True

    @property
    def pooled(self) -> range:
        """The positions whose hidden states are added up."""
        length = len(self.token_ids)
        return {"cls": range(1), "last": range(length - 1, length)}.get(
            self.sampling.pooling, range(length)
        )


class ExtrasMirror:
    """Row by row: what is wanted beside the tokens."""

    def __init__(self, num_lines: int, vocab_size: int):
        self._num_lines = num_lines
        self._vocab_size = vocab_size
        self._scored: dict[int, SamplingParams] = {}
        self._prompts: dict[int, _Prompt] = {}

    def apply(self, plan: SchedulerOutput) -> None:
        """Takes in one plan."""
        for row in plan.released_rows:
            self._scored.pop(row, None)
            self._prompts.pop(row, None)
        for admitted in plan.admitted:
            self._admit(admitted)

    def _admit(self, admitted: AdmittedRow) -> None:
        sampling, num_prompt = admitted.sampling, admitted.num_prompt_tokens
        if sampling.logprobs is not None or sampling.logprob_token_ids:
            self._scored[admitted.row] = sampling
        # A row that has output is back after a preemption: its prompt is dealt with.
        is_first = len(admitted.token_ids) == num_prompt
        if is_first and (sampling.prompt_logprobs is not None or sampling.pooling):
            assert admitted.num_computed_tokens == 0, (
                f"row {admitted.row} wants what the prefix cache does not have"
            )
            token_ids = np.array(admitted.token_ids, np.int32)
            self._prompts[admitted.row] = _Prompt(sampling, token_ids)

    def sampled(self, step: StepInput, num_batch_rows: int) -> SampledPlan | None:
        """What to score of the tokens that the step samples. None: nothing."""
        rows: list[ScoredRow] = []
        for row, idx in _find(self._scored, step):
            if not step.samples[idx]:
                continue
            sampling = self._scored[row]
            num_top = self._num_top(sampling.logprobs or 0)
            rows.append(ScoredRow(row, idx, 1, num_top, len(sampling.logprob_token_ids)))
        if not rows:
            return None
        chosen = np.zeros((num_batch_rows, MAX_LOGPROB_TOKEN_IDS), np.int32)
        for scored in rows:
            ids = self._scored[scored.row].logprob_token_ids
            chosen[scored.start, : len(ids)] = ids
        return SampledPlan(rows, max(r.num_top for r in rows), chosen)

    def prompts(self, step: StepInput) -> tuple[PromptPlan | None, PoolPlan | None]:
        """What to score and to pool of the prompt tokens that the step computes."""
        if not self._prompts:
            return None, None
        starts = np.cumsum(step.q_lens) - step.q_lens
        scored: list[ScoredRow] = []
        places, next_tokens = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
        pool = PoolPlan(
            np.full(len(step.token_ids), self._num_lines, np.int32),
            np.zeros(self._num_lines, np.int32),
            [],
        )
        is_pooling, num_scored = False, 0
        for row, idx in _find(self._prompts, step):
            prompt = self._prompts[row]
            begin, start = int(step.num_computed[idx]), int(starts[idx])
            end = begin + int(step.q_lens[idx])
            if prompt.sampling.prompt_logprobs is not None:
                known = prompt.token_ids[begin + 1 : end + 1]
                num_top = self._num_top(prompt.sampling.prompt_logprobs)
                if len(known):
                    scored.append(ScoredRow(row, num_scored, len(known), num_top))
                    num_scored += len(known)
                places.append(start + np.arange(len(known), dtype=np.int32))
                next_tokens.append(known)
            if prompt.sampling.pooling:
                is_pooling = True
                wanted = prompt.pooled
                first, last = max(begin, wanted.start), min(end, wanted.stop)
                pool.lines[start + first - begin : start + max(first, last) - begin] = row
                pool.is_fresh[row] = prompt.is_fresh
                if end == len(prompt.token_ids):
                    pool.complete.append((row, len(wanted)))
            prompt.is_fresh = False
            if end == len(prompt.token_ids):
                del self._prompts[row]
        prompt_plan = PromptPlan(
            scored,
            max((r.num_top for r in scored), default=0),
            np.concatenate(places),
            np.concatenate(next_tokens),
        )
        return prompt_plan if scored else None, pool if is_pooling else None

    def _num_top(self, wanted: int) -> int:
        return self._vocab_size if wanted == -1 else min(wanted, self._vocab_size)


def _find(rows: dict, step: StepInput) -> list[tuple[int, int]]:
    """(row, its place in the batch) for those of `rows` that the step computes, ascending."""
    if not rows:
        return []
    wanted = np.array(sorted(rows), np.int32)
    places = np.searchsorted(step.rows, wanted)
    found = places < len(step.rows)
    found[found] = step.rows[places[found]] == wanted[found]
    return list(zip(wanted[found].tolist(), places[found].tolist(), strict=True))


class StepExtras(NamedTuple):
    """A step's extras on their way to the host."""

    sampled_rows: list[ScoredRow]
    sampled: TokenScores | None
    prompt_rows: list[ScoredRow]
    prompt: list[TokenScores]  # pieces that follow each other
    complete: list[tuple[int, int]]
    pooled: Array | None

    def start_copies(self) -> None:
        """Starts to copy everything to the host."""
        arrays = [part for scores in (self.sampled, *self.prompt) if scores for part in scores]
        if self.complete and self.pooled is not None:
            arrays.append(self.pooled)
        for array in arrays:
            array.copy_to_host_async()

    def read(self) -> list[RowExtras]:
        """Waits for the copies; the rows that have extras, ascending."""
        logprobs = _pack(self.sampled_rows, [self.sampled] if self.sampled else [])
        prompt_logprobs = _pack(self.prompt_rows, self.prompt)
        embeddings = {}
        for row, count in self.complete:
            vector = np.asarray(self.pooled)[row] / np.float32(count)
            embeddings[row] = vector.astype("<f4").tobytes()
        rows = sorted({*logprobs, *prompt_logprobs, *embeddings})
        return [
            RowExtras(row, logprobs.get(row), prompt_logprobs.get(row), embeddings.get(row))
            for row in rows
        ]


def _pack(rows: list[ScoredRow], pieces: list[TokenScores]) -> dict[int, TokenLogprobs]:
    if not rows:
        return {}
    scores = HostScores.read(pieces)
    return {
        r.row: scores.pack(slice(r.start, r.start + r.num_tokens), r.num_top, r.num_chosen)
        for r in rows
    }
