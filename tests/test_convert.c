/* test_convert.c - a tiny checkpoint, written here, becomes a GGUF file; values, orders and names are checked one by one. */
#include "convert/convert.h"
#include "convert/shape.h"
#include "gguf/gguf.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

/* ---- A checkpoint that can be made wrong in one place -------------------------------------------------------------------------
 */

enum {
    HIDDEN = 32,
    VOCAB = 24,
    LAYERS = 4,
    HEAD = 8,
    KEYS = 2,
    VALUES = 6,
    DIM = 4,
    TAPS = 4,
    EXPERTS = 3,
    WIDTH = 16,
    STREAMS = 2,
    RANK = 8,
    WIDE = 64
};
enum { INDEX_HEADS = 2, INDEX_DIM = 4, TABLE = 64, TABLE_WIDTH = 8, QK = 2 * KEYS * DIM, V = VALUES * DIM };

struct variant {
    bool fused_experts, whole_table, nested, two_files, twice, no_constants;
    const char *skip;    /* leave this tensor out */
    const char *reshape; /* one row too many */
    const char *fp8;     /* this tensor's dtype is F8_E4M3 */
};

static char directory[128];

static const char *path_of(const char *name)
{
    static char paths[8][256];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", directory, name);
    return path;
}

static void write_text(const char *name, const char *text)
{
    FILE *file = fopen(path_of(name), "wb");
    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
}

/* Element i of a tensor: a function of its name, short enough for BF16. */
static float value_of(const char *name, int64_t i)
{
    uint32_t hash = 2166136261u;
    for (const char *c = name; *c; c++)
        hash = (hash ^ (uint8_t)*c) * 16777619u;
    hash = (hash ^ (uint32_t)i) * 2654435761u;
    return ((int)(hash >> 16 & 127) - 64) / 32.0f;
}

struct file {
    char header[96 << 10];
    size_t at;
    float *data;
    size_t n;
};

static void put_raw(struct file *f, const struct variant *v, const char *prefix, const char *name, const char *dtype, int64_t rows,
                    int64_t width, const void *data, size_t bytes)
{
    char full[160];
    snprintf(full, sizeof full, "%s%s", prefix, name);
    if (v->skip && strcmp(v->skip, full) == 0)
        return;
    size_t start = f->n * 4;
    f->at += (size_t)snprintf(f->header + f->at, sizeof f->header - f->at,
                              "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%lld,%lld],\"data_offsets\":[%zu,%zu]}", f->at > 1 ? "," : "",
                              full, dtype, (long long)rows, (long long)width, start, start + bytes);
    f->data = realloc(f->data, (f->n + bytes / 4) * sizeof *f->data);
    memcpy(f->data + f->n, data, bytes);
    f->n += bytes / 4;
}

/* A tensor with value_of its name; the name is the plain one ("layers.0...") whatever the prefix. `first`: element to start at. */
static void put_part(struct file *f, const struct variant *v, const char *prefix, const char *name, const char *values,
                     int64_t first, int64_t rows, int64_t width)
{
    bool fp8 = v->fp8 && strcmp(v->fp8, name) == 0;
    rows += v->reshape && strcmp(v->reshape, name) == 0;
    float *data = calloc((size_t)(rows * width), sizeof *data);
    for (int64_t i = 0; i < rows * width; i++)
        data[i] = value_of(values, first + i);
    put_raw(f, v, prefix, name, fp8 ? "F8_E4M3" : "F32", rows, width, data, (size_t)(rows * width) * (fp8 ? 1 : 4));
    free(data);
}

static void put(struct file *f, const struct variant *v, const char *prefix, const char *name, int64_t rows, int64_t width)
{
    put_part(f, v, prefix, name, name, 0, rows, width);
}

