"""POST /v1/completions."""

import time
from collections.abc import Sequence

from starlette.types import Receive, Scope, Send

from jaxserve.engine.input_processor import COMPLETION_MAX_TOKENS
from jaxserve.engine.output_processor import RequestOutput
from jaxserve.server.generation import ResponseHead, ServerContext, check_model, respond
from jaxserve.server.http import Encoder, StreamEncoder, read_body
from jaxserve.server.protocol.common import Usage
from jaxserve.server.protocol.completions import (
    Completion,
    CompletionChoice,
    decode_completion_request,
)


class Completions:
    """The route's handler."""

    def __init__(self, context: ServerContext):
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = self._context
        arrival_time_s = time.time()
        body = await read_body(scope, receive, context.config.server.max_body_bytes)
        request = decode_completion_request(body)
        check_model(context, request.model)
        params = request.sampling_params()
        prompts = await context.renderer.completion(
            request.prompt, add_special_tokens=request.add_special_tokens is not False
        )
        await respond(
            context,
            request,
            params,
            prompts,
            CompletionFormat(),
            receive,
            send,
            arrival_time_s=arrival_time_s,
            default_max_tokens=COMPLETION_MAX_TOKENS,
        )


class CompletionFormat:
    """Writes text_completion objects."""

    id_prefix = "cmpl"

    def whole(self, head: ResponseHead, outputs: list[RequestOutput], usage: Usage) -> Completion:
        """All choices at once."""
        choices = [
            CompletionChoice(
                index=output.index,
                text=output.text,
                finish_reason=str(output.finish_reason),
                stop_reason=output.stop_reason,
            )
            for output in outputs
        ]
        return Completion(
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
                "object": "text_completion",
                "created": head.created,
                "model": head.model,
            },
            before_text=b'"text":',
            after_text=b"",
            no_text=b'"text":""',
            first=None,
            include_usage=include_usage,
            n=n,
        )
