"""Opens, copies and syncs the ledger's files, and converts failures to readable errors.

Only the owner has access to a ledger's files. This module knows no tables.
"""

import errno
import fcntl
import os
import sqlite3
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from semantic.adapters.outbound.cipher import Cipher
from semantic.adapters.outbound.ledger.encryption import LedgerConnection
from semantic.adapters.outbound.ledger.schema import DamagedLedgerError, DamagedRowError
from semantic.domain.errors import CachePersistenceError

SIDECARS = ("-wal", "-shm", "-journal")
_OWNER_ONLY = 0o600
_MARK_DIGITS = 18  # the most digits that always fit into an SQLite integer
_RETRY_AFTER_S = 1.0
_ROOM_BYTES = 2**18  # for the write-ahead log's index and some pages
_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_UNWRITABLE = (
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_AUTH,
)
READ_ERRORS = (sqlite3.Error, DamagedLedgerError)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT)
# While reading: a missing table (ERROR), or an impossible length (TOOBIG).
_DAMAGED_IF_READ = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_TOOBIG)


def primary_code(error: sqlite3.Error) -> int:
    """SQLite's primary result code; SQLITE_ERROR if the exception has none."""
    return int(getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)) & 0xFF


def is_damage(error: Exception) -> bool:
    """Whether an error raised while reading can only come from a damaged file."""
    if isinstance(error, sqlite3.Error):
        return primary_code(error) in (*_DAMAGED, *_DAMAGED_IF_READ)
    return isinstance(error, DamagedLedgerError)


def is_full(error: Exception, directory: Path) -> bool:
    """Whether a full disk caused an error; SQLite may report it as an I/O or open error."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    if not isinstance(error, sqlite3.Error):
        return False
    code = primary_code(error)
    is_unclear = code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
    return code == sqlite3.SQLITE_FULL or (is_unclear and not has_room(directory))


def has_room(directory: Path) -> bool:
    """Whether the directory has room for a small file; writes one to find out."""
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            return file.write(bytes(_ROOM_BYTES)) == _ROOM_BYTES
    except OSError:
        return False


def refusal(path: Path | str, error: Exception) -> CachePersistenceError:
    """Convert an error to one that states the problem and the remedy.

    If clients see the message, `path` is only the ledger's name.
    """
    if isinstance(error, DamagedRowError):
        return CachePersistenceError(
            f"{error}, and no backup has it. Rewind the agent to an earlier turn, or restart the "
            "server to have it rewound."
        )
    code = primary_code(error) if isinstance(error, sqlite3.Error) else None
    if code in _LOCKED:
        return CachePersistenceError(
            f"another program has locked {path}. Close that program, for instance a database "
            "browser, and try again.",
            retry_after_s=_RETRY_AFTER_S,
        )
    if code == sqlite3.SQLITE_FULL:
        return CachePersistenceError(
            f"{path} cannot grow: the disk is full. Free some space.", retry_after_s=_RETRY_AFTER_S
        )
    if code in _UNWRITABLE or isinstance(error, OSError):
        return CachePersistenceError(
            f"{path} cannot be opened for writing: {_reason(error)}. Make the user that "
            "runs the server the owner of the file and its directory, or choose another "
            "--cache-dir."
        )
    if code in _DAMAGED or (code is None and is_damage(error)):
        return CachePersistenceError(
            f"{path} is damaged: {_reason(error)}. Restart the server: it restores what it can "
            "read, and the rest from the backup."
        )
    return CachePersistenceError(f"{path} cannot be used: {_reason(error)}.")


def connect(path: Path, timeout_s: float, cipher: Cipher | None = None) -> sqlite3.Connection:
    """Open a database for writing, creating it if missing; not for concurrent use by threads."""
    with suppress(FileExistsError):
        # SQLite creates the files beside it with the same mode.
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, _OWNER_ONLY))
    if path.stat().st_mode & 0o077:
        path.chmod(_OWNER_ONLY)
    return _connect(f"file:{quote(str(path))}", timeout_s, cipher)


def connect_read_only(
    path: Path, timeout_s: float, cipher: Cipher | None = None
) -> sqlite3.Connection:
    """Open an existing database for reading; not for concurrent use by threads."""
    return _connect(f"file:{quote(str(path))}?mode=ro", timeout_s, cipher)


def _connect(uri: str, timeout_s: float, cipher: Cipher | None) -> sqlite3.Connection:
    made = sqlite3.connect(
        uri,
        timeout_s,
        isolation_level=None,
        check_same_thread=False,
        uri=True,
        factory=LedgerConnection,
    )
    made.cipher = cipher
    # Invalid UTF-8 occurs only in damaged rows, and their checksum reveals it.
    made.text_factory = lambda data: data.decode(errors="replace")
    return made


def connect_unchanged(path: Path, cipher: Cipher | None = None) -> sqlite3.Connection:
    """Open a database without writing or creating any file; no other process may have it open.

    SQLite does not even apply the log of a killed process, but indexes it in memory.
    """
    log = Path(f"{path}-wal")
    has_log = log.exists() and log.stat().st_size > 0
    # Without locks, SQLite needs no -shm file beside the log; `immutable` would ignore the log.
    how = "mode=ro&vfs=unix-none" if has_log else "immutable=1"
    made = _connect(f"file:{quote(str(path))}?{how}", 0.0, cipher)
    made.execute("PRAGMA locking_mode = EXCLUSIVE").fetchone()
    return made


def check_pages(connection: sqlite3.Connection) -> None:
    """Check every page, and the consistency of tables and their indices.

    A gigabyte takes a second or two.

    Raises:
        DamagedLedgerError: the check found an error.
    """
    (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if found != "ok":
        raise DamagedLedgerError(found.splitlines()[-1])


def sync_file(path: Path) -> None:
    """Sync a file, or a directory's entries, so that it survives a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        sync(handle)
    finally:
        os.close(handle)


