"""What our own multiplication takes; the kernel itself where there is a GPU for it."""

from typing import Any

import pytest

from semantic.adapters.outbound.backends.mlx import runtime

runtime.prepare(num_threads=1)
mx = pytest.importorskip("mlx.core")
mlx_cuda = pytest.importorskip("semantic.adapters.outbound.backends.mlx.cuda.device")
mlx_cuda_linear = pytest.importorskip("semantic.adapters.outbound.backends.mlx.cuda.linear")

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "given,num_columns,dtype,expected",
    [
        ((2, 1, 64), 64, mx.bfloat16, True),
        ((8, 1, 64), 64, mx.float16, True),
        ((1, 1, 64), 64, mx.bfloat16, False),
        ((9, 1, 64), 64, mx.bfloat16, False),
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
@pytest.mark.parametrize("num_rows", [2, 5, 8])
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
@pytest.mark.parametrize("num_rows,shape", [(1, (16, 32)), (3, (34, 576)), (8, (200, 4096))])
@pytest.mark.parametrize("added", [None, "bias", "rows"])
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("is_gated", [False, True])
def test_what_comes_before_and_after_is_done_on_the_way(
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
