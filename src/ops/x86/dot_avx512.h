/* dot_avx512.h - inside ops/x86 only: the one loop of all quantized products with AVX-512 (VNNI and VBMI).
 *
 * A format adds a function that turns group g of a strand into eight vectors of unsigned codes (vector m of quant/tile.h: one
 * 32-bit lane a row) and fp32 scales; the loop does the rest, for up to four rows of activations at once, in the order of rule 2.
 * vpdpbusd wants unsigned times signed bytes, so codes are stored with a bias, which the activations' sums take off again: all of
 * it exact in int32. */
#ifndef OPS_X86_DOT_AVX512_H
#define OPS_X86_DOT_AVX512_H

#include "ops/kernels.h"

#include <immintrin.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* What a group has besides codes and one scale. */
enum shape {
    PLAIN,
    MIN,        /* a minimum (dmin) for all 32 */
    HALVES,     /* an integer sub-scale for each 16 */
    HALVES_MIN, /* and an integer minimum for each 16 */
    SPLIT,      /* an fp32 scale for each 16, added one after the other */
};

struct group_avx512 {
    __m512i code[8];          /* code + bias, as unsigned bytes */
    __m512 d[2], dmin;        /* d[1]: SPLIT only */
    __m512i scale[2], min[2]; /* one int32 a row */
};

typedef void group_fn_avx512(const uint8_t *strand, int n, int g, struct group_avx512 *w); /* strand of n groups */

/* ---- Loading fields of quant/tile.h ---- */

INLINE __m512i load_avx512(const void *p) { return _mm512_loadu_si512(p); }
INLINE __m512 halves_load(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }   /* f16 */
INLINE __m512i bytes_load(const uint8_t *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); } /* s8, unsigned */

/* nibs and two: only the low four or two bits of each lane count, the caller clears the others. */
INLINE __m512i nibs_load(const uint8_t *p)
{
    const __m512i shift = _mm512_setr_epi32(0, 8, 16, 24, 32, 40, 48, 56, 4, 12, 20, 28, 36, 44, 52, 60);
    long long bits;
    memcpy(&bits, p, 8);
    return _mm512_multishift_epi64_epi8(shift, _mm512_set1_epi64(bits));
}
INLINE __m512i two_load(const uint8_t *p)
{
    const __m512i shift = _mm512_setr_epi32(0, 8, 16, 24, 2, 10, 18, 26, 4, 12, 20, 28, 6, 14, 22, 30);
    int bits;
    memcpy(&bits, p, 4);
    return _mm512_multishift_epi64_epi8(shift, _mm512_set1_epi32(bits));
}
INLINE __m512i and_avx512(__m512i v, int mask) { return _mm512_and_si512(v, _mm512_set1_epi32(mask)); }

/* nib4 as codes 0..15 */
INLINE void nib4_codes(const uint8_t *p, __m512i code[8])
{
    const __m512i low = _mm512_set1_epi8(15);
    for (int j = 0; j < 4; j++) {
        __m512i raw = load_avx512(p + 64 * j);
        code[j] = _mm512_and_si512(raw, low);
        code[j + 4] = _mm512_and_si512(_mm512_srli_epi16(raw, 4), low);
    }
}

/* Adds `value` to the codes whose bit of a bit1 section is set. */
INLINE void bit1_add(const uint8_t *p, int value, __m512i code[8])
{
    __m512i plane = load_avx512(p);
    for (int m = 0; m < 8; m++)
        code[m] = _mm512_mask_add_epi8(code[m], _mm512_test_epi8_mask(plane, _mm512_set1_epi8((char)(1 << m))), code[m],
                                       _mm512_set1_epi8((char)value));
}

/* bit2 as codes 0..3 */
INLINE void bit2_codes(const uint8_t *p, __m512i code[8])
{
    const __m512i low = _mm512_set1_epi8(3);
    for (int h = 0; h < 2; h++) {
        __m512i raw = load_avx512(p + 64 * h);
        for (int j = 0; j < 4; j++)
            code[4 * h + j] = _mm512_and_si512(_mm512_srli_epi16(raw, 2 * j), low);
    }
}

/* ---- The products ---- */

INLINE __m512i activations(const void *four)
{
    int v;
    memcpy(&v, four, 4);
    return _mm512_set1_epi32(v);
}

/* Sums of 16 products, one a row of the tile, on top of `sum`. */
INLINE __m512i half_dot(__m512i sum, const __m512i *code, const int8_t *x)
{
    for (int j = 0; j < 4; j++)
        sum = _mm512_dpbusd_epi32(sum, code[j], activations(x + 4 * j));
    return sum;
}

/* The bias comes off first, because it does not wait for the codes. Where a half has its own scale, by vpdpwssd: the sum of 16
 * activations fits the low half of its int32. Elsewhere the integer unit does it once for both halves, which leaves the multipliers to
 * the products (4 rows of Q2_0 and IQ4_NL from cache: 4 % faster on Zen 5; with halves it would be slower). */
