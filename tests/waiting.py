"""Waiting for conditions that other threads and processes fulfil."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator


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


@contextlib.contextmanager
def repeating(action: Callable[[], object]) -> Iterator[None]:
    """Repeat an action in a thread, with pauses of 0.05 s, until the block ends."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(0.05):
            action()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
