"""Quantises buffers of floating-point numbers to 8 or 4 bits per number.

Numbers are quantised in groups of 64 along the last axis. A group stores its minimum and a step
size, both in the buffer's own dtype, and each number as a count of steps above the minimum. An
affine scale never needs larger steps than a symmetric one, since a group's range is at most twice
its largest magnitude, and keys often lie on one side of zero.

These stay raw: integers, buffers with a NaN or an infinity (no count represents them), last axes
that fit no group size, and recurrent state. A state is the sum of everything before it, so
its error would affect all tokens after a restore; a key's error affects only its own token.

Numpy has no bfloat16, so arrays of it hold the raw bits. All supported dtypes are sign and
magnitude: their bits, read as integers, sort like the numbers once the magnitude bits of negative
numbers are inverted. Comparing integers is also twice as fast.

This module works on arrays in host memory and knows neither files nor backends. Numpy releases the
GIL.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from semantic.domain.errors import CacheCorruptionError
from semantic.ports.backend import HostBuffer

Array: TypeAlias = npt.NDArray[Any]
Singles: TypeAlias = npt.NDArray[np.float32]
Codes: TypeAlias = npt.NDArray[np.uint8]

_BITS = {"q8g64": 8, "q4g64": 4}
_WIDEST = 32  # bits of the widest dtype
_GROUP = 64
_WHOLE_AXIS = (8, 128)  # an even last axis within these bounds forms one group
_AT_ONCE = 4096  # groups per step: 1 MB of scratch; with less, threads switch the GIL too often


# -- numbers of one dtype -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """The binary format of one floating-point dtype.

    Attributes:
        array: The numpy dtype of its arrays; unsigned integers if numpy lacks the dtype.
        smallest: Smallest positive value whose inverse is finite in float32.
    """

    array: np.dtype[Any]
    integer: np.dtype[Any]
    smallest: float
    largest: float

    def widen(self, numbers: Array, out: Singles) -> None:
        """Convert to float32, which represents all numbers exactly."""
        if self.array.kind == "u":
            np.left_shift(numbers, 16, out=out.view(np.uint32), dtype=np.uint32)
        else:
            with np.errstate(invalid="ignore"):  # ARM raises a flag for signalling NaNs
                np.copyto(out, numbers)

    def narrow(self, singles: Singles, out: Array) -> None:
        """Convert float32 to the nearest number of this format; overwrites `singles`."""
        if self.array.kind == "u":
            bits = singles.view(np.uint32)
            np.add(bits, 0x8000, out=bits)
            np.right_shift(bits, 16, out=bits)
            np.copyto(out, bits, casting="same_kind")
        else:
            np.copyto(out, singles, casting="same_kind")

    def widened(self, numbers: Array) -> Singles:
        singles = np.empty(numbers.shape, np.float32)
        self.widen(numbers, singles)
        return singles

    def narrowed_up(self, singles: Singles) -> Array:
        """Convert positive float32 numbers to this format, rounding up."""
        if self.array.kind == "u":
            return ((singles.view(np.uint32) + np.uint32(0xFFFF)) >> 16).astype(self.array)
        narrow = singles.astype(self.array)
        above = np.nextafter(narrow, self.array.type(np.inf))
        return np.where(narrow.astype(np.float32) < singles, above, narrow)

    def bounds(self, groups: Array, at_once: int) -> tuple[Array, Array]:
        """The minimum and maximum of each row; NaN sorts beyond all numbers."""
        bits = groups.view(self.integer)
        lowest, highest = np.empty((2, len(bits)), self.integer)
        scratch = np.empty((min(at_once, len(bits)), bits.shape[1]), self.integer)
        for first in range(0, len(bits), at_once):
            rows = slice(first, first + at_once)
            ranks = _to_sortable(bits[rows], scratch[: len(bits[rows])])
            ranks.min(axis=1, out=lowest[rows])
            ranks.max(axis=1, out=highest[rows])
        low, high = (_to_sortable(ranks, np.empty_like(ranks)) for ranks in (lowest, highest))
        return low.view(self.array), high.view(self.array)


def _to_sortable(bits: Array, out: Array) -> Array:
    """Convert sign and magnitude to sortable integers, or back (it is its own inverse)."""
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


# -- buffers ------------------------------------------------------------------------------------


def tensor_names(name: str) -> tuple[str, str, str]:
    """The names of the tensors that store a quantised buffer."""
    return (f"{name}.codes", f"{name}.steps", f"{name}.minima")


def max_expanded_bytes(kv_format: str, num_bytes: int) -> int:
    """Upper bound of the bytes that quantised and dequantised buffers take together."""
    return num_bytes + num_bytes * _WIDEST // _BITS[kv_format]


def _group_size(shape: tuple[int, ...]) -> int | None:
    axis = shape[-1] if shape else 0
    if not math.prod(shape):
        return None
    if axis % _GROUP == 0:
        return _GROUP
    shortest, longest = _WHOLE_AXIS
    return axis if shortest <= axis <= longest and axis % 2 == 0 else None


def quantise(buffer: HostBuffer, kv_format: str) -> tuple[HostBuffer, ...] | None:
    """Quantise a buffer to codes, steps and minima; None if it must stay raw."""
    floats, group = FLOATS.get(buffer.dtype), _group_size(buffer.shape)
    if floats is None or group is None:
        return None
    groups = np.frombuffer(buffer.data, floats.array).reshape(-1, group)
    low, high = floats.bounds(groups, _AT_ONCE)
    minima, maxima = floats.widened(low), floats.widened(high)
    # A quarter of the range keeps differences and rounded-up numbers finite. NaN compares false.
    if not (abs(minima).max() <= floats.largest / 4 and abs(maxima).max() <= floats.largest / 4):
        return None
    bits = _BITS[kv_format]
    ranges = (maxima - minima) / np.float32(2**bits - 1)
    steps = floats.narrowed_up(np.maximum(ranges, np.float32(floats.smallest)))
    codes = _encode(groups, minima, floats.widened(steps), floats, bits)
    lead = buffer.shape[:-1]
    per_group = (*lead, buffer.shape[-1] // group)
    names = tensor_names(buffer.name)
    return (
        _host_buffer(names[0], (*lead, buffer.shape[-1] * bits // 8), "uint8", codes),
        _host_buffer(names[1], per_group, buffer.dtype, steps),
        _host_buffer(names[2], per_group, buffer.dtype, low),
    )


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
        # Subtract before scaling: small differences are exact, so no count overflows.
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


def dequantise(
    name: str, shape: tuple[int, ...], dtype: str, kv_format: str, tensors: Sequence[HostBuffer]
) -> HostBuffer:
    """Restore a buffer from the result of `quantise`; `CacheCorruptionError` if it does not fit."""
    floats, group = FLOATS.get(dtype), _group_size(shape)
    bits = _BITS.get(kv_format)
    if floats is None or group is None or bits is None:
        raise CacheCorruptionError(f"{name} cannot be stored as {kv_format}")
    num_groups = math.prod(shape) // group
    sizes = (group * bits // 8, floats.array.itemsize, floats.array.itemsize)
    if [memoryview(tensor.data).nbytes for tensor in tensors] != [
        num_groups * size for size in sizes
    ]:
        raise CacheCorruptionError(f"{name} does not match its shape")
    codes = np.frombuffer(tensors[0].data, np.uint8)
    steps, minima = (np.frombuffer(tensor.data, floats.array) for tensor in tensors[1:])
    # A malicious file can produce NaN and infinity here; no warning is needed.
    with np.errstate(all="ignore"):
        numbers = _decode(
            codes.reshape(num_groups, -1),
            floats.widened(steps),
            floats.widened(minima),
            floats,
            group,
        )
    return _host_buffer(name, shape, dtype, numbers)


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
