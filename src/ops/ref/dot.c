/* The definition of the products (design.md section 2, rules 2 and 3), written for reading: a tile is put back into rows of the file's
 * layout, and each row is walked group by group. */
#include "ops/ref/ref.h"

#include "base/half.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Rule 2: one quantized row times one row of A8 activations. */
static float dot_quantized(const struct quant_format *format, const uint8_t *row, int width, const struct dot_input *x)
{
    float total = 0;
    for (int strand = 0; strand < width; strand += TILE_STRAND) {
        float acc = 0;
        for (int g = strand / 32; g < width / 32 && g < strand / 32 + 8; g++) {
            struct quant_group w;
            format->group(row, g, &w);
            int32_t sum[2] = { 0, 0 };
            for (int c = 0; c < 32; c++)
                sum[c / 16] += w.code[c] * x->codes[32 * g + tile_a8_position(c)];
            if (w.split) {
                acc = fmaf((float)sum[0], w.d[0] * x->scales[g], acc);
                acc = fmaf((float)sum[1], w.d[1] * x->scales[g], acc);
            } else {
                acc = fmaf((float)(sum[0] + sum[1]), w.d[0] * x->scales[g], acc);
            }
            if (format->has_min) {
                int32_t minimum = w.min[0] * x->sums[2 * g] + w.min[1] * x->sums[2 * g + 1];
                acc = fmaf((float)minimum, -(w.dmin * x->scales[g]), acc);
            }
        }
        total = strand ? total + acc : acc;
    }
    return total;
}

static float weight_at(const struct quant_format *format, const uint8_t *row, int k)
{
    float f;
    uint16_t h;
    if (format->type == QUANT_F32)
        return memcpy(&f, row + 4 * k, 4), f;
    memcpy(&h, row + 2 * k, 2);
    return format->type == QUANT_F16 ? half_to_float(h) : bfloat_to_float(h);
}

/* Rule 3: float weights, activations not quantized. */
static float dot_float(const struct quant_format *format, const uint8_t *row, int width, const struct dot_input *x)
{
    float total = 0;
    for (int strand = 0; strand < width; strand += TILE_STRAND) {
        float acc = 0;
        for (int k = strand; k < width && k < strand + TILE_STRAND; k++)
            acc = fmaf(weight_at(format, row, k), x->values[k], acc);
        total = strand ? total + acc : acc;
    }
    return total;
}

static void dot_tiles(const struct quant_format *format, const uint8_t *tiles, size_t stride, int n_tiles, int width, const struct dot_input *in, int n_rows,
                      float *const *out)
{
    size_t row_bytes = quant_row_bytes(format, width);
    uint8_t *rows = malloc(TILE_ROWS * row_bytes);
    if (!rows)
        abort(); /* a few KB of scratch in the reference only */
    for (int i = 0; i < n_tiles; i++) {
        tile_unpack(format, width, tiles + (size_t)i * stride, rows);
        for (int t = 0; t < n_rows; t++)
            for (int r = 0; r < TILE_ROWS; r++) {
                const uint8_t *row = rows + (size_t)r * row_bytes;
                out[t][TILE_ROWS * i + r] = format->is_float ? dot_float(format, row, width, &in[t]) : dot_quantized(format, row, width, &in[t]);
            }
    }
    free(rows);
}

/* One entry per format: the table's functions do not carry the format. */
#define DOT(name)                                                                                                                                    \
    static void dot_##name(const uint8_t *tiles, size_t stride, int n_tiles, int width, const struct dot_input *in, int n_rows, float *const *out)  \
    {                                                                                                                                                \
        dot_tiles(quant_format_find(QUANT_##name), tiles, stride, n_tiles, width, in, n_rows, out);                                                 \
    }
#define FORMATS(X)                                                                                                                                   \
    X(F32) X(F16) X(BF16) X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) X(IQ2_XXS) X(IQ2_XS) X(IQ3_XXS) X(IQ1_S)   \
    X(IQ4_NL) X(IQ3_S) X(IQ2_S) X(IQ4_XS) X(IQ1_M) X(MXFP4) X(NVFP4) X(Q1_0) X(Q2_0)
FORMATS(DOT)

/* A8 (rule 2): scale = amax/127, code = round-half-even(x * (127/amax)); a group below 1e-30 is all zero. Magnitudes are compared as bit
 * patterns, in which a NaN is the largest: it becomes the scale, and so every product, instead of vanishing. */
static void quantize(const float *values, int width, int8_t *codes, float *scales, int32_t *sums)
{
    for (int g = 0; g < width / 32; g++) {
        const float *x = values + 32 * g;
        uint32_t most = 0;
        for (int c = 0; c < 32; c++)
            most = (float_bits(x[c]) & 0x7fffffff) > most ? float_bits(x[c]) & 0x7fffffff : most;
        float amax = bits_float(most);
        bool empty = amax < 1e-30f;
        float inverse = empty ? 0.0f : 127.0f / amax;
        scales[g] = empty ? 0.0f : amax / 127.0f;
        sums[2 * g] = sums[2 * g + 1] = 0;
        for (int c = 0; c < 32; c++) {
            float product = empty ? 0.0f : x[c] * inverse;
            int8_t code = (int8_t)((product + 0x1.8p23f) - 0x1.8p23f); /* adding 1.5 * 2^23 rounds to even */
            codes[32 * g + tile_a8_position(c)] = code;
            sums[2 * g + c / 16] += code;
        }
    }
}

#define ENTRY(name) k->dot[QUANT_##name] = dot_##name;
void kernels_ref(struct kernels *k)
{
    FORMATS(ENTRY)
    k->quantize = quantize;
    k->vector = &vector_kernels_ref;
}
