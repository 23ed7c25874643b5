import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from semantic.adapters.outbound.blocks.format import KVCodec, KVFormat, StoredBuffer
from semantic.adapters.outbound.blocks.quantisation import FLOATS
from semantic.domain.errors import CacheCorruptionError
from semantic.domain.spec import LayerKind
from semantic.ports.backend import HostBuffer, KVPayload

pytestmark = pytest.mark.unit

Singles = npt.NDArray[np.float32]
QUANTISED: tuple[KVFormat, ...] = ("q8g64", "q4g64")
LEVELS = {"q8g64": 255, "q4g64": 15}
# Of a number, by how much the dtype itself may be off.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-22}


def narrowed(numbers: Singles, dtype: str) -> npt.NDArray[np.generic]:
    """Numbers as an array of the dtype; bfloat16 as its bits, cut off."""
    if dtype == "bfloat16":
        return (numbers.view(np.uint32) >> 16).astype(np.uint16)
    return numbers.astype(dtype)


def make_buffer(numbers: Singles, dtype: str) -> HostBuffer:
    return HostBuffer("keys", numbers.shape, dtype, narrowed(numbers, dtype).tobytes())


def singles(buffer: HostBuffer) -> Singles:
    floats = FLOATS[buffer.dtype]
    return floats.widened(np.frombuffer(buffer.data, floats.array).reshape(buffer.shape))


def encode(codec: KVCodec, *buffers: HostBuffer) -> tuple[StoredBuffer, ...]:
    return codec.encode(KVPayload("abi", LayerKind.FULL, 0, 4, buffers))


def there_and_back(kv_format: KVFormat, buffer: HostBuffer) -> tuple[StoredBuffer, HostBuffer]:
    codec = KVCodec(kv_format)
    (resting,) = encode(codec, buffer)
    return resting, codec.decode(resting)


def assert_close(kv_format: KVFormat, buffer: HostBuffer, group: int) -> None:
    """No number is off by more than half a step of its group, and what the dtype rounds."""
    resting, back = there_and_back(kv_format, buffer)
    assert resting.kv_format == kv_format
    assert (back.name, back.shape, back.dtype) == (buffer.name, buffer.shape, buffer.dtype)
    exact, found = (singles(b).reshape(-1, group).astype(np.float64) for b in (buffer, back))
    ranges = exact.max(axis=1) - exact.min(axis=1)
    smallest = FLOATS[buffer.dtype].smallest
    steps = np.maximum(ranges / LEVELS[kv_format], smallest) * (1 + 2.0**-7) + smallest
    bounds = steps[:, None] * 0.501 + np.abs(found) * ROUNDING[buffer.dtype]
    assert np.all(np.abs(found - exact) <= bounds)


@pytest.mark.parametrize("kv_format", QUANTISED)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "shape, group",
    [
        ((3, 2, 70, 64), 64),
        ((2, 5, 128), 64),
        ((9, 256), 64),
        ((64,), 64),
        ((4, 80), 80),
        ((4, 96), 96),
        ((7, 8), 8),
        ((5000, 64), 64),  # more groups than are worked on at once
    ],
)
def test_errors_stay_within_half_a_step(
    kv_format: KVFormat, dtype: str, shape: tuple[int, ...], group: int
) -> None:
    random = np.random.default_rng(math.prod(shape))
    numbers = random.standard_normal(shape) * random.lognormal(size=(*shape[:-1], 1)) * 3
    offsets = random.standard_normal((*shape[:-1], 1)) * 5
    assert_close(kv_format, make_buffer((numbers + offsets).astype(np.float32), dtype), group)


@given(data=st.data(), kv_format=st.sampled_from(QUANTISED), dtype=st.sampled_from(list(FLOATS)))
def test_errors_of_any_numbers(data: st.DataObject, kv_format: KVFormat, dtype: str) -> None:
    limit = float(np.float32(FLOATS[dtype].largest / 4.01))
    numbers = data.draw(
        arrays.arrays(
            np.float32,
            st.tuples(st.integers(1, 4), st.sampled_from([8, 64, 128])),
            elements=st.floats(-limit, limit, width=32),
        )
    )
    group = min(64, numbers.shape[1])
    assert_close(kv_format, make_buffer(numbers, dtype), group)


@given(
    data=st.data(),
    kv_format=st.sampled_from(QUANTISED),
    dtype=st.sampled_from([*FLOATS, "int8", "u32"]),
)
def test_any_bytes_can_rest(data: st.DataObject, kv_format: KVFormat, dtype: str) -> None:
    """NaN, infinities, denormals, nothing at all: no error, and the same outside."""
    size = {"int8": 1, "bfloat16": 2, "float16": 2}.get(dtype, 4)
    shape = data.draw(
        st.tuples(st.integers(0, 3), st.sampled_from([0, 1, 7, 64, 66, 128, 192, 1000]))
    )
    content = data.draw(st.binary(min_size=1, max_size=64)) * (math.prod(shape) * size)
    buffer = HostBuffer("keys", shape, dtype, content[: math.prod(shape) * size])
    resting, back = there_and_back(kv_format, buffer)
    assert (back.name, back.shape, back.dtype) == (buffer.name, buffer.shape, buffer.dtype)
    assert len(bytes(back.data)) == len(buffer.data)
    if resting.kv_format == "raw":
        assert bytes(back.data) == buffer.data
    else:
        assert np.isfinite(singles(back)).all()


