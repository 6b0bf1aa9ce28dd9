/* hf_tensors.c - which checkpoint tensor becomes which GGUF tensor, in which order and with which values (spec/model.md section 2).
 */
#include "convert/hf.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Rows ------------------------------------------------------------------------------------------------------------------- */

enum values { AS_STORED, PLUS_ONE /* the checkpoint keeps norm weights as w of 1 + w */, MINUS_EXP /* A_log -> A */ };

/* How rows and columns of the output lie in the source. All zero: as they are. */
struct layout {
    enum values values;
    /* From row `skip_rows` on, groups of `head_rows` rows are value heads, which GGUF has in another order; likewise groups of
     * columns. */
    int64_t skip_rows, head_rows, head_columns;
    /* Output rows come in groups of `group`, which are `stride` rows apart in the source and start at `offset`: parts of fused
     * matrices. */
    int64_t group, stride, offset;
    bool beside; /* two parts side by side, instead of one below the other */
};

struct rows {
    const struct safetensors *st;
    struct layout layout;
    int k_heads, heads_per_key; /* of DeltaNet */
    int64_t width;              /* of an output row */
    int n_parts;
    const struct safetensor *parts[];
};

/* GGUF's value head j is the checkpoint's head: the checkpoint has the heads of a key head together, GGUF has a round of all key
 * heads first. */
static int64_t value_head(const struct rows *r, int64_t j) { return j % r->k_heads * r->heads_per_key + j / r->k_heads; }

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Where output row `row` is: the part, the first element in it; returns how many output rows follow one another there, at most n.
 */
static int64_t locate(const struct rows *r, int64_t row, int64_t n, const struct safetensor **part, int64_t *element)
{
    const struct layout *l = &r->layout;
    if (l->head_rows && row >= l->skip_rows) {
        int64_t in_heads = row - l->skip_rows, inside = in_heads % l->head_rows;
        n = least(n, l->head_rows - inside);
        row = l->skip_rows + value_head(r, in_heads / l->head_rows) * l->head_rows + inside;
    } else if (l->head_rows)
        n = least(n, l->skip_rows - row);
    if (l->group) {
        n = least(n, l->group - row % l->group);
        row = row / l->group * l->stride + l->offset + row % l->group;
    }
    int i = 0;
    while (i < r->n_parts - 1 &&
           row >= r->parts[i]->n_elements / r->width) /* shapes were checked: the last part has it at the latest */
        row -= r->parts[i++]->n_elements / r->width;
    *part = r->parts[i];
    *element = row * r->width;
    return least(n, r->parts[i]->n_elements / r->width - row);
}

/* [fc_embedding | fc_hidden] */
static int read_beside(const struct rows *r, int64_t row, float *out, struct strata_error *error)
{
    int64_t half = r->width / 2;
    int code = safetensors_read_floats(r->st, r->parts[0], row * half, half, out, error);
    return code ? code : safetensors_read_floats(r->st, r->parts[1], row * half, half, out + half, error);
}

static int permute_columns(const struct rows *r, float *row, struct strata_error *error)
{
    int64_t d = r->layout.head_columns;
    float *old = malloc((size_t)r->width * sizeof *old);
    if (!old)
        return error_set(error, STRATA_E_MEMORY, "out of memory for a row of %lld weights", (long long)r->width);
    memcpy(old, row, (size_t)r->width * sizeof *old);
    for (int64_t j = 0; j < r->width / d; j++)
        memcpy(row + j * d, old + value_head(r, j) * d, (size_t)d * sizeof *old);
    free(old);
    return 0;
}

