// What the kernel for quantised weights needs on a CPU besides its lanes.
#pragma once
#define __device__
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "threads.h"

static unsigned permute_bytes(unsigned one, unsigned two, unsigned selector) {
    unsigned char bytes[8];
    memcpy(bytes, &one, 4), memcpy(bytes + 4, &two, 4);
    unsigned found = 0;
    for (int i = 0; i < 4; i++) found |= unsigned(bytes[selector >> 4 * i & 7]) << 8 * i;
    return found;
}
#define __byte_perm permute_bytes
#define __uint_as_float bits_of<float>
#define rsqrtf(x) (1.0f / sqrtf(x))

// Copies arrive at once; a GPU refuses addresses that are not aligned.
template <int COUNT>
static void copy_ahead(void* to, const void* from) {
    if (uintptr_t(to) % COUNT || uintptr_t(from) % COUNT) abort();
    memcpy(to, from, COUNT);
}
static void end_copies() {}
template <int LEFT>
static void await_copies() {}
