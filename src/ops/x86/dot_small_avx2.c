/* Formats of small blocks, and IQ4_XS, which is IQ4_NL with packed scales. */
#include "ops/x86/dot_avx2.h"

enum { FP4_BIAS = 12 }; /* the largest negative code */

/* `bias` makes all codes unsigned, or is 0. */
INLINE void nib4_lookup(const uint8_t *p, const int8_t *levels, int bias, __m256i code[8])
{
    __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)levels));
    table = _mm256_add_epi8(table, _mm256_set1_epi8((char)bias));
    nib4_codes(p, code);
    for (int m = 0; m < 8; m++)
        code[m] = _mm256_shuffle_epi8(table, code[m]);
}

INLINE void group_q8_0(const uint8_t *strand, int n, int g, int y, struct group_avx2 *w)
{
    for (int m = 0; m < 8; m++)
        w->code[m] = load_avx2(strand + 512 * g + 64 * m + 32 * y);
    w->d[0] = halves_load(strand + 512 * n + 32 * g + 16 * y);
}
DOT_AVX2(q8_0, 32, 34, SIGNED_CODES, 0, 1, PLAIN)

INLINE void group_q4_0(const uint8_t *strand, int n, int g, int y, struct group_avx2 *w)
{
    nib4_codes(strand + 256 * g + 32 * y, w->code);
    w->d[0] = halves_load(strand + 256 * n + 32 * g + 16 * y);
}
DOT_AVX2(q4_0, 32, 18, 15, 8, 1, PLAIN)

/* weight = d*code + m */
INLINE void scale_and_offset(const uint8_t *d, int n, int g, int y, struct group_avx2 *w)
{
    w->d[0] = halves_load(d + 32 * g + 16 * y);
    w->dmin = _mm256_xor_ps(halves_load(d + 32 * n + 32 * g + 16 * y), _mm256_set1_ps(-0.0f));
}

INLINE void group_q4_1(const uint8_t *strand, int n, int g, int y, struct group_avx2 *w)
{
    nib4_codes(strand + 256 * g + 32 * y, w->code);
    scale_and_offset(strand + 256 * n, n, g, y, w);
}
DOT_AVX2(q4_1, 32, 20, 15, 0, 1, MIN)

INLINE void group_q5_0(const uint8_t *strand, int n, int g, int y, struct group_avx2 *w)
{
    nib4_codes(strand + 256 * g + 32 * y, w->code);
    bit1_put(strand + 256 * n + 64 * g + 32 * y, 4, w->code);
    w->d[0] = halves_load(strand + 320 * n + 32 * g + 16 * y);
}
DOT_AVX2(q5_0, 32, 22, 31, 16, 1, PLAIN)

INLINE void group_q5_1(const uint8_t *strand, int n, int g, int y, struct group_avx2 *w)
{
    nib4_codes(strand + 256 * g + 32 * y, w->code);
    bit1_put(strand + 256 * n + 64 * g + 32 * y, 4, w->code);
    scale_and_offset(strand + 320 * n, n, g, y, w);
}
DOT_AVX2(q5_1, 32, 24, 31, 0, 1, MIN)

INLINE void group_q2_0(const uint8_t *strand, int n, int g, int y, struct group_avx2 *w)
{
    bit2_codes(strand + 128 * g + 32 * y, w->code);
    w->d[0] = halves_load(strand + 128 * n + 32 * (g / 2) + 16 * y);
}
DOT_AVX2(q2_0, 64, 18, 3, 1, 1, PLAIN)

INLINE void group_q1_0(const uint8_t *strand, int n, int g, int y, struct group_avx2 *w)
{
    for (int m = 0; m < 8; m++)
        w->code[m] = _mm256_setzero_si256();
    bit1_put(strand + 64 * g + 32 * y, 0, w->code);
    w->d[0] = halves_load(strand + 64 * n + 32 * (g / 4) + 16 * y);
}
DOT_AVX2(q1_0, 128, 18, 1, 1, 2, PLAIN)