static int read_rows(const void *context, int64_t first, int64_t n, float *out, struct strata_error *error)
{
    const struct rows *r = context;
    int code = 0;
    for (int64_t done = 0, run; !code && done < n; done += run) {
        const struct safetensor *part = NULL;
        int64_t element = 0;
        run = r->layout.beside ? 1 : locate(r, first + done, n - done, &part, &element);
        float *to = out + done * r->width;
        code = r->layout.beside ? read_beside(r, first + done, to, error)
                                : safetensors_read_floats(r->st, part, element, run * r->width, to, error);
    }
    for (int64_t i = 0; !code && r->layout.head_columns && i < n; i++)
        code = permute_columns(r, out + i * r->width, error);
    for (int64_t i = 0; i < n * r->width; i++)
        out[i] = r->layout.values == PLUS_ONE ? out[i] + 1 : r->layout.values == MINUS_EXP ? -expf(out[i]) : out[i];
    return code;
}

/* ---- One output tensor ---------------------------------------------------------------------------------------------------------
 */

/* A list being built; the first failure sticks. Names are put together from the two prefixes. */
struct map {
    struct hf *hf;
    struct emit *emit;
    char to[32], from[96]; /* "blk.3.", "model.layers.3." */
    int code;
    struct strata_error *error;
};

/* The checkpoint tensor `name`, with `rows` rows (0: any) of `width`; sizes of 1 in its shape do not matter. */
static const struct safetensor *take(struct map *m, const char *name, int64_t rows, int64_t width)
{
    char full[256];
    snprintf(full, sizeof full, "%s%s", m->from, name);
    struct safetensor *t = m->code ? NULL : safetensors_find(m->hf->st, full);
    if (!t) {
        if (!m->code)
            m->code = error_set(m->error, STRATA_E_FORMAT, "%s: tensor %s is missing", m->hf->directory, full);
        return NULL;
    }
    int64_t last = 1;
    for (int i = t->n_dims - 1; i >= 0 && last == 1; i--) /* [channels, 1, taps]: rows are what is left of the last size */
        last = t->dims[i];
    if (!t->format)
        m->code = error_set(m->error, STRATA_E_UNSUPPORTED,
                            "%s: tensor %s has dtype %s, wanted BF16, F16 or F32 (a BF16 release of the checkpoint)",
                            m->hf->directory, full, t->dtype);
    else if (t->n_elements == 0 || (rows && t->n_elements != rows * width) || t->n_elements % width ||
             (last != width && width != 1)) {
        char shape[128] = "";
        for (int i = 0, at = 0; i < t->n_dims && at < (int)sizeof shape; i++)
            at += snprintf(shape + at, sizeof shape - (size_t)at, "%s%lld", i ? " x " : "", (long long)t->dims[i]);
        m->code = error_set(m->error, STRATA_E_FORMAT, "%s: tensor %s has shape %s, wanted %lld%s x %lld", m->hf->directory, full,
                            shape, (long long)rows, rows ? "" : " (any number)", (long long)width);
    }
    if (m->code)
        return NULL;
    t->used = true;
    return t;
}

/* Room for a source of n parts, which the caller fills; NULL after a failure. */
static struct rows *new_rows(struct map *m, int64_t width, struct layout layout, int n_parts)
{
    struct rows *r = m->code ? NULL : calloc(1, sizeof *r + (size_t)n_parts * sizeof r->parts[0]);
    if (r)
        *r = (struct rows){ m->hf->st, layout, m->hf->shape.k_heads, m->hf->shape.v_heads / m->hf->shape.k_heads, width, n_parts };
    else if (!m->code)
        m->code = error_set(m->error, STRATA_E_MEMORY, "out of memory for the tensors of %s", m->hf->directory);
    return r;
}

/* Appends the output tensor "TO" "name". Takes `r` over, also after a failure of `take`. */
static void add(struct map *m, const char *name, struct rows *r, int n_dims, const int64_t *dims)
{
    char full[128];
    snprintf(full, sizeof full, "%s%s", m->to, name);
    if (m->code) {
        free(r);
        return;
    }
    const struct quant_format *format = emit_format(m->emit, full, n_dims, dims[0], r->parts[0]->format);
    m->code = emit_add(m->emit, full, format, n_dims, dims, (struct emit_source){ .floats = read_rows, .context = r }, m->error);
}

