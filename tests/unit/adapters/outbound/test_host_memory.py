"""Freed memory returns to the system, although kept memory lies in between."""

import gc
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from semantic.adapters.outbound import host_memory

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has it"),
]

# How many places threads have allocated from, as the C library tells it.
COUNT_ARENAS = """
import ctypes, sys, threading
from semantic.adapters.outbound import host_memory
host_memory.share_arenas()
libc, everyone = ctypes.CDLL("libc.so.6"), threading.Barrier(6)
def allocate():
    everyone.wait()
    kept.append(bytearray(5000))
    everyone.wait()
kept, threads = [], [threading.Thread(target=allocate) for _ in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc.fopen.restype = ctypes.c_void_p
told = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, told), libc.fclose(told)
"""


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_freed_memory_between_what_is_kept_is_given_back() -> None:
    pieces = [bytearray(b"x" * 40_000) for _ in range(2000)]  # 76 MB, too small for maps of its own
    kept = pieces[::20]
    del pieces
    gc.collect()
    before = resident_mb()
    host_memory.trim()
    assert resident_mb() < before - 40
    assert all(piece[0] == ord("x") for piece in kept)


@pytest.mark.parametrize("environment,is_few", [({}, True), ({"MALLOC_ARENA_MAX": "16"}, False)])
def test_threads_share_what_they_allocate_from(
    environment: dict[str, str], is_few: bool, tmp_path: Path
) -> None:
    told = tmp_path / "arenas.xml"
    env = {**os.environ, **environment}
    subprocess.run([sys.executable, "-c", COUNT_ARENAS, str(told)], check=True, env=env)  # noqa: S603 - our own
    assert (told.read_text().count("<heap nr=") <= 2) == is_few


@pytest.mark.parametrize("is_enabled", [True, False])
def test_collection_is_as_before_after_a_pause(*, is_enabled: bool) -> None:
    (gc.enable if is_enabled else gc.disable)()
    try:
        with host_memory.without_collection():
            assert not gc.isenabled()
        assert gc.isenabled() is is_enabled
    finally:
        gc.enable()
