"""Memory goes back to the system, although what is kept lies between what was freed."""

import gc
import os
import platform
from pathlib import Path

import pytest

from semantic.adapters.outbound import host_memory

pytestmark = pytest.mark.unit


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has it")
def test_freed_memory_between_what_is_kept_is_given_back() -> None:
    pieces = [bytearray(b"x" * 40_000) for _ in range(2000)]  # 76 MB, too small for maps of its own
    kept = pieces[::20]
    del pieces
    gc.collect()
    before = resident_mb()
    host_memory.trim()
    assert resident_mb() < before - 40
    assert all(piece[0] == ord("x") for piece in kept)
