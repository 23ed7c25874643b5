/* Linears of few rows, and whole decode steps of Llama-like models, on an ARM CPU in float32.
 *
 * A decode step of a small model is some nine hundred operations of microseconds each; calling them
 * one by one takes three times as long as computing them. Here a step is one call: threads are
 * woken once and meet at a barrier after each phase, and whoever is free takes the next piece.
 *
 * Weights are float32 as they lie, or integers of 4 or 8 bits with a scale and a bias for every
 * 32 of a row. Against integers, activations are rounded to sixteen bits, as two digits of eight;
 * what is summed is exact within a group. Four rows of a matrix lie side by side, so that a
 * dot product's lanes are four results.
 *
 * `native.py` builds this file, lays out the structures, and checks the results.
 */
#include <arm_neon.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if !defined(__ARM_FEATURE_DOTPROD) || !defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
#error "this CPU has no dot products of bytes or no half precision"
#endif

#define INLINE static inline __attribute__((always_inline))
enum { GROUP = 32, LANES = 4, TILE = 8, KEYS = 128, HEADS = 3, MAX_THREADS = 64 };
enum { SPINS = 50000 }; /* a quarter of a millisecond: to sleep and be woken takes a tenth */
enum { WIDTH = 512, AHEAD = 128 }; /* of float32: columns at once, and those fetched early */
enum { SIDE = 8, BLOCK = 64, QUERIES = 96 }; /* of a square of scores; keys and queries of a tile */
#define UNSEEN -1e30f
enum { FULL = 0, FOUR_BITS = 4, EIGHT_BITS = 8 };

typedef struct {
    const void *data;   /* float32 rows, or blocks of four rows by 32 columns */
    const float *bias;  /* or NULL */
    int32_t kind, rows, columns;
    float unit; /* what scales and biases of groups are multiples of */
} Matrix;

typedef struct {
    const float *norm, *mlp_norm, *query_norm, *key_norm; /* the last two may be NULL */
    Matrix inputs[3];                                     /* queries, keys, values; or one for all */
    Matrix output, gate, up, down;
    int32_t num_inputs, window; /* 0: sees everything */
} Layer;

typedef struct {
    const Layer *layers;
    const float *norm;
    Matrix head;
    int32_t num_layers, hidden, inner, heads, kv_heads, dim;
    float eps, scaling;
} Model;

/* One token: its sequence's buffers, [layers, heads, capacity, dim], and its place there. */
typedef struct {
    float *keys, *values;
    int64_t capacity, position;
} Row;

/* ---- threads ---------------------------------------------------------------------------------- */

typedef struct {
    int count;
    atomic_int next, arrived, phase, sleepers;
} Team;

typedef void (*Job)(void *about, Team *team);

static struct {
    pthread_mutex_t one_job, lock;
    pthread_cond_t wake;
    int started;
    atomic_int generation, working, sleepers;
    Job job;
    void *about;
    Team *team;
} pool = {.one_job = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER};

/* Wait until a word has another value. Who waits for long sleeps: where other programs want the
   cores, one who spins or yields has had its share when the word changes, and one who slept comes
   first. */
static void await(atomic_int *word, int value, atomic_int *sleepers) {
    for (int spins = 0; spins < SPINS; spins++) {
        if (atomic_load_explicit(word, memory_order_acquire) != value) return;
        __asm__ volatile("yield");
    }
    atomic_fetch_add(sleepers, 1);
    while (atomic_load(word) == value) {
#ifdef __linux__
        syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
#else
        sched_yield();
#endif
    }
    atomic_fetch_sub(sleepers, 1);
}

/* Wake who sleeps, after the word was changed. */
INLINE void rouse(atomic_int *word, atomic_int *sleepers) {
    (void)word;
    if (!atomic_load(sleepers)) return;
#ifdef __linux__
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, MAX_THREADS, NULL, NULL, 0);
#endif
}

static void meet(Team *team) {
    int phase = atomic_load_explicit(&team->phase, memory_order_relaxed);
    if (atomic_fetch_add(&team->arrived, 1) == team->count - 1) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team->next, 0, memory_order_relaxed);
        atomic_store(&team->phase, phase + 1);
        rouse(&team->phase, &team->sleepers);
    } else {
        await(&team->phase, phase, &team->sleepers);
    }
}

/* The next piece of a phase, or -1. */
INLINE int take(Team *team, int count, int size) {
    int start = atomic_fetch_add_explicit(&team->next, size, memory_order_relaxed);
    return start < count ? start : -1;
}

static void *work(void *argument) {
    int index = (int)(intptr_t)argument, seen = 0;
    for (;;) {
        pthread_mutex_lock(&pool.lock);
        while (atomic_load(&pool.generation) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
        seen = atomic_load(&pool.generation);
        Team *team = pool.team;
        int is_in = team && index < team->count;
        pthread_mutex_unlock(&pool.lock);
        if (is_in) {
            pool.job(pool.about, team);
            if (atomic_fetch_sub(&pool.working, 1) == 1) rouse(&pool.working, &pool.sleepers);
        }
    }
    return NULL;
}

static void run(Job job, void *about, int threads) {
    Team team = {.count = 1};
    pthread_mutex_lock(&pool.one_job);
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    for (; pool.started < threads - 1; pool.started++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, (void *)(intptr_t)(pool.started + 1))) break;
        pthread_detach(thread);
    }
    if (threads > pool.started + 1) threads = pool.started + 1;
    team.count = threads < 1 ? 1 : threads;
    if (team.count > 1) {
        pthread_mutex_lock(&pool.lock);
        pool.job = job, pool.about = about, pool.team = &team;
        atomic_store(&pool.working, team.count - 1);
        atomic_fetch_add(&pool.generation, 1);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    job(about, &team);
    if (team.count > 1) {
        for (int left; (left = atomic_load(&pool.working));)
            await(&pool.working, left, &pool.sleepers);
        pthread_mutex_lock(&pool.lock);
        pool.team = NULL;
        pthread_mutex_unlock(&pool.lock);
    }
    pthread_mutex_unlock(&pool.one_job);
}

