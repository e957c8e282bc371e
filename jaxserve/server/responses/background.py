"""A response that is made while its client does something else."""

import asyncio
import logging

from jaxserve.engine.async_llm import RequestStream
from jaxserve.errors import EngineDeadError, RequestError
from jaxserve.server.responses.store import StoredResponse
from jaxserve.server.responses.writer import ResponseWriter

logger = logging.getLogger(__name__)


class BackgroundRun:
    """Makes the response from the stream, from now on, and keeps `stored` up to date.

    task: done when the response is over.
    """

    def __init__(self, stream: RequestStream, writer: ResponseWriter, stored: StoredResponse):
        self._stream = stream
        self._writer = writer
        self._stored = stored
        stored.cancel = self._cancel
        self._add(writer.begin())
        self.task = asyncio.create_task(self._run(), name=f"background {stored.response.id}")

    async def _cancel(self) -> None:
        """Ends the response; returns when it is over."""
        self._stream.cancel()
        await asyncio.wait({self.task})

    async def _run(self) -> None:
        try:
            async with self._stream as stream:
                await self._generate(stream)
        finally:
            self._stored.cancel = None
            if self._stored.log is not None:
                self._stored.log.close()

    async def _generate(self, stream: RequestStream) -> None:
        writer = self._writer
        try:
            while outputs := await stream.take():
                self._add(writer.feed(outputs))
            self._add(writer.cancel() if stream.is_cancelled else writer.end())
        except (EngineDeadError, RequestError) as error:
            self._add(writer.fail(error))
        except Exception:
            logger.exception("cannot write the response %s", self._stored.response.id)
            error = RequestError(
                "Internal server error; the server's log has the details.", status=500
            )
            self._add(writer.fail(error))

    def _add(self, events: list[bytes]) -> None:
        self._stored.response = self._writer.response
        if self._stored.log is not None:
            for event in events:
                self._stored.log.append(event)
