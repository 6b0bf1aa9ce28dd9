/* The K formats: blocks of 256 with integer sub-scales. Byte positions follow from quant/tile.h with n = 8 groups. */
#include "ops/x86/dot_avx2.h"

INLINE void group_q2_k(const uint8_t *strand, int n, int g, int y, struct group_avx2 *w)
{
    bit2_codes(strand + 128 * g + 32 * y, w->code);
    for (int h = 0; h < 2; h++) {
        __m256i both = bytes_load(strand + 1024 + 32 * g + 16 * h + 8 * y);
        w->scale[h] = twice(and_avx2(both, 15));
        w->min[h] = twice(_mm256_srli_epi32(both, 4));
    }
    w->d[0] = halves_load(strand + 1280 + 16 * y);
    w->dmin = halves_load(strand + 1312 + 16 * y);
}
DOT_AVX2(q2_k, 256, 84, 3, 0, 1, HALVES_MIN)

INLINE void group_q3_k(const uint8_t *strand, int n, int g, int y, struct group_avx2 *w)
{
    bit2_codes(strand + 128 * g + 32 * y, w->code);
    bit1_put(strand + 1024 + 64 * g + 32 * y, 2, w->code);
    for (int h = 0; h < 2; h++) {
        __m256i low = and_avx2(nibs_load(strand + 1536 + 16 * g + 8 * h, y), 15),
                high = and_avx2(two_load(strand + 1664 + 8 * g + 4 * h, y), 3);
        w->scale[h] = twice(_mm256_sub_epi32(_mm256_or_si256(low, _mm256_slli_epi32(high, 4)), _mm256_set1_epi32(32)));
    }
    w->d[0] = halves_load(strand + 1728 + 16 * y);
}
DOT_AVX2(q3_k, 256, 110, 7, 4, 1, HALVES)

/* The scales of Q4_K and Q5_K: six bits each for scale and minimum. */
INLINE void scale_and_min(const uint8_t *p, int g, int y, struct group_avx2 *w)
{
    __m256i scale = and_avx2(nibs_load(p + 8 * g, y), 15), min = and_avx2(nibs_load(p + 64 + 8 * g, y), 15),
            high = nibs_load(p + 128 + 8 * g, y);
    scale = _mm256_or_si256(scale, and_avx2(_mm256_slli_epi32(high, 4), 0x30));
    min = _mm256_or_si256(min, and_avx2(_mm256_slli_epi32(high, 2), 0x30));
    w->d[0] = _mm256_mul_ps(halves_load(p + 192 + 16 * y), _mm256_cvtepi32_ps(scale));
    w->dmin = _mm256_mul_ps(halves_load(p + 224 + 16 * y), _mm256_cvtepi32_ps(min));
}

INLINE void group_q4_k(const uint8_t *strand, int n, int g, int y, struct group_avx2 *w)
{
    nib4_codes(strand + 256 * g + 32 * y, w->code);
    scale_and_min(strand + 2048, g, y, w);
}
DOT_AVX2(q4_k, 256, 144, 15, 0, 1, MIN)

INLINE void group_q5_k(const uint8_t *strand, int n, int g, int y, struct group_avx2 *w)
{
    nib4_codes(strand + 256 * g + 32 * y, w->code);
    bit1_put(strand + 2048 + 64 * g + 32 * y, 4, w->code);
    scale_and_min(strand + 2560, g, y, w);
}
DOT_AVX2(q5_k, 256, 176, 31, 0, 1, MIN)

INLINE void group_q6_k(const uint8_t *strand, int n, int g, int y, struct group_avx2 *w)
{
    nib4_codes(strand + 256 * g + 32 * y, w->code);
    for (int h = 0; h < 2; h++) {
        __m256i raw = load_avx2(strand + 2048 + 128 * g + 64 * h + 32 * y);
        __m256i at4[4] = { _mm256_slli_epi16(raw, 4), _mm256_slli_epi16(raw, 2), raw, _mm256_srli_epi16(raw, 2) };
        for (int j = 0; j < 4; j++)
            w->code[4 * h + j] = _mm256_or_si256(w->code[4 * h + j], _mm256_and_si256(at4[j], _mm256_set1_epi8(0x30)));
        w->scale[h] = twice(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(strand + 3072 + 32 * g + 16 * h + 8 * y))));
    }
    w->d[0] = halves_load(strand + 3328 + 16 * y);
}
DOT_AVX2(q6_k, 256, 210, 63, 32, 1, HALVES)

void dot_super_avx2(struct kernels *k)
{
    k->dot[QUANT_Q2_K] = dot_q2_k;
    k->dot[QUANT_Q3_K] = dot_q3_k;
    k->dot[QUANT_Q4_K] = dot_q4_k;
    k->dot[QUANT_Q5_K] = dot_q5_k;
    k->dot[QUANT_Q6_K] = dot_q6_k;
}
