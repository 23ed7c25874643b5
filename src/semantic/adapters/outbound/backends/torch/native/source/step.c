/* A decode or prefill step in one call.
 *
 * A step of a small model is some nine hundred operations of microseconds each; calling them one by
 * one takes three times as long as computing them. Here threads are woken once and wait for each
 * other at a barrier after each phase; within a phase a thread that is free takes the next piece.
 */
#include "step.h"

static void normalise(const float *x, const float *weight, int size, float eps, float *out) {
    vf sum = zeros();
    for (int i = 0; i < size; i += LANES) {
        vf v = load_some(x + i, size - i);
        sum = fmadd(v, v, sum);
    }
    vf scale = splat(1.0f / sqrtf(reduce_add(sum) / (float)size + eps));
    for (int i = 0; i < size; i += LANES) {
        vf v = load_some(x + i, size - i) * scale;
        store_some(out + i, load_some(weight + i, size - i) * v, size - i);
    }
}

static void norm_phase(Step *s, Team *team, const float *weight, const Matrix *reader) {
    int size = s->model->hidden, row;
    while ((row = take(team, s->num_rows, 1)) >= 0) {
        float *out = s->normed + (size_t)row * size;
        normalise(s->hidden + (size_t)row * size, weight, size, s->model->eps, out);
        prepare(s->prepared, reader, row, s->num_rows, out);
    }
    barrier(team);
}

/* Apply a head's norm, if there is one, and RoPE. */
static void rotate(float *x, const float *norm, const Model *m, const float *cos, const float *sin,
                   float scale) {
    int half = m->dim / 2;
    if (norm) normalise(x, norm, m->dim, m->eps, x);
    for (int i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = (a * cos[i] - b * sin[i]) * scale;
        x[i + half] = (b * cos[i + half] + a * sin[i + half]) * scale;
    }
}

/* Apply RoPE to queries and keys, and append keys and values to the buffers. */
static void append_phase(Step *s, Team *team, int index) {
    const Model *m = s->model;
    const Layer *layer = &m->layers[index];
    int stride = (m->heads + 2 * m->kv_heads) * m->dim, row;
    while ((row = take(team, s->num_rows, 1)) >= 0) {
        const Row *r = &s->rows[row];
        const float *cos = s->cos + row * m->dim, *sin = s->sin + row * m->dim;
        float *x = s->inputs + (size_t)row * stride;
        for (int h = 0; h < m->heads; h++, x += m->dim)
            rotate(x, layer->query_norm, m, cos, sin, m->scaling);
        for (int h = 0; h < m->kv_heads; h++, x += m->dim) {
            size_t place = (((size_t)index * m->kv_heads + h) * r->capacity + r->position) * m->dim;
            rotate(x, layer->key_norm, m, cos, sin, 1.0f);
            memcpy(r->keys + place, x, m->dim * sizeof(float));
            memcpy(r->values + place, x + m->kv_heads * m->dim, m->dim * sizeof(float));
        }
    }
    barrier(team);
}

static void join_phase(Step *s, Team *team, const Layer *layer) {
    size_t width = (size_t)s->model->heads * s->model->dim;
    int row;
    while ((row = take(team, s->num_rows, 1)) >= 0) {
        join_parts(s, row, layer, s->attended + row * width);
        prepare(s->prepared, &layer->output, row, s->num_rows, s->attended + row * width);
    }
    barrier(team);
}

static void inner_phase(Step *s, Team *team, const Matrix *reader) {
    int row;
    while ((row = take(team, s->num_rows, 1)) >= 0)
        prepare(s->prepared, reader, row, s->num_rows, s->inner + (size_t)row * reader->columns);
    barrier(team);
}

static void head_phase(Step *s, Team *team) {
    const Model *m = s->model;
    int row;
    while ((row = take(team, s->num_last, 1)) >= 0) {
        float *out = s->normed + (size_t)row * m->hidden;
        normalise(s->hidden + (size_t)s->last[row] * m->hidden, m->norm, m->hidden, m->eps, out);
        prepare(s->prepared, &m->head, row, s->num_last, out);
    }
    barrier(team);
    Input input = {s->prepared, s->num_last};
    project(team, &m->head, 1, &input, s->logits, m->head.rows, 0);
}

