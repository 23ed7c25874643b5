import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from semantic.adapters.outbound.blocks.lock import DirectoryLock
from semantic.domain.errors import CachePersistenceError, InvalidRequestError

pytestmark = pytest.mark.unit

HOLDER = """
import sys
from pathlib import Path
from semantic.adapters.outbound.blocks.lock import DirectoryLock

lock = DirectoryLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
lock.close()
print("closed", flush=True)
sys.stdin.readline()
"""


@contextmanager
def holder(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the lock; a line makes it let go, a second one makes it end."""
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


def test_a_second_server_is_refused_and_told_who_has_the_directory(tmp_path: Path) -> None:
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


def test_a_server_that_lets_go_can_be_followed_while_it_lives(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "closed\n"

        with DirectoryLock(tmp_path):
            assert process.poll() is None


def test_a_child_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    lock.close()

    DirectoryLock(tmp_path).close()

    child.communicate(b"\n")


def test_two_directories_do_not_mind_each_other(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path / "a"), DirectoryLock(tmp_path / "b"):
        assert (tmp_path / "a" / "lock").exists()


def test_the_same_process_cannot_take_it_twice(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path), pytest.raises(InvalidRequestError, match=f"{os.getpid()}"):
        DirectoryLock(tmp_path)


def test_the_file_is_the_owners_alone_and_says_who_holds_it(tmp_path: Path) -> None:
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

        with pytest.raises(InvalidRequestError, match="a process that did not say which"):
            DirectoryLock(tmp_path)


def test_a_directory_that_cannot_be_made_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(CachePersistenceError, match=r"cannot be locked: .*--cache-dir"):
        DirectoryLock(tmp_path / "file" / "cache")


def test_a_lock_file_that_was_removed_leaves_the_directory_locked(tmp_path: Path) -> None:
    with holder(tmp_path):
        (tmp_path / "lock").unlink()

        with pytest.raises(InvalidRequestError, match="in use by another server"):
            DirectoryLock(tmp_path)
        assert not (tmp_path / "lock").exists()
    DirectoryLock(tmp_path).close()


def test_a_lock_file_that_was_replaced_leaves_the_directory_locked(tmp_path: Path) -> None:
    with holder(tmp_path):
        (tmp_path / "other").touch()
        (tmp_path / "other").replace(tmp_path / "lock")

        with pytest.raises(InvalidRequestError, match="in use by another server"):
            DirectoryLock(tmp_path)


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
