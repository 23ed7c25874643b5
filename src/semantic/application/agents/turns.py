"""Turns: their queue, their progress and telemetry, and the log that stores them.

Until a turn is written, it is read from memory. A longer block may replace the block that a turn
points at before the turn is logged; the `Repoint` row then precedes the turn's row and misses it.
So `TurnLog` remembers recent replacements and applies them to turns logged later.
"""

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeAlias

from semantic.application.agents.feed import EventFeed, TurnEnded, TurnStarted
from semantic.domain.agents import Principal, Reuse, Turn
from semantic.domain.blocks import BlockName
from semantic.domain.chat import Message, Role
from semantic.domain.errors import (
    CachePersistenceError,
    GenerationTimeoutError,
    OverloadedError,
    SemanticError,
)
from semantic.domain.events import Failed, Finished, PrefillProgress, Started
from semantic.ports.inbound import PastTurn, Reply
from semantic.ports.storage import (
    LedgerChange,
    LedgerPort,
    PutTurn,
    Repoint,
    TurnPlace,
    WriteChanges,
)
from semantic.ports.telemetry import RequestEnd, RequestTrace, TelemetryPort

_Key: TypeAlias = tuple[str, str]  # tenant, and the id of a turn or an agent
_PAGE = 256
_MAX_LINKS = 50_000
_MAX_MOVES = 256  # few suffice: a turn is logged right after its last block is sealed
_UNKNOWN = ""  # no turn has this id


def turn_id(request_id: str) -> str:
    """Return the id of the turn that a request creates."""
    return f"turn_{request_id}"


