/* test_quant.c - block formats against what ggml's library answered (tests/data/quant_vectors.h, recorded by
 * tools/oracle/ggml_vectors.c). */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <xxhash.h>

#include "quant/quant.h"
#include "quant_random.h"

#include "data/quant_vectors.h"

/* A test's storage, too large for the stack. */
static uint8_t blocks[QUANT_VECTOR_WEIGHTS * 4];
static float decoded[QUANT_VECTOR_WEIGHTS], weights[QUANT_VECTOR_WEIGHTS], importance[QUANT_VECTOR_WEIGHTS];

static const struct quant_vector *vector_of(uint32_t type)
{
    for (size_t k = 0; k < sizeof quant_vectors / sizeof *quant_vectors; k++)
        if (quant_vectors[k].type == type)
            return &quant_vectors[k];
    fail_msg("no recorded vector for type %u", type);
    return NULL;
}

static void every_format_has_the_name_and_sizes_that_ggml_gives_it(void **state)
{
    for (int k = 0; k < QUANT_LAYOUTS; k++) {
        const struct quant_layout *layout = &quant_layouts[k];
        const struct quant_format *format = quant_format_find(layout->type);
        assert_non_null(format);
        assert_ptr_equal(format, quant_format_named(layout->name)); /* ggml spells it "q4_K": any case is found */
        assert_string_equal(format->name, quant_type_name(layout->type));
        assert_int_equal(format->type, layout->type);
        assert_int_equal(format->block, layout->block);
        assert_int_equal(format->bytes, layout->bytes);
        assert_int_equal(quant_row_bytes(format, 5 * 256), 5 * 256 / layout->block * layout->bytes);
        assert_false(format->is_float);
    }
}

static void float_formats_are_blocks_of_one_value_without_groups(void **state)
{
    static const struct {
        const char *name;
        int bytes;
    } floats[] = { { "F32", 4 }, { "F16", 2 }, { "BF16", 2 } };
    for (int k = 0; k < 3; k++) {
        const struct quant_format *format = quant_format_named(floats[k].name);
        assert_non_null(format);
        assert_true(format->is_float);
        assert_null(format->group);
        assert_int_equal(format->block, 1);
        assert_int_equal(format->bytes, floats[k].bytes);
    }
}

static void types_that_strata_cannot_run_have_a_name_but_no_format(void **state)
{
    assert_string_equal(quant_type_name(34), "TQ1_0");
    assert_null(quant_format_find(34));
    assert_null(quant_format_named("TQ1_0"));
}

static void ids_that_do_not_exist_have_neither_name_nor_format(void **state)
{
    static const uint32_t ids[] = { 4, 5, 31, 38, 43, 44, 1000, UINT32_MAX };
    for (size_t k = 0; k < sizeof ids / sizeof *ids; k++) {
        assert_null(quant_format_find(ids[k]));
        assert_null(quant_type_name(ids[k]));
    }
}

/* ---- Codebooks ---- */

static uint32_t rotate_right(uint32_t v, int n) { return v >> n | v << (32 - n); }

static void sha256_chunk(uint32_t hash[8], const uint8_t *chunk)
{
    static const uint32_t k[64] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
        0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
        0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
        0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
        0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
        0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
    };
    uint32_t w[64], v[8];
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)chunk[4 * i] << 24 | (uint32_t)chunk[4 * i + 1] << 16 | (uint32_t)chunk[4 * i + 2] << 8 | chunk[4 * i + 3];
    for (int i = 16; i < 64; i++) {
        uint32_t s0 = rotate_right(w[i - 15], 7) ^ rotate_right(w[i - 15], 18) ^ w[i - 15] >> 3;
        uint32_t s1 = rotate_right(w[i - 2], 17) ^ rotate_right(w[i - 2], 19) ^ w[i - 2] >> 10;
        w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    memcpy(v, hash, sizeof v);
    for (int i = 0; i < 64; i++) {
        uint32_t s1 = rotate_right(v[4], 6) ^ rotate_right(v[4], 11) ^ rotate_right(v[4], 25),
                 choice = (v[4] & v[5]) ^ (~v[4] & v[6]);
        uint32_t s0 = rotate_right(v[0], 2) ^ rotate_right(v[0], 13) ^ rotate_right(v[0], 22);
        uint32_t majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]), t = v[7] + s1 + choice + k[i] + w[i];
        memmove(v + 1, v, 7 * sizeof *v);
        v[4] += t;
        v[0] = t + s0 + majority;
    }
    for (int i = 0; i < 8; i++)
        hash[i] += v[i];
}

