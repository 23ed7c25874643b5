/* A decode or prefill step in one call.
 *
 * A step of a small model has about nine hundred operations of microseconds each; calling them one by
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

/* With an output norm, normalise the last matrix's output in `normed` and add it to the row. */
static void add_output(Step *s, int row, const float *weight) {
    int size = s->model->hidden;
    float *hidden = s->hidden + (size_t)row * size, *output = s->normed + (size_t)row * size;
    if (!weight) return;
    normalise(output, weight, size, s->model->eps, output);
    for (int i = 0; i < size; i++) hidden[i] += output[i];
}

/* Normalise all rows for a matrix; `output_norm` applies to the last matrix's output. */
static void norm_phase(Step *s, Team *team, const float *output_norm, const float *weight,
                       const Matrix *reader) {
    int size = s->model->hidden, row;
    while ((row = take(team, s->num_rows, 1)) >= 0) {
        float *out = s->normed + (size_t)row * size;
        add_output(s, row, output_norm);
        normalise(s->hidden + (size_t)row * size, weight, size, s->model->eps, out);
        prepare(s->prepared, reader, row, s->num_rows, out);
    }
    barrier(team);
}

/* Apply a head's norm, if there is one, and RoPE. */
static void apply_rope(float *x, const float *norm, const Model *m, const float *cos,
                       const float *sin, float scale) {
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
        size_t angles = ((size_t)layer->rope * s->num_rows + row) * m->dim;
        const float *cos = s->cos + angles, *sin = s->sin + angles;
        float *x = s->inputs + (size_t)row * stride;
        for (int h = 0; h < m->heads; h++, x += m->dim)
            apply_rope(x, layer->query_norm, m, cos, sin, m->scaling);
        for (int h = 0; h < m->kv_heads; h++, x += m->dim) {
            size_t place = (((size_t)index * m->kv_heads + h) * r->capacity + r->position) * m->dim;
            apply_rope(x, layer->key_norm, m, cos, sin, 1.0f);
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

static void prepare_phase(Step *s, Team *team, const Matrix *reader, const float *x) {
    int row;
    while ((row = take(team, s->num_rows, 1)) >= 0)
        prepare(s->prepared, reader, row, s->num_rows, x + (size_t)row * reader->columns);
    barrier(team);
}

/* Queries, keys and values: matrices with other numbers of bits may read another form of the input. */
static void project_inputs(Step *s, Team *team, const Layer *layer) {
    const Model *m = s->model;
    const Matrix *inputs = layer->inputs;
    int stride = (m->heads + 2 * m->kv_heads) * m->dim, offset = 0;
    Input input = {s->prepared, s->num_rows};
    for (int first = 0, end; first < layer->num_inputs; first = end) {
        int width = inputs[first].rows;
        for (end = first + 1; end < layer->num_inputs; width += inputs[end++].rows)
            if (!reads_same(&inputs[first], &inputs[end])) break;
        if (first) prepare_phase(s, team, &inputs[first], s->normed);
        project(team, inputs + first, end - first, &input, s->inputs + offset, stride, 0);
        offset += width;
    }
}

static void head_phase(Step *s, Team *team, const float *output_norm) {
    const Model *m = s->model;
    int row;
    while ((row = take(team, s->num_rows, 1)) >= 0) {
        float *x = s->hidden + (size_t)row * m->hidden;
        add_output(s, row, output_norm);
        normalise(x, m->norm, m->hidden, m->eps, x);
        prepare(s->prepared, &m->head, row, s->num_rows, x);
    }
    barrier(team);
    Input input = {s->prepared, s->num_rows};
    project(team, &m->head, 1, &input, s->logits, m->head.rows, 0);
}

/* Move the rows whose logits are wanted to the front: the last layer needs only keys and values of
 * the others. */
static void narrow_phase(Step *s, Team *team, int thread) {
    const Model *m = s->model;
    size_t stride = (m->heads + 2 * (size_t)m->kv_heads) * m->dim, hidden = m->hidden;
    for (int i = 0; !thread && i < s->num_last; i++) {
        size_t from = s->last[i];
        memmove(s->inputs + i * stride, s->inputs + from * stride, stride * sizeof(float));
        memmove(s->hidden + i * hidden, s->hidden + from * hidden, hidden * sizeof(float));
    }
    barrier(team);
}

/* Multiply by the last matrix of attention or of an MLP. Without a norm, add the results to `hidden`;
 * with one, store them in `normed` until it is applied. */
static void project_output(Step *s, Team *team, const Matrix *matrix, const float *norm) {
    Input input = {s->prepared, s->num_rows};
    project(team, matrix, 1, &input, norm ? s->normed : s->hidden, s->model->hidden, !norm);
}

static void step_job(void *argument, Team *team, int thread) {
    Step *s = argument;
    const Model *m = s->model;
    const float *output_norm = NULL;
    for (int i = 0; i < m->num_layers; i++) {
        const Layer *layer = &m->layers[i];
        const Mlp *mlp = layer->mlps;
        norm_phase(s, team, output_norm, layer->norm, layer->inputs);
        project_inputs(s, team, layer);
        append_phase(s, team, i);
        if (i == m->num_layers - 1 && s->num_last < s->num_rows) {
            narrow_phase(s, team, thread);
            s = s->narrow;
            if (!s->num_rows) return;
        }
        attend_phase(s, team, thread, i);
        join_phase(s, team, layer);
        project_output(s, team, &layer->output, layer->output_norm);
        norm_phase(s, team, layer->output_norm, layer->mlp_norm,
                   layer->num_experts ? &layer->router : &mlp->gate);
        output_norm = layer->mlp_output_norm;
        if (layer->num_experts) {
            mix_experts(s, team, layer);
            continue;
        }
        Input input = {s->prepared, s->num_rows};
        project_gated(team, &mlp->gate, &mlp->up, &m->activation, &input, s->inner, mlp->gate.rows);
        prepare_phase(s, team, &mlp->down, s->inner);
        project_output(s, team, &mlp->down, output_norm);
    }
    head_phase(s, team, output_norm);
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* The most that any layer needs: bytes of prepared rows, floats of inner rows, and experts. */
typedef struct {
    size_t prepared, inner, num_experts, num_chosen;
} Sizes;

INLINE void raise_to(size_t *most, size_t size) {
    if (size > *most) *most = size;
}

static Sizes largest_sizes(const Model *m, size_t num_rows) {
    Sizes most = {.prepared = num_rows * prepared_size(&m->head)};
    for (int i = 0; i < m->num_layers; i++) {
        const Layer *layer = &m->layers[i];
        for (int j = 0; j < layer->num_inputs; j++)
            raise_to(&most.prepared, num_rows * prepared_size(&layer->inputs[j]));
        raise_to(&most.prepared, num_rows * prepared_size(&layer->output));
        if (layer->num_experts) {
            raise_to(&most.prepared, num_rows * prepared_size(&layer->router));
            raise_to(&most.prepared, expert_prepared_size(layer, (int)num_rows));
            raise_to(&most.inner, expert_inner_size(layer, (int)num_rows));
            raise_to(&most.num_experts, layer->num_experts);
            raise_to(&most.num_chosen, layer->num_chosen);
        } else {
            raise_to(&most.prepared, num_rows * prepared_size(&layer->mlps->gate));
            raise_to(&most.prepared, num_rows * prepared_size(&layer->mlps->down));
            raise_to(&most.inner, num_rows * layer->mlps->down.columns);
        }
    }
    return most;
}

enum { NUM_BUFFERS = 12 };

INLINE size_t parts_size(const Step *s) {
    return (size_t)s->num_single * part_size(s->model) * s->model->heads * s->num_shares;
}

/* Allocate the scratch memory of a step and its narrow one into `buffers`; returns 1 if that fails. */
static int allocate_all(Step *s, size_t num_threads, void **buffers) {
    const Model *m = s->model;
    size_t n = s->num_rows, width = (size_t)m->heads * m->dim, floats = sizeof(float);
    size_t stride = width + 2 * (size_t)m->kv_heads * m->dim;
    Sizes most = largest_sizes(m, n);
    size_t parts = parts_size(s);
    raise_to(&parts, parts_size(s->narrow));
    const size_t sizes[NUM_BUFFERS] = {
        n * m->hidden * floats, n * stride * floats, n * width * floats, most.inner * floats,
        parts * floats, most.prepared, num_threads * s->scratch_size * floats,
        n * most.num_experts * floats, n * most.num_chosen * floats,
        n * most.num_chosen * sizeof(int32_t), n * most.num_chosen * sizeof(Routed),
        most.num_experts * sizeof(Run),
    };
    int failed = 0;
    for (int i = 0; i < NUM_BUFFERS; i++) failed |= !(buffers[i] = allocate(sizes[i]));
    for (; s; s = s->narrow) {
        s->normed = buffers[0], s->inputs = buffers[1], s->attended = buffers[2];
        s->inner = buffers[3], s->parts = buffers[4], s->prepared = buffers[5];
        s->scratch = buffers[6], s->scores = buffers[7], s->weights = buffers[8];
        s->chosen = buffers[9], s->routed = buffers[10], s->runs = buffers[11];
    }
    return failed;
}

/* Sort a step's rows for attention, and choose how many threads share the keys of a single row. */
static void arrange(Step *s, size_t num_threads, int32_t *places) {
    int64_t longest = 0;
    s->tiles = places, s->single = places + 2 * s->num_rows, s->place = s->single + s->num_rows;
    find_tiles(s);
    for (int i = 0; i < s->num_rows; i++)
        if (s->rows[i].position + 1 > longest) longest = s->rows[i].position + 1;
    int pieces = (int)((longest + KEYS - 1) / KEYS), items = s->num_single + s->num_tiles;
    int wanted = items ? (int)(8 * num_threads) / (items * s->model->kv_heads) : 1;
    s->num_shares = wanted < 1 ? 1 : wanted < pieces ? wanted : pieces;
}

/* Run a model over rows; `hidden` has their embeddings and is overwritten. The cosines and sines are
 * [RoPE, row, dim]. `last` ascends. Returns 0, or 1 if memory allocation fails. */
int semantic_step(const Model *model, const Row *rows, int num_rows, const float *cos,
                  const float *sin, const int32_t *last, int num_last, float *hidden,
                  float *logits, int threads) {
    size_t n = num_rows, num_kept = num_last, num_threads = limit_threads(threads);
    void *buffers[NUM_BUFFERS];
    int32_t *places = allocate(4 * (n + num_kept) * sizeof(int32_t));
    Row *kept = allocate(num_kept * sizeof(Row));
    int failed = !places || !kept;
    if (!failed) {
        for (int i = 0; i < num_last; i++) kept[i] = rows[last[i]];
        Step s = {.model = model, .rows = rows, .cos = cos, .sin = sin, .last = last};
        s.hidden = hidden, s.logits = logits, s.num_rows = num_rows, s.num_last = num_last;
        s.scratch_size = attention_scratch(model);
        Step narrow = s;
        narrow.rows = kept, narrow.num_rows = num_last, s.narrow = &narrow;
        arrange(&s, num_threads, places);
        arrange(&narrow, num_threads, places + 4 * n);
        failed = allocate_all(&s, num_threads, buffers);
        if (!failed) run_job(step_job, &s, threads);
        for (int i = 0; i < NUM_BUFFERS; i++) release(buffers[i]);
    }
    release(kept);
    release(places);
    return failed;
}

/* The sizes of the structures that callers fill in, in 16 bits each. */
uint64_t semantic_abi(void) {
    return (uint64_t)sizeof(Matrix) | (uint64_t)sizeof(Layer) << 16 | (uint64_t)sizeof(Model) << 32 |
           (uint64_t)sizeof(Row) << 48;
}
