"""Weights by way of pinned memory: the same as MLX reads, whatever a file holds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from semantic.adapters.outbound.backends.mlx import runtime

runtime.prepare(num_threads=1)
mx = pytest.importorskip("mlx.core")
pinned = pytest.importorskip("semantic.adapters.outbound.backends.pinned")
transfer = pytest.importorskip("semantic.adapters.outbound.backends.mlx.cuda.transfer")
weights = pytest.importorskip("semantic.adapters.outbound.backends.mlx.cuda.weights")

pytestmark = pytest.mark.unit


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


def test_who_cannot_pin_reads_as_before(tmp_path: Path) -> None:
    file = str(tmp_path / "model.safetensors")
    mx.save_safetensors(file, {"wide": mx.ones((2**10, 2**9))})
    device = PlainTransfer()
    memory = pinned.PinnedMemory(lambda *_: False, slab=2**16, limit=2**27)
    with weights.WeightReader(memory, device).in_use():
        assert mx.all(mx.load(file)["wide"] == 1).item()
    assert not device.num_fetched
