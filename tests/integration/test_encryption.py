"""A cache encrypted at rest: its files contain no text of conversations, and it is restored."""

import os
import shutil
import sqlite3
import stat
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from semantic.adapters.outbound.cipher import Cipher, load_cipher
from semantic.domain.errors import (
    CacheCorruptionError,
    CachePersistenceError,
    InvalidRequestError,
)
from semantic.entrypoints.bootstrap import bootstrap
from semantic.entrypoints.cli.app import main
from tests.http_server import make_settings, run_server

pytestmark = pytest.mark.integration

SECRET = "xylophone-" * 60
CHAT: dict[str, Any] = {
    "max_tokens": 6,
    "temperature": 0,
    "messages": [
        {"role": "system", "content": f"Remember {SECRET}"},
        {"role": "user", "content": f"What is {SECRET}?"},
    ],
}


def make_key(path: Path) -> Path:
    path.write_text(os.urandom(32).hex() + "\n")
    path.chmod(0o600)
    return path


def ask(home: Path, **settings: Any) -> tuple[str, int]:
    """Start a server, ask, stop it; returns the reply and how much was reused."""
    with run_server(make_settings(home, **settings)) as running, running.client() as http:
        agent = {"system": SECRET, "id": "coder"}
        assert http.post("/v1/agents", json=agent).status_code in (200, 201)
        body = http.post("/v1/chat/completions", json=CHAT).json()
    assert running.server.memory.close(20)
    cached: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return body["choices"][0]["message"]["content"], cached


def contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


@pytest.mark.parametrize("backend", ["fake", "torch"])
def test_encrypted_text_is_in_no_file_and_is_restored(
    tmp_path: Path, backend: str, request: pytest.FixtureRequest
) -> None:
    model: dict[str, Any] = {"backend": backend}
    if backend == "torch":
        model |= {"model": str(request.getfixturevalue("tiny_starter_dir")), "dtype": "float32"}
    plain, _ = ask(tmp_path / "plain", **model)
    key = {"encryption_key_file": make_key(tmp_path / "key"), **model}
    first, cold = ask(tmp_path / "home", **key)
    again, warm = ask(tmp_path / "home", **key)
    assert plain == first == again
    assert (cold, warm > 0) == (0, True)
    # The probe finds it where nothing is encrypted.
    found = contents(tmp_path / "plain" / "cache")
    assert any(b"xylophone" in content for content in found.values())
    for name, content in contents(tmp_path / "home" / "cache").items():
        assert b"xylophone" not in content, name
        assert b"__metadata__" not in content, name
        assert b"semantic.block" not in content, name


def test_a_wrong_key_is_refused_and_nothing_is_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, key = tmp_path / "home", make_key(tmp_path / "key")
    reply, _ = ask(home, encryption_key_file=key)
    ask(tmp_path / "plain")
    other = make_key(tmp_path / "other")
    refused: list[tuple[Path, dict[str, Any], str]] = [
        (home, {"encryption_key_file": other}, "a different key"),
        (home, {}, "the cache is encrypted"),
        (tmp_path / "plain", {"encryption_key_file": key}, "the cache is not encrypted"),
    ]
    for place, settings, words in refused:
        before = contents(place / "cache" / "blocks")
        with pytest.raises(CachePersistenceError, match=words):
            bootstrap(make_settings(place, **settings))
        assert contents(place / "cache" / "blocks") == before
        names = {path.name for path in (place / "cache").iterdir()}
        assert not {name for name in names if "damaged" in name or "suspect" in name}
    assert main(["cache", "verify", "--home", str(home)]) == 2
    assert "the cache is encrypted" in capsys.readouterr().err
    again, cached = ask(home, encryption_key_file=key)
    assert again == reply
    assert cached > 0


def killed(home: Path, target: Path, **settings: Any) -> Path:
    """Leave what a server leaves that is killed: some of its ledger is in the log alone."""
    given = make_settings(home, durability="sync", **settings)
    with run_server(given) as running, running.client() as http:
        assert http.post("/v1/chat/completions", json=CHAT).json()["durable"]
        assert (home / "cache" / "ledger.db-wal").stat().st_size
        return shutil.copytree(home, target)


def test_a_wrong_key_changes_no_byte_of_what_a_killed_server_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, other = make_key(tmp_path / "key"), make_key(tmp_path / "other")
    home = killed(tmp_path / "first", tmp_path / "home", encryption_key_file=key)
    plain = killed(tmp_path / "second", tmp_path / "plain")
    (plain / "cache" / "ledger.db-shm").unlink()
    refused: list[tuple[Path, dict[str, Any], str]] = [
        (home, {"encryption_key_file": other}, "a different key"),
        (home, {}, "the cache is encrypted"),
        (plain, {"encryption_key_file": key}, "the cache is not encrypted"),
    ]
    for place, settings, words in refused:
        before = contents(place / "cache")
        with pytest.raises(CachePersistenceError, match=f"{words}.*Nothing was changed"):
            bootstrap(make_settings(place, **settings))
        assert contents(place / "cache") == before
    before = contents(home / "cache")
    assert main(["cache", "gc", "--home", str(home)]) == 2
    assert "Nothing was changed" in capsys.readouterr().err
    assert contents(home / "cache") == before
    assert ask(home, encryption_key_file=key)[1] > 0
    assert ask(plain)[1] > 0


