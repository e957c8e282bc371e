"""The table of all routes. An entry here is a route, and its place in /openapi.json and /docs."""

from starlette.types import Receive, Scope, Send

from jaxserve.metrics import CONTENT_TYPE
from jaxserve.server.anthropic.errors import anthropic_error_of
from jaxserve.server.anthropic.handlers import Messages
from jaxserve.server.chat import ChatCompletions
from jaxserve.server.completions import Completions
from jaxserve.server.docs_page import make_page
from jaxserve.server.embeddings import Embeddings
from jaxserve.server.generation import ServerContext
from jaxserve.server.http import encode_json, send_bytes
from jaxserve.server.openapi import make_document
from jaxserve.server.operations import Operations, ServerLoad, Status, Version
from jaxserve.server.protocol.anthropic import (
    AnthropicError,
    Message,
    MessageEvent,
    MessagesRequest,
    TokenCount,
)
from jaxserve.server.protocol.chat import ChatChunk, ChatCompletion, ChatCompletionRequest
from jaxserve.server.protocol.common import ModelCard, ModelList
from jaxserve.server.protocol.completions import (
    Completion,
    CompletionChunk,
    CompletionRequest,
)
from jaxserve.server.protocol.embeddings import EmbeddingList, EmbeddingRequest
from jaxserve.server.protocol.responses import (
    DeletedResponse,
    ResponseEvent,
    ResponseObject,
    ResponsesRequest,
)
from jaxserve.server.protocol.tokenize import (
    DetokenizedText,
    DetokenizeRequest,
    TokenizeRequest,
    TokenizerInfo,
    Tokens,
)
from jaxserve.server.responses.handlers import Responses
from jaxserve.server.routing import Route
from jaxserve.server.tokenize import Tokenization


