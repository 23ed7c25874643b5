/* Matrices, and rows of activations prepared for them. */
#ifndef SEMANTIC_LINEARS_H
#define SEMANTIC_LINEARS_H

#include "threads.h"
#include "vectors.h"

enum { FULL = 0, FOUR_BITS = 4, EIGHT_BITS = 8 };

/* Weights are float32 rows as they lie, or integers of 4 or 8 bits with a scale and a bias for every
 * 32 of a row, packed by `semantic_pack`. */
typedef struct {
    const void *data;
    const float *bias; /* or NULL */
    int32_t kind, rows, columns;
    float unit; /* scales and biases of groups are multiples of it */
} Matrix;

/* Rows of activations in the form that a kind of matrix reads, in tiles of up to MAX_TILE rows.
 *
 * For integers a row is rounded to 16 bits: value = (256 * high + low) * step. Of each group a tile
 * has every row's 32 high digits and 32 low ones; then of each group every row's sum as float32; then
 * every row's step. For float32 a tile has LANES columns of each row in turn. */
typedef struct {
    const int8_t *prepared;
    int rows;
} Input;

/* Bytes that one prepared row takes. */
size_t prepared_size(const Matrix *reader);

/* Prepare one of `num_rows` rows for matrices of the reader's kind and number of columns. */
void prepare(int8_t *prepared, const Matrix *reader, int row, int num_rows, const float *x);

/* One phase: multiply by matrices that read the same input; their results lie side by side in a row
 * of `out`, or are added to what is there. */
void project(Team *team, const Matrix *all, int num_matrices, const Input *input, float *out,
             int stride, int is_added);

/* One phase: silu(gate(x)) * up(x). */
void project_gated(Team *team, const Matrix *gate, const Matrix *up, const Input *input, float *out,
                   int stride);

/* Memory aligned to a cache line, or NULL; `release` frees it. */
void *allocate(size_t bytes);
void release(void *memory);

#endif
