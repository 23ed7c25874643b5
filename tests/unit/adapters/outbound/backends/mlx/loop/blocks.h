// What the kernel that samples tokens in a row needs on a CPU besides its lanes: memory that blocks share,
// signals, and copies.
#pragma once
#include <atomic>
#include <map>

#include "threads.h"

typedef long long Int64;
#define int64_t Int64
#define __device__
#define __shared__ static thread_local
#define __align__(n) __attribute__((aligned(n)))

struct uint4 { unsigned x, y, z, w; };
struct int4 { int x, y, z, w; };
static uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }

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
static void sync_warps() { meet(block->some, 256); }

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

static thread_local std::map<void*, int> awaited_bytes;  // of signals
struct Signal { int16_t count, pending, phase; };
static void update(Signal* signal) {
    if (signal->pending || awaited_bytes[signal]) return;
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
    awaited_bytes[place] += count;
    give_signal(place);
}
static bool has_signal(Int64* place, unsigned parity) {
    const bool is_there = reinterpret_cast<Signal*>(place)->phase != int(parity);
    if (!is_there) pause();
    return is_there;
}
static void copy_bytes(void* to, const void* from, int count, Int64* place) {
    memcpy(to, from, count);
    awaited_bytes[place] -= count;
    update(reinterpret_cast<Signal*>(place));
}

template <class T> static uint4 product(uint4 one, uint4 two) {
    uint4 both;
    for (int i = 0; i < 8; i++)
        reinterpret_cast<T*>(&both)[i] =
            T(float(reinterpret_cast<T*>(&one)[i]) * float(reinterpret_cast<T*>(&two)[i]));
    return both;
}
