"""Responses that can be had again: in memory, up to a size; the least recently used go first."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from jaxserve.server.protocol.chat import ChatMessage
from jaxserve.server.protocol.responses import ResponseObject


class EventLog:
    """The encoded events of a background response; any number of readers follow it."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._is_closed = False
        self._changed = asyncio.Event()

    @property
    def num_bytes(self) -> int:
        """Of all events."""
        return sum(len(event) for event in self._events)

    def append(self, event: bytes) -> None:
        """The next event; its index is its sequence number."""
        assert not self._is_closed
        self._events.append(event)
        self._wake()

    def close(self) -> None:
        """There are no more events."""
        self._is_closed = True
        self._wake()

    async def read(self, first: int = 0) -> AsyncIterator[bytes]:
        """Events from number `first` on, several at a time; ends when the log is closed."""
        while True:
            if self._events[first:]:
                events = self._events[first:]
                first += len(events)
                yield b"".join(events)
            elif self._is_closed:
                return
            else:
                await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass(eq=False)
class StoredResponse:
    """A response, as far as it is known.

    messages: the conversation up to and with this response, without instructions.
    log: of a background response that is streamed.
    cancel: ends a background response that runs, and waits for that; None when nothing runs.
    """

    response: ResponseObject
    messages: tuple[ChatMessage, ...] = ()
    log: EventLog | None = None
    cancel: Callable[[], Awaitable[None]] | None = None
    num_bytes: int = field(default=0, init=False)


class ResponseStore:
    """Responses by id. What runs is kept whatever its size; what has ended counts.

    Each counts with its own size and that of the whole conversation before it, though
    conversations share their messages: what is held is at most what is counted.
    """

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._responses: dict[str, StoredResponse] = {}  # the least recently used first
        self.num_bytes = 0

    @property
    def is_on(self) -> bool:
        """Whether anything is kept at all."""
        return self._max_bytes > 0

    def add(self, stored: StoredResponse, num_bytes: int) -> None:
        """Keeps a response, or counts one anew that has changed."""
        self._forget(stored.response.id)
        stored.num_bytes = num_bytes
        self.num_bytes += num_bytes
        self._responses[stored.response.id] = stored
        for other in list(self._responses.values()):
            if self.num_bytes <= self._max_bytes:
                break
            if other.cancel is None:
                self._forget(other.response.id)

    def get(self, response_id: str) -> StoredResponse | None:
        """The response, which is now the most recently used one."""
        stored = self._responses.pop(response_id, None)
        if stored is not None:
            self._responses[response_id] = stored
        return stored

    def delete(self, response_id: str) -> None:
        """Forgets a response, if there is one."""
        self._forget(response_id)

    def _forget(self, response_id: str) -> None:
        stored = self._responses.pop(response_id, None)
        if stored is not None:
            self.num_bytes -= stored.num_bytes
