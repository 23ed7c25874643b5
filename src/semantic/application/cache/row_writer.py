"""Writes rows to the ledger, and keeps rows that cannot be written yet for another attempt.

A busy ledger or one invalid row does not lose other rows. A turn is marked as durable when its row
and all its blocks are on disk.
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
    """Changes that are written together, and the future to complete afterwards."""

    changes: tuple[LedgerChange, ...]
    done: Future[None] | None


class RowWriter:
    """Writes changes in order, many in one transaction. Runs on the writer's thread."""

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
            ledger: Destination of the rows.
            is_synced: Whether rows must survive a power failure.
            is_on_disk: Whether the KV cache up to a pointer is on disk.
            report: Called with the source and the reason of a failure, or with an empty reason once
                writing succeeds.
        """
        self._ledger = ledger
        self._is_synced = is_synced
        self._report = report
        self._turns = _UnsafeTurns(is_on_disk)
        self._unwritten: list[_Rows] = []

    @property
    def has_unwritten(self) -> bool:
        """Whether changes wait for the next `apply`."""
        return bool(self._unwritten)

    def add(self, changes: Sequence[LedgerChange], done: Future[None] | None = None) -> None:
        """Queue changes for the next `apply`; `done` completes when they are written."""
        for change in changes:
            self._turns.note(change)
        # After this call the future can no longer be cancelled.
        is_wanted = done is not None and done.set_running_or_notify_cancel()
        self._unwritten.append(_Rows(tuple(changes), done if is_wanted else None))

    def apply(self) -> None:
        """Write the queued changes; keep those that cannot be written now for the next call."""
        rows, self._unwritten = [*self._unwritten, _Rows(self._turns.take(), None)], []
        try:
            self._write(rows)
        except ValueError:
            _log.exception("a change cannot be stored and was dropped")
            self._write_one_by_one(rows)
        except Exception as error:  # noqa: BLE001 - queued changes must not be lost
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
            except Exception as error:  # noqa: BLE001 - queued changes must not be lost
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
        """Keep rows for another attempt, and fail their futures so that replies do not wait."""
        self._report("ledger", str(error))
        for row in rows:
            _fail(row, CachePersistenceError(str(error)))
        self._unwritten = [_Rows(row.changes, None) for row in rows]


def _fail(rows: _Rows, error: CachePersistenceError) -> None:
    if rows.done is not None:
        rows.done.set_exception(error)


class _UnsafeTurns:
    """Turns whose rows are queued or written but whose blocks may not be on disk yet."""

    def __init__(self, is_on_disk: Callable[[Pointer], bool]) -> None:
        self._is_on_disk = is_on_disk
        self._waiting: OrderedDict[str, Pointer] = OrderedDict()

    def note(self, change: LedgerChange) -> None:
        """Track the pointers of turns in a change that is about to be written."""
        match change:
            case PutTurn(_, turn) if turn.pointer is not None:
                self._waiting[turn.id] = turn.pointer
                # Turns whose blocks were evicted before they were written never become durable.
                if len(self._waiting) > _MAX_WAITING_TURNS:
                    self._waiting.popitem(last=False)
            case Repoint(old, new):
                for turn_id, pointer in self._waiting.items():
                    if pointer.block == old:
                        self._waiting[turn_id] = replace(pointer, block=new)
            case _:
                return

    def take(self) -> tuple[MarkDurable, ...]:
        """Return marks for turns that are durable once the changes noted so far are written."""
        safe = [turn for turn, pointer in self._waiting.items() if self._is_on_disk(pointer)]
        for turn_id in safe:
            del self._waiting[turn_id]
        return tuple(MarkDurable(turn_id) for turn_id in safe)