class TurnLog:
    """All turns of one ledger. Thread-safe.

    The device thread calls `move`, which therefore never waits for I/O.
    """

    def __init__(
        self, ledger: LedgerPort, write: WriteChanges, settle_s: float | None = None
    ) -> None:
        """Start with the turns in the ledger.

        Args:
            ledger: Source of written turns.
            write: Writes changes in order; its future resolves when they are written.
            settle_s: Longest wait of `settled`; None does not wait.
        """
        self._ledger = ledger
        self._write = write
        self._settle_s = settle_s
        # Serialises `put`, and is held while a database is written: `move` must not acquire it.
        self._order = threading.Lock()
        self._lock = threading.Lock()  # guards the fields below; never held across I/O
        self._turns: dict[_Key, Turn] = {}  # not written yet, in the order of their writes
        self._parents: dict[_Key, str | None] = {}
        self._moves: OrderedDict[BlockName, BlockName] = OrderedDict()

    # -- writing --------------------------------------------------------------------------------

    def put(self, tenant: str, turn: Turn, *changes: LedgerChange) -> tuple[Turn, Future[None]]:
        """Write a turn together with other changes.

        Returns the turn with its current pointer, and a future that resolves when it is written.
        """
        self._link(tenant, [(turn.id, turn.parent)])
        with self._order:
            with self._lock:
                turn = self._located(turn)
                self._turns.pop((tenant, turn.id), None)
                self._turns[tenant, turn.id] = turn
            try:
                done = self._write(PutTurn(tenant, turn), *changes)
            except BaseException:
                with self._lock:
                    del self._turns[tenant, turn.id]
                raise
            with self._lock:
                moved = self._located(turn)
            if turn.pointer and moved.pointer and moved.pointer != turn.pointer:
                # The block moved during the write: its Repoint row may precede the turn's row.
                self._write(Repoint(turn.pointer.block, moved.pointer.block))
        done.add_done_callback(lambda written: self._forget(tenant, turn, written))
        return turn, done

    def move(self, old: BlockName, new: BlockName) -> None:
        """Repoint all turns from block `old` to block `new`, including turns logged later."""
        with self._lock:
            self._moves[old] = new
            if len(self._moves) > _MAX_MOVES:
                self._moves.popitem(last=False)
            self._write(Repoint(old, new))

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """On exit, wait until all changes so far, of all threads, are written.

        Does not wait if `settle_s` is None. Waits also if the body raises: the error may report
        that an agent does not exist while its deletion is still being written.

        Raises:
            CachePersistenceError: the changes are not written yet; the writer keeps retrying.
        """
        try:
            yield
        finally:
            if self._settle_s is not None:
                self._settle(self._settle_s)

    def _settle(self, timeout_s: float) -> None:
        try:
            self._write().result(timeout_s)  # an empty write resolves after all earlier ones
        except TimeoutError:
            why = f"writing takes more than {timeout_s:g} s."
        except CachePersistenceError as error:
            why = error.message
        else:
            return
        raise CachePersistenceError(
            f"the change is made in memory, but is not on disk yet: {why} The server writes it as "
            "soon as the disk allows; /health shows the problem.",
            retry_after_s=5,
        )

    # -- reading --------------------------------------------------------------------------------

    def turn(self, tenant: str, turn_id: str) -> Turn | None:
        """Return a turn, from memory if it is not written yet; None if it does not exist."""
        return self._unwritten(tenant, turn_id) or self._ledger.turn(tenant, turn_id)

    def place(self, tenant: str, turn_id: str) -> TurnPlace | None:
        """Return where a turn ended, without reading its messages; None if it does not exist."""
        held = self._unwritten(tenant, turn_id)
        if held is not None:
            return TurnPlace(held.num_tokens, held.pointer)
        return self._ledger.place(tenant, turn_id)

    def turns(self, tenant: str, head: str | None, limit: int) -> list[Turn]:
        """Return up to `limit` turns that lead to `head`, latest first."""
        found: list[Turn] = []
        while head is not None and len(found) < limit:
            held = self._unwritten(tenant, head)
            if held is None:
                return [*found, *self._ledger.turns(tenant, head, limit=limit - len(found))]
            found.append(held)
            head = held.parent
        return found

    def ancestry(self, tenant: str, head: str | None, until: str) -> Iterator[str]:
        """Yield the ids of the turns that lead to `head`, latest first, ending with `until`."""
        while head is not None:
            with self._lock:
                parent = self._parents.get((tenant, head), _UNKNOWN)
            if parent == _UNKNOWN:
                ids = self._ledger.ancestry(tenant, head, until=until)
                self._link(tenant, pairwise(ids))
                yield from ids
                return
            yield head
            head = parent if head != until else None

    def tokens(self, tenant: str, head: str | None) -> list[int]:
        """Return all tokens of the conversation up to a turn."""
        turns = self._back_to(tenant, head, lambda turn: turn.holds_all_tokens)
        return [token for turn in turns for token in turn.tokens]

    def messages(self, tenant: str, head: str | None) -> list[Message]:
        """Return all messages of the conversation up to a turn."""
        turns = self._back_to(tenant, head, lambda turn: turn.holds_all_messages)
        return [message for turn in turns for message in turn.messages]

    # -- inside ---------------------------------------------------------------------------------

    def _back_to(
        self, tenant: str, head: str | None, is_first: Callable[[Turn], bool]
    ) -> list[Turn]:
        """Return the turns from the latest one that satisfies `is_first` to `head`, in order."""
        found: list[Turn] = []
        while head is not None:
            page = self.turns(tenant, head, _PAGE)
            for turn in page:
                found.append(turn)
                if is_first(turn):
                    return found[::-1]
            head = page[-1].parent if page else None
        return found[::-1]

    def _unwritten(self, tenant: str, turn_id: str) -> Turn | None:
        with self._lock:
            turn = self._turns.get((tenant, turn_id))
            return self._located(turn) if turn else None

    def _located(self, turn: Turn) -> Turn:
        while turn.pointer is not None and turn.pointer.block in self._moves:
            block = self._moves[turn.pointer.block]
            turn = replace(turn, pointer=replace(turn.pointer, block=block))
        return turn

    def _forget(self, tenant: str, turn: Turn, written: Future[None]) -> None:
        """Drop a written turn from memory, and all turns before it: writes happen in order."""
        if written.exception() is not None:
            return
        with self._lock:
            # If the turn was put again meanwhile, its newer version is not written yet.
            while self._turns.get((tenant, turn.id)) is turn:
                del self._turns[next(iter(self._turns))]

    def _link(self, tenant: str, links: Iterable[tuple[str, str | None]]) -> None:
        """Cache the parents of turns; a turn's parent never changes."""
        with self._lock:
            for turn_id, parent in links:
                self._parents[tenant, turn_id] = parent
            while len(self._parents) > _MAX_LINKS:
                del self._parents[next(iter(self._parents))]


