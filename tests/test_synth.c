/* test_synth.c - a synthetic model has the shapes, the tokens and the kind of weights that were asked for. */
#include "convert/convert.h"
#include "gguf/gguf.h"

#include <math.h>
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

static int make_directory(void **state)
{
    strcpy(directory, "/tmp/strata-synth-XXXXXX");
    return mkdtemp(directory) ? 0 : -1;
}

static int remove_directory(void **state)
{
    unlink(path_of("a.gguf"));
    unlink(path_of("b.gguf"));
    return rmdir(directory);
}

static int write_model(const char *name, struct convert_synth synth, int threads)
{
    struct convert_options options = { .threads = threads };
    if (!synth.like)
        synth.like = "tiny";
    return convert_synthetic(path_of(name), &synth, &options, &summary, &error);
}

static struct gguf *synthetic(struct convert_synth synth)
{
    struct gguf *gguf = NULL;
    if (write_model("a.gguf", synth, 2) || gguf_open(&gguf, path_of("a.gguf"), &error))
        fail_msg("%s", error.text);
    return gguf;
}

static float *values_of(const struct gguf *gguf, const char *name, int64_t *rows, int64_t *width)
{
    const struct gguf_tensor *t = gguf_tensor_find(gguf, name);
    if (!t)
        fail_msg("%s is missing", name);
    *width = t->dims[0];
    *rows = t->dims[1] * t->dims[2];
    uint8_t *bytes = malloc(t->bytes);
    float *values = malloc((size_t)(*rows * *width) * sizeof *values);
    assert_int_equal(gguf_read(gguf, t, 0, bytes, t->bytes, &error), 0);
    for (int64_t row = 0; row < *rows; row++)
        quant_decode(t->format, bytes + (size_t)row * quant_row_bytes(t->format, *width), *width, values + row * *width);
    free(bytes);
    return values;
}

/* Cosine of two rows. */
static double likeness(const float *a, const float *b, int64_t width)
{
    double ab = 0, aa = 0, bb = 0;
    for (int64_t i = 0; i < width; i++) {
        ab += (double)a[i] * b[i];
        aa += (double)a[i] * a[i];
        bb += (double)b[i] * b[i];
    }
    return ab / sqrt(aa * bb);
}

static bool same_files(const char *a, const char *b)
{
    FILE *one = fopen(path_of(a), "rb"), *two = fopen(path_of(b), "rb");
    int x = 0, y = 0;
    while (x == y && x != EOF) {
        x = fgetc(one);
        y = fgetc(two);
    }
    fclose(one);
    fclose(two);
    return x == y;
}

/* ---- Tests ---------------------------------------------------------------------------------------------------------------- */

static void one_seed_gives_one_file_with_any_number_of_threads(void **state)
{
    assert_int_equal(write_model("a.gguf", (struct convert_synth){ .seed = 7 }, 1), 0);
    assert_int_equal(write_model("b.gguf", (struct convert_synth){ .seed = 7 }, 3), 0);
    assert_true(same_files("a.gguf", "b.gguf"));
}

static void another_seed_gives_another_file(void **state)
{
    assert_int_equal(write_model("a.gguf", (struct convert_synth){ .seed = 7 }, 2), 0);
    assert_int_equal(write_model("b.gguf", (struct convert_synth){ .seed = 8 }, 2), 0);
    assert_false(same_files("a.gguf", "b.gguf"));
}

static void the_file_says_that_it_is_synthetic(void **state)
{
    struct gguf *gguf = synthetic((struct convert_synth){ 0 });
    bool said = false;
    struct gguf_string name = { 0 };
    assert_int_equal(gguf_get_bool(gguf, "strata.synthetic", &said, &error), 1);
    assert_int_equal(gguf_get_string(gguf, "general.name", &name, &error), 1);
    assert_true(said);
    assert_memory_equal(name.data, "synthetic ", 10);
    gguf_close(gguf);
}

