/* cpu.c - the CPU backend of ops.h: shares every operation out over a pool of threads.
 *
 * Nothing here adds two numbers that belong to one sum: items are whole tiles, rows or heads, so the number of threads cannot change a
 * result. Operations that are too small to share run on the calling thread. */
#include "ops/ops.h"

#include "base/half.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Work below this many bytes of weights is not worth waking another thread for: a wake and a barrier cost about 1-2 us, in which a core
 * reads 16-32 KB. */
enum { MIN_ITEM_BYTES = 16 << 10, MAX_ITEM_BYTES = 512 << 10 }; /* docs/LEARNED.md #17 */

struct cpu {
    struct ops ops;
    const struct kernels *k;
    struct pool *pool;
    int threads;
    /* Scratch of ops_cpu_experts: hidden vectors of all (row, rank) pairs (ops_cpu_reserve_experts). */
    struct activations hidden;
    float *gate_up;
    struct experts_job *experts;
};

static struct cpu *cpu_of(struct ops *ops) { return ops->backend; }
static int min_int(int a, int b) { return a < b ? a : b; }

/* Item sizes in tiles: enough items for every thread to take several, none tiny, none so large that the last one is waited for. */
static int tiles_per_item(const struct cpu *cpu, size_t tile_size, int64_t total_tiles)
{
    size_t bytes = tile_size * (size_t)total_tiles / (size_t)(4 * cpu->threads);
    bytes = bytes < MIN_ITEM_BYTES ? MIN_ITEM_BYTES : bytes > MAX_ITEM_BYTES ? MAX_ITEM_BYTES : bytes;
    int64_t tiles = (int64_t)(bytes / tile_size);
    return cpu->threads == 1 ? (int)total_tiles : tiles < 1 ? 1 : (int)tiles;
}

static void input_row(const struct activations *a, int t, struct dot_input *in)
{
    size_t width = (size_t)a->width, padded = (size_t)ops_padded(a->width), row = (size_t)t;
    *in = (struct dot_input){ a->values + row * padded, a->codes + row * width, a->scales + row * (width / 32), a->sums + row * (width / 16) };
}

static void scale_outputs(float *x, int n, float scale)
{
    for (int i = 0; i < n; i++)
        x[i] *= scale;
}

/* ---- gather, norm, quantize -------------------------------------------------------------------------------------------------------- */

static void gather(struct ops *ops, const struct row_table *table, const uint64_t *ids, int n, float *out)
{
    size_t bytes = quant_row_bytes(table->format, table->width);
    for (int i = 0; i < n; i++)
        quant_decode(table->format, table->data + ids[i] * bytes, table->width, out + (size_t)i * (size_t)table->width);
}

struct norm_job { struct cpu *cpu; const float *x, *gamma; int groups, dim, gamma_groups, partials; float eps, *out; };

static void norm_item(void *context, int t)
{
    const struct norm_job *j = context;
    size_t dim = (size_t)j->dim, row = (size_t)t * (size_t)ops_padded(j->groups * j->dim);
    for (int g = 0; g < j->groups; g++)
        j->cpu->k->vector->rms_norm(j->x + row + (size_t)g * dim, j->gamma + (size_t)(g % j->gamma_groups) * dim, j->dim, j->eps, j->partials,
                                    j->out + row + (size_t)g * dim);
}

static void norm(struct ops *ops, int n, const float *x, int groups, int dim, const float *gamma, int gamma_groups, float eps, int partials, float *out)
{
    struct norm_job job = { cpu_of(ops), x, gamma, groups, dim, gamma_groups, partials, eps, out };
    pool_run(job.cpu->pool, n, norm_item, &job);
}

struct quantize_job { struct cpu *cpu; struct activations *a; };

static void quantize_item(void *context, int t)
{
    const struct quantize_job *j = context;
    struct dot_input row;
    input_row(j->a, t, &row);
    j->cpu->k->quantize(row.values, j->a->width, (int8_t *)row.codes, (float *)row.scales, (int32_t *)row.sums);
}

static void quantize(struct ops *ops, int n, struct activations *a)
{
    struct quantize_job job = { cpu_of(ops), a };
    pool_run(job.cpu->pool, n, quantize_item, &job);
}

/* ---- products ---------------------------------------------------------------------------------------------------------------------- */

enum { MAX_MATRICES = 8 };

