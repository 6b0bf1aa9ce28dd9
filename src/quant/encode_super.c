/* encode_super.c - writing blocks of 256 whose sub-blocks have small integer scales: Q2_K ... Q6_K and IQ4_XS.
 *
 * First every sub-block finds the scale it would like. Then the block's binary16 scales are set so that the largest fits, every
 * sub-block tries the integers next to its wish, and the block's scales are solved for again (least squares over all 256). */
#include "quant/fit.h"

#include <math.h>

enum { ROUNDS = 2 }; /* of integers, then block scales: the second gains up to 0.8 % of the error, two more 0.3 % */

/* The result, before a format packs it. */
struct super {
    uint16_t d, dmin; /* binary16 */
    int scale[16], min[16];
    uint8_t q[256]; /* level indexes, or codes */
};

/* x = d * scale * level, scale in low .. -low-1. */
static void fit_super(const struct fit_levels *levels, int sub, int low, const struct fit_block *block, struct super *best)
{
    float wish[16], extreme = 0, d, best_error = INFINITY;
    int n = 256 / sub;
    for (int s = 0; s < n; s++) {
        wish[s] = fit_scale(levels, block->x + s * sub, block->w + s * sub, sub);
        if (fabsf(wish[s]) > fabsf(extreme))
            extreme = wish[s];
    }
    memset(best, 0, sizeof *best);
    double next = extreme / (float)low; /* the most extreme scale becomes the integer with the widest side */
    for (int round = 0; round < ROUNDS; round++) {
        struct super try = { .d = fit_half(block, next, &d) };
        float error = 0, inverse = fit_inverse(d);
        double xq = 0, qq = 0;
        for (int s = 0; s < n; s++) {
            const float *x = block->x + s * sub, *w = block->w + s * sub;
            float centre = fmaxf(fminf(rintf(wish[s] * inverse), (float)(-low - 1)), (float)low), sub_error = INFINITY;
            for (int scale = (int)centre - 1; scale <= (int)centre + 1; scale++) {
                uint8_t index[32];
                if (scale < low || scale > -low - 1)
                    continue;
                fit_nearest(levels, x, sub, fit_inverse(d * (float)scale), index);
                float e = fit_error(levels, x, w, sub, d * (float)scale, index);
                if (e < sub_error) {
                    sub_error = e;
                    try.scale[s] = scale;
                    memcpy(try.q + s * sub, index, (size_t)sub);
                }
            }
            error += sub_error;
            for (int i = 0; i < sub; i++) {
                float q = (float)(try.scale[s] * levels->value[try.q[s * sub + i]]);
                xq += w[i] * x[i] * q;
                qq += w[i] * q * q;
            }
        }
        if (error < best_error) {
            best_error = error;
            *best = try;
        }
        next = qq > 0 ? xq / qq : 0;
    }
}

/* x = d * scale * q - dmin * min; q = 0..top, scale and min = 0..largest. */
static void fit_super_affine(int top, int sub, int largest, const struct fit_block *block, struct super *best)
{
    float scale_wish[16], min_wish[16], scale_max = 0, min_max = 0, d, dmin, best_error = INFINITY;
    int n = 256 / sub;
    for (int s = 0; s < n; s++) {
        fit_affine(top, false, block->x + s * sub, block->w + s * sub, sub, &scale_wish[s], &min_wish[s]);
        scale_max = fmaxf(scale_max, scale_wish[s]);
        min_max = fmaxf(min_max, min_wish[s]);
    }
    memset(best, 0, sizeof *best);
    double next = scale_max / (float)largest, next_min = min_max / (float)largest;
    for (int round = 0; round < ROUNDS; round++) {
        struct super try = { .d = fit_half(block, next, &d), .dmin = fit_half(block, next_min, &dmin) };
        float error = 0;
        double qq = 0, qm = 0, mm = 0, xq = 0, xm = 0;
        for (int s = 0; s < n; s++) {
            const float *x = block->x + s * sub, *w = block->w + s * sub;
            int scale_centre = (int)fminf(rintf(scale_wish[s] * fit_inverse(d)), (float)largest);
            int min_centre = (int)fminf(rintf(min_wish[s] * fit_inverse(dmin)), (float)largest);
            float sub_error = INFINITY;
            for (int k = 0; k < 9; k++) {
                uint8_t q[32];
                int scale = scale_centre + k % 3 - 1, min = min_centre + k / 3 - 1;
                if (scale < 0 || scale > largest || min < 0 || min > largest)
                    continue;
                float e = fit_affine_codes(top, x, w, sub, d * (float)scale, dmin * (float)min, q);
                if (e < sub_error) {
                    sub_error = e;
                    try.scale[s] = scale;
                    try.min[s] = min;
                    memcpy(try.q + s * sub, q, (size_t)sub);
                }
            }
            error += sub_error;
            for (int i = 0; i < sub; i++) {
                double q = try.scale[s] * try.q[s * sub + i], m = -try.min[s];
                qq += w[i] * q * q;
                qm += w[i] * q * m;
                mm += w[i] * m * m;
                xq += w[i] * x[i] * q;
                xm += w[i] * x[i] * m;
            }
        }
        if (error < best_error) {
            best_error = error;
            *best = try;
        }
        double determinant = qq * mm - qm * qm;
        if (!(determinant > 1e-9 * qq * mm))
            break;
        next = (xq * mm - xm * qm) / determinant;
        next_min = (xm * qq - xq * qm) / determinant;
        if (!(next > 0) || !(next_min >= 0))
            break;
    }
}

