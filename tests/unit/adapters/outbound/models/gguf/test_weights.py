import re
import struct
from fractions import Fraction
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st

from semantic.adapters.outbound.models.gguf.weights import (
    BITS,
    GROUP,
    GROWTH,
    PLAIN,
    Stored,
    describe_storage,
    file_bits,
    find_problem,
    is_grouped,
    read_tensor,
    stored_bits,
    stored_size,
    to_bfloat16,
)
from tests.gguf_blocks import encode_q6_k

pytestmark = pytest.mark.unit

Floats = npt.NDArray[np.float32]

ROWS, COLUMNS = 6, 512
EXACT = [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]
ROUNDED_SCALES = [Kind.Q4_K, Kind.Q5_K]
NEAREST = [Kind.IQ4_NL, Kind.IQ4_XS, Kind.Q3_K, Kind.Q2_K, Kind.IQ3_S]
REFUSED = [Kind.F64, Kind.Q1_0, Kind.Q8_1, Kind.Q8_K]
RUNNING = Path(__file__).parents[6] / "docs" / "running.md"


def random_tensor(kind: Kind) -> gguf.ReaderTensor:
    """A matrix of random blocks; what are float16 numbers in them is small and finite."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(3).integers(0, 256, (ROWS, COLUMNS // block, size), np.uint8)
    # Where the kinds keep their float16 numbers.
    halves = {Kind.Q6_K: [208], Kind.Q3_K: [108], Kind.Q2_K: [80, 82]}
    halves |= {key: [0, 2] for key in (Kind.Q4_1, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K)}
    for number, place in enumerate(halves.get(kind, [0])):
        value = np.array([(-1) ** number * 0.01], np.float16).view(np.uint8)
        data[..., place : place + 2] = value
    return tensor_of(data.reshape(ROWS, -1), kind, (COLUMNS, ROWS))


def tensor_of(
    data: npt.NDArray[np.generic], kind: Kind, shape: tuple[int, ...]
) -> gguf.ReaderTensor:
    numbers = np.array(shape, np.uint64)
    count = int(np.prod(shape))
    return gguf.ReaderTensor("t", kind, numbers, count, data.nbytes, 0, data, None)


def large_tensor(kind: Kind, num_rows: int) -> gguf.ReaderTensor:
    """What the size of a tensor is calculated from, without its data."""
    num_bytes = int(num_rows * 4096 * file_bits(kind) / 8)
    shape = np.array((4096, num_rows), np.uint64)
    return gguf.ReaderTensor("large", kind, shape, num_rows * 4096, num_bytes, 0, None, None)


def expand(arrays: dict[str, Stored], bits: int) -> Floats:
    """What MLX makes of the arrays: a row's integers are a stream of bits."""
    stream = np.unpackbits(arrays["weight"].view(np.uint8), axis=-1, bitorder="little")
    integers = stream.reshape(ROWS, -1, GROUP, bits) @ (1 << np.arange(bits))
    scales, biases = (arrays[name][..., None].astype(np.float32) for name in ("scales", "biases"))
    return np.asarray(integers.astype(np.float32) * scales + biases).reshape(ROWS, COLUMNS)


@pytest.mark.parametrize("kind", EXACT, ids=lambda kind: kind.name)
def test_kinds_with_a_scale_and_a_bias_are_exact(kind: Kind) -> None:
    tensor = random_tensor(kind)
    found = expand(read_tensor(tensor), BITS[kind])
    np.testing.assert_array_equal(found, gguf.dequantize(tensor.data, kind))


@pytest.mark.parametrize("kind", ROUNDED_SCALES, ids=lambda kind: kind.name)
def test_kinds_with_scales_of_two_levels_keep_their_integers(kind: Kind) -> None:
    """Scale and bias are products, which are rounded to eleven significant bits each."""
    tensor = random_tensor(kind)
    arrays, expected = read_tensor(tensor), gguf.dequantize(tensor.data, kind)
    reach = 2 ** BITS[kind] * np.abs(arrays["scales"]) + np.abs(arrays["biases"])
    off = np.abs(expand(arrays, BITS[kind]) - expected).reshape(ROWS, -1, GROUP)
    assert (off.max(axis=-1) <= reach.astype(np.float32) / 2**11).all()


