/* Converts a file's integers to the layout that the kernels read, and rows back to floats. Blocks (see
 * `groups.h`) of the same rows follow each other.
 */
#include "linears.h"

typedef struct {
    const uint8_t *packed;
    const float *scales, *biases;
    int rows, columns, group, kind;
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

/* Spread four integers over four bytes. */
INLINE uint32_t spread(uint32_t four, int bits) {
    uint32_t one = (1u << bits) - 1, both = one | one << 16;
    if (bits == 8) return four ^ (IS_SIGNED ? 0x80808080 : 0);
    four = (four & ((1u << 2 * bits) - 1)) | four >> 2 * bits << 16;
    return (four & both) | (four & both << bits) << (8 - bits);
}

/* Pack a row's group: first one byte for each integer, a word for each vector. */
INLINE void pack_group(const uint8_t *from, int bits, uint8_t *out) {
    uint32_t words[GROUP / 4], packed[GROUP / 4] = {0};
#pragma GCC unroll 4
    for (int v = 0; v < GROUP / 4; v += 2, from += bits) {
        uint64_t eight = 0;
        memcpy(&eight, from, bits);
        words[v] = spread((uint32_t)(eight & ((1ull << 4 * bits) - 1)), bits);
        words[v + 1] = spread((uint32_t)(eight >> 4 * bits), bits);
    }
#pragma GCC unroll 8
    for (int v = 0; v < GROUP / 4; v++) {
        uint32_t low = words[v] & 0x0f0f0f0f, high = words[v] >> 4 & 0x0f0f0f0f;
        if (bits == 8) packed[v] = words[v];
        if (bits < 8) packed[v % 4] |= v < 4 ? low : low << 4;
        if (bits == 5) packed[4] |= high << v;
        if (bits == 6) packed[4 + v / 4] |= high << 2 * (v % 4);
    }
#pragma GCC unroll 8
    for (int v = 0; v < bits; v++) memcpy(out + 4 * LANES * v, &packed[v], sizeof *packed);
}

static void pack_row(const uint8_t *from, int bits, uint8_t *out) {
    switch (bits) {
    case 4: pack_group(from, 4, out); break;
    case 5: pack_group(from, 5, out); break;
    case 6: pack_group(from, 6, out); break;
    case 8: pack_group(from, 8, out); break;
    }
}

static void pack_job(void *argument, Team *team, int thread) {
    Packing *p = argument;
    int blocks = (p->rows + LANES - 1) / LANES, index, groups = p->columns / GROUP;
    int bits = p->kind == MXFP4 ? 4 : p->kind;
    size_t size = group_size(p->kind);
    (void)thread;
    while ((index = take(team, blocks, 1)) >= 0) {
        uint8_t *out = p->out + size * groups * index;
        for (int g = 0; g < groups; g++, out += size) {
            if (index * LANES + LANES > p->rows) memset(out, 0, size);
            uint16_t *scales = (uint16_t *)(out + integers_size(p->kind)), *biases = scales + LANES;
            for (int r = 0; r < LANES && index * LANES + r < p->rows; r++) {
                int row = index * LANES + r;
                size_t at = (size_t)row * (p->columns / p->group) + g * GROUP / p->group;
                pack_row(p->packed + ((size_t)row * groups + g) * 4 * bits, bits, out + 4 * r);
                scales[r] = to_half(p->scales[at] / p->unit);
                if (p->kind != MXFP4) biases[r] = to_half(p->biases[at] / p->unit);
            }
        }
    }
    barrier(team);
}

/* Bytes that a packed matrix takes. */
size_t semantic_packed_size(int rows, int columns, int kind) {
    return (size_t)(rows + LANES - 1) / LANES * (columns / GROUP) * group_size(kind);
}

/* Pack a matrix whose integers are stored in rows, the first in the lowest bits; MXFP4 has no biases. */
void semantic_pack(const uint8_t *packed, const float *scales, const float *biases, int rows,
                   int columns, int group, int kind, float unit, uint8_t *out, int threads) {
    Packing p = {packed, scales, biases, rows, columns, group, kind, out, unit};
    run_job(pack_job, &p, threads);
}

/* Expand some rows of a packed matrix, as float32. Returns 0, or 1 if there is no such row. */
int semantic_rows(const Matrix *a, const int64_t *rows, int count, float *out) {
    int groups = a->columns / GROUP, kind = a->kind;
    for (int i = 0; i < count; i++) {
        if (rows[i] < 0 || rows[i] >= a->rows) return 1;
        size_t first = (size_t)(rows[i] / LANES) * groups, lane = rows[i] % LANES;
        const uint8_t *block = (const uint8_t *)a->data + first * group_size(kind);
        for (int g = 0; g < groups; g++, block += group_size(kind)) {
            const uint16_t *halves = (const uint16_t *)(block + integers_size(kind));
            float scale = load_halves(halves)[lane];
            float bias = kind == MXFP4 ? -12.0f * scale : load_halves(halves + LANES)[lane];
            for (int c = 0; c < GROUP; c++) /* the product is exact */
                *out++ = ((float)weight_at(block, kind, (int)lane, c) * scale + bias) * a->unit;
        }
    }
    return 0;
}
