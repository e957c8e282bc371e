"""Reading bodies and sending answers over ASGI: JSON, errors, server-sent events, disconnects."""

import asyncio
import contextlib
import http
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType
from starlette.types import Receive, Scope, Send

from jaxserve.engine.async_llm import RequestStream
from jaxserve.engine.output_processor import RequestOutput
from jaxserve.errors import EngineDeadError, RequestError
from jaxserve.messages import FinishReason
from jaxserve.server.protocol.common import (
    CompletionTokensDetails,
    ErrorBody,
    ErrorDetail,
    PromptTokensDetails,
    Usage,
)
from jaxserve.server.sse import EventStream

type Headers = Sequence[tuple[bytes, bytes]]
encode_json = msgspec.json.Encoder().encode

SSE_DONE = b"data: [DONE]\n\n"
_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    501: "not_implemented_error",
    503: "service_unavailable_error",
}


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
    other = "invalid_request_error" if status < 500 else "internal_server_error"
    kind = _ERROR_TYPES.get(status, other)
    return ErrorBody(ErrorDetail(message, kind, param, code or _code_of(status, param)))


def _code_of(status: int, param: str | None) -> str:
    if status == 401:
        return "invalid_api_key"
    if (status, param) == (404, "model"):
        return "model_not_found"
    return http.HTTPStatus(status).phrase.lower().replace(" ", "_")


def usage_of(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int,
    reasoning_tokens: int | None = None,
) -> Usage:
    """OpenAI's token counts. reasoning_tokens: None where the text is not looked through."""
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens),
        completion_tokens_details=completion_details(reasoning_tokens),
    )


def completion_details(reasoning_tokens: int | None) -> CompletionTokensDetails | UnsetType:
    """A usage's details of the answer; left out when there are none."""
    return UNSET if reasoning_tokens is None else CompletionTokensDetails(reasoning_tokens)


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
    """Raises RequestError for a choice that the engine, not the client, ended early.

    It does so only where a grammar cannot go on, so trying again would not help: no 503.
    """
    if output.finish_reason == FinishReason.ABORT:
        raise RequestError(
            "The engine aborted the request: its grammar cannot go on. Other options, such as "
            "allowed_token_ids, may leave nothing that it allows."
        )


class Encoder(Protocol):
    """Writes one request's outputs as server-sent events, and counts them."""

    def encode(self, outputs: list[RequestOutput]) -> bytes:
        """The events of one or more outputs; never empty for the first.

        Raises:
          RequestError: the engine ended a choice early (`check_not_aborted`).
        """
        ...

    def encode_end(self, num_prompt_tokens: int) -> bytes:
        """The last events of a stream that ended well."""
        ...

    def encode_error(self, error: EngineDeadError | RequestError) -> bytes:
        """The last events of a stream that fails after its first output."""
        ...


