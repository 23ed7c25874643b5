"""Claims and locks a cache directory: one server at a time, and only directories of Semantic.

`claim` marks a new cache directory. A directory of an earlier version has no marker and is
recognised by its ledger. The server reads and writes nothing in any other directory.

The kernel holds the lock (`DirectoryLock`) and releases it when the process ends, even by a crash.
The directory itself is locked, so that the lock survives the removal of any file. A file that
names the lock's owner is locked as well, because some file systems cannot lock directories.
"""

import errno
import fcntl
import json
import logging
import os
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from semantic.adapters.outbound.blocks.listing import BLOCKS, QUARANTINE
from semantic.adapters.outbound.ledger.files import SIDECARS
from semantic.adapters.outbound.ledger.schema import APPLICATION_ID
from semantic.adapters.outbound.ledger.sqlite import BACKUP_FILES, LEDGER_FILE, MARK_FILE
from semantic.domain.errors import CachePersistenceError, InvalidRequestError

_log = logging.getLogger(__name__)

MARKER_FILE, LOCK_FILE = "semantic-cache", "lock"
_MARKER_TEXT = b"This is a cache directory of Semantic, which writes and deletes files in it.\n"
_OWN_NAMES = (
    MARKER_FILE,
    LOCK_FILE,
    BLOCKS,
    QUARANTINE,
    *BACKUP_FILES,
    MARK_FILE,
    *(f"{LEDGER_FILE}{suffix}" for suffix in ("", *SIDECARS)),
)
# Parts of SQLite's file format: a database's first bytes, and the write-ahead log.
_MAGIC = b"SQLite format 3\0"
_ID_PLACE = 68
_LOG_HEADER, _FRAME_HEADER, _MAX_FRAMES = 32, 24, 64
_MAX_HOLDER = 1024


