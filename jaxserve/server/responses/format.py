"""How /v1/responses writes its answers, and what a response says before there is one."""

from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import asdict

from jaxserve.engine.output_processor import RequestOutput
from jaxserve.messages import FinishReason
from jaxserve.server.chat_generation import PreparedChat
from jaxserve.server.generation import ResponseHead, ServerContext
from jaxserve.server.http import Encoder
from jaxserve.server.logprobs import LogprobsWriter
from jaxserve.server.plain_parser import PlainParser
from jaxserve.server.protocol.chat import ChatMessage
from jaxserve.server.protocol.common import Usage
from jaxserve.server.protocol.logprobs import ChatTokenLogprob
from jaxserve.server.protocol.responses import ResponseObject, ResponsesRequest, ResponseStatus
from jaxserve.server.responses.writer import ResponseWriter

ID_PREFIX = "resp"


class ResponseFormat:
    """The Format of one response (`generation.Format`).

    end: called with the response when it is over, and the conversation before it.
    """

    id_prefix = ID_PREFIX

    def __init__(
        self,
        context: ServerContext,
        request: ResponsesRequest,
        conversation: Sequence[ChatMessage],
        prepared: PreparedChat,
        end: Callable[[ResponseObject, Sequence[ChatMessage]], None],
    ):
        self.prepared = prepared
        self._context = context
        self._request = request
        self._conversation = conversation
        self._end = end

    def writer(
        self, head: ResponseHead, num_prompt_tokens: int, *, status: ResponseStatus
    ) -> ResponseWriter:
        """For a response that has `status` before the model is at work."""
        parser = self.prepared.make_parser()
        return ResponseWriter(
            _begun(self._request, self.prepared, head, status),
            parser or PlainParser(),
            num_prompt_tokens,
            self._logprobs_of(),
            lambda response: self._end(response, self._conversation),
        )

    def whole(
        self, head: ResponseHead, outputs: list[RequestOutput], usage: Usage
    ) -> ResponseObject:
        writer = self.writer(head, usage.prompt_tokens, status="in_progress")
        writer.feed(outputs)
        writer.end()
        return writer.response

    def encoder(
        self,
        head: ResponseHead,
        *,
        n: int,
        prompt_lens: Sequence[int],
        include_usage: bool,
        continuous_usage: bool,
    ) -> Encoder:
        return self.writer(head, prompt_lens[0], status="in_progress")

    def _logprobs_of(self) -> Callable[[RequestOutput], list[ChatTokenLogprob]]:
        params = self.prepared.params
        if params.logprobs is None:
            return lambda output: []
        writer = LogprobsWriter(self._context.detokenizers, params, as_ids=False)

        def logprobs_of(output: RequestOutput) -> list[ChatTokenLogprob]:
            token_ids = output.token_ids
            is_stopped = output.finish_reason == FinishReason.STOP
            if is_stopped and not isinstance(output.stop_reason, str):
                token_ids = token_ids[:-1]  # the stop token is no text
            return writer.chat(token_ids, output.logprobs or ())

        return logprobs_of


def _begun(
    request: ResponsesRequest, prepared: PreparedChat, head: ResponseHead, status: ResponseStatus
) -> ResponseObject:
    text_format = request.text.format if request.text else None
    choice = request.tool_choice or "auto"
    return ResponseObject(
        id=head.id,
        created_at=head.created,
        status=status,
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        model=head.model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning={
            "effort": request.reasoning.effort if request.reasoning else None,
            "summary": None,
        },
        safety_identifier=request.safety_identifier,
        store=request.store is not False,
        temperature=prepared.params.temperature,
        text={"format": _given(text_format) if text_format else {"type": "text"}},
        tool_choice=choice if isinstance(choice, str) else _given(choice),
        tools=[asdict(tool) for tool in request.tools or ()],
        top_logprobs=request.top_logprobs or 0,
        top_p=prepared.params.top_p,
        user=request.user,
    )


def _given(struct: Struct) -> dict[str, object]:
    return {name: value for name, value in asdict(struct).items() if value is not None}