INLINE void group_iq4_nl(const uint8_t *strand, int n, int g, int y, struct group_avx2 *w)
{
    nib4_lookup(strand + 256 * g + 32 * y, quant_iq4nl, 0, w->code);
    w->d[0] = halves_load(strand + 256 * n + 32 * g + 16 * y);
}
DOT_AVX2(iq4_nl, 32, 18, SIGNED_CODES, 0, 1, PLAIN)

INLINE void group_iq4_xs(const uint8_t *strand, int n, int g, int y, struct group_avx2 *w)
{
    __m256i low = and_avx2(nibs_load(strand + 2048 + 8 * g, y), 15), high = and_avx2(two_load(strand + 2112 + 4 * g, y), 3);
    __m256i scale = _mm256_sub_epi32(_mm256_or_si256(low, _mm256_slli_epi32(high, 4)), _mm256_set1_epi32(32));
    nib4_lookup(strand + 256 * g + 32 * y, quant_iq4nl, 0, w->code);
    w->d[0] = _mm256_mul_ps(halves_load(strand + 2144 + 16 * y), _mm256_cvtepi32_ps(scale));
}
DOT_AVX2(iq4_xs, 256, 136, SIGNED_CODES, 0, 1, PLAIN)

INLINE void group_mxfp4(const uint8_t *strand, int n, int g, int y, struct group_avx2 *w)
{
    nib4_lookup(strand + 256 * g + 32 * y, quant_fp4, FP4_BIAS, w->code);
    /* 2^(e - 128): the exponent field is e - 1, and the two smallest are denormals */
    __m256i e = bytes_load(strand + 256 * n + 16 * g + 8 * y),
            bits = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
    __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
    w->d[0] = _mm256_castsi256_ps(_mm256_blendv_epi8(bits, small, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e)));
}
DOT_AVX2(mxfp4, 32, 17, 2 * FP4_BIAS, FP4_BIAS, 1, PLAIN)

/* Half of an unsigned E4M3. As the exponent and mantissa of a binary16 it is short of 2^8; 0x7f is zero, bit 7 is ignored. */
INLINE __m256 ue4m3_half(const uint8_t *p)
{
    __m128i bytes = _mm_loadl_epi64((const __m128i *)p);
    __m128i half = _mm_and_si128(_mm_slli_epi16(_mm_cvtepu8_epi16(bytes), 7), _mm_set1_epi16(0x3f80));
    __m256i nothing = _mm256_cvtepi8_epi32(_mm_cmpeq_epi8(bytes, _mm_set1_epi8(0x7f)));
    return _mm256_andnot_ps(_mm256_castsi256_ps(nothing), _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(0x1p7f)));
}

INLINE void group_nvfp4(const uint8_t *strand, int n, int g, int y, struct group_avx2 *w)
{
    nib4_lookup(strand + 256 * g + 32 * y, quant_fp4, FP4_BIAS, w->code);
    for (int h = 0; h < 2; h++)
        w->d[h] = ue4m3_half(strand + 256 * n + 32 * g + 16 * h + 8 * y);
}
DOT_AVX2(nvfp4, 64, 36, 2 * FP4_BIAS, FP4_BIAS, 1, SPLIT)

void dot_small_avx2(struct kernels *k)
{
    k->dot[QUANT_Q8_0] = dot_q8_0;
    k->dot[QUANT_Q4_0] = dot_q4_0;
    k->dot[QUANT_Q4_1] = dot_q4_1;
    k->dot[QUANT_Q5_0] = dot_q5_0;
    k->dot[QUANT_Q5_1] = dot_q5_1;
    k->dot[QUANT_Q2_0] = dot_q2_0;
    k->dot[QUANT_Q1_0] = dot_q1_0;
    k->dot[QUANT_IQ4_NL] = dot_iq4_nl;
    k->dot[QUANT_IQ4_XS] = dot_iq4_xs;
    k->dot[QUANT_MXFP4] = dot_mxfp4;
    k->dot[QUANT_NVFP4] = dot_nvfp4;
}
