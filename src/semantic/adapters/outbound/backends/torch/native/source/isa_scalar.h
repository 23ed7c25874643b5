/* The reference: plain C, one lane at a time. For tests only; it is slow. */
#define LANES 4
#define VALUE_VECTORS 2
#define PANEL_VECTORS 2
#define HAS_WORDS 0
#define HAS_PAIRS 0
#define PREFETCH 0
#define IS_SIGNED 0
#define SPINS 20000

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));

#include "groups.h"

INLINE void cpu_pause(void) {}
INLINE vf splat(float x) { return (vf){x, x, x, x}; }
INLINE vf fmadd(vf a, vf b, vf c) {
    for (int i = 0; i < LANES; i++) c[i] = fmaf(a[i], b[i], c[i]);
    return c;
}
/* Returns the second operand if either is NaN. */
INLINE vf vmax(vf a, vf b) {
    for (int i = 0; i < LANES; i++) b[i] = a[i] > b[i] ? a[i] : b[i];
    return b;
}
INLINE vi round_to_int(vf v) {
    vi r;
    for (int i = 0; i < LANES; i++) r[i] = (int32_t)lrintf(v[i]);
    return r;
}
INLINE float half_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, rest = half & 1023;
    uint32_t bits = sign | (exponent + 112) << 23 | rest << 13;
    float value;
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * (float)rest * 0x1p-24f;
    if (exponent == 31) bits = sign | 0x7f800000 | rest << 13;
    memcpy(&value, &bits, sizeof value);
    return value;
}
INLINE vf load_halves(const uint16_t *p) {
    vf v;
    for (int i = 0; i < LANES; i++) v[i] = half_to_float(p[i]);
    return v;
}
INLINE vf load_some(const float *p, int count) {
    vf v = {0};
    for (int i = 0; i < LANES && i < count; i++) v[i] = p[i];
    return v;
}
INLINE void store_some(float *p, vf v, int count) {
    for (int i = 0; i < LANES && i < count; i++) p[i] = v[i];
}
INLINE float reduce_add(vf v) { return (v[0] + v[1]) + (v[2] + v[3]); }
INLINE void reduce4(const vf *v, float *sums) {
    for (int i = 0; i < 4; i++) sums[i] = reduce_add(v[i]);
}

/* A group's exact dot products of `count` rows of digits with LANES rows of weights. */
INLINE void dot_group(const uint8_t *block, int kind, const int8_t *digits, const float *group_sums,
                      int count, vi *sums) {
    (void)group_sums;
    for (int m = 0; m < count; m++, digits += 2 * GROUP)
        for (int lane = 0; lane < LANES; lane++) {
            int32_t sum = 0;
            for (int column = 0; column < GROUP; column++)
                sum += weight_at(block, kind, lane, column) *
                       (digits[column] * 256 + digits[GROUP + column]);
            sums[m][lane] = sum;
        }
}
