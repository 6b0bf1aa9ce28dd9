/* The AVX2 step of the ladder, and the quantization of activations. */
#include "base/half.h"
#include "ops/vector.h"
#include "ops/x86/dot_avx2.h"

/* Magnitudes are compared as bit patterns, in which a NaN is the largest: it must not vanish. */
INLINE __m256i magnitude(__m256 v) { return _mm256_castps_si256(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), v)); }

INLINE float largest(__m256i v)
{
    __m128i m = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1));
    return bits_float((uint32_t)_mm_cvtsi128_si32(m));
}

static void quantize(const float *values, int width, int8_t *codes, float *scales, int32_t *sums)
{
    /* Packing works in halves of a register: it leaves columns 0-3, 8-11, 16-19, 24-27 and 4-7, 12-15, 20-23, 28-31. A8 order is
     * then four times four bytes, transposed. */
    const __m256i natural = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i a8 = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    for (int g = 0; g < width / 32; g++) {
        __m256 x[4];
        __m256i code[4], most = _mm256_setzero_si256();
        for (int i = 0; i < 4; i++) {
            x[i] = _mm256_loadu_ps(values + 32 * g + 8 * i);
            most = _mm256_max_epu32(most, magnitude(x[i]));
        }
        float amax = largest(most);
        bool empty = amax < 1e-30f;
        scales[g] = empty ? 0.0f : amax / 127.0f;
        __m256 inverse = _mm256_set1_ps(empty ? 0.0f : 127.0f / amax);
        for (int i = 0; i < 4; i++)
            code[i] = _mm256_cvtps_epi32(_mm256_mul_ps(x[i], inverse)); /* rounds to nearest even */
        __m256i all = _mm256_packs_epi16(_mm256_packs_epi32(code[0], code[1]), _mm256_packs_epi32(code[2], code[3]));
        all = _mm256_shuffle_epi8(_mm256_permutevar8x32_epi32(all, natural), a8);
        _mm256_storeu_si256((__m256i *)(codes + 32 * g), all);
        __m256i sum = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), all), _mm256_set1_epi16(1));
        sum = _mm256_hadd_epi32(sum, sum);
        sum = _mm256_hadd_epi32(sum, sum);
        sums[2 * g] = _mm256_extract_epi32(sum, 0);
        sums[2 * g + 1] = _mm256_extract_epi32(sum, 4);
    }
}

void kernels_avx2(struct kernels *k)
{
    dot_small_avx2(k);
    dot_super_avx2(k);
    dot_grid_avx2(k);
    dot_float_avx2(k);
    k->quantize = quantize;
    k->vector = &vector_kernels_avx2;
}
