/* qwen4exp.c - the forward pass of Qwen3.8-Flash-Next as a list of operations (spec/model.md section 3).
 *
 * States are of two kinds. Rings and KV are indexed by position: a rejected row is overwritten by the next row at its position, so
 * they need no care. The delta-rule state is a running product: a window applies certain rows to it and works on a copy for the
 * others, whose inputs stay in the window until commit replays the accepted ones (design.md section 6).
 */
#include "model/qwen4exp.h"

#include "ops/math.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

enum { ROWS = KERNEL_MAX_ROWS };

struct model_state {
    const struct qwen4exp *m;
    struct arena arena;
    int context;
    enum kv_type kv;
    float **delta;               /* [n_delta]: [v_heads][dim_v/16][dim_k][16] */
    float **conv;                /* [n_delta]: ring [ROWS + taps - 1][channels] of raw qkv */
    struct kv_plane *keys, *values; /* [n_attention] */
    float **raw_keys;            /* [n_attention]: ring [ROWS + block][index_dim] */
    float **block_keys;          /* [n_attention]: [context/block][index_dim] */
    float *ngram;                /* ring [ROWS + (taps-1)*dilation][W] of normed n-gram vectors */
    int span_first, span_n, span_keep; /* its rows in the last forward; n = 0: nothing to commit */
};

/* What commit needs to replay a delta layer. */
struct delta_trace { float *qkv, *decay, *beta; };

struct model_window {
    const struct qwen4exp *m;
    struct arena arena;
    struct activations normed, low, hidden, embed, delta_out, attn_out, shared;
    float *residual, *gates, *inject, *y;
    float *qkv, *z, *alpha, *b;
    float *q, *k, *v, *index_q, *index_k;
    float *router, *shared_gate, *gate, *up, *shared_out, *parts;
    float *ngram_key, *ngram_query, *ngram_value, *ngram_p, *ngram_c;
    float *logits, *zeros, *cosines, *sines, *block_cosines, *block_sines, *scores;
    float *inverse_frequency; /* [n_pairs] */
    int32_t *cells;
    size_t max_cells, max_blocks;
    struct delta_trace *traces; /* [n_delta] */
    struct route route;

    /* The rows of the last forward; `rows` is the caller's and valid only during it. */
    const struct model_row *rows;
    int n, n_spans;
    bool broken; /* a product since the last check was not finite */
    int logits_at[ROWS]; /* where a row's logits are, -1 if it wanted none */
    struct row_span spans[ROWS];
    struct model_state *span_state[ROWS];
};

static int conv_ring(const struct qwen4exp *m) { return ROWS + m->conv_taps - 1; }
static int ngram_ring(const struct qwen4exp *m) { return ROWS + (m->ngram.taps - 1) * m->ngram.dilation; }
static int raw_ring(const struct attention_shape *s) { return ROWS + s->block; }
static size_t delta_floats(const struct qwen4exp *m) { return (size_t)(m->delta.v_heads * m->delta.dim_v) * (size_t)m->delta.dim_k; }
static size_t block_count(const struct attention_shape *s, int context) { return s->block ? (size_t)(context / s->block) + 1 : 0; }

/* ---- One sequence's state ---------------------------------------------------------------------------------------------------------- */

static void state_destroy(struct model_state *s)
{
    if (!s)
        return;
    arena_destroy(&s->arena);
    free(s->delta);
    free(s->conv);
    free(s->keys);
    free(s->values);
    free(s->raw_keys);
    free(s->block_keys);
    free(s);
}

static size_t plane_bytes(enum kv_type kv, size_t cells, size_t width, size_t *scale_bytes)
{
    *scale_bytes = kv == KV_INT8 ? cells * (width / KV_GROUP) * sizeof(float) : 0;
    return cells * width * (kv == KV_INT8 ? 1 : 2);
}

