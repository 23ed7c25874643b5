"""Waiting for conditions that other threads and processes fulfil."""

import time
from collections.abc import Callable


def eventually(
    condition: Callable[[], object], timeout_s: float = 60.0, *, every_s: float = 0.01
) -> bool:
    """Return whether a condition becomes true within `timeout_s`."""
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= until:
            return False
        time.sleep(every_s)
    return True


def await_that(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait until a condition is true.

    Raises:
        AssertionError: the condition was still false after `timeout_s`.
    """
    assert eventually(condition, timeout_s), f"the condition was still false after {timeout_s} s"
