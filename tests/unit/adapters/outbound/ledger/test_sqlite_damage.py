"""Files that are damaged, cut, missing, empty or something else."""

import random
import shutil
import sqlite3
import tempfile
import zlib
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantic.adapters.outbound.ledger import schema as ledger_schema
from semantic.adapters.outbound.ledger.schema import agent_row, with_checksum
from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.domain.agents import Turn
from semantic.domain.errors import CachePersistenceError
from semantic.ports.storage import (
    DropAgent,
    LedgerState,
    MarkIndexWhole,
    PutAgent,
    PutPart,
    PutReplay,
    PutTenant,
    PutTurn,
    Tenant,
)
from tests.unit.adapters.outbound.ledger.ledger_values import agent_of, part_of, turn_of

pytestmark = pytest.mark.unit

NUM_AGENTS, NUM_TURNS, PAGE = 20, 60, 4096
TENANT = Tenant("local", b"salt")
AGENTS = {f"a{i}": agent_of(f"a{i}", f"t{i + 40}", 3) for i in range(NUM_AGENTS)}
# Three turns an agent, long enough for pages of their own.
TURNS = {
    f"t{i}": turn_of(f"t{i}", f"t{i - 20}" if i >= 20 else None, text=f"{i} " * 1500)
    for i in range(NUM_TURNS)
}
DEEP_AGENT, DEEP_TURN = (
    agent_of("a0", "t60", 4),
    turn_of("t60", "t40", text="newer than the backup"),
)

Harm = Callable[[Path], object]


def fill(directory: Path, *, is_backed_up: bool = True) -> None:
    """Make a ledger with a backup, and one more turn that is not in the backup."""
    with closing(SqliteLedger(directory)) as ledger:
        ledger.load()
        ledger.apply([PutTenant(TENANT), MarkIndexWhole()], is_synced=False)
        ledger.apply([PutTurn("local", turn) for turn in TURNS.values()], is_synced=False)
        ledger.apply([PutAgent(agent) for agent in AGENTS.values()], is_synced=False)
        parts = [PutPart(part_of(i)) for i in range(20)]
        ledger.apply([*parts, PutReplay("local", b"key", (1, 2), 1.0)], is_synced=False)
        if is_backed_up:
            ledger.back_up()
        ledger.apply([PutTurn("local", DEEP_TURN), PutAgent(DEEP_AGENT)], is_synced=False)


def test_the_checksum_of_a_row() -> None:
    row = with_checksum(ledger_schema.TENANTS, ("local", b"salt"))
    assert row == ("local", b"salt", zlib.crc32(b"5:local4:salt"))
    turn = ("t", "local", None, "a", 2, 0.5, b"root", b"block", 2, 1, b"\1\2", "{}")
    summed = zlib.crc32(b"1:t5:local4:None1:a1:23:0.52:\1\x022:{}")  # not what may change
    assert with_checksum(ledger_schema.TURNS, turn) == (*turn, summed)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("filled")
    fill(directory)
    return directory


@pytest.fixture
def directory(tmp_path: Path, filled: Path) -> Path:
    return shutil.copytree(filled, tmp_path / "cache")


def noise(num_bytes: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(num_bytes)  # noqa: S311


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def cut(path: Path, share: float) -> None:
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * share))


def zero_first_page(path: Path, table: str) -> None:
    with closing(sqlite3.connect(path)) as other:
        query = "SELECT rootpage FROM sqlite_master WHERE name = ?"
        (page,) = other.execute(query, [table]).fetchone()
    overwrite(path, (page - 1) * PAGE, bytes(PAGE))


def change_text(path: Path, old: bytes, new: bytes) -> None:
    """Change text as it lies on disk, so that no page looks wrong."""
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))


def all_turns(ledger: SqliteLedger) -> dict[str, Turn]:
    found = {turn_id: ledger.turn("local", turn_id) for turn_id in (*TURNS, "t60")}
    return {turn_id: turn for turn_id, turn in found.items() if turn}