struct matmul_job {
    struct cpu *cpu;
    int n, n_matrices;
    const struct matrix *const *w;
    float *const *out;
    struct dot_input in[KERNEL_MAX_ROWS];
    int item_tiles[MAX_MATRICES], first_item[MAX_MATRICES + 1];
};

static void matmul_item(void *context, int item)
{
    const struct matmul_job *j = context;
    int i = 0;
    while (item >= j->first_item[i + 1])
        i++;
    const struct matrix *w = j->w[i];
    int first = (item - j->first_item[i]) * j->item_tiles[i], n_tiles = min_int(j->item_tiles[i], (int)tile_count(w->rows) - first);
    float *out[KERNEL_MAX_ROWS];
    for (int t = 0; t < j->n; t++)
        out[t] = j->out[i] + (size_t)t * (size_t)ops_padded(w->rows) + (size_t)first * TILE_ROWS;
    j->cpu->k->dot[w->format->type](w->tiles + (size_t)first * w->stride, w->stride, n_tiles, w->width, j->in, j->n, out);
    for (int t = 0; w->scale != 1.0f && t < j->n; t++)
        scale_outputs(out[t], n_tiles * TILE_ROWS, w->scale);
}

static void matmul(struct ops *ops, int n, const struct activations *x, int n_matrices, const struct matrix *const *w, float *const *out)
{
    struct matmul_job job = { .cpu = cpu_of(ops), .n = n, .n_matrices = n_matrices, .w = w, .out = out };
    for (int t = 0; t < n; t++)
        input_row(x, t, &job.in[t]);
    for (int i = 0; i < n_matrices; i++) {
        int tiles = (int)tile_count(w[i]->rows);
        job.item_tiles[i] = tiles_per_item(job.cpu, w[i]->stride, tiles);
        job.first_item[i + 1] = job.first_item[i] + (tiles + job.item_tiles[i] - 1) / job.item_tiles[i];
    }
    pool_run(job.cpu->pool, job.first_item[n_matrices], matmul_item, &job);
}

/* ---- Gated Residual, small element-wise steps -------------------------------------------------------------------------------------- */

struct rows_job {
    struct cpu *cpu;
    int a, b;               /* sizes, as the item function reads them */
    const float *x, *y, *z;
    float *out;
};

static void gate_input_item(void *context, int t)
{
    const struct rows_job *j = context;
    size_t at = (size_t)t * (size_t)ops_padded(j->a);
    j->cpu->k->vector->gate_input(j->x + at, j->a, j->b, j->out + at);
}

static void gate_input(struct ops *ops, int n, int width, int streams, const float *x, float *out)
{
    struct rows_job job = { .cpu = cpu_of(ops), .a = width, .b = streams, .x = x, .out = out };
    pool_run(job.cpu->pool, n, gate_input_item, &job);
}

static void mix_item(void *context, int t)
{
    const struct rows_job *j = context;
    size_t wide = (size_t)t * (size_t)ops_padded(j->a * j->b);
    j->cpu->k->vector->mix(j->x + wide, j->y + wide, j->a, j->b, j->out + (size_t)t * (size_t)ops_padded(j->b));
}

static void mix(struct ops *ops, int n, int streams, int dim, const float *gates, const float *normed, float *out)
{
    struct rows_job job = { .cpu = cpu_of(ops), .a = streams, .b = dim, .x = gates, .y = normed, .out = out };
    pool_run(job.cpu->pool, n, mix_item, &job);
}

static void write_item(void *context, int t)
{
    const struct rows_job *j = context;
    size_t row = (size_t)t;
    j->cpu->k->vector->write(j->out + row * (size_t)ops_padded(j->a * j->b), j->x + row * (size_t)ops_padded(j->a), j->y + row * (size_t)ops_padded(j->b), j->a,
                             j->b);
}

static void write_streams(struct ops *ops, int n, int streams, int dim, const float *inject, const float *y, float *residual)
{
    struct rows_job job = { .cpu = cpu_of(ops), .a = streams, .b = dim, .x = inject, .y = y, .out = residual };
    pool_run(job.cpu->pool, n, write_item, &job);
}

static void silu_mul_item(void *context, int t)
{
    const struct rows_job *j = context;
    size_t at = (size_t)t * (size_t)ops_padded(j->a);
    j->cpu->k->vector->silu_mul(j->x + at, j->y + at, j->a, j->out + at);
}

static void silu_mul(struct ops *ops, int n, int width, const float *gate, const float *up, float *out)
{
    struct rows_job job = { .cpu = cpu_of(ops), .a = width, .x = gate, .y = up, .out = out };
    pool_run(job.cpu->pool, n, silu_mul_item, &job);
}