/* ---- activations as digits -------------------------------------------------------------------- */

/* Up to eight rows side by side: of each group, every row's 32 high digits and 32 low ones in turn;
 * then of each group every row's sum, and every row's step. */
INLINE size_t digits_size(int columns) {
    return (size_t)columns * 2 + ((size_t)columns / GROUP + 1) * sizeof(float);
}
INLINE float *sums_of(const int8_t *digits, int columns, int width) {
    return (float *)(digits + (size_t)columns * 2 * width);
}

static void to_digits(const float *x, int columns, int8_t *tile, int place, int width) {
    float32x4_t largest = vdupq_n_f32(0);
    for (int i = 0; i < columns; i += 4) largest = vmaxq_f32(largest, vabsq_f32(vld1q_f32(x + i)));
    float most = vmaxvq_f32(largest), *sums = sums_of(tile, columns, width) + place;
    int8_t *digits = tile + place * 2 * GROUP;
    float inverse = most > 1e-30f ? 32512.0f / most : 0.0f;
    for (int g = 0; g < columns / GROUP; g++, digits += width * 2 * GROUP) {
        int32x4_t sum = vdupq_n_s32(0);
        for (int half = 0; half < 2; half++) {
            const float *from = x + g * GROUP + half * 16;
            int8x8_t high[2], low[2];
            for (int part = 0; part < 2; part++) {
                int32x4_t a = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(from + part * 8), inverse));
                int32x4_t b = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(from + part * 8 + 4), inverse));
                sum = vaddq_s32(sum, vaddq_s32(a, b));
                int16x8_t both = vcombine_s16(vmovn_s32(a), vmovn_s32(b));
                high[part] = vrshrn_n_s16(both, 8); /* the nearest, so that the rest has a sign */
                low[part] = vmovn_s16(both);
            }
            vst1q_s8(digits + half * 16, vcombine_s8(high[0], high[1]));
            vst1q_s8(digits + GROUP + half * 16, vcombine_s8(low[0], low[1]));
        }
        sums[g * width] = (float)vaddvq_s32(sum);
    }
    sums[columns / GROUP * width] = most / 32512.0f;
}

/* ---- four rows of a matrix times some rows of activations ------------------------------------- */

/* A group: eight times four columns of four rows. */
INLINE int32x4_t dots(int32x4_t sum, const int8x16_t *w, const int8_t *digits) {
    int8x16_t first = vld1q_s8(digits), second = vld1q_s8(digits + 16);
    sum = vdotq_laneq_s32(sum, w[0], first, 0), sum = vdotq_laneq_s32(sum, w[1], first, 1);
    sum = vdotq_laneq_s32(sum, w[2], first, 2), sum = vdotq_laneq_s32(sum, w[3], first, 3);
    sum = vdotq_laneq_s32(sum, w[4], second, 0), sum = vdotq_laneq_s32(sum, w[5], second, 1);
    sum = vdotq_laneq_s32(sum, w[6], second, 2), sum = vdotq_laneq_s32(sum, w[7], second, 3);
    return sum;
}

/* Low digits are added to the high ones' sum; of few rows apart, so that neither waits. */
INLINE void integers(const uint8_t *block, int columns, int bits, const int8_t *digits, int count,
                     float32x4_t *out) {
    const float *sums = sums_of(digits, columns, count);
    int is_apart = count <= 4;
    float32x4_t total[TILE];
#pragma GCC unroll 8
    for (int m = 0; m < count; m++) total[m] = vdupq_n_f32(0);
    for (int g = 0; g < columns / GROUP; g++, block += 16 + 16 * bits, sums += count) {
        int8x16_t w[8];
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            if (bits == 8) {
                w[v] = vld1q_s8((const int8_t *)block + v * 16);
                w[v + 4] = vld1q_s8((const int8_t *)block + 64 + v * 16);
            } else {
                uint8x16_t pairs = vld1q_u8(block + v * 16);
                w[v] = vreinterpretq_s8_u8(vandq_u8(pairs, vdupq_n_u8(15)));
                w[v + 4] = vreinterpretq_s8_u8(vshrq_n_u8(pairs, 4));
            }
        }
        float16x8_t about = vld1q_f16((const float16_t *)(block + 16 * bits));
        float32x4_t scale = vcvt_f32_f16(vget_low_f16(about)), bias = vcvt_high_f32_f16(about);
#pragma GCC unroll 8
        for (int m = 0; m < count; m++, digits += 2 * GROUP) {
            int32x4_t high = vshlq_n_s32(dots(vdupq_n_s32(0), w, digits), 8);
            int32x4_t low = dots(is_apart ? vdupq_n_s32(0) : high, w, digits + GROUP);
            if (is_apart) low = vaddq_s32(high, low);
            total[m] = vfmaq_f32(total[m], scale, vcvtq_f32_s32(low));
            total[m] = vfmaq_n_f32(total[m], bias, sums[m]);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < count; m++) out[m] = vmulq_n_f32(total[m], sums[m]);
}

INLINE float32x4_t across(const float32x4_t *v) {
    return vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3]));
}

