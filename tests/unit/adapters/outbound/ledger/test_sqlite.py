import gc
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from semantic.adapters.outbound.ledger import schema as ledger_schema
from semantic.adapters.outbound.ledger.files import ReaderPool
from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.domain.errors import CachePersistenceError
from semantic.ports.storage import (
    PutAgent,
    PutPart,
    PutReplay,
    PutTenant,
    PutTurn,
    Tenant,
    TouchParts,
)
from tests.unit.adapters.outbound.ledger.ledger_values import (
    agent_of,
    part_of,
    turn_of,
)

pytestmark = pytest.mark.unit

LOCAL = PutTenant(Tenant("local", b"salt"))


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[SqliteLedger]:
    made = SqliteLedger(tmp_path, timeout_s=0.05)
    made.load()
    yield made
    made.close()


@pytest.fixture(params=["on disk", "in memory"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqliteLedger]:
    """Servers that keep nothing on disk have the same ledger, in memory."""
    made = SqliteLedger(tmp_path if request.param == "on disk" else None)
    made.load()
    yield made
    made.close()


def modes(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()}


# -- what is kept -----------------------------------------------------------------------------


def test_a_new_ledger_is_empty_and_its_directory_is_made(tmp_path: Path) -> None:
    with closing(SqliteLedger(tmp_path / "a" / "b")) as ledger:
        state = ledger.load()

    assert (state.tenants, state.agents, state.parts) == ((), (), ())
    assert (state.is_index_lost, state.problem) == (True, "")


def test_forgetting_gives_the_space_back(tmp_path: Path, ledger: SqliteLedger) -> None:
    turns = [PutTurn("local", turn_of(f"t{i}", text="x" * 9000)) for i in range(100)]
    ledger.apply(turns, is_synced=False)
    ledger.close()
    full = (tmp_path / "ledger.db").stat().st_size
    ledger.load()
    ledger.forget_unreachable(before=99.0, replays_before=99.0)
    ledger.close()

    assert (tmp_path / "ledger.db").stat().st_size < full / 4


def test_all_of_a_batch_or_nothing(either: SqliteLedger) -> None:
    for impossible in (
        PutReplay("local", b"key", (2**32,), at=1.0),
        PutReplay("local", b"key", (1,), at=float("nan")),
        PutTurn("\ud800", turn_of("t9")),
        TouchParts((part_of(1).key,), at=2**70),
    ):
        with pytest.raises(ValueError, match=r"."):
            either.apply([PutTurn("local", turn_of("t1")), impossible], is_synced=False)
        assert either.turn("local", "t1") is None

    either.apply([PutTurn("local", turn_of("t1"))], is_synced=False)
    assert either.turn("local", "t1") == turn_of("t1")


def test_an_unopened_ledger_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CachePersistenceError, match="is not open"):
        SqliteLedger(tmp_path).pointers()


def test_a_ledger_in_memory_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(SqliteLedger.in_memory()) as ledger:
        ledger.apply([LOCAL, PutTurn("local", turn_of("t1"))], is_synced=True)
        ledger.back_up()
        assert ledger.load().tenants == (LOCAL.tenant,)
        assert ledger.turn("local", "t1") == turn_of("t1")

    assert not list(tmp_path.iterdir())


# -- what a long life leaves in memory --------------------------------------------------------


def num_objects(kind: str) -> int:
    """Count the objects of a class by its name: sqlite3 does not export all of its classes."""
    gc.collect()
    return sum(type(found).__name__ == kind for found in gc.get_objects())


def test_statements_do_not_multiply_with_the_number_of_agents(either: SqliteLedger) -> None:
    ids = [f"t{number}" for number in range(600)]
    either.apply([PutTurn("local", turn_of(name)) for name in ids], is_synced=False)
    before = num_objects("Statement")
    for number in range(len(ids) + 1):
        assert either.places("local", ids[:number]).keys() == set(ids[:number])

    assert num_objects("Statement") - before <= 10  # one for every power of two up to 512


