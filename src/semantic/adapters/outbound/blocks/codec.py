"""How payloads rest: as they are, or at 8 or 4 bits a number.

Numbers are quantised in groups of 64 along the last axis. A group keeps its smallest value and a
step, both in the buffer's own dtype, and every number as a count of steps above the smallest. An
affine scale never needs larger steps than one around zero, since a group's range is at most twice
its largest magnitude, and keys often lie on one side of zero.

What rests as it is: integers, buffers with a NaN or an infinity (no step stands for them), last
axes that make no fair group, and recurrent state. A state is the sum of everything before it:
all tokens after a restore would build on its error, where a key's error stays with its token.

Numpy does not know bfloat16, so arrays of it are its bits. All formats are sign and magnitude:
their bits, read as integers, sort as the numbers do once the magnitude of negative ones is turned
around. Integers are also compared twice as fast.

Knows arrays in host memory; it does not know files or backends. Numpy lets other threads run.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from semantic.domain.errors import CacheCorruptionError
from semantic.domain.spec import LayerKind
from semantic.ports.backend import HostBuffer, KVPayload

Array: TypeAlias = npt.NDArray[Any]
Singles: TypeAlias = npt.NDArray[np.float32]
KVFormat = Literal["raw", "q8g64", "q4g64"]
Codes: TypeAlias = npt.NDArray[np.uint8]

FORMATS: dict[int, KVFormat] = {16: "raw", 8: "q8g64", 4: "q4g64"}
_BITS: dict[str, int] = {kv_format: bits for bits, kv_format in FORMATS.items()}
_WIDEST = 32  # bits of a number
_GROUP = 64
_WHOLE_AXIS = (8, 128)  # an even last axis between these is one group
_AT_ONCE = 4096  # groups: a megabyte of scratch; with less, threads would take turns too often


# -- numbers of one dtype -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """How numbers of one dtype are written.

    Attributes:
        array: The numpy dtype of arrays of them; unsigned integers if numpy has none.
        integer: Signed integers of the same size.
        smallest: Smallest positive value whose inverse a float32 holds.
        largest: Largest finite value.
    """

    array: np.dtype[Any]
    integer: np.dtype[Any]
    smallest: float
    largest: float

    def widen(self, numbers: Array, out: Singles) -> None:
        """Write numbers as float32, which holds all of them exactly."""
        if self.array.kind == "u":
            np.left_shift(numbers, 16, out=out.view(np.uint32), dtype=np.uint32)
        else:
            with np.errstate(invalid="ignore"):  # ARM tells of NaNs that signal
                np.copyto(out, numbers)

    def narrow(self, singles: Singles, out: Array) -> None:
        """Write float32 numbers in this format, to the nearest; `singles` is used up."""
        if self.array.kind == "u":
            bits = singles.view(np.uint32)
            np.add(bits, 0x8000, out=bits)
            np.right_shift(bits, 16, out=bits)
            np.copyto(out, bits, casting="same_kind")
        else:
            np.copyto(out, singles, casting="same_kind")

    def widened(self, numbers: Array) -> Singles:
        """Numbers as a new float32 array."""
        singles = np.empty(numbers.shape, np.float32)
        self.widen(numbers, singles)
        return singles

    def narrowed_up(self, singles: Singles) -> Array:
        """Positive float32 numbers in this format, none of them smaller than it was."""
        if self.array.kind == "u":
            return ((singles.view(np.uint32) + np.uint32(0xFFFF)) >> 16).astype(self.array)
        narrow = singles.astype(self.array)
        above = np.nextafter(narrow, self.array.type(np.inf))
        return np.where(narrow.astype(np.float32) < singles, above, narrow)

    def bounds(self, groups: Array, at_once: int) -> tuple[Array, Array]:
        """The smallest and the largest number of each row; a NaN is beyond every number."""
        bits = groups.view(self.integer)
        lowest, highest = np.empty((2, len(bits)), self.integer)
        scratch = np.empty((min(at_once, len(bits)), bits.shape[1]), self.integer)
        for first in range(0, len(bits), at_once):
            rows = slice(first, first + at_once)
            ranks = _turned(bits[rows], scratch[: len(bits[rows])])
            ranks.min(axis=1, out=lowest[rows])
            ranks.max(axis=1, out=highest[rows])
        low, high = (_turned(ranks, np.empty_like(ranks)) for ranks in (lowest, highest))
        return low.view(self.array), high.view(self.array)


def _turned(bits: Array, out: Array) -> Array:
    """Turn sign and magnitude into ranks, or ranks back."""
    sign = bits.dtype.itemsize * 8 - 1
    np.right_shift(bits, sign, out=out)
    np.bitwise_and(out, (1 << sign) - 1, out=out)
    np.bitwise_xor(out, bits, out=out)
    return out


FLOATS: dict[str, FloatFormat] = {
    "bfloat16": FloatFormat(
        np.dtype("<u2"), np.dtype("<i2"), 2.0**-126, (2.0 - 2.0**-7) * 2.0**127
    ),
    "float16": FloatFormat(np.dtype("<f2"), np.dtype("<i2"), 2.0**-24, 65504.0),
    "float32": FloatFormat(
        np.dtype("<f4"), np.dtype("<i4"), 2.0**-126, (2.0 - 2.0**-23) * 2.0**127
    ),
}


# -- how payloads rest --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredBuffer:
    """A buffer's name, shape and dtype, how it rests, and the tensors that are kept of it.

    Attributes:
        tensors: The buffer itself if it rests ``raw``; else its codes, steps and minima.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kv_format: str
    tensors: tuple[HostBuffer, ...]


