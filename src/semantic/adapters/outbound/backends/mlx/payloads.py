"""A sequence's state as host buffers, one kind of layers at a time, and back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from semantic.adapters.outbound.backends.mlx.caches import Array, Layout, roll
from semantic.adapters.outbound.backends.mlx.groups import MlxSequence
from semantic.domain.errors import CacheCorruptionError
from semantic.domain.spec import LayerKind
from semantic.ports.backend import HostBuffer, KVPayload

# Numbers numpy does not know travel as integers of their size.
_CARRIERS = {mx.bfloat16: mx.uint16}


@dataclass(frozen=True, slots=True)
class SnapshotTicket:
    """A copy under way on the device."""

    abi: str
    kind: LayerKind
    start: int
    end: int
    arrays: tuple[tuple[str, Array], ...]

    def payload(self) -> KVPayload:
        """Wait for the copy and bring it to the host."""
        buffers = tuple(_to_host(name, array) for name, array in self.arrays)
        return KVPayload(self.abi, self.kind, self.start, self.end, buffers)


def copy_out(
    layout: Layout, sequence: MlxSequence, start: int, end: int, kind: LayerKind
) -> tuple[tuple[str, Array], ...]:
    """Begin copying one kind of layers, all of them packed into one array a name."""
    group, row = sequence.group_row()
    places = layout.of_kind(kind)
    part = layout.parts[places[0]]
    index: Any = slice(start, end)
    if kind is LayerKind.WINDOW and end > part.size(group.capacity):
        index = mx.array([position % part.window for position in range(start, end)])
    copies = []
    for i, name in enumerate(_names(layout, kind)):
        arrays = [group.arrays[place][i][row] for place in places]
        if kind is not LayerKind.STATE:
            arrays = [array[:, index] for array in arrays]
        copies.append((name, mx.stack(arrays)))
    mx.async_eval([copy for _, copy in copies])
    return tuple(copies)


@dataclass(frozen=True, slots=True)
class DevicePart:
    """A payload whose arrays are on the device, not yet in a sequence."""

    payload: KVPayload
    arrays: tuple[Array, ...]


def read(layout: Layout, payload: KVPayload) -> DevicePart:
    """Bring a payload's arrays to the device.

    Raises:
        CacheCorruptionError: a buffer is missing or has another shape or size.
    """
    places = layout.of_kind(payload.kind)
    part = layout.parts[places[0]]
    buffers = {buffer.name: buffer for buffer in payload.buffers}
    num_tokens = payload.end - payload.start
    arrays = []
    for name, shape, dtype in zip(
        _names(layout, payload.kind), part.shapes, part.dtypes, strict=True
    ):
        if payload.kind is not LayerKind.STATE:
            shape = (shape[0], num_tokens, shape[1])  # noqa: PLW2901 - the same, with its tokens
        arrays.append(_to_device(buffers.get(name), (len(places), *shape), dtype))
    return DevicePart(payload, tuple(arrays))


def put_full(layout: Layout, sequence: MlxSequence, loaded: DevicePart, end: int) -> None:
    """Write a FULL part up to `end` into a sequence that is alone in its group."""
    group, _ = sequence.group_row()
    payload = loaded.payload
    end = min(end, payload.end)
    for i, array in enumerate(loaded.arrays):
        for layer, place in enumerate(layout.of_kind(LayerKind.FULL)):
            new = array[layer : layer + 1, :, : end - payload.start]
            group.arrays[place][i][:, :, payload.start : end] = new


def put_window(
    layout: Layout, sequence: MlxSequence, loaded: Sequence[DevicePart], end: int
) -> None:
    """Write the last tokens before `end` into the rings of a sequence that is alone."""
    group, _ = sequence.group_row()
    places = layout.of_kind(LayerKind.WINDOW)
    part = layout.parts[places[0]]
    start = loaded[0].payload.start
    columns = zip(*(part.arrays for part in loaded), strict=True)
    for i, pieces in enumerate(columns):
        ordered = mx.concatenate(pieces, axis=2)[:, :, : end - start]
        for layer, place in enumerate(places):
            ring = roll(ordered[layer : layer + 1], end, part.window, part.size(group.capacity))
            group.arrays[place][i] = mx.contiguous(ring)


def put_state(layout: Layout, sequence: MlxSequence, loaded: DevicePart) -> None:
    """Set the recurrent arrays of a sequence that is alone."""
    group, _ = sequence.group_row()
    for i, array in enumerate(loaded.arrays):
        for layer, place in enumerate(layout.of_kind(LayerKind.STATE)):
            group.arrays[place][i] = mx.contiguous(array[layer : layer + 1])


def _names(layout: Layout, kind: LayerKind) -> list[str]:
    if kind is not LayerKind.STATE:
        return ["keys", "values"]
    return [f"state{i}" for i in range(len(layout.parts[layout.of_kind(kind)[0]].shapes))]


def _to_host(name: str, array: Array) -> HostBuffer:
    carrier = _CARRIERS.get(array.dtype)
    host = np.array(array if carrier is None else array.view(carrier))
    dtype = str(array.dtype).removeprefix("mlx.core.")
    return HostBuffer(name, tuple(array.shape), dtype, host.reshape(-1).view(np.uint8).data)


def _to_device(buffer: HostBuffer | None, shape: tuple[int, ...], dtype: Any) -> Array:
    num_bytes = int(np.prod(shape)) * dtype.size
    if buffer is None or buffer.shape != shape or memoryview(buffer.data).nbytes != num_bytes:
        raise CacheCorruptionError(f"a payload lacks an array of shape {shape}")
    carrier = _CARRIERS.get(dtype)
    name = str(carrier or dtype).removeprefix("mlx.core.")
    array = mx.array(np.frombuffer(buffer.data, np.dtype(name)).reshape(shape))
    return array if carrier is None else array.view(dtype)
