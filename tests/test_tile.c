/* Tiles of 16 rows: packing loses nothing, and every field lies where quant/tile.h says. */
#include "quant/tile.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MAX_WIDTH = 2560, MAX_ROW_BYTES = 4 * MAX_WIDTH };

static uint8_t rows[TILE_ROWS * MAX_ROW_BYTES], tile[TILE_ROWS * MAX_ROW_BYTES + 1], again[TILE_ROWS * MAX_ROW_BYTES + 1];

static void rows_random(void)
{
    uint64_t state = 88172645463325252u;
    for (size_t i = 0; i < sizeof rows; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        rows[i] = (uint8_t)(state >> 40);
    }
}

/* A full strand (256 columns) of random rows in `tile`. */
static const struct quant_format *strand_random(enum quant_type type)
{
    const struct quant_format *format = quant_format_find(type);
    rows_random();
    tile_pack(format, TILE_STRAND, rows, TILE_ROWS, tile);
    return format;
}

static const uint8_t *row_at(const struct quant_format *format, int r)
{
    return rows + (size_t)r * quant_row_bytes(format, TILE_STRAND);
}

static uint16_t u16_at(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }
static int bit_at(const uint8_t *p, int bit) { return p[bit / 8] >> bit % 8 & 1; }

/* ---- Reading the sections of tile.h, from its words: h, q, j of a column; vector m = 4h + j ---- */

static int half_of(int c) { return c / 16; }
static int quad_of(int c) { return c % 16 / 4; }
static int vector_of(int c) { return 4 * half_of(c) + c % 4; }

static int byte_code(const uint8_t *p, int r, int c) { return p[64 * vector_of(c) + 4 * r + quad_of(c)]; }
static int nib4_code(const uint8_t *p, int r, int c)
{
    return p[64 * (vector_of(c) % 4) + 4 * r + quad_of(c)] >> 4 * (vector_of(c) / 4) & 15;
}
static int bit2_code(const uint8_t *p, int r, int c) { return p[64 * half_of(c) + 4 * r + quad_of(c)] >> 2 * (c % 4) & 3; }
static int bit1_code(const uint8_t *p, int r, int c) { return p[4 * r + quad_of(c)] >> vector_of(c) & 1; }
static int nibs_value(const uint8_t *p, int r) { return p[r % 8] >> 4 * (r / 8) & 15; }
static int two_value(const uint8_t *p, int r) { return p[r % 4] >> 2 * (r / 4) & 3; }
static int idx4_value(const uint8_t *p, int r, int c) { return p[64 * half_of(c) + 4 * r + quad_of(c)]; }
static int idx8_value(const uint8_t *p, int r, int c) { return p[32 * half_of(c) + 2 * r + c % 16 / 8]; }
/* The sign of column c in sign7, and the free bit f. */
static int sign7_value(const uint8_t *p, int r, int c)
{
    int parity = 0;
    if (c % 8 < 7)
        return bit1_code(p, r, c);
    for (int k = c - 7; k < c; k++)
        parity ^= bit1_code(p, r, k);
    return parity;
}
static int sign7_free(const uint8_t *p, int r, int f) { return p[4 * r + 2 * (f / 2) + 1] >> (4 * (f % 2) + 3) & 1; }

/* The code of row r, column c of the strand as the format's own reader sees it. */
static int code_at(const struct quant_format *format, int r, int c)
{
    struct quant_group group;
    format->group(row_at(format, r), c / 32, &group);
    return group.code[c % 32];
}

#define EVERY_WEIGHT(r, g, c)                                                                                                      \
    for (int r = 0; r < TILE_ROWS; r++)                                                                                            \
        for (int g = 0; g < 8; g++)                                                                                                \
            for (int c = 0; c < 32; c++)

/* ---- Tests ---- */

static void unpacking_gives_back_the_packed_rows_of_every_format_and_width(void **state)
{
    static const int widths[] = { 32, 64, 96, 128, 256, 640, 768, MAX_WIDTH };
    rows_random();
    for (uint32_t type = 0; type < QUANT_TYPE_LIMIT; type++)
        for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
            const struct quant_format *format = quant_format_find(type);
            if (!format || widths[i] % format->block)
                continue;
            size_t bytes = tile_bytes(format, widths[i]);
            memset(tile, 0xa5, sizeof tile);
            memset(again, 0x5a, sizeof again);
            tile_pack(format, widths[i], rows, TILE_ROWS, tile);
            tile_unpack(format, widths[i], tile, again);
            assert_memory_equal(rows, again, bytes);
            assert_int_equal(again[bytes], 0x5a);
            assert_int_equal(tile[bytes], 0xa5);
        }
}

