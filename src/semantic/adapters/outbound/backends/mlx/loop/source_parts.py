"""Parts of the kernel that samples several tokens in a row; see `loop.py`.

A phase multiplies, or attends. Its blocks of threads divide the outputs; before the next phase, all
of them meet at a barrier. One warp of each block does not wait there: it copies the block's weights
into a ring of tiles in shared memory, in the order in which the others will need them. That order
depends on no result, so the memory is read throughout.

Other blocks write what a block reads, so that activations and keys bypass the first-level cache.
"""

from typing import Final

MAX_ROWS: Final = 16  # of a pass
MAX_CHUNKS: Final = 8  # of a row's tokens that attend in parallel
MAX_STEPS: Final = 16
MAX_BLOCKS: Final = 1024
FIELDS: Final = 9  # weights of a layer
WARPS: Final = 8  # that compute
THREADS: Final = 32 * (WARPS + 1)
COLUMNS: Final = 1024  # of a tile, at most; its rows are padded so that they lie in different banks
TILE_BYTES: Final = 16 * (COLUMNS * 2 + 64)

# What has no equivalent in C++.
ASSEMBLY = """
__device__ inline unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ inline void init_signal(Int64* signal, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                 :: "r"(shared_address(signal)), "r"(count) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ inline void expect_bytes(Int64* signal, int count) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(shared_address(signal)), "r"(count) : "memory");
}

__device__ inline void give_signal(Int64* signal) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
                 :: "r"(shared_address(signal)) : "memory");
}

__device__ inline bool has_signal(Int64* signal, unsigned parity) {
    unsigned is_there;
    asm volatile("{ .reg .pred p; "
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
                 "selp.u32 %0, 1, 0, p; }"
                 : "=r"(is_there) : "r"(shared_address(signal)), "r"(parity) : "memory");
    return is_there;
}

__device__ inline void copy_bytes(void* to, const void* from, int count, Int64* signal) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];"
                 :: "r"(shared_address(to)), "l"(__cvta_generic_to_global(from)), "r"(count),
                    "r"(shared_address(signal)) : "memory");
}

__device__ inline unsigned long long nanoseconds() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now) :: "memory");
    return now;
}

__device__ inline void sync_warps() {  // those that compute
    asm volatile("bar.sync 1, 256;" ::: "memory");
}

__device__ inline void add_released(unsigned* to) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(to) : "memory");
}

__device__ inline unsigned load_acquired(const unsigned* from) {
    unsigned value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}
"""

_CONSTANTS = f"""
constexpr int MAX_ROWS = {MAX_ROWS}, MAX_CHUNKS = {MAX_CHUNKS}, MAX_STEPS = {MAX_STEPS};
constexpr int MAX_BLOCKS = {MAX_BLOCKS}, FIELDS = {FIELDS}, WARPS = {WARPS}, THREADS = 32 * WARPS;
constexpr int STEP = 32, PIECE = 64, HEIGHT = 16, MAX_COLUMNS = {COLUMNS};
constexpr int PITCH = MAX_COLUMNS * 2 + 64;  // bytes
constexpr int TILE_BYTES = {TILE_BYTES};
constexpr unsigned PATIENCE = 1u << 22;  // polls of a barrier, more than a second
"""

