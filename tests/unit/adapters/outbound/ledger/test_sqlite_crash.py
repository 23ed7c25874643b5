"""Processes that die while they write, and what reaches the disk when."""

import random
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from tests.unit.adapters.outbound.ledger.ledger_values import agent_of, turn_of

pytestmark = pytest.mark.unit

WRITER = """
import sys
from pathlib import Path
from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.ports.storage import PutAgent, PutTurn
from tests.unit.adapters.outbound.ledger.ledger_values import agent_of, turn_of

ledger = SqliteLedger(Path(sys.argv[1]))
ledger.load()
first, index = int(sys.argv[2]), int(sys.argv[2])
while True:
    parent = f"t{index - 1}" if index else None
    turn = turn_of(f"t{index}", parent, text=f"{index} " * 700)
    changes = [PutTurn("local", turn), PutAgent(agent_of("coder", turn.id, index + 1))]
    ledger.apply(changes, is_synced=index % 7 == 0)
    print(index, flush=True)
    if index % 40 == 0:
        ledger.back_up()
    index += 1
"""


def write_until_killed(directory: Path, first: int, num_lines: int) -> int:
    """Let another process write from turn `first` on; returns the last turn it acknowledged."""
    process = subprocess.Popen(  # noqa: S603 - our own command
        [sys.executable, "-c", WRITER, str(directory), str(first)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    for _ in range(num_lines):
        assert process.stdout.readline()
    # In the midst of whatever it does now.
    process.kill()
    rest = process.stdout.read().split("\n")
    process.wait()
    process.stdout.close()
    # A last line without its end was not acknowledged.
    return max([first + num_lines - 1, *(int(line) for line in rest[:-1])])


@pytest.mark.parametrize("seed", range(2))
def test_every_acknowledged_change_survives_kill_9(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    first = 0
    for _ in range(3):
        last = write_until_killed(tmp_path, first, chance.randrange(1, 150))
        with closing(SqliteLedger(tmp_path)) as ledger:
            state = ledger.load()
            assert state.problem == ""
            (agent,) = state.agents
            # The one after it may have been written and not acknowledged.
            assert agent.num_turns - 1 in (last, last + 1)
            assert agent == agent_of("coder", f"t{agent.num_turns - 1}", agent.num_turns)
            log = ledger.turns("local", f"t{agent.num_turns - 1}", limit=10_000)
        assert len(log) == agent.num_turns
        for index, turn in enumerate(reversed(log)):
            parent = f"t{index - 1}" if index else None
            assert turn == turn_of(f"t{index}", parent, text=f"{index} " * 700)
        first = agent.num_turns


SYNCS = """
import os, sys
from pathlib import Path
from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.ports.storage import PutTenant, Tenant

ledger = SqliteLedger(Path(sys.argv[1]))
ledger.load()
for mark, changes, is_synced in (
    ("put", [PutTenant(Tenant("a", b""))], False),
    ("put synced", [PutTenant(Tenant("b", b""))], True),
    ("put again", [PutTenant(Tenant("c", b""))], False),
    ("nothing synced", [], True),
):
    os.write(2, b"< " + mark.encode())
    ledger.apply(changes, is_synced=is_synced)
    os.write(2, b">")
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace to see system calls")
def test_a_synced_change_is_synced_and_another_is_not(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    strace = ["strace", "-f", "-o", str(trace), "-e", "trace=fsync,fdatasync,write"]
    command = [*strace, sys.executable, "-c", SYNCS, str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)  # noqa: S603
    if done.returncode and "ptrace" in done.stderr:
        pytest.skip("this system forbids tracing")

    num_syncs: dict[str, int] = {}
    mark = ""
    for line in trace.read_text().splitlines():
        if 'write(2, "' in line:
            mark = line.split('"')[1]
        elif "sync(" in line and mark.startswith("<"):
            num_syncs[mark] = num_syncs.get(mark, 0) + 1
    # A synced change with nothing in it makes the earlier ones durable.
    assert num_syncs == {"< put synced": 1, "< nothing synced": 1}
