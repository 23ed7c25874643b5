"""A PostgreSQL for tests: one server a test run, a schema of its own for each test."""

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
    """Where initdb and postgres are: on the path, or where Debian and Ubuntu put them."""
    found = shutil.which("initdb")
    if found:
        return Path(found).parent
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return places[-1].parent if places else None


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
        pytest.skip("no PostgreSQL here: neither on the path nor in /usr/lib/postgresql")
    prefix = _as_other_user()
    home = Path(tempfile.mkdtemp(prefix="semantic-pg-", dir="/tmp"))
    data = home / "data"
    try:
        home.chmod(0o777)
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
            server.wait(30)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _wait_for(url: str, server: "subprocess.Popen[bytes]") -> None:
    psycopg = pytest.importorskip("psycopg")
    for _ in range(600):
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
