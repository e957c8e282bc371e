"""Log-probabilities of tokens, and of those that were likelier."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float32, Int32

from jaxserve.messages import TokenLogprobs

DEFAULT_TOP = 20  # how many of the likeliest tokens the programs for most requests give


class TokenScores(NamedTuple):
    """Log-probabilities of N tokens, as `messages.TokenLogprobs` has them."""

    logprobs: Float32[Array, " N"]
    ranks: Int32[Array, " N"]
    top_ids: Int32[Array, "N K"]
    top_logprobs: Float32[Array, "N K"]
    chosen_logprobs: Float32[Array, "N C"]


class HostScores(NamedTuple):
    """`TokenScores`, read back."""

    logprobs: Float32[np.ndarray, " N"]
    ranks: Int32[np.ndarray, " N"]
    top_ids: Int32[np.ndarray, "N K"]
    top_logprobs: Float32[np.ndarray, "N K"]
    chosen_logprobs: Float32[np.ndarray, "N C"]

    @classmethod
    def read(cls, pieces: list[TokenScores]) -> "HostScores":
        """Waits for scores that follow each other."""
        return cls(
            *(np.concatenate([np.asarray(a) for a in parts]) for parts in zip(*pieces, strict=True))
        )

    def pack(self, at: slice, num_top: int, num_chosen: int) -> TokenLogprobs:
        """Some of the tokens, trimmed to what a request asks for."""
        assert self.top_ids.shape[1] >= num_top, (self.top_ids.shape, num_top)
        return TokenLogprobs(
            num_tokens=len(self.logprobs[at]),
            num_top=num_top,
            logprobs=self.logprobs[at].tobytes(),
            ranks=self.ranks[at].tobytes(),
            top_ids=self.top_ids[at, :num_top].tobytes(),
            top_logprobs=self.top_logprobs[at, :num_top].tobytes(),
            chosen_logprobs=self.chosen_logprobs[at, :num_chosen].tobytes(),
        )


def top_sizes(max_logprobs: int, vocab_size: int) -> tuple[int, ...]:
    """How many of the likeliest tokens the compiled programs give, ascending: few, as most requests
    ask, and as many as one may ask (--max-logprobs; -1 is the whole vocabulary)."""
    most = vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size)
    return tuple(sorted({min(DEFAULT_TOP, most), most}))


def score_tokens(
    logits: Float32[Array, "N V"],
    tokens: Int32[Array, " N"],
    chosen: Int32[Array, "N C"],
    num_top: int,
) -> TokenScores:
    """Of `tokens`, of the `num_top` likeliest (the lower id first where equal), and of `chosen`."""
    logprobs = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    own = jnp.take_along_axis(logprobs, tokens[:, None], axis=1)
    own_logits = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    _, top_ids = jax.lax.top_k(logits, num_top)
    return TokenScores(
        logprobs=own[:, 0],
        ranks=1 + (logits > own_logits).sum(axis=-1, dtype=jnp.int32),
        top_ids=top_ids,
        top_logprobs=jnp.take_along_axis(logprobs, top_ids, axis=1),
        chosen_logprobs=jnp.take_along_axis(logprobs, chosen, axis=1),
    )
