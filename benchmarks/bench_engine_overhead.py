"""Overhead of the engine per step, and of telemetry on the engine.

Sequences decode on the fake backend, whose own time is subtracted, with text, stop strings and
sealing as in a real server: at most 0.5 ms + 30 µs per row. Telemetry means metrics and traces of
one request in ten, compared with neither, interleaved; the cost of ending a request is divided by
the tokens of its reply. The bound is 2 % of a decode step of the starter model with the same
number of rows. These times are CPU times, so that other programs affect them less. Steps of the
starter model with and without telemetry, interleaved, only check that nothing is overlooked,
because they vary by more than telemetry costs.
"""

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from benchmarks.common import make_engine, make_job
from benchmarks.report import Report, interleaved, run
from benchmarks.starter import backend, prompt_tokens, starter_directory
from semantic.adapters.outbound.backends.fake import FakeBackend, FakeTokenizer, fake_spec
from semantic.adapters.outbound.models.tokenizer import HFTokenizer
from semantic.adapters.outbound.telemetry.metrics import Metrics
from semantic.adapters.outbound.telemetry.tracing import RequestTracer
from semantic.application.engine.engine import BlockPoolBatchEngine
from semantic.application.settings import EngineLimits
from semantic.domain.agents import Reuse
from semantic.domain.events import Usage
from semantic.domain.sampling import StopRules
from semantic.ports.backend import ModelBackendPort, Step, StepOutput, Ticket
from semantic.ports.telemetry import NoTelemetry, RequestEnd, RequestTrace, TelemetryPort
from semantic.ports.text import TokenizerPort

ROW_COUNTS, WATCHED_ROWS = (1, 4, 8, 16, 32, 64), (1, 8)
NUM_REQUESTS, REPLY_TOKENS, SAMPLE_RATIO = 1000, 50, 0.1
_NAMES = itertools.count()
_T = TypeVar("_T")


class TimedBackend(FakeBackend):
    """Measures the time spent in device calls."""

    spent_s = 0.0

    def launch(self, step: Step) -> Ticket:
        return self._timed(lambda: super(TimedBackend, self).launch(step))

    def collect(self, ticket: Ticket) -> StepOutput:
        return self._timed(lambda: super(TimedBackend, self).collect(ticket))

    def _timed(self, call: Callable[[], _T]) -> _T:
        started = time.perf_counter()
        try:
            return call()
        finally:
            self.spent_s += time.perf_counter() - started


def overhead_ms(num_rows: int, num_steps: int) -> float:
    """Return the median time of a step outside the backend, with `num_rows` sequences decoding."""
    device = TimedBackend(fake_spec(block_tokens=256))
    engine = make_engine(device, FakeTokenizer(), EngineLimits(max_batch_size=num_rows))
    stop = StopRules(strings=("never to be seen",), ignore_eos=True)
    for row in range(num_rows):
        prompt = f"prompt {row} of the benchmark".encode()
        engine.submit(make_job(str(row), prompt, num_steps + 100, stop=stop))
    for _ in range(50):
        engine.step()
    times: list[float] = []
    for _ in range(num_steps):
        device.spent_s = 0.0
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started - device.spent_s)
    return 1000 * median(times)


# -- watching ------------------------------------------------------------------------------------


