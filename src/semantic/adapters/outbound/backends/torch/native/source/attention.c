/* Attention within sequences, over float32 keys and values. */
#include "step.h"

enum { HEADS = 3 };                          /* heads computed at once if they share keys */
enum { SIDE = 8, BLOCK = 64, QUERIES = 96 }; /* keys per square, keys per block, queries per tile */
enum { PANEL = PANEL_VECTORS * LANES };      /* queries per panel, one per lane */
#define MASKED -1e30f

/* ---- single rows ----------------------------------------------------------------------------- */

INLINE void score_columns(const float *query, int heads, const float *const *keys, int dim, int d,
                          int left, vf acc[HEADS][4]) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        vf key = load_some(keys[i] + d, left);
#pragma GCC unroll 3
        for (int h = 0; h < heads; h++)
            acc[h][i] = fmadd(load_some(query + h * dim + d, left), key, acc[h][i]);
    }
}

INLINE void score_keys(const float *query, int heads, const float *keys, int count, int dim,
                       float scores[HEADS][KEYS + LANES]) {
    for (int j = 0; j < count; j += 4) {
        vf acc[HEADS][4];
        const float *k[4];
        int d = 0;
        for (int i = 0; i < 4; i++) k[i] = keys + (size_t)(j + i < count ? j + i : j) * dim;
#pragma GCC unroll 3
        for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) acc[h][i] = zeros();
        for (; d + LANES <= dim; d += LANES) score_columns(query, heads, k, dim, d, LANES, acc);
        if (d < dim) score_columns(query, heads, k, dim, d, dim - d, acc);
#pragma GCC unroll 3
        for (int h = 0; h < heads; h++) reduce4(acc[h], scores[h] + j);
    }
}

/* Turn scores into weights; writes the greatest score and the sum of weights. */
INLINE void weigh(float *scores, int count, float *greatest_and_sum) {
    vf most = splat(MASKED), total = zeros();
    float all[LANES], greatest = MASKED;
    for (int j = count; j % LANES; j++) scores[j] = MASKED; /* their weights round to zero */
    for (int j = 0; j < count; j += LANES) most = vmax(most, load(scores + j));
    store(all, most);
    for (int i = 0; i < LANES; i++) greatest = all[i] > greatest ? all[i] : greatest;
    for (int j = 0; j < count; j += LANES) {
        vf weight = exponential(load(scores + j) - splat(greatest));
        store(scores + j, weight);
        total = total + weight;
    }
    greatest_and_sum[0] = greatest;
    greatest_and_sum[1] = reduce_add(total);
}

INLINE void add_values(float scores[HEADS][KEYS + LANES], int heads, const float *values, int count,
                       int dim, int d, int is_whole, float *part, size_t stride) {
    vf acc[HEADS][VALUE_VECTORS];
#pragma GCC unroll 3
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int v = 0; v < VALUE_VECTORS; v++) acc[h][v] = zeros();
    for (int j = 0; j < count; j++) {
        vf value[VALUE_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VALUE_VECTORS; v++) {
            int at = d + v * LANES;
            value[v] = load_some(values + (size_t)j * dim + at, is_whole ? LANES : dim - at);
        }
#pragma GCC unroll 3
        for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
            for (int v = 0; v < VALUE_VECTORS; v++)
                acc[h][v] = fmadd(value[v], splat(scores[h][j]), acc[h][v]);
    }
    for (int h = 0; h < heads; h++)
        for (int v = 0; v < VALUE_VECTORS; v++)
            store_some(part + h * stride + d + v * LANES, acc[h][v], dim - d - v * LANES);
}

/* Attention of heads that share keys, over `count` keys: writes each head's weighted values, greatest
 * score and sum of weights. Several heads run at once, because each addition waits for the last one. */
INLINE void attend_keys(const float *query, int heads, const float *keys, const float *values,
                        int count, int dim, float *part, size_t stride) {
    float scores[HEADS][KEYS + LANES];
    score_keys(query, heads, keys, count, dim, scores);
    for (int h = 0; h < heads; h++) weigh(scores[h], count, part + h * stride + dim);
    for (int d = 0; d < dim; d += VALUE_VECTORS * LANES) {
        if (d + VALUE_VECTORS * LANES <= dim)
            add_values(scores, heads, values, count, dim, d, 1, part, stride);
        else
            add_values(scores, heads, values, count, dim, d, 0, part, stride);
    }
}

