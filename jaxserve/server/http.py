"""Reading bodies and sending answers over ASGI: JSON, errors, server-sent events, disconnects."""

import asyncio
import contextlib
import http
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import msgspec
from starlette.types import Receive, Scope, Send

from jaxserve.engine.async_llm import RequestStream
from jaxserve.engine.output_processor import RequestOutput
from jaxserve.errors import EngineDeadError, RequestError
from jaxserve.messages import FinishReason
from jaxserve.server.protocol.common import ErrorBody, ErrorDetail, PromptTokensDetails, Usage

type Headers = Sequence[tuple[bytes, bytes]]
encode_json = msgspec.json.Encoder().encode

_SSE_DONE = b"data: [DONE]\n\n"
_SSE_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error"}


class ClientDisconnected(Exception):
    """The client went away; nobody reads an answer."""


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The whole body; never holds more than `max_bytes` and one chunk.

    Raises:
      RequestError: 413, the body is larger.
      ClientDisconnected: it did not come to its end.
    """
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > max_bytes:
            raise _too_large(max_bytes)
    more_body = True
    chunks: list[bytes] = []
    num_bytes = 0
    while more_body:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk = message.get("body", b"")
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
        more_body = message.get("more_body", False)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(f"The body is larger than {max_bytes} bytes.", status=413)


async def send_bytes(
    send: Send, body: bytes, content_type: bytes, *, status: int = 200, headers: Headers = ()
) -> None:
    """A whole response."""
    start = {
        "type": "http.response.start",
        "status": status,
        "headers": [
            (b"content-type", content_type),
            (b"content-length", str(len(body)).encode()),
            *headers,
        ],
    }
    await send(start)
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, value: object, *, status: int = 200, headers: Headers = ()) -> None:
    """A whole JSON response from msgspec structs."""
    await send_bytes(send, encode_json(value), b"application/json", status=status, headers=headers)


def error_of(error: Exception) -> tuple[int, ErrorBody]:
    """The status and the OpenAI-style body for a failed request."""
    if isinstance(error, RequestError):
        return error.status, error_body(error.status, error.message, error.param)
    if isinstance(error, EngineDeadError):
        return 503, error_body(503, f"The engine is dead: {error}", code="engine_dead")
    return 500, error_body(500, "Internal server error; the server's log has the details.")


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> ErrorBody:
    """An OpenAI-style error."""
    if status >= 500:
        kind = "service_unavailable_error" if status == 503 else "internal_server_error"
    else:
        kind = _ERROR_TYPES.get(status, "invalid_request_error")
    if code is None:
        code = "model_not_found" if (status, param) == (404, "model") else None
    return ErrorBody(ErrorDetail(message, kind, param, code or _code_of(status)))


def _code_of(status: int) -> str:
    return http.HTTPStatus(status).phrase.lower().replace(" ", "_")


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    """OpenAI's token counts."""
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens),
    )


