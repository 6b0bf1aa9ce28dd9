/* Float weights (rule 3): a strand is one chain of fused multiply-adds, each waiting for the one before it, so four tiles run side
 * by side to keep the multipliers busy. */
#include "ops/x86/dot_avx512.h"

INLINE __m512 column_f32(const uint8_t *tile, int k) { return _mm512_loadu_ps(tile + 64 * (size_t)k); }
INLINE __m512 column_f16(const uint8_t *tile, int k) { return halves_load(tile + 32 * (size_t)k); }
INLINE __m512 column_bf16(const uint8_t *tile, int k)
{
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(tile + 32 * (size_t)k))), 16));
}

/* n_tiles (1 or 4) and n_rows (1..4) are known when compiled. */
INLINE void float_tiles(const uint8_t *tiles, size_t stride, int n_tiles, int width, const struct dot_input *in, int n_rows,
                        float *const *out, int at, __m512 (*column)(const uint8_t *, int))
{
    __m512 total[4][4], acc[4][4];
    for (int i = 0; i < n_tiles; i++)
        for (int t = 0; t < n_rows; t++)
            total[i][t] = _mm512_set1_ps(-0.0f); /* adds to the first strand without a trace */
    for (int first = 0; first < width; first += TILE_STRAND) {
        int end = width - first < TILE_STRAND ? width : first + TILE_STRAND;
        for (int i = 0; i < n_tiles; i++)
            for (int t = 0; t < n_rows; t++)
                acc[i][t] = _mm512_setzero_ps();
        for (int k = first; k < end; k++)
            for (int i = 0; i < n_tiles; i++) {
                __m512 w = column(tiles + (size_t)i * stride, k);
                for (int t = 0; t < n_rows; t++)
                    acc[i][t] = _mm512_fmadd_ps(w, _mm512_set1_ps(in[t].values[k]), acc[i][t]);
            }
        for (int i = 0; i < n_tiles; i++)
            for (int t = 0; t < n_rows; t++)
                total[i][t] = _mm512_add_ps(total[i][t], acc[i][t]);
    }
    for (int i = 0; i < n_tiles; i++)
        for (int t = 0; t < n_rows; t++)
            _mm512_storeu_ps(out[t] + at + TILE_ROWS * i, total[i][t]);
}

INLINE void dot_float(const uint8_t *tiles, size_t stride, int n_tiles, int width, const struct dot_input *in, int n_rows,
                      float *const *out, __m512 (*column)(const uint8_t *, int))
{
    for (int i = 0, step; i < n_tiles; i += step, tiles += (size_t)step * stride) {
        step = n_tiles - i >= 4 ? 4 : 1;
        for (int t = 0; t < n_rows; t += 4) {
            int rows = n_rows - t < 4 ? n_rows - t : 4;
#define CASE(s, r)                                                                                                                 \
    if (step == s && rows == r)                                                                                                    \
        float_tiles(tiles, stride, s, width, in + t, r, out + t, TILE_ROWS * i, column);
            CASE(1, 1) CASE(1, 2) CASE(1, 3) CASE(1, 4) CASE(4, 1) CASE(4, 2) CASE(4, 3) CASE(4, 4)
#undef CASE
        }
    }
}

#define DOT_FLOAT(name)                                                                                                            \
    static void dot_##name(const uint8_t *tiles, size_t stride, int n_tiles, int width, const struct dot_input *in, int n_rows,    \
                           float *const *out)                                                                                      \
    {                                                                                                                              \
        dot_float(tiles, stride, n_tiles, width, in, n_rows, out, column_##name);                                                  \
    }
DOT_FLOAT(f32)
DOT_FLOAT(f16)
DOT_FLOAT(bf16)

void dot_float_avx512(struct kernels *k)
{
    k->dot[QUANT_F32] = dot_f32;
    k->dot[QUANT_F16] = dot_f16;
    k->dot[QUANT_BF16] = dot_bf16;
}
