"""The ledger in SQLite: agents, turns, tenants, replays and the index of block parts.

One connection writes; readings have their own, so they neither wait for it nor hold it up. A
damaged file is moved aside and replaced at start by what it and its backup still hold. That one
process has the directory to itself is `DirectoryLock`'s business. Servers that keep nothing on disk
have the same ledger in memory.
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
    Readers,
    check_pages,
    connect,
    connect_read_only,
    copy_database,
    is_damage,
    refusal,
    suspect_file,
    sync_file,
)
from semantic.adapters.outbound.ledger.rescue import Rescue, move_aside
from semantic.adapters.outbound.ledger.schema import (
    DamagedLedgerError,
    NewerLedgerError,
    Row,
    Table,
    check_tables,
    migrate,
    num_logged,
    set_num_logged,
    version_of,
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
LEDGER_FILE, BACKUP_FILE, MARK_FILE = "ledger.db", "ledger.backup.db", "ledger.mark"
_TIMEOUT_S = 5.0
_LOG_BYTES = 2**24
_COUNT_LOGGED = "UPDATE facts SET value = value + ? WHERE name = 'num_logged'"
_COUNT_SYNC = "UPDATE facts SET value = value + 1 WHERE name = 'num_synced'"
# A change that meets one of these will meet it again.
_UNSTORABLE = (
    *(sqlite3.DataError, sqlite3.IntegrityError, sqlite3.InterfaceError, sqlite3.ProgrammingError),
    *(OverflowError, RecursionError),
)


@dataclass(slots=True)
class _Open:
    """What is there between `load` and `close`."""

    writer: sqlite3.Connection
    readers: Readers | None = None  # None in memory
    inode: int = 0
    is_synced: bool | None = None
    num_changes: int = 1
    num_backed_up: int = 0
    num_logged: int = 0


class _CutLedgerError(Exception):
    """The ledger has seen less than its backup."""


class SqliteLedger(LedgerReadings):
    """`LedgerPort` over one directory; safe on any thread once `load` is done."""

    def __init__(
        self,
        directory: Path | None,
        *,
        timeout_s: float = _TIMEOUT_S,
        cipher: Cipher | None = None,
    ) -> None:
        """Prepare; nothing is opened yet.

        Args:
            directory: Holds the ledger and its backup; made if need be. None keeps it in memory.
            timeout_s: How long to wait for another program's lock.
            cipher: Encrypts what was said; None writes it as it is.
        """
        self._is_in_memory = directory is None
        place = directory or Path()
        self._path, self._backup = place / LEDGER_FILE, place / BACKUP_FILE
        self._mark = Mark(place / MARK_FILE)
        self._suspect = suspect_file(self._path)
        self._rescue = Rescue(self._path, self._backup, timeout_s, cipher)
        self._timeout_s = timeout_s
        self._cipher = cipher
        self._lock = threading.RLock()
        self._backup_lock = threading.Lock()
        self._opened: _Open | None = None

    @classmethod
    def in_memory(cls) -> Self:
        """Make a ledger that ends with its process; it is open from the start."""
        made = cls(None)
        made.load()
        return made

    def load(self) -> LedgerState:
        """Open the ledger and read what a server must know from the start.

        Raises:
            CachePersistenceError: it cannot be opened for writing, is locked, or is of a newer
                server; nothing was changed.
        """
        with self._lock:
            if self._is_in_memory:
                return self._load_memory()
            self.close()
            try:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                return self._load()
            except NewerLedgerError as error:
                raise CachePersistenceError(
                    f"{self._path} was written by a newer Semantic ({error}). Upgrade, or choose "
                    "another --cache-dir."
                ) from error
            except (*READ_ERRORS, OSError) as error:
                raise refusal(self._path, error) from error

    def apply(self, changes: Sequence[LedgerChange], *, is_synced: bool) -> None:
        """Make changes in their order, all or none of them."""
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
        """How many turns there are, also those that no agent reaches."""
        with self._lend() as connection:
            (number,) = connection.execute("SELECT count(*) FROM turns").fetchone()
            return int(number)

    def forget_unreachable(self, *, before: float, replays_before: float) -> int:
        """Remove old turns that no agent reaches, and old replays; returns how many."""
        with self._transaction(is_synced=False) as connection:
            num_gone = forget_unreachable(connection, before, replays_before)
        if num_gone:
            self._current.num_changes += 1
            with self._lock, self._refusals():
                # Gives the space back: the ledger counts against the disk budget. `execute` would
                # give back one page.
                self._current.writer.executescript("PRAGMA incremental_vacuum")
        return num_gone

    def back_up(self) -> None:
        """Copy the ledger, unless nothing but the index changed since the last copy.

        A copy that is damaged does not replace the one before. In memory there is nothing to copy.
        """
        if self._is_in_memory:
            return
        with self._backup_lock:
            current = self._current
            num_changes = current.num_changes
            if num_changes == current.num_backed_up and self._backup.exists():
                return
            copy = self._backup.with_name(f"{self._backup.name}.tmp")
            # A file that lost its name can be read by who has it open, and nobody else.
            lend = self._lend if self._is_in_place(current) else self._lend_writer
            with self._refusals(), lend() as source:
                copy_database(source, copy, self._timeout_s)
                copy.replace(self._backup)
                sync_file(self._backup.parent)
            current.num_backed_up = num_changes

    def close(self) -> None:
        """Write what is pending and let go."""
        with self._lock, self._refusals():
            if self._opened:
                opened, self._opened = self._opened, None
                if opened.readers is not None:
                    opened.readers.close()
                opened.writer.close()

    def _read(
        self, query: str, values: Row, decode: Callable[[Row], _T], table: Table | None = None
    ) -> list[_T]:
        with self._lend() as connection:
            rows = connection.execute(query, values).fetchall()
            return [decode(from_stored(connection, table, row) if table else row) for row in rows]

    @property
    def _current(self) -> _Open:
        if self._opened is None:
            raise CachePersistenceError(f"{self._path} is not open.")
        return self._opened

    def _load_memory(self) -> LedgerState:
        if self._opened is None:
            writer = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            weakref.finalize(self, writer.close)  # nobody needs to close what ends with its process
            migrate(writer, 0)
            self._opened = _Open(writer)
        return read_state(self._opened.writer, "")

    def _load(self) -> LedgerState:
        problem = ""
        if not self._path.exists() or not self._path.stat().st_size:
            if self._backup.exists():
                problem = self._restore("was missing")
            else:
                # SQLite would take a log that was left behind for the new ledger's.
                move_aside(self._path)
        try:
            return self._open(problem)
        except _CutLedgerError as error:
            problem = self._restore(f"was cut ({error})", is_backup_newer=True)
        except READ_ERRORS as error:
            if not is_damage(error):
                raise
            problem = self._restore(f"was damaged ({error})")
        return self._open(problem)

    def _restore(self, reason: str, *, is_backup_newer: bool = False) -> str:
        problem = self._rescue.run(reason, is_backup_newer=is_backup_newer)
        self._suspect.unlink(missing_ok=True)
        return problem

    def _open(self, problem: str) -> LedgerState:
        writer = connect(self._path, self._timeout_s, self._cipher)
        try:
            self._prepare(writer)
            lost = self._count_lost(writer, is_restored=bool(problem))
            state = read_state(writer, " ".join(filter(None, (problem, lost))))
            number = num_logged(writer)
        except BaseException:
            writer.close()
            raise
        readers = Readers(self._path, self._timeout_s, self._cipher)
        inode = self._path.stat().st_ino
        self._opened = _Open(writer, readers, inode, num_logged=number)
        self._mark.write(number)
        return state

    def _count_lost(self, writer: sqlite3.Connection, *, is_restored: bool) -> str:
        """Compare a ledger with its mark; returns what is missing, for people.

        Raises:
            _CutLedgerError: the backup has more of it.
        """
        found, marked = num_logged(writer), self._mark.read()
        num_lost = marked - found
        if num_lost > 0 and not is_restored and self._num_backed_up() > found:
            raise _CutLedgerError(f"it lacked its last {num_lost} changes")
        set_num_logged(writer, max(found, marked))
        if num_lost <= 0:
            return ""
        return (
            f"{self._path.name}: up to {num_lost} of the latest changes to agents and turns were "
            "lost, though they had been written."
        )

    def _num_backed_up(self) -> int:
        """How much the backup has seen; 0 if it cannot be read."""
        try:
            with closing(connect_read_only(self._backup, self._timeout_s)) as backup:
                return num_logged(backup)
        except READ_ERRORS:
            return 0

    def _note_logged(self, number: int) -> None:
        with self._lock:
            current = self._current
            current.num_logged += number
            if not self._is_in_memory:
                self._mark.write(current.num_logged)

    def _prepare(self, writer: sqlite3.Connection) -> None:
        """Check the file and bring it up to date."""
        version = version_of(writer)
        if version:
            if self._suspect.exists():
                raise DamagedLedgerError(self._suspect.read_text())
            check_pages(writer)
        elif self._backup.exists():
            raise DamagedLedgerError("it was empty")
        else:
            writer.execute("PRAGMA auto_vacuum = INCREMENTAL")
        writer.execute("PRAGMA secure_delete = ON")
        # A plain fsync does not reach the medium on macOS; elsewhere these say nothing.
        writer.execute("PRAGMA fullfsync = ON")
        writer.execute("PRAGMA checkpoint_fullfsync = ON")
        writer.execute("PRAGMA journal_mode = WAL").fetchone()
        writer.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}").fetchone()
        # Not only to migrate: shows now, and not at the first turn, whether it can be written.
        migrate(writer, version)
        check_tables(writer)
        if not version:
            sync_file(self._path.parent)

    @contextmanager
    def _transaction(self, *, is_synced: bool) -> Iterator[sqlite3.Connection]:
        with self._lock, self._refusals():
            current = self._current
            if not self._is_in_place(current):
                raise CachePersistenceError(
                    f"{self._path} was removed or replaced while the server runs. Restart it; it "
                    "then continues from the backup."
                )
            connection = current.writer
            if current.is_synced != is_synced:
                # EXTRA also holds where the file system has no write-ahead log.
                connection.execute(f"PRAGMA synchronous = {'EXTRA' if is_synced else 'NORMAL'}")
                current.is_synced = is_synced
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                if is_synced:
                    # SQLite syncs only what it writes, and earlier changes wait for this one.
                    connection.execute(_COUNT_SYNC)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def _lend(self) -> AbstractContextManager[sqlite3.Connection]:
        """Lend a connection to read from: one of its own, so that changes need not wait.

        A database in memory has none but the writer's.
        """
        readers = self._current.readers
        return self._lend_writer() if readers is None else readers.lend()

    @contextmanager
    def _lend_writer(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._refusals():
            yield self._current.writer

    def _is_in_place(self, current: _Open) -> bool:
        """Whether the open file still has its name; without it, it is gone once it is closed."""
        if self._is_in_memory:
            return True
        with suppress(FileNotFoundError):
            return self._path.stat().st_ino == current.inode
        return False

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Raise the domain's errors in place of SQLite's."""
        try:
            yield
        except _UNSTORABLE as error:
            raise ValueError(f"a change cannot be stored: {error}") from error
        except (*READ_ERRORS, OSError) as error:
            raise refusal(self._path, error) from error
