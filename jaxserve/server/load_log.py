"""A line in the log every few seconds while there is work."""

import asyncio
import logging
import time
from typing import NamedTuple

from jaxserve.metrics import ServerMetrics, kv_usage

PERIOD_S = 10.0
logger = logging.getLogger(__name__)


class _Totals(NamedTuple):
    """Counters as of one moment."""

    time_s: float
    prompt_tokens: int
    generation_tokens: int
    cache_queries: int
    cache_hits: int


class LoadLog:
    """Turns two looks at the metrics into a line."""

    def __init__(self, metrics: ServerMetrics, now_s: float):
        self._metrics = metrics
        self._last = self._totals(now_s)

    def line(self, now_s: float) -> str | None:
        """What happened since the last call; None when nothing ran and nothing was generated."""
        last, self._last = self._last, self._totals(now_s)
        now, engines = self._last, self._metrics.stats.values()
        num_running = sum(stats.num_running for stats in engines)
        num_waiting = sum(stats.num_waiting for stats in engines)
        num_prompt = now.prompt_tokens - last.prompt_tokens
        num_generated = now.generation_tokens - last.generation_tokens
        if not (num_running or num_waiting or num_prompt or num_generated):
            return None
        took_s = max(now_s - last.time_s, 1e-9)
        num_queries = now.cache_queries - last.cache_queries
        hits = (now.cache_hits - last.cache_hits) / num_queries if num_queries else 0.0
        usage = sum(map(kv_usage, engines)) / len(engines)
        return (
            f"{num_running} running, {num_waiting} waiting; "
            f"prompt {num_prompt / took_s:.1f} tok/s, output {num_generated / took_s:.1f} tok/s; "
            f"KV cache {usage:.1%} used, prefix hits {hits:.1%}"
        )

    def _totals(self, now_s: float) -> _Totals:
        metrics = self._metrics
        return _Totals(
            now_s,
            metrics.prompt_tokens,
            metrics.generation_tokens,
            sum(stats.prefix_cache_queries for stats in metrics.stats.values()),
            sum(stats.prefix_cache_hits for stats in metrics.stats.values()),
        )


async def log_load(metrics: ServerMetrics, period_s: float = PERIOD_S) -> None:
    """Writes the lines until it is cancelled."""
    log = LoadLog(metrics, time.monotonic())
    while True:
        await asyncio.sleep(period_s)
        line = log.line(time.monotonic())
        if line is not None:
            logger.info("%s", line)
