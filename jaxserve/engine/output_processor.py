"""Turns the engine core's token ids into text, a sink a request, and finds stop strings."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from jaxserve.engine.detokenizer import Detokenizer, DetokenizerFactory, StopChecker
from jaxserve.engine.input_processor import SequenceRequest
from jaxserve.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason, TokenLogprobs
from jaxserve.metrics import ServerMetrics


class RequestOutput(msgspec.Struct, gc=False):
    """What one choice gained since its last output.

    index: which choice of the request.
    finish_reason: set on the choice's last output.
    stop_reason: the stop string, or the requested stop token id, that ended it; None when the
        model's own end-of-sequence token did.
    logprobs: if the request asks for them, pieces that in order cover `token_ids`, and on the last
        output perhaps tokens that a stop string cut off.
    prompt_logprobs: on the choice's first output, if asked for: pieces that cover the prompt from
        its second token.
    embedding: of a pooling request, as in EngineCoreOutput.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    embedding: bytes | None = None

    def merge(self, later: "RequestOutput") -> None:
        """Adds the output that follows this one."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs


class OutputSink(Protocol):
    """Where one request's outputs go. Neither method may block or raise."""

    def put(self, output: RequestOutput) -> None: ...

    def fail(self, error: Exception) -> None:
        """No more outputs come, because of `error`."""
        ...


class _Sequence:
    """A running sequence: its text so far that is not given out, and its timestamps."""

    __slots__ = (
        "arrival_s",
        "detokenizer",
        "embedding",
        "first_token_s",
        "has_extras",
        "index",
        "last_token_s",
        "num_cached_tokens",
        "num_prompt_tokens",
        "num_tokens",
        "pending_ids",
        "pending_logprobs",
        "pending_prompt_logprobs",
        "pending_text",
        "request",
        "sink",
        "stop_checker",
    )

    def __init__(self, request: SequenceRequest, sink: OutputSink, detokenizer: Detokenizer):
        self.request = request
        self.index = request.index
        self.sink = sink
        self.detokenizer = detokenizer
        self.stop_checker = (
            StopChecker(request.stop, include_in_output=request.include_stop_str_in_output)
            if request.stop
            else None
        )
        self.pending_text: list[str] = []
        self.pending_ids: list[int] = []
        sampling = request.core.sampling
        self.has_extras = (
            sampling.logprobs is not None
            or sampling.prompt_logprobs is not None
            or bool(sampling.pooling)
        )
        self.pending_logprobs: list[TokenLogprobs] = []
        self.pending_prompt_logprobs: list[TokenLogprobs] | None = None
        self.embedding: bytes | None = None
        self.num_tokens = 0
        self.num_prompt_tokens = len(request.core.prompt_token_ids)
        self.num_cached_tokens = 0
        self.arrival_s = request.core.arrival_time_s
        self.first_token_s = 0.0
        self.last_token_s = 0.0

    def keep_extras(self, output: EngineCoreOutput) -> None:
        """Keeps what comes beside the tokens until it is given out."""
        if output.logprobs is not None:
            self.pending_logprobs.append(output.logprobs)
        if output.prompt_logprobs is not None:
            self.pending_prompt_logprobs = output.prompt_logprobs
        if output.embedding is not None:
            self.embedding = output.embedding

    def give_extras(self, output: RequestOutput) -> None:
        """Moves what was kept to the output that is given out."""
        if self.request.core.sampling.logprobs is not None:
            output.logprobs = self.pending_logprobs
            self.pending_logprobs = []
        output.prompt_logprobs = self.pending_prompt_logprobs
        self.pending_prompt_logprobs = None
        output.embedding = self.embedding