/* Gives out the memory of every layer; with base NULL it only counts. */
static size_t state_layout(struct model_state *s)
{
    const struct qwen4exp *m = s->m;
    struct arena *arena = s->arena.base ? &s->arena : NULL;
    size_t total = 0;
#define TAKE(target, bytes)                                                                                                                          \
    do {                                                                                                                                             \
        size_t take_bytes = (bytes);                                                                                                                 \
        total += take_bytes + 64;                                                                                                                    \
        if (arena)                                                                                                                                   \
            (target) = arena_alloc(arena, take_bytes);                                                                                               \
    } while (0)
    for (int i = 0; i < m->model.n_layers; i++) {
        const struct attention_shape *shape = &m->layers[i].attention_shape;
        int at = m->layers[i].kind_index;
        if (!m->layers[i].is_attention) {
            TAKE(s->delta[at], delta_floats(m) * sizeof(float));
            TAKE(s->conv[at], (size_t)conv_ring(m) * (size_t)m->conv_channels * sizeof(float));
            continue;
        }
        size_t scales, codes = plane_bytes(s->kv, (size_t)s->context, (size_t)(shape->kv_heads * shape->dim), &scales);
        s->keys[at].type = s->values[at].type = s->kv;
        TAKE(s->keys[at].codes, codes);
        TAKE(s->keys[at].scales, scales);
        TAKE(s->values[at].codes, codes);
        TAKE(s->values[at].scales, scales);
        TAKE(s->raw_keys[at], (size_t)raw_ring(shape) * (size_t)shape->index_dim * sizeof(float));
        TAKE(s->block_keys[at], block_count(shape, s->context) * (size_t)shape->index_dim * sizeof(float));
    }
    TAKE(s->ngram, (size_t)ngram_ring(m) * (size_t)m->wide * sizeof(float));
#undef TAKE
    return total;
}

static int state_create(struct model_state **out, const struct model *model, int context, enum kv_type kv, struct strata_error *error)
{
    const struct qwen4exp *m = (const struct qwen4exp *)model;
    if (context < 1 || context > model->max_context)
        return error_set(error, STRATA_E_ARGUMENT, "a context of %d tokens: this model takes 1 to %d", context, model->max_context);
    const struct attention_shape *shape = &m->layers[0].attention_shape;
    if (kv == KV_INT8 && shape->kv_heads * shape->dim % KV_GROUP)
        return error_set(error, STRATA_E_UNSUPPORTED, "int8 KV needs a key width that is a multiple of %d, this model has %d", KV_GROUP, shape->kv_heads * shape->dim);
    struct model_state *s = calloc(1, sizeof *s);
    size_t n_delta = (size_t)m->n_delta + 1, n_attention = (size_t)m->n_attention + 1;
    if (s) {
        *s = (struct model_state){ .m = m, .context = context, .kv = kv, .delta = calloc(n_delta, sizeof(float *)), .conv = calloc(n_delta, sizeof(float *)),
                                   .keys = calloc(n_attention, sizeof *s->keys), .values = calloc(n_attention, sizeof *s->values),
                                   .raw_keys = calloc(n_attention, sizeof(float *)), .block_keys = calloc(n_attention, sizeof(float *)) };
    }
    if (!s || !s->delta || !s->conv || !s->keys || !s->values || !s->raw_keys || !s->block_keys) {
        state_destroy(s);
        return error_set(error, STRATA_E_MEMORY, "out of memory for a session");
    }
    int code = arena_create(&s->arena, state_layout(s), "a session's state", error);
    if (code) {
        state_destroy(s);
        return code;
    }
    state_layout(s);
    *out = s;
    return 0;
}

/* Only the delta states are read before they are written: rings and KV are guarded by the position. */
static void state_reset(struct model_state *s)
{
    for (int i = 0; i < s->m->n_delta; i++)
        memset(s->delta[i], 0, delta_floats(s->m) * sizeof(float));
    s->span_n = 0;
}

static uint64_t hash_ring(uint64_t hash, const float *ring, int size, size_t width, int last, int n)
{
    for (int position = last - n < 0 ? 0 : last - n; position < last; position++)
        hash = XXH64(ring + (size_t)(position % size) * width, width * sizeof(float), hash);
    return hash;
}

