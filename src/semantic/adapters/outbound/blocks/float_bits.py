"""Floating-point arrays as numpy can handle them: bfloat16, which it does not know, as its bits.

All formats are sign and magnitude, so their bits, read as integers, sort as the numbers do once
the magnitude of negative ones is turned around. Integers are also compared twice as fast.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Singles: TypeAlias = npt.NDArray[np.float32]


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
