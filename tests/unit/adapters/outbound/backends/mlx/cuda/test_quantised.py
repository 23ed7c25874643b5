"""The custom multiplication by quantised weights, and which formats it takes.

The kernel itself where there is a GPU for it; what models compute is in the contract suite.
"""

from dataclasses import replace
from typing import Any

import pytest

from semantic.adapters.outbound.backends.mlx import runtime

runtime.prepare(num_threads=1)
mx = pytest.importorskip("mlx.core")
nn = pytest.importorskip("mlx.nn")
device = pytest.importorskip("semantic.adapters.outbound.backends.mlx.cuda.device")
kernel = pytest.importorskip("semantic.adapters.outbound.backends.mlx.cuda.quantised.kernel")
kernels = pytest.importorskip("semantic.adapters.outbound.backends.mlx.cuda.kernels")
linear = pytest.importorskip("semantic.adapters.outbound.backends.mlx.cuda.linear")
quantised = pytest.importorskip("semantic.adapters.outbound.backends.mlx.cuda.quantised.linear")
widening = pytest.importorskip("semantic.adapters.outbound.backends.mlx.cuda.quantised.widening")

from tests.unit.adapters.outbound.backends.mlx.cuda.lanes import EmulatedLanes  # noqa: E402 - needs MLX

pytestmark = pytest.mark.unit

FORMS = [
    *((bits, group, "affine") for bits in (4, 8) for group in (32, 64, 128)),
    (4, 32, "mxfp4"),
]
DTYPES = (mx.bfloat16, mx.float16)
FEW = (16, 4096)


def matrix_of(weight: Any, bits: int, group: int, mode: str) -> Any:
    arrays = mx.quantize(weight, group, bits, mode)
    return quantised.QuantisedMatrix(*[*arrays, None][:3], group, bits, mode)


def dequantised(matrix: Any) -> Any:
    """In float32, without a rounding."""
    wide = [matrix.scales, matrix.biases]
    if matrix.mode == "affine":
        wide = [array.astype(mx.float32) for array in wide]
    packing = {"group_size": matrix.group_size, "bits": matrix.bits, "mode": matrix.mode}
    return mx.dequantize(matrix.weight, *wide, **packing).astype(mx.float32)


@pytest.mark.parametrize(
    "form,num_columns,dtype,expected",
    [
        *((form, 512, mx.bfloat16, True) for form in FORMS),
        ((4, 64, "affine"), 512, mx.float16, True),
        ((4, 64, "affine"), 512, mx.float32, False),
        ((4, 64, "affine"), 320, mx.bfloat16, False),
        ((6, 64, "affine"), 512, mx.bfloat16, False),
        ((8, 32, "mxfp8"), 512, mx.bfloat16, False),
    ],
)
def test_what_the_kernel_takes(
    form: tuple[int, int, str], num_columns: int, dtype: Any, expected: bool
) -> None:
    matrix = matrix_of(mx.ones((16, num_columns), dtype), *form)
    assert matrix.shape == (16, num_columns)
    assert quantised.has_kernel(matrix, dtype) == expected
    for num_rows, is_few in ((1, True), (32, True), (33, False)):
        given = mx.zeros((num_rows, 1, num_columns), dtype)
        assert quantised.can_multiply(given, matrix) == (expected and is_few)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_rows", [1, 8, 13, 32])
@pytest.mark.parametrize("shape", [(34, 768), (200, 4096)])
@pytest.mark.parametrize(
    "added,is_normed,is_gated", [("rows", False, False), ("bias", True, False), (None, True, True)]
)
def test_the_kernel_computes_what_dequantised_weights_give(
    dtype: Any,
    form: tuple[int, int, str],
    num_rows: int,
    shape: tuple[int, int],
    added: str | None,
    is_normed: bool,
    is_gated: bool,
) -> None:
    """Beyond a tile and a strip, with fewer chunks than warps and with more."""
    if not device.is_available():
        pytest.skip("no GPU for the kernel")
    compare(dtype, form, num_rows, shape, added, is_normed=is_normed, is_gated=is_gated)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> EmulatedLanes:
    paths = kernels.include_paths()
    if not EmulatedLanes.are_possible(paths):
        pytest.skip("needs g++ and CUDA's headers: make kernel-check installs these")
    return EmulatedLanes(tmp_path_factory.mktemp("lanes"), paths)


