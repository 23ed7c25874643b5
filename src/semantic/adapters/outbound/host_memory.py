"""Host memory for the KV cache: plain pages, or pages that a device reads and writes by itself.

A process has one device. Where that copies faster to and from memory of its own choosing, its
backend says so here, and what is read from files comes to lie there.
"""

import contextlib
import ctypes
import gc
import mmap
import os
from collections.abc import Callable

_HUGE_PAGE = 2**21
_M_ARENA_MAX = -8  # as in malloc.h

_device_memory: Callable[[int], memoryview | None] | None = None


def use_device_memory(allocate: Callable[[int], memoryview | None] | None) -> None:
    """Take memory from a device's own allocator from now on, where it has some; None ends that."""
    global _device_memory  # noqa: PLW0603 - one process, one device
    _device_memory = allocate


def allocate(num_bytes: int) -> memoryview:
    """Memory that begins with a page and is given back when nobody refers to it."""
    memory = _device_memory(num_bytes) if _device_memory is not None else None
    return plain_pages(num_bytes) if memory is None else memory


def plain_pages(num_bytes: int) -> memoryview:
    """Fresh pages, huge ones where that wastes little.

    First touch of small pages takes longer than the copying itself.
    """
    huge = -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE
    is_huge = huge - num_bytes <= num_bytes // 8 and hasattr(mmap, "MADV_HUGEPAGE")
    size = huge if is_huge else num_bytes
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    if is_huge:
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[:num_bytes]


def share_arenas() -> None:
    """Let threads allocate from one place a core instead of eight.

    Threads come and go with requests; what each leaves behind would keep a place of its own from
    going back to the system. With fewer than cores they wait for each other: tokenising in sixteen
    threads with two places took twenty times as long. Whoever sets MALLOC_ARENA_MAX decides
    otherwise.
    """
    if "MALLOC_ARENA_MAX" not in os.environ:
        _tell_malloc("mallopt", _M_ARENA_MAX, max(2, os.cpu_count() or 1))


def trim() -> None:
    """Return freed memory to the system, where the C library keeps it.

    What is kept for long lies between what came and went, so the library cannot do it by itself.
    """
    _tell_malloc("malloc_trim", 0)


def collect_and_trim() -> None:
    """Give back all that a model has left, circles of references too."""
    gc.collect()
    trim()


def _tell_malloc(function: str, *arguments: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # only glibc has it
        getattr(ctypes.CDLL("libc.so.6"), function)(*arguments)
