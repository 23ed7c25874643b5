"""Converts a GGUF file's tensors: quantised matrices stay quantised, others become bfloat16.

The result is MLX's format, which mlx-lm reads directly: integers of 4 or 8 bits packed into words,
and a scale and a bias for every 32 weights of a row, ``weight = integer * scale + bias``. Q4_0,
Q4_1, Q4_K and Q8_0 have the same structure, so their integers are copied and only scales and biases
are rounded, to bfloat16. Types with other groups or steps (Q6_K, Q5_K, IQ4_NL...) are requantised
to 8 bits. MXFP4, the format of GPT-OSS's experts, is kept: 4-bit numbers, and for every 32 an
exponent instead of scale and bias.
"""

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind
from gguf.quants import Q4_K, dequantize
from safetensors import TensorSpec

GROUP = 32

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Stored = npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
_Groups = tuple[Bytes, Floats, Floats]

_PLAIN = {Kind.F64, Kind.F32, Kind.F16, Kind.BF16}
_VALUES_AT_ONCE = 1 << 22
_SMALLEST_SCALE = np.float32(1e-8)
_FOUR_BITS = (Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.MXFP4)
_NAMES: dict[np.dtype[Any], str] = {
    np.dtype(np.uint8): "uint8",
    np.dtype(np.uint16): "bfloat16",
    np.dtype(np.uint32): "uint32",
}


def is_grouped(tensor: gguf.ReaderTensor) -> bool:
    """Whether a tensor stays quantised: a matrix whose rows consist of whole groups."""
    is_matrix = len(tensor.shape) > 1 and int(tensor.shape[0]) % GROUP == 0
    return is_matrix and tensor.tensor_type not in _PLAIN


def group_bits(tensor: gguf.ReaderTensor) -> int:
    """Bits per integer of a grouped tensor."""
    return 4 if tensor.tensor_type in _FOUR_BITS else 8