_HELPERS = """
__device__ inline uint4 load16(const void* from) {
    return __ldcg(reinterpret_cast<const uint4*>(from));
}

__device__ inline float number(const __nv_bfloat16* from) {
    return __bfloat162float(__ushort_as_bfloat16(
        __ldcg(reinterpret_cast<const unsigned short*>(from))));
}

// Sorts as the number does, and the smaller index first.
__device__ inline unsigned long long sortable(float value, int index) {
    unsigned bits = __float_as_uint(value);
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    return (static_cast<unsigned long long>(bits) << 32) | (0xffffffffu - unsigned(index));
}

__device__ inline float sorted_value(unsigned long long key) {
    const unsigned bits = unsigned(key >> 32);
    return __uint_as_float(bits >> 31 ? bits & 0x7fffffffu : ~bits);
}

// All blocks of the grid, which must run at the same time.
struct Barrier {
    unsigned *state, target = 0;
    bool is_broken = false;

    __device__ void arrive() {
        sync_warps();
        target += gridDim.x;
        if (threadIdx.x == 0) add_released(state);
    }

    // Returns false if not all blocks arrive: the kernel ends then.
    __device__ bool wait() {
        __shared__ bool has_failed;
        if (threadIdx.x == 0) {
            unsigned polls = 0;
            has_failed = false;
            while (!has_failed && load_acquired(state) < target)
                if (++polls > PATIENCE || (polls % 1024 == 0 && __ldcg(state + 2))) {
                    atomicExch(state + 2, 1u);
                    has_failed = true;
                }
        }
        sync_warps();
        is_broken = is_broken || has_failed;
        return !is_broken;
    }
};

// Tiles of weights on their way from the copying warp to the others.
struct Ring {
    char* tiles;
    Int64 *full, *empty;
    int size, slot = 0;
    unsigned parity = 0;

    __device__ void advance() {
        if (++slot == size) {
            slot = 0;
            parity ^= 1;
        }
    }

    __device__ const char* wait() {
        while (!has_signal(full + slot, parity)) {}
        return tiles + slot * TILE_BYTES;
    }

    __device__ void release() {
        __syncwarp();
        if (threadIdx.x % 32 == 0) give_signal(empty + slot);
        advance();
    }
};

template <int K>
__device__ constexpr int tile_columns() {
    return K % MAX_COLUMNS == 0 ? MAX_COLUMNS : K % 512 == 0 ? 512 : 256;
}

// Copies this block's strips of a matrix; by the copying warp. Returns false if it is to stop.
template <int K, int OUTPUTS, bool GATED>
__device__ inline bool copy_strips(
    Ring& ring, const __nv_bfloat16* weight, const volatile bool* has_stopped) {
    constexpr int WIDTH = GATED ? HEIGHT / 2 : HEIGHT, COLUMNS = tile_columns<K>();
    const int lane = threadIdx.x % 32;
    for (int strip = blockIdx.x; strip * WIDTH < OUTPUTS; strip += gridDim.x) {
        // Rows beyond the last repeat it; their results are not written.
        const int row = min(strip * WIDTH + lane % WIDTH, OUTPUTS - 1);
        const __nv_bfloat16* from = weight + int64_t(lane < WIDTH ? row : OUTPUTS + row) * K;
        for (int column = 0; column < K; column += COLUMNS) {
            while (!has_signal(ring.empty + ring.slot, ring.parity ^ 1))
                if (*has_stopped) return false;
            if (lane == 0) expect_bytes(ring.full + ring.slot, HEIGHT * COLUMNS * 2);
            __syncwarp();
            if (lane < HEIGHT)
                copy_bytes(ring.tiles + ring.slot * TILE_BYTES + lane * PITCH, from + column,
                           COLUMNS * 2, ring.full + ring.slot);
            ring.advance();
        }
    }
    return true;
}

// Waits for the barrier, and multiplies rows by the transpose of a matrix, a strip of outputs at a
// time. Thread (g, c) of a warp holds rows g and g + 8 of the strip, and row g of the input; see
// `linear.py`. A warp has the same columns of all tiles, so that it reads its part of the input
// once, if that fits its registers. `row_at` returns the address of an input row; `write` takes
// (row, output, value).
template <int K, int OUTPUTS, bool NORMED, bool GATED, int TILES, class RowAt, class Write>
__device__ inline bool multiply_strips(
    Ring& ring, Barrier& barrier, float* scratch, const __nv_bfloat16* factors, float eps,
    int num_rows, RowAt row_at, Write write) {
    using T = __nv_bfloat16;
    using Sums = float[WARPS][TILES * 8][HEIGHT + 4];
    using Squares = float[WARPS][TILES * 8];
    constexpr int WIDTH = GATED ? HEIGHT / 2 : HEIGHT, COLUMNS = tile_columns<K>();
    constexpr int EACH = COLUMNS / (WARPS * STEP), NUM_TILES = K / COLUMNS;
    constexpr int GROUP = 8 / EACH, HELD = 8;  // tiles, and steps, whose input is in registers
    constexpr bool IS_HELD = NUM_TILES <= GROUP;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;

    auto column_of = [&](int tile, int i) {
        const int from = min(tile + i / EACH, NUM_TILES - 1) * COLUMNS;
        return from + (warp * EACH + i % EACH) * STEP + c * 8;
    };
    uint4 factor[HELD], d[TILES][HELD], next[TILES][HELD];
    if (NORMED && IS_HELD) {
#pragma unroll
        for (int i = 0; i < HELD; i++)
            factor[i] = *reinterpret_cast<const uint4*>(factors + column_of(0, i));
    }
    if (!barrier.wait()) return false;
    const T* x[TILES];
#pragma unroll
    for (int t = 0; t < TILES; t++) x[t] = row_at(min(t * 8 + g, num_rows - 1));
    float square[TILES][4] = {};
    auto read = [&](uint4 (&to)[TILES][HELD], int tile) {
#pragma unroll
        for (int i = 0; i < HELD; i++)
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                to[t][i] = load16(x[t] + column_of(tile, i));
                if (tile + i / EACH >= NUM_TILES) to[t][i] = make_uint4(0, 0, 0, 0);
            }
    };
    auto apply_norm = [&](int tile) {
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            if (!IS_HELD) factor[i] = *reinterpret_cast<const uint4*>(factors + column_of(tile, i));
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                const uint4 e = d[t][i];
                multiply<T>(square[t], e.x, 0, e.y, 0, e.x, e.y);
                multiply<T>(square[t], e.z, 0, e.w, 0, e.z, e.w);
                d[t][i] = product<T>(e, factor[i]);
            }
        }
    };
    if (IS_HELD) {
        read(d, 0);
        if (NORMED) apply_norm(0);
    }
    int parity = 0;
    for (int strip = blockIdx.x; strip * WIDTH < OUTPUTS; strip += gridDim.x) {
        float sum[TILES][4] = {};
        if (!IS_HELD) {
            read(d, 0);
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int i = 0; i < 4; i++) square[t][i] = 0;
        }
        for (int group = 0; group < NUM_TILES; group += GROUP) {
            if (!IS_HELD) {
                if (group + GROUP < NUM_TILES) read(next, group + GROUP);
                if (NORMED) apply_norm(group);
            }
#pragma unroll
            for (int tile = 0; tile < GROUP; tile++) {
                if (group + tile >= NUM_TILES) break;
                const char* held = ring.wait() + g * PITCH + (warp * EACH * STEP + c * 8) * 2;
                uint4 a[EACH], b[EACH];
#pragma unroll
                for (int i = 0; i < EACH; i++) {
                    a[i] = *reinterpret_cast<const uint4*>(held + i * STEP * 2);
                    b[i] = *reinterpret_cast<const uint4*>(held + i * STEP * 2 + 8 * PITCH);
                }
#pragma unroll
                for (int i = 0; i < EACH; i++)
#pragma unroll
                    for (int t = 0; t < TILES; t++) {
                        const uint4 e = d[t][tile * EACH + i];
                        multiply<T>(sum[t], a[i].x, b[i].x, a[i].y, b[i].y, e.x, e.y);
                        multiply<T>(sum[t], a[i].z, b[i].z, a[i].w, b[i].w, e.z, e.w);
                    }
                ring.release();
            }
            if (!IS_HELD) {
#pragma unroll
                for (int t = 0; t < TILES; t++)
#pragma unroll
                    for (int i = 0; i < HELD; i++) d[t][i] = next[t][i];
            }
        }
        auto& sums = reinterpret_cast<Sums*>(scratch)[parity];
        auto& squares =
            reinterpret_cast<Squares*>(scratch + 2 * sizeof(Sums) / sizeof(float))[parity];
        parity ^= 1;
#pragma unroll
        for (int t = 0; t < TILES; t++) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                sums[warp][t * 8 + 2 * c + i % 2][i / 2 * 8 + g] = sum[t][i];
            if (NORMED && c == g / 2) squares[warp][t * 8 + g] = square[t][g % 2];
        }
        sync_warps();
        const int row = threadIdx.x / WIDTH, place = threadIdx.x % WIDTH;
        if (row >= num_rows || strip * WIDTH + place >= OUTPUTS) continue;
        float total = 0, passed = 0, norm = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            total += sums[i][row][place];
            if (GATED) passed += sums[i][row][place + WIDTH];
            if (NORMED) norm += squares[i][row];
        }
        if (NORMED) {
            norm = rsqrtf(norm / K + eps);
            total *= norm;
            passed *= norm;
        }
        if (GATED) total = total / (1 + expf(-total)) * passed;
        write(row, strip * WIDTH + place, total);
    }
    return true;
}
"""

HELPERS = _CONSTANTS + _HELPERS
