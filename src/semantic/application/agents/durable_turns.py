"""Which turns are safe: their row and all blocks that lead to them are on disk."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from semantic.domain.agents import Pointer
from semantic.ports.storage import LedgerChange, MarkDurable, PutTurn, Repoint

_MAX_WAITING = 1024


class DurableTurns:
    """Turns whose rows are written and whose blocks may not be yet. On the writer's thread."""

    def __init__(self, is_on_disk: Callable[[Pointer], bool]) -> None:
        self._is_on_disk = is_on_disk
        self._waiting: OrderedDict[str, Pointer] = OrderedDict()

    def note(self, change: LedgerChange) -> None:
        """Follow a change that is about to be written."""
        match change:
            case PutTurn(_, turn) if turn.pointer is not None:
                self._waiting[turn.id] = turn.pointer
                # Old ones whose blocks were evicted before they were written never get there.
                if len(self._waiting) > _MAX_WAITING:
                    self._waiting.popitem(last=False)
            case Repoint(old, new):
                for turn_id, pointer in self._waiting.items():
                    if pointer.block == old:
                        self._waiting[turn_id] = replace(pointer, block=new)
            case _:
                return

    def take(self) -> list[MarkDurable]:
        """Marks for the turns that are safe once what was noted so far is written."""
        safe = [turn for turn, pointer in self._waiting.items() if self._is_on_disk(pointer)]
        for turn_id in safe:
            del self._waiting[turn_id]
        return [MarkDurable(turn_id) for turn_id in safe]
