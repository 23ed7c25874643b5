"""The ledger in SQLite: agents, turns, tenants, replays and the index of block parts.

One connection writes. Reads use connections of their own, so that reads and writes do not block
each other. At start, `load` moves a damaged file aside and rebuilds it from its remains and its
backups. A damaged row is restored from a backup, at start and whenever a read finds one.
`DirectoryLock` gives one process exclusive use of the directory. Servers that keep nothing on disk
use the same ledger in memory.
"""

import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from semantic.adapters.outbound.cipher import Cipher
from semantic.adapters.outbound.ledger.encryption import from_stored
from semantic.adapters.outbound.ledger.files import (
    READ_ERRORS,
    Mark,
    ReaderPool,
    connect,
    connect_unchanged,
    copy_database,
    has_room,
    is_damage,
    is_full,
    refusal,
    remove,
    sync_file,
)
from semantic.adapters.outbound.ledger.opening import check_access, num_backed_up, prepare
from semantic.adapters.outbound.ledger.rescue import DamagedRows, Rescue, move_aside
from semantic.adapters.outbound.ledger.schema import (
    DamagedRowError,
    NewerLedgerError,
    Row,
    Table,
    damaged_rows,
    migrate,
    num_logged,
    set_num_logged,
)
from semantic.adapters.outbound.ledger.statements import (
    LedgerReadings,
    forget_unreachable,
    is_logged,
    is_of_index,
    make_change,
    read_state,
)
from semantic.domain.errors import CachePersistenceError
from semantic.ports.storage import LedgerChange, LedgerState

_T = TypeVar("_T")
LEDGER_FILE, MARK_FILE = "ledger.db", "ledger.mark"
BACKUP_FILES = ("ledger.backup.db", "ledger.backup-2.db")  # newest first
_TIMEOUT_S = 5.0
_FULL = (
    "the disk is full: the ledger is read-only; new turns stay in memory, and are lost when the "
    "server stops. Free some space."
)
_COUNT_LOGGED = "UPDATE facts SET value = value + ? WHERE name = 'num_logged'"
_COUNT_SYNC = "UPDATE facts SET value = value + 1 WHERE name = 'num_synced'"
# Errors of the change itself: a retry would fail again.
_UNSTORABLE = (
    sqlite3.DataError,
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    OverflowError,
    RecursionError,
)


@dataclass(slots=True)
class _OpenLedger:
    """State between `load` and `close`."""

    writer: sqlite3.Connection
    readers: ReaderPool | None = None  # None for a ledger in memory
    inode: int = 0
    is_standby: bool = False  # read-only, because the disk was full at start
    is_synced: bool | None = None
    num_changes: int = 1
    num_backed_up: int = 0
    num_logged: int = 0


class _TruncatedLedgerError(Exception):
    """The ledger has fewer logged changes than its backup."""


