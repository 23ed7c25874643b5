"""Host memory that a CUDA device reads and writes by itself, at the full speed of the link.

Pages are pinned in slabs, since that takes longer than copying into them, and holds up whoever
calls the device meanwhile: a thread does it while the model loads, a little before its weights are
read and the rest after, up to the memory budget for the KV cache, which comes to lie there.
Pieces go back when nobody refers to them any more, and are handed out again. What does not fit
travels as it would without any of this.
"""

import contextlib
import ctypes
import functools
import logging
import mmap
import os
import threading
import time
import weakref
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable

_LOG = logging.getLogger(__name__)

_SLAB = 2**28
_MAX_SHARE = 2  # no more than this part of the machine's memory is pinned
_PAGE = 4096
_PAUSE_S = 0.002
_FIRST_BYTES = 2**32  # enough for weights on their way
_PORTABLE_AND_MAPPED = 3
_POPULATE_WRITE = 23  # of madvise

Pin = Callable[[int, int], bool]  # an address and its bytes; False if the device does not take them


class PinnedMemory:
    """Pieces of pinned slabs. Thread-safe."""

    def __init__(self, pin: Pin, *, slab: int, limit: int) -> None:
        """Begin to pin.

        Args:
            pin: Makes pages of this process the device's.
            slab: Bytes that are pinned at once.
            limit: Bytes in all, at most.
        """
        self._pin = pin
        self._slab_bytes, self._limit = slab, limit
        self._slabs: list[tuple[int, int]] = []  # address and bytes, sorted
        self._memory: list[mmap.mmap] = []  # never given back: the device knows it
        self._free: list[tuple[int, int]] = []  # the same of what is free, neighbours joined
        self._returned: deque[tuple[int, int]] = deque()  # by whoever dropped the last reference
        self._lock = threading.Lock()
        self._growing = threading.Lock()
        self._has_time = threading.Event()
        threading.Thread(target=self._pin_all, name="semantic-pinning", daemon=True).start()

    def allocate(self, num_bytes: int) -> memoryview | None:
        """A piece that begins with a page; None if no more can be pinned."""
        size = max(-(-num_bytes // _PAGE), 1) * _PAGE
        address = self._take(size)
        if address is None:
            self._grow(max(size, self._slab_bytes))
            address = self._take(size)  # which the other thread may have pinned meanwhile
        if address is None:
            return None
        piece = (ctypes.c_ubyte * num_bytes).from_address(address)
        weakref.finalize(piece, self._returned.append, (address, size)).atexit = False
        return memoryview(piece).cast("B")

    def pin_rest(self) -> None:
        """Let the thread pin all there may be, beside whatever else is done; returns at once."""
        self._has_time.set()

    def holds(self, address: int, num_bytes: int) -> bool:
        """Whether bytes lie in it."""
        with self._lock:
            place = bisect_right(self._slabs, (address, 2**63)) - 1
            if place < 0:
                return False
            start, size = self._slabs[place]
        return address + num_bytes <= start + size

    @property
    def num_free(self) -> int:
        """Bytes that are pinned and not in use."""
        with self._lock:
            self._take_back()
            return sum(size for _, size in self._free)

    # -- inside ---------------------------------------------------------------------------------

    def _take(self, size: int) -> int | None:
        with self._lock:
            self._take_back()
            place = next((i for i, (_, free) in enumerate(self._free) if free >= size), None)
            address = None
            if place is not None:
                address, free = self._free.pop(place)
                if free > size:
                    self._free.insert(place, (address + size, free - size))
        return address

    def _take_back(self) -> None:
        while self._returned:
            start, size = self._returned.popleft()
            place = bisect_left(self._free, (start, 0))
            if place < len(self._free) and self._free[place][0] == start + size:
                size += self._free.pop(place)[1]
            if place and sum(self._free[place - 1]) == start:
                start, before = self._free.pop(place - 1)
                size += before
            insort(self._free, (start, size))

    def _grow(self, size: int) -> bool:
        """Pin one more slab; False if that is not possible, or would be too much."""
        with self._growing:
            if sum(held for _, held in self._slabs) + size > self._limit:
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
                _LOG.warning("no more host memory can be pinned; copies will be slower")
                self._limit = 0
                return False
            with self._lock:
                self._memory.append(memory)
                insort(self._slabs, (address, size))
                self._returned.append((address, size))
            return True

    def _pin_all(self) -> None:
        while self._grow(self._slab_bytes):
            time.sleep(_PAUSE_S)  # whoever waits for memory goes first
            if sum(held for _, held in self._slabs) >= _FIRST_BYTES:
                self._has_time.wait()


def _touch(address: int, size: int) -> None:
    """Have the kernel hand the pages out now, and not to the driver, which would hold others up."""
    with contextlib.suppress(OSError, AttributeError):  # Linux alone, and from 5.14 on
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _POPULATE_WRITE)


@functools.cache
def shared_memory(num_bytes: int) -> PinnedMemory | None:
    """The process's own, so large at most; None where there is no CUDA device."""
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
