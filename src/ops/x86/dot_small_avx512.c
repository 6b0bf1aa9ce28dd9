/* Formats of small blocks, and IQ4_XS, which is IQ4_NL with packed scales. */
#include "ops/x86/dot_avx512.h"

enum { FP4_BIAS = 12, IQ4NL_BIAS = 127 }; /* the largest negative code: what makes all codes unsigned */

/* The 16 levels plus bias, four times: vpermb looks at six bits, and only the lowest four shall count. */
static uint8_t levels_fp4[64], levels_iq4nl[64];

static void levels_fill(const int8_t *code, int bias, uint8_t *levels)
{
    for (int i = 0; i < 64; i++)
        levels[i] = (uint8_t)(code[i % 16] + bias);
}

INLINE void nib4_lookup(const uint8_t *p, const uint8_t *levels, __m512i code[8])
{
    __m512i table = load_avx512(levels);
    for (int j = 0; j < 4; j++) {
        __m512i raw = load_avx512(p + 64 * j);
        code[j] = _mm512_permutexvar_epi8(raw, table);
        code[j + 4] = _mm512_permutexvar_epi8(_mm512_srli_epi16(raw, 4), table);
    }
}

INLINE void group_q8_0(const uint8_t *strand, int n, int g, struct group_avx512 *w)
{
    for (int m = 0; m < 8; m++)
        w->code[m] = _mm512_xor_si512(load_avx512(strand + 512 * g + 64 * m), _mm512_set1_epi8((char)0x80));
    w->d[0] = halves_load(strand + 512 * n + 32 * g);
}
DOT_AVX512(q8_0, 32, 34, 128, PLAIN)

INLINE void group_q4_0(const uint8_t *strand, int n, int g, struct group_avx512 *w)
{
    nib4_codes(strand + 256 * g, w->code);
    w->d[0] = halves_load(strand + 256 * n + 32 * g);
}
DOT_AVX512(q4_0, 32, 18, 8, PLAIN)

/* weight = d*code + m */
INLINE void scale_and_offset(const uint8_t *d, int n, int g, struct group_avx512 *w)
{
    w->d[0] = halves_load(d + 32 * g);
    w->dmin = _mm512_xor_ps(halves_load(d + 32 * n + 32 * g), _mm512_set1_ps(-0.0f));
}

INLINE void group_q4_1(const uint8_t *strand, int n, int g, struct group_avx512 *w)
{
    nib4_codes(strand + 256 * g, w->code);
    scale_and_offset(strand + 256 * n, n, g, w);
}
DOT_AVX512(q4_1, 32, 20, 0, MIN)

INLINE void group_q5_0(const uint8_t *strand, int n, int g, struct group_avx512 *w)
{
    nib4_codes(strand + 256 * g, w->code);
    bit1_add(strand + 256 * n + 64 * g, 16, w->code);
    w->d[0] = halves_load(strand + 320 * n + 32 * g);
}
DOT_AVX512(q5_0, 32, 22, 16, PLAIN)

INLINE void group_q5_1(const uint8_t *strand, int n, int g, struct group_avx512 *w)
{
    nib4_codes(strand + 256 * g, w->code);
    bit1_add(strand + 256 * n + 64 * g, 16, w->code);
    scale_and_offset(strand + 320 * n, n, g, w);
}
DOT_AVX512(q5_1, 32, 24, 0, MIN)

INLINE void group_q2_0(const uint8_t *strand, int n, int g, struct group_avx512 *w)
{
    bit2_codes(strand + 128 * g, w->code);
    w->d[0] = halves_load(strand + 128 * n + 32 * (g / 2));
}
DOT_AVX512(q2_0, 64, 18, 1, PLAIN)

INLINE void group_q1_0(const uint8_t *strand, int n, int g, struct group_avx512 *w)
{
    for (int m = 0; m < 8; m++)
        w->code[m] = _mm512_setzero_si512();
    bit1_add(strand + 64 * g, 2, w->code);
    w->d[0] = halves_load(strand + 64 * n + 32 * (g / 4));
}
DOT_AVX512(q1_0, 128, 18, 1, PLAIN)

INLINE void group_iq4_nl(const uint8_t *strand, int n, int g, struct group_avx512 *w)
{
    nib4_lookup(strand + 256 * g, levels_iq4nl, w->code);
    w->d[0] = halves_load(strand + 256 * n + 32 * g);
}
DOT_AVX512(iq4_nl, 32, 18, IQ4NL_BIAS, PLAIN)

INLINE void group_iq4_xs(const uint8_t *strand, int n, int g, struct group_avx512 *w)
{
    __m512i low = and_avx512(nibs_load(strand + 2048 + 8 * g), 15), high = and_avx512(two_load(strand + 2112 + 4 * g), 3);
    __m512i scale = _mm512_sub_epi32(_mm512_or_si512(low, _mm512_slli_epi32(high, 4)), _mm512_set1_epi32(32));
    nib4_lookup(strand + 256 * g, levels_iq4nl, w->code);
    w->d[0] = _mm512_mul_ps(halves_load(strand + 2144), _mm512_cvtepi32_ps(scale));
}
DOT_AVX512(iq4_xs, 256, 136, IQ4NL_BIAS, PLAIN)

INLINE void group_mxfp4(const uint8_t *strand, int n, int g, struct group_avx512 *w)
{
    nib4_lookup(strand + 256 * g, levels_fp4, w->code);
    /* 2^(e - 128): the exponent field is e - 1, and the two smallest are denormals */
    __m512i e = bytes_load(strand + 256 * n + 16 * g), bits = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
    bits = _mm512_mask_sllv_epi32(bits, _mm512_cmplt_epu32_mask(e, _mm512_set1_epi32(2)), _mm512_set1_epi32(0x00200000), e);
    w->d[0] = _mm512_castsi512_ps(bits);
}
DOT_AVX512(mxfp4, 32, 17, FP4_BIAS, PLAIN)

/* Half of an unsigned E4M3. As the exponent and mantissa of a binary16 it is short of 2^8; 0x7f is zero, bit 7 is ignored. */
INLINE __m512 ue4m3_half(const uint8_t *p)
{
    __m128i bytes = _mm_loadu_si128((const __m128i *)p);
    __m256i half = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 7), _mm256_set1_epi16(0x3f80));
    __mmask16 number = _mm_cmpneq_epi8_mask(bytes, _mm_set1_epi8(0x7f));
    return _mm512_maskz_mul_ps(number, _mm512_cvtph_ps(half), _mm512_set1_ps(0x1p7f));
}

INLINE void group_nvfp4(const uint8_t *strand, int n, int g, struct group_avx512 *w)
{
    nib4_lookup(strand + 256 * g, levels_fp4, w->code);
    for (int h = 0; h < 2; h++)
        w->d[h] = ue4m3_half(strand + 256 * n + 32 * g + 16 * h);
}
DOT_AVX512(nvfp4, 64, 36, FP4_BIAS, SPLIT)

void dot_small_avx512(struct kernels *k)
{
    levels_fill(quant_fp4, FP4_BIAS, levels_fp4);
    levels_fill(quant_iq4nl, IQ4NL_BIAS, levels_iq4nl);
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
