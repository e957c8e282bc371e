"""POST /v1/chat/completions."""

import time
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType
from starlette.types import Receive, Scope, Send

from jaxserve.engine.output_processor import RequestOutput
from jaxserve.server.chat_generation import PreparedChat, prepare_chat, respond_chat
from jaxserve.server.chat_messages import content_text
from jaxserve.server.choice_parser import ChoiceParser, Delta, ToolCallDelta
from jaxserve.server.generation import ResponseHead, ServerContext
from jaxserve.server.http import (
    ChunkEncoder,
    Encoder,
    StreamEncoder,
    StreamUsage,
    completion_details,
    encode_json,
    read_body,
)
from jaxserve.server.logprobs import LogprobsWriter
from jaxserve.server.protocol.chat import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionRequest,
    DeltaFunction,
    DeltaMessage,
    DeltaToolCall,
    ResponseFunction,
    ResponseMessage,
    ResponseToolCall,
    decode_chat_request,
)
from jaxserve.server.protocol.common import Usage
from jaxserve.server.protocol.logprobs import ChatLogprobs


class ChatCompletions:
    """The route's handler."""

    def __init__(self, context: ServerContext):
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = self._context
        arrival_time_s = time.time()
        body = await read_body(scope, receive, context.config.server.max_body_bytes)
        request = decode_chat_request(body)
        prepared = await prepare_chat(context, request)
        await respond_chat(
            context,
            request,
            prepared,
            ChatFormat(context, request, prepared),
            receive,
            send,
            arrival_time_s=arrival_time_s,
        )


