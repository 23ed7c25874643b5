"""A ledger that lost something: the server starts, and says so."""

import shutil
from pathlib import Path

import pytest

from tests.http_server import make_settings, run_server
from tests.integration.test_direct_api import get, make, say

pytestmark = pytest.mark.integration


def killed(tmp_path: Path) -> Path:
    """The home of a server that was killed after three agents spoke."""
    with run_server(make_settings(tmp_path / "home")) as running, running.client() as http:
        for name in ("a", "b", "c"):
            make(http, id=name, system="s")
            say(http, name, "one")
        running.server.memory.disk.flush(10)  # type: ignore[union-attr]
        return shutil.copytree(tmp_path / "home", tmp_path / "killed")


def health(home: Path) -> tuple[str, list[str]]:
    with run_server(make_settings(home)) as running, running.client() as http:
        agents = [agent["id"] for agent in get(http, "/v1/agents")["data"]]
        assert say(http, make(http)["id"], "one")["turn_id"]
        return get(http, "/health")["problem"], agents


def test_a_killed_server_lost_nothing(tmp_path: Path) -> None:
    assert health(killed(tmp_path)) == ("", ["c", "b", "a"])


def test_a_log_that_was_cut_in_half_is_told(tmp_path: Path) -> None:
    home = killed(tmp_path)
    log = home / "cache" / "ledger.db-wal"
    with log.open("r+b") as file:
        file.truncate(log.stat().st_size // 2)

    problem, agents = health(home)

    assert len(agents) <= 3
    assert "changes to agents and turns were lost" in problem
    assert health(home)[0] == ""


def test_two_bad_copies_are_told(tmp_path: Path) -> None:
    home = killed(tmp_path)
    (home / "cache" / "ledger.db-wal").unlink()  # it alone would bring all of it back
    for name in ("ledger.db", "ledger.backup.db"):
        (home / "cache" / name).write_bytes(b"x" * 9000)

    problem, agents = health(home)

    assert agents == []
    assert "ledger.db was damaged" in problem
    assert "restored 0 agents and 0 turns" in problem
    assert "was damaged too" in problem
