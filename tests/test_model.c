/* Model files as they come: wrong ones are refused with the sentence that names what is wrong, unusual ones give the same bits as
 * usual ones, damaged weights end in an error and never in text. Then what a session refuses and what it reuses.
 *
 * Most files here are one copy of pebble whose header or weights are changed in place, and put back after the test. */
#define _GNU_SOURCE /* memmem */
#include <strata.h>

#include "base/half.h"
#include "model/model.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define SOURCE "models/pebble/pebble.gguf"
enum { N_TOKENS = 12 };

static struct gguf *pebble;
static uint8_t *header; /* of pebble, up to the first tensor's bytes */
static size_t header_bytes;
static char folder[200], copy[256], other[256];
static int copy_fd;
static int32_t tokens[N_TOKENS];     /* the last one of the vocabulary is among them */
static struct strata_engine *engine; /* of pebble itself */
static struct strata_info info;
static float *expected; /* [n_vocab]: pebble's logits after the tokens */

/* ---- Changing the copy in place
 * ------------------------------------------------------------------------------------------------------- */

static void patch(size_t at, const void *bytes, size_t n) { assert_int_equal(pwrite(copy_fd, bytes, n, (off_t)at), n); }

/* Where the bytes after a key or a tensor's name are. */
static size_t after(const char *name)
{
    uint8_t needle[160];
    uint64_t length = strlen(name);
    memcpy(needle, &length, 8);
    memcpy(needle + 8, name, length);
    const uint8_t *found = memmem(header, header_bytes, needle, 8 + length);
    assert_non_null(found);
    return (size_t)(found - header) + 8 + length;
}

static void rename_in_place(const char *name) { patch(after(name) - 1, "~", 1); }

static const char *full_key(const char *key)
{
    static char name[100];
    snprintf(name, sizeof name, "qwen4exp.%s", key);
    return name;
}

static void set_u32(const char *key, uint32_t value)
{
    const struct gguf_value *old = gguf_find(pebble, full_key(key));
    assert_non_null(old);
    assert_int_equal(old->type, GGUF_U32);
    patch(after(full_key(key)) + 4, &value, 4);
}

static void set_element(const char *key, uint64_t i, uint64_t value)
{
    const struct gguf_value *old = gguf_find(pebble, full_key(key));
    assert_true(old && old->type == GGUF_ARRAY && i < old->count);
    size_t bytes = old->element == GGUF_U64 || old->element == GGUF_I64 ? 8 : 4;
    patch(after(full_key(key)) + 16 + i * bytes, &value, bytes);
}

static uint64_t element(const char *key, uint64_t i)
{
    uint64_t value = 0;
    assert_int_equal(gguf_value_u64(gguf_find(pebble, full_key(key)), key, i, &value, NULL), 0);
    return value;
}

static void restore_header(void) { patch(0, header, header_bytes); }

static uint8_t *read_tensor(const struct gguf_tensor *t)
{
    uint8_t *data = malloc((size_t)t->bytes);
    assert_non_null(data);
    assert_int_equal(gguf_read(pebble, t, 0, data, t->bytes, NULL), 0);
    return data;
}

static void restore_tensor(const struct gguf_tensor *t)
{
    uint8_t *data = read_tensor(t);
    patch((size_t)t->offset, data, (size_t)t->bytes);
    free(data);
}

static int restore(void **state)
{
    restore_header();
    unsetenv("STRATA_ISA");
    return 0;
}

/* ---- Writing other files
 * -------------------------------------------------------------------------------------------------------------- */

struct added {
    char name[64];
    const struct quant_format *format;
    int n_dims;
    int64_t dims[4];
    void *data;
};

struct edit {
    const char *skip_key;
    void (*put_keys)(struct gguf_writer *);
    bool only_put_keys;
    bool (*keep)(const struct gguf_tensor *);
    const struct quant_format *norms; /* one-dimensional F32 tensors are written so */
    struct added *added;
    int n_added;
};

static const struct quant_format *written_format(const struct edit *e, const struct gguf_tensor *t)
{
    return e->norms && t->n_dims == 1 && t->type == QUANT_F32 ? e->norms : t->format;
}

static void write_file(const char *path, const struct edit *e)
{
    struct gguf_writer *writer;
    struct strata_error error = { 0 };
    assert_int_equal(gguf_writer_create(&writer, path, NULL), 0);
    for (uint64_t i = 0; !e->only_put_keys && i < pebble->n_entries; i++)
        if (!e->skip_key || strcmp(pebble->entries[i].key.data, e->skip_key))
            gguf_put_entry(writer, &pebble->entries[i]);
    if (e->put_keys)
        e->put_keys(writer);
    for (uint64_t i = 0; i < pebble->n_tensors; i++) {
        const struct gguf_tensor *t = &pebble->tensors[i];
        if (!e->keep || e->keep(t))
            gguf_put_tensor(writer, t->name, written_format(e, t), t->n_dims, t->dims);
    }
    for (int i = 0; i < e->n_added; i++)
        gguf_put_tensor(writer, e->added[i].name, e->added[i].format, e->added[i].n_dims, e->added[i].dims);
    if (gguf_writer_begin_data(writer, &error))
        fail_msg("%s", error.text);
    for (uint64_t i = 0; i < pebble->n_tensors; i++) {
        const struct gguf_tensor *t = &pebble->tensors[i];
        const struct quant_format *format = written_format(e, t);
        if (e->keep && !e->keep(t))
            continue;
        uint8_t *data = read_tensor(t);
        if (format != t->format) {
            uint8_t *encoded = malloc((size_t)t->bytes); /* F32 is the widest */
            quant_encode(format, (const float *)data, NULL, t->dims[0], encoded);
            free(data);
            data = encoded;
        }
        assert_int_equal(
            gguf_write(writer, data, quant_row_bytes(format, t->dims[0]) * (size_t)(t->dims[1] * t->dims[2] * t->dims[3]), NULL),
            0);
        free(data);
    }
    for (int i = 0; i < e->n_added; i++) {
        const struct added *a = &e->added[i];
        uint64_t rows = 1;
        for (int d = 1; d < a->n_dims; d++)
            rows *= (uint64_t)a->dims[d];
        assert_int_equal(gguf_write(writer, a->data, quant_row_bytes(a->format, a->dims[0]) * rows, NULL), 0);
    }
    if (gguf_writer_finish(writer, &error))
        fail_msg("%s", error.text);
    gguf_writer_destroy(writer);
}

/* ---- Opening and running
 * ---------------------------------------------------------------------------------------------------------------- */

/* The sentence comes from strata_engine_open, and from model_check on the file alone. */
static void assert_refused(const char *path, int code, const char *format, ...)
{
    char sentence[512];
    va_list args;
    va_start(args, format);
    vsnprintf(sentence, sizeof sentence, format, args);
    va_end(args);
    struct strata_engine *opened = NULL;
    struct strata_error error = { 0 };
    int got = strata_engine_open(&opened, path, &(struct strata_options){ .threads = 1 }, &error);
    strata_engine_close(opened);
    if (got == 0)
        fail_msg("the file was opened, wanted: %s", sentence);
    assert_string_equal(error.text, sentence);
    assert_int_equal(got, code);
    assert_int_equal(error.code, code);
    struct gguf *gguf;
    error = (struct strata_error){ 0 };
    assert_int_equal(gguf_open(&gguf, path, NULL), 0);
    got = model_check(gguf, &error);
    gguf_close(gguf);
    assert_string_equal(error.text, sentence);
    assert_int_equal(got, code);
}