static void put_layer(struct file *f, const struct variant *v, const char *prefix, const char *layer, bool attends)
{
    char name[128], values[128];
#define PUT(text, rows, width) (snprintf(name, sizeof name, "%s%s", layer, text), put(f, v, prefix, name, rows, width))
    static const char *const mixers[] = { "attn_hyper_connection.", "mlp_hyper_connection." };
    for (int i = 0; i < 2; i++) {
        char mixer[96];
        snprintf(mixer, sizeof mixer, "%shc_norm.weight", mixers[i]);
        PUT(mixer, 1, WIDE);
        snprintf(mixer, sizeof mixer, "%sinput_mix_weight_down.weight", mixers[i]);
        PUT(mixer, RANK, WIDE);
        snprintf(mixer, sizeof mixer, "%sinput_mix_weight_up.weight", mixers[i]);
        PUT(mixer, WIDE, RANK);
        snprintf(mixer, sizeof mixer, "%sblock_inject_weight.weight", mixers[i]);
        PUT(mixer, STREAMS, WIDE);
    }
    if (attends) {
        PUT("self_attn.q_proj.weight", 2 * 2 * HEAD, HIDDEN);
        PUT("self_attn.k_proj.weight", HEAD, HIDDEN);
        PUT("self_attn.v_proj.weight", HEAD, HIDDEN);
        PUT("self_attn.o_proj.weight", HIDDEN, 2 * HEAD);
        PUT("self_attn.q_norm.weight", 1, HEAD);
        PUT("self_attn.k_norm.weight", 1, HEAD);
        PUT("self_attn.indexer.index_qk_proj.weight", (INDEX_HEADS + 1) * INDEX_DIM, HIDDEN);
        PUT("self_attn.indexer.q_layernorm.weight", 1, INDEX_DIM);
        PUT("self_attn.indexer.k_layernorm.weight", 1, INDEX_DIM);
    } else {
        PUT("linear_attn.in_proj_qkv.weight", QK + V, HIDDEN);
        PUT("linear_attn.in_proj_z.weight", V, HIDDEN);
        PUT("linear_attn.in_proj_b.weight", VALUES, HIDDEN);
        PUT("linear_attn.in_proj_a.weight", VALUES, HIDDEN);
        PUT("linear_attn.A_log", 1, VALUES);
        PUT("linear_attn.dt_bias", 1, VALUES);
        PUT("linear_attn.conv1d.weight", QK + V, TAPS);
        PUT("linear_attn.norm.weight", 1, DIM);
        PUT("linear_attn.out_proj.weight", HIDDEN, V);
    }
    PUT("mlp.gate.weight", EXPERTS, HIDDEN);
    PUT("mlp.shared_expert.gate_proj.weight", WIDTH, HIDDEN);
    PUT("mlp.shared_expert.up_proj.weight", WIDTH, HIDDEN);
    PUT("mlp.shared_expert.down_proj.weight", HIDDEN, WIDTH);
    PUT("mlp.shared_expert_gate.weight", 1, HIDDEN);
    if (v->fused_experts) {
        PUT("mlp.experts.gate_up_proj", EXPERTS * 2 * WIDTH, HIDDEN);
        PUT("mlp.experts.down_proj", EXPERTS * HIDDEN, WIDTH);
        return;
    }
    for (int e = 0; e < EXPERTS;
         e++) { /* the same values, taken out of the fused order: gate rows, then up rows, expert by expert */
        static const char *const names[] = { "gate", "up", "down" };
        for (int k = 0; k < 3; k++) {
            snprintf(name, sizeof name, "%smlp.experts.%d.%s_proj.weight", layer, e, names[k]);
            snprintf(values, sizeof values, "%smlp.experts.%s", layer, k < 2 ? "gate_up_proj" : "down_proj");
            int64_t first = k < 2 ? (int64_t)(2 * e + k) * WIDTH * HIDDEN : (int64_t)e * HIDDEN * WIDTH;
            put_part(f, v, prefix, name, values, first, k < 2 ? WIDTH : HIDDEN, k < 2 ? HIDDEN : WIDTH);
        }
    }
#undef PUT
}

static void write_safetensors(struct file *f, const char *name)
{
    f->header[f->at++] = '}';
    FILE *file = fopen(path_of(name), "wb");
    assert_non_null(file);
    uint64_t length = f->at;
    fwrite(&length, 8, 1, file);
    fwrite(f->header, 1, f->at, file);
    fwrite(f->data, 4, f->n, file);
    assert_int_equal(fclose(file), 0);
    free(f->data);
    free(f);
}

static struct file *new_file(void)
{
    struct file *f = calloc(1, sizeof *f);
    f->header[f->at++] = '{';
    return f;
}

static const uint64_t head_sizes[4] = { 11, 13, 17, 19 }, head_offsets[4] = { 0, 11, 24, 41 };

static void put_ngram(struct file *f, const struct variant *v, const char *prefix)
{
    static const char table[] = "layers.1.ple.ple_embedding.ngram_embedding.weight";
    if (v->whole_table)
        put(f, v, prefix, table, TABLE, TABLE_WIDTH);
    else { /* unequal shards: nothing promises equal ones */
        put_part(f, v, prefix, "layers.1.ple.ple_embedding.ngram_embedding.shard_0.weight", table, 0, 40, TABLE_WIDTH);
        put_part(f, v, prefix, "layers.1.ple.ple_embedding.ngram_embedding.shard_1.weight", table, 40 * TABLE_WIDTH, TABLE - 40,
                 TABLE_WIDTH);
    }
    if (!v->no_constants) {
        put_raw(f, v, prefix, "layers.1.ple.ple_embedding.layer_multipliers", "I64", 1, 3, (uint64_t[]){ 3, 5, 7 }, 24);
        put_raw(f, v, prefix, "layers.1.ple.ple_embedding.ngram_heads_vocab_sizes", "I64", 1, 4, head_sizes, 32);
        put_raw(f, v, prefix, "layers.1.ple.ple_embedding.ngram_heads_offsets", "I64", 1, 4, head_offsets, 32);
    }
    put(f, v, prefix, "layers.1.ple.key_proj.weight", WIDE, HIDDEN);
    put(f, v, prefix, "layers.1.ple.value_proj.weight", HIDDEN, HIDDEN);
    put(f, v, prefix, "layers.1.ple.norm_key.weight", 1, WIDE);
    put(f, v, prefix, "layers.1.ple.norm_query.weight", 1, WIDE);
    put(f, v, prefix, "layers.1.ple.norm_conv.weight", 1, WIDE);
    put(f, v, prefix, "layers.1.ple.conv1d.weight", WIDE, TAPS);
}

