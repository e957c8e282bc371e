"""One response while it comes about: its events, and the object that tells how far it is."""

import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from jaxserve.engine.output_processor import RequestOutput
from jaxserve.errors import EngineDeadError, RequestError
from jaxserve.messages import FinishReason
from jaxserve.server.choice_parser import ChoiceParser, Delta
from jaxserve.server.http import check_not_aborted, encode_json, error_of
from jaxserve.server.plain_parser import PlainParser
from jaxserve.server.protocol.logprobs import ChatTokenLogprob
from jaxserve.server.protocol.responses import (
    Completed,
    Created,
    Failed,
    Incomplete,
    IncompleteDetails,
    InProgress,
    InputTokensDetails,
    ItemStatus,
    OutputTokensDetails,
    Queued,
    ResponseError,
    ResponseEvent,
    ResponseObject,
    ResponseUsage,
)
from jaxserve.server.responses.output import OutputBuilder

type LogprobsOf = Callable[[RequestOutput], list[ChatTokenLogprob]]


class ResponseWriter:
    """The Encoder of one response (`generation.Encoder`), whole or streamed.

    Args:
      response: the response as it is before the model is at work.
      logprobs_of: what an output has of them.
      on_end: gets the response when it is over, for whatever reason, but not when its client left.

    response: as far as it is known.
    """

    def __init__(
        self,
        response: ResponseObject,
        parser: ChoiceParser | PlainParser,
        num_prompt_tokens: int,
        logprobs_of: LogprobsOf,
        on_end: Callable[[ResponseObject], None],
    ):
        self.response = response
        self._parser = parser
        self._num_prompt_tokens = num_prompt_tokens
        self._logprobs_of = logprobs_of
        self._on_end = on_end
        self._builder = OutputBuilder()
        self._has_begun = False
        self._held_logprobs: list[ChatTokenLogprob] = []  # of tokens whose text is held back
        self._finish_reason: FinishReason | None = None
        self._num_tokens = 0
        self._num_cached_tokens = 0

    def begin(self) -> list[bytes]:
        """The events before any output."""
        if self._has_begun:
            return []
        self._has_begun = True
        number = self._builder.next_number()
        events: list[ResponseEvent] = [Created(sequence_number=number, response=self.response)]
        if self.response.status == "queued":
            number = self._builder.next_number()
            events.append(Queued(sequence_number=number, response=self.response))
        return [_encode(event) for event in events]

    def feed(self, outputs: Sequence[RequestOutput]) -> list[bytes]:
        """The events of outputs, each one encoded.

        Raises:
          RequestError: the engine ended the choice early.
        """
        encoded = self.begin()
        if encoded or self.response.status == "queued":
            self.response = replace(self.response, status="in_progress")
            number = self._builder.next_number()
            encoded.append(_encode(InProgress(sequence_number=number, response=self.response)))
        for output in outputs:
            check_not_aborted(output)
            self._num_cached_tokens = output.num_cached_tokens
            self._num_tokens += len(output.token_ids)
            delta = self._parser.feed(output.text, output.token_ids)
            self._held_logprobs += self._logprobs_of(output)
            self._add(delta)
            if output.finish_reason is not None:
                self._finish_reason = output.finish_reason
                self._add(self._parser.finish())
        encoded += map(_encode, self._builder.take_events())
        return encoded

    def end(self) -> list[bytes]:
        """The events after all outputs; the response is over."""
        is_cut = self._finish_reason == FinishReason.LENGTH
        self._builder.end("incomplete" if is_cut else "completed")
        if is_cut:
            details = IncompleteDetails()
            self._finish(status="incomplete", incomplete_details=details)
            make = Incomplete
        else:
            self._finish(status="completed", completed_at=int(time.time()))
            make = Completed
        return self._last_events(make)

    def cancel(self) -> list[bytes]:
        """The events of a response that a client ends."""
        return self._break_off("incomplete", Incomplete, status="cancelled")

    def fail(self, error: EngineDeadError | RequestError) -> list[bytes]:
        """The events of a response that cannot go on."""
        detail = ResponseError(error_of(error)[1].error.message)
        return self._break_off("incomplete", Failed, status="failed", error=detail)

    # What `generation.Encoder` asks for.

    def encode(self, outputs: list[RequestOutput]) -> bytes:
        return b"".join(self.feed(outputs))

    def encode_end(self, num_prompt_tokens: int) -> bytes:
        return b"".join(self.end())

    def encode_error(self, error: EngineDeadError | RequestError) -> bytes:
        return b"".join(self.fail(error))

    def _add(self, delta: Delta) -> None:
        if delta.reasoning:
            self._builder.reasoning(delta.reasoning)
        if delta.content:
            self._builder.text(delta.content, self._held_logprobs)
        if delta:  # what has no content, reasoning and calls, has no log-probabilities either
            self._held_logprobs = []
        for call in delta.tool_calls:
            if call.id is not None:
                self._builder.call(call.id, call.name or "")
            if call.arguments:
                self._builder.arguments(call.arguments)

    def _break_off(
        self, item_status: ItemStatus, make: type[Incomplete | Failed], **changes: object
    ) -> list[bytes]:
        encoded = self.begin()
        if self._builder.has_output:
            self._builder.end(item_status)
        self._finish(**changes)
        return encoded + self._last_events(make)

    def _finish(self, **changes: object) -> None:
        self.response = replace(
            self.response, output=list(self._builder.items), usage=self._usage(), **changes
        )
        self._on_end(self.response)

    def _last_events(self, make: type[Completed | Incomplete | Failed]) -> list[bytes]:
        events: list[ResponseEvent] = self._builder.take_events()
        events.append(make(sequence_number=self._builder.next_number(), response=self.response))
        return [_encode(event) for event in events]

    def _usage(self) -> ResponseUsage:
        return ResponseUsage(
            input_tokens=self._num_prompt_tokens,
            input_tokens_details=InputTokensDetails(self._num_cached_tokens),
            output_tokens=self._num_tokens,
            output_tokens_details=OutputTokensDetails(self._parser.num_reasoning_tokens),
            total_tokens=self._num_prompt_tokens + self._num_tokens,
        )


def _encode(event: ResponseEvent) -> bytes:
    kind = str(type(event).__struct_config__.tag).encode()
    return b"event: %b\ndata: %b\n\n" % (kind, encode_json(event))
