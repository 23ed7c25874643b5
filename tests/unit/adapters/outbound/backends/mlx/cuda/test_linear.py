"""Joined layers with a shared input, and the inputs that the custom multiplication supports.

The kernel itself where there is a GPU for it; what models compute is in the contract suite.
"""

from typing import Any

import pytest

from semantic.adapters.outbound.backends.mlx import runtime

runtime.prepare(num_threads=1)
mx = pytest.importorskip("mlx.core")
nn = pytest.importorskip("mlx.nn")
mlx_cuda = pytest.importorskip("semantic.adapters.outbound.backends.mlx.cuda.device")
mlx_cuda_linear = pytest.importorskip("semantic.adapters.outbound.backends.mlx.cuda.linear")
join_linears = mlx_cuda_linear.join_linears

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "given,num_columns,dtype,expected",
    [
        ((2, 1, 64), 64, mx.bfloat16, True),
        ((8, 1, 64), 64, mx.float16, True),
        ((1, 1, 64), 64, mx.bfloat16, False),
        ((32, 1, 64), 64, mx.bfloat16, True),
        ((33, 1, 64), 64, mx.bfloat16, False),
        ((1, 8, 64), 64, mx.bfloat16, False),
        ((8, 64), 64, mx.bfloat16, False),
        ((8, 1, 72), 72, mx.bfloat16, False),
        ((8, 1, 64), 64, mx.float32, False),
    ],
)
def test_what_the_kernel_takes(
    given: tuple[int, ...], num_columns: int, dtype: Any, expected: bool
) -> None:
    weight = mx.zeros((5, num_columns), dtype)
    assert mlx_cuda_linear.can_multiply(mx.zeros(given, dtype), weight) == expected


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("num_rows", [2, 5, 8, 9, 16, 17, 32])
@pytest.mark.parametrize("shape", [(16, 32), (17, 576), (100, 4096), (1, 8224)])
def test_each_row_is_multiplied(dtype: Any, num_rows: int, shape: tuple[int, int]) -> None:
    """Sizes about the ends of strips, steps and turns of the warps."""
    if not mlx_cuda.is_available():
        pytest.skip("no GPU for the kernel")
    given = mx.random.normal((num_rows, 1, shape[1])).astype(dtype)
    weight = (mx.random.normal(shape) * shape[1] ** -0.5).astype(dtype)
    out = mlx_cuda_linear.multiply(given, weight)
    expected = given.astype(mx.float32) @ weight.astype(mx.float32).T
    assert mx.allclose(out.astype(mx.float32), expected, atol=3e-2).item()


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize(
    "num_rows,shape",
    [(1, (16, 32)), (3, (34, 576)), (8, (200, 4096)), (13, (34, 576)), (32, (200, 4096))],
)
@pytest.mark.parametrize("added", [None, "bias", "rows"])
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("is_gated", [False, True])
def test_norms_gates_and_additions_are_fused(
    dtype: Any,
    num_rows: int,
    shape: tuple[int, int],
    added: str | None,
    is_normed: bool,
    is_gated: bool,
) -> None:
    if not mlx_cuda.is_available():
        pytest.skip("no GPU for the kernel")
    num_outputs = shape[0] // 2 if is_gated else shape[0]
    given = (3 * mx.random.normal((num_rows, 1, shape[1]))).astype(dtype)
    weight = (mx.random.normal(shape) * shape[1] ** -0.5).astype(dtype)
    factors = mx.random.normal((shape[1],)).astype(dtype)
    rows = mx.random.normal((num_outputs,) if added == "bias" else (num_rows, 1, num_outputs))
    norm = mlx_cuda_linear.Norm(factors, 1e-5) if is_normed else None
    out = mlx_cuda_linear.multiply(
        given,
        weight,
        norm=norm,
        added=None if added is None else rows.astype(dtype),
        is_gated=is_gated,
    )
    wide = given.astype(mx.float32)
    if is_normed:
        wide = mx.fast.rms_norm(wide, factors.astype(mx.float32), 1e-5)
    expected = wide @ weight.astype(mx.float32).T
    if is_gated:
        gate, passed = mx.split(expected, 2, axis=-1)
        expected = gate * mx.sigmoid(gate) * passed
    expected = expected if added is None else expected + rows
    assert out.shape == expected.shape
    assert mx.allclose(out.astype(mx.float32), expected, rtol=2e-2, atol=6e-2).item()


# -- a model's layers -------------------------------------------------------------------------