class SqliteLedger(LedgerReadings):
    """`LedgerPort` over one directory; thread-safe once `load` has returned."""

    def __init__(
        self,
        directory: Path | None,
        *,
        timeout_s: float = _TIMEOUT_S,
        cipher: Cipher | None = None,
    ) -> None:
        """Set the paths without opening a file; without a directory, the ledger is in memory.

        `timeout_s` is how long to wait for another program's lock.
        """
        self._is_in_memory = directory is None
        place = directory or Path()
        self._path = place / LEDGER_FILE
        self._backup, self._older_backup = self._backups = tuple(
            place / name for name in BACKUP_FILES
        )
        self._mark = Mark(place / MARK_FILE)
        self._rescue = Rescue(self._path, self._backups, timeout_s, cipher)
        self._damages = DamagedRows(self._rescue)
        self._timeout_s = timeout_s
        self._cipher = cipher
        self._lock = threading.RLock()
        self._backup_lock = threading.Lock()
        self._opened: _OpenLedger | None = None

    @classmethod
    def in_memory(cls) -> Self:
        """Create a ledger in memory, already loaded; it is lost when the process ends."""
        made = cls(None)
        made.load()
        return made

    @property
    def problem(self) -> str:
        """Message about damaged rows found since `load`, and about a full disk; may be empty."""
        is_standby = self._opened is not None and self._opened.is_standby
        return "; ".join(filter(None, (_FULL if is_standby else "", self._damages.problem)))

    def load(self) -> LedgerState:
        """Open the ledger; if the disk is full, read-only until a write finds room again."""
        with self._lock:
            if self._is_in_memory:
                return self._load_memory()
            was_standby = self._opened is not None and self._opened.is_standby
            self.close()
            self._damages.clear()
            try:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                check_access((self._path, *self._backups), self._cipher)
                return self._load()
            except NewerLedgerError as error:
                raise CachePersistenceError(
                    f"a newer version of Semantic wrote {self._path} ({error}). Upgrade, or choose "
                    "another --cache-dir."
                ) from error
            except (*READ_ERRORS, OSError) as error:
                if not was_standby and not is_full(error, self._path.parent):
                    raise refusal(self._path, error) from error
                return self._stand_by()

    def apply(self, changes: Sequence[LedgerChange], *, is_synced: bool) -> None:
        num_new = sum(map(is_logged, changes))
        with self._transaction(is_synced=is_synced) as connection:
            for change in changes:
                make_change(connection, change)
            if num_new:
                connection.execute(_COUNT_LOGGED, (num_new,))
        if num_new:
            self._note_logged(num_new)
        if not all(is_of_index(change) for change in changes):
            self._current.num_changes += 1

    def num_turns(self) -> int:
        """Count all turns, including those that no agent reaches."""
        return int(self._read("SELECT count(*) FROM turns", (), lambda row: row[0])[0])

    def forget_unreachable(self, *, before: float, replays_before: float) -> int:
        # Checks all rows first: a damaged row may no longer link to its ancestors.
        with self._lend() as source:
            damages = damaged_rows(source)
        with self._refusals():
            self._mend(damages)
        with self._transaction(is_synced=False) as connection:
            num_gone = forget_unreachable(connection, before, replays_before)
        if num_gone:
            self._current.num_changes += 1
            with self._lock, self._refusals():
                # The ledger counts against the disk budget. `execute` would free only one page.
                self._current.writer.executescript("PRAGMA incremental_vacuum")
        return num_gone

    def back_up(self) -> None:
        """Copy the ledger, unless only the index changed since the last copy.

        Keeps the two latest copies. Damaged rows are restored first; if that fails, no copy is
        replaced. Does nothing for a ledger in memory.
        """
        if self._is_in_memory:
            return
        with self._backup_lock:
            current = self._current
            num_changes = current.num_changes
            if num_changes == current.num_backed_up and self._backup.exists():
                return
            copy = self._backup.with_name(f"{self._backup.name}.tmp")
            with self._refusals():
                damages = self._copy(current, copy)
                if damages:
                    self._mend(damages)
                    damages = self._copy(current, copy)
                if damages:
                    raise damages[0]
                with suppress(FileNotFoundError):
                    self._backup.replace(self._older_backup)
                copy.replace(self._backup)
                sync_file(self._backup.parent)
            current.num_backed_up = num_changes

    def _copy(self, current: _OpenLedger, copy: Path) -> list[DamagedRowError]:
        # Once the file is unlinked, only connections that are already open can read it.
        lend = self._lend if self._is_in_place(current) else self._lend_writer
        with lend() as source:
            copy_database(source, copy, self._timeout_s)
        with closing(connect_unchanged(copy)) as made:
            damages = damaged_rows(made)
        if damages:
            remove(copy)
        return damages

    def close(self) -> None:
        with self._lock, self._refusals():
            if self._opened:
                opened, self._opened = self._opened, None
                if opened.readers is not None:
                    opened.readers.close()
                opened.writer.close()

    def _read(
        self, query: str, values: Row, decode: Callable[[Row], _T], table: Table | None = None
    ) -> list[_T]:
        def read() -> list[_T]:
            with self._lend() as connection:
                found = connection.execute(query, values).fetchall()
                rows = (from_stored(connection, table, row) if table else row for row in found)
                return [decode(row) for row in rows]

        try:
            return read()
        except DamagedRowError as damage:
            with self._refusals():
                self._mend([damage])
        with self._refusals():
            return read()

    def _mend(self, damages: Sequence[DamagedRowError]) -> None:
        if not damages:
            return
        with self._lock, self._refusals():
            # SQLite does not rewrite a page if its cached copy is right and only the file is not.
            self._current.writer.execute("PRAGMA shrink_memory")
        with self._transaction(is_synced=True) as connection:
            lost = self._damages.restore(connection, damages)
        if lost:
            raise lost[0]

    @property
    def _current(self) -> _OpenLedger:
        if self._opened is None:
            raise CachePersistenceError(f"{self._path.name} is not open.")
        return self._opened

    def _load_memory(self) -> LedgerState:
        if self._opened is None:
            writer = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            weakref.finalize(self, writer.close)  # no explicit close needed
            migrate(writer, 0)
            self._opened = _OpenLedger(writer)
        return read_state(self._opened.writer, "")

    def _stand_by(self) -> LedgerState:
        """Open the ledger or a backup read-only, without changing any file, until there is room."""
        there = [p for p in (self._path, *self._backups) if p.exists() and p.stat().st_size]
        if there:
            reader = connect_unchanged(there[0], self._cipher)
        else:
            reader = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            migrate(reader, 0)
        self._opened = _OpenLedger(reader, is_standby=True)
        with self._refusals():
            return read_state(reader, "")

    def _load(self) -> LedgerState:
        problem = ""
        if not self._path.exists() or not self._path.stat().st_size:
            if self._has_backup:
                problem = self._restore("was missing")
            else:
                # SQLite would apply a leftover write-ahead log to the new ledger.
                move_aside(self._path)
                problem = self._rescue.total_loss()
        try:
            return self._open(problem)
        except _TruncatedLedgerError as error:
            problem = self._restore(f"was truncated ({error})", is_backup_newer=True)
        except READ_ERRORS as error:
            if not is_damage(error):
                raise
            problem = self._restore(f"was damaged ({error})")
        return self._open(problem)

    def _restore(self, reason: str, *, is_backup_newer: bool = False) -> str:
        self._damages.clear()
        return self._rescue.run(reason, is_backup_newer=is_backup_newer)

    def _open(self, problem: str) -> LedgerState:
        writer = connect(self._path, self._timeout_s, self._cipher)
        try:
            prepare(writer, self._path, has_backup=self._has_backup)
            mended = self._mend_at_start(writer)
            lost = self._count_lost(writer, is_restored=bool(problem))
            state = read_state(writer, " ".join(filter(None, (problem, mended, lost))))
            number = num_logged(writer)
        except BaseException:
            writer.close()
            raise
        readers = ReaderPool(self._path, self._timeout_s, self._cipher)
        inode = self._path.stat().st_ino
        self._opened = _OpenLedger(writer, readers, inode, num_logged=number)
        self._mark.write(number)
        return state

    def _mend_at_start(self, writer: sqlite3.Connection) -> str:
        """Restore damaged rows from a backup; returns a message."""
        damages = damaged_rows(writer)
        if not damages:
            return ""
        writer.execute("BEGIN IMMEDIATE")
        if lost := self._damages.restore(writer, damages):
            raise lost[0]
        writer.execute("COMMIT")
        problem = f"{self._path.name}: {self._damages.problem}."
        self._damages.clear()
        return problem

    def _count_lost(self, writer: sqlite3.Connection, *, is_restored: bool) -> str:
        """Message about changes lost since the mark; raises `_TruncatedLedgerError`."""
        found, marked = num_logged(writer), self._mark.read()
        num_lost = marked - found
        if num_lost > 0 and not is_restored and self._is_backup_newer(found):
            raise _TruncatedLedgerError(f"its last {num_lost} changes are missing")
        set_num_logged(writer, max(found, marked))
        if num_lost <= 0:
            return ""
        return (
            f"{self._path.name}: up to {num_lost} of the latest changes to agents and turns are "
            "lost, although they were written."
        )

    def _is_backup_newer(self, num_found: int) -> bool:
        return num_backed_up(self._backup, self._timeout_s) > num_found

    def _note_logged(self, number: int) -> None:
        with self._lock:
            current = self._current
            current.num_logged += number
            if not self._is_in_memory:
                self._mark.write(current.num_logged)

    @contextmanager
    def _transaction(self, *, is_synced: bool) -> Iterator[sqlite3.Connection]:
        with self._lock, self._refusals():
            if self._current.is_standby and has_room(self._path.parent):
                self.load()
            current = self._current
            if current.is_standby:
                raise CachePersistenceError(_FULL, retry_after_s=1.0)
            if not self._is_in_place(current):
                raise CachePersistenceError(
                    f"{self._path.name} was removed or replaced while the server was running. "
                    "Restart the server to continue from the backup."
                )
            connection = current.writer
            if current.is_synced != is_synced:
                # EXTRA is also durable on file systems that do not support a write-ahead log.
                connection.execute(f"PRAGMA synchronous = {'EXTRA' if is_synced else 'NORMAL'}")
                current.is_synced = is_synced
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                if is_synced:
                    # An empty commit syncs nothing, and earlier unsynced changes must be synced.
                    connection.execute(_COUNT_SYNC)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def _lend(self) -> AbstractContextManager[sqlite3.Connection]:
        """Lend a read connection; a database in memory has only the writer's."""
        readers = self._current.readers
        return self._lend_writer() if readers is None else readers.lend()

    @contextmanager
    def _lend_writer(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._refusals():
            yield self._current.writer

    @property
    def _has_backup(self) -> bool:
        return any(path.exists() for path in self._backups)

    def _is_in_place(self, current: _OpenLedger) -> bool:
        """Whether the open file still has its name; otherwise it is lost once it is closed."""
        if self._is_in_memory:
            return True
        with suppress(FileNotFoundError):
            return self._path.stat().st_ino == current.inode
        return False

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Convert SQLite's errors to domain errors; clients see the messages, so no paths."""
        try:
            yield
        except _UNSTORABLE as error:
            raise ValueError(f"a change cannot be stored: {error}") from error
        except (*READ_ERRORS, OSError) as error:
            raise refusal(self._path.name, error) from error
