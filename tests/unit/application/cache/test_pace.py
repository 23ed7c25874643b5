"""How background work leaves the interpreter to requests."""

import time

import pytest

from semantic.application.cache.pace import Pace

pytestmark = pytest.mark.unit


def work(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@pytest.mark.parametrize("share,pauses", [(1.0, 0), (0.5, 1), (0.1, 9)])
def test_pauses_are_as_long_as_the_share_asks(share: float, pauses: int) -> None:
    waited: list[float] = []

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        return False

    pace = Pace(wait, share)
    work(0.002)
    assert not pace()
    assert not pace()  # it has just paused
    (seconds,) = waited
    assert seconds == pytest.approx(pauses * 0.002, rel=0.5)


def test_the_wait_tells_that_the_work_should_end() -> None:
    pace = Pace(lambda _: True, 0.5)
    assert not pace()
    work(0.001)
    assert pace()