static uint64_t state_hash(const struct model_state *s, int n_tokens)
{
    const struct qwen4exp *m = s->m;
    uint64_t hash = 0;
    for (int i = 0; i < m->model.n_layers; i++) {
        const struct attention_shape *shape = &m->layers[i].attention_shape;
        int at = m->layers[i].kind_index;
        if (!m->layers[i].is_attention) {
            hash = XXH64(s->delta[at], delta_floats(m) * sizeof(float), hash);
            hash = hash_ring(hash, s->conv[at], conv_ring(m), (size_t)m->conv_channels, n_tokens, m->conv_taps - 1);
            continue;
        }
        size_t scales, codes = plane_bytes(s->kv, (size_t)n_tokens, (size_t)(shape->kv_heads * shape->dim), &scales);
        hash = XXH64(s->keys[at].codes, codes, hash);
        hash = XXH64(s->keys[at].scales, scales, hash);
        hash = XXH64(s->values[at].codes, codes, hash);
        hash = XXH64(s->values[at].scales, scales, hash);
        if (!shape->block)
            continue;
        hash = XXH64(s->block_keys[at], (size_t)(n_tokens / shape->block) * (size_t)shape->index_dim * sizeof(float), hash);
        hash = hash_ring(hash, s->raw_keys[at], raw_ring(shape), (size_t)shape->index_dim, n_tokens, n_tokens % shape->block);
    }
    return hash_ring(hash, s->ngram, ngram_ring(m), (size_t)m->wide, n_tokens, (m->ngram.taps - 1) * m->ngram.dilation);
}

/* ---- The window's scratch ---------------------------------------------------------------------------------------------------------- */

static void window_destroy(struct model_window *w)
{
    if (!w)
        return;
    arena_destroy(&w->arena);
    free(w->traces);
    free(w);
}

static float *take_rows(struct arena *arena, size_t *total, int width)
{
    size_t bytes = (size_t)ROWS * (size_t)ops_padded(width) * sizeof(float);
    *total += bytes + 64;
    return arena ? arena_alloc(arena, bytes) : NULL;
}

static void take_activations(struct arena *arena, size_t *total, struct activations *a, int width)
{
    size_t cells = (size_t)ROWS * (size_t)width;
    *a = (struct activations){ .width = width, .values = take_rows(arena, total, width) };
    *total += cells + cells / 8 + cells / 4 + 4 * 64;
    if (!arena)
        return;
    a->codes = arena_alloc(arena, cells);
    a->scales = arena_alloc(arena, cells / 32 * sizeof(float));
    a->sums = arena_alloc(arena, cells / 16 * sizeof(int32_t));
}

