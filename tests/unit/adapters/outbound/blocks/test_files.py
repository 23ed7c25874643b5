import os
import resource
import stat
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from semantic.adapters.outbound.blocks.files import SafetensorsCache
from semantic.adapters.outbound.blocks.format import KVCodec, KVFormat
from semantic.domain.blocks import BlockName, BlockNamespace, BlockOrigin, BlockPart
from semantic.domain.errors import CacheCorruptionError, CachePersistenceError
from semantic.domain.spec import LayerKind
from semantic.ports.backend import HostBuffer, KVPayload
from tests.chaos.mounts import small_disk
from tests.unit.adapters.outbound.blocks.sealed_files import (
    ROOT,
    buffers_of,
    file_of,
    make_part,
    make_payload,
)

pytestmark = pytest.mark.unit

# One block of two tokens, as docs/cache-format.md shows it.
EXAMPLE = (
    b"p\x02\x00\x00\x00\x00\x00\x00"
    b'{"__metadata__":{"checksum":"a7a1faa7e1d26627acfc9d6fd540251d",'
    b'"format":"semantic.block.v1",'
    b'"root":"f40f2c879da243d67200233ed76b3de2e66589cbb4843e6fdd59bc3502c87037",'
    b'"name":"8c60d9d7106e9cf64e2e320bde58ed593b662a4447b909782b05205b3bfb92ac",'
    b'"parent":"f40f2c879da243d67200233ed76b3de2e66589cbb4843e6fdd59bc3502c87037",'
    b'"kind":"full","start":"0","end":"2","abi":"demo.v1","kv_format":"raw",'
    b'"fingerprint":"example","buffer.keys":"float16[1,2,2] raw"},'
    b'"tokens":{"dtype":"U32","shape":[2],"data_offsets":[0,8]},'
    b'"keys":{"dtype":"F16","shape":[1,2,2],"data_offsets":[8,16]}}' + b" " * 59 + b""
    b"\x07\x00\x00\x00\x08\x00\x00\x00"
    b"\x00\x3c\x00\x40\x00\x42\x00\x44"
)


@pytest.fixture
def cache(tmp_path: Path) -> SafetensorsCache:
    return SafetensorsCache(tmp_path)


def put(cache: SafetensorsCache, part: BlockPart, *buffers: HostBuffer) -> BlockPart:
    return cache.write(part, make_payload(part, *buffers), is_synced=False)


def all_files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if not path.is_dir()]


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in all_files(directory))


# -- what computed the blocks -------------------------------------------------------------------


def test_each_root_names_the_model_that_computed_it(
    cache: SafetensorsCache, tmp_path: Path
) -> None:
    other = BlockNamespace("example", "other").root()
    cache.fingerprint_of = {ROOT: "model", other: ""}.__getitem__
    of_other = [make_part((n,), parent=other, root=other) for n in (1, 2)]
    parts = [put(cache, part) for part in (make_part((1, 2)), *of_other)]
    for known in (None, parts):
        assert SafetensorsCache(tmp_path).origins(known) == [
            BlockOrigin(other, "", "demo.v1", "raw", 2),
            BlockOrigin(ROOT, "model", "demo.v1", "raw", 1),
        ]


def test_bad_files_are_ignored_and_left(cache: SafetensorsCache, tmp_path: Path) -> None:
    good, bad = put(cache, make_part((1,))), put(cache, make_part((2,)))
    parts = [bad, good]
    lost = BlockNamespace("example", "lost").root()
    parts.append(put(cache, make_part((3,), parent=lost, root=lost)))
    for path in (
        file_of(tmp_path, bad),
        file_of(tmp_path, make_part((3,), parent=lost, root=lost)),
    ):
        path.write_bytes(b"nonsense")
    before = sorted(all_files(tmp_path))
    for known in (None, parts):
        assert SafetensorsCache(tmp_path).origins(known) == [
            BlockOrigin(ROOT, "", "demo.v1", "raw", 2)
        ]
    assert sorted(all_files(tmp_path)) == before
    assert cache.read(good).end == 1


