"""The API server's handle on the engine: submits, streams outputs, aborts, notices death."""

import asyncio
import contextlib
import itertools
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from jaxserve.engine.input_processor import SequenceRequest
from jaxserve.engine.output_processor import OutputProcessor, RequestOutput
from jaxserve.errors import EngineDeadError, RequestError
from jaxserve.messages import (
    AbortRequests,
    EngineCoreOutputs,
    EngineDead,
    EngineInput,
    EngineOutput,
    UtilityCall,
    UtilityResult,
)

logger = logging.getLogger(__name__)


class QueueFullError(RequestError):
    """Too many sequences wait for their first token."""

    def __init__(self, num_queued: int, num_tokens: int):
        super().__init__(
            f"The server is busy: {num_queued} sequences with {num_tokens} prompt tokens wait.",
            status=503,
            retry_after_s=1,
        )


def shutting_down() -> RequestError:
    """What requests get when the server ends as it was told to."""
    return RequestError("The server is shutting down.", status=503)


class CoreClient(Protocol):
    """What AsyncLLM needs of engine cores that are ready."""

    def send(self, message: EngineInput) -> None:
        """Sends a message; never blocks.

        Raises:
          EngineDeadError: an engine core is gone.
        """
        ...

    def start_receiving(self, handle: Callable[[EngineOutput], None]) -> None:
        """From now on `handle`, which does not raise, gets every message at once; EngineDead when
        an engine core is gone, in whatever way."""
        ...


@dataclass
class _Call:
    """A utility call under way: what the engine cores have answered so far."""

    future: asyncio.Future[list[Any]]
    values: list[Any] = field(default_factory=list)


class AsyncLLM:
    """Admits sequences to the engine and routes its outputs. Lives on one event loop.

    client_idx: which API server this is.  num_engines: engine cores, all of which answer a call.
    max_num_queued, max_num_queued_tokens: how many sequences may have no token yet, and how many
      tokens their prompts; 0: no limit. When none waits, any request is taken.
    """

    def __init__(
        self,
        client: CoreClient,
        output_processor: OutputProcessor,
        *,
        client_idx: int = 0,
        num_engines: int = 1,
        max_num_queued: int = 0,
        max_num_queued_tokens: int = 0,
    ):
        self._client_idx = client_idx
        self._num_engines = num_engines
        self._client = client
        self._output_processor = output_processor
        self._max_num_queued = max_num_queued or sys.maxsize
        self._max_num_queued_tokens = max_num_queued_tokens or sys.maxsize
        self._call_ids = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._closed_by: Exception | None = None
        self._died = asyncio.Event()

    def start(self) -> None:
        """Begins to receive; the engine must be ready."""
        self._client.start_receiving(self._receive)

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the engine is dead, if it is."""
        return self._closed_by if isinstance(self._closed_by, EngineDeadError) else None

    async def wait_dead(self) -> EngineDeadError:
        """Blocks until the engine is dead; returns the root cause."""
        await self._died.wait()
        assert self.dead_error is not None
        return self.dead_error

    def generate(self, sequences: Sequence[SequenceRequest]) -> "RequestStream":
        """Starts generating the choices of one request.

        The stream must be used as a context manager: leaving it, for whatever reason, aborts
        what still runs.

        Raises:
          EngineDeadError: the engine is dead.
          RequestError: the server is shutting down, or too many sequences wait.
        """
        num_tokens = sum(len(sequence.core.prompt_token_ids) for sequence in sequences)
        self.check_admission(len(sequences), num_tokens)
        stream = RequestStream(self, sequences)
        for sequence in sequences:
            self._output_processor.add(sequence, stream)
            self._client.send(sequence.core)
        return stream

    def check_admission(self, num_sequences: int = 1, num_tokens: int = 1) -> None:
        """Raises what `generate` would raise for so many sequences with so many prompt tokens."""
        if self._closed_by is not None:
            raise self._closed_by
        queue = self._output_processor
        if queue.num_queued and (
            queue.num_queued + num_sequences > self._max_num_queued
            or queue.num_queued_tokens + num_tokens > self._max_num_queued_tokens
        ):
            raise QueueFullError(queue.num_queued, queue.num_queued_tokens)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ends sequences nobody waits for; those that have ended already are ignored."""
        running = self._output_processor.discard(request_ids, time.time())
        if running and self._closed_by is None:
            with contextlib.suppress(EngineDeadError):  # then nothing runs any more
                self._client.send(AbortRequests(running))

    async def reset_prefix_cache(self) -> bool:
        """Empties every prefix cache between two steps; False when blocks are in use somewhere."""
        return all(await self._call("reset_prefix_cache"))

    async def _call(self, method: str, *args: Any) -> list[Any]:
        """What each engine core answers."""
        if self._closed_by is not None:
            raise self._closed_by
        call_id = next(self._call_ids)
        call = self._calls[call_id] = _Call(asyncio.get_running_loop().create_future())
        self._client.send(UtilityCall(call_id, method, list(args), self._client_idx))
        try:
            return await call.future
        finally:
            self._calls.pop(call_id, None)

    def close(self, error: Exception | None = None) -> None:
        """Fails everything that runs and whatever comes with `error`; by default, a 503 that
        says that the server is shutting down. The engine itself is the caller's to end."""
        self._fail(error or shutting_down())

    def _receive(self, message: EngineOutput) -> None:
        if self._closed_by is not None:
            return
        try:
            self._handle(message)
        except EngineDeadError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("cannot process the engine's output")
            self._fail(EngineDeadError(f"the API server failed: {error!r}"))

    def _handle(self, message: EngineOutput) -> None:
        match message:
            case EngineCoreOutputs():
                to_abort = self._output_processor.process(message)
                if to_abort:
                    self._client.send(AbortRequests(to_abort))
            case UtilityResult():
                self._take_result(message)
            case EngineDead():
                raise EngineDeadError(message.reason)

    def _take_result(self, message: UtilityResult) -> None:
        call = self._calls.get(message.call_id)
        if call is None or call.future.done():
            return
        if message.error is not None:
            call.future.set_exception(RuntimeError(message.error))
            return
        call.values.append(message.value)
        if len(call.values) == self._num_engines:
            call.future.set_result(call.values)

    def _fail(self, error: Exception) -> None:
        if self._closed_by is not None:
            return
        self._closed_by = error
        self._output_processor.fail_all(error)
        for call in self._calls.values():
            if not call.future.done():
                call.future.set_exception(error)
        if isinstance(error, EngineDeadError):
            self._died.set()