def test_readers_of_a_burst_are_closed(ledger: SqliteLedger) -> None:
    before, num_threads = num_objects("LedgerConnection"), 3 * ReaderPool.MAX_IDLE
    meeting = threading.Barrier(num_threads)

    class Read(str):
        """An id that waits, while it is bound to a query, until all threads read."""

        def __conform__(self, _: object) -> str:
            meeting.wait(60)
            return "t1"

    with ThreadPoolExecutor(num_threads) as pool:
        found = list(pool.map(lambda _: ledger.turn("local", Read()), range(num_threads)))
    assert found == [None] * num_threads
    assert num_objects("LedgerConnection") - before <= ReaderPool.MAX_IDLE


# -- threads, processes, permissions ----------------------------------------------------------


def test_any_thread_may_read_while_one_writes(tmp_path: Path) -> None:
    ledger = SqliteLedger(tmp_path)
    ledger.load()
    written, is_done = [0], threading.Event()

    def read() -> int:
        num_seen = 0
        while not (is_done.is_set() and num_seen):
            newest = written[0]
            log = ledger.turns("local", f"t{newest}", limit=10_000)
            # What was applied before the reading began is whole in it.
            assert len(log) == newest + 1
            num_seen += 1
        return num_seen

    ledger.apply([PutTurn("local", turn_of("t0"))], is_synced=False)
    with ThreadPoolExecutor(4) as pool:
        readings = [pool.submit(read) for _ in range(4)]
        try:
            for i in range(1, 200):
                turn = turn_of(f"t{i}", f"t{i - 1}")
                ledger.apply([PutTurn("local", turn)], is_synced=i % 10 == 0)
                written[0] = i
        finally:
            is_done.set()
        assert all(reading.result() for reading in readings)
    ledger.close()


def test_all_files_are_the_owners_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        ledger = SqliteLedger(tmp_path / "new")
        ledger.load()
        ledger.apply([LOCAL], is_synced=True)
        ledger.back_up()
    finally:
        os.umask(old)

    found = modes(tmp_path / "new")
    ledger.close()
    logs = {"ledger.db-wal", "ledger.db-shm"}
    assert {"ledger.db", "ledger.backup.db", "ledger.mark"} | logs == set(found)
    assert set(found.values()) == {0o600}
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_a_ledger_that_others_could_read_is_closed_to_them(
    tmp_path: Path, ledger: SqliteLedger
) -> None:
    ledger.close()
    (tmp_path / "ledger.db").chmod(0o644)

    ledger.load()

    assert modes(tmp_path)["ledger.db"] == 0o600


def test_a_path_with_odd_characters_is_a_path(tmp_path: Path) -> None:
    with closing(SqliteLedger(tmp_path / "a?mode=rw#b %41ü")) as ledger:
        ledger.load()
        ledger.apply([PutTurn("local", turn_of("t1"))], is_synced=False)
        ledger.back_up()
        assert ledger.turn("local", "t1") == turn_of("t1")


