"""Opening the ledger's files, and saying for people why it cannot be done.

All files of a ledger are its owner's alone. It knows no tables.
"""

import fcntl
import os
import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from semantic.adapters.outbound.cipher import Cipher
from semantic.adapters.outbound.ledger.encryption import LedgerConnection
from semantic.adapters.outbound.ledger.schema import DamagedLedgerError
from semantic.domain.errors import CachePersistenceError

SIDECARS = ("-wal", "-shm", "-journal")
_OWNER_ONLY = 0o600
_MARK_DIGITS = 18  # so many fit into an integer of SQLite
_RETRY_AFTER_S = 1.0
_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_UNWRITABLE = (
    *(sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM),
    sqlite3.SQLITE_AUTH,
)
# The second comes from a name or a message that is no text.
READ_ERRORS = (sqlite3.Error, UnicodeDecodeError, DamagedLedgerError)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT)
# A table that should be there or text that is none; a length that was never written.
_DAMAGED_IF_READ = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_TOOBIG)


def primary_code(error: sqlite3.Error) -> int:
    """SQLite's result code without its details; that of a mere error if there is none."""
    return int(getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)) & 0xFF


def is_damage(error: Exception) -> bool:
    """Whether an error met while reading can only come from a damaged file."""
    if isinstance(error, sqlite3.Error):
        return primary_code(error) in (*_DAMAGED, *_DAMAGED_IF_READ)
    return isinstance(error, DamagedLedgerError | UnicodeDecodeError)


def refusal(path: Path, error: Exception) -> CachePersistenceError:
    """Say what is wrong with a ledger and what to do about it."""
    code = primary_code(error) if isinstance(error, sqlite3.Error) else None
    if code in _LOCKED:
        return CachePersistenceError(
            f"{path} is locked by another program. Close what has it open, for instance a "
            "database browser, and try again.",
            retry_after_s=_RETRY_AFTER_S,
        )
    if code == sqlite3.SQLITE_FULL:
        return CachePersistenceError(
            f"{path} cannot grow: the disk is full. Free some space.", retry_after_s=_RETRY_AFTER_S
        )
    if code in _UNWRITABLE or isinstance(error, OSError):
        return CachePersistenceError(
            f"{path} cannot be opened for writing: {_reason(error)}. Let it and its directory "
            "belong to whoever runs the server, or choose another --cache-dir."
        )
    if code in _DAMAGED or (code is None and is_damage(error)):
        return CachePersistenceError(
            f"{path} is damaged: {_reason(error)}. Restart the server: it then restores what can "
            "be read, and the rest from the backup."
        )
    return CachePersistenceError(f"{path} cannot be used: {_reason(error)}.")


def connect(path: Path, timeout_s: float, cipher: Cipher | None = None) -> sqlite3.Connection:
    """Open a database for writing, making it if need be; any one thread at a time may use it."""
    with suppress(FileExistsError):
        # SQLite gives the files beside it the same mode.
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, _OWNER_ONLY))
    if path.stat().st_mode & 0o077:
        path.chmod(_OWNER_ONLY)
    made = sqlite3.connect(
        path, timeout_s, isolation_level=None, check_same_thread=False, factory=LedgerConnection
    )
    made.cipher = cipher
    return made


def connect_read_only(
    path: Path, timeout_s: float, cipher: Cipher | None = None
) -> sqlite3.Connection:
    """Open a database that is there; any one thread at a time may use it."""
    made = sqlite3.connect(
        f"file:{quote(str(path))}?mode=ro",
        timeout_s,
        isolation_level=None,
        check_same_thread=False,
        uri=True,
        factory=LedgerConnection,
    )
    made.cipher = cipher
    return made


