// Runs a CUDA kernel on a CPU: every thread of a block is a coroutine. Those of a warp meet at each
// operation of the whole warp, and those of a block at __syncthreads.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

using std::max;
using std::min;

struct Place {
    int x;
};
static Place thread_place, block_place;
#define threadIdx thread_place
#define blockIdx block_place

struct Lane {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(1 << 17);
    unsigned given[2][6];  // for the operations of a warp; a lane is at most one of them ahead
    int num_operations = 0;
    bool is_done = false;
};
static ucontext_t scheduler;
static std::vector<Lane> lanes;
static int current, num_waiting, num_barriers;

static void pause() {
    const int own = current;
    swapcontext(&lanes[own].context, &scheduler);
    thread_place.x = current = own;
}

// Gives values to the other lanes of the warp; returns where theirs are.
static int give(const unsigned* values, int count) {
    const int place = lanes[current].num_operations++ % 2;
    std::copy_n(values, count, lanes[current].given[place]);
    pause();
    return place;
}

static void meet_warp() {
    const unsigned nothing = 0;
    give(&nothing, 1);
}
#define __syncwarp meet_warp

static void meet_block() {
    const int barrier = num_barriers;
    if (++num_waiting == int(lanes.size())) num_waiting = 0, num_barriers++;
    while (barrier == num_barriers) pause();
}
#define __syncthreads meet_block

static float exchange_xor(float value, int mask) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    const int place = give(&bits, 1);
    memcpy(&value, lanes[current ^ mask].given[place], 4);
    return value;
}
#define __shfl_xor_sync(lanes, value, mask) exchange_xor(value, mask)

static unsigned permute_bytes(unsigned one, unsigned two, unsigned selector) {
    unsigned char bytes[8];
    memcpy(bytes, &one, 4), memcpy(bytes + 4, &two, 4);
    unsigned found = 0;
    for (int i = 0; i < 4; i++) found |= unsigned(bytes[selector >> 4 * i & 7]) << 8 * i;
    return found;
}
#define __byte_perm permute_bytes

static float as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
#define __uint_as_float as_float
#define rsqrtf(x) (1.0f / sqrtf(x))

template <typename T>
static float half_of(unsigned word, bool is_high) {
    const unsigned short bits = is_high ? word >> 16 : word;
    T value;
    memcpy(&value, &bits, 2);
    return float(value);
}

// mma.m16n8k16: adds the product of a 16x16 and a 16x8 tile, which the lanes of a warp share.
template <typename T>
static void multiply(
    float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    const unsigned own[6] = {a0, a1, a2, a3, b0, b1};
    const int place = give(own, 6), first = current & ~31, lane = current & 31;
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        double sum = 0;
        for (int k = 0; k < 16; k++) {
            const unsigned* a = lanes[first + row % 8 * 4 + k % 8 / 2].given[place];
            const unsigned* b = lanes[first + column * 4 + k % 8 / 2].given[place];
            sum += double(half_of<T>(a[row / 8 + k / 8 * 2], k % 2)) * half_of<T>(b[4 + k / 8], k % 2);
        }
        c[i] += float(sum);
    }
}

// Copies arrive at once; a GPU refuses addresses that are not aligned.
template <int COUNT>
static void copy_ahead(void* to, const void* from) {
    if (uintptr_t(to) % COUNT || uintptr_t(from) % COUNT) abort();
    memcpy(to, from, COUNT);
}
static void end_copies() {}
template <int LEFT>
static void await_copies() {}

static void finish_lane() {
    lanes[current].is_done = true;
    swapcontext(&lanes[current].context, &scheduler);
}

static void run_block(int num_threads, void (*entry)()) {
    lanes = std::vector<Lane>(num_threads);
    num_waiting = num_barriers = 0;
    for (Lane& lane : lanes) {
        getcontext(&lane.context);
        lane.context.uc_stack.ss_sp = lane.stack.data();
        lane.context.uc_stack.ss_size = lane.stack.size();
        makecontext(&lane.context, entry, 0);
    }
    for (bool is_running = true; is_running;) {
        is_running = false;
        for (int i = 0; i < num_threads; i++)
            if (!lanes[i].is_done) {
                thread_place.x = current = i;
                swapcontext(&scheduler, &lanes[i].context);
                is_running = true;
            }
    }
}
