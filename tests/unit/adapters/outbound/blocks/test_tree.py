"""Files below `blocks`: those never touched, those moved to quarantine, those deleted from it."""

import logging
import os
import time
from pathlib import Path

import pytest

from semantic.adapters.outbound.blocks.files import SafetensorsCache
from semantic.domain.errors import CacheCorruptionError, CachePersistenceError
from tests.unit.adapters.outbound.blocks.sealed_files import ROOT, file_of, make_part, make_payload

pytestmark = pytest.mark.unit

SHARD = ROOT.hex()[:16]
BLOCK = f"{'a' * 64}.full.safetensors"
FOREIGN = (
    "notes.txt",
    BLOCK,  # a block's name, but not where blocks are
    f"{SHARD}/notes.txt",
    f"{SHARD}/{BLOCK}",
    f"{SHARD}/ab/notes.txt",
    f"{SHARD}/ab/model.safetensors",
    f"{SHARD}/ab/{'a' * 63}.full.safetensors",
    f"{SHARD}/ab/{'A' * 64}.full.safetensors",
    f"{SHARD}/ab/{'a' * 64}.other.safetensors",
    f"{SHARD}/ab/{BLOCK}.bak",
    f"{SHARD}/ab/{BLOCK}\n",
    f"{SHARD}/ab/0123-4.tmp",
    f"{SHARD}/ab/report.tmp",
    f"{SHARD}/abc/{BLOCK}",
    f"{SHARD}/ab/more/{BLOCK}",
    f"project/ab/{BLOCK}",
    f"{SHARD}0/ab/{BLOCK}",
)


@pytest.fixture
def cache(tmp_path: Path) -> SafetensorsCache:
    return SafetensorsCache(tmp_path / "cache")


@pytest.fixture
def blocks(tmp_path: Path) -> Path:
    made = tmp_path / "cache" / "blocks"
    made.mkdir(parents=True)
    return made


def contents(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): path.read_text()
        for path in directory.rglob("*")
        if path.is_file()
    }


def put(cache: SafetensorsCache) -> Path:
    part = cache.write(make_part(), make_payload(make_part()), is_synced=False)
    return file_of(Path("cache"), part)


def test_what_is_not_named_like_a_block_is_left_alone(
    cache: SafetensorsCache, blocks: Path
) -> None:
    for name in FOREIGN:
        path = blocks / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"not ours: {name}")
    before = contents(blocks)
    assert list(cache.scan()) == []
    assert contents(blocks) == before
    assert not (blocks.parent / "quarantine").exists()


# -- links ------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A directory of another program, with names like the cache's at every level."""
    for name in (f"{SHARD}/ab/{BLOCK}", f"ab/{BLOCK}", BLOCK):
        path = tmp_path / "elsewhere" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("not ours")
    return tmp_path / "elsewhere"


@pytest.mark.parametrize("level", ["blocks", f"blocks/{SHARD}", f"blocks/{SHARD}/8c"])
def test_no_directory_is_reached_through_a_link(
    level: str, cache: SafetensorsCache, elsewhere: Path, tmp_path: Path
) -> None:
    part = make_part()
    assert part.name.hex().startswith("8c")
    link = tmp_path / "cache" / level
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(elsewhere)
    own = file_of(tmp_path / "cache", part)
    own.parent.mkdir(parents=True, exist_ok=True)  # beyond the link
    own.write_text("not ours either")
    before = contents(elsewhere)
    assert list(cache.scan()) == []
    with pytest.raises(CachePersistenceError, match="cannot write"):
        put(cache)
    with pytest.raises(CachePersistenceError, match="cannot delete"):
        cache.delete(part)
    with pytest.raises(CachePersistenceError, match="cannot move"):
        cache.quarantine(part)
    with pytest.raises(CacheCorruptionError, match="cannot read"):
        cache.read(part)
    assert contents(elsewhere) == before


