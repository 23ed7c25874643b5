/* Mixtures of experts: MLPs of which a router chooses some for each row.
 *
 * Rows of the same expert are multiplied together, so that its weights are read once for them. Each
 * thread computes its own columns of the result and adds the experts in the order of their numbers,
 * so a row's sum depends neither on the other rows nor on the number of threads.
 */
#include "step.h"

enum { ROUTED_ROWS = 256 }; /* rows sorted by expert at once; bounds the memory */

INLINE int routed_rows(int num_rows) { return num_rows < ROUTED_ROWS ? num_rows : ROUTED_ROWS; }

size_t expert_prepared_size(const Layer *layer, int num_rows) {
    size_t gate = prepared_size(&layer->mlps->gate), down = prepared_size(&layer->mlps->down);
    return (gate > down ? gate : down) * routed_rows(num_rows) * layer->num_chosen;
}

size_t expert_inner_size(const Layer *layer, int num_rows) {
    return (size_t)layer->mlps->down.columns * routed_rows(num_rows) * layer->num_chosen;
}

/* Choose a row's experts, those with the highest scores, and weigh them by a softmax. */
static void choose(const Layer *layer, float *scores, int32_t *chosen, float *weights) {
    int count = layer->num_experts;
    float greatest = scores[0], total = 0.0f;
    for (int e = 1; e < count; e++) greatest = scores[e] > greatest ? scores[e] : greatest;
    for (int e = 0; e < count && !layer->is_normalised; e++)
        total += exponential(splat(scores[e] - greatest))[0];
    for (int i = 0; i < layer->num_chosen; i++) {
        int best = 0;
        for (int e = 1; e < count; e++)
            if (scores[e] > scores[best]) best = e;
        chosen[i] = best;
        weights[i] = exponential(splat(scores[best] - greatest))[0];
        if (layer->is_normalised) total += weights[i];
        scores[best] = -INFINITY;
    }
    for (int i = 0; i < layer->num_chosen; i++) weights[i] /= total;
}

static void choose_phase(Step *s, Team *team, const Layer *layer) {
    int row;
    while ((row = take(team, s->num_rows, 1)) >= 0) {
        size_t first = (size_t)row * layer->num_chosen;
        choose(layer, s->scores + (size_t)row * layer->num_experts, s->chosen + first,
               s->weights + first);
    }
    barrier(team);
}

/* Sort the choices of some rows by expert; the rows of one expert are a run. */
static void sort_by_expert(Step *s, const Layer *layer, int first_row, int num_rows) {
    int each = layer->num_chosen, count = num_rows * each, place = 0;
    const int32_t *chosen = s->chosen + (size_t)first_row * each;
    const float *weights = s->weights + (size_t)first_row * each;
    Run *runs = s->runs;
    for (int e = 0; e < layer->num_experts; e++) runs[e] = (Run){e, 0, 0};
    for (int i = 0; i < count; i++) runs[chosen[i]].count++;
    for (int e = 0; e < layer->num_experts; e++)
        runs[e].first = place, place += runs[e].count, runs[e].count = 0;
    for (int i = 0; i < count; i++) {
        Run *run = &runs[chosen[i]];
        s->routed[run->first + run->count++] = (Routed){first_row + i / each, 0, weights[i]};
    }
    s->num_runs = 0;
    for (int e = 0; e < layer->num_experts; e++) {
        Run run = runs[e];
        if (run.count == 0) continue;
        for (int i = 0; i < run.count; i++) s->routed[run.first + i].run = s->num_runs;
        runs[s->num_runs++] = run;
    }
}

/* Prepare a row of `x` for each choice: its own row or, if `is_by_row`, the row of its token. */
static void prepare_runs(Step *s, Team *team, int count, const Matrix *reader, const float *x,
                         int is_by_row) {
    int i;
    while ((i = take(team, count, 1)) >= 0) {
        const Run *run = &s->runs[s->routed[i].run];
        int place = (i - run->first) % MAX_TILE, left = run->first + run->count - (i - place);
        int width = left < MAX_TILE ? left : MAX_TILE;
        int8_t *tile = s->prepared + (i - place) * prepared_size(reader);
        size_t from = is_by_row ? s->routed[i].row : i;
        prepare_in_tile(tile, reader, place, width, x + from * reader->columns);
    }
    barrier(team);
}

