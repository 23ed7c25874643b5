"""The service's command as its manager runs it: no shell, and hardly any environment."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.smoke.server_process import ServerProcess

pytestmark = pytest.mark.smoke


@pytest.mark.skipif(sys.platform == "darwin", reason="launchd's plist is read otherwise")
def test_the_command_of_the_unit_serves_until_it_is_terminated(tmp_path: Path) -> None:
    home = tmp_path / "a home"
    flags = ("--port", "0", "--backend", "fake", "--home", str(home / "data"))
    printed = subprocess.run(  # noqa: S603 - our own command
        [sys.executable, "-m", "semantic", "service", "install", "--print", "--json", *flags],
        env={**os.environ, "HOME": str(home)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = json.loads(printed)
    assert found["file"] == str(home / ".config" / "systemd" / "user" / "semantic.service")
    unit = dict(line.split("=", 1) for line in found["content"].splitlines() if "=" in line)
    home.mkdir()
    log = tmp_path / "log"
    with log.open("w") as sink:
        process = subprocess.Popen(  # noqa: S603 - our own command
            shlex.split(unit["ExecStart"]),
            cwd=home,
            env={"HOME": str(home), "PATH": "/usr/bin:/bin"},
            stdout=sink,
            stderr=subprocess.STDOUT,
            text=True,
        )
    server = ServerProcess(process, log)
    try:
        server.await_listening()
        server.await_ready()
        with server.client() as http:
            assert http.get("/health").json()["status"] == "ok"
        process.send_signal(signal.SIGTERM)
        assert process.wait(int(unit["TimeoutStopSec"])) == 0
    finally:
        process.kill()
        process.wait()
    assert (home / "data" / "cache").is_dir()
