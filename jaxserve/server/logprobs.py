"""Writes log-probabilities as clients want them, from the engine's arrays."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.engine.detokenizer import Detokenizer, DetokenizerFactory
from jaxserve.messages import TokenLogprobs
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.protocol.logprobs import (
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)

# JSON has no infinity; the field writes this number.
LOWEST_LOGPROB = -9999.0


class TokenScore(NamedTuple):
    """One token's log-probability and those of others in its place, likeliest first."""

    token_id: int
    logprob: float
    rank: int
    others: list[tuple[int, float]]


def scores(
    pieces: Sequence[TokenLogprobs], token_ids: Sequence[int], chosen_ids: Sequence[int] = ()
) -> Iterator[TokenScore]:
    """The scores of `token_ids`, which `pieces` cover in order; they may go on behind them.

    chosen_ids: the request's logprob_token_ids, which are then the others.
    """
    left = iter(token_ids)
    for piece in pieces:
        n, num_top = piece.num_tokens, piece.num_top
        logprobs = np.frombuffer(piece.logprobs, "<f4").tolist()
        ranks = np.frombuffer(piece.ranks, "<i4").tolist()
        if chosen_ids:
            chosen = np.frombuffer(piece.chosen_logprobs, "<f4").reshape(n, len(chosen_ids))
            rows = [list(zip(chosen_ids, row, strict=True)) for row in chosen.tolist()]
        else:
            ids = np.frombuffer(piece.top_ids, "<i4").reshape(n, num_top).tolist()
            tops = np.frombuffer(piece.top_logprobs, "<f4").reshape(n, num_top).tolist()
            rows = [list(zip(*pair, strict=True)) for pair in zip(ids, tops, strict=True)]
        # The next token is taken last: a piece that goes on must not eat one.
        for logprob, rank, row, token_id in zip(logprobs, ranks, rows, left, strict=False):
            others = [(i, _finite(value)) for i, value in row]
            yield TokenScore(token_id, _finite(logprob), rank, others)


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


class LogprobsWriter:
    """Writes one request's log-probabilities.

    as_ids: tokens are written as "token_id:123" (return_tokens_as_token_ids).
    """

    def __init__(self, detokenizers: DetokenizerFactory, params: SamplingParams, *, as_ids: bool):
        self._detokenizers = detokenizers
        self._chosen_ids = tuple(dict.fromkeys(params.logprob_token_ids))
        self._num_top = 0 if params.logprobs is None else params.logprobs
        self._as_ids = as_ids

    def chat(
        self, token_ids: Sequence[int], pieces: Sequence[TokenLogprobs]
    ) -> list[ChatTokenLogprob]:
        """The entries of a chat's `content`: of an output's token_ids and logprobs."""
        return [
            ChatTokenLogprob(
                self._text(score.token_id),
                score.logprob,
                self._bytes(score.token_id),
                [
                    TopLogprob(self._text(token_id), logprob, self._bytes(token_id))
                    for token_id, logprob in score.others
                ],
            )
            for score in scores(pieces, token_ids, self._chosen_ids)
        ]

    def completion(
        self,
        token_ids: Sequence[int],
        pieces: Sequence[TokenLogprobs],
        offsets: "TextOffsets",
    ) -> CompletionLogprobs:
        """An output's part of a completion's lists. offsets: made once a choice."""
        found = list(scores(pieces, token_ids, self._chosen_ids))
        return CompletionLogprobs(
            [offsets.next(score.token_id) for score in found],
            [score.logprob for score in found],
            [self._text(score.token_id) for score in found],
            [self._by_text(score, score.others) for score in found],
        )

    def echo(
        self, prompt_token_ids: Sequence[int], pieces: Sequence[TokenLogprobs], text: str
    ) -> CompletionLogprobs:
        """The prompt's part of a completion's lists, with as many others as the output's.

        text: the prompt in the answer.
        """
        offsets = prompt_offsets(self._detokenizers, prompt_token_ids, text)
        found = list(scores(pieces, prompt_token_ids[1:]))
        num_top = len(found[0].others) if found and self._num_top == -1 else self._num_top
        return CompletionLogprobs(
            [offsets.next(token_id) for token_id in prompt_token_ids],
            [None, *(score.logprob for score in found)],
            [self._text(token_id) for token_id in prompt_token_ids],
            [None, *(self._by_text(score, score.others[:num_top]) for score in found)],
        )

    def prompt(
        self, prompt_token_ids: Sequence[int], pieces: Sequence[TokenLogprobs]
    ) -> PromptLogprobs:
        """`prompt_logprobs`: null, then for each token itself and the likeliest, by token id."""
        return [None, *self.ranked(prompt_token_ids[1:], pieces)]

    def ranked(
        self, token_ids: Sequence[int], pieces: Sequence[TokenLogprobs], *, chosen: bool = False
    ) -> list[dict[int, PromptLogprob]]:
        """For each token itself, then the others, by token id.

        chosen: the others are the request's logprob_token_ids, whose ranks nobody knows.
        """
        entries = []
        for score in scores(pieces, token_ids, self._chosen_ids if chosen else ()):
            own = PromptLogprob(score.logprob, score.rank, self._text(score.token_id))
            entry = {score.token_id: own}
            for rank, (token_id, logprob) in enumerate(score.others, 1):
                if token_id not in entry:
                    known = None if chosen and self._chosen_ids else rank
                    entry[token_id] = PromptLogprob(logprob, known, self._text(token_id))
            entries.append(entry)
        return entries

    def _by_text(self, score: TokenScore, others: list[tuple[int, float]]) -> dict[str, float]:
        """Of tokens that are written the same, the first counts: the token itself."""
        by_text = {self._text(score.token_id): score.logprob}
        for token_id, logprob in others:
            by_text.setdefault(self._text(token_id), logprob)
        return by_text

    def _text(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        return self._detokenizers.token_bytes(token_id).decode(errors="replace")

    def _bytes(self, token_id: int) -> list[int]:
        return list(self._detokenizers.token_bytes(token_id))


class TextOffsets:
    """Where each token of a text begins: at the first character that it has a byte of."""

    def __init__(self, detokenizer: Detokenizer, start: int = 0, end: int | None = None):
        self._detokenizer = detokenizer
        self._offset = start
        self._end = end

    def next(self, token_id: int) -> int:
        """The offset of the next token."""
        offset = self._offset if self._end is None else min(self._offset, self._end)
        self._offset += len(self._detokenizer.feed((token_id,)))
        return offset


def prompt_offsets(
    detokenizers: DetokenizerFactory, prompt_token_ids: Sequence[int], text: str
) -> TextOffsets:
    """For a prompt that the answer has as `text`, whose special tokens may be in it or not."""
    skip = prompt_text(detokenizers, prompt_token_ids, skip_special_tokens=False) != text
    detokenizer = detokenizers.make((), skip_special_tokens=skip)
    return TextOffsets(detokenizer, end=len(text))


def prompt_text(
    detokenizers: DetokenizerFactory,
    prompt_token_ids: Sequence[int],
    *,
    skip_special_tokens: bool,
) -> str:
    """The text of a prompt given as tokens."""
    detokenizer = detokenizers.make((), skip_special_tokens=skip_special_tokens)
    return detokenizer.feed(prompt_token_ids) + detokenizer.flush()