/* SHA-256 of `n` bytes, a multiple of 64, as hex. */
static void sha256_hex(const void *data, size_t n, char hex[65])
{
    uint32_t hash[8] = { 0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19 };
    uint8_t last[64] = { 0x80 };
    for (size_t i = 0; i < n; i += 64)
        sha256_chunk(hash, (const uint8_t *)data + i);
    for (int i = 0; i < 8; i++)
        last[63 - i] = (uint8_t)((uint64_t)n * 8 >> 8 * i);
    sha256_chunk(hash, last);
    for (int i = 0; i < 8; i++)
        snprintf(hex + 8 * i, 9, "%08x", hash[i]);
}

static void every_codebook_has_its_published_sha256(void **state)
{
    static const struct {
        const void *grid;
        size_t bytes;
        const char *sha256;
    } grids[] = {
        { quant_grid_iq2xxs, sizeof quant_grid_iq2xxs, "05826b5d3e472a3a78f196be62ac78acf81df0f909626e12ab9fa2a5d490dd54" },
        { quant_grid_iq2xs, sizeof quant_grid_iq2xs, "06e47aaca60b4dc1d9b5a3f34540437058a6b142b4d7a59d5ded769b4d1bf1de" },
        { quant_grid_iq2s, sizeof quant_grid_iq2s, "e1aa1473412b0552c2174c30ef22ab4073f6a181b85a17056e8249bd2932fd88" },
        { quant_grid_iq3xxs, sizeof quant_grid_iq3xxs, "46e35f5a997efdee6c99ce57854c8a0d4f0ff8ca57e5e8a60c0793ea580acf5d" },
        { quant_grid_iq3s, sizeof quant_grid_iq3s, "bd1af4945a1717c65610b0284e4628b9a1ba3b306fae3a06f6e5f597356e349f" },
        { quant_grid_iq1s, sizeof quant_grid_iq1s, "07540ffc1aeaf6ad4d97e96b0fcc765aae39671d4ae4a27bbd0e796fde167c6a" },
    };
    for (int k = 0; k < 6; k++) {
        char hex[65];
        sha256_hex(grids[k].grid, grids[k].bytes, hex);
        assert_string_equal(hex, grids[k].sha256);
    }
}

/* ---- Decoding ---- */

static void every_format_decodes_random_blocks_to_the_bits_of_ggml(void **state)
{
    for (int k = 0; k < QUANT_LAYOUTS; k++) {
        const struct quant_layout *layout = &quant_layouts[k];
        const struct quant_vector *vector = vector_of(layout->type);
        uint64_t random = layout->type;
        int n = QUANT_VECTOR_BLOCKS * layout->block;
        for (int b = 0; b < QUANT_VECTOR_BLOCKS; b++)
            quant_random_block(layout, &random, blocks + b * layout->bytes);
        quant_decode(quant_format_find(layout->type), blocks, n, decoded);
        for (int i = 0; i < n; i++)
            decoded[i] += 0.0f; /* -0 becomes 0, as recorded */
        for (int i = 0; i < 4; i++)
            if (decoded[i] != vector->first[i])
                fail_msg("%s: weight %d is %a, ggml has %a", layout->name, i, (double)decoded[i], (double)vector->first[i]);
        if (XXH64(decoded, (size_t)n * sizeof *decoded, 0) != vector->hash)
            fail_msg("%s: the first weights agree with ggml's, but not all %d", layout->name, n);
    }
}

static void a_row_of_zero_bytes_decodes_to_finite_values_in_every_format(void **state)
{
    memset(blocks, 0, 4096);
    for (uint32_t type = 0; type < QUANT_TYPE_LIMIT; type++) {
        const struct quant_format *format = quant_format_find(type);
        if (!format)
            continue;
        quant_decode(format, blocks, 512, decoded);
        for (int i = 0; i < 512; i++)
            assert_true(isfinite(decoded[i]));
    }
}

static void only_nvfp4_has_two_scales_in_a_group(void **state)
{
    for (int k = 0; k < QUANT_LAYOUTS; k++) {
        const struct quant_layout *layout = &quant_layouts[k];
        struct quant_group group;
        uint64_t random = 99;
        quant_random_block(layout, &random, blocks);
        quant_format_find(layout->type)->group(blocks, 0, &group);
        assert_int_equal(group.split, layout->type == QUANT_NVFP4);
        if (!group.split)
            assert_memory_equal(&group.d[0], &group.d[1], sizeof(float));
    }
}