INLINE void group_dot(const struct group_avx512 *w, int bias, bool halves, const int8_t *x, const int32_t *x_sum, __m512i *first, __m512i *second)
{
    *first = *second = _mm512_setzero_si512();
    if (bias && halves) {
        *first = _mm512_dpwssd_epi32(*first, _mm512_set1_epi32((uint16_t)-bias), activations(x_sum));
        *second = _mm512_dpwssd_epi32(*second, _mm512_set1_epi32((uint16_t)-bias), activations(x_sum + 1));
    } else if (bias) {
        *first = _mm512_set1_epi32(-bias * (x_sum[0] + x_sum[1]));
    }
    *first = half_dot(*first, w->code, x);
    *second = half_dot(*second, w->code + 4, x + 16);
}

INLINE __m512 group_add(__m512 acc, const struct group_avx512 *w, int bias, enum shape shape, const int8_t *x, float x_scale,
                        const int32_t *x_sum)
{
    __m512 scale = _mm512_set1_ps(x_scale);
    __m512i first, second;
    group_dot(w, bias, shape != PLAIN && shape != MIN, x, x_sum, &first, &second);
    if (shape == SPLIT) {
        acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(first), _mm512_mul_ps(w->d[0], scale), acc);
        return _mm512_fmadd_ps(_mm512_cvtepi32_ps(second), _mm512_mul_ps(w->d[1], scale), acc);
    }
    if (shape == HALVES || shape == HALVES_MIN) {
        first = _mm512_mullo_epi32(first, w->scale[0]);
        second = _mm512_mullo_epi32(second, w->scale[1]);
    }
    acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(first, second)), _mm512_mul_ps(w->d[0], scale), acc);
    if (shape == MIN)
        acc = _mm512_fnmadd_ps(_mm512_set1_ps((float)(x_sum[0] + x_sum[1])), _mm512_mul_ps(w->dmin, scale), acc);
    if (shape == HALVES_MIN) {
        __m512i min = _mm512_dpwssd_epi32(_mm512_setzero_si512(), w->min[0], activations(x_sum));
        min = _mm512_dpwssd_epi32(min, w->min[1], activations(x_sum + 1));
        acc = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(min), _mm512_mul_ps(w->dmin, scale), acc);
    }
    return acc;
}

/* One tile with n_rows (1..4, known when compiled) rows of activations. */
INLINE void tile_dot_avx512(const uint8_t *tile, int width, const struct dot_input *in, int n_rows, float *const *out, int at,
                            int group_bytes, int bias, enum shape shape, group_fn_avx512 *decode)
{
    /* Bytes: docs/LEARNED.md #7, #17. What is fetched past the end of an item is another thread's. */
    enum { AHEAD = 3072 };
    __m512 total[4], acc[4];
    for (int t = 0; t < n_rows; t++)
        total[t] = _mm512_set1_ps(-0.0f); /* adds to the first strand without a trace, also to -0 */
    for (int first = 0; first < width / 32; first += 8) {
        int n = width / 32 - first < 8 ? width / 32 - first : 8;
        for (int t = 0; t < n_rows; t++)
            acc[t] = _mm512_setzero_ps();
        for (int g = 0; g < n; g++) {
            struct group_avx512 w;
            for (int line = 0; line < group_bytes; line += 64)
                _mm_prefetch((const char *)(tile + g * group_bytes + line + AHEAD), _MM_HINT_T0);
            decode(tile, n, g, &w);
            int k = first + g;
            for (int t = 0; t < n_rows; t++)
                acc[t] = group_add(acc[t], &w, bias, shape, in[t].codes + 32 * k, in[t].scales[k], in[t].sums + 2 * k);
        }
        for (int t = 0; t < n_rows; t++)
            total[t] = _mm512_add_ps(total[t], acc[t]);
        tile += n * group_bytes;
    }
    for (int t = 0; t < n_rows; t++)
        _mm512_storeu_ps(out[t] + at, total[t]);
}

INLINE void dot_avx512(const uint8_t *tiles, size_t stride, int n_tiles, int width, const struct dot_input *in, int n_rows,
                       float *const *out, int group_bytes, int bias, enum shape shape, group_fn_avx512 *decode)
{
    for (int i = 0; i < n_tiles; i++, tiles += stride)
        for (int t = 0; t < n_rows; t += 4) {
            int rows = n_rows - t < 4 ? n_rows - t : 4;
#define CASE(n)                                                                                                                    \
    if (rows == n)                                                                                                                 \
        tile_dot_avx512(tiles, width, in + t, n, out + t, TILE_ROWS * i, group_bytes, bias, shape, decode);
            CASE(1) CASE(2) CASE(3) CASE(4)
#undef CASE
        }
}

/* Defines dot_NAME from group_NAME, for a format with blocks of `block` weights in `bytes` bytes. */
#define DOT_AVX512(name, block, bytes, bias, shape)                                                                                \
    static void dot_##name(const uint8_t *tiles, size_t stride, int n_tiles, int width, const struct dot_input *in, int n_rows,    \
                           float *const *out)                                                                                      \
    {                                                                                                                              \
        dot_avx512(tiles, stride, n_tiles, width, in, n_rows, out, TILE_ROWS *(bytes)*32 / (block), bias, shape, group_##name);    \
    }

/* Each sets the entries of one family of formats. */
void dot_small_avx512(struct kernels *k); /* blocks of 32, 64, 128 and IQ4_XS */
void dot_super_avx512(struct kernels *k); /* Q2_K .. Q6_K */
void dot_grid_avx512(struct kernels *k);  /* codebooks: IQ1, IQ2, IQ3 */
void dot_float_avx512(struct kernels *k); /* F32, F16, BF16 */

#endif
