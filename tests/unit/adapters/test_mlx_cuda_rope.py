"""Angles told by the library's modules; the kernel that turns by them where there is a GPU."""

from typing import Any

import pytest

from semantic.adapters.outbound import mlx_runtime

mlx_runtime.prepare(num_threads=1)
mx = pytest.importorskip("mlx.core")
nn = pytest.importorskip("mlx.nn")
mlx_cuda = pytest.importorskip("semantic.adapters.outbound.mlx_cuda")
mlx_cuda_rope = pytest.importorskip("semantic.adapters.outbound.mlx_cuda_rope")
Norm = pytest.importorskip("semantic.adapters.outbound.mlx_cuda_linear").Norm

pytestmark = pytest.mark.unit

POSITIONS = [0, 1, 700, 31_000]


def _rope(scaling: dict[str, Any] | None) -> Any:
    made = mlx_runtime.import_library("mlx_lm.models.rope_utils").initialize_rope
    return made(64, 500_000.0, False, scaling, 131_072)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


@pytest.mark.parametrize("scaling", [None, LLAMA3, YARN], ids=["plain", "llama3", "yarn"])
def test_angles_turn_as_the_library_does(scaling: dict[str, Any] | None) -> None:
    rope, positions = _rope(scaling), mx.array(POSITIONS)
    heads = mx.random.normal((4, 3, 1, 64))
    expected = rope(heads[...], offset=positions)
    turned = mlx_cuda_rope.turned_by(mlx_cuda_rope.angles_at(rope, positions, 64), heads)
    assert mx.allclose(turned, expected, atol=1e-4).item()


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("is_normed", [False, True])
def test_heads_are_split_normed_and_turned(dim: int, is_normed: bool) -> None:
    if not mlx_cuda.is_available():
        pytest.skip("no GPU for the kernel")
    given = (2 * mx.random.normal((4, 1, 10 * dim))).astype(mx.bfloat16)
    angles = mlx_cuda_rope.angles_at(nn.RoPE(dim, base=10_000), mx.array(POSITIONS), dim)
    norms = [Norm(mx.random.normal((dim,)).astype(mx.bfloat16), 1e-6) for _ in range(2)]
    made = mlx_cuda_rope.split_heads(
        given, angles, 6, 2, mlx_cuda_rope.HeadNorms(*norms) if is_normed else None
    )
    heads = given.astype(mx.float32).reshape(4, 10, 1, dim)
    queries, keys, values = mx.split(heads, [6, 8], axis=1)
    if is_normed:
        queries, keys = (
            mx.fast.rms_norm(array, norm.factors.astype(mx.float32), norm.eps)
            for array, norm in zip((queries, keys), norms, strict=True)
        )
    expected = (
        mlx_cuda_rope.turned_by(angles, queries),
        mlx_cuda_rope.turned_by(angles, keys),
        values,
    )
    for array, wanted in zip(made, expected, strict=True):
        assert array.shape == wanted.shape
        assert mx.allclose(array.astype(mx.float32), wanted, rtol=2e-2, atol=2e-2).item()