def tensor_names(name: str, kv_format: str) -> tuple[str, ...]:
    """What the tensors of a buffer are called."""
    if kv_format == "raw":
        return (name,)
    return (f"{name}.codes", f"{name}.steps", f"{name}.minima")


class KVCodec:
    """Quantises payloads for their rest. Has no state: safe on any thread."""

    def __init__(self, kv_format: KVFormat = "raw") -> None:
        self._kv_format = kv_format

    @property
    def kv_format(self) -> str:
        """Part of the names of blocks; see `BlockNamespace`."""
        return self._kv_format

    def encode(self, payload: KVPayload) -> tuple[StoredBuffer, ...]:
        """Quantise a payload's buffers, in their order; what stays raw is not copied."""
        is_raw = self._kv_format == "raw" or payload.kind is LayerKind.STATE
        quantised = [
            None if is_raw else _quantised(buffer, self._kv_format) for buffer in payload.buffers
        ]
        return tuple(
            rested or StoredBuffer(buffer.name, buffer.shape, buffer.dtype, "raw", (buffer,))
            for rested, buffer in zip(quantised, payload.buffers, strict=True)
        )

    def decode(self, stored: StoredBuffer) -> HostBuffer:
        """Expand a buffer of any format; a raw one is handed on without a copy.

        Raises:
            CacheCorruptionError: its tensors are not what its shape and dtype ask for.
        """
        if stored.kv_format == "raw":
            (buffer,) = stored.tensors
            return HostBuffer(stored.name, stored.shape, stored.dtype, buffer.data)
        return _expanded(stored)


def max_expanded_bytes(kv_format: str, num_bytes: int) -> int:
    """Bytes that buffers and what they rest as take together while they are expanded, at most."""
    if kv_format == "raw":
        return num_bytes
    return num_bytes + num_bytes * _WIDEST // _BITS[kv_format]


def _group_size(shape: tuple[int, ...]) -> int | None:
    """Numbers in a group; None if the last axis makes no fair group."""
    axis = shape[-1] if shape else 0
    if not math.prod(shape):
        return None
    if axis % _GROUP == 0:
        return _GROUP
    shortest, longest = _WHOLE_AXIS
    return axis if shortest <= axis <= longest and axis % 2 == 0 else None