static void add2(struct ops *ops, size_t n, float *x, const float *a, const float *b) { cpu_of(ops)->k->vector->add2(x, a, b, (int)n); }

static bool all_finite(struct ops *ops, const float *x, size_t n) { return cpu_of(ops)->k->vector->all_finite(x, n); }

struct conv_job { struct cpu *cpu; int n_taps, channels; const float *const (*taps)[8]; const float *kernel; float *out; };

static void conv_item(void *context, int t)
{
    const struct conv_job *j = context;
    j->cpu->k->vector->conv_silu(j->taps[t], j->kernel, j->n_taps, j->channels, j->out + (size_t)t * (size_t)ops_padded(j->channels));
}

static void conv_silu(struct ops *ops, int n, int n_taps, int channels, const float *const (*taps)[8], const float *kernel, float *out)
{
    struct conv_job job = { cpu_of(ops), n_taps, channels, taps, kernel, out };
    pool_run(job.cpu->pool, n, conv_item, &job);
}

static void ngram_gate_item(void *context, int t)
{
    const struct rows_job *j = context;
    size_t dim = (size_t)j->b, row = (size_t)t, wide = row * (size_t)ops_padded(j->a * j->b);
    const float *v = j->z + row * (size_t)ops_padded(j->b);
    for (int s = 0; s < j->a; s++) {
        size_t at = wide + (size_t)s * dim;
        float d = j->cpu->k->vector->dot256(j->x + at, j->y + at, j->b) / sqrtf((float)j->b), size = sqrtf(fabsf(d) > 1e-6f ? fabsf(d) : 1e-6f);
        float gate[1] = { 1.0f };
        j->cpu->k->vector->mul_sigmoid(gate, &(float){ d > 0 ? size : d < 0 ? -size : 0.0f }, 1);
        for (size_t i = 0; i < dim; i++)
            j->out[at + i] = gate[0] * v[i];
    }
}

static void ngram_gate(struct ops *ops, int n, int streams, int dim, const float *k, const float *q, const float *v, float *p)
{
    struct rows_job job = { .cpu = cpu_of(ops), .a = streams, .b = dim, .x = k, .y = q, .z = v, .out = p };
    pool_run(job.cpu->pool, n, ngram_gate_item, &job);
}

/* ---- Gated DeltaNet ---------------------------------------------------------------------------------------------------------------- */

struct delta_job {
    struct cpu *cpu;
    const struct delta_shape *shape;
    const struct row_span *spans;
    float *const *state;
    float *qkv, *decay, *beta, *out;
    const float *alpha, *b, *a, *dt, *z, *gamma;
    float eps;
};

static int delta_width(const struct delta_shape *s) { return 2 * s->k_heads * s->dim_k + s->v_heads * s->dim_v; }

static void delta_prepare_item(void *context, int t)
{
    const struct delta_job *j = context;
    const struct delta_shape *s = j->shape;
    size_t gates = (size_t)t * (size_t)ops_padded(s->v_heads);
    float *row = j->qkv + (size_t)t * (size_t)ops_padded(delta_width(s));
    for (int h = 0; h < 2 * s->k_heads; h++) /* queries, then keys */
        j->cpu->k->vector->l2_norm(row + h * s->dim_k, s->dim_k, 1e-6f, h < s->k_heads ? 1.0f / sqrtf((float)s->dim_k) : 1.0f);
    j->cpu->k->vector->delta_gates(j->alpha + gates, j->b + gates, j->a, j->dt, s->v_heads, j->decay + gates, j->beta + gates);
}

static void delta_prepare(struct ops *ops, int n, const struct delta_shape *shape, float *qkv, const float *alpha, const float *b, const float *a, const float *dt,
                          float *decay, float *beta)
{
    struct delta_job job = { .cpu = cpu_of(ops), .shape = shape, .qkv = qkv, .alpha = alpha, .b = b, .a = a, .dt = dt, .decay = decay, .beta = beta };
    pool_run(job.cpu->pool, n, delta_prepare_item, &job);
}

