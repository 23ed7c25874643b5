/* Multiplies rows of activations by a matrix. */
#include "linears.h"

#include <stdlib.h>

enum { WIDTH = 512, AHEAD = 128 }; /* float32: columns per part, columns prefetched ahead */

void *allocate(size_t bytes) {
#if defined(_WIN32)
    return _aligned_malloc(bytes + 64, 64);
#else
    void *memory = NULL;
    return posix_memalign(&memory, 64, bytes + 64) ? NULL : memory;
#endif
}

void release(void *memory) {
#if defined(_WIN32)
    _aligned_free(memory);
#else
    free(memory);
#endif
}

/* ---- activations ----------------------------------------------------------------------------- */

INLINE size_t digits_size(int columns) {
    return (size_t)columns * 2 + ((size_t)columns / GROUP + 1) * sizeof(float);
}
INLINE float *sums_of(const int8_t *digits, int columns, int width) {
    return (float *)(digits + (size_t)columns * 2 * width);
}

/* The greatest magnitude. NaN compares greatest as an integer, so the result is NaN if any is. */
INLINE float largest_magnitude(const float *x, int columns) {
    vi most = {0};
    for (int i = 0; i < columns; i += LANES) {
        vi magnitude = (vi)load(x + i) & 0x7fffffff;
        vi is_more = magnitude > most;
        most = (magnitude & is_more) | (most & ~is_more);
    }
    int32_t all[LANES], best = 0;
    float value;
    memcpy(all, &most, sizeof all);
    for (int i = 0; i < LANES; i++) best = all[i] > best ? all[i] : best;
    memcpy(&value, &best, sizeof value);
    return value;
}

static void to_digits(const float *x, int columns, int8_t *tile, int place, int width,
                      int has_words) {
    float most = largest_magnitude(x, columns), *sums = sums_of(tile, columns, width) + place;
    float inverse = most > 1e-30f ? 32512.0f / most : 0.0f;
    int8_t *digits = tile + place * 2 * GROUP;
    for (int g = 0; g < columns / GROUP; g++, digits += width * 2 * GROUP) {
        int32_t values[GROUP], sum = 0;
        for (int i = 0; i < GROUP; i += LANES) {
            vi rounded = round_to_int(load(x + g * GROUP + i) * splat(inverse));
            memcpy(values + i, &rounded, sizeof rounded);
        }
        for (int i = 0; i < GROUP; i++) sum += (int16_t)values[i];
        if (has_words) { /* columns 0 and 2, then 1 and 3 of each four */
            int16_t *words = (int16_t *)digits;
            for (int i = 0; i < GROUP; i += 4) {
                words[i] = (int16_t)values[i], words[i + 1] = (int16_t)values[i + 2];
                words[i + 2] = (int16_t)values[i + 1], words[i + 3] = (int16_t)values[i + 3];
            }
        } else {
            enum { RUN = HAS_PAIRS ? 8 : GROUP }; /* high digits before their low ones */
            for (int i = 0; i < GROUP; i++) {
                int32_t value = (int16_t)values[i], high = (value + 128) >> 8;
                int8_t *place = digits + i / RUN * 2 * RUN + i % RUN;
                place[0] = (int8_t)high; /* rounded to nearest, so the low digit is signed */
                place[RUN] = (int8_t)(value - high * 256);
            }
        }
        sums[g * width] = (float)sum;
    }
    sums[columns / GROUP * width] = most / 32512.0f;
}

size_t prepared_size(const Matrix *reader) {
    if (reader->kind != FULL) return digits_size(reader->columns);
    return ((size_t)reader->columns + LANES - 1) / LANES * LANES * sizeof(float);
}

INLINE int tile_width(int first, int num_rows) {
    return num_rows - first < MAX_TILE ? num_rows - first : MAX_TILE;
}

void prepare_in_tile(int8_t *tile, const Matrix *reader, int place, int width, const float *x) {
    int columns = reader->columns;
    if (reader->kind != FULL) {
        to_digits(x, columns, tile, place, width, reads_words(reader));
        return;
    }
    float *out = (float *)tile + place * LANES;
    for (int k = 0; k < columns; k += LANES) store(out + k * width, load_some(x + k, columns - k));
}

void prepare(int8_t *prepared, const Matrix *reader, int row, int num_rows, const float *x) {
    int first = row / MAX_TILE * MAX_TILE, width = tile_width(first, num_rows);
    prepare_in_tile(prepared + first * prepared_size(reader), reader, row - first, width, x);
}

/* ---- LANES rows of a matrix times some rows of activations ------------------------------------- */

