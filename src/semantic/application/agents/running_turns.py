"""Turns that wait or run: the queue of each agent's turns, and their progress and telemetry."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from semantic.application.agents.feed import EventFeed, TurnEnded, TurnStarted
from semantic.application.agents.turn_log import turn_id
from semantic.domain.agents import Reuse
from semantic.domain.errors import GenerationTimeoutError, OverloadedError, SemanticError
from semantic.domain.events import Failed, Finished, PrefillProgress, Started
from semantic.ports.telemetry import RequestEnd, RequestTrace, TelemetryPort


@dataclass(frozen=True, slots=True)
class LiveTurns:
    """Numbers of waiting and running requests, and of the agents they belong to."""

    num_waiting: int
    num_running: int
    num_agents: int


@dataclass(frozen=True, slots=True)
class RunningTurn:
    """A waiting or running request, and its progress.

    Attributes:
        state: `queued`, `prefill` or `decoding`.
        computed_tokens: Prompt tokens whose KV cache is available, reused or computed.
    """

    agent_id: str
    turn_id: str
    state: str
    prompt_tokens: int
    reused_tokens: int
    computed_tokens: int
    generated_tokens: int
    max_tokens: int
    age_s: float


class TurnWatch:
    """Reports the start and end of turns to the feed and to telemetry. Thread-safe."""

    def __init__(self, feed: EventFeed, telemetry: TelemetryPort) -> None:
        self.counts = telemetry.counts.requests
        self._feed = feed
        self._telemetry = telemetry
        self._lock = threading.Lock()
        self._live: dict[str, tuple[TurnStarted, RequestTrace]] = {}

    @property
    def live(self) -> LiveTurns:
        with self._lock:
            turns = list(self._live.values())
        num_waiting = sum(trace.admitted is None for _, trace in turns)
        agents = {(turn.tenant, turn.agent_id) for turn, _ in turns}
        return LiveTurns(num_waiting, len(turns) - num_waiting, len(agents))

    def running(self, tenant: str) -> list[RunningTurn]:
        """Return the waiting and running requests of a tenant, oldest first."""
        with self._lock:
            turns = [known for known in self._live.values() if known[0].tenant == tenant]
        return [_running(turn, trace) for turn, trace in turns]

    def begin(
        self,
        started: Started,
        tenant: str,
        agent_id: str,
        trace: RequestTrace,
        *,
        is_published: bool = True,
    ) -> Callable[[Finished | Failed, Reuse], None]:
        """Report the start of a turn; returns a function to call with its last event.

        The feed gets no events of a turn that is not published.
        """
        begun = TurnStarted(
            tenant, agent_id, turn_id(started.request_id), started.usage.prompt_tokens
        )
        with self._lock:
            self._live[begun.turn_id] = begun, trace
        self._telemetry.begin(trace, started.request_id, agent_id, started.model)
        publish = self._feed.publish if is_published else _discard
        publish(begun)
        return lambda event, reuse: publish(self._end(started, begun, event, reuse))

    def refuse(self, model: str, error: SemanticError) -> None:
        """Count a request that was rejected before it was queued."""
        with self._lock:
            self.counts.outcomes[model, "refused"] += 1
            self.counts.failures[error.kind] += 1

    def persist(self, trace: RequestTrace, written: Future[None]) -> None:
        """Report to telemetry when the turn of a request, submitted now, is written."""
        started = time.monotonic()
        written.add_done_callback(lambda _: self._telemetry.persisted(trace, started))

    def _end(
        self, started: Started, begun: TurnStarted, event: Finished | Failed, reuse: Reuse
    ) -> TurnEnded:
        reason, usage, problem = "failed", started.usage, ""
        if isinstance(event, Finished):
            reason, usage = event.reason.value, event.usage
        else:
            problem = event.error.kind
        with self._lock:
            _, trace = self._live.pop(begun.turn_id)
            self._count(started.model, reason, problem, reuse)
        self._telemetry.end(trace, RequestEnd(reason, usage, reuse, problem))
        names = begun.tenant, begun.agent_id, begun.turn_id
        return TurnEnded(*names, reason, usage, reuse)

    def _count(self, model: str, outcome: str, problem: str, more: Reuse) -> None:
        counts = self.counts
        counts.outcomes[model, outcome] += 1
        if problem:
            counts.failures[problem] += 1
            return
        counts.replies += 1
        counts.hits += bool(more.reused)
        counts.reuse += more


def _discard(_: TurnStarted | TurnEnded) -> None:
    """Publish nothing."""


def _running(turn: TurnStarted, trace: RequestTrace) -> RunningTurn:
    progress = trace.progress or PrefillProgress(0, turn.prompt_tokens)
    has_begun = trace.first_token is not None
    return RunningTurn(
        agent_id=turn.agent_id,
        turn_id=turn.turn_id,
        state="queued" if trace.admitted is None else "decoding" if has_begun else "prefill",
        prompt_tokens=turn.prompt_tokens,
        reused_tokens=progress.reused,
        computed_tokens=progress.total if has_begun else progress.done,
        generated_tokens=trace.num_generated,
        max_tokens=trace.max_tokens,
        age_s=time.monotonic() - trace.received,
    )


@dataclass(slots=True)
class TurnLane:
    """The queue of one agent's turns, where the server keeps the conversation: one runs at a time.

    Attributes:
        lock: Held by the running turn.
        num_turns: Running and waiting turns.
        num_discards: Calls of `TurnLanes.discard`, so that a turn notices one before its reply
            exists.
        discard: Ends the running reply and keeps nothing of it.
    """

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_turns: int = 0
    num_discards: int = 0
    discard: Callable[[], None] | None = None


class TurnLanes:
    """Runs the turns of each agent in sequence. For the event loop's thread, except `discard`."""

    def __init__(self, *, max_waiting: int, timeout_s: float) -> None:
        """Create the lanes; `max_waiting` limits the waiting turns of all agents together."""
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._lanes: dict[tuple[str, str], TurnLane] = {}

    def num_turns(self, tenant: str, agent_id: str) -> int:
        lane = self._lanes.get((tenant, agent_id))
        return lane.num_turns if lane else 0

    def discard(self, tenant: str, agent_id: str) -> None:
        """End the running turn of an agent, if any, and keep nothing of it. Thread-safe."""
        lane = self._lanes.get((tenant, agent_id))
        if lane is None:
            return
        lane.num_discards += 1
        if (discard := lane.discard) is not None:
            discard()

    @contextlib.contextmanager
    def lane(self, tenant: str, agent_id: str) -> Iterator[TurnLane]:
        """Enter an agent's lane as one of its turns; raises OverloadedError if too many wait."""
        key = (tenant, agent_id)
        num_waiting = sum(lane.num_turns - 1 for lane in self._lanes.values())
        if key in self._lanes and num_waiting >= self._max_waiting:
            raise OverloadedError("too many turns are waiting; try again.", retry_after_s=2)
        lane = self._lanes.setdefault(key, TurnLane())
        lane.num_turns += 1
        try:
            yield lane
        finally:
            lane.num_turns -= 1
            if not lane.num_turns:
                del self._lanes[key]

    async def wait(self, lane: TurnLane) -> None:
        """Acquire the lane's lock; raises GenerationTimeoutError if earlier turns take too long."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await lane.lock.acquire()
        except TimeoutError as error:
            raise GenerationTimeoutError("the agent's earlier turns took too long.") from error