# -- what is written --------------------------------------------------------------------------


def test_the_bytes_of_a_file(tmp_path: Path) -> None:
    part = make_part((7, 8))
    numbers = np.array([1, 2, 3, 4], "<f2").tobytes()
    cache = SafetensorsCache(tmp_path)
    cache.fingerprint_of = {ROOT: "example"}.__getitem__
    written = put(cache, part, HostBuffer("keys", (1, 2, 2), "float16", numbers))
    assert file_of(tmp_path, part).read_bytes() == EXAMPLE
    assert written == replace(part, nbytes=len(EXAMPLE))
    page = Path(__file__).parents[5] / "docs" / "cache-format.md"
    assert EXAMPLE[8:].split(b" " * 8)[0].decode() in page.read_text().replace("\n", "")


def test_the_library_reads_it(tmp_path: Path) -> None:
    part = make_part(range(9))  # token ids that end off the alignment
    numbers = np.arange(18, dtype=np.float32).reshape(1, 9, 2)
    words = np.arange(3, dtype=np.uint64)
    put(
        SafetensorsCache(tmp_path),
        part,
        HostBuffer("state", (1, 9, 2), "float32", numbers.tobytes()),
        HostBuffer("words", (3,), "u64", words.tobytes()),
    )
    tensors = load_file(file_of(tmp_path, part))
    assert tensors["tokens"].dtype == np.uint32
    assert tensors["tokens"].tolist() == list(range(9))
    assert np.array_equal(tensors["state"], numbers)
    assert np.array_equal(tensors["words"], words)
    with safetensors.safe_open(file_of(tmp_path, part), "numpy") as opened:
        assert opened.metadata()["name"] == part.name.hex()
        assert opened.metadata()["format"] == "semantic.block.v1"


@pytest.mark.parametrize("kv_format", ["q8g64", "q4g64"])
def test_the_library_reads_what_is_quantised(tmp_path: Path, kv_format: str) -> None:
    part = make_part(range(5))
    numbers = np.random.default_rng(3).standard_normal((2, 5, 64)).astype(np.float32)
    cache = SafetensorsCache(tmp_path, KVCodec(kv_format))  # type: ignore[arg-type]
    put(cache, part, HostBuffer("keys", (2, 5, 64), "float32", numbers.tobytes()))
    tensors = load_file(file_of(tmp_path, part))
    assert tensors["keys.codes"].shape == (2, 5, 64 if kv_format == "q8g64" else 32)
    assert tensors["keys.steps"].shape == tensors["keys.minima"].shape == (2, 5, 1)
    assert np.array_equal(tensors["keys.minima"][..., 0], numbers.min(axis=-1))


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    directory = tmp_path / "home" / "cache"
    previous = os.umask(0)
    try:
        put(SafetensorsCache(directory), make_part())
    finally:
        os.umask(previous)
    path = file_of(directory, make_part())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    while path != directory:
        path = path.parent
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


# -- what is read -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LayerKind)
def test_every_kind_comes_back(cache: SafetensorsCache, kind: LayerKind) -> None:
    part = make_part(range(100, 356), kind, start=512)
    payload = KVPayload(
        "torch.v1.bfloat16",
        kind,
        640 if kind is LayerKind.WINDOW else 512,
        768,
        (
            HostBuffer("odd", (3,), "u8", b"abc"),
            HostBuffer("keys", (2, 128, 4), "bfloat16", os.urandom(2048)),
            HostBuffer("wide", (1,), "u64", b"12345678"),
            HostBuffer("none", (0, 4), "float32", b""),
            HostBuffer("foreign", (2, 5), "float4_e2m1", b"12345"),
            HostBuffer("scalar", (), "f32", b"1234"),
        ),
    )
    read = cache.read(cache.write(part, payload, is_synced=False))
    assert replace(read, buffers=()) == replace(payload, buffers=())
    assert buffers_of(read) == buffers_of(payload)