static void the_number_of_layers_is_the_one_asked_for(void **state)
{
    struct gguf *gguf = synthetic((struct convert_synth){ .n_layers = 6 });
    uint32_t blocks = 0;
    assert_int_equal(gguf_get_u32(gguf, "qwen4exp.block_count", &blocks, &error), 1);
    assert_int_equal(blocks, 6);
    assert_non_null(gguf_tensor_find(gguf, "blk.5.ffn_down_exps.weight"));
    assert_null(gguf_tensor_find(gguf, "blk.6.ffn_down_exps.weight"));
    gguf_close(gguf);
}

static void hash_heads_are_distinct_primes_inside_the_table(void **state)
{
    struct gguf *gguf = synthetic((struct convert_synth){ .ngram_rows = 5000 });
    const struct gguf_value *sizes = gguf_find(gguf, "qwen4exp.ple.head_vocab_sizes"),
                            *offsets = gguf_find(gguf, "qwen4exp.ple.head_offsets");
    uint64_t last = 1, end = 0;
    assert_int_equal(sizes->count, 16);
    for (uint64_t h = 0; h < 16; h++) {
        uint64_t size = 0, offset = 0;
        assert_int_equal(gguf_value_u64(sizes, "sizes", h, &size, &error), 0);
        assert_int_equal(gguf_value_u64(offsets, "offsets", h, &offset, &error), 0);
        assert_true(size > last);
        for (uint64_t d = 2; d * d <= size; d++)
            assert_int_not_equal(size % d, 0);
        assert_int_equal(offset, end);
        end = offset + size;
        last = size;
    }
    assert_true(end <= 5000 && end > 4000);
    assert_true((uint64_t)gguf_tensor_find(gguf, "per_layer_token_embd.weight")->dims[1] >= end);
    gguf_close(gguf);
}

static void neighbouring_tokens_are_alike_as_far_as_locality_says(void **state)
{
    static const struct {
        double locality, least, most;
    } cases[] = { { 0, 0, 0.4 }, { 0.5, 0.45, 0.75 }, { 0.95, 0.85, 1 } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct gguf *gguf = synthetic((struct convert_synth){ .locality = cases[i].locality });
        int64_t rows, width;
        float *x = values_of(gguf, "token_embd.weight", &rows, &width);
        double mean =
            0; /* of tokens of one topic that share none of their pieces would be less exact: the tiny model's rows are one piece */
        int n = 0;
        for (int id = 0; id < 63; id++)
            if (memcmp(x + id * width, x + (id + 1) * width, (size_t)width * sizeof *x) != 0) {
                mean += likeness(x + id * width, x + (id + 1) * width, width);
                n++;
            }
        assert_true(n > 10);
        assert_in_range((int)(mean / n * 1000), (int)(cases[i].least * 1000), (int)(cases[i].most * 1000));
        free(x);
        gguf_close(gguf);
    }
}

static void skew_gives_experts_unequal_biases_along_what_tokens_share(void **state)
{
    double spread[2];
    for (int i = 0; i < 2; i++) {
        struct gguf *gguf = synthetic((struct convert_synth){ .skew = i });
        int64_t rows, width, tokens, hidden;
        float *router = values_of(gguf, "blk.2.ffn_gate_inp.weight", &rows, &width),
              *x = values_of(gguf, "token_embd.weight", &tokens, &hidden);
        float common[256] = { 0 };
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t k = 0; k < hidden; k++)
                common[k] += x[t * hidden + k] / (float)tokens;
        double lowest = INFINITY, highest = -INFINITY;
        for (int64_t e = 0; e < rows; e++) {
            double logit = 0;
            for (int64_t k = 0; k < width; k++)
                logit += 0.5 * (double)router[e * width + k] * common[k];
            lowest = fmin(lowest, logit);
            highest = fmax(highest, logit);
        }
        spread[i] = highest - lowest;
        free(router);
        free(x);
        gguf_close(gguf);
    }
    assert_true(spread[1] - spread[0] > 0.5 * log(32) / 2.4);
}

