/* NEON with dot products of bytes (ARMv8.2): four lanes, thirty-two registers; with I8MM also products
 * of two by eight bytes and eight by two. */
#include <arm_neon.h>

#define LANES 4
#define VALUE_VECTORS 2
#define PANEL_VECTORS 2
#define HAS_WORDS 0
#ifdef __ARM_FEATURE_MATMUL_INT8
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif
#define PREFETCH 0
#define IS_SIGNED 1
#define SPINS 50000 /* `yield` takes a few cycles */

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));

#include "groups.h"

INLINE void cpu_pause(void) { __asm__ volatile("yield"); }
INLINE vf splat(float x) { return (vf)vdupq_n_f32(x); }
INLINE vf fmadd(vf a, vf b, vf c) {
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
INLINE vf vmax(vf a, vf b) { return (vf)vmaxq_f32((float32x4_t)a, (float32x4_t)b); }
INLINE vi round_to_int(vf v) { return (vi)vcvtnq_s32_f32((float32x4_t)v); }
INLINE vf load_halves(const uint16_t *p) {
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
/* Sizes are multiples of four, so a vector is either complete or empty. */
INLINE vf load_some(const float *p, int count) {
    return count > 0 ? (vf)vld1q_f32(p) : (vf){0};
}
INLINE void store_some(float *p, vf v, int count) {
    if (count >= LANES)
        vst1q_f32(p, (float32x4_t)v);
    else
        for (int i = 0; i < count; i++) p[i] = v[i];
}
INLINE float reduce_add(vf v) { return vaddvq_f32((float32x4_t)v); }
INLINE void reduce4(const vf *v, float *sums) {
    float32x4_t a = vpaddq_f32((float32x4_t)v[0], (float32x4_t)v[1]);
    float32x4_t b = vpaddq_f32((float32x4_t)v[2], (float32x4_t)v[3]);
    vst1q_f32(sums, vpaddq_f32(a, b));
}

/* Multiply-adds take a factor from a lane, so that one load serves four of them. */
#define HAS_LANES
INLINE void add_products(vf x, const float *y, int i, vf sums[4][PANEL_VECTORS]) {
    float32x4_t v = (float32x4_t)x, factors = vld1q_f32(y);
    sums[0][i] = (vf)vfmaq_laneq_f32((float32x4_t)sums[0][i], v, factors, 0);
    sums[1][i] = (vf)vfmaq_laneq_f32((float32x4_t)sums[1][i], v, factors, 1);
    sums[2][i] = (vf)vfmaq_laneq_f32((float32x4_t)sums[2][i], v, factors, 2);
    sums[3][i] = (vf)vfmaq_laneq_f32((float32x4_t)sums[3][i], v, factors, 3);
}

/* Write four numbers of each of four rows as columns; the rows written are `width` apart. */
INLINE void transpose_four(const float *const *rows, int from, int width, float *out) {
    float32x4_t a = vld1q_f32(rows[0] + from), b = vld1q_f32(rows[1] + from);
    float32x4_t c = vld1q_f32(rows[2] + from), d = vld1q_f32(rows[3] + from);
    float32x4_t ac = vzip1q_f32(a, c), bd = vzip1q_f32(b, d);
    vst1q_f32(out, vzip1q_f32(ac, bd)), vst1q_f32(out + width, vzip2q_f32(ac, bd));
    ac = vzip2q_f32(a, c), bd = vzip2q_f32(b, d), out += 2 * width;
    vst1q_f32(out, vzip1q_f32(ac, bd)), vst1q_f32(out + width, vzip2q_f32(ac, bd));
}

INLINE vw look_up(vw codes) {
    static const uint8_t values[] = {MXFP4_VALUES};
    return (vw)vqtbl1q_u8(vld1q_u8(values), (uint8x16_t)codes);
}

/* 128 times a group's sum. */
INLINE int32x4_t offset_of(const float *group_sum) {
    return vcvtq_n_s32_f32(vld1q_dup_f32(group_sum), 7);
}

#if HAS_PAIRS

/* Weights of two rows times the high and the low digits of eight columns, added to four sums. */
INLINE void dot_rows(const int8x16_t w[2][4], const int8_t *digits, int count, int32x4_t (*sums)[2]) {
#pragma GCC unroll 4
    for (int m = 0; m < count; m++) sums[m][0] = sums[m][1] = vdupq_n_s32(0);
#pragma GCC unroll 4
    for (int eight = 0; eight < 4; eight++)
#pragma GCC unroll 4
        for (int m = 0; m < count; m++) {
            int8x16_t x = vld1q_s8(digits + m * 2 * GROUP + 16 * eight);
            sums[m][0] = vmmlaq_s32(sums[m][0], w[0][eight], x);
            sums[m][1] = vmmlaq_s32(sums[m][1], w[1][eight], x);
        }
}

/* A group's exact dot products of `count` rows of digits with LANES rows of weights. 8-bit weights are
 * signed here, so 128 times the group's sum is added. */
INLINE void dot_group(const uint8_t *block, int kind, const int8_t *digits, const float *group_sums,
                      int count, vi *sums) {
    int8x16_t w[2][4]; /* rows 0 and 1, then 2 and 3, of eight columns in turn */
#pragma GCC unroll 4
    for (int eight = 0; eight < 4; eight++) {
        uint32x4_t first = (uint32x4_t)weights_of(block, kind, 2 * eight);
        uint32x4_t second = (uint32x4_t)weights_of(block, kind, 2 * eight + 1);
        w[0][eight] = (int8x16_t)vzip1q_u32(first, second);
        w[1][eight] = (int8x16_t)vzip2q_u32(first, second);
    }
#pragma GCC unroll 2
    for (int first = 0; first < count; first += 4) {
        int32x4_t pairs[4][2];
        int width = count - first < 4 ? count - first : 4;
        dot_rows(w, digits + first * 2 * GROUP, width, pairs);
#pragma GCC unroll 4
        for (int m = 0; m < width; m++) {
            int32x4_t high = vuzp1q_s32(pairs[m][0], pairs[m][1]);
            int32x4_t low = vuzp2q_s32(pairs[m][0], pairs[m][1]);
            if (kind == EIGHT_BITS) low = vaddq_s32(low, offset_of(group_sums + first + m));
            sums[first + m] = (vi)vaddq_s32(vshlq_n_s32(high, 8), low);
        }
    }
}

#else

INLINE int32x4_t dot_digits(int32x4_t sum, const int8x16_t *w, const int8_t *digits) {
    int8x16_t first = vld1q_s8(digits), second = vld1q_s8(digits + 16);
    sum = vdotq_laneq_s32(sum, w[0], first, 0), sum = vdotq_laneq_s32(sum, w[1], first, 1);
    sum = vdotq_laneq_s32(sum, w[2], first, 2), sum = vdotq_laneq_s32(sum, w[3], first, 3);
    sum = vdotq_laneq_s32(sum, w[4], second, 0), sum = vdotq_laneq_s32(sum, w[5], second, 1);
    sum = vdotq_laneq_s32(sum, w[6], second, 2), sum = vdotq_laneq_s32(sum, w[7], second, 3);
    return sum;
}

INLINE void clear_four(int32x4_t *sums) {
    __asm__("movi %0.4s, #0\n\tmovi %1.4s, #0\n\tmovi %2.4s, #0\n\tmovi %3.4s, #0"
            : "=w"(sums[0]), "=w"(sums[1]), "=w"(sums[2]), "=w"(sums[3]));
}

/* Add four vectors of weights times 16 digits of each of four rows. The assembly fixes the order:
 * compilers finish one row before the next, and then every instruction waits for the last one. */
INLINE void dot_four(int32x4_t *sums, const int8x16_t *w, const int8_t *digits) {
    int8x16_t a = vld1q_s8(digits), b = vld1q_s8(digits + 2 * GROUP);
    int8x16_t c = vld1q_s8(digits + 4 * GROUP), d = vld1q_s8(digits + 6 * GROUP);
#define DOT(sum, v, row) "sdot %" #sum ".4s, %[w" #v "].16b, %[" #row "].4b[" #v "]\n\t"
#define DOTS(v) DOT(0, v, a) DOT(1, v, b) DOT(2, v, c) DOT(3, v, d)
    __asm__(DOTS(0) DOTS(1) DOTS(2) DOTS(3)
            : "+&w"(sums[0]), "+&w"(sums[1]), "+&w"(sums[2]), "+&w"(sums[3])
            : [w0] "w"(w[0]), [w1] "w"(w[1]), [w2] "w"(w[2]), [w3] "w"(w[3]),
              [a] "w"(a), [b] "w"(b), [c] "w"(c), [d] "w"(d));
#undef DOTS
#undef DOT
}

/* A group's exact dot products of `count` rows of digits with LANES rows of weights. 8-bit
 * weights are signed here, so 128 times the group's sum is added. Low digits are added to the sum of
 * the high ones; single rows have a separate sum, so that neither sum waits for the other. */
INLINE void dot_group(const uint8_t *block, int kind, const int8_t *digits, const float *group_sums,
                      int count, vi *sums) {
    int is_apart = count < 4, m = 0;
    int8x16_t w[8];
#pragma GCC unroll 8
    for (int v = 0; v < 8; v++) w[v] = (int8x16_t)weights_of(block, kind, v);
#pragma GCC unroll 2
    for (; m + 4 <= count; m += 4, digits += 8 * GROUP) {
        int32x4_t four[4];
        clear_four(four);
        dot_four(four, w, digits), dot_four(four, w + 4, digits + 16);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            four[i] = vshlq_n_s32(four[i], 8);
            if (kind == EIGHT_BITS) four[i] = vaddq_s32(four[i], offset_of(group_sums + m + i));
        }
        dot_four(four, w, digits + GROUP), dot_four(four, w + 4, digits + GROUP + 16);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) sums[m + i] = (vi)four[i];
    }
#pragma GCC unroll 4
    for (; m < count; m++, digits += 2 * GROUP) {
        int32x4_t offset = kind == EIGHT_BITS ? offset_of(group_sums + m) : vdupq_n_s32(0);
        int32x4_t high = vshlq_n_s32(dot_digits(vdupq_n_s32(0), w, digits), 8);
        if (is_apart)
            sums[m] = (vi)vaddq_s32(high, dot_digits(offset, w, digits + GROUP));
        else
            sums[m] = (vi)dot_digits(kind == EIGHT_BITS ? vaddq_s32(high, offset) : high, w,
                                     digits + GROUP);
    }
}

#endif