def test_a_link_in_a_blocks_place_is_set_aside_and_not_what_it_leads_to(
    cache: SafetensorsCache, elsewhere: Path, blocks: Path
) -> None:
    link = blocks / SHARD / "ab" / BLOCK
    link.parent.mkdir(parents=True)
    link.symlink_to(elsewhere / BLOCK)
    before = contents(elsewhere)
    assert list(cache.scan()) == []
    assert not link.is_symlink()
    cache.empty_quarantine(before=time.time() + 1)
    assert contents(elsewhere) == before


def test_a_quarantine_that_is_a_link_takes_nothing_and_loses_nothing(
    cache: SafetensorsCache, blocks: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "elsewhere"
    kept.mkdir()
    aside = kept / f"0000000000001-0-{BLOCK}"
    aside.write_text("not ours")
    (tmp_path / "cache" / "quarantine").symlink_to(kept)
    bad = blocks / SHARD / "ab" / BLOCK
    bad.parent.mkdir(parents=True)
    bad.write_text("bad")
    assert list(cache.scan()) == []
    assert cache.empty_quarantine(before=time.time()) == 0
    assert contents(kept) == {aside.name: "not ours"}
    assert bad.exists()


# -- quarantine -------------------------------------------------------------------------------


def spoil(cache: SafetensorsCache, tmp_path: Path) -> Path:
    put(cache)
    path = file_of(tmp_path / "cache", make_part())
    path.write_bytes(b"spoilt")
    return path


def test_a_file_that_is_set_aside_is_logged_and_keeps_its_bytes(
    cache: SafetensorsCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = spoil(cache, tmp_path)
    with caplog.at_level(logging.WARNING):
        assert list(cache.scan()) == []
    (aside,) = (tmp_path / "cache" / "quarantine").iterdir()
    assert aside.read_bytes() == b"spoilt"
    assert aside.stat().st_mode & 0o777 == 0o600
    assert aside.parent.stat().st_mode & 0o777 == 0o700
    (line,) = caplog.messages
    assert str(path.relative_to(tmp_path / "cache")) in line
    assert "quarantine" in line


def test_many_bad_files_do_not_fill_the_log(
    cache: SafetensorsCache, blocks: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shard = blocks / SHARD / "ab"
    shard.mkdir(parents=True)
    for number in range(100):
        (shard / f"{number:064x}.full.safetensors").write_bytes(b"")
    assert list(cache.scan()) == []
    assert len(caplog.messages) < 30
    assert "moved 100 files" in caplog.messages[-1]


def test_a_part_that_is_set_aside_twice_or_is_gone_is_passed_over(
    cache: SafetensorsCache, tmp_path: Path
) -> None:
    cache.quarantine(make_part())
    for _ in range(2):
        spoil(cache, tmp_path)
        cache.quarantine(make_part())
        cache.quarantine(make_part())
    assert len(list((tmp_path / "cache" / "quarantine").iterdir())) == 2


def test_quarantine_counts_as_used_until_it_is_emptied(
    cache: SafetensorsCache, tmp_path: Path
) -> None:
    spoil(cache, tmp_path)
    before = cache.used_bytes()
    others = cache.other_bytes()
    list(cache.scan())
    assert cache.used_bytes() == before > 0
    assert SafetensorsCache(tmp_path / "cache").used_bytes() == before
    assert cache.other_bytes() == others
    assert cache.empty_quarantine(before=time.time() - 60) == 0  # it is not that old
    assert cache.used_bytes() == before
    assert cache.empty_quarantine(before=time.time() + 1) == before
    assert cache.used_bytes() == 0


def test_only_what_was_set_aside_leaves_quarantine(cache: SafetensorsCache, tmp_path: Path) -> None:
    quarantine = tmp_path / "cache" / "quarantine"
    quarantine.mkdir(parents=True)
    (quarantine / "notes.txt").write_text("not ours")
    (quarantine / f"0000000000001-0-{BLOCK}").symlink_to(quarantine / "notes.txt")
    os.mkfifo(quarantine / f"0000000000001-1-{BLOCK}")
    (quarantine / f"0000000000001-2-{BLOCK}").mkdir()
    cache.empty_quarantine(before=time.time())
    assert {path.name for path in quarantine.iterdir()} == {
        "notes.txt",
        f"0000000000001-2-{BLOCK}",
    }