INLINE void multiply_integers(const uint8_t *block, int columns, int kind, const int8_t *digits,
                              int count, vf *out) {
    const float *sums = sums_of(digits, columns, count);
    vf total[MAX_TILE];
#pragma GCC unroll 8
    for (int m = 0; m < count; m++) total[m] = zeros();
    for (int g = 0; g < columns / GROUP; g++, sums += count, digits += count * 2 * GROUP) {
        const uint16_t *halves = (const uint16_t *)(block + integers_size(kind));
        vf scale = load_halves(halves);
        vf bias = kind == MXFP4 ? scale * splat(-12.0f) : load_halves(halves + LANES);
        vi dots[MAX_TILE];
        for (size_t at = 0; at < group_size(kind) && PREFETCH && count <= 4; at += 64)
            __builtin_prefetch(block + PREFETCH + at);
        dot_group(block, kind, digits, sums, count, dots);
#pragma GCC unroll 8
        for (int m = 0; m < count; m++) {
            total[m] = fmadd(scale, to_floats(dots[m]), total[m]);
            total[m] = fmadd(bias, splat(sums[m]), total[m]);
        }
        block += group_size(kind);
    }
#pragma GCC unroll 8
    for (int m = 0; m < count; m++) out[m] = total[m] * splat(sums[m]);
}

INLINE void float_columns(const float *const *row, int k, int left, const float *x, int count,
                          int lanes, vf acc[MAX_TILE][4]) {
    vf w[4];
#pragma GCC unroll 4
    for (int r = 0; r < lanes; r++) w[r] = load_some(row[r] + k, left);
    for (int r = 0; r < lanes && count > 3 && k % 16 == 0; r++)
        __builtin_prefetch(row[r] + k + AHEAD);
#pragma GCC unroll 8
    for (int m = 0; m < count; m++) {
        vf v = load(x + LANES * m);
#pragma GCC unroll 4
        for (int r = 0; r < lanes; r++) acc[m][r] = fmadd(w[r], v, acc[m][r]);
    }
}

/* Up to four float32 rows of a matrix times `count` of the `width` rows of a tile; results of a row of
 * activations are four floats apart. */
INLINE void float_rows(const float *weights, int stride, int columns, const float *x, int width,
                       int count, int lanes, int rows, float *out) {
    vf acc[MAX_TILE][4];
    const float *row[4];
    int k = 0;
    for (int r = 0; r < lanes; r++) row[r] = weights + (size_t)(r < rows ? r : 0) * stride;
#pragma GCC unroll 8
    for (int m = 0; m < count; m++)
#pragma GCC unroll 4
        for (int r = 0; r < lanes; r++) acc[m][r] = zeros();
    for (; k + LANES <= columns; k += LANES, x += LANES * width)
        float_columns(row, k, LANES, x, count, lanes, acc);
    if (k < columns) float_columns(row, k, columns - k, x, count, lanes, acc);
#pragma GCC unroll 8
    for (int m = 0; m < count; m++) {
        if (lanes == 4) reduce4(acc[m], out + m * 4);
        for (int r = 0; r < lanes && lanes < 4; r++) out[m * 4 + r] = reduce_add(acc[m][r]);
    }
}

/* Four rows of a matrix at a time and up to four activations; more activations in two halves, or,
 * where registers are few, with two rows of the matrix at a time. */
static void multiply_floats(const float *weights, int stride, int columns, const float *x, int count,
                            int rows, vf *out) {
    float y[MAX_TILE * 4], all[MAX_TILE][LANES] = {{0}};
    for (int first = 0; first < LANES && first < rows; first += 4) {
        const float *four = weights + (size_t)first * stride;
        int left = rows - first;
#define NARROW(n) case n: float_rows(four, stride, columns, x, n, n, 4, left, y); break;
#if LANES == 16
#define WIDE(n)                                                                                    \
    case n:                                                                                        \
        float_rows(four, stride, columns, x, n, 4, 4, left, y);                                    \
        float_rows(four, stride, columns, x + 4 * LANES, n, n - 4, 4, left, y + 16);               \
        break;
#else
        const float *second = four + (left > 2 ? 2 : 0) * (size_t)stride;
#define WIDE(n)                                                                                    \
    case n:                                                                                        \
        float_rows(four, stride, columns, x, n, n, 2, left, y);                                    \
        float_rows(second, stride, columns, x, n, n, 2, left - 2, y + 2);                          \
        break;
#endif
        switch (count) {
            NARROW(1) NARROW(2) NARROW(3) NARROW(4) WIDE(5) WIDE(6) WIDE(7) WIDE(8)
        }
        for (int m = 0; m < count; m++) memcpy(all[m] + first, y + m * 4, 4 * sizeof(float));
    }
    for (int m = 0; m < count; m++) out[m] = load(all[m]);
}

INLINE size_t block_size(const Matrix *a) {
    if (a->kind == FULL) return (size_t)a->columns * LANES * sizeof(float);
    return a->columns / GROUP * group_size(a->kind);
}

