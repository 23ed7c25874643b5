"""Variants of the native library: the same bytes from integer matrices on every CPU."""

import hashlib
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from semantic.adapters.outbound.backends.torch.native.library import MXFP4, Library, Matrix
from semantic.adapters.outbound.backends.torch.native.variants import (
    SCALAR,
    VARIANTS,
    NativeBuild,
)
from semantic.domain.errors import InvalidRequestError

pytestmark = pytest.mark.contract

Floats = npt.NDArray[np.float32]
GetVariant = Callable[[str], Library]

NUM_ROWS = (*range(1, 10), 16, 17)
SHAPES = ((48, 64), (50, 96), (1, 32), (576, 288))
# SHA-256 of the results of all SHAPES and NUM_ROWS; recorded on x86, valid on every CPU.
RECORDED = {
    4: "284e13d665f3c3491a1de4a7494f51430f1f1023d0205db54ccc2cdcbd47a977",
    5: "5f297c2c1f21f25b992af9820ee4ee3271b2dda63fc10cb39dfdbdae5420d0bd",
    6: "2765b558305d147b0d397d5d80cb60dc3a7889384bc4a09561f7334c46d0b4b2",
    MXFP4: "c166a0b1c47a1d6799996190c398c795448281e55496caf7d78762759e06a1b0",
    8: "eda935199519c98aa0c61b31afe5a03ffa692bb61943c8ba5839ab1872f3e2dc",
}


KINDS = [4, 5, 6, 8, MXFP4]
MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])


@pytest.fixture(scope="session")
def variant(native_directory: Path) -> GetVariant:
    """Makes a variant; skips where this machine cannot run it."""

    def make(name: str) -> Library:
        try:
            made = NativeBuild(native_directory, name).library()
        except InvalidRequestError as error:
            pytest.skip(str(error))
        assert made is not None
        return made

    return make


@dataclass(frozen=True)
class Case:
    """A matrix in groups of 32 columns, and activations: numbers that are exact on any machine."""

    integers: npt.NDArray[np.uint8]
    scales: Floats
    biases: Floats
    x: Floats
    kind: int

    @staticmethod
    def make(shape: tuple[int, int], kind: int, num_rows: int) -> "Case":
        random = np.random.default_rng((shape[0], kind, num_rows))
        groups = (shape[0], shape[1] // 32)
        integers = random.integers(0, 16 if kind == MXFP4 else 2**kind, shape, np.uint8)
        scales = np.float32(2**-16) * random.integers(1, 1024, groups).astype(np.float32)
        biases = np.float32(-(2**-13)) * random.integers(0, 1024, groups).astype(np.float32)
        x = random.integers(-(2**12), 2**12, (num_rows, shape[1])).astype(np.float32)
        x *= np.float32(2**-9)
        x[:, 7] *= 30
        return Case(integers, scales, biases, x, kind)

    def multiply(self, library: Library, num_threads: int = 1) -> Floats:
        num_rows, num_columns = self.integers.shape
        bits = np.unpackbits(self.integers[..., None], axis=-1, bitorder="little")
        bits = bits[..., : 4 if self.kind == MXFP4 else self.kind].reshape(num_rows, -1)
        packed = np.packbits(bits, axis=-1, bitorder="little")
        unit = 2.0**-12
        out = np.empty(library.packed_size(num_rows, num_columns, self.kind), np.uint8)
        addresses = [array.ctypes.data for array in (packed, self.scales, self.biases)]
        library.pack(addresses, (num_rows, num_columns, 32, self.kind), unit, out.ctypes.data)
        matrix = Matrix(out.ctypes.data, None, self.kind, num_rows, num_columns, unit)
        found = np.empty((len(self.x), num_rows), np.float32)
        library.linear(matrix, self.x.ctypes.data, len(self.x), found.ctypes.data, num_threads)
        return found

    @property
    def expected(self) -> Floats:
        scales, biases = np.repeat(self.scales, 32, 1), np.repeat(self.biases, 32, 1)
        if self.kind == MXFP4:
            return self.x @ (scales * MXFP4_VALUES[self.integers].astype(np.float32)).T
        return self.x @ (scales * self.integers + biases).T


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_multiplies(variant: GetVariant, kind: int) -> None:
    case = Case.make((50, 96), kind, 5)
    found, expected = case.multiply(variant("scalar")), case.expected
    assert np.linalg.norm(found - expected) < 2e-4 * np.linalg.norm(expected)


@pytest.mark.parametrize("name", [variant.name for variant in VARIANTS if variant is not SCALAR])
@pytest.mark.parametrize("kind", KINDS)
def test_every_variant_gives_the_bytes_of_the_reference(
    variant: GetVariant, name: str, kind: int
) -> None:
    library, reference = variant(name), variant("scalar")
    for shape in SHAPES:
        for num_rows in NUM_ROWS:
            case = Case.make(shape, kind, num_rows)
            found, expected = case.multiply(library, 1 + num_rows % 3), case.multiply(reference)
            assert found.tobytes() == expected.tobytes(), (shape, num_rows)


@pytest.mark.parametrize("name", [variant.name for variant in VARIANTS])
@pytest.mark.parametrize("kind", KINDS)
def test_results_equal_those_recorded_on_another_machine(
    variant: GetVariant, name: str, kind: int
) -> None:
    library, digest = variant(name), hashlib.sha256()
    for shape in SHAPES:
        for num_rows in NUM_ROWS:
            digest.update(Case.make(shape, kind, num_rows).multiply(library).tobytes())
    assert digest.hexdigest() == RECORDED[kind]


@pytest.mark.parametrize("name", [variant.name for variant in VARIANTS])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("extreme", [np.nan, np.inf, 0.0, 1e-38, 3e38])
def test_extremes_stay_within_their_row(
    variant: GetVariant, name: str, kind: int, extreme: float
) -> None:
    """What is not a number makes a row not a number, and no other; zeros give zeros."""
    library, case = variant(name), Case.make((48, 64), kind, 4)
    alone = case.multiply(library)
    case.x[2] = 0.0 if extreme == 0.0 else case.x[2]
    case.x[2, 33] = extreme
    with np.errstate(over="ignore", invalid="ignore"):
        found = case.multiply(library)
    assert np.array_equal(found[[0, 1, 3]], alone[[0, 1, 3]])
    if not np.isfinite(extreme):
        assert np.isnan(found[2]).all()
    elif extreme == 0.0:
        assert not found[2].any()


def test_the_order_of_preference_ends_with_what_all_cpus_have() -> None:
    names = [v.name for v in VARIANTS if platform.machine() in v.machines]
    assert names[-2:] in (["avx2", "scalar"], ["dotprod", "scalar"])
