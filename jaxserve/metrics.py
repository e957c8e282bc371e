"""The API server's Prometheus metrics: plain numbers that cost nothing to raise, read at scrape."""

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jaxserve.messages import SchedulerStats

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
FINISHED_REASONS = ("stop", "length", "abort", "error")

_SHORT_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2),
    *(0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
_LONG_BOUNDS_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 320.0, 640.0, 1280.0),
)


class Histogram:
    """Counts of values by upper bound."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]):
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts `value`, `times` times."""
        self.counts[bisect_left(self._bounds, value)] += times
        self.total += value * times


class MetricsCounts(msgspec.Struct, array_like=True):
    """What API servers have counted: one, or several together.

    stats: of each engine core, as it last told.
    finished: sequences that ended, by one of FINISHED_REASONS.
    http: HTTP requests that ended, by (path as the table of routes has it, status).
    histograms: (how many values lie between two bounds, their sum) of each of _HISTOGRAMS.
    """

    stats: dict[int, SchedulerStats]
    prompt_tokens: int
    generation_tokens: int
    num_refused: int
    num_generating: int
    finished: dict[str, int]
    http: list[tuple[str, int, int]]
    histograms: list[tuple[list[int], float]]

    def add(self, other: "MetricsCounts") -> None:
        """Adds what another API server has counted."""
        for idx, stats in other.stats.items():
            if idx not in self.stats or self.stats[idx].num_steps < stats.num_steps:
                self.stats[idx] = stats
        self.prompt_tokens += other.prompt_tokens
        self.generation_tokens += other.generation_tokens
        self.num_refused += other.num_refused
        self.num_generating += other.num_generating
        self.finished = {k: n + other.finished[k] for k, n in self.finished.items()}
        http = Counter({(route, status): n for route, status, n in self.http})
        http.update({(route, status): n for route, status, n in other.http})
        self.http = [(*key, n) for key, n in http.items()]
        self.histograms = [
            ([a + b for a, b in zip(mine, theirs, strict=True)], my_sum + their_sum)
            for (mine, my_sum), (theirs, their_sum) in zip(
                self.histograms, other.histograms, strict=True
            )
        ]


