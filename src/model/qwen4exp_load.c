/* qwen4exp_load.c - reads shapes and weights of a qwen4exp file and refuses wrong ones by name. */
#include "model/qwen4exp.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* ---- Metadata. Keys are given without the architecture's prefix. -------------------------------------------------------------------- */

static void key_name(char out[64], const char *key) { snprintf(out, 64, "qwen4exp.%s", key); }

/* An integer in [min, max]; fallback < min means the key is required. */
static int get_int(struct loader *l, const char *key, int min, int max, int fallback)
{
    char name[64];
    key_name(name, key);
    uint32_t value = 0;
    int present = l->code ? 0 : gguf_get_u32(l->gguf, name, &value, l->error);
    if (present < 0)
        l->code = present;
    if (l->code)
        return min;
    if (!present && fallback < min)
        loader_fail(l, STRATA_E_FORMAT, "key %s is missing", name);
    else if (!present)
        return fallback;
    else if (value < (uint32_t)min || value > (uint32_t)max)
        loader_fail(l, STRATA_E_UNSUPPORTED, "key %s is %u, wanted %d to %d", name, value, min, max);
    return l->code ? min : (int)value;
}

static float get_float(struct loader *l, const char *key, float min, float max)
{
    char name[64];
    key_name(name, key);
    float value = min;
    int present = l->code ? 1 : gguf_get_f32(l->gguf, name, &value, l->error);
    if (present < 0)
        l->code = present;
    else if (!present)
        loader_fail(l, STRATA_E_FORMAT, "key %s is missing", name);
    else if (!(value >= min && value <= max))
        loader_fail(l, STRATA_E_UNSUPPORTED, "key %s is %g, wanted %g to %g", name, (double)value, (double)min, (double)max);
    return l->code ? min : value;
}

/* The first n elements of an integer array. */
static void get_array(struct loader *l, const char *key, uint64_t *out, uint64_t n)
{
    char name[64];
    key_name(name, key);
    const struct gguf_value *value = gguf_find(l->gguf, name);
    if (!value)
        loader_fail(l, STRATA_E_FORMAT, "key %s is missing", name);
    else if (value->count < n)
        loader_fail(l, STRATA_E_FORMAT, "key %s has %llu elements, wanted %llu", name, (unsigned long long)value->count, (unsigned long long)n);
    for (uint64_t i = 0; !l->code && i < n; i++)
        l->code = gguf_value_u64(value, name, i, &out[i], l->error);
}

static void require(struct loader *l, bool ok, const char *sentence)
{
    if (!ok)
        loader_fail(l, STRATA_E_UNSUPPORTED, "%s", sentence);
}

static void read_ngram(struct loader *l, struct qwen4exp *m)
{
    struct ngram_layer *g = &m->ngram;
    const struct gguf_value *layers = gguf_find(l->gguf, "qwen4exp.ple.layers");
    uint64_t layer = 0;
    if (layers && layers->count > 1)
        loader_fail(l, STRATA_E_UNSUPPORTED, "key qwen4exp.ple.layers names %llu layers, wanted 1", (unsigned long long)layers->count);
    get_array(l, "ple.layers", &layer, 1);
    if (!l->code && layer >= (uint64_t)m->model.n_layers)
        loader_fail(l, STRATA_E_FORMAT, "key qwen4exp.ple.layers names layer %llu of %d", (unsigned long long)layer, m->model.n_layers);
    m->ngram_layer = (int)layer;
    require(l, get_int(l, "ple.ngram_size", 2, 16, 0) == 3, "key qwen4exp.ple.ngram_size is not 3");
    g->heads_per_order = get_int(l, "ple.heads_per_ngram", 1, QWEN_MAX_NGRAM_HEADS / 2, 0);
    g->n_heads = 2 * g->heads_per_order;
    g->embed = get_int(l, "embedding_length_per_layer_input", 1, 65536, 0);
    g->taps = get_int(l, "ple.conv_kernel", 1, QWEN_MAX_TAPS, 0);
    g->dilation = 3; /* the n-gram size */
    g->eos = get_int(l, "ple.eos_token_id", 0, l->code ? 0 : m->model.n_vocab - 1, -1);
    get_array(l, "ple.layer_multipliers", g->multipliers, 3);
    get_array(l, "ple.head_vocab_sizes", g->sizes, (uint64_t)g->n_heads);
    get_array(l, "ple.head_offsets", g->offsets, (uint64_t)g->n_heads);
    for (int h = 0; !l->code && h < g->n_heads; h++)
        if (g->sizes[h] == 0 || g->sizes[h] >= 1ull << 31 || g->offsets[h] >= 1ull << 31 || g->offsets[h] + g->sizes[h] >= 1ull << 31)
            loader_fail(l, STRATA_E_FORMAT, "n-gram head %d: offset %llu and size %llu leave the range of 31 bits", h, (unsigned long long)g->offsets[h],
                        (unsigned long long)g->sizes[h]);
    for (int i = 0; !l->code && i < 3; i++)
        if (g->multipliers[i] > INT64_MAX / (uint64_t)(m->model.n_vocab ? m->model.n_vocab : 1))
            loader_fail(l, STRATA_E_FORMAT, "n-gram multiplier %d is too large for %d tokens", i, m->model.n_vocab);
    require(l, l->code || g->n_heads * g->embed == m->model.hidden, "n-gram rows (heads x width) do not add up to the hidden size");
}

