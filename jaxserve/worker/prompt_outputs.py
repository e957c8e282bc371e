"""What requests want of their prompts: log-probabilities and pooled vectors, from hidden states."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32

from jaxserve.config import ModelInfo
from jaxserve.models.registry import Params, model_for
from jaxserve.worker.token_scores import TokenScores, score_tokens

_MAX_PIECE = 128


def piece_len(max_num_tokens: int) -> int:
    """Tokens that are scored at once, so that logits of a whole step never exist."""
    return min(_MAX_PIECE, max_num_tokens)


def score_prompt(
    info: ModelInfo,
    num_top: int,
    params: Params,
    hidden: Float[Array, "T D"],
    places: Int32[Array, " N"],
    next_tokens: Int32[Array, " N"],
) -> TokenScores:
    """Scores of the tokens that follow those at `places` of the step."""
    logits = model_for(info).logits(params, info, hidden[places])
    no_chosen = jnp.zeros((places.shape[0], 0), jnp.int32)
    return score_tokens(logits, next_tokens, no_chosen, num_top)


def add_pooled(
    pooled: Float32[Array, "lines D"],
    hidden: Float[Array, "T D"],
    lines: Int32[Array, " T"],
    is_fresh: Int32[Array, " lines"],
) -> Float32[Array, "lines D"]:
    """Sums of hidden states, after a step.

    lines: which line each token is added to; past the end for none.
    is_fresh: 1 for lines that start at zero.
    """
    num_lines = pooled.shape[0]
    pooled = jnp.where(is_fresh[:, None] != 0, 0, pooled)
    # A product, as sums of a scatter come in any order; what is not added may be anything.
    added = jnp.where((lines < num_lines)[:, None], hidden.astype(jnp.float32), 0)
    belongs = (lines[None, :] == jnp.arange(num_lines)[:, None]).astype(jnp.float32)
    return pooled + jnp.matmul(belongs, added, precision=jax.lax.Precision.HIGHEST)
