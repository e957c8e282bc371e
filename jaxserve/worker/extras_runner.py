"""Runs what gives rows their extras: scores of tokens and pooled hidden states."""

import jax
import numpy as np
from jax import Array
from jaxtyping import Float, Float32, Int32

from jaxserve.messages import MAX_LOGPROB_TOKEN_IDS, SchedulerOutput
from jaxserve.models.registry import Params
from jaxserve.worker.batch_mirror import StepInput
from jaxserve.worker.extras import ExtrasMirror, PoolPlan, PromptPlan, StepExtras
from jaxserve.worker.programs import Programs
from jaxserve.worker.prompt_outputs import piece_len
from jaxserve.worker.sharding import upload
from jaxserve.worker.token_scores import TokenScores


class ExtrasRunner:
    """Keeps what rows want, and the sums of hidden states that are pooled."""

    def __init__(
        self,
        programs: Programs,
        params: Params,
        pooled: Float32[Array, "lines D"],
        vocab_size: int,
    ):
        self._programs = programs
        self._params = params
        self._pooled = pooled
        self._uploaded = pooled.sharding  # whole on every device
        self._mirror = ExtrasMirror(pooled.shape[0], vocab_size)

    def warm_up_scores(self, logits: Float32[Array, "R V"], tokens: Int32[Array, " R"]) -> None:
        """Runs what scores as many sampled tokens once on nothing."""
        chosen = np.zeros((logits.shape[0], MAX_LOGPROB_TOKEN_IDS), np.int32)
        for top in self._programs.prompt_scores:
            jax.block_until_ready(self._score(logits, tokens, chosen, top))

    def warm_up_prompts(self, hidden: Float[Array, "T D"]) -> None:
        """Runs what is made of prompts once on nothing."""
        empty, one = np.zeros(0, np.int32), np.zeros(1, np.int32)
        for top in self._programs.prompt_scores:
            jax.block_until_ready(self._score_prompt(PromptPlan([], top, one, one), hidden))
        not_fresh = np.zeros(self._pooled.shape[0], np.int32)
        jax.block_until_ready(self._pool(PoolPlan(empty, not_fresh, []), hidden))

    def apply(self, plan: SchedulerOutput) -> None:
        """Takes in one plan."""
        self._mirror.apply(plan)

    def start(
        self,
        step: StepInput,
        logits: Float32[Array, "R V"],
        tokens: Int32[Array, " R"],
        hidden: Float[Array, "T D"],
    ) -> StepExtras | None:
        """Starts what a step's rows want, and the copies to the host; None where they want nothing.

        logits: raw.  tokens: what was sampled.  hidden: of the step's tokens, from the first on.
        """
        sampled = self._mirror.sampled(step, logits.shape[0])
        prompt, pool = self._mirror.prompts(step)
        if sampled is None and prompt is None and pool is None:
            return None
        extras = StepExtras([], None, [], [], [], None)
        if sampled is not None:
            scores = self._score(logits, tokens, sampled.chosen, sampled.num_top)
            extras = extras._replace(sampled_rows=sampled.rows, sampled=scores)
        if prompt is not None:
            pieces = self._score_prompt(prompt, hidden)
            extras = extras._replace(prompt_rows=prompt.rows, prompt=pieces)
        if pool is not None:
            self._pooled = self._pool(pool, hidden)
            extras = extras._replace(complete=pool.complete, pooled=self._pooled)
        extras.start_copies()
        return extras

    def _top(self, wanted: int) -> int:
        """The smallest compiled size of the top that holds `wanted`."""
        sizes = [top for top in self._programs.prompt_scores if top >= wanted]
        assert sizes, f"{wanted} log-probabilities are more than --max-logprobs"
        return min(sizes)

    def _score(
        self,
        logits: Float32[Array, "R V"],
        tokens: Int32[Array, " R"],
        chosen: Int32[np.ndarray, "R C"],
        num_top: int,
    ) -> TokenScores:
        program = self._programs.scores[logits.shape[0], self._top(num_top)]
        return program(logits, tokens, upload(chosen, self._uploaded))

    def _score_prompt(self, plan: PromptPlan, hidden: Float[Array, "T D"]) -> list[TokenScores]:
        program = self._programs.prompt_scores[self._top(plan.num_top)]
        length = piece_len(hidden.shape[0])
        pieces = []
        for start in range(0, len(plan.places), length):
            padded = np.zeros((2, length), np.int32)
            for line, whole in zip(padded, (plan.places, plan.next_tokens), strict=True):
                part = whole[start : start + length]
                line[: len(part)] = part
            uploads = (upload(line, self._uploaded) for line in padded)
            pieces.append(program(self._params, hidden, *uploads))
        return pieces

    def _pool(self, plan: PoolPlan, hidden: Float[Array, "T D"]) -> Float32[Array, "lines D"]:
        lines = np.full(hidden.shape[0], self._pooled.shape[0], np.int32)
        lines[: len(plan.lines)] = plan.lines
        uploads = (upload(part, self._uploaded) for part in (lines, plan.is_fresh))
        return self._programs.pool(self._pooled, hidden, *uploads)
