"""What an API server asks the others, and what it says when they do not answer."""

import asyncio
from collections.abc import Callable

import pytest

from jaxserve.errors import EngineDeadError, RequestError
from jaxserve.messages import MetricsReport, MetricsRequest, PeerMessage, SchedulerStats, encode
from jaxserve.metrics import ServerMetrics
from jaxserve.server import peers as module
from jaxserve.server.peers import Peers


class FakeConnection:
    """Of API server 0 of three. answers: whether the others do."""

    client_idx = 0
    peer_idxs = (1, 2)

    def __init__(self, answers: tuple[int, ...] = (1, 2)):
        self.answers = answers
        self.sent: list[tuple[int, PeerMessage]] = []
        self.on_peer_message: Callable[[PeerMessage], None] | None = None

    def send_to_peer(self, peer_idx: int, message: PeerMessage) -> None:
        self.sent.append((peer_idx, message))
        if isinstance(message, MetricsRequest) and peer_idx in self.answers:
            report = MetricsReport(message.call_id, encode(counted(peer_idx).counts()), peer_idx)
            asyncio.get_running_loop().call_soon(self.on_peer_message, report)


def counted(number: int) -> ServerMetrics:
    """Metrics in which everything is a multiple of `number`."""
    metrics = ServerMetrics("m", num_engines=2)
    metrics.prompt_tokens, metrics.generation_tokens = 10 * number, 100 * number
    metrics.num_generating = number
    for _ in range(number):
        metrics.count_finished("stop")
        metrics.count_http("/health", 200)
        metrics.e2e_latency.observe(0.5 * number)
    metrics.stats[number % 2] = SchedulerStats(num_running=number, num_steps=number)
    return metrics


def test_all_counts_are_added_up():
    async def main() -> None:
        peers = Peers(FakeConnection(), own := counted(3))
        for _ in range(2):  # asking changes nothing
            counts = await peers.counts()
            assert (counts.prompt_tokens, counts.generation_tokens) == (60, 600)
            assert (counts.num_generating, counts.finished["stop"]) == (6, 6)
            assert counts.http == [("/health", 200, 6)]
            between, total = counts.histograms[2]
            assert sum(between) == 6 and total == 3 * 1.5 + 0.5 + 2 * 1.0
            # Of an engine core, whoever heard last: 3 of engine core 1, 2 of engine core 0.
            assert {i: s.num_running for i, s in counts.stats.items()} == {0: 2, 1: 3}
        assert own.counts().prompt_tokens == 30
        page = own.render(counts).decode()
        assert 'jaxserve:num_requests_running{engine="1",model_name="m"} 3.0' in page
        assert 'e2e_request_latency_seconds_count{model_name="m"} 6.0' in page

    asyncio.run(main())


def test_who_is_asked_answers():
    async def main() -> None:
        connection = FakeConnection()
        Peers(connection, own := counted(1))
        assert connection.on_peer_message is not None
        connection.on_peer_message(MetricsRequest(client_idx=2, call_id=77))
        assert connection.sent == [(2, MetricsReport(77, encode(own.counts()), 0))]

    asyncio.run(main())


def test_who_does_not_answer_is_named(monkeypatch, caplog):
    monkeypatch.setattr(module, "_TIMEOUT_S", 0.05)

    async def main() -> None:
        peers = Peers(FakeConnection(answers=(1,)), counted(1))
        with pytest.raises(RequestError, match=r"^API server 2 does not answer\.$") as raised:
            await peers.counts()
        assert raised.value.status == 503
        assert "API server 2 has not answered" in caplog.text

    asyncio.run(main())


def test_a_late_answer_is_nobodys():
    async def main() -> None:
        connection = FakeConnection()
        Peers(connection, counted(1))
        assert connection.on_peer_message is not None
        connection.on_peer_message(MetricsReport(5, encode(counted(1).counts()), 1))

    asyncio.run(main())


def test_the_end_is_told_to_who_waits_and_who_comes():
    async def main() -> None:
        peers = Peers(FakeConnection(answers=()), counted(1))
        waiting = asyncio.create_task(peers.counts())
        await asyncio.sleep(0)
        peers.close(EngineDeadError("it is dead"))
        for asked in (waiting, peers.counts()):
            with pytest.raises(EngineDeadError, match="it is dead"):
                await asked

    asyncio.run(main())
