"""What ``/metrics`` shows, over all HTTP processes of this server.

With ``PROMETHEUS_MULTIPROC_DIR`` set before this module is first imported (process.py does), each process keeps its
numbers in files there and any of them answers for all. Otherwise they live in this object's own registry.

A request here is one choice: ``n=3`` counts three times in ``lightserve_requests_total``. The reasons add up to all
requests that ever reached a route for generation: ``stop``, ``length``, ``abort`` (the client left), ``refused`` (4xx,
by the router or by us) and ``error`` (5xx). What fails before its choices are known counts once.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from lightserve.errors import RequestError
from lightserve.ipc.messages import LoadMsg

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_DURATION_BUCKETS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)


class Metrics:
    """All counters, gauges and histograms of one HTTP process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "lightserve_requests", "Requests by how they ended", ["reason"], registry=self._registry
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that produced a token")
        self.cached_prompt_tokens = self._counter(
            "cached_prompt_tokens", "Prompt tokens found in the prefix cache, of every choice"
        )
        self.generated_tokens = self._counter("generated_tokens", "Tokens generated")
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From the checked request to its first token", _FIRST_TOKEN_BUCKETS_S
        )
        self.request_duration = self._histogram(
            "request_duration_seconds", "From the checked request to its last token", _DURATION_BUCKETS_S
        )
        self.open_requests = Gauge(
            "lightserve_open_http_requests",
            "HTTP requests whose reply is not complete",
            registry=self._registry,
            multiprocess_mode="livesum",
        )
        self._running = self._load_gauge("running_requests", "Requests in the running batch")
        self._waiting = self._load_gauge("waiting_requests", "Requests in the queue")
        self._used = self._load_gauge("kv_slots_used", "KV cache slots held by running requests")
        self._cached = self._load_gauge("kv_slots_cached", "KV cache slots held by the prefix cache alone")
        self._promised = self._load_gauge("kv_slots_promised", "Peak that the running batch may still reach")
        self._total = self._load_gauge("kv_slots_total", "KV cache slots in all")
        self._pauses = _Pauses()
        self._registry.register(self._pauses)

    def count_requests(self, reason: str, number: int = 1) -> None:
        """Count requests that ended."""
        self._requests.labels(reason).inc(number)

    @contextmanager
    def counting_failures(self, number: int = 1) -> Iterator[None]:
        """Count so many requests if this block fails: the client's fault, ours, or a bug."""
        try:
            yield
        except Exception as error:
            self.count_requests(failure_reason(error.status if isinstance(error, RequestError) else 500), number)
            raise

    def set_load(self, load: LoadMsg) -> None:
        """Show what the router reported."""
        self._running.set(load.num_running)
        self._waiting.set(load.num_waiting)
        self._used.set(load.used_slots)
        self._cached.set(load.cached_slots)
        self._promised.set(load.promised_slots)
        self._total.set(load.max_total_token_num)
        self._pauses.total = load.num_pauses

    def exposition(self) -> bytes:
        """Return everything in Prometheus's text format."""
        directory = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        if directory is None:
            return generate_latest(self._registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry, directory)  # type: ignore[no-untyped-call]
        registry.register(self._pauses)
        return generate_latest(registry)

    def _counter(self, name: str, help_text: str) -> Counter:
        return Counter(f"lightserve_{name}", help_text, registry=self._registry)

    def _histogram(self, name: str, help_text: str, buckets_s: tuple[float, ...]) -> Histogram:
        return Histogram(f"lightserve_{name}", help_text, registry=self._registry, buckets=buckets_s)

    def _load_gauge(self, name: str, help_text: str) -> Gauge:
        # Every HTTP process hears the same reports: the latest one counts, not their sum.
        return Gauge(f"lightserve_{name}", help_text, registry=self._registry, multiprocess_mode="mostrecent")


def failure_reason(status: int) -> str:
    """Say how a request ended that was answered with an error."""
    return "refused" if status < 500 else "error"


class _Pauses(Collector):
    """The router's own count, as last reported: every HTTP process hears it, so it must not be added up over them."""

    def __init__(self) -> None:
        self.total = 0

    def collect(self) -> Iterator[Metric]:
        """Yield the counter."""
        help_text = "Times that a running request had to wait again for want of KV cache slots"
        yield CounterMetricFamily("lightserve_pauses", help_text, self.total)
