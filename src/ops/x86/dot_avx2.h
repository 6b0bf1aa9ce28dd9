/* dot_avx2.h - inside ops/x86 only: the one loop of all quantized products with AVX2.
 *
 * A format adds a function that turns group g of a strand into codes and fp32 scales, for eight of the tile's 16 rows: eight
 * vectors (vector m of quant/tile.h: one 32-bit lane a row) stay in registers, while up to four rows of activations pass by, in the
 * order of rule 2. vpmaddubsw multiplies unsigned by signed bytes and adds two products in 16 bits, where they saturate. So codes
 * are either stored with a bias, as small unsigned numbers, and the activations' sums take the bias off again; or, where they need
 * all eight bits, their signs go to the activations. A small code's products may be added in 16 bits several times before they are
 * widened. All of it is exact. */
#ifndef OPS_X86_DOT_AVX2_H
#define OPS_X86_DOT_AVX2_H

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

struct group_avx2 {
    __m256i code[8];
    __m256 d[2], dmin;        /* d[1]: SPLIT only */
    __m256i scale[2], min[2]; /* int16: each row's twice, in both halves of its lane */
};

/* Rows 8y .. 8y+7 of group g; the strand has n groups. */
typedef void group_fn_avx2(const uint8_t *strand, int n, int g, int y, struct group_avx2 *w);

struct format_avx2 {
    int group_bytes; /* of a tile */
    int top;         /* the largest code, bias included, or SIGNED_CODES */
    int bias, unit;  /* weight = (code * unit - bias) * d */
    enum shape shape;
    group_fn_avx2 *decode;
};
enum { SIGNED_CODES = -1 }; /* -128 .. 127, no bias */

/* ---- Loading fields of quant/tile.h: of eight rows, `p` being the place of the first ---- */

INLINE __m256i load_avx2(const void *p) { return _mm256_loadu_si256(p); }
INLINE __m256i and_avx2(__m256i v, int mask) { return _mm256_and_si256(v, _mm256_set1_epi32(mask)); }
INLINE __m256 halves_load(const uint8_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }      /* f16 */
INLINE __m256i bytes_load(const uint8_t *p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); } /* s8, unsigned */

/* nibs and two of rows 8y .. 8y+7: `p` is the section. Only the low four or two bits of a lane count, the caller clears the rest.
 */
INLINE __m256i nibs_load(const uint8_t *p, int y) { return _mm256_srli_epi32(bytes_load(p), 4 * y); }
INLINE __m256i two_load(const uint8_t *p, int y)
{
    int bits;
    memcpy(&bits, p, 4);
    const __m256i shift = _mm256_add_epi32(_mm256_setr_epi32(0, 8, 16, 24, 2, 10, 18, 26), _mm256_set1_epi32(4 * y));
    return _mm256_srlv_epi32(_mm256_set1_epi32(bits), shift);
}

/* A number in the low 16 bits of each lane, put in both halves. */
INLINE __m256i twice(__m256i v) { return _mm256_or_si256(_mm256_slli_epi32(v, 16), and_avx2(v, 0xffff)); }

/* nib4 as codes 0..15 */
INLINE void nib4_codes(const uint8_t *p, __m256i code[8])
{
    const __m256i low = _mm256_set1_epi8(15);
    for (int j = 0; j < 4; j++) {
        __m256i raw = load_avx2(p + 64 * j);
        code[j] = _mm256_and_si256(raw, low);
        code[j + 4] = _mm256_and_si256(_mm256_srli_epi16(raw, 4), low);
    }
}

/* Sets bit `at` (of clear bits) in the codes whose bit of a bit1 section is set. */
INLINE void bit1_put(const uint8_t *p, int at, __m256i code[8])
{
    __m256i plane = load_avx2(p);
    for (int m = 0; m < 8; m++) {
        __m256i moved = m < at ? _mm256_slli_epi16(plane, at - m) : _mm256_srli_epi16(plane, m - at);
        code[m] = _mm256_or_si256(code[m], _mm256_and_si256(moved, _mm256_set1_epi8((char)(1 << at))));
    }
}