static void attend_heads(const float *query, int heads, const float *keys, const float *values,
                         int count, int dim, float *part, size_t stride) {
    switch (heads) {
    case 1: attend_keys(query, 1, keys, values, count, dim, part, stride); break;
    case 2: attend_keys(query, 2, keys, values, count, dim, part, stride); break;
    default: attend_keys(query, 3, keys, values, count, dim, part, stride);
    }
}

INLINE float *part_of(const Step *s, int single, int head, int share) {
    const Model *m = s->model;
    return s->parts + (((size_t)single * m->heads + head) * s->num_shares + share) * part_size(m);
}

/* Merge one part of a head's attention into another. */
static void merge_parts(float *part, const float *other, int dim) {
    float greatest = fmaxf(part[dim], other[dim]);
    float mine = exponential(splat(part[dim] - greatest))[0];
    float its = exponential(splat(other[dim] - greatest))[0];
    for (int d = 0; d < dim; d += LANES) {
        vf sum = load_some(part + d, dim - d) * splat(mine);
        sum = fmadd(load_some(other + d, dim - d), splat(its), sum);
        store_some(part + d, sum, dim - d);
    }
    part[dim] = greatest;
    part[dim + 1] = part[dim + 1] * mine + other[dim + 1] * its;
}

/* Attention over a share of a single row's keys. The heads that share these keys process a piece one
 * after the other while it is in the cache. With few rows, several threads divide a row's pieces. */
static void attend_single(Step *s, int layer, int item, float *scratch) {
    const Model *m = s->model;
    int shared = m->heads / m->kv_heads, stride = (m->heads + 2 * m->kv_heads) * m->dim;
    int single = item % s->num_single, head = item / s->num_single % m->kv_heads;
    int share = item / s->num_single / m->kv_heads, row = s->single[single];
    const Row *r = &s->rows[row];
    int64_t start = first_visible(r, &m->layers[layer]) + (int64_t)share * KEYS;
    for (int is_first = 1; start <= r->position; start += s->num_shares * KEYS, is_first = 0) {
        int count = r->position + 1 - start < KEYS ? (int)(r->position + 1 - start) : KEYS;
        size_t place = (((size_t)layer * m->kv_heads + head) * r->capacity + start) * m->dim;
        for (int h = head * shared, some; h < (head + 1) * shared; h += some) {
            int left = (head + 1) * shared - h;
            some = left == 4 ? 2 : left < HEADS ? left : HEADS;
            const float *query = s->inputs + (size_t)row * stride + h * m->dim;
            float *part = is_first ? part_of(s, single, h, share) : scratch;
            size_t step = (is_first ? s->num_shares : 1) * part_size(m);
            attend_heads(query, some, r->keys + place, r->values + place, count, m->dim, part, step);
            for (int i = 0; i < some && !is_first; i++)
                merge_parts(part_of(s, single, h + i, share), scratch + i * part_size(m), m->dim);
        }
    }
}

/* A head's sum of weights, including its sink's weight. */
INLINE float with_sink(float total, float greatest, const Layer *layer, int head) {
    if (!layer->sinks) return total;
    return total + exponential(vmin(splat(88.0f), splat(layer->sinks[head] - greatest)))[0];
}

void join_parts(const Step *s, int row, const Layer *layer, float *out) {
    const Model *m = s->model;
    const Row *r = &s->rows[row];
    int single = s->place[row];
    int64_t count = r->position + 1 - first_visible(r, layer);
    for (int h = 0; h < m->heads && single >= 0; h++, out += m->dim) {
        float *part = part_of(s, single, h, 0);
        for (int share = 1; share < s->num_shares && (int64_t)share * KEYS < count; share++)
            merge_parts(part, part_of(s, single, h, share), m->dim);
        vf sum = splat(with_sink(part[m->dim + 1], part[m->dim], layer, h));
        for (int d = 0; d < m->dim; d += LANES)
            store_some(out + d, load_some(part + d, m->dim - d) / sum, m->dim - d);
    }
}

/* ---- tiles: panels of queries, one query per vector lane --------------------------------------- */

/* Add the products of SIDE numbers of y and a panel of x, summed over `count`. */
INLINE void multiply_square(const float *x, const float *y, size_t y_stride, int count,
                            vf acc[SIDE][PANEL_VECTORS]) {
    for (int k = 0; k < count; k++, x += PANEL, y += y_stride) {
        vf v[PANEL_VECTORS];
#pragma GCC unroll 4
        for (int i = 0; i < PANEL_VECTORS; i++) v[i] = load(x + i * LANES);
#pragma GCC unroll 2
        for (int j = 0; j < SIDE; j += 4)
#pragma GCC unroll 4
            for (int i = 0; i < PANEL_VECTORS; i++) add_products(v[i], y + j, i, acc + j);
    }
}

