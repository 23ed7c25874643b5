"""The bytes of a cache directory while its files are counted, written and removed."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.adapters.outbound.blocks.files import SafetensorsCache
from semantic.domain.blocks import BlockPart
from tests.unit.adapters.outbound.blocks.sealed_files import make_part, make_payload

pytestmark = pytest.mark.unit

PARTS = [make_part(range(index, index + 4)) for index in range(6)]


def put(cache: SafetensorsCache, part: BlockPart) -> None:
    cache.write(part, make_payload(part), is_synced=False)


def true_size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_the_index_tells_the_bytes_until_they_are_counted(tmp_path: Path) -> None:
    first = SafetensorsCache(tmp_path)
    for part in PARTS[:3]:
        put(first, part)
    (tmp_path / "blocks" / "notes.txt").write_text("theirs")
    cache = SafetensorsCache(tmp_path)
    cache.expect(1000)
    assert cache.used_bytes() == 1000
    put(cache, PARTS[3])
    assert cache.used_bytes() > 1000
    cache.count(lambda: False)
    assert cache.used_bytes() == true_size(tmp_path)


def test_a_count_that_is_stopped_changes_nothing(tmp_path: Path) -> None:
    cache = SafetensorsCache(tmp_path)
    for part in PARTS:
        put(cache, part)
    cache.expect(1000)
    cache.count(lambda: True)
    assert cache.used_bytes() == 1000
    cache.count(lambda: False)
    assert cache.used_bytes() == true_size(tmp_path)


@given(st.lists(st.tuples(st.sampled_from("wdq"), st.sampled_from(PARTS)), max_size=12))
def test_changes_during_a_count_are_counted_once(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[str, BlockPart]]
) -> None:
    directory = tmp_path_factory.mktemp("cache")
    cache = SafetensorsCache(directory)
    for part in PARTS[:4]:
        put(cache, part)
    acts: dict[str, Callable[[BlockPart], object]] = {
        "w": lambda part: put(cache, part),
        "d": cache.delete,
        "q": cache.quarantine,
    }
    left = list(changes)

    def pause() -> bool:
        for _ in range(2):
            if left:
                name, part = left.pop()
                acts[name](part)
        return False

    cache.count(pause)
    assert cache.used_bytes() == true_size(directory)
    while left:
        pause()
    assert cache.used_bytes() == true_size(directory)


def test_what_cannot_be_read_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = SafetensorsCache(tmp_path)
    put(cache, PARTS[0])
    size = true_size(tmp_path)
    (tmp_path / "blocks" / "theirs").mkdir()
    (tmp_path / "quarantine").mkdir()
    scan = os.scandir

    def refuse(path: Path) -> object:
        if path.name in ("theirs", "quarantine"):
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    cache.expect(1000)
    cache.count(lambda: False)
    monkeypatch.undo()
    assert cache.used_bytes() == size