def _attention(bias: bool = False, num_columns: int = 6) -> Any:
    module: Any = nn.Module()
    for name, size in (("q_proj", 8), ("k_proj", 4), ("v_proj", 4)):
        setattr(module, name, nn.Linear(num_columns, size, bias=bias))
    return module


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packing", [None, (4, "affine"), (4, "mxfp4")])
def test_each_layer_gives_what_it_gave(bias: bool, packing: tuple[int, str] | None) -> None:
    """Called together, alone, twice, or with inputs of their own; quantised or not."""
    size = 32 if packing else 6
    module, given, other = _attention(bias, size), mx.random.normal((3, size)), mx.ones((2, size))
    if packing:
        nn.quantize(module, group_size=32, bits=packing[0], mode=packing[1])
    names = ("q_proj", "k_proj", "v_proj")
    plain = {name: module[name] for name in names}
    weights = {name: layer.weight for name, layer in plain.items()}
    assert join_linears(module) == 1
    for name, x in [*((n, given) for n in names), ("k_proj", other), ("k_proj", other)]:
        assert mx.allclose(getattr(module, name)(x), plain[name](x), atol=1e-6).item()
    assert mx.array_equal(module.k_proj.weight, weights["k_proj"]).item()


def test_the_weights_stay_parameters() -> None:
    module = _attention()
    assert join_linears(module) == 1
    assert module.parameters()["q_proj_k_proj_v_proj"]["weight"].shape == (16, 6)
    assert len(module.parameters()) == 1


def test_nothing_is_kept_after_the_last_layer() -> None:
    module, given = _attention(), mx.ones((3, 6))
    join_linears(module)
    joined = module.q_proj._joined
    for layer in (module.q_proj, module.k_proj, module.v_proj):
        layer(given)
    assert joined._input is None
    assert not joined._outputs


def test_what_cannot_be_joined_stays() -> None:
    packed: Any = nn.Module()
    packed.gate_proj, packed.up_proj = (nn.Linear(64, 64, bias=False) for _ in range(2))
    packed.gate_proj = packed.gate_proj.to_quantized(group_size=32, bits=4)
    packed.up_proj = packed.up_proj.to_quantized(group_size=32, bits=8)
    unlike: Any = nn.Module()
    unlike.gate_proj, unlike.up_proj = nn.Linear(6, 4, bias=True), nn.Linear(6, 4, bias=False)
    alone: Any = nn.Module()
    alone.up_proj = nn.Linear(6, 4)
    for module in (packed, unlike, alone):
        before = set(module)
        assert join_linears(module) == 0
        assert set(module) == before


def test_few_rows_go_to_our_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without a bias, and by a head that is the embedding; others as before."""
    model: Any = nn.Module()
    model.plain, model.biased = nn.Linear(32, 5, bias=False), nn.Linear(32, 5)
    model.tied = nn.Embedding(7, 32)
    model.set_dtype(mx.bfloat16)
    layers = {"plain": model.plain, "biased": model.biased, "tied": model.tied.as_linear}
    few, many = (mx.random.normal((n, 1, 32)).astype(mx.bfloat16) for n in (3, 33))
    expected = {name: [layer(x) for x in (few, many)] for name, layer in layers.items()}
    taken: list[int] = []

    def multiply(given: Any, weight: Any) -> Any:
        taken.append(given.shape[0])
        return given @ weight.T

    monkeypatch.setattr(mlx_cuda_linear, "multiply", multiply)
    mlx_cuda_linear.use_custom_linears(model)
    layers["tied"] = model.tied.as_linear
    for name, layer in layers.items():
        for x, wanted in zip((few, many), expected[name], strict=True):
            assert mx.allclose(layer(x), wanted, atol=2e-2).item(), name
    assert taken == [3, 3, 3]


def test_experts_do_not_assume_sorted_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Module()
    model.experts = pytest.importorskip("mlx_lm.models.switch_layers").SwitchLinear(8, 4, 3)
    given, indices = mx.random.normal((6, 1, 8)), mx.array([0, 0, 1, 1, 2, 2])
    expected = model.experts(given, indices)
    told: list[bool] = []
    original = mx.gather_mm

    def gather_mm(*args: Any, sorted_indices: bool, **more: Any) -> Any:
        told.append(sorted_indices)
        return original(*args, sorted_indices=sorted_indices, **more)

    monkeypatch.setattr(mx, "gather_mm", gather_mm)
    mlx_cuda_linear.mend_experts(model)
    assert mx.allclose(model.experts(given, indices, sorted_indices=True), expected).item()
    assert told == [False]