/* Write rows, whose size is a multiple of SIDE, as columns of a panel of `width`; missing rows are zero. */
INLINE void transpose_panel(const float *const *rows, int count, int width, int dim, float *panel) {
    int i = 0;
    for (; i + 4 <= count; i += 4)
        for (int d = 0; d < dim; d += 4) transpose_four(rows + i, d, width, panel + d * width + i);
    for (; i < width; i++)
        for (int d = 0; d < dim; d++) panel[d * width + i] = i < count ? rows[i][d] : 0.0f;
}

/* A panel of queries and their attention so far, [dim][PANEL] each. */
typedef struct {
    float *queries, *sums;
    int64_t first[PANEL], last[PANEL]; /* range of keys that each query attends to */
    int64_t least_last, most_last, most_first;
    float greatest[PANEL], total[PANEL];
} Panel;

static void mask_scores(const Panel *p, int64_t start, int count, float *scores) {
    for (int j = 0; j < count; j++)
        for (int i = 0; i < PANEL; i++)
            if (start + j > p->last[i] || start + j < p->first[i]) scores[j * PANEL + i] = MASKED;
}

/* Turn scores into weights; `shrink` are the factors by which earlier sums are scaled. A panel's
 * vectors run at once, because each operation of an exponential waits for the last one. */
INLINE void weigh_panel(Panel *p, int count, float *scores, vf *shrink) {
    vf greatest[PANEL_VECTORS], total[PANEL_VECTORS];
    for (int i = 0; i < PANEL_VECTORS; i++) {
        greatest[i] = load(p->greatest + i * LANES), total[i] = zeros();
        for (int j = 0; j < count; j++)
            greatest[i] = vmax(greatest[i], load(scores + j * PANEL + i * LANES));
    }
    for (int j = 0; j < count; j++)
#pragma GCC unroll 4
        for (int i = 0; i < PANEL_VECTORS; i++) {
            float *score = scores + j * PANEL + i * LANES;
            vf weight = exponential(load(score) - greatest[i]);
            store(score, weight);
            total[i] = total[i] + weight;
        }
    for (int i = 0; i < PANEL_VECTORS; i++) {
        float *sum = p->total + i * LANES;
        shrink[i] = exponential(load(p->greatest + i * LANES) - greatest[i]);
        store(p->greatest + i * LANES, greatest[i]);
        store(sum, fmadd(load(sum), shrink[i], total[i]));
    }
}

/* Attend to a block of keys, transposed in squares of SIDE, and their values. */
static void attend_block(Panel *p, const float *keys, const float *values, int64_t start, int count,
                         int dim) {
    float scores[BLOCK * PANEL];
    vf shrink[PANEL_VECTORS];
    if (start > p->most_last) return;
    for (int j = 0; j < count; j += SIDE) {
        vf acc[SIDE][PANEL_VECTORS] = {{{0}}};
        multiply_square(p->queries, keys + (size_t)j * dim, SIDE, dim, acc);
        for (int i = 0; i < SIDE; i++)
            for (int v = 0; v < PANEL_VECTORS; v++)
                store(scores + (j + i) * PANEL + v * LANES, acc[i][v]);
    }
    if (start + count - 1 > p->least_last || start < p->most_first)
        mask_scores(p, start, count, scores);
    weigh_panel(p, count, scores, shrink);
    for (int d = 0; d < dim; d += SIDE) {
        float *sums = p->sums + d * PANEL;
        vf acc[SIDE][PANEL_VECTORS];
        for (int i = 0; i < SIDE; i++)
            for (int v = 0; v < PANEL_VECTORS; v++)
                acc[i][v] = load(sums + i * PANEL + v * LANES) * shrink[v];
        multiply_square(scores, values + d, dim, count, acc);
        for (int i = 0; i < SIDE; i++)
            for (int v = 0; v < PANEL_VECTORS; v++)
                store(sums + i * PANEL + v * LANES, acc[i][v]);
    }
}

enum { MOST_PANELS = (QUERIES + PANEL - 1) / PANEL };

size_t attention_scratch(const Model *m) {
    size_t tiles = (2 * (size_t)MOST_PANELS * PANEL + BLOCK) * m->dim, single = HEADS * part_size(m);
    return tiles > single ? tiles : single;
}