static void delta_rule_item(void *context, int item)
{
    const struct delta_job *j = context;
    const struct delta_shape *s = j->shape;
    int head = item % s->v_heads, key_head = head % s->k_heads; /* GGUF's tiled order of value heads (spec 2.2) */
    const struct row_span *span = &j->spans[item / s->v_heads];
    const float *q[KERNEL_MAX_ROWS], *k[KERNEL_MAX_ROWS], *v[KERNEL_MAX_ROWS];
    float *out[KERNEL_MAX_ROWS], decay[KERNEL_MAX_ROWS], beta[KERNEL_MAX_ROWS];
    for (int i = 0; i < span->n; i++) {
        size_t t = (size_t)(span->first + i), gates = t * (size_t)ops_padded(s->v_heads);
        const float *row = j->qkv + t * (size_t)ops_padded(delta_width(s));
        q[i] = row + key_head * s->dim_k;
        k[i] = row + (s->k_heads + key_head) * s->dim_k;
        v[i] = row + 2 * s->k_heads * s->dim_k + head * s->dim_v;
        out[i] = j->out + t * (size_t)ops_padded(s->v_heads * s->dim_v) + (size_t)(head * s->dim_v);
        decay[i] = j->decay[gates + (size_t)head];
        beta[i] = j->beta[gates + (size_t)head];
    }
    float *state = j->state[item / s->v_heads] + (size_t)head * (size_t)s->dim_k * (size_t)s->dim_v;
    j->cpu->k->vector->delta_rule(state, s->dim_k, s->dim_v, span->n, span->keep, q, k, v, decay, beta, out);
}

static void delta_rule(struct ops *ops, int n_spans, const struct row_span *spans, float *const *state, const struct delta_shape *shape, const float *qkv,
                       const float *decay, const float *beta, float *out)
{
    struct delta_job job = { .cpu = cpu_of(ops), .shape = shape, .spans = spans, .state = state, .qkv = (float *)qkv, .decay = (float *)decay,
                             .beta = (float *)beta, .out = out };
    pool_run(job.cpu->pool, n_spans * shape->v_heads, delta_rule_item, &job);
}

static void delta_output_item(void *context, int t)
{
    const struct delta_job *j = context;
    const struct delta_shape *s = j->shape;
    size_t at = (size_t)t * (size_t)ops_padded(s->v_heads * s->dim_v);
    for (int h = 0; h < s->v_heads; h++) {
        float *o = j->out + at + h * s->dim_v;
        j->cpu->k->vector->rms_norm(o, j->gamma, s->dim_v, j->eps, 32, o);
    }
    j->cpu->k->vector->mul_sigmoid(j->out + at, j->z + at, s->v_heads * s->dim_v);
}

static void delta_output(struct ops *ops, int n, const struct delta_shape *shape, float *o, const float *z, const float *gamma, float eps)
{
    struct delta_job job = { .cpu = cpu_of(ops), .shape = shape, .out = o, .z = z, .gamma = gamma, .eps = eps };
    pool_run(job.cpu->pool, n, delta_output_item, &job);
}

/* ---- Attention --------------------------------------------------------------------------------------------------------------------- */

struct attention_job {
    struct cpu *cpu;
    const struct attention_shape *shape;
    const struct attention_row *rows;
    float *q, *k, *iq, *out;
    const float *v, *ik, *q_gamma, *k_gamma, *iq_gamma, *ik_gamma;
    int split; /* items per (row, key head) or per row */
};

static void heads_norm_rope(const struct attention_job *j, float *x, int n_heads, int stride, int dim, const float *gamma, const struct attention_row *row)
{
    for (int h = 0; h < n_heads; h++) {
        j->cpu->k->vector->rms_norm(x + h * stride, gamma, dim, j->shape->eps, 32, x + h * stride);
        j->cpu->k->vector->rope(x + h * stride, row->cosines, row->sines, j->shape->n_pairs);
    }
}

static void attention_store_item(void *context, int t)
{
    const struct attention_job *j = context;
    const struct attention_shape *s = j->shape;
    const struct attention_row *row = &j->rows[t];
    size_t at = (size_t)t;
    int kv = s->kv_heads * s->dim;
    float *k = j->k + at * (size_t)ops_padded(kv);
    heads_norm_rope(j, j->q + at * (size_t)ops_padded(2 * s->n_heads * s->dim), s->n_heads, 2 * s->dim, s->dim, j->q_gamma, row);
    heads_norm_rope(j, k, s->kv_heads, s->dim, s->dim, j->k_gamma, row);
    j->cpu->k->vector->kv_store(&row->keys, row->position, k, kv);
    j->cpu->k->vector->kv_store(&row->values, row->position, j->v + at * (size_t)ops_padded(kv), kv);
    if (!s->block)
        return;
    heads_norm_rope(j, j->iq + at * (size_t)ops_padded(s->index_heads * s->index_dim), s->index_heads, s->index_dim, s->index_dim, j->iq_gamma, row);
    memcpy(row->raw_keys + (size_t)(row->position % row->ring_rows) * (size_t)s->index_dim, j->ik + at * (size_t)ops_padded(s->index_dim),
           (size_t)s->index_dim * sizeof(float));
}