/* The common case: one source, `rows` rows of `width` in the output, 1-D if rows is 1. */
static void put(struct map *m, const char *to, const char *from, int64_t rows, int64_t width, struct layout layout)
{
    struct rows *r = new_rows(m, width, layout, 1);
    if (!r)
        return;
    r->parts[0] = take(m, from, layout.group ? rows / layout.group * layout.stride : rows, width);
    add(m, to, r, rows == 1 ? 1 : 2, (int64_t[]){ width, rows });
}

static const struct layout as_stored = { 0 }, plus_one = { .values = PLUS_ONE };

/* ---- The model ----------------------------------------------------------------------------------------------------------------
 */

static void put_gated_residual(struct map *m, const char *to, const char *from, bool inject)
{
    const struct shape *s = &m->hf->shape;
    int64_t wide = shape_wide(s);
    const struct {
        const char *to, *from;
        int64_t rows, width;
        struct layout layout;
    } pieces[] = {
        { "norm", "hc_norm", 1, wide, plus_one },
        { "down", "input_mix_weight_down", s->low_rank, wide, as_stored },
        { "up", "input_mix_weight_up", wide, s->low_rank, as_stored },
        { "inject", "block_inject_weight", s->streams, wide, as_stored },
    };
    for (int i = 0; i < (inject ? 4 : 3); i++) {
        char to_name[64], from_name[96];
        snprintf(to_name, sizeof to_name, "%s_%s.weight", to, pieces[i].to);
        snprintf(from_name, sizeof from_name, "%s.%s.weight", from, pieces[i].from);
        put(m, to_name, from_name, pieces[i].rows, pieces[i].width, pieces[i].layout);
    }
}

static void put_delta(struct map *m)
{
    const struct shape *s = &m->hf->shape;
    int64_t keys = 2 * (int64_t)s->k_heads * s->k_dim, values = (int64_t)s->v_heads * s->v_dim; /* q and k together; v */
    struct layout after_keys = { .skip_rows = keys, .head_rows = s->v_dim }, heads = { .head_rows = s->v_dim },
                  head_per_row = { .head_rows = 1 };
    put(m, "attn_qkv.weight", "linear_attn.in_proj_qkv.weight", keys + values, s->hidden, after_keys);
    put(m, "attn_gate.weight", "linear_attn.in_proj_z.weight", values, s->hidden, heads);
    put(m, "ssm_beta.weight", "linear_attn.in_proj_b.weight", s->v_heads, s->hidden, head_per_row);
    put(m, "ssm_alpha.weight", "linear_attn.in_proj_a.weight", s->v_heads, s->hidden, head_per_row);
    put(m, "ssm_a", "linear_attn.A_log", 1, s->v_heads, (struct layout){ .values = MINUS_EXP, .head_columns = 1 });
    put(m, "ssm_dt.bias", "linear_attn.dt_bias", 1, s->v_heads, (struct layout){ .head_columns = 1 });
    put(m, "ssm_conv1d.weight", "linear_attn.conv1d.weight", keys + values, s->conv_taps, after_keys);
    put(m, "ssm_norm.weight", "linear_attn.norm.weight", 1, s->v_dim, as_stored); /* the one norm without a +1 */
    put(m, "ssm_out.weight", "linear_attn.out_proj.weight", s->hidden, values, (struct layout){ .head_columns = s->v_dim });
}