static void missing_rows_are_zero_bytes(void **state)
{
    rows_random();
    for (uint32_t type = 0; type < QUANT_TYPE_LIMIT; type++) {
        const struct quant_format *format = quant_format_find(type);
        if (!format)
            continue;
        size_t row_bytes = quant_row_bytes(format, 512);
        tile_pack(format, 512, rows, 5, tile);
        tile_unpack(format, 512, tile, again);
        assert_memory_equal(rows, again, 5 * row_bytes);
        for (size_t i = 5 * row_bytes; i < TILE_ROWS * row_bytes; i++)
            assert_int_equal(again[i], 0);
    }
}

static void a8_order_is_its_own_inverse(void **state)
{
    for (int c = 0; c < 32; c++) {
        assert_int_equal(tile_a8_position(tile_a8_position(c)), c);
        assert_int_equal(tile_a8_position(c), 4 * vector_of(c) + quad_of(c));
    }
}

static void float_tiles_hold_a_column_of_16_rows_together(void **state)
{
    const struct quant_format *format = strand_random(QUANT_F16);
    for (int k = 0; k < TILE_STRAND; k++)
        for (int r = 0; r < TILE_ROWS; r++)
            assert_int_equal(u16_at(tile + 2 * (16 * k + r)), u16_at(row_at(format, r) + 2 * k));
}

static void q8_0_is_bytes_then_scales(void **state)
{
    const struct quant_format *format = strand_random(QUANT_Q8_0);
    EVERY_WEIGHT(r, g, c)
    {
        assert_int_equal((int8_t)byte_code(tile + 512 * g, r, c), code_at(format, r, 32 * g + c));
        assert_int_equal(u16_at(tile + 4096 + 32 * g + 2 * r), u16_at(row_at(format, r) + 34 * g));
    }
}

static void a_short_strand_keeps_its_sections_close(void **state)
{
    const struct quant_format *format = quant_format_find(QUANT_Q8_0);
    rows_random();
    tile_pack(format, 320, rows, TILE_ROWS, tile); /* one strand of 8 groups, one of 2 */
    const uint8_t *strand = tile + 16 * 34 * 8;
    for (int r = 0; r < TILE_ROWS; r++)
        for (int g = 0; g < 2; g++) {
            const uint8_t *block = rows + (size_t)r * quant_row_bytes(format, 320) + 34 * (8 + g);
            assert_int_equal(byte_code(strand + 512 * g, r, 21), block[2 + 21]);
            assert_int_equal(u16_at(strand + 1024 + 32 * g + 2 * r), u16_at(block));
        }
}

static void q2_0_is_pairs_of_bits_then_a_scale_for_64(void **state)
{
    const struct quant_format *format = strand_random(QUANT_Q2_0);
    EVERY_WEIGHT(r, g, c)
    {
        assert_int_equal(bit2_code(tile + 128 * g, r, c) - 1, code_at(format, r, 32 * g + c));
        assert_int_equal(u16_at(tile + 1024 + 32 * (g / 2) + 2 * r), u16_at(row_at(format, r) + 18 * (g / 2)));
    }
}

static void q1_0_is_bits_then_a_scale_for_128(void **state)
{
    const struct quant_format *format = strand_random(QUANT_Q1_0);
    EVERY_WEIGHT(r, g, c)
    {
        assert_int_equal(2 * bit1_code(tile + 64 * g, r, c) - 1, code_at(format, r, 32 * g + c));
        assert_int_equal(u16_at(tile + 512 + 32 * (g / 4) + 2 * r), u16_at(row_at(format, r) + 18 * (g / 4)));
    }
}

static void q5_1_is_nibbles_fifth_bits_scales_offsets(void **state)
{
    const struct quant_format *format = strand_random(QUANT_Q5_1);
    EVERY_WEIGHT(r, g, c)
    {
        int code = nib4_code(tile + 256 * g, r, c) | bit1_code(tile + 2048 + 64 * g, r, c) << 4;
        assert_int_equal(code, code_at(format, r, 32 * g + c));
        assert_int_equal(u16_at(tile + 2560 + 32 * g + 2 * r), u16_at(row_at(format, r) + 24 * g));
        assert_int_equal(u16_at(tile + 2816 + 32 * g + 2 * r), u16_at(row_at(format, r) + 24 * g + 2));
    }
}