/* The key of the block that ends at this row: mean of its raw keys (added in order), norm, rope at its first position. */
static void block_key(const struct attention_job *j, const struct attention_row *row)
{
    const struct attention_shape *s = j->shape;
    int block = row->position / s->block;
    float *key = row->block_keys + (size_t)block * (size_t)s->index_dim;
    for (int i = 0; i < s->block; i++) {
        const float *raw = row->raw_keys + (size_t)((block * s->block + i) % row->ring_rows) * (size_t)s->index_dim;
        for (int d = 0; d < s->index_dim; d++)
            key[d] = i ? key[d] + raw[d] : raw[d];
    }
    for (int d = 0; d < s->index_dim; d++)
        key[d] /= (float)s->block;
    j->cpu->k->vector->rms_norm(key, j->ik_gamma, s->index_dim, s->eps, 32, key);
    j->cpu->k->vector->rope(key, row->block_cosines, row->block_sines, s->n_pairs);
}

static void attention_store(struct ops *ops, int n, const struct attention_shape *shape, const struct attention_row *rows, float *q, float *k, const float *v,
                            float *iq, const float *ik, const float *q_gamma, const float *k_gamma, const float *iq_gamma, const float *ik_gamma)
{
    struct attention_job job = { .cpu = cpu_of(ops), .shape = shape, .rows = rows, .q = q, .k = k, .v = v, .iq = iq, .ik = ik,
                                 .q_gamma = q_gamma, .k_gamma = k_gamma, .iq_gamma = iq_gamma, .ik_gamma = ik_gamma };
    pool_run(job.cpu->pool, n, attention_store_item, &job);
    for (int t = 0; shape->block && t < n; t++)
        if ((rows[t].position + 1) % shape->block == 0)
            block_key(&job, &rows[t]);
}

enum { SCORE_BLOCKS = 512 }; /* blocks per item of the indexer */

static int complete_blocks(const struct attention_job *j, int t) { return j->shape->block ? (j->rows[t].position + 1) / j->shape->block : 0; }
static bool prunes(const struct attention_job *j, int t) { return complete_blocks(j, t) > j->shape->budget_blocks; }

static void index_item(void *context, int item)
{
    const struct attention_job *j = context;
    const struct attention_shape *s = j->shape;
    int t = item / j->split, first = item % j->split * SCORE_BLOCKS, last = min_int(first + SCORE_BLOCKS, complete_blocks(j, t));
    if (prunes(j, t) && first < last)
        j->cpu->k->vector->index_scores(j->iq + (size_t)t * (size_t)ops_padded(s->index_heads * s->index_dim), s->index_heads, s->index_dim,
                                        j->rows[t].block_keys, first, last, j->rows[t].scores);
}

/* The value of the `want`-th largest score and how many are larger. Scores are >= 0, so their bit patterns order like numbers: four rounds
 * of counting bytes, the highest first. */
static uint32_t kth_largest(const float *scores, int n, int want, int *n_larger)
{
    uint32_t prefix = 0, mask = 0;
    int larger = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int count[256] = { 0 };
        for (int b = 0; b < n; b++)
            if ((float_bits(scores[b]) & mask) == prefix)
                count[float_bits(scores[b]) >> shift & 255]++;
        int byte = 255;
        while (byte > 0 && larger + count[byte] < want)
            larger += count[byte--];
        prefix |= (uint32_t)byte << shift;
        mask |= 255u << shift;
    }
    *n_larger = larger;
    return prefix;
}

static void select_item(void *context, int t)
{
    const struct attention_job *j = context;
    const struct attention_shape *s = j->shape;
    const struct attention_row *row = &j->rows[t];
    struct selection *out = (struct selection *)&row->selection;
    int blocks = complete_blocks(j, t), n = 0, first = 0;
    if (prunes(j, t)) {
        int larger, equal = 0;
        uint32_t threshold = kth_largest(row->scores, blocks, s->budget_blocks, &larger);
        for (int b = 0; b < blocks; b++) {
            uint32_t score = float_bits(row->scores[b]);
            if (score < threshold || (score == threshold && larger + equal++ >= s->budget_blocks)) /* ties: the lower block */
                continue;
            for (int i = 0; i < s->block; i++)
                out->cells[n++] = b * s->block + i;
        }
        first = blocks * s->block;
    }
    for (int cell = first; cell <= row->position; cell++)
        out->cells[n++] = cell;
    out->n = n;
}