class StreamUsage:
    """Counts what a stream gives, for the usage in it.

    include: the stream ends with the usage of all choices.
    continuous: every chunk has the usage of its choice so far.
    n: choices of each prompt, to count a prompt's cached tokens once.
    prompt_lens: tokens of each prompt.
    count_reasoning: at the end, how many tokens were reasoning, if anybody knows.
    """

    def __init__(
        self,
        *,
        include: bool,
        continuous: bool,
        n: int,
        prompt_lens: Sequence[int],
        count_reasoning: Callable[[], int | None] = lambda: None,
    ):
        self.include = include
        self.continuous = continuous
        self._n = n
        self._prompt_lens = prompt_lens
        self._count_reasoning = count_reasoning
        self._num_tokens: dict[int, int] = {}
        self.num_cached_tokens = 0

    def add(self, output: RequestOutput) -> bool:
        """Counts an output; whether it is its choice's first."""
        before = self._num_tokens.get(output.index)
        self._num_tokens[output.index] = (before or 0) + len(output.token_ids)
        if before is not None:
            return False
        if output.index % self._n == 0:
            self.num_cached_tokens += output.num_cached_tokens
        return True

    def of_choice(self, index: int) -> Usage:
        """One choice so far."""
        num_prompt = self._prompt_lens[index // self._n]
        num_tokens = self._num_tokens[index]
        return Usage(num_prompt, num_tokens, num_prompt + num_tokens)

    def of_all(self, num_prompt_tokens: int) -> Usage:
        """All choices of all prompts."""
        return usage_of(
            num_prompt_tokens,
            sum(self._num_tokens.values()),
            self.num_cached_tokens,
            self._count_reasoning(),
        )


class StreamEncoder:
    """The Encoder of a plain stream, made for speed: text alone, with no usage but at the end.

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
        """See Encoder."""
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
        """See Encoder."""
        if not self._include_usage:
            return SSE_DONE
        usage = usage_of(num_prompt_tokens, self.num_completion_tokens, self.num_cached_tokens)
        return event({**self._fields, "choices": [], "usage": usage}) + SSE_DONE

    def encode_error(self, error: EngineDeadError | RequestError) -> bytes:
        """See Encoder."""
        return error_event(error)


class ChunkEncoder:
    """The Encoder of every other stream of `choices`: each chunk is an object of its own.

    Args:
      fields: the chunk's fields beside `choices` and `usage`.
      make_choices: the choices of one output's chunks, one a chunk; the second argument says that
        it is its choice's first output.
      first: more fields of the stream's first chunk.
    """

    def __init__(
        self,
        fields: Mapping[str, object],
        make_choices: Callable[[RequestOutput, bool], Iterable[object]],
        usage: StreamUsage,
        first: Mapping[str, object] | None = None,
    ):
        self._head = encode_json(fields)[:-1]
        self._next_head = encode_json({**fields, **first})[:-1] if first else self._head
        self._make_choices = make_choices
        self._usage = usage

    def encode(self, outputs: list[RequestOutput]) -> bytes:
        """See Encoder."""
        parts: list[bytes] = []
        for output in outputs:
            if output.finish_reason is not None:
                check_not_aborted(output)
            is_first = self._usage.add(output)
            tail = self._tail(output.index)
            for choice in self._make_choices(output, is_first):
                parts += (b"data: ", self._next_head, b',"choices":[', encode_json(choice), tail)
                self._next_head = self._head
        return b"".join(parts)

    def _tail(self, index: int) -> bytes:
        if self._usage.continuous:
            return b'],"usage":%b}\n\n' % encode_json(self._usage.of_choice(index))
        return b'],"usage":null}\n\n' if self._usage.include else b"]}\n\n"

    def encode_end(self, num_prompt_tokens: int) -> bytes:
        """See Encoder."""
        if not self._usage.include:
            return SSE_DONE
        usage = encode_json(self._usage.of_all(num_prompt_tokens))
        return b'data: %b,"choices":[],"usage":%b}\n\n%b' % (self._head, usage, SSE_DONE)

    def encode_error(self, error: EngineDeadError | RequestError) -> bytes:
        """See Encoder."""
        return error_event(error)


def event(value: object) -> bytes:
    """One server-sent event of JSON."""
    return b"data: %b\n\n" % encode_json(value)


def error_event(error: EngineDeadError | RequestError) -> bytes:
    """An OpenAI-style error as an event; nothing follows it."""
    return event(error_of(error)[1])


async def send_events(
    send: Send,
    stream: RequestStream,
    encoder: Encoder,
    num_prompt_tokens: int,
    headers: Headers,
    *,
    keep_alive_s: float,
) -> None:
    """Streams a request's outputs; the response starts with the first output, so that what fails
    before it is an ordinary error. What fails later is `encode_error`, and the end of the stream.

    Args:
      keep_alive_s: after so much silence a comment is sent, which starts the response too; 0:
        never.

    Raises:
      EngineDeadError, RequestError: the request failed before the response started.
    """
    events = EventStream(send, headers, keep_alive_s)
    try:
        while outputs := await stream.take():
            if data := encoder.encode(outputs):
                await events.write(data)
        if not stream.is_cancelled:  # else the client is gone
            await events.end(encoder.encode_end(num_prompt_tokens))
    except (EngineDeadError, RequestError) as error:
        if not events.has_begun:
            raise
        await events.end(encoder.encode_error(error))
    finally:
        events.stop()
