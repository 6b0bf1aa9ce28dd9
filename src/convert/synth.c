/* synth.c - a model of real shapes with random weights, written about as fast as the disk takes it.
 *
 * Quantized matrices are not encoded weight by weight: a *palette* of blocks is encoded once per type and scale, and rows are drawn
 * from it in pieces of 256 weights. Scales are chosen so that activations stay near 1: a layer adds about a fifth of the residual's
 * size.
 *
 * What makes the routing lifelike is built from three kinds of fixed random vectors (each entry has mean 0 and variance 1):
 *   - `common`, the same for all tokens: a share of every embedding, hence of every hidden state. The router's rows carry a
 * multiple of it, -skew * ln(rank) / 2.4 in the logits, so experts are about as popular as rank^-skew.
 *   - a topic for every TOPIC_TOKENS neighbouring ids, drifting slowly from one topic to the next: `locality` of the rest of an
 * embedding. Tokens of one topic prefer the same experts, and the head prefers tokens of the topic that the text is in.
 *   - noise for what is left. */
#include "convert/synth.h"

#include "base/pool.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    NOISE = 1 << 20,
    PALETTE_WEIGHTS = 256 << 10,
    PIECE = 256,
    TOPIC_TOKENS = 64,
    TOPIC_DRIFT = 8,
    VARIANTS = 4,
    MAX_PALETTES = 64
};

static const double common_share = 0.2; /* of an embedding's energy */
/* Ten of 512 normal logits are chosen, and there the tail falls by e^2.4 a unit: so much does a logit count for popularity. */
static const double tail_slope = 2.4;

/* Blocks to draw from: weights of standard deviation `deviation`. */
struct palette {
    const struct quant_format *format;
    double deviation;
    int64_t n_blocks;
    uint8_t *blocks;
};

/* Rows of the embedding or the head: piece p of a token's row is one of VARIANTS encodings for its topic. */
struct bank {
    const struct quant_format *format;
    int64_t n_topics, row_bytes;
    uint8_t *rows; /* [n_topics][VARIANTS][row_bytes] */
};

struct synth {
    const struct convert_synth *request;
    struct shape shape;
    int first_special; /* ids from here on have no place in the text */
    float *noise;      /* [NOISE]: windows of it serve as random vectors */
    struct palette palettes[MAX_PALETTES];
    int n_palettes;
    struct bank embedding, head;
    struct emit *emit;
    int code;
    struct strata_error *error;
};

/* ---- Random numbers: functions of the seed and of names, so that threads and order do not matter
 * -------------------------------------- */

static uint64_t mix(uint64_t x) /* SplitMix64 */
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static uint64_t key_of(const struct synth *s, uint64_t a, uint64_t b) { return mix(mix(s->request->seed ^ mix(a)) + b); }
static double uniform(uint64_t key) { return (double)(key >> 11) * 0x1p-53; }

/* Four 16-bit numbers added: bell-shaped, mean 0, variance 1. */
static float bell(uint64_t key)
{
    int64_t sum = (int64_t)(key & 0xffff) + (int64_t)(key >> 16 & 0xffff) + (int64_t)(key >> 32 & 0xffff) + (int64_t)(key >> 48);
    return (float)((double)(sum - 131070) * (1.7320508 / 65536));
}

enum { COMMON = 1, TOPIC, TOKEN, ROUTER, RANK, VECTOR, DRAW };

static const float *vector(const struct synth *s, uint64_t kind, uint64_t index)
{
    return s->noise + key_of(s, kind, index) % (NOISE - 65536);
}

/* ---- Palettes -------------------------------------------------------------------------------------------------------------------
 */

