/* Matrices, and rows of activations prepared for them. */
#ifndef SEMANTIC_LINEARS_H
#define SEMANTIC_LINEARS_H

#include "threads.h"
#include "vectors.h"

/* Weights are plain float32 rows, or integers with a scale and a bias for every 32 of a row, packed
 * by `semantic_pack`. */
typedef struct {
    const void *data;
    const float *bias; /* or NULL */
    int32_t kind, rows, columns;
    float unit; /* factor of the stored scales and biases of groups */
} Matrix;

/* How a gated MLP combines its two products: silu(gate) * up; gelu(gate) * up with the tanh
 * approximation; or, with both clamped to `limit`, gate * sigmoid(alpha * gate) * (up + 1). */
enum { SILU = 0, GELU_TANH = 1, CLAMPED = 2 };
typedef struct {
    int32_t kind;
    float alpha, limit; /* for CLAMPED */
} Activation;

/* Rows of activations in the form that a kind of matrix reads, in tiles of up to MAX_TILE rows.
 *
 * For integers a row is rounded to 16 bits: value = (256 * high + low) * step. Of each group a tile
 * has every row's 32 high digits and 32 low ones, or eight of each in turn if HAS_PAIRS; then of each
 * group every row's sum as float32; then every row's step. For float32 a tile has LANES columns of each
 * row in turn. */
typedef struct {
    const int8_t *prepared;
    int rows;
} Input;

/* Whether a matrix reads words instead of digits. */
INLINE int reads_words(const Matrix *a) { return HAS_WORDS && a->kind == EIGHT_BITS; }

/* Whether two matrices read the same form of their input. */
INLINE int reads_same(const Matrix *a, const Matrix *b) {
    return (a->kind == FULL) == (b->kind == FULL) && reads_words(a) == reads_words(b);
}

/* Bytes that one prepared row takes. */
size_t prepared_size(const Matrix *reader);

/* Prepare one of `num_rows` rows for matrices of the reader's kind and number of columns. */
void prepare(int8_t *prepared, const Matrix *reader, int row, int num_rows, const float *x);

/* Prepare a row as number `place` of a tile of `width` rows. */
void prepare_in_tile(int8_t *tile, const Matrix *reader, int place, int width, const float *x);

/* Compute LANES results, from row `LANES * index` of the matrix on, for each of up to MAX_TILE rows;
 * with float32, over `columns` of the columns. */
void multiply(const Matrix *a, int index, const int8_t *x, int count, int from, int columns, vf *out);

/* One phase: multiply by matrices that read the same input; their results are side by side in a
 * row of `out`, or are added to it. */
void project(Team *team, const Matrix *all, int num_matrices, const Input *input, float *out,
             int stride, int is_added);

/* One phase: the products of gate and up, combined by the activation. */
void project_gated(Team *team, const Matrix *gate, const Matrix *up, const Activation *activation,
                   const Input *input, float *out, int stride);

INLINE int num_blocks(const Matrix *a) { return (a->rows + LANES - 1) / LANES; }

/* Blocks that a thread takes at once, so that there are at least eight pieces per thread. */
INLINE int piece_size(int blocks, const Team *team) {
    enum { MOST = 64 / LANES };
    int size = blocks / (team->count * 8);
    return size < 1 ? 1 : size > MOST ? MOST : size;
}

INLINE vf vmin(vf a, vf b) { return -vmax(-a, -b); }

INLINE vf times_sigmoid(vf x, vf z) {
    vf one = splat(1.0f);
    return x * (one / (one + exponential(zeros() - vmax(splat(-86.0f), z))));
}

INLINE vf activate(const Activation *a, vf gate, vf up) {
    if (a->kind == SILU) return times_sigmoid(gate, gate) * up;
    if (a->kind == GELU_TANH) { /* 1 + tanh(z) is 2 * sigmoid(2 * z) */
        vf cubic = fmadd(gate * gate * gate, splat(0.044715f), gate);
        return times_sigmoid(gate, cubic * splat(1.5957691216f)) * up;
    }
    gate = vmin(splat(a->limit), gate);
    up = vmax(splat(-a->limit), vmin(splat(a->limit), up));
    return times_sigmoid(gate, gate * splat(a->alpha)) * (up + splat(1.0f));
}

/* Memory aligned to a cache line, or NULL; `release` frees it. */
void *allocate(size_t bytes);
void release(void *memory);

#endif