static void levels_range(struct fit_levels *levels, int low, int n)
{
    levels->n = n;
    levels->uniform = true;
    for (int i = 0; i < n; i++)
        levels->value[i] = (int8_t)(low + i);
}

void quant_encode_q2_k(const float *weights, const float *importance, uint8_t *out)
{
    struct fit_block block;
    struct super super;
    fit_prepare(&block, weights, importance, 256);
    fit_super_affine(3, 16, 15, &block, &super);
    memset(out, 0, 84);
    for (int s = 0; s < 16; s++)
        out[s] = (uint8_t)(super.scale[s] | super.min[s] << 4);
    for (int i = 0; i < 256; i++) /* of each 128: byte i % 32, two bits per 32 */
        out[16 + 32 * (i / 128) + i % 32] |= (uint8_t)(super.q[i] << 2 * (i / 32 % 4));
    store_u16(out + 80, super.d);
    store_u16(out + 82, super.dmin);
}

void quant_encode_q3_k(const float *weights, const float *importance, uint8_t *out)
{
    struct fit_levels levels;
    struct fit_block block;
    struct super super;
    levels_range(&levels, -4, 8);
    fit_prepare(&block, weights, importance, 256);
    fit_super(&levels, 16, -32, &block, &super);
    memset(out, 0, 110);
    for (int i = 0; i < 256; i++) {
        out[32 + 32 * (i / 128) + i % 32] |= (uint8_t)((super.q[i] & 3) << 2 * (i / 32 % 4));
        out[i % 32] |= (uint8_t)(super.q[i] >> 2 << i / 32);
    }
    for (int s = 0; s < 16; s++) {
        int scale = super.scale[s] + 32;
        out[96 + s % 8] |= (uint8_t)((scale & 15) << 4 * (s / 8));
        out[104 + s % 4] |= (uint8_t)(scale >> 4 << 2 * (s / 4));
    }
    store_u16(out + 108, super.d);
}

/* The first 16 bytes of Q4_K and Q5_K. */
static void put_k_scales(uint8_t *out, const struct super *super)
{
    uint8_t *packed = out + 4;
    store_u16(out, super->d);
    store_u16(out + 2, super->dmin);
    for (int k = 0; k < 4; k++) {
        int scale = super->scale[k + 4], min = super->min[k + 4];
        packed[k] = (uint8_t)(super->scale[k] | scale >> 4 << 6);
        packed[k + 4] = (uint8_t)(super->min[k] | min >> 4 << 6);
        packed[k + 8] = (uint8_t)((scale & 15) | (min & 15) << 4);
    }
}

void quant_encode_q4_k(const float *weights, const float *importance, uint8_t *out)
{
    struct fit_block block;
    struct super super;
    fit_prepare(&block, weights, importance, 256);
    fit_super_affine(15, 32, 63, &block, &super);
    memset(out, 0, 144);
    put_k_scales(out, &super);
    for (int i = 0; i < 256; i++)
        out[16 + 32 * (i / 64) + i % 32] |= (uint8_t)(super.q[i] << 4 * (i / 32 % 2));
}

void quant_encode_q5_k(const float *weights, const float *importance, uint8_t *out)
{
    struct fit_block block;
    struct super super;
    fit_prepare(&block, weights, importance, 256);
    fit_super_affine(31, 32, 63, &block, &super);
    memset(out, 0, 176);
    put_k_scales(out, &super);
    for (int i = 0; i < 256; i++) {
        out[16 + i % 32] |= (uint8_t)(super.q[i] >> 4 << i / 32);
        out[48 + 32 * (i / 64) + i % 32] |= (uint8_t)((super.q[i] & 15) << 4 * (i / 32 % 2));
    }
}

void quant_encode_q6_k(const float *weights, const float *importance, uint8_t *out)
{
    struct fit_levels levels;
    struct fit_block block;
    struct super super;
    levels_range(&levels, -32, 64);
    fit_prepare(&block, weights, importance, 256);
    fit_super(&levels, 16, -128, &block, &super);
    memset(out, 0, 210);
    for (int i = 0; i < 256; i++) {
        int quarter = i / 32 % 4;
        out[64 * (i / 128) + 32 * (quarter % 2) + i % 32] |= (uint8_t)((super.q[i] & 15) << 4 * (quarter / 2));
        out[128 + 32 * (i / 128) + i % 32] |= (uint8_t)(super.q[i] >> 4 << 2 * quarter);
    }
    for (int s = 0; s < 16; s++)
        out[192 + s] = (uint8_t)super.scale[s];
    store_u16(out + 208, super.d);
}

void quant_encode_iq4_xs(const float *weights, const float *importance, uint8_t *out)
{
    struct fit_levels levels = { .n = 16 };
    struct fit_block block;
    struct super super;
    memcpy(levels.value, quant_iq4nl, sizeof quant_iq4nl);
    fit_prepare(&block, weights, importance, 256);
    fit_super(&levels, 32, -32, &block, &super);
    memset(out, 0, 136);
    uint32_t high = 0;
    for (int s = 0; s < 8; s++) {
        uint32_t scale = (uint32_t)(super.scale[s] + 32);
        out[4 + s / 2] |= (uint8_t)((scale & 15) << 4 * (s % 2));
        high |= scale >> 4 << 2 * s;
    }
    store_u16(out, super.d);
    store_u16(out + 2, high);
    for (int i = 0; i < 256; i++)
        out[8 + 16 * (i / 32) + i % 16] |= (uint8_t)(super.q[i] << 4 * (i / 16 % 2));
}