def _quantised(buffer: HostBuffer, kv_format: str) -> StoredBuffer | None:
    """Quantise a buffer, or return None if it has to stay as it is."""
    floats, group = FLOATS.get(buffer.dtype), _group_size(buffer.shape)
    if floats is None or group is None:
        return None
    groups = np.frombuffer(buffer.data, floats.array).reshape(-1, group)
    low, high = floats.bounds(groups, _AT_ONCE)
    minima, maxima = floats.widened(low), floats.widened(high)
    # A quarter keeps ranges, and numbers that are rounded up, finite. A NaN compares false.
    if not (abs(minima).max() <= floats.largest / 4 and abs(maxima).max() <= floats.largest / 4):
        return None
    bits = _BITS[kv_format]
    ranges = (maxima - minima) / np.float32(2**bits - 1)
    steps = floats.narrowed_up(np.maximum(ranges, np.float32(floats.smallest)))
    codes = _encode(groups, minima, floats.widened(steps), floats, bits)
    lead = buffer.shape[:-1]
    per_group = (*lead, buffer.shape[-1] // group)
    names = tensor_names(buffer.name, kv_format)
    tensors = (
        _host_buffer(names[0], (*lead, buffer.shape[-1] * bits // 8), "uint8", codes),
        _host_buffer(names[1], per_group, buffer.dtype, steps),
        _host_buffer(names[2], per_group, buffer.dtype, low),
    )
    return StoredBuffer(buffer.name, buffer.shape, buffer.dtype, kv_format, tensors)


def _encode(
    groups: Array, minima: Singles, steps: Singles, floats: FloatFormat, bits: int
) -> Codes:
    num_groups, size = groups.shape
    codes = np.empty((num_groups, size * bits // 8), np.uint8)
    singles = np.empty((min(_AT_ONCE, num_groups), size), np.float32)
    counts = np.empty(singles.shape, np.uint8)
    inverse = 1 / steps
    for first in range(0, num_groups, _AT_ONCE):
        rows = slice(first, first + _AT_ONCE)
        here = singles[: len(groups[rows])]
        floats.widen(groups[rows], here)
        # Subtracted first: the difference is exact where it is small, so no count overflows.
        np.subtract(here, minima[rows, None], out=here)
        np.multiply(here, inverse[rows, None], out=here)
        np.add(here, np.float32(0.5), out=here)
        if bits == 8:
            np.copyto(codes[rows], here, casting="unsafe")
            continue
        count = counts[: len(here)]
        np.copyto(count, here, casting="unsafe")
        np.left_shift(count[:, size // 2 :], 4, out=codes[rows])
        np.bitwise_or(codes[rows], count[:, : size // 2], out=codes[rows])
    return codes


def _expanded(stored: StoredBuffer) -> HostBuffer:
    floats, group = FLOATS.get(stored.dtype), _group_size(stored.shape)
    bits = _BITS.get(stored.kv_format)
    if floats is None or group is None or bits is None:
        raise CacheCorruptionError(f"{stored.name} cannot be stored as {stored.kv_format}")
    num_groups = math.prod(stored.shape) // group
    sizes = (group * bits // 8, floats.array.itemsize, floats.array.itemsize)
    if [memoryview(tensor.data).nbytes for tensor in stored.tensors] != [
        num_groups * size for size in sizes
    ]:
        raise CacheCorruptionError(f"{stored.name} does not have the size of its shape")
    codes = np.frombuffer(stored.tensors[0].data, np.uint8)
    steps, minima = (np.frombuffer(t.data, floats.array) for t in stored.tensors[1:])
    # What a hostile file makes of this is not a number; that is not worth a warning.
    with np.errstate(all="ignore"):
        numbers = _decode(
            codes.reshape(num_groups, -1),
            floats.widened(steps),
            floats.widened(minima),
            floats,
            group,
        )
    return _host_buffer(stored.name, stored.shape, stored.dtype, numbers)


def _decode(codes: Codes, steps: Singles, minima: Singles, floats: FloatFormat, size: int) -> Array:
    numbers = np.empty((len(codes), size), floats.array)
    singles = np.empty((min(_AT_ONCE, len(codes)), size), np.float32)
    for first in range(0, len(codes), _AT_ONCE):
        rows = slice(first, first + _AT_ONCE)
        here, code = singles[: len(codes[rows])], codes[rows]
        if code.shape[1] == size:
            np.copyto(here, code)
        else:
            np.copyto(here[:, : size // 2], code & 0xF)
            np.copyto(here[:, size // 2 :], code >> 4)
        np.multiply(here, steps[rows, None], out=here)
        np.add(here, minima[rows, None], out=here)
        floats.narrow(here, numbers[rows])
    return numbers


def _host_buffer(name: str, shape: tuple[int, ...], dtype: str, array: Array) -> HostBuffer:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return HostBuffer(name, shape, dtype, data)