def test_a_locked_ledger_loses_nothing_and_can_be_tried_again(
    tmp_path: Path, ledger: SqliteLedger
) -> None:
    ledger.apply([PutTurn("local", turn_of("t1"))], is_synced=False)
    with closing(sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(CachePersistenceError, match="another program has locked") as refused:
            ledger.apply([PutTurn("local", turn_of("t2", "t1"))], is_synced=True)
        assert refused.value.retry_after_s
        assert ledger.turns("local", "t1", limit=9) == (turn_of("t1"),)
        other.execute("ROLLBACK")

    ledger.apply([PutTurn("local", turn_of("t2", "t1"))], is_synced=True)
    assert len(ledger.turns("local", "t2", limit=9)) == 2


def test_a_server_does_not_start_on_a_locked_ledger(tmp_path: Path, ledger: SqliteLedger) -> None:
    ledger.apply([LOCAL], is_synced=False)
    ledger.back_up()
    ledger.close()
    with closing(sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)) as other:
        for mode in ("NORMAL", "EXCLUSIVE"):
            other.execute(f"PRAGMA locking_mode = {mode}")
            other.execute("BEGIN EXCLUSIVE")
            other.execute("CREATE TABLE IF NOT EXISTS browser (x)")
            with pytest.raises(CachePersistenceError, match="Close that program"):
                ledger.load()
            other.execute("ROLLBACK")

    assert ledger.load().tenants == (LOCAL.tenant,)
    assert not list(tmp_path.glob("*damaged*"))


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_leaves_all_as_it_was(ledger: SqliteLedger) -> None:
    ledger.apply([PutTurn("local", turn_of("t1"))], is_synced=False)
    ledger.back_up()
    large = [PutTurn("local", turn_of("t2", "t1", text="x" * 10**6))]

    with full_disk(2**19), pytest.raises(CachePersistenceError, match=r"cannot"):
        ledger.apply([PutTurn("local", turn_of("t3")), *large], is_synced=True)

    assert ledger.turn("local", "t3") is None
    assert ledger.turns("local", "t1", limit=9) == (turn_of("t1"),)
    ledger.apply(large, is_synced=True)
    with full_disk(2**22), pytest.raises(CachePersistenceError, match=r"cannot"):
        ledger.apply([PutTurn("local", turn_of("t4", text="x" * 10**7))], is_synced=True)
    assert len(ledger.turns("local", "t2", limit=9)) == 2
    assert ledger.load().problem == ""
    assert len(ledger.turns("local", "t2", limit=9)) == 2


def test_a_backup_that_fails_leaves_the_one_before(tmp_path: Path, ledger: SqliteLedger) -> None:
    ledger.apply([LOCAL], is_synced=False)
    ledger.back_up()
    before = (tmp_path / "ledger.backup.db").read_bytes()
    ledger.apply([PutTurn("local", turn_of("t1", text="x" * 10**6))], is_synced=False)
    with full_disk(2**19), pytest.raises(CachePersistenceError, match=r"cannot"):
        ledger.back_up()

    assert (tmp_path / "ledger.backup.db").read_bytes() == before
    assert not list(tmp_path.glob("*.tmp*"))
    ledger.back_up()
    assert (tmp_path / "ledger.backup.db").stat().st_size > 10**6


def test_a_removed_ledger_is_not_written_into_the_void(
    tmp_path: Path, ledger: SqliteLedger
) -> None:
    ledger.apply([LOCAL], is_synced=False)
    (tmp_path / "ledger.db").unlink()
    with pytest.raises(CachePersistenceError, match="was removed or replaced"):
        ledger.apply([PutTurn("local", turn_of("t1"))], is_synced=False)

    ledger.back_up()

    assert ledger.load().tenants == (LOCAL.tenant,)


UNWRITABLE = """
import os, sys
from pathlib import Path
from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.domain.errors import CachePersistenceError

if os.getuid() == 0:
    # Nothing is forbidden to the superuser.
    os.setuid(65534)
try:
    SqliteLedger(Path(sys.argv[1])).load()
except CachePersistenceError as error:
    print(error.message)
"""


@pytest.mark.parametrize("what", ["ledger.db", "."])
def test_an_unwritable_place_is_refused_in_a_sentence(
    tmp_path: Path, ledger: SqliteLedger, what: str
) -> None:
    ledger.close()
    place = Path("/tmp") / f"semantic-{os.getpid()}"  # noqa: S108 - others must get there
    place.mkdir(mode=0o755)
    try:
        shutil.copy(tmp_path / "ledger.db", place)
        (place / "ledger.db").chmod(0o666 if what == "." else 0o444)
        place.chmod(0o777 if what == "ledger.db" and os.getuid() == 0 else 0o555)
        command = [sys.executable, "-c", UNWRITABLE, str(place)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)  # noqa: S603
    finally:
        place.chmod(0o755)
        shutil.rmtree(place)

    assert "cannot be opened for writing" in done.stdout
    assert "--cache-dir" in done.stdout


def test_a_place_that_is_no_directory_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CachePersistenceError, match=r"cannot be opened for writing: .*--cache-dir"):
        SqliteLedger(tmp_path / "file").load()


