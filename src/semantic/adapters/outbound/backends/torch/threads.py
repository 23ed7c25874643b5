"""How many threads PyTorch gets for a step: as many as find a core of their own.

They wait for each other at the end of every operation, some hundred times a step, and spin.
Where other programs take the cores, one of them is always waiting for its turn and all others wait
with it: beside two busy loops on two cores, a step of five rows took four times as long with two
threads as with one. So a thread is given up when the kernel lets them wait, and taken back when a
core is idle. In float32 attention state was the same to the bit with one thread and two.

Reads Linux's own counts; elsewhere the number stays as it was chosen.
"""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_LOOK_EVERY_S = 0.5
_MOST_WAITING = 0.2  # of the time that our threads wanted to run
_LEAST_RUNNING = 0.1  # of a core; who hardly ran has not seen whether there are cores
_IDLE_CORE = 0.7
_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_NICE, _IDLE, _IOWAIT = 2, 4, 5  # fields of a processor's line; the first is its name


@dataclass(frozen=True, slots=True)
class CoreUse:
    """What the kernel has counted so far, in seconds.

    Attributes:
        running: In which a thread of this process ran.
        waiting: In which one could have run and had no core.
        idle: In which a core of ours had nothing to do, or only what gives way to others.
    """

    running: float
    waiting: float
    idle: float


def read_core_use() -> CoreUse | None:
    """Read the counts; None where there are none."""
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
    """The number of threads of the next step."""

    def __init__(
        self,
        most: int,
        read: Callable[[], CoreUse | None] = read_core_use,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with all of them.

        Args:
            most: Never more than so many.
            read: Counts of the kernel.
            clock: In seconds.
        """
        self.number = most
        self._most = most
        self._read = read
        self._clock = clock
        self._looked_at, self._last = clock(), read() if most > 1 else None

    def adapt(self) -> bool:
        """Look around, now and then; True if the number changed."""
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
        # A thread that has ended takes its counts along.
        running = max(seen.running - before.running, 0.0)
        waiting = max(seen.waiting - before.waiting, 0.0)
        is_busy = running > _LEAST_RUNNING * elapsed
        if is_busy and waiting > _MOST_WAITING * (running + waiting):
            return max(self.number - 1, 1)
        if seen.idle - before.idle > _IDLE_CORE * elapsed:
            return min(self.number + 1, self._most)
        return self.number
