"""Which directories become a cache, which are refused unchanged, and which process holds one."""

import fcntl
import json
import logging
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from semantic.adapters.outbound.blocks.directory import MARKER_FILE, DirectoryLock, claim
from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.domain.errors import CachePersistenceError, InvalidRequestError

pytestmark = pytest.mark.unit

# A server that ends before its write-ahead log was ever copied into the ledger.
KILLED = """
import os, sys
from pathlib import Path
from semantic.adapters.outbound.ledger.sqlite import SqliteLedger

SqliteLedger(Path(sys.argv[1])).load()
os._exit(1)
"""


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def kept_state(directory: Path) -> dict[Path, tuple[int, int, int]]:
    found = {path: path.lstat() for path in directory.rglob("*")}
    return {path: (of.st_mode, of.st_size, of.st_mtime_ns) for path, of in found.items()}


@pytest.mark.parametrize("place", ["cache", "a/b/cache", "."])
def test_a_new_or_empty_directory_is_marked(place: str, tmp_path: Path) -> None:
    directory = tmp_path / place
    claim(directory)
    assert names(directory) == {MARKER_FILE}
    claim(directory)
    (directory / "more").touch()
    claim(directory)


def test_the_marker_and_the_directory_are_the_owners_alone(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        claim(tmp_path / "cache")
    finally:
        os.umask(previous)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "cache" / MARKER_FILE).stat().st_mode & 0o777 == 0o600


def test_claiming_a_cache_removes_the_permissions_of_others(tmp_path: Path) -> None:
    (tmp_path / "outside").touch(mode=0o644)
    directory = tmp_path / "cache"
    claim(directory)
    directory.chmod(0o755)
    (directory / "ledger.db.damaged-1").touch(mode=0o644)
    (directory / "blocks").mkdir(mode=0o755)
    (directory / "link").symlink_to(tmp_path / "outside")
    claim(directory)
    for closed in (directory, directory / "blocks"):
        assert closed.stat().st_mode & 0o777 == 0o700
    assert (directory / "ledger.db.damaged-1").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "outside").stat().st_mode & 0o777 == 0o644


def fill_with_other_database(directory: Path) -> None:
    with closing(sqlite3.connect(directory / "ledger.db")) as other:
        other.execute("CREATE TABLE mine (name TEXT)")
        other.commit()


def fill_with_link_to_ledger(directory: Path) -> None:
    other = directory.parent / "other"
    with closing(SqliteLedger(other)) as ledger:
        ledger.load()
    (directory / "ledger.backup.dbx").symlink_to(other / "ledger.db")


FILLS: dict[str, Callable[[Path], object]] = {
    "notes": lambda directory: (directory / "notes.txt").write_text("mine"),
    "a directory": lambda directory: (directory / "blocks").mkdir(),
    "a lock": lambda directory: (directory / "lock").touch(),
    "text": lambda directory: (directory / "ledger.db").write_bytes(b"SQLite format 3\0, or so"),
    "a pipe": lambda directory: os.mkfifo(directory / "ledger.db"),
    "another database": fill_with_other_database,
    "a link to a ledger": fill_with_link_to_ledger,
}


@pytest.mark.parametrize("fill", FILLS)
def test_a_directory_of_something_else_is_refused_and_left_as_it_is(
    fill: str, tmp_path: Path
) -> None:
    directory = tmp_path / "project"
    directory.mkdir(mode=0o755)
    FILLS[fill](directory)
    before = kept_state(directory)
    with pytest.raises(InvalidRequestError, match=r"is not a Semantic cache.*--cache-dir") as error:
        claim(directory)
    assert error.value.param == "cache_dir"
    assert MARKER_FILE in error.value.message
    assert kept_state(directory) == before
    assert directory.stat().st_mode & 0o777 == 0o755
    # What the message says helps.
    (directory / MARKER_FILE).touch()
    claim(directory)


def earlier_version(directory: Path) -> None:
    with closing(SqliteLedger(directory)) as ledger:
        ledger.load()


def killed_version(directory: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(directory)], check=False)  # noqa: S603
    assert (directory / "ledger.db-wal").stat().st_size > 0
    assert b"SEMA" not in (directory / "ledger.db").read_bytes()[:100]


def version_without_ledger(directory: Path) -> None:
    with closing(SqliteLedger(directory)) as ledger:
        ledger.load()
        ledger.back_up()
    (directory / "ledger.db").unlink()