static void special_tokens_have_no_place_in_the_head(void **state)
{
    struct gguf *gguf = synthetic((struct convert_synth){ 0 });
    int64_t rows, width;
    float *head = values_of(gguf, "output.weight", &rows, &width);
    for (int64_t id = 0; id < rows; id++) {
        double energy = 0;
        for (int64_t k = 0; k < width; k++)
            energy += (double)head[id * width + k] * head[id * width + k];
        assert_int_equal(energy > 0, id < 400);
    }
    free(head);
    gguf_close(gguf);
}

static void decay_is_between_minus_eight_and_minus_a_tenth(void **state)
{
    struct gguf *gguf = synthetic((struct convert_synth){ 0 });
    int64_t rows, width;
    float *a = values_of(gguf, "blk.0.ssm_a", &rows, &width);
    for (int64_t i = 0; i < width; i++)
        assert_true(a[i] >= -8.001f && a[i] <= -0.099f);
    free(a);
    gguf_close(gguf);
}

static void weights_have_the_size_that_keeps_activations_near_one(void **state)
{
    static const struct {
        const char *name;
        double gain;
    } matrices[] = { /* deviation = gain / sqrt(width) */
                     { "blk.0.ffn_gate_exps.weight", 2 },
                     { "blk.0.ffn_down_exps.weight", 1 },
                     { "blk.0.ssm_out.weight", 0.4 },
                     { "blk.0.hc_attn_down.weight", 4 }
    };
    struct gguf *gguf = synthetic((struct convert_synth){ 0 });
    for (size_t i = 0; i < sizeof matrices / sizeof *matrices; i++) {
        int64_t rows, width;
        float *w = values_of(gguf, matrices[i].name, &rows, &width);
        double energy = 0;
        for (int64_t k = 0; k < rows * width; k++)
            energy += (double)w[k] * w[k];
        double deviation = sqrt(energy / (double)rows); /* times sqrt(width) */
        if (deviation < 0.8 * matrices[i].gain || deviation > 1.1 * matrices[i].gain)
            fail_msg("%s has size %g, wanted about %g", matrices[i].name, deviation, matrices[i].gain);
        free(w);
    }
    gguf_close(gguf);
}

static void too_few_layers_for_the_ngram_table_are_refused(void **state)
{
    assert_int_equal(write_model("a.gguf", (struct convert_synth){ .n_layers = 1 }, 1), STRATA_E_ARGUMENT);
    assert_non_null(strstr(error.text, "1 layers, wanted 2 to "));
}

static void unknown_shapes_are_refused_with_the_known_ones(void **state)
{
    assert_int_equal(write_model("a.gguf", (struct convert_synth){ .like = "gpt-9" }, 1), STRATA_E_ARGUMENT);
    assert_non_null(strstr(error.text, "'gpt-9' are known, wanted qwen3.8-flash-next or tiny"));
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, make_directory, remove_directory)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(one_seed_gives_one_file_with_any_number_of_threads),
        TEST(another_seed_gives_another_file),
        TEST(the_file_says_that_it_is_synthetic),
        TEST(the_number_of_layers_is_the_one_asked_for),
        TEST(hash_heads_are_distinct_primes_inside_the_table),
        TEST(neighbouring_tokens_are_alike_as_far_as_locality_says),
        TEST(skew_gives_experts_unequal_biases_along_what_tokens_share),
        TEST(special_tokens_have_no_place_in_the_head),
        TEST(decay_is_between_minus_eight_and_minus_a_tenth),
        TEST(weights_have_the_size_that_keeps_activations_near_one),
        TEST(too_few_layers_for_the_ngram_table_are_refused),
        TEST(unknown_shapes_are_refused_with_the_known_ones),
    };
    return cmocka_run_group_tests_name("synth", tests, NULL, NULL);
}