/* Rows of activations lie side by side, four columns of each in turn. */
INLINE void floats(const float *block, int stride, int columns, const float *x, int count, int lanes,
                   int rows, float *out) {
    float32x4_t acc[TILE][LANES];
    const float *row[LANES];
    for (int r = 0; r < lanes; r++) row[r] = block + (size_t)(r < rows ? r : 0) * stride;
#pragma GCC unroll 8
    for (int m = 0; m < count; m++)
#pragma GCC unroll 4
        for (int r = 0; r < lanes; r++) acc[m][r] = vdupq_n_f32(0);
    for (int k = 0; k < columns; k += 4, x += 4 * count) {
        float32x4_t w[LANES];
#pragma GCC unroll 4
        for (int r = 0; r < lanes; r++) w[r] = vld1q_f32(row[r] + k);
        for (int r = 0; r < lanes && count > 3 && k % 16 == 0; r++)
            __builtin_prefetch(row[r] + k + AHEAD);
#pragma GCC unroll 8
        for (int m = 0; m < count; m++) {
            float32x4_t v = vld1q_f32(x + 4 * m);
#pragma GCC unroll 4
            for (int r = 0; r < lanes; r++) acc[m][r] = vfmaq_f32(acc[m][r], w[r], v);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < count; m++)
#pragma GCC unroll 4
        for (int r = 0; r < lanes; r++) out[m * LANES + r] = vaddvq_f32(acc[m][r]);
}

/* Four results of up to eight rows: of more than four, two at a time, for want of registers. */
static void multiply_floats(const float *block, int stride, int columns, const float *x, int count,
                            int rows, float32x4_t *out) {
    float y[TILE * LANES];
    const float *second = block + (rows > 2 ? 2 : 0) * (size_t)stride;
#define NARROW(n) case n: floats(block, stride, columns, x, n, 4, rows, y); break;
#define WIDE(n)                                                                                    \
    case n:                                                                                        \
        floats(block, stride, columns, x, n, 2, rows, y);                                          \
        floats(second, stride, columns, x, n, 2, rows - 2, y + 2);                                 \
        break;
    switch (count) {
        NARROW(1) NARROW(2) NARROW(3) NARROW(4) WIDE(5) WIDE(6) WIDE(7) WIDE(8)
    }
    for (int m = 0; m < count; m++) out[m] = vld1q_f32(y + m * LANES);
}

INLINE size_t block_size(const Matrix *a) {
    size_t groups = a->columns / GROUP;
    if (a->kind == FULL) return (size_t)a->columns * LANES * sizeof(float);
    return groups * (a->kind == FOUR_BITS ? 80 : 144);
}

/* Four results for each of up to eight rows, which are prepared as the matrix wants them. */
static void multiply(const Matrix *a, int index, const int8_t *x, int count, int from, int columns,
                     float32x4_t *out) {
    const uint8_t *block = (const uint8_t *)a->data + block_size(a) * index;
    int left = a->rows - index * LANES;
#define CASE(n, bits) case n: integers(block, a->columns, bits, x, n, out); break;
#define CASES(bits)                                                                                \
    switch (count) {                                                                               \
        CASE(1, bits) CASE(2, bits) CASE(3, bits) CASE(4, bits)                                    \
        CASE(5, bits) CASE(6, bits) CASE(7, bits) CASE(8, bits)                                    \
    }
    if (a->kind == FOUR_BITS)
        CASES(4)
    else if (a->kind == EIGHT_BITS)
        CASES(8)
    else
        multiply_floats((const float *)block + from, a->columns, columns,
                        (const float *)x + (size_t)from * count, count, left, out);
    float32x4_t bias = vdupq_n_f32(0);
    if (a->bias && from == 0) {
        float padded[LANES] = {0};
        memcpy(padded, a->bias + index * LANES, (left < LANES ? left : LANES) * sizeof(float));
        bias = vld1q_f32(padded);
    }
    for (int m = 0; m < count; m++) out[m] = vfmaq_n_f32(bias, out[m], a->unit);
}

INLINE void put(float *target, float32x4_t value, int left) {
    if (left >= LANES) {
        vst1q_f32(target, value);
    } else {
        float all[LANES];
        vst1q_f32(all, value);
        memcpy(target, all, left * sizeof(float));
    }
}

/* Rows of activations, prepared as the matrices that read them want them. */
typedef struct {
    const int8_t *prepared;
    int rows;
} Input;

INLINE size_t prepared_size(const Matrix *a) {
    return a->kind == FULL ? (size_t)a->columns * sizeof(float) : digits_size(a->columns);
}

static void prepare(int8_t *prepared, const Matrix *reader, int row, int num_rows, const float *x) {
    int first = row / TILE * TILE, width = num_rows - first < TILE ? num_rows - first : TILE;
    int8_t *tile = prepared + first * prepared_size(reader);
    if (reader->kind != FULL) {
        to_digits(x, reader->columns, tile, row - first, width);
        return;
    }
    float *out = (float *)tile + (row - first) * 4;
    for (int k = 0; k < reader->columns; k += 4) vst1q_f32(out + k * width, vld1q_f32(x + k));
}

INLINE int tile(const Input *input, const Matrix *a, int first, const int8_t **x) {
    *x = input->prepared + first * prepared_size(a);
    return input->rows - first < TILE ? input->rows - first : TILE;
}

INLINE int num_blocks(const Matrix *a) { return (a->rows + LANES - 1) / LANES; }
INLINE int piece(int blocks, const Team *team) {
    int size = blocks / (team->count * 8);
    return size < 1 ? 1 : size > 16 ? 16 : size;
}

/* Columns that are taken at once: of float32 so many that eight rows of activations stay near. */
INLINE int part(const Matrix *a, int from, int rows) {
    int left = a->columns - from;
    return a->kind == FULL && rows > LANES && left > WIDTH ? WIDTH : left;
}

/* Everything of one phase; results are put at `out`, or added to what is there. */
static void project(Team *team, const Matrix *all, int num_matrices, const Input *input, float *out,
                    int stride, int is_added) {
    int total = 0, start;
    for (int i = 0; i < num_matrices; i++) total += num_blocks(&all[i]);
    int size = piece(total, team);
    while ((start = take(team, total, size)) >= 0) {
        int end = start + size < total ? start + size : total;
        for (int first = 0, from = 0; first < input->rows;) {
            const Matrix *a = all;
            int index = start, offset = 0, columns = part(all, from, input->rows);
            for (; index >= num_blocks(a); a++) index -= num_blocks(a), offset += a->rows;
            for (int block = start; block < end; block++, index++) {
                const int8_t *x;
                float32x4_t y[TILE];
                if (index == num_blocks(a)) offset += a->rows, a++, index = 0;
                int count = tile(input, a, first, &x), left = a->rows - index * LANES;
                multiply(a, index, x, count, from, columns, y);
                for (int m = 0; m < count; m++) {
                    float *target = out + (size_t)(first + m) * stride + offset + index * LANES;
                    if (is_added || from) y[m] = vaddq_f32(y[m], vld1q_f32(target));
                    put(target, y[m], left);
                }
            }
            from += columns;
            if (from == all->columns) first += TILE, from = 0;
        }
    }
    meet(team);
}

/* e to the power of four numbers, none of them above 88; within 2e-7 of its value. Added to a
 * number whose last bit is one, a power of two is rounded, and lies where an exponent is added. */
INLINE float32x4_t exponential(float32x4_t x) {
    x = vmaxq_f32(x, vdupq_n_f32(-86.0f));
    float32x4_t ones = vdupq_n_f32(12582912.0f), shifted = vfmaq_n_f32(ones, x, 1.44269504f);
    float32x4_t n = vsubq_f32(shifted, ones), p = vdupq_n_f32(1.9875691500e-4f);
    x = vfmsq_n_f32(vfmsq_n_f32(x, n, 0.693359375f), n, -2.12194440e-4f);
    p = vfmaq_f32(vdupq_n_f32(1.3981999507e-3f), p, x);
    p = vfmaq_f32(vdupq_n_f32(8.3334519073e-3f), p, x);
    p = vfmaq_f32(vdupq_n_f32(4.1665795894e-2f), p, x);
    p = vfmaq_f32(vdupq_n_f32(1.6666665459e-1f), p, x);
    p = vfmaq_f32(vdupq_n_f32(5.0000001201e-1f), p, x);
    p = vaddq_f32(vfmaq_f32(x, p, vmulq_f32(x, x)), vdupq_n_f32(1.0f));
    int32x4_t power = vshlq_n_s32(vreinterpretq_s32_f32(shifted), 23);
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(p), power));
}

