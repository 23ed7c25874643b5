"""ctypes bindings of the C library: its structures and functions.

The structures here must have the layout that `linears.h` and `step.h` declare. `semantic_abi`
returns the structure sizes that the library was built with; `Library` rejects a library whose sizes
differ.
"""

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

# Kinds of matrices (see `groups.h`); that of plain integers is their number of bits.
FULL, MXFP4 = 0, 12
SILU, GELU_TANH, CLAMPED = 0, 1, 2  # kinds of `Activation`


class LibraryMismatchError(OSError):
    """The library does not match this CPU or this version of the package."""


class Matrix(ctypes.Structure):
    """`Matrix` of `linears.h`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("unit", ctypes.c_float),
    )


class Activation(ctypes.Structure):
    """`Activation` of `linears.h`."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
    )


class Mlp(ctypes.Structure):
    """`Mlp` of `step.h`."""

    _fields_ = (("gate", Matrix), ("up", Matrix), ("down", Matrix))


class NativeLayer(ctypes.Structure):
    """`Layer` of `step.h`."""

    _fields_ = (
        ("norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
        ("output_norm", ctypes.c_void_p),
        ("mlp_output_norm", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("mlps", ctypes.POINTER(Mlp)),
        ("inputs", Matrix * 3),
        ("output", Matrix),
        ("router", Matrix),
        ("num_inputs", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("rope", ctypes.c_int32),
        ("num_experts", ctypes.c_int32),
        ("num_chosen", ctypes.c_int32),
        ("is_normalised", ctypes.c_int32),
    )


class NativeModel(ctypes.Structure):
    """`Model` of `step.h`."""

    _fields_ = (
        ("layers", ctypes.POINTER(NativeLayer)),
        ("norm", ctypes.c_void_p),
        ("head", Matrix),
        ("activation", Activation),
        ("num_layers", ctypes.c_int32),
        ("hidden", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("scaling", ctypes.c_float),
    )


class NativeRow(ctypes.Structure):
    """`Row` of `step.h`; `decoding` writes each one as four 64-bit integers."""

    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("capacity", ctypes.c_int64),
        ("position", ctypes.c_int64),
    )


def _abi() -> int:
    sizes = (ctypes.sizeof(kind) for kind in (Matrix, NativeLayer, NativeModel, NativeRow))
    return sum(size << 16 * index for index, size in enumerate(sizes))


class Library:
    """The functions of the C library.

    Arguments that are addresses point to arrays that the caller keeps alive during the call.

    Attributes:
        variant: The instruction set that the library was built for.
    """

    def __init__(self, path: Path, variant: str) -> None:
        """Load the library.

        Raises:
            LibraryMismatchError: this CPU cannot run it, or its structure sizes differ.
            OSError: it cannot be loaded.
            AttributeError: it lacks a function.
        """
        loaded = ctypes.CDLL(str(path))
        loaded.semantic_abi.restype = ctypes.c_uint64
        if not loaded.semantic_supported():
            raise LibraryMismatchError(f"this CPU does not support the variant {variant}")
        if loaded.semantic_abi() != _abi():
            raise LibraryMismatchError(f"{path.name} was built for another version")
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        self.variant = variant
        self._step, self._linear = loaded.semantic_step, loaded.semantic_linear
        self._pack, self._packed_size = loaded.semantic_pack, loaded.semantic_packed_size
        self._step.argtypes = (pointer, pointer, integer, pointer, pointer, pointer)
        self._step.argtypes += (integer, pointer, pointer, integer)
        self._linear.argtypes = (pointer, pointer, integer, pointer, integer)
        self._pack.argtypes = (pointer, pointer, pointer, *(integer,) * 4, ctypes.c_float)
        self._pack.argtypes += (pointer, integer)
        self._pack.restype = None
        self._packed_size.argtypes = (integer, integer, integer)
        self._packed_size.restype = ctypes.c_size_t
        self._rows = loaded.semantic_rows
        self._rows.argtypes = (pointer, pointer, integer, pointer)

    def step(self, model: NativeModel, rows: int, num_rows: int, *rest: int) -> None:
        if self._step(ctypes.byref(model), rows, num_rows, *rest):
            raise MemoryError("out of memory in a native decode step")

    def linear(self, matrix: Matrix, x: int, num_rows: int, out: int, num_threads: int) -> None:
        if self._linear(ctypes.byref(matrix), x, num_rows, out, num_threads):
            raise MemoryError("out of memory in a native linear")

    def rows(self, matrix: Matrix, numbers: int, num_rows: int, out: int) -> None:
        """Expand rows of a packed matrix to float32; their numbers are 64-bit integers."""
        if self._rows(ctypes.byref(matrix), numbers, num_rows, out):
            raise IndexError("a row of a native matrix is out of range")

    def packed_size(self, num_rows: int, num_columns: int, kind: int) -> int:
        """Return the size of a packed matrix in bytes."""
        return int(self._packed_size(num_rows, num_columns, kind))

    def pack(self, addresses: Sequence[int], sizes: Sequence[int], unit: float, out: int) -> None:
        """Write a matrix's integers, scales and biases in the layout that the kernels read.

        Args:
            addresses: Of the integers, the scales and the biases (0 for MXFP4).
            sizes: Rows, columns, columns per group, kind.
            unit: Scales and biases are stored as multiples of this number.
            out: Memory for the result, of `packed_size` bytes.
        """
        self._pack(*addresses, *sizes, unit, out, os.cpu_count() or 1)