void multiply(const Matrix *a, int index, const int8_t *x, int count, int from, int columns,
              vf *out) {
    const uint8_t *block = (const uint8_t *)a->data + block_size(a) * index;
    int left = a->rows - index * LANES;
#define ROWS(n, kind) case n: multiply_integers(block, a->columns, kind, x, n, out); break;
#define KIND(kind)                                                                                 \
    case kind:                                                                                     \
        switch (count) {                                                                           \
            ROWS(1, kind) ROWS(2, kind) ROWS(3, kind) ROWS(4, kind)                                \
            ROWS(5, kind) ROWS(6, kind) ROWS(7, kind) ROWS(8, kind)                                \
        }                                                                                          \
        break;
    switch (a->kind) {
        KIND(FOUR_BITS) KIND(FIVE_BITS) KIND(SIX_BITS) KIND(EIGHT_BITS) KIND(MXFP4)
    default:
        multiply_floats((const float *)block + from, a->columns, columns,
                        (const float *)x + (size_t)from * count, count, left, out);
    }
    vf bias = zeros();
    if (a->bias && from == 0) {
        float padded[LANES] = {0};
        memcpy(padded, a->bias + index * LANES, (left < LANES ? left : LANES) * sizeof(float));
        bias = load(padded);
    }
    for (int m = 0; m < count; m++) out[m] = fmadd(out[m], splat(a->unit), bias);
}

/* ---- phases ---------------------------------------------------------------------------------- */

INLINE int tile_of(const Input *input, const Matrix *a, int first, const int8_t **x) {
    *x = input->prepared + first * prepared_size(a);
    return tile_width(first, input->rows);
}

/* Columns to multiply at once; with float32, few enough that a tile of activations stays in cache. */
INLINE int part_width(const Matrix *a, int from, int rows) {
    int left = a->columns - from; /* no small last part: every part has sums to reduce */
    return a->kind == FULL && rows > 4 && left > WIDTH + WIDTH / 2 ? WIDTH : left;
}

void project(Team *team, const Matrix *all, int num_matrices, const Input *input, float *out,
             int stride, int is_added) {
    int total = 0, start;
    for (int i = 0; i < num_matrices; i++) total += num_blocks(&all[i]);
    int size = piece_size(total, team);
    while ((start = take(team, total, size)) >= 0) {
        int end = start + size < total ? start + size : total;
        for (int first = 0, from = 0; first < input->rows;) {
            const Matrix *a = all;
            int index = start, offset = 0, columns = part_width(all, from, input->rows);
            for (; index >= num_blocks(a); a++) index -= num_blocks(a), offset += a->rows;
            for (int block = start; block < end; block++, index++) {
                const int8_t *x;
                vf y[MAX_TILE];
                if (index == num_blocks(a)) offset += a->rows, a++, index = 0;
                int count = tile_of(input, a, first, &x), left = a->rows - index * LANES;
                multiply(a, index, x, count, from, columns, y);
                for (int m = 0; m < count; m++) {
                    float *target = out + (size_t)(first + m) * stride + offset + index * LANES;
                    if (is_added || from) y[m] = y[m] + load_some(target, left);
                    store_some(target, y[m], left);
                }
            }
            from += columns;
            if (from == all->columns) first += MAX_TILE, from = 0;
        }
    }
    barrier(team);
}

void project_gated(Team *team, const Matrix *gate, const Matrix *up, const Activation *activation,
                   const Input *input, float *out, int stride) {
    int total = num_blocks(gate), start, size = piece_size(total, team);
    while ((start = take(team, total, size)) >= 0) {
        int end = start + size < total ? start + size : total;
        for (int first = 0; first < input->rows; first += MAX_TILE)
            for (int index = start; index < end; index++) {
                const int8_t *x;
                vf g[MAX_TILE], u[MAX_TILE];
                int count = tile_of(input, gate, first, &x), left = gate->rows - index * LANES;
                multiply(gate, index, x, count, 0, gate->columns, g);
                count = tile_of(input, up, first, &x);
                multiply(up, index, x, count, 0, up->columns, u);
                for (int m = 0; m < count; m++) {
                    float *target = out + (size_t)(first + m) * stride + index * LANES;
                    store_some(target, activate(activation, g[m], u[m]), left);
                }
            }
    }
    barrier(team);
}

/* ---- one linear ------------------------------------------------------------------------------ */

typedef struct {
    const Matrix *matrix;
    const float *x;
    float *out;
    int8_t *prepared;
    int rows;
} Linear;

static void linear_job(void *argument, Team *team, int index) {
    Linear *l = argument;
    int row, columns = l->matrix->columns;
    (void)index;
    while ((row = take(team, l->rows, 1)) >= 0)
        prepare(l->prepared, l->matrix, row, l->rows, l->x + (size_t)row * columns);
    barrier(team);
    Input input = {l->prepared, l->rows};
    project(team, l->matrix, 1, &input, l->out, l->matrix->rows, 0);
}

/* Multiply rows by a matrix. Returns 0, or 1 if memory allocation fails. */
int semantic_linear(const Matrix *matrix, const float *x, int rows, float *out, int threads) {
    Linear l = {matrix, x, out, allocate(rows * prepared_size(matrix)), rows};
    if (!l.prepared) return 1;
    run_job(linear_job, &l, threads);
    release(l.prepared);
    return 0;
}