class ApiDocs:
    """The documents that are made of this table."""

    def __init__(self, context: ServerContext):
        document = make_document(ROUTES, context.config.server.root_path)
        self._document = encode_json(document)
        self._page = make_page(document)

    async def openapi(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /openapi.json."""
        await send_bytes(send, self._document, b"application/json")

    async def page(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /docs."""
        policy = b"default-src 'none'; style-src 'unsafe-inline'"
        headers = [(b"content-security-policy", policy)]
        await send_bytes(send, self._page, b"text/html; charset=utf-8", headers=headers)


ROUTES: tuple[Route, ...] = (
    Route(
        method="POST",
        path="/v1/chat/completions",
        surface=ChatCompletions,
        handler=ChatCompletions.__call__,
        summary="A chat, whole or streamed.",
        request=ChatCompletionRequest,
        response=ChatCompletion,
        streams=True,
        event=ChatChunk,
        generates=True,
    ),
    Route(
        method="POST",
        path="/v1/completions",
        surface=Completions,
        handler=Completions.__call__,
        summary="A text, whole or streamed.",
        request=CompletionRequest,
        response=Completion,
        streams=True,
        event=CompletionChunk,
        generates=True,
    ),
    Route(
        method="POST",
        path="/v1/responses",
        surface=Responses,
        handler=Responses.create,
        summary="An answer as a response: items of text, reasoning and calls.",
        request=ResponsesRequest,
        response=ResponseObject,
        streams=True,
        event=ResponseEvent,
        generates=True,
    ),
    Route(
        method="GET",
        path="/v1/responses/{response_id}",
        surface=Responses,
        handler=Responses.retrieve,
        summary="A response that was stored; with stream=true the events of one in the background.",
        response=ResponseObject,
        streams=True,
        event=ResponseEvent,
        errors=(404,),
    ),
    Route(
        method="DELETE",
        path="/v1/responses/{response_id}",
        surface=Responses,
        handler=Responses.delete,
        summary="Forgets a response, and ends it if it runs.",
        response=DeletedResponse,
        errors=(404,),
    ),
    Route(
        method="POST",
        path="/v1/responses/{response_id}/cancel",
        surface=Responses,
        handler=Responses.cancel,
        summary="Ends a response in the background.",
        response=ResponseObject,
        errors=(404,),
    ),
    Route(
        method="POST",
        path="/v1/messages",
        surface=Messages,
        handler=Messages.create,
        summary="A chat in Anthropic's form, whole or streamed.",
        request=MessagesRequest,
        response=Message,
        streams=True,
        event=MessageEvent,
        error=AnthropicError,
        error_of=anthropic_error_of,
        generates=True,
    ),
    Route(
        method="POST",
        path="/v1/messages/count_tokens",
        surface=Messages,
        handler=Messages.count_tokens,
        summary="How many tokens the prompt of such a chat has.",
        request=MessagesRequest,
        response=TokenCount,
        errors=(404,),
        error=AnthropicError,
        error_of=anthropic_error_of,
    ),
    Route(
        method="POST",
        path="/v1/embeddings",
        surface=Embeddings,
        handler=Embeddings.__call__,
        summary="A vector for each text.",
        request=EmbeddingRequest,
        response=EmbeddingList,
        generates=True,
    ),
    Route(
        method="POST",
        path="/tokenize",
        surface=Tokenization,
        handler=Tokenization.tokenize,
        summary="The tokens of a text or a chat.",
        request=TokenizeRequest,
        response=Tokens,
        errors=(404,),
    ),
    Route(
        method="POST",
        path="/detokenize",
        surface=Tokenization,
        handler=Tokenization.detokenize,
        summary="The text of tokens.",
        request=DetokenizeRequest,
        response=DetokenizedText,
        errors=(404,),
    ),
    Route(
        method="GET",
        path="/tokenizer_info",
        surface=Tokenization,
        handler=Tokenization.info,
        summary="The special tokens and the chat template.",
        response=TokenizerInfo,
    ),
    Route(
        method="GET",
        path="/v1/models",
        surface=Operations,
        handler=Operations.models,
        summary="The served model.",
        response=ModelList,
    ),
    Route(
        method="GET",
        path="/v1/models/{model:path}",
        surface=Operations,
        handler=Operations.model,
        summary="The served model, by its name.",
        response=ModelCard,
        errors=(404,),
    ),
    *(
        Route(
            method="POST",
            path=f"/v1/{verb}_lora_adapter",
            surface=Operations,
            handler=Operations.adapters,
            summary="Not there yet: always a 501.",
            response=Status,
            errors=(501,),
        )
        for verb in ("load", "unload")
    ),
    Route(
        method="POST",
        path="/reset_prefix_cache",
        surface=Operations,
        handler=Operations.reset_prefix_cache,
        summary="Forgets cached prompts.",
        response=Status,
        errors=(409, 503),
    ),
    Route(
        method="GET",
        path="/health",
        surface=Operations,
        handler=Operations.health,
        summary="Whether the engine can run a step.",
        response=Status,
        errors=(503,),
        is_open=True,
    ),
    *(
        Route(
            method=method,
            path="/ping",
            surface=Operations,
            handler=Operations.health,
            summary="The same as /health.",
            response=Status,
            errors=(503,),
            is_open=True,
        )
        for method in ("GET", "POST")
    ),
    Route(
        method="GET",
        path="/version",
        surface=Operations,
        handler=Operations.version,
        summary="The server's version.",
        response=Version,
        is_open=True,
    ),
    Route(
        method="GET",
        path="/load",
        surface=Operations,
        handler=Operations.load,
        summary="How many requests that generate are not answered whole yet.",
        response=ServerLoad,
        is_open=True,
    ),
    Route(
        method="GET",
        path="/metrics",
        surface=Operations,
        handler=Operations.metrics,
        summary="Metrics as Prometheus text.",
        content_type=CONTENT_TYPE,
        is_open=True,
    ),
    Route(
        method="GET",
        path="/openapi.json",
        surface=ApiDocs,
        handler=ApiDocs.openapi,
        summary="This API as an OpenAPI 3.1 document.",
        response=dict,
        is_open=True,
    ),
    Route(
        method="GET",
        path="/docs",
        surface=ApiDocs,
        handler=ApiDocs.page,
        summary="This API as a page.",
        content_type="text/html",
        is_open=True,
    ),
)