class Nowhere(SpanExporter):
    """An exporter that discards spans."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        del spans
        return SpanExportResult.SUCCESS


def watched() -> Metrics:
    """Create telemetry with metrics and traces of some requests, as in a server."""
    metrics = Metrics()
    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(SAMPLE_RATIO)))
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    metrics.tracer = RequestTracer(provider)
    return metrics


def decoding(
    device: ModelBackendPort,
    tokenizer: TokenizerPort,
    prompt: Sequence[int],
    num_rows: int,
    telemetry: TelemetryPort,
) -> BlockPoolBatchEngine:
    """Create an engine in which all sequences decode."""
    limits = EngineLimits(max_batch_size=num_rows)
    engine = make_engine(device, tokenizer, limits, telemetry=telemetry)
    for _ in range(num_rows):
        engine.submit(make_job(str(next(_NAMES)), prompt, 10**6))
    for _ in range(2 * num_rows + 10):
        engine.step()
    return engine


def step_us(engine: BlockPoolBatchEngine, num_steps: int) -> float:
    """Return the median CPU time of a step on its thread."""
    times: list[float] = []
    for _ in range(num_steps):
        started = time.thread_time()
        engine.step()
        times.append(time.thread_time() - started)
    return median(times) * 1e6


def request_us(telemetry: TelemetryPort) -> float:
    """Return the CPU time of beginning and ending a request, on all threads."""
    end = RequestEnd("end_turn", Usage(prompt_tokens=100), Reuse(computed=100))
    started = time.process_time()
    for _ in range(NUM_REQUESTS):
        now = time.monotonic()
        trace = RequestTrace(now, now, now, now, now, now, now, now)
        telemetry.begin(trace, "request", "agent", "model")
        telemetry.end(trace, end)
        telemetry.persisted(trace, now)
    return (time.process_time() - started) / NUM_REQUESTS * 1e6


def step_costs_us(num_rows: int, num_steps: int, num_rounds: int) -> list[float]:
    """Return what telemetry adds to a step, by round."""
    prompt = tuple(b"a prompt")
    ways: dict[str, TelemetryPort] = {"on": watched(), "off": NoTelemetry()}
    engines = {
        name: decoding(FakeBackend(fake_spec()), FakeTokenizer(), prompt, num_rows, way)
        for name, way in ways.items()
    }
    found = interleaved(
        {name: partial(step_us, e, num_steps) for name, e in engines.items()}, num_rounds
    ).figures
    return [on - off for on, off in zip(found["on"], found["off"], strict=True)]


def starter_steps(directory: Path, num_rows: int, num_pairs: int) -> tuple[float, list[float]]:
    """Return µs of a starter step without telemetry, and the ratio with telemetry, interleaved."""
    prompt, tokenizer = prompt_tokens(directory, 64), HFTokenizer(directory)
    with backend(directory) as first, backend(directory) as second:
        on = decoding(first, tokenizer, prompt, num_rows, watched())
        off = decoding(second, tokenizer, prompt, num_rows, NoTelemetry())
        pairs = [(step_us(off, 1), step_us(on, 1)) for _ in range(num_pairs)]
    return median(a for a, _ in pairs), [b / a for a, b in pairs]


def measure(report: Report) -> None:
    """Measure the engine's overhead, then that of telemetry."""
    num_steps, num_rounds, num_pairs = report.choose((100, 2, 10), (200, 4, 30))
    for rows in ROW_COUNTS:
        values = [overhead_ms(rows, num_steps) for _ in range(2)]
        report.add(f"engine, {rows} rows", values, "ms", most=0.5 + 0.030 * rows)
    ways: dict[str, TelemetryPort] = {"on": watched(), "off": NoTelemetry()}
    requests = interleaved({n: partial(request_us, w) for n, w in ways.items()}, num_rounds)
    per_token = (requests.median("on") - requests.median("off")) / REPLY_TOKENS
    directory = starter_directory()
    for rows in report.choose(WATCHED_ROWS[:1], WATCHED_ROWS):
        costs = [cost + per_token * rows for cost in step_costs_us(rows, num_steps, num_rounds)]
        step, ratios = starter_steps(directory, rows, num_pairs)
        report.add(f"watching {rows} rows", costs, "µs a step")
        shares = [100 * cost / step for cost in costs]
        report.add(f"watching {rows} rows, of a starter step", shares, "%", most=2.0)
        report.add(f"{rows} rows, starter steps watched / not", ratios)


if __name__ == "__main__":
    sys.exit(run("engine_overhead", measure))