static const char config[] =
    "\"hidden_size\":32,\"vocab_size\":24,\"num_hidden_layers\":4,\"max_position_embeddings\":512,\"num_attention_heads\":2,\"num_"
    "key_value_heads\":1,"
    "\"head_dim\":8,\"indexer_n_heads\":2,\"indexer_head_dim\":4,\"indexer_budget\":8,\"indexer_compress_ratio\":4,\"linear_num_"
    "key_heads\":2,"
    "\"linear_num_value_heads\":6,\"linear_key_head_dim\":4,\"linear_value_head_dim\":4,\"linear_conv_kernel_dim\":4,\"num_"
    "experts\":3,"
    "\"num_experts_per_tok\":2,\"moe_intermediate_size\":16,\"shared_expert_intermediate_size\":16,\"hc_count\":2,\"hc_lowrank\":8,"
    "\"ple_layer_ids\":[2],"
    "\"ngram_size\":3,\"heads_per_ngram\":2,\"ple_embed_dim\":32,\"ple_conv_kernel_size\":4,\"eos_token_id\":5,\"ngram_vocab_size_"
    "base\":11,\"seed\":1234,"
    "\"pad_token_id\":5,\"rope_parameters\":{\"rope_theta\":10000.0,\"partial_rotary_factor\":0.25,\"mrope_section\":[1,0,0]}";

static void write_checkpoint(const struct variant *v)
{
    const char *prefix = v->nested ? "model.language_model." : "model.";
    struct file *f = new_file();
    put(f, v, prefix, "embed_tokens.weight", VOCAB, HIDDEN);
    put(f, v, "", "lm_head.weight", VOCAB, HIDDEN);
    put(f, v, prefix, "hyper_connection_mixer.hc_norm.weight", 1, WIDE);
    put(f, v, prefix, "hyper_connection_mixer.input_mix_weight_down.weight", RANK, WIDE);
    put(f, v, prefix, "hyper_connection_mixer.input_mix_weight_up.weight", WIDE, RANK);
    put_ngram(f, v, prefix);
    for (int i = 0; i < LAYERS; i++) {
        char layer[32];
        snprintf(layer, sizeof layer, "layers.%d.", i);
        put_layer(f, v, prefix, layer, i == 3);
    }
    struct file *second = v->two_files ? new_file() : f;
    put_layer(second, v, "", "mtp.layers.0.", true);
    put(second, v, "", "mtp.fc_embedding.weight", HIDDEN, HIDDEN);
    put(second, v, "", "mtp.fc_hidden.weight", HIDDEN, HIDDEN);
    put(second, v, "", "mtp.pre_fc_norm_embedding.weight", 1, HIDDEN);
    put(second, v, "", "mtp.pre_fc_norm_hidden.weight", 1, WIDE);
    put(second, v, "", "mtp.hyper_connection_mixer.hc_norm.weight", 1, WIDE);
    put(second, v, "", "mtp.hyper_connection_mixer.input_mix_weight_down.weight", RANK, WIDE);
    put(second, v, "", "mtp.hyper_connection_mixer.input_mix_weight_up.weight", WIDE, RANK);
    if (v->twice)
        put(second, v, "", "lm_head.weight", VOCAB, HIDDEN);
    if (v->two_files) {
        write_safetensors(f, "first.safetensors");
        write_safetensors(second, "second.safetensors");
        write_text("model.safetensors.index.json",
                   "{\"weight_map\":{\"lm_head.weight\":\"first.safetensors\",\"mtp.fc_hidden.weight\":\"second.safetensors\"}}");
    } else
        write_safetensors(f, "model.safetensors");
    char text[4096];
    snprintf(text, sizeof text,
             v->nested ? "{\"model_type\":\"qwen4_exp\",\"text_config\":{%s}}" : "{\"model_type\":\"qwen4_exp_text\",%s}", config);
    write_text("config.json", text);
    write_text("generation_config.json", "{\"temperature\":0.7,\"top_p\":0.8,\"top_k\":20,\"eos_token_id\":[7,5]}");
    write_text(
        "tokenizer.json",
        "{\"model\":{\"vocab\":{\"a\":0,\"b\":1,\"ab\":2,\"c\":3,\"abc\":4},\"merges\":[[\"a\",\"b\"],\"ab c\"]},"
        "\"added_tokens\":[{\"id\":5,\"content\":\"<end>\",\"special\":true},{\"id\":6,\"content\":\"<think>\",\"special\":false},"
        "{\"id\":7,\"content\":\"<stop>\",\"special\":true}]}");
    write_text("tokenizer_config.json", "{\"chat_template\":\"{{ messages }}\"}");
}

static int make_directory(void **state)
{
    strcpy(directory, "/tmp/strata-convert-XXXXXX");
    return mkdtemp(directory) ? 0 : -1;
}

