"""Pinned host memory, which a CUDA device reads and writes directly at the link's full speed.

Pages are pinned in slabs, because pinning takes longer than copying and blocks other device calls
meanwhile. A thread pins in the background while the model loads: a small part before the weights
are read, and the rest afterwards, up to the memory budget of the KV cache, which is stored there. A
piece of a slab is free again when its last reference ends. Data that does not fit is copied from
pageable memory.
"""

import contextlib
import ctypes
import functools
import logging
import mmap
import os
import sys
import threading
import time
import weakref
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable

_LOG = logging.getLogger(__name__)

_SLAB = 2**28
_MAX_SHARE = 2  # at most one part in this many of the machine's memory is pinned
_PAGE = 4096
_PAUSE_S = 0.002
_FIRST_BYTES = 2**32  # enough to transfer weights
_PORTABLE_AND_MAPPED = 3
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of madvise

Pin = Callable[[int, int], bool]  # of an address and a size in bytes; False if the device refuses


class ArrivingBytes:
    """Pinned memory that a running copy writes to; see `PendingBytes`."""

    def __init__(self, memory: memoryview, wait: Callable[[], None]) -> None:
        """Wrap memory that a copy writes to.

        `wait` waits for the copy without blocking other threads; raises `CacheCorruptionError` if
        the copy failed.
        """
        self._memory = memory
        self._wait = wait

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def wait(self) -> memoryview:
        self._wait()
        return self._memory


class FreePieces:
    """The free pieces of slabs, by address. Not thread-safe.

    The device registers each slab separately and rejects a copy across two of them, so a piece
    never extends from one slab into the next, even if their addresses are adjacent.
    """

    def __init__(self) -> None:
        self._slabs: list[tuple[int, int]] = []  # address and bytes, sorted
        self._starts: set[int] = set()
        self._free: list[tuple[int, int]] = []  # address and bytes, sorted, neighbours joined

    @property
    def num_bytes(self) -> int:
        """Size of all slabs in bytes."""
        return sum(size for _, size in self._slabs)

    @property
    def num_free(self) -> int:
        return sum(size for _, size in self._free)

    def add_slab(self, address: int, size: int) -> None:
        insort(self._slabs, (address, size))
        self._starts.add(address)
        self.free(address, size)

    def holds(self, address: int, num_bytes: int) -> bool:
        """Whether a range lies within one slab."""
        place = bisect_right(self._slabs, (address, sys.maxsize)) - 1
        if place < 0:
            return False
        start, size = self._slabs[place]
        return address + num_bytes <= start + size

    def allocate(self, size: int) -> int | None:
        """Allocate from the first piece that is large enough; returns the address, or None."""
        place = next((i for i, (_, free) in enumerate(self._free) if free >= size), None)
        if place is None:
            return None
        address, free = self._free.pop(place)
        if free > size:
            self._free.insert(place, (address + size, free - size))
        return address

    def free(self, start: int, size: int) -> None:
        """Free a piece and join it with free neighbours in its slab."""
        place, end = bisect_left(self._free, (start, 0)), start + size
        if place < len(self._free) and self._free[place][0] == end and end not in self._starts:
            size += self._free.pop(place)[1]
        if place and sum(self._free[place - 1]) == start and start not in self._starts:
            start, before = self._free.pop(place - 1)
            size += before
        insort(self._free, (start, size))


class PinnedMemory:
    """Allocates pieces of pinned slabs. Thread-safe."""

    def __init__(self, pin: Pin, *, slab: int, limit: int) -> None:
        """Start to pin in the background: `slab` bytes at once, at most `limit` bytes in total."""
        self._pin = pin
        self._slab_bytes, self._limit = slab, limit
        self._pieces = FreePieces()
        self._memory: list[mmap.mmap] = []  # never unmapped: the device has registered it
        self._returned: deque[tuple[int, int]] = deque()  # appended when a last reference ends
        self._lock = threading.Lock()
        self._growing = threading.Lock()
        self._has_time = threading.Event()
        threading.Thread(target=self._pin_all, name="semantic-pinning", daemon=True).start()

    def allocate(self, num_bytes: int) -> memoryview | None:
        """Allocate a page-aligned piece; None if no more memory can be pinned."""
        size = max(-(-num_bytes // _PAGE), 1) * _PAGE
        address = self._allocate(size)
        if address is None:
            self._grow(max(size, self._slab_bytes))
            address = self._allocate(size)  # also succeeds if the other thread has pinned a slab
        if address is None:
            return None
        piece = (ctypes.c_ubyte * num_bytes).from_address(address)
        weakref.finalize(piece, self._returned.append, (address, size)).atexit = False
        return memoryview(piece).cast("B")

    def pin_rest(self) -> None:
        """Let the background thread pin all memory up to the limit; returns at once."""
        self._has_time.set()

    def holds(self, address: int, num_bytes: int) -> bool:
        with self._lock:
            return self._pieces.holds(address, num_bytes)

    @property
    def num_free(self) -> int:
        """Bytes that are pinned and not in use."""
        with self._lock:
            self._collect_freed()
            return self._pieces.num_free

    # -- inside ---------------------------------------------------------------------------------

    @property
    def _num_pinned(self) -> int:
        with self._lock:
            return self._pieces.num_bytes

    def _allocate(self, size: int) -> int | None:
        with self._lock:
            self._collect_freed()
            return self._pieces.allocate(size)

    def _collect_freed(self) -> None:
        while self._returned:
            self._pieces.free(*self._returned.popleft())

    def _grow(self, size: int) -> bool:
        """Pin one more slab; False if that fails or exceeds the limit."""
        with self._growing:
            if self._num_pinned + size > self._limit:
                return False
            try:
                memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
            except OSError:
                return False
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
            _touch(address, size)
            if not self._pin(address, size):
                _LOG.warning("cannot pin more host memory; further copies are slower")
                self._limit = 0
                return False
            with self._lock:
                self._memory.append(memory)
                self._pieces.add_slab(address, size)
            return True

    def _pin_all(self) -> None:
        while self._grow(self._slab_bytes):
            time.sleep(_PAUSE_S)  # let threads that wait in `allocate` go first
            if self._num_pinned >= _FIRST_BYTES:
                self._has_time.wait()


def _touch(address: int, size: int) -> None:
    """Populate the pages now: if the driver did it, it would block other calls for longer."""
    with contextlib.suppress(OSError, AttributeError):  # Linux 5.14 or later
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _POPULATE_WRITE)


@functools.cache
def shared_memory(num_bytes: int) -> PinnedMemory | None:
    """Return the process-wide pinned memory of at most this size; None without a CUDA device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    context = ctypes.c_void_p()
    if driver.cuInit(0) or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0):
        return None

    def pin(address: int, size: int) -> bool:
        if driver.cuCtxSetCurrent(context):
            return False
        flags = ctypes.c_uint(_PORTABLE_AND_MAPPED)
        place, num_bytes = ctypes.c_void_p(address), ctypes.c_size_t(size)
        return bool(driver.cuMemHostRegister_v2(place, num_bytes, flags) == 0)

    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return PinnedMemory(pin, slab=_SLAB, limit=min(num_bytes, whole // _MAX_SHARE))
