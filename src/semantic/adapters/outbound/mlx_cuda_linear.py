"""A matrix times a few rows, as a kernel of our own for MLX's CUDA build.

With one row MLX has a kernel for it. With two and more it asks cuBLAS, which is as fast on the
device but costs the host half as much again, and it is the host that a step waits for. Here a block
of threads takes a strip of the matrix and all rows at once: its warps share the strip's columns
among them, and add up what they found at the end.
"""

import functools
from typing import Any

import mlx.core as mx

from semantic.adapters.outbound.mlx_cuda import HEADER
from semantic.adapters.outbound.mlx_layout import Array

MAX_ROWS = 8  # the columns of a tensor core's tile

_HEIGHT = 16  # of a strip: a tile's
_WARPS = 8
_STEP = 32  # columns that a warp takes at once

# Thread (g, c) of a warp holds rows g and g + 8 of the strip, and row g of what is given. Which
# column is which does not matter as long as both agree, so each thread reads 16 bytes in a row.
# Numbers are written into the source since MLX writes out a kernel's arguments at every call.
_SOURCE = (
    f"constexpr int HEIGHT = {_HEIGHT}, WARPS = {_WARPS}, STEP = {_STEP}, AHEAD = 4;"
    """
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const int num_rows = given_shape[0], height = weight_shape[0], size = weight_shape[1];
    const int first = blockIdx.x * HEIGHT;
    // Beyond the last row the last one again: what comes of it is not written.
    const T* x = given + int64_t(min(g, num_rows - 1)) * size + c * 8;
    const T* top = weight + int64_t(min(first + g, height - 1)) * size + c * 8;
    const T* low = weight + int64_t(min(first + 8 + g, height - 1)) * size + c * 8;

    float sum[4] = {};
    for (int start = warp * STEP; start < size; start += WARPS * STEP * AHEAD) {
        uint4 a[AHEAD], b[AHEAD], d[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int k = start + i * WARPS * STEP, column = min(k, size - STEP);
            d[i] = *reinterpret_cast<const uint4*>(x + column);
            if (k >= size) d[i] = make_uint4(0, 0, 0, 0);
            a[i] = __ldcs(reinterpret_cast<const uint4*>(top + column));
            b[i] = __ldcs(reinterpret_cast<const uint4*>(low + column));
        }
        __syncwarp();  // all reads are on their way before the first is waited for
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            multiply<T>(sum, a[i].x, b[i].x, a[i].y, b[i].y, d[i].x, d[i].y);
            multiply<T>(sum, a[i].z, b[i].z, a[i].w, b[i].w, d[i].z, d[i].w);
        }
    }

    __shared__ float sums[WARPS][8][HEIGHT + 4];
#pragma unroll
    for (int i = 0; i < 4; i++) sums[warp][2 * c + i % 2][i / 2 * 8 + g] = sum[i];
    __syncthreads();
    for (int n = threadIdx.x; n < num_rows * HEIGHT; n += WARPS * 32) {
        const int row = n / HEIGHT, place = n % HEIGHT;
        float all = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++) all += sums[i][row][place];
        if (first + place < height) out[int64_t(row) * height + first + place] = T(all);
    }
"""
)


def can_multiply(given: Array, weight: Array) -> bool:
    """Whether the kernel takes such arrays and is worth it: one token each for a few rows."""
    return (
        given.ndim == 3
        and given.shape[1] == 1
        and 1 < given.shape[0] <= MAX_ROWS
        and weight.dtype in (mx.bfloat16, mx.float16)
        and given.dtype == weight.dtype
        and weight.shape[1] % _STEP == 0
    )


def multiply(given: Array, weight: Array) -> Array:
    """Multiply ``[rows, 1, columns]`` by the transpose of ``[outputs, columns]``."""
    num_outputs = weight.shape[0]
    num_strips = -(-num_outputs // _HEIGHT)
    (out,) = _kernel()(
        inputs=[given, weight],
        template=[("T", weight.dtype)],
        grid=(num_strips * 32 * _WARPS, 1, 1),
        threadgroup=(32 * _WARPS, 1, 1),
        output_shapes=[(given.shape[0], 1, num_outputs)],
        output_dtypes=[weight.dtype],
    )
    return out


@functools.cache
def _kernel() -> Any:
    return mx.fast.cuda_kernel(
        "multiply_few_rows", ["given", "weight"], ["out"], _SOURCE, header=HEADER
    )