static struct strata_engine *open_file(const char *path)
{
    struct strata_engine *opened;
    struct strata_error error;
    if (strata_engine_open(&opened, path, &(struct strata_options){ .threads = 2 }, &error))
        fail_msg("%s", error.text);
    return opened;
}

static int run_tokens(struct strata_engine *e, float *logits, struct strata_error *error)
{
    struct strata_session *session;
    assert_int_equal(strata_session_open(&session, e, N_TOKENS, STRATA_KV_F16, NULL), 0);
    int code = strata_session_sync(session, tokens, N_TOKENS, 8, NULL, NULL, error);
    if (!code && logits)
        memcpy(logits, strata_session_logits(session), (size_t)info.n_vocab * sizeof *logits);
    strata_session_close(session);
    return code;
}

/* The logits of a file after the tokens; the caller frees them. */
static float *logits_of(const char *path)
{
    struct strata_error error;
    float *logits = malloc((size_t)info.n_vocab * sizeof *logits);
    struct strata_engine *opened = open_file(path);
    if (run_tokens(opened, logits, &error))
        fail_msg("%s", error.text);
    strata_engine_close(opened);
    return logits;
}

static bool same_logits(const float *a, const float *b) { return memcmp(a, b, (size_t)info.n_vocab * sizeof *a) == 0; }

/* Takes and frees both. */
static void assert_same_logits(float *got, float *wanted, const char *what)
{
    bool same = same_logits(got, wanted);
    free(got);
    if (wanted != expected)
        free(wanted);
    if (!same)
        fail_msg("other logits: %s", what);
}

/* ---- Keys
 * -------------------------------------------------------------------------------------------------------------------------------
 */

static const struct {
    const char *key;
    int64_t min, max;
    bool optional;
} integers[] = {
    { "block_count", 1, 1024, false },
    { "embedding_length", 32, 65536, false },
    { "context_length", 1, 1 << 24, false },
    { "hyper_connection.count", 2, 16, false },
    { "hyper_connection.low_rank", 1, 65536, false },
    { "ssm.group_count", 1, 1024, false },
    { "ssm.time_step_rank", 1, 1024, false },
    { "ssm.state_size", 16, 256, false },
    { "ssm.inner_size", 16, 1 << 20, false },
    { "ssm.conv_kernel", 1, 8, false },
    { "expert_count", 1, 65536, false },
    { "expert_used_count", 1, 32, false },
    { "expert_shared_feed_forward_length", 1, 1 << 20, false },
    { "ple.ngram_size", 2, 16, false },
    { "ple.heads_per_ngram", 1, 16, false },
    { "embedding_length_per_layer_input", 1, 65536, false },
    { "ple.conv_kernel", 1, 8, false },
    { "ple.eos_token_id", 0, 4095, false },
    { "full_attention_interval", 1, 1024, true },
    { "attention.head_count", 1, 1024, false },
    { "attention.head_count_kv", 1, 1024, false },
    { "attention.key_length", 32, 256, false },
    { "rope.dimension_count", 2, 256, false },
    { "attention.indexer.head_count", 1, 64, false },
    { "attention.indexer.key_length", 32, 256, false },
    { "attention.indexer.top_k", 1, 1 << 20, false },
    { "attention.value_length", 1, 4096, false },
    { "expert_feed_forward_length", 1, 1 << 20, false },
};
static const char *const floats[] = { "attention.layer_norm_rms_epsilon", "rope.freq_base" };
static const char *const arrays[] = { "ple.layers", "ple.layer_multipliers", "ple.head_vocab_sizes", "ple.head_offsets" };

static void a_missing_key_is_named(void **state)
{
    const char *needed[64];
    int n = 0;
    for (size_t i = 0; i < sizeof integers / sizeof *integers; i++)
        if (!integers[i].optional)
            needed[n++] = integers[i].key;
    for (size_t i = 0; i < sizeof floats / sizeof *floats; i++)
        needed[n++] = floats[i];
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        needed[n++] = arrays[i];
    for (int i = 0; i < n; i++) {
        rename_in_place(full_key(needed[i]));
        assert_refused(copy, STRATA_E_FORMAT, "key %s is missing", full_key(needed[i]));
        restore_header();
    }
    rename_in_place("tokenizer.ggml.tokens");
    assert_refused(copy, STRATA_E_FORMAT, "key tokenizer.ggml.tokens is missing");
}

static void an_integer_out_of_range_is_named_with_its_range(void **state)
{
    for (size_t i = 0; i < sizeof integers / sizeof *integers; i++) {
        const int64_t wrong[] = { integers[i].max + 1, UINT32_MAX, integers[i].min - 1 };
        for (int w = 0; w < 3; w++) {
            if (wrong[w] < 0)
                continue;
            set_u32(integers[i].key, (uint32_t)wrong[w]);
            assert_refused(copy, STRATA_E_UNSUPPORTED, "key %s is %lld, wanted %lld to %lld", full_key(integers[i].key),
                           (long long)wrong[w], (long long)integers[i].min, (long long)integers[i].max);
        }
        restore_header();
    }
}

static void an_integer_of_another_type_is_refused(void **state)
{
    size_t at = after("qwen4exp.block_count");
    patch(at, &(uint32_t){ GGUF_F32 }, 4);
    assert_refused(copy, STRATA_E_FORMAT, "%s: key 'qwen4exp.block_count' holds f32, wanted an integer", copy);
    patch(at, &(uint32_t){ GGUF_I32 }, 4);
    patch(at + 4, &(int32_t){ -1 }, 4);
    assert_refused(copy, STRATA_E_FORMAT, "%s: key 'qwen4exp.block_count' is -1, wanted 0 or more", copy);
}

static void a_float_that_is_no_number_is_refused(void **state)
{
    patch(after("qwen4exp.attention.layer_norm_rms_epsilon") + 4, &(uint32_t){ 0x7fc00000 }, 4);
    assert_refused(copy, STRATA_E_UNSUPPORTED, "key qwen4exp.attention.layer_norm_rms_epsilon is nan, wanted 1e-12 to 0.01");
}

static void a_float_out_of_range_is_refused(void **state)
{
    patch(after("qwen4exp.rope.freq_base") + 4, &(float){ 0 }, 4);
    assert_refused(copy, STRATA_E_UNSUPPORTED, "key qwen4exp.rope.freq_base is 0, wanted 1 to 1e+12");
}