# -- versions ---------------------------------------------------------------------------------


def test_a_newer_ledger_is_refused_and_left_alone(tmp_path: Path, ledger: SqliteLedger) -> None:
    ledger.back_up()
    ledger.close()
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as other:
        other.execute("PRAGMA user_version = 7")
    before = (tmp_path / "ledger.db").read_bytes()

    with pytest.raises(
        CachePersistenceError, match=r"newer version .*\(format 7; this version supports 2"
    ):
        ledger.load()

    assert (tmp_path / "ledger.db").read_bytes() == before


def test_a_newer_ledger_of_a_killed_server_keeps_its_log(
    tmp_path: Path, ledger: SqliteLedger
) -> None:
    ledger.apply([LOCAL], is_synced=False)
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as other:
        other.execute("PRAGMA user_version = 7")
        killed = shutil.copytree(tmp_path, tmp_path / "killed")
    before = {path.name: path.read_bytes() for path in killed.iterdir()}
    assert before["ledger.db-wal"]

    with pytest.raises(CachePersistenceError, match="newer version of Semantic"):
        SqliteLedger(killed).load()

    assert {path.name: path.read_bytes() for path in killed.iterdir()} == before


def test_a_newer_backup_is_refused_too(tmp_path: Path, ledger: SqliteLedger) -> None:
    ledger.back_up()
    ledger.close()
    (tmp_path / "ledger.db").unlink()
    with closing(sqlite3.connect(tmp_path / "ledger.backup.db")) as other:
        other.execute("PRAGMA user_version = 7")

    with pytest.raises(CachePersistenceError, match="newer version of Semantic"):
        ledger.load()


@pytest.mark.parametrize("is_lost", [False, True])
def test_an_older_ledger_is_brought_up_to_date(
    tmp_path: Path, ledger: SqliteLedger, monkeypatch: pytest.MonkeyPatch, *, is_lost: bool
) -> None:
    ledger.apply([LOCAL, PutTurn("local", turn_of("t1"))], is_synced=False)
    ledger.back_up()
    ledger.close()
    if is_lost:
        (tmp_path / "ledger.db").unlink()
    later = (*ledger_schema.MIGRATIONS, "CREATE TABLE notes (id TEXT);")
    monkeypatch.setattr(ledger_schema, "MIGRATIONS", later)

    assert ledger.load().tenants == (LOCAL.tenant,)
    assert ledger.turn("local", "t1") == turn_of("t1")
    ledger.close()
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as other:
        assert other.execute("PRAGMA user_version").fetchone() == (len(later),)
        assert other.execute("SELECT count(*) FROM notes").fetchone() == (0,)
    with closing(sqlite3.connect(tmp_path / "ledger.backup.db")) as other:
        assert other.execute("PRAGMA user_version").fetchone() == (len(later) - (not is_lost),)


# -- backups ----------------------------------------------------------------------------------


def test_a_backup_is_written_only_when_more_than_the_index_changed(
    tmp_path: Path, ledger: SqliteLedger
) -> None:
    backup = tmp_path / "ledger.backup.db"
    inodes = []
    for changes in ([LOCAL], [], [PutPart(part_of(1))], [PutAgent(agent_of("coder", None))]):
        if changes:
            ledger.apply(changes, is_synced=False)
        ledger.back_up()
        # Kept open, so that no inode is used twice.
        inodes.append(backup.open("rb"))

    numbers = [os.fstat(file.fileno()).st_ino for file in inodes]
    for file in inodes:
        file.close()
    assert numbers[0] == numbers[1] == numbers[2] != numbers[3]


def test_a_backup_is_one_file_that_stands_alone(tmp_path: Path, ledger: SqliteLedger) -> None:
    ledger.apply([PutTurn("local", turn_of("t1"))], is_synced=False)
    ledger.back_up()
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(tmp_path / "ledger.backup.db", tmp_path / "elsewhere" / "ledger.db")

    with closing(SqliteLedger(tmp_path / "elsewhere")) as restored:
        restored.load()
        assert restored.turn("local", "t1") == turn_of("t1")
