/* AVX-512 with VNNI: sixteen lanes, thirty-two registers, dot products of unsigned by signed bytes. */
#include <immintrin.h>

#define LANES 16
#define VALUE_VECTORS 4
#define PANEL_VECTORS 1
#define HAS_WORDS 0
#define HAS_PAIRS 0
#define PREFETCH 2048
#define IS_SIGNED 0
#define SPINS 4000 /* `pause` takes 140 cycles here */

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));

#include "groups.h"

INLINE void cpu_pause(void) { _mm_pause(); }
INLINE vf splat(float x) { return (vf)_mm512_set1_ps(x); }
INLINE vf fmadd(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
/* Returns the second operand if either is NaN. */
INLINE vf vmax(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vi round_to_int(vf v) { return (vi)_mm512_cvtps_epi32((__m512)v); }
INLINE vf load_halves(const uint16_t *p) {
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
INLINE __mmask16 first_lanes(int count) {
    return count >= LANES ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1);
}
INLINE vf load_some(const float *p, int count) {
    return (vf)_mm512_maskz_loadu_ps(first_lanes(count), p);
}
INLINE void store_some(float *p, vf v, int count) {
    _mm512_mask_storeu_ps(p, first_lanes(count), (__m512)v);
}
INLINE __m128 fold(vf v) {
    __m256 low = _mm512_castps512_ps256((__m512)v);
    __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)v), 1));
    __m256 eight = _mm256_add_ps(low, high);
    return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}
INLINE float reduce_add(vf v) {
    __m128 four = fold(v), two = _mm_hadd_ps(four, four);
    return _mm_cvtss_f32(_mm_hadd_ps(two, two));
}
INLINE void reduce4(const vf *v, float *sums) {
    __m128 a = _mm_hadd_ps(fold(v[0]), fold(v[1])), b = _mm_hadd_ps(fold(v[2]), fold(v[3]));
    _mm_storeu_ps(sums, _mm_hadd_ps(a, b));
}

INLINE vw look_up(vw codes) {
    __m512i values = _mm512_broadcast_i32x4(_mm_setr_epi8(MXFP4_VALUES));
    return (vw)_mm512_shuffle_epi8(values, (__m512i)codes);
}

/* Add the dot products of four columns; the instruction itself broadcasts the activations, a
 * form that GCC 12 does not generate. */
INLINE __m512i dot4(__m512i sum, __m512i w, const int8_t *x) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*(const int32_t *)x));
    return sum;
}

/* A group's exact dot products of `count` rows of digits with LANES rows of weights. */
INLINE void dot_group(const uint8_t *block, int kind, const int8_t *digits, const float *group_sums,
                      int count, vi *sums) {
    __m512i w[8];
    (void)group_sums;
#pragma GCC unroll 8
    for (int v = 0; v < 8; v++) w[v] = (__m512i)weights_of(block, kind, v);
#pragma GCC unroll 8
    for (int m = 0; m < count; m++, digits += 2 * GROUP) {
        __m512i high = _mm512_setzero_si512(), low = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int v = 0; v < 8; v++) {
            high = dot4(high, w[v], digits + 4 * v);
            low = dot4(low, w[v], digits + GROUP + 4 * v);
        }
        sums[m] = (vi)_mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
    }
}
