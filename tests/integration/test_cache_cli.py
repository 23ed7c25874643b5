"""`semantic cache`, over directories that real servers left."""

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from semantic.entrypoints.cli.app import main
from tests.chaos.talk import ask
from tests.http_server import RunningServer, make_settings, run_server
from tests.smoke.server_process import serve_forked

pytestmark = pytest.mark.integration

HEAD = "Both agents begin like this, at some length. " * 4
QUESTIONS = {"coder": "Write a function. " * 10, "critic": "Find a flaw. " * 10}


def talk(running: RunningServer, agent: str) -> None:
    said = [{"role": "user", "content": HEAD + QUESTIONS[agent]}]
    with running.client() as http:
        ask(http, running.model, said, 20, agent)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Where a server left two agents that begin alike."""
    with run_server(make_settings(tmp_path)) as running:
        for agent in QUESTIONS:
            talk(running, agent)
    return tmp_path


def block_files(home: Path) -> list[Path]:
    return sorted((home / "cache" / "blocks").rglob("*.safetensors"))


def test_stats_report_the_cache(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "stats", "--home", str(home)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [f"directory  {home}/cache", "agents     2", "turns      2"]
    num_files = len(block_files(home))
    assert lines[3].startswith(f"files      {num_files}, ")
    assert lines[4].startswith(f"  fake (fake.v2.0.0, raw): {num_files}, ")
    assert lines[5].startswith("total ")
    assert " of 20.0 GB (" in lines[5]
    assert lines[5].endswith(" of it for the ledger and its backup")


def test_verify_removes_and_reports_bad_files(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = block_files(home)
    content = bytearray(files[0].read_bytes())
    content[-1] ^= 1
    files[0].write_bytes(content)
    files[1].write_bytes(b"")
    files[2].with_name(f"{'01' * 8}-7.tmp").write_bytes(b"half a file")
    assert main(["cache", "verify", "--home", str(home)]) == 1
    text = capsys.readouterr().out
    for bad in files[:2]:
        assert f"bad: {bad.relative_to(home / 'cache')}: " in text
    assert "moved 1 unfinished file of a killed server to quarantine" in text
    assert f"checked {len(files)} files" in text
    assert ": 2 bad files; the ledger is sound" in text
    assert block_files(home) == files[2:]
    quarantine = home / "cache" / "quarantine"
    assert len(list(quarantine.iterdir())) == 3
    assert content in [path.read_bytes() for path in quarantine.iterdir()]
    assert main(["cache", "verify", "--home", str(home)]) == 0
    assert f"checked {len(files) - 2} files" in capsys.readouterr().out
    with run_server(make_settings(home)) as running:
        talk(running, "coder")
        assert running.server.memory.cache.store.counts.corrupt == 0


def test_verify_compares_files_with_the_index(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server refuses a file that differs from its row, so `verify` must not call it sound."""
    with contextlib.closing(sqlite3.connect(home / "cache" / "ledger.db")) as ledger, ledger:
        ledger.execute("UPDATE parts SET nbytes = nbytes + 1 WHERE start = 0")
    assert main(["cache", "verify", "--home", str(home)]) == 1
    assert ": 1 bad file; the ledger is sound" in capsys.readouterr().out
    with run_server(make_settings(home)) as running:
        for agent in QUESTIONS:
            talk(running, agent)
        assert running.server.memory.cache.store.counts.corrupt == 0


