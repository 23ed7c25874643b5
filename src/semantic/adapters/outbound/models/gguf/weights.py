"""Converts a GGUF file's tensors: quantised matrices stay quantised, others have 16 bits.

The result is MLX's format, which mlx-lm reads directly: integers of 4, 5, 6 or 8 bits packed into
words, and a scale and a bias in float16 for every 32 weights of a row, ``weight = integer * scale +
bias``. Types with the same structure keep their integers. Q6_K has a scale for every 16 weights:
the group takes the greater of two, and the other half is rounded to its steps. MXFP4, the format of
GPT-OSS's experts, is kept: 4-bit numbers, and for every 32 an exponent instead of scale and bias.
Types with less than 4 bits or uneven steps become 8 bits, which few tensors of a file may take:
`find_problem` names files that would grow by more than 15 %.
"""

import math
from collections.abc import Callable, Collection
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind
from gguf.quants import Q4_K, dequantize
from safetensors import TensorSpec

GROUP = 32
GROWTH = 1.15  # the most that a file may grow

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]
Bytes = npt.NDArray[np.uint8]
Stored = Bytes | Halves | npt.NDArray[np.uint16] | npt.NDArray[np.uint32] | Floats
Arrays = dict[str, Stored]
_Groups = tuple[Bytes, Floats, Floats]

PLAIN = (Kind.F32, Kind.F16, Kind.BF16)
"""Types that are not quantised; they become 16 bits wide."""
BITS = {
    **dict.fromkeys((Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.MXFP4), 4),
    **dict.fromkeys((Kind.Q5_0, Kind.Q5_1, Kind.Q5_K), 5),
    **dict.fromkeys((Kind.Q6_K,), 6),
    **dict.fromkeys((Kind.Q8_0, Kind.IQ4_NL, Kind.IQ4_XS, Kind.NVFP4, Kind.Q3_K, Kind.Q2_K), 8),
    **dict.fromkeys((Kind.IQ3_S, Kind.IQ3_XXS, Kind.IQ2_S, Kind.IQ2_XS, Kind.IQ2_XXS), 8),
    **dict.fromkeys((Kind.IQ1_M, Kind.IQ1_S, Kind.TQ2_0, Kind.TQ1_0), 8),
}
"""Bits per integer that each quantised type is stored in; other types are not supported."""
_ALTERNATIVES = "Q4_K_M, Q5_K_M, Q6_K or Q8_0"
_VALUES_AT_ONCE = 1 << 22
_SMALLEST_SCALE = np.float32(2**-24)  # of float16
_NAMES: dict[np.dtype[Any], str] = {
    np.dtype(np.uint8): "uint8",
    np.dtype(np.float16): "float16",
    np.dtype(np.uint16): "bfloat16",
    np.dtype(np.uint32): "uint32",
    np.dtype(np.float32): "float32",
}


def is_grouped(tensor: gguf.ReaderTensor) -> bool:
    """Whether a tensor stays quantised: a matrix whose rows consist of whole groups."""
    is_matrix = len(tensor.shape) > 1 and int(tensor.shape[0]) % GROUP == 0
    return is_matrix and tensor.tensor_type not in PLAIN


def group_bits(tensor: gguf.ReaderTensor) -> int:
    """Bits per integer of a grouped tensor."""
    return BITS[tensor.tensor_type]


def file_bits(kind: Kind) -> float:
    """Bits that a weight takes in a GGUF file."""
    num_weights, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    return float(num_bytes * 8 / num_weights)


def stored_bits(kind: Kind) -> float:
    """Bits that a weight of a matrix takes after the import, with its share of scale and bias."""
    if kind in PLAIN:
        return 16
    return BITS[kind] + (8 if kind == Kind.MXFP4 else 32) / GROUP


def stored_size(tensor: gguf.ReaderTensor) -> int:
    """Bytes that a tensor takes."""
    bits = stored_bits(tensor.tensor_type) if is_grouped(tensor) else 16
    return int(tensor.n_elements * bits) // 8


