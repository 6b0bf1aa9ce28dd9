/* test_quantize.c - re-encoding a model changes the types that were asked for, and nothing else. */
#include "convert/convert.h"
#include "gguf/gguf.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static char directory[128];
static struct strata_error error;
static struct convert_summary summary;

static const char *path_of(const char *name)
{
    static char paths[8][256];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", directory, name);
    return path;
}

/* in.gguf: the tiny synthetic model, Q8_0 with Q2_0 experts. */
static int make_directory(void **state)
{
    strcpy(directory, "/tmp/strata-quantize-XXXXXX");
    struct convert_options options = { .threads = 2 };
    struct convert_synth synth = { .like = "tiny", .skew = 0.6, .locality = 0.6, .seed = 1 };
    return mkdtemp(directory) && !convert_synthetic(path_of("in.gguf"), &synth, &options, &summary, &error) ? 0 : -1;
}

static int remove_directory(void **state)
{
    static const char *const names[] = { "in.gguf", "out.gguf", "again.gguf", "part-00001-of-00002.gguf",
                                         "part-00002-of-00002.gguf" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        unlink(path_of(names[i]));
    return rmdir(directory);
}

static struct gguf *open_model(const char *name)
{
    struct gguf *gguf = NULL;
    if (gguf_open(&gguf, path_of(name), &error))
        fail_msg("%s", error.text);
    return gguf;
}

static struct gguf *quantized(const char *in, const char *out, struct convert_types types)
{
    struct convert_options options = { .types = types, .threads = 2 };
    if (convert_quantize(path_of(in), path_of(out), &options, &summary, &error))
        fail_msg("%s", error.text);
    return open_model(out);
}

static uint8_t *bytes_of(const struct gguf *gguf, const struct gguf_tensor *t)
{
    uint8_t *bytes = malloc(t->bytes);
    assert_non_null(bytes);
    assert_int_equal(gguf_read(gguf, t, 0, bytes, t->bytes, &error), 0);
    return bytes;
}

static void expect_same_tensor(const struct gguf *a, const struct gguf *b, const char *name)
{
    const struct gguf_tensor *x = gguf_tensor_find(a, name), *y = gguf_tensor_find(b, name);
    if (!x || !y || x->type != y->type || x->bytes != y->bytes)
        fail_msg("tensor %s is not the same", name);
    uint8_t *p = bytes_of(a, x), *q = bytes_of(b, y);
    if (memcmp(p, q, x->bytes) != 0)
        fail_msg("the bytes of tensor %s differ", name);
    free(p);
    free(q);
}

static const char *type_of(const struct gguf *gguf, const char *name)
{
    const struct gguf_tensor *t = gguf_tensor_find(gguf, name);
    return t ? t->format->name : "missing";
}

static struct convert_types all(const char *name)
{
    const struct quant_format *f = quant_format_named(name);
    return (struct convert_types){ f, f, f, f };
}

/* ---- Tests ---------------------------------------------------------------------------------------------------------------- */

static void without_types_every_tensor_stays_as_it_is(void **state)
{
    struct gguf *in = open_model("in.gguf"), *out = quantized("in.gguf", "out.gguf", (struct convert_types){ 0 });
    assert_int_equal(in->n_tensors, out->n_tensors);
    for (uint64_t i = 0; i < in->n_tensors; i++)
        expect_same_tensor(in, out, in->tensors[i].name);
    gguf_close(in);
    gguf_close(out);
}

static void types_for_experts_leave_the_rest_alone(void **state)
{
    const struct quant_format *q = quant_format_named("Q4_0");
    struct gguf *in = open_model("in.gguf"),
                *out = quantized("in.gguf", "out.gguf", (struct convert_types){ .gate_up = q, .down = q });
    for (uint64_t i = 0; i < in->n_tensors; i++)
        if (strstr(in->tensors[i].name, "_exps."))
            assert_string_equal(type_of(out, in->tensors[i].name), "Q4_0");
        else
            expect_same_tensor(in, out, in->tensors[i].name);
    gguf_close(in);
    gguf_close(out);
}

static void expanding_gives_the_values_that_the_types_stand_for(void **state)
{
    struct gguf *in = open_model("in.gguf"), *out = quantized("in.gguf", "out.gguf", all("F32"));
    for (uint64_t i = 0; i < in->n_tensors; i++) {
        const struct gguf_tensor *x = &in->tensors[i], *y = gguf_tensor_find(out, x->name);
        assert_string_equal(y->format->name, "F32");
        uint8_t *coded = bytes_of(in, x), *expanded = bytes_of(out, y);
        float *row = malloc((size_t)x->dims[0] * sizeof *row);
        size_t row_bytes = quant_row_bytes(x->format, x->dims[0]);
        for (int64_t r = 0; r < x->dims[1] * x->dims[2]; r++) {
            quant_decode(x->format, coded + (size_t)r * row_bytes, x->dims[0], row);
            if (memcmp(row, expanded + (size_t)(r * x->dims[0]) * 4, (size_t)x->dims[0] * 4) != 0)
                fail_msg("row %lld of %s differs", (long long)r, x->name);
        }
        free(row);
        free(coded);
        free(expanded);
    }
    gguf_close(in);
    gguf_close(out);
}

static void encoding_loses_no_more_than_the_type_must(void **state)
{
    gguf_close(quantized("in.gguf", "out.gguf", all("F32")));
    struct gguf *wide = open_model("out.gguf"), *narrow = quantized("out.gguf", "again.gguf", all("Q8_0"));
    const struct gguf_tensor *x = gguf_tensor_find(wide, "blk.3.attn_q.weight"),
                             *y = gguf_tensor_find(narrow, "blk.3.attn_q.weight");
    assert_string_equal(y->format->name, "Q8_0");
    uint8_t *values = bytes_of(wide, x), *coded = bytes_of(narrow, y);
    float row[256], original[256];
    double lost = 0, all_of_it = 0;
    for (int64_t r = 0; r < x->dims[1]; r++) {
        quant_decode(y->format, coded + (size_t)r * quant_row_bytes(y->format, 256), 256, row);
        memcpy(original, values + (size_t)r * sizeof original, sizeof original);
        for (int i = 0; i < 256; i++) {
            lost += (double)(row[i] - original[i]) * (row[i] - original[i]);
            all_of_it += (double)original[i] * original[i];
        }
    }
    assert_true(all_of_it > 0 && lost < 1e-4 * all_of_it); /* eight bits: about 1e-5 */
    free(values);
    free(coded);
    gguf_close(wide);
    gguf_close(narrow);
}

static void small_and_sensitive_tensors_stay_f32(void **state)
{
    static const char *const names[] = {
        "blk.0.ffn_gate_inp.weight", "blk.0.ssm_alpha.weight",          "blk.0.ssm_beta.weight",
        "blk.0.ssm_conv1d.weight",   "blk.1.ple_conv1d.weight",         "blk.0.hc_attn_inject.weight",
        "blk.0.hc_ffn_norm.weight",  "blk.0.ffn_gate_inp_shexp.weight", "blk.0.ssm_a"
    };
    struct gguf *out = quantized("in.gguf", "out.gguf", all("Q8_0"));
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        assert_string_equal(type_of(out, names[i]), "F32");
    gguf_close(out);
}

static void indexer_projections_keep_sixteen_bits_unless_everything_is_f32(void **state)
{
    struct gguf *out = quantized("in.gguf", "out.gguf", all("Q8_0"));
    assert_string_equal(type_of(out, "blk.3.indexer.q_proj.weight"), "BF16");
    gguf_close(out);
    out = quantized("in.gguf", "out.gguf", all("F32"));
    assert_string_equal(type_of(out, "blk.3.indexer.q_proj.weight"), "F32");
    gguf_close(out);
}

static void narrow_rows_fall_back_to_a_type_with_no_fewer_bits(void **state)
{
    static const struct {
        const char *asked, *down, *table;
    } cases[] = { /* rows of 64 and of 16 */
                  { "IQ3_S", "IQ4_NL", "F16" },
                  { "Q4_K", "IQ4_NL", "F16" },
                  { "Q6_K", "Q8_0", "F16" },
                  { "Q2_0", "Q2_0", "F16" },
                  { "F16", "F16", "F16" }
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct quant_format *q = quant_format_named(cases[i].asked);
        struct gguf *out = quantized("in.gguf", "out.gguf", (struct convert_types){ .down = q, .ngram = q });
        assert_string_equal(type_of(out, "blk.0.ffn_down_exps.weight"), cases[i].down);
        assert_string_equal(type_of(out, "per_layer_token_embd.weight"), cases[i].table);
        gguf_close(out);
    }
}

static void the_file_type_follows_the_weights_and_other_keys_stay(void **state)
{
    struct gguf *in = open_model("in.gguf"), *out = quantized("in.gguf", "out.gguf", all("F16"));
    uint32_t file_type = 0;
    assert_int_equal(gguf_get_u32(out, "general.file_type", &file_type, &error), 1);
    assert_int_equal(file_type, 1);
    assert_int_equal(in->n_entries, out->n_entries);
    for (uint64_t i = 0; i < in->n_entries; i++) {
        const struct gguf_value *x = &in->entries[i].value, *y = gguf_find(out, in->entries[i].key.data);
        assert_non_null(y);
        assert_int_equal(x->count, y->count);
    }
    gguf_close(in);
    gguf_close(out);
}

/* Writes half of the tensors of `in` to part `no` of two. */
static void write_part(const struct gguf *in, const char *name, uint32_t no)
{
    struct gguf_writer *writer = NULL;
    assert_int_equal(gguf_writer_create(&writer, path_of(name), &error), 0);
    for (uint64_t i = 0; no == 0 && i < in->n_entries; i++)
        gguf_put_entry(writer, &in->entries[i]);
    gguf_put_u32(writer, "split.no", no);
    gguf_put_u32(writer, "split.count", 2);
    gguf_put_u32(writer, "split.tensors.count", (uint32_t)in->n_tensors);
    uint64_t half = in->n_tensors / 2, first = no ? half : 0, end = no ? in->n_tensors : half;
    for (uint64_t i = first; i < end; i++)
        gguf_put_tensor(writer, in->tensors[i].name, in->tensors[i].format, in->tensors[i].n_dims, in->tensors[i].dims);
    assert_int_equal(gguf_writer_begin_data(writer, &error), 0);
    for (uint64_t i = first; i < end; i++) {
        uint8_t *bytes = bytes_of(in, &in->tensors[i]);
        assert_int_equal(gguf_write(writer, bytes, in->tensors[i].bytes, &error), 0);
        free(bytes);
    }
    assert_int_equal(gguf_writer_finish(writer, &error), 0);
    gguf_writer_destroy(writer);
}

static void a_split_model_becomes_one_file(void **state)
{
    struct gguf *in = open_model("in.gguf");
    write_part(in, "part-00001-of-00002.gguf", 0);
    write_part(in, "part-00002-of-00002.gguf", 1);
    struct gguf *out = quantized("part-00001-of-00002.gguf", "out.gguf", (struct convert_types){ 0 });
    assert_int_equal(in->n_tensors, out->n_tensors);
    for (uint64_t i = 0; i < in->n_tensors; i++)
        expect_same_tensor(in, out, in->tensors[i].name);
    assert_null(gguf_find(out, "split.count"));
    gguf_close(in);
    gguf_close(out);
}

static void a_type_that_cannot_be_written_is_refused_by_name(void **state)
{
    struct convert_options options = { .types = all("NVFP4"), .threads = 1 };
    assert_int_equal(convert_quantize(path_of("in.gguf"), path_of("out.gguf"), &options, &summary, &error), STRATA_E_UNSUPPORTED);
    assert_non_null(strstr(error.text, "Strata reads NVFP4 but cannot write it"));
}

static void the_result_does_not_depend_on_the_number_of_threads(void **state)
{
    struct convert_options options = { .types = all("Q8_0"), .threads = 1 };
    assert_int_equal(convert_quantize(path_of("in.gguf"), path_of("again.gguf"), &options, &summary, &error), 0);
    struct gguf *one = open_model("again.gguf"), *two = quantized("in.gguf", "out.gguf", options.types);
    for (uint64_t i = 0; i < one->n_tensors; i++)
        expect_same_tensor(one, two, one->tensors[i].name);
    gguf_close(one);
    gguf_close(two);
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, make_directory, remove_directory)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(without_types_every_tensor_stays_as_it_is),
        TEST(types_for_experts_leave_the_rest_alone),
        TEST(expanding_gives_the_values_that_the_types_stand_for),
        TEST(encoding_loses_no_more_than_the_type_must),
        TEST(small_and_sensitive_tensors_stay_f32),
        TEST(indexer_projections_keep_sixteen_bits_unless_everything_is_f32),
        TEST(narrow_rows_fall_back_to_a_type_with_no_fewer_bits),
        TEST(the_file_type_follows_the_weights_and_other_keys_stay),
        TEST(a_split_model_becomes_one_file),
        TEST(a_type_that_cannot_be_written_is_refused_by_name),
        TEST(the_result_does_not_depend_on_the_number_of_threads),
    };
    return cmocka_run_group_tests_name("quantize", tests, NULL, NULL);
}
