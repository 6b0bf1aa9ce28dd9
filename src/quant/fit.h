/* fit.h - inside quant/ only: choosing scales and codes that lose least.
 *
 * The encoders (encode.c, encode_super.c, encode_grid.c) all do the same: try a few dozen scales around the one that maps the
 * largest weight to the largest code, take the nearest codes for each, solve for the scale that these codes want (weighted least
 * squares), keep the best, then alternate codes and scale until nothing improves. Here are the parts of it that know no format.
 */
#ifndef QUANT_FIT_H
#define QUANT_FIT_H

#include "quant/formats.h"

/* A block to encode, divided by a power of two so that the largest weight lies in 0.5..1: squares neither overflow nor vanish. */
struct fit_block {
    int n;
    float x[256], w[256]; /* weights / unit, and what an error in each costs */
    double unit;
};

/* Costs are importance * sqrt(mean square + x*x): what the caller knows about activations, and that large weights matter more than
 * small ones. Values that are not finite count as zero; without any positive importance all weights count the same. */
void fit_prepare(struct fit_block *block, const float *weights, const float *importance, int n);

/* `scale` (in units of the block) as the nearest finite binary16; `rounded` receives what a decoder will see, in units of the
 * block. */
uint16_t fit_half(const struct fit_block *block, double scale, float *rounded);

/* The values that a code can stand for, ascending: value[i] of index i. */
struct fit_levels {
    int n;
    bool uniform; /* value[i] = value[0] + i */
    int8_t value[64];
};

static inline float fit_inverse(float scale) { return scale != 0 ? 1 / scale : 0; }

/* index[i] = the level nearest to x[i] * inverse. */
void fit_nearest(const struct fit_levels *levels, const float *x, int n, float inverse, uint8_t *index);
/* Sum of w * (x - scale * level)^2. */
float fit_error(const struct fit_levels *levels, const float *x, const float *w, int n, float scale, const uint8_t *index);
/* The scale (either sign) with which levels represent n <= 64 (Q1_0: 128) weights best. */
float fit_scale(const struct fit_levels *levels, const float *x, const float *w, int n);

/* x = scale * q - min, q = 0..top, scale >= 0; min >= 0 unless `any_min`. Writes the best pair for n <= 32 weights. */
void fit_affine(int top, bool any_min, const float *x, const float *w, int n, float *scale, float *min);
/* q[i] of scale and min, and the sum of w * (x - scale*q + min)^2. */
float fit_affine_codes(int top, const float *x, const float *w, int n, float scale, float min, uint8_t *q);

#endif