def find_problem(tensors: Collection[gguf.ReaderTensor]) -> str | None:
    """Return why tensors cannot be stored, an unknown type or too much growth; None if they can."""
    for tensor in tensors:
        kind = tensor.tensor_type
        if kind not in BITS and kind not in PLAIN:
            return f"type {kind.name} of tensor {tensor.name} is not supported"
    before, after = sum(int(t.n_bytes) for t in tensors), sum(map(stored_size, tensors))
    if after <= GROWTH * before:
        return None
    grown = sorted({t.tensor_type.name for t in tensors if stored_size(t) > GROWTH * t.n_bytes})
    return (
        f"stored in 8 bits, its tensors of type {', '.join(grown)} would make {_size(after)} of "
        f"{_size(before)}. Use a file of this model in {_ALTERNATIVES}"
    )


def describe_storage(tensors: Collection[gguf.ReaderTensor]) -> str:
    """Describe the size of tensors and their bits per weight, before and after the import."""
    before, after = sum(int(t.n_bytes) for t in tensors), sum(map(stored_size, tensors))
    kinds = sorted({tensor.tensor_type for tensor in tensors if len(tensor.shape) > 1})
    bits = ", ".join(f"{k.name} {file_bits(k):.4g} -> {stored_bits(k):.4g}" for k in kinds)
    return f"{_size(before)} become {_size(after)} (bits per weight: {bits})"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def read_tensor(tensor: gguf.ReaderTensor) -> dict[str, Stored]:
    """Read a tensor's arrays, by the suffix of their names; arrays of uint16 hold bfloat16.

    Raises:
        ValueError: a weight is not finite or too large.
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
    """Dequantise a tensor."""
    return np.asarray(dequantize(tensor.data, tensor.tensor_type))


def quantised(values: Floats) -> Arrays:
    """Quantise a matrix to 8 bits; one whose rows are no whole groups becomes bfloat16."""
    if values.shape[-1] % GROUP:
        return {"weight": to_bfloat16(values)}
    integers, scales, biases = _quantise(values)
    return {
        "weight": _words(integers, 8),
        "scales": to_float16(scales),
        "biases": to_float16(biases),
    }


def to_bfloat16(values: Floats) -> npt.NDArray[np.uint16]:
    """Return the bits of the nearest bfloat16 of each value, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    # Add half of the dropped range, and one more if the last kept bit is odd.
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    # Rounding could turn a NaN into infinity; setting the quiet bit keeps it a NaN.
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def to_float16(values: Floats) -> Halves:
    """Round to float16.

    Raises:
        ValueError: a value is not finite or too large.
    """
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    if not np.isfinite(halves).all():
        raise ValueError("has scales that are not finite, or too large for float16")
    return halves


def tensor_spec(array: Stored) -> TensorSpec:
    """Describe an array for safetensors; the array must outlive the result."""
    name, address = _NAMES[array.dtype], array.ctypes.data
    return TensorSpec(dtype=name, shape=array.shape, data_ptr=address, data_len=array.nbytes)


def _read_rows(tensor: gguf.ReaderTensor, rows: npt.NDArray[Any]) -> dict[str, Stored]:
    kind = tensor.tensor_type
    if kind == Kind.F16:
        return {"weight": np.ascontiguousarray(rows).view(np.float16)}
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
        "weight": _words(integers, BITS[kind]),
        "scales": to_float16(scales.reshape(len(rows), -1)),
        "biases": to_float16(biases.reshape(len(rows), -1)),
    }