def sync(handle: int) -> None:
    """Sync an open file, so that it survives a power failure."""
    if sys.platform == "darwin":
        # A plain fsync leaves the data in the drive's cache on macOS.
        fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
    else:
        os.fsync(handle)


class Mark:
    """A small file with the number of logged changes: a ledger with fewer changes was truncated.

    The mark is written after each change and never synced. It survives a crash of the process and
    may lag behind the ledger; it is ahead only if the ledger has lost changes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> int:
        """Read the number of logged changes; 0 if it is unknown."""
        try:
            text = self._path.read_bytes()
        except OSError:
            return 0
        is_whole = len(text) == _MARK_DIGITS + 1 and text[:-1].isdigit()
        return int(text) if is_whole else 0

    def write(self, number: int) -> None:
        """Write the number. Ignores errors, because the ledger reports a failing disk itself."""
        with suppress(OSError):
            flags = os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
            handle = os.open(self._path, flags, _OWNER_ONLY)
            try:
                os.pwrite(handle, b"%0*d\n" % (_MARK_DIGITS, number), 0)
            finally:
                os.close(handle)


def copy_database(source: sqlite3.Connection, path: Path, timeout_s: float) -> None:
    """Write a checked and synced copy, removed on failure; `DamagedLedgerError` if damaged."""
    remove(path)
    try:
        with closing(connect(path, timeout_s)) as copy:
            copy.execute("PRAGMA synchronous = OFF")
            source.backup(copy)
            # A single file without a write-ahead log beside it.
            copy.execute("PRAGMA journal_mode = DELETE").fetchone()
            check_pages(copy)
        sync_file(path)
    except BaseException:
        remove(path)
        raise


def move(path: Path, target: Path) -> None:
    """Move a database and the files beside it; ignores missing files."""
    for suffix in ("", *SIDECARS):
        with suppress(FileNotFoundError):
            Path(f"{path}{suffix}").replace(f"{target}{suffix}")


def remove(path: Path) -> None:
    """Remove a database and the files beside it; ignores missing files."""
    for suffix in ("", *SIDECARS):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


class ReaderPool:
    """A pool of read connections, each lent to one thread at a time. Thread-safe.

    A burst of reads opens as many as it needs; at most `MAX_IDLE` stay open, since each of them
    keeps up to 2 MB of pages, its prepared statements, and two file descriptors.
    """

    MAX_IDLE = 4

    def __init__(self, path: Path, timeout_s: float, cipher: Cipher | None = None) -> None:
        self._path, self._timeout_s, self._cipher = path, timeout_s, cipher
        self._idle: list[sqlite3.Connection] = []
        self._lock = threading.Lock()
        self._is_closed = False

    @contextmanager
    def lend(self) -> Iterator[sqlite3.Connection]:
        """Lend a connection for one read; raises `CachePersistenceError` or `DamagedRowError`."""
        try:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            connection = connection or connect_read_only(self._path, self._timeout_s, self._cipher)
            try:
                yield connection
            finally:
                self._take_back(connection)
        except DamagedRowError:
            raise
        except READ_ERRORS as error:
            raise refusal(self._path.name, error) from error

    def close(self) -> None:
        """Close idle connections now, and lent ones when they are returned."""
        with self._lock:
            self._is_closed = True
            for connection in self._idle:
                connection.close()
            self._idle.clear()

    def _take_back(self, connection: sqlite3.Connection) -> None:
        with self._lock:
            if not self._is_closed and len(self._idle) < self.MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).rstrip(".")