def check_backed_up(state: LedgerState, turns: dict[str, Turn]) -> None:
    """What was in the backup is there, and nothing is that was never written."""
    written = TURNS | {"t60": DEEP_TURN}
    assert state.tenants == (TENANT,)
    for agent in state.agents:
        # The later agent only with the later turn.
        assert agent == AGENTS[agent.id] or (agent == DEEP_AGENT and "t60" in turns)
    assert len(state.agents) == NUM_AGENTS
    assert set(TURNS) <= set(turns)
    assert all(written[turn_id] == turn for turn_id, turn in turns.items())


HARMS: dict[str, Harm] = {
    "garbage": lambda path: path.write_bytes(noise(70_000, seed=1)),
    "header": lambda path: overwrite(path, 0, bytes(100)),
    "first page": lambda path: overwrite(path, 0, noise(PAGE, seed=2)),
    "schema": lambda path: overwrite(path, 120, noise(2000, seed=3)),
    "middle pages": lambda path: overwrite(path, 20 * PAGE, noise(9 * PAGE, seed=4)),
    "zeroed pages": lambda path: overwrite(path, 3 * PAGE, bytes(5 * PAGE)),
    "cut in half": lambda path: cut(path, 0.5),
    "cut by a little": lambda path: cut(path, 0.97),
    "only a header": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "text": lambda path: path.write_text("these are not the bytes you are looking for"),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("harm", HARMS)
def test_whatever_is_done_to_a_ledger_what_was_backed_up_is_there(
    directory: Path, harm: str
) -> None:
    HARMS[harm](directory / "ledger.db")

    with closing(SqliteLedger(directory)) as ledger:
        state = ledger.load()
        check_backed_up(state, all_turns(ledger))
        assert ledger.replay("local", b"key") == (1, 2)
        assert (state.parts, state.is_index_lost) == ((), True)
        assert state.problem.startswith("ledger.db was ")
        assert "restored 20 agents" in state.problem
        is_gone = harm in ("empty", "missing")
        assert ("was missing" if is_gone else "was damaged (") in state.problem
        # The next start finds nothing wrong, but an index to be rebuilt.
        again = ledger.load()
        assert (again.agents, again.problem) == (state.agents, "")
        assert again.is_index_lost


def test_the_damaged_file_is_kept_and_named_and_what_came_after_the_backup_is_counted(
    directory: Path,
) -> None:
    (directory / "ledger.db").write_bytes(b"x" * 9000)

    with closing(SqliteLedger(directory)) as ledger:
        problem = ledger.load().problem

    (kept,) = directory.glob("ledger.db.damaged-*")
    assert kept.read_bytes() == b"x" * 9000
    assert kept.name in problem
    assert "restored 20 agents and 60 turns, with the backup of " in problem
    assert "up to 2 of the latest changes" in problem


@settings(max_examples=30)
@given(st.data())
def test_any_bytes_may_be_overwritten(filled: Path, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = shutil.copytree(filled, Path(name) / "cache")
        path = directory / "ledger.db"
        for _ in range(data.draw(st.integers(1, 4))):
            # Before this are the version numbers, whose damage looks like a newer server's.
            offset = data.draw(st.integers(100, path.stat().st_size - 1))
            length = data.draw(st.sampled_from([1, 8, 100, PAGE]))
            seed = data.draw(st.integers(0, 2**32))
            overwrite(path, offset, noise(length, seed))
        with closing(SqliteLedger(directory)) as ledger:
            ledger.load()
            with suppress(CachePersistenceError):
                all_turns(ledger)
            # Damage that shows only when a row is read is seen to at the next start.
            state = ledger.load()
            turns = all_turns(ledger)
        check_backed_up(state, turns)


def test_what_is_newer_than_the_backup_is_saved_where_it_can_be_read(directory: Path) -> None:
    # Not a page of agents or turns, which are still read to the last row.
    zero_first_page(directory / "ledger.db", "replays")

    with closing(SqliteLedger(directory)) as ledger:
        state = ledger.load()
        assert DEEP_AGENT in state.agents
        assert ledger.turns("local", "t60", limit=2) == (DEEP_TURN, TURNS["t40"])
        assert ledger.replay("local", b"key") == (1, 2)
        assert "lost turns" not in state.problem


def test_what_was_removed_after_the_backup_stays_removed(directory: Path) -> None:
    with closing(SqliteLedger(directory)) as ledger:
        ledger.load()
        ledger.apply([DropAgent("local", "a7")], is_synced=False)
    zero_first_page(directory / "ledger.db", "parts")

    with closing(SqliteLedger(directory)) as ledger:
        assert {agent.id for agent in ledger.load().agents} == set(AGENTS) - {"a7"}


def test_an_agent_without_its_latest_turn_goes_back_to_where_it_was(directory: Path) -> None:
    change_text(directory / "ledger.db", b"newer than the backup", b"never was in a backup")

    with closing(SqliteLedger(directory)) as ledger:
        state = ledger.load()
        assert "20 agents, of which 1 lost turns, and 60 turns" in state.problem
        assert AGENTS["a0"] in state.agents
        assert ledger.turn("local", "t60") is None
        assert ledger.load().problem == ""


def test_without_a_backup_what_can_be_read_is_kept(tmp_path: Path) -> None:
    fill(tmp_path, is_backed_up=False)
    path = tmp_path / "ledger.db"
    change_text(path, b"30 " * 20, b"31 " * 20)

    with closing(SqliteLedger(tmp_path)) as ledger:
        state = ledger.load()
        assert all_turns(ledger) == {
            i: t for i, t in (TURNS | {"t60": DEEP_TURN}).items() if i != "t30"
        }

    assert "there was no backup" in state.problem
    heads = {agent.id: agent.head for agent in state.agents}
    assert heads == {name: agent.head for name, agent in AGENTS.items()} | {
        "a0": "t60",
        "a10": "t10",
    }
    assert {agent.num_turns for agent in state.agents if agent.id == "a10"} == {1}


def test_a_damaged_ledger_and_a_damaged_backup_still_make_a_start(directory: Path) -> None:
    (directory / "ledger.db").write_bytes(b"x" * 9000)
    cut(directory / "ledger.backup.db", 0.6)

    with closing(SqliteLedger(directory)) as ledger:
        state = ledger.load()
        assert "was damaged" in state.problem
        ledger.apply([PutTurn("local", DEEP_TURN)], is_synced=True)
        assert ledger.turn("local", "t60") == DEEP_TURN
        assert all(TURNS[name] == turn for name, turn in all_turns(ledger).items() if name != "t60")


def test_a_ledger_and_backup_that_are_both_bad_are_reported_and_kept(directory: Path) -> None:
    for name in ("ledger.db", "ledger.backup.db"):
        (directory / name).write_bytes(name.encode() * 900)

    with closing(SqliteLedger(directory)) as ledger:
        state = ledger.load()
        ledger.back_up()

    assert state.agents == ()
    assert "restored 0 agents and 0 turns; the backup of " in state.problem
    assert "was damaged too" in state.problem
    # A tenant, 20 agents, 60 turns; then one of each.
    assert "up to 83 of the latest changes" in state.problem
    for name in ("ledger.db", "ledger.backup.db"):
        (kept,) = directory.glob(f"{name}.damaged-*")
        assert kept.read_bytes() == name.encode() * 900
        assert kept.name in state.problem


def test_a_missing_ledger_and_backup_are_reported(directory: Path) -> None:
    (directory / "ledger.db").unlink()
    (directory / "ledger.backup.db").unlink()

    with closing(SqliteLedger(directory)) as ledger:
        assert "up to 83 of the latest changes" in ledger.load().problem
        assert ledger.load().problem == ""


def test_a_missing_ledger_beside_blocks_is_reported(
    directory: Path,
) -> None:
    for path in directory.glob("ledger.*"):
        path.unlink()
    with closing(SqliteLedger(directory)) as ledger:
        assert ledger.load().problem == ""  # nothing tells it from a new directory
    for path in directory.glob("ledger.*"):
        path.unlink()
    (directory / "blocks" / "00").mkdir(parents=True)

    with closing(SqliteLedger(directory)) as ledger:
        state = ledger.load()
        assert (state.agents, state.is_index_lost) == ((), True)
        assert "ledger.db and its backups were missing" in state.problem
        assert "all earlier agents and turns are lost" in state.problem
        assert ledger.load().problem == ""


def killed(directory: Path, target: Path, *, num_turns: int, backed_up_at: int | None) -> None:
    """Leave what a server leaves that is killed while most of its ledger is in the log."""
    with closing(SqliteLedger(directory)) as ledger:
        ledger.load()
        for index in range(num_turns):
            parent = f"n{index - 1}" if index else None
            turn = turn_of(f"n{index}", parent, text=f"{index} " * 700)
            agent = agent_of("n", turn.id, index + 1)
            ledger.apply([PutTurn("local", turn), PutAgent(agent)], is_synced=False)
            if index + 1 == backed_up_at:
                ledger.back_up()
        shutil.copytree(directory, target)


def test_a_truncated_log_is_reported(directory: Path, tmp_path: Path) -> None:
    killed(directory, tmp_path / "killed", num_turns=40, backed_up_at=None)
    (tmp_path / "killed" / "ledger.backup.db").unlink()
    cut(tmp_path / "killed" / "ledger.db-wal", 0.5)

    with closing(SqliteLedger(tmp_path / "killed")) as ledger:
        state = ledger.load()
        (agent,) = [agent for agent in state.agents if agent.id == "n"]
        assert 0 < agent.num_turns < 40
        assert len(ledger.turns("local", str(agent.head), limit=99)) == agent.num_turns
        num_lost = 2 * (40 - agent.num_turns)
        assert f"up to {num_lost} of the latest changes" in state.problem
        assert ledger.load().problem == ""


def test_what_a_cut_log_lost_comes_from_a_newer_backup(directory: Path, tmp_path: Path) -> None:
    killed(directory, tmp_path / "killed", num_turns=40, backed_up_at=38)
    cut(tmp_path / "killed" / "ledger.db-wal", 0.5)

    with closing(SqliteLedger(tmp_path / "killed")) as ledger:
        state = ledger.load()
        assert agent_of("n", "n37", 38) in state.agents
        assert len(ledger.turns("local", "n37", limit=99)) == 38
        assert {agent.id for agent in state.agents} == {*AGENTS, "n"}
        assert state.problem.startswith("ledger.db was truncated (its last ")
        assert "up to 4 of the latest changes" in state.problem
        assert ledger.load().problem == ""


@pytest.mark.parametrize("content", [b"", b"nonsense", b"-5", b"9" * 5000, None])
def test_an_invalid_mark_is_ignored(directory: Path, content: bytes | None) -> None:
    mark = directory / "ledger.mark"
    mark.unlink() if content is None else mark.write_bytes(content)

    with closing(SqliteLedger(directory)) as ledger:
        assert ledger.load().problem == ""


def test_a_log_without_its_ledger_is_not_taken_for_another_ones(directory: Path) -> None:
    with closing(SqliteLedger(directory)) as ledger:
        ledger.load()
        ledger.apply([PutAgent(agent_of("late", None))], is_synced=False)
        shutil.copy(directory / "ledger.db-wal", directory / "saved")
    (directory / "ledger.db").unlink()
    (directory / "saved").rename(directory / "ledger.db-wal")

    with closing(SqliteLedger(directory)) as ledger:
        check_backed_up(ledger.load(), all_turns(ledger))


@pytest.mark.parametrize(
    "old,new",
    [
        ('"interactive"', '"unheard of"'),
        ('"labels":[]', '"labels":[["a",{"x":1}]]'),
        ('"ttl_s":null', '"ttl_s":"abc"'),
    ],
)
def test_an_agent_that_cannot_be_made_does_not_stop_the_start(
    directory: Path, old: str, new: str
) -> None:
    broken = agent_row(agent_of("odd", None))
    assert old in broken[4]
    row = with_checksum(ledger_schema.AGENTS, (*broken[:4], broken[4].replace(old, new)))
    for name in ("ledger.db", "ledger.backup.db"):
        with closing(sqlite3.connect(directory / name)) as other, other:
            other.execute(ledger_schema.AGENTS.put, row)

    with closing(SqliteLedger(directory)) as ledger:
        state = ledger.load()
        assert "the row of agent odd" in state.problem
        assert {agent.id for agent in state.agents} == set(AGENTS)
        assert ledger.load().problem == ""


def test_another_programs_database_is_moved_aside(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as other:
        other.execute("CREATE TABLE agents (id)")

    with closing(SqliteLedger(tmp_path)) as ledger:
        assert "was damaged (it is not a ledger)" in ledger.load().problem

    assert len(list(tmp_path.glob("ledger.db.damaged-*"))) == 1


def test_a_ledger_whose_making_was_cut_short_is_made(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as other:
        other.execute("PRAGMA journal_mode = WAL")

    with closing(SqliteLedger(tmp_path)) as ledger:
        assert ledger.load().problem == ""


DAMAGED = (b"30 " * 20, b"31 " * 20)  # in the text of turn t30 of agent a10, as pages see no harm


def test_a_damaged_row_is_restored_at_start_and_all_else_stays(directory: Path) -> None:
    change_text(directory / "ledger.db", *DAMAGED)

    with closing(SqliteLedger(directory)) as ledger:
        state = ledger.load()
        assert all_turns(ledger) == TURNS | {"t60": DEEP_TURN}
        assert DEEP_AGENT in state.agents
        assert len(state.parts) == 20  # the index need not be rebuilt
        words = "turn t30 of agent coder does not match its checksum; restored it from the backup"
        assert words in state.problem
        assert not list(directory.glob("*.damaged-*"))
        assert ledger.load().problem == ""


def test_a_damaged_row_is_restored_when_it_is_read(directory: Path) -> None:
    with closing(SqliteLedger(directory)) as ledger:
        ledger.load()
        change_text(directory / "ledger.db", *DAMAGED)
        assert ledger.turn("local", "t30") == TURNS["t30"]
        assert "turn t30 of agent coder" in ledger.problem
        assert "restored it from the backup" in ledger.problem
        assert ledger.load().problem == ledger.problem == ""


def test_a_damaged_row_is_restored_before_it_would_reach_the_backup(
    directory: Path, tmp_path: Path
) -> None:
    change = PutAgent(agent_of("late", None))
    with closing(SqliteLedger(directory)) as ledger:
        ledger.load()
        change_text(directory / "ledger.db", *DAMAGED)
        for _ in range(2):
            ledger.apply([change], is_synced=True)
            ledger.back_up()
        assert "restored it" in ledger.problem
    for name in ("ledger.backup.db", "ledger.backup-2.db"):
        (tmp_path / name).mkdir()
        shutil.copy(directory / name, tmp_path / name / "ledger.db")
        with closing(SqliteLedger(tmp_path / name)) as ledger:
            assert ledger.load().problem == ""
            assert all_turns(ledger) == TURNS | {"t60": DEEP_TURN}


def test_a_damaged_row_of_which_there_is_no_copy_is_named_and_never_backed_up(
    directory: Path,
) -> None:
    with closing(SqliteLedger(directory)) as ledger:
        ledger.load()
        before = (directory / "ledger.backup.db").read_bytes()
        change_text(directory / "ledger.db", b"newer than the backup", b"never was in a backup")
        for work in (
            lambda: ledger.turn("local", "t60"),
            ledger.back_up,
            lambda: ledger.forget_unreachable(before=1e12, replays_before=0),
        ):
            with pytest.raises(CachePersistenceError) as refused:
                work()
            assert "turn t60 of agent coder does not match its checksum" in refused.value.message
            assert str(directory) not in refused.value.message
        assert "turn t60 of agent coder" in ledger.problem
        assert ledger.turns("local", "t50", limit=9)[0] == TURNS["t50"]
    assert (directory / "ledger.backup.db").read_bytes() == before


def test_the_two_latest_backups_are_kept_and_the_older_one_restores_too(directory: Path) -> None:
    with closing(SqliteLedger(directory)) as ledger:
        ledger.load()
        first = (directory / "ledger.backup.db").read_bytes()
        ledger.back_up()
    assert (directory / "ledger.backup-2.db").read_bytes() == first
    (directory / "ledger.db").unlink()
    (directory / "ledger.backup.db").write_bytes(b"x" * 9000)

    with closing(SqliteLedger(directory)) as ledger:
        check_backed_up(ledger.load(), all_turns(ledger))


def test_a_damaged_ledger_does_not_replace_a_good_backup(directory: Path) -> None:
    with closing(SqliteLedger(directory)) as ledger:
        ledger.load()
        before = (directory / "ledger.backup.db").read_bytes()
        overwrite(directory / "ledger.db", 20 * PAGE, bytes(9 * PAGE))
        with pytest.raises(CachePersistenceError, match="is damaged") as refused:
            ledger.back_up()
        assert str(directory) not in refused.value.message

    assert (directory / "ledger.backup.db").read_bytes() == before
