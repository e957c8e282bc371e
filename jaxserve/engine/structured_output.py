"""Holds outputs to their grammars: compiles them beside the loop, says what each row may sample."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from jaxserve.checkpoint.tokenizer import Tokenizer
from jaxserve.engine.request import Request, RequestStatus
from jaxserve.grammars import describe_error, make_grammar_tokenizer, try_grammar
from jaxserve.messages import FinishReason, GrammarMask, SamplingParams

logger = logging.getLogger(__name__)

_NUM_COMPILE_THREADS = 4
_MAX_CACHED_GRAMMARS = 256
_WORD_BITS = 32
_ALL = np.uint32(0xFFFFFFFF)


class Masked(NamedTuple):
    """What a step's grammars say.

    forced: tokens that must follow the one each of these requests samples now.
    ended: requests that cannot go on, and why.
    """

    mask: GrammarMask
    forced: list[tuple[Request, list[int]]]
    ended: list[tuple[Request, FinishReason]]


class GrammarRefusedError(ValueError):
    """A request's grammar cannot be compiled; `str()` says why."""


class StructuredOutputs:
    """Compiled grammars for one model. `compile` may be called by any thread, the rest by the one
    that runs the loop.

    A request's matcher has seen the output tokens that are known; it catches up when the next mask
    is made. So it survives a preemption, and does not care how steps are scheduled.
    """

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int):
        """load_tokenizer: called once, by a thread of the pool, for the first grammar.
        vocab_size: of the logits.
        """
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._tokenizer_lock = threading.Lock()
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        # Threads start when they are first needed.
        self._pool = ThreadPoolExecutor(_NUM_COMPILE_THREADS, thread_name_prefix="grammar")
        self._executor: LLExecutor | None = None

    def compile(self, grammar: str) -> Future[LLMatcher]:
        """A matcher to copy; GrammarRefusedError of the future says why there is none."""
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is None:
                compiled = self._pool.submit(self._compile, grammar)
                self._compiled[grammar] = compiled
                if len(self._compiled) > _MAX_CACHED_GRAMMARS:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return compiled

    def shutdown(self) -> None:
        """Compiles nothing more; does not wait for what is being compiled."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def mask(self, step_id: int, masked: Sequence[tuple[int, Request]]) -> Masked:
        """What the rows of a step may sample, once the results of all earlier steps are known.

        masked: (row, request), ascending. Rows of finished requests may sample anything.
        """
        tokenizer = self._tokenizer
        assert tokenizer is not None, "no grammar is compiled"
        result = Masked(GrammarMask(step_id, [], b""), [], [])
        num_words = -(-tokenizer.vocab_size // _WORD_BITS)
        words = np.empty((len(masked), num_words), np.uint32)
        live = [(i, r) for i, (_, r) in enumerate(masked) if r.status is not RequestStatus.FINISHED]
        for idx in set(range(len(masked))).difference(idx for idx, _ in live):
            words[idx] = _ALL
        for _, request in live:
            _catch_up(request)
        self._fill([(_matcher(request), idx) for idx, request in live], words)
        for idx, request in live:
            reason = self._finish_mask(request, words[idx], tokenizer)
            if reason is not None:
                words[idx] = _ALL
                result.ended.append((request, reason))
            elif len(forced := _forced_tokens(request, words[idx])) > 1:
                result.forced.append((request, forced[1:]))
        rows = [row for row, _ in masked]
        # The tokenizer may have more tokens than the model has logits.
        bits = words[:, : -(-self._vocab_size // _WORD_BITS)].tobytes()
        return result._replace(mask=GrammarMask(step_id, rows, bits))

    def _compile(self, grammar: str) -> LLMatcher:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = make_grammar_tokenizer(self._load_tokenizer(), self._vocab_size)
        matcher, problem = try_grammar(grammar, self._tokenizer)
        if problem is not None:
            raise GrammarRefusedError(problem)
        return matcher

    def _fill(self, matchers: list[tuple[LLMatcher, int]], words: np.ndarray) -> None:
        """The grammars' own masks: (matcher, line of `words`). Several are made in parallel."""
        num_rows, num_words = words.shape
        if len(matchers) == 1:
            matcher, idx = matchers[0]
            matcher.unsafe_compute_mask_ptr(words[idx].ctypes.data, num_words * 4)
        elif matchers:
            if self._executor is None:
                self._executor = LLExecutor()
            self._executor.unsafe_compute_mask_ptr(
                matchers, words.ctypes.data, num_words * 4, num_rows
            )

    def _finish_mask(
        self, request: Request, words: np.ndarray, tokenizer: LLTokenizer
    ) -> FinishReason | None:
        """Adds to a grammar's mask what the request says of stop tokens and of allowed ones.

        A grammar's end is any of the request's stop tokens, once there are min_tokens. Returns why
        the request ends instead, when nothing is left to sample.
        """
        matcher, sampling = _matcher(request), request.sampling
        if matcher.is_error():
            warn_of_abort(describe_error(matcher))
            return FinishReason.ABORT
        is_complete = matcher.is_accepting()
        may_stop = request.num_output_tokens >= sampling.min_tokens
        if is_complete:
            _set_bits(words, tokenizer.eos_tokens, False)
        if is_complete or not may_stop:
            _set_bits(words, sampling.stop_token_ids, is_complete and may_stop)
        if sampling.allowed_token_ids is not None:
            words &= _bits(sampling.allowed_token_ids, len(words))
        if words.any():
            return None
        if is_complete:
            return FinishReason.STOP
        warn_of_abort("its other options forbid every token that the grammar allows")
        return FinishReason.ABORT


def warn_of_abort(problem: object) -> None:
    """Says that a request ends because of its grammar, which any client can cause."""
    logger.warning("one request is aborted, and no other, for its grammar: %s", problem)


def _matcher(request: Request) -> LLMatcher:
    assert request.matcher is not None, request
    return request.matcher


def _catch_up(request: Request) -> None:
    """Shows the matcher the output that it has not seen."""
    start = request.num_prompt_tokens + request.num_matched_tokens
    new_token_ids = request.token_ids[start:]
    if new_token_ids:
        _matcher(request).consume_tokens(new_token_ids)
        request.num_matched_tokens += len(new_token_ids)


def _forced_tokens(request: Request, words: np.ndarray) -> list[int]:
    """The next tokens when there is no choice about them, up to the first stop token; the mask then
    allows the first alone.

    None for a request whose options look at each token that is sampled.
    """
    if np.count_nonzero(words) > 1 or not _may_skip(request.sampling):
        return []
    forced = _matcher(request).compute_ff_tokens()
    stop = request.stop_token_ids
    return forced[: next((i for i, t in enumerate(forced) if t in stop), len(forced))]


def _may_skip(sampling: SamplingParams) -> bool:
    return not (
        sampling.has_penalties
        or sampling.bad_words
        or sampling.logit_bias
        or sampling.allowed_token_ids is not None
        or sampling.logits_processors
        or sampling.logprobs is not None
        or sampling.logprob_token_ids
    )


def _set_bits(words: np.ndarray, token_ids: Sequence[int], value: bool) -> None:
    for token_id in token_ids:
        bit = np.uint32(1 << token_id % _WORD_BITS)
        if value:
            words[token_id // _WORD_BITS] |= bit
        else:
            words[token_id // _WORD_BITS] &= ~bit


@lru_cache(maxsize=64)
def _bits(token_ids: tuple[int, ...], num_words: int) -> np.ndarray:
    words = np.zeros(num_words, np.uint32)
    _set_bits(words, token_ids, True)
    return words
