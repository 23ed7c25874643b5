"""Every way a file can be wrong is a miss with a reason: no crash, and no wrong payload."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from semantic.adapters.outbound.blocks.files import SafetensorsCache
from semantic.adapters.outbound.blocks.format import KVCodec
from semantic.domain.blocks import BlockNamespace, BlockPart
from semantic.domain.errors import CacheCorruptionError
from semantic.domain.spec import LayerKind
from semantic.ports.backend import HostBuffer
from tests.unit.adapters.outbound.blocks.sealed_files import (
    OPENING,
    file_of,
    make_part,
    make_payload,
    put_together,
    seal,
    take_apart,
)

pytestmark = pytest.mark.unit

Header = dict[str, dict[str, Any]]
PART = make_part((7, 8))


@pytest.fixture
def cache(tmp_path: Path) -> SafetensorsCache:
    return SafetensorsCache(tmp_path)


@pytest.fixture
def path(tmp_path: Path, cache: SafetensorsCache) -> Path:
    """Of a file that is as it should be."""
    cache.write(PART, make_payload(PART), is_synced=False)
    return file_of(tmp_path, PART)


def refusal(cache: SafetensorsCache, part: BlockPart = PART) -> str:
    with pytest.raises(CacheCorruptionError) as caught:
        cache.read(part)
    return caught.value.message


def test_any_flipped_bit(cache: SafetensorsCache, path: Path) -> None:
    content = path.read_bytes()
    for index in range(len(content)):
        damaged = bytearray(content)
        damaged[index] ^= 1 << (index % 8)
        path.write_bytes(damaged)
        refusal(cache)


def test_cut_off_anywhere(cache: SafetensorsCache, path: Path) -> None:
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        refusal(cache)
    assert "bytes, not" in refusal(cache, replace(PART, nbytes=len(content)))


def test_swapped(tmp_path: Path, cache: SafetensorsCache, path: Path) -> None:
    other = make_part((7, 9))
    cache.write(other, make_payload(other), is_synced=False)
    mine, theirs = path.read_bytes(), file_of(tmp_path, other).read_bytes()
    path.write_bytes(theirs)
    file_of(tmp_path, other).write_bytes(mine)
    assert refusal(cache) == refusal(cache, other)
    assert "a different part" in refusal(cache)


@pytest.mark.parametrize(
    "asked",
    [
        replace(PART, start=1),
        replace(PART, parent=PART.name),
        replace(PART, tokens=PART.tokens + PART.tokens),
    ],
    ids=["start", "parent", "tokens"],
)
def test_not_what_is_asked_for(cache: SafetensorsCache, path: Path, asked: BlockPart) -> None:
    assert path.exists()
    assert "a different part" in refusal(cache, asked)


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"\xff" * 100, b"hello" * 100])
def test_not_a_block_at_all(cache: SafetensorsCache, path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert "not a block" in refusal(cache)
    assert list(cache.scan()) == []
    assert not path.exists()


def test_tensors_of_another_program_are_refused(cache: SafetensorsCache, path: Path) -> None:
    save_file({"keys": np.ones(100, np.float32)}, path)
    assert "not a block" in refusal(cache)


def test_neither_a_directory_nor_a_pipe_nor_a_link(
    tmp_path: Path, cache: SafetensorsCache, path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.mkdir()
    refusal(cache)
    path.rmdir()
    os.mkfifo(path)
    assert "not a block" in refusal(cache)
    path.unlink()
    path.symlink_to(elsewhere)
    assert "symbolic" in refusal(cache)
    list(cache.scan())
    assert elsewhere.exists()


def change(name: str, value: object) -> Callable[[Header], None]:
    return lambda header: header["__metadata__"].update({name: value})


def entry(name: str, **fields: object) -> Callable[[Header], None]:
    return lambda header: header.setdefault(name, {}).update(fields)


def drop(name: str) -> Callable[[Header], None]:
    def dropped(header: Header) -> None:
        header.pop(name, None)
        header.get("__metadata__", {}).pop(name, None)

    return dropped


OTHER = BlockNamespace("other", "raw").root().hex()
HOSTILE: dict[str, Callable[[Header], None]] = {
    "another version": change("format", "semantic.block.v2"),
    "another root": change("root", OTHER),
    "another parent": change("parent", OTHER),
    "another name": change("name", OTHER),
    "a short root": change("root", "ab"),
    "a root that is no number": change("root", "zz"),
    "another kind": change("kind", "window"),
    "an unknown kind": change("kind", "half"),
    "a later end": change("end", "3"),
    "no end": drop("end"),
    "a start after the end": change("start", "2"),
    "a negative start": change("start", "-1"),
    "a start that is no number": change("start", "first"),
    "an end of many digits": change("end", "9" * 5000),
    "no abi": drop("abi"),
    "metadata that is no text": change("abi", 1),
    "no metadata": drop("__metadata__"),
    "no token ids": drop("tokens"),
    "token ids of another type": entry("tokens", dtype="F32"),
    "token ids in a table": entry("tokens", shape=[2, 1]),
    "a tensor of an unknown type": entry("keys", dtype="Q7"),
    "a tensor of another shape": entry("keys", shape=[1, 2, 3]),
    "a shape beyond measure": entry("keys", shape=[2**62, 2**62, 2**62]),
    "a negative shape": entry("keys", shape=[-1, -2, 2]),
    "a shape that is no number": entry("keys", shape=["1"]),
    "no shape": entry("keys", shape=None),
    "negative offsets": entry("keys", data_offsets=[-8, 0]),
    "offsets the wrong way round": entry("keys", data_offsets=[16, 8]),
    "offsets beyond the end": entry("keys", data_offsets=[2**40, 2**40 + 8]),
    "offsets that are true and false": entry("keys", data_offsets=[False, True]),
    "one offset": entry("keys", data_offsets=[8]),
    "overlapping tensors": entry("keys", data_offsets=[4, 12]),
    "a second tensor in the same place": entry(
        "again", dtype="F16", shape=[1, 2, 2], data_offsets=[8, 16]
    ),
    "a tensor nobody described": entry("more", dtype="U8", shape=[0], data_offsets=[16, 16]),
    "no tensor": drop("keys"),
    "no description": drop("buffer.keys"),
    "a description that says nothing": change("buffer.keys", "float16"),
    "a description of another size": change("buffer.keys", "float16[1,2,3] raw"),
    "a description of another dtype": change("buffer.keys", "float32[1,2,2] raw"),
    "a description of a shape beyond measure": change("buffer.keys", f"f16[{'9' * 5000}] raw"),
    "a buffer that is not there": change("buffer.values", "float16[1,2,2] raw"),
    "an unknown resting format": change("buffer.keys", "float16[1,2,2] q2g64"),
    "a quantised buffer without its steps": change("buffer.keys", "float16[1,2,2] q8g64"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_with_a_right_checksum(
    cache: SafetensorsCache, path: Path, case: str
) -> None:
    header, data = take_apart(path.read_bytes())
    HOSTILE[case](header)
    path.write_bytes(put_together(header, data))
    # Without metadata there is no place for a checksum.
    assert "checksum" not in refusal(cache)
    list(cache.scan())


def test_resealing_alone_changes_nothing(cache: SafetensorsCache, path: Path) -> None:
    """The cases above fail for the reason they name, not for how they were made."""
    path.write_bytes(put_together(*take_apart(path.read_bytes())))
    assert cache.read(PART).nbytes == 8


@pytest.mark.parametrize(
    "header",
    [
        OPENING + b"0" * 32 + b'"',
        OPENING + b"0" * 32 + b'"}}' + b"x",
        OPENING + b"0" * 32 + b'","a":' + b"[" * 100_000,
        OPENING + b"0" * 32 + b'\xff\xfe"}}',
        OPENING + b"0" * 32 + b'"}}',
        OPENING + b"0" * 32 + b'","format":"semantic.block.v1"},"tokens":7}',
    ],
    ids=["cut", "trailing", "deep", "not text", "bare", "no entry"],
)
def test_a_header_that_is_not_json(cache: SafetensorsCache, path: Path, header: bytes) -> None:
    path.write_bytes(seal(header, b""))
    assert "header" in refusal(cache) or "format" in refusal(cache)
    assert list(cache.scan()) == []


@pytest.mark.parametrize("length", [10 * 2**30, 2**64 - 1, 2**63, 10_000, 2**20 + 1])
def test_a_header_length_beyond_the_file(cache: SafetensorsCache, path: Path, length: int) -> None:
    content = path.read_bytes()
    path.write_bytes(seal(content[8:], b"", length=length))
    assert "header cannot have" in refusal(cache)
    assert list(cache.scan()) == []


def test_a_file_beyond_measure(cache: SafetensorsCache, path: Path) -> None:
    """No memory is asked for before the size is judged; the file is one hole."""
    with path.open("r+b") as file:
        file.truncate(2**40)
    assert "not a block" in refusal(cache)


def test_a_hostile_scan_of_token_ids(cache: SafetensorsCache, path: Path) -> None:
    """A file may claim a billion token ids; they must be in it."""
    header, data = take_apart(path.read_bytes())
    header["tokens"].update(shape=[2**30], data_offsets=[0, 2**32])
    path.write_bytes(put_together(header, data))
    assert list(cache.scan()) == []


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 3e38])
def test_hostile_steps_are_expanded_without_an_alarm(tmp_path: Path, number: float) -> None:
    cache = SafetensorsCache(tmp_path, KVCodec("q8g64"))
    numbers = np.linspace(-1, 1, 128, dtype=np.float32)
    buffer = HostBuffer("keys", (2, 64), "float32", numbers.tobytes())
    cache.write(PART, make_payload(PART, buffer), is_synced=False)
    path = file_of(tmp_path, PART)
    header, data = take_apart(path.read_bytes())
    assert header["keys.steps"]["data_offsets"] == [8, 16]
    steps = np.full(2, number, np.float32).tobytes()
    path.write_bytes(put_together(header, data[:8] + steps + data[16:]))
    assert cache.read(PART).nbytes == 512


@given(content=st.binary(max_size=400), position=st.integers(0, 700))
def test_no_bytes_make_it_crash(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, position: int
) -> None:
    directory = tmp_path_factory.mktemp("cache")
    cache = SafetensorsCache(directory)
    cache.write(PART, make_payload(PART), is_synced=False)
    path = file_of(directory, PART)
    whole = path.read_bytes()
    damaged = whole[:position] + content + whole[position + len(content) :]
    path.write_bytes(damaged)
    if damaged != whole:
        refusal(cache)
    list(cache.scan())


@given(
    header=st.dictionaries(
        st.sampled_from(["tokens", "keys", "more"]),
        st.fixed_dictionaries(
            {},
            optional={
                "dtype": st.sampled_from(["U8", "U32", "F16", 3]),
                "shape": st.lists(st.integers(-2, 20), max_size=3) | st.none(),
                "data_offsets": st.lists(st.integers(-5, 40), max_size=3) | st.text(max_size=2),
            },
        ),
    ),
    metadata=st.dictionaries(
        st.sampled_from(["start", "end", "kind", "root", "buffer.keys", "buffer.more"]),
        st.text(max_size=8) | st.sampled_from(["0", "2", "u8[8] raw", "float16[2,64] q4g64"]),
    ),
)
def test_no_sealed_header_makes_it_crash(
    tmp_path_factory: pytest.TempPathFactory, header: Header, metadata: dict[str, str]
) -> None:
    directory = tmp_path_factory.mktemp("cache")
    cache = SafetensorsCache(directory)
    cache.write(PART, make_payload(PART), is_synced=False)
    path = file_of(directory, PART)
    found, data = take_apart(path.read_bytes())
    found["__metadata__"].update(metadata)
    path.write_bytes(put_together({**found, **header}, data))
    try:
        payload = cache.read(PART)
    except CacheCorruptionError:
        return
    assert payload.kind is LayerKind.FULL
    assert sum(len(bytes(buffer.data)) for buffer in payload.buffers) <= len(data)