@pytest.mark.parametrize("kv_format", QUANTISED)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("number", [math.nan, -math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_kept_to_the_bit(
    kv_format: KVFormat, dtype: str, number: float
) -> None:
    numbers = np.ones((4, 64), np.float32)
    numbers[2, 5] = number
    buffer = make_buffer(numbers, dtype)
    resting, back = there_and_back(kv_format, buffer)
    assert resting.kv_format == "raw"
    assert bytes(back.data) == buffer.data


@pytest.mark.parametrize("kv_format", QUANTISED)
@pytest.mark.parametrize("dtype", FLOATS)
def test_equal_numbers_and_bounds_are_exact(kv_format: KVFormat, dtype: str) -> None:
    numbers = np.full((3, 64), 0.625, np.float32)
    numbers[1] = 0
    numbers[2] = -3
    buffer = make_buffer(numbers, dtype)
    resting, back = there_and_back(kv_format, buffer)
    assert resting.kv_format == kv_format
    assert np.array_equal(singles(back), numbers)


@pytest.mark.parametrize("kv_format, share", [("raw", 1.0), ("q8g64", 0.53125), ("q4g64", 0.28125)])
def test_sizes(kv_format: KVFormat, share: float) -> None:
    numbers = np.random.default_rng(0).standard_normal((4, 256, 64)).astype(np.float32)
    buffer = make_buffer(numbers, "bfloat16")
    (resting,) = encode(KVCodec(kv_format), buffer)
    kept = sum(memoryview(tensor.data).nbytes for tensor in resting.tensors)
    assert kept == share * len(buffer.data)


def test_raw_is_not_copied() -> None:
    data = bytearray(128)
    buffer = HostBuffer("keys", (64,), "float16", data)
    _, back = there_and_back("raw", buffer)
    assert back.data is data


@pytest.mark.parametrize("kv_format", QUANTISED)
def test_integers_and_recurrent_state_rest_as_they_are(kv_format: KVFormat) -> None:
    codec = KVCodec(kv_format)
    ids = HostBuffer("ids", (64,), "u32", bytes(256))
    (resting,) = encode(codec, ids)
    assert resting.kv_format == "raw"
    state = make_buffer(np.ones((4, 64), np.float32), "float32")
    (resting,) = codec.encode(KVPayload("abi", LayerKind.STATE, 0, 4, (state,)))
    assert resting.kv_format == "raw"
    (resting,) = codec.encode(KVPayload("abi", LayerKind.WINDOW, 0, 4, (state,)))
    assert resting.kv_format == kv_format


def test_buffers_keep_their_order_and_tell_their_tensors() -> None:
    numbers = np.ones((2, 64), np.float32)
    keys = make_buffer(numbers, "float16")
    ids = HostBuffer("ids", (1,), "u32", b"1234")
    first, second = encode(KVCodec("q4g64"), keys, ids)
    assert [tensor.name for tensor in first.tensors] == ["keys.codes", "keys.steps", "keys.minima"]
    assert [tensor.shape for tensor in first.tensors] == [(2, 32), (2, 1), (2, 1)]
    assert [tensor.dtype for tensor in first.tensors] == ["uint8", "float16", "float16"]
    assert second.tensors == (ids,)


def test_four_bits_pack_a_groups_halves() -> None:
    numbers = np.arange(16, dtype=np.float32)[None]
    (resting,) = encode(KVCodec("q4g64"), make_buffer(numbers, "float32"))
    codes = list(bytes(resting.tensors[0].data))
    assert codes == [low | (low + 8) << 4 for low in range(8)]


def test_what_does_not_fit_its_shape_is_refused() -> None:
    codec = KVCodec("q8g64")
    (resting,) = encode(codec, make_buffer(np.ones((2, 64), np.float32), "float32"))
    for dtype, shape, kv_format in (
        ("float32", (3, 64), "q8g64"),
        ("float32", (2, 64), "q4g64"),
        ("float16", (2, 64), "q8g64"),
        ("u32", (2, 64), "q8g64"),
        ("float32", (2, 63), "q8g64"),
        ("float32", (2, 64), "q2g64"),
    ):
        with pytest.raises(CacheCorruptionError):
            codec.decode(StoredBuffer("keys", shape, dtype, kv_format, resting.tensors))


def test_a_nan_that_signals_is_widened_without_a_warning() -> None:
    signalling = np.array([0x7D00, 0x3C00], np.uint16).view(np.float16)
    widened = FLOATS["float16"].widened(signalling)
    assert np.isnan(widened[0])
    assert widened[1] == 1.0