static void step_job(void *argument, Team *team, int thread) {
    Step *s = argument;
    const Model *m = s->model;
    int stride = (m->heads + 2 * m->kv_heads) * m->dim;
    Input input = {s->prepared, s->num_rows};
    for (int i = 0; i < m->num_layers; i++) {
        const Layer *layer = &m->layers[i];
        norm_phase(s, team, layer->norm, layer->inputs);
        project(team, layer->inputs, layer->num_inputs, &input, s->inputs, stride, 0);
        append_phase(s, team, i);
        attend_phase(s, team, thread, i);
        join_phase(s, team, layer);
        project(team, &layer->output, 1, &input, s->hidden, m->hidden, 1);
        norm_phase(s, team, layer->mlp_norm, &layer->gate);
        project_gated(team, &layer->gate, &layer->up, &input, s->inner, m->inner);
        inner_phase(s, team, &layer->down);
        project(team, &layer->down, 1, &input, s->hidden, m->hidden, 1);
    }
    head_phase(s, team);
}

/* Bytes for prepared rows of any matrix of the model. */
static size_t widest_prepared(const Model *m) {
    size_t widest = prepared_size(&m->head);
    for (int i = 0; i < m->num_layers; i++) {
        const Layer *layer = &m->layers[i];
        const Matrix *all[] = {&layer->inputs[0], &layer->output, &layer->gate, &layer->down};
        for (int j = 0; j < 4; j++)
            if (prepared_size(all[j]) > widest) widest = prepared_size(all[j]);
    }
    return widest;
}

/* Run a model over some rows; `hidden` has their embeddings and is overwritten. Returns 0, or 1 when
 * there is no memory for it. */
int semantic_step(const Model *model, const Row *rows, int num_rows, const float *cos,
                  const float *sin, const int32_t *last, int num_last, float *hidden,
                  float *logits, int threads) {
    const Model *m = model;
    int width = m->heads * m->dim, stride = (m->heads + 2 * m->kv_heads) * m->dim;
    int64_t longest = 0;
    size_t n = num_rows, num_threads = limit_threads(threads);
    for (int i = 0; i < num_rows; i++)
        if (rows[i].position + 1 > longest) longest = rows[i].position + 1;
    Step s = {.model = model, .rows = rows, .cos = cos, .sin = sin, .last = last};
    s.hidden = hidden, s.logits = logits, s.num_rows = num_rows, s.num_last = num_last;
    s.tiles = allocate(4 * n * sizeof(int32_t));
    if (!s.tiles) return 1;
    s.single = s.tiles + 2 * n, s.place = s.single + n;
    find_tiles(&s);
    int pieces = (int)((longest + KEYS - 1) / KEYS);
    int wanted = (int)(8 * num_threads) / ((s.num_single + s.num_tiles) * m->kv_heads);
    s.num_shares = wanted < 1 ? 1 : wanted < pieces ? wanted : pieces;
    s.scratch_size = attention_scratch(m);
    s.normed = allocate(n * m->hidden * sizeof(float));
    s.inputs = allocate(n * stride * sizeof(float));
    s.attended = allocate(n * width * sizeof(float));
    s.inner = allocate(n * m->inner * sizeof(float));
    s.parts = allocate(s.num_single * part_size(m) * m->heads * s.num_shares * sizeof(float));
    s.prepared = allocate(n * widest_prepared(m));
    s.scratch = allocate(num_threads * s.scratch_size * sizeof(float));
    int failed = !(s.normed && s.inputs && s.attended && s.inner && s.parts && s.prepared);
    failed |= !s.scratch;
    if (!failed) run_job(step_job, &s, threads);
    release(s.normed), release(s.inputs), release(s.attended), release(s.inner), release(s.parts);
    release(s.prepared), release(s.scratch), release(s.tiles);
    return failed;
}

/* The sizes of the structures that callers lay out, in 16 bits each. */
uint64_t semantic_abi(void) {
    return (uint64_t)sizeof(Matrix) | (uint64_t)sizeof(Layer) << 16 | (uint64_t)sizeof(Model) << 32 |
           (uint64_t)sizeof(Row) << 48;
}