/* silu(gate) * up */
static void gated(Team *team, const Layer *layer, const Input *input, float *out, int stride) {
    int total = num_blocks(&layer->gate), start, size = piece(total, team);
    while ((start = take(team, total, size)) >= 0) {
        int end = start + size < total ? start + size : total;
        for (int first = 0; first < input->rows; first += TILE)
            for (int index = start; index < end; index++) {
                const int8_t *x;
                float32x4_t g[TILE], u[TILE], one = vdupq_n_f32(1.0f);
                int count = tile(input, &layer->gate, first, &x);
                multiply(&layer->gate, index, x, count, 0, layer->gate.columns, g);
                count = tile(input, &layer->up, first, &x);
                multiply(&layer->up, index, x, count, 0, layer->up.columns, u);
                for (int m = 0; m < count; m++) {
                    float32x4_t least = vmaxq_f32(g[m], vdupq_n_f32(-86.0f));
                    float32x4_t sigmoid = vdivq_f32(one, vaddq_f32(one, exponential(vnegq_f32(least))));
                    float *target = out + (size_t)(first + m) * stride + index * LANES;
                    vst1q_f32(target, vmulq_f32(vmulq_f32(g[m], sigmoid), u[m]));
                }
            }
    }
    meet(team);
}

/* ---- a step ----------------------------------------------------------------------------------- */

typedef struct {
    const Model *model;
    const Row *rows;
    const float *cos, *sin; /* of each row */
    const int32_t *last;    /* rows whose logits are wanted */
    float *hidden, *logits;
    int32_t num_rows, num_last, num_tiles, num_single, num_shares; /* threads may share a row's keys */
    int32_t *tiles, *single, *place; /* first row and number of rows; rows in none; where a row is there */
    float *normed, *inputs, *attended, *inner, *parts;
    int8_t *digits; /* what the next matrix reads */
} Step;

static void normalise(const float *x, const float *weight, int size, float eps, float *out) {
    float32x4_t sum = vdupq_n_f32(0);
    for (int i = 0; i < size; i += 4) {
        float32x4_t v = vld1q_f32(x + i);
        sum = vfmaq_f32(sum, v, v);
    }
    float scale = 1.0f / sqrtf(vaddvq_f32(sum) / (float)size + eps);
    for (int i = 0; i < size; i += 4)
        vst1q_f32(out + i, vmulq_f32(vld1q_f32(weight + i), vmulq_n_f32(vld1q_f32(x + i), scale)));
}

static void norm_phase(Step *s, Team *team, const float *weight, const Matrix *reader) {
    int size = s->model->hidden, row;
    while ((row = take(team, s->num_rows, 1)) >= 0) {
        float *out = s->normed + (size_t)row * size;
        normalise(s->hidden + (size_t)row * size, weight, size, s->model->eps, out);
        prepare(s->digits, reader, row, s->num_rows, out);
    }
    meet(team);
}

static void turn(float *x, const float *norm, const Model *m, const float *cos, const float *sin,
                 float scale) {
    int half = m->dim / 2;
    if (norm) normalise(x, norm, m->dim, m->eps, x);
    for (int i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = (a * cos[i] - b * sin[i]) * scale;
        x[i + half] = (b * cos[i + half] + a * sin[i + half]) * scale;
    }
}

/* Turn queries and keys to their positions, and append keys and values to the buffers. */
static void append_phase(Step *s, Team *team, int index) {
    const Model *m = s->model;
    const Layer *layer = &m->layers[index];
    int stride = (m->heads + 2 * m->kv_heads) * m->dim, row;
    while ((row = take(team, s->num_rows, 1)) >= 0) {
        const Row *r = &s->rows[row];
        const float *cos = s->cos + row * m->dim, *sin = s->sin + row * m->dim;
        float *x = s->inputs + (size_t)row * stride;
        for (int h = 0; h < m->heads; h++, x += m->dim)
            turn(x, layer->query_norm, m, cos, sin, m->scaling);
        for (int h = 0; h < m->kv_heads; h++, x += m->dim) {
            size_t place = (((size_t)index * m->kv_heads + h) * r->capacity + r->position) * m->dim;
            turn(x, layer->key_norm, m, cos, sin, 1.0f);
            memcpy(r->keys + place, x, m->dim * sizeof(float));
            memcpy(r->values + place, x + m->kv_heads * m->dim, m->dim * sizeof(float));
        }
    }
    meet(team);
}

