"""Agents over a ledger, what they say in a turn, and ledgers and writers that are slow."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.application.agents.ledger import AgentLedger, write_at_once
from semantic.application.agents.turn_log import FinishedTurn
from semantic.domain.agents import Pointer, Reuse, Turn
from semantic.domain.chat import Continuation, Message, Role
from semantic.domain.errors import CachePersistenceError
from semantic.domain.events import Usage
from semantic.ports.storage import LedgerChange, LedgerPort, WriteChanges


def agents_of(
    ledger: LedgerPort | None = None,
    write: WriteChanges | None = None,
    now: Callable[[], float] = time.time,
    settle_s: float | None = None,
) -> AgentLedger:
    """The agents of a ledger, a new one in memory if none is named."""
    ledger = ledger or SqliteLedger.in_memory()
    write = write or write_at_once(ledger)
    return AgentLedger(ledger, ledger.load(), write, now, settle_s=settle_s)


def exchange_of(
    prompt: Sequence[int],
    reply: Sequence[int],
    said: Sequence[str | Message] = "01",
    *,
    pointer: Pointer | None = None,
    continuation: Continuation | None = None,
    turn_id: str = "",
    is_stored: bool = True,
) -> FinishedTurn:
    """A turn; texts are a user's and an assistant's in turn."""
    roles = (Role.USER, Role.ASSISTANT)
    messages = [
        one if isinstance(one, Message) else Message.of(roles[i % 2], one)
        for i, one in enumerate(said)
    ]
    return FinishedTurn(
        prompt,
        reply,
        messages,
        pointer,
        Usage(len(prompt), len(reply)),
        Reuse(),
        turn_id,
        is_stored,
        continuation,
    )


class LateWriter:
    """Keeps changes until it is told to write them."""

    def __init__(self, ledger: SqliteLedger) -> None:
        self._ledger = ledger
        self._waiting: list[tuple[tuple[LedgerChange, ...], Future[None]]] = []

    def __call__(self, *changes: LedgerChange) -> Future[None]:
        done: Future[None] = Future()
        self._waiting.append((changes, done))
        return done

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_awaited(self) -> bool:
        """Whether a caller waits for all changes so far: the last entry changes nothing."""
        return bool(self._waiting) and not self._waiting[-1][0]

    def write(self, count: int | None = None) -> None:
        due, self._waiting = self._waiting[:count], self._waiting[len(self._waiting[:count]) :]
        for changes, done in due:
            self._ledger.apply(changes, is_synced=False)
            done.set_result(None)


class GatedWriter:
    """Writes on the caller's thread, as a shared ledger does: a `held` change waits for the gate.

    Block pointers, which move on the device thread, are written at once.
    """

    def __init__(self, ledger: SqliteLedger, held: type[LedgerChange]) -> None:
        self._write = write_at_once(ledger)
        self._held = held
        self.gate, self.is_writing = threading.Event(), threading.Event()

    def __call__(self, *changes: LedgerChange) -> Future[None]:
        if any(isinstance(change, self._held) for change in changes):
            self.is_writing.set()
            assert self.gate.wait(60)
        return self._write(*changes)


class GatedLedger(SqliteLedger):
    """Reads turns only while its gate is open; fails if it is told to."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.gate, self.is_read, self.is_broken = threading.Event(), threading.Event(), False
        self.gate.set()

    def turn(self, tenant: str, turn_id: str) -> Turn | None:
        self._wait()
        return super().turn(tenant, turn_id)

    def turns(self, tenant: str, head: str, *, limit: int) -> tuple[Turn, ...]:
        self._wait()
        return super().turns(tenant, head, limit=limit)

    def ancestry(self, tenant: str, head: str, *, until: str = "") -> tuple[str, ...]:
        self._wait()
        return super().ancestry(tenant, head, until=until)

    def stall(self) -> None:
        """Let the next reader wait; `is_read` tells that it came."""
        self.gate.clear()
        self.is_read.clear()

    def _wait(self) -> None:
        self.is_read.set()
        assert self.gate.wait(60)
        if self.is_broken:
            raise CachePersistenceError("the disk is gone.")
