/* Whole steps of models whose layers are norms, attention with RoPE, and gated MLPs or mixtures of
 * experts. */
#ifndef SEMANTIC_STEP_H
#define SEMANTIC_STEP_H

#include "linears.h"

typedef struct {
    Matrix gate, up, down;
} Mlp;

typedef struct {
    const float *norm, *mlp_norm;               /* before attention, before the MLP */
    const float *query_norm, *key_norm;         /* of each head; these and the rest may be NULL */
    const float *output_norm, *mlp_output_norm; /* of what attention and the MLP add */
    const float *sinks;                         /* attention sinks: a score per head */
    const Mlp *mlps;                            /* the MLP, or each expert */
    Matrix inputs[3];                           /* queries, keys, values; or one for all */
    Matrix output, router;
    int32_t num_inputs, window; /* 0: attends to all tokens */
    int32_t rope;               /* index of its cosines and sines */
    int32_t num_experts;        /* 0: `mlps` is one MLP, without a router */
    int32_t num_chosen, is_normalised; /* experts of a row; whether their weights sum to 1 */
} Layer;

typedef struct {
    const Layer *layers;
    const float *norm;
    Matrix head;
    Activation activation;
    int32_t num_layers, hidden, heads, kv_heads, dim;
    float eps, scaling;
} Model;

/* One token: its sequence's buffers, [layers, heads, capacity, dim], and its position there. */
typedef struct {
    float *keys, *values;
    int64_t capacity, position;
} Row;

/* A row's use of one of its experts, and the rows of one expert; see experts.c. */
typedef struct {
    int32_t row, run;
    float weight;
} Routed;
typedef struct {
    int32_t expert, first, count;
} Run;

/* A step's inputs and scratch memory. Rows that follow each other in a sequence form tiles, whose
 * keys are read once for all of them; others are single rows. */
typedef struct Step {
    const Model *model;
    const Row *rows;
    const float *cos, *sin; /* of each row, once for each RoPE */
    const int32_t *last;    /* rows whose logits are wanted */
    float *hidden, *logits;
    int32_t num_rows, num_last, num_tiles, num_single;
    int32_t num_shares; /* threads that may share the keys of a single row */
    int32_t *tiles;     /* first row and number of rows */
    int32_t *single;    /* rows that are in no tile */
    int32_t *place;     /* index of each row in `single`, or -1 */
    float *normed, *inputs, *attended, *inner, *parts, *scratch;
    size_t scratch_size; /* floats for each thread */
    int8_t *prepared;    /* what the next matrix reads */
    float *scores, *weights; /* per row: of all experts; of the chosen ones */
    int32_t *chosen;
    Routed *routed; /* sorted by expert */
    Run *runs;
    int32_t num_runs;
    struct Step *narrow; /* of the rows at `last` alone, from the last layer's attention on */
} Step;

enum { KEYS = 128 }; /* keys of a single row in one piece */

INLINE int64_t first_visible(const Row *row, const Layer *layer) {
    int64_t first = layer->window ? row->position + 1 - layer->window : 0;
    return first > 0 ? first : 0;
}

/* Sort the rows of a step into tiles and single rows. */
void find_tiles(Step *s);

/* Floats that a thread needs for attention. */
size_t attention_scratch(const Model *model);

/* Floats of one head's part of a single row's attention: weighted values, the greatest score, the
 * sum of weights. */
INLINE size_t part_size(const Model *m) { return m->dim + 4; }

/* One phase: attention of a layer; tiles are complete, single rows are in parts. */
void attend_phase(Step *s, Team *team, int thread, int layer);

/* Bytes and floats that a layer's experts need of `prepared` and `inner`. */
size_t expert_prepared_size(const Layer *layer, int num_rows);
size_t expert_inner_size(const Layer *layer, int num_rows);

/* Phases of a layer's experts: `normed` has their input, prepared for the router; their output
 * is added to `hidden`. */
void mix_experts(Step *s, Team *team, const Layer *layer);

/* Write a row's attention to `out`, [heads, dim], if it is a single row. */
void join_parts(const Step *s, int row, const Layer *layer, float *out);

#endif
