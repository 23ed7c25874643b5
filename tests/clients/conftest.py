"""Where the clients are, and a server with the starter model for them."""

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.smoke.server_process import ServerProcess, serve

_DIRECTORY = os.environ.get("CLIENTS_DIR")
# The scripts belong to the clients' own Python, and the tests need what `make clients` installs.
collect_ignore_glob = ["scripts/*", *(["test_*.py"] if _DIRECTORY is None else [])]


def run_client(
    command: Sequence[str], home: Path, environment: Mapping[str, str]
) -> "subprocess.CompletedProcess[str]":
    """Run a client to its end; it sees an empty home and the environment it is given."""
    return subprocess.run(  # noqa: S603 - our own commands
        command,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **environment},
        cwd=home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.fixture(scope="session")
def clients() -> Path:
    """The directory the clients are installed in."""
    return Path(_DIRECTORY or "")


@pytest.fixture(scope="session")
def server(starter_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that is ready."""
    place = tmp_path_factory.mktemp("server")
    # A busy machine may take long for a long prompt.
    with serve(starter_home, place / "log", hang_timeout_s=600) as running:
        yield running