static void nvfp4_puts_its_sixteens_into_halves(void **state)
{
    const struct quant_format *format = strand_random(QUANT_NVFP4);
    EVERY_WEIGHT(r, g, c)
    {
        assert_int_equal(quant_fp4[nib4_code(tile + 256 * g, r, c)], code_at(format, r, 32 * g + c));
        assert_int_equal(tile[2048 + 32 * g + 16 * half_of(c) + r], row_at(format, r)[36 * (g / 2) + 2 * (g % 2) + half_of(c)]);
    }
}

static void iq4_xs_splits_its_six_bit_scales(void **state)
{
    const struct quant_format *format = strand_random(QUANT_IQ4_XS);
    EVERY_WEIGHT(r, g, c)
    {
        const uint8_t *block = row_at(format, r);
        assert_int_equal(quant_iq4nl[nib4_code(tile + 256 * g, r, c)], code_at(format, r, 32 * g + c));
        assert_int_equal(nibs_value(tile + 2048 + 8 * g, r), block[4 + g / 2] >> 4 * (g % 2) & 15);
        assert_int_equal(two_value(tile + 2112 + 4 * g, r), u16_at(block + 2) >> 2 * g & 3);
        assert_int_equal(u16_at(tile + 2144 + 2 * r), u16_at(block));
    }
}

static void q3_k_is_low_bits_high_bits_scales(void **state)
{
    const struct quant_format *format = strand_random(QUANT_Q3_K);
    EVERY_WEIGHT(r, g, c)
    {
        int code = bit2_code(tile + 128 * g, r, c) + 4 * bit1_code(tile + 1024 + 64 * g, r, c) - 4;
        int scale = nibs_value(tile + 1536 + 16 * g + 8 * half_of(c), r) | two_value(tile + 1664 + 8 * g + 4 * half_of(c), r) << 4;
        assert_int_equal(code * (scale - 32), code_at(format, r, 32 * g + c));
    }
}

static void q5_k_splits_its_six_bit_scales_and_minimums(void **state)
{
    const struct quant_format *format = strand_random(QUANT_Q5_K);
    EVERY_WEIGHT(r, g, c)
    {
        const uint8_t *packed = row_at(format, r) + 4, *scales = tile + 2560;
        int high = nibs_value(scales + 128 + 8 * g, r);
        int scale = nibs_value(scales + 8 * g, r) | (high & 3) << 4, min = nibs_value(scales + 64 + 8 * g, r) | (high >> 2) << 4;
        int code = nib4_code(tile + 256 * g, r, c) | bit1_code(tile + 2048 + 64 * g, r, c) << 4;
        assert_int_equal(code, code_at(format, r, 32 * g + c));
        assert_int_equal(scale, g < 4 ? packed[g] & 63 : (packed[g + 4] & 15) | packed[g - 4] >> 6 << 4);
        assert_int_equal(min, g < 4 ? packed[g + 4] & 63 : packed[g + 4] >> 4 | packed[g] >> 6 << 4);
    }
}

static void q6_k_is_nibbles_high_bits_scales(void **state)
{
    const struct quant_format *format = strand_random(QUANT_Q6_K);
    EVERY_WEIGHT(r, g, c)
    {
        int code = (nib4_code(tile + 256 * g, r, c) | bit2_code(tile + 2048 + 128 * g, r, c) << 4) - 32;
        assert_int_equal(code * (int8_t)tile[3072 + 32 * g + 16 * half_of(c) + r], code_at(format, r, 32 * g + c));
    }
}

static void iq3_s_is_indexes_ninth_bits_signs_scales(void **state)
{
    const struct quant_format *format = strand_random(QUANT_IQ3_S);
    EVERY_WEIGHT(r, g, c)
    {
        int index = idx4_value(tile + 128 * g, r, c) | bit_at(tile + 1024 + 16 * g + 8 * half_of(c), 4 * r + quad_of(c)) << 8;
        int magnitude = quant_grid_iq3s[index][c % 4];
        assert_int_equal(bit1_code(tile + 1152 + 64 * g, r, c) ? -magnitude : magnitude, code_at(format, r, 32 * g + c));
        assert_int_equal(nibs_value(tile + 1664 + 8 * g, r), row_at(format, r)[106 + g / 2] >> 4 * (g % 2) & 15);
    }
}

static void iq3_xxs_hides_its_scale_between_seven_signs(void **state)
{
    const struct quant_format *format = strand_random(QUANT_IQ3_XXS);
    EVERY_WEIGHT(r, g, c)
    {
        const uint8_t *signs = tile + 1024 + 64 * g;
        int magnitude = quant_grid_iq3xxs[idx4_value(tile + 128 * g, r, c)][c % 4], scale = 0;
        for (int f = 0; f < 4; f++)
            scale |= sign7_free(signs, r, f) << f;
        assert_int_equal(sign7_value(signs, r, c) ? -magnitude : magnitude, code_at(format, r, 32 * g + c));
        assert_int_equal(scale, row_at(format, r)[66 + 4 * g + 3] >> 4);
    }
}

