/* AVX2 with FMA and F16C: eight lanes, sixteen registers; with AVX-VNNI also dot products of bytes. */
#include <immintrin.h>

#define LANES 8
#define VALUE_VECTORS 2
#define PANEL_VECTORS 1
#if defined(__AVXVNNI__)
#define DOT_BYTES _mm256_dpbusd_avx_epi32
#elif defined(__AVX512VNNI__)
#define DOT_BYTES _mm256_dpbusd_epi32 /* the same instruction in another encoding, for tests */
#endif
#ifdef DOT_BYTES
#define HAS_WORDS 0
#else
#define HAS_WORDS 1
#endif
#define HAS_PAIRS 0
#define PREFETCH 2048
#define IS_SIGNED 0
#define SPINS 4000 /* `pause` takes 40 to 140 cycles */

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));

#include "groups.h"

INLINE void cpu_pause(void) { _mm_pause(); }
INLINE vf splat(float x) { return (vf)_mm256_set1_ps(x); }
INLINE vf fmadd(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
/* Returns the second operand if either is NaN. */
INLINE vf vmax(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vi round_to_int(vf v) { return (vi)_mm256_cvtps_epi32((__m256)v); }
INLINE vf load_halves(const uint16_t *p) {
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
INLINE __m256i first_lanes(int count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
INLINE vf load_some(const float *p, int count) {
    if (count >= LANES) return (vf)_mm256_loadu_ps(p);
    return (vf)_mm256_maskload_ps(p, first_lanes(count));
}
INLINE void store_some(float *p, vf v, int count) {
    if (count >= LANES)
        _mm256_storeu_ps(p, (__m256)v);
    else
        _mm256_maskstore_ps(p, first_lanes(count), (__m256)v);
}
INLINE __m128 fold(vf v) {
    return _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
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
    __m256i values = _mm256_broadcastsi128_si256(_mm_setr_epi8(MXFP4_VALUES));
    return (vw)_mm256_shuffle_epi8(values, (__m256i)codes);
}

INLINE __m256i broadcast4(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    return _mm256_set1_epi32(four);
}

#ifdef DOT_BYTES

INLINE void dot_rows(const uint8_t *block, int kind, const int8_t *digits, int count, vi *sums) {
    __m256i high[4], low[4];
#pragma GCC unroll 4
    for (int m = 0; m < count; m++) high[m] = low[m] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int v = 0; v < 8; v++) {
        __m256i w = (__m256i)weights_of(block, kind, v);
#pragma GCC unroll 4
        for (int m = 0; m < count; m++) {
            const int8_t *x = digits + m * 2 * GROUP + 4 * v;
            high[m] = DOT_BYTES(high[m], w, broadcast4(x));
            low[m] = DOT_BYTES(low[m], w, broadcast4(x + GROUP));
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < count; m++)
        sums[m] = (vi)_mm256_add_epi32(_mm256_slli_epi32(high[m], 8), low[m]);
}

#else

/* Without this, GCC adds all products at the end and spills them until then. */
#define keep_order(a, b) __asm__("" : "+x"(a), "+x"(b))

/* Sums of products of bytes are 16 bits wide and may not exceed 32,767. The greatest product of a pair is
 * 2 * 128 * weight, so eight pairs of 4 bits can be added (30,720), four of 5 bits (31,744) or of
 * MXFP4, and two of 6 bits (32,256). Eight bits could exceed it with one, so their activations are
 * 16-bit words: columns 0 and 2, then 1 and 3. */
INLINE int pairs_of(int kind) { return kind == FOUR_BITS ? 8 : kind == SIX_BITS ? 2 : 4; }

INLINE void dot_words(const uint8_t *block, const int8_t *words, int count, vi *sums) {
    __m256i first[4], second[4];
#pragma GCC unroll 4
    for (int m = 0; m < count; m++) first[m] = second[m] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int v = 0; v < 8; v++) {
        __m256i w = (__m256i)weights_of(block, EIGHT_BITS, v);
        __m256i even = _mm256_and_si256(w, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(w, 8);
#pragma GCC unroll 4
        for (int m = 0; m < count; m++) {
            const int8_t *x = words + m * 2 * GROUP + 8 * v;
            first[m] = _mm256_add_epi32(first[m], _mm256_madd_epi16(even, broadcast4(x)));
            second[m] = _mm256_add_epi32(second[m], _mm256_madd_epi16(odd, broadcast4(x + 4)));
            keep_order(first[m], second[m]);
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < count; m++) sums[m] = (vi)_mm256_add_epi32(first[m], second[m]);
}

INLINE void dot_rows(const uint8_t *block, int kind, const int8_t *digits, int count, vi *sums) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i high[4], low[4];
    int pairs = pairs_of(kind);
    if (kind == EIGHT_BITS) {
        dot_words(block, digits, count, sums);
        return;
    }
#pragma GCC unroll 8
    for (int v = 0; v < 8; v++) {
        __m256i w = (__m256i)weights_of(block, kind, v);
#pragma GCC unroll 4
        for (int m = 0; m < count; m++) {
            const int8_t *x = digits + m * 2 * GROUP + 4 * v;
            __m256i a = _mm256_maddubs_epi16(w, broadcast4(x));
            __m256i b = _mm256_maddubs_epi16(w, broadcast4(x + GROUP));
            high[m] = v % pairs ? _mm256_add_epi16(high[m], a) : a;
            low[m] = v % pairs ? _mm256_add_epi16(low[m], b) : b;
            keep_order(high[m], low[m]);
            if (v % pairs < pairs - 1) continue;
            __m256i wide = _mm256_slli_epi32(_mm256_madd_epi16(high[m], ones), 8);
            wide = _mm256_add_epi32(wide, _mm256_madd_epi16(low[m], ones));
            sums[m] = v < pairs ? (vi)wide : sums[m] + (vi)wide;
        }
    }
}

#endif

/* A group's exact dot products of `count` rows of digits with LANES rows of weights; four rows at a
 * time, as there are sixteen registers. */
INLINE void dot_group(const uint8_t *block, int kind, const int8_t *digits, const float *group_sums,
                      int count, vi *sums) {
    (void)group_sums;
    dot_rows(block, kind, digits, count < 4 ? count : 4, sums);
    if (count > 4) dot_rows(block, kind, digits + 8 * GROUP, count - 4, sums + 4);
}