/* Layer kinds: full_attention_interval says which layers attend; compress_ratios[i] is the index block (0: dense). */
static void read_layer_kinds(struct loader *l, struct qwen4exp *m, int n_blocks)
{
    int interval = get_int(l, "full_attention_interval", 1, 1024, 4);
    uint64_t ratio[1024] = { 0 };
    if (gguf_find(l->gguf, "qwen4exp.attention.compress_ratios"))
        get_array(l, "attention.compress_ratios", ratio, (uint64_t)(n_blocks < 1024 ? n_blocks : 1024));
    struct attention_shape shape = {
        .n_heads = get_int(l, "attention.head_count", 1, 1024, 0),
        .kv_heads = get_int(l, "attention.head_count_kv", 1, 1024, 0),
        .dim = get_int(l, "attention.key_length", 32, ATTEND_MAX_DIM, 0),
        .n_pairs = get_int(l, "rope.dimension_count", 2, ATTEND_MAX_DIM, 0),
        .index_heads = get_int(l, "attention.indexer.head_count", 1, 64, 0),
        .index_dim = get_int(l, "attention.indexer.key_length", 32, ATTEND_MAX_DIM, 0),
        .eps = m->eps,
    };
    int budget = get_int(l, "attention.indexer.top_k", 1, 1 << 20, 0);
    require(l, get_int(l, "attention.value_length", 1, 4096, 0) == shape.dim || l->code, "attention.value_length differs from attention.key_length");
    require(l, shape.n_heads % shape.kv_heads == 0 && shape.n_heads / shape.kv_heads <= ATTEND_MAX_HEADS, "attention heads do not divide among the key heads");
    require(l, shape.dim % 32 == 0 && shape.index_dim % 32 == 0, "an attention head's width is not a multiple of 32");
    require(l, shape.n_pairs % 2 == 0 || l->code, "rope.dimension_count is odd");
    shape.n_pairs /= 2;
    require(l, 2 * shape.n_pairs <= shape.dim && 2 * shape.n_pairs <= shape.index_dim, "rope.dimension_count is larger than a head");
    for (int i = 0; !l->code && i < m->model.n_layers; i++) {
        struct qwen4exp_layer *layer = &m->layers[i];
        layer->is_attention = (i + 1) % interval == 0;
        layer->kind_index = layer->is_attention ? m->n_attention++ : m->n_delta++;
        layer->attention_shape = shape;
        if (!layer->is_attention)
            continue;
        if (ratio[i] > 64 || (ratio[i] && (uint64_t)budget % ratio[i]))
            loader_fail(l, STRATA_E_UNSUPPORTED, "layer %d: index blocks of %llu tokens for a budget of %d", i, (unsigned long long)ratio[i], budget);
        layer->attention_shape.block = (int)ratio[i];
        layer->attention_shape.budget_blocks = ratio[i] ? budget / (int)ratio[i] : 0;
    }
    if (!l->code && m->layers[m->ngram_layer].is_attention)
        loader_fail(l, STRATA_E_UNSUPPORTED, "the n-gram layer %d is an attention layer", m->ngram_layer);
}