static size_t window_layout(struct model_window *w)
{
    const struct qwen4exp *m = w->m;
    const struct attention_shape *s = &m->layers[0].attention_shape;
    struct arena *arena = w->arena.base ? &w->arena : NULL;
    size_t total = 0;
    int hidden = m->model.hidden, inner = m->delta.v_heads * m->delta.dim_v;
    take_activations(arena, &total, &w->normed, m->wide);
    take_activations(arena, &total, &w->low, m->low_rank);
    take_activations(arena, &total, &w->hidden, hidden);
    take_activations(arena, &total, &w->embed, hidden);
    take_activations(arena, &total, &w->delta_out, inner);
    take_activations(arena, &total, &w->attn_out, s->n_heads * s->dim);
    take_activations(arena, &total, &w->shared, m->shared_width);
    const struct { float **target; int width; } rows[] = {
        { &w->residual, m->wide }, { &w->gates, m->wide }, { &w->inject, m->streams }, { &w->y, hidden }, { &w->qkv, m->conv_channels }, { &w->z, inner },
        { &w->alpha, m->delta.v_heads }, { &w->b, m->delta.v_heads }, { &w->q, 2 * s->n_heads * s->dim }, { &w->k, s->kv_heads * s->dim },
        { &w->v, s->kv_heads * s->dim }, { &w->index_q, s->index_heads * s->index_dim }, { &w->index_k, s->index_dim }, { &w->router, m->n_experts },
        { &w->shared_gate, 1 }, { &w->gate, m->shared_width }, { &w->up, m->shared_width }, { &w->shared_out, hidden }, { &w->parts, m->n_used * ops_padded(hidden) },
        { &w->ngram_key, m->wide }, { &w->ngram_query, m->wide }, { &w->ngram_value, hidden }, { &w->ngram_p, m->wide }, { &w->ngram_c, m->wide },
        { &w->logits, m->model.n_vocab }, { &w->zeros, m->wide > m->conv_channels ? m->wide : m->conv_channels }, { &w->cosines, s->n_pairs },
        { &w->sines, s->n_pairs }, { &w->block_cosines, s->n_pairs }, { &w->block_sines, s->n_pairs }, { &w->inverse_frequency, s->n_pairs },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        *rows[i].target = take_rows(arena, &total, rows[i].width);
    for (int i = 0; i < m->n_delta; i++) {
        w->traces[i].qkv = take_rows(arena, &total, m->conv_channels);
        w->traces[i].decay = take_rows(arena, &total, m->delta.v_heads);
        w->traces[i].beta = take_rows(arena, &total, m->delta.v_heads);
    }
    for (int i = 0; i < m->model.n_layers; i++) {
        const struct attention_shape *shape = &m->layers[i].attention_shape;
        if (!m->layers[i].is_attention)
            continue;
        size_t cells = shape->block ? (size_t)(shape->budget_blocks + 1) * (size_t)shape->block : (size_t)m->model.max_context;
        w->max_cells = cells > w->max_cells ? cells : w->max_cells;
        w->max_blocks = block_count(shape, m->model.max_context) > w->max_blocks ? block_count(shape, m->model.max_context) : w->max_blocks;
    }
    total += ROWS * (w->max_cells * sizeof(int32_t) + w->max_blocks * sizeof(float)) + 128;
    if (arena) {
        w->cells = arena_alloc(arena, ROWS * w->max_cells * sizeof(int32_t));
        w->scores = arena_alloc(arena, ROWS * w->max_blocks * sizeof(float));
    }
    return total;
}

static int window_create(struct model_window **out, const struct model *model, struct strata_error *error)
{
    const struct qwen4exp *m = (const struct qwen4exp *)model;
    struct model_window *w = calloc(1, sizeof *w);
    if (w)
        w->traces = calloc((size_t)m->n_delta + 1, sizeof *w->traces);
    if (!w || !w->traces) {
        window_destroy(w);
        return error_set(error, STRATA_E_MEMORY, "out of memory for a window");
    }
    w->m = m;
    int code = arena_create(&w->arena, window_layout(w), "a window", error);
    if (code) {
        window_destroy(w);
        return code;
    }
    window_layout(w);
    int n_pairs = m->layers[0].attention_shape.n_pairs;
    double step = math_inverse_root(m->rope_base, n_pairs), frequency = 1;
    for (int i = 0; i < n_pairs; i++, frequency *= step)
        w->inverse_frequency[i] = (float)frequency;
    *out = w;
    return 0;
}

/* ---- The forward pass -------------------------------------------------------------------------------------------------------------- */

/* The angle is rounded to float32 as the reference does. */
static void rope_table(const struct model_window *w, int position, float *cosines, float *sines, int n_pairs)
{
    for (int i = 0; i < n_pairs; i++)
        math_cos_sin((double)((float)position * w->inverse_frequency[i]), &cosines[i], &sines[i]);
}

static void find_spans(struct model_window *w)
{
    w->n_spans = 0;
    for (int t = 0; t < w->n; t++) {
        const struct model_row *row = &w->rows[t], *before = t ? row - 1 : NULL;
        if (!before || before->state != row->state) {
            w->spans[w->n_spans] = (struct row_span){ t, 1, row->certain };
            w->span_state[w->n_spans++] = row->state;
            continue;
        }
        w->spans[w->n_spans - 1].n++;
        w->spans[w->n_spans - 1].keep += row->certain;
    }
    for (int s = 0; s < w->n_spans; s++) {
        struct model_state *state = w->span_state[s];
        state->span_first = w->spans[s].first;
        state->span_n = w->spans[s].n;
        state->span_keep = w->spans[s].keep;
    }
}

/* Looks at n rows that gates, a rounding or a choice may hide a NaN or an infinity of from the check of the residual. */
static void watch(struct model_window *w, int n, int width, const float *x)
{
    struct ops *ops = w->m->model.ops;
    if (!ops->all_finite(ops, x, (size_t)n * (size_t)ops_padded(width)))
        w->broken = true;
}

/* ops->matmul, watched: a damaged scale of a weight block shows here. */
static void products(struct model_window *w, int n, const struct activations *x, int n_matrices, const struct matrix *const *matrices, float *const *out)
{
    struct ops *ops = w->m->model.ops;
    ops->matmul(ops, n, x, n_matrices, matrices, out);
    for (int i = 0; i < n_matrices; i++)
        watch(w, n, matrices[i]->rows, out[i]);
}

/* spec 3.1 steps 1-5: residual -> w->hidden (with A8) and w->inject. */
static void read_streams(struct model_window *w, const struct gated_residual *mix)
{
    const struct qwen4exp *m = w->m;
    struct ops *ops = m->model.ops;
    int n = w->n, streams = m->streams, hidden = m->model.hidden;
    ops->norm(ops, n, w->residual, streams, hidden, mix->norm, streams, m->eps, 256, w->normed.values);
    ops->quantize(ops, n, &w->normed);
    products(w, n, &w->normed, mix->inject.rows ? 2 : 1, (const struct matrix *[]){ &mix->down, &mix->inject }, (float *[]){ w->low.values, w->inject });
    ops->gate_input(ops, n, m->low_rank, streams, w->low.values, w->low.values);
    if (!mix->up.format->is_float)
        ops->quantize(ops, n, &w->low);
    products(w, n, &w->low, 1, (const struct matrix *[]){ &mix->up }, (float *[]){ w->gates });
    ops->mix(ops, n, streams, hidden, w->gates, w->normed.values, w->hidden.values);
    ops->quantize(ops, n, &w->hidden);
}

static void write_streams(struct model_window *w)
{
    const struct qwen4exp *m = w->m;
    m->model.ops->write(m->model.ops, w->n, m->streams, m->model.hidden, w->inject, w->y, w->residual);
}

/* taps[t][j]: the vector `distance * (n_taps-1-j)` positions before row t, from a ring or zeros before the start. */
static void ring_taps(const struct model_window *w, const float *(*taps)[8], int n_taps, int distance, int ring, size_t width,
                      const float *(*base)(const struct model_state *, int), int layer)
{
    for (int t = 0; t < w->n; t++)
        for (int j = 0; j < n_taps; j++) {
            int position = w->rows[t].position - distance * (n_taps - 1 - j);
            taps[t][j] = position < 0 ? w->zeros : base(w->rows[t].state, layer) + (size_t)(position % ring) * width;
        }
}

static const float *conv_base(const struct model_state *s, int layer) { return s->conv[layer]; }
static const float *ngram_base(const struct model_state *s, int layer) { return s->ngram; }

/* spec 3.4 */
static void delta_forward(struct model_window *w, const struct qwen4exp_layer *layer)
{
    const struct qwen4exp *m = w->m;
    const struct delta_layer *d = &layer->delta;
    struct ops *ops = m->model.ops;
    int n = w->n, at = layer->kind_index;
    size_t channels = (size_t)m->conv_channels;
    struct delta_trace *trace = &w->traces[at];
    products(w, n, &w->hidden, 4, (const struct matrix *[]){ &d->qkv, &d->gate, &d->alpha, &d->beta }, (float *[]){ w->qkv, w->z, w->alpha, w->b });
    for (int t = 0; t < n; t++)
        memcpy(w->rows[t].state->conv[at] + (size_t)(w->rows[t].position % conv_ring(m)) * channels, w->qkv + (size_t)t * (size_t)ops_padded(m->conv_channels),
               channels * sizeof(float));
    const float *taps[ROWS][8];
    ring_taps(w, taps, m->conv_taps, 1, conv_ring(m), channels, conv_base, at);
    ops->conv_silu(ops, n, m->conv_taps, m->conv_channels, taps, d->conv, trace->qkv);
    ops->delta_prepare(ops, n, &m->delta, trace->qkv, w->alpha, w->b, d->a, d->dt, trace->decay, trace->beta);
    float *states[ROWS];
    for (int s = 0; s < w->n_spans; s++)
        states[s] = w->span_state[s]->delta[at];
    ops->delta_rule(ops, w->n_spans, w->spans, states, &m->delta, trace->qkv, trace->decay, trace->beta, w->delta_out.values);
    ops->delta_output(ops, n, &m->delta, w->delta_out.values, w->z, d->norm, m->eps);
    if (!d->out.format->is_float)
        ops->quantize(ops, n, &w->delta_out);
    products(w, n, &w->delta_out, 1, (const struct matrix *[]){ &d->out }, (float *[]){ w->y });
}

/* spec 3.5 */
static void attention_forward(struct model_window *w, const struct qwen4exp_layer *layer)
{
    const struct qwen4exp *m = w->m;
    const struct attention_layer *a = &layer->attention;
    const struct attention_shape *shape = &layer->attention_shape;
    struct ops *ops = m->model.ops;
    int n = w->n, at = layer->kind_index;
    struct attention_row rows[ROWS];
    for (int t = 0; t < n; t++) {
        struct model_state *s = w->rows[t].state;
        size_t pairs = (size_t)t * (size_t)ops_padded(shape->n_pairs);
        rows[t] = (struct attention_row){ .position = w->rows[t].position, .cosines = w->cosines + pairs, .sines = w->sines + pairs, .keys = s->keys[at],
                                          .values = s->values[at], .raw_keys = s->raw_keys[at], .ring_rows = raw_ring(shape), .block_keys = s->block_keys[at],
                                          .block_cosines = w->block_cosines + pairs, .block_sines = w->block_sines + pairs,
                                          .scores = w->scores + (size_t)t * w->max_blocks, .selection = { w->cells + (size_t)t * w->max_cells, 0 } };
        if (shape->block)
            rope_table(w, rows[t].position / shape->block * shape->block, w->block_cosines + pairs, w->block_sines + pairs, shape->n_pairs);
    }
    products(w, n, &w->hidden, shape->block ? 5 : 3, (const struct matrix *[]){ &a->q, &a->k, &a->v, &a->index_q, &a->index_k },
                (float *[]){ w->q, w->k, w->v, w->index_q, w->index_k });
    ops->attention_store(ops, n, shape, rows, w->q, w->k, w->v, w->index_q, w->index_k, a->q_norm, a->k_norm, a->index_q_norm, a->index_k_norm);
    ops->attention_select(ops, n, shape, rows, w->index_q);
    ops->attend(ops, n, shape, rows, w->q, w->attn_out.values);
    watch(w, n, shape->n_heads * shape->dim, w->attn_out.values);
    if (!a->out.format->is_float)
        ops->quantize(ops, n, &w->attn_out);
    products(w, n, &w->attn_out, 1, (const struct matrix *[]){ &a->out }, (float *[]){ w->y });
}

/* spec 3.6 */
static void ffn_forward(struct model_window *w, const struct ffn_layer *f)
{
    const struct qwen4exp *m = w->m;
    struct ops *ops = m->model.ops;
    int n = w->n;
    products(w, n, &w->hidden, 4, (const struct matrix *[]){ &f->router, &f->shared_gate, &f->gate, &f->up },
                (float *[]){ w->router, w->shared_gate, w->gate, w->up });
    ops->route(ops, n, m->n_experts, m->n_used, w->router, &w->route);
    ops->experts(ops, n, m->n_used, &f->experts, &w->hidden, &w->route, w->parts);
    ops->silu_mul(ops, n, m->shared_width, w->gate, w->up, w->shared.values);
    if (!f->down.format->is_float)
        ops->quantize(ops, n, &w->shared);
    products(w, n, &w->shared, 1, (const struct matrix *[]){ &f->down }, (float *[]){ w->shared_out });
    ops->experts_wait(ops, n, m->n_used, &f->experts, w->parts);
    ops->combine(ops, n, m->n_used, m->model.hidden, w->parts, &w->route, w->shared_out, w->shared_gate, w->y);
}

/* spec 3.2, the hash: table rows of one position. */
static void ngram_rows(const struct ngram_layer *g, const int32_t *tokens, int position, uint64_t *rows)
{
    uint64_t context[3];
    bool cut = false;
    for (int i = 0; i < 3; i++) {
        if (i > 0)
            cut = cut || position - i < 0 || tokens[position - i] == g->eos;
        context[i] = (uint64_t)(cut ? g->eos : tokens[position - i]);
    }
    uint64_t bigram = context[0] * g->multipliers[0] ^ context[1] * g->multipliers[1], trigram = bigram ^ context[2] * g->multipliers[2];
    for (int h = 0; h < g->n_heads; h++)
        rows[h] = g->offsets[h] + (h < g->heads_per_order ? bigram : trigram) % g->sizes[h];
}

/* spec 3.2, the mix. */
static void ngram_forward(struct model_window *w)
{
    const struct qwen4exp *m = w->m;
    const struct ngram_layer *g = &m->ngram;
    struct ops *ops = m->model.ops;
    int n = w->n, hidden = m->model.hidden;
    uint64_t ids[ROWS * QWEN_MAX_NGRAM_HEADS];
    for (int t = 0; t < n; t++)
        ngram_rows(g, w->rows[t].tokens, w->rows[t].position, ids + t * g->n_heads);
    ops->gather(ops, &g->table, ids, n * g->n_heads, w->embed.values);
    watch(w, n, hidden, w->embed.values);
    ops->quantize(ops, n, &w->embed);
    products(w, n, &w->embed, 2, (const struct matrix *[]){ &g->key, &g->value }, (float *[]){ w->ngram_key, w->ngram_value });
    ops->norm(ops, n, w->ngram_key, m->streams, hidden, g->norm_key, m->streams, m->eps, 256, w->ngram_key);
    ops->norm(ops, n, w->residual, m->streams, hidden, g->norm_query, m->streams, m->eps, 256, w->ngram_query);
    ops->ngram_gate(ops, n, m->streams, hidden, w->ngram_key, w->ngram_query, w->ngram_value, w->ngram_p);
    ops->norm(ops, n, w->ngram_p, m->streams, hidden, g->norm_conv, m->streams, m->eps, 256, w->ngram_c);
    size_t width = (size_t)m->wide;
    for (int t = 0; t < n; t++)
        memcpy(w->rows[t].state->ngram + (size_t)(w->rows[t].position % ngram_ring(m)) * width, w->ngram_c + (size_t)t * width, width * sizeof(float));
    const float *taps[ROWS][8];
    ring_taps(w, taps, g->taps, g->dilation, ngram_ring(m), width, ngram_base, 0);
    ops->conv_silu(ops, n, g->taps, m->wide, taps, g->conv, w->ngram_c);
    ops->add2(ops, (size_t)n * width, w->residual, w->ngram_p, w->ngram_c);
}

static int check_finite(struct model_window *w, const float *x, size_t n, const char *what, int layer, struct strata_error *error)
{
    if (w->m->model.ops->all_finite(w->m->model.ops, x, n) && !w->broken)
        return 0;
    return layer < 0 ? error_set(error, STRATA_E_NUMERIC, "%s at position %d is not finite: the weights are damaged", what, w->rows[0].position)
                     : error_set(error, STRATA_E_NUMERIC, "%s in layer %d at position %d is not finite: the weights are damaged", what, layer, w->rows[0].position);
}

/* Logits of the rows that want them: they are gathered to the front, because the head is the largest matrix. */
static void head_forward(struct model_window *w)
{
    const struct qwen4exp *m = w->m;
    size_t width = (size_t)m->wide;
    int n = w->n, wanted = 0;
    for (int t = 0; t < n; t++) {
        w->logits_at[t] = w->rows[t].wants_logits ? wanted : -1;
        if (w->rows[t].wants_logits && wanted++ != t)
            memmove(w->residual + (size_t)(wanted - 1) * width, w->residual + (size_t)t * width, width * sizeof(float));
    }
    if (!wanted)
        return;
    w->n = wanted;
    read_streams(w, &m->final_mix);
    w->n = n;
    products(w, wanted, &w->hidden, 1, (const struct matrix *[]){ &m->output }, (float *[]){ w->logits });
}

static const float *logits(const struct model_window *w, int row)
{
    int at = w->logits_at[row];
    return at < 0 ? NULL : w->logits + (size_t)at * (size_t)ops_padded(w->m->model.n_vocab);
}

static int forward(struct model_window *w, const struct model_row *rows, int n, model_probe_fn *probe, void *probe_context, struct strata_error *error)
{
    const struct qwen4exp *m = w->m;
    struct ops *ops = m->model.ops;
    w->rows = rows;
    w->n = n;
    w->broken = false;
    find_spans(w);
    int code = 0;
    uint64_t ids[ROWS] = { 0 };
    size_t hidden = (size_t)m->model.hidden, width = (size_t)m->wide;
    const struct attention_shape *shape = &m->layers[0].attention_shape;
    for (int t = 0; t < n; t++) {
        size_t pairs = (size_t)t * (size_t)ops_padded(shape->n_pairs);
        rope_table(w, rows[t].position, w->cosines + pairs, w->sines + pairs, shape->n_pairs);
        ids[t] = (uint64_t)rows[t].tokens[rows[t].position];
    }
    ops->gather(ops, &m->embedding, ids, n, w->hidden.values);
    for (int t = 0; t < n; t++)
        for (int s = 0; s < m->streams; s++)
            memcpy(w->residual + (size_t)t * width + (size_t)s * hidden, w->hidden.values + (size_t)t * hidden, hidden * sizeof(float));

    for (int i = 0; i < m->model.n_layers; i++) {
        const struct qwen4exp_layer *layer = &m->layers[i];
        if (i == m->ngram_layer)
            ngram_forward(w);
        read_streams(w, &layer->attn_mix);
        if (layer->is_attention)
            attention_forward(w, layer);
        else
            delta_forward(w, layer);
        write_streams(w);
        read_streams(w, &layer->ffn_mix);
        ffn_forward(w, &layer->ffn);
        write_streams(w);
        code = check_finite(w, w->residual, (size_t)n * width, "a value", i, error);
        if (code)
            return code;
        if (probe)
            probe(probe_context, i, n, w->residual, m->wide);
    }
    head_forward(w);
    for (int t = 0; !code && t < n; t++)
        if (w->logits_at[t] >= 0)
            code = check_finite(w, logits(w, t), (size_t)m->model.n_vocab, "a logit", -1, error);
    return code;
}

static void commit(struct model_window *w, struct model_state *state, int n_kept)
{
    const struct qwen4exp *m = w->m;
    struct ops *ops = m->model.ops;
    if (n_kept > state->span_keep) {
        int replay = n_kept - state->span_keep;
        struct row_span span = { state->span_first + state->span_keep, replay, replay };
        for (int i = 0; i < m->n_delta; i++)
            ops->delta_rule(ops, 1, &span, &state->delta[i], &m->delta, w->traces[i].qkv, w->traces[i].decay, w->traces[i].beta, w->delta_out.values);
    }
    state->span_n = 0;
}

const struct model_arch model_qwen4exp = {
    .name = "qwen4exp", .load = qwen4exp_load, .destroy = qwen4exp_destroy, .window_create = window_create, .window_destroy = window_destroy,
    .state_create = state_create, .state_destroy = state_destroy, .state_reset = state_reset, .forward = forward, .commit = commit,
    .logits = logits, .state_hash = state_hash,
};
