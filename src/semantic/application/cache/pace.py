"""Paces background work, so that it does not keep the interpreter's lock from requests."""

import time
from collections.abc import Callable

_SLICE_S = 0.0004  # the least work between two pauses


class Pace:
    """Call it after each small piece of work: it pauses now and then.

    Only the thread's own CPU time counts as work.
    """

    def __init__(self, wait: Callable[[float], bool], share: float) -> None:
        """Set what pauses, and how much of a core to take.

        Args:
            wait: Pauses for some seconds, or until something happens, and then returns True.
            share: Of a core's time; 1 never pauses.
        """
        self._wait = wait
        self._pauses = 1 / share - 1  # seconds for each second of work
        self._since = time.thread_time()

    def __call__(self) -> bool:
        """Pause if it is time; returns what the wait returned."""
        worked_s = time.thread_time() - self._since
        if worked_s < _SLICE_S:
            return False
        is_ended = self._wait(worked_s * self._pauses)
        self._since = time.thread_time()
        return is_ended