/* Heads that share keys over some of them: weighted values, the greatest score, and the sum of
 * weights. Several at once, so that none waits for its own last sum. */
INLINE void attend(const float *query, int heads, const float *keys, const float *values, int count,
                   int dim, float *part, size_t stride) {
    float scores[HEADS][KEYS + 4];
    for (int j = 0; j < count; j += 4) {
        float32x4_t acc[HEADS][4];
        const float *k[4];
        for (int i = 0; i < 4; i++) k[i] = keys + (size_t)(j + i < count ? j + i : j) * dim;
#pragma GCC unroll 3
        for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) acc[h][i] = vdupq_n_f32(0);
        for (int d = 0; d < dim; d += 4) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                float32x4_t key = vld1q_f32(k[i] + d);
#pragma GCC unroll 3
                for (int h = 0; h < heads; h++)
                    acc[h][i] = vfmaq_f32(acc[h][i], vld1q_f32(query + h * dim + d), key);
            }
        }
#pragma GCC unroll 3
        for (int h = 0; h < heads; h++) vst1q_f32(scores[h] + j, across(acc[h]));
    }
    for (int h = 0; h < heads; h++) {
        float32x4_t most = vdupq_n_f32(-INFINITY), total = vdupq_n_f32(0);
        for (int j = count; j % 4; j++) scores[h][j] = -INFINITY;
        for (int j = 0; j < count; j += 4) most = vmaxq_f32(most, vld1q_f32(scores[h] + j));
        most = vdupq_n_f32(vmaxvq_f32(most));
        for (int j = 0; j < count; j += 4) {
            float32x4_t score = vld1q_f32(scores[h] + j), zero = vdupq_n_f32(0);
            float32x4_t weight = exponential(vsubq_f32(score, most));
            weight = vbslq_f32(vceqq_f32(score, vdupq_n_f32(-INFINITY)), zero, weight);
            vst1q_f32(scores[h] + j, weight);
            total = vaddq_f32(total, weight);
        }
        part[h * stride + dim] = vgetq_lane_f32(most, 0);
        part[h * stride + dim + 1] = vaddvq_f32(total);
    }
    for (int d = 0; d < dim; d += 8) { /* sixteen sums or fewer: two columns of four for each head */
        float32x4_t acc[HEADS][2];
        const float *v = values + d;
        int has_two = d + 4 < dim;
#pragma GCC unroll 3
        for (int h = 0; h < heads; h++) acc[h][0] = acc[h][1] = vdupq_n_f32(0);
        for (int j = 0; j < count; j++, v += dim) {
            float32x4_t first = vld1q_f32(v), second = vld1q_f32(has_two ? v + 4 : v);
#pragma GCC unroll 3
            for (int h = 0; h < heads; h++) {
                acc[h][0] = vfmaq_n_f32(acc[h][0], first, scores[h][j]);
                acc[h][1] = vfmaq_n_f32(acc[h][1], second, scores[h][j]);
            }
        }
        for (int h = 0; h < heads; h++) {
            vst1q_f32(part + h * stride + d, acc[h][0]);
            if (has_two) vst1q_f32(part + h * stride + d + 4, acc[h][1]);
        }
    }
}

static void attend_some(const float *query, int heads, const float *keys, const float *values,
                        int count, int dim, float *part, size_t stride) {
    switch (heads) {
    case 1: attend(query, 1, keys, values, count, dim, part, stride); break;
    case 2: attend(query, 2, keys, values, count, dim, part, stride); break;
    default: attend(query, 3, keys, values, count, dim, part, stride);
    }
}

INLINE int64_t first_seen(const Row *r, const Layer *layer) {
    int64_t first = layer->window ? r->position + 1 - layer->window : 0;
    return first > 0 ? first : 0;
}
INLINE float *part_of(const Step *s, int single, int head, int share) {
    const Model *m = s->model;
    return s->parts + (((size_t)single * m->heads + head) * s->num_shares + share) * (m->dim + 4);
}

/* Add a piece to others of the same head. */
static void merge(float *part, const float *other, int dim) {
    float most = fmaxf(part[dim], other[dim]);
    float mine = expf(part[dim] - most), its = expf(other[dim] - most);
    for (int d = 0; d < dim; d++) part[d] = part[d] * mine + other[d] * its;
    part[dim] = most;
    part[dim + 1] = part[dim + 1] * mine + other[dim + 1] * its;
}

/* Heads that share keys take a piece of them one after the other, while it is in the cache. Where
 * there are few rows, several threads share a row's pieces. */
static void attend_alone(Step *s, int index, int item) {
    const Model *m = s->model;
    int shared = m->heads / m->kv_heads, stride = (m->heads + 2 * m->kv_heads) * m->dim;
    int single = item % s->num_single, head = item / s->num_single % m->kv_heads;
    int share = item / s->num_single / m->kv_heads, row = s->single[single];
    float other[HEADS * (m->dim + 4)];
    const Row *r = &s->rows[row];
    int64_t start = first_seen(r, &m->layers[index]) + (int64_t)share * KEYS;
    for (int is_first = 1; start <= r->position; start += s->num_shares * KEYS, is_first = 0) {
        int count = r->position + 1 - start < KEYS ? (int)(r->position + 1 - start) : KEYS;
        size_t place = (((size_t)index * m->kv_heads + head) * r->capacity + start) * m->dim;
        for (int h = head * shared, some; h < (head + 1) * shared; h += some) {
            int left = (head + 1) * shared - h;
            some = left == 4 ? 2 : left < HEADS ? left : HEADS;
            const float *query = s->inputs + (size_t)row * stride + h * m->dim;
            float *part = part_of(s, single, h, share);
            size_t step = is_first ? s->num_shares * (size_t)(m->dim + 4) : (size_t)m->dim + 4;
            attend_some(query, some, r->keys + place, r->values + place, count, m->dim,
                        is_first ? part : other, step);
            for (int i = 0; i < some && !is_first; i++)
                merge(part_of(s, single, h + i, share), other + i * (m->dim + 4), m->dim);
        }
    }
}

