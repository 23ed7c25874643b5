import json
import stat
import threading
from pathlib import Path

import pytest

from semantic.adapters.config.keys import (
    KeyFile,
    RateEntry,
    TenantEntry,
    edit_key_file,
    load_key_ring,
    read_key_file,
)
from semantic.adapters.config.sources import load_settings
from semantic.domain.access import Rate, secret_digest
from semantic.domain.errors import InvalidRequestError
from semantic.entrypoints.cli.app import main

pytestmark = pytest.mark.unit


def test_a_key_is_kept_as_its_hash_for_its_owner_alone(tmp_path: Path) -> None:
    path, secrets = tmp_path / "new" / "keys.json", []

    def add(file: KeyFile) -> KeyFile:
        file, _, secret = file.with_key("acme", TenantEntry(weight=2), rate=RateEntry())
        secrets.append(secret)
        return file

    edit_key_file(path, add)
    assert secrets[0] not in path.read_text()
    assert secret_digest(secrets[0]) in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["keys.json"]
    ring = read_key_file(path).to_domain()
    key = ring.find_key(secrets[0])
    assert key is not None
    assert (key.tenant, ring.policy("acme").weight, ring.policy("other").weight) == ("acme", 2, 1)


def test_changes_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"

    def add() -> None:
        edit_key_file(path, lambda file: file.with_key("t", TenantEntry())[0])

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_key_file(path).keys) == 8


@pytest.mark.parametrize(
    "content,words",
    [
        ("{", "the file"),
        ('{"keys": [{"id": "a"}]}', "keys.0.tenant"),
        ('{"version": 2}', "version"),
        ('{"tenants": {"../x": {}}}', "a tenant's name must be"),
        ('{"tenants": {"t": {"weight": 0}}}', "tenants.t.weight"),
        ('{"limits": {"requests": 3}}', "limits.requests"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(InvalidRequestError, match=words) as refusal:
        read_key_file(path)
    assert str(path) in refusal.value.message


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text("{}")
    path.chmod(0o666)
    with pytest.raises(InvalidRequestError, match="chmod 600"):
        read_key_file(path)


def test_keys_of_the_settings_stand_beside_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SEMANTIC_API_KEY", "a-key-of-many-letters")
    given = {"home": tmp_path, "admin_key": secret_digest("the admin's key, hashed")}
    settings = load_settings(given)
    edit_key_file(tmp_path / "keys.json", lambda file: file.with_key("t", TenantEntry())[0])
    path, marker = tmp_path / "keys.json", tmp_path / "marker"
    ring = load_key_ring(path, marker, settings.api_key, settings.admin_key)
    assert len(ring.keys) == 3
    user, admin = ring.find_key("a-key-of-many-letters"), ring.find_key("the admin's key, hashed")
    assert user is not None
    assert admin is not None
    assert (user.is_admin, admin.is_admin, user.tenant) == (False, True, "local")
    assert "a-key-of-many-letters" not in repr(settings)


def test_the_error_for_a_lost_key_file_says_what_to_do(tmp_path: Path) -> None:
    path, marker = tmp_path / "keys.json", tmp_path / "marker"

    def load(api_key: str | None = None) -> int:
        return len(load_key_ring(path, marker, api_key, None).keys)

    def add() -> None:
        edit_key_file(path, lambda file: file.with_key("t", TenantEntry())[0])

    assert load() == 0
    edit_key_file(path, lambda file: file)  # limits alone need no key
    assert load() == 0
    path.unlink()
    assert load() == 0
    add()
    assert load() == 1
    path.unlink()
    for api_key in (None, "a-key-of-many-letters"):
        with pytest.raises(InvalidRequestError, match=r"keys\.json is missing.*keys add.*marker"):
            load(api_key)
    add()
    assert load() == 1
    path.unlink()
    marker.unlink()
    assert load() == 0


@pytest.mark.parametrize("value", ["short", "", "with a line\nbreak in the key", "ключ" * 10])
def test_weak_or_strange_keys_are_refused(value: str) -> None:
    with pytest.raises(InvalidRequestError, match="semantic keys add"):
        load_settings({"api_key": value})


# -- the command ----------------------------------------------------------------------------------


def test_keys_are_added_listed_and_revoked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def keys(*arguments: str) -> str:
        assert main(["keys", *arguments, "--home", str(tmp_path)]) == 0
        return capsys.readouterr().out

    secret = keys(
        "add",
        "--tenant",
        "acme",
        "--note",
        "laptop",
        "--limit",
        "requests_per_minute=3",
        "--tenant-limit",
        "weight=2.5",
        "--tenant-limit",
        "agent.tokens_per_minute=9",
    ).strip()
    keys("add", "--admin")
    keys("add", "--tenant", "acme", "--tenant-limit", "max_concurrent=4")
    path = tmp_path / "keys.json"
    first = json.loads(path.read_text())["keys"][0]["id"]
    listing = keys("list")
    assert secret not in listing
    assert "requests_per_minute=3  laptop" in listing
    assert "tenant acme: weight=2.5, max_concurrent=4, agent.tokens_per_minute=9" in listing

    ring = read_key_file(path).to_domain()
    found = ring.find_key(secret)
    assert found is not None
    assert found.rate == Rate(requests=3)
    keys("revoke", first)
    assert read_key_file(path).to_domain().find_key(secret) is None
    assert "revoked" in keys("list").splitlines()[0]


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["add", "--tenant", "a/b"], "a tenant's name must be"),
        (["add", "--limit", "speed=3"], "limit speed"),
        (["add", "--tenant-limit", "weight=0"], "limit weight"),
        (["add", "--tenant-limit", "agent.tokens_per_minute=many"], "agent.tokens_per_minute"),
        (["revoke", "key_unknown"], "no key 'key_unknown'"),
    ],
)
def test_a_wrong_option_is_a_one_line_error_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["keys", *arguments, "--home", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "keys.json").exists()
