"""Attention with one query per row over keys of different lengths, as a custom CUDA kernel.

MLX's CUDA kernels support no mask per row, and two multiplications and a softmax are five
operations, each of which costs the host about ten microseconds. This kernel takes the addresses of
the keys and values of each group of rows, and reads each row up to its own length. So padding costs
nothing, all rows of a step are one operation, and no row must be copied next to others to be
batched with them. A block of threads attends over one chunk of one row's tokens for all query heads
that share the keys; a second kernel combines a row's chunks. The plan gives all blocks about the
same work, and makes about as many blocks as the device runs at once.

A kernel writes the arrays' addresses into a table. MLX does not move an array while it is
referenced: the holder of a table must keep the arrays alive, and make a new table when the
arrays change.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from semantic.adapters.outbound.backends.mlx.caches import Array
from semantic.adapters.outbound.backends.mlx.cuda.kernels import HEADER, Kernel
from semantic.adapters.outbound.backends.mlx.cuda.rope import PREPARE, HeadNorms, Held

MAX_GROUPS = 1024  # of a step
TILE = 16  # tokens that a warp processes at once

_THREADS = 128
_DIMS = (64, 128, 256)  # of a head
_MAX_SHARED = 8  # query heads per key head: the columns of a tensor core's tile
_SIZES = range(256, 2049, 128)  # candidates for the maximum size of a chunk, in tokens
_SETUP = 64  # cost of starting and ending a block, in tokens that could be read meanwhile
_AT_ONCE = 3 * 132  # blocks of threads that an H100 runs at once
_CHUNKS_STEP = 32  # the number of chunks is a multiple of this

_HELPERS = """
template <typename T>
__device__ inline unsigned pair(float low, float high) {
    T both[2] = {T(low), T(high)};
    return *reinterpret_cast<unsigned*>(both);
}

__device__ inline uint4 load(const void* from, bool is_there) {
    return is_there ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
}
"""

# Thread (g, c) of a warp holds row g and columns 2c, 2c+1, 2c+8, 2c+9 of a tile. The order of a
# head's dimensions does not matter as long as queries and keys agree, so each thread reads 16
# consecutive bytes. The first product's output has the layout that the second one takes.
_CHUNKS = """
    constexpr int WARPS = 4, PIECES = DIM / 32, BLOCKS = DIM / 64;
    constexpr float LEAST = -3.4e38f;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const int head = blockIdx.y;
    const int4 chunk = reinterpret_cast<const int4*>(chunks)[blockIdx.x];
    const int row = chunk.x, start = chunk.y, size = chunk.z;
    const int group = chunk.w % MAX_GROUPS, place = chunk.w / MAX_GROUPS;
    const int64_t* held = table + (int64_t(layer) * num_groups + group) * 3;
    const int64_t first = ((int64_t(place) * gridDim.y + head) * held[2] + start) * DIM;
    const T* key = reinterpret_cast<const T*>(held[0]) + first;
    const T* value = reinterpret_cast<const T*>(held[1]) + first;
    constexpr float FACTOR = SCALE * 1.44269504f;  // for exponents of two

    uint4 query[PIECES];
    const T* asked = queries + (row * num_heads + head * SHARED + g) * DIM + c * 8;
#pragma unroll
    for (int p = 0; p < PIECES; p++) query[p] = load(asked + p * 32, g < SHARED);
    PREPARE

    float top = LEAST, total = 0, mix[BLOCKS][4][4] = {};
    for (int base = warp * TILE; base < size; base += WARPS * TILE) {
        uint4 k[2][PIECES], v[4][BLOCKS];
#pragma unroll
        for (int t = 0; t < 2; t++) {
            const int token = base + t * 8 + g;
#pragma unroll
            for (int p = 0; p < PIECES; p++)
                k[t][p] = load(key + int64_t(token) * DIM + p * 32 + c * 8, token < size);
        }
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const int token = base + r / 2 * 8 + 2 * c + r % 2;
#pragma unroll
            for (int b = 0; b < BLOCKS; b++)
                v[r][b] = load(value + int64_t(token) * DIM + b * 64 + g * 8, token < size);
        }

        __syncwarp();  // all reads are on their way before the first is waited for
        float score[2][4] = {}, most = LEAST;
