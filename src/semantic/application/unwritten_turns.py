"""Turns on their way to the ledger, and the blocks that were replaced meanwhile.

A turn may be logged after the block it points at went into a longer one: then the row that would
repoint it came too early. So what was replaced is remembered for a while.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeAlias

from semantic.domain.agents import Agent, Turn
from semantic.domain.blocks import BlockName
from semantic.ports.persistence import PutAgent, PutTurn, Repoint

WriteChanges: TypeAlias = Callable[..., Future[None]]
_MAX_MOVES = 256  # a turn is logged right after its last block was sealed


class UnwrittenTurns:
    """Writes turns whose pointers hold. Thread-safe; never waits for the disk."""

    def __init__(self, write: WriteChanges) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._turns: dict[tuple[str, str], Turn] = {}
        self._moves: OrderedDict[BlockName, BlockName] = OrderedDict()

    def get(self, tenant: str, turn_id: str) -> Turn | None:
        """Find a tenant's turn that is not written yet."""
        with self._lock:
            turn = self._turns.get((tenant, turn_id))
            return self._located(turn) if turn else None

    def put(self, tenant: str, turn: Turn, agent: Agent | None = None) -> tuple[Turn, Future[None]]:
        """Write a turn and the agent that has it now, if any; returns it as it is written."""
        with self._lock:
            turn = self._located(turn)
            self._turns[tenant, turn.id] = turn
            changes = (PutTurn(tenant, turn), *((PutAgent(agent),) if agent else ()))
            done = self._write(*changes)
        done.add_done_callback(lambda written: self._forget((tenant, turn.id), written))
        return turn, done

    def move(self, old: BlockName, new: BlockName) -> None:
        """Let all turns that point at `old`, those to come too, point into `new`."""
        with self._lock:
            self._moves[old] = new
            if len(self._moves) > _MAX_MOVES:
                self._moves.popitem(last=False)
            self._write(Repoint(old, new))

    def _located(self, turn: Turn) -> Turn:
        while turn.pointer is not None and turn.pointer.block in self._moves:
            block = self._moves[turn.pointer.block]
            turn = replace(turn, pointer=replace(turn.pointer, block=block))
        return turn

    def _forget(self, key: tuple[str, str], written: Future[None]) -> None:
        """Turns that are written can be read there; those before one were written before it."""
        if written.exception() is not None:
            return
        with self._lock:
            while key in self._turns:
                del self._turns[next(iter(self._turns))]
