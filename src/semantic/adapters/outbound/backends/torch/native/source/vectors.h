/* Vectors of LANES numbers and the primitives of one instruction set.
 *
 * Everything else in this folder is written once, with the vector extensions of GCC and Clang and
 * the primitives below. Each header `isa_*.h` defines:
 *
 *   LANES            numbers in a vector, and matrix rows that lie side by side
 *   VALUE_VECTORS    vectors of values that decode attention sums at once
 *   PANEL_VECTORS    vectors of queries that a panel of prefill attention has
 *   HAS_WORDS        activations for 8-bit weights (no others) are 16-bit words instead of two digits
 *   HAS_PAIRS        eight high digits of activations are followed by their low ones, not 32
 *   IS_SIGNED        8-bit weights are stored as signed bytes (minus 128)
 *   PREFETCH         distance in bytes at which weights are prefetched for few rows; 0: never
 *   SPINS            calls of `cpu_pause` before a waiting thread sleeps: a quarter of a millisecond
 *   splat, fmadd, vmax, round_to_int, load_halves, load_some, store_some, reduce_add, reduce4
 *                    (reduce4 adds in the order of reduce_add)
 *   add_products     vector `i` of a panel times each of four numbers, added to sums
 *   transpose_four   four numbers of each of four rows as columns; the defaults of these two are
 *                    below, a header that has its own defines HAS_LANES
 *   look_up          the value of each byte's MXFP4 code
 *   dot_group        exact integer dot products of one group of 32 columns
 *
 * Results of integer matrices are the same bytes in every variant: `dot_group` is exact, floats are
 * added once for each group in the same order, every multiply-add is an explicit `fmadd`, and the
 * compiler may not contract others (-ffp-contract=off).
 */
#ifndef SEMANTIC_VECTORS_H
#define SEMANTIC_VECTORS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
enum { GROUP = 32, MAX_TILE = 8 }; /* columns of a group; rows of activations in a tile */

#if defined(SEMANTIC_SCALAR)
#include "isa_scalar.h"
#elif defined(__AVX512VNNI__) && defined(__AVX512BW__) && !defined(SEMANTIC_NARROW)
#include "isa_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "isa_avx2.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "isa_neon.h"
#else
#error "no instruction set is selected: compile with the flags of a variant (see variants.py)"
#endif

INLINE vf load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}
/* No memcpy: GCC would copy a vector through integer registers. */
typedef float unaligned_vf __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
INLINE void store(float *p, vf v) { *(unaligned_vf *)p = v; }
INLINE vf zeros(void) { return (vf){0}; }
#ifndef HAS_LANES
INLINE void add_products(vf x, const float *y, int i, vf sums[4][PANEL_VECTORS]) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) sums[j][i] = fmadd(x, splat(y[j]), sums[j][i]);
}
INLINE void transpose_four(const float *const *rows, int from, int width, float *out) {
    for (int i = 0; i < 4; i++)
        for (int d = 0; d < 4; d++) out[d * width + i] = rows[i][from + d];
}
#endif
INLINE vf to_floats(vi v) { return __builtin_convertvector(v, vf); }

/* e to the power of x for x <= 88, within 2e-7 of its value. NaN stays NaN. */
INLINE vf exponential(vf x) {
    const vf magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    x = vmax(splat(-86.0f), x);
    vf shifted = fmadd(x, splat(1.44269504f), magic), n = shifted - magic;
    x = fmadd(n, splat(-0.693359375f), x);
    x = fmadd(n, splat(2.12194440e-4f), x);
    vf p = fmadd(splat(1.9875691500e-4f), x, splat(1.3981999507e-3f));
    p = fmadd(p, x, splat(8.3334519073e-3f));
    p = fmadd(p, x, splat(4.1665795894e-2f));
    p = fmadd(p, x, splat(1.6666665459e-1f));
    p = fmadd(p, x, splat(5.0000001201e-1f));
    p = fmadd(p, x * x, x) + splat(1.0f);
    return (vf)((vi)p + ((vi)shifted << 23)); /* the integer's bits move into the exponent */
}

#endif