static void put_attention(struct map *m)
{
    const struct shape *s = &m->hf->shape;
    int64_t q = (int64_t)s->heads * s->head_dim, kv = (int64_t)s->kv_heads * s->head_dim;
    int64_t index_q = (int64_t)s->index_heads * s->index_dim, index = index_q + s->index_dim;
    put(m, "attn_q.weight", "self_attn.q_proj.weight", 2 * q, s->hidden, as_stored);
    put(m, "attn_k.weight", "self_attn.k_proj.weight", kv, s->hidden, as_stored);
    put(m, "attn_v.weight", "self_attn.v_proj.weight", kv, s->hidden, as_stored);
    put(m, "attn_output.weight", "self_attn.o_proj.weight", s->hidden, q, as_stored);
    put(m, "attn_q_norm.weight", "self_attn.q_norm.weight", 1, s->head_dim, plus_one);
    put(m, "attn_k_norm.weight", "self_attn.k_norm.weight", 1, s->head_dim, plus_one);
    put(m, "indexer.q_proj.weight", "self_attn.indexer.index_qk_proj.weight", index_q, s->hidden,
        (struct layout){ .group = index_q, .stride = index });
    put(m, "indexer.k_proj.weight", "self_attn.indexer.index_qk_proj.weight", s->index_dim, s->hidden,
        (struct layout){ .group = s->index_dim, .stride = index, .offset = index_q });
    put(m, "indexer.q_norm.weight", "self_attn.indexer.q_layernorm.weight", 1, s->index_dim, plus_one);
    put(m, "indexer.k_norm.weight", "self_attn.indexer.k_layernorm.weight", 1, s->index_dim, plus_one);
}

/* One of gate, up, down of all experts: from the fused tensor (rows of an expert: gate, then up), or expert by expert. */
static void put_experts(struct map *m, const char *which, const char *fused, int64_t rows, int64_t width,
                        struct layout fused_layout)
{
    char to[64], from[96];
    bool is_fused = hf_find(m->hf, m->from, fused) != NULL;
    int n_parts = is_fused ? 1 : m->hf->shape.experts;
    struct rows *r = new_rows(m, width, is_fused ? fused_layout : as_stored, n_parts);
    if (!r)
        return;
    if (is_fused)
        r->parts[0] = take(m, fused, m->hf->shape.experts * (fused_layout.group ? fused_layout.stride : rows), width);
    for (int e = 0; !is_fused && e < n_parts; e++) {
        snprintf(from, sizeof from, "mlp.experts.%d.%s_proj.weight", e, which);
        r->parts[e] = take(m, from, rows, width);
    }
    snprintf(to, sizeof to, "ffn_%s_exps.weight", which);
    add(m, to, r, 3, (int64_t[]){ width, rows, m->hf->shape.experts });
}

static void put_ffn(struct map *m)
{
    const struct shape *s = &m->hf->shape;
    int64_t hidden = s->hidden, width = s->expert_width;
    put(m, "ffn_gate_inp.weight", "mlp.gate.weight", s->experts, hidden, as_stored);
    put_experts(m, "gate", "mlp.experts.gate_up_proj", width, hidden, (struct layout){ .group = width, .stride = 2 * width });
    put_experts(m, "up", "mlp.experts.gate_up_proj", width, hidden,
                (struct layout){ .group = width, .stride = 2 * width, .offset = width });
    put_experts(m, "down", "mlp.experts.down_proj", hidden, width, as_stored);
    put(m, "ffn_gate_shexp.weight", "mlp.shared_expert.gate_proj.weight", s->shared_width, hidden, as_stored);
    put(m, "ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight", s->shared_width, hidden, as_stored);
    put(m, "ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight", hidden, s->shared_width, as_stored);
    put(m, "ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight", 1, hidden, as_stored);
}

static void put_ngram_layer(struct map *m)
{
    const struct shape *s = &m->hf->shape;
    int64_t wide = shape_wide(s);
    put(m, "ple_key.weight", "ple.key_proj.weight", wide, s->hidden, as_stored);
    put(m, "ple_value.weight", "ple.value_proj.weight", s->hidden, s->hidden, as_stored);
    put(m, "ple_norm_key.weight", "ple.norm_key.weight", 1, wide, plus_one);
    put(m, "ple_norm_query.weight", "ple.norm_query.weight", 1, wide, plus_one);
    put(m, "ple_norm_conv.weight", "ple.norm_conv.weight", 1, wide, plus_one);
    put(m, "ple_conv1d.weight", "ple.conv1d.weight", wide, s->ngram_taps, as_stored);
}