/* ---- attention of many rows: tiles of queries, whose lanes are eight of them ------------------- */

/* Eight numbers of y for eight of x, summed over `count`. */
INLINE void square(const float *x, const float *y, size_t y_stride, int count,
                   float32x4_t acc[SIDE][2]) {
    for (int k = 0; k < count; k++, x += SIDE, y += y_stride) {
        float32x4_t a = vld1q_f32(x), b = vld1q_f32(x + 4), c = vld1q_f32(y), d = vld1q_f32(y + 4);
#define LANE(j, v)                                                                                 \
    acc[j][0] = vfmaq_laneq_f32(acc[j][0], a, v, j % 4);                                           \
    acc[j][1] = vfmaq_laneq_f32(acc[j][1], b, v, j % 4);
        LANE(0, c) LANE(1, c) LANE(2, c) LANE(3, c) LANE(4, d) LANE(5, d) LANE(6, d) LANE(7, d)
    }
}

/* Eight rows of numbers as columns of a panel; those that are not there are zero. */
static void stand_up(const float *const *rows, int count, int dim, float *panel) {
    for (int half = 0; half < SIDE; half += 4)
        for (int d = 0; d < dim; d += 4) {
            float32x4_t v[4];
            for (int i = 0; i < 4; i++)
                v[i] = half + i < count ? vld1q_f32(rows[half + i] + d) : vdupq_n_f32(0);
            float32x4_t a = vzip1q_f32(v[0], v[2]), b = vzip2q_f32(v[0], v[2]);
            float32x4_t e = vzip1q_f32(v[1], v[3]), f = vzip2q_f32(v[1], v[3]);
            float *out = panel + d * SIDE + half;
            vst1q_f32(out, vzip1q_f32(a, e)), vst1q_f32(out + SIDE, vzip2q_f32(a, e));
            vst1q_f32(out + 2 * SIDE, vzip1q_f32(b, f));
            vst1q_f32(out + 3 * SIDE, vzip2q_f32(b, f));
        }
}

/* A panel of queries and what it has seen so far, [dim][8] each. */
typedef struct {
    float *queries, *sums;
    int64_t first[SIDE], last[SIDE]; /* what each of them may see */
    float most[SIDE], total[SIDE];
} Panel;

static void hide(const Panel *p, int64_t start, int count, float *scores) {
    for (int j = 0; j < count; j++)
        for (int i = 0; i < SIDE; i++)
            if (start + j > p->last[i] || start + j < p->first[i]) scores[j * SIDE + i] = UNSEEN;
}

/* Some keys, which stand in panels, and their values. */
static void look(Panel *p, const float *keys, const float *values, int64_t start, int count,
                 int dim) {
    float scores[BLOCK * SIDE];
    int64_t least = p->last[0], latest = p->first[0], end = p->last[0];
    for (int i = 1; i < SIDE; i++) {
        if (p->last[i] < least) least = p->last[i];
        if (p->last[i] > end) end = p->last[i];
        if (p->first[i] > latest) latest = p->first[i];
    }
    if (start > end) return;
    for (int j = 0; j < count; j += SIDE) {
        float32x4_t acc[SIDE][2] = {0};
        square(p->queries, keys + (size_t)j * dim, SIDE, dim, acc);
        for (int i = 0; i < SIDE; i++)
            vst1q_f32(scores + (j + i) * SIDE, acc[i][0]), vst1q_f32(scores + (j + i) * SIDE + 4, acc[i][1]);
    }
    if (start + count - 1 > least || start < latest) hide(p, start, count, scores);
    float32x4_t shrink[2];
    for (int half = 0; half < 2; half++) {
        float *column = scores + 4 * half;
        float32x4_t before = vld1q_f32(p->most + 4 * half), most = before, total = vdupq_n_f32(0);
        for (int j = 0; j < count; j++) most = vmaxq_f32(most, vld1q_f32(column + j * SIDE));
        for (int j = 0; j < count; j++) {
            float32x4_t weight = exponential(vsubq_f32(vld1q_f32(column + j * SIDE), most));
            vst1q_f32(column + j * SIDE, weight);
            total = vaddq_f32(total, weight);
        }
        shrink[half] = exponential(vsubq_f32(before, most));
        vst1q_f32(p->most + 4 * half, most);
        vst1q_f32(p->total + 4 * half,
                  vfmaq_f32(total, vld1q_f32(p->total + 4 * half), shrink[half]));
    }
    for (int d = 0; d < dim; d += SIDE) {
        float *sums = p->sums + d * SIDE;
        float32x4_t acc[SIDE][2];
        for (int i = 0; i < SIDE; i++)
            for (int half = 0; half < 2; half++)
                acc[i][half] = vmulq_f32(vld1q_f32(sums + i * SIDE + half * 4), shrink[half]);
        square(scores, values + d, dim, count, acc);
        for (int i = 0; i < SIDE; i++)
            vst1q_f32(sums + i * SIDE, acc[i][0]), vst1q_f32(sums + i * SIDE + 4, acc[i][1]);
    }
}

