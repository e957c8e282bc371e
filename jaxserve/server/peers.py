"""What an API server asks the others: what they have counted."""

import asyncio
import itertools
import logging

import msgspec

from jaxserve.engine.core_connection import CoreConnection
from jaxserve.errors import RequestError
from jaxserve.messages import MetricsReport, MetricsRequest, PeerMessage, encode
from jaxserve.metrics import MetricsCounts, ServerMetrics

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
_decode_counts = msgspec.msgpack.Decoder(MetricsCounts).decode


class _Call:
    """The reports that one scrape waits for."""

    def __init__(self, peer_idxs: list[int]):
        self.missing = set(peer_idxs)
        self.reports: list[MetricsCounts] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self, report: MetricsReport) -> None:
        """One of the others has answered."""
        self.missing.discard(report.client_idx)
        self.reports.append(_decode_counts(report.counts))
        if not self.missing and not self.done.done():
            self.done.set_result(None)


class Peers:
    """The other API servers, as the one sees them that `connection` belongs to."""

    def __init__(self, connection: CoreConnection, metrics: ServerMetrics):
        self._connection = connection
        self._metrics = metrics
        self._call_ids = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._closed_by: Exception | None = None
        connection.on_peer_message = self._handle

    async def counts(self) -> MetricsCounts:
        """What all API servers have counted.

        Raises:
          RequestError: one does not answer; a sum without it would be less than the last.
          Exception: what `close` was given.
        """
        peer_idxs = self._connection.peer_idxs
        if not peer_idxs:
            return self._metrics.counts()
        if self._closed_by is not None:
            raise self._closed_by
        call_id = next(self._call_ids)
        call = self._calls[call_id] = _Call(peer_idxs)
        try:
            for peer_idx in peer_idxs:
                request = MetricsRequest(self._connection.client_idx, call_id)
                self._connection.send_to_peer(peer_idx, request)
            async with asyncio.timeout(_TIMEOUT_S):
                await call.done
        except TimeoutError:
            names = ", ".join(map(str, sorted(call.missing)))
            logger.warning("API server %s has not answered for %g s", names, _TIMEOUT_S)
            raise RequestError(f"API server {names} does not answer.", status=503) from None
        finally:
            del self._calls[call_id]
        counts = self._metrics.counts()
        for report in call.reports:
            counts.add(report)
        return counts

    def close(self, error: Exception) -> None:
        """Nothing more is received: whoever asks for all counts gets `error`."""
        self._closed_by = error
        for call in self._calls.values():
            if not call.done.done():
                call.done.set_exception(error)

    def _handle(self, message: PeerMessage) -> None:
        match message:
            case MetricsRequest():
                counts = encode(self._metrics.counts())
                report = MetricsReport(message.call_id, counts, self._connection.client_idx)
                self._connection.send_to_peer(message.client_idx, report)
            case MetricsReport() if message.call_id in self._calls:
                self._calls[message.call_id].take(message)
