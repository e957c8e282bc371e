"""What an API server asks the others: what they have counted."""

import asyncio
import itertools

import msgspec

from jaxserve.engine.core_connection import CoreConnection
from jaxserve.errors import RequestError
from jaxserve.messages import MetricsReport, MetricsRequest, PeerMessage, encode
from jaxserve.metrics import MetricsCounts, ServerMetrics

_TIMEOUT_S = 5.0
_decode_counts = msgspec.msgpack.Decoder(MetricsCounts).decode


class Peers:
    """The other API servers, as one sees them that is being served by `connection`."""

    def __init__(self, connection: CoreConnection, metrics: ServerMetrics):
        self._connection = connection
        self._metrics = metrics
        self._call_ids = itertools.count(1)
        self._reports: dict[int, asyncio.Queue[MetricsCounts]] = {}
        connection.on_peer_message = self._handle

    async def counts(self) -> MetricsCounts:
        """What all API servers have counted.

        Raises:
          RequestError: one does not answer; a sum without it would be less than the last.
        """
        call_id = next(self._call_ids)
        reports = self._reports[call_id] = asyncio.Queue()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                peer_idxs = self._connection.peer_idxs
                for peer_idx in peer_idxs:
                    request = MetricsRequest(self._connection.client_idx, call_id)
                    self._connection.send_to_peer(peer_idx, request)
                others = [await reports.get() for _ in peer_idxs]
        except TimeoutError:
            raise RequestError("Another API server does not answer.", status=503) from None
        finally:
            del self._reports[call_id]
        counts = self._metrics.counts()
        for other in others:
            counts.add(other)
        return counts

    def _handle(self, message: PeerMessage) -> None:
        match message:
            case MetricsRequest():
                report = MetricsReport(message.call_id, encode(self._metrics.counts()))
                self._connection.send_to_peer(message.client_idx, report)
            case MetricsReport() if message.call_id in self._reports:
                self._reports[message.call_id].put_nowait(_decode_counts(message.counts))