@pytest.mark.slow
@pytest.mark.parametrize(
    "form, num_few, dtype",
    [
        (form, num_few, DTYPES[(i + j) % 2])
        for i, form in enumerate(FORMS)
        for j, num_few in enumerate(FEW)
    ],
)
def test_its_source_does_on_a_cpu(
    form: tuple[int, int, str],
    num_few: int,
    dtype: Any,
    emulated: EmulatedLanes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the work is divided for matrices of few rows and of many; each pair of two choices."""
    monkeypatch.setattr(kernel, "_FEW", num_few)
    monkeypatch.setattr(kernels, "compile_source", emulated.compile_source)
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", emulated.run)
    kernel.make_kernel.cache_clear()
    for num_rows in (1, 3, 13, 27):
        compare(dtype, form, num_rows, (34, 768), "rows", is_normed=False, is_gated=False)
        compare(dtype, form, num_rows, (34, 768), None, is_normed=True, is_gated=True)
    kernel.make_kernel.cache_clear()


def compare(
    dtype: Any,
    form: tuple[int, int, str],
    num_rows: int,
    shape: tuple[int, int],
    added: str | None,
    *,
    is_normed: bool,
    is_gated: bool,
) -> None:
    """Compare the kernel with dequantised weights in float32."""
    num_outputs = shape[0] // 2 if is_gated else shape[0]
    weight = mx.random.normal(shape) * shape[1] ** -0.5 + 0.01
    matrix = matrix_of(weight.astype(dtype), *form)
    given = mx.random.normal((num_rows, 1, shape[1])).astype(dtype)
    factors = mx.random.normal((shape[1],)).astype(dtype)
    rows = mx.random.normal((num_outputs,) if added == "bias" else (num_rows, 1, num_outputs))
    rows = rows.astype(dtype)
    out = quantised.multiply(
        given,
        matrix,
        norm=linear.Norm(factors, 1e-5) if is_normed else None,
        added=rows if added else None,
        is_gated=is_gated,
    ).astype(mx.float32)
    wide = given.astype(mx.float32)
    if is_normed:
        wide = mx.fast.rms_norm(wide, factors.astype(mx.float32), 1e-5)
    expected = wide @ dequantised(matrix).T
    if is_gated:
        gate, passed = mx.split(expected, 2, axis=-1)
        expected = gate * mx.sigmoid(gate) * passed
    expected = expected + rows.astype(mx.float32) if added else expected
    error = mx.linalg.norm(out - expected) / mx.linalg.norm(expected)
    assert error.item() < (1e-2 if is_normed else 4e-3)  # of the output's own rounding


@pytest.mark.parametrize("is_expanded", [False, True])
def test_more_rows_are_multiplied_without_the_kernel(is_expanded: bool) -> None:
    matrix = matrix_of(mx.random.normal((32, 256)), 4, 64, "affine")
    matrix = replace(matrix, is_expanded=is_expanded)
    given, added = mx.random.normal((40, 1, 256)), mx.random.normal((16,))
    found = quantised.multiply(given, matrix, added=added, is_gated=True)
    gate, passed = mx.split(given @ dequantised(matrix).T, 2, axis=-1)
    assert mx.allclose(found, gate * mx.sigmoid(gate) * passed + added, atol=1e-3).item()


@pytest.mark.parametrize("form", [(4, 64, "affine"), (4, 32, "mxfp4")])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_a_layer_chooses_by_rows_and_by_the_devices_memory(
    form: tuple[int, int, str], dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short prompt is a few rows; many rows need memory for the dequantised matrix."""
    calls: list[tuple[int, ...]] = []

    def multiply(given: Any, matrix: Any, added: Any = None) -> Any:
        calls.append(given.shape)
        out = given @ dequantised(matrix).T.astype(given.dtype)
        return out if added is None else out + added

    monkeypatch.setattr(quantised, "multiply", multiply)
    bits, group, mode = form
    for device_bytes, is_expanded in ((64 * 2 * 16 * 256, True), (64 * 2 * 16 * 256 - 1, False)):
        model = nn.Module()
        layer = nn.Linear(256, 16)
        layer.set_dtype(dtype)
        model.layer = layer.to_quantized(group_size=group, bits=bits, mode=mode)
        quantised.use_custom_linears(model, (), device_bytes)
        assert quantised.QuantisedMatrix.of(model.layer).is_expanded == is_expanded
        weight = dequantised(quantised.QuantisedMatrix.of(model.layer))
        for num_tokens, expected_calls in ((8, [(8, 1, 256)]), (33, [])):
            given = mx.random.normal((1, num_tokens, 256)).astype(dtype)
            found = model.layer(given)
            expected = given.astype(mx.float32) @ weight.T + model.layer.bias
            assert calls == expected_calls
            calls.clear()
            assert found.dtype == dtype
            assert mx.allclose(found, expected, rtol=0.05, atol=0.05).item()


@pytest.mark.parametrize("form", [(4, 64, "affine"), (4, 32, "mxfp4")])
def test_narrow_matrices_are_dequantised(form: tuple[int, int, str]) -> None:
    """MLX's own product of several rows is wrong for them on CUDA."""
    bits, group, mode = form
    model = nn.Module()
    model.narrow, model.wide, model.words = (
        layer.to_quantized(group_size=group, bits=bits, mode=mode)
        for layer in (nn.Linear(64, 96), nn.Linear(128, 96), nn.Embedding(96, 64))
    )
    matrices = [quantised.QuantisedMatrix.of(layer) for layer in (model.narrow, model.words)]
    weights = [*map(dequantised, matrices)]
    quantised.expand_narrow(model)
    assert type(model.wide) is nn.QuantizedLinear
    given = mx.random.normal((30, 64))
    found = model.narrow(given), model.words.as_linear(given)
    expected = given @ weights[0].T + model.narrow.bias, given @ weights[1].T
    for one, other in zip(found, expected, strict=True):
        assert mx.allclose(one, other, atol=1e-4).item()
    assert set(model.narrow.parameters()) == {"weight", "bias"}
    assert set(model.words.parameters()) == {"weight"}


@pytest.mark.parametrize("bits", [2, 3, 5, 6])
def test_wider_packing_keeps_the_weights(bits: int) -> None:
    model = nn.Module()
    model.lm_head = nn.Linear(256, 8, bias=False).to_quantized(group_size=32, bits=bits)
    before = dequantised(quantised.QuantisedMatrix.of(model.lm_head))
    assert widening.widen(model, device_bytes=100) == 0  # no room
    assert widening.widen(model, device_bytes=2**20) == 1
    assert model.lm_head.bits == 8
    assert mx.array_equal(dequantised(quantised.QuantisedMatrix.of(model.lm_head)), before)


def test_packing_that_no_kernel_takes_stays() -> None:
    model = nn.Module()
    model.lm_head = nn.Linear(320, 8, bias=False).to_quantized(group_size=64, bits=6)
    assert widening.widen(model, device_bytes=2**20) == 0
    assert model.lm_head.bits == 6


@pytest.mark.parametrize("error", [1.0, 1.1, float("nan")])
def test_a_kernel_that_differs_from_the_library_is_found(
    error: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In one format: the layers of the other keep the kernel."""

    def multiply(given: Any, matrix: Any) -> Any:
        factor = error if matrix.bits == 8 and given.shape[0] == 8 else 1.0
        return (given @ dequantised(matrix).T).astype(given.dtype) * factor

    monkeypatch.setattr(quantised, "multiply", multiply)
    model = nn.Module()
    for name, bits in (("right", 4), ("wrong", 8), ("other", 6)):
        layer = nn.Linear(256, 8, bias=False)
        layer.set_dtype(mx.bfloat16)
        model[name] = layer.to_quantized(group_size=64, bits=bits)
    wrong = quantised.find_wrong_formats(model)
    quantised.use_custom_linears(model, wrong)
    is_wrong = error != 1.0
    assert [str(packing) for packing in wrong] == ["8 bits in groups of 64"] * is_wrong
    assert ("8 bits in groups of 64; disabled" in caplog.text) == is_wrong
    assert type(model.right).__name__ == "FewRowsQuantisedLinear"
    assert (type(model.wrong) is nn.QuantizedLinear) == is_wrong


def test_siblings_of_unlike_formats_become_alike() -> None:
    model = nn.Module()
    for name, bits in (("q_proj", 4), ("k_proj", 4), ("v_proj", 6), ("o_proj", 4)):
        model[name] = nn.Linear(256, 8, bias=False).to_quantized(group_size=32, bits=bits)
    given = mx.random.normal((2, 256))
    expected = [model[name](given) for name in ("q_proj", "k_proj", "v_proj")]
    assert widening.widen(model, device_bytes=2**20) == 3
    assert model.o_proj.bits == 4
    assert linear.join_linears(model) == 1
    for layer, wanted in zip((model.q_proj, model.k_proj, model.v_proj), expected, strict=True):
        assert mx.allclose(layer(given), wanted, atol=1e-5).item()