def test_q6_k_takes_the_greater_of_two_scales() -> None:
    """One half of a group is exact; the other is off by one step at most, rarely by over half."""
    weights = np.random.default_rng(5).normal(size=(ROWS, COLUMNS)).astype(np.float32)
    tensor = tensor_of(encode_q6_k(weights), Kind.Q6_K, (COLUMNS, ROWS))
    expected = gguf.dequantize(tensor.data, Kind.Q6_K)
    assert np.abs(expected - weights).max() < 0.1
    arrays = read_tensor(tensor)
    halves = (expand(arrays, 6) - expected).reshape(ROWS, -1, 2, GROUP // 2)
    off, steps = np.abs(halves).max(axis=-1), np.abs(arrays["scales"]).astype(np.float32)
    assert (off.min(axis=-1) <= 32 * steps / 2**11).all()
    assert (off.max(axis=-1) <= 1.02 * steps).all()
    assert (off.max(axis=-1) <= 0.52 * steps).mean() > 0.8
    # What the format adds to the rounding that the file already has.
    assert np.square(halves).mean() < 0.75 * np.square(expected - weights).mean()


def test_q6_k_of_zeros_and_of_opposite_signs_stays_near() -> None:
    weights = np.zeros((ROWS, COLUMNS), np.float32)
    weights[1:, :16], weights[1:, 16:32] = np.linspace(-1, 0.5, 16), np.linspace(-0.5, 1, 16)
    tensor = tensor_of(encode_q6_k(weights), Kind.Q6_K, (COLUMNS, ROWS))
    found = expand(read_tensor(tensor), 6)
    np.testing.assert_array_equal(found[0], 0)
    np.testing.assert_allclose(found, weights, atol=1.6 / 32)


@pytest.mark.parametrize("kind", NEAREST, ids=lambda kind: kind.name)
def test_other_kinds_are_quantised_to_eight_bits(kind: Kind) -> None:
    tensor = random_tensor(kind)
    expected = gguf.dequantize(tensor.data, kind)
    groups = expected.reshape(ROWS, -1, GROUP)
    steps = (groups.max(axis=-1) - groups.min(axis=-1)) / 255
    off = np.abs(expand(read_tensor(tensor), 8) - expected).reshape(groups.shape)
    # Half a step, and what rounding the scale takes at the group's far end.
    assert (off.max(axis=-1) <= 0.7 * steps + 1e-6).all()
    assert (off.mean(axis=-1) <= 0.5 * steps + 1e-6).all()


@pytest.mark.parametrize(
    "kind", [*EXACT, *ROUNDED_SCALES, Kind.Q6_K, *NEAREST], ids=lambda kind: kind.name
)
def test_the_size_is_known_before(kind: Kind) -> None:
    tensor = random_tensor(kind)
    arrays = read_tensor(tensor)
    assert sum(array.nbytes for array in arrays.values()) == stored_size(tensor)
    assert stored_size(tensor) == ROWS * COLUMNS * stored_bits(kind) / 8


# -- what a file may take -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.name)
def test_kinds_that_cannot_be_read_are_named(kind: Kind) -> None:
    problem = find_problem([large_tensor(Kind.Q4_0, 8), large_tensor(kind, 8)])
    assert problem == f"type {kind.name} of tensor large is not supported"


def test_a_file_that_would_grow_too_much_is_refused_with_its_size() -> None:
    problem = find_problem([large_tensor(Kind.IQ4_XS, 2**20), large_tensor(Kind.Q6_K, 2**16)])
    assert problem is not None
    assert problem.startswith(
        "stored in 8 bits, its tensors of type IQ4_XS would make 5.07 GB of 2.50 GB. "
    )
    assert "Q4_K_M" in problem


def test_few_tensors_may_take_eight_bits() -> None:
    tensors = [large_tensor(Kind.Q5_K, 2**16), large_tensor(Kind.IQ4_XS, 2**11)]
    assert find_problem(tensors) is None
    assert describe_storage(tensors) == (
        "189.0 MB become 210.8 MB (bits per weight: Q5_K 5.5 -> 6, IQ4_XS 4.25 -> 9)"
    )


def test_a_usual_mix_stays_within_the_limit() -> None:
    """Q4_K_M: most matrices in Q4_K, half of two kinds and the head in Q6_K, norms in full."""
    tensors = [large_tensor(Kind.Q4_K, 860), large_tensor(Kind.Q6_K, 140)]
    before, after = sum(t.n_bytes for t in tensors), sum(map(stored_size, tensors))
    assert after / before < 1.11
    assert find_problem(tensors) is None


def test_the_table_of_types_is_true() -> None:
    row = re.compile(
        r"^\| ([A-Z][A-Z0-9_, ]+) \| ([0-9. to]+) \| ([0-9.]+) \| (.+) \|$", re.MULTILINE
    )
    listed: dict[Kind, str] = {}
    for names, in_file, stored, how in row.findall(RUNNING.read_text("utf-8")):
        kinds = [Kind[name] for name in names.split(", ")]
        bits = sorted({file_bits(kind) for kind in kinds})
        assert [float(number) for number in in_file.split(" to ")] == pytest.approx(
            sorted({bits[0], bits[-1]}), abs=0.01
        )
        assert {stored_bits(kind) for kind in kinds} == {float(stored)}, names
        listed |= dict.fromkeys(kinds, how)
    assert listed.keys() == BITS.keys() | set(PLAIN)
    for kind, how in listed.items():
        is_exact = kind in (*EXACT, Kind.MXFP4, Kind.F16, Kind.BF16)
        assert how.startswith("exact") == is_exact, kind.name
        is_refused = "refused" in how
        assert is_refused == (stored_bits(kind) > GROWTH * file_bits(kind)), kind.name


def test_a_group_of_equal_weights_is_kept() -> None:
    """All integers of a block are the same, and so are all weights."""
    stored = np.full((1, 18), 0x88, np.uint8)
    stored[:, :2] = np.array([0.5], np.float16).view(np.uint8)
    arrays = read_tensor(tensor_of(stored, Kind.IQ4_NL, (GROUP, 1)))
    assert np.isfinite(arrays["scales"]).all()
    np.testing.assert_array_equal(arrays["biases"], 0.5)
    np.testing.assert_array_equal(arrays["weight"], 0)


def test_scales_that_float16_cannot_hold_are_refused() -> None:
    stored = gguf.quantize(np.full((1, GROUP), 1e6, np.float32), Kind.Q8_0)
    with pytest.raises(ValueError, match="too large for float16"):
        read_tensor(tensor_of(stored, Kind.Q8_0, (GROUP, 1)))


def test_float16_stays_float16() -> None:
    weights = np.random.default_rng(1).normal(size=(ROWS, 40)).astype(np.float16)
    arrays = read_tensor(tensor_of(weights, Kind.F16, (40, ROWS)))
    assert arrays["weight"].dtype == np.float16
    np.testing.assert_array_equal(arrays["weight"], weights)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16], ids=lambda kind: kind.name)
def test_other_unquantised_tensors_become_bfloat16(kind: Kind) -> None:
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
