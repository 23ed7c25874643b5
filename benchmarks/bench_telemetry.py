"""What watching costs: metrics and sampled traces on, against off, as a share of a step.

What a step and its tokens take to be measured is the difference between steps on the fake backend,
whose own time is next to nothing. It is set against a decode step of the starter model with as many
rows. What a request costs when it ends is shared by the tokens of its reply. Target: at most 2 %.
Times are the processor's, so that other programs on the machine count less.

Steps of the starter model with and without it, by turns, are printed beside that: they say that
nothing is overlooked, and no more, as they differ from each other by more than watching costs.
"""

import itertools
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from benchmarks.common import Target, interleaved, make_engine, make_job, verdict
from benchmarks.starter import backend, prompt_tokens, starter_directory
from semantic.adapters.outbound.backends.fake import FakeBackend, FakeTokenizer, fake_spec
from semantic.adapters.outbound.models.tokenizer import HFTokenizer
from semantic.adapters.outbound.telemetry.metrics import Metrics
from semantic.adapters.outbound.telemetry.tracing import RequestTracer
from semantic.application.engine.engine import BlockPoolBatchEngine
from semantic.application.engine.scheduler import EngineLimits
from semantic.domain.agents import Reuse
from semantic.domain.events import Usage
from semantic.ports.backend import ModelBackendPort
from semantic.ports.telemetry import NoTelemetry, RequestEnd, RequestTrace, TelemetryPort
from semantic.ports.text import TokenizerPort

NUM_STEPS = 300
NUM_REQUESTS = 1000
NUM_ROUNDS = 7
NUM_PAIRS = 100
ROW_COUNTS = (1, 8)
REPLY_TOKENS = 50
SAMPLE_RATIO = 0.1
_NAMES = itertools.count()


class Nowhere(SpanExporter):
    """Takes spans and forgets them."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Forget."""
        del spans
        return SpanExportResult.SUCCESS


def watched() -> Metrics:
    """Metrics, and traces of some requests, as a server has them."""
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
    """An engine whose sequences all decode."""
    limits = EngineLimits(max_batch_size=num_rows)
    engine = make_engine(device, tokenizer, limits, telemetry=telemetry)
    for _ in range(num_rows):
        engine.submit(make_job(str(next(_NAMES)), prompt, 10**6))
    for _ in range(2 * num_rows + 10):
        engine.step()
    return engine


def step_us(engine: BlockPoolBatchEngine, num_steps: int) -> float:
    """The median time of a step, of the thread that takes it."""
    times: list[float] = []
    for _ in range(num_steps):
        started = time.thread_time()
        engine.step()
        times.append(time.thread_time() - started)
    return median(times) * 1e6


def request_us(telemetry: TelemetryPort) -> float:
    """What beginning and ending a request takes, of all threads."""
    end = RequestEnd("end_turn", Usage(prompt_tokens=100), Reuse(computed=100))
    started = time.process_time()
    for _ in range(NUM_REQUESTS):
        now = time.monotonic()
        trace = RequestTrace(now, now, now, now, now, now, now, now)
        telemetry.begin(trace, "request", "agent", "model")
        telemetry.end(trace, end)
        telemetry.persisted(trace, now)
    return (time.process_time() - started) / NUM_REQUESTS * 1e6


def step_cost_us(num_rows: int) -> float:
    """What measuring adds to a step."""
    prompt = tuple(b"a prompt")
    ways: dict[str, TelemetryPort] = {"on": watched(), "off": NoTelemetry()}
    engines = {
        name: decoding(FakeBackend(fake_spec()), FakeTokenizer(), prompt, num_rows, way)
        for name, way in ways.items()
    }
    rounds = interleaved(
        {name: partial(step_us, e, NUM_STEPS) for name, e in engines.items()}, NUM_ROUNDS
    )
    return rounds.median("on") - rounds.median("off")


def starter_steps(directory: Path, num_rows: int) -> tuple[float, float]:
    """The median time of a step of the starter model that is not watched, and what watching adds.

    Steps are taken by turns, one with and one without; what it adds is in percent.
    """
    prompt, tokenizer = prompt_tokens(directory, 64), HFTokenizer(directory)
    with backend(directory) as first, backend(directory) as second:
        on = decoding(first, tokenizer, prompt, num_rows, watched())
        off = decoding(second, tokenizer, prompt, num_rows, NoTelemetry())
        pairs = [(step_us(off, 1), step_us(on, 1)) for _ in range(NUM_PAIRS)]
    return median(a for a, _ in pairs), 100 * (median(b / a for a, b in pairs) - 1)


def main() -> int:
    """Print the shares; 1 if one is too large."""
    ways: dict[str, TelemetryPort] = {"on": watched(), "off": NoTelemetry()}
    requests = interleaved({n: partial(request_us, w) for n, w in ways.items()}, NUM_ROUNDS)
    per_token = (requests.median("on") - requests.median("off")) / REPLY_TOKENS
    directory = starter_directory()
    targets = []
    for num_rows in ROW_COUNTS:
        cost = step_cost_us(num_rows) + per_token * num_rows
        step, percent = starter_steps(directory, num_rows)
        print(f"  {num_rows} rows: {cost:.1f} µs of a step of {step / 1000:.1f} ms")
        print(f"  {num_rows} rows: steps by turns, on over off: {percent:+.2f} %")
        targets.append(Target(f"watching {num_rows} rows", 100 * cost / step, 2.0, "%"))
    return verdict(targets)


if __name__ == "__main__":
    sys.exit(main())
