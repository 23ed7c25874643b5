"""Pinned host memory, and copies to and from it where there is a GPU for them."""

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from semantic.adapters.outbound.backends.mlx import runtime
from semantic.domain.errors import CacheCorruptionError
from tests.waiting import eventually

runtime.prepare(num_threads=1)
mx = pytest.importorskip("mlx.core")
pinned = pytest.importorskip("semantic.adapters.outbound.backends.pinned")
transfer = pytest.importorskip("semantic.adapters.outbound.backends.mlx.cuda.transfer")
weights = pytest.importorskip("semantic.adapters.outbound.backends.mlx.cuda.weights")

pytestmark = pytest.mark.unit

SLAB = 2**16


def test_pieces_begin_with_a_page_and_come_back_joined() -> None:
    memory = pinned.PinnedMemory(lambda *_: True, slab=SLAB, limit=SLAB)
    pieces = [memory.allocate(size) for size in (5000, 1, 4096)]
    addresses = [transfer._address(piece) for piece in pieces]
    assert [address % 4096 for address in addresses] == [0, 0, 0]
    for number, piece in enumerate(pieces):
        piece[:] = bytes([number]) * len(piece)
    assert [set(piece) for piece in pieces] == [{0}, {1}, {2}]
    assert all(memory.holds(a, len(p)) for a, p in zip(addresses, pieces, strict=True))
    assert not memory.holds(addresses[0] - SLAB, 1)
    del piece, pieces
    gc.collect()
    assert memory.num_free == SLAB
    whole = memory.allocate(SLAB)
    assert whole is not None
    assert len(whole) == SLAB


def test_a_view_keeps_its_piece() -> None:
    memory = pinned.PinnedMemory(lambda *_: True, slab=SLAB, limit=SLAB)
    view = memory.allocate(SLAB)[100:200]
    gc.collect()
    assert memory.num_free == 0
    view[:] = b"x" * 100
    del view
    gc.collect()
    assert memory.num_free == SLAB


def test_all_is_pinned_beforehand_and_no_more_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "_FIRST_BYTES", SLAB)
    memory = pinned.PinnedMemory(lambda *_: True, slab=SLAB, limit=3 * SLAB)
    assert eventually(lambda: memory.num_free == SLAB)
    memory.pin_rest()
    assert eventually(lambda: memory.num_free == 3 * SLAB)
    pieces = [memory.allocate(SLAB) for _ in range(4)]
    assert [piece is None for piece in pieces] == [False, False, False, True]


def test_what_cannot_be_pinned_is_not_handed_out() -> None:
    memory = pinned.PinnedMemory(lambda *_: False, slab=SLAB, limit=SLAB)
    assert memory.allocate(1) is None


def test_a_copy_that_fails_is_a_miss() -> None:
    copying = transfer.Copying(lambda: None)
    copying.note_begun([], "an illegal memory access was encountered")
    with pytest.raises(CacheCorruptionError, match="illegal memory access"):
        pinned.ArrivingBytes(memoryview(b"12"), copying.wait).wait()
    copying.settle()


@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("span", [(1, 256, 256, 0), (0, 900, 300, 1024), (0, 0, 1, 0)])
def test_state_leaves_and_comes_back(span: tuple[int, int, int, int]) -> None:
    copies = transfer.Transfer(pinned.shared_memory(2**30))
    given = transfer.TokenSpan(*span)
    layers = [mx.random.normal((2, 4, 1024, 64)).astype(mx.bfloat16) for _ in range(3)]
    arriving = copies.copy_out(layers, given, mx.zeros(1))
    positions = mx.array([p % 1024 for p in range(given.start, given.start + given.num_tokens)])
    expected: Any = mx.stack([layer[given.row][:, positions] for layer in layers])
    assert arriving.nbytes == expected.nbytes
    assert bytes(arriving.wait()) == bytes(memoryview(expected.view(mx.uint16)).cast("B"))
    whole = transfer.HostPiece(arriving.wait(), given.num_tokens, given.num_tokens)
    part = transfer.HostPiece(arriving.wait(), given.num_tokens, 1)
    back = [mx.ones((1, 4, 1024, 64), mx.bfloat16) for _ in layers]
    copies.copy_in([whole, part], back, 7)
    given_back = mx.concatenate([expected, expected[:, :, :1]], axis=2)
    end = 7 + given_back.shape[2]
    for layer, array in zip(back, given_back, strict=True):
        assert mx.array_equal(layer[0, :, 7:end], array).item()
        assert mx.all(layer[:, :, :7] == 1).item()
        assert mx.all(layer[:, :, end:] == 1).item()
    copied = copies.pinned(memoryview(bytes(16)))
    assert copied is not None
    assert bytes(copied) == bytes(16)


# -- weights by way of it: the same as MLX reads, whatever a file holds -----------------------


class PlainTransfer:
    """Fetches as the device does."""

    def __init__(self) -> None:
        self.num_fetched = 0

    def copy_in(self, pieces: Sequence[Any], arrays: Sequence[Any], start: int) -> Any:
        self.num_fetched += 1
        joined = b"".join(bytes(piece.data) for piece in pieces)
        assert len(joined) == sum(piece.num_tokens * transfer.UNIT for piece in pieces)
        (array,) = arrays
        assert start == 0
        numbers = mx.array(memoryview(joined).cast("H"), mx.uint16).view(array.dtype)
        array[:] = numbers.reshape(array.shape)
        return array

    def finish(self) -> None:
        pass


def test_files_are_read_as_mlx_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_MIN_BYTES", 64)
    monkeypatch.setattr(weights, "_READ_BYTES", 1024)
    monkeypatch.setattr(weights, "_AHEAD_BYTES", 3000)
    file = str(tmp_path / "model.safetensors")
    shapes = {"wide": (40, 64), "tall": (700, 8), "odd": (33, 1), "small": (8,), "deep": (2, 3, 16)}
    written = {name: mx.random.normal(shape) for name, shape in shapes.items()}
    written["half"] = written["wide"].astype(mx.bfloat16)
    written["ids"] = mx.arange(100)
    mx.save_safetensors(file, written)
    device = PlainTransfer()
    memory = pinned.PinnedMemory(lambda *_: True, slab=2**16, limit=2**27)
    original = mx.load
    with weights.WeightReader(memory, device).in_use():
        found = mx.load(file)
    assert mx.load is original
    assert found.keys() == written.keys()
    assert (
        device.num_fetched == 4
    )  # neither the odd, nor the small, nor the numbers of another kind
    for name, array in written.items():
        assert found[name].dtype == array.dtype
        assert mx.array_equal(found[name], array).item(), name


def test_without_pinned_memory_reads_work_as_before(tmp_path: Path) -> None:
    file = str(tmp_path / "model.safetensors")
    mx.save_safetensors(file, {"wide": mx.ones((2**10, 2**9))})
    device = PlainTransfer()
    memory = pinned.PinnedMemory(lambda *_: False, slab=2**16, limit=2**27)
    with weights.WeightReader(memory, device).in_use():
        assert mx.all(mx.load(file)["wide"] == 1).item()
    assert not device.num_fetched
