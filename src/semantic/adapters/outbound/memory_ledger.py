"""A ledger in memory, for servers that keep nothing on disk."""

import threading
from collections.abc import Sequence
from dataclasses import replace

from semantic.domain.agents import Agent, Pointer, Turn
from semantic.domain.blocks import BlockName
from semantic.ports.persistence import (
    DropAgent,
    LedgerChange,
    LedgerState,
    MarkDurable,
    PutAgent,
    PutReplay,
    PutTenant,
    PutTurn,
    Repoint,
    Tenant,
    TurnPlace,
)


class MemoryLedger:
    """`LedgerPort` over dictionaries; parts of blocks are none of its business."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tenants: dict[str, Tenant] = {}
        self._agents: dict[tuple[str, str], Agent] = {}
        self._turns: dict[tuple[str, str], Turn] = {}
        self._replays: dict[tuple[str, bytes], tuple[tuple[int, ...], float]] = {}

    def load(self) -> LedgerState:
        """Return what is there; at the start, nothing."""
        with self._lock:
            return LedgerState(tuple(self._tenants.values()), tuple(self._agents.values()), ())

    def apply(self, changes: Sequence[LedgerChange], *, is_synced: bool) -> None:
        """Make changes."""
        del is_synced
        with self._lock:
            for change in changes:
                self._apply(change)

    def turn(self, tenant: str, turn_id: str) -> Turn | None:
        """Find a turn."""
        with self._lock:
            return self._turns.get((tenant, turn_id))

    def place(self, tenant: str, turn_id: str) -> TurnPlace | None:
        """Find where a turn ended."""
        turn = self.turn(tenant, turn_id)
        return TurnPlace(turn.num_tokens, turn.pointer) if turn else None

    def turns(self, tenant: str, head: str, *, limit: int) -> tuple[Turn, ...]:
        """Follow the turns back."""
        with self._lock:
            found: list[Turn] = []
            turn = self._turns.get((tenant, head))
            while turn is not None and len(found) < limit:
                found.append(turn)
                turn = self._turns.get((tenant, turn.parent)) if turn.parent else None
            return tuple(found)

    def ancestry(self, tenant: str, head: str, *, until: str = "") -> tuple[str, ...]:
        """Follow the turns back by their ids."""
        with self._lock:
            found: dict[str, None] = {}
            turn = self._turns.get((tenant, head))
            while turn is not None and turn.id not in found and until not in found:
                found[turn.id] = None
                turn = self._turns.get((tenant, turn.parent)) if turn.parent else None
            return tuple(found)

    def turns_at(self, tenant: str, root: BlockName, block: BlockName) -> tuple[Turn, ...]:
        """Find turns by where they end."""
        with self._lock:
            found = [
                turn
                for (owner, _), turn in self._turns.items()
                if owner == tenant
                and turn.pointer is not None
                and (turn.pointer.root, turn.pointer.block) == (root, block)
            ]
        return tuple(sorted(found, key=lambda turn: turn.created_at, reverse=True))

    def pointers(self) -> tuple[Pointer, ...]:
        """Collect where the turns end that an agent reaches."""
        with self._lock:
            reached = self._reached()
            turns = (self._turns[key] for key in reached)
            return tuple(turn.pointer for turn in turns if turn.pointer is not None)

    def replay(self, tenant: str, key: bytes) -> tuple[int, ...] | None:
        """Find the ids of a reply."""
        with self._lock:
            found = self._replays.get((tenant, key))
            return found[0] if found else None

    def forget_unreachable(self, *, before: float, replays_before: float) -> int:
        """Remove what no agent reaches."""
        with self._lock:
            reached = self._reached()
            old = [k for k, t in self._turns.items() if k not in reached and t.created_at < before]
            stale = [key for key, (_, at) in self._replays.items() if at < replays_before]
            for turn_key in old:
                del self._turns[turn_key]
            for replay_key in stale:
                del self._replays[replay_key]
            return len(old) + len(stale)

    def back_up(self) -> None:
        """Do nothing: there is no file to lose."""

    def close(self) -> None:
        """Do nothing."""

    def _apply(self, change: LedgerChange) -> None:
        match change:
            case PutTenant(tenant):
                self._tenants[tenant.id] = tenant
            case PutAgent(agent):
                self._agents[(agent.tenant, agent.id)] = agent
            case DropAgent(owner, agent_id):
                self._agents.pop((owner, agent_id), None)
            case PutTurn(owner, turn):
                self._turns[(owner, turn.id)] = turn
            case MarkDurable(turn_id):
                self._mark(turn_id)
            case Repoint(old, new):
                self._repoint(old, new)
            case PutReplay(owner, key, tokens, at):
                self._replays[(owner, key)] = (tokens, at)
            case _:
                return

    def _repoint(self, old: BlockName, new: BlockName) -> None:
        for key, turn in self._turns.items():
            if turn.pointer is not None and turn.pointer.block == old:
                self._turns[key] = replace(turn, pointer=replace(turn.pointer, block=new))

    def _mark(self, turn_id: str) -> None:
        for key, turn in self._turns.items():
            if turn.id == turn_id:
                self._turns[key] = replace(turn, is_durable=True)

    def _reached(self) -> set[tuple[str, str]]:
        reached: set[tuple[str, str]] = set()
        for agent in self._agents.values():
            head = agent.head
            while head is not None and (agent.tenant, head) not in reached:
                reached.add((agent.tenant, head))
                turn = self._turns.get((agent.tenant, head))
                head = turn.parent if turn else None
        return {key for key in reached if key in self._turns}