@pytest.mark.parametrize("leave", [earlier_version, killed_version, version_without_ledger])
def test_a_cache_of_an_earlier_version_is_recognised_marked_and_logged(
    leave: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leave(tmp_path)
    (tmp_path / "blocks").mkdir()
    (tmp_path / "lock").touch()
    before = names(tmp_path)
    with caplog.at_level(logging.INFO):
        claim(tmp_path)
        claim(tmp_path)
    assert names(tmp_path) == {*before, MARKER_FILE}
    (line,) = caplog.messages
    assert f"{tmp_path}, a cache of an earlier version" in line
    with closing(SqliteLedger(tmp_path)) as ledger:
        ledger.load()


@pytest.mark.parametrize("name", ["blocks", "quarantine", "lock", "ledger.db", MARKER_FILE])
def test_one_of_our_names_that_is_a_link_is_refused(name: str, tmp_path: Path) -> None:
    directory, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    elsewhere.mkdir()
    claim(directory)
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to(elsewhere)
    with pytest.raises(InvalidRequestError, match=rf"{name} is a link.*--cache-dir"):
        claim(directory)
    assert names(elsewhere) == set()


def test_the_cache_directory_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "large-disk").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "large-disk")
    claim(tmp_path / "cache")
    assert names(tmp_path / "large-disk") == {MARKER_FILE}


def test_a_directory_that_cannot_be_made_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CachePersistenceError, match=r"cannot be used as a cache: .*--cache-dir"):
        claim(tmp_path / "file" / "cache")


# -- the lock -----------------------------------------------------------------------------------

HOLDER = """
import sys
from pathlib import Path
from semantic.adapters.outbound.blocks.directory import DirectoryLock

lock = DirectoryLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
"""


@contextmanager
def holder(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the lock."""
    process = subprocess.Popen(  # noqa: S603 - our own command
        [sys.executable, "-c", HOLDER, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin
    assert process.stdout
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_a_second_server_is_refused_with_the_directorys_holder(tmp_path: Path) -> None:
    with holder(tmp_path) as process, pytest.raises(InvalidRequestError) as refused:
        DirectoryLock(tmp_path)

    assert refused.value.param == "cache_dir"
    assert f"process {process.pid}, since 20" in refused.value.message
    assert str(tmp_path) in refused.value.message
    assert "--cache-dir" in refused.value.message


def test_a_killed_server_leaves_no_lock(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()

        DirectoryLock(tmp_path).close()


def test_a_child_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    lock.close()

    DirectoryLock(tmp_path).close()

    child.communicate(b"\n")


def test_the_lock_file_is_private_and_names_the_holder(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path) as lock:
        holder = json.loads(lock.path.read_text())
        assert holder["pid"] == os.getpid()
        assert lock.path.stat().st_mode & 0o777 == 0o600

    assert lock.path.read_text() == ""


def test_closing_twice_is_fine(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    lock.close()

    with DirectoryLock(tmp_path) as second:
        lock.close()
        assert json.loads(second.path.read_text())["pid"] == os.getpid()


def test_a_holder_that_left_nonsense_is_still_respected(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path) as lock:
        lock.path.write_bytes(b'{"pid": "\xff')

        with pytest.raises(InvalidRequestError, match="an unknown process"):
            DirectoryLock(tmp_path)


def test_a_lock_that_cannot_be_made_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(CachePersistenceError, match=r"cannot be locked: .*--cache-dir"):
        DirectoryLock(tmp_path / "file" / "cache")


def test_a_lock_file_that_was_removed_or_replaced_leaves_the_directory_locked(
    tmp_path: Path,
) -> None:
    with holder(tmp_path):
        (tmp_path / "lock").unlink()
        with pytest.raises(InvalidRequestError, match="in use by another server"):
            DirectoryLock(tmp_path)
        assert not (tmp_path / "lock").exists()
        (tmp_path / "lock").touch()
        with pytest.raises(InvalidRequestError, match="in use by another server"):
            DirectoryLock(tmp_path)
    DirectoryLock(tmp_path).close()


def test_a_lock_that_is_a_link_is_refused_and_what_it_leads_to_is_left(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "precious").write_text("not a lock")
    (tmp_path / "cache" / "lock").symlink_to(tmp_path / "precious")

    with pytest.raises(CachePersistenceError, match=r"it is a link.*--cache-dir"):
        DirectoryLock(tmp_path / "cache")

    assert (tmp_path / "precious").read_text() == "not a lock"
    (tmp_path / "cache" / "lock").unlink()
    DirectoryLock(tmp_path / "cache").close()  # nothing is held after a refusal


def test_a_file_that_an_earlier_version_has_locked_is_respected(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)

        with pytest.raises(InvalidRequestError, match="in use by another server"):
            DirectoryLock(tmp_path)
    DirectoryLock(tmp_path).close()