static void iq2_xs_hides_its_ninth_index_bits_between_seven_signs(void **state)
{
    const struct quant_format *format = strand_random(QUANT_IQ2_XS);
    EVERY_WEIGHT(r, g, c)
    {
        const uint8_t *signs = tile + 512 + 64 * g;
        int index = idx8_value(tile + 64 * g, r, c) | sign7_free(signs, r, 2 * (c % 16 / 8) + half_of(c)) << 8;
        int scale = 2 * (tile[1024 + 16 * g + r] >> 4 * half_of(c) & 15) + 1, magnitude = quant_grid_iq2xs[index][c % 8];
        assert_int_equal((sign7_value(signs, r, c) ? -magnitude : magnitude) * scale, code_at(format, r, 32 * g + c));
    }
}

static void iq2_s_has_two_masks_of_extra_index_bits(void **state)
{
    const struct quant_format *format = strand_random(QUANT_IQ2_S);
    EVERY_WEIGHT(r, g, c)
    {
        const uint8_t *extra = tile + 512 + 16 * g + 8 * half_of(c);
        int bit = 2 * r + c % 16 / 8,
            index = idx8_value(tile + 64 * g, r, c) | bit_at(extra, bit) << 8 | bit_at(extra + 4, bit) << 9;
        int scale = 2 * (tile[1152 + 16 * g + r] >> 4 * half_of(c) & 15) + 1, magnitude = quant_grid_iq2s[index][c % 8];
        assert_int_equal((bit1_code(tile + 640 + 64 * g, r, c) ? -magnitude : magnitude) * scale, code_at(format, r, 32 * g + c));
    }
}

static void iq1_m_collects_its_scattered_scale(void **state)
{
    const struct quant_format *format = strand_random(QUANT_IQ1_M);
    EVERY_WEIGHT(r, g, c)
    {
        int h = half_of(c), bit = 2 * r + c % 16 / 8, index = idx8_value(tile + 64 * g, r, c), scale = 0, d = 0;
        for (int b = 0; b < 3; b++) {
            index |= bit_at(tile + 512 + 24 * g + 12 * h + 4 * b, bit) << (8 + b);
            scale |= bit_at(tile + 768 + 12 * g + 6 * h + 2 * b, r) << b;
        }
        for (int k = 0; k < 4; k++)
            d |= u16_at(row_at(format, r) + 48 + 2 * k) >> 12 << 4 * k;
        int delta = bit_at(tile + 704 + 8 * g + 4 * h, bit) ? -1 : 1;
        assert_int_equal((8 * quant_grid_iq1s[index][c % 8] + delta) * (2 * scale + 1), code_at(format, r, 32 * g + c));
        assert_int_equal(u16_at(tile + 864 + 2 * r), d);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(unpacking_gives_back_the_packed_rows_of_every_format_and_width),
        cmocka_unit_test(missing_rows_are_zero_bytes),
        cmocka_unit_test(a8_order_is_its_own_inverse),
        cmocka_unit_test(float_tiles_hold_a_column_of_16_rows_together),
        cmocka_unit_test(q8_0_is_bytes_then_scales),
        cmocka_unit_test(a_short_strand_keeps_its_sections_close),
        cmocka_unit_test(q2_0_is_pairs_of_bits_then_a_scale_for_64),
        cmocka_unit_test(q1_0_is_bits_then_a_scale_for_128),
        cmocka_unit_test(q5_1_is_nibbles_fifth_bits_scales_offsets),
        cmocka_unit_test(nvfp4_puts_its_sixteens_into_halves),
        cmocka_unit_test(iq4_xs_splits_its_six_bit_scales),
        cmocka_unit_test(q3_k_is_low_bits_high_bits_scales),
        cmocka_unit_test(q5_k_splits_its_six_bit_scales_and_minimums),
        cmocka_unit_test(q6_k_is_nibbles_high_bits_scales),
        cmocka_unit_test(iq3_s_is_indexes_ninth_bits_signs_scales),
        cmocka_unit_test(iq3_xxs_hides_its_scale_between_seven_signs),
        cmocka_unit_test(iq2_xs_hides_its_ninth_index_bits_between_seven_signs),
        cmocka_unit_test(iq2_s_has_two_masks_of_extra_index_bits),
        cmocka_unit_test(iq1_m_collects_its_scattered_scale),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