class RequestStream:
    """The outputs of one request's choices: an asynchronous iterator of RequestOutput.

    Each output is a choice's gain since the one before; what piles up while nobody reads is
    merged, so a slow reader gets fewer, longer outputs and the same text. Ends when every choice
    has ended; raises EngineDeadError or RequestError when they are failed from outside.
    """

    def __init__(self, llm: AsyncLLM, sequences: Sequence[SequenceRequest]):
        self._llm = llm
        self._request_ids = [sequence.core.request_id for sequence in sequences]
        self._num_open = len(sequences)
        self._ready: dict[int, RequestOutput] = {}
        self._error: Exception | None = None
        self._is_cancelled = False
        self._waiter: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if not self._ready and not await self._wait():
            raise StopAsyncIteration
        return self._ready.pop(next(iter(self._ready)))

    async def take(self) -> list[RequestOutput]:
        """All that is ready, at most one output a choice; waits for at least one. Empty at the
        end."""
        if not self._ready and not await self._wait():
            return []
        outputs = list(self._ready.values())
        self._ready.clear()
        return outputs

    @property
    def is_cancelled(self) -> bool:
        """Whether it ended by `cancel` with choices unfinished."""
        return self._is_cancelled

    def cancel(self) -> None:
        """Aborts what still runs; the iterator ends."""
        if self._num_open:
            self._num_open = 0
            self._is_cancelled = True
            self._llm.abort(self._request_ids)
        self._wake()

    def put(self, output: RequestOutput) -> None:
        """Called by the output processor."""
        earlier = self._ready.get(output.index)
        if earlier is None:
            self._ready[output.index] = output
        else:
            earlier.merge(output)
        if output.finish_reason is not None:
            self._num_open -= 1
        self._wake()

    def fail(self, error: Exception) -> None:
        """Called by the output processor."""
        self._error = error
        self._wake()

    async def _wait(self) -> bool:
        """Until there is an output (True) or there will be none (False)."""
        while not self._ready:
            if self._num_open <= 0:
                return False
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return True

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
