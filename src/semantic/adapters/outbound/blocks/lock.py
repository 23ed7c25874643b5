"""One server for one directory.

The kernel holds the lock and lets go of it when the process ends, however it ends. It is on the
directory itself, so that it survives whatever is removed from it, and on a file that says who has
it: file systems there are that lock no directories. It knows nothing of what the directory holds.
"""

import errno
import fcntl
import json
import os
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from semantic.domain.errors import CachePersistenceError, InvalidRequestError

LOCK_FILE = "lock"
_MAX_BYTES = 1024


class DirectoryLock:
    """Holds a directory from its making until `close` or the end of the process.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name, DirectoryLock(Path(name)) as lock:
        ...     lock.path.name
        'lock'
    """

    def __init__(self, directory: Path) -> None:
        """Take the lock.

        Raises:
            InvalidRequestError: another process has it; says which.
            CachePersistenceError: the directory cannot be written, or its file system has no locks.
        """
        self.path = directory / LOCK_FILE
        self._handles: list[int] = []
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._take(directory)
        except OSError as error:
            self._let_go()
            reason = "it is a link" if error.errno == errno.ELOOP else error.strerror
            raise CachePersistenceError(
                f"{self.path} cannot be locked: {reason}. Let the directory belong to "
                "whoever runs the server, or choose another --cache-dir."
            ) from error
        except InvalidRequestError:
            self._let_go()
            raise

    def __enter__(self) -> "DirectoryLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go; a second call does nothing."""
        if self._handles:
            # A process that ended should not be named to the next one that asks.
            with suppress(OSError):
                os.ftruncate(self._handles[-1], 0)
        self._let_go()

    def _let_go(self) -> None:
        while self._handles:
            os.close(self._handles.pop())

    def _take(self, directory: Path) -> None:
        """Lock the directory, then the file."""
        self._handles.append(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        self._lock(directory, is_needed=False)
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._handles.append(os.open(self.path, flags, 0o600))
            self._lock(directory, is_needed=True)
            if self._is_in_place(self._handles[-1]):
                _write_holder(self._handles[-1])
                return
            # Someone removed the file between our opening and locking it.
            os.close(self._handles.pop())

    def _lock(self, directory: Path, *, is_needed: bool) -> None:
        """Lock what was opened last; `is_needed` is whether its file system must be able to."""
        try:
            fcntl.flock(self._handles[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidRequestError(
                f"{directory} is in use by another server ({_holder(self.path)}). Stop that one, "
                "or choose another --cache-dir.",
                param="cache_dir",
            ) from None
        except OSError:
            if is_needed:
                raise

    def _is_in_place(self, handle: int) -> bool:
        with suppress(FileNotFoundError):
            return self.path.lstat().st_ino == os.fstat(handle).st_ino
        return False


def _write_holder(handle: int) -> None:
    os.ftruncate(handle, 0)
    holder = {"pid": os.getpid(), "started_at": time.time()}
    os.pwrite(handle, json.dumps(holder).encode() + b"\n", 0)


def _holder(path: Path) -> str:
    """Say who holds the lock, as far as the file tells."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            holder = json.loads(os.pread(handle, _MAX_BYTES, 0))
        finally:
            os.close(handle)
        started = datetime.fromtimestamp(holder["started_at"], UTC)
        return f"process {int(holder['pid'])}, since {started:%Y-%m-%d %H:%M:%S} UTC"
    except (KeyError, OSError, OverflowError, TypeError, ValueError):
        return "a process that did not say which"
