/* fit.c - scales and codes of least weighted error (see fit.h). */
#include "quant/fit.h"

#include <math.h>

static float finite_or_zero(float v) { return isfinite(v) ? v : 0; }

void fit_prepare(struct fit_block *block, const float *weights, const float *importance, int n)
{
    float largest = 0, heaviest = 0, mean = 0;
    int exponent;
    for (int i = 0; i < n; i++) {
        largest = fmaxf(largest, fabsf(finite_or_zero(weights[i])));
        if (importance)
            heaviest = fmaxf(heaviest, finite_or_zero(importance[i]));
    }
    frexp(largest, &exponent);
    block->n = n;
    block->unit = ldexp(1, exponent);
    for (int i = 0; i < n; i++) {
        block->x[i] = (float)(finite_or_zero(weights[i]) / block->unit);
        mean += block->x[i] * block->x[i] / (float)n;
    }
    for (int i = 0; i < n; i++) {
        float important = heaviest > 0 ? fmaxf(finite_or_zero(importance[i]), 0) / heaviest : 1;
        block->w[i] = important * sqrtf(mean + block->x[i] * block->x[i]);
    }
}

uint16_t fit_half(const struct fit_block *block, double scale, float *rounded)
{
    uint16_t half = half_from_float((float)fmax(fmin(scale * block->unit, 65504), -65504));
    *rounded = (float)(half_to_float(half) / block->unit);
    return half;
}

void fit_nearest(const struct fit_levels *levels, const float *x, int n, float inverse, uint8_t *index)
{
    if (levels->uniform) {
        float half_up = 0.5f - levels->value[0], top = (float)(levels->n - 1) + 0.5f;
        for (int i = 0; i < n; i++) {
            float v = x[i] * inverse + half_up;
            v = v > 0 ? v : 0;
            index[i] = (uint8_t)(int)(v < top ? v : top);
        }
        return;
    }
    for (int i = 0; i < n; i++)
        index[i] = 0;
    for (int k = 1; k < levels->n; k++) { /* counting the borders below x needs no branches */
        float border = 0.5f * (float)(levels->value[k - 1] + levels->value[k]);
        for (int i = 0; i < n; i++)
            index[i] = (uint8_t)(index[i] + (x[i] * inverse > border));
    }
}

float fit_error(const struct fit_levels *levels, const float *x, const float *w, int n, float scale, const uint8_t *index)
{
    float sum = 0;
    for (int i = 0; i < n; i++) {
        float e = x[i] - scale * levels->value[index[i]];
        sum += w[i] * e * e;
    }
    return sum;
}

/* How much error the best scale for these codes saves compared with decoding to zero; `scale` receives it. */
static float scale_gain(const struct fit_levels *levels, const float *x, const float *w, int n, const uint8_t *index, float *scale)
{
    float xq = 0, qq = 0;
    for (int i = 0; i < n; i++) {
        float q = levels->value[index[i]];
        xq += w[i] * x[i] * q;
        qq += w[i] * q * q;
    }
    *scale = qq > 0 ? xq / qq : 0;
    return xq * *scale;
}

float fit_scale(const struct fit_levels *levels, const float *x, const float *w, int n)
{
    /* With few levels the best scale clips many weights, with many it hardly clips any. */
    float first = levels->n <= 4 ? 0.5f : 0.7f, last = levels->n <= 4 ? 2.5f : 1.35f;
    enum { STEPS = 24 };
    uint8_t index[128];
    float largest = 0, best = 0, best_gain = 0;
    float edge = fmaxf(-(float)levels->value[0], (float)levels->value[levels->n - 1]);
    for (int i = 0; i < n; i++)
        largest = fmaxf(largest, fabsf(x[i]));
    if (!(largest > 0x1p-100f)) /* nothing that a scale could hold, and 1/largest stays finite */
        return 0;
    for (int t = 0; t < 2 * STEPS; t++) {
        float f = first + (last - first) * (float)(t / 2) / (STEPS - 1), scale;
        fit_nearest(levels, x, n, (t % 2 ? -edge : edge) * f / largest, index);
        float gain = scale_gain(levels, x, w, n, index, &scale);
        if (gain > best_gain) {
            best_gain = gain;
            best = scale;
        }
    }
    for (int round = 0; round < 8 && best != 0; round++) {
        float scale;
        fit_nearest(levels, x, n, 1 / best, index);
        float gain = scale_gain(levels, x, w, n, index, &scale);
        if (!(gain > best_gain))
            break;
        best_gain = gain;
        best = scale;
    }
    return best;
}

float fit_affine_codes(int top, const float *x, const float *w, int n, float scale, float min, uint8_t *q)
{
    float inverse = fit_inverse(scale), limit = (float)top + 0.5f, sum = 0;
    for (int i = 0; i < n; i++) {
        float v = (x[i] + min) * inverse + 0.5f;
        v = v > 0 ? v : 0;
        q[i] = (uint8_t)(int)(v < limit ? v : limit);
    }
    for (int i = 0; i < n; i++) {
        float e = x[i] - scale * q[i] + min;
        sum += w[i] * e * e;
    }
    return sum;
}

/* The pair that codes q want: a 2x2 system. False if it has no answer with a positive scale. */
static bool affine_solve(bool any_min, const float *x, const float *w, int n, const uint8_t *q, float *scale, float *min)
{
    float sw = 0, sx = 0, sq = 0, sqq = 0, sxq = 0;
    for (int i = 0; i < n; i++) {
        float wq = w[i] * q[i];
        sw += w[i];
        sx += w[i] * x[i];
        sq += wq;
        sqq += wq * q[i];
        sxq += wq * x[i];
    }
    float determinant = sw * sqq - sq * sq;
    if (!(determinant > 1e-6f * sw * sqq))
        return false;
    *scale = (sw * sxq - sx * sq) / determinant;
    *min = (sq * *scale - sx) / sw;
    if (*min < 0 && !any_min) {
        *min = 0;
        *scale = sxq / sqq;
    }
    return *scale > 0;
}

void fit_affine(int top, bool any_min, const float *x, const float *w, int n, float *scale, float *min)
{
    uint8_t q[32];
    float low = any_min ? x[0] : fminf(x[0], 0), high = x[0], best;
    for (int i = 1; i < n; i++) {
        low = fminf(low, x[i]);
        high = fmaxf(high, x[i]);
    }
    *scale = high - low > 0x1p-100f ? (high - low) / (float)top : 0;
    *min = -low;
    best = fit_affine_codes(top, x, w, n, *scale, *min, q);
    if (*scale == 0)
        return;
    /* 16 starts: the range widened or narrowed at both ends; 36 gain less than 1 % of the error. From each, codes and pair are
     * alternated while that helps. */
    for (int a = 0; a < 4; a++)
        for (int b = 0; b < 4; b++) {
            float from = low * (1.1f - 0.08f * (float)a), to = high - 0.08f * (float)(b - 1) * (high - low), previous = INFINITY;
            if (any_min)
                from = low + 0.08f * (float)(a - 1) * (high - low);
            float s = (to - from) / (float)top, m = -from;
            for (int round = 0; round < 6 && s > 0; round++) {
                float error = fit_affine_codes(top, x, w, n, s, m, q);
                if (error < best) {
                    best = error;
                    *scale = s;
                    *min = m;
                }
                if (!(error < previous) || !affine_solve(any_min, x, w, n, q, &s, &m))
                    break;
                previous = error;
            }
        }
}
