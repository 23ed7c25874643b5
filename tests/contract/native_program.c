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
                   int columns, int group, int kind, float unit, uint8_t *out, int threads);
size_t semantic_packed_size(int rows, int columns, int kind);
int semantic_linear(const Matrix *matrix, const float *x, int rows, float *out, int threads);
int semantic_rows(const Matrix *a, const int64_t *rows, int count, float *out);
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

static Matrix matrix(int rows, int columns, int kind, int has_bias) {
    int bits = kind == MXFP4 ? 4 : kind;
    int groups = rows * columns / 32;
    uint8_t *packed = malloc((size_t)rows * columns * bits / 8);
    float *scales = malloc(groups * sizeof(float)), *biases = malloc(groups * sizeof(float));
    for (int i = 0; i < rows * columns * bits / 8; i++) packed[i] = (uint8_t)draw(256);
    for (int i = 0; i < groups; i++) {
        scales[i] = (float)(1 + draw(1023)) * 0x1p-12f / (float)(1 << bits);
        biases[i] = -7.5f * scales[i] * (float)(1 << (bits - 4));
    }
    uint8_t *out = allocate(semantic_packed_size(rows, columns, kind));
    semantic_pack(packed, scales, biases, rows, columns, 32, kind, 0x1p-14f, out, 2);
    free(packed), free(scales), free(biases);
    return (Matrix){out, has_bias ? numbers(rows, 100, 0x1p-7f) : NULL, kind, rows, columns, 0x1p-14f};
}

static uint64_t hash_of(const void *data, size_t size, uint64_t hash) {
    const uint8_t *bytes = data;
    for (size_t i = 0; i < size; i++) hash = (hash ^ bytes[i]) * 0x100000001b3u;
    return hash;
}