#pragma unroll
        for (int t = 0; t < 2; t++) {
#pragma unroll
            for (int p = 0; p < PIECES; p++) {
                multiply<T>(score[t], query[p].x, 0, query[p].y, 0, k[t][p].x, k[t][p].y);
                multiply<T>(score[t], query[p].z, 0, query[p].w, 0, k[t][p].z, k[t][p].w);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const bool is_there = base + t * 8 + 2 * c + i < size;
                score[t][i] = is_there ? score[t][i] * FACTOR : LEAST;
                most = fmaxf(most, score[t][i]);
            }
        }
        most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
        if (__any_sync(0xffffffff, most > top)) {
            most = fmaxf(most, top);
            const float shrink = exp2f(top - most);
            top = most;
            total *= shrink;
            const float low = __shfl_sync(0xffffffff, shrink, 8 * c);
            const float high = __shfl_sync(0xffffffff, shrink, 8 * c + 4);
#pragma unroll
            for (int b = 0; b < BLOCKS; b++)
#pragma unroll
                for (int j = 0; j < 4; j++)
#pragma unroll
                    for (int i = 0; i < 4; i++) mix[b][j][i] *= i % 2 ? high : low;
        }
#pragma unroll
        for (int t = 0; t < 2; t++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                score[t][i] = exp2f(score[t][i] - top);
                total += score[t][i];
            }
        const unsigned w0 = pair<T>(score[0][0], score[0][1]);
        const unsigned w1 = pair<T>(score[1][0], score[1][1]);
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const unsigned half = j % 2 ? 0x7632 : 0x5410;
                unsigned a[4];
#pragma unroll
                for (int r = 0; r < 4; r += 2) {
                    const uint4 one = v[r][b], two = v[r + 1][b];
                    a[r] = __byte_perm(j < 2 ? one.x : one.y, j < 2 ? two.x : two.y, half);
                    a[r + 1] = __byte_perm(j < 2 ? one.z : one.w, j < 2 ? two.z : two.w, half);
                }
                multiply<T>(mix[b][j], a[0], a[1], a[2], a[3], w0, w1);
            }
    }

    __shared__ float warp_tops[WARPS][8], warp_totals[WARPS][8], warp_mixes[WARPS][SHARED][DIM];
    total += __shfl_xor_sync(0xffffffff, total, 1);
    total += __shfl_xor_sync(0xffffffff, total, 2);
    if (c == 0) {
        warp_tops[warp][g] = top;
        warp_totals[warp][g] = total;
    }
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (2 * c + i % 2 < SHARED)
                    warp_mixes[warp][2 * c + i % 2][b * 64 + g * 8 + j + i / 2 * 4] = mix[b][j][i];
    __syncthreads();
    for (int n = threadIdx.x; n < SHARED * DIM; n += WARPS * 32) {
        const int q = n / DIM, d = n % DIM;
        float highest = LEAST, sum = 0, mixed = 0;
        for (int w = 0; w < WARPS; w++) highest = fmaxf(highest, warp_tops[w][q]);
        for (int w = 0; w < WARPS; w++) {
            const float weight = exp2f(warp_tops[w][q] - highest);
            sum += weight * warp_totals[w][q];
            mixed += weight * warp_mixes[w][q][d];
        }
        const int at = blockIdx.x * gridDim.y * SHARED + head * SHARED + q;
        mixes[at * DIM + d] = mixed;
        if (d == 0) {
            tops[at] = highest;
            totals[at] = sum;
        }
    }
"""

_JOIN = """
    constexpr int TEAMS = 1024 / DIM;
    const int i = threadIdx.x, team = threadIdx.y, head = blockIdx.y, row = blockIdx.z;
    float top = -3.4e38f, mix = 0, total = 0;
#pragma unroll 4
    for (int chunk = firsts[row] + team; chunk < firsts[row + 1]; chunk += TEAMS) {
        const int at = chunk * gridDim.y + head;
        const float highest = fmaxf(top, tops[at]);
        const float old = exp2f(top - highest), weight = exp2f(tops[at] - highest);
        total = total * old + weight * totals[at];
        mix = mix * old + weight * mixes[at * DIM + i];
        top = highest;
    }
    __shared__ float team_mixes[TEAMS][DIM], team_tops[TEAMS], team_totals[TEAMS];
    team_mixes[team][i] = mix;
    if (i == 0) {
        team_tops[team] = top;
        team_totals[team] = total;
    }
    __syncthreads();
    if (team > 0) return;
    float highest = top, sum = 0, mixed = 0;
    for (int t = 1; t < TEAMS; t++) highest = fmaxf(highest, team_tops[t]);
    for (int t = 0; t < TEAMS; t++) {
        const float weight = exp2f(team_tops[t] - highest);
        sum += weight * team_totals[t];
        mixed += weight * team_mixes[t][i];
    }
    out[(row * gridDim.y + head) * DIM + i] = T(mixed / sum);
