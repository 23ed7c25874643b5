"""Counts the bytes of block files, directory by directory, while files are written and removed."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


class RunningCount:
    """What is counted so far. Not thread-safe: the owner holds a lock.

    Attributes:
        places: All directories of block files, relative to that of the blocks.
        uncounted: Those that are not counted yet; changes in all others must be added.
        num_bytes: Bytes of all others, and of files beside the directories.
    """

    def __init__(self, blocks: Path) -> None:
        self.num_bytes = 0
        self.places = [
            f"{root}/{shard}"
            for root in self._directories(blocks)
            for shard in self._directories(blocks / root)
        ]
        self.uncounted = set(self.places)

    def add(self, place: str, num_bytes: int) -> None:
        self.uncounted.discard(place)
        self.num_bytes += num_bytes

    def _directories(self, directory: Path) -> Iterator[str]:
        """Yield the names of directories, and count the files beside them.

        Ignores what vanishes, and what cannot be read.
        """
        with contextlib.suppress(OSError), os.scandir(directory) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        yield entry.name
                    else:
                        self.num_bytes += entry.stat(follow_symlinks=False).st_size