@pytest.mark.parametrize("num_tokens", [1, 3, 16, 255, 256])
def test_buffers_are_aligned_views_of_what_was_read(
    cache: SafetensorsCache, num_tokens: int
) -> None:
    part = make_part(range(num_tokens))
    size = (4, num_tokens, 64)
    data = np.ones(size, np.float16).tobytes()
    put(
        cache,
        part,
        HostBuffer("keys", size, "float16", data),
        HostBuffer("values", size, "float16", data),
    )
    first, second = (np.frombuffer(b.data, np.uint8) for b in cache.read(part).buffers)
    assert first.ctypes.data % 64 == 0
    assert second.ctypes.data == first.ctypes.data + first.nbytes


@given(
    ids=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=70),
    buffers=st.lists(st.binary(max_size=300), max_size=4),
)
def test_any_payload_comes_back(
    tmp_path_factory: pytest.TempPathFactory, ids: list[int], buffers: list[bytes]
) -> None:
    cache = SafetensorsCache(tmp_path_factory.mktemp("cache"))
    part = make_part(ids)
    payload = KVPayload(
        'a "b" \u00e9\x00',
        LayerKind.FULL,
        0,
        len(ids),
        tuple(HostBuffer(f"n{i}", (len(b),), "uint8", b) for i, b in enumerate(buffers)),
    )
    read = cache.read(cache.write(part, payload, is_synced=False))
    assert read.abi == payload.abi
    assert buffers_of(read) == buffers_of(payload)


@pytest.mark.parametrize("kv_format", ["raw", "q8g64", "q4g64"])
@pytest.mark.parametrize("dtype, code", [("float32", "<f4"), ("float16", "<f2")])
@pytest.mark.parametrize("num_tokens", [1, 256])
def test_reading_takes_no_more_room_than_declared(
    tmp_path: Path, kv_format: KVFormat, dtype: str, code: str, num_tokens: int
) -> None:
    part = make_part(range(num_tokens))
    numbers = np.random.default_rng(1).random((2, num_tokens, 64)).astype(code)
    buffer = HostBuffer("keys", numbers.shape, dtype, numbers.tobytes())
    cache = SafetensorsCache(tmp_path, KVCodec(kv_format))
    written = put(cache, part, buffer)
    room, payload = cache.room_for(written), cache.read(written)
    if kv_format == "raw":
        assert payload.nbytes <= room <= payload.nbytes + 1024
    else:
        # While it is expanded, what it rests as is in memory too.
        resting = KVCodec(kv_format).encode(make_payload(part, buffer))
        tensors = [memoryview(t.data).nbytes for rested in resting for t in rested.tensors]
        assert payload.nbytes + sum(tensors) <= room


def test_a_part_without_buffers_takes_no_room_to_speak_of(cache: SafetensorsCache) -> None:
    part = make_part((1,))
    empty = KVPayload("", LayerKind.FULL, 0, 1, ())
    assert 0 <= cache.room_for(cache.write(part, empty, is_synced=False)) < 1024


def test_a_payload_of_another_format_is_still_read(tmp_path: Path) -> None:
    part = make_part(range(4))
    numbers = np.linspace(-1, 1, 256, dtype=np.float32).reshape(4, 64)
    buffer = HostBuffer("keys", (4, 64), "float32", numbers.tobytes())
    put(SafetensorsCache(tmp_path, KVCodec("q8g64")), part, buffer)
    (read,) = SafetensorsCache(tmp_path).read(part).buffers
    assert (read.name, read.shape, read.dtype) == ("keys", (4, 64), "float32")
    back = np.frombuffer(read.data, np.float32).reshape(4, 64)
    assert np.abs(back - numbers).max() < 0.5 / 255