/* The number of rows of a run to multiply at once, from `first` on; sets `x` to the prepared rows. */
INLINE int run_tile(const Step *s, const Run *run, int first, const Matrix *a, const int8_t **x) {
    *x = s->prepared + (run->first + first) * prepared_size(a);
    return run->count - first < MAX_TILE ? run->count - first : MAX_TILE;
}

static void gate_phase(Step *s, Team *team, const Layer *layer) {
    int blocks = num_blocks(&layer->mlps->gate), item;
    int size = piece_size(blocks * s->num_runs, team), pieces = (blocks + size - 1) / size;
    while ((item = take(team, pieces * s->num_runs, 1)) >= 0) {
        const Run *run = &s->runs[item / pieces];
        const Mlp *mlp = &layer->mlps[run->expert];
        int start = item % pieces * size, end = start + size < blocks ? start + size : blocks;
        for (int first = 0; first < run->count; first += MAX_TILE)
            for (int index = start; index < end; index++) {
                const int8_t *x;
                vf gate[MAX_TILE], up[MAX_TILE];
                int count = run_tile(s, run, first, &mlp->gate, &x), inner = mlp->gate.rows;
                multiply(&mlp->gate, index, x, count, 0, mlp->gate.columns, gate);
                multiply(&mlp->up, index, x, count, 0, mlp->up.columns, up);
                float *out = s->inner + (size_t)(run->first + first) * inner + index * LANES;
                for (int m = 0; m < count; m++, out += inner)
                    store_some(out, activate(&s->model->activation, gate[m], up[m]),
                               inner - index * LANES);
            }
    }
    barrier(team);
}

static void add_run(Step *s, const Run *run, const Matrix *down, int start, int end) {
    for (int first = 0; first < run->count; first += MAX_TILE)
        for (int index = start; index < end; index++) {
            const int8_t *x;
            vf y[MAX_TILE];
            int count = run_tile(s, run, first, down, &x), left = down->rows - index * LANES;
            const Routed *routed = s->routed + run->first + first;
            multiply(down, index, x, count, 0, down->columns, y);
            for (int m = 0; m < count; m++) {
                float *target = s->hidden + (size_t)routed[m].row * down->rows + index * LANES;
                vf sum = fmadd(y[m], splat(routed[m].weight), load_some(target, left));
                store_some(target, sum, left);
            }
        }
}

static void down_phase(Step *s, Team *team, const Layer *layer) {
    int blocks = num_blocks(&layer->mlps->down), size = piece_size(blocks, team), start;
    while ((start = take(team, blocks, size)) >= 0) {
        int end = start + size < blocks ? start + size : blocks;
        for (int i = 0; i < s->num_runs; i++)
            add_run(s, &s->runs[i], &layer->mlps[s->runs[i].expert].down, start, end);
    }
    barrier(team);
}

void mix_experts(Step *s, Team *team, const Layer *layer) {
    Input input = {s->prepared, s->num_rows};
    project(team, &layer->router, 1, &input, s->scores, layer->num_experts, 0);
    choose_phase(s, team, layer);
    for (int first = 0; first < s->num_rows; first += ROUTED_ROWS) {
        int rows = routed_rows(s->num_rows - first), count = rows * layer->num_chosen;
        if (take(team, 1, 1) >= 0) sort_by_expert(s, layer, first, rows);
        barrier(team);
        prepare_runs(s, team, count, &layer->mlps->gate, s->normed, 1);
        gate_phase(s, team, layer);
        prepare_runs(s, team, count, &layer->mlps->down, s->inner, 0);
        down_phase(s, team, layer);
    }
}
