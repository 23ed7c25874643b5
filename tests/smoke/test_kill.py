"""Servers that are killed while agents talk: nothing that was promised is lost, nothing is wrong.

`make chaos` does the same fifty times, with the starter model too.
"""

from pathlib import Path

import pytest

from tests.chaos.kills import Trial
from tests.chaos.talk import make_agents

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize("durability,num_kills", [("sync", 2), ("write_behind", 1)])
def test_killed_servers_lose_no_turn_and_say_nothing_wrong(
    durability: str, num_kills: int, tmp_path: Path
) -> None:
    trial = Trial(
        home=tmp_path / "home",
        work=tmp_path,
        durability=durability,
        options=["--backend", "fake"],
        agents=make_agents("fake", 4, max_tokens=40),
        seed=17,
        most_replies=20,
    )
    for _ in range(num_kills):
        trial.kill_once()
    trial.finish()
    assert trial.check_replies() > 4
