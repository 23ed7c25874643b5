"""Rows on their way to the ledger: none is lost because the ledger was busy, or another was bad.

A turn whose row and blocks are all on disk is marked as durable.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from semantic.domain.agents import Pointer
from semantic.domain.errors import CachePersistenceError
from semantic.ports.storage import LedgerChange, LedgerPort, MarkDurable, PutTurn, Repoint

_log = logging.getLogger(__name__)
_MAX_WAITING_TURNS = 1024


@dataclass(frozen=True, slots=True)
class _Rows:
    """Changes that are made together, and who waits for them."""

    changes: tuple[LedgerChange, ...]
    done: Future[None] | None


class RowWriter:
    """Writes changes in their order, many in one transaction. On the writer's thread."""

    def __init__(
        self,
        ledger: LedgerPort,
        *,
        is_synced: bool,
        is_on_disk: Callable[[Pointer], bool],
        report: Callable[[str, str], None],
    ) -> None:
        """Start empty.

        Args:
            ledger: Where rows are written.
            is_synced: Whether they must survive a power failure.
            is_on_disk: Whether the KV cache up to a place is on disk.
            report: Told why rows could not be written, or that they are written again.
        """
        self._ledger = ledger
        self._is_synced = is_synced
        self._report = report
        self._turns = _UnsafeTurns(is_on_disk)
        self._unwritten: list[_Rows] = []

    @property
    def has_unwritten(self) -> bool:
        """Whether `apply` has something to try again."""
        return bool(self._unwritten)

    def add(self, changes: Sequence[LedgerChange], done: Future[None] | None = None) -> None:
        """Take changes for the next `apply`; `done` is set when they are written."""
        for change in changes:
            self._turns.note(change)
        # From here on it cannot be cancelled.
        is_wanted = done is not None and done.set_running_or_notify_cancel()
        self._unwritten.append(_Rows(tuple(changes), done if is_wanted else None))

    def apply(self) -> None:
        """Write what was taken; what cannot be written now is kept for the next time."""
        rows, self._unwritten = [*self._unwritten, _Rows(self._turns.take(), None)], []
        try:
            self._write(rows)
        except ValueError:
            _log.exception("a change cannot be stored and was dropped")
            self._write_one_by_one(rows)
        except Exception as error:  # noqa: BLE001 - nothing that was handed in may be lost
            self._keep(rows, error)

    def close(self) -> None:
        """Try a last time, then back up and close the ledger."""
        self.apply()
        if self._unwritten:
            _log.error("%d changes of the ledger are lost", len(self._unwritten))
        for end in (self._ledger.back_up, self._ledger.close):
            try:
                end()
            except CachePersistenceError as error:
                self._report("ledger", error.message)

    def _write_one_by_one(self, rows: Sequence[_Rows]) -> None:
        for index, row in enumerate(rows):
            try:
                self._write([row])
            except ValueError as error:
                _fail(row, CachePersistenceError(f"it cannot be stored: {error}"))
            except Exception as error:  # noqa: BLE001 - nothing that was handed in may be lost
                self._keep(rows[index:], error)
                return

    def _write(self, rows: Sequence[_Rows]) -> None:
        changes = [change for row in rows for change in row.changes]
        if changes:
            self._ledger.apply(changes, is_synced=self._is_synced)
        self._report("ledger", "")
        for row in rows:
            if row.done is not None:
                row.done.set_result(None)

    def _keep(self, rows: Sequence[_Rows], error: Exception) -> None:
        """Try rows again later; nobody waits for a disk that fails: replies go out."""
        self._report("ledger", str(error))
        for row in rows:
            _fail(row, CachePersistenceError(str(error)))
        self._unwritten = [_Rows(row.changes, None) for row in rows]


def _fail(rows: _Rows, error: CachePersistenceError) -> None:
    if rows.done is not None:
        rows.done.set_exception(error)


class _UnsafeTurns:
    """Turns whose rows are written and whose blocks may not be yet."""

    def __init__(self, is_on_disk: Callable[[Pointer], bool]) -> None:
        self._is_on_disk = is_on_disk
        self._waiting: OrderedDict[str, Pointer] = OrderedDict()

    def note(self, change: LedgerChange) -> None:
        """Follow a change that is about to be written."""
        match change:
            case PutTurn(_, turn) if turn.pointer is not None:
                self._waiting[turn.id] = turn.pointer
                # Old ones whose blocks were evicted before they were written never get there.
                if len(self._waiting) > _MAX_WAITING_TURNS:
                    self._waiting.popitem(last=False)
            case Repoint(old, new):
                for turn_id, pointer in self._waiting.items():
                    if pointer.block == old:
                        self._waiting[turn_id] = replace(pointer, block=new)
            case _:
                return

    def take(self) -> tuple[MarkDurable, ...]:
        """Marks for the turns that are safe once what was noted so far is written."""
        safe = [turn for turn, pointer in self._waiting.items() if self._is_on_disk(pointer)]
        for turn_id in safe:
            del self._waiting[turn_id]
        return tuple(MarkDurable(turn_id) for turn_id in safe)