def test_gc_empties_quarantine_of_what_is_old(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    block_files(home)[0].write_bytes(b"bad")
    assert main(["cache", "verify", "--home", str(home)]) == 1
    quarantine = home / "cache" / "quarantine"
    assert main(["cache", "gc", "--home", str(home)]) == 0
    assert len(list(quarantine.iterdir())) == 1
    capsys.readouterr()
    assert main(["cache", "gc", "--home", str(home), "--orphan-age-h", "0"]) == 0
    assert "deleted 3 B of bad files in quarantine" in capsys.readouterr().out
    assert list(quarantine.iterdir()) == []


def test_verify_restores_turns_that_changed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.closing(sqlite3.connect(home / "cache" / "ledger.db")) as ledger, ledger:
        ledger.execute("UPDATE turns SET num_tokens = num_tokens + 1 WHERE agent = 'critic'")
    assert main(["cache", "verify", "--home", str(home)]) == 1
    text = capsys.readouterr().out
    assert "of agent critic does not match its checksum; restored it from the backup" in text
    assert "the ledger is not sound" in text
    assert main(["cache", "verify", "--home", str(home)]) == 0


def test_gc_deletes_what_no_agent_reaches(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = block_files(home)
    assert main(["cache", "gc", "--home", str(home), "--orphan-age-h", "0"]) == 0
    assert block_files(home) == before
    with run_server(make_settings(home)) as running:
        running.server.memory.agents.delete("local", "critic")
    assert main(["cache", "gc", "--home", str(home)]) == 0
    assert block_files(home) == before  # used within the last day
    capsys.readouterr()
    assert main(["cache", "gc", "--home", str(home), "--orphan-age-h", "0"]) == 0
    after = block_files(home)
    num_gone = len(before) - len(after)
    text = capsys.readouterr().out
    assert 0 < num_gone < len(before) / 2  # what both began with is still needed
    assert text.startswith(f"deleted {num_gone} files (")
    assert f"and 1 turn that no agent reaches; left: {len(after)} files" in text
    assert main(["cache", "verify", "--home", str(home)]) == 0
    with run_server(make_settings(home)) as running, running.client() as http:
        body = {
            "model": running.model,
            "messages": [{"role": "user", "content": HEAD + QUESTIONS["coder"]}],
            "max_tokens": 5,
        }
        usage = http.post("/v1/chat/completions", json=body).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


def test_gc_keeps_the_beginning_of_what_lost_its_end(home: Path) -> None:
    """As a server's own collection does: the next turn computes only what is gone."""
    with run_server(make_settings(home)) as running:
        agents = running.server.memory.agents
        agents.delete("local", "critic")
        place = agents.place(agents.get("local", "coder"))
        assert place.pointer is not None
        end = place.pointer.block.hex()
    (tail,) = (home / "cache" / "blocks").rglob(f"{end}.*.safetensors")
    tail.unlink()
    assert main(["cache", "gc", "--home", str(home), "--orphan-age-h", "0"]) == 0
    assert block_files(home)
    assert main(["cache", "verify", "--home", str(home)]) == 0
    with run_server(make_settings(home)) as running, running.client() as http:
        content = [{"role": "user", "content": HEAD + QUESTIONS["coder"]}]
        body = {"model": running.model, "messages": content, "max_tokens": 5}
        usage = http.post("/v1/chat/completions", json=body).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_running_server_does_the_work(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    num_files = len(block_files(home))
    key = "the key of an operator"
    with serve_forked(home, home / "log", "--backend", "fake", admin_key=key) as server:
        given = ("--home", str(home), "--key", key)
        assert main(["cache", "stats", *given]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[:2] == [f"directory  {home}/cache, in use by {server.url}", "agents     2"]
        assert lines[2].startswith(f"files      {num_files}, ")
        assert main(["cache", "verify", *given]) == 0
        assert f"checked {num_files} files: no bad files" in capsys.readouterr().out
        with server.client(headers={"authorization": f"Bearer {key}"}) as http:
            http.delete("/v1/agents/critic").raise_for_status()
        assert main(["cache", "gc", *given, "--orphan-age-h", "0", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["freed_bytes"] > 0
        assert 0 < len(block_files(home)) < num_files
        assert main(["cache", "stats", "--home", str(home)]) == 2
        assert "Give a key with --key" in capsys.readouterr().err
    assert main(["cache", "stats", "--home", str(home)]) == 0


def test_gc_that_cannot_delete_a_file_fails_with_the_reason(home: Path) -> None:
    with run_server(make_settings(home)) as running:
        running.server.memory.agents.delete("local", "critic")
    for file in block_files(home):
        file.parent.chmod(0o500)
    command = [sys.executable, "-m", "semantic", "cache", "gc", "--home", str(home)]
    if os.geteuid() == 0:  # root may delete files everywhere
        command = ["setpriv", "--bounding-set=-dac_override", *command]
    done = subprocess.run(  # noqa: S603 - our own command
        [*command, "--orphan-age-h", "0"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == "semantic: incomplete: cannot delete a block: Permission denied"


@pytest.mark.parametrize("action", ["stats", "verify", "gc"])
def test_a_directory_without_a_cache_is_a_one_line_error_and_stays_unchanged(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", action, "--cache-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"semantic: no cache in {tmp_path}")
    assert list(tmp_path.iterdir()) == []
