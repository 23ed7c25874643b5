import struct
from fractions import Fraction

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st

from semantic.adapters.outbound.models.gguf.weights import (
    GROUP,
    Stored,
    group_bits,
    is_grouped,
    read_tensor,
    to_bfloat16,
)

pytestmark = pytest.mark.unit

Floats = npt.NDArray[np.float32]

ROWS, COLUMNS = 6, 512
EXACT = {Kind.Q4_0: 4, Kind.Q4_1: 4, Kind.Q4_K: 4, Kind.Q8_0: 8}
NEAREST = [Kind.Q6_K, Kind.Q5_K, Kind.Q5_0, Kind.Q3_K, Kind.IQ4_NL]


def random_tensor(kind: Kind) -> gguf.ReaderTensor:
    """A matrix of random blocks; what are float16 numbers in them is small and finite."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(3).integers(0, 256, (ROWS, COLUMNS // block, size), np.uint8)
    # Where the kinds keep their float16 numbers.
    halves = {Kind.Q6_K: [208], Kind.Q3_K: [108], Kind.Q4_1: [0, 2], Kind.Q4_K: [0, 2]}
    halves |= {Kind.Q5_K: [0, 2]}
    for number, place in enumerate(halves.get(kind, [0])):
        value = np.array([(-1) ** number * 0.01], np.float16).view(np.uint8)
        data[..., place : place + 2] = value
    return tensor_of(data.reshape(ROWS, -1), kind, (COLUMNS, ROWS))


def tensor_of(
    data: npt.NDArray[np.generic], kind: Kind, shape: tuple[int, ...]
) -> gguf.ReaderTensor:
    numbers = np.array(shape, np.uint64)
    return gguf.ReaderTensor("t", kind, numbers, 0, data.nbytes, 0, data, None)


def from_bfloat16(bits: Stored) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def expand(arrays: dict[str, Stored], bits: int) -> Floats:
    """What MLX makes of the arrays, number by number."""
    words = arrays["weight"][..., None] >> np.arange(0, 32, bits, dtype=np.uint32)
    integers = (words & np.uint32(2**bits - 1)).reshape(ROWS, -1, GROUP).astype(np.float32)
    scales, biases = (from_bfloat16(arrays[name])[..., None] for name in ("scales", "biases"))
    return (integers * scales + biases).reshape(ROWS, COLUMNS)


@pytest.mark.parametrize("kind", EXACT, ids=lambda kind: kind.name)
def test_kinds_with_a_scale_and_a_bias_keep_their_integers(kind: Kind) -> None:
    tensor = random_tensor(kind)
    arrays = read_tensor(tensor)
    expected = gguf.dequantize(tensor.data, kind)
    bits = group_bits(tensor)
    assert (is_grouped(tensor), bits) == (True, EXACT[kind])
    assert arrays["weight"].nbytes == ROWS * COLUMNS * bits // 8
    assert arrays["scales"].shape == arrays["biases"].shape == (ROWS, COLUMNS // GROUP)
    # Scale and bias are rounded to eight significant bits each, and nothing else is.
    reach = (2**bits - 1) * np.abs(from_bfloat16(arrays["scales"])).max()
    reach += np.abs(from_bfloat16(arrays["biases"])).max()
    np.testing.assert_allclose(expand(arrays, bits), expected, atol=reach / 2**8, rtol=0)


@pytest.mark.parametrize("kind", NEAREST, ids=lambda kind: kind.name)
def test_other_kinds_are_quantised_to_eight_bits(kind: Kind) -> None:
    tensor = random_tensor(kind)
    expected = gguf.dequantize(tensor.data, kind)
    groups = expected.reshape(ROWS, -1, GROUP)
    steps = (groups.max(axis=-1) - groups.min(axis=-1)) / 255
    off = np.abs(expand(read_tensor(tensor), 8) - expected).reshape(groups.shape)
    assert (is_grouped(tensor), group_bits(tensor)) == (True, 8)
    # Half a step, and what rounding the scale takes at the group's far end.
    assert (off.max(axis=-1) <= 1.5 * steps + 1e-6).all()
    assert (off.mean(axis=-1) <= 0.5 * steps + 1e-6).all()


def test_a_group_of_equal_weights_is_kept() -> None:
    weights = np.repeat(np.array([[0.0], [0.75]], np.float32), GROUP, axis=1)
    stored = gguf.quantize(weights, Kind.Q5_0)
    arrays = read_tensor(tensor_of(stored, Kind.Q5_0, (GROUP, 2)))
    np.testing.assert_array_equal(from_bfloat16(arrays["biases"])[0], 0.0)
    assert np.isfinite(from_bfloat16(arrays["scales"])).all()


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16], ids=lambda kind: kind.name)
def test_what_is_not_quantised_becomes_bfloat16(kind: Kind) -> None:
    weights = np.random.default_rng(1).normal(size=(ROWS, 40)).astype(np.float32)
    stored = gguf.quantize(weights, kind)
    tensor = tensor_of(stored, kind, (40, ROWS))
    assert not is_grouped(tensor)
    arrays = read_tensor(tensor)
    assert arrays.keys() == {"weight"}
    np.testing.assert_array_equal(arrays["weight"], to_bfloat16(gguf.dequantize(stored, kind)))


def test_rows_read_some_at_a_time_are_the_whole_matrix() -> None:
    weights = np.random.default_rng(1).normal(size=(40000, 128)).astype(np.float32)
    stored = gguf.quantize(weights, Kind.Q8_0)
    arrays = read_tensor(tensor_of(stored, Kind.Q8_0, (128, 40000)))
    integers = stored.reshape(40000, 4, 34)[..., 2:] ^ np.uint8(0x80)
    np.testing.assert_array_equal(arrays["weight"].view(np.uint8), integers.reshape(40000, 128))


def exact(bits: int) -> Fraction:
    """The value of a bfloat16; an infinity counts as the number after the greatest."""
    sign = -1 if bits >> 15 else 1
    if bits & 0x7FFF == 0x7F80:
        return Fraction(sign * 2**128)
    return Fraction(struct.unpack(">f", struct.pack(">I", bits << 16))[0])


@given(st.integers(0, 2**32 - 1))
def test_rounding_gives_the_nearest_bfloat16_and_the_even_one_of_two(bits: int) -> None:
    value = np.array([bits], np.uint32).view(np.float32)
    (found,) = to_bfloat16(value).tolist()
    if not np.isfinite(value[0]):
        assert np.array_equal(np.uint32(found << 16).view(np.float32), value[0], equal_nan=True)
        return
    candidates = [bits >> 16, (bits >> 16) + 1]
    wanted = Fraction(float(value[0]))
    assert found == min(candidates, key=lambda each: (abs(exact(each) - wanted), each % 2))
