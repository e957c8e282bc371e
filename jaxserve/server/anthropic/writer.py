"""One message of the model: its events while it comes about, and the message as a whole."""

from jaxserve.engine.output_processor import RequestOutput
from jaxserve.errors import EngineDeadError, RequestError
from jaxserve.messages import FinishReason
from jaxserve.server.anthropic.errors import anthropic_error_of
from jaxserve.server.anthropic.output import BlockBuilder
from jaxserve.server.choice_parser import ChoiceParser, Delta
from jaxserve.server.generation import ResponseHead
from jaxserve.server.http import check_not_aborted, encode_json
from jaxserve.server.plain_parser import PlainParser
from jaxserve.server.protocol.anthropic import (
    ErrorEvent,
    Message,
    MessageDelta,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    StopDelta,
    StopReason,
    ThinkingTokens,
)


class MessageWriter:
    """The Encoder of one message (`generation.Encoder`), whole or streamed."""

    def __init__(
        self, head: ResponseHead, parser: ChoiceParser | PlainParser, num_prompt_tokens: int
    ):
        self._head = head
        self._parser = parser
        self._num_prompt_tokens = num_prompt_tokens
        self._builder = BlockBuilder()
        self._has_begun = False
        self._last: RequestOutput | None = None
        self._num_tokens = 0
        self._num_cached_tokens = 0

    def message(self) -> Message:
        """The message so far."""
        stop = self._stop()
        return Message(
            id=self._head.id,
            model=self._head.model,
            content=list(self._builder.blocks),
            stop_reason=stop.stop_reason if stop else None,
            stop_sequence=stop.stop_sequence if stop else None,
            usage=self._usage(),
        )

    # What `generation.Encoder` asks for.

    def encode(self, outputs: list[RequestOutput]) -> bytes:
        events: list[MessageEvent] = []
        for output in outputs:
            check_not_aborted(output)
            if not self._has_begun:
                self._has_begun = True
                self._num_cached_tokens = output.num_cached_tokens
                events += (MessageStart(self.message()), Ping())
            self._num_tokens += len(output.token_ids)
            self._add(self._parser.feed(output.text, output.token_ids))
            if output.finish_reason is not None:
                self._add(self._parser.finish())
                self._builder.end()
                self._last = output
        return b"".join(map(_encode, [*events, *self._builder.take_events()]))

    def encode_end(self, num_prompt_tokens: int) -> bytes:
        stop = self._stop()
        assert stop is not None
        return _encode(MessageDelta(stop, self._usage())) + _encode(MessageStop())

    def encode_error(self, error: EngineDeadError | RequestError) -> bytes:
        return _encode(ErrorEvent(anthropic_error_of(error)[1].error))

    def _add(self, delta: Delta) -> None:
        if delta.reasoning:
            self._builder.thinking(delta.reasoning)
        if delta.content:
            self._builder.text(delta.content)
        for call in delta.tool_calls:
            if call.name is not None:
                self._builder.tool(call.name)
            if call.arguments:
                self._builder.input(call.arguments)

    def _stop(self) -> StopDelta | None:
        if self._last is None:
            return None
        if self._last.finish_reason == FinishReason.LENGTH:
            return StopDelta("max_tokens", None)
        if isinstance(self._last.stop_reason, str):
            return StopDelta("stop_sequence", self._last.stop_reason)
        reason: StopReason = "tool_use" if self._parser.has_tool_calls else "end_turn"
        return StopDelta(reason, None)

    def _usage(self) -> MessageUsage:
        return MessageUsage(
            input_tokens=self._num_prompt_tokens - self._num_cached_tokens,
            cache_read_input_tokens=self._num_cached_tokens,
            output_tokens=self._num_tokens,
            output_tokens_details=ThinkingTokens(self._parser.num_reasoning_tokens),
        )


def _encode(event: MessageEvent) -> bytes:
    kind = str(type(event).__struct_config__.tag).encode()
    return b"event: %b\ndata: %b\n\n" % (kind, encode_json(event))
