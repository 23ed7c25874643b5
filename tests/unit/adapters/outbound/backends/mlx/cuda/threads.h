// Runs a CUDA kernel on a CPU. A block is a thread; its lanes are coroutines, which meet at each operation
// of a warp and at each barrier.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

using std::max;
using std::min;

template <class To, class From>
static To bits_of(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

struct Meeting {  // of some lanes
    int count = 0, number = 0;
};
struct Lane {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(1 << 17);
    bool has_ended = false;
    // What it gives to its warp, alternately: a lane is at most one operation ahead of another.
    unsigned given[2][6];
    int num_operations = 0;
};
struct Block {
    ucontext_t outside;
    std::vector<Lane> lanes;
    std::vector<Meeting> warps;
    Meeting all, some;
    int current = 0;
};
static thread_local Block* block;

struct Place {
    int x;
};
struct CurrentLane {
    operator int() const { return block->current; }
};
static thread_local Place blockIdx, gridDim;
static struct {
    CurrentLane x;
} threadIdx;

static Lane& lane_at(int place) { return block->lanes[place]; }
static Lane& own_lane() { return lane_at(block->current); }

static void pause() { swapcontext(&own_lane().context, &block->outside); }

static void meet(Meeting& meeting, int count) {
    const int number = meeting.number;
    if (++meeting.count == count) meeting.count = 0, meeting.number++;
    while (meeting.number == number) pause();
}
static void meet_block() { meet(block->all, block->lanes.size()); }
static void meet_warp() { meet(block->warps[block->current / 32], 32); }
#define __syncthreads meet_block
#define __syncwarp meet_warp

// Gives values to the other lanes of the warp; returns where theirs are.
template <class Values>
static int give(const Values& values) {
    static_assert(sizeof values <= sizeof Lane::given[0]);
    const int place = own_lane().num_operations++ % 2;
    memcpy(own_lane().given[place], &values, sizeof values);
    meet_warp();
    return place;
}

template <class Value>
static Value exchanged(Value value, int distance) {
    const int place = give(value);
    memcpy(&value, lane_at(block->current ^ distance).given[place], sizeof value);
    return value;
}
#define __shfl_xor_sync(mask, value, distance) exchanged(value, distance)

// mma.m16n8k16: adds the product of a 16x16 and a 16x8 tile, whose numbers the lanes of a warp hold.
template <class T>
static void multiply(
    float (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    const auto number = [](unsigned both, int half) {
        return double(float(bits_of<T>(uint16_t(half ? both >> 16 : both))));
    };
    const unsigned own[6] = {a0, a1, a2, a3, b0, b1};
    const int place = give(own), first = block->current & ~31, lane = block->current & 31;
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        double added = 0;
        for (int k = 0; k < 16; k++) {
            const unsigned* a = lane_at(first + row % 8 * 4 + k % 8 / 2).given[place];
            const unsigned* b = lane_at(first + column * 4 + k % 8 / 2).given[place] + 4;
            added += number(a[row / 8 + k / 8 * 2], k % 2) * number(b[k / 8], k % 2);
        }
        sum[i] += float(added);
    }
}

// Every lane calls this when the kernel returns.
static void end_lane() {
    own_lane().has_ended = true;
    for (;;) pause();
}

static void run_block(void (*entry)(), int number, int num_blocks, int num_lanes) {
    Block own;
    block = &own;
    blockIdx.x = number, gridDim.x = num_blocks;
    own.lanes = std::vector<Lane>(num_lanes);
    own.warps = std::vector<Meeting>(num_lanes / 32);
    for (Lane& lane : own.lanes) {
        getcontext(&lane.context);
        lane.context.uc_stack.ss_sp = lane.stack.data();
        lane.context.uc_stack.ss_size = lane.stack.size();
        makecontext(&lane.context, entry, 0);
    }
    for (bool is_running = true; is_running;) {
        is_running = false;
        for (own.current = 0; own.current < num_lanes; own.current++)
            if (!own_lane().has_ended) {
                is_running = true;
                swapcontext(&own.outside, &own_lane().context);
            }
    }
}

// All blocks at once, as kernels expect whose blocks wait for each other.
static void run_blocks(void (*entry)(), int num_blocks, int num_lanes) {
    std::vector<std::thread> blocks;
    for (int number = 0; number < num_blocks; number++)
        blocks.emplace_back(run_block, entry, number, num_blocks, num_lanes);
    for (std::thread& one : blocks) one.join();
}
