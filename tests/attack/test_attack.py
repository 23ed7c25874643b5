"""The short form of `make attack`: every kind, a few rounds, always the same ones."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from tests.attack import campaign
from tests.attack.damages import DAMAGES
from tests.attack.site import Attack, Truth

pytestmark = pytest.mark.e2e

SEED = 1


def damage_rounds() -> list[int]:
    """Damages that between them touch blocks, foreign files, links, and both copies of turns."""
    chosen = (
        "block_flip",
        "blocks is a link",
        "foreign files",
        "ledger and backup_scramble",
        "write-ahead log_cut",
        "all files of the ledger gone",
        "a bit of a turn is flipped",
    )
    return [number for number, damage in enumerate(DAMAGES) if damage.name in chosen]


ROUNDS: dict[str, list[int]] = {
    "kills": [0, 1, 2],
    "damage": damage_rounds(),
    "fuzz": [0, 1, 2],
    "schemas": [0, 1, 2, 3],
    "templates": [0, 2],
    "images": [0, 1, 2],
    "imports": [0, 1, 2, 3, 4, 6, 12],
    "connections": [0, 5],
    "races": [0, 1],
}


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Truth]:
    right = Truth(tmp_path_factory.mktemp("truth")).start()
    yield right
    right.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(campaign.KINDS))
def test_every_promise_holds(kind: str, truth: Truth, tmp_path: Path) -> None:
    attack = campaign.KINDS[kind](tmp_path / kind, truth)
    outcome = campaign.carry_out(attack, SEED, ROUNDS[kind])
    assert outcome.num_rounds == len(ROUNDS[kind])
    assert outcome.num_requests >= outcome.num_rounds
    assert not outcome.findings, "\n".join(found.what for found in outcome.findings)


class Unlucky(Attack):
    """An attack that finds something in its first round, and cannot finish the second."""

    kind: ClassVar[str] = "unlucky"

    def run_round(self, dice: random.Random) -> None:
        self.num_requests += 1
        if self.round:
            raise OSError("nobody answers")
        self.find(f"rolled {dice.randrange(6)}")


def test_findings_and_failed_rounds_are_reported(
    truth: Truth, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = campaign.carry_out(Unlucky(tmp_path, truth), 7, campaign.numbers(0, 2, 60))
    campaign.report([outcome], 7)
    words = capsys.readouterr().out
    assert [found.round for found in outcome.findings] == [0, 1]
    assert "unlucky, round 0: rolled" in words
    assert "unlucky, round 1: OSError" in words
    assert "make attack SEED=7" in words
    again = campaign.carry_out(Unlucky(tmp_path, truth), 7, [0])
    assert again.findings == outcome.findings[:1]