static void attention_select(struct ops *ops, int n, const struct attention_shape *shape, struct attention_row *rows, const float *iq)
{
    struct attention_job job = { .cpu = cpu_of(ops), .shape = shape, .rows = rows, .iq = (float *)iq };
    int most = 0;
    for (int t = 0; t < n; t++)
        most = prunes(&job, t) && complete_blocks(&job, t) > most ? complete_blocks(&job, t) : most;
    job.split = (most + SCORE_BLOCKS - 1) / SCORE_BLOCKS;
    pool_run(job.cpu->pool, n * job.split, index_item, &job);
    pool_run(job.cpu->pool, n, select_item, &job);
}

static void attend_item(void *context, int item)
{
    const struct attention_job *j = context;
    const struct attention_shape *s = j->shape;
    int part = item % j->split, head = item / j->split % s->kv_heads, t = item / j->split / s->kv_heads;
    const struct attention_row *row = &j->rows[t];
    int group = s->n_heads / s->kv_heads, first = group * part / j->split, n_heads = group * (part + 1) / j->split - first;
    if (n_heads == 0)
        return;
    first += head * group;
    const float *q = j->q + (size_t)t * (size_t)ops_padded(2 * s->n_heads * s->dim) + (size_t)first * 2 * (size_t)s->dim;
    float *out = j->out + (size_t)t * (size_t)ops_padded(s->n_heads * s->dim) + (size_t)first * (size_t)s->dim;
    j->cpu->k->vector->attend(q, 2 * s->dim, n_heads, s->dim, 1.0f / sqrtf((float)s->dim), &row->keys, &row->values, head, s->kv_heads, row->selection.cells,
                              row->selection.n, out, s->dim);
    for (int h = 0; h < n_heads; h++)
        j->cpu->k->vector->mul_sigmoid(out + h * s->dim, q + h * 2 * s->dim + s->dim, s->dim);
}

static void attend(struct ops *ops, int n, const struct attention_shape *shape, const struct attention_row *rows, const float *q, float *out)
{
    struct attention_job job = { .cpu = cpu_of(ops), .shape = shape, .rows = rows, .q = (float *)q, .out = out };
    int items = n * shape->kv_heads; /* more threads than that: share the query heads of a key head too */
    job.split = min_int((job.cpu->threads + items - 1) / items, shape->n_heads / shape->kv_heads);
    pool_run(job.cpu->pool, items * job.split, attend_item, &job);
}

/* ---- Mixture of experts ------------------------------------------------------------------------------------------------------------ */

static void route(struct ops *ops, int n, int n_experts, int n_used, const float *logits, struct route *route)
{
    for (int t = 0; t < n; t++)
        cpu_of(ops)->k->vector->route(logits + (size_t)t * (size_t)ops_padded(n_experts), n_experts, n_used, route->ids[t], route->weights[t]);
}

enum { MAX_JOBS = KERNEL_MAX_ROWS * OPS_MAX_USED };

struct experts_job {
    struct cpu *cpu;
    const struct expert_set *set;
    const struct expert_job *jobs;
    const struct activations *x;
    int first_slot[MAX_JOBS]; /* of a job's hidden vectors */
    int n_used, item_tiles, items_per_job;
    float *parts;
};