def test_a_damaged_part_of_the_index_is_not_taken_for_a_wrong_key(tmp_path: Path) -> None:
    key = {"encryption_key_file": make_key(tmp_path / "key")}
    home = tmp_path / "home"
    ask(home, **key)
    with closing(sqlite3.connect(home / "cache" / "ledger.db")) as ledger, ledger:
        ((tokens,), *_) = ledger.execute("SELECT tokens FROM parts").fetchall()
        bad = tokens[:-1] + bytes([tokens[-1] ^ 1])
        ledger.execute("UPDATE parts SET tokens = ? WHERE tokens = ?", (bad, tokens))
    assert ask(home, **key)[1] > 0


def test_the_cache_commands_take_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = make_key(tmp_path / "key")
    ask(tmp_path / "home", encryption_key_command=f"cat {key}")
    config = tmp_path / "config.toml"
    config.write_text(f'encryption_key_file = "{key}"\n')
    given = ("--home", str(tmp_path / "home"), "--config", str(config))
    assert main(["cache", "verify", *given]) == 0
    assert main(["cache", "stats", *given]) == 0
    assert "no bad files" in capsys.readouterr().out


def test_a_damaged_ledger_is_restored_with_its_key(tmp_path: Path) -> None:
    key = {"encryption_key_file": make_key(tmp_path / "key")}
    home = tmp_path / "home"
    reply, _ = ask(home, **key)
    ledger = home / "cache" / "ledger.db"
    assert (home / "cache" / "ledger.backup.db").exists()
    ledger.write_bytes(b"damaged" * 1000)
    again, cached = ask(home, **key)
    assert again == reply
    assert cached > 0


def test_exports_are_not_encrypted_and_come_in_anywhere(tmp_path: Path) -> None:
    settings = make_settings(tmp_path / "a", encryption_key_file=make_key(tmp_path / "key"))
    with run_server(settings) as running, running.client() as http:
        http.post("/v1/agents", json={"id": "coder", "system": SECRET})
        http.post("/v1/agents/coder/generate", json={"message": "hi", "max_tokens": 2})
        file = http.get("/v1/agents/coder/export").content
    assert b"xylophone" in file
    with run_server(make_settings(tmp_path / "b")) as running, running.client() as http:
        assert http.post("/v1/agents/import", content=file).status_code == 201


# -- the cipher -----------------------------------------------------------------------------------


def test_what_is_sealed_opens_in_its_place_with_its_key_only() -> None:
    cipher, other = Cipher(bytes(32)), Cipher(bytes([1] * 32))
    encrypted = cipher.encrypt(b"text", b"here")
    assert cipher.decrypt(memoryview(encrypted), b"here") == b"text"
    assert encrypted != cipher.encrypt(b"text", b"here")
    wrong: list[tuple[Cipher, bytes, bytes]] = [
        (cipher, encrypted, b"there"),
        (other, encrypted, b"here"),
        (cipher, encrypted[:-1] + b"x", b"here"),
        (cipher, encrypted[:20], b"here"),
        (cipher, b"text", b"here"),
    ]
    for who, content, context in wrong:
        with pytest.raises(CacheCorruptionError):
            who.decrypt(content, context)


@pytest.mark.parametrize(
    "content,mode,words",
    [
        (b"ab" * 32, 0o644, "chmod 600"),
        (b"ab" * 31, 0o600, "64 hexadecimal digits"),
        (b"xy" * 32, 0o600, "64 hexadecimal digits"),
        (None, 0, "cannot be read"),
    ],
    ids=["open to others", "short", "no digits", "gone"],
)
def test_a_key_file_that_is_none_is_refused(
    tmp_path: Path, content: bytes | None, mode: int, words: str
) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
        assert stat.S_IMODE(path.stat().st_mode) == mode
    with pytest.raises(InvalidRequestError, match=words):
        load_cipher(path, None)


@pytest.mark.parametrize(
    "command,words",
    [
        ("false", "gave no key: it ended with status 1"),
        ("no-such-command", "gave no key: No such file"),
        ("echo short", "64 hexadecimal digits"),
        ("'", "gave no key: it is not a command"),
    ],
)
def test_a_command_that_gives_no_key_is_refused(command: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"encryption_key_command.*{words}"):
        load_cipher(None, command)