static void print_linears(int kind) {
    const int shapes[][2] = {{48, 64}, {50, 96}, {1, 32}, {96, 288}};
    for (int s = 0; s < 4; s++) {
        int rows = shapes[s][0], columns = shapes[s][1];
        Matrix a = matrix(rows, columns, kind, s % 2);
        uint64_t hash = 0xcbf29ce484222325u;
        for (int n = 1; n <= 17; n++) {
            float *x = numbers(n * columns, 4096, 0x1p-9f), *out = malloc(n * rows * sizeof(float));
            x[7] *= 30;
            if (semantic_linear(&a, x, n, out, 1 + n % 2)) exit(1);
            hash = hash_of(out, (size_t)n * rows * sizeof(float), hash);
            free(x), free(out);
        }
        float *row = malloc(columns * sizeof(float));
        for (int64_t r = 0; r < rows; r++) {
            if (semantic_rows(&a, &r, 1, row)) exit(1);
            hash = hash_of(row, columns * sizeof(float), hash);
        }
        free(row);
        printf("linear kind %d, %d x %d: %016llx\n", kind, rows, columns, (unsigned long long)hash);
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

enum { HIDDEN = 64, INNER = 96, HEAD_COUNT = 4, KV = 2, DIM = 16, WORDS = 40, CAPACITY = 200 };
enum { EXPERTS = 6, CHOSEN = 2 };

/* Llama's parts; those of Gemma: norms of what layers add; those of GPT-OSS: sinks and experts. */
enum { LLAMA, GEMMA, GPT_OSS };

static Mlp *mlps(int count, int kind, int has_bias) {
    Mlp *made = malloc(count * sizeof(Mlp));
    for (int i = 0; i < count; i++)
        made[i] = (Mlp){matrix(INNER, HIDDEN, kind, has_bias), matrix(INNER, HIDDEN, kind, has_bias),
                        matrix(HIDDEN, INNER, kind, has_bias)};
    return made;
}

static float *norm_of(int size) { return numbers(size, 64, 0x1p-6f); }

static Layer layer(int family, int index, int kind) {
    int has_output_norms = family == GEMMA, has_experts = family == GPT_OSS;
    Layer made = {.norm = norm_of(HIDDEN),
                  .mlp_norm = norm_of(HIDDEN),
                  .query_norm = index ? norm_of(DIM) : NULL,
                  .key_norm = index ? norm_of(DIM) : NULL,
                  .output_norm = has_output_norms ? norm_of(HIDDEN) : NULL,
                  .mlp_output_norm = has_output_norms ? norm_of(HIDDEN) : NULL,
                  .sinks = has_experts ? numbers(HEAD_COUNT, 64, 0x1p-5f) : NULL,
                  .mlps = mlps(has_experts ? EXPERTS : 1, kind, has_experts),
                  .inputs = {matrix(HEAD_COUNT * DIM, HIDDEN, kind, 1),
                             matrix(KV * DIM, HIDDEN, kind, 0),
                             matrix(KV * DIM, HIDDEN, index ? 8 : kind, 0)},
                  .output = matrix(HIDDEN, HEAD_COUNT * DIM, kind, 0),
                  .num_inputs = 3,
                  .window = index ? 50 : 0,
                  .rope = has_output_norms ? index : 0};
    if (has_experts) {
        made.router = (Matrix){numbers(EXPERTS * HIDDEN, 512, 0x1p-9f), NULL, FULL,
                               EXPERTS, HIDDEN, 1.0f};
        made.num_experts = EXPERTS, made.num_chosen = CHOSEN, made.is_normalised = index;
    }
    return made;
}

/* Two sequences, one with several new tokens; 2 layers, 4 heads that share 2 pairs of keys. */
static void print_step(int family, int kind) {
    const char *names[] = {"llama", "gemma", "gpt-oss"};
    const Activation activations[] = {{SILU, 0, 0}, {GELU_TANH, 0, 0}, {CLAMPED, 1.702f, 7.0f}};
    Layer layers[] = {layer(family, 0, kind), layer(family, 1, kind)};
    Model model = {.layers = layers,
                   .norm = norm_of(HIDDEN),
                   .head = matrix(WORDS, HIDDEN, 8, 0),
                   .activation = activations[family],
                   .num_layers = 2,
                   .hidden = HIDDEN,
                   .heads = HEAD_COUNT,
                   .kv_heads = KV,
                   .dim = DIM,
                   .eps = 1e-5f,
                   .scaling = 0.25f};
    int lengths[] = {150, 37}, news[] = {1, 9}, num_rows = 0;
    Row rows[10];
    for (int s = 0; s < 2; s++) {
        int size = 2 * KV * CAPACITY * DIM;
        float *keys = numbers(size, 512, 0x1p-9f), *values = numbers(size, 512, 0x1p-9f);
        for (int i = 0; i < news[s]; i++)
            rows[num_rows++] = (Row){keys, values, CAPACITY, lengths[s] + i};
    }
    float *cos = numbers(2 * num_rows * DIM, 512, 0x1p-9f);
    float *sin = numbers(2 * num_rows * DIM, 512, 0x1p-9f);
    float *hidden = numbers(num_rows * HIDDEN, 512, 0x1p-9f), logits[2 * WORDS];
    int32_t last[] = {0, num_rows - 1};
    if (semantic_step(&model, rows, num_rows, cos, sin, last, 2, hidden, logits, 2)) exit(1);
    for (int i = 0; i < 2 * WORDS; i++)
        printf("step %s kind %d, %d: %a\n", names[family], kind, i, logits[i]);
}

int main(void) {
    for (int kind = 4; kind <= MXFP4; kind++)
        if (kind <= SIX_BITS || kind == EIGHT_BITS || kind == MXFP4) print_linears(kind);
    print_exponentials();
    for (int family = LLAMA; family <= GPT_OSS; family++)
        print_step(family, FOUR_BITS), print_step(family, EIGHT_BITS), print_step(family, MXFP4);
    print_step(LLAMA, FIVE_BITS), print_step(LLAMA, SIX_BITS);
    return 0;
}
