"""Small and read-only file systems, where the tests may mount them."""

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603


@contextlib.contextmanager
def small_disk(place: Path, options: str) -> Iterator[Path]:
    """Mount a file system in memory; skips the test where that is not permitted."""
    place.mkdir(parents=True, exist_ok=True)
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if mount is None or umount is None:
        pytest.skip("there is no mount here")
    done = _run(mount, "-t", "tmpfs", "-o", options, "tmpfs", str(place))
    if done.returncode:
        pytest.skip(f"mounting is not permitted: {done.stderr.strip()}")
    try:
        yield place
    finally:
        _run(umount, "-l", str(place))


def resize(place: Path, options: str) -> None:
    """Change the size of a small disk, or forbid writing to it."""
    mount = shutil.which("mount")
    assert mount is not None
    done = _run(mount, "-o", f"remount,{options}", str(place))
    assert done.returncode == 0, done.stderr


def fill_up(place: Path) -> None:
    """Write a file until there is no room left."""
    with place.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1024))
