import subprocess
import sys

import pytest

from semantic.adapters.outbound.backends.torch.threads import CoreUse, ThreadCount

pytestmark = pytest.mark.unit


class Machine:
    """Counts of a kernel, and a clock, that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.use: CoreUse | None = CoreUse(0, 0, 0)

    def read(self) -> CoreUse | None:
        return self.use

    def go_on(self, running: float, waiting: float, idle: float, seconds: float = 1.0) -> None:
        assert self.use is not None
        self.now += seconds
        self.use = CoreUse(
            self.use.running + running, self.use.waiting + waiting, self.use.idle + idle
        )


def count(machine: Machine, most: int) -> ThreadCount:
    return ThreadCount(most, machine.read, lambda: machine.now)


def test_threads_are_given_up_one_by_one_while_others_have_the_cores() -> None:
    machine = Machine()
    threads = count(machine, 3)
    seen = []
    for _ in range(4):
        machine.go_on(running=1, waiting=1, idle=0)
        seen.append((threads.adapt(), threads.number))
    assert seen == [(True, 2), (True, 1), (False, 1), (False, 1)]


@pytest.mark.parametrize(
    "running,waiting,idle,number",
    [
        pytest.param(1.0, 0.1, 0.9, 2, id="a core is idle"),
        pytest.param(1.0, 0.1, 0.3, 1, id="no core is idle for long"),
        pytest.param(0.0, 0.0, 2.0, 2, id="nothing ran"),
        pytest.param(0.5, 0.5, 0.9, 1, id="idle at times, and yet ours waited"),
    ],
)
def test_a_thread_is_taken_back_for_an_idle_core(
    running: float, waiting: float, idle: float, number: int
) -> None:
    machine = Machine()
    threads = count(machine, 2)
    machine.go_on(running=1, waiting=1, idle=0)
    assert threads.adapt()
    machine.go_on(running, waiting, idle)
    threads.adapt()
    assert threads.number == number


@pytest.mark.parametrize(
    "running,waiting,seconds",
    [
        pytest.param(0.01, 0.05, 10, id="threads hardly ran"),
        pytest.param(0.1, 0.1, 0.1, id="too soon after the last look"),
    ],
)
def test_the_number_stays_after_too_little_use(
    running: float, waiting: float, seconds: float
) -> None:
    machine = Machine()
    threads = count(machine, 2)
    machine.go_on(running, waiting, idle=0, seconds=seconds)
    assert not threads.adapt()


def test_where_nothing_is_counted_the_number_stays() -> None:
    machine = Machine()
    machine.use = None
    threads = count(machine, 4)
    machine.now = 10
    assert (threads.adapt(), threads.number) == (False, 4)


# In a process of its own: what threads counted goes with them, and others leave some behind.
LOOK_TWICE = """
from semantic.adapters.outbound.backends.torch.threads import read_core_use
before = read_core_use()
sum(range(2_000_000))
after = read_core_use()
print(after.running > before.running, after.waiting >= before.waiting, after.idle > 0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux counts")
def test_the_kernels_counts_grow() -> None:
    command = [sys.executable, "-c", LOOK_TWICE]
    told = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - our own
    assert told.stdout.split() == ["True"] * 3