def test_a_foreign_payload_is_not_written(tmp_path: Path, cache: SafetensorsCache) -> None:
    part = make_part()
    twice = HostBuffer("keys", (1,), "u8", b"1")
    for payload in (
        replace(make_payload(part), end=3),
        replace(make_payload(part), kind=LayerKind.STATE),
        make_payload(part, twice, twice),
        make_payload(part, replace(twice, name="tokens")),
        make_payload(part, replace(twice, shape=(2,))),
    ):
        with pytest.raises(CachePersistenceError):
            cache.write(part, payload, is_synced=False)
    assert all_files(tmp_path) == []


# -- when the disk refuses --------------------------------------------------------------------


def big_buffer(num_bytes: int) -> HostBuffer:
    return HostBuffer("keys", (num_bytes,), "uint8", bytes(num_bytes))


def test_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "size=1m") as disk:
        cache = SafetensorsCache(disk)
        kept = put(cache, make_part((1,)), big_buffer(600_000))
        with pytest.raises(CachePersistenceError, match="No space left"):
            put(cache, make_part((2,)), big_buffer(600_000))
        assert all_files(disk) == [file_of(disk, kept)]
        assert cache.used_bytes() == kept.nbytes
        assert cache.read(kept).nbytes == 600_000
        cache.delete(kept)
        put(cache, make_part((2,)), big_buffer(600_000))