/* bit2 as codes 0..3 */
INLINE void bit2_codes(const uint8_t *p, __m256i code[8])
{
    const __m256i low = _mm256_set1_epi8(3);
    for (int h = 0; h < 2; h++) {
        __m256i raw = load_avx2(p + 64 * h);
        for (int j = 0; j < 4; j++)
            code[4 * h + j] = _mm256_and_si256(_mm256_srli_epi16(raw, 2 * j), low);
    }
}

/* ---- The products ---- */

INLINE __m256i activations(const void *four)
{
    int v;
    memcpy(&v, four, 4);
    return _mm256_set1_epi32(v);
}

/* Sums of 4*n products a row, each multiplied by the row's int16 `factor`. */
INLINE __m256i codes_dot(const __m256i *code, int n, int top, __m256i factor, const int8_t *x)
{
    const int together = top == SIGNED_CODES ? 1 : 32767 / (2 * 127 * top); /* sums of two products that fit 16 bits */
    __m256i sum = _mm256_setzero_si256(), some = sum;
    for (int m = 0; m < n; m++) {
        __m256i four = activations(x + 4 * m), two;
        if (top == SIGNED_CODES)
            two = _mm256_maddubs_epi16(_mm256_abs_epi8(code[m]), _mm256_sign_epi8(four, code[m]));
        else
            two = _mm256_maddubs_epi16(code[m], four);
        some = m % together ? _mm256_add_epi16(some, two) : two;
        if (m % together == together - 1 || m == n - 1) {
            __m256i wide = _mm256_madd_epi16(some, factor);
            sum = m < together ? wide : _mm256_add_epi32(sum, wide);
        }
    }
    return sum;
}

INLINE __m256 group_add(__m256 acc, const struct format_avx2 *f, const struct group_avx2 *w, const int8_t *x, float x_scale,
                        const int32_t *x_sum)
{
    const __m256i unit = _mm256_set1_epi16((short)f->unit);
    const __m256 scale = _mm256_set1_ps(x_scale);
    __m256i sum;
    if (f->shape == SPLIT) {
        for (int h = 0; h < 2; h++) {
            sum = _mm256_sub_epi32(codes_dot(w->code + 4 * h, 4, f->top, unit, x + 16 * h), _mm256_set1_epi32(f->bias * x_sum[h]));
            acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(w->d[h], scale), acc);
        }
        return acc;
    }
    /* the two sums of a group fit 16 bits, and vpmaddwd multiplies and adds two numbers for each half */
    const __m256i x_sums = _mm256_set1_epi32((int)((uint32_t)x_sum[0] & 0xffff) | (int)((uint32_t)x_sum[1] << 16));
    if (f->shape == HALVES || f->shape == HALVES_MIN) {
        sum = codes_dot(w->code, 4, f->top, w->scale[0], x);
        sum = _mm256_add_epi32(sum, codes_dot(w->code + 4, 4, f->top, w->scale[1], x + 16));
        if (f->bias) {
            __m256i scales = _mm256_blend_epi16(w->scale[0], w->scale[1], 0xaa);
            sum = _mm256_sub_epi32(sum, _mm256_madd_epi16(_mm256_mullo_epi16(scales, _mm256_set1_epi16((short)f->bias)), x_sums));
        }
    } else {
        sum = codes_dot(w->code, 8, f->top, unit, x);
        if (f->bias)
            sum = _mm256_sub_epi32(sum, _mm256_set1_epi32(f->bias * (x_sum[0] + x_sum[1])));
    }
    acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(w->d[0], scale), acc);
    if (f->shape == MIN)
        acc = _mm256_fnmadd_ps(_mm256_set1_ps((float)(x_sum[0] + x_sum[1])), _mm256_mul_ps(w->dmin, scale), acc);
    if (f->shape == HALVES_MIN) {
        __m256i min = _mm256_madd_epi16(_mm256_blend_epi16(w->min[0], w->min[1], 0xaa), x_sums);
        acc = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(min), _mm256_mul_ps(w->dmin, scale), acc);
    }
    return acc;
}