static int remove_directory(void **state)
{
    static const char *const names[] = { "config.json",
                                         "generation_config.json",
                                         "tokenizer.json",
                                         "tokenizer_config.json",
                                         "model.safetensors",
                                         "first.safetensors",
                                         "second.safetensors",
                                         "a.gguf",
                                         "b.gguf",
                                         "model.safetensors.index.json",
                                         "chat_template.jinja" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        unlink(path_of(names[i]));
    return rmdir(directory); /* fails if anything else was left, such as a temporary file */
}

/* ---- Reading the result -------------------------------------------------------------------------------------------------------
 */

static struct strata_error error;
static struct convert_summary summary;

static int convert(const char *out, const struct convert_types *types)
{
    struct convert_options options = { .threads = 2 };
    if (types)
        options.types = *types;
    memset(&error, 0, sizeof error);
    return convert_checkpoint(directory, path_of(out), true, &options, &summary, &error);
}

static struct gguf *converted(struct variant v)
{
    write_checkpoint(&v);
    struct gguf *gguf = NULL;
    if (convert("a.gguf", NULL) || gguf_open(&gguf, path_of("a.gguf"), &error))
        fail_msg("%s", error.text);
    return gguf;
}

static float *tensor(const struct gguf *gguf, const char *name, int64_t width, int64_t rows)
{
    const struct gguf_tensor *t = gguf_tensor_find(gguf, name);
    if (!t)
        fail_msg("%s is missing", name);
    assert_int_equal(t->type, QUANT_F32);
    assert_int_equal(t->dims[0], width);
    assert_int_equal(t->dims[1] * t->dims[2], rows);
    float *data = malloc(t->bytes);
    assert_int_equal(gguf_read(gguf, t, 0, data, t->bytes, &error), 0);
    return data;
}

/* Row `row` of the output is row `wanted` of the checkpoint's tensor, plus `add`. */
static void expect_row(const float *data, int64_t row, int64_t width, const char *name, int64_t wanted, float plus)
{
    for (int64_t i = 0; i < width; i++)
        if (data[row * width + i] != value_of(name, wanted * width + i) + plus)
            fail_msg("row %lld of %s: element %lld is %g, wanted %g", (long long)row, name, (long long)i,
                     (double)data[row * width + i], (double)(value_of(name, wanted * width + i) + plus));
}

/* ---- Names, orders, values
 * ---------------------------------------------------------------------------------------------------------- */

/* nk = 2, nv = 6: the checkpoint's heads 0 1 2 belong to key head 0 and 3 4 5 to key head 1; GGUF alternates. */
static const int head_from[VALUES] = { 0, 3, 1, 4, 2, 5 };

static void rows_of_value_heads_alternate_between_key_heads(void **state)
{
    struct gguf *gguf = converted((struct variant){ 0 });
    float *gate = tensor(gguf, "blk.0.attn_gate.weight", HIDDEN, V),
          *alpha = tensor(gguf, "blk.0.ssm_alpha.weight", HIDDEN, VALUES);
    for (int j = 0; j < VALUES; j++) {
        expect_row(alpha, j, HIDDEN, "layers.0.linear_attn.in_proj_a.weight", head_from[j], 0);
        for (int i = 0; i < DIM; i++)
            expect_row(gate, j * DIM + i, HIDDEN, "layers.0.linear_attn.in_proj_z.weight", head_from[j] * DIM + i, 0);
    }
    free(gate);
    free(alpha);
    gguf_close(gguf);
}

static void query_and_key_rows_keep_their_places_before_the_value_rows(void **state)
{
    struct gguf *gguf = converted((struct variant){ 0 });
    float *qkv = tensor(gguf, "blk.2.attn_qkv.weight", HIDDEN, QK + V),
          *taps = tensor(gguf, "blk.2.ssm_conv1d.weight", TAPS, QK + V);
    for (int row = 0; row < QK + V; row++) {
        int in_values = row - QK, from = row < QK ? row : QK + head_from[in_values / DIM] * DIM + in_values % DIM;
        expect_row(qkv, row, HIDDEN, "layers.2.linear_attn.in_proj_qkv.weight", from, 0);
        expect_row(taps, row, TAPS, "layers.2.linear_attn.conv1d.weight", from, 0);
    }
    free(qkv);
    free(taps);
    gguf_close(gguf);
}

static void columns_of_the_output_projection_follow_the_value_heads(void **state)
{
    struct gguf *gguf = converted((struct variant){ 0 });
    float *out = tensor(gguf, "blk.0.ssm_out.weight", V, HIDDEN);
    for (int row = 0; row < HIDDEN; row++)
        for (int column = 0; column < V; column++)
            assert_float_equal(
                out[row * V + column],
                value_of("layers.0.linear_attn.out_proj.weight", row * V + head_from[column / DIM] * DIM + column % DIM), 0);
    free(out);
    gguf_close(gguf);
}

static void decay_is_minus_exp_of_its_logarithm_in_the_new_head_order(void **state)
{
    struct gguf *gguf = converted((struct variant){ 0 });
    float *a = tensor(gguf, "blk.0.ssm_a", VALUES, 1), *dt = tensor(gguf, "blk.0.ssm_dt.bias", VALUES, 1);
    for (int j = 0; j < VALUES; j++) {
        assert_float_equal(a[j], -exp(value_of("layers.0.linear_attn.A_log", head_from[j])), 1e-6);
        assert_float_equal(dt[j], value_of("layers.0.linear_attn.dt_bias", head_from[j]), 0);
    }
    free(a);
    free(dt);
    gguf_close(gguf);
}

static void norm_weights_get_their_one_except_deltanets(void **state)
{
    static const struct {
        const char *to, *from;
        int width;
        float plus;
    } norms[] = {
        { "output_hc_norm.weight", "hyper_connection_mixer.hc_norm.weight", WIDE, 1 },
        { "blk.0.hc_attn_norm.weight", "layers.0.attn_hyper_connection.hc_norm.weight", WIDE, 1 },
        { "blk.3.hc_ffn_norm.weight", "layers.3.mlp_hyper_connection.hc_norm.weight", WIDE, 1 },
        { "blk.3.attn_q_norm.weight", "layers.3.self_attn.q_norm.weight", HEAD, 1 },
        { "blk.3.attn_k_norm.weight", "layers.3.self_attn.k_norm.weight", HEAD, 1 },
        { "blk.3.indexer.q_norm.weight", "layers.3.self_attn.indexer.q_layernorm.weight", INDEX_DIM, 1 },
        { "blk.3.indexer.k_norm.weight", "layers.3.self_attn.indexer.k_layernorm.weight", INDEX_DIM, 1 },
        { "blk.1.ple_norm_key.weight", "layers.1.ple.norm_key.weight", WIDE, 1 },
        { "blk.1.ple_norm_query.weight", "layers.1.ple.norm_query.weight", WIDE, 1 },
        { "blk.1.ple_norm_conv.weight", "layers.1.ple.norm_conv.weight", WIDE, 1 },
        { "blk.4.nextn.enorm.weight", "mtp.pre_fc_norm_embedding.weight", HIDDEN, 1 },
        { "blk.4.nextn.hnorm.weight", "mtp.pre_fc_norm_hidden.weight", WIDE, 1 },
        { "blk.4.nextn.hc_head_norm.weight", "mtp.hyper_connection_mixer.hc_norm.weight", WIDE, 1 },
        { "blk.0.ssm_norm.weight", "layers.0.linear_attn.norm.weight", DIM, 0 },
    };
    struct gguf *gguf = converted((struct variant){ 0 });
    for (size_t i = 0; i < sizeof norms / sizeof *norms; i++) {
        float *norm = tensor(gguf, norms[i].to, norms[i].width, 1);
        expect_row(norm, 0, norms[i].width, norms[i].from, 0, norms[i].plus);
        free(norm);
    }
    gguf_close(gguf);
}

static void indexer_projections_are_cut_out_of_one_matrix(void **state)
{
    struct gguf *gguf = converted((struct variant){ 0 });
    float *q = tensor(gguf, "blk.3.indexer.q_proj.weight", HIDDEN, INDEX_HEADS * INDEX_DIM),
          *k = tensor(gguf, "blk.3.indexer.k_proj.weight", HIDDEN, INDEX_DIM);
    for (int row = 0; row < INDEX_HEADS * INDEX_DIM; row++)
        expect_row(q, row, HIDDEN, "layers.3.self_attn.indexer.index_qk_proj.weight", row, 0);
    for (int row = 0; row < INDEX_DIM; row++)
        expect_row(k, row, HIDDEN, "layers.3.self_attn.indexer.index_qk_proj.weight", INDEX_HEADS * INDEX_DIM + row, 0);
    free(q);
    free(k);
    gguf_close(gguf);
}

static void an_experts_rows_are_its_gate_rows_and_then_its_up_rows(void **state)
{
    struct gguf *gguf = converted((struct variant){ .fused_experts = true });
    float *gate = tensor(gguf, "blk.2.ffn_gate_exps.weight", HIDDEN, EXPERTS * WIDTH),
          *up = tensor(gguf, "blk.2.ffn_up_exps.weight", HIDDEN, EXPERTS * WIDTH);
    for (int e = 0; e < EXPERTS; e++)
        for (int row = 0; row < WIDTH; row++) {
            expect_row(gate, e * WIDTH + row, HIDDEN, "layers.2.mlp.experts.gate_up_proj", 2 * e * WIDTH + row, 0);
            expect_row(up, e * WIDTH + row, HIDDEN, "layers.2.mlp.experts.gate_up_proj", (2 * e + 1) * WIDTH + row, 0);
        }
    free(gate);
    free(up);
    gguf_close(gguf);
}

static void the_draft_block_comes_last_with_its_two_projections_side_by_side(void **state)
{
    struct gguf *gguf = converted((struct variant){ 0 });
    uint32_t blocks = 0, drafts = 0;
    assert_int_equal(gguf_get_u32(gguf, "qwen4exp.block_count", &blocks, &error), 1);
    assert_int_equal(gguf_get_u32(gguf, "qwen4exp.nextn_predict_layers", &drafts, &error), 1);
    assert_int_equal(blocks, LAYERS + 1);
    assert_int_equal(drafts, 1);
    float *both = tensor(gguf, "blk.4.nextn.eh_proj.weight", 2 * HIDDEN, HIDDEN);
    for (int row = 0; row < HIDDEN; row++)
        for (int i = 0; i < HIDDEN; i++) {
            assert_float_equal(both[row * 2 * HIDDEN + i], value_of("mtp.fc_embedding.weight", row * HIDDEN + i), 0);
            assert_float_equal(both[row * 2 * HIDDEN + HIDDEN + i], value_of("mtp.fc_hidden.weight", row * HIDDEN + i), 0);
        }
    free(both);
    gguf_close(gguf);
}

static void sparse_layers_and_the_draft_block_have_their_compress_ratios(void **state)
{
    struct gguf *gguf = converted((struct variant){ 0 });
    const struct gguf_value *ratios = gguf_find(gguf, "qwen4exp.attention.compress_ratios");
    assert_non_null(ratios);
    assert_int_equal(ratios->count, LAYERS + 1);
    for (uint64_t i = 0; i < ratios->count; i++) {
        uint64_t ratio = 99;
        assert_int_equal(gguf_value_u64(ratios, "ratios", i, &ratio, &error), 0);
        assert_int_equal(ratio, i == 3 ? 4 : 0);
    }
    gguf_close(gguf);
}

/* ---- Layouts of checkpoints that mean the same
 * ---------------------------------------------------------------------------------------- */

static void expect_same_file(struct variant a, struct variant b)
{
    write_checkpoint(&a);
    assert_int_equal(convert("a.gguf", NULL), 0);
    unlink(path_of("model.safetensors"));
    write_checkpoint(&b);
    if (convert("b.gguf", NULL))
        fail_msg("%s", error.text);
    FILE *one = fopen(path_of("a.gguf"), "rb"), *two = fopen(path_of("b.gguf"), "rb");
    int64_t at = 0;
    for (int x = 0, y = 0; x != EOF; at++)
        if ((x = fgetc(one)) != (y = fgetc(two)))
            fail_msg("byte %lld differs", (long long)at);
    assert_true(at > 100000);
    fclose(one);
    fclose(two);
}

static void fused_and_single_experts_give_the_same_file(void **state)
{
    expect_same_file((struct variant){ .fused_experts = true }, (struct variant){ 0 });
}

static void a_table_in_shards_gives_the_same_file_as_a_whole_one(void **state)
{
    expect_same_file((struct variant){ .whole_table = true }, (struct variant){ 0 });
}

static void a_nested_config_and_its_prefix_give_the_same_file(void **state)
{
    expect_same_file((struct variant){ .nested = true }, (struct variant){ 0 });
}

static void two_files_with_an_index_give_the_same_file_as_one(void **state)
{
    expect_same_file((struct variant){ 0 }, (struct variant){ .two_files = true });
}

/* ---- Hash constants, tokens, types
 * ------------------------------------------------------------------------------------------------------ */

static void hash_constants_follow_from_the_seed_as_in_the_released_model(void **state)
{
    uint64_t m[3], sizes[16], offsets[16];
    shape_hash_multipliers(1234, 0, 248320, m);
    assert_int_equal(m[0], 23703573157769);
    assert_int_equal(m[1], 20109073645365);
    assert_int_equal(m[2], 8052911324071);
    shape_hash_sizes(20000000, 16, sizes, offsets);
    assert_int_equal(sizes[0], 20000003);
    assert_int_equal(sizes[15], 20000171);
    assert_int_equal(offsets[15], 300001275);
}

static void missing_hash_constants_are_derived(void **state)
{
    struct gguf *gguf = converted((struct variant){ .no_constants = true });
    const struct gguf_value *sizes = gguf_find(gguf, "qwen4exp.ple.head_vocab_sizes");
    assert_non_null(sizes);
    for (uint64_t i = 0; i < 4; i++) {
        uint64_t size = 0;
        assert_int_equal(gguf_value_u64(sizes, "sizes", i, &size, &error), 0);
        assert_int_equal(size, head_sizes[i]);
    }
    gguf_close(gguf);
}

static void the_chat_stop_is_the_first_of_the_generation_configs_list(void **state)
{
    struct gguf *gguf = converted((struct variant){ 0 });
    uint32_t eos = 0, hash_eos = 0;
    assert_int_equal(gguf_get_u32(gguf, "tokenizer.ggml.eos_token_id", &eos, &error), 1);
    assert_int_equal(gguf_get_u32(gguf, "qwen4exp.ple.eos_token_id", &hash_eos, &error), 1);
    assert_int_equal(eos, 7);
    assert_int_equal(hash_eos, 5);
    gguf_close(gguf);
}

static void tokens_have_their_types_and_empty_ids_are_padding(void **state)
{
    static const struct {
        int id;
        const char *text;
        int type;
    } wanted[] = { { 4, "abc", 1 }, { 5, "<end>", 3 }, { 6, "<think>", 4 }, { 23, "[PAD23]", 5 } };
    struct gguf *gguf = converted((struct variant){ 0 });
    const struct gguf_value *tokens = gguf_find(gguf, "tokenizer.ggml.tokens"),
                            *types = gguf_find(gguf, "tokenizer.ggml.token_type");
    assert_int_equal(tokens->count, VOCAB);
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        uint64_t type = 0;
        assert_string_equal(((const struct gguf_string *)tokens->data)[wanted[i].id].data, wanted[i].text);
        assert_int_equal(gguf_value_u64(types, "types", (uint64_t)wanted[i].id, &type, &error), 0);
        assert_int_equal(type, wanted[i].type);
    }
    gguf_close(gguf);
}