/* Copy a tile's queries (of the heads that share keys) into panels; returns the number of panels. */
static int fill_panels(const Step *s, int layer, const int32_t *tile, int head, Panel *panels,
                       float *scratch) {
    const Model *m = s->model;
    int shared = m->heads / m->kv_heads, dim = m->dim, count = tile[1] * shared;
    int stride = (m->heads + 2 * m->kv_heads) * dim, num_panels = (count + PANEL - 1) / PANEL;
    const float *first = s->inputs + (size_t)tile[0] * stride + head * shared * dim;
    for (int n = 0; n < num_panels; n++) {
        Panel *p = &panels[n];
        const float *queries[PANEL];
        p->queries = scratch + 2 * n * PANEL * dim, p->sums = p->queries + PANEL * dim;
        memset(p->sums, 0, PANEL * dim * sizeof(float));
        for (int i = 0; i < PANEL; i++) {
            int at = n * PANEL + i < count ? n * PANEL + i : count - 1;
            const Row *row = &s->rows[tile[0] + at / shared];
            queries[i] = first + (size_t)(at / shared) * stride + at % shared * dim;
            p->first[i] = first_visible(row, &m->layers[layer]), p->last[i] = row->position;
            p->greatest[i] = MASKED, p->total[i] = 0.0f;
        }
        /* Rows of a tile are consecutive, so the bounds are those of the first and the last. */
        p->least_last = p->last[0], p->most_last = p->last[PANEL - 1];
        p->most_first = p->first[PANEL - 1];
        transpose_panel(queries, PANEL, PANEL, dim, p->queries);
    }
    return num_panels;
}

static void attend_tile(Step *s, int layer, int item, float *scratch) {
    const Model *m = s->model;
    const int32_t *tile = s->tiles + 2 * (s->num_tiles - 1 - item / m->kv_heads);
    int head = item % m->kv_heads, shared = m->heads / m->kv_heads, dim = m->dim;
    const Row *rows = s->rows + tile[0];
    Panel panels[MOST_PANELS];
    float *keys = scratch;
    int num_panels = fill_panels(s, layer, tile, head, panels, scratch + BLOCK * dim);
    int64_t start = panels[0].first[0], end = rows[tile[1] - 1].position + 1;
    size_t place = ((size_t)layer * m->kv_heads + head) * rows->capacity;
    for (; start < end; start += BLOCK) {
        int some = end - start < BLOCK ? (int)(end - start) : BLOCK;
        for (int j = 0; j < some; j += SIDE) {
            const float *those[SIDE];
            for (int i = 0; i < SIDE; i++) those[i] = rows->keys + (place + start + j + i) * dim;
            transpose_panel(those, some - j < SIDE ? some - j : SIDE, SIDE, dim, keys + j * dim);
        }
        for (int n = 0; n < num_panels; n++)
            attend_block(&panels[n], keys, rows->values + (place + start) * dim, start, some, dim);
    }
    for (int at = 0; at < tile[1] * shared; at++) {
        const Panel *p = &panels[at / PANEL];
        int row = tile[0] + at / shared, i = at % PANEL;
        int h = head * shared + at % shared;
        float *out = s->attended + ((size_t)row * m->heads + h) * dim;
        float total = with_sink(p->total[i], p->greatest[i], &m->layers[layer], h);
        for (int d = 0; d < dim; d++) out[d] = p->sums[d * PANEL + i] / total;
    }
}

/* ---- a layer --------------------------------------------------------------------------------- */

void find_tiles(Step *s) {
    int shared = s->model->heads / s->model->kv_heads, most = QUERIES / shared;
    for (int row = 0, end; row < s->num_rows; row = end) {
        const Row *first = &s->rows[row];
        for (end = row + 1; end < s->num_rows && end - row < most; end++)
            if (s->rows[end].keys != first->keys ||
                s->rows[end].position != first->position + end - row) break;
        int is_tile = (end - row) * shared >= SIDE && s->model->dim % SIDE == 0 && most > 1;
        if (is_tile) s->tiles[2 * s->num_tiles] = row, s->tiles[2 * s->num_tiles++ + 1] = end - row;
        for (int i = row; i < end; i++) {
            s->place[i] = is_tile ? -1 : s->num_single;
            if (!is_tile) s->single[s->num_single++] = i;
        }
    }
}

/* The last tiles have the most keys and start first, so that no thread waits for them at the end. */
void attend_phase(Step *s, Team *team, int thread, int layer) {
    int heads = s->model->kv_heads, tiled = s->num_tiles * heads, item;
    float *scratch = s->scratch + thread * s->scratch_size;
    while ((item = take(team, tiled + s->num_single * heads * s->num_shares, 1)) >= 0) {
        if (item < tiled)
            attend_tile(s, layer, item, scratch);
        else
            attend_single(s, layer, item - tiled, scratch);
    }
    barrier(team);
}
