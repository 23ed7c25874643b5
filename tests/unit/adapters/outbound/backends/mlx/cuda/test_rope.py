"""Angles told by the library's modules; the kernel turns by them in the attention's tests."""

from typing import Any

import pytest

from semantic.adapters.outbound.backends.mlx import runtime

runtime.prepare(num_threads=1)
mx = pytest.importorskip("mlx.core")
mlx_cuda_rope = pytest.importorskip("semantic.adapters.outbound.backends.mlx.cuda.rope")

pytestmark = pytest.mark.unit

POSITIONS = [0, 1, 700, 31_000]


def _rope(scaling: dict[str, Any] | None) -> Any:
    made = runtime.import_library("mlx_lm.models.rope_utils").initialize_rope
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
    turned = mlx_cuda_rope.rotate(mlx_cuda_rope.angles_at(rope, positions, 64), heads)
    assert mx.allclose(turned, expected, atol=1e-4).item()
