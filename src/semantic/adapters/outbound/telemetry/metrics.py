"""Prometheus metrics: histograms that record events, and values that are read at each scrape.

Label values are bounded: served models, and the reasons, tiers and kinds of errors that the code
defines. Agents, tenants and client input are never labels.
"""

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import structlog
from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from semantic.adapters.outbound.telemetry.tracing import RequestTracer
from semantic.application.agents.cache_admin import CacheService, Sharing
from semantic.application.agents.running_turns import TurnWatch
from semantic.domain.errors import ModelSwapError
from semantic.ports.inbound import ModelState
from semantic.ports.telemetry import Counts, Measure, Readings, RequestEnd, RequestTrace

_MOMENTS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_WAITS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_MEASURES: Mapping[Measure, tuple[str, str, Sequence[float]]] = {
    Measure.STEP: ("step_duration_seconds", "Seconds of a step on the device.", _MOMENTS),
    Measure.BATCH: ("batch_size", "Sequences in a step.", _SIZES),
    Measure.TOKEN: (
        "inter_token_latency_seconds",
        "Seconds between two tokens of a reply.",
        _MOMENTS,
    ),
    Measure.RESTORE: (
        "cache_restore_duration_seconds",
        "Seconds to read a part of a block from disk.",
        _MOMENTS,
    ),
    Measure.PERSIST: (
        "cache_persist_duration_seconds",
        "Seconds to write a part of a block to disk.",
        _MOMENTS,
    ),
    Measure.SWAP: ("model_swap_duration_seconds", "Seconds to load a model.", _WAITS),
}
_STATES = [state for state in ModelState if state is not ModelState.ON_DISK]


_Values: TypeAlias = Mapping[str, float] | Mapping[tuple[str, str], float]