class ServerMetrics:
    """What one API server counts. Written from the event loop only.

    stats: of each engine core, by its number.
    num_refused: requests that the admission limits kept out.
    num_generating: requests to routes that generate, which are not answered whole yet.
    """

    def __init__(self, model_name: str, num_engines: int = 1):
        self._model_name = model_name
        self.stats = {idx: SchedulerStats() for idx in range(num_engines)}
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.time_to_first_token = Histogram(_LONG_BOUNDS_S)
        self.inter_token_latency = Histogram(_SHORT_BOUNDS_S)
        self.e2e_latency = Histogram(_LONG_BOUNDS_S)
        self.queue_time = Histogram(_LONG_BOUNDS_S)
        self.num_refused = 0
        self.num_generating = 0
        self._num_http: dict[tuple[str, int], int] = {}
        self._num_finished: dict[str, int] = dict.fromkeys(FINISHED_REASONS, 0)

    def count_finished(self, reason: str) -> None:
        """One sequence ended; reason: one of FINISHED_REASONS."""
        self._num_finished[reason] += 1

    def count_http(self, route: str, status: int) -> None:
        """One HTTP request ended. route: its path as the table has it, so that they are few."""
        key = route, status
        self._num_http[key] = self._num_http.get(key, 0) + 1

    def counts(self) -> MetricsCounts:
        """All of it, as it is now."""
        histograms = (
            self.time_to_first_token,
            self.inter_token_latency,
            self.e2e_latency,
            self.queue_time,
        )
        return MetricsCounts(
            stats=dict(self.stats),
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            num_refused=self.num_refused,
            num_generating=self.num_generating,
            finished=dict(self._num_finished),
            http=[(*key, n) for key, n in self._num_http.items()],
            histograms=[(list(h.counts), h.total) for h in histograms],
        )

    def render(self, counts: MetricsCounts | None = None) -> bytes:
        """The text that a Prometheus server scrapes. counts: default: this API server's own."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(MetricsPage(self._model_name, counts or self.counts()))
        return generate_latest(registry)


class MetricsPage(Collector):
    """What `/metrics` shows."""

    def __init__(self, model_name: str, counts: MetricsCounts):
        self._model_name = model_name
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus-client."""
        counts = self._counts
        yield from self._engine_metrics()
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens processed.", counts.prompt_tokens),
            ("generation_tokens", "Tokens generated.", counts.generation_tokens),
            ("requests_refused", "Requests over the admission limits.", counts.num_refused),
        ):
            yield self._counter(name, text, [], [((), value)])
        finished = [((reason,), n) for reason, n in counts.finished.items()]
        text = "Sequences that ended, by reason."
        yield self._counter("request_success", text, ["finished_reason"], finished)
        http = [((route, str(status)), n) for route, status, n in counts.http]
        text = "HTTP requests, by route and status."
        yield self._counter("http_requests", text, ["route", "status"], http)
        for (name, text, bounds), (between, total) in zip(
            _HISTOGRAMS, counts.histograms, strict=True
        ):
            family = HistogramMetricFamily(f"jaxserve:{name}", text, labels=["model_name"])
            names = [*map(str, bounds), "+Inf"]
            buckets = list(zip(names, map(float, itertools.accumulate(between)), strict=True))
            family.add_metric([self._model_name], buckets, total)
            yield family

    def _engine_metrics(self) -> Iterator[Metric]:
        """Those that each engine core has."""
        by_engine = sorted(self._counts.stats.items())
        for name, text, value_of in _ENGINE_GAUGES:
            gauge = GaugeMetricFamily(f"jaxserve:{name}", text, labels=["model_name", "engine"])
            for idx, stats in by_engine:
                gauge.add_metric([self._model_name, str(idx)], value_of(stats))
            yield gauge
        for name, text, value_of in _ENGINE_COUNTERS:
            values = [((str(idx),), value_of(stats)) for idx, stats in by_engine]
            yield self._counter(name, text, ["engine"], values)

    def _counter(
        self, name: str, text: str, labels: list[str], values: list[tuple[tuple[str, ...], int]]
    ) -> Metric:
        family = CounterMetricFamily(f"jaxserve:{name}", text, labels=["model_name", *labels])
        for label_values, value in values:
            family.add_metric([self._model_name, *label_values], value)
        return family


def kv_usage(stats: SchedulerStats) -> float:
    """Part of the KV blocks that sequences hold, without the null block."""
    return stats.num_used_kv_blocks / max(1, stats.num_kv_blocks - 1)


_ENGINE_GAUGES: tuple[tuple[str, str, Callable[[SchedulerStats], float]], ...] = (
    ("num_requests_running", "Sequences in the running batch.", lambda s: s.num_running),
    ("num_requests_waiting", "Sequences that wait to be scheduled.", lambda s: s.num_waiting),
    ("kv_cache_usage_perc", "Used part of the KV cache; 1 is all of it.", kv_usage),
)
_ENGINE_COUNTERS: tuple[tuple[str, str, Callable[[SchedulerStats], int]], ...] = (
    ("engine_requests", "Sequences that came to the engine core.", lambda s: s.num_requests),
    ("num_preemptions", "Sequences preempted.", lambda s: s.num_preemptions),
    ("prefix_cache_queries", "Tokens looked for in the cache.", lambda s: s.prefix_cache_queries),
    ("prefix_cache_hits", "Tokens found in the cache.", lambda s: s.prefix_cache_hits),
    ("engine_steps", "Steps of the engine core.", lambda s: s.num_steps),
    (
        "compiles_after_ready",
        "Compilations since ready.",
        lambda s: s.num_compiles_after_ready,
    ),
)
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "Arrival to first token.", _LONG_BOUNDS_S),
    ("inter_token_latency_seconds", "Between two tokens.", _SHORT_BOUNDS_S),
    ("e2e_request_latency_seconds", "Arrival to last token.", _LONG_BOUNDS_S),
    ("request_queue_time_seconds", "Queued to first scheduled.", _LONG_BOUNDS_S),
)