/* gate and up for a range of tiles, silu, and the A8 form of the result; ranges are whole groups of 32. */
static void gate_up_item(void *context, int item)
{
    const struct experts_job *j = context;
    struct cpu *cpu = j->cpu;
    const struct expert_set *set = j->set;
    const struct expert_job *job = &j->jobs[item / j->items_per_job];
    int slot = j->first_slot[item / j->items_per_job];
    int first = item % j->items_per_job * j->item_tiles, n_tiles = min_int(j->item_tiles, (int)tile_count(set->width) - first);
    const uint8_t *blob = job->blob + (size_t)first * (set->gate_bytes + set->up_bytes);
    int padded = ops_padded(set->width), at = first * TILE_ROWS, count = min_int(n_tiles * TILE_ROWS, set->width - at);
    struct dot_input in[KERNEL_MAX_ROWS];
    float *gate[KERNEL_MAX_ROWS], *up[KERNEL_MAX_ROWS];
    for (int i = 0; i < job->n_rows; i++) {
        input_row(j->x, job->row[i], &in[i]);
        gate[i] = cpu->gate_up + (size_t)(slot + i) * 2 * (size_t)padded + at;
        up[i] = gate[i] + padded;
    }
    size_t stride = set->gate_bytes + set->up_bytes;
    for (int i = 0; i < n_tiles; i++, blob += stride) { /* in the order of memory: each prefetches the other */
        float *gate_out[KERNEL_MAX_ROWS], *up_out[KERNEL_MAX_ROWS];
        for (int t = 0; t < job->n_rows; t++) {
            gate_out[t] = gate[t] + i * TILE_ROWS;
            up_out[t] = up[t] + i * TILE_ROWS;
        }
        cpu->k->dot[set->gate->type](blob, stride, 1, set->hidden, in, job->n_rows, gate_out);
        cpu->k->dot[set->up->type](blob + set->gate_bytes, stride, 1, set->hidden, in, job->n_rows, up_out);
    }
    for (int i = 0; i < job->n_rows; i++) {
        if (set->gate_scale)
            scale_outputs(gate[i], n_tiles * TILE_ROWS, set->gate_scale[job->expert]);
        if (set->up_scale)
            scale_outputs(up[i], n_tiles * TILE_ROWS, set->up_scale[job->expert]);
        struct dot_input out;
        input_row(&cpu->hidden, slot + i, &out);
        cpu->k->vector->silu_mul(gate[i], up[i], count, (float *)out.values + at);
        if (!set->down->is_float)
            cpu->k->quantize(out.values + at, count, (int8_t *)out.codes + at, (float *)out.scales + at / 32, (int32_t *)out.sums + at / 16);
    }
}

static void down_item(void *context, int item)
{
    const struct experts_job *j = context;
    struct cpu *cpu = j->cpu;
    const struct expert_set *set = j->set;
    const struct expert_job *job = &j->jobs[item / j->items_per_job];
    int first = item % j->items_per_job * j->item_tiles, n_tiles = min_int(j->item_tiles, (int)tile_count(set->hidden) - first);
    const uint8_t *tiles = job->blob + set->down_offset + (size_t)first * set->down_bytes;
    struct dot_input in[KERNEL_MAX_ROWS];
    float *out[KERNEL_MAX_ROWS];
    for (int i = 0; i < job->n_rows; i++) {
        input_row(&cpu->hidden, j->first_slot[item / j->items_per_job] + i, &in[i]);
        out[i] = j->parts + (size_t)(job->row[i] * j->n_used + job->rank[i]) * (size_t)ops_padded(set->hidden) + (size_t)first * TILE_ROWS;
    }
    cpu->k->dot[set->down->type](tiles, set->down_bytes, n_tiles, set->width, in, job->n_rows, out);
    for (int i = 0; set->down_scale && i < job->n_rows; i++)
        scale_outputs(out[i], n_tiles * TILE_ROWS, set->down_scale[job->expert]);
}

int ops_cpu_experts(struct ops *ops, int n_used, const struct expert_set *set, const struct activations *x, const struct expert_job *jobs, int n_jobs,
                    float *parts, double timeout_s)
{
    struct cpu *cpu = cpu_of(ops);
    struct experts_job *job = cpu->experts; /* not on the stack: a stalled worker may look at it after we returned */
    *job = (struct experts_job){ .cpu = cpu, .set = set, .jobs = jobs, .x = x, .n_used = n_used, .parts = parts };
    for (int i = 1; i < n_jobs; i++)
        job->first_slot[i] = job->first_slot[i - 1] + jobs[i - 1].n_rows;
    cpu->hidden.width = set->width;

    int tiles = (int)tile_count(set->width);
    job->item_tiles = (tiles_per_item(cpu, set->gate_bytes + set->up_bytes, (int64_t)tiles * n_jobs) + 1) & ~1;
    job->item_tiles = min_int(job->item_tiles, (tiles + 1) & ~1);
    job->items_per_job = (tiles + job->item_tiles - 1) / job->item_tiles;
    int stalled = pool_run_within(cpu->pool, n_jobs * job->items_per_job, gate_up_item, job, timeout_s);
    if (stalled >= 0)
        return stalled / job->items_per_job;

    tiles = (int)tile_count(set->hidden);
    job->item_tiles = min_int(tiles_per_item(cpu, set->down_bytes, (int64_t)tiles * n_jobs), tiles);
    job->items_per_job = (tiles + job->item_tiles - 1) / job->item_tiles;
    stalled = pool_run_within(cpu->pool, n_jobs * job->items_per_job, down_item, job, timeout_s);
    return stalled >= 0 ? stalled / job->items_per_job : -1;
}