/* Rows that follow each other, and all heads that share keys: each key is read once for them. */
static void attend_tile(Step *s, int index, int item) {
    const Model *m = s->model;
    const int32_t *tile = s->tiles + 2 * (s->num_tiles - 1 - item / m->kv_heads);
    int head = item % m->kv_heads, shared = m->heads / m->kv_heads, dim = m->dim;
    int stride = (m->heads + 2 * m->kv_heads) * dim, count = tile[1] * shared;
    const Row *rows = s->rows + tile[0];
    const float *above = s->inputs + (size_t)tile[0] * stride + head * shared * dim;
    Panel panels[QUERIES / SIDE];
    float queries[QUERIES * dim], sums[QUERIES * dim], keys[BLOCK * dim];
    int num_panels = (count + SIDE - 1) / SIDE;
    memset(sums, 0, (size_t)num_panels * SIDE * dim * sizeof(float));
    for (int n = 0; n < num_panels; n++) {
        Panel *p = &panels[n];
        const float *those[SIDE];
        p->queries = queries + n * SIDE * dim, p->sums = sums + n * SIDE * dim;
        for (int i = 0; i < SIDE; i++) {
            int at = n * SIDE + i < count ? n * SIDE + i : count - 1, row = at / shared;
            those[i] = above + (size_t)row * stride + at % shared * dim;
            p->first[i] = first_seen(&rows[row], &m->layers[index]);
            p->last[i] = rows[row].position, p->most[i] = UNSEEN, p->total[i] = 0.0f;
        }
        stand_up(those, SIDE, dim, p->queries);
    }
    int64_t start = panels[0].first[0], end = rows[tile[1] - 1].position + 1;
    size_t place = ((size_t)index * m->kv_heads + head) * rows->capacity;
    for (; start < end; start += BLOCK) {
        int some = end - start < BLOCK ? (int)(end - start) : BLOCK;
        for (int j = 0; j < some; j += SIDE) {
            const float *those[SIDE];
            for (int i = 0; i < SIDE; i++) those[i] = rows->keys + (place + start + j + i) * dim;
            stand_up(those, some - j < SIDE ? some - j : SIDE, dim, keys + (size_t)j * dim);
        }
        for (int n = 0; n < num_panels; n++)
            look(&panels[n], keys, rows->values + (place + start) * dim, start, some, dim);
    }
    for (int at = 0; at < count; at++) {
        const Panel *p = &panels[at / SIDE];
        int row = tile[0] + at / shared, i = at % SIDE;
        float *out = s->attended + ((size_t)row * m->heads + head * shared + at % shared) * dim;
        for (int d = 0; d < dim; d++) out[d] = p->sums[d * SIDE + i] / p->total[i];
    }
}

/* Rows that follow each other in a sequence make tiles where they are enough to fill a panel. */
static void find_tiles(Step *s) {
    int shared = s->model->heads / s->model->kv_heads, most = QUERIES / shared;
    memset(s->place, -1, s->num_rows * sizeof(int32_t));
    for (int row = 0, end; row < s->num_rows; row = end) {
        const Row *first = &s->rows[row];
        for (end = row + 1; end < s->num_rows && end - row < most; end++)
            if (s->rows[end].keys != first->keys ||
                s->rows[end].position != first->position + end - row) break;
        if ((end - row) * shared >= SIDE && s->model->dim % SIDE == 0 && most > 1)
            s->tiles[2 * s->num_tiles] = row, s->tiles[2 * s->num_tiles++ + 1] = end - row;
        else
            for (int i = row; i < end; i++) s->place[i] = s->num_single, s->single[s->num_single++] = i;
    }
}

/* The longest, which are the last, first: nobody waits for them at the end. */
static void attend_phase(Step *s, Team *team, int index) {
    int heads = s->model->kv_heads, tiled = s->num_tiles * heads, item;
    while ((item = take(team, tiled + s->num_single * heads * s->num_shares, 1)) >= 0) {
        if (item < tiled)
            attend_tile(s, index, item);
        else
            attend_alone(s, index, item - tiled);
    }
    meet(team);
}

/* Put each head's parts together. */
static void join_phase(Step *s, Team *team, int index) {
    const Model *m = s->model;
    int row;
    while ((row = take(team, s->num_rows, 1)) >= 0) {
        const Row *r = &s->rows[row];
        int single = s->place[row];
        int64_t count = r->position + 1 - first_seen(r, &m->layers[index]);
        float *attended = s->attended + (size_t)row * m->heads * m->dim, *out = attended;
        for (int h = 0; h < m->heads && single >= 0; h++, out += m->dim) {
            float *part = part_of(s, single, h, 0);
            for (int share = 1; share < s->num_shares && (int64_t)share * KEYS < count; share++)
                merge(part, part_of(s, single, h, share), m->dim);
            for (int d = 0; d < m->dim; d++) out[d] = part[d] / part[m->dim + 1];
        }
        prepare(s->digits, &m->layers[index].output, row, s->num_rows, attended);
    }
    meet(team);
}

static void inner_phase(Step *s, Team *team, const Matrix *reader) {
    int row;
    while ((row = take(team, s->num_rows, 1)) >= 0)
        prepare(s->digits, reader, row, s->num_rows, s->inner + (size_t)row * reader->columns);
    meet(team);
}

static void head_phase(Step *s, Team *team) {
    const Model *m = s->model;
    int row;
    while ((row = take(team, s->num_last, 1)) >= 0) {
        float *out = s->normed + (size_t)row * m->hidden;
        normalise(s->hidden + (size_t)s->last[row] * m->hidden, m->norm, m->hidden, m->eps, out);
        prepare(s->digits, &m->head, row, s->num_last, out);
    }
    meet(team);
    Input input = {s->digits, s->num_last};
    project(team, &m->head, 1, &input, s->logits, m->head.rows, 0);
}

static void step_job(void *about, Team *team) {
    Step *s = about;
    const Model *m = s->model;
    int stride = (m->heads + 2 * m->kv_heads) * m->dim;
    for (int i = 0; i < m->num_layers; i++) {
        const Layer *layer = &m->layers[i];
        Input input = {s->digits, s->num_rows};
        norm_phase(s, team, layer->norm, layer->inputs);
        project(team, layer->inputs, layer->num_inputs, &input, s->inputs, stride, 0);
        append_phase(s, team, i);
        attend_phase(s, team, i);
        join_phase(s, team, i);
        project(team, &layer->output, 1, &input, s->hidden, m->hidden, 1);
        norm_phase(s, team, layer->mlp_norm, &layer->gate);
        gated(team, layer, &input, s->inner, m->inner);
        inner_phase(s, team, &layer->down);
        project(team, &layer->down, 1, &input, s->hidden, m->hidden, 1);
    }
    head_phase(s, team);
}

