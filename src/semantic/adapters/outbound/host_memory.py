"""Host memory for the KV cache: plain pages, or pinned pages that a device accesses directly.

A process uses one device. If the device copies faster to and from memory of its own allocator, the
backend registers that allocator here, and blocks are read from files into such memory.
"""

import contextlib
import ctypes
import functools
import gc
import mmap
import os
from collections.abc import Callable, Iterator

_HUGE_PAGE = 2**21
_M_ARENA_MAX = -8  # as in malloc.h

_device_memory: Callable[[int], memoryview | None] | None = None


def use_device_memory(allocate: Callable[[int], memoryview | None] | None) -> None:
    """Set the device's allocator; None goes back to plain pages.

    The allocator returns None if it has no memory, and `allocate` then uses plain pages.
    """
    global _device_memory  # noqa: PLW0603 - one process, one device
    _device_memory = allocate


def allocate(num_bytes: int) -> memoryview:
    """Allocate page-aligned memory, which is freed when its last reference is dropped."""
    memory = _device_memory(num_bytes) if _device_memory is not None else None
    return plain_pages(num_bytes) if memory is None else memory


def plain_pages(num_bytes: int) -> memoryview:
    """Allocate fresh pages, as huge pages where the rounding wastes at most an eighth.

    Faulting in small pages on first touch takes longer than the copy itself.
    """
    huge = -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE
    is_huge = huge - num_bytes <= num_bytes // 8 and hasattr(mmap, "MADV_HUGEPAGE")
    size = huge if is_huge else num_bytes
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    if is_huge:
        with contextlib.suppress(OSError):  # the kernel has no huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[:num_bytes]


def share_arenas() -> None:
    """Limit malloc to one arena per core (at least two); glibc's default is eight per core.

    Threads start and end with requests, and the allocations that each leaves in its own arena keep
    that arena from being returned to the system. Fewer arenas than cores cause lock contention:
    tokenising in sixteen threads with two arenas took twenty times as long. The environment
    variable MALLOC_ARENA_MAX takes precedence.
    """
    if "MALLOC_ARENA_MAX" not in os.environ:
        _tell_malloc("mallopt", _M_ARENA_MAX, max(2, os.cpu_count() or 1))


def trim() -> None:
    """Return freed memory from the C library to the system.

    The library does not do so by itself, because long-lived allocations lie between freed ones.
    """
    _tell_malloc("malloc_trim", 0)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Disable garbage collection while many lasting objects are created.

    It would scan those that are there again and again: half of the time that a start takes.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@functools.cache  # later in the process, models that will be freed could be among the objects
def freeze_libraries() -> None:
    """Exempt the objects of libraries, which stay loaded, from garbage collection, once.

    Scanning them would cost a decode step 40 ms and a swap 0.4 s.
    """
    gc.freeze()


def collect_and_trim() -> None:
    """Free what a model has left, including reference cycles, and return it to the system."""
    gc.collect()
    trim()


def _tell_malloc(function: str, *arguments: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # only glibc has it
        getattr(ctypes.CDLL("libc.so.6"), function)(*arguments)
