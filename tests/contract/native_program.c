/* A program that prints results of the native library's kernels on fixed inputs, as hexadecimal.
 *
 * Built for any variant, also for another architecture under qemu-user; inputs are made of integers,
 * so they are the same everywhere. The first lines, of integer linears and of prefill attention's
 * exponentials, must be the same bytes in every variant; "step" lines are rounded numbers.
 */
#include <stdio.h>
#include <stdlib.h>

#include "step.h"

void semantic_pack(const uint8_t *packed, const float *scales, const float *biases, int rows,
                   int columns, int group, int bits, float unit, uint8_t *out, int threads);
size_t semantic_packed_size(int rows, int columns, int bits);
int semantic_linear(const Matrix *matrix, const float *x, int rows, float *out, int threads);
int semantic_step(const Model *model, const Row *rows, int num_rows, const float *cos,
                  const float *sin, const int32_t *last, int num_last, float *hidden, float *logits,
                  int threads);

static uint32_t state = 1;
static uint32_t draw(uint32_t below) {
    state = state * 1664525u + 1013904223u;
    return (state >> 8) % below;
}
static float number(int below, float unit) { return ((float)draw(2 * below) - below) * unit; }
static float *numbers(int count, int below, float unit) {
    float *made = malloc(count * sizeof(float));
    for (int i = 0; i < count; i++) made[i] = number(below, unit);
    return made;
}

static Matrix matrix(int rows, int columns, int bits, int has_bias) {
    int groups = rows * columns / 32;
    uint8_t *packed = malloc((size_t)rows * columns * bits / 8);
    float *scales = malloc(groups * sizeof(float)), *biases = malloc(groups * sizeof(float));
    for (int i = 0; i < rows * columns * bits / 8; i++) packed[i] = (uint8_t)draw(256);
    for (int i = 0; i < groups; i++) {
        scales[i] = (float)(1 + draw(1023)) * 0x1p-16f * (bits == 8 ? 0x1p-4f : 1.0f);
        biases[i] = -7.5f * scales[i] * (bits == 8 ? 16.0f : 1.0f);
    }
    uint8_t *out = allocate(semantic_packed_size(rows, columns, bits));
    semantic_pack(packed, scales, biases, rows, columns, 32, bits, 0x1p-14f, out, 2);
    free(packed), free(scales), free(biases);
    return (Matrix){out, has_bias ? numbers(rows, 100, 0x1p-7f) : NULL, bits, rows, columns, 0x1p-14f};
}

static uint64_t hash_of(const void *data, size_t size, uint64_t hash) {
    const uint8_t *bytes = data;
    for (size_t i = 0; i < size; i++) hash = (hash ^ bytes[i]) * 0x100000001b3u;
    return hash;
}

static void print_linears(int bits) {
    const int shapes[][2] = {{48, 64}, {50, 96}, {1, 32}, {96, 288}};
    for (int s = 0; s < 4; s++) {
        int rows = shapes[s][0], columns = shapes[s][1];
        Matrix a = matrix(rows, columns, bits, s % 2);
        uint64_t hash = 0xcbf29ce484222325u;
        for (int n = 1; n <= 17; n++) {
            float *x = numbers(n * columns, 4096, 0x1p-9f), *out = malloc(n * rows * sizeof(float));
            x[7] *= 30;
            if (semantic_linear(&a, x, n, out, 1 + n % 2)) exit(1);
            hash = hash_of(out, (size_t)n * rows * sizeof(float), hash);
            free(x), free(out);
        }
        printf("linear %d bits %d x %d: %016llx\n", bits, rows, columns, (unsigned long long)hash);
    }
}

static void print_exponentials(void) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (int i = 0; i < 4096; i++) {
        float out[LANES];
        store(out, exponential(splat(number(1 << 14, 0x1p-7f) * 0.5f)));
        hash = hash_of(out, sizeof(float), hash);
    }
    printf("exponential: %016llx\n", (unsigned long long)hash);
}

/* Two sequences, one with several new tokens; 2 layers, 4 heads that share 2 pairs of keys. */
static void print_step(int bits) {
    enum { HIDDEN = 64, INNER = 96, HEAD_COUNT = 4, KV = 2, DIM = 16, WORDS = 40, CAPACITY = 200 };
    Layer layers[2];
    for (int i = 0; i < 2; i++) {
        layers[i] = (Layer){.norm = numbers(HIDDEN, 64, 0x1p-6f),
                            .mlp_norm = numbers(HIDDEN, 64, 0x1p-6f),
                            .query_norm = i ? numbers(DIM, 64, 0x1p-6f) : NULL,
                            .key_norm = i ? numbers(DIM, 64, 0x1p-6f) : NULL,
                            .inputs = {matrix(HEAD_COUNT * DIM, HIDDEN, bits, 1),
                                       matrix(KV * DIM, HIDDEN, bits, 0),
                                       matrix(KV * DIM, HIDDEN, bits, 0)},
                            .output = matrix(HIDDEN, HEAD_COUNT * DIM, bits, 0),
                            .gate = matrix(INNER, HIDDEN, bits, 0),
                            .up = matrix(INNER, HIDDEN, bits, 0),
                            .down = matrix(HIDDEN, INNER, bits, 0),
                            .num_inputs = 3,
                            .window = i ? 50 : 0};
    }
    Model model = {layers, numbers(HIDDEN, 64, 0x1p-6f), matrix(WORDS, HIDDEN, 8, 0),
                   2, HIDDEN, INNER, HEAD_COUNT, KV, DIM, 1e-5f, 0.25f};
    int lengths[] = {150, 37}, news[] = {1, 9}, num_rows = 0;
    Row rows[10];
    for (int s = 0; s < 2; s++) {
        int size = 2 * KV * CAPACITY * DIM;
        float *keys = numbers(size, 512, 0x1p-9f), *values = numbers(size, 512, 0x1p-9f);
        for (int i = 0; i < news[s]; i++)
            rows[num_rows++] = (Row){keys, values, CAPACITY, lengths[s] + i};
    }
    float *cos = numbers(num_rows * DIM, 512, 0x1p-9f), *sin = numbers(num_rows * DIM, 512, 0x1p-9f);
    float *hidden = numbers(num_rows * HIDDEN, 512, 0x1p-9f), logits[2 * WORDS];
    int32_t last[] = {0, num_rows - 1};
    if (semantic_step(&model, rows, num_rows, cos, sin, last, 2, hidden, logits, 2)) exit(1);
    for (int i = 0; i < 2 * WORDS; i++) printf("step %d bits %d: %a\n", bits, i, logits[i]);
}

int main(void) {
    print_linears(4), print_linears(8), print_exponentials();
    print_step(4), print_step(8);
    return 0;
}