static const struct palette *palette(struct synth *s, const struct quant_format *format, double deviation)
{
    for (int i = 0; i < s->n_palettes; i++)
        if (s->palettes[i].format == format && s->palettes[i].deviation == deviation)
            return &s->palettes[i];
    float *values = malloc(PALETTE_WEIGHTS * sizeof *values);
    uint8_t *blocks = malloc(quant_row_bytes(format, PALETTE_WEIGHTS));
    if (!values || !blocks || s->n_palettes == MAX_PALETTES) {
        free(values);
        free(blocks);
        s->code = error_set(s->error, STRATA_E_MEMORY, "out of memory for random blocks of type %s", format->name);
        return NULL;
    }
    const float *noise = vector(s, VECTOR, (uint64_t)s->n_palettes);
    for (int i = 0; i < PALETTE_WEIGHTS; i++)
        values[i] = noise[i % 65536] * (float)deviation * (i / 65536 % 2 ? -1 : 1);
    quant_encode(format, values, NULL, PALETTE_WEIGHTS, blocks);
    free(values);
    s->palettes[s->n_palettes] = (struct palette){ format, deviation, PALETTE_WEIGHTS / format->block, blocks };
    return &s->palettes[s->n_palettes++];
}

struct drawn {
    const struct synth *synth;
    const struct palette *palette;
    int64_t width;
    uint64_t tensor;
};

static int draw_rows(const void *context, int64_t first, int64_t n, uint8_t *out, struct strata_error *error)
{
    const struct drawn *d = context;
    int64_t piece = PIECE / d->palette->format->block, row_blocks = d->width / d->palette->format->block;
    size_t block_bytes = (size_t)d->palette->format->bytes;
    for (int64_t row = first; row < first + n; row++) {
        uint64_t key = key_of(d->synth, DRAW + 16 * d->tensor, (uint64_t)row);
        for (int64_t at = 0, take; at < row_blocks; at += take, out += (size_t)take * block_bytes) {
            take = row_blocks - at < piece ? row_blocks - at : piece;
            key = mix(key);
            memcpy(out, d->palette->blocks + key % (uint64_t)(d->palette->n_blocks - take + 1) * block_bytes,
                   (size_t)take * block_bytes);
        }
    }
    return 0;
}

/* ---- Embedding and head
 * ------------------------------------------------------------------------------------------------------------ */

/* Shares of the energy; what is left to 1 is noise. `scale` for the whole row. */
struct recipe {
    double common, topic, scale;
};

struct bank_job {
    const struct synth *synth;
    struct bank *bank;
    struct recipe recipe;
    uint64_t tensor;
    int first;
};

static void make_topic(void *context, int item)
{
    const struct bank_job *job = context;
    int topic = job->first + item;
    const struct synth *s = job->synth;
    float row[PIECE];
    double turn = topic % TOPIC_DRIFT * (M_PI / 2 / TOPIC_DRIFT); /* from one anchor to the next at constant length */
    const float *from = vector(s, TOPIC, (uint64_t)(topic / TOPIC_DRIFT)),
                *to = vector(s, TOPIC, (uint64_t)(topic / TOPIC_DRIFT + 1));
    const float *common = vector(s, COMMON, 0);
    float a = (float)(cos(turn) * sqrt(job->recipe.topic)), b = (float)(sin(turn) * sqrt(job->recipe.topic)),
          c = (float)sqrt(job->recipe.common);
    float d = (float)sqrt(fmax(0, 1 - job->recipe.topic - job->recipe.common)), scale = (float)job->recipe.scale;
    for (int v = 0; v < VARIANTS; v++) {
        const float *noise = vector(s, TOKEN + 16 * job->tensor, (uint64_t)topic * VARIANTS + (uint64_t)v);
        uint8_t *out = job->bank->rows + ((int64_t)topic * VARIANTS + v) * job->bank->row_bytes;
        for (int64_t at = 0, take; at < s->shape.hidden; at += take) {
            take = s->shape.hidden - at < PIECE ? s->shape.hidden - at : PIECE;
            for (int64_t i = 0; i < take; i++)
                row[i] = scale * (a * from[at + i] + b * to[at + i] + c * common[at + i] + d * noise[at + i]);
            quant_encode(job->bank->format, row, NULL, take, out);
            out += quant_row_bytes(job->bank->format, take);
        }
    }
}

struct banked {
    const struct synth *synth;
    const struct bank *bank;
    bool only_text; /* rows of special tokens are zero, so that the text does not end by chance */
};

