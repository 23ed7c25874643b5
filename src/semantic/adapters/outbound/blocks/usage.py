"""Counts the bytes of a cache directory's block files and of its quarantine."""

import os
from collections.abc import Iterable
from pathlib import Path

from semantic.adapters.outbound.blocks.listing import BLOCKS, QUARANTINE


def tree_size(directory: Path, skip: str | tuple[str, ...] = ()) -> int:
    """Bytes of all files below a directory, except names that start with (one of) `skip`.

    Ignores files that vanish during the walk, and what cannot be read.
    """
    total = 0
    for entry in _entries(directory):
        if entry.name.startswith(skip):
            continue
        if _is_directory(entry):
            total += tree_size(directory / entry.name, skip)
        else:
            total += _size(entry)
    return total


class UsedSpace:
    """The bytes of block files and of the quarantine. Not thread-safe: the owner holds a lock.

    Counting looks at every file, which takes five seconds for a million. It can go directory by
    directory while files are written and removed. Until it ends, the bytes are the expected ones.
    """

    def __init__(self, directory: Path, own_prefix: str) -> None:
        """`own_prefix` begins the names of files that are being written, which do not count."""
        self._blocks, self._quarantine = directory / BLOCKS, directory / QUARANTINE
        self._own_prefix = own_prefix
        self._total: int | None = None
        # While a count runs: the directories that are not counted yet, and the bytes of the others.
        self._uncounted: set[str] | None = None
        self._counted = 0

    @property
    def is_counting(self) -> bool:
        return self._uncounted is not None

    @property
    def total(self) -> int:
        if self._total is None:
            self.expect(tree_size(self._blocks, self._own_prefix))
        return self._total or 0

    def expect(self, blocks: int) -> None:
        """Take over the bytes of all block files from elsewhere."""
        self._total = blocks + tree_size(self._quarantine)

    def change(self, directory: str, num_bytes: int) -> None:
        """Add the bytes of files that were written to a directory, or subtract those removed."""
        if self._total is not None:
            self._total = max(0, self._total + num_bytes)
        self._count(directory, num_bytes)

    def move_to_quarantine(self, directory: str, num_bytes: int) -> None:
        self._count(directory, -num_bytes)

    def empty_quarantine(self, num_bytes: int) -> None:
        if self._total is not None:
            self._total = max(0, self._total - num_bytes)

    # -- counting -------------------------------------------------------------------------------

    def begin_count(self) -> list[str]:
        """Begin to count; returns the directories for `count`, relative to that of the blocks."""
        self._counted, places = 0, []
        for root in self._listed(_entries(self._blocks)):
            shards = self._listed(_entries(self._blocks / root))
            places += [f"{root}/{shard}" for shard in shards]
        self._uncounted = set(places)
        return places

    def count(self, directory: str) -> None:
        if self._uncounted is not None:
            self._uncounted.discard(directory)
            self._counted += tree_size(self._blocks / directory, self._own_prefix)

    def end_count(self, *, is_complete: bool) -> None:
        """End the count, and take over its result if it is complete."""
        if is_complete:
            self.expect(self._counted)
        self._uncounted = None

    def _listed(self, entries: Iterable["os.DirEntry[str]"]) -> list[str]:
        """Return the names of directories, and count the bytes of files beside them."""
        names = []
        for entry in entries:
            if _is_directory(entry):
                names.append(entry.name)
            else:
                self._counted += _size(entry)
        return names

    def _count(self, directory: str, num_bytes: int) -> None:
        if self._uncounted is not None and directory not in self._uncounted:
            self._counted += num_bytes


def _entries(directory: Path) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except OSError:
        return []


def _is_directory(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _size(entry: "os.DirEntry[str]") -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except OSError:
        return 0
