"""What the ledger costs: opening one of ordinary size, adding turns, and backing it up.

The ledger holds 1,000 agents, 5,000 turns of half a thousand tokens and 20,000 parts of 256.

Run with `python -m benchmarks.bench_ledger`; the exit code is 1 if the target is missed.
"""

import os
import random
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.common import Target, seconds, verdict
from semantic.adapters.outbound.ledger.sqlite import LEDGER_FILE, SqliteLedger
from semantic.domain.agents import Agent, Pointer, Turn
from semantic.domain.blocks import BlockName, BlockPart, block_name, pack_tokens
from semantic.domain.chat import Message, Role
from semantic.domain.events import Usage
from semantic.domain.spec import LayerKind
from semantic.ports.storage import (
    LedgerChange,
    PutAgent,
    PutPart,
    PutReplay,
    PutTenant,
    PutTurn,
    Tenant,
    TouchParts,
)

NUM_AGENTS, NUM_PARTS, NUM_TURNS, NUM_APPLIED, ROUNDS = 1_000, 20_000, 5_000, 400, 5
TARGET_LOAD_S = 1.0
ROOT = BlockName(bytes(32))
TEXT = "def f(x):\n    return x + 1  # what an agent reads and writes all day\n" * 30


def make_turn(index: int, tokens: list[int]) -> Turn:
    """A question and an answer of about two thousand characters each."""
    said = (Message.of(Role.USER, f"{index} {TEXT}"), Message.of(Role.ASSISTANT, TEXT))
    return Turn(
        id=f"turn_{index:08}",
        parent=f"turn_{index - NUM_AGENTS:08}" if index >= NUM_AGENTS else None,
        agent_id=f"agent-{index % NUM_AGENTS}",
        messages=said,
        tokens=tuple(tokens),
        num_tokens=len(tokens),
        pointer=Pointer(ROOT, block_name(ROOT, [index]), len(tokens)),
        usage=Usage(len(tokens), 250),
        created_at=float(index),
    )


def make_part(index: int, tokens: list[int]) -> BlockPart:
    """A full block of 256 tokens."""
    packed = pack_tokens([index, *tokens[:255]])
    name = block_name(ROOT, [index])
    return BlockPart(ROOT, name, ROOT, LayerKind.FULL, 0, packed, 2**23, float(index))


def fill(ledger: SqliteLedger, tokens: list[int]) -> None:
    """Make the ledger of ordinary size."""
    changes: list[LedgerChange] = [PutTenant(Tenant("local", os.urandom(32)))]
    changes += [PutTurn("local", make_turn(index, tokens)) for index in range(NUM_TURNS)]
    for index in range(NUM_AGENTS):
        head = f"turn_{NUM_TURNS - NUM_AGENTS + index:08}"
        agent = Agent(f"agent-{index}", created_at=0.0, head=head, num_turns=5)
        changes.append(PutAgent(agent))
    changes += [PutPart(make_part(index, tokens)) for index in range(NUM_PARTS)]
    ledger.apply(changes, is_synced=True)


def commit(index: int, tokens: list[int]) -> list[LedgerChange]:
    """What the end of one turn writes."""
    turn = make_turn(NUM_TURNS + index, tokens)
    parts = [make_part(NUM_PARTS + 2 * index + offset, tokens) for offset in range(2)]
    return [
        PutTurn("local", turn),
        PutAgent(Agent(turn.agent_id, 0.0).advance(turn.id, at=turn.created_at)),
        PutReplay("local", os.urandom(32), turn.tokens[:250], turn.created_at),
        *(PutPart(part) for part in parts),
        TouchParts(tuple(part.key for part in parts), turn.created_at),
    ]


def load_time(directory: Path) -> float:
    """How long a new server waits for its ledger."""
    ledger = SqliteLedger(directory)
    elapsed = seconds(ledger.load)
    ledger.close()
    return elapsed


def apply_rate(ledger: SqliteLedger, tokens: list[int], first: int, *, is_synced: bool) -> float:
    """Turns a second, each in a transaction of its own."""
    batches = [commit(first + index, tokens) for index in range(NUM_APPLIED)]

    def write() -> None:
        for batch in batches:
            ledger.apply(batch, is_synced=is_synced)

    return NUM_APPLIED / seconds(write)


def main() -> int:
    """Print the figures and the verdict."""
    tokens = [random.Random(0).randrange(2**17) for _ in range(500)]  # noqa: S311
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        ledger = SqliteLedger(directory)
        ledger.load()
        print(f"filling takes {seconds(lambda: fill(ledger, tokens)):.2f} s")
        ledger.close()
        print(f"{LEDGER_FILE}: {(directory / LEDGER_FILE).stat().st_size / 2**20:.0f} MiB")
        loads = [load_time(directory) for _ in range(ROUNDS)]
        ledger.load()
        for is_synced in (False, True):
            rate = apply_rate(ledger, tokens, NUM_APPLIED * is_synced, is_synced=is_synced)
            print(f"turns a second, {'synced' if is_synced else 'not synced'}: {rate:.0f}")
        print(f"all pointers: {1e3 * seconds(ledger.pointers):.0f} ms")
        head = f"turn_{NUM_TURNS - 1:08}"
        log = seconds(lambda: ledger.turns("local", head, limit=100))
        print(f"one agent's turns: {1e3 * log:.2f} ms")
        print(f"backup: {1e3 * seconds(ledger.back_up):.0f} ms")
        print(f"backup, nothing changed: {1e6 * seconds(ledger.back_up):.0f} us")
        ledger.close()
    print(f"{NUM_AGENTS:,} agents, {NUM_PARTS:,} parts, {NUM_TURNS:,} turns")
    return verdict([Target("load", median(loads), TARGET_LOAD_S, "s")])


if __name__ == "__main__":
    sys.exit(main())