def test_a_write_that_stops_half_way(tmp_path: Path, cache: SafetensorsCache) -> None:
    """A limit on the size of files ends a write after its first part, without privileges."""
    kept = put(cache, make_part((1,)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CachePersistenceError, match="too large"):
            put(cache, make_part((2,)), big_buffer(200_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert all_files(tmp_path) == [file_of(tmp_path, kept)]


def test_a_directory_that_cannot_be_made(tmp_path: Path, cache: SafetensorsCache) -> None:
    (tmp_path / "blocks").write_text("in the way")
    with pytest.raises(CachePersistenceError, match="cannot write a block"):
        put(cache, make_part())


# -- delete, scan, used bytes -----------------------------------------------------------------


def test_delete(tmp_path: Path, cache: SafetensorsCache) -> None:
    part = put(cache, make_part())
    cache.delete(part)
    cache.delete(part)
    assert all_files(tmp_path) == []
    with pytest.raises(CacheCorruptionError, match="No such file"):
        cache.read(part)


def test_delete_of_what_cannot_be_deleted(tmp_path: Path, cache: SafetensorsCache) -> None:
    file_of(tmp_path, make_part()).mkdir(parents=True)
    with pytest.raises(CachePersistenceError, match="cannot delete"):
        cache.delete(make_part())


def chain(num_blocks: int, root: BlockName = ROOT) -> list[BlockPart]:
    parts: list[BlockPart] = []
    for index in range(num_blocks):
        parent = parts[-1].name if parts else root
        parts.append(make_part(range(index, index + 4), parent=parent, start=4 * index, root=root))
    return parts


def test_scan_finds_every_part(tmp_path: Path, cache: SafetensorsCache) -> None:
    other = BlockNamespace("another model", "raw").root()
    parts = [*chain(20), *chain(5, other), make_part(kind=LayerKind.WINDOW)]
    # Longer than what is read at first: its token ids, and its header.
    parts.append(make_part(range(3000)))
    written = [put(cache, part) for part in parts]
    many = [HostBuffer(f"layer{i}", (1,), "u8", b"1") for i in range(100)]
    written.append(put(cache, make_part((9, 9, 9)), *many))
    found = list(SafetensorsCache(tmp_path).scan())
    assert all(part.last_used > 0 for part in found)
    assert {replace(part, last_used=0.0) for part in found} == set(written)
    assert len(found) == len(written)


def test_scan_sets_aside_what_is_no_whole_part(tmp_path: Path, cache: SafetensorsCache) -> None:
    (kept, cut, old, moved, bare) = chain(5)
    for part in (kept, cut, old, moved, bare):
        put(cache, part)
    path = file_of(tmp_path, cut)
    path.write_bytes(path.read_bytes()[:-1])
    path = file_of(tmp_path, old)
    path.write_bytes(path.read_bytes().replace(b"block.v1", b"block.v0"))
    path = file_of(tmp_path, moved)
    path.rename(path.with_name("0" * 64 + ".full.safetensors"))
    file_of(tmp_path, bare).write_bytes(b"")
    shard = file_of(tmp_path, kept).parent
    (shard / f"{'01' * 8}-4.tmp").write_bytes(b"left by a crash")
    (tmp_path / "ledger.db").write_text("not ours")
    cache.used_bytes()
    before = size_of(tmp_path)
    assert [part.name for part in cache.scan()] == [kept.name]
    aside = set((tmp_path / "quarantine").iterdir())
    assert {path.name.split("-", 2)[2] for path in aside} == {
        *(file_of(tmp_path, part).name for part in (cut, old, bare)),
        f"{'0' * 64}.full.safetensors",
        f"{'01' * 8}-4.tmp",
    }
    assert set(all_files(tmp_path)) - aside == {file_of(tmp_path, kept), tmp_path / "ledger.db"}
    assert cache.used_bytes() == size_of(tmp_path) == before


def test_scan_does_not_touch_what_is_being_written(tmp_path: Path) -> None:
    cache = SafetensorsCache(tmp_path)
    parts = chain(40)
    is_over = threading.Event()

    def scan() -> None:
        while not is_over.is_set():
            list(cache.scan())

    scanner = threading.Thread(target=scan)
    scanner.start()
    try:
        for part in parts:
            put(cache, part, big_buffer(500_000))
    finally:
        is_over.set()
        scanner.join()
    assert len(list(cache.scan())) == len(parts)


def test_nothing_there_yet(tmp_path: Path) -> None:
    cache = SafetensorsCache(tmp_path / "absent")
    assert list(cache.scan()) == []
    assert cache.used_bytes() == 0
    cache.delete(make_part())
    assert not (tmp_path / "absent").exists()


def test_used_bytes_are_those_of_everything(tmp_path: Path, cache: SafetensorsCache) -> None:
    parts = chain(4)
    put(cache, parts[0])
    (tmp_path / "ledger.db").write_bytes(bytes(1000))
    (tmp_path / "backup").mkdir()
    (tmp_path / "backup" / "ledger.db").write_bytes(bytes(500))
    assert cache.used_bytes() == size_of(tmp_path) > 1500
    for part in parts:
        put(cache, part, big_buffer(5000))
        assert cache.used_bytes() == size_of(tmp_path)
    (tmp_path / "ledger.db").write_bytes(bytes(9000))
    cache.delete(parts[1])
    cache.delete(parts[1])
    assert cache.used_bytes() == size_of(tmp_path)


# -- threads ----------------------------------------------------------------------------------


def read_all(cache: SafetensorsCache, parts: list[BlockPart], size: int) -> list[str]:
    """Read every part once; returns what went wrong other than that one was deleted."""
    wrong = []
    for part in parts:
        try:
            if cache.read(part).nbytes != size:
                wrong.append("another size")
        except CacheCorruptionError as error:
            if "No such file" not in error.message:
                wrong.append(error.message)
    return wrong


def test_reads_beside_writes(tmp_path: Path, cache: SafetensorsCache) -> None:
    """Readers see whole files only, while one thread replaces and deletes them."""
    parts, size = chain(6), 200_000
    is_over = threading.Event()
    wrong: list[str] = []

    def read() -> None:
        while not is_over.is_set():
            wrong.extend(read_all(cache, parts, size))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        for turn in range(10):
            for part in parts:
                put(cache, part, big_buffer(size))
            cache.delete(parts[turn % len(parts)])
            cache.used_bytes()
    finally:
        is_over.set()
        for reader in readers:
            reader.join()
    assert wrong == []
    assert cache.used_bytes() == size_of(tmp_path)
