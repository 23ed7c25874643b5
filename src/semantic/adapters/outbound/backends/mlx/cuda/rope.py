"""Applies RoPE as part of the custom attention kernel for MLX's CUDA build.

The kernel takes the output of a layer's multiplication: queries, keys and values side by side,
before norms and RoPE. A block of threads prepares its own queries, and the block with a row's last
chunk first stores the new key and value at the row's end. As separate operations, these would cost
the host more time than the device. The angles are the same in all layers, so the library computes
them once per step.
"""

import functools
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.caches import Array
from semantic.adapters.outbound.backends.mlx.cuda.kernels import Kernel

# Thread (g, c) of a warp holds dimensions 8c to 8c + 7 of each 32 of query head g, and so both
# halves of the pairs that RoPE rotates together. For a new key, one thread rotates one pair.
PREPARE = """
    constexpr int HALF = DIM / 2;
    const float *cosines = angles + row * DIM, *sines = cosines + HALF;
    T* mine = reinterpret_cast<T*>(query);
    float norm = 1;
    if (IS_NORMED) {
        float square = 0;
#pragma unroll
        for (int n = 0; n < PIECES * 8; n++) square += float(mine[n]) * float(mine[n]);
        square += __shfl_xor_sync(0xffffffff, square, 1);
        square += __shfl_xor_sync(0xffffffff, square, 2);
        norm = rsqrtf(square / DIM + EPS);
    }
#pragma unroll
    for (int n = 0; n < PIECES * 4; n++) {
        const int i = n / 8 * 32 + c * 8 + n % 8;
        float one = mine[n], two = mine[n + PIECES * 4];
        if (IS_NORMED) {
            one *= norm * float(query_factors[i]);
            two *= norm * float(query_factors[i + HALF]);
        }
        mine[n] = T(one * cosines[i] - two * sines[i]);
        mine[n + PIECES * 4] = T(two * cosines[i] + one * sines[i]);
    }

    if (blockIdx.x + 1 == firsts[row + 1]) {
        const T* new_key = queries + (row * num_heads + gridDim.y * SHARED + head) * DIM;
        const T* new_value = new_key + gridDim.y * DIM;
        // MLX supports no kernels that write to their inputs; these arrays are not shared.
        T *key_place = const_cast<T*>(key) + int64_t(size - 1) * DIM;
        T *value_place = const_cast<T*>(value) + int64_t(size - 1) * DIM;
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


# The same as a separate kernel, for steps in which several rows belong to one sequence: each row
# attends to keys that another row stores. A block handles one head of one row, a thread one pair.
_KEEP = """
    constexpr int HALF = DIM / 2;
    const int row = blockIdx.x, head = blockIdx.y, i = threadIdx.x;
    const int4 where = reinterpret_cast<const int4*>(places)[row];
    const int group = where.x, place = where.y, position = where.z;
    const T* given = heads + (int64_t(row) * gridDim.y + head) * DIM;
    const bool is_query = head < NUM_HEADS, is_value = head >= NUM_HEADS + NUM_KEYS;
    float one = given[i], two = given[i + HALF];
    if (IS_NORMED && !is_value) {
        __shared__ float squares[HALF / 32];
        float square = one * one + two * two;
        for (int n = 16; n; n /= 2) square += __shfl_xor_sync(0xffffffff, square, n);
        if (i % 32 == 0) squares[i / 32] = square;
        __syncthreads();
        square = 0;
        for (int n = 0; n < HALF / 32; n++) square += squares[n];
        const T* factors = is_query ? query_factors : key_factors;
        const float norm = rsqrtf(square / DIM + EPS);
        one *= norm * float(factors[i]);
        two *= norm * float(factors[i + HALF]);
    }
    if (!is_value) {
        const float cosine = angles[row * DIM + i], sine = angles[row * DIM + HALF + i];
        const float rotated = one * cosine - two * sine;
        two = two * cosine + one * sine;
        one = rotated;
    }
    T* to = rotated_queries + (int64_t(row) * NUM_HEADS + head) * DIM;
    if (!is_query) {
        const int64_t* held = table + (int64_t(layer) * num_groups + group) * 3;
        const int64_t at = (int64_t(place) * NUM_KEYS + (head - NUM_HEADS) % NUM_KEYS) * held[2];
        // MLX supports no kernels that write to their inputs; these arrays are not shared.
        to = reinterpret_cast<T*>(held[is_value]) + (at + position) * DIM;
    }
    to[i] = T(one);
    to[i + HALF] = T(two);
"""


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of each head's queries and keys, applied before RoPE."""

    query_factors: Array
    key_factors: Array
    eps: float


@dataclass(frozen=True, slots=True)
class Held:
    """Keys and values of a layer, by group.

    Attributes:
        table: Addresses, by layer and group.
    """

    table: Array
    layer: int
    num_key_heads: int


def keep(
    heads: Array,
    angles: Array,
    norms: HeadNorms | None,
    held: Held,
    places: Array,
) -> Array:
    """Store each row's new key and value; returns its queries after norm and RoPE.

    Writes to the groups' arrays in place: nothing else may share their memory.

    Args:
        heads: Queries, keys and values ``[rows, all heads, 1, dim]``, before norms and RoPE.
        angles: RoPE cosines and sines, by row.
        held: Keys and values, with room for the new ones.
        places: By row its group, its row in the group, and its position.
    """
    num_rows, num_all, _, dim = heads.shape
    num_heads = num_all - 2 * held.num_key_heads
    factors = [] if norms is None else [norms.query_factors, norms.key_factors]
    constants = {"DIM": dim, "NUM_HEADS": num_heads, "NUM_KEYS": held.num_key_heads}
    (queries,) = _keep_kernel(None if norms is None else norms.eps)(
        inputs=[heads, held.table, places, angles, *factors],
        template={"T": heads.dtype, **constants},
        grid=(num_rows * (dim // 2), num_all, 1),
        threadgroup=(dim // 2, 1, 1),
        outputs=[((num_rows, num_heads, 1, dim), heads.dtype)],
        numbers=(held.layer, held.table.shape[1]),
    )
    return queries


@functools.cache
def _keep_kernel(eps: float | None) -> Kernel:
    is_normed = eps is not None
    factors = ["query_factors", "key_factors"]
    source = f"constexpr bool IS_NORMED = {int(is_normed)}; constexpr float EPS = {eps or 0:e}f;"
    source += "" if is_normed else "".join(f"const T* {name} = heads;" for name in factors)
    return Kernel(
        "keep_rows",
        ["heads", "table", "places", "angles", *(factors if is_normed else [])],
        ["rotated_queries"],
        source + _KEEP,
        numbers=("layer", "num_groups"),
    )


def angles_at(rope: Any, positions: Array, dim: int) -> Array:
    """Return the cosines and sines that a library RoPE module applies, by position."""
    ones = mx.ones((positions.shape[0], 1, 1, dim // 2))
    given = mx.concatenate([ones, mx.zeros_like(ones)], axis=-1)
    return rope(given, offset=positions).reshape(-1, dim)


def apply_rope(angles: Array, heads: Array) -> Array:
    """Apply RoPE to ``[rows, heads, 1, dim]`` with each row's angles, as the kernel does."""
    (cosine, sine), (a, b) = (
        mx.split(array, 2, axis=-1) for array in (angles[:, None, None], heads)
    )
    return mx.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1)