def _words(integers: Bytes, bits: int) -> npt.NDArray[np.uint32]:
    """Pack each row's integers into a stream of bits, the first in the lowest."""
    count = 8 // math.gcd(bits, 8)  # integers that fill whole bytes
    runs = integers.reshape(len(integers), -1, count)
    packed = np.zeros((*runs.shape[:2], count * bits // 8), np.uint8)
    for index in range(count):
        byte, shift = divmod(bits * index, 8)
        packed[..., byte] |= runs[..., index] << np.uint8(shift)
        if shift + bits > 8:
            packed[..., byte + 1] |= runs[..., index] >> np.uint8(8 - shift)
    return packed.reshape(len(integers), -1).view(np.uint32)


# -- blocks of each type to integers [row, group, 32], scales and biases [row, group] -------------


def _split_q4_0(rows: Bytes) -> _Groups:
    scales, nibbles = _parts(rows, 1, 16)
    return _two_halves(nibbles), scales[..., 0], -8 * scales[..., 0]


def _split_q4_1(rows: Bytes) -> _Groups:
    scales, nibbles = _parts(rows, 2, 16)
    return _two_halves(nibbles), scales[..., 0], scales[..., 1]


def _split_q5_0(rows: Bytes) -> _Groups:
    scales, rest = _parts(rows, 1, 4 + 16)
    return _with_fifth_bits(rest), scales[..., 0], -16 * scales[..., 0]


def _split_q5_1(rows: Bytes) -> _Groups:
    scales, rest = _parts(rows, 2, 4 + 16)
    return _with_fifth_bits(rest), scales[..., 0], scales[..., 1]


def _with_fifth_bits(rest: Bytes) -> Bytes:
    fifth = np.unpackbits(rest[..., :4], axis=-1, bitorder="little")
    return _two_halves(rest[..., 4:]) | (fifth << np.uint8(4))


def _split_q8_0(rows: Bytes) -> _Groups:
    scales, integers = _parts(rows, 1, 32)
    # Flipping the sign bit shifts the range from -128..127 to 0..255.
    return integers ^ np.uint8(0x80), scales[..., 0], -128 * scales[..., 0]


def _split_q4_k(rows: Bytes) -> _Groups:
    steps, rest = _parts(rows, 2, 12 + 128)
    return _in_turn(rest[..., 12:]), *_two_levels(steps, rest[..., :12])


def _split_q5_k(rows: Bytes) -> _Groups:
    steps, rest = _parts(rows, 2, 12 + 32 + 128)
    fifth = rest[..., None, 12:44] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    fifth = fifth.reshape(len(rows), -1, GROUP)
    integers = _in_turn(rest[..., 44:]) | (fifth << np.uint8(4))
    return integers, *_two_levels(steps, rest[..., :12])


def _two_levels(steps: Floats, packed: Bytes) -> tuple[Floats, Floats]:
    """Scales and biases of groups: small integers times the block's two numbers."""
    scales, least = Q4_K.get_scale_min(np.ascontiguousarray(packed).reshape(-1, 12))
    shape = (len(steps), -1, 8)
    return steps[..., :1] * scales.reshape(shape), -steps[..., 1:] * least.reshape(shape)


def _in_turn(nibbles: Bytes) -> Bytes:
    """Unpack nibbles: 32 low halves, then the high halves of the same bytes."""
    runs = nibbles.reshape(len(nibbles), -1, 32)
    return np.stack([runs & 15, runs >> 4], axis=2).reshape(len(nibbles), -1, GROUP)


def _split_q6_k(rows: Bytes) -> _Groups:
    blocks = rows.reshape(len(rows), -1, 210)
    low = blocks[..., :128].reshape(len(rows), -1, 1, 64) >> np.array([[0], [4]], np.uint8)
    high = blocks[..., 128:192].reshape(len(rows), -1, 1, 32) >> np.array(
        [[0], [2], [4], [6]], np.uint8
    )
    shape = (len(rows), -1, 2, GROUP // 2)
    integers = (low & 15).reshape(shape) | (high & 3).reshape(shape) << np.uint8(4)
    unit = np.ascontiguousarray(blocks[..., 208:]).view(np.float16).astype(np.float32)
    halves = (unit * blocks[..., 192:208].view(np.int8)).reshape(*integers.shape[:3])
    # The half with the greater scale keeps its integers, the other one is rounded to its steps.
    greater = np.abs(halves).argmax(axis=-1, keepdims=True)
    scales = np.take_along_axis(halves, greater, axis=-1)
    ratios = np.divide(halves, scales, out=np.ones_like(halves), where=scales != 0)
    steps = np.rint((integers.astype(np.float32) - 32) * ratios[..., None]) + 32
    integers = np.clip(steps, 0, 63).astype(np.uint8).reshape(len(rows), -1, GROUP)
    return integers, scales[..., 0], -32 * scales[..., 0]


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
    return to_float16(values).astype(np.float32)


_SPLITTERS: dict[Kind, Callable[[Bytes], _Groups]] = {
    Kind.Q4_0: _split_q4_0,
    Kind.Q4_1: _split_q4_1,
    Kind.Q4_K: _split_q4_k,
    Kind.Q5_0: _split_q5_0,
    Kind.Q5_1: _split_q5_1,
    Kind.Q5_K: _split_q5_k,
    Kind.Q6_K: _split_q6_k,
    Kind.Q8_0: _split_q8_0,
}
