"""Damaged rows: those that change before they are restored, and images."""

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
from semantic.ports.storage import DropAgent, LedgerChange, PutAgent, PutImage, PutTurn
from tests.unit.adapters.outbound.ledger.ledger_values import agent_of, image_of, turn_with

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


def test_images_are_rescued_from_a_damaged_ledger_and_from_its_backup(tmp_path: Path) -> None:
    images = [image_of(b"backed up" * 500), image_of(b"later" * 500)]
    with closing(SqliteLedger(tmp_path)) as ledger:
        ledger.load()
        for number, image in enumerate(images):
            stored = PutImage("local", image.digest, image.data, 1.0)
            turn = PutTurn("local", turn_with(f"t{number}", image))
            ledger.apply([stored, turn, PutAgent(agent_of("a", f"t{number}"))], is_synced=True)
            if not number:
                ledger.back_up()
    with closing(connect(tmp_path / LEDGER_FILE, 1.0)) as writer:
        writer.execute("UPDATE images SET data = zeroblob(9) WHERE at = 1.0 AND rowid = 1")
        writer.execute("DROP TABLE replays")  # so that the whole ledger is rebuilt

    with closing(SqliteLedger(tmp_path)) as ledger:
        assert "restored" in ledger.load().problem
        assert [ledger.image("local", image.digest) for image in images] == [
            image.data for image in images
        ]
        assert ledger.forget_unreachable(before=99.0, replays_before=0.0) == 2  # turn and image
        assert ledger.image("local", images[0].digest) is None


def test_a_damaged_image_is_restored_when_it_is_read(tmp_path: Path) -> None:
    image = image_of(b"picture")
    with closing(SqliteLedger(tmp_path)) as ledger:
        ledger.load()
        stored = PutImage("local", image.digest, image.data, 1.0)
        ledger.apply([stored, PutTurn("local", turn_with("t1", image))], is_synced=True)
        ledger.back_up()
        with closing(connect(tmp_path / LEDGER_FILE, 1.0)) as writer:
            writer.execute("UPDATE images SET data = zeroblob(9)")

        assert ledger.image("local", image.digest) == image.data
        assert "restored it from the backup" in ledger.problem