static int bank_rows(const void *context, int64_t first, int64_t n, uint8_t *out, struct strata_error *error)
{
    const struct banked *b = context;
    int64_t row_bytes = b->bank->row_bytes;
    size_t piece_bytes = quant_row_bytes(b->bank->format, PIECE);
    for (int64_t id = first; id < first + n; id++, out += row_bytes) {
        const uint8_t *topic = b->bank->rows + id / TOPIC_TOKENS * VARIANTS * row_bytes;
        uint64_t key = key_of(b->synth, TOKEN, (uint64_t)id);
        if (b->only_text && id >= b->synth->first_special) {
            memset(out, 0, (size_t)row_bytes);
            continue;
        }
        for (int64_t at = 0; at < row_bytes; at += (int64_t)piece_bytes) {
            key = mix(key);
            size_t take = row_bytes - at < (int64_t)piece_bytes ? (size_t)(row_bytes - at) : piece_bytes;
            memcpy(out + at, topic + (int64_t)(key % VARIANTS) * row_bytes + at, take);
        }
    }
    return 0;
}

/* ---- Router and vectors
 * ------------------------------------------------------------------------------------------------------------- */

struct router {
    const struct synth *synth;
    uint64_t layer;
    int rank[]; /* [experts]: 0 is the most popular */
};

/* A hidden state that reaches the router is about half an embedding: the mean of half-open gates times normalised streams. */
static int router_rows(const void *context, int64_t first, int64_t n, float *out, struct strata_error *error)
{
    const struct router *r = context;
    const struct synth *s = r->synth;
    int hidden = s->shape.hidden;
    const float *common = vector(s, COMMON, 0);
    for (int64_t e = first; e < first + n; e++, out += hidden) {
        const float *own = vector(s, ROUTER + 16 * r->layer, (uint64_t)e);
        double along = 0; /* the own direction must not lean on what all tokens have: only the rank decides about popularity */
        for (int i = 0; i < hidden; i++)
            along += (double)own[i] * common[i] / hidden;
        double scale = 2 / sqrt(hidden),
               bias = -s->request->skew / tail_slope * log(1 + r->rank[e]) / (0.5 * sqrt(common_share) * hidden);
        for (int i = 0; i < hidden; i++)
            out[i] = (float)(scale * (own[i] - along * common[i]) + bias * common[i]);
    }
    return 0;
}

enum vector_kind { NORM, DECAY, STEP };

struct small {
    const struct synth *synth;
    enum vector_kind kind;
    int64_t width;
    uint64_t tensor;
};

static int small_row(const void *context, int64_t first, int64_t n, float *out, struct strata_error *error)
{
    const struct small *v = context;
    for (int64_t i = 0; i < v->width; i++) {
        uint64_t key = key_of(v->synth, DRAW + 16 * v->tensor, (uint64_t)i);
        switch (v->kind) {
        case NORM:
            out[i] = 1 + 0.1f * bell(key);
            break;
        case DECAY: /* -8 .. -0.1, all orders of magnitude alike */
            out[i] = (float)-exp(log(0.1) + uniform(key) * log(80));
            break;
        case STEP:
            out[i] = -2 + bell(key);
            break;
        }
    }
    return 0;
}

/* ---- The list of tensors
 * -------------------------------------------------------------------------------------------------------------- */

static void *new_context(struct synth *s, size_t size)
{
    void *context = s->code ? NULL : calloc(1, size);
    if (!context && !s->code)
        s->code = error_set(s->error, STRATA_E_MEMORY, "out of memory for a list of tensors");
    return context;
}

static void add(struct synth *s, const char *name, const struct quant_format *format, int n_dims, const int64_t *dims,
                struct emit_source source)
{
    s->code = emit_add(s->emit, name, format, n_dims, dims, source, s->error);
}

/* The type of a tensor: as asked for, else Q8_0 for matrices and Q2_0 for experts. */
static const struct quant_format *format_of(struct synth *s, const char *name, int n_dims, int64_t width)
{
    bool experts = strstr(name, "_exps.") != NULL;
    return emit_format(s->emit, name, n_dims, width, quant_format_find(experts ? QUANT_Q2_0 : QUANT_Q8_0));
}

