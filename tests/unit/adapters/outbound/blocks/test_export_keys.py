from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from semantic.adapters.outbound.blocks.export_keys import ExportKeys, own_key
from semantic.domain.errors import CachePersistenceError

pytestmark = pytest.mark.unit


def test_those_who_are_first_at_once_have_one_key(tmp_path: Path) -> None:
    path = tmp_path / "home" / "export.key"
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: own_key(path), range(8)))

    assert keys == {own_key(path)}
    assert [found.name for found in path.parent.iterdir()] == ["export.key"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64, b"0" * 65, b"G" * 64])
def test_what_is_no_key_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "export.key"
    path.write_bytes(content)

    with pytest.raises(CachePersistenceError, match=r"export\.key"):
        own_key(path)

    assert path.read_bytes() == content


def test_keys_are_not_shown() -> None:
    assert "secret" not in repr(ExportKeys(b"secret", {"laptop": b"secret too"}))


@pytest.mark.parametrize("signature", ["", "00", "ä" * 64])
def test_what_is_no_signature_is_nobodys(signature: str) -> None:
    assert ExportKeys(b"secret").signer(b"content", signature) == ""
