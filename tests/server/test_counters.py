"""Exact numbers: all counters after ten requests of ten tokens; the line of load in the log."""

import asyncio
import itertools
import logging
import re

import httpx
import pytest

from jaxserve.messages import SchedulerStats
from jaxserve.metrics import ServerMetrics
from jaxserve.server.load_log import LoadLog, log_load
from tests.fakes_engine import FakeServer, fake_server


def values(text: str) -> dict[str, float]:
    """What a scrape shows, without the labels that all have and without buckets."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        name = re.sub(r',?model_name="tiny"|engine="0"', "", name)
        name = name.replace("{}", "").replace("{,", "{")
        if not line.startswith("#") and "_bucket" not in name:
            found[name.removeprefix("jaxserve:")] = float(value)
    return found


async def scrape(client: httpx.AsyncClient) -> dict[str, float]:
    return values((await client.get("/metrics")).text)


def test_ten_requests_of_ten_tokens() -> None:
    async def test(server: FakeServer) -> None:
        before = await scrape(server.client)
        zero = ("prompt_tokens_total", "generation_tokens_total", "e2e_request_latency_seconds_sum")
        assert all(before[name] == 0 for name in zero)
        answers = await asyncio.gather(
            *(
                server.post("/v1/completions", prompt="abcdefg", max_tokens=10, stream=i % 2 == 0)
                for i in range(10)
            )
        )
        assert [answer.status_code for answer in answers] == [200] * 10
        after = await scrape(server.client)
        assert {name: value for name, value in after.items() if value != before.get(name)} == {
            "engine_steps_total": server.core.num_steps,
            "prompt_tokens_total": 10 * 7,
            "generation_tokens_total": 10 * 10,
            'request_success_total{finished_reason="length"}': 10,
            "time_to_first_token_seconds_count": 10,
            "inter_token_latency_seconds_count": 10 * 9,
            "e2e_request_latency_seconds_count": 10,
            "request_queue_time_seconds_count": 10,
            "request_queue_time_seconds_sum": 10.0,  # the fake says a second each
            **{
                f"{name}_seconds_sum": after[f"{name}_seconds_sum"]
                for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
            },
            "num_preemptions_total": 4,
            "prefix_cache_queries_total": 50,
            "prefix_cache_hits_total": 6,
            "compiles_after_ready_total": 1,
            "num_requests_waiting": 2,
            "kv_cache_usage_perc": 0.25,
            'http_requests_total{route="/v1/completions",status="200"}': 10,
            'http_requests_total{route="/metrics",status="200"}': 1,
        }

    async def main() -> None:
        async with fake_server(lambda request: itertools.repeat(97)) as server:
            await asyncio.wait_for(test(server), 10)

    asyncio.run(main())


def test_times_add_up() -> None:
    """The time to the first token and the times between tokens are the whole time."""

    async def main() -> None:
        async with fake_server(lambda request: itertools.repeat(97), step_s=0.01) as server:
            await server.post("/v1/completions", prompt="a", max_tokens=10)
            found = await scrape(server.client)
            parts = found["time_to_first_token_seconds_sum"]
            parts += found["inter_token_latency_seconds_sum"]
            assert parts == pytest.approx(found["e2e_request_latency_seconds_sum"])
            assert found["inter_token_latency_seconds_sum"] >= 9 * 0.01

    asyncio.run(main())


def test_a_line_of_load() -> None:
    metrics = ServerMetrics("m")
    log = LoadLog(metrics, 100.0)
    assert log.line(110.0) is None
    metrics.stats[0] = SchedulerStats(
        num_running=3,
        num_waiting=2,
        num_kv_blocks=101,
        num_used_kv_blocks=25,
        prefix_cache_queries=200,
        prefix_cache_hits=50,
    )
    metrics.prompt_tokens, metrics.generation_tokens = 500, 1234
    assert log.line(120.0) == (
        "3 running, 2 waiting; prompt 50.0 tok/s, output 123.4 tok/s; "
        "KV cache 25.0% used, prefix hits 25.0%"
    )
    metrics.generation_tokens += 10
    metrics.stats[0] = SchedulerStats(prefix_cache_queries=210, prefix_cache_hits=58)
    assert log.line(125.0) == (
        "0 running, 0 waiting; prompt 0.0 tok/s, output 2.0 tok/s; "
        "KV cache 0.0% used, prefix hits 80.0%"
    )
    assert log.line(135.0) is None
    metrics.stats[0] = SchedulerStats(num_waiting=1)
    assert (log.line(145.0) or "").startswith("0 running, 1 waiting")


def test_the_log_says_nothing_while_idle(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        metrics = ServerMetrics("m")
        logging_load = asyncio.create_task(log_load(metrics, period_s=0.01))
        await asyncio.sleep(0.1)
        assert caplog.records == []
        metrics.generation_tokens = 5
        while not caplog.records:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        logging_load.cancel()

    with caplog.at_level(logging.INFO, "jaxserve"):
        asyncio.run(main())
    assert len(caplog.records) == 1