@contextlib.asynccontextmanager
async def cancelled_on_disconnect(
    stream: RequestStream, receive: Receive
) -> AsyncIterator[RequestStream]:
    """Within the block, a client that goes away cancels the stream at once."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        stream.cancel()

    async with stream:
        watcher = asyncio.create_task(watch())
        try:
            yield stream
        finally:
            watcher.cancel()


async def collect(stream: RequestStream) -> list[RequestOutput]:
    """Every choice whole, in order of index.

    Raises:
      EngineDeadError, RequestError: the choices were failed.
      ClientDisconnected: the stream was cancelled.
    """
    choices: dict[int, RequestOutput] = {}
    async for output in stream:
        check_not_aborted(output)
        if output.index in choices:
            choices[output.index].merge(output)
        else:
            choices[output.index] = output
    if stream.is_cancelled:
        raise ClientDisconnected
    return [choices[index] for index in sorted(choices)]


def check_not_aborted(output: RequestOutput) -> None:
    """Raises RequestError for a choice that the engine, not the client, ended early."""
    if output.finish_reason == FinishReason.ABORT:
        raise RequestError("The engine aborted the request.", status=503)


class StreamEncoder:
    """Encodes one request's outputs as server-sent events.

    A chunk is `head`, the choice's index, `before_text`, the text as JSON, `after_text`, and the
    finish; everything but index, text and finish is encoded once a request.

    Args:
      fields: the chunk's fields beside `choices` and `usage`.
      no_text: instead of `before_text` and the text, for a finish without text.
      first: a delta sent before a choice's first text, or None.
      n: choices of each prompt, to count a prompt's cached tokens once.
    """

    def __init__(
        self,
        fields: Mapping[str, object],
        *,
        before_text: bytes,
        after_text: bytes,
        no_text: bytes,
        first: bytes | None,
        include_usage: bool,
        n: int,
    ):
        self._fields = fields
        self._head = b"data: " + encode_json(fields)[:-1] + b',"choices":[{"index":'
        self._before_text = before_text
        usage = b',"usage":null' if include_usage else b""
        self._tail = after_text + b',"logprobs":null,"finish_reason":null}]' + usage + b"}\n\n"
        self._finish = after_text + b',"logprobs":null,"finish_reason":%b,"stop_reason":%b}]'
        self._finish += usage + b"}\n\n"
        self._no_text = no_text
        self._first = None if first is None else first + self._tail[len(after_text) :]
        self._include_usage = include_usage
        self._n = n
        self._heads: dict[int, bytes] = {}
        self.num_completion_tokens = 0
        self.num_cached_tokens = 0

    def encode(self, outputs: list[RequestOutput]) -> bytes:
        """The events of one or more outputs, and counts them for the usage."""
        parts: list[bytes] = []
        for output in outputs:
            self.num_completion_tokens += len(output.token_ids)
            head = self._heads.get(output.index)
            if head is None:
                head = self._begin(output, parts)
            if output.finish_reason is None:
                parts += (head, self._before_text, encode_json(output.text), self._tail)
                continue
            check_not_aborted(output)
            text = encode_json(output.text) if output.text else self._no_text
            before = self._before_text if output.text else b""
            reason = encode_json(str(output.finish_reason))
            stop_reason = encode_json(output.stop_reason)
            parts += (head, before, text, self._finish % (reason, stop_reason))
        return b"".join(parts)

    def _begin(self, output: RequestOutput, parts: list[bytes]) -> bytes:
        """A choice's first output."""
        if output.index % self._n == 0:
            self.num_cached_tokens += output.num_cached_tokens
        head = self._heads[output.index] = self._head + b"%d," % output.index
        if self._first is not None:
            parts += (head, self._first)
        return head

    def encode_end(self, num_prompt_tokens: int) -> bytes:
        """The last events of a stream that ended well."""
        if not self._include_usage:
            return _SSE_DONE
        usage = usage_of(num_prompt_tokens, self.num_completion_tokens, self.num_cached_tokens)
        return b"data: %b\n\n%b" % (
            encode_json({**self._fields, "choices": [], "usage": usage}),
            _SSE_DONE,
        )


async def send_events(
    send: Send,
    stream: RequestStream,
    encode: Callable[[list[RequestOutput]], bytes],
    encode_end: Callable[[], bytes],
    headers: Headers,
) -> None:
    """Streams a request's outputs; the response starts with the first output, so that what fails
    before it is an ordinary error. What fails later is an event, and the end of the stream.

    Raises:
      EngineDeadError, RequestError: the request failed before its first output.
    """
    outputs = await stream.take()
    if not outputs:
        return  # the client is gone
    data = encode(outputs)
    await send({"type": "http.response.start", "status": 200, "headers": [*_SSE_HEADERS, *headers]})
    try:
        while data:
            await send({"type": "http.response.body", "body": data, "more_body": True})
            outputs = await stream.take()
            data = encode(outputs) if outputs else b""
        if stream.is_cancelled:
            return
        data = encode_end()
    except (EngineDeadError, RequestError) as error:
        data = b"data: %b\n\n" % encode_json(error_of(error)[1])
    await send({"type": "http.response.body", "body": data})