static void merges_may_be_pairs_or_one_string(void **state)
{
    struct gguf *gguf = converted((struct variant){ 0 });
    const struct gguf_value *merges = gguf_find(gguf, "tokenizer.ggml.merges");
    assert_int_equal(merges->count, 2);
    assert_string_equal(((const struct gguf_string *)merges->data)[0].data, "a b");
    assert_string_equal(((const struct gguf_string *)merges->data)[1].data, "ab c");
    gguf_close(gguf);
}

static void a_template_file_serves_when_the_tokenizers_config_has_none(void **state)
{
    write_checkpoint(&(struct variant){ 0 });
    write_text("tokenizer_config.json", "{}");
    write_text("chat_template.jinja", "{{ from_file }}");
    struct gguf *gguf = NULL;
    assert_int_equal(convert("a.gguf", NULL), 0);
    assert_int_equal(gguf_open(&gguf, path_of("a.gguf"), &error), 0);
    struct gguf_string template = { 0 };
    assert_int_equal(gguf_get_string(gguf, "tokenizer.chat_template", &template, &error), 1);
    assert_string_equal(template.data, "{{ from_file }}");
    gguf_close(gguf);
}

static void rows_that_no_block_divides_fall_back_and_are_counted(void **state)
{
    const struct quant_format *q = quant_format_named("IQ3_S");
    write_checkpoint(&(struct variant){ 0 });
    assert_int_equal(convert("a.gguf", &(struct convert_types){ .gate_up = q, .down = q }), 0);
    struct gguf *gguf = NULL;
    assert_int_equal(gguf_open(&gguf, path_of("a.gguf"), &error), 0);
    assert_string_equal(gguf_tensor_find(gguf, "blk.0.ffn_gate_exps.weight")->format->name, "IQ4_NL"); /* 32 wide */
    assert_string_equal(gguf_tensor_find(gguf, "blk.0.ffn_down_exps.weight")->format->name, "F16");    /* 16 wide */
    assert_string_equal(summary.fallbacks, "10 x IQ3_S -> IQ4_NL, 5 x IQ3_S -> F16");
    gguf_close(gguf);
}