/* A random matrix, or `count` of them; outputs have `gain` times the size of inputs. */
static void add_matrices(struct synth *s, const char *prefix, const char *name, int64_t count, int64_t rows, int64_t width,
                         double gain)
{
    char full[GGUF_MAX_NAME];
    snprintf(full, sizeof full, "%s%s", prefix, name);
    int n_dims = count > 1 ? 3 : rows > 1 ? 2 : 1;
    struct drawn *d = new_context(s, sizeof *d);
    if (!d)
        return;
    const struct quant_format *format = format_of(s, full, n_dims, width);
    *d = (struct drawn){ s, palette(s, format, gain / sqrt((double)width)), width, s->emit->n };
    if (!d->palette) {
        free(d);
        return;
    }
    add(s, full, format, n_dims, (int64_t[]){ width, rows, count }, (struct emit_source){ .bytes = draw_rows, .context = d });
}

static void add_matrix(struct synth *s, const char *prefix, const char *name, int64_t rows, int64_t width, double gain)
{
    add_matrices(s, prefix, name, 1, rows, width, gain);
}

static void add_vector(struct synth *s, const char *prefix, const char *name, int64_t width, enum vector_kind kind)
{
    char full[GGUF_MAX_NAME];
    snprintf(full, sizeof full, "%s%s", prefix, name);
    struct small *v = new_context(s, sizeof *v);
    if (!v)
        return;
    *v = (struct small){ s, kind, width, s->emit->n };
    add(s, full, quant_format_find(QUANT_F32), 1, &width, (struct emit_source){ .floats = small_row, .context = v });
}

static void add_bank(struct synth *s, struct pool *pool, struct bank *bank, const char *name, struct recipe recipe, bool only_text)
{
    enum { BATCH = 128 };
    const struct convert_options *options = s->emit->options;
    int64_t dims[] = { s->shape.hidden, s->shape.vocab };
    struct banked *b = new_context(s, sizeof *b);
    if (!b)
        return;
    bank->format = format_of(s, name, 2, dims[0]);
    bank->n_topics = (dims[1] + TOPIC_TOKENS - 1) / TOPIC_TOKENS;
    bank->row_bytes = (int64_t)quant_row_bytes(bank->format, dims[0]);
    bank->rows = malloc((size_t)(bank->n_topics * VARIANTS * bank->row_bytes));
    if (!bank->rows) {
        free(b);
        s->code = error_set(s->error, STRATA_E_MEMORY, "out of memory for the rows of tensor %s", name);
        return;
    }
    struct bank_job job = { s, bank, recipe, s->emit->n, 0 };
    for (; !s->code && job.first < bank->n_topics; job.first += BATCH) {
        pool_run(pool, bank->n_topics - job.first < BATCH ? (int)bank->n_topics - job.first : BATCH, make_topic, &job);
        if (options->progress &&
            !options->progress(options->progress_context, 0)) /* nothing is written yet, but types with a search take a while */
            s->code = error_set(s->error, STRATA_E_STOPPED, "stopped");
    }
    if (s->code) {
        free(b);
        return;
    }
    *b = (struct banked){ s, bank, only_text };
    add(s, name, bank->format, 2, dims, (struct emit_source){ .bytes = bank_rows, .context = b });
}

static void add_router(struct synth *s, const char *prefix, int layer)
{
    int n = s->shape.experts;
    struct router *r = new_context(s, sizeof *r + (size_t)n * sizeof r->rank[0]);
    if (!r)
        return;
    r->synth = s;
    r->layer = (uint64_t)layer;
    for (int e = 0; e < n; e++) { /* a shuffle */
        int other = (int)(key_of(s, RANK + 16 * r->layer, (uint64_t)e) % (uint64_t)(e + 1));
        r->rank[e] = r->rank[other];
        r->rank[other] = e;
    }
    char full[GGUF_MAX_NAME];
    snprintf(full, sizeof full, "%sffn_gate_inp.weight", prefix);
    add(s, full, quant_format_find(QUANT_F32), 2, (int64_t[]){ s->shape.hidden, n },
        (struct emit_source){ .floats = router_rows, .context = r });
}

/* Gains below: a projection of the mixed streams doubles, because these are about half as large as the residual. */
static void add_gated_residual(struct synth *s, const char *prefix, bool inject)
{
    int64_t wide = shape_wide(&s->shape);
    double streams = s->shape.streams; /* the model divides by it */
    add_vector(s, prefix, "_norm.weight", wide, NORM);
    add_matrix(s, prefix, "_down.weight", s->shape.low_rank, wide, streams);
    add_matrix(s, prefix, "_up.weight", wide, s->shape.low_rank, 1);
    if (inject)
        add_matrix(s, prefix, "_inject.weight", s->shape.streams, wide, 0.3 * streams);
}

