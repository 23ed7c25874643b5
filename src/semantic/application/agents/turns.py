"""Turns: in line, watched, on their way to the ledger, read again, found by their request.

A turn is read from memory while it waits to be written. It may be logged after the block it points
at went into a longer one: then the row that would repoint it came too early. So what was replaced
is remembered for a while.
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
from semantic.domain.errors import GenerationTimeoutError, OverloadedError, SemanticError
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

_Key: TypeAlias = tuple[str, str]  # tenant, turn or agent
_PAGE = 256
_MAX_LINKS = 50_000
_MAX_MOVES = 256  # a turn is logged right after its last block was sealed
_UNKNOWN = ""  # no turn has this id


def turn_id(request_id: str) -> str:
    """What the turn of a request is called."""
    return f"turn_{request_id}"


class TurnLog:
    """All turns of one directory. Thread-safe; writing never waits for the disk."""

    def __init__(self, ledger: LedgerPort, write: WriteChanges) -> None:
        """Begin with what is written.

        Args:
            ledger: Where turns are read.
            write: Makes changes in order; its future tells when they are written.
        """
        self._ledger = ledger
        self._write = write
        self._lock = threading.Lock()
        self._turns: dict[_Key, Turn] = {}  # not written yet
        self._parents: dict[_Key, str | None] = {}
        self._moves: OrderedDict[BlockName, BlockName] = OrderedDict()

    # -- writing --------------------------------------------------------------------------------

    def put(self, tenant: str, turn: Turn, *changes: LedgerChange) -> tuple[Turn, Future[None]]:
        """Write a turn, and with it other changes; returns it as it is written."""
        self._link(tenant, [(turn.id, turn.parent)])
        with self._lock:
            turn = self._located(turn)
            self._turns.pop((tenant, turn.id), None)
            self._turns[tenant, turn.id] = turn
            try:
                done = self._write(PutTurn(tenant, turn), *changes)
            except BaseException:
                del self._turns[tenant, turn.id]
                raise
        done.add_done_callback(lambda written: self._forget(tenant, turn, written))
        return turn, done

    def move(self, old: BlockName, new: BlockName) -> None:
        """Let all turns that point at `old`, those to come too, point into `new`."""
        with self._lock:
            self._moves[old] = new
            if len(self._moves) > _MAX_MOVES:
                self._moves.popitem(last=False)
            self._write(Repoint(old, new))

    # -- reading --------------------------------------------------------------------------------

    def turn(self, tenant: str, turn_id: str) -> Turn | None:
        """A turn, from memory until it is written; None if there is none."""
        return self._unwritten(tenant, turn_id) or self._ledger.turn(tenant, turn_id)

    def place(self, tenant: str, turn_id: str) -> TurnPlace | None:
        """Find where a turn ended; what was said in it is not read."""
        held = self._unwritten(tenant, turn_id)
        if held is not None:
            return TurnPlace(held.num_tokens, held.pointer)
        return self._ledger.place(tenant, turn_id)

    def turns(self, tenant: str, head: str | None, limit: int) -> list[Turn]:
        """The turns that led to `head`, the latest first."""
        found: list[Turn] = []
        while head is not None and len(found) < limit:
            held = self._unwritten(tenant, head)
            if held is None:
                return [*found, *self._ledger.turns(tenant, head, limit=limit - len(found))]
            found.append(held)
            head = held.parent
        return found

    def ancestry(self, tenant: str, head: str | None, until: str) -> Iterator[str]:
        """The ids of the turns that led to `head`, the latest first, no further than `until`."""
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
        """All tokens of the conversation that a turn ended."""
        turns = self._back_to(tenant, head, lambda turn: turn.holds_all_tokens)
        return [token for turn in turns for token in turn.tokens]

    def messages(self, tenant: str, head: str | None) -> list[Message]:
        """All messages of the conversation that a turn ended."""
        turns = self._back_to(tenant, head, lambda turn: turn.holds_all_messages)
        return [message for turn in turns for message in turn.messages]

    # -- inside ---------------------------------------------------------------------------------

    def _back_to(
        self, tenant: str, head: str | None, is_first: Callable[[Turn], bool]
    ) -> list[Turn]:
        """The turns from the latest that is a beginning up to `head`, in order."""
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
        """Turns that are written can be read there; those before one were written before it."""
        if written.exception() is not None:
            return
        with self._lock:
            # One that was put again meanwhile is not written yet.
            while self._turns.get((tenant, turn.id)) is turn:
                del self._turns[next(iter(self._turns))]

    def _link(self, tenant: str, links: Iterable[tuple[str, str | None]]) -> None:
        """Remember which turn follows which; that never changes."""
        with self._lock:
            for turn_id, parent in links:
                self._parents[tenant, turn_id] = parent
            while len(self._parents) > _MAX_LINKS:
                del self._parents[next(iter(self._parents))]


class PastTurns:
    """What was said in turns that are over. Any thread but the event loop's: may read a disk."""

    def __init__(self, log: TurnLog) -> None:
        self._log = log

    def find(self, request_id: str, principal: Principal) -> PastTurn | None:
        """Find the turn that a request made; None if it is unknown, or its text is not kept."""
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
        """Remove what was said in a turn; False if there is nothing to remove.

        Its place and its KV cache stay.
        """
        turn = self._turn(request_id, principal)
        if turn is None:
            return False
        self._log.put(principal.tenant, replace(turn, messages=(), tokens=()))
        return True

    def _turn(self, request_id: str, principal: Principal) -> Turn | None:
        turn = self._log.turn(principal.tenant, turn_id(request_id))
        is_told = turn is not None and bool(turn.messages)
        return turn if is_told and turn and turn.messages[-1].role is Role.ASSISTANT else None


