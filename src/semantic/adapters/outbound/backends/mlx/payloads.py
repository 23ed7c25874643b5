"""Converts a sequence's KV cache to host buffers and back, one kind of layers at a time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from semantic.adapters.outbound.backends.mlx.caches import Array, CacheLayout, Part, roll
from semantic.adapters.outbound.backends.mlx.cuda.transfer import HostPiece, TokenSpan, Transfer
from semantic.adapters.outbound.backends.mlx.groups import MlxSequence
from semantic.domain.errors import CacheCorruptionError
from semantic.domain.spec import LayerKind
from semantic.ports.backend import HostBuffer, KVPayload

# Number formats that numpy lacks are transferred as integers of their size.
_CARRIERS = {mx.bfloat16: mx.uint16}


@dataclass(frozen=True, slots=True)
class SnapshotTicket:
    """A running copy; see `HostBuffer` for the meaning of the names."""

    abi: str
    kind: LayerKind
    start: int
    end: int
    copies: tuple[tuple[str, Array | HostBuffer], ...]

    def payload(self) -> KVPayload:
        """Return the payload; waits only for buffers that MLX itself copies to the host."""
        buffers = tuple(
            copy if isinstance(copy, HostBuffer) else _to_host(name, copy)
            for name, copy in self.copies
        )
        return KVPayload(self.abi, self.kind, self.start, self.end, buffers)


def copy_out(
    layout: CacheLayout,
    sequence: MlxSequence,
    positions: range,
    kind: LayerKind,
    transfer: Transfer | None = None,
    after: Array | None = None,
) -> tuple[tuple[str, Array | HostBuffer], ...]:
    """Start to copy one kind of layers, all packed into one array per name.

    Args:
        transfer: Copies to the host in the background; without it the copies stay on the device.
        after: Array that must be evaluated before the copy starts.
    """
    group, row = sequence.group_row()
    copies: list[tuple[str, Array | HostBuffer]] = []
    for section in _sections(layout, kind):
        part = section.part
        is_wrapped = kind is LayerKind.WINDOW and positions.stop > part.size(group.capacity)
        span = TokenSpan(row, positions.start, len(positions), part.window if is_wrapped else 0)
        for i, name in section.names:
            arrays = [group.arrays[place][i] for place in section.places]
            sent = None
            if transfer is not None and after is not None:
                sent = _send(transfer, name, arrays, span, kind, after)
            copies.append((name, _stack(arrays, span, kind) if sent is None else sent))
    mx.async_eval([copy for _, copy in copies if not isinstance(copy, HostBuffer)])
    return tuple(copies)


@dataclass(frozen=True, slots=True)
class _Section:
    """Parts of one kind and form, whose arrays are packed together.

    Attributes:
        names: The index of each array of a part, and the name of the buffer that packs it.
    """

    part: Part
    places: Sequence[int]
    names: Sequence[tuple[int, str]]


def _sections(layout: CacheLayout, kind: LayerKind) -> list[_Section]:
    sections = []
    for number, places in enumerate(layout.sections(kind)):
        part, suffix = layout.parts[places[0]], f".{number}" if number else ""
        stems = ["keys", "values"]
        if kind is LayerKind.STATE:
            stems = [f"state{i}" for i in range(len(part.shapes))]
        names = [
            (i, f"{stem}{suffix}")
            for i, (stem, shape) in enumerate(zip(stems, part.shapes, strict=True))
            if math.prod(shape)
        ]
        sections.append(_Section(part, places, names))
    return sections


def _stack(arrays: Sequence[Array], span: TokenSpan, kind: LayerKind) -> Array:
    rows = [array[span.row] for array in arrays]
    if kind is LayerKind.STATE:
        return mx.stack(rows)
    positions = range(span.start, span.start + span.num_tokens)
    index: Any = slice(positions.start, positions.stop)
    if span.ring:
        index = mx.array([position % span.ring for position in positions])
    return mx.stack([row[:, index] for row in rows])


def _send(
    transfer: Transfer,
    name: str,
    arrays: Sequence[Array],
    span: TokenSpan,
    kind: LayerKind,
    after: Array,
) -> HostBuffer | None:
    shape = tuple(arrays[0].shape[1:])
    dtype = arrays[0].dtype
    if kind is LayerKind.STATE:
        arrays = [array.reshape(array.shape[0], 1, 1, -1) for array in arrays]
        span = TokenSpan(span.row, 0, 1)
    else:
        shape = (shape[0], span.num_tokens, shape[2])
    if not transfer.can_copy(arrays[0].shape, dtype):
        return None
    arriving = transfer.copy_out(arrays, span, after)
    if arriving is None:
        return None
    return HostBuffer(name, (len(arrays), *shape), _dtype_name(dtype), arriving)


@dataclass(frozen=True, slots=True)
class DevicePart:
    """A range of tokens, or a state, that is not yet part of a sequence.

    Attributes:
        arrays: By buffer ``[layers, heads, tokens, dim]``, or ``[layers, ...]`` for a state; empty
            if the tokens are copied from `pieces` directly to their place.
        pieces: By buffer, host memory that the device copies from; keep it until that is complete.
    """

    start: int
    end: int
    arrays: tuple[Array, ...] = ()
    pieces: tuple[list[HostPiece], ...] = ()


def read(
    layout: CacheLayout, payloads: Sequence[KVPayload], end: int, transfer: Transfer | None = None
) -> list[DevicePart]:
    """Copy payloads of one kind, which follow each other, to the device up to `end`.

    Raises:
        CacheCorruptionError: a buffer is missing or has another shape or size.
    """
    found = [_Found(layout, payload, min(end, payload.end)) for payload in payloads]
    if transfer is not None and found:
        together = _receive(transfer, found)
        if together is not None:
            return [together]
    return [DevicePart(f.payload.start, f.end, f.on_device()) for f in found]


class _Found:
    def __init__(self, layout: CacheLayout, payload: KVPayload, end: int) -> None:
        self.payload, self.end = payload, end
        self.is_state = payload.kind is LayerKind.STATE
        self.num_tokens = payload.end - payload.start
        self.dtypes: list[Any] = []
        self.shapes: list[tuple[int, ...]] = []
        self.buffers: list[HostBuffer] = []
        by_name = {buffer.name: buffer for buffer in payload.buffers}
        for section in _sections(layout, payload.kind):
            for i, name in section.names:
                shape, dtype = section.part.shapes[i], section.part.dtypes[i]
                if not self.is_state:
                    shape = (shape[0], self.num_tokens, shape[1])
                self.dtypes.append(dtype)
                self.shapes.append((len(section.places), *shape))
                self.buffers.append(_checked(by_name.get(name), self.shapes[-1], dtype))

    def on_device(self) -> tuple[Array, ...]:
        arrays = tuple(map(_to_device, self.buffers, self.shapes, self.dtypes))
        if self.is_state or self.end == self.payload.end:
            return arrays
        return tuple(array[:, :, : self.end - self.payload.start] for array in arrays)


def _receive(transfer: Transfer, found: Sequence[_Found]) -> DevicePart | None:
    """Let the device fetch payloads in one operation; None if it cannot."""
    first = found[0]
    pieces: list[list[HostPiece]] = []
    for i, dtype in enumerate(first.dtypes):
        _, *shape = first.shapes[i]
        if not transfer.can_copy([math.prod(shape) if first.is_state else shape[2]], dtype):
            return None
        pieces.append([])
        for f in found:
            data = transfer.pinned(memoryview(f.buffers[i].data).cast("B"))
            if data is None:
                return None
            num_held = 1 if f.is_state else f.num_tokens
            num_taken = 1 if f.is_state else f.end - f.payload.start
            pieces[-1].append(HostPiece(data, num_held, num_taken))
    arrays = [] if first.payload.kind is LayerKind.FULL else _fetched(transfer, first, pieces)
    return DevicePart(first.payload.start, found[-1].end, tuple(arrays), tuple(pieces))


def _fetched(
    transfer: Transfer, first: _Found, pieces: Sequence[Sequence[HostPiece]]
) -> list[Array]:
    arrays = []
    for given, (layers, *shape), dtype in zip(pieces, first.shapes, first.dtypes, strict=True):
        num_tokens = sum(piece.num_tokens for piece in given)
        heads, dim = (1, math.prod(shape)) if first.is_state else (shape[0], shape[2])
        array = mx.zeros((1, layers * heads, num_tokens, dim), dtype)
        transfer.copy_in(given, [array], 0)
        held = shape if first.is_state else (heads, num_tokens, dim)
        arrays.append(array.reshape(layers, *held))
    return arrays


def _targets(layout: CacheLayout, kind: LayerKind) -> list[tuple[int, Sequence[int]]]:
    """Return for each buffer the index of its arrays in their parts, and the places of these."""
    return [(i, section.places) for section in _sections(layout, kind) for i, _ in section.names]


def put_full(
    layout: CacheLayout, sequence: MlxSequence, loaded: DevicePart, transfer: Transfer | None = None
) -> None:
    """Write a FULL part into a sequence that is alone in its group."""
    group, _ = sequence.group_row()
    targets = _targets(layout, LayerKind.FULL)
    if transfer is not None and not loaded.arrays:
        for pieces, (i, places) in zip(loaded.pieces, targets, strict=True):
            arrays = [group.arrays[place][i] for place in places]
            transfer.copy_in(pieces, arrays, loaded.start)
        return
    for array, (i, places) in zip(loaded.arrays, targets, strict=True):
        for layer, place in enumerate(places):
            new = array[layer : layer + 1]
            group.arrays[place][i][:, :, loaded.start : loaded.end] = new


def put_window(
    layout: CacheLayout, sequence: MlxSequence, loaded: Sequence[DevicePart], end: int
) -> None:
    """Write the last tokens before `end` into the rings of a sequence alone in its group."""
    group, _ = sequence.group_row()
    start = loaded[0].start
    columns = zip(*(part.arrays for part in loaded), strict=True)
    for pieces, (i, places) in zip(columns, _targets(layout, LayerKind.WINDOW), strict=True):
        ordered = mx.concatenate(pieces, axis=2)[:, :, : end - start]
        for layer, place in enumerate(places):
            part = layout.parts[place]
            ring = roll(ordered[layer : layer + 1], end, part.window, part.size(group.capacity))
            group.arrays[place][i] = mx.contiguous(ring)


def put_state(layout: CacheLayout, sequence: MlxSequence, loaded: DevicePart) -> None:
    """Set the recurrent arrays of a sequence that is alone in its group."""
    group, _ = sequence.group_row()
    targets = _targets(layout, LayerKind.STATE)
    for array, (i, places) in zip(loaded.arrays, targets, strict=True):
        for layer, place in enumerate(places):
            group.arrays[place][i] = mx.contiguous(array[layer : layer + 1])


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _to_host(name: str, array: Array) -> HostBuffer:
    carrier = _CARRIERS.get(array.dtype)
    host = np.array(array if carrier is None else array.view(carrier))
    data = host.reshape(-1).view(np.uint8).data
    return HostBuffer(name, tuple(array.shape), _dtype_name(array.dtype), data)


def _checked(buffer: HostBuffer | None, shape: tuple[int, ...], dtype: Any) -> HostBuffer:
    num_bytes = math.prod(shape) * dtype.size
    if buffer is None or buffer.shape != shape or buffer.nbytes != num_bytes:
        raise CacheCorruptionError(f"a payload has no array of shape {shape}")
    return buffer


def _to_device(buffer: HostBuffer, shape: tuple[int, ...], dtype: Any) -> Array:
    carrier = _CARRIERS.get(dtype)
    name = np.dtype(_dtype_name(carrier or dtype))
    array = mx.array(np.frombuffer(buffer.data, name).reshape(shape))
    return array if carrier is None else array.view(dtype)
