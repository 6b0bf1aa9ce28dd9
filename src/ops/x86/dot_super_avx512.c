/* The K formats: blocks of 256 with integer sub-scales. Byte positions follow from quant/tile.h with n = 8 groups. */
#include "ops/x86/dot_avx512.h"

INLINE void group_q2_k(const uint8_t *strand, int n, int g, struct group_avx512 *w)
{
    bit2_codes(strand + 128 * g, w->code);
    for (int h = 0; h < 2; h++) {
        __m512i both = bytes_load(strand + 1024 + 32 * g + 16 * h);
        w->scale[h] = and_avx512(both, 15);
        w->min[h] = _mm512_srli_epi32(both, 4);
    }
    w->d[0] = halves_load(strand + 1280);
    w->dmin = halves_load(strand + 1312);
}
DOT_AVX512(q2_k, 256, 84, 0, HALVES_MIN)

INLINE void group_q3_k(const uint8_t *strand, int n, int g, struct group_avx512 *w)
{
    bit2_codes(strand + 128 * g, w->code);
    bit1_add(strand + 1024 + 64 * g, 4, w->code);
    for (int h = 0; h < 2; h++) {
        __m512i low = and_avx512(nibs_load(strand + 1536 + 16 * g + 8 * h), 15),
                high = and_avx512(two_load(strand + 1664 + 8 * g + 4 * h), 3);
        w->scale[h] = _mm512_sub_epi32(_mm512_or_si512(low, _mm512_slli_epi32(high, 4)), _mm512_set1_epi32(32));
    }
    w->d[0] = halves_load(strand + 1728);
}
DOT_AVX512(q3_k, 256, 110, 4, HALVES)

/* The scales of Q4_K and Q5_K: six bits each for scale and minimum. */
INLINE void scale_and_min(const uint8_t *p, int g, struct group_avx512 *w)
{
    __m512i scale = and_avx512(nibs_load(p + 8 * g), 15), min = and_avx512(nibs_load(p + 64 + 8 * g), 15),
            high = nibs_load(p + 128 + 8 * g);
    scale = _mm512_or_si512(scale, and_avx512(_mm512_slli_epi32(high, 4), 0x30));
    min = _mm512_or_si512(min, and_avx512(_mm512_slli_epi32(high, 2), 0x30));
    w->d[0] = _mm512_mul_ps(halves_load(p + 192), _mm512_cvtepi32_ps(scale));
    w->dmin = _mm512_mul_ps(halves_load(p + 224), _mm512_cvtepi32_ps(min));
}

INLINE void group_q4_k(const uint8_t *strand, int n, int g, struct group_avx512 *w)
{
    nib4_codes(strand + 256 * g, w->code);
    scale_and_min(strand + 2048, g, w);
}
DOT_AVX512(q4_k, 256, 144, 0, MIN)

INLINE void group_q5_k(const uint8_t *strand, int n, int g, struct group_avx512 *w)
{
    nib4_codes(strand + 256 * g, w->code);
    bit1_add(strand + 2048 + 64 * g, 16, w->code);
    scale_and_min(strand + 2560, g, w);
}
DOT_AVX512(q5_k, 256, 176, 0, MIN)

INLINE void group_q6_k(const uint8_t *strand, int n, int g, struct group_avx512 *w)
{
    nib4_codes(strand + 256 * g, w->code);
    for (int h = 0; h < 2; h++) {
        __m512i raw = load_avx512(strand + 2048 + 128 * g + 64 * h),
                at4[4] = { _mm512_slli_epi16(raw, 4), _mm512_slli_epi16(raw, 2), raw, _mm512_srli_epi16(raw, 2) };
        for (int j = 0; j < 4; j++)
            w->code[4 * h + j] = _mm512_or_si512(w->code[4 * h + j], _mm512_and_si512(at4[j], _mm512_set1_epi8(0x30)));
        w->scale[h] = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(strand + 3072 + 32 * g + 16 * h)));
    }
    w->d[0] = halves_load(strand + 3328);
}
DOT_AVX512(q6_k, 256, 210, 32, HALVES)

void dot_super_avx512(struct kernels *k)
{
    k->dot[QUANT_Q2_K] = dot_q2_k;
    k->dot[QUANT_Q3_K] = dot_q3_k;
    k->dot[QUANT_Q4_K] = dot_q4_k;
    k->dot[QUANT_Q5_K] = dot_q5_k;
    k->dot[QUANT_Q6_K] = dot_q6_k;
}
