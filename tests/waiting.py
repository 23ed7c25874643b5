"""Waiting for what other threads and processes do."""

import time
from collections.abc import Callable


def eventually(
    condition: Callable[[], object], timeout_s: float = 60.0, *, every_s: float = 0.01
) -> bool:
    """Whether a condition comes to hold in time."""
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= until:
            return False
        time.sleep(every_s)
    return True


def await_that(condition: Callable[[], object]) -> None:
    """Wait until a condition holds.

    Raises:
        AssertionError: it never did.
    """
    assert eventually(condition), "it never came true"
