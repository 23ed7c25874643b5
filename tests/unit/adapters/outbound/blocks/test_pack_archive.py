"""Keys of packs, and when stored KV cache counts as equal to computed."""

import stat
from pathlib import Path

import numpy as np
import pytest

from semantic.adapters.outbound.blocks.format import FORMATS, KVCodec
from semantic.adapters.outbound.blocks.pack_archive import PackFile
from semantic.adapters.outbound.blocks.pack_keys import PackKeys
from semantic.domain.errors import CachePersistenceError, InvalidRequestError
from semantic.domain.spec import LayerKind
from semantic.ports.backend import HostBuffer, KVPayload

pytestmark = pytest.mark.unit


@pytest.fixture
def keys(tmp_path: Path) -> PackKeys:
    return PackKeys(tmp_path / "home" / "pack.key", tmp_path / "home" / "pack_keys")


# -- keys ---------------------------------------------------------------------------------------


def test_a_signature_is_of_one_content_and_one_key(keys: PackKeys, tmp_path: Path) -> None:
    other = PackKeys(tmp_path / "other", tmp_path / "none")
    signature = keys.sign(b"text")
    signer = keys.signer(b"text", keys.public, signature)
    assert signer is not None
    assert (signer.key, signer.name) == (keys.public, "this server")
    assert keys.signer(b"texT", keys.public, signature) is None
    assert keys.signer(b"text", other.public, signature) is None
    assert keys.signer(b"text", keys.public, other.sign(b"text")) is None
    for key, made in [("zz", signature), (keys.public, ""), ("0" * 64, signature), ("", "")]:
        assert keys.signer(b"text", key, made) is None
    stranger = keys.signer(b"text", other.public, other.sign(b"text"))
    assert stranger is not None
    assert stranger.name == ""


def test_the_private_key_is_kept_and_private(keys: PackKeys, tmp_path: Path) -> None:
    first = keys.public
    file = tmp_path / "home" / "pack.key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert first not in file.read_text()
    assert PackKeys(file, tmp_path / "none").public == first


def test_trust_is_given_and_taken(keys: PackKeys, tmp_path: Path) -> None:
    assert keys.trusted() == {}
    keys.trust("alice", "a" * 64)
    keys.trust("bob", "b" * 64)
    keys.trust("bob", "b" * 64)
    assert keys.trusted() == {"alice": "a" * 64, "bob": "b" * 64}
    with pytest.raises(InvalidRequestError, match="bob has another key"):
        keys.trust("bob", "c" * 64)
    for name, key in [("../x", "a" * 64), ("", "a" * 64), ("x", "A" * 64), ("x", "a" * 63)]:
        with pytest.raises(InvalidRequestError):
            keys.trust(name, key)
    keys.untrust("alice")
    assert keys.trusted() == {"bob": "b" * 64}
    file = tmp_path / "home" / "pack_keys"
    assert [path.name for path in file.parent.iterdir()] == ["pack_keys"]
    file.write_text("bob\n")
    with pytest.raises(CachePersistenceError, match=r"line 1 of .*pack_keys"):
        keys.trusted()


# -- comparison ---------------------------------------------------------------------------------


def payload(numbers: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]", dtype: str) -> KVPayload:
    data: bytes
    if dtype == "bfloat16":
        data = (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    else:
        data = numbers.astype(dtype).tobytes()
    buffer = HostBuffer("k", numbers.shape, dtype, data)
    return KVPayload("abi", LayerKind.FULL, 0, len(numbers), (buffer,))


@pytest.mark.parametrize(
    "dtype, bits, allowed",
    [
        ("float32", 16, 1e-4),
        ("float16", 16, 1e-2),
        ("bfloat16", 16, 6e-2),
        ("float32", 8, 1e-4 + 5e-2),
        ("float32", 4, 1e-4 + 4e-1),
    ],
)
def test_numbers_agree_within_the_tolerance_of_their_format(
    keys: PackKeys, dtype: str, bits: int, allowed: float
) -> None:
    file = PackFile(KVCodec(FORMATS[bits]), keys)
    numbers = np.random.default_rng(0).uniform(-1, 1, (8, 4)).astype(np.float32)
    numbers[0, 0] = 1
    ours = payload(numbers, dtype)
    for share, is_equal in [(0.0, True), (0.7, True), (1.4, False)]:
        moved = numbers.copy()
        moved[5, 1] += share * allowed
        assert (file.compare(payload(moved, dtype), ours) == "") is is_equal
    for wrong in (np.nan, np.inf):
        moved = numbers.copy()
        moved[7, 3] = wrong
        assert "deviates" in file.compare(payload(moved, dtype), ours)


def test_anything_else_must_be_equal(keys: PackKeys) -> None:
    file = PackFile(KVCodec(), keys)
    numbers = np.ones((4, 2), np.float32)
    ours = payload(numbers, "float32")
    ids = KVPayload("abi", LayerKind.FULL, 0, 4, (HostBuffer("k", (4,), "u32", bytes(range(16))),))
    others = KVPayload("abi", LayerKind.FULL, 0, 4, (HostBuffer("k", (4,), "u32", bytes(16)),))
    assert file.compare(ids, ids) == ""
    assert "other values" in file.compare(others, ids)
    assert "shape or dtype" in file.compare(ids, ours)
    assert "positions" in file.compare(payload(numbers[:2], "float32"), ours)
    assert "layers" in file.compare(KVPayload("abi", LayerKind.FULL, 0, 4, ()), ours)