static void add_delta(struct synth *s, const char *prefix)
{
    const struct shape *h = &s->shape;
    int64_t values = (int64_t)h->v_heads * h->v_dim, channels = 2 * (int64_t)h->k_heads * h->k_dim + values;
    add_matrix(s, prefix, "attn_qkv.weight", channels, h->hidden, 2);
    add_matrix(s, prefix, "attn_gate.weight", values, h->hidden, 2);
    add_matrix(s, prefix, "ssm_beta.weight", h->v_heads, h->hidden, 2);
    add_matrix(s, prefix, "ssm_alpha.weight", h->v_heads, h->hidden, 2);
    add_vector(s, prefix, "ssm_a", h->v_heads, DECAY);
    add_vector(s, prefix, "ssm_dt.bias", h->v_heads, STEP);
    add_matrix(s, prefix, "ssm_conv1d.weight", channels, h->conv_taps, 1);
    add_vector(s, prefix, "ssm_norm.weight", h->v_dim, NORM);
    add_matrix(s, prefix, "ssm_out.weight", h->hidden, values, 0.4);
}

static void add_attention(struct synth *s, const char *prefix)
{
    const struct shape *h = &s->shape;
    int64_t q = (int64_t)h->heads * h->head_dim, kv = (int64_t)h->kv_heads * h->head_dim;
    add_matrix(s, prefix, "attn_q.weight", 2 * q, h->hidden, 2);
    add_matrix(s, prefix, "attn_k.weight", kv, h->hidden, 2);
    add_matrix(s, prefix, "attn_v.weight", kv, h->hidden, 2);
    add_matrix(s, prefix, "attn_output.weight", h->hidden, q, 0.5);
    add_vector(s, prefix, "attn_q_norm.weight", h->head_dim, NORM);
    add_vector(s, prefix, "attn_k_norm.weight", h->head_dim, NORM);
    add_matrix(s, prefix, "indexer.q_proj.weight", (int64_t)h->index_heads * h->index_dim, h->hidden, 2);
    add_matrix(s, prefix, "indexer.k_proj.weight", h->index_dim, h->hidden, 2);
    add_vector(s, prefix, "indexer.q_norm.weight", h->index_dim, NORM);
    add_vector(s, prefix, "indexer.k_norm.weight", h->index_dim, NORM);
}

static void add_ffn(struct synth *s, const char *prefix, int layer)
{
    const struct shape *h = &s->shape;
    add_router(s, prefix, layer);
    add_matrices(s, prefix, "ffn_gate_exps.weight", h->experts, h->expert_width, h->hidden, 2);
    add_matrices(s, prefix, "ffn_up_exps.weight", h->experts, h->expert_width, h->hidden, 2);
    add_matrices(s, prefix, "ffn_down_exps.weight", h->experts, h->hidden, h->expert_width, 1);
    add_matrix(s, prefix, "ffn_gate_shexp.weight", h->shared_width, h->hidden, 2);
    add_matrix(s, prefix, "ffn_up_shexp.weight", h->shared_width, h->hidden, 2);
    add_matrix(s, prefix, "ffn_down_shexp.weight", h->hidden, h->shared_width, 1);
    add_matrix(s, prefix, "ffn_gate_inp_shexp.weight", 1, h->hidden, 2);
}

static void add_ngram_layer(struct synth *s, const char *prefix)
{
    const struct shape *h = &s->shape;
    int64_t wide = shape_wide(h);
    add_matrix(s, prefix, "ple_key.weight", wide, h->hidden, 1);
    add_matrix(s, prefix, "ple_value.weight", h->hidden, h->hidden, 0.3);
    add_vector(s, prefix, "ple_norm_key.weight", wide, NORM);
    add_vector(s, prefix, "ple_norm_query.weight", wide, NORM);
    add_vector(s, prefix, "ple_norm_conv.weight", wide, NORM);
    add_matrix(s, prefix, "ple_conv1d.weight", wide, h->ngram_taps, 0.6);
}

