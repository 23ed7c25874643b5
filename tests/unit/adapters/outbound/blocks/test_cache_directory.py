"""Which directories become a cache, and which are refused untouched."""

import logging
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from semantic.adapters.outbound.blocks.cache_directory import MARKER_FILE, claim
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


def test_what_others_could_read_in_a_cache_they_can_no_more(tmp_path: Path) -> None:
    (tmp_path / "outside").touch(mode=0o644)
    directory = tmp_path / "cache"
    claim(directory)
    directory.chmod(0o755)
    (directory / "ledger.db.damaged-1").touch(mode=0o644)
    (directory / "link").symlink_to(tmp_path / "outside")
    claim(directory)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / "ledger.db.damaged-1").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "outside").stat().st_mode & 0o777 == 0o644


def fill_with_notes(directory: Path) -> None:
    (directory / "blocks").mkdir()
    (directory / "blocks" / "notes.txt").write_text("mine")


def fill_with_lock(directory: Path) -> None:
    (directory / "lock").touch()


def fill_with_other_database(directory: Path) -> None:
    with closing(sqlite3.connect(directory / "ledger.db")) as other:
        other.execute("CREATE TABLE mine (name TEXT)")
        other.commit()


def fill_with_text(directory: Path) -> None:
    (directory / "ledger.db").write_bytes(b"SQLite format 3\0, or so it says")


def fill_with_pipe(directory: Path) -> None:
    os.mkfifo(directory / "ledger.db")


def fill_with_link_to_ledger(directory: Path) -> None:
    other = directory.parent / "other"
    with closing(SqliteLedger(other)) as ledger:
        ledger.load()
    (directory / "ledger.backup.dbx").symlink_to(other / "ledger.db")


@pytest.mark.parametrize(
    "fill",
    [
        fill_with_notes,
        fill_with_lock,
        fill_with_other_database,
        fill_with_text,
        fill_with_pipe,
        fill_with_link_to_ledger,
    ],
)
def test_a_directory_of_something_else_is_refused_and_left_as_it_is(
    fill: object, tmp_path: Path
) -> None:
    directory = tmp_path / "project"
    directory.mkdir(mode=0o755)
    assert callable(fill)
    fill(directory)
    before = kept_state(directory)
    with pytest.raises(InvalidRequestError, match=r"is no cache of Semantic.*--cache-dir") as error:
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
    leave: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert callable(leave)
    leave(tmp_path)
    (tmp_path / "blocks").mkdir()
    (tmp_path / "lock").touch()
    before = names(tmp_path)
    with caplog.at_level(logging.INFO):
        claim(tmp_path)
        claim(tmp_path)
    assert names(tmp_path) == {*before, MARKER_FILE}
    (line,) = caplog.messages
    assert f"{tmp_path} is a cache of an earlier version" in line
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


def test_a_cache_that_was_moved_is_still_one(tmp_path: Path) -> None:
    claim(tmp_path / "cache")
    (tmp_path / "cache" / "ledger.db").touch()
    shutil.move(tmp_path / "cache", tmp_path / "moved")
    claim(tmp_path / "moved")
