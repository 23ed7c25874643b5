"""OpenTelemetry traces: one span per request, with a child span for each phase.

The phases are known by their timestamps when a request ends, and their spans are created then. The
engine carries only timestamps, so requests that are not sampled cost nothing there.
"""

import time
from collections.abc import Callable

from opentelemetry.trace import (
    Span,
    SpanKind,
    Status,
    StatusCode,
    TracerProvider,
    set_span_in_context,
)
from opentelemetry.util.types import AttributeValue

from semantic.domain.agents import Reuse
from semantic.ports.telemetry import RequestEnd, RequestTrace

_NANO = 10**9


class RequestTracer:
    """Creates the spans of requests. Thread-safe.

    `close` exports pending spans and shuts down; it may take a while.
    """

    def __init__(self, provider: TracerProvider, close: Callable[[], None] = lambda: None) -> None:
        self.close = close
        self._tracer = provider.get_tracer("semantic")

    def begin(self, trace: RequestTrace, request_id: str, agent_id: str, model: str) -> str:
        """Start a request's span, in the client's trace if it sent one; returns the trace id."""
        span = self._tracer.start_span(
            "request",
            kind=SpanKind.SERVER,
            attributes={
                "semantic.request_id": request_id,
                "semantic.agent": agent_id,
                "gen_ai.request.model": model,
            },
            start_time=_wall(trace.received),
        )
        trace.context = span
        return f"{span.get_span_context().trace_id:032x}"

    def end(self, trace: RequestTrace, end: RequestEnd) -> None:
        span = trace.context
        if not isinstance(span, Span) or not span.is_recording():
            return
        now = time.monotonic()
        ended = trace.sealing or now
        reuse = end.reuse
        recalled: dict[str, AttributeValue] = {
            "semantic.tier": _tier(reuse),
            "semantic.bytes": trace.restored_bytes,
            "semantic.tokens": reuse.reused,
        }
        self._part(trace, "queue", trace.queued, trace.admitted or ended)
        self._part(trace, "recall", trace.admitted, trace.prefilled or ended, recalled)
        self._part(trace, "prefill", trace.prefilled, trace.first_token or ended)
        self._part(trace, "decode", trace.first_token, ended)
        self._part(trace, "seal", trace.sealing, trace.sealed or now)
        span.set_attributes(
            {
                "semantic.outcome": end.outcome,
                "gen_ai.usage.input_tokens": end.usage.prompt_tokens,
                "gen_ai.usage.output_tokens": end.usage.completion_tokens,
            }
        )
        if end.problem:
            span.set_status(Status(StatusCode.ERROR, end.problem))
        span.end(_wall(now))

    def persisted(self, trace: RequestTrace, started: float) -> None:
        self._part(trace, "persist", started, time.monotonic())

    def _part(
        self,
        trace: RequestTrace,
        name: str,
        start: float | None,
        end: float,
        attributes: dict[str, AttributeValue] | None = None,
    ) -> None:
        """Create the span of a phase, if the request reached it and is sampled."""
        parent = trace.context
        is_sampled = isinstance(parent, Span) and parent.get_span_context().trace_flags.sampled
        if start is None or not isinstance(parent, Span) or not is_sampled:
            return
        span = self._tracer.start_span(
            name,
            context=set_span_in_context(parent),
            attributes=attributes,
            start_time=_wall(start),
        )
        span.end(_wall(max(start, end)))


def _tier(reuse: Reuse) -> str:
    """The slowest tier that tokens were reused from."""
    tiers = {"disk": reuse.disk, "pool": reuse.pool, "hot": reuse.hot}
    return next((name for name, num_tokens in tiers.items() if num_tokens), "none")


def _wall(moment: float) -> int:
    """Convert a time of the monotonic clock to nanoseconds since the epoch."""
    return time.time_ns() - int((time.monotonic() - moment) * _NANO)