static void *room(size_t bytes) {
    void *memory = NULL;
    return posix_memalign(&memory, 64, bytes + 64) ? NULL : memory;
}

/* Run a model over some rows; `hidden` comes as embeddings and is overwritten. 0 if it did. */
int semantic_step(const Model *model, const Row *rows, int num_rows, const float *cos,
                  const float *sin, const int32_t *last, int num_last, float *hidden,
                  float *logits, int threads) {
    const Model *m = model;
    int width = m->heads * m->dim, stride = (m->heads + 2 * m->kv_heads) * m->dim;
    int widest = m->hidden > m->inner ? m->hidden : m->inner;
    int64_t longest = 0;
    for (int i = 0; i < num_rows; i++)
        if (rows[i].position + 1 > longest) longest = rows[i].position + 1;
    Step s = {.model = model, .rows = rows, .cos = cos, .sin = sin, .last = last};
    s.hidden = hidden, s.logits = logits, s.num_rows = num_rows, s.num_last = num_last;
    size_t n = num_rows;
    s.tiles = room(4 * n * sizeof(int32_t));
    if (!s.tiles) return 1;
    s.single = s.tiles + 2 * n, s.place = s.single + n;
    find_tiles(&s);
    int pieces = (int)((longest + KEYS - 1) / KEYS);
    int wanted = 8 * threads / ((s.num_single + s.num_tiles) * m->kv_heads);
    s.num_shares = wanted < 1 ? 1 : wanted < pieces ? wanted : pieces;
    s.normed = room(n * m->hidden * sizeof(float));
    s.inputs = room(n * stride * sizeof(float));
    s.attended = room(n * width * sizeof(float));
    s.inner = room(n * m->inner * sizeof(float));
    s.parts = room((size_t)s.num_single * m->heads * s.num_shares * (m->dim + 4) * sizeof(float));
    s.digits = room(n * 4 * (width > widest ? width : widest) + n * digits_size(GROUP));
    int failed = !(s.normed && s.inputs && s.attended && s.inner && s.parts && s.digits);
    if (!failed) run(step_job, &s, threads);
    free(s.normed), free(s.inputs), free(s.attended), free(s.inner), free(s.parts), free(s.digits);
    free(s.tiles);
    return failed;
}

/* ---- one linear ------------------------------------------------------------------------------- */

typedef struct {
    const Matrix *matrix;
    const float *x;
    float *out;
    int8_t *digits;
    int rows;
} Linear;

static void linear_job(void *about, Team *team) {
    Linear *l = about;
    int row, columns = l->matrix->columns;
    while ((row = take(team, l->rows, 1)) >= 0)
        prepare(l->digits, l->matrix, row, l->rows, l->x + (size_t)row * columns);
    meet(team);
    Input input = {l->digits, l->rows};
    project(team, l->matrix, 1, &input, l->out, l->matrix->rows, 0);
}

int semantic_linear(const Matrix *matrix, const float *x, int rows, float *out, int threads) {
    Linear l = {matrix, x, out, room(rows * prepared_size(matrix)), rows};
    if (!l.digits) return 1;
    run(linear_job, &l, threads);
    free(l.digits);
    return 0;
}

/* ---- packing ---------------------------------------------------------------------------------- */

typedef struct {
    const uint8_t *packed;
    const float *scales, *biases;
    int rows, columns, group, bits;
    uint8_t *out;
    float unit;
} Packing;

/* Spread sixteen bytes over a block's vectors: four of each are a row's. */
INLINE void spread(uint8_t *out, uint8x16_t bytes) {
    uint32_t words[4];
    vst1q_u32(words, vreinterpretq_u32_u8(bytes));
    for (int vector = 0; vector < 4; vector++) memcpy(out + 16 * vector, words + vector, 4);
}

INLINE void pack_integers(const Packing *p, int row, int group, uint8_t *out) {
    const uint8_t *from = p->packed + ((size_t)row * p->columns + group * GROUP) * p->bits / 8;
    uint8x16_t first = vld1q_u8(from);
    if (p->bits == 4) {
        uint8x16_t even = vandq_u8(first, vdupq_n_u8(15)), odd = vshrq_n_u8(first, 4);
        spread(out, vorrq_u8(vzip1q_u8(even, odd), vshlq_n_u8(vzip2q_u8(even, odd), 4)));
    } else {
        spread(out, veorq_u8(first, vdupq_n_u8(128)));
        spread(out + 64, veorq_u8(vld1q_u8(from + 16), vdupq_n_u8(128)));
    }
}

static void pack_job(void *about, Team *team) {
    Packing *p = about;
    int blocks = (p->rows + LANES - 1) / LANES, index, groups = p->columns / GROUP;
    size_t bytes = p->bits == 4 ? 64 : 128, size = groups * (bytes + 16);
    while ((index = take(team, blocks, 1)) >= 0) {
        uint8_t *out = p->out + size * index;
        for (int g = 0; g < groups; g++, out += bytes + 16) {
            if (index * LANES + LANES > p->rows) memset(out, 0, bytes);
            float16_t *about_rows = (float16_t *)(out + bytes);
            for (int r = 0; r < LANES; r++) {
                int row = index * LANES + r;
                if (row < p->rows) pack_integers(p, row, g, out + 4 * r);
                size_t at = (size_t)row * (p->columns / p->group) + g * GROUP / p->group;
                float scale = row < p->rows ? p->scales[at] : 0, bias = row < p->rows ? p->biases[at] : 0;
                if (p->bits == 8) bias += 128 * scale;
                about_rows[r] = (float16_t)(scale / p->unit);
                about_rows[LANES + r] = (float16_t)(bias / p->unit);
            }
        }
    }
    meet(team);
}

/* Lay a file's integers as the kernels read them: whole blocks of four rows. */
void semantic_pack(const uint8_t *packed, const float *scales, const float *biases, int rows,
                   int columns, int group, int bits, float unit, uint8_t *out, int threads) {
    Packing p = {packed, scales, biases, rows, columns, group, bits, out, unit};
    run(pack_job, &p, threads);
}
