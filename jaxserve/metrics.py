"""The API server's Prometheus metrics: plain numbers that cost nothing to raise, read at scrape."""

from bisect import bisect_left
from collections.abc import Iterator

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

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]):
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts `value`, `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def snapshot(self) -> tuple[list[tuple[str, float]], float]:
        """(upper bound, how many values are not above it) in ascending order, and the sum."""
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((str(bound), total))
        return buckets, self._sum


class ServerMetrics(Collector):
    """Everything `/metrics` shows. Written from the event loop only.

    num_refused: requests that the admission limits kept out.
    num_generating: requests to routes that generate, which are not answered whole yet.
    """

    def __init__(self, model_name: str):
        self._model_name = model_name
        self.stats = SchedulerStats()
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
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def count_finished(self, reason: str) -> None:
        """One sequence ended; reason: one of FINISHED_REASONS."""
        self._num_finished[reason] += 1

    def count_http(self, route: str, status: int) -> None:
        """One HTTP request ended. route: its path as the table has it, so that they are few."""
        key = route, status
        self._num_http[key] = self._num_http.get(key, 0) + 1

    @property
    def kv_usage(self) -> float:
        """Part of the KV blocks that sequences hold, without the null block."""
        return self.stats.num_used_kv_blocks / max(1, self.stats.num_kv_blocks - 1)

    def render(self) -> bytes:
        """The text a Prometheus server scrapes."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus-client."""
        stats = self.stats
        for name, text, value in (
            ("num_requests_running", "Sequences in the running batch.", stats.num_running),
            ("num_requests_waiting", "Sequences that wait to be scheduled.", stats.num_waiting),
            ("kv_cache_usage_perc", "Used part of the KV cache; 1 is all of it.", self.kv_usage),
        ):
            yield self._gauge(name, text, value)
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens processed.", self.prompt_tokens),
            ("generation_tokens", "Tokens generated.", self.generation_tokens),
            ("num_preemptions", "Sequences preempted.", stats.num_preemptions),
            (
                "prefix_cache_queries",
                "Tokens looked for in the cache.",
                stats.prefix_cache_queries,
            ),
            ("prefix_cache_hits", "Tokens found in the cache.", stats.prefix_cache_hits),
            ("engine_steps", "Steps of the engine core.", stats.num_steps),
            ("compiles_after_ready", "Compilations since ready.", stats.num_compiles_after_ready),
            ("requests_refused", "Requests over the admission limits.", self.num_refused),
        ):
            yield self._counter(name, text, value)
        finished = CounterMetricFamily(
            "jaxserve:request_success",
            "Sequences that ended, by reason.",
            labels=["model_name", "finished_reason"],
        )
        for reason, count in self._num_finished.items():
            finished.add_metric([self._model_name, reason], count)
        yield finished
        http = CounterMetricFamily(
            "jaxserve:http_requests",
            "HTTP requests, by route and status.",
            labels=["model_name", "route", "status"],
        )
        for (route, status), count in self._num_http.items():
            http.add_metric([self._model_name, route, str(status)], count)
        yield http
        for name, text, histogram in (
            ("time_to_first_token_seconds", "Arrival to first token.", self.time_to_first_token),
            ("inter_token_latency_seconds", "Between two tokens.", self.inter_token_latency),
            ("e2e_request_latency_seconds", "Arrival to last token.", self.e2e_latency),
            ("request_queue_time_seconds", "Queued to first scheduled.", self.queue_time),
        ):
            family = HistogramMetricFamily(f"jaxserve:{name}", text, labels=["model_name"])
            family.add_metric([self._model_name], *histogram.snapshot())
            yield family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"jaxserve:{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"jaxserve:{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family
