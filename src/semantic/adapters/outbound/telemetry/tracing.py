"""OpenTelemetry traces: one span a request, with children for each part of its way.

The parts are known by their times when a request ends, so spans are made then: nothing is carried
through the engine but the times, and what is not sampled costs nothing there.
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
    """Makes the spans of requests. Safe on any thread.

    Attributes:
        close: Sends what waits, and ends; may take a while.
    """

    def __init__(self, provider: TracerProvider, close: Callable[[], None] = lambda: None) -> None:
        self.close = close
        self._tracer = provider.get_tracer("semantic")

    def begin(self, trace: RequestTrace, request_id: str, agent_id: str, model: str) -> str:
        """Begin a request's span, in the trace of the client if it sent one; returns the trace."""
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
        """End a request's span, and make those of its parts."""
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
        """Make the span of writing a request's turn."""
        self._part(trace, "persist", started, time.monotonic())

    def _part(
        self,
        trace: RequestTrace,
        name: str,
        start: float | None,
        end: float,
        attributes: dict[str, AttributeValue] | None = None,
    ) -> None:
        """Make the span of a part that the request got to."""
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
    """The slowest tier that something came from."""
    tiers = {"disk": reuse.disk, "pool": reuse.pool, "hot": reuse.hot}
    return next((name for name, num_tokens in tiers.items() if num_tokens), "none")


def _wall(moment: float) -> int:
    """A moment of the monotonic clock in nanoseconds since the epoch."""
    return time.time_ns() - int((time.monotonic() - moment) * _NANO)