/* The n-gram table, whole or in shards one below the other. */
static void put_table(struct map *m)
{
    const struct hf *hf = m->hf;
    const struct shape *s = &m->hf->shape;
    char name[96];
    snprintf(m->from, sizeof m->from, "%slayers.%d.ple.ple_embedding.ngram_embedding.", hf->prefix, s->ngram_layer);
    bool whole = hf_find(hf, m->from, "weight") != NULL;
    int n = 0;
    do
        snprintf(name, sizeof name, "shard_%d.weight", n);
    while (!whole && hf_find(hf, m->from, name) && ++n);
    struct rows *r = new_rows(m, s->ngram_width, as_stored, n ? n : 1);
    int64_t rows = 0, wanted = shape_ngram_rows(s);
    for (int i = 0; r && i < r->n_parts; i++) {
        snprintf(name, sizeof name, "shard_%d.weight", i);
        r->parts[i] = take(m, whole ? "weight" : name, 0, s->ngram_width);
        rows += r->parts[i] ? r->parts[i]->n_elements / s->ngram_width : 0;
    }
    if (!m->code && rows < wanted)
        m->code = error_set(m->error, STRATA_E_FORMAT, "%s: the n-gram table %s* has %lld rows, its hash heads want %lld",
                            hf->directory, m->from, (long long)rows, (long long)wanted);
    if (r)
        add(m, "per_layer_token_embd.weight", r, 2, (int64_t[]){ s->ngram_width, rows });
}

static void put_block(struct map *m, bool attends)
{
    put_gated_residual(m, "hc_attn", "attn_hyper_connection", true);
    if (attends)
        put_attention(m);
    else
        put_delta(m);
    put_gated_residual(m, "hc_ffn", "mlp_hyper_connection", true);
    put_ffn(m);
}

static void put_mtp(struct map *m)
{
    const struct shape *s = &m->hf->shape;
    snprintf(m->to, sizeof m->to, "blk.%d.", s->layers);
    strcpy(m->from, "mtp.layers.0.");
    put_block(m, true);
    strcpy(m->from, "mtp.");
    struct rows *r = new_rows(m, 2 * (int64_t)s->hidden, (struct layout){ .beside = true }, 2);
    if (!r)
        return;
    r->parts[0] = take(m, "fc_embedding.weight", s->hidden, s->hidden);
    r->parts[1] = take(m, "fc_hidden.weight", s->hidden, s->hidden);
    add(m, "nextn.eh_proj.weight", r, 2, (int64_t[]){ 2 * (int64_t)s->hidden, s->hidden });
    put(m, "nextn.enorm.weight", "pre_fc_norm_embedding.weight", 1, s->hidden, plus_one);
    put(m, "nextn.hnorm.weight", "pre_fc_norm_hidden.weight", 1, shape_wide(s), plus_one);
    put_gated_residual(m, "nextn.hc_head", "hyper_connection_mixer", false);
}

static bool is_tied(const struct hf *hf)
{
    return json_is_true(json_object_get(hf->text, "tie_word_embeddings")) ||
           json_is_true(json_object_get(hf->config, "tie_word_embeddings"));
}

int hf_add_tensors(struct hf *hf, struct emit *emit, struct strata_error *error)
{
    struct map m = { .hf = hf, .emit = emit, .error = error };
    strcpy(m.from, hf->prefix);
    put(&m, "token_embd.weight", "embed_tokens.weight", hf->shape.vocab, hf->shape.hidden, as_stored);
    put_gated_residual(&m, "output_hc", "hyper_connection_mixer", false);
    put_table(&m);
    m.from[0] = 0;
    if (safetensors_find(hf->st, "lm_head.weight") || !is_tied(hf))
        put(&m, "output.weight", "lm_head.weight", hf->shape.vocab, hf->shape.hidden, as_stored);
    for (int i = 0; i < hf->shape.layers; i++) {
        snprintf(m.to, sizeof m.to, "blk.%d.", i);
        snprintf(m.from, sizeof m.from, "%slayers.%d.", hf->prefix, i);
        put_block(&m, shape_attends(&hf->shape, i));
        if (i == hf->shape.ngram_layer)
            put_ngram_layer(&m);
    }
    if (hf->shape.mtp)
        put_mtp(&m);
    return m.code;
}
