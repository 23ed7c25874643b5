"""How many threads PyTorch uses for a step: as many as have a core of their own.

PyTorch's threads synchronise at the end of every operation, some hundred times per step, by
spinning. If other programs use the cores, one thread always waits to be scheduled and all others
wait for it: beside two busy loops on two cores, a step of five rows took four times as long with
two threads as with one. `ThreadCount` therefore removes a thread when the kernel makes them wait
for a core, and adds one when a core is idle. In float32, the KV cache was bit-identical with
one and two threads.

Only models that PyTorch runs on a CPU need this. In the native library, threads take over the work
of those that wait for a core, so a decode step there always uses all threads.

The counts come from Linux's `/proc`; elsewhere the number does not change.
"""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_LOOK_EVERY_S = 0.5
_MOST_WAITING = 0.2  # share of the time that our threads were runnable
_LEAST_RUNNING = 0.1  # of a core; below this the counts say nothing about free cores
_IDLE_CORE = 0.7
_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_NICE, _IDLE, _IOWAIT = 2, 4, 5  # fields of a CPU's line in /proc/stat; field 0 is its name


@dataclass(frozen=True, slots=True)
class CoreUse:
    """The kernel's scheduling counts so far, in seconds.

    Attributes:
        running: Time in which threads of this process ran.
        waiting: Time in which they were runnable and had no core.
        idle: Time in which the process's cores were idle or ran only low-priority (nice) work.
    """

    running: float
    waiting: float
    idle: float


def read_core_use() -> CoreUse | None:
    """Read the counts; None if the system does not provide them."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        counts = [
            [int(word) for word in (task / "schedstat").read_text().split()]
            for task in Path("/proc/self/task").iterdir()
        ]
        ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        idle = sum(
            int(line[field])
            for line in lines
            if line[0] in ours
            for field in (_NICE, _IDLE, _IOWAIT)
        )
        running, waiting = (sum(count[field] for count in counts) / 1e9 for field in (0, 1))
        return CoreUse(running, waiting, idle / _TICKS_PER_S)
    return None


class ThreadCount:
    """Adapts the number of threads from step to step."""

    def __init__(
        self,
        most: int,
        read: Callable[[], CoreUse | None] = read_core_use,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.number = most
        self._most = most
        self._read = read
        self._clock = clock
        self._looked_at, self._last = clock(), read() if most > 1 else None

    def adapt(self) -> bool:
        """Read the counts if enough time has passed, and adapt; True if the number changed."""
        now = self._clock()
        if self._last is None or now - self._looked_at < _LOOK_EVERY_S:
            return False
        seen, before = self._read(), self._last
        elapsed, self._looked_at, self._last = now - self._looked_at, now, seen
        if seen is None:
            return False
        number = self._next(seen, before, elapsed)
        has_changed, self.number = number != self.number, number
        return has_changed

    def _next(self, seen: CoreUse, before: CoreUse, elapsed: float) -> int:
        # The counts of a thread that has ended disappear, so the sums can decrease.
        running = max(seen.running - before.running, 0.0)
        waiting = max(seen.waiting - before.waiting, 0.0)
        is_busy = running > _LEAST_RUNNING * elapsed
        if is_busy and waiting > _MOST_WAITING * (running + waiting):
            return max(self.number - 1, 1)
        if seen.idle - before.idle > _IDLE_CORE * elapsed:
            return min(self.number + 1, self._most)
        return self.number