def read_tensor(tensor: gguf.ReaderTensor) -> dict[str, Stored]:
    """Read a tensor's arrays, by the suffix of their names; 16-bit arrays hold bfloat16.

    Raises:
        NotImplementedError: the tensor's type is not supported.
    """
    if len(tensor.shape) == 1:
        return _read_rows(tensor, tensor.data)
    rows = tensor.data.reshape(-1, tensor.data.shape[-1])
    at_once = max(1, _VALUES_AT_ONCE // int(tensor.shape[0]))
    # Some rows at a time: a whole embedding in float32 may exceed the rest of the memory use.
    starts = range(0, len(rows), at_once)
    pieces = [_read_rows(tensor, rows[start : start + at_once]) for start in starts]
    return {
        end: np.concatenate([piece[end] for piece in pieces]).reshape(*tensor.data.shape[:-1], -1)
        for end in pieces[0]
    }


def read_floats(tensor: gguf.ReaderTensor) -> Floats:
    """Dequantise a tensor; `NotImplementedError` if its type is not supported."""
    return np.asarray(dequantize(tensor.data, tensor.tensor_type))


def to_bfloat16(values: Floats) -> npt.NDArray[np.uint16]:
    """Return the bits of the nearest bfloat16 of each value, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    # Add half of the dropped range, and one more if the last kept bit is odd.
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    # Rounding could turn a NaN into infinity; setting the quiet bit keeps it a NaN.
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def tensor_spec(array: Stored) -> TensorSpec:
    """Describe an array for safetensors; the array must outlive the result."""
    name, address = _NAMES[array.dtype], array.ctypes.data
    return TensorSpec(dtype=name, shape=array.shape, data_ptr=address, data_len=array.nbytes)


def _read_rows(tensor: gguf.ReaderTensor, rows: npt.NDArray[Any]) -> dict[str, Stored]:
    kind = tensor.tensor_type
    if not is_grouped(tensor):
        return {"weight": to_bfloat16(np.asarray(dequantize(rows, kind)))}
    if kind == Kind.MXFP4:
        blocks = rows.reshape(len(rows), -1, 1 + GROUP // 2)
        scales = np.ascontiguousarray(blocks[..., 0])
        return {"weight": _words(_two_halves(blocks[..., 1:]), 4), "scales": scales}
    if split := _SPLITTERS.get(kind):
        integers, scales, biases = split(np.ascontiguousarray(rows).view(np.uint8))
    else:
        integers, scales, biases = _quantise(np.asarray(dequantize(rows, kind)))
    return {
        "weight": _words(integers, group_bits(tensor)),
        "scales": to_bfloat16(scales.reshape(len(rows), -1)),
        "biases": to_bfloat16(biases.reshape(len(rows), -1)),
    }


def _words(integers: Bytes, bits: int) -> npt.NDArray[np.uint32]:
    """Pack each row's integers into words, the first in the lowest bits."""
    flat = integers.reshape(len(integers), -1)
    if bits == 4:
        flat = flat[:, ::2] | (flat[:, 1::2] << np.uint8(4))
    return np.ascontiguousarray(flat).view(np.uint32)


# -- blocks of each type to integers [row, group, 32], scales and biases [row, group] -------------


def _split_q4_0(rows: Bytes) -> _Groups:
    scales, nibbles = _parts(rows, 1, 16)
    return _two_halves(nibbles), scales[..., 0], -8 * scales[..., 0]


def _split_q4_1(rows: Bytes) -> _Groups:
    scales, nibbles = _parts(rows, 2, 16)
    return _two_halves(nibbles), scales[..., 0], scales[..., 1]


def _split_q8_0(rows: Bytes) -> _Groups:
    scales, integers = _parts(rows, 1, 32)
    # Flipping the sign bit shifts the range from -128..127 to 0..255.
    return integers ^ np.uint8(0x80), scales[..., 0], -128 * scales[..., 0]


def _split_q4_k(rows: Bytes) -> _Groups:
    steps, rest = _parts(rows, 2, 12 + 128)
    scales, least = Q4_K.get_scale_min(np.ascontiguousarray(rest[..., :12]).reshape(-1, 12))
    shape = (len(rows), -1, 8)
    nibbles = rest[..., 12:].reshape(len(rows), -1, 4, 32)
    return (
        np.stack([nibbles & 15, nibbles >> 4], axis=3).reshape(len(rows), -1, GROUP),
        steps[..., :1] * scales.reshape(shape),
        -steps[..., 1:] * least.reshape(shape),
    )


def _parts(rows: Bytes, num_halves: int, num_bytes: int) -> tuple[Floats, Bytes]:
    """Split rows into blocks: some float16 numbers, and the bytes after them."""
    blocks = rows.reshape(len(rows), -1, 2 * num_halves + num_bytes)
    halves = np.ascontiguousarray(blocks[..., : 2 * num_halves]).view(np.float16)
    return halves.astype(np.float32), blocks[..., 2 * num_halves :]


def _two_halves(nibbles: Bytes) -> Bytes:
    """Unpack nibbles: first the low halves of a block's bytes, then the high ones."""
    return np.concatenate([nibbles & 15, nibbles >> 4], axis=-1)


def _quantise(weights: Floats) -> _Groups:
    """Quantise to 8 bits between each group's minimum and maximum."""
    groups = weights.reshape(len(weights), -1, GROUP)
    least, greatest = groups.min(axis=-1), groups.max(axis=-1)
    # Round biases and scales first, so that the integers compensate for their error.
    biases = _rounded(least)
    scales = _rounded(np.maximum((greatest - biases) / 255, _SMALLEST_SCALE))
    steps = (groups - biases[..., None]) / scales[..., None]
    return np.clip(np.rint(steps), 0, 255).astype(np.uint8), scales, biases


def _rounded(values: Floats) -> Floats:
    return (to_bfloat16(values).astype(np.uint32) << 16).view(np.float32)


_SPLITTERS: dict[Kind, Callable[[Bytes], _Groups]] = {
    Kind.Q4_0: _split_q4_0,
    Kind.Q4_1: _split_q4_1,
    Kind.Q4_K: _split_q4_k,
    Kind.Q8_0: _split_q8_0,
}