/* Rows 8y .. 8y+7 of group g of a strand, which is group k of the row. */
INLINE void half_tile_add(__m256 (*acc)[2], const struct format_avx2 *f, const uint8_t *strand, int n, int g, int y,
                          const struct dot_input *in, int n_rows, int k)
{
    struct group_avx2 w;
    f->decode(strand, n, g, y, &w);
    for (int t = 0; t < n_rows; t++)
        acc[t][y] = group_add(acc[t][y], f, &w, in[t].codes + 32 * k, in[t].scales[k], in[t].sums + 2 * k);
}

/* One tile with n_rows (1..4, known when compiled) rows of activations. */
INLINE void tile_dot_avx2(const uint8_t *tile, int width, const struct dot_input *in, int n_rows, float *const *out, int at,
                          const struct format_avx2 *f)
{
    enum { AHEAD = 8192 }; /* bytes */
    __m256 total[4][2], acc[4][2];
    for (int t = 0; t < n_rows; t++)
        total[t][0] = total[t][1] = _mm256_set1_ps(-0.0f); /* adds to the first strand without a trace, also to -0 */
    for (int first = 0; first < width / 32; first += 8) {
        int n = width / 32 - first < 8 ? width / 32 - first : 8;
        for (int t = 0; t < n_rows; t++)
            acc[t][0] = acc[t][1] = _mm256_setzero_ps();
        for (int g = 0; g < n; g++) {
            for (int line = 0; line < f->group_bytes; line += 64)
                _mm_prefetch((const char *)(tile + g * f->group_bytes + line + AHEAD), _MM_HINT_T0);
            half_tile_add(acc, f, tile, n, g, 0, in, n_rows, first + g);
            /* Or the compiler keeps the activations for the second half, and has not the registers for it: a quarter of the speed.
             */
            __asm__ volatile("" ::: "memory");
            half_tile_add(acc, f, tile, n, g, 1, in, n_rows, first + g);
        }
        for (int t = 0; t < n_rows; t++)
            for (int y = 0; y < 2; y++)
                total[t][y] = _mm256_add_ps(total[t][y], acc[t][y]);
        tile += n * f->group_bytes;
    }
    for (int t = 0; t < n_rows; t++)
        for (int y = 0; y < 2; y++)
            _mm256_storeu_ps(out[t] + at + 8 * y, total[t][y]);
}

INLINE void dot_avx2(const uint8_t *tiles, size_t stride, int n_tiles, int width, const struct dot_input *in, int n_rows,
                     float *const *out, const struct format_avx2 *f)
{
    for (int i = 0; i < n_tiles; i++, tiles += stride)
        for (int t = 0; t < n_rows; t += 4)
            switch (n_rows - t) {
            case 1:
                tile_dot_avx2(tiles, width, in + t, 1, out + t, TILE_ROWS * i, f);
                break;
            case 2:
                tile_dot_avx2(tiles, width, in + t, 2, out + t, TILE_ROWS * i, f);
                break;
            case 3:
                tile_dot_avx2(tiles, width, in + t, 3, out + t, TILE_ROWS * i, f);
                break;
            default:
                tile_dot_avx2(tiles, width, in + t, 4, out + t, TILE_ROWS * i, f);
                break;
            }
}

/* Defines dot_NAME from group_NAME and the fields of struct format_avx2; `bytes` are those of a block of one row. */
#define DOT_AVX2(name, block, bytes, top, bias, unit, shape)                                                                       \
    static void dot_##name(const uint8_t *tiles, size_t stride, int n_tiles, int width, const struct dot_input *in, int n_rows,    \
                           float *const *out)                                                                                      \
    {                                                                                                                              \
        const struct format_avx2 f = { TILE_ROWS * (bytes)*32 / (block), top, bias, unit, shape, group_##name };                   \
        dot_avx2(tiles, stride, n_tiles, width, in, n_rows, out, &f);                                                              \
    }

/* Each sets the entries of one family of formats. */
void dot_small_avx2(struct kernels *k); /* blocks of 32, 64, 128 and IQ4_XS */
void dot_super_avx2(struct kernels *k); /* Q2_K .. Q6_K */
void dot_grid_avx2(struct kernels *k);  /* codebooks: IQ1, IQ2, IQ3 */
void dot_float_avx2(struct kernels *k); /* F32, F16, BF16 */

#endif
