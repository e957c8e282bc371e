"""POST /v1/chat/completions."""

import time
from collections.abc import Sequence

from starlette.types import Receive, Scope, Send

from jaxserve.engine.output_processor import RequestOutput
from jaxserve.errors import RequestError
from jaxserve.server.generation import ResponseHead, ServerContext, check_model, respond
from jaxserve.server.http import Encoder, StreamEncoder, read_body
from jaxserve.server.protocol.chat import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionRequest,
    ResponseMessage,
    decode_chat_request,
)
from jaxserve.server.protocol.common import Usage


class ChatCompletions:
    """The route's handler."""

    def __init__(self, context: ServerContext):
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = self._context
        arrival_time_s = time.time()
        body = await read_body(scope, receive, context.config.server.max_body_bytes)
        request = decode_chat_request(body)
        check_model(context, request.model)
        try:
            params = request.sampling_params()
            prompt_token_ids = await context.renderer.chat(request)
            await respond(
                context,
                request,
                params,
                [(prompt_token_ids, "messages")],
                ChatFormat(),
                receive,
                send,
                arrival_time_s=arrival_time_s,
                default_max_tokens=None,
            )
        except RequestError as error:
            raise _named_as_given(error, request) from error


def _named_as_given(error: RequestError, request: ChatCompletionRequest) -> RequestError:
    """The error, with max_tokens under the newer name if the client used that."""
    if request.max_completion_tokens is None or error.param != "max_tokens":
        return error
    name = "max_completion_tokens"
    message = error.message.replace("max_tokens", name)
    return RequestError(message, param=name, status=error.status)


class ChatFormat:
    """Writes chat.completion and chat.completion.chunk objects."""

    id_prefix = "chatcmpl"

    def whole(
        self, head: ResponseHead, outputs: list[RequestOutput], usage: Usage
    ) -> ChatCompletion:
        """All choices at once."""
        choices = [
            ChatChoice(
                index=output.index,
                message=ResponseMessage(output.text),
                finish_reason=str(output.finish_reason),
                stop_reason=output.stop_reason,
            )
            for output in outputs
        ]
        return ChatCompletion(
            id=head.id, created=head.created, model=head.model, choices=choices, usage=usage
        )

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
        return StreamEncoder(
            {
                "id": head.id,
                "object": "chat.completion.chunk",
                "created": head.created,
                "model": head.model,
            },
            before_text=b'"delta":{"content":',
            after_text=b"}",
            no_text=b'"delta":{',
            first=b'"delta":{"role":"assistant","content":""}',
            include_usage=include_usage,
            n=n,
        )
