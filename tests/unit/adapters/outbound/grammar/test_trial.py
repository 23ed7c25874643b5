"""Grammars tried in worker processes, which always end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from semantic.adapters.outbound.backends.fake import FakeTokenizer
from semantic.adapters.outbound.grammar.trial import EXCEEDED, GrammarTrials
from semantic.adapters.outbound.grammar.vocabulary import TokenTable
from tests.waiting import await_that

pytestmark = pytest.mark.unit

GOOD = '%llguidance {}\nstart: "yes" | "no"'
BAD = "%llguidance {}\nstart: nobody"
ENDLESS = '%llguidance {}\nstart: %json {"type": "integer", "multipleOf": 99999989}'
# Starts a worker, says which process it is, and waits to be killed.
PARENT = f"""
import subprocess, time
from semantic.adapters.outbound.backends.fake import FakeTokenizer
from semantic.adapters.outbound.grammar.trial import GrammarTrials
from semantic.adapters.outbound.grammar.vocabulary import TokenTable
class Told(subprocess.Popen):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        print(self.pid, flush=True)
subprocess.Popen = Told
trials = GrammarTrials(TokenTable.of(FakeTokenizer()))
trials.fault({GOOD!r})
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def trials() -> GrammarTrials:
    return GrammarTrials(TokenTable.of(FakeTokenizer()))


def test_a_grammar_is_tried_and_its_fault_is_reported(trials: GrammarTrials) -> None:
    assert trials.fault(GOOD) == ""
    assert "nobody" in trials.fault(BAD)


def test_a_grammar_that_takes_too_much_ends_only_its_own_process(trials: GrammarTrials) -> None:
    assert trials.fault(ENDLESS) == EXCEEDED
    assert trials.fault(ENDLESS) == EXCEEDED  # known by now
    assert trials.fault(GOOD + ' | "maybe"') == ""


def test_a_worker_imports_no_backend() -> None:
    code = (
        "import sys, semantic.adapters.outbound.grammar.trial; "
        "print([m for m in ('torch', 'mlx', 'transformers', 'fastapi') if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    told = subprocess.run(  # noqa: S603 - our own code
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    assert told.stdout.strip() == "[]"


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks a process up in /proc")
def test_a_worker_ends_with_its_server_however_that_ends() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(  # noqa: S603 - our own code
        [sys.executable, "-c", PARENT], env=environment, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert parent.stdout.readline() == "ready\n"
        assert is_alive(worker)
        parent.send_signal(signal.SIGKILL)
    await_that(lambda: not is_alive(worker))


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # before it is opened, or after that
        return False
    return state != "Z"
