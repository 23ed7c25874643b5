/* Converts a file's integers to the layout that the kernels read.
 *
 * A block is LANES rows of 32 columns: eight vectors of four columns of each row (4 bits: the lower
 * halves of four vectors' bytes are vectors 0 to 3, the upper ones 4 to 7), then each row's scale
 * and each row's bias in half precision. Blocks of the same rows follow each other.
 */
#include "linears.h"

typedef struct {
    const uint8_t *packed;
    const float *scales, *biases;
    int rows, columns, group, bits;
    uint8_t *out;
    float unit;
} Packing;

/* The nearest half precision number, ties to even; magnitudes are below 65,504. */
static uint16_t to_half(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude < 0x38800000) { /* subnormal: multiples of 2^-24 */
        float scaled;
        memcpy(&scaled, &magnitude, sizeof scaled);
        return (uint16_t)(sign | (uint16_t)lrintf(scaled * 0x1p24f));
    }
    magnitude += 0xfff + (magnitude >> 13 & 1);
    return (uint16_t)(sign | (uint16_t)((magnitude - 0x38000000) >> 13));
}

/* Spread four 4-bit numbers over four bytes. */
INLINE uint32_t spread(uint32_t four) {
    four = (four | four << 8) & 0x00ff00ff;
    return (four | four << 4) & 0x0f0f0f0f;
}

static void pack_row(const Packing *p, int row, int group, uint8_t *out) {
    const uint8_t *from = p->packed + ((size_t)row * p->columns + group * GROUP) * p->bits / 8;
    for (int v = 0; v < p->bits; v++, out += 4 * LANES) {
        uint32_t word;
        if (p->bits == 8) {
            memcpy(&word, from + 4 * v, sizeof word);
            if (IS_SIGNED) word ^= 0x80808080;
        } else {
            uint16_t low, high;
            memcpy(&low, from + 2 * v, sizeof low);
            memcpy(&high, from + 8 + 2 * v, sizeof high);
            word = spread(low) | spread(high) << 4;
        }
        memcpy(out, &word, sizeof word);
    }
}

static void pack_job(void *argument, Team *team, int thread) {
    Packing *p = argument;
    int blocks = (p->rows + LANES - 1) / LANES, index, groups = p->columns / GROUP;
    size_t bytes = 4 * LANES * (size_t)p->bits, size = bytes + 4 * LANES;
    (void)thread;
    while ((index = take(team, blocks, 1)) >= 0) {
        uint8_t *out = p->out + size * groups * index;
        for (int g = 0; g < groups; g++, out += size) {
            if (index * LANES + LANES > p->rows) memset(out, 0, size);
            uint16_t *scales = (uint16_t *)(out + bytes), *biases = scales + LANES;
            for (int r = 0; r < LANES && index * LANES + r < p->rows; r++) {
                int row = index * LANES + r;
                size_t at = (size_t)row * (p->columns / p->group) + g * GROUP / p->group;
                pack_row(p, row, g, out + 4 * r);
                scales[r] = to_half(p->scales[at] / p->unit);
                biases[r] = to_half(p->biases[at] / p->unit);
            }
        }
    }
    barrier(team);
}

/* Bytes that a packed matrix takes. */
size_t semantic_packed_size(int rows, int columns, int bits) {
    size_t blocks = (size_t)(rows + LANES - 1) / LANES * (columns / GROUP);
    return blocks * 4 * LANES * (bits + 1);
}

/* Pack a matrix whose integers are stored in rows, the first in the lowest bits. */
void semantic_pack(const uint8_t *packed, const float *scales, const float *biases, int rows,
                   int columns, int group, int bits, float unit, uint8_t *out, int threads) {
    Packing p = {packed, scales, biases, rows, columns, group, bits, out, unit};
    run_job(pack_job, &p, threads);
}