/* ---- What is wrong is said, by name
 * ------------------------------------------------------------------------------------------------------- */

static void expect_error(int code, const char *sentence)
{
    assert_int_equal(convert("a.gguf", NULL), code);
    if (!strstr(error.text, sentence))
        fail_msg("'%s' does not say '%s'", error.text, sentence);
    assert_int_not_equal(access(path_of("a.gguf"), F_OK), 0);
}

static void a_missing_tensor_is_named(void **state)
{
    write_checkpoint(&(struct variant){ .skip = "model.layers.2.linear_attn.in_proj_z.weight" });
    expect_error(STRATA_E_FORMAT, "tensor model.layers.2.linear_attn.in_proj_z.weight is missing");
}

static void a_missing_expert_is_named(void **state)
{
    write_checkpoint(&(struct variant){ .skip = "model.layers.1.mlp.experts.2.up_proj.weight" });
    expect_error(STRATA_E_FORMAT, "tensor model.layers.1.mlp.experts.2.up_proj.weight is missing");
}

static void a_wrong_shape_is_shown_beside_the_wanted_one(void **state)
{
    write_checkpoint(&(struct variant){ .reshape = "layers.3.self_attn.k_proj.weight" });
    expect_error(STRATA_E_FORMAT, "layers.3.self_attn.k_proj.weight has shape 9 x 32, wanted 8 x 32");
}

