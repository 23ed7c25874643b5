"""One server for one directory.

The kernel holds the lock and lets go of it when the process ends, however it ends; the file stays
and says who has it. It knows nothing of what the directory holds.
"""

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
        self._handle: int | None = None
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._handle = self._take(directory)
        except OSError as error:
            raise CachePersistenceError(
                f"{self.path} cannot be locked: {error.strerror}. Let the directory belong to "
                "whoever runs the server, or choose another --cache-dir."
            ) from error

    def __enter__(self) -> "DirectoryLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go; a second call does nothing."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            # A process that ended should not be named to the next one that asks.
            with suppress(OSError):
                os.ftruncate(handle, 0)
            os.close(handle)

    def _take(self, directory: Path) -> int:
        while True:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_in_place(handle):
                    _write_holder(handle)
                    return handle
            except BlockingIOError:
                holder = _read_holder(handle)
                os.close(handle)
                raise InvalidRequestError(
                    f"{directory} is in use by another server ({holder}). Stop that one, or choose "
                    "another --cache-dir.",
                    param="cache_dir",
                ) from None
            except OSError:
                os.close(handle)
                raise
            # Someone removed the file between our opening and locking it.
            os.close(handle)

    def _is_in_place(self, handle: int) -> bool:
        with suppress(FileNotFoundError):
            return self.path.stat().st_ino == os.fstat(handle).st_ino
        return False


def _write_holder(handle: int) -> None:
    os.ftruncate(handle, 0)
    holder = {"pid": os.getpid(), "started_at": time.time()}
    os.pwrite(handle, json.dumps(holder).encode() + b"\n", 0)


def _read_holder(handle: int) -> str:
    """Say who holds the lock, as far as the file tells."""
    try:
        holder = json.loads(os.pread(handle, _MAX_BYTES, 0))
        started = datetime.fromtimestamp(holder["started_at"], UTC)
        return f"process {int(holder['pid'])}, since {started:%Y-%m-%d %H:%M:%S} UTC"
    except (KeyError, OSError, OverflowError, TypeError, ValueError):
        return "a process that did not say which"