static void read_shapes(struct loader *l, struct qwen4exp *m)
{
    const struct gguf_value *tokens = gguf_find(l->gguf, "tokenizer.ggml.tokens");
    if (!tokens)
        loader_fail(l, STRATA_E_FORMAT, "key tokenizer.ggml.tokens is missing");
    else if (tokens->type != GGUF_ARRAY || tokens->element != GGUF_STRING || tokens->count < 1 || tokens->count > 1 << 24)
        loader_fail(l, STRATA_E_FORMAT, "key tokenizer.ggml.tokens is not a vocabulary");
    int n_blocks = get_int(l, "block_count", 1, 1024, 0), n_mtp = get_int(l, "nextn_predict_layers", 0, 1024, 0);
    if (!l->code && n_mtp >= n_blocks)
        loader_fail(l, STRATA_E_FORMAT, "nextn_predict_layers is %d of %d blocks", n_mtp, n_blocks);
    m->model.n_vocab = l->code ? 0 : (int)tokens->count;
    m->model.n_layers = n_blocks - n_mtp;
    m->model.hidden = get_int(l, "embedding_length", 32, 65536, 0);
    m->model.max_context = get_int(l, "context_length", 1, 1 << 24, 0);
    m->eps = get_float(l, "attention.layer_norm_rms_epsilon", 1e-12f, 1e-2f);
    m->rope_base = (double)get_float(l, "rope.freq_base", 1.0f, 1e12f);
    m->streams = get_int(l, "hyper_connection.count", 2, 16, 0);
    m->low_rank = get_int(l, "hyper_connection.low_rank", 1, 65536, 0);
    m->wide = m->streams * m->model.hidden;
    m->delta = (struct delta_shape){ .k_heads = get_int(l, "ssm.group_count", 1, 1024, 0), .v_heads = get_int(l, "ssm.time_step_rank", 1, 1024, 0),
                                     .dim_k = get_int(l, "ssm.state_size", 16, DELTA_MAX_KEY, 0) };
    int inner = get_int(l, "ssm.inner_size", 16, 1 << 20, 0);
    m->delta.dim_v = inner / m->delta.v_heads;
    require(l, m->delta.v_heads % m->delta.k_heads == 0 && m->delta.dim_v * m->delta.v_heads == inner && m->delta.dim_v % DELTA_STRIP == 0 && m->delta.dim_k % 32 == 0,
            "the ssm.* head counts and sizes do not fit together");
    m->conv_taps = get_int(l, "ssm.conv_kernel", 1, QWEN_MAX_TAPS, 0);
    m->conv_channels = 2 * m->delta.k_heads * m->delta.dim_k + inner;
    m->n_experts = get_int(l, "expert_count", 1, 65536, 0);
    m->n_used = get_int(l, "expert_used_count", 1, OPS_MAX_USED, 0);
    require(l, m->n_used <= m->n_experts, "expert_used_count is larger than expert_count");
    m->shared_width = get_int(l, "expert_shared_feed_forward_length", 1, 1 << 20, 0);
    require(l, m->model.hidden % 32 == 0, "embedding_length is not a multiple of 32");
    if (l->code)
        return;
    m->layers = calloc((size_t)m->model.n_layers, sizeof *m->layers);
    if (!m->layers) {
        loader_fail(l, STRATA_E_MEMORY, "out of memory for %d layers", m->model.n_layers);
        return;
    }
    read_ngram(l, m);
    read_layer_kinds(l, m, n_blocks);
}

/* ---- Tensors ----------------------------------------------------------------------------------------------------------------------- */

static void load_mix(struct loader *l, struct qwen4exp *m, struct gated_residual *mix, const char *prefix, bool inject)
{
    loader_vector(l, &mix->norm, m->wide, "%s_norm.weight", prefix);
    loader_matrix(l, &mix->down, m->low_rank, m->wide, "%s_down.weight", prefix);
    loader_matrix(l, &mix->up, m->wide, m->low_rank, "%s_up.weight", prefix);
    if (inject)
        loader_matrix(l, &mix->inject, m->streams, m->wide, "%s_inject.weight", prefix);
}

