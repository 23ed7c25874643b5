// CUDA on a CPU for one kernel: a block of threads is a thread, its lanes are coroutines.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>
#include <ucontext.h>
#include <vector>

using std::max;
using std::min;
typedef long long Int64;
#define int64_t Int64
#define __device__
#define __shared__ static thread_local
#define __align__(n) __attribute__((aligned(n)))
#define __shfl_xor_sync(mask, value, distance) exchanged(value, distance)

struct uint4 { unsigned x, y, z, w; };
struct int4 { int x, y, z, w; };
static uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }

template <class To, class From> static To bits_of(From from) {
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

struct __nv_bfloat16 {
    uint16_t bits;
    __nv_bfloat16() = default;
    explicit __nv_bfloat16(float value) {
        const uint32_t wide = bits_of<uint32_t>(value);
        bits = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
    }
    operator float() const { return bits_of<float>(uint32_t(bits) << 16); }
};
static float __bfloat162float(__nv_bfloat16 value) { return value; }
static __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
    return bits_of<__nv_bfloat16>(bits);
}
static unsigned __float_as_uint(float value) { return bits_of<unsigned>(value); }
static float __uint_as_float(unsigned bits) { return bits_of<float>(bits); }
static float rsqrtf(float value) { return 1 / sqrtf(value); }

constexpr int LANES = 288;
struct Meeting {  // of some lanes
    int count = 0, number = 0;
};
struct Block {
    ucontext_t outside, lanes[LANES];
    int current = 0;
    bool has_ended[LANES] = {};
    Meeting all, computing, warps[LANES / 32];
    uint64_t exchanged[LANES];
    std::map<void*, int> bytes;  // that signals wait for
};
static thread_local Block* block;
struct Index { int x; };
static thread_local Index blockIdx, gridDim;
struct LaneIndex { operator int() const { return block->current; } };
static struct { LaneIndex x; } threadIdx;

static void pause() { swapcontext(&block->lanes[block->current], &block->outside); }
static void meet(Meeting& meeting, int count) {
    const int number = meeting.number;
    if (++meeting.count == count) {
        meeting.count = 0;
        meeting.number++;
    }
    while (meeting.number == number) pause();
}
static void __syncthreads() { meet(block->all, LANES); }
static void sync_warps() { meet(block->computing, 256); }
static void __syncwarp() { meet(block->warps[block->current / 32], 32); }
template <class Value> static Value exchanged(Value value, int distance) {
    memcpy(&block->exchanged[block->current], &value, sizeof value);
    __syncwarp();
    Value other;
    memcpy(&other, &block->exchanged[block->current ^ distance], sizeof other);
    __syncwarp();
    return other;
}

template <class Value> static Value __ldcg(const Value* from) { return *from; }
static void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
static void __nanosleep(int) {}
static unsigned long long nanoseconds() { return 0; }
static unsigned atomicAdd(unsigned* to, unsigned value) {
    return __atomic_fetch_add(to, value, __ATOMIC_SEQ_CST);
}
static unsigned atomicExch(unsigned* to, unsigned value) {
    return __atomic_exchange_n(to, value, __ATOMIC_SEQ_CST);
}
template <class Value> static void atomicMax(Value* to, Value value) {
    Value seen = __atomic_load_n(to, __ATOMIC_SEQ_CST);
    while (seen < value && !__atomic_compare_exchange_n(
               to, &seen, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
}
static void add_released(unsigned* to) { atomicAdd(to, 1); }
static unsigned load_acquired(const unsigned* from) {
    const unsigned value = __atomic_load_n(from, __ATOMIC_SEQ_CST);
    pause();
    std::this_thread::yield();
    return value;
}

struct Signal { int16_t count, pending, phase; };
static void update(Signal* signal) {
    if (signal->pending || block->bytes[signal]) return;
    signal->phase ^= 1;
    signal->pending = signal->count;
}
static void init_signal(Int64* place, int count) {
    *reinterpret_cast<Signal*>(place) = {int16_t(count), int16_t(count), 0};
}
static void give_signal(Int64* place) {
    Signal* signal = reinterpret_cast<Signal*>(place);
    if (signal->pending-- < 1) abort();
    update(signal);
}
static void expect_bytes(Int64* place, int count) {
    block->bytes[place] += count;
    give_signal(place);
}
static bool has_signal(Int64* place, unsigned parity) {
    const bool is_there = reinterpret_cast<Signal*>(place)->phase != int(parity);
    if (!is_there) pause();
    return is_there;
}
static void copy_bytes(void* to, const void* from, int count, Int64* place) {
    memcpy(to, from, count);
    block->bytes[place] -= count;
    update(reinterpret_cast<Signal*>(place));
}

// The product of 16x16 and 16x8 tiles, whose numbers the lanes hold as tensor cores want them.
template <class T> static void multiply(
    float (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    static thread_local float left[LANES / 32][16][16], right[LANES / 32][16][8];
    const int warp = block->current / 32, g = block->current % 32 / 4, c = block->current % 4;
    for (int half = 0; half < 2; half++) {
        auto number = [&](unsigned both) {
            return bits_of<float>(half ? both & 0xffff0000u : both << 16);
        };
        left[warp][g][2 * c + half] = number(a0);
        left[warp][g + 8][2 * c + half] = number(a1);
        left[warp][g][2 * c + 8 + half] = number(a2);
        left[warp][g + 8][2 * c + 8 + half] = number(a3);
        right[warp][2 * c + half][g] = number(b0);
        right[warp][2 * c + 8 + half][g] = number(b1);
    }
    __syncwarp();
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 16; k++)
            sum[i] += left[warp][g + i / 2 * 8][k] * right[warp][k][2 * c + i % 2];
    __syncwarp();
}
template <class T> static uint4 product(uint4 one, uint4 two) {
    uint4 both;
    for (int i = 0; i < 8; i++)
        reinterpret_cast<T*>(&both)[i] =
            T(float(reinterpret_cast<T*>(&one)[i]) * float(reinterpret_cast<T*>(&two)[i]));
    return both;
}

static void run_lanes(void (*entry)(), int number, int count) {
    static thread_local Block memory;
    block = &memory;
    blockIdx.x = number;
    gridDim.x = count;
    std::vector<std::vector<char>> stacks(LANES, std::vector<char>(65536));
    for (int lane = 0; lane < LANES; lane++) {
        getcontext(&block->lanes[lane]);
        block->lanes[lane].uc_stack.ss_sp = stacks[lane].data();
        block->lanes[lane].uc_stack.ss_size = stacks[lane].size();
        makecontext(&block->lanes[lane], entry, 0);
    }
    for (bool is_on = true; is_on;) {
        is_on = false;
        for (block->current = 0; block->current < LANES; block->current++)
            if (!block->has_ended[block->current]) {
                is_on = true;
                swapcontext(&block->outside, &block->lanes[block->current]);
            }
    }
}
static void end_lane() {
    block->has_ended[block->current] = true;
    for (;;) pause();
}
static void run_blocks(void (*entry)(), int count) {
    std::vector<std::thread> blocks;
    for (int number = 0; number < count; number++)
        blocks.emplace_back(run_lanes, entry, number, count);
    for (auto& one : blocks) one.join();
}
