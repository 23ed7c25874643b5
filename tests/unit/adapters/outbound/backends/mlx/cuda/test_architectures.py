"""The custom kernels by compute capability: compiled for each by NVRTC, which needs no GPU."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from semantic.adapters.outbound.backends.mlx import runtime

runtime.prepare(num_threads=1)
mx = pytest.importorskip("mlx.core")
nn = pytest.importorskip("mlx.nn")
attention = pytest.importorskip("semantic.adapters.outbound.backends.mlx.cuda.attention")
device = pytest.importorskip("semantic.adapters.outbound.backends.mlx.cuda.device")
kernels = pytest.importorskip("semantic.adapters.outbound.backends.mlx.cuda.kernels")
linear = pytest.importorskip("semantic.adapters.outbound.backends.mlx.cuda.linear")
quantised = pytest.importorskip("semantic.adapters.outbound.backends.mlx.cuda.quantised.linear")
loop = pytest.importorskip("semantic.adapters.outbound.backends.mlx.loop.kernel")
rope = pytest.importorskip("semantic.adapters.outbound.backends.mlx.cuda.rope")
transfer = pytest.importorskip("semantic.adapters.outbound.backends.mlx.cuda.transfer")
tuning = pytest.importorskip("semantic.adapters.outbound.backends.mlx.cuda.tuning")

pytestmark = pytest.mark.unit

CAPABILITIES = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0))
FORMATS = (mx.bfloat16, mx.float16)


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """By name the sources of all kernels, as the server calls them; nothing is run."""
    found: dict[str, str] = {}

    def note(name: str, source: str) -> bytes:
        found[name] = source
        return b""

    def run(*, output_shapes: Any, output_dtypes: Any, **_: Any) -> list[Any]:
        return [mx.zeros(s, d) for s, d in zip(output_shapes, output_dtypes, strict=True)]

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "compile_source", note)
        patch.setattr(mx.fast, "precompiled_cuda_kernel", run)
        forget_kernels()
        call_kernels_without_tiles()
        call_kernels_with_tiles()
        call_kernels_with_bulk_copies()
    forget_kernels()
    return found


def forget_kernels() -> None:
    """A kernel remembers what it has compiled."""
    for module in (attention, linear, loop, quantised, rope, transfer):
        for maker in vars(module).values():
            if hasattr(maker, "cache_clear"):
                maker.cache_clear()


def call_kernels_with_tiles() -> None:
    for dtype, dim, shared in itertools.product(FORMATS, (64, 128, 256), (1, 8)):
        plan, held = attention.make_plan([[40]], 2), held_of(dtype, dim)
        queries = mx.zeros((1, 2 * shared, 1, dim), dtype)
        attention.attend(queries, held, plan, dim**-0.5)
        heads, angles = mx.zeros((1, 2 * shared + 4, 1, dim), dtype), mx.zeros((1, dim))
        factors = mx.ones((dim,), dtype)
        for norms in (None, rope.HeadNorms(factors, factors, 1e-6)):
            attention.keep_and_attend(heads, angles, norms, held, plan, dim**-0.5)
    flags = itertools.product(FORMATS, (2, 16, 32), (True, False), ("", "rows", "bias"))
    for dtype, num_rows, is_normed, added in flags:
        given, weight = mx.zeros((num_rows, 1, 64), dtype), mx.zeros((32, 64), dtype)
        norm = linear.Norm(mx.ones((64,), dtype), 1e-5) if is_normed else None
        more = {"": None, "rows": mx.zeros((num_rows, 1, 32), dtype), "bias": mx.zeros(32, dtype)}
        linear.multiply(given, weight, norm=norm, added=more[added])
        if not added:
            linear.multiply(given, weight, norm=norm, is_gated=True)
    forms = ((4, 32, "affine"), (4, 64, "affine"), (8, 32, "affine"), (8, 128, "affine"))
    packed = itertools.product(FORMATS, (1, 2, 16, 32), (32, 4128), (*forms, (4, 32, "mxfp4")))
    for (dtype, num_rows, height, packing), is_gated in itertools.product(packed, (True, False)):
        bits, group, mode = packing
        arrays = mx.quantize(mx.zeros((height, 256), dtype), group, bits, mode)
        matrix = quantised.QuantisedMatrix(*[*arrays, None][:3], group, bits, mode)
        norm = linear.Norm(mx.ones((256,), dtype), 1e-5) if is_gated else None
        rows, bias = mx.zeros((num_rows, 1, 256), dtype), mx.zeros((height,), dtype)
        options = {"norm": norm} if is_gated else {"added": bias}
        quantised.multiply(rows, matrix, is_gated=is_gated, **options)


def call_kernels_without_tiles() -> None:
    for dtype, dim in itertools.product(FORMATS, (64, 128, 256)):
        heads, places = mx.zeros((1, 12, 1, dim), dtype), mx.zeros((1, 4), mx.int32)
        factors = mx.ones((dim,), dtype)
        for norms in (None, rope.HeadNorms(factors, factors, 1e-6)):
            rope.keep(heads, mx.zeros((1, dim)), norms, held_of(dtype, dim), places)
    for dtype, count in itertools.product((mx.bfloat16, mx.float32), (1, 36)):
        arrays = [mx.zeros((1, 1, 1, transfer.UNIT), dtype)] * count
        where = mx.zeros((4,), mx.int64)
        sizes = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1), "outputs": [((1,), mx.uint8)]}
        given = {"template": {"T": dtype}, **sizes}
        transfer._out_kernel(count)(inputs=[*arrays, where, arrays[0]], **given)
        transfer._in_kernel(count)(inputs=[*arrays, where], **given)


def call_kernels_with_bulk_copies() -> None:
    for dim, num_heads, head_eps, has_bias in ((64, 8, None, False), (128, 16, 1e-6, True)):
        sizes = loop.LoopSizes(2, 512, 768, 1000, num_heads, 2, dim, 0.1, 1e-5, head_eps, has_bias)
        weight = mx.zeros((1,), mx.bfloat16)
        weights = [[weight] * loop.source_parts.FIELDS] * 3
        made = loop.LoopKernel(loop.LoopModel(sizes, weights, mx.zeros((1, dim))), 4, 2)
        for num_rows in (1, 9):
            rows = [loop.LoopRow(0, n, 0) for n in range(num_rows)]
            made.run(rows, [[loop.LoopDraw()]], mx.zeros((2, 1, 3), mx.int64))


def held_of(dtype: Any, dim: int) -> Any:
    keys = mx.zeros((1, 2, 64, dim), dtype)
    return rope.Held(attention.addresses([(keys, keys)])[None], 0, 2)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_compiles_where_it_is_used(
    capability: tuple[int, int], sources: dict[str, str]
) -> None:
    """In all forms that the server uses; the assembler also refuses too much shared memory."""
    if kernels._compiler() is None or not kernels.include_paths():
        pytest.skip("needs NVRTC and CUDA's headers: make kernel-check installs them")
    architecture = "sm_{}{}".format(*capability)
    for name, source in sources.items():
        if "mma.sync" in source and capability < (8, 0):
            with pytest.raises(RuntimeError, match=r"requires \.target sm_80"):
                kernels.compile_source(name, source, architecture)
        elif "cp.async.bulk" in source and capability < (9, 0):
            with pytest.raises(RuntimeError, match=r"requires \.target sm_90"):
                kernels.compile_source(name, source, architecture)
        else:
            assert kernels.compile_source(name, source, architecture), name


def test_the_compiler_of_pip_packages_finds_its_own_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "cu13" / "lib"
    folder.mkdir(parents=True)
    for name in ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0"):
        (folder / name).touch()
    loaded: list[str] = []

    def load(name: str) -> str:
        loaded.append(name)
        if name == "libnvrtc.so.13":  # no toolkit is installed
            raise OSError
        return name

    monkeypatch.setattr(kernels, "_packages", lambda: tmp_path)
    monkeypatch.setattr(kernels, "_LIBRARIES", ("libnvrtc.so.13",))
    monkeypatch.setattr(kernels.ctypes, "CDLL", load)
    kernels._compiler.cache_clear()
    assert kernels._compiler() == str(folder / "libnvrtc.so.13")
    assert loaded[0] == str(folder / "libnvrtc-builtins.so.13.0")
    kernels._compiler.cache_clear()


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("can_compile", [True, False])
def test_the_capability_decides_between_custom_layers_and_those_of_the_library(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], can_compile: bool
) -> None:
    major, minor = capability
    info = {"compute_capability_major": major, "compute_capability_minor": minor}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(device, "is_in_use", lambda: True)
    monkeypatch.setattr(kernels, "can_compile", lambda: can_compile)
    device.capability.cache_clear()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    given = mx.random.normal((3, 1, 8), key=mx.random.key(1))
    expected = model(given)
    tuning.tune(model, 0)
    is_custom = type(model.layers[0]) is not nn.Linear
    assert is_custom == (capability >= (8, 0) and can_compile) == device.is_available()
    assert mx.array_equal(model(given), expected)  # in float32 both use the library's code
    device.capability.cache_clear()
