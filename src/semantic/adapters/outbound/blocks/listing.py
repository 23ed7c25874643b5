"""Finds the block files of a cache directory by their names, and empties its quarantine.

Files with any other name are never touched.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from semantic.domain.spec import LayerKind

BLOCKS, QUARANTINE = "blocks", "quarantine"
TEMPORARY = ".tmp"  # suffix of files that are being written, or were when the server crashed
SUFFIX = ".safetensors"
_KINDS = "|".join(kind.value for kind in LayerKind)
_FILE = rf"(?:[0-9a-f]{{64}}\.(?:{_KINDS}){re.escape(SUFFIX)}|[0-9a-f]{{16}}-[0-9]+\.tmp)"
_IS_FILE = re.compile(_FILE).fullmatch
_IS_ROOT = re.compile("[0-9a-f]{16}").fullmatch
_IS_SHARD = re.compile("[0-9a-f]{2}").fullmatch
_IS_QUARANTINED = re.compile(rf"([0-9]{{13}})-[0-9]+-{_FILE}").fullmatch

# Opens a directory by the names that lead to it from the cache directory.
OpenDirectory: TypeAlias = Callable[..., contextlib.AbstractContextManager[int]]


@dataclass(frozen=True, slots=True)
class Shard:
    """A directory of block files, which is open until the next one is listed.

    Attributes:
        directory: Its handle.
        files: Names of the files in it that are named like a block or an unfinished file.
    """

    root: str
    name: str
    directory: int
    files: list[str]


def shards(opened: OpenDirectory) -> Iterator[Shard]:
    """List all directories of block files, one after another."""
    for root in filter(_IS_ROOT, _names(opened, BLOCKS)):
        for name in filter(_IS_SHARD, _names(opened, BLOCKS, root)):
            with contextlib.suppress(OSError), opened(BLOCKS, root, name) as directory:
                files = list(filter(_IS_FILE, _listed(directory, is_directory=False)))
                yield Shard(root, name, directory, files)


def empty_quarantine(opened: OpenDirectory, before: float) -> int:
    """Remove files quarantined up to `before`, ignoring failures; returns the bytes freed."""
    freed = 0
    names = _names(opened, QUARANTINE, is_directory=False)
    with contextlib.suppress(OSError), opened(QUARANTINE) as handle:
        for name in names:
            match = _IS_QUARANTINED(name)
            if match is None or int(match[1]) > before * 1000:
                continue
            with contextlib.suppress(OSError):
                num_bytes = os.stat(name, dir_fd=handle, follow_symlinks=False).st_size
                os.unlink(name, dir_fd=handle)
                freed += num_bytes
    return freed


def _names(opened: OpenDirectory, *levels: str, is_directory: bool = True) -> list[str]:
    try:
        with opened(*levels) as handle:
            return _listed(handle, is_directory=is_directory)
    except OSError:
        return []


def _listed(directory: int, *, is_directory: bool) -> list[str]:
    with os.scandir(directory) as entries:
        return [e.name for e in entries if e.is_dir(follow_symlinks=False) is is_directory]
