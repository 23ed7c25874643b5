"""Damaged rows that change between the moment they are found and the moment they are restored."""

from contextlib import closing
from pathlib import Path

import pytest

from semantic.adapters.outbound.ledger.files import connect
from semantic.adapters.outbound.ledger.rescue import DamagedRows, Rescue
from semantic.adapters.outbound.ledger.schema import (
    AGENTS,
    DamagedRowError,
    agent_row,
    with_checksum,
)
from semantic.adapters.outbound.ledger.sqlite import BACKUP_FILES, LEDGER_FILE, SqliteLedger
from semantic.domain.agents import Agent
from semantic.ports.storage import DropAgent, LedgerChange, PutAgent
from tests.unit.adapters.outbound.ledger.ledger_values import agent_of

pytestmark = pytest.mark.unit

BEFORE, AFTER = agent_of("a", None), agent_of("a", "t1", 1)


@pytest.mark.parametrize(
    "change,left,num_lost",
    [(PutAgent(AFTER), [AFTER], 0), (DropAgent("local", "a"), [], 1)],
    ids=["written anew", "removed"],
)
def test_a_row_that_changed_since_it_was_found_damaged_is_not_replaced(
    tmp_path: Path, change: LedgerChange, left: list[Agent], num_lost: int
) -> None:
    with closing(SqliteLedger(tmp_path)) as ledger:
        ledger.load()
        ledger.apply([PutAgent(BEFORE)], is_synced=False)
        ledger.back_up()
        ledger.apply([change], is_synced=False)
    backups = tuple(tmp_path / name for name in BACKUP_FILES)
    damage = DamagedRowError(AGENTS, with_checksum(AGENTS, agent_row(BEFORE)))

    with closing(connect(tmp_path / LEDGER_FILE, 1.0)) as writer:
        rows = DamagedRows(Rescue(tmp_path / LEDGER_FILE, backups, 1.0))
        assert len(rows.restore(writer, [damage])) == num_lost

    with closing(SqliteLedger(tmp_path)) as ledger:
        assert list(ledger.load().agents) == left
