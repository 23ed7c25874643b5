"""The service as systemd and launchd get it; their commands are stand-ins that keep a record."""

import json
import os
import plistlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from semantic.adapters.config.settings import Settings
from semantic.domain.errors import InvalidRequestError
from semantic.entrypoints.cli.app import main
from semantic.entrypoints.cli.service import (
    LABEL,
    STOP_S,
    LaunchdAgent,
    SystemdUser,
    service_manager,
)

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(sys.platform == "darwin", reason="the commands would use launchd"),
]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "a home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("SEMANTIC_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "a home"


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts managers on the path that succeed; returns the file of their arguments."""
    record = tmp_path / "calls"
    record.touch()
    (tmp_path / "bin").mkdir()
    answers = {"systemctl": "case $2 in show) echo active;; esac", "launchctl": "echo 'state = 1'"}
    for name, answer in answers.items():
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\necho "{name} $@" >> {record}\n{answer}\n')
        program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return record


def exec_start(unit: str) -> list[str]:
    """The command of a unit, as systemd reads it."""
    (line,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    command = shlex.split(line.removeprefix("ExecStart="))
    return [word.replace("%%", "%").replace("$$", "$") for word in command]


def test_a_service_is_installed_shown_and_removed(
    home: Path, calls: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["service", "status"]) == 1
    assert "not installed" in capsys.readouterr().out

    assert main(["service", "install", "--port", "9000", "--backend", "fake"]) == 0
    said = capsys.readouterr().out
    unit = home / ".config" / "systemd" / "user" / "semantic.service"
    assert exec_start(unit.read_text()) == [
        *(sys.executable, "-m", "semantic", "serve", "--port", "9000", "--backend", "fake"),
        *("--home", str(home / ".semantic")),
    ]
    assert f"installed {unit}" in said
    assert "http://127.0.0.1:9000" in said
    verbs = [line.split()[2] for line in calls.read_text().splitlines()]
    assert verbs == ["daemon-reload", "enable", "restart"]

    assert main(["service", "status", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"file": str(unit), "installed": True, "state": "running"}

    assert main(["service", "uninstall"]) == 0
    assert not unit.exists()
    assert "disable --now semantic.service" in calls.read_text()
    assert main(["service", "uninstall"]) == 2


def test_paths_are_absolute_and_quoted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "100% $mine").mkdir()
    (tmp_path / "more.toml").write_text("port = 8123\n")
    flags = ["--model", "100% $mine", "--cache-dir", "ca che", "--config", "more.toml", "--ollama"]
    assert main(["service", "install", "--print", "--home", "h", *flags]) == 0
    command = exec_start(capsys.readouterr().out)
    assert command[4:] == [
        *("--model", str(tmp_path / "100% $mine"), "--home", str(tmp_path / "h")),
        *("--cache-dir", str(tmp_path / "ca che"), "--ollama"),
        *("--config", str(tmp_path / "more.toml")),
    ]
    assert main(["service", "install", "--print", "--port", "many"]) == 2


def test_variables_that_the_service_does_not_see_are_named(
    calls: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEMANTIC_PORT", "9001")
    assert main(["service", "install"]) == 0
    assert "does not see SEMANTIC_PORT" in capsys.readouterr().err
    assert calls.read_text()


def test_a_system_without_systemd_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["service", "install"]) == 2
    assert "this system has no systemctl. Run `semantic serve`" in capsys.readouterr().err


def test_what_the_manager_says_is_shown(
    calls: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin" / "systemctl").write_text("#!/bin/sh\necho no bus >&2; exit 1\n")
    assert main(["service", "install"]) == 2
    assert "systemctl --user daemon-reload: no bus" in capsys.readouterr().err
    assert not calls.read_text()


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "semantic.service"
    unit.write_text(SystemdUser().text((sys.executable, "-m", "a b", "c%d"), tmp_path))
    done = subprocess.run(  # noqa: S603 - the tool that reads units
        ["systemd-analyze", "--user", "verify", str(unit)],  # noqa: S607
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_launchd_gets_a_plist_and_its_commands(home: Path, calls: Path) -> None:
    agent = service_manager("darwin")
    assert isinstance(agent, LaunchdAgent)
    job = plistlib.loads(agent.text(("semantic", "serve"), home).encode())
    assert (job["Label"], job["ProgramArguments"]) == (LABEL, ["semantic", "serve"])
    assert job["KeepAlive"] == {"SuccessfulExit": False}
    assert agent.path == home / "Library" / "LaunchAgents" / f"{LABEL}.plist"

    assert agent.state() == "1"
    agent.start()
    verbs = [line.split()[1] for line in calls.read_text().splitlines()]
    assert verbs == ["print", "print", "bootout", "bootstrap"]


def test_an_agent_that_is_not_loaded_is_not_stopped_first(calls: Path, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "launchctl"
    program.write_text(f'#!/bin/sh\necho "$1" >> {calls}\n[ $1 = bootstrap ]\n')
    LaunchdAgent().start()
    assert calls.read_text().split() == ["print", "bootstrap"]
    with pytest.raises(InvalidRequestError, match="bootout"):
        LaunchdAgent().stop()


def test_time_to_stop_is_longer_than_the_servers_phases() -> None:
    assert 4 * float(Settings.model_fields["shutdown_timeout_s"].default) < STOP_S