static void formats_without_a_minimum_give_groups_without_one(void **state)
{
    for (int k = 0; k < QUANT_LAYOUTS; k++) {
        const struct quant_layout *layout = &quant_layouts[k];
        const struct quant_format *format = quant_format_find(layout->type);
        struct quant_group group;
        uint64_t random = 7;
        quant_random_block(layout, &random, blocks);
        format->group(blocks, 0, &group);
        assert_int_equal(format->has_min, group.dmin != 0);
        if (!format->has_min)
            assert_true(group.min[0] == 0 && group.min[1] == 0);
    }
}

/* ---- Encoding ---- */

static void float_rows_survive_encoding_and_decoding(void **state)
{
    static const float values[] = { 0, -1.5f, 0.25f, 3, -65504 + 32 * 1024, 0x1p-14f, 0x1p-20f, -2 }; /* exact in all three */
    static const char *const names[] = { "F32", "F16", "BF16" };
    for (int k = 0; k < 3; k++) {
        const struct quant_format *format = quant_format_named(names[k]);
        int n = k == 2 ? 4 : 8; /* bfloat16 has 8 bits of mantissa */
        quant_encode(format, values, NULL, n, blocks);
        quant_decode(format, blocks, n, decoded);
        assert_memory_equal(decoded, values, (size_t)n * sizeof *values);
    }
}

/* Root mean square error of encoding and decoding the shared random weights, weighted by `important` if not NULL. */
static double round_trip_error(const struct quant_format *format, const float *important)
{
    double sum = 0, total = 0;
    quant_encode(format, weights, important, QUANT_VECTOR_WEIGHTS, blocks);
    quant_decode(format, blocks, QUANT_VECTOR_WEIGHTS, decoded);
    for (int i = 0; i < QUANT_VECTOR_WEIGHTS; i++) {
        double e = decoded[i] - weights[i], w = important ? important[i] : 1;
        sum += w * e * e;
        total += w;
    }
    return sqrt(sum / total);
}

static void encoders_err_no_more_than_ggmls_on_normal_weights(void **state)
{
    quant_random_weights(weights, importance);
    for (int k = 0; k < QUANT_LAYOUTS; k++) {
        const struct quant_format *format = quant_format_find(quant_layouts[k].type);
        if (!format->encode)
            continue;
        double ours = round_trip_error(format, NULL), theirs = vector_of(format->type)->rmse;
        print_message("    %-8s error %.6f, ggml %.6f: %.3f\n", format->name, ours, theirs, ours / theirs);
        if (!(ours <= 1.05 * theirs))
            fail_msg("%s: error %g, ggml's encoder has %g", format->name, ours, theirs);
    }
}

static void encoders_err_no_more_than_ggmls_where_weights_are_important(void **state)
{
    quant_random_weights(weights, importance);
    for (int k = 0; k < QUANT_LAYOUTS; k++) {
        const struct quant_format *format = quant_format_find(quant_layouts[k].type);
        if (!format->encode)
            continue;
        double ours = round_trip_error(format, importance), theirs = vector_of(format->type)->weighted;
        print_message("    %-8s weighted error %.6f, ggml %.6f: %.3f\n", format->name, ours, theirs, ours / theirs);
        if (!(ours <= 1.05 * theirs))
            fail_msg("%s: weighted error %g, ggml's encoder has %g", format->name, ours, theirs);
    }
}

static void the_formats_that_a_model_is_converted_to_have_encoders(void **state)
{
    static const char *const names[] = { "Q8_0",  "Q4_0", "Q4_1", "Q5_0", "Q5_1",    "IQ4_NL", "Q2_0",
                                         "MXFP4", "Q4_K", "Q5_K", "Q6_K", "IQ3_XXS", "IQ3_S",  "IQ2_XS" };
    for (size_t k = 0; k < sizeof names / sizeof *names; k++)
        assert_non_null(quant_format_named(names[k])->encode);
}

/* Encodes `values` [256] in every format that has an encoder; every decoded value must be finite. */
static void assert_encodes_to_finite(const float *values, const float *important)
{
    for (uint32_t type = 0; type < QUANT_TYPE_LIMIT; type++) {
        const struct quant_format *format = quant_format_find(type);
        if (!format || !format->encode)
            continue;
        quant_encode(format, values, important, 256, blocks);
        quant_decode(format, blocks, 256, decoded);
        for (int i = 0; i < 256; i++)
            if (!isfinite(decoded[i]))
                fail_msg("%s: weight %d = %g decodes to %g", format->name, i, (double)values[i], (double)decoded[i]);
    }
}

static void zero_weights_stay_zero_in_every_format(void **state)
{
    static const float zeros[256];
    for (uint32_t type = 0; type < QUANT_TYPE_LIMIT; type++) {
        const struct quant_format *format = quant_format_find(type);
        if (!format || !(format->encode || format->is_float))
            continue;
        memset(blocks, 0xff, 1024);
        quant_encode(format, zeros, NULL, 256, blocks);
        quant_decode(format, blocks, 256, decoded);
        for (int i = 0; i < 256; i++)
            if (decoded[i] != 0)
                fail_msg("%s: weight %d of zeros decodes to %g", format->name, i, (double)decoded[i]);
    }
}

