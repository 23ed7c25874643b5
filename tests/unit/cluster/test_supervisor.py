"""The supervisor of `semantic cluster`, with commands that stand for Ray's driver."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.waiting import eventually

pytestmark = pytest.mark.unit

_SUPERVISE = """
import sys
from semantic.cluster.entrypoints import supervisor
supervisor._FIRST_DELAY_S = 0.05
command = [sys.executable, "-c", sys.argv[1]]
sys.exit(supervisor.Supervisor(command, {"log": sys.argv[2]}).run())
"""
# Writes "PID is_restart" to the log, and starts a process that would outlive it.
_DRIVER = """
import os, signal, subprocess, sys, time
from multiprocessing.connection import Connection
link = Connection(int(sys.argv[1]))
os.dup(link.fileno())
options, is_restart = link.recv()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
def note(*words):
    with open(options["log"], "a") as log:
        log.write(" ".join(map(str, words)) + "\\n")
"""
_READY = _DRIVER + "link.send_bytes(b'ready')\nnote(os.getpid(), child.pid, is_restart)\n"
_WAIT = _READY + "link.poll(None)\nnote('orphaned')\n"
_STOPS = (
    _DRIVER
    + """
def stop(*_):
    note("stopped")
    sys.exit(0)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
link.send_bytes(b"ready")
note(os.getpid(), child.pid, is_restart)
time.sleep(600)
"""
)
_STUBBORN = _STOPS.replace('note("stopped")\n    sys.exit(0)', 'note("asked")').replace(
    "time.sleep(600)\n", "while True:\n    time.sleep(600)\n"
)


class Supervised:
    """A supervisor in a process of its own, and what its command has noted."""

    def __init__(self, directory: Path, driver: str) -> None:
        self.log, self._output = directory / "noted", directory / "output"
        self.log.touch()
        with self._output.open("w") as sink:
            self.process = subprocess.Popen(  # noqa: S603 - our own
                [sys.executable, "-c", _SUPERVISE, driver, str(self.log)],
                stdout=sink,
                stderr=subprocess.STDOUT,
            )

    def await_lines(self, number: int) -> list[str]:
        assert eventually(lambda: len(self.lines) >= number), (self.lines, self.output)
        return self.lines

    @property
    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    @property
    def output(self) -> str:
        return self._output.read_text()


Supervise = Callable[[str], Supervised]


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Supervise]:
    with contextlib.ExitStack() as stack:

        def start(driver: str) -> Supervised:
            made = Supervised(tmp_path, driver)
            stack.callback(made.process.wait)
            stack.callback(made.process.kill)
            return made

        yield start


def pids(line: str) -> list[int]:
    return [int(word) for word in line.split()[:2]]


def are_gone(numbers: list[int]) -> bool:
    return eventually(lambda: not any(is_running(pid) for pid in numbers))


def is_running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        # Whoever adopts it may not have waited for it yet.
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def test_a_driver_that_is_killed_is_replaced_and_leaves_nothing_behind(
    supervise: Supervise,
) -> None:
    supervised = supervise(_STOPS)
    (first,) = supervised.await_lines(1)
    assert first.endswith("False")
    os.kill(pids(first)[0], signal.SIGKILL)
    _, second = supervised.await_lines(2)
    assert second.endswith("True")
    assert are_gone(pids(first))
    assert "restarting: in 0.05 s, attempt 1 (exit status -9)" in supervised.output
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.process.wait(60) == 0
    assert supervised.lines[-1] == "stopped"
    assert are_gone(pids(second))


def test_a_delay_doubles_while_restarts_fail(supervise: Supervise) -> None:
    driver = _DRIVER + "note(is_restart)\nif not is_restart: link.send_bytes(b'ready')\nos._exit(3)"
    supervised = supervise(driver)
    assert supervised.await_lines(4)[:4] == ["False", *["True"] * 3]
    for number, delay_s in enumerate((0.05, 0.1, 0.2), 1):
        assert f"in {delay_s} s, attempt {number} (exit status 3)" in supervised.output
    supervised.process.send_signal(signal.SIGINT)
    supervised.process.wait(60)


def test_a_first_start_that_fails_is_not_repeated(supervise: Supervise) -> None:
    supervised = supervise(_DRIVER + "note('once')\nsys.exit(2)\n")
    assert supervised.process.wait(60) == 2
    assert supervised.lines == ["once"]
    assert supervised.output == ""


def test_a_third_signal_ends_a_driver_that_does_not_stop(supervise: Supervise) -> None:
    supervised = supervise(_STUBBORN)
    (first,) = supervised.await_lines(1)
    for number in (2, 3):
        supervised.process.send_signal(signal.SIGINT)
        supervised.await_lines(number)
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.process.wait(60) == 128 + signal.SIGKILL
    assert supervised.lines[1:] == ["asked"] * 2
    assert are_gone(pids(first))


def test_a_driver_learns_that_its_supervisor_was_killed(supervise: Supervise) -> None:
    supervised = supervise(_WAIT)
    (first,) = supervised.await_lines(1)
    supervised.process.kill()
    supervised.process.wait()
    assert supervised.await_lines(2)[1] == "orphaned"
    os.kill(pids(first)[1], signal.SIGKILL)