static void load_delta(struct loader *l, struct qwen4exp *m, struct delta_layer *d, int i)
{
    int hidden = m->model.hidden, heads = m->delta.v_heads, inner = heads * m->delta.dim_v;
    loader_matrix(l, &d->qkv, m->conv_channels, hidden, "blk.%d.attn_qkv.weight", i);
    loader_matrix(l, &d->gate, inner, hidden, "blk.%d.attn_gate.weight", i);
    loader_matrix(l, &d->alpha, heads, hidden, "blk.%d.ssm_alpha.weight", i);
    loader_matrix(l, &d->beta, heads, hidden, "blk.%d.ssm_beta.weight", i);
    loader_matrix(l, &d->out, hidden, inner, "blk.%d.ssm_out.weight", i);
    loader_vector(l, &d->a, heads, "blk.%d.ssm_a", i);
    loader_vector(l, &d->dt, heads, "blk.%d.ssm_dt.bias", i);
    loader_taps(l, &d->conv, m->conv_channels, m->conv_taps, "blk.%d.ssm_conv1d.weight", i);
    loader_vector(l, &d->norm, m->delta.dim_v, "blk.%d.ssm_norm.weight", i);
}

static void load_attention(struct loader *l, struct qwen4exp *m, struct attention_layer *a, const struct attention_shape *s, int i)
{
    int hidden = m->model.hidden;
    loader_matrix(l, &a->q, 2 * s->n_heads * s->dim, hidden, "blk.%d.attn_q.weight", i);
    loader_matrix(l, &a->k, s->kv_heads * s->dim, hidden, "blk.%d.attn_k.weight", i);
    loader_matrix(l, &a->v, s->kv_heads * s->dim, hidden, "blk.%d.attn_v.weight", i);
    loader_matrix(l, &a->out, hidden, s->n_heads * s->dim, "blk.%d.attn_output.weight", i);
    loader_vector(l, &a->q_norm, s->dim, "blk.%d.attn_q_norm.weight", i);
    loader_vector(l, &a->k_norm, s->dim, "blk.%d.attn_k_norm.weight", i);
    if (!s->block)
        return;
    loader_matrix(l, &a->index_q, s->index_heads * s->index_dim, hidden, "blk.%d.indexer.q_proj.weight", i);
    loader_matrix(l, &a->index_k, s->index_dim, hidden, "blk.%d.indexer.k_proj.weight", i);
    loader_vector(l, &a->index_q_norm, s->index_dim, "blk.%d.indexer.q_norm.weight", i);
    loader_vector(l, &a->index_k_norm, s->index_dim, "blk.%d.indexer.k_norm.weight", i);
}

static void load_ffn(struct loader *l, struct qwen4exp *m, struct ffn_layer *f, int i, int expert_width)
{
    int hidden = m->model.hidden;
    loader_matrix(l, &f->router, m->n_experts, hidden, "blk.%d.ffn_gate_inp.weight", i);
    loader_matrix(l, &f->shared_gate, 1, hidden, "blk.%d.ffn_gate_inp_shexp.weight", i);
    loader_matrix(l, &f->gate, m->shared_width, hidden, "blk.%d.ffn_gate_shexp.weight", i);
    loader_matrix(l, &f->up, m->shared_width, hidden, "blk.%d.ffn_up_shexp.weight", i);
    loader_matrix(l, &f->down, hidden, m->shared_width, "blk.%d.ffn_down_shexp.weight", i);
    loader_experts(l, &f->experts, m->n_experts, hidden, expert_width, i);
}

static void load_ngram(struct loader *l, struct qwen4exp *m)
{
    struct ngram_layer *g = &m->ngram;
    int i = m->ngram_layer, hidden = m->model.hidden;
    int64_t rows = 0;
    for (int h = 0; h < g->n_heads; h++)
        rows = (int64_t)(g->offsets[h] + g->sizes[h]) > rows ? (int64_t)(g->offsets[h] + g->sizes[h]) : rows;
    loader_table(l, &g->table, rows, g->embed, "per_layer_token_embd.weight");
    loader_matrix(l, &g->key, m->wide, hidden, "blk.%d.ple_key.weight", i);
    loader_matrix(l, &g->value, hidden, hidden, "blk.%d.ple_value.weight", i);
    loader_vector(l, &g->norm_key, m->wide, "blk.%d.ple_norm_key.weight", i);
    loader_vector(l, &g->norm_query, m->wide, "blk.%d.ple_norm_query.weight", i);
    loader_vector(l, &g->norm_conv, m->wide, "blk.%d.ple_norm_conv.weight", i);
    loader_taps(l, &g->conv, m->wide, g->taps, "blk.%d.ple_conv1d.weight", i);
}

