"""The routes under /v1/messages."""

import time
from collections.abc import Sequence

from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope, Send

from jaxserve.engine.output_processor import RequestOutput
from jaxserve.errors import RequestError
from jaxserve.server.anthropic.conversion import chat_request, named_as_given
from jaxserve.server.anthropic.writer import MessageWriter
from jaxserve.server.chat_generation import PreparedChat, prepare_chat, respond_chat
from jaxserve.server.generation import ResponseHead, ServerContext
from jaxserve.server.http import Encoder, read_body, send_json
from jaxserve.server.plain_parser import PlainParser
from jaxserve.server.protocol.anthropic import (
    Message,
    MessagesRequest,
    TokenCount,
    decode_messages_request,
)
from jaxserve.server.protocol.chat import ChatCompletionRequest
from jaxserve.server.protocol.common import Usage


class Messages:
    """The handlers."""

    def __init__(self, context: ServerContext):
        self._context = context

    async def create(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /v1/messages."""
        arrival_time_s = time.time()
        request = await self._request(scope, receive)
        if request.max_tokens is None:
            raise RequestError("max_tokens is missing.", param="max_tokens")
        chat = self._chat(request)
        try:
            prepared = await prepare_chat(self._context, chat)
            await respond_chat(
                self._context,
                chat,
                prepared,
                MessageFormat(prepared),
                receive,
                _with_request_id(send),
                arrival_time_s=arrival_time_s,
            )
        except RequestError as error:
            raise named_as_given(error, request) from error

    async def count_tokens(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /v1/messages/count_tokens."""
        request = await self._request(scope, receive)
        chat = self._chat(request)
        try:
            prepared = await prepare_chat(self._context, chat)
        except RequestError as error:
            raise named_as_given(error, request) from error
        await send_json(send, TokenCount(len(prepared.prompt_token_ids)))

    async def _request(self, scope: Scope, receive: Receive) -> MessagesRequest:
        max_bytes = self._context.config.server.max_body_bytes
        return decode_messages_request(await read_body(scope, receive, max_bytes))

    def _chat(self, request: MessagesRequest) -> ChatCompletionRequest:
        return chat_request(request, has_reasoning=self._context.chat.reasoning_format is not None)


def _with_request_id(send: Send) -> Send:
    """The id of the response also under the name that Anthropic's clients look for."""

    async def send_on(message: AsgiMessage) -> None:
        if message["type"] == "http.response.start":
            ids = [value for name, value in message["headers"] if name == b"x-request-id"]
            message["headers"] = [*message["headers"], *((b"request-id", i) for i in ids)]
        await send(message)

    return send_on


class MessageFormat:
    """How /v1/messages writes its answers (`generation.Format`)."""

    id_prefix = "msg"

    def __init__(self, prepared: PreparedChat):
        self._prepared = prepared

    def whole(self, head: ResponseHead, outputs: list[RequestOutput], usage: Usage) -> Message:
        writer = self._writer(head, usage.prompt_tokens)
        writer.encode(outputs)
        return writer.message()

    def encoder(
        self,
        head: ResponseHead,
        *,
        n: int,
        prompt_lens: Sequence[int],
        include_usage: bool,
        continuous_usage: bool,
    ) -> Encoder:
        return self._writer(head, prompt_lens[0])

    def _writer(self, head: ResponseHead, num_prompt_tokens: int) -> MessageWriter:
        parser = self._prepared.make_parser() or PlainParser()

        return MessageWriter(head, parser, num_prompt_tokens)
