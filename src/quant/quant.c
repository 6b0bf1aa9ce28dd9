/* quant.c - the table of formats, and rows made of blocks. */
#include "quant/formats.h"

#include <strings.h>

/* Values that no rule produces; both are part of the formats. */
const int8_t quant_iq4nl[16] = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 };
const int8_t quant_fp4[16] = { 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12 };

/* clang-format off */
#define FLOAT(NAME, size) [QUANT_##NAME] = { .name = #NAME, .type = QUANT_##NAME, .block = 1, .bytes = size, .is_float = true }
#define BLOCK(NAME, lower, weights, size, with_min, encoder)                                                                       \
    [QUANT_##NAME] = { .name = #NAME, .type = QUANT_##NAME, .block = weights, .bytes = size, .has_min = with_min,                  \
                       .group = quant_group_##lower, .encode = encoder }

/* clang-format on */

static const struct quant_format formats[QUANT_TYPE_LIMIT] = {
    FLOAT(F32, 4),
    FLOAT(F16, 2),
    FLOAT(BF16, 2),
    BLOCK(Q4_0, q4_0, 32, 18, false, quant_encode_q4_0),
    BLOCK(Q4_1, q4_1, 32, 20, true, quant_encode_q4_1),
    BLOCK(Q5_0, q5_0, 32, 22, false, quant_encode_q5_0),
    BLOCK(Q5_1, q5_1, 32, 24, true, quant_encode_q5_1),
    BLOCK(Q8_0, q8_0, 32, 34, false, quant_encode_q8_0),
    BLOCK(Q1_0, q1_0, 128, 18, false, quant_encode_q1_0),
    BLOCK(Q2_0, q2_0, 64, 18, false, quant_encode_q2_0),
    BLOCK(IQ4_NL, iq4_nl, 32, 18, false, quant_encode_iq4_nl),
    BLOCK(MXFP4, mxfp4, 32, 17, false, quant_encode_mxfp4),
    BLOCK(NVFP4, nvfp4, 64, 36, false, NULL),
    BLOCK(Q2_K, q2_k, 256, 84, true, quant_encode_q2_k),
    BLOCK(Q3_K, q3_k, 256, 110, false, quant_encode_q3_k),
    BLOCK(Q4_K, q4_k, 256, 144, true, quant_encode_q4_k),
    BLOCK(Q5_K, q5_k, 256, 176, true, quant_encode_q5_k),
    BLOCK(Q6_K, q6_k, 256, 210, false, quant_encode_q6_k),
    BLOCK(IQ4_XS, iq4_xs, 256, 136, false, quant_encode_iq4_xs),
    BLOCK(IQ3_S, iq3_s, 256, 110, false, quant_encode_iq3_s),
    BLOCK(IQ3_XXS, iq3_xxs, 256, 98, false, quant_encode_iq3_xxs),
    BLOCK(IQ2_S, iq2_s, 256, 82, false, quant_encode_iq2_s),
    BLOCK(IQ2_XS, iq2_xs, 256, 74, false, quant_encode_iq2_xs),
    BLOCK(IQ2_XXS, iq2_xxs, 256, 66, false, quant_encode_iq2_xxs),
    BLOCK(IQ1_M, iq1_m, 256, 56, false, NULL),
    BLOCK(IQ1_S, iq1_s, 256, 50, false, NULL),
};

/* Types that exist but that no row here is made of; ids missing from both tables were withdrawn from the format. */
static const char *const foreign_names[QUANT_TYPE_LIMIT] = {
    [9] = "Q8_1", [15] = "Q8_K", [24] = "I8",    [25] = "I16",   [26] = "I32",
    [27] = "I64", [28] = "F64",  [34] = "TQ1_0", [35] = "TQ2_0",
};

const struct quant_format *quant_format_find(uint32_t type)
{
    return type < QUANT_TYPE_LIMIT && formats[type].name ? &formats[type] : NULL;
}

const struct quant_format *quant_format_named(const char *name)
{
    for (int type = 0; type < QUANT_TYPE_LIMIT; type++)
        if (formats[type].name && strcasecmp(formats[type].name, name) == 0)
            return &formats[type];
    return NULL;
}

const char *quant_type_name(uint32_t type)
{
    if (type >= QUANT_TYPE_LIMIT)
        return NULL;
    return formats[type].name ? formats[type].name : foreign_names[type];
}

size_t quant_row_bytes(const struct quant_format *format, int64_t width)
{
    return (size_t)(width / format->block) * (size_t)format->bytes;
}

static void float_decode(const struct quant_format *format, const uint8_t *row, int64_t width, float *out)
{
    for (int64_t i = 0; i < width; i++)
        switch (format->type) {
        case QUANT_F16:
            out[i] = half_to_float(load_u16(row + 2 * i));
            break;
        case QUANT_BF16:
            out[i] = bfloat_to_float(load_u16(row + 2 * i));
            break;
        default:
            out[i] = bits_float(load_u32(row + 4 * i));
        }
}

static void float_encode(const struct quant_format *format, const float *weights, int64_t width, uint8_t *row)
{
    for (int64_t i = 0; i < width; i++)
        switch (format->type) {
        case QUANT_F16:
            store_u16(row + 2 * i, half_from_float(weights[i]));
            break;
        case QUANT_BF16:
            store_u16(row + 2 * i, bfloat_from_float(weights[i]));
            break;
        default:
            store_u32(row + 4 * i, float_bits(weights[i]));
        }
}

void quant_decode(const struct quant_format *format, const uint8_t *row, int64_t width, float *out)
{
    if (format->is_float) {
        float_decode(format, row, width, out);
        return;
    }
    for (int64_t g = 0; g < width / 32; g++) {
        struct quant_group group;
        format->group(row, (int)g, &group);
        for (int i = 0; i < 32; i++)
            out[32 * g + i] = group.d[i / 16] * group.code[i] - group.dmin * group.min[i / 16];
    }
}

void quant_encode(const struct quant_format *format, const float *weights, const float *importance, int64_t width, uint8_t *row)
{
    if (format->is_float) {
        float_encode(format, weights, width, row);
        return;
    }
    for (int64_t i = 0; i < width; i += format->block, row += format->bytes)
        format->encode(weights + i, importance ? importance + i : NULL, row);
}