class Metrics:
    """A `TelemetryPort` with its own Prometheus registry; traces requests if it has a `tracer`."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.tracer: RequestTracer | None = None
        self.registry = CollectorRegistry(auto_describe=False)
        self._measures = {
            measure: self._histogram(name, text, buckets)
            for measure, (name, text, buckets) in _MEASURES.items()
        }
        self._duration = self._histogram(
            "request_duration_seconds", "Seconds from a request to its last event.", _WAITS
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Seconds from a request to its first token.", _WAITS
        )
        self._queue_wait = self._histogram(
            "queue_wait_seconds", "Seconds a request waited for the device.", _WAITS
        )
        ProcessCollector(registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"semantic_{name}", text, buckets=buckets, registry=self.registry)

    def observe(self, measure: Measure, value: float) -> None:
        self._measures[measure].observe(value)

    def begin(self, trace: RequestTrace, request_id: str, agent_id: str, model: str) -> None:
        """Bind agent and trace id to the request's log lines; starts its span."""
        structlog.contextvars.bind_contextvars(agent=agent_id)
        if self.tracer is not None:
            trace_id = self.tracer.begin(trace, request_id, agent_id, model)
            structlog.contextvars.bind_contextvars(trace_id=trace_id)

    def end(self, trace: RequestTrace, end: RequestEnd) -> None:
        now = time.monotonic()
        self._duration.observe(now - trace.received)
        if trace.first_token is not None:
            self._first_token.observe(trace.first_token - trace.received)
        if trace.queued is not None:
            self._queue_wait.observe((trace.admitted or now) - trace.queued)
        if self.tracer is not None:
            self.tracer.end(trace, end)

    def persisted(self, trace: RequestTrace, started: float) -> None:
        """Record the write in the trace; the duration of each part is measured separately."""
        if self.tracer is not None:
            self.tracer.persisted(trace, started)

    def register_server(
        self, cache: CacheService, watch: TurnWatch, state: Callable[[], ModelState]
    ) -> None:
        self.registry.register(ServerCollector(self.counts, cache, watch, state))

    def plotted(self, watch: TurnWatch) -> dict[str, float]:
        """Read the metrics that the page plots over time; cheap."""
        engine, reuse, live = self.counts.engine, self.counts.requests.reuse, watch.live
        tiers = {"hot": reuse.hot, "pool": reuse.pool, "disk": reuse.disk}
        values: dict[str, float] = {
            "semantic_tokens_generated_total": engine.generated_tokens,
            "semantic_tokens_prefilled_total": engine.prompt_tokens,
            "semantic_requests_running": live.num_running,
            "semantic_request_queue_depth": live.num_waiting,
        }
        for tier, count in tiers.items():
            values[f'semantic_tokens_reused_total{{tier="{tier}"}}'] = count
        for histogram in (self._first_token, self._measures[Measure.TOKEN]):
            for sample in next(iter(histogram.collect())).samples:
                if "le" in sample.labels:
                    values[f'{sample.name}{{le="{sample.labels["le"]}"}}'] = sample.value
        return values

    def render(self, accept: str) -> tuple[bytes, str]:
        """Encode all metrics in a format that the client accepts; returns content and its type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"semantic_{name}", text, labels=labels)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"semantic_{name}", text, labels=labels)


def _one(family: CounterMetricFamily | GaugeMetricFamily, value: float) -> Metric:
    family.add_metric([], value)
    return family


def _each(family: CounterMetricFamily | GaugeMetricFamily, values: _Values) -> Metric:
    for key, value in values.items():
        family.add_metric([key] if isinstance(key, str) else key, value)
    return family


class ServerCollector(Collector):
    """Reads the server's counts and current usage at each scrape."""

    def __init__(
        self,
        counts: Counts,
        cache: CacheService,
        watch: TurnWatch,
        state: Callable[[], ModelState],
    ) -> None:
        self._counts = counts
        self._cache = cache
        self._watch = watch
        self._state = state
        self._rate = TokenRate()

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._tokens()
        yield from self._blocks()
        yield from self._use()
        yield from self._shared()

    def _requests(self) -> Iterator[Metric]:
        counts, live = self._counts.requests, self._watch.live
        outcomes = counts.outcomes.copy()
        yield _each(_counter("request", "Requests by outcome.", "model", "status"), outcomes)
        cancelled = sum(n for (_, outcome), n in outcomes.items() if outcome == "cancelled")
        yield _one(_counter("cancellation", "Requests that were cancelled."), cancelled)
        yield _each(
            _counter("failure", "Requests that failed or were refused.", "kind"),
            counts.failures.copy(),
        )
        yield _one(_gauge("request_queue_depth", "Requests waiting."), live.num_waiting)
        yield _one(_gauge("requests_running", "Requests running."), live.num_running)
        yield _one(
            _gauge("agents_active", "Agents with a waiting or running request."), live.num_agents
        )

    def _tokens(self) -> Iterator[Metric]:
        engine, requests = self._counts.engine, self._counts.requests
        yield _one(_counter("tokens_prefilled", "Prompt tokens computed."), engine.prompt_tokens)
        yield _one(_counter("tokens_generated", "Reply tokens generated."), engine.generated_tokens)
        yield _one(
            _counter("drafted_tokens", "Draft tokens that were checked."), engine.drafted_tokens
        )
        right = _counter("accepted_draft_tokens", "Draft tokens that were accepted.")
        yield _one(right, engine.accepted_tokens)
        yield from self._ahead()
        yield _one(
            _gauge("tokens_per_second", "Reply tokens per second since the last scrape."),
            self._rate.read(engine.generated_tokens),
        )
        reuse = requests.reuse
        tiers = {"hot": reuse.hot, "pool": reuse.pool, "disk": reuse.disk}
        yield _each(
            _counter("tokens_reused", "Prompt tokens reused from the KV cache, by tier.", "tier"),
            tiers,
        )
        yield _one(_counter("cache_hit", "Replies that reused KV cache."), requests.hits)
        misses = requests.replies - requests.hits
        yield _one(_counter("cache_miss", "Replies that reused nothing."), misses)
        yield _one(
            _counter("preemption", "Sequences preempted to free memory."), engine.preemptions
        )
        yield _one(_counter("watchdog_hang", "Device calls that hung."), engine.hangs)
        swaps = _counter("model_swap", "Model loads by result.", "result")
        yield _each(swaps, engine.swaps.copy())

    def _ahead(self) -> Iterator[Metric]:
        engine = self._counts.engine
        figures = {
            "tokens_ahead": ("Prompt tokens computed while tools ran.", engine.ahead_tokens),
            "tokens_ahead_used": ("Those that requests reused.", engine.used_ahead_tokens),
            "tokens_ahead_wasted": ("Those dropped unused.", engine.wasted_ahead_tokens),
        }
        for name, (text, value) in figures.items():
            yield _one(_counter(name, text), value)

    def _blocks(self) -> Iterator[Metric]:
        counts = self._counts.cache
        yield _each(
            _counter("eviction", "Block parts evicted.", "tier", "reason"),
            counts.evictions.copy(),
        )
        figures = {
            "block_sealed": ("Blocks sealed.", counts.sealed),
            "block_corrupt": ("Block parts that could not be read.", counts.corrupt),
            "cache_restore": ("Block parts read from disk.", counts.restored),
            "cache_restore_bytes": ("Bytes read from disk.", counts.restored_bytes),
            "cache_persist": ("Block parts written to disk.", counts.written),
            "cache_persist_bytes": ("Bytes written to disk.", counts.written_bytes),
            "cache_persist_failure": ("Block parts that could not be written.", counts.unwritten),
        }
        for name, (text, value) in figures.items():
            yield _one(_counter(name, text), value)

    def _use(self) -> Iterator[Metric]:
        use = self._cache.use()
        memory = use.memory
        kinds = {"held": memory.held, "idle": memory.idle, "working": memory.working}
        yield _each(_gauge("memory_used_bytes", "Memory for the KV cache, by kind.", "kind"), kinds)
        yield _one(_gauge("memory_budget_bytes", "Memory budget of the KV cache."), memory.total)
        yield _one(
            _gauge(
                "pool_utilization_ratio", "Share of the memory budget that eviction cannot free."
            ),
            memory.needed_share,
        )
        if (device := use.device) is not None:
            shares = {
                "weights": device.weights,
                "sequences": device.sequences,
                "cached": device.cached,
                "scratch": device.scratch,
            }
            text = "Device memory: weights, open sequences, the library's cached buffers, the rest."
            yield _each(_gauge("device_memory_used_bytes", text, "kind"), shares)
            yield _one(_gauge("device_memory_bytes", "Memory of the device."), device.total)
        yield _one(_gauge("pool_blocks", "Block parts in memory."), memory.num_blocks)
        yield _one(_gauge("disk_used_bytes", "Bytes in the cache directory."), use.disk)
        yield _one(
            _gauge("disk_budget_bytes", "Disk budget of the cache directory."), use.disk_budget
        )
        yield _one(_gauge("write_queue_bytes", "Bytes queued for writing."), use.queue)
        now = self._state()
        states = {state.value: float(state is now) for state in _STATES}
        yield _each(
            _gauge("model_state", "1 for the model's current state, else 0.", "state"), states
        )

    def _shared(self) -> Iterator[Metric]:
        try:
            sharing = self._cache.sharing()
        except ModelSwapError:
            sharing = Sharing()
        tiers = {tier.value: count for tier, count in sharing.tiers.items()}
        yield _each(_gauge("agents", "Agents by the tier of their KV cache.", "tier"), tiers)
        ratio = sharing.logical_bytes / sharing.unique_bytes if sharing.unique_bytes else 1.0
        yield _one(
            _gauge("dedup_ratio", "KV cache bytes without sharing, divided by the actual bytes."),
            ratio,
        )