class ChatFormat:
    """Writes chat.completion and chat.completion.chunk objects."""

    id_prefix = "chatcmpl"

    def __init__(
        self, context: ServerContext, request: ChatCompletionRequest, prepared: PreparedChat
    ):
        self._prepared = prepared
        self._include_reasoning = request.include_reasoning is not False
        self._return_token_ids = bool(request.return_token_ids)
        self._has_logprobs = bool(request.logprobs or request.logprob_token_ids)
        self._writer = LogprobsWriter(
            context.detokenizers,
            prepared.params,
            as_ids=bool(request.return_tokens_as_token_ids),
        )
        last = request.messages[-1]
        opens_turn = request.add_generation_prompt is not False
        opens_turn = opens_turn and not request.continue_final_message
        self._role = "assistant" if opens_turn else last.role
        is_echoed = request.echo and last.role == self._role and last.content is not None
        self._echo = content_text(last.content, "messages") if is_echoed else ""
        self._parsers: dict[int, ChoiceParser | None] = {}

    def whole(
        self, head: ResponseHead, outputs: list[RequestOutput], usage: Usage
    ) -> ChatCompletion:
        """All choices at once."""
        prompt = self._prepared.prompt_token_ids
        choices = [self._choice(output) for output in outputs]
        pieces = outputs[0].prompt_logprobs
        return ChatCompletion(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=choices,
            usage=msgspec.structs.replace(
                usage, completion_tokens_details=completion_details(self._count_reasoning())
            ),
            prompt_logprobs=self._writer.prompt(prompt, pieces) if pieces is not None else UNSET,
            prompt_token_ids=prompt if self._return_token_ids else UNSET,
        )

    def _choice(self, output: RequestOutput) -> ChatChoice:
        parser = self._parsers[output.index] = self._prepared.make_parser()
        if parser is None:
            message = ResponseMessage(role=self._role, content=self._echo + output.text)
        else:
            message = self._message(parser, output)
        return ChatChoice(
            index=output.index,
            message=message,
            finish_reason=self._prepared.finish_reason(str(output.finish_reason), parser),
            stop_reason=output.stop_reason,
            logprobs=self._logprobs(output),
            token_ids=output.token_ids if self._return_token_ids else UNSET,
        )

    def _logprobs(self, output: RequestOutput) -> ChatLogprobs | None:
        if output.logprobs is None:
            return None
        return ChatLogprobs(self._writer.chat(output.token_ids, output.logprobs))

    def _count_reasoning(self) -> int | None:
        """Of all choices; None where no parser looks for reasoning."""
        parsers = [parser for parser in self._parsers.values() if parser is not None]
        if not self._prepared.finds_reasoning:
            return None
        return sum(parser.num_reasoning_tokens for parser in parsers)

    def _message(self, parser: ChoiceParser, output: RequestOutput) -> ResponseMessage:
        delta = parser.feed(output.text, output.token_ids) + parser.finish()
        content = self._echo + delta.content
        calls = [
            ResponseToolCall(
                id=call.id or "",
                function=ResponseFunction(name=call.name or "", arguments=call.arguments),
            )
            for call in delta.tool_calls
        ]
        reasoning = self._reasoning(delta)
        return ResponseMessage(
            role=self._role,
            content=content if content or not calls else None,
            tool_calls=calls or UNSET,
            reasoning=reasoning,
            reasoning_content=reasoning,
        )

    def _reasoning(self, delta: Delta) -> str | UnsetType:
        return delta.reasoning if delta.reasoning and self._include_reasoning else UNSET

    def encoder(
        self,
        head: ResponseHead,
        *,
        n: int,
        prompt_lens: Sequence[int],
        include_usage: bool,
        continuous_usage: bool,
    ) -> Encoder:
        """Chunks of one request."""
        fields = {
            "id": head.id,
            "object": "chat.completion.chunk",
            "created": head.created,
            "model": head.model,
        }
        is_plain = not (
            self._echo
            or self._has_logprobs
            or self._return_token_ids
            or continuous_usage
            or self._prepared.is_parsed
        )
        if is_plain:
            first = b'"delta":{"role":%b,"content":""}' % encode_json(self._role)
            return StreamEncoder(
                fields,
                before_text=b'"delta":{"content":',
                after_text=b"}",
                no_text=b'"delta":{',
                first=first,
                include_usage=include_usage,
                n=n,
            )
        usage = StreamUsage(
            include=include_usage,
            continuous=continuous_usage,
            n=n,
            prompt_lens=prompt_lens,
            count_reasoning=self._count_reasoning,
        )
        first_fields = None
        if self._return_token_ids:
            first_fields = {"prompt_token_ids": self._prepared.prompt_token_ids}
        return ChunkEncoder(fields, self._chunk_choices, usage, first_fields)

    def _chunk_choices(self, output: RequestOutput, is_first: bool) -> Iterator[ChatChunkChoice]:
        """One output's chunks: the role, the pieces of the message, and with the last of them what
        comes beside it."""
        index = output.index
        if is_first:
            self._parsers[index] = self._prepared.make_parser()
            yield ChatChunkChoice(index=index, delta=DeltaMessage(role=self._role, content=""))
            if self._echo:
                yield ChatChunkChoice(index=index, delta=DeltaMessage(content=self._echo))
        parser = self._parsers[index]
        if parser is None:
            delta = Delta(output.text)
        else:
            delta = parser.feed(output.text, output.token_ids)
            if output.finish_reason is not None:
                delta += parser.finish()
        messages = list(self._delta_messages(delta))
        is_last = output.finish_reason is not None
        if not (messages or is_last or self._has_logprobs or self._return_token_ids):
            return  # the parser holds it back
        last = messages.pop() if messages else DeltaMessage()
        for message in messages:
            yield ChatChunkChoice(index=index, delta=message)
        reason = self._prepared.finish_reason(str(output.finish_reason), parser)
        yield ChatChunkChoice(
            index=index,
            delta=last,
            logprobs=self._logprobs(output),
            finish_reason=reason if is_last else None,
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self._return_token_ids else UNSET,
        )

    def _delta_messages(self, delta: Delta) -> Iterator[DeltaMessage]:
        """The text, then each piece of a call; a call's first piece has no arguments."""
        reasoning = self._reasoning(delta)
        if delta.content or reasoning is not UNSET:
            yield DeltaMessage(
                content=delta.content or UNSET,
                reasoning=reasoning,
                reasoning_content=reasoning,
            )
        for call in delta.tool_calls:
            for piece in _call_pieces(call):
                yield DeltaMessage(tool_calls=[piece])


def _call_pieces(call: ToolCallDelta) -> Iterator[DeltaToolCall]:
    if call.id is not None:
        yield DeltaToolCall(
            index=call.index,
            id=call.id,
            type="function",
            function=DeltaFunction(name=call.name or "", arguments=""),
        )
    if call.arguments:
        yield DeltaToolCall(index=call.index, function=DeltaFunction(arguments=call.arguments))
