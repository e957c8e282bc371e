"""One response of server-sent events, with comments where it would be silent."""

import asyncio
from collections.abc import Sequence

from starlette.types import Send

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_COMMENT = b": keep-alive\n\n"
_TICKS = 4  # looks for silence so often in a period


class EventStream:
    """The response begins with the first data or the first comment: what fails before may still be
    answered in another way, unless `has_begun`.

    keep_alive_s: after so much silence, up to a quarter more, a comment is sent; 0: never. One
      timer a stream, none a chunk.
    """

    def __init__(self, send: Send, headers: Sequence[tuple[bytes, bytes]], keep_alive_s: float):
        self.has_begun = False
        self._send = send
        self._headers = headers
        self._num_begun = 0
        self._num_sent = 0
        self._ticker = None
        if keep_alive_s:
            self._ticker = asyncio.create_task(self._keep_alive(keep_alive_s / _TICKS))

    async def write(self, data: bytes) -> None:
        """Sends whole events."""
        if not self.has_begun:
            await self._begin()
        self._num_begun += 1
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._num_sent += 1

    async def end(self, data: bytes) -> None:
        """Sends the last events."""
        self.stop()
        if not self.has_begun:
            await self._begin()
        await self._send({"type": "http.response.body", "body": data})

    def stop(self) -> None:
        """No more comments; must be called, whatever happens."""
        if self._ticker is not None:
            self._ticker.cancel()

    async def _begin(self) -> None:
        self.has_begun = True
        headers = [*_HEADERS, *self._headers]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _keep_alive(self, tick_s: float) -> None:
        seen = num_silent = 0
        while True:
            await asyncio.sleep(tick_s)
            num_silent += 1
            if seen != self._num_sent or self._num_begun != self._num_sent:
                seen, num_silent = self._num_sent, 0
            elif num_silent >= _TICKS:
                await self.write(_COMMENT)
                seen, num_silent = self._num_sent, 0