class TokenRate:
    """Tokens per second between two reads; reads within `_MIN_S` return the same value."""

    _MIN_S = 1.0

    def __init__(self) -> None:
        self._at, self._count, self._rate = time.monotonic(), 0, 0.0

    def read(self, count: int) -> float:
        now = time.monotonic()
        elapsed = now - self._at
        if elapsed >= self._MIN_S:
            self._rate = (count - self._count) / elapsed
            self._at, self._count = now, count
        return self._rate


# -- the last hour, for the page at `/`, which works without Prometheus ---------------------------

_EVERY_S = 5.0
_KEPT_S = 3660.0  # an hour, plus the readings that the first rates need


class MetricsHistory:
    """Keeps recent readings of metrics. Must be used on the event loop's thread."""

    def __init__(
        self, read: Callable[[], Mapping[str, float]], now: Callable[[], float] = time.time
    ) -> None:
        """Start with an empty history; `read` must return the same names each time."""
        self._read = read
        self._now = now
        self._names: tuple[str, ...] = ()
        self._kept: deque[tuple[float, array[float]]] = deque(maxlen=int(_KEPT_S / _EVERY_S))

    async def run(self) -> None:
        """Record a reading every few seconds until cancelled."""
        while True:
            self.record()
            await asyncio.sleep(_EVERY_S)

    def record(self) -> None:
        values = self._read()
        self._names = tuple(values)
        self._kept.append((self._now(), array("d", values.values())))

    def since(self, moment: float) -> Readings:
        """Return the readings after `moment`, oldest first."""
        found = [(at, values) for at, values in self._kept if at > moment]
        series = {n: [v[i] for _, v in found] for i, n in enumerate(self._names)}
        return Readings([at for at, _ in found], series)
