"""The directory tree of block files; never follows a symbolic link.

    <directory>/blocks/<root, 16 digits>/<name, 2 digits>/<name>.<kind>.safetensors
    <directory>/quarantine/<milliseconds>-<number>-<file name>

Files with any other name are never touched. Directories are opened level by level, relative to
their parent, and links are refused. `files.py` reads and writes the content.
"""

import contextlib
import itertools
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from semantic.domain.blocks import BlockPart
from semantic.domain.spec import LayerKind

BLOCKS, QUARANTINE = "blocks", "quarantine"
TEMPORARY = ".tmp"  # suffix of files that are being written, or were when the server crashed
_SUFFIX = ".safetensors"
_KINDS = "|".join(kind.value for kind in LayerKind)
_FILE = rf"(?:[0-9a-f]{{64}}\.(?:{_KINDS}){re.escape(_SUFFIX)}|[0-9a-f]{{16}}-[0-9]+\.tmp)"
_IS_FILE = re.compile(_FILE).fullmatch
_IS_ROOT = re.compile("[0-9a-f]{16}").fullmatch
_IS_SHARD = re.compile("[0-9a-f]{2}").fullmatch
_IS_SET_ASIDE = re.compile(rf"([0-9]{{13}})-[0-9]+-{_FILE}").fullmatch
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Place:
    """The location of a file below `blocks`."""

    root: str
    shard: str
    name: str

    @classmethod
    def of(cls, part: BlockPart) -> "Place":
        """The location of a part's file."""
        name = part.name.hex()
        return cls(part.root.hex()[:16], name[:2], f"{name}.{part.kind.value}{_SUFFIX}")

    @property
    def is_temporary(self) -> bool:
        """Whether the file is unfinished."""
        return self.name.endswith(TEMPORARY)

    def __str__(self) -> str:
        return f"{BLOCKS}/{self.root}/{self.shard}/{self.name}"


class BlockTree:
    """The block files of one cache directory, and its quarantine."""

    def __init__(self, directory: Path) -> None:
        """Set the directory without reading or creating anything."""
        self._directory = directory
        self._numbers = itertools.count()

    def shard(
        self, place: Place, *, is_made: bool = False, is_synced: bool = False
    ) -> contextlib.AbstractContextManager[int]:
        """Open the directory of a file.

        Args:
            place: Location of the file.
            is_made: Create missing directories, accessible only to their owner.
            is_synced: Sync created directories, so that they survive a power failure.

        Raises:
            OSError: the directory is missing, or a link or a file is in its place.
        """
        levels = (BLOCKS, place.root, place.shard)
        return self._opened(*levels, is_made=is_made, is_synced=is_synced)

    def places(self) -> Iterator[Place]:
        """Iterate over all files named like a block or an unfinished file."""
        for root in self._names(BLOCKS):
            if not _IS_ROOT(root):
                continue
            for shard in self._names(BLOCKS, root):
                if not _IS_SHARD(shard):
                    continue
                for name in self._names(BLOCKS, root, shard, is_directory=False):
                    if _IS_FILE(name):
                        yield Place(root, shard, name)

    def quarantine(self, place: Place) -> None:
        """Move a file to quarantine.

        Raises:
            OSError: the file is missing or cannot be moved.
        """
        name = f"{time.time_ns() // 10**6:013}-{next(self._numbers)}-{place.name}"
        with self.shard(place) as source, self._opened(QUARANTINE, is_made=True) as target:
            os.rename(place.name, name, src_dir_fd=source, dst_dir_fd=target)

    def empty_quarantine(self, before: float) -> int:
        """Remove files quarantined up to `before`, ignoring failures; returns the bytes freed."""
        freed = 0
        names = self._names(QUARANTINE, is_directory=False)
        with contextlib.suppress(OSError), self._opened(QUARANTINE) as handle:
            for name in names:
                match = _IS_SET_ASIDE(name)
                if match is None or int(match[1]) > before * 1000:
                    continue
                with contextlib.suppress(OSError):
                    num_bytes = os.stat(name, dir_fd=handle, follow_symlinks=False).st_size
                    os.unlink(name, dir_fd=handle)
                    freed += num_bytes
        return freed

    def _names(self, *levels: str, is_directory: bool = True) -> list[str]:
        """The directories or the other entries of a directory; empty if it is missing."""
        try:
            with self._opened(*levels) as handle, os.scandir(handle) as entries:
                return [
                    entry.name
                    for entry in entries
                    if entry.is_dir(follow_symlinks=False) is is_directory
                ]
        except OSError:
            return []

    @contextlib.contextmanager
    def _opened(
        self, *levels: str, is_made: bool = False, is_synced: bool = False
    ) -> Iterator[int]:
        # The cache directory itself may be a link, which its owner has chosen.
        if is_made and not self._directory.is_dir():
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(self._directory, _OPEN_DIRECTORY)
        try:
            for name in levels:
                below = _open_below(handle, name, is_made=is_made, is_synced=is_synced)
                os.close(handle)
                handle = below
            yield handle
        finally:
            os.close(handle)


def size_of(name: str, directory: int) -> int:
    """Bytes of a file; 0 if it is missing."""
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


def tree_size(directory: Path, skip: str | tuple[str, ...]) -> int:
    """Bytes of all files below a directory, except names that start with (one of) `skip`.

    Ignores files that vanish during the walk.
    """
    total = 0
    try:
        with os.scandir(directory) as entries:
            listed = list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return 0
    for entry in listed:
        if entry.name.startswith(skip):
            continue
        try:
            if entry.is_dir(follow_symlinks=False):
                total += tree_size(directory / entry.name, skip)
            else:
                total += entry.stat(follow_symlinks=False).st_size
        except FileNotFoundError:
            continue
    return total


def _open_below(parent: int, name: str, *, is_made: bool, is_synced: bool) -> int:
    flags = _OPEN_DIRECTORY | os.O_NOFOLLOW
    try:
        return os.open(name, flags, dir_fd=parent)
    except FileNotFoundError:
        if not is_made:
            raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)
        if is_synced:
            os.fsync(parent)
    return os.open(name, flags, dir_fd=parent)