static void a_table_too_small_for_its_hash_heads_is_refused(void **state)
{
    write_checkpoint(&(struct variant){ .skip = "model.layers.1.ple.ple_embedding.ngram_embedding.shard_1.weight" });
    expect_error(STRATA_E_FORMAT, "has 40 rows, its hash heads want 60");
}

static void an_fp8_tensor_is_refused_with_its_type(void **state)
{
    write_checkpoint(&(struct variant){ .fp8 = "embed_tokens.weight" });
    expect_error(STRATA_E_UNSUPPORTED, "has dtype F8_E4M3, wanted BF16, F16 or F32");
}

static void a_name_in_two_files_is_refused(void **state)
{
    write_checkpoint(&(struct variant){ .two_files = true, .twice = true });
    expect_error(STRATA_E_FORMAT, "tensor lm_head.weight is in ");
}

static void an_index_must_not_lead_out_of_its_directory(void **state)
{
    write_checkpoint(&(struct variant){ 0 });
    write_text("model.safetensors.index.json", "{\"weight_map\":{\"lm_head.weight\":\"../model.safetensors\"}}");
    expect_error(STRATA_E_FORMAT, "wanted a plain file name");
}

static void another_model_type_is_refused(void **state)
{
    write_checkpoint(&(struct variant){ 0 });
    write_text("config.json", "{\"model_type\":\"llama\"}");
    expect_error(STRATA_E_UNSUPPORTED, "model_type is 'llama'");
}

static void a_missing_configuration_field_is_named(void **state)
{
    write_checkpoint(&(struct variant){ 0 });
    write_text("config.json", "{\"model_type\":\"qwen4_exp_text\",\"hidden_size\":32}");
    expect_error(STRATA_E_FORMAT, "config.json: vocab_size is missing");
}

/* Overwrites the model with a header of this length and text, and 64 bytes of data. */
static void write_header(uint64_t length, const char *text)
{
    static const char data[64];
    FILE *file = fopen(path_of("model.safetensors"), "wb");
    fwrite(&length, 8, 1, file);
    fputs(text, file);
    fwrite(data, 1, sizeof data, file);
    fclose(file);
}

static void expect_bad_header(const char *text, const char *sentence)
{
    write_header(strlen(text), text);
    expect_error(STRATA_E_FORMAT, sentence);
}