/* Each is in range alone, but not with the others. */
static void shapes_that_do_not_fit_together_are_refused(void **state)
{
    static const struct {
        const char *key;
        uint32_t value;
        int code;
        const char *sentence;
    } cases[] = {
        { "embedding_length", 100, STRATA_E_UNSUPPORTED, "embedding_length is not a multiple of 32" },
        { "embedding_length", 65536, STRATA_E_UNSUPPORTED, "n-gram rows (heads x width) do not add up to the hidden size" },
        { "embedding_length_per_layer_input", 65536, STRATA_E_UNSUPPORTED,
          "n-gram rows (heads x width) do not add up to the hidden size" },
        { "ssm.time_step_rank", 5, STRATA_E_UNSUPPORTED, "the ssm.* head counts and sizes do not fit together" },
        { "ssm.time_step_rank", 1024, STRATA_E_UNSUPPORTED, "the ssm.* head counts and sizes do not fit together" },
        { "ssm.inner_size", 760, STRATA_E_UNSUPPORTED, "the ssm.* head counts and sizes do not fit together" },
        { "ssm.state_size", 100, STRATA_E_UNSUPPORTED, "the ssm.* head counts and sizes do not fit together" },
        { "ssm.group_count", 1024, STRATA_E_UNSUPPORTED, "the ssm.* head counts and sizes do not fit together" },
        { "expert_count", 5, STRATA_E_UNSUPPORTED, "expert_used_count is larger than expert_count" },
        { "attention.head_count", 3, STRATA_E_UNSUPPORTED, "attention heads do not divide among the key heads" },
        { "attention.head_count", 1024, STRATA_E_UNSUPPORTED, "attention heads do not divide among the key heads" },
        { "attention.key_length", 128, STRATA_E_UNSUPPORTED, "attention.value_length differs from attention.key_length" },
        { "attention.indexer.key_length", 100, STRATA_E_UNSUPPORTED, "an attention head's width is not a multiple of 32" },
        { "rope.dimension_count", 63, STRATA_E_UNSUPPORTED, "rope.dimension_count is odd" },
        { "rope.dimension_count", 256, STRATA_E_UNSUPPORTED, "rope.dimension_count is larger than a head" },
        { "attention.indexer.top_k", 255, STRATA_E_UNSUPPORTED, "layer 3: index blocks of 4 tokens for a budget of 255" },
        { "ple.ngram_size", 4, STRATA_E_UNSUPPORTED, "key qwen4exp.ple.ngram_size is not 3" },
        { "full_attention_interval", 2, STRATA_E_UNSUPPORTED, "the n-gram layer 1 is an attention layer" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        set_u32(cases[i].key, cases[i].value);
        assert_refused(copy, cases[i].code, "%s", cases[i].sentence);
        restore_header();
    }
}

static void more_layers_than_tensors_are_refused(void **state)
{
    set_u32("block_count", 1000);
    uint64_t n_ratios = gguf_find(pebble, "qwen4exp.attention.compress_ratios")->count;
    assert_refused(copy, STRATA_E_FORMAT, "key qwen4exp.attention.compress_ratios has %llu elements, wanted 1000",
                   (unsigned long long)n_ratios);
    rename_in_place("qwen4exp.attention.compress_ratios");
    assert_refused(copy, STRATA_E_FORMAT, "tensor blk.%d.hc_attn_norm.weight is missing", info.n_layers);
}

static void put_1025_draft_blocks(struct gguf_writer *writer) { gguf_put_u32(writer, "qwen4exp.nextn_predict_layers", 1025); }
static void put_1000_draft_blocks(struct gguf_writer *writer) { gguf_put_u32(writer, "qwen4exp.nextn_predict_layers", 1000); }

static void more_draft_blocks_than_blocks_are_refused(void **state)
{
    struct edit e = { .skip_key = "qwen4exp.nextn_predict_layers", .put_keys = put_1025_draft_blocks };
    write_file(other, &e);
    assert_refused(other, STRATA_E_UNSUPPORTED, "key qwen4exp.nextn_predict_layers is 1025, wanted 0 to 1024");
    e.put_keys = put_1000_draft_blocks;
    write_file(other, &e);
    uint32_t n_blocks;
    assert_int_equal(gguf_get_u32(pebble, "qwen4exp.block_count", &n_blocks, NULL), 1);
    assert_refused(other, STRATA_E_FORMAT, "nextn_predict_layers is 1000 of %u blocks", n_blocks);
}

static void more_experts_than_the_tensors_hold_are_refused(void **state)
{
    set_u32("expert_count", 65536);
    assert_refused(copy, STRATA_E_FORMAT, "tensor blk.0.ffn_gate_inp.weight has shape 48 x 256, wanted 65536 x 256");
}

static void index_blocks_longer_than_the_ring_are_refused(void **state)
{
    set_element("attention.compress_ratios", 3, 128);
    assert_refused(copy, STRATA_E_UNSUPPORTED, "layer 3: index blocks of 128 tokens for a budget of 256");
}

static void a_vocabulary_of_numbers_is_refused(void **state)
{
    static const int32_t numbers[4096];
    struct gguf_writer *writer;
    assert_int_equal(gguf_writer_create(&writer, other, NULL), 0);
    gguf_put_string(writer, "general.architecture", "qwen4exp");
    gguf_put_array(writer, "tokenizer.ggml.tokens", GGUF_I32, numbers, 4096);
    gguf_put_tensor(writer, "blk.0.ssm_a", quant_format_find(QUANT_F32), 1, (int64_t[]){ 8 });
    assert_int_equal(gguf_writer_begin_data(writer, NULL), 0);
    assert_int_equal(gguf_write(writer, numbers, 32, NULL), 0);
    assert_int_equal(gguf_writer_finish(writer, NULL), 0);
    gguf_writer_destroy(writer);
    assert_refused(other, STRATA_E_FORMAT, "key tokenizer.ggml.tokens is not a vocabulary");
}

/* ---- The n-gram arrays
 * ------------------------------------------------------------------------------------------------------------------ */

static void more_ngram_heads_than_array_elements_are_refused(void **state)
{
    set_u32("ple.heads_per_ngram", 16);
    assert_refused(copy, STRATA_E_FORMAT, "key qwen4exp.ple.head_vocab_sizes has 16 elements, wanted 32");
}

static void an_ngram_layer_beyond_the_last_is_refused(void **state)
{
    set_element("ple.layers", 0, 8);
    assert_refused(copy, STRATA_E_FORMAT, "key qwen4exp.ple.layers names layer 8 of 8");
}

static void an_ngram_layer_that_attends_is_refused(void **state)
{
    set_element("ple.layers", 0, 3);
    assert_refused(copy, STRATA_E_UNSUPPORTED, "the n-gram layer 3 is an attention layer");
}

static void put_two_ngram_layers(struct gguf_writer *writer)
{
    gguf_put_array(writer, "qwen4exp.ple.layers", GGUF_I32, (int32_t[]){ 1, 2 }, 2);
}

static void two_ngram_layers_are_refused(void **state)
{
    write_file(other, &(struct edit){ .skip_key = "qwen4exp.ple.layers", .put_keys = put_two_ngram_layers });
    assert_refused(other, STRATA_E_UNSUPPORTED, "key qwen4exp.ple.layers names 2 layers, wanted 1");
}

static void an_ngram_multiplier_that_overflows_is_refused(void **state)
{
    set_element("ple.layer_multipliers", 2, INT64_MAX / 4096 + 1);
    assert_refused(copy, STRATA_E_FORMAT, "n-gram multiplier 2 is too large for 4096 tokens");
}

static void an_empty_ngram_head_is_refused(void **state)
{
    set_element("ple.head_vocab_sizes", 3, 0);
    assert_refused(copy, STRATA_E_FORMAT, "n-gram head 3: offset %llu and size 0 leave the range of 31 bits",
                   (unsigned long long)element("ple.head_offsets", 3));
}

static void an_ngram_head_beyond_31_bits_is_refused(void **state)
{
    set_element("ple.head_offsets", 5, INT32_MAX);
    assert_refused(copy, STRATA_E_FORMAT, "n-gram head 5: offset 2147483647 and size %llu leave the range of 31 bits",
                   (unsigned long long)element("ple.head_vocab_sizes", 5));
}

static void an_ngram_head_beyond_the_table_is_refused(void **state)
{
    const struct gguf_tensor *t = gguf_tensor_find(pebble, "per_layer_token_embd.weight");
    set_element("ple.head_offsets", 15, (uint64_t)t->dims[1]);
    assert_refused(copy, STRATA_E_FORMAT, "tensor per_layer_token_embd.weight has shape %lld x 16, wanted at least %lld x 16",
                   (long long)t->dims[1], (long long)t->dims[1] + (long long)element("ple.head_vocab_sizes", 15));
}

/* ---- Tensors
 * ---------------------------------------------------------------------------------------------------------------------------- */

/* Not of the draft block that a file may have after its layers. */
static bool is_used(const struct gguf_tensor *t)
{
    int block;
    return sscanf(t->name, "blk.%d.", &block) != 1 || block < info.n_layers;
}

static void every_missing_tensor_is_named(void **state)
{
    for (uint64_t i = 0; i < pebble->n_tensors; i++) {
        const struct gguf_tensor *t = &pebble->tensors[i];
        if (!is_used(t) || strcmp(t->name, "output.weight") == 0)
            continue;
        rename_in_place(t->name);
        assert_refused(copy, STRATA_E_FORMAT, "tensor %s is missing", t->name);
        restore_header();
    }
}

static const char *shape(char out[100], const struct gguf_tensor *t, int64_t ne0, int64_t ne1)
{
    if (t->n_dims == 1)
        snprintf(out, 100, "%lld", (long long)ne0);
    else if (t->n_dims == 2)
        snprintf(out, 100, "%lld x %lld", (long long)ne1, (long long)ne0);
    else
        snprintf(out, 100, "%lld x %lld x %lld", (long long)t->dims[2], (long long)ne1, (long long)ne0);
    return out;
}

static void every_wrong_shape_is_named_with_the_right_one(void **state)
{
    int64_t ngram_rows = 0;
    for (uint64_t h = 0; h < 16; h++) {
        int64_t end = (int64_t)(element("ple.head_offsets", h) + element("ple.head_vocab_sizes", h));
        ngram_rows = end > ngram_rows ? end : ngram_rows;
    }
    for (uint64_t i = 0; i < pebble->n_tensors; i++) {
        const struct gguf_tensor *t = &pebble->tensors[i];
        if (!is_used(t))
            continue;
        /* The bytes stay as many, or end in the same padding. */
        int64_t ne0 = t->n_dims == 1 ? t->dims[0] - 1 : 2 * t->dims[0], ne1 = t->dims[1] / 2;
        size_t at = after(t->name) + 4;
        patch(at, &ne0, 8);
        if (t->n_dims > 1)
            patch(at + 8, &ne1, 8);
        bool ngram = strcmp(t->name, "per_layer_token_embd.weight") == 0,
             table = ngram || strcmp(t->name, "token_embd.weight") == 0;
        char found[100], wanted[100];
        assert_refused(copy, STRATA_E_FORMAT, "tensor %s has shape %s, wanted %s%s", t->name, shape(found, t, ne0, ne1),
                       table ? "at least " : "", shape(wanted, t, t->dims[0], ngram ? ngram_rows : t->dims[1]));
        restore_header();
    }
}

static void a_type_that_cannot_be_computed_with_is_named(void **state)
{
    patch(after("blk.5.hc_ffn_norm.weight") + 4 + 8, &(uint32_t){ 26 }, 4);
    assert_refused(copy, STRATA_E_UNSUPPORTED, "tensor blk.5.hc_ffn_norm.weight has type I32, which Strata cannot compute with");
}

static void another_architecture_is_named(void **state)
{
    patch(after("general.architecture") + 4 + 8, "qwen3moe", 8);
    assert_refused(copy, STRATA_E_UNSUPPORTED,
                   "architecture 'qwen3moe' is not supported; Strata runs qwen4exp (Qwen3.8-Flash-Next)");
}

static void a_file_without_an_architecture_is_no_model(void **state)
{
    rename_in_place("general.architecture");
    assert_refused(copy, STRATA_E_FORMAT, "%s has no general.architecture: not a model", copy);
}

static bool keep_none(const struct gguf_tensor *t) { return false; }

static void a_vocabulary_alone_is_no_model(void **state)
{
    write_file(other, &(struct edit){ .keep = keep_none });
    assert_refused(other, STRATA_E_UNSUPPORTED, "this file has no tensors: a vocabulary, not a model");
}

static void put_one_draft_block(struct gguf_writer *writer) { gguf_put_u32(writer, "qwen4exp.nextn_predict_layers", 1); }
static bool keep_draft(const struct gguf_tensor *t)
{
    return !strncmp(t->name, "blk.7.", 6) || !strcmp(t->name, "token_embd.weight") || !strcmp(t->name, "output.weight");
}

static void a_draft_sidecar_is_no_model(void **state)
{
    write_file(other,
               &(struct edit){ .skip_key = "qwen4exp.nextn_predict_layers", .put_keys = put_one_draft_block, .keep = keep_draft });
    assert_refused(other, STRATA_E_UNSUPPORTED, "this is an MTP draft sidecar, not a model: open the trunk's file");
}

static void a_scale_companion_of_a_wrong_shape_is_named(void **state)
{
    static float ones[2] = { 1, 1 };
    struct added scale = { "blk.0.attn_qkv.scale", quant_format_find(QUANT_F32), 1, { 2 }, ones };
    write_file(other, &(struct edit){ .added = &scale, .n_added = 1 });
    assert_refused(other, STRATA_E_FORMAT, "tensor blk.0.attn_qkv.scale has shape 2, wanted 1");
}

/* ---- Unusual files that run
 * ------------------------------------------------------------------------------------------------------------- */

static bool keep_other_than_gate_up(const struct gguf_tensor *t)
{
    return !is_used(t) || (!strstr(t->name, "ffn_gate_exps") && !strstr(t->name, "ffn_up_exps"));
}

static void gate_and_up_in_one_tensor_give_the_same_bits(void **state)
{
    struct added fused[8];
    for (int i = 0; i < 8; i++) {
        char gate_name[64], up_name[64];
        snprintf(gate_name, sizeof gate_name, "blk.%d.ffn_gate_exps.weight", i);
        snprintf(up_name, sizeof up_name, "blk.%d.ffn_up_exps.weight", i);
        const struct gguf_tensor *gate = gguf_tensor_find(pebble, gate_name), *up = gguf_tensor_find(pebble, up_name);
        assert_ptr_equal(gate->format, up->format);
        uint8_t *g = read_tensor(gate), *u = read_tensor(up), *both = malloc(2 * (size_t)gate->bytes);
        size_t part = (size_t)gate->bytes / (size_t)gate->dims[2];
        for (size_t e = 0; e < (size_t)gate->dims[2]; e++) {
            memcpy(both + 2 * e * part, g + e * part, part);
            memcpy(both + (2 * e + 1) * part, u + e * part, part);
        }
        free(g);
        free(u);
        fused[i] = (struct added){ "", gate->format, 3, { gate->dims[0], 2 * gate->dims[1], gate->dims[2] }, both };
        snprintf(fused[i].name, sizeof fused[i].name, "blk.%d.ffn_gate_up_exps.weight", i);
    }
    write_file(other, &(struct edit){ .keep = keep_other_than_gate_up, .added = fused, .n_added = 8 });
    for (int i = 0; i < 8; i++)
        free(fused[i].data);
    assert_same_logits(logits_of(other), expected, "gate and up in one tensor");
}

static bool keep_other_than_output(const struct gguf_tensor *t) { return strcmp(t->name, "output.weight") != 0; }

static void a_file_without_output_uses_the_embedding(void **state)
{
    const struct gguf_tensor *embedding = gguf_tensor_find(pebble, "token_embd.weight"),
                             *output = gguf_tensor_find(pebble, "output.weight");
    assert_int_equal(embedding->type, output->type);
    uint8_t *data = read_tensor(embedding);
    patch((size_t)output->offset, data, (size_t)output->bytes);
    free(data);
    float *wanted = logits_of(copy);
    restore_tensor(output);
    assert_false(same_logits(wanted, expected));
    write_file(other, &(struct edit){ .keep = keep_other_than_output });
    assert_same_logits(logits_of(other), wanted, "tied embeddings");
}

static void put_split(struct gguf_writer *writer, uint32_t no)
{
    gguf_put_u32(writer, "split.no", no);
    gguf_put_u32(writer, "split.count", 2);
    gguf_put_u32(writer, "split.tensors.count", (uint32_t)pebble->n_tensors);
}
static void put_first(struct gguf_writer *writer) { put_split(writer, 0); }
static void put_second(struct gguf_writer *writer) { put_split(writer, 1); }
static bool in_first(const struct gguf_tensor *t) { return t - pebble->tensors < (ptrdiff_t)pebble->n_tensors / 2; }
static bool in_second(const struct gguf_tensor *t) { return !in_first(t); }

static void a_split_model_gives_the_same_bits(void **state)
{
    char first[300], second[300];
    snprintf(first, sizeof first, "%s/split-00001-of-00002.gguf", folder);
    snprintf(second, sizeof second, "%s/split-00002-of-00002.gguf", folder);
    write_file(first, &(struct edit){ .put_keys = put_first, .keep = in_first });
    write_file(second, &(struct edit){ .put_keys = put_second, .only_put_keys = true, .keep = in_second });
    assert_same_logits(logits_of(first), expected, "a model in two files");
    unlink(first);
    unlink(second);
}

/* Vectors of another float type, against F32 ones that hold the same rounded numbers. */
static void compare_norms(enum quant_type type)
{
    const struct quant_format *format = quant_format_find(type);
    for (uint64_t i = 0; i < pebble->n_tensors; i++) {
        const struct gguf_tensor *t = &pebble->tensors[i];
        if (t->n_dims != 1 || t->type != QUANT_F32)
            continue;
        float *values = (float *)read_tensor(t);
        uint8_t *rounded = malloc((size_t)t->bytes);
        quant_encode(format, values, NULL, t->dims[0], rounded);
        quant_decode(format, rounded, t->dims[0], values);
        patch((size_t)t->offset, values, (size_t)t->bytes);
        free(values);
        free(rounded);
    }
    float *wanted = logits_of(copy);
    for (uint64_t i = 0; i < pebble->n_tensors; i++)
        if (pebble->tensors[i].n_dims == 1)
            restore_tensor(&pebble->tensors[i]);
    write_file(other, &(struct edit){ .norms = format });
    assert_same_logits(logits_of(other), wanted, format->name);
}

static void vectors_may_be_f16(void **state) { compare_norms(QUANT_F16); }
static void vectors_may_be_bf16(void **state) { compare_norms(QUANT_BF16); }

/* Doubles the binary16 numbers in the first `n` places of every block in rows [first, last). Doubling is exact. */
static void double_scales(const struct gguf_tensor *t, int n, int64_t first, int64_t last)
{
    uint8_t *data = read_tensor(t);
    size_t row_bytes = quant_row_bytes(t->format, t->dims[0]);
    for (uint8_t *block = data + (size_t)first * row_bytes; block < data + (size_t)last * row_bytes; block += t->format->bytes)
        for (int i = 0; i < n; i++) {
            uint16_t half;
            memcpy(&half, block + 2 * i, 2);
            half = half_from_float(2 * half_to_float(half));
            memcpy(block + 2 * i, &half, 2);
        }
    patch((size_t)t->offset, data, (size_t)t->bytes);
    free(data);
}

static int scales_of_block(const struct gguf_tensor *t)
{
    switch (t->type) { /* those that begin a block with their binary16 scales */
    case QUANT_Q5_1:
    case QUANT_Q4_1:
        return 2;
    case QUANT_Q4_0:
    case QUANT_Q5_0:
    case QUANT_Q8_0:
    case QUANT_IQ4_NL:
        return 1;
    default:
        fail_msg("pebble's %s has type %s, unknown to this test", t->name, t->format->name);
        return 0;
    }
}

static void a_scale_of_two_equals_doubled_blocks(void **state)
{
    const struct gguf_tensor *t = gguf_tensor_find(pebble, "blk.0.attn_gate.weight");
    double_scales(t, scales_of_block(t), 0, t->dims[1]);
    float *wanted = logits_of(copy);
    restore_tensor(t);
    assert_false(same_logits(wanted, expected));
    static float two = 2;
    struct added scale = { "blk.0.attn_gate.scale", quant_format_find(QUANT_F32), 1, { 1 }, &two };
    write_file(other, &(struct edit){ .added = &scale, .n_added = 1 });
    assert_same_logits(logits_of(other), wanted, "a .scale of 2");
}

static void every_expert_has_its_own_scale(void **state)
{
    static const char *const parts[] = { "gate", "up", "down" };
    for (int p = 0; p < 3; p++) {
        char name[64];
        snprintf(name, sizeof name, "blk.2.ffn_%s_exps.weight", parts[p]);
        const struct gguf_tensor *t = gguf_tensor_find(pebble, name);
        uint8_t *whole = read_tensor(t);
        for (int64_t e = 0; e < t->dims[2]; e += 2) { /* even experts */
            double_scales(t, scales_of_block(t), e * t->dims[1], (e + 1) * t->dims[1]);
            size_t part = (size_t)(t->bytes / (uint64_t)t->dims[2]);
            assert_int_equal(pread(copy_fd, whole + (size_t)e * part, part, (off_t)(t->offset + (uint64_t)e * part)), part);
        }
        patch((size_t)t->offset, whole, (size_t)t->bytes);
        free(whole);
        float *wanted = logits_of(copy);
        restore_tensor(t);
        assert_false(same_logits(wanted, expected));
        float scales[48];
        for (int e = 0; e < 48; e++)
            scales[e] = e % 2 ? 1 : 2;
        struct added scale = { "", quant_format_find(QUANT_F32), 1, { 48 }, scales };
        snprintf(scale.name, sizeof scale.name, "blk.2.ffn_%s_exps.scale", parts[p]);
        write_file(other, &(struct edit){ .added = &scale, .n_added = 1 });
        assert_same_logits(logits_of(other), wanted, name);
    }
}

/* ---- Damaged weights
 * -------------------------------------------------------------------------------------------------------------------- */

/* One number in the last row (of every expert), or in every row of the n-gram table: a float itself, or a block's scale. */
static void damage(const struct gguf_tensor *t, bool infinite)
{
    uint8_t *data = read_tensor(t);
    const uint32_t f32 = infinite ? 0x7f800000 : 0x7fc00000;
    const uint16_t half = t->type == QUANT_BF16 ? (uint16_t)(f32 >> 16) : infinite ? 0x7c00 : 0x7e00;
    int64_t rows = t->dims[1] * t->dims[2], step = strcmp(t->name, "per_layer_token_embd.weight") ? t->dims[1] : 1;
    for (int64_t row = step - 1; row < rows; row += step) {
        uint8_t *at = data + (size_t)row * quant_row_bytes(t->format, t->dims[0]);
        if (t->type == QUANT_F32)
            memcpy(at, &f32, 4);
        else
            memcpy(at, &half, 2);
    }
    patch((size_t)t->offset, data, (size_t)t->bytes);
    free(data);
}

/* Float tensors are refused while loading; tables and blocks when they are used, naming the layer. */
static void assert_damage_is_found(const struct gguf_tensor *t)
{
    struct strata_engine *opened = NULL;
    struct strata_error error = { 0 };
    char wanted[200];
    bool table = strstr(t->name, "token_embd") != NULL;
    int code = strata_engine_open(&opened, copy, &(struct strata_options){ .threads = 2 }, &error), layer;
    if (t->format->is_float && !table) {
        snprintf(wanted, sizeof wanted, "tensor %s holds a value that is not finite: the file is damaged", t->name);
    } else {
        if (code)
            fail_msg("%s: %s", t->name, error.text);
        code = run_tokens(opened, NULL, &error);
        if (sscanf(t->name, "blk.%d.", &layer) != 1)
            layer = strncmp(t->name, "output", 6) == 0 ? -1 : strcmp(t->name, "token_embd.weight") ? 1 : 0;
        if (layer < 0)
            snprintf(wanted, sizeof wanted, "a logit at position ");
        else
            snprintf(wanted, sizeof wanted, "a value in layer %d at position ", layer);
    }
    strata_engine_close(opened);
    if (code != STRATA_E_NUMERIC || strncmp(error.text, wanted, strlen(wanted)))
        fail_msg("%s: code %d '%s', wanted '%s...'", t->name, code, code ? error.text : "", wanted);
}

/* A layer of each kind, and what belongs to none. */
static bool is_sample(const struct gguf_tensor *t)
{
    return !strncmp(t->name, "blk.1.", 6) || !strncmp(t->name, "blk.3.", 6) || strncmp(t->name, "blk.", 4);
}

static void sweep(bool (*picks)(const struct gguf_tensor *), bool infinite)
{
    int n = 0;
    for (uint64_t i = 0; i < pebble->n_tensors; i++) {
        const struct gguf_tensor *t = &pebble->tensors[i];
        if (!picks(t))
            continue;
        damage(t, infinite);
        assert_damage_is_found(t);
        restore_tensor(t);
        n++;
    }
    assert_true(n > 0);
}

static void a_nan_anywhere_is_an_error_and_never_text(void **state) { sweep(is_sample, false); }

/* An expert's gate may be -infinity: its silu is zero. */
static bool is_sample_but_expert_gates(const struct gguf_tensor *t) { return is_sample(t) && !strstr(t->name, "ffn_gate_exps"); }
static void an_infinity_anywhere_is_an_error_and_never_text(void **state) { sweep(is_sample_but_expert_gates, true); }

/* Their NaN passes through the rounding of activations inside one operation. */
static bool is_expert(const struct gguf_tensor *t) { return !strncmp(t->name, "blk.3.", 6) && strstr(t->name, "_exps."); }

static void a_nan_in_an_expert_is_found_by_every_instruction_set(void **state)
{
    static const char *const isas[] = { "ref", "avx2", "avx512" };
    for (int i = 0; i < 3; i++) { /* one that the processor lacks is replaced by the next lower */
        setenv("STRATA_ISA", isas[i], 1);
        sweep(is_expert, false);
    }
}

/* ---- Sessions
 * --------------------------------------------------------------------------------------------------------------------------- */

static struct strata_session *open_session(int context)
{
    struct strata_session *session;
    struct strata_error error;
    if (strata_session_open(&session, engine, context, STRATA_KV_F16, &error))
        fail_msg("%s", error.text);
    return session;
}

#define assert_fails(call, error_code, sentence)                                                                                   \
    do {                                                                                                                           \
        struct strata_error error = { 0 };                                                                                         \
        assert_int_equal((call), (error_code));                                                                                    \
        assert_string_equal(error.text, (sentence));                                                                               \
    } while (0)

static int sync_n(struct strata_session *session, int n, int width, struct strata_error *error)
{
    return strata_session_sync(session, tokens, n, width, NULL, NULL, error);
}

static void a_context_out_of_range_is_refused(void **state)
{
    static const int wrong[] = { 0, -1, 32769, INT32_MAX };
    for (int i = 0; i < 4; i++) {
        struct strata_session *session = NULL;
        struct strata_error error = { 0 };
        char wanted[100];
        snprintf(wanted, sizeof wanted, "a context of %d tokens: this model takes 1 to %d", wrong[i], info.max_context);
        assert_int_equal(strata_session_open(&session, engine, wrong[i], STRATA_KV_F16, &error), STRATA_E_ARGUMENT);
        assert_string_equal(error.text, wanted);
        assert_null(session);
    }
}

static void a_full_session_says_so_and_stays(void **state)
{
    struct strata_session *session = open_session(4);
    assert_int_equal(sync_n(session, 4, 8, NULL), 0);
    uint64_t hash = strata_session_hash(session);
    struct strata_row row = { session, 1, true, true };
    assert_fails(strata_window_run(engine, &row, 1, &error), STRATA_E_ARGUMENT, "the session is full: 4 of 4 tokens");
    assert_fails(sync_n(session, 5, 8, &error), STRATA_E_ARGUMENT, "5 tokens for a session of 1 to 4");
    assert_int_equal(strata_session_length(session), 4);
    assert_true(strata_session_hash(session) == hash);
    assert_non_null(strata_session_logits(session));
    strata_session_close(session);
}

static void a_window_that_would_overfill_a_session_is_refused_whole(void **state)
{
    struct strata_session *session = open_session(4);
    assert_int_equal(sync_n(session, 3, 8, NULL), 0);
    struct strata_row rows[2] = { { session, 1, true, true }, { session, 2, true, true } };
    assert_fails(strata_window_run(engine, rows, 2, &error), STRATA_E_ARGUMENT, "the session is full: 3 of 4 tokens");
    assert_fails(strata_session_commit(session, 1, &error), STRATA_E_ARGUMENT, "the session has no window to commit");
    strata_session_close(session);
}

static void a_commit_of_a_wrong_count_is_refused_and_can_be_repeated(void **state)
{
    struct strata_session *session = open_session(16);
    assert_fails(strata_session_commit(session, 0, &error), STRATA_E_ARGUMENT, "the session has no window to commit");
    struct strata_row rows[3] = { { session, 1, true, true }, { session, 2, true, true }, { session, 3, false, true } };
    assert_int_equal(strata_window_run(engine, rows, 3, NULL), 0);
    assert_fails(strata_session_commit(session, 1, &error), STRATA_E_ARGUMENT, "commit of 1 rows: wanted 2 to 3");
    assert_fails(strata_session_commit(session, 4, &error), STRATA_E_ARGUMENT, "commit of 4 rows: wanted 2 to 3");
    assert_fails(strata_session_commit(session, -1, &error), STRATA_E_ARGUMENT, "commit of -1 rows: wanted 2 to 3");
    assert_fails(strata_window_run(engine, rows, 3, &error), STRATA_E_ARGUMENT,
                 "row 0: its session's last window was not committed");
    assert_int_equal(strata_session_commit(session, 2, NULL), 0);
    assert_int_equal(strata_session_length(session), 2);
    assert_fails(strata_session_commit(session, 2, &error), STRATA_E_ARGUMENT, "the session has no window to commit");
    strata_session_close(session);
}

static void a_window_of_a_wrong_size_is_refused(void **state)
{
    struct strata_session *session = open_session(16);
    struct strata_row rows[9];
    for (int t = 0; t < 9; t++)
        rows[t] = (struct strata_row){ session, t, true, false };
    assert_fails(strata_window_run(engine, rows, 0, &error), STRATA_E_ARGUMENT, "a window of 0 rows: wanted 1 to 8");
    assert_fails(strata_window_run(engine, rows, 9, &error), STRATA_E_ARGUMENT, "a window of 9 rows: wanted 1 to 8");
    assert_fails(sync_n(session, 4, 0, &error), STRATA_E_ARGUMENT, "a window of 0 rows: wanted 1 to 8");
    assert_fails(sync_n(session, 4, 9, &error), STRATA_E_ARGUMENT, "a window of 9 rows: wanted 1 to 8");
    assert_fails(sync_n(session, 0, 8, &error), STRATA_E_ARGUMENT, "0 tokens for a session of 1 to 16");
    strata_session_close(session);
}

static void rows_in_a_wrong_order_are_refused(void **state)
{
    struct strata_session *a = open_session(16), *b = open_session(16);
    struct strata_row apart[3] = { { a, 1, true, true }, { b, 1, true, true }, { a, 2, true, true } };
    assert_fails(strata_window_run(engine, apart, 3, &error), STRATA_E_ARGUMENT, "row 2: the rows of a session must be neighbours");
    struct strata_row certain_late[2] = { { a, 1, false, true }, { a, 2, true, true } };
    assert_fails(strata_window_run(engine, certain_late, 2, &error), STRATA_E_ARGUMENT,
                 "row 1 of the window does not follow row 0");
    strata_session_close(a);
    strata_session_close(b);
}

static void a_row_of_another_engine_is_refused(void **state)
{
    struct strata_engine *second = open_file(SOURCE);
    struct strata_session *session = open_session(16);
    struct strata_row row = { session, 1, true, true };
    assert_fails(strata_window_run(second, &row, 1, &error), STRATA_E_ARGUMENT, "row 0 of the window belongs to another engine");
    strata_session_close(session);
    strata_engine_close(second);
}

static void a_token_outside_the_vocabulary_is_refused_and_leaves_a_usable_session(void **state)
{
    struct strata_session *session = open_session(16);
    int32_t wrong[3] = { 1, 2, info.n_vocab };
    char wanted[100];
    snprintf(wanted, sizeof wanted, "token %d at position 2 is outside the vocabulary of %d", info.n_vocab, info.n_vocab);
    assert_fails(strata_session_sync(session, wrong, 3, 8, NULL, NULL, &error), STRATA_E_ARGUMENT, wanted);
    wrong[2] = -1;
    snprintf(wanted, sizeof wanted, "token -1 at position 2 is outside the vocabulary of %d", info.n_vocab);
    assert_fails(strata_session_sync(session, wrong, 3, 1, NULL, NULL, &error), STRATA_E_ARGUMENT, wanted);
    assert_int_equal(strata_session_length(session), 0);
    assert_null(strata_session_logits(session));
    assert_int_equal(sync_n(session, N_TOKENS, 8, NULL), 0);
    assert_true(same_logits(strata_session_logits(session), expected));
    strata_session_close(session);
}

/* ---- What sync reuses
 * ------------------------------------------------------------------------------------------------------------------- */

static int positions[64], n_positions; /* that were computed */

static void note_position(void *context, const struct strata_session *session, int position, int layer, const float *residual,
                          int width)
{
    if (layer == 0 && n_positions < 64)
        positions[n_positions++] = position;
}

static void a_longer_text_computes_only_what_is_new(void **state)
{
    struct strata_session *session = open_session(16);
    assert_int_equal(sync_n(session, 9, 8, NULL), 0);
    n_positions = 0;
    strata_engine_probe(engine, note_position, NULL);
    assert_int_equal(sync_n(session, N_TOKENS, 8, NULL), 0);
    strata_engine_probe(engine, NULL, NULL);
    assert_int_equal(n_positions, N_TOKENS - 9);
    assert_int_equal(positions[0], 9);
    assert_true(same_logits(strata_session_logits(session), expected));
    strata_session_close(session);
}

static void the_same_text_computes_nothing(void **state)
{
    struct strata_session *session = open_session(16);
    assert_int_equal(sync_n(session, N_TOKENS, 8, NULL), 0);
    n_positions = 0;
    strata_engine_probe(engine, note_position, NULL);
    assert_int_equal(sync_n(session, N_TOKENS, 8, NULL), 0);
    strata_engine_probe(engine, NULL, NULL);
    assert_int_equal(n_positions, 0);
    strata_session_close(session);
}

static void the_same_text_is_read_again_when_its_logits_are_gone(void **state)
{
    struct strata_session *session = open_session(16), *between = open_session(16);
    assert_int_equal(sync_n(session, N_TOKENS, 8, NULL), 0);
    assert_int_equal(sync_n(between, 2, 8, NULL), 0);
    assert_null(strata_session_logits(session));
    assert_int_equal(sync_n(session, N_TOKENS, 8, NULL), 0);
    assert_true(same_logits(strata_session_logits(session), expected));
    strata_session_close(session);
    strata_session_close(between);
}

static void another_text_starts_anew_without_a_trace(void **state)
{
    struct strata_session *session = open_session(16), *fresh = open_session(16);
    int32_t before[N_TOKENS];
    for (int t = 0; t < N_TOKENS; t++)
        before[t] = t < 5 ? tokens[t] : tokens[t] / 2 + 1;
    assert_int_equal(strata_session_sync(session, before, N_TOKENS, 8, NULL, NULL, NULL), 0);
    assert_int_equal(sync_n(session, N_TOKENS, 8, NULL), 0);
    assert_memory_equal(strata_session_tokens(session), tokens, sizeof tokens);
    assert_true(same_logits(strata_session_logits(session), expected));
    assert_int_equal(sync_n(fresh, N_TOKENS, 3, NULL), 0);
    assert_true(strata_session_hash(session) == strata_session_hash(fresh));
    assert_int_equal(sync_n(session, 4, 8, NULL), 0); /* a shorter text too */
    assert_int_equal(sync_n(fresh, 4, 8, NULL), 0);
    assert_true(strata_session_hash(session) == strata_session_hash(fresh));
    assert_int_equal(strata_session_length(session), 4);
    strata_session_close(session);
    strata_session_close(fresh);
}

static bool stop(void *context, double part) { return false; }

static void a_stopped_prompt_leaves_an_empty_session(void **state)
{
    struct strata_session *session = open_session(16);
    assert_fails(strata_session_sync(session, tokens, N_TOKENS, 1, stop, NULL, &error), STRATA_E_STOPPED,
                 "reading the prompt was stopped");
    assert_int_equal(strata_session_length(session), 0);
    strata_session_close(session);
}

static void loading_can_be_stopped(void **state)
{
    struct strata_engine *opened = NULL;
    assert_fails(strata_engine_open(&opened, SOURCE, &(struct strata_options){ .threads = 1, .progress = stop }, &error),
                 STRATA_E_STOPPED, "loading was stopped");
    assert_null(opened);
}

/* ---- Beginning and end
 * ------------------------------------------------------------------------------------------------------------------ */

static int set_up(void **state)
{
    struct strata_error error;
    const char *temporary = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/strata-test-model-XXXXXX", temporary && strlen(temporary) < 100 ? temporary : "/tmp");
    if (!mkdtemp(folder) || gguf_open(&pebble, SOURCE, &error))
        return -1;
    snprintf(copy, sizeof copy, "%s/copy.gguf", folder);
    snprintf(other, sizeof other, "%s/other.gguf", folder);
    header_bytes = (size_t)pebble->tensors[0].offset;
    size_t bytes = (size_t)pebble->files[0].size;
    uint8_t *all = malloc(bytes);
    copy_fd = open(copy, O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (!all || copy_fd < 0 || pread(pebble->files[0].fd, all, bytes, 0) != (ssize_t)bytes ||
        write(copy_fd, all, bytes) != (ssize_t)bytes)
        return -1;
    header = all;
    engine = open_file(SOURCE);
    strata_engine_info(engine, &info);
    for (int t = 0; t < N_TOKENS; t++)
        tokens[t] = t == 4 ? info.n_vocab - 1 : 11 + 37 * t;
    expected = malloc((size_t)info.n_vocab * sizeof *expected);
    return run_tokens(engine, expected, &error);
}

static int tear_down(void **state)
{
    strata_engine_close(engine);
    gguf_close(pebble);
    close(copy_fd);
    unlink(copy);
    unlink(other);
    rmdir(folder);
    free(header);
    free(expected);
    return 0;
}

#define TEST(name) cmocka_unit_test_teardown(name, restore)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_missing_key_is_named),
        TEST(an_integer_out_of_range_is_named_with_its_range),
        TEST(an_integer_of_another_type_is_refused),
        TEST(a_float_that_is_no_number_is_refused),
        TEST(a_float_out_of_range_is_refused),
        TEST(shapes_that_do_not_fit_together_are_refused),
        TEST(more_layers_than_tensors_are_refused),
        TEST(more_draft_blocks_than_blocks_are_refused),
        TEST(more_experts_than_the_tensors_hold_are_refused),
        TEST(index_blocks_longer_than_the_ring_are_refused),
        TEST(a_vocabulary_of_numbers_is_refused),
        TEST(more_ngram_heads_than_array_elements_are_refused),
        TEST(an_ngram_layer_beyond_the_last_is_refused),
        TEST(an_ngram_layer_that_attends_is_refused),
        TEST(two_ngram_layers_are_refused),
        TEST(an_ngram_multiplier_that_overflows_is_refused),
        TEST(an_empty_ngram_head_is_refused),
        TEST(an_ngram_head_beyond_31_bits_is_refused),
        TEST(an_ngram_head_beyond_the_table_is_refused),
        TEST(every_missing_tensor_is_named),
        TEST(every_wrong_shape_is_named_with_the_right_one),
        TEST(a_type_that_cannot_be_computed_with_is_named),
        TEST(another_architecture_is_named),
        TEST(a_file_without_an_architecture_is_no_model),
        TEST(a_vocabulary_alone_is_no_model),
        TEST(a_draft_sidecar_is_no_model),
        TEST(a_scale_companion_of_a_wrong_shape_is_named),
        TEST(gate_and_up_in_one_tensor_give_the_same_bits),
        TEST(a_file_without_output_uses_the_embedding),
        TEST(a_split_model_gives_the_same_bits),
        TEST(vectors_may_be_f16),
        TEST(vectors_may_be_bf16),
        TEST(a_scale_of_two_equals_doubled_blocks),
        TEST(every_expert_has_its_own_scale),
        TEST(a_nan_anywhere_is_an_error_and_never_text),
        TEST(an_infinity_anywhere_is_an_error_and_never_text),
        TEST(a_nan_in_an_expert_is_found_by_every_instruction_set),
        TEST(a_context_out_of_range_is_refused),
        TEST(a_full_session_says_so_and_stays),
        TEST(a_window_that_would_overfill_a_session_is_refused_whole),
        TEST(a_commit_of_a_wrong_count_is_refused_and_can_be_repeated),
        TEST(a_window_of_a_wrong_size_is_refused),
        TEST(rows_in_a_wrong_order_are_refused),
        TEST(a_row_of_another_engine_is_refused),
        TEST(a_token_outside_the_vocabulary_is_refused_and_leaves_a_usable_session),
        TEST(a_longer_text_computes_only_what_is_new),
        TEST(the_same_text_computes_nothing),
        TEST(the_same_text_is_read_again_when_its_logits_are_gone),
        TEST(another_text_starts_anew_without_a_trace),
        TEST(a_stopped_prompt_leaves_an_empty_session),
        TEST(loading_can_be_stopped),
    };
    return cmocka_run_group_tests_name(SOURCE, tests, set_up, tear_down);
}
