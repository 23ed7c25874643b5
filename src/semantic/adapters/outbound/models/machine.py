"""What this machine offers to models (memory and its bandwidth), and which models suit it."""

import functools
import os
import platform
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from semantic.adapters.outbound.models.known import known_models
from semantic.domain.model_names import Suggestion, suggest

_CGROUP = Path("/sys/fs/cgroup/memory.max")
_PROBE_BYTES = 2**26  # per thread; larger than caches
_ROUNDS = 4
_RESERVED_BYTES = 2 * 2**30  # for the system and other programs


def machine_memory() -> int:
    """Bytes of memory available to this process: the machine's, or its container's limit."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        allowed = _CGROUP.read_text("ascii").strip()
    except OSError:
        return total
    return min(total, int(allowed)) if allowed.isdecimal() else total


def read_bandwidth(num_threads: int = 0) -> float:
    """Measure how many bytes all cores together read from memory in a second, in about 0.3 s."""
    num_threads = num_threads or os.cpu_count() or 1
    arrays = [np.ones(_PROBE_BYTES // 8) for _ in range(num_threads)]
    best = 0.0
    with ThreadPoolExecutor(num_threads) as threads:
        for _ in range(_ROUNDS):
            started = time.perf_counter()
            list(threads.map(np.max, arrays))  # numpy releases the GIL
            seconds = time.perf_counter() - started
            best = max(best, num_threads * _PROBE_BYTES / seconds)
    return best


def gpu_memory() -> int:
    """Bytes of memory of the first NVIDIA GPU; 0 if there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    query = ["--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(  # noqa: S603 - a program of the driver
        [program, *query], capture_output=True, text=True, check=False
    )
    first = done.stdout.strip().partition("\n")[0]
    return int(first) * 2**20 if first.isdecimal() else 0


@functools.cache
def suggestions(*, is_on_gpu: bool) -> tuple[Suggestion, ...]:
    """Judge the known models for this machine; measures it once.

    Args:
        is_on_gpu: Models run on an NVIDIA GPU, whose speed is not measured.
    """
    if is_on_gpu and (memory := gpu_memory()):
        return suggest(known_models(), memory - _RESERVED_BYTES, None)
    memory = machine_memory()
    if platform.system() == "Darwin":
        memory = memory * 2 // 3  # the part that macOS lets a GPU use, on machines of up to 36 GB
    return suggest(known_models(), memory - _RESERVED_BYTES, read_bandwidth())