/* Files of this architecture that are no model: a vocabulary, or the draft block alone. */
static void refuse_parts(struct loader *l)
{
    bool first_block = false;
    for (uint64_t i = 0; i < l->gguf->n_tensors; i++)
        first_block |= strncmp(l->gguf->tensors[i].name, "blk.0.", 6) == 0;
    if (!l->gguf->n_tensors)
        loader_fail(l, STRATA_E_UNSUPPORTED, "this file has no tensors: a vocabulary, not a model");
    else if (!first_block && gguf_find(l->gguf, "qwen4exp.nextn_predict_layers"))
        loader_fail(l, STRATA_E_UNSUPPORTED, "this is an MTP draft sidecar, not a model: open the trunk's file");
}

static void load_tensors(struct loader *l, struct qwen4exp *m)
{
    int expert_width = get_int(l, "expert_feed_forward_length", 1, 1 << 20, 0);
    loader_table(l, &m->embedding, m->model.n_vocab, m->model.hidden, "token_embd.weight");
    bool tied = !gguf_tensor_find(l->gguf, "output.weight");
    loader_matrix(l, &m->output, m->model.n_vocab, m->model.hidden, "%s", tied ? "token_embd.weight" : "output.weight");
    load_mix(l, m, &m->final_mix, "output_hc", false);
    for (int i = 0; !l->code && i < m->model.n_layers; i++) {
        struct qwen4exp_layer *layer = &m->layers[i];
        char prefix[64];
        snprintf(prefix, sizeof prefix, "blk.%d.hc_attn", i);
        load_mix(l, m, &layer->attn_mix, prefix, true);
        snprintf(prefix, sizeof prefix, "blk.%d.hc_ffn", i);
        load_mix(l, m, &layer->ffn_mix, prefix, true);
        if (layer->is_attention)
            load_attention(l, m, &layer->attention, &layer->attention_shape, i);
        else
            load_delta(l, m, &layer->delta, i);
        load_ffn(l, m, &layer->ffn, i, expert_width);
    }
    if (!l->code)
        load_ngram(l, m);
}

int qwen4exp_load(struct model **out, const struct gguf *gguf, struct ops *ops, const struct load_options *options, struct strata_error *error)
{
    struct qwen4exp *m = calloc(1, sizeof *m);
    if (!m)
        return error_set(error, STRATA_E_MEMORY, "out of memory for the model");
    m->model.arch = &model_qwen4exp;
    m->model.ops = ops;
    struct loader l = { .gguf = gguf, .arena = &m->arena, .store = &m->model.experts, .dry = true, .error = error };
    refuse_parts(&l);
    read_shapes(&l, m);
    m->model.n_used = m->n_used;
    if (!l.code)
        l.code = store_create(&m->model.experts, m->model.n_layers, error);
    load_tensors(&l, m);
    if (!l.code && out && ops) {
        loader_reserve(&l, options);
        load_tensors(&l, m);
        if (!l.code)
            l.code = ops_cpu_reserve_experts(ops, m->layers[0].ffn.experts.width, m->n_used, error);
        memcpy(m->maps, l.maps, sizeof m->maps);
        m->n_maps = l.n_maps;
        loader_run(&l, ops_cpu_pool(ops), options);
    }
    loader_finish(&l);
    m->model.weight_bytes = m->arena.used + m->model.experts.arena.used;
    if (l.code || !out)
        qwen4exp_destroy(&m->model);
    else
        *out = &m->model;
    return l.code;
}

void qwen4exp_destroy(struct model *model)
{
    if (!model)
        return;
    struct qwen4exp *m = (struct qwen4exp *)model;
    for (int i = 0; i < m->n_maps; i++)
        munmap(m->maps[i].base, m->maps[i].length);
    arena_destroy(&m->arena);
    store_destroy(&m->model.experts);
    free(m->layers);
    free(m);
}
