/* The AVX-512 step of the ladder, and the quantization of activations. */
#include "base/half.h"
#include "ops/vector.h"
#include "ops/x86/dot_avx512.h"

/* Sixteen codes in A8 order: four times four bytes, transposed. */
INLINE void half_store(__m512i codes, int8_t *out, int32_t *sum)
{
    const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm_storeu_si128((__m128i *)out, _mm_shuffle_epi8(_mm512_cvtepi32_epi8(codes), order));
    *sum = _mm512_reduce_add_epi32(codes);
}

static void quantize(const float *values, int width, int8_t *codes, float *scales, int32_t *sums)
{
    for (int g = 0; g < width / 32; g++) {
        __m512 low = _mm512_loadu_ps(values + 32 * g), high = _mm512_loadu_ps(values + 32 * g + 16);
        /* As bit patterns, in which a NaN is the largest magnitude: it must not vanish. */
        float amax = bits_float(_mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_castps_si512(_mm512_abs_ps(low)), _mm512_castps_si512(_mm512_abs_ps(high)))));
        bool empty = amax < 1e-30f;
        scales[g] = empty ? 0.0f : amax / 127.0f;
        __m512 inverse = _mm512_set1_ps(empty ? 0.0f : 127.0f / amax);
        half_store(_mm512_cvtps_epi32(_mm512_mul_ps(low, inverse)), codes + 32 * g, sums + 2 * g); /* rounds to nearest even */
        half_store(_mm512_cvtps_epi32(_mm512_mul_ps(high, inverse)), codes + 32 * g + 16, sums + 2 * g + 1);
    }
}

void kernels_avx512(struct kernels *k)
{
    dot_small_avx512(k);
    dot_super_avx512(k);
    dot_grid_avx512(k);
    dot_float_avx512(k);
    k->quantize = quantize;
    k->vector = &vector_kernels_avx512;
}
