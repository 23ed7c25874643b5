"""Telemetry of the server: counters, durations, and the timeline of each request.

Counters are plain numbers that the component concerned increments in place. `/v1/cache`, the event
feed and `/metrics` all read the same counters, so that they cannot disagree.
"""

import enum
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from semantic.domain.agents import Reuse
from semantic.domain.events import PrefillProgress, ReplyTiming, Usage


class EvictionReason(enum.Enum):
    """Why a part was evicted from memory or disk."""

    BUDGET = "budget"  # the memory or disk budget was needed for other parts
    QUOTA = "quota"  # the tenant's quota was full
    REQUEST = "request"  # a client requested it
    UNUSED = "unused"  # no agent reaches it, or a longer block replaced it
    CORRUPT = "corrupt"  # it could not be read or loaded


@dataclass(slots=True)
class CacheCounts:
    """Counters of block operations since the start of the server. The store increments them.

    Attributes:
        unwritten: Number of failed writes of a part.
        evictions: Evicted parts, by tier (`memory` or `disk`) and reason.
    """

    sealed: int = 0
    restored: int = 0
    restored_bytes: int = 0
    written: int = 0
    written_bytes: int = 0
    unwritten: int = 0
    corrupt: int = 0
    evictions: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def totals(self) -> dict[str, int]:
        """The counters by name, as shown to clients."""
        evicted = sum(n for (tier, _), n in self.evictions.copy().items() if tier == "memory")
        return {
            "sealed": self.sealed,
            "evicted": evicted,
            "restored": self.restored,
            "written": self.written,
            "corrupt": self.corrupt,
        }


@dataclass(slots=True)
class EngineCounts:
    """Counters of the engine since the start of the server. The device thread increments them.

    Attributes:
        prompt_tokens: Computed prompt tokens.
        generated_tokens: Generated tokens.
        drafted_tokens: Draft tokens that the model verified.
        accepted_tokens: Accepted draft tokens.
        ahead_tokens: Prompt tokens computed ahead, before a request needed them.
        used_ahead_tokens: Those that requests reused.
        wasted_ahead_tokens: Those that were dropped unused.
        preemptions: Preempted sequences.
        hangs: Number of times the watchdog found the device hung.
        swaps: Number of model loads, by result (`ok` or `failed`).
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    ahead_tokens: int = 0
    used_ahead_tokens: int = 0
    wasted_ahead_tokens: int = 0
    preemptions: int = 0
    hangs: int = 0
    swaps: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class RequestCounts:
    """Counters of requests since the start of the server. `TurnWatch` increments them.

    Attributes:
        outcomes: Requests by model and outcome: why the reply ended, `failed`, or `refused` if the
            request was rejected before it was queued.
        failures: Failed and rejected requests, by kind of error.
        replies: Finished replies.
        hits: Finished replies that reused KV cache.
        reuse: Where the prompt tokens of finished replies came from.
    """

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    replies: int = 0
    hits: int = 0
    reuse: Reuse = field(default_factory=Reuse)


@dataclass(slots=True)
class Counts:
    """All counters of the server."""

    cache: CacheCounts = field(default_factory=CacheCounts)
    engine: EngineCounts = field(default_factory=EngineCounts)
    requests: RequestCounts = field(default_factory=RequestCounts)


class Measure(enum.Enum):
    """Measured quantities; the comments give the unit of one observation."""

    STEP = "step"  # seconds per step
    BATCH = "batch"  # sequences in a step
    TOKEN = "token"  # noqa: S105 - seconds between two tokens of a reply
    RESTORE = "restore"  # seconds to read a part from disk
    PERSIST = "persist"  # seconds to write a part to disk
    SWAP = "swap"  # seconds to load a model


@dataclass(slots=True, eq=False)
class RequestTrace:
    """Timeline of a request, in seconds of `time.monotonic`; None for stages not reached.

    Not locked: the service and the engine write in turn, each while it handles the request.

    Attributes:
        received: A protocol adapter submitted the request.
        queued: The request is prepared and waits for the device.
        admitted: Its sequence is open on the device, and the restore of reusable KV cache starts.
        prefilled: Its first step was launched.
        first_token: The first token of the reply was sampled.
        last_token: The latest token of the reply was sampled.
        sealing: Sealing of the KV cache after the last full block starts.
        sealed: Sealing is complete.
        restored_bytes: Bytes loaded from sealed blocks.
        max_tokens: Maximum number of tokens of the reply.
        progress: Progress of the prefill; None until the engine reports it.
        num_generated: Number of tokens generated so far.
        context: Data of the tracer.
    """

    received: float = field(default_factory=time.monotonic)
    queued: float | None = None
    admitted: float | None = None
    prefilled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    sealing: float | None = None
    sealed: float | None = None
    restored_bytes: int = 0
    max_tokens: int = 0
    progress: PrefillProgress | None = None
    num_generated: int = 0
    context: object = None

    @property
    def timing(self) -> ReplyTiming | None:
        """How long the reply took; None if it has no token."""
        if self.first_token is None or self.last_token is None:
            return None
        return ReplyTiming(self.first_token - self.received, self.last_token - self.first_token)

    def note_admitted(self) -> None:
        """Record the admission; after a preemption the time of the first admission stays."""
        if self.admitted is None:
            self.admitted = time.monotonic()


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """Result of a request.

    Attributes:
        outcome: Why the reply ended, or `failed`.
        problem: Kind of the error; empty if there was none.
    """

    outcome: str
    usage: Usage
    reuse: Reuse
    problem: str = ""


class TelemetryPort(Protocol):
    """Sink for telemetry. All methods are thread-safe, return at once and never raise."""

    counts: Counts

    def observe(self, measure: Measure, value: float) -> None:
        """Record one observation."""

    def begin(self, trace: RequestTrace, request_id: str, agent_id: str, model: str) -> None:
        """Record that a request was queued.

        Call it on the thread, and in the `contextvars` context, that handles the request.
        """

    def end(self, trace: RequestTrace, end: RequestEnd) -> None:
        """Record that a request ended."""

    def persisted(self, trace: RequestTrace, started: float) -> None:
        """Record that the turn of a request, submitted for writing at `started`, is written."""


@dataclass(frozen=True, slots=True)
class Readings:
    """Samples of metrics over time.

    Attributes:
        at: Times of the samples, in seconds since the epoch.
        series: Values of each metric at these times, by its name in `/metrics`.
    """

    at: list[float]
    series: dict[str, list[float]]


class NoTelemetry:
    """A `TelemetryPort` with counters, which discards everything else."""

    def __init__(self) -> None:
        self.counts = Counts()

    def observe(self, measure: Measure, value: float) -> None:
        """Do nothing."""

    def begin(self, trace: RequestTrace, request_id: str, agent_id: str, model: str) -> None:
        """Do nothing."""

    def end(self, trace: RequestTrace, end: RequestEnd) -> None:
        """Do nothing."""

    def persisted(self, trace: RequestTrace, started: float) -> None:
        """Do nothing."""