static void add_tensors(struct synth *s, struct pool *pool)
{
    const struct shape *h = &s->shape;
    double left = 1 - common_share, locality = s->request->locality;
    /* Logits vary by 2 between tokens; those of the current topic get up to 8 more. */
    double spread = 4, topic_logit = 0.5 * spread * sqrt(h->hidden * left * locality),
           lift = topic_logit > 0 ? fmin(1, 8 / topic_logit) : 0;
    add_bank(s, pool, &s->embedding, "token_embd.weight", (struct recipe){ common_share, left * locality, 1 }, false);
    add_bank(s, pool, &s->head, "output.weight", (struct recipe){ 0, locality * lift * lift, spread / sqrt(h->hidden) }, true);
    add_gated_residual(s, "output_hc", false);
    add_matrix(s, "", "per_layer_token_embd.weight", (shape_ngram_rows(h) + 127) / 128 * 128, h->ngram_width, sqrt(h->ngram_width));
    for (int i = 0; i < h->layers; i++) {
        char prefix[32], mix_prefix[40];
        snprintf(prefix, sizeof prefix, "blk.%d.", i);
        snprintf(mix_prefix, sizeof mix_prefix, "%shc_attn", prefix);
        add_gated_residual(s, mix_prefix, true);
        if (shape_attends(h, i))
            add_attention(s, prefix);
        else
            add_delta(s, prefix);
        snprintf(mix_prefix, sizeof mix_prefix, "%shc_ffn", prefix);
        add_gated_residual(s, mix_prefix, true);
        add_ffn(s, prefix, i);
        if (i == h->ngram_layer)
            add_ngram_layer(s, prefix);
    }
}

/* ---- The file
 * --------------------------------------------------------------------------------------------------------------------------- */

static void put_keys(const struct synth *s, struct gguf_writer *writer)
{
    char name[96];
    snprintf(name, sizeof name, "synthetic %s, %d layers", s->request->like, s->shape.layers);
    gguf_put_string(writer, "general.name", name);
    gguf_put_bool(writer, "strata.synthetic", true);
    gguf_put_f32(writer, "general.sampling.temp", 1.0f);
    gguf_put_f32(writer, "general.sampling.top_p", 0.95f);
    gguf_put_i32(writer, "general.sampling.top_k", 20);
    shape_put_keys(&s->shape, writer);
}

int convert_synthetic(const char *out, const struct convert_synth *request, const struct convert_options *options,
                      struct convert_summary *summary, struct strata_error *error)
{
    struct emit emit;
    struct gguf_writer *writer = NULL;
    struct pool *pool = NULL;
    struct synth *s = calloc(1, sizeof *s);
    emit_create(&emit, options, summary);
    if (!s)
        return error_set(error, STRATA_E_MEMORY, "out of memory for a synthetic model");
    *s = (struct synth){ .request = request, .emit = &emit, .error = error };
    s->code = synth_shape(request, &s->shape, &s->first_special, error);
    if (!s->code && !(s->noise = malloc(NOISE * sizeof *s->noise)))
        s->code = error_set(error, STRATA_E_MEMORY, "out of memory for random numbers");
    for (int i = 0; !s->code && i < NOISE; i++)
        s->noise[i] = bell(mix(request->seed ^ (uint64_t)i << 32));
    if (!s->code)
        s->code = pool_create(&pool, options->threads ? options->threads : pool_default_threads(), error);
    if (!s->code)
        add_tensors(s, pool);
    pool_destroy(pool);
    if (!s->code)
        s->code = gguf_writer_create(&writer, out, error);
    if (!s->code) {
        put_keys(s, writer);
        s->code = synth_put_tokenizer(&s->shape, s->first_special, writer, error);
    }
    if (!s->code) {
        emit_put_file_type(&emit, writer);
        s->code = emit_run(&emit, writer, error);
    }
    int code = s->code;
    gguf_writer_destroy(writer);
    emit_destroy(&emit);
    for (int i = 0; i < s->n_palettes; i++)
        free(s->palettes[i].blocks);
    free(s->embedding.rows);
    free(s->head.rows);
    free(s->noise);
    free(s);
    return code;
}
