"""Where the clients are, and a server with the starter model for them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.smoke.server_process import ServerProcess, serve

_DIRECTORY = os.environ.get("CLIENTS_DIR")
# The scripts belong to the clients' own Python, and the tests need what `make clients` installs.
collect_ignore_glob = ["scripts/*", *(["test_*.py"] if _DIRECTORY is None else [])]


@pytest.fixture(scope="session")
def clients() -> Path:
    """The directory the clients are installed in."""
    return Path(_DIRECTORY or "")


@pytest.fixture(scope="session")
def server(starter_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that is ready."""
    log = tmp_path_factory.mktemp("server") / "log"
    with serve(starter_home, log) as running:
        running.await_ready()
        yield running
