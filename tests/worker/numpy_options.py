"""What every sampling option does to logits and which tokens may follow, in plain NumPy."""

import numpy as np

from jaxserve.messages import SamplingParams


def shaped_logits(
    logits: np.ndarray,
    sampling: SamplingParams,
    prompt: list[int],
    output: list[int],
    grammar: set[int] | None = None,
) -> np.ndarray:
    """float64 logits of one row after all options that come before the temperature.

    Knows two logits processors: "scale" and "add_to_id" (`tests/worker/tiny.py`).
    """
    vocab = range(len(logits))
    may = set(vocab) if grammar is None else grammar
    if sampling.allowed_token_ids is not None:
        may = may & set(sampling.allowed_token_ids) or may
    barred = {w[-1] for w in sampling.bad_words if ends_with(output, w[:-1])}
    if len(output) < sampling.min_tokens:
        barred |= set(sampling.stop_token_ids)
    may = may - barred or may
    shaped = np.array([logits[i] if i in may else -np.inf for i in vocab], np.float64)
    for token_id, value in sampling.logit_bias:
        shaped[token_id] += value
    for i in vocab:
        if i in prompt or i in output:
            factor = sampling.repetition_penalty
            shaped[i] = shaped[i] / factor if shaped[i] > 0 else shaped[i] * factor
        shaped[i] -= sampling.frequency_penalty * output.count(i)
        shaped[i] -= sampling.presence_penalty * (i in output)
    for name, args in sampling.logits_processors:
        if name == "scale":
            shaped *= args[0]
        else:
            shaped[int(args[0])] += args[1]
    return np.array([shaped[i] if i in may else -np.inf for i in vocab])


def ends_with(output: list[int], tokens: tuple[int, ...]) -> bool:
    """Whether `tokens` are the last of `output`."""
    return not tokens or tuple(output[-len(tokens) :]) == tokens


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64."""
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def kept_tokens(logits: np.ndarray, p: SamplingParams) -> set[int]:
    """What temperature, min_p, top_k and top_p leave: sort, cut, renormalize. Ties at a cut stay
    together."""
    scaled = logits.astype(np.float64) / p.temperature
    weights = np.exp(scaled - scaled.max())
    kept = weights >= p.min_p
    if p.top_k:
        kth = np.sort(weights)[::-1][min(p.top_k, len(weights)) - 1]
        kept &= weights >= kth
    weights = np.where(kept, weights, 0)
    order = np.argsort(-weights, kind="stable")
    total = np.cumsum(weights[order]) / weights.sum()
    last = int(np.searchsorted(total, p.top_p + 1e-5))  # float32 sums may keep one more
    return set(np.flatnonzero(kept & (weights >= weights[order[min(last, len(order) - 1)]])))
