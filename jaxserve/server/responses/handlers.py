"""The routes under /v1/responses."""

import asyncio
import time
import uuid
from collections.abc import Sequence
from urllib.parse import parse_qsl

from starlette.types import Receive, Scope, Send

from jaxserve.errors import RequestError
from jaxserve.server.chat_generation import prepare_chat, respond_chat
from jaxserve.server.generation import ResponseHead, ServerContext
from jaxserve.server.http import encode_json, read_body, send_json
from jaxserve.server.protocol.chat import ChatCompletionRequest, ChatMessage
from jaxserve.server.protocol.responses import (
    DeletedResponse,
    ResponseObject,
    ResponsesRequest,
    decode_responses_request,
)
from jaxserve.server.responses.background import BackgroundRun
from jaxserve.server.responses.conversion import answered, chat_request, continued, named_as_given
from jaxserve.server.responses.format import ID_PREFIX, ResponseFormat
from jaxserve.server.responses.store import EventLog, ResponseStore, StoredResponse
from jaxserve.server.sse import EventStream


class Responses:
    """The handlers; they share one store."""

    def __init__(self, context: ServerContext):
        self._context = context
        self._store = ResponseStore(context.config.server.response_store_bytes)
        self._runs: set[asyncio.Task[None]] = set()

    async def create(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /v1/responses."""
        context = self._context
        arrival_time_s = time.time()
        body = await read_body(scope, receive, context.config.server.max_body_bytes)
        request = decode_responses_request(body)
        self._check_store(request)
        conversation = continued(self._history(request), request.input)
        chat = chat_request(request, conversation)
        try:
            prepared = await prepare_chat(context, chat)
            making = ResponseFormat(context, request, conversation, prepared, self._end)
            if request.background:
                await self._create_in_background(making, chat, receive, send, arrival_time_s)
            else:
                await respond_chat(
                    context, chat, prepared, making, receive, send, arrival_time_s=arrival_time_s
                )
        except RequestError as error:
            raise named_as_given(error) from error

    async def retrieve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v1/responses/{id}; with ?stream=true the events of one in the background."""
        options = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        stored = self._stored(scope["path_params"]["response_id"])
        for name in options:
            if name.removesuffix("[]") == "include":
                raise RequestError("include is not supported here.", param="include")
        if options.get("include_obfuscation", "false") != "false":
            raise RequestError("include_obfuscation is not supported.", param="include_obfuscation")
        stream = options.get("stream", "false")
        if stream not in ("true", "false"):
            raise RequestError("stream must be true or false.", param="stream")
        after = options.get("starting_after", "-1")
        if after != "-1" and (not after.isdecimal() or len(after) > 9 or stream == "false"):
            raise RequestError(
                "starting_after must be the number of an event, with stream=true.",
                param="starting_after",
            )
        if stream == "false":
            await send_json(send, stored.response)
            return
        if stored.log is None:
            raise RequestError(
                "Only a response that was created with background and stream has events to "
                "stream again.",
                param="stream",
            )
        await self._send_log(stored.log, int(after) + 1, receive, send)

    async def cancel(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /v1/responses/{id}/cancel: ends a background response; one that has ended stays."""
        stored = self._stored(scope["path_params"]["response_id"])
        if not stored.response.background:
            raise RequestError(
                "Only a response that was created with background can be cancelled.",
                param="response_id",
            )
        if stored.cancel is not None:
            await stored.cancel()
        await send_json(send, stored.response)

    async def delete(self, scope: Scope, receive: Receive, send: Send) -> None:
        """DELETE /v1/responses/{id}: forgets a response, and ends it if it runs."""
        stored = self._stored(scope["path_params"]["response_id"])
        if stored.cancel is not None:
            await stored.cancel()
        self._store.delete(stored.response.id)
        await send_json(send, DeletedResponse(id=stored.response.id))

    def _stored(self, response_id: str) -> StoredResponse:
        stored = self._store.get(response_id)
        if stored is None:
            raise _not_found(response_id, "response_id")
        return stored

    def _check_store(self, request: ResponsesRequest) -> None:
        if request.background and request.store is False:
            raise RequestError("background needs a response that is stored.", param="store")
        for name in ("store", "background"):
            if getattr(request, name) and not self._store.is_on:
                raise RequestError(
                    f"{name} is not available: this server keeps no responses "
                    "(--response-store-bytes 0, or --api-server-count above 1).",
                    param=name,
                )
        if request.request_id and self._store.get(f"{ID_PREFIX}-{request.request_id}"):
            raise RequestError("There is a response with this request_id.", param="request_id")

    def _history(self, request: ResponsesRequest) -> Sequence[ChatMessage]:
        if request.previous_response_id is None:
            return ()
        previous = self._store.get(request.previous_response_id)
        if previous is None:
            raise _not_found(request.previous_response_id, "previous_response_id")
        if previous.response.status not in ("completed", "incomplete"):
            raise RequestError(
                f"The previous response is {previous.response.status}; only one that has an answer "
                "can be gone on from.",
                param="previous_response_id",
            )
        return previous.messages

    def _end(self, response: ResponseObject, conversation: Sequence[ChatMessage]) -> None:
        """A response is over."""
        if not response.store or not self._store.is_on:
            return
        stored = self._store.get(response.id) or StoredResponse(response)
        stored.response = response
        stored.messages = answered(conversation, response.output)
        num_bytes = len(encode_json(response)) + len(encode_json(stored.messages))
        self._store.add(stored, num_bytes + (stored.log.num_bytes if stored.log else 0))

    async def _create_in_background(
        self,
        making: ResponseFormat,
        chat: ChatCompletionRequest,
        receive: Receive,
        send: Send,
        arrival_time_s: float,
    ) -> None:
        context, prepared = self._context, making.prepared
        sequences = context.input_processor.process(
            prepared.prompt_token_ids,
            prepared.params,
            arrival_time_s=arrival_time_s,
            default_max_tokens=None,
            first_index=0,
            priority=chat.priority or 0,
            cache_salt=chat.cache_salt,
            final_only=False,
            prompt_param="messages",
        )
        head = ResponseHead(
            id=f"{ID_PREFIX}-{chat.request_id or uuid.uuid4().hex}",
            created=int(arrival_time_s),
            model=chat.model,
        )
        num_prompt_tokens = len(sequences[0].core.prompt_token_ids)
        writer = making.writer(head, num_prompt_tokens, status="queued")
        log = EventLog() if chat.stream else None
        stored = StoredResponse(writer.response, log=log)
        run = BackgroundRun(context.llm.generate(sequences), writer, stored)
        self._store.add(stored, len(encode_json(stored.response)))
        self._runs.add(run.task)
        run.task.add_done_callback(self._runs.discard)
        if log is None:
            await send_json(send, stored.response, headers=_headers(head.id))
        else:
            await self._send_log(log, 0, receive, send, response_id=head.id)

    async def _send_log(
        self,
        log: EventLog,
        first: int,
        receive: Receive,
        send: Send,
        *,
        response_id: str | None = None,
    ) -> None:
        """Follows a log to its end, or until the client leaves."""
        headers = _headers(response_id) if response_id else []
        keep_alive_s = self._context.config.server.sse_keepalive_s
        events = EventStream(send, headers, keep_alive_s)

        async def follow() -> None:
            async for data in log.read(first):
                await events.write(data)
            await events.end(b"")

        following = asyncio.create_task(follow())
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({following, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
        finally:
            events.stop()
            following.cancel()
            leaving.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _headers(response_id: str) -> list[tuple[bytes, bytes]]:
    return [(b"x-request-id", response_id.encode())]


def _not_found(response_id: str, param: str) -> RequestError:
    return RequestError(
        f"There is no response {response_id[:200]!r} here: it was not stored, was dropped to make "
        "room, or the server was restarted.",
        param=param,
        status=404,
    )