def claim(directory: Path) -> None:
    """Check that a directory is a cache, or turn an empty one into a cache.

    Restricts the access to its files to their owner.

    Raises:
        InvalidRequestError: the directory holds other files, or one of the cache's names in it is a
            symbolic link.
        CachePersistenceError: the directory cannot be read or written.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_links(directory)
        if not (directory / MARKER_FILE).is_file():
            _adopt(directory)
        keep_private(directory.resolve(), skip=BLOCKS)
    except OSError as error:
        raise CachePersistenceError(
            f"{directory} cannot be used as a cache: {error.strerror}. Make the directory belong "
            "to the user who runs the server, or choose another --cache-dir."
        ) from error


def _refuse_links(directory: Path) -> None:
    for name in _OWN_NAMES:
        if (directory / name).is_symlink():
            raise InvalidRequestError(
                f"{directory / name} is a link; links in a cache directory are not followed. "
                "Remove it, or choose another --cache-dir (which may itself be a link).",
                param="cache_dir",
            )


def _adopt(directory: Path) -> None:
    is_empty = not any(directory.iterdir())
    if not is_empty and not _holds_ledger(directory):
        raise InvalidRequestError(
            f"{directory} is not empty and is not a Semantic cache: it has no file {MARKER_FILE}. "
            "Choose a new or empty directory with --cache-dir. If it is a cache, create an "
            "empty file of that name in it.",
            param="cache_dir",
        )
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with suppress(FileExistsError):  # another server was faster; the lock decides
        marker = os.open(directory / MARKER_FILE, flags, 0o600)
        try:
            os.write(marker, _MARKER_TEXT)
        finally:
            os.close(marker)
        if not is_empty:
            _log.info(
                "created the marker file in %s, a cache of an earlier version of Semantic",
                directory,
            )


def _holds_ledger(directory: Path) -> bool:
    """Look for a ledger without opening it in SQLite: the file may belong to another program."""
    application = struct.pack(">I", APPLICATION_ID)
    return any(
        page.startswith(_MAGIC) and page[_ID_PLACE : _ID_PLACE + 4] == application
        for page in _first_pages(directory)
    )


def _first_pages(directory: Path) -> Iterator[bytes]:
    yield _read(directory / LEDGER_FILE, 0)
    for name in BACKUP_FILES:
        yield _read(directory / name, 0)
    # If the server was killed before the first checkpoint, only the log contains the page.
    log = directory / f"{LEDGER_FILE}-wal"
    header = _read(log, 0)
    if len(header) < _LOG_HEADER:
        return
    (page_size,) = struct.unpack_from(">I", header, 8)
    for index in range(_MAX_FRAMES):
        frame = _read(log, _LOG_HEADER + index * (_FRAME_HEADER + page_size))
        if frame[:4] == struct.pack(">I", 1):
            yield frame[_FRAME_HEADER:]


def _read(path: Path, place: int) -> bytes:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(file, 128, place)
    except OSError:
        return b""
    finally:
        os.close(file)


def keep_private(top: Path, skip: str = "") -> None:
    """Restrict a directory and everything below it to their owner; follows no symbolic link.

    Skips the content of directories named `skip`. It may be large, and is already out of reach for
    others once its directory is restricted.
    """
    for _, directories, files, handle in os.fwalk(top, follow_symlinks=False):
        # The directory first: from then on, other users cannot change its content.
        with suppress(OSError):
            _restrict(".", handle)
        for name in (*files, skip) if skip in directories else files:
            with suppress(OSError):
                _restrict(name, handle)
        directories[:] = [name for name in directories if name != skip]


def _restrict(name: str, directory: int) -> None:
    mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
    if (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) and mode & 0o077:
        os.chmod(name, stat.S_IMODE(mode) & 0o700, dir_fd=directory)


# -- the lock -----------------------------------------------------------------------------------


class DirectoryInUseError(InvalidRequestError):
    """Another process holds the lock of a directory.

    Attributes:
        url: Where the process listens; empty if it is no server, or does not listen yet.
    """

    def __init__(self, directory: Path) -> None:
        holder = _read_holder(directory / LOCK_FILE)
        super().__init__(
            f"{directory} is in use by another server ({_describe(holder)}). Stop it, "
            "or choose another --cache-dir.",
            param="cache_dir",
        )
        self.url = str(holder.get("url", ""))


class DirectoryLock:
    """Locks a directory from construction until `close` or the end of the process.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name, DirectoryLock(Path(name)) as lock:
        ...     lock.path.name
        'lock'
    """

    def __init__(self, directory: Path) -> None:
        """Take the lock.

        Raises:
            DirectoryInUseError: another process holds the lock; the message names it.
            CachePersistenceError: the directory cannot be written, or its file system has no locks.
        """
        self.path = directory / LOCK_FILE
        self._handles: list[int] = []
        self._found = b""
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._take(directory)
        except OSError as error:
            self._release()
            reason = "it is a link" if error.errno == errno.ELOOP else error.strerror
            raise CachePersistenceError(
                f"{self.path} cannot be locked: {reason}. Make the directory belong to "
                "the user who runs the server, or choose another --cache-dir."
            ) from error
        except InvalidRequestError:
            self._release()
            raise

    def __enter__(self) -> "DirectoryLock":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(is_refused=kind is not None)

    def announce(self, url: str) -> None:
        """Name the address of this server in the lock file, for commands on the directory."""
        with suppress(OSError):  # on a full disk
            _write_holder(self._handles[-1], url)

    def close(self, *, is_refused: bool = False) -> None:
        """Release the lock, once; with `is_refused`, restore the lock file's former content."""
        if self._handles:
            # Clear the file, so that the next process is not pointed to one that has ended.
            with suppress(OSError):
                os.ftruncate(self._handles[-1], 0)
                if is_refused:
                    os.pwrite(self._handles[-1], self._found, 0)
        self._release()

    def _release(self) -> None:
        while self._handles:
            os.close(self._handles.pop())

    def _take(self, directory: Path) -> None:
        self._handles.append(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        self._lock(directory, is_needed=False)
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._handles.append(os.open(self.path, flags, 0o600))
            self._lock(directory, is_needed=True)
            if self._is_in_place(self._handles[-1]):
                self._found = os.pread(self._handles[-1], _MAX_HOLDER, 0)
                with suppress(OSError):  # on a full disk, the lock holds without naming its owner
                    _write_holder(self._handles[-1])
                return
            # The file was removed between opening and locking it.
            os.close(self._handles.pop())

    def _lock(self, directory: Path, *, is_needed: bool) -> None:
        """Lock the handle opened last; raises for a file system without locks if `is_needed`."""
        try:
            fcntl.flock(self._handles[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DirectoryInUseError(directory) from None
        except OSError:
            if is_needed:
                raise

    def _is_in_place(self, handle: int) -> bool:
        with suppress(FileNotFoundError):
            return self.path.lstat().st_ino == os.fstat(handle).st_ino
        return False


def _write_holder(handle: int, url: str = "") -> None:
    os.ftruncate(handle, 0)
    holder = {"pid": os.getpid(), "started_at": time.time(), "url": url}
    os.pwrite(handle, json.dumps(holder).encode() + b"\n", 0)


def _read_holder(path: Path) -> dict[str, Any]:
    """What the lock file says of its owner; empty if it cannot be read."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            holder = json.loads(os.pread(handle, _MAX_HOLDER, 0))
        finally:
            os.close(handle)
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _describe(holder: dict[str, Any]) -> str:
    try:
        started = datetime.fromtimestamp(holder["started_at"], UTC)
        return f"process {int(holder['pid'])}, since {started:%Y-%m-%d %H:%M:%S} UTC"
    except (KeyError, OSError, OverflowError, TypeError, ValueError):
        return "an unknown process"