class PastTurns:
    """The content of finished turns.

    Thread-safe; do not call it on the event loop's thread, since it may read from disk.
    """

    def __init__(self, log: TurnLog) -> None:
        self._log = log

    def find(self, request_id: str, principal: Principal) -> PastTurn | None:
        """Return the turn a request created; None if it is unknown or has no stored text."""
        turn = self._turn(request_id, principal)
        if turn is None:
            return None
        messages = self._log.messages(principal.tenant, turn.id)
        return PastTurn(
            turn_id=turn.id,
            messages=tuple(message for message in messages if not message.is_instruction),
            reply=turn.messages[-1],
            usage=turn.usage,
            created_at=turn.created_at,
            model=turn.model,
            reason=turn.reason,
            is_whole=len(messages) == turn.num_messages,
        )

    def forget(self, request_id: str, principal: Principal) -> bool:
        """Remove the messages and tokens of a turn; returns False if it has none.

        The turn's place in the history and its KV cache stay.

        Raises:
            CachePersistenceError: the text is removed in memory, but not on disk yet.
        """
        with self._log.settled():
            turn = self._turn(request_id, principal)
            if turn is not None:
                self._log.put(principal.tenant, replace(turn, messages=(), tokens=()))
            return turn is not None

    def _turn(self, request_id: str, principal: Principal) -> Turn | None:
        turn = self._log.turn(principal.tenant, turn_id(request_id))
        is_told = turn is not None and bool(turn.messages)
        return turn if is_told and turn and turn.messages[-1].role is Role.ASSISTANT else None


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
        age_s: Seconds since the request was received.
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
    """Reports the start and end of turns to the feed and to telemetry. Thread-safe.

    Attributes:
        counts: Outcomes of requests since the start of the server.
    """

    def __init__(self, feed: EventFeed, telemetry: TelemetryPort) -> None:
        self.counts = telemetry.counts.requests
        self._feed = feed
        self._telemetry = telemetry
        self._lock = threading.Lock()
        self._live: dict[str, tuple[TurnStarted, RequestTrace]] = {}

    @property
    def live(self) -> LiveTurns:
        """Numbers of requests that wait or run now."""
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
        self, started: Started, tenant: str, agent_id: str, trace: RequestTrace
    ) -> Callable[[Finished | Failed, Reuse], None]:
        """Report the start of a turn; returns a function to call with its last event."""
        begun = TurnStarted(
            tenant, agent_id, turn_id(started.request_id), started.usage.prompt_tokens
        )
        with self._lock:
            self._live[begun.turn_id] = begun, trace
        self._telemetry.begin(trace, started.request_id, agent_id, started.model)
        self._feed.publish(begun)
        return lambda event, reuse: self._end(started, begun, event, reuse)

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
    ) -> None:
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
        self._feed.publish(TurnEnded(*names, reason, usage, reuse))

    def _count(self, model: str, outcome: str, problem: str, more: Reuse) -> None:
        counts = self.counts
        counts.outcomes[model, outcome] += 1
        if problem:
            counts.failures[problem] += 1
            return
        counts.replies += 1
        counts.hits += bool(more.reused)
        counts.reuse += more


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
        num_cancels: Calls of `TurnLanes.cancel`, so that a turn notices one before its reply
            exists.
        reply: The reply of the running turn.
    """

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_turns: int = 0
    num_cancels: int = 0
    reply: Reply | None = None


class TurnLanes:
    """Runs the turns of each agent in sequence. For the event loop's thread, except `cancel`."""

    def __init__(self, *, max_waiting: int, timeout_s: float) -> None:
        """Create the lanes; an agent gets one with its first turn.

        Args:
            max_waiting: Maximum number of waiting turns, of all agents together.
            timeout_s: Longest wait of a turn for the agent's earlier turns.
        """
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._lanes: dict[_Key, TurnLane] = {}

    def num_turns(self, tenant: str, agent_id: str) -> int:
        """Return the number of running and waiting turns of an agent."""
        lane = self._lanes.get((tenant, agent_id))
        return lane.num_turns if lane else 0

    def cancel(self, tenant: str, agent_id: str) -> None:
        """Cancel the running turn of an agent, if any. Thread-safe."""
        lane = self._lanes.get((tenant, agent_id))
        if lane is None:
            return
        lane.num_cancels += 1
        if (reply := lane.reply) is not None:
            reply.cancel()

    @contextlib.contextmanager
    def lane(self, tenant: str, agent_id: str) -> Iterator[TurnLane]:
        """Enter an agent's lane, and count as one of its turns until the context ends.

        Raises:
            OverloadedError: `max_waiting` turns wait already.
        """
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
        """Wait for the agent's earlier turns and acquire the lane's lock.

        Raises:
            GenerationTimeoutError: they took longer than the timeout.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                await lane.lock.acquire()
        except TimeoutError as error:
            raise GenerationTimeoutError("the agent's earlier turns took too long.") from error
