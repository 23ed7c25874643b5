"""What is told to those who watch the server: counts, how long things take, each request's way.

Counts are plain numbers that their owners add to where things happen; `/v1/cache`, the feed of
events and `/metrics` all read these, so that they cannot disagree.
"""

import enum
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from semantic.domain.agents import Reuse
from semantic.domain.events import PrefillProgress, Usage


class EvictionReason(enum.Enum):
    """Why state was dropped from memory or disk."""

    BUDGET = "budget"  # others needed the room
    QUOTA = "quota"  # the tenant's share was full
    REQUEST = "request"  # somebody asked for it
    UNUSED = "unused"  # nothing reaches it, or something longer has taken its place
    CORRUPT = "corrupt"  # it could not be read or loaded


@dataclass(slots=True)
class CacheCounts:
    """What happened to blocks since the start; only ever grows. The store changes it.

    Attributes:
        evictions: Parts that were dropped, by tier (`memory` or `disk`) and reason.
        unwritten: How often a part could not be written.
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
        """The counts by name, as clients see them."""
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
    """What the device's thread did since the start; it changes them.

    Attributes:
        prompt_tokens: Tokens of prompts that were computed.
        generated_tokens: Tokens of replies.
        drafted_tokens: Tokens of replies that were guessed, and checked by the model.
        accepted_tokens: Of these, how many were right.
        preemptions: How often a sequence had to give way.
        hangs: How often the watchdog found the device hung.
        swaps: How often a model was loaded, by result (`ok` or `failed`).
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    hangs: int = 0
    swaps: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class RequestCounts:
    """What became of requests since the start; `TurnWatch` changes it.

    Attributes:
        outcomes: How they ended, by model: why the reply ended, `failed`, or `refused` at once.
        failures: Those that failed or were refused, by kind of error.
        replies: Replies that were finished.
        hits: Of these, how many began with state that was known.
        reuse: Where their prompts came from.
    """

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    replies: int = 0
    hits: int = 0
    reuse: Reuse = field(default_factory=Reuse)


@dataclass(slots=True)
class Counts:
    """All that is counted where it happens, for as long as the server runs."""

    cache: CacheCounts = field(default_factory=CacheCounts)
    engine: EngineCounts = field(default_factory=EngineCounts)
    requests: RequestCounts = field(default_factory=RequestCounts)


class Measure(enum.Enum):
    """What is measured each time it happens: a name, and what one measurement is."""

    STEP = "step"  # seconds of a step
    BATCH = "batch"  # sequences in a step
    TOKEN = "token"  # noqa: S105 - seconds between two tokens of a reply
    RESTORE = "restore"  # seconds to read a part from disk
    PERSIST = "persist"  # seconds to write a part to disk
    SWAP = "swap"  # seconds to load a model


@dataclass(slots=True, eq=False)
class RequestTrace:
    """When a request got where, in seconds of `time.monotonic`; None if it did not get there.

    Whoever has the request writes its part: the service, then the engine, then the service.

    Attributes:
        received: A protocol handed it in.
        queued: It was prepared, and waits for the device.
        admitted: It was opened on the device, and what is known of it is being restored.
        prefilled: Its first tokens were sent to be computed.
        first_token: The reply began.
        last_token: When the latest token came.
        sealing: It ended, and what is left of its state is being kept.
        sealed: That is done.
        restored_bytes: How much was loaded from sealed blocks.
        max_tokens: The most tokens its reply may have.
        progress: How much of its prompt is there; None before anything is known of it.
        num_generated: Tokens of the reply so far.
        context: What a tracer keeps with it.
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

    def note_admitted(self) -> None:
        """Note that it was opened; who was preempted did not wait for its turn again."""
        if self.admitted is None:
            self.admitted = time.monotonic()


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """How a request ended.

    Attributes:
        outcome: Why the reply ended, or `failed`.
        problem: The kind of failure; empty without one.
    """

    outcome: str
    usage: Usage
    reuse: Reuse
    problem: str = ""


class TelemetryPort(Protocol):
    """Who is told. All methods may be called on any thread, return at once and never raise."""

    counts: Counts

    def observe(self, measure: Measure, value: float) -> None:
        """Take a measurement."""

    def begin(self, trace: RequestTrace, request_id: str, agent_id: str, model: str) -> None:
        """Note that a request was queued; on the thread, and in the context, that handles it."""

    def end(self, trace: RequestTrace, end: RequestEnd) -> None:
        """Note that a request has its last event."""

    def persisted(self, trace: RequestTrace, started: float) -> None:
        """Note that the turn of a request, handed over at `started`, is written."""


@dataclass(frozen=True, slots=True)
class Readings:
    """Metrics over time.

    Attributes:
        at: When they were read, in seconds since the epoch.
        series: The value of each metric at each of these times, by its name in `/metrics`.
    """

    at: list[float]
    series: dict[str, list[float]]


class NoTelemetry:
    """A `TelemetryPort` that counts, and tells nobody."""

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