def check_pages(connection: sqlite3.Connection) -> None:
    """Look at every page, and whether tables and their indices agree.

    A gigabyte takes a second or two.

    Raises:
        DamagedLedgerError: one is not what it should be.
    """
    (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if found != "ok":
        raise DamagedLedgerError(found.splitlines()[-1])


def sync_file(path: Path) -> None:
    """Come back when a file, or a directory's list of files, would survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        sync(handle)
    finally:
        os.close(handle)


def sync(handle: int) -> None:
    """Come back when what is open would survive a power failure."""
    if sys.platform == "darwin":
        # A plain fsync leaves it in the drive's own cache there.
        fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
    else:
        os.fsync(handle)


def suspect_file(path: Path) -> Path:
    """The file that says that damage was seen, for the next start to see to it."""
    return Path(f"{path}.suspect")


class Mark:
    """A small file beside the ledger that says how much was logged: a ledger that says less is cut.

    It is written after each change and never synced: it survives the death of the process, and may
    be behind the ledger, but is ahead of it only if changes are lost.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> int:
        """How much was logged; 0 if that is not known."""
        try:
            text = self._path.read_bytes()
        except OSError:
            return 0
        is_whole = len(text) == _MARK_DIGITS + 1 and text[:-1].isdigit()
        return int(text) if is_whole else 0

    def write(self, number: int) -> None:
        """Note it. A disk that fails is told of by the ledger itself."""
        with suppress(OSError):
            flags = os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
            handle = os.open(self._path, flags, _OWNER_ONLY)
            try:
                os.pwrite(handle, b"%0*d\n" % (_MARK_DIGITS, number), 0)
            finally:
                os.close(handle)


def copy_database(source: sqlite3.Connection, path: Path, timeout_s: float) -> None:
    """Write a copy that is checked and would survive a power failure.

    Raises:
        DamagedLedgerError: a page of it is not what it should be.
    """
    remove(path)
    try:
        with closing(connect(path, timeout_s)) as copy:
            copy.execute("PRAGMA synchronous = OFF")
            source.backup(copy)
            # One file, without a log beside it.
            copy.execute("PRAGMA journal_mode = DELETE").fetchone()
            check_pages(copy)
        sync_file(path)
    except BaseException:
        remove(path)
        raise


def move(path: Path, target: Path) -> None:
    """Move a database and the files beside it; what is not there is passed over."""
    for suffix in ("", *SIDECARS):
        with suppress(FileNotFoundError):
            Path(f"{path}{suffix}").replace(f"{target}{suffix}")


def remove(path: Path) -> None:
    """Remove a database and the files beside it."""
    for suffix in ("", *SIDECARS):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


class Readers:
    """Connections that only read, lent to one thread at a time. Safe on any thread."""

    def __init__(self, path: Path, timeout_s: float, cipher: Cipher | None = None) -> None:
        self._path, self._timeout_s, self._cipher = path, timeout_s, cipher
        self._idle: list[sqlite3.Connection] = []
        self._lock = threading.Lock()
        self._is_closed = False

    @contextmanager
    def lend(self) -> Iterator[sqlite3.Connection]:
        """Lend a connection for the time of a reading.

        Raises:
            CachePersistenceError: it cannot be read.
        """
        try:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            connection = connection or connect_read_only(self._path, self._timeout_s, self._cipher)
            try:
                yield connection
            finally:
                self._take_back(connection)
        except READ_ERRORS as error:
            if is_damage(error):
                self._note_damage(error)
            raise refusal(self._path, error) from error

    def close(self) -> None:
        """Close all; those that are lent when they come back."""
        with self._lock:
            self._is_closed = True
            for connection in self._idle:
                connection.close()
            self._idle.clear()

    def _note_damage(self, error: Exception) -> None:
        # A row that has changed does not show when the pages are looked at.
        with suppress(OSError):
            suspect_file(self._path).write_text(_reason(error), "utf-8", "replace")

    def _take_back(self, connection: sqlite3.Connection) -> None:
        with self._lock:
            if self._is_closed:
                connection.close()
            else:
                self._idle.append(connection)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).rstrip(".")