@dataclass(frozen=True, slots=True)
class LiveTurns:
    """Requests that have not got their last event: how many wait, run, and whose they are."""

    num_waiting: int
    num_running: int
    num_agents: int


@dataclass(frozen=True, slots=True)
class RunningTurn:
    """A waiting or running request, and how far it has got.

    Attributes:
        state: `queued`, `prefill` or `decoding`.
        computed_tokens: Of the prompt, what is there: reused or computed.
        age_s: Since it came.
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
    """Tells the feed and telemetry when turns begin and end, and counts them. Thread-safe.

    Attributes:
        counts: What became of them since the start.
    """

    def __init__(self, feed: EventFeed, telemetry: TelemetryPort) -> None:
        self.counts = telemetry.counts.requests
        self._feed = feed
        self._telemetry = telemetry
        self._lock = threading.Lock()
        self._live: dict[str, tuple[TurnStarted, RequestTrace]] = {}

    @property
    def live(self) -> LiveTurns:
        """Who waits and runs now."""
        with self._lock:
            turns = list(self._live.values())
        num_waiting = sum(trace.admitted is None for _, trace in turns)
        agents = {(turn.tenant, turn.agent_id) for turn, _ in turns}
        return LiveTurns(num_waiting, len(turns) - num_waiting, len(agents))

    def running(self, tenant: str) -> list[RunningTurn]:
        """A tenant's requests that wait or run, those that came first before the others."""
        with self._lock:
            turns = [known for known in self._live.values() if known[0].tenant == tenant]
        return [_running(turn, trace) for turn, trace in turns]

    def begin(
        self, started: Started, tenant: str, agent_id: str, trace: RequestTrace
    ) -> Callable[[Finished | Failed, Reuse], None]:
        """Tell that a turn began; returns what is to be called with its end."""
        begun = TurnStarted(
            tenant, agent_id, turn_id(started.request_id), started.usage.prompt_tokens
        )
        with self._lock:
            self._live[begun.turn_id] = begun, trace
        self._telemetry.begin(trace, started.request_id, agent_id, started.model)
        self._feed.publish(begun)
        return lambda event, reuse: self._end(started, begun, event, reuse)

    def refuse(self, model: str, error: SemanticError) -> None:
        """Count a request that was not queued."""
        with self._lock:
            self.counts.outcomes[model, "refused"] += 1
            self.counts.failures[error.kind] += 1

    def persist(self, trace: RequestTrace, written: Future[None]) -> None:
        """Tell when the turn of a request, which was handed over now, is written."""
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
    """The turns of one agent in a conversation that the server keeps: one runs, others wait."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_turns: int = 0
    num_cancels: int = 0
    reply: Reply | None = None


class TurnLanes:
    """Agents' turns, one after another. On the event loop's thread, but for `cancel`."""

    def __init__(self, *, max_waiting: int, timeout_s: float) -> None:
        """Start with nobody waiting.

        Args:
            max_waiting: Turns of all agents that may wait for the ones before them.
            timeout_s: The longest such a wait.
        """
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._lanes: dict[_Key, TurnLane] = {}

    def num_turns(self, tenant: str, agent_id: str) -> int:
        """How many turns of an agent run or wait."""
        lane = self._lanes.get((tenant, agent_id))
        return lane.num_turns if lane else 0

    def cancel(self, tenant: str, agent_id: str) -> None:
        """End the turn that is running, if one is; safe on any thread."""
        lane = self._lanes.get((tenant, agent_id))
        if lane is None:
            return
        lane.num_cancels += 1
        if (reply := lane.reply) is not None:
            reply.cancel()

    @contextlib.contextmanager
    def lane(self, tenant: str, agent_id: str) -> Iterator[TurnLane]:
        """Count as a turn that runs or waits.

        Raises:
            OverloadedError: too many wait already.
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
        """Wait for the turns before; takes the lane's lock.

        Raises:
            GenerationTimeoutError: they took too long.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                await lane.lock.acquire()
        except TimeoutError as error:
            raise GenerationTimeoutError("the agent's earlier turns took too long.") from error
