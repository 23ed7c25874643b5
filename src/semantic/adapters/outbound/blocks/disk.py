"""What the system does for files: memory to read into, writing for good, counting what is there."""

import contextlib
import fcntl
import mmap
import os
import stat
from collections.abc import Sequence
from pathlib import Path

_PIECES_AT_ONCE = 512  # systems take 1024 or more
_HUGE_PAGE = 2**21


def fresh_memory(num_bytes: int) -> memoryview:
    """Memory that begins with a page, in huge pages where that wastes little.

    First touch of small pages takes longer than the copying itself.
    """
    huge = -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE
    is_huge = huge - num_bytes <= num_bytes // 8 and hasattr(mmap, "MADV_HUGEPAGE")
    size = huge if is_huge else num_bytes
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    if is_huge:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[:num_bytes]


def read_ahead(file: int) -> None:
    """Tell the system that a whole file is about to be read."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)


def write_pieces(file: int, pieces: Sequence[bytes | memoryview]) -> int:
    """Write all pieces to a descriptor without joining them; returns the bytes written."""
    left = [memoryview(piece) for piece in pieces if len(piece)]
    total = sum(len(piece) for piece in left)
    while left:
        written = os.writev(file, left[:_PIECES_AT_ONCE])
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]
    return total


def sync_file(file: int) -> None:
    """Come back when a file's bytes would survive a power failure."""
    # Elsewhere than on Linux fsync may leave them in the disk's own cache.
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is None:
        os.fsync(file)
    else:
        fcntl.fcntl(file, full)


def keep_private(top: Path, skip: str = "") -> None:
    """Let only their owner use a directory and what is below it; follows no link.

    Args:
        top: Where to begin.
        skip: A directory that is passed over, wherever it is.
    """
    for _, directories, files, handle in os.fwalk(top, follow_symlinks=False):
        # First the directory: from then on nobody else changes what is in it.
        with contextlib.suppress(OSError):
            _restrict(".", handle)
        for name in files:
            with contextlib.suppress(OSError):
                _restrict(name, handle)
        directories[:] = [name for name in directories if name != skip]


def _restrict(name: str, directory: int) -> None:
    mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
    if (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) and mode & 0o077:
        os.chmod(name, stat.S_IMODE(mode) & 0o700, dir_fd=directory)


def tree_size(directory: Path, skip: str | tuple[str, ...]) -> int:
    """Bytes of all files below a directory, but for names that begin with (one of) `skip`.

    What vanishes meanwhile does not count.
    """
    total = 0
    try:
        with os.scandir(directory) as entries:
            found = list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return 0
    for entry in found:
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
