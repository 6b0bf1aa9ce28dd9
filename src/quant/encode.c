/* encode.c - writing the formats whose blocks have one scale, or a scale and a minimum. */
#include "quant/fit.h"

#include <math.h>

/* clang-format off */
static const struct fit_levels levels_q1_0 = { 2, false, { -1, 1 } };
static const struct fit_levels levels_q2_0 = { 4, true, { -1, 0, 1, 2 } };
static const struct fit_levels levels_q4_0 = { 16, true, { -8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7 } };
static const struct fit_levels levels_q5_0 = { 32, true, { -16, -15, -14, -13, -12, -11, -10, -9, -8, -7, -6, -5, -4, -3, -2, -1,
                                                           0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 } };
static const struct fit_levels levels_iq4_nl = { 16, false,
                                                 { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 } };
static const struct fit_levels levels_fp4 = { 15, false, { -12, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12 } };
/* clang-format on */

/* The best binary16 scale, written to `out`, and the codes for exactly that scale. */
static void encode_levels(const struct fit_levels *levels, int n, const float *weights, const float *importance, uint8_t *out,
                          uint8_t *index)
{
    struct fit_block block;
    float scale;
    fit_prepare(&block, weights, importance, n);
    store_u16(out, fit_half(&block, fit_scale(levels, block.x, block.w, n), &scale));
    fit_nearest(levels, block.x, n, fit_inverse(scale), index);
}

static void encode_affine(int top, const float *weights, const float *importance, uint8_t *out, uint8_t *q)
{
    struct fit_block block;
    float scale, min;
    fit_prepare(&block, weights, importance, 32);
    fit_affine(top, true, block.x, block.w, 32, &scale, &min);
    store_u16(out, fit_half(&block, scale, &scale));
    store_u16(out + 2, fit_half(&block, -min, &min));
    fit_affine_codes(top, block.x, block.w, 32, scale, -min, q);
}

static void put_nibbles(uint8_t *qs, const uint8_t *index)
{
    for (int i = 0; i < 16; i++)
        qs[i] = (uint8_t)((index[i] & 15) | (index[i + 16] & 15) << 4);
}

static void put_fifth_bits(uint8_t *qh, const uint8_t *index)
{
    uint32_t bits = 0;
    for (int i = 0; i < 32; i++)
        bits |= (uint32_t)(index[i] >> 4) << i;
    store_u32(qh, bits);
}

void quant_encode_q4_0(const float *weights, const float *importance, uint8_t *out)
{
    uint8_t index[32];
    encode_levels(&levels_q4_0, 32, weights, importance, out, index);
    put_nibbles(out + 2, index);
}

void quant_encode_q4_1(const float *weights, const float *importance, uint8_t *out)
{
    uint8_t q[32];
    encode_affine(15, weights, importance, out, q);
    put_nibbles(out + 4, q);
}

void quant_encode_q5_0(const float *weights, const float *importance, uint8_t *out)
{
    uint8_t index[32];
    encode_levels(&levels_q5_0, 32, weights, importance, out, index);
    put_fifth_bits(out + 2, index);
    put_nibbles(out + 6, index);
}

void quant_encode_q5_1(const float *weights, const float *importance, uint8_t *out)
{
    uint8_t q[32];
    encode_affine(31, weights, importance, out, q);
    put_fifth_bits(out + 4, q);
    put_nibbles(out + 8, q);
}

/* No search: among 255 codes the scale that just avoids clipping is within a percent of the best. */
void quant_encode_q8_0(const float *weights, const float *importance, uint8_t *out)
{
    struct fit_block block;
    float largest = 0, scale;
    fit_prepare(&block, weights, importance, 32);
    for (int i = 0; i < 32; i++)
        largest = fmaxf(largest, fabsf(block.x[i]));
    store_u16(out, fit_half(&block, largest / 127, &scale));
    for (int i = 0; i < 32; i++)
        out[2 + i] = (uint8_t)(int8_t)fmaxf(fminf(rintf(block.x[i] * fit_inverse(scale)), 127), -127);
}

void quant_encode_q1_0(const float *weights, const float *importance, uint8_t *out)
{
    uint8_t index[128];
    encode_levels(&levels_q1_0, 128, weights, importance, out, index);
    for (int i = 0; i < 16; i++) {
        out[2 + i] = 0;
        for (int j = 0; j < 8; j++)
            out[2 + i] |= (uint8_t)(index[8 * i + j] << j);
    }
}

void quant_encode_q2_0(const float *weights, const float *importance, uint8_t *out)
{
    uint8_t index[64];
    encode_levels(&levels_q2_0, 64, weights, importance, out, index);
    for (int i = 0; i < 16; i++)
        out[2 + i] = (uint8_t)(index[4 * i] | index[4 * i + 1] << 2 | index[4 * i + 2] << 4 | index[4 * i + 3] << 6);
}

void quant_encode_iq4_nl(const float *weights, const float *importance, uint8_t *out)
{
    uint8_t index[32];
    encode_levels(&levels_iq4_nl, 32, weights, importance, out, index);
    put_nibbles(out + 2, index);
}

/* The scale is a power of two, 2^(e-128): the three that bring the largest weight near the largest code are tried. */
void quant_encode_mxfp4(const float *weights, const float *importance, uint8_t *out)
{
    struct fit_block block;
    uint8_t index[32], code[32];
    float best = INFINITY;
    fit_prepare(&block, weights, importance, 32);
    int unit = ilogb(block.unit);
    memset(out, 0, 17);
    for (int shift = -4; shift <= -2; shift++) { /* x is at most 1, the largest code 12 */
        int e = unit + shift + 128;
        if (e < 0 || e > 252) /* 12 * 2^(252-128) is the largest finite weight */
            continue;
        float scale = ldexpf(1, shift);
        fit_nearest(&levels_fp4, block.x, 32, 1 / scale, index);
        float error = fit_error(&levels_fp4, block.x, block.w, 32, scale, index);
        if (!(error < best))
            continue;
        best = error;
        out[0] = (uint8_t)e;
        for (int i = 0; i < 32; i++) /* level 7 is zero; negative codes have bit 3 set */
            code[i] = (uint8_t)(index[i] >= 7 ? index[i] - 7 : 8 | (7 - index[i]));
        put_nibbles(out + 1, code);
    }
}