static void a_header_longer_than_the_file_is_refused(void **state)
{
    write_checkpoint(&(struct variant){ 0 });
    write_header(5000, "{}");
    expect_error(STRATA_E_FORMAT, "a header of 5000 bytes, the file has 74");
}

static void a_header_of_absurd_length_is_refused(void **state)
{
    write_checkpoint(&(struct variant){ 0 });
    write_header(UINT64_C(0xffffffffffffffff), "{}");
    expect_error(STRATA_E_FORMAT, "a header of 18446744073709551615 bytes");
}

static void a_header_that_is_no_json_is_refused(void **state)
{
    write_checkpoint(&(struct variant){ 0 });
    expect_bad_header("{\"a\":", "not valid JSON");
}

static void a_tensor_twice_in_one_header_is_refused(void **state)
{
    write_checkpoint(&(struct variant){ 0 });
    expect_bad_header("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},\"a\":{\"dtype\":\"F32\",\"shape\":[1],"
                      "\"data_offsets\":[0,4]}}",
                      "not valid JSON");
}

static void data_past_the_end_of_the_file_is_refused(void **state)
{
    write_checkpoint(&(struct variant){ 0 });
    expect_bad_header("{\"a\":{\"dtype\":\"F32\",\"shape\":[20],\"data_offsets\":[0,80]}}",
                      "ends at byte 80 of a data section of 64 bytes");
}

static void bytes_that_do_not_fit_the_shape_are_refused(void **state)
{
    write_checkpoint(&(struct variant){ 0 });
    expect_bad_header("{\"a\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,16]}}",
                      "has 16 bytes, its shape and dtype F32 want 3 elements of 4");
}

static void descending_offsets_are_refused(void **state)
{
    write_checkpoint(&(struct variant){ 0 });
    expect_bad_header("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[8,4]}}", "no pair of ascending data_offsets");
}

static void a_shape_that_overflows_is_refused(void **state)
{
    write_checkpoint(&(struct variant){ 0 });
    expect_bad_header("{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904,4],\"data_offsets\":[0,0]}}",
                      "a shape that no tensor can have");
}

static bool refuse(void *context, double part) { return false; }

static void stopping_leaves_no_file_behind(void **state)
{
    write_checkpoint(&(struct variant){ 0 });
    struct convert_options options = { .threads = 1, .progress = refuse };
    assert_int_equal(convert_checkpoint(directory, path_of("a.gguf"), true, &options, &summary, &error), STRATA_E_STOPPED);
    assert_int_not_equal(access(path_of("a.gguf"), F_OK), 0); /* and remove_directory finds no temporary one */
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, make_directory, remove_directory)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(rows_of_value_heads_alternate_between_key_heads),
        TEST(query_and_key_rows_keep_their_places_before_the_value_rows),
        TEST(columns_of_the_output_projection_follow_the_value_heads),
        TEST(decay_is_minus_exp_of_its_logarithm_in_the_new_head_order),
        TEST(norm_weights_get_their_one_except_deltanets),
        TEST(indexer_projections_are_cut_out_of_one_matrix),
        TEST(an_experts_rows_are_its_gate_rows_and_then_its_up_rows),
        TEST(the_draft_block_comes_last_with_its_two_projections_side_by_side),
        TEST(sparse_layers_and_the_draft_block_have_their_compress_ratios),
        TEST(fused_and_single_experts_give_the_same_file),
        TEST(a_table_in_shards_gives_the_same_file_as_a_whole_one),
        TEST(a_nested_config_and_its_prefix_give_the_same_file),
        TEST(two_files_with_an_index_give_the_same_file_as_one),
        TEST(hash_constants_follow_from_the_seed_as_in_the_released_model),
        TEST(missing_hash_constants_are_derived),
        TEST(the_chat_stop_is_the_first_of_the_generation_configs_list),
        TEST(tokens_have_their_types_and_empty_ids_are_padding),
        TEST(merges_may_be_pairs_or_one_string),
        TEST(a_template_file_serves_when_the_tokenizers_config_has_none),
        TEST(rows_that_no_block_divides_fall_back_and_are_counted),
        TEST(a_missing_tensor_is_named),
        TEST(a_missing_expert_is_named),
        TEST(a_wrong_shape_is_shown_beside_the_wanted_one),
        TEST(a_table_too_small_for_its_hash_heads_is_refused),
        TEST(an_fp8_tensor_is_refused_with_its_type),
        TEST(a_name_in_two_files_is_refused),
        TEST(an_index_must_not_lead_out_of_its_directory),
        TEST(another_model_type_is_refused),
        TEST(a_missing_configuration_field_is_named),
        TEST(a_header_longer_than_the_file_is_refused),
        TEST(a_header_of_absurd_length_is_refused),
        TEST(a_header_that_is_no_json_is_refused),
        TEST(a_tensor_twice_in_one_header_is_refused),
        TEST(data_past_the_end_of_the_file_is_refused),
        TEST(bytes_that_do_not_fit_the_shape_are_refused),
        TEST(descending_offsets_are_refused),
        TEST(a_shape_that_overflows_is_refused),
        TEST(stopping_leaves_no_file_behind),
    };
    return cmocka_run_group_tests_name("convert", tests, NULL, NULL);
}
