"""Turns as they are read: from the ledger, or from memory while they wait to be written."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

from semantic.domain.agents import Turn
from semantic.domain.chat import Message
from semantic.ports.persistence import LedgerPort, TurnPlace

_PAGE = 256
_MAX_LINKS = 50_000
_UNKNOWN = ""  # no turn has this id


class TurnLog:
    """All turns of one directory. Thread-safe."""

    def __init__(self, ledger: LedgerPort, held: Callable[[str, str], Turn | None]) -> None:
        """Read turns.

        Args:
            ledger: Has those that are written.
            held: Finds those of a tenant that are not.
        """
        self._ledger = ledger
        self._held = held
        self._lock = threading.Lock()
        self._parents: dict[tuple[str, str], str | None] = {}

    def link(self, tenant: str, turns: Sequence[Turn]) -> None:
        """Remember which turns new ones follow."""
        self._link(tenant, ((turn.id, turn.parent) for turn in turns))

    def turn(self, tenant: str, turn_id: str) -> Turn | None:
        """Find a turn."""
        return self._held(tenant, turn_id) or self._ledger.turn(tenant, turn_id)

    def place(self, tenant: str, turn_id: str) -> TurnPlace | None:
        """Find where a turn ended; what was said in it is not read."""
        held = self._held(tenant, turn_id)
        if held is not None:
            return TurnPlace(held.num_tokens, held.pointer)
        return self._ledger.place(tenant, turn_id)

    def turns(self, tenant: str, head: str | None, limit: int) -> list[Turn]:
        """The turns that led to `head`, the latest first."""
        found: list[Turn] = []
        while head is not None and len(found) < limit:
            held = self._held(tenant, head)
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

    def _link(self, tenant: str, links: Iterable[tuple[str, str | None]]) -> None:
        """Remember which turn follows which; that never changes."""
        with self._lock:
            for turn_id, parent in links:
                self._parents[tenant, turn_id] = parent
            while len(self._parents) > _MAX_LINKS:
                del self._parents[next(iter(self._parents))]
