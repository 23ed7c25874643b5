"""Queries, keys and values of a few rows out of one multiplication, as a kernel of our own.

For MLX's CUDA build, where each of the norms, turns and copies that a model does there is an
operation that costs the host more than the device. The angles are the same in all layers, so they
are computed once a step.
"""

import functools
from typing import Any, NamedTuple

import mlx.core as mx

from semantic.adapters.outbound.mlx_cuda_linear import Norm
from semantic.adapters.outbound.mlx_layout import Array

# A block of threads takes one head of one row; thread i the pair that is turned together.
_SOURCE = """
    constexpr int HALF = DIM / 2;
    const int i = threadIdx.x, head = blockIdx.y, row = blockIdx.z;
    const int key_head = head - HEADS, value_head = key_head - KEY_HEADS;
    const T* from = given + (row * gridDim.y + head) * DIM;
    float a = from[i], b = from[i + HALF];
    T* to = values + (row * KEY_HEADS + value_head) * DIM;
    if (value_head < 0) {
        to = key_head < 0 ? queries + (row * HEADS + head) * DIM
                          : keys + (row * KEY_HEADS + key_head) * DIM;
        if (IS_NORMED) {
            __shared__ float squares[HALF / 32];
            float square = a * a + b * b;
            for (int n = 16; n; n /= 2) square += __shfl_xor_sync(0xffffffff, square, n);
            if (i % 32 == 0) squares[i / 32] = square;
            __syncthreads();
            square = 0;
            for (int n = 0; n < HALF / 32; n++) square += squares[n];
            const float norm = rsqrtf(square / DIM + EPS);
            const T* factors = key_head < 0 ? query_factors : key_factors;
            a *= norm * float(factors[i]);
            b *= norm * float(factors[i + HALF]);
        }
        const float cosine = angles[row * DIM + i], sine = angles[row * DIM + HALF + i];
        const float turned = a * cosine - b * sine;
        b = b * cosine + a * sine;
        a = turned;
    }
    to[i] = T(a);
    to[i + HALF] = T(b);
"""


class HeadNorms(NamedTuple):
    """Norms of each head's queries and keys, before they are turned."""

    queries: Norm
    keys: Norm


def angles_at(rope: Any, positions: Array, dim: int) -> Array:
    """The cosines and sines by which a library's module turns halves of a head, by position."""
    ones = mx.ones((positions.shape[0], 1, 1, dim // 2))
    given = mx.concatenate([ones, mx.zeros_like(ones)], axis=-1)
    return rope(given, offset=positions).reshape(-1, dim)


def turned_by(angles: Array, heads: Array) -> Array:
    """Turn ``[rows, heads, 1, dim]`` by each row's angles, as the kernel does."""
    (cosine, sine), (a, b) = (
        mx.split(array, 2, axis=-1) for array in (angles[:, None, None], heads)
    )
    return mx.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1)


def split_heads(
    given: Array, angles: Array, num_heads: int, num_key_heads: int, norms: HeadNorms | None = None
) -> tuple[Array, Array, Array]:
    """Queries, keys and values ``[rows, heads, 1, dim]``, the first two normed and turned.

    Args:
        given: ``[rows, 1, all heads x dim]``: queries, keys, values.
        angles: Of `angles_at`.
        num_heads: Of queries.
        num_key_heads: Of keys, and of values.
        norms: Of queries and keys.
    """
    num_rows, dim = angles.shape
    kernel = _kernel(None if norms is None else norms.queries.eps)
    factors = [] if norms is None else [norms.queries.factors, norms.keys.factors]
    shapes = [(num_rows, n, 1, dim) for n in (num_heads, num_key_heads, num_key_heads)]
    queries, keys, values = kernel(
        inputs=[given, angles, *factors],
        template=[
            ("T", given.dtype),
            ("DIM", dim),
            ("HEADS", num_heads),
            ("KEY_HEADS", num_key_heads),
        ],
        grid=(dim // 2, num_heads + 2 * num_key_heads, num_rows),
        threadgroup=(dim // 2, 1, 1),
        output_shapes=shapes,
        output_dtypes=[given.dtype] * 3,
    )
    return queries, keys, values


@functools.cache
def _kernel(eps: float | None) -> Any:
    is_normed = eps is not None
    source = f"constexpr bool IS_NORMED = {int(is_normed)}; constexpr float EPS = {eps or 0:e}f;"
    factors = ["query_factors", "key_factors"]
    if not is_normed:
        source += "".join(f"const T* {name} = given;" for name in factors)
    return mx.fast.cuda_kernel(
        "split_normed_heads" if is_normed else "split_heads",
        ["given", "angles", *(factors if is_normed else [])],
        ["queries", "keys", "values"],
        source + _SOURCE,
    )