static void one_huge_weight_among_small_ones_gives_finite_blocks(void **state)
{
    static float values[256];
    uint64_t random = 3;
    for (int i = 0; i < 256; i++)
        values[i] = 1e-3f * quant_random_normal(&random);
    values[77] = 3e38f;
    assert_encodes_to_finite(values, NULL);
    values[77] = -1e5f; /* beyond binary16 */
    assert_encodes_to_finite(values, NULL);
}

static void denormal_weights_give_finite_blocks(void **state)
{
    static float values[256];
    uint64_t random = 4;
    for (int i = 0; i < 256; i++)
        values[i] = 1e-40f * quant_random_normal(&random);
    assert_encodes_to_finite(values, NULL);
}

static void weights_of_one_sign_give_finite_blocks_that_keep_the_sign(void **state)
{
    static float values[256];
    for (int i = 0; i < 256; i++)
        values[i] = -1 - (float)(i % 13) / 13;
    assert_encodes_to_finite(values, NULL);
    for (uint32_t type = 0; type < QUANT_TYPE_LIMIT; type++) {
        const struct quant_format *format = quant_format_find(type);
        if (!format || !format->encode)
            continue;
        quant_encode(format, values, NULL, 256, blocks);
        quant_decode(format, blocks, 256, decoded);
        double sum = 0;
        for (int i = 0; i < 256; i++)
            sum += decoded[i];
        if (!(sum < -128))
            fail_msg("%s: 256 weights between -1 and -2 decode to a sum of %g", format->name, sum);
    }
}

static void importance_of_zero_everywhere_gives_finite_blocks(void **state)
{
    static const float zeros[256];
    quant_random_weights(weights, importance);
    assert_encodes_to_finite(weights, zeros);
}

static void values_that_are_not_finite_do_not_spread(void **state)
{
    quant_random_weights(weights, importance);
    weights[5] = NAN;
    weights[70] = INFINITY;
    assert_encodes_to_finite(weights, NULL);
}

static void encoding_gives_the_same_bytes_every_time(void **state)
{
    static uint8_t again[1024];
    quant_random_weights(weights, importance);
    for (uint32_t type = 0; type < QUANT_TYPE_LIMIT; type++) {
        const struct quant_format *format = quant_format_find(type);
        if (!format || !format->encode)
            continue;
        memset(blocks, 0xff, 1024);
        memset(again, 0, 1024);
        quant_encode(format, weights, importance, 256, blocks);
        quant_encode(format, weights, importance, 256, again);
        assert_memory_equal(blocks, again, quant_row_bytes(format, 256)); /* also: no byte is left unwritten */
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_format_has_the_name_and_sizes_that_ggml_gives_it),
        cmocka_unit_test(float_formats_are_blocks_of_one_value_without_groups),
        cmocka_unit_test(types_that_strata_cannot_run_have_a_name_but_no_format),
        cmocka_unit_test(ids_that_do_not_exist_have_neither_name_nor_format),
        cmocka_unit_test(every_codebook_has_its_published_sha256),
        cmocka_unit_test(every_format_decodes_random_blocks_to_the_bits_of_ggml),
        cmocka_unit_test(a_row_of_zero_bytes_decodes_to_finite_values_in_every_format),
        cmocka_unit_test(only_nvfp4_has_two_scales_in_a_group),
        cmocka_unit_test(formats_without_a_minimum_give_groups_without_one),
        cmocka_unit_test(float_rows_survive_encoding_and_decoding),
        cmocka_unit_test(the_formats_that_a_model_is_converted_to_have_encoders),
        cmocka_unit_test(encoders_err_no_more_than_ggmls_on_normal_weights),
        cmocka_unit_test(encoders_err_no_more_than_ggmls_where_weights_are_important),
        cmocka_unit_test(zero_weights_stay_zero_in_every_format),
        cmocka_unit_test(one_huge_weight_among_small_ones_gives_finite_blocks),
        cmocka_unit_test(denormal_weights_give_finite_blocks),
        cmocka_unit_test(weights_of_one_sign_give_finite_blocks_that_keep_the_sign),
        cmocka_unit_test(importance_of_zero_everywhere_gives_finite_blocks),
        cmocka_unit_test(values_that_are_not_finite_do_not_spread),
        cmocka_unit_test(encoding_gives_the_same_bytes_every_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
