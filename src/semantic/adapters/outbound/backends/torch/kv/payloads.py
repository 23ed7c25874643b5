"""Converts a sequence's KV cache to host buffers and back, one kind of layers at a time."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from semantic.adapters.outbound.backends.torch.kv.geometry import StateArray
from semantic.adapters.outbound.backends.torch.kv.sequences import KVLayout, TorchSequence
from semantic.domain.errors import CacheCorruptionError
from semantic.domain.spec import LayerKind
from semantic.ports.backend import HostBuffer, KVPayload

Bits: TypeAlias = npt.NDArray[np.integer[Any]]
_BITS = {2: np.int16, 4: np.int32}


@dataclass(frozen=True, slots=True)
class KVPiece:
    """Keys or values of a payload, and where they belong.

    Attributes:
        content: ``[layers, heads, tokens, dim]``.
    """

    start: int
    content: Bits
    pair: int
    is_values: bool
    rows: slice | list[int]


class Payloads:
    """Reads and writes the payloads of one model."""

    def __init__(self, layout: KVLayout, states: Sequence[StateArray], dtype: torch.dtype) -> None:
        self._layout, self._dtype = layout, dtype
        self._states = list(_alike(states))

    def copy_out(
        self, sequence: TorchSequence, start: int, end: int, kind: LayerKind
    ) -> tuple[HostBuffer, ...]:
        """Copy keys and values to host buffers."""
        return tuple(
            _host_buffer(name, sequence.buffers[pair][is_values][rows, :, start:end])
            for name, pair, is_values, rows in self._names(kind)
        )

    def copy_states(self, arrays: Sequence[torch.Tensor]) -> tuple[HostBuffer, ...]:
        """Copy recurrent arrays, those of one shape together."""
        return tuple(
            _host_buffer(f"state{number}", torch.stack([arrays[i] for i in group]))
            for number, group in enumerate(self._groups())
        )

    def read(self, payload: KVPayload) -> list[KVPiece]:
        """Check a payload of keys and values.

        Raises:
            CacheCorruptionError: a buffer is missing or has another shape or size.
        """
        buffers = {buffer.name: buffer for buffer in payload.buffers}
        pieces = []
        for name, pair, is_values, rows in self._names(payload.kind):
            heads, *dims = self._layout.shapes[pair]
            num_tokens = payload.end - payload.start
            shape = (self._layout.num_rows(pair, rows), heads, num_tokens, dims[is_values])
            content = _array(buffers.get(name), shape, self._dtype)
            pieces.append(KVPiece(payload.start, content, pair, is_values, rows))
        return pieces

    def read_states(self, payload: KVPayload) -> list[torch.Tensor]:
        """Copy the recurrent arrays of a payload.

        Raises:
            CacheCorruptionError: a buffer is missing or has another shape or size.
        """
        buffers = {buffer.name: buffer for buffer in payload.buffers}
        arrays: dict[int, torch.Tensor] = {}
        for number, (first, members) in enumerate(self._states):
            shape = (len(members), *first.shape)
            content = _array(buffers.get(f"state{number}"), shape, first.dtype)
            for member, bits in zip(members, content, strict=True):
                arrays[member] = torch.from_numpy(bits.copy()).view(first.dtype)
        return [arrays[member] for member in sorted(arrays)]

    def _groups(self) -> Iterator[list[int]]:
        return (members for _, members in self._states)

    def _names(self, kind: LayerKind) -> Iterator[tuple[str, int, bool, slice | list[int]]]:
        for number, (pair, rows) in enumerate(self._layout.rows(kind)):
            suffix = str(number or "")
            yield f"keys{suffix}", pair, False, rows
            if self._layout.shapes[pair][2]:
                yield f"values{suffix}", pair, True, rows


def _alike(states: Sequence[StateArray]) -> Iterator[tuple[StateArray, list[int]]]:
    """Yield the arrays of each shape and dtype: the first, and the indices of all."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, array in enumerate(states):
        groups.setdefault((array.name, array.shape, array.dtype), []).append(index)
    for members in groups.values():
        yield states[members[0]], members


def write_piece(sequence: TorchSequence, piece: KVPiece, end: int) -> None:
    """Write keys or values up to `end` into a sequence's buffers, which must have room."""
    target = sequence.buffers[piece.pair][piece.is_values]
    content = piece.content[:, :, : end - piece.start]
    place = slice(piece.start, piece.start + content.shape[2])
    if isinstance(piece.rows, slice):
        _copy(content, target[:, :, place])
        return
    for row, of_row in zip(piece.rows, content, strict=True):
        _copy(of_row, target[row, :, place])


def _array(buffer: HostBuffer | None, shape: tuple[int, ...], dtype: torch.dtype) -> Bits:
    num_bytes = math.prod(shape) * dtype.itemsize
    data = memoryview(b"" if buffer is None else buffer.data)
    if buffer is None or buffer.shape != shape or data.nbytes != num_bytes:
        raise CacheCorruptionError(f"KV cache payload has no array of shape {shape}")
    return np.frombuffer(data, _BITS[dtype.itemsize]).reshape(shape)


def _bits(tensor: torch.Tensor) -> Bits:
    """View a host tensor as integers of the same size, sharing its memory."""
    integers = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    bits: Bits = tensor.view(integers).numpy()
    return bits


def _copy(source: Bits, target: torch.Tensor) -> None:
    """Write data into a tensor by numpy: torch would wake its threads and take far longer."""
    _bits(target)[:] = source


def _host_buffer(name: str, tensor: torch.Tensor) -> HostBuffer:
    data = _bits(tensor).copy().reshape(-1).view(np.uint8).data
    return HostBuffer(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), data)
