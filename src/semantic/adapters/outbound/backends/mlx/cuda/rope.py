"""Heads turned by their positions, as our attention kernel for MLX's CUDA build does it.

Models give the kernel what their multiplication made: queries, keys and values side by side, not
yet normed or turned. A block of threads prepares its own queries, and the one with a row's last
chunk first puts the new key and value in their place at its end. Each of these is an operation
otherwise, and costs the host more than the device. The angles are the same in all layers, so they
are computed once a step, by the library.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.caches import Array

# Thread (g, c) of a warp holds dimensions 8c to 8c + 7 of each 32 of query head g, and so both
# halves of the pairs that are turned together. A new key is turned by one thread a pair.
PREPARE = """
    constexpr int HALF = DIM / 2;
    const float *cosines = angles + row * DIM, *sines = cosines + HALF;
    T* asks = reinterpret_cast<T*>(query);
    float norm = 1;
    if (IS_NORMED) {
        float square = 0;
#pragma unroll
        for (int n = 0; n < PIECES * 8; n++) square += float(asks[n]) * float(asks[n]);
        square += __shfl_xor_sync(0xffffffff, square, 1);
        square += __shfl_xor_sync(0xffffffff, square, 2);
        norm = rsqrtf(square / DIM + EPS);
    }
#pragma unroll
    for (int n = 0; n < PIECES * 4; n++) {
        const int i = n / 8 * 32 + c * 8 + n % 8;
        float one = asks[n], two = asks[n + PIECES * 4];
        if (IS_NORMED) {
            one *= norm * float(query_factors[i]);
            two *= norm * float(query_factors[i + HALF]);
        }
        asks[n] = T(one * cosines[i] - two * sines[i]);
        asks[n + PIECES * 4] = T(two * cosines[i] + one * sines[i]);
    }

    if (blockIdx.x + 1 == firsts[row + 1]) {
        const T* new_key = queries + row * queries_strides[0]
            + (gridDim.y * SHARED + head) * queries_strides[1];
        const T* new_value = new_key + gridDim.y * queries_strides[1];
        // MLX knows of no kernel that writes into what it is given; nobody else has these arrays.
        T *key_place = const_cast<T*>(key) + (size - 1) * key_step;
        T *value_place = const_cast<T*>(value) + (size - 1) * value_step;
        const int i = threadIdx.x;
        float one = i < HALF ? float(new_key[i]) : 0, two = i < HALF ? float(new_key[i + HALF]) : 0;
        if (IS_NORMED) {
            __shared__ float squares[WARPS];
            float square = one * one + two * two;
            for (int n = 16; n; n /= 2) square += __shfl_xor_sync(0xffffffff, square, n);
            if (lane == 0) squares[warp] = square;
            __syncthreads();
            square = 0;
            for (int n = 0; n < WARPS; n++) square += squares[n];
            norm = rsqrtf(square / DIM + EPS);
        }
        if (i < HALF) {
            if (IS_NORMED) {
                one *= norm * float(key_factors[i]);
                two *= norm * float(key_factors[i + HALF]);
            }
            key_place[i] = T(one * cosines[i] - two * sines[i]);
            key_place[i + HALF] = T(two * cosines[i] + one * sines[i]);
            value_place[i] = new_value[i];
            value_place[i + HALF] = new_value[i + HALF];
        }
        __syncthreads();
    }
"""


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Root-mean-square norms of each head's queries and keys, before they are turned."""

    query_factors: Array
    key_factors: Array
    eps: float


def angles_at(rope: Any, positions: Array, dim: int) -> Array:
    """The cosines and sines by which a library's module turns halves of a head, by position."""
    ones = mx.ones((positions.shape[0], 1, 1, dim // 2))
    given = mx.concatenate([ones, mx.zeros_like(ones)], axis=-1)
    return rope(given, offset=positions).reshape(-1, dim)


def rotate(angles: Array, heads: Array) -> Array:
    """Turn ``[rows, heads, 1, dim]`` by each row's angles, as the kernel does."""
    (cosine, sine), (a, b) = (
        mx.split(array, 2, axis=-1) for array in (angles[:, None, None], heads)
    )
    return mx.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1)