class OutputProcessor:
    """Holds every running sequence of one API server; no I/O, no clock: times come with the
    outputs.

    num_queued, num_queued_tokens: sequences that have no token yet, and their prompts' tokens.
    """

    def __init__(
        self,
        detokenizers: DetokenizerFactory,
        metrics: ServerMetrics,
        eos_token_ids: Iterable[int] = (),
    ):
        self._detokenizers = detokenizers
        self._metrics = metrics
        self._eos_token_ids = frozenset(eos_token_ids)
        self._sequences: dict[str, _Sequence] = {}
        self.num_queued = 0
        self.num_queued_tokens = 0

    @property
    def num_unfinished(self) -> int:
        """Sequences that still get outputs."""
        return len(self._sequences)

    def add(self, request: SequenceRequest, sink: OutputSink) -> None:
        """From now on `sink` gets the outputs of `request`."""
        detokenizer = self._detokenizers.make(
            request.core.prompt_token_ids,
            skip_special_tokens=request.skip_special_tokens,
            spaces_between_special_tokens=request.spaces_between_special_tokens,
        )
        self._sequences[request.core.request_id] = _Sequence(request, sink, detokenizer)
        self.num_queued += 1
        self.num_queued_tokens += len(request.core.prompt_token_ids)

    def process(self, step: EngineCoreOutputs) -> list[str]:
        """Puts one step's outputs into the sinks.

        Returns:
          Ids of the sequences that ended at a stop string, which the engine core must abort.
        """
        self._metrics.stats[step.engine_idx] = step.stats
        to_abort = []
        sequences = self._sequences
        for output in step.outputs:
            sequence = sequences.get(output.request_id)
            if sequence is None:  # ended here before the engine core knew
                continue
            self._record_times(sequence, output, step.timestamp_s)
            if sequence.request.prompt_only:
                finish_reason, stop_reason = FinishReason.LENGTH, None
                if output.finish_reason == FinishReason.ABORT:
                    finish_reason = FinishReason.ABORT
            else:
                finish_reason, stop_reason = self._advance(sequence, output)
            if sequence.has_extras:
                sequence.keep_extras(output)
            if finish_reason is not None:
                del sequences[output.request_id]
                self._record_finish(sequence, finish_reason, step.timestamp_s)
                if output.finish_reason is None:
                    to_abort.append(output.request_id)
            elif sequence.request.final_only or not sequence.pending_text:
                continue
            gained = RequestOutput(
                sequence.index,
                "".join(sequence.pending_text),
                sequence.pending_ids,
                finish_reason,
                stop_reason,
                sequence.num_cached_tokens,
            )
            if sequence.has_extras:
                sequence.give_extras(gained)
            sequence.sink.put(gained)
            sequence.pending_text = []
            sequence.pending_ids = []
        return to_abort

    def discard(self, request_ids: Sequence[str], now_s: float) -> list[str]:
        """Forgets sequences that nobody waits for any more.

        Returns:
          Those that still ran, which the engine core must abort.
        """
        running = [i for i in request_ids if i in self._sequences]
        for request_id in running:
            self._record_finish(self._sequences.pop(request_id), FinishReason.ABORT, now_s)
        return running

    def fail_all(self, error: Exception) -> None:
        """Ends every sequence with `error`."""
        sequences, self._sequences = self._sequences, {}
        self.num_queued = self.num_queued_tokens = 0
        for sequence in sequences.values():
            self._metrics.count_finished("error")
            sequence.sink.fail(error)

    def _advance(
        self, sequence: _Sequence, output: EngineCoreOutput
    ) -> tuple[FinishReason | None, int | str | None]:
        """Appends an output's tokens and text; returns how the sequence ended, if it did."""
        request = sequence.request
        token_ids = output.new_token_ids
        finish_reason = output.finish_reason
        text_ids = token_ids
        if finish_reason == FinishReason.STOP and not request.include_stop_str_in_output:
            text_ids = token_ids[:-1]  # the stop token itself is no text
        if sequence.stop_checker is not None:
            matched = self._feed_until_stop(sequence, sequence.stop_checker, text_ids)
            if matched is not None:
                return FinishReason.STOP, matched
            sequence.pending_ids += token_ids[len(text_ids) :]
        else:
            text = sequence.detokenizer.feed(text_ids)
            if text:
                sequence.pending_text.append(text)
            sequence.pending_ids += token_ids
        sequence.num_tokens += len(token_ids)
        if finish_reason is None:
            return None, None
        text = sequence.detokenizer.flush()
        if sequence.stop_checker is not None:
            text = sequence.stop_checker.flush() + text
        if text:
            sequence.pending_text.append(text)
        reason = output.stop_reason
        return finish_reason, None if reason in self._eos_token_ids else reason

    def _feed_until_stop(
        self, sequence: _Sequence, checker: StopChecker, token_ids: list[int]
    ) -> str | None:
        """Feeds token by token; returns the stop string when one is complete. Tokens behind it
        are dropped."""
        min_tokens = sequence.request.core.sampling.min_tokens
        for num_fed, token_id in enumerate(token_ids, 1):
            sequence.pending_ids.append(token_id)
            text = sequence.detokenizer.feed((token_id,))
            if text and sequence.num_tokens + num_fed > min_tokens:
                text = checker.feed(text)
            if text:
                sequence.pending_text.append(text)
            if checker.matched is not None:
                sequence.num_tokens += num_fed
                return checker.matched
        return None

    def _record_times(self, sequence: _Sequence, output: EngineCoreOutput, now_s: float) -> None:
        metrics = self._metrics
        num_new = len(output.new_token_ids)
        if not num_new:
            return
        if not sequence.request.prompt_only:
            metrics.generation_tokens += num_new
        if sequence.first_token_s:
            metrics.inter_token_latency.observe((now_s - sequence.last_token_s) / num_new, num_new)
        else:
            self._leave_queue(sequence)
            sequence.first_token_s = now_s
            sequence.num_cached_tokens = output.num_cached_tokens
            metrics.prompt_tokens += sequence.num_prompt_tokens
            metrics.time_to_first_token.observe(now_s - sequence.arrival_s)
            if num_new > 1:  # they came at once
                metrics.inter_token_latency.observe(0.0, num_new - 1)
            if output.scheduled_s:
                metrics.queue_time.observe(output.scheduled_s - output.queued_s)
        sequence.last_token_s = now_s

    def _leave_queue(self, sequence: _Sequence) -> None:
        self.num_queued -= 1
        self.num_queued_tokens -= sequence.num_prompt_tokens

    def _record_finish(self, sequence: _Sequence, reason: FinishReason, now_s: float) -> None:
        if not sequence.first_token_s:
            self._leave_queue(sequence)
        self._metrics.count_finished(str(reason))
        if reason != FinishReason.ABORT:
            self._metrics.e2e_latency.observe(now_s - sequence.arrival_s)