struct combine_job { struct cpu *cpu; int n_used, dim; const float *parts, *shared, *gate; const struct route *route; float *out; };

static void combine_item(void *context, int t)
{
    const struct combine_job *j = context;
    const float *parts[OPS_MAX_USED];
    size_t padded = (size_t)ops_padded(j->dim), row = (size_t)t;
    for (int i = 0; i < j->n_used; i++)
        parts[i] = j->parts + (row * (size_t)j->n_used + (size_t)i) * padded;
    j->cpu->k->vector->combine(parts, j->route->weights[t], j->n_used, j->shared + row * padded, j->gate[row * (size_t)ops_padded(1)], j->dim,
                               j->out + row * padded);
}

static void combine(struct ops *ops, int n, int n_used, int dim, const float *parts, const struct route *route, const float *shared, const float *shared_gate,
                    float *out)
{
    struct combine_job job = { cpu_of(ops), n_used, dim, parts, shared, shared_gate, route, out };
    pool_run(job.cpu->pool, n, combine_item, &job);
}

/* ---- Life -------------------------------------------------------------------------------------------------------------------------- */

struct pool *ops_cpu_pool(struct ops *ops) { return cpu_of(ops)->pool; }
const char *ops_cpu_name(const struct ops *ops) { return ((const struct cpu *)ops->backend)->k->name; }

int ops_cpu_reserve_experts(struct ops *ops, int width, int n_used, struct strata_error *error)
{
    struct cpu *cpu = cpu_of(ops);
    size_t slots = (size_t)KERNEL_MAX_ROWS * (size_t)n_used, padded = ((size_t)ops_padded(width) + 32 + 63) & ~(size_t)63; /* every array of whole lines */
    cpu->hidden = (struct activations){ width, aligned_alloc(64, slots * padded * 4), aligned_alloc(64, slots * padded), aligned_alloc(64, slots * padded / 8),
                                        aligned_alloc(64, slots * padded / 4) };
    cpu->gate_up = aligned_alloc(64, slots * padded * 8);
    cpu->experts = calloc(1, sizeof *cpu->experts);
    if (!cpu->experts || !cpu->hidden.values || !cpu->hidden.codes || !cpu->hidden.scales || !cpu->hidden.sums || !cpu->gate_up)
        return error_set(error, STRATA_E_MEMORY, "out of memory for the scratch of %d experts of width %d", n_used, width);
    return 0;
}

int ops_cpu_create(struct ops **out, enum isa isa, int n_threads, struct strata_error *error)
{
    const struct kernels *k = kernels_get(isa);
    if (!k)
        return error_set(error, STRATA_E_UNSUPPORTED, "this processor lacks the instruction set asked for");
    struct cpu *cpu = calloc(1, sizeof *cpu);
    if (!cpu)
        return error_set(error, STRATA_E_MEMORY, "out of memory for the CPU backend");
    cpu->k = k;
    cpu->threads = n_threads ? n_threads : pool_default_threads();
    int code = pool_create(&cpu->pool, cpu->threads, error);
    if (code) {
        free(cpu);
        return code;
    }
    cpu->ops = (struct ops){ .backend = cpu, .gather = gather, .norm = norm, .quantize = quantize, .matmul = matmul, .gate_input = gate_input, .mix = mix,
                             .write = write_streams, .conv_silu = conv_silu, .delta_prepare = delta_prepare, .delta_rule = delta_rule,
                             .delta_output = delta_output, .attention_store = attention_store, .attention_select = attention_select, .attend = attend,
                             .route = route, .silu_mul = silu_mul, .combine = combine, .ngram_gate = ngram_gate, .add2 = add2,
                             .all_finite = all_finite };
    *out = &cpu->ops;
    return 0;
}

void ops_cpu_destroy(struct ops *ops)
{
    if (!ops)
        return;
    struct cpu *cpu = cpu_of(ops);
    pool_destroy(cpu->pool);
    free(cpu->hidden.values);
    free(cpu->hidden.codes);
    free(cpu->hidden.scales);
    free(cpu->hidden.sums);
    free(cpu->gate_up);
    free(cpu->experts);
    free(cpu);
}