"""


_ADDRESSES = """
    for (int n = threadIdx.x; n < int(sizeof(arrays) / sizeof(arrays[0])); n += 32) {
        table[n / 2 * 3 + n % 2] = reinterpret_cast<int64_t>(arrays[n]);
        if (n % 2) table[n / 2 * 3 + 2] = rooms[n / 2];
    }
"""


# -- plans -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Assigns work to blocks of threads.

    Attributes:
        chunks: By block its row, first token, number of tokens, and the row's place and group.
        firsts: The first block of each row, and one past the last.
        places: See `rope.keep`; None if each row is a separate sequence.
    """

    chunks: Array
    firsts: Array
    places: Array | None = None


def make_plan(
    lengths: Sequence[Sequence[int]],
    num_key_heads: int,
    places: Sequence[Sequence[int]] | None = None,
    *,
    has_few_sizes: bool = False,
) -> AttentionPlan:
    """Plan a step over groups of rows, given how many tokens (at least one) each row attends to.

    `places` gives each row's index in its group's arrays; by default the first, the second, ...
    Blocks without work are added at the end, so that steps come in fewer sizes; with
    `has_few_sizes` the number of blocks is a power of two.
    """
    most = _most_tokens([length for rows in lengths for length in rows], num_key_heads)
    chunks: list[tuple[int, int, int, int]] = []
    firsts = [0]
    for group, rows in enumerate(lengths):
        for place, length in zip(places[group] if places else range(len(rows)), rows, strict=True):
            row = len(firsts) - 1
            num_chunks = -(-length // most)
            size = -(-length // (num_chunks * TILE)) * TILE
            chunks += [
                (row, start, min(size, length - start), place * MAX_GROUPS + group)
                for start in range(0, length, size)
            ]
            firsts.append(len(chunks))
    num_chunks = -(-len(chunks) // _CHUNKS_STEP) * _CHUNKS_STEP
    if has_few_sizes:
        num_chunks = max(_CHUNKS_STEP, 1 << (len(chunks) - 1).bit_length())
    chunks += [(0, 0, 0, 0)] * (num_chunks - len(chunks))
    return AttentionPlan(mx.array(chunks, mx.int32), mx.array(firsts, mx.int32))


def _most_tokens(lengths: Sequence[int], num_key_heads: int) -> int:
    """Return the tokens per block that balance the last blocks with the others."""

    def cost(size: int) -> int:
        num_blocks = num_key_heads * sum(-(-length // size) for length in lengths)
        return -(-num_blocks // _AT_ONCE) * (size + _SETUP)

    return min(_SIZES, key=cost)


# -- the calls ---------------------------------------------------------------------------------


def can_attend(queries: Array, keys: Array, values: Array) -> bool:
    """Whether the kernel supports these arrays, by shape and number format."""
    dim, num_shared = queries.shape[-1], queries.shape[1] // keys.shape[1]
    return (
        queries.dtype in (mx.bfloat16, mx.float16)
        and queries.dtype == keys.dtype == values.dtype
        and queries.shape[2] == 1
        and dim in _DIMS
        and dim == values.shape[-1]
        and num_shared <= _MAX_SHARED
    )


def addresses(pairs: Sequence[Sequence[Array]]) -> Array:
    """Return the addresses of keys and values ``[rows, key heads, room, dim]``.

    The arrays must be contiguous. The table has the shape ``[pairs or more, 3]``.
    """
    count = 1 << (len(pairs) - 1).bit_length()  # a power of two, so that few kernels are compiled
    padded = [*pairs, *[pairs[0]] * (count - len(pairs))]
    rooms = mx.array([keys.shape[2] for keys, _ in padded], mx.int64)
    (table,) = _addresses_kernel(count)(
        inputs=[*itertools.chain(*padded), rooms],
        template={"T": pairs[0][0].dtype},
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        outputs=[((count, 3), mx.int64)],
    )
    return table


def attend(queries: Array, held: Held, plan: AttentionPlan, scale: float) -> Array:
    """Attend with one query per row, ``[rows, heads, 1, dim]``."""
    return _run(_chunks_kernel(scale), queries, queries.shape[1], held, plan, [])


def keep_and_attend(
    heads: Array,
    angles: Array,
    norms: HeadNorms | None,
    held: Held,
    plan: AttentionPlan,
    scale: float,
) -> Array:
    """Store each row's new key and value at its last position, then attend with its query.

    Writes to the groups' arrays in place: nothing else may share their memory.

    Args:
        heads: Queries, keys and values ``[rows, all heads, 1, dim]``, before norms and RoPE.
        angles: RoPE cosines and sines, by row.
        held: Keys and values to attend over, with room for the new ones.
        plan: Plan of the step, including the new tokens.
    """
    num_heads = heads.shape[1] - 2 * held.num_key_heads
    eps = None if norms is None else norms.eps
    factors = [] if norms is None else [norms.query_factors, norms.key_factors]
    more = [angles, plan.firsts, *factors]
    return _run(_keeping_kernel(scale, eps), heads, num_heads, held, plan, more)


def _run(
    kernel: Any,
    queries: Array,
    num_heads: int,
    held: Held,
    plan: AttentionPlan,
    more: Sequence[Array],
) -> Array:
    num_rows, dim, num_key_heads = queries.shape[0], queries.shape[-1], held.num_key_heads
    num_chunks = plan.chunks.shape[0]
    shape = (num_chunks, num_heads)
    mixes, tops, totals = kernel(
        inputs=[queries, held.table, plan.chunks, *more],
        template={"T": queries.dtype, "DIM": dim, "SHARED": num_heads // num_key_heads},
        grid=(num_chunks * _THREADS, num_key_heads, 1),
        threadgroup=(_THREADS, 1, 1),
        outputs=[((*shape, dim), mx.float32), (shape, mx.float32), (shape, mx.float32)],
        numbers=(held.layer, held.table.shape[1], queries.shape[1]),
    )
    num_teams = 1024 // dim
    (out,) = _join_kernel()(
        inputs=[mixes, tops, totals, plan.firsts],
        template={"T": queries.dtype, "DIM": dim},
        grid=(dim, num_teams * num_heads, num_rows),
        threadgroup=(dim, num_teams, 1),
        outputs=[((num_rows, num_heads, 1, dim), queries.dtype)],
    )
    return out


@functools.cache
def _chunks_kernel(scale: float) -> Kernel:
    return _make_chunks_kernel("attend_chunks", scale, [], "")


@functools.cache
def _keeping_kernel(scale: float, eps: float | None) -> Kernel:
    is_normed = eps is not None
    factors = ["query_factors", "key_factors"]
    constants = f"constexpr bool IS_NORMED = {int(is_normed)}; constexpr float EPS = {eps or 0:e}f;"
    absent = "" if is_normed else "".join(f"const T* {name} = queries;" for name in factors)
    more = ["angles", "firsts", *(factors if is_normed else [])]
    return _make_chunks_kernel("keep_and_attend_chunks", scale, more, constants + absent + PREPARE)


def _make_chunks_kernel(name: str, scale: float, more: Sequence[str], prepare: str) -> Kernel:
    constants = f"constexpr int MAX_GROUPS = {MAX_GROUPS}, TILE = {TILE};"
    constants += f"constexpr float SCALE = {scale:.9e}f;"
    return Kernel(
        name,
        ["queries", "table", "chunks", *more],
        ["mixes", "tops", "totals"],
        constants + _CHUNKS.replace("PREPARE", prepare),
        header=HEADER + _HELPERS,
        numbers=("layer", "num_groups", "num_heads"),
    )


@functools.cache
def _join_kernel() -> Kernel:
    return Kernel("attend_join", ["mixes", "tops", "totals", "firsts"], ["out"], _JOIN)


@functools.cache
def _addresses_kernel(count: int) -> Kernel:
    names = [f"array{n}" for n in range(2 * count)]
    source = f"const void* arrays[] = {{{', '.join(names)}}};" + _ADDRESSES
    return Kernel(f"addresses_{count}", [*names, "rooms"], ["table"], source, is_copying=False)
