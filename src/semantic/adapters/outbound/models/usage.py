"""Marks a model's directory as used, so that no other process deletes it."""

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Self


class ModelUsage:
    """An advisory lock on one directory; it ends with the process.

    File systems without such locks are used without one.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def share(self, directory: Path) -> None:
        """Mark a directory as used, instead of the one that was marked before."""
        self._lock(directory, fcntl.LOCK_SH)

    def take(self, directory: Path) -> bool:
        """Lock a directory for deletion; false if a process uses it."""
        return self._lock(directory, fcntl.LOCK_EX)

    def release(self) -> None:
        """Unlock the directory; idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _lock(self, directory: Path, kind: int) -> bool:
        self.release()
        with contextlib.suppress(OSError):
            self._descriptor = os.open(directory, os.O_RDONLY)
            try:
                fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                self.release()
                return False
        return True
