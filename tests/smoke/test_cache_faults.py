"""A cache directory that is in use, and the files of servers that were stopped abruptly."""

import contextlib
import os
from pathlib import Path

import pytest

from semantic.entrypoints.cli.app import main
from tests.chaos.talk import ask
from tests.smoke.server_process import StartFailedError, serve, serve_forked

pytestmark = pytest.mark.smoke


def test_a_directory_in_use_is_refused_by_servers_and_commands_ask_its_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve_forked(tmp_path, tmp_path / "log", "--backend", "fake") as server:
        with (
            pytest.raises(StartFailedError) as refused,
            serve_forked(tmp_path, tmp_path / "second.log", "--backend", "fake"),
        ):
            pass
        assert refused.value.status == 2
        words = refused.value.output
        assert f"process {server.process.pid}" in words
        assert "--cache-dir" in words
        assert words.count("\n") == 1
        assert main(["cache", "verify", "--home", str(tmp_path)]) == 0
        assert capsys.readouterr().out.startswith(f"{server.url} checked no files: no bad files")
        with server.client() as http:
            assert ask(http, "fake", [{"role": "user", "content": "still there?"}], 5)
        assert server.stop() == 0
    assert main(["cache", "verify", "--home", str(tmp_path)]) == 0


def test_everything_a_server_writes_is_its_owners_alone(tmp_path: Path) -> None:
    home = tmp_path / "home"
    previous = os.umask(0)
    try:
        (home / "logs").mkdir(parents=True)  # as an earlier version left them
        (home / "native").mkdir()
        (home / "logs" / "server.log").write_text("earlier\n")
        with serve(home, tmp_path / "log", "--backend", "fake", "--durability", "sync") as server:
            with server.client() as http:
                ask(http, "fake", [{"role": "user", "content": "a secret " * 50}], 5)
            modes = modes_below(home)
            assert server.stop() == 0
    finally:
        os.umask(previous)
    assert any(path.suffix == ".safetensors" for path in modes)
    for found in (modes, modes_below(home)):
        assert {path: mode for path, mode in found.items() if mode not in ("0o700", "0o600")} == {}
        assert {path.name for path in found} >= {"ledger.db", "server.log", "semantic-cache"}


def modes_below(home: Path) -> dict[Path, str]:
    modes = {}
    for path in (home, *home.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # it may have got its name meanwhile
            modes[path] = oct(path.stat().st_mode & 0o777)
    return modes


def test_a_model_that_cannot_be_loaded_is_a_one_line_error_and_releases_the_directory(
    tmp_path: Path,
) -> None:
    with serve(tmp_path, tmp_path / "log", "--model", "nowhere/at-all", is_ready=False) as server:
        assert server.process.wait(60) == 2
    last = server.output.splitlines()[-1]
    assert last.startswith("semantic: the model could not be loaded: downloading nowhere/at-all")
    assert "Traceback" not in server.output
    assert (tmp_path / "cache" / "ledger.backup.db").is_file()
    assert (tmp_path / "cache" / "lock").read_text() == ""
    assert main(["cache", "stats", "--home", str(tmp_path)]) == 0
