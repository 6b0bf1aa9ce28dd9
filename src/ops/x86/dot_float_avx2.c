/* Float weights (rule 3): a strand is one chain of fused multiply-adds, each waiting for the one before it, so several tiles run
 * side by side where the rows of activations are few: eight chains keep the multipliers busy. */
#include "ops/x86/dot_avx2.h"

/* Rows 8y .. 8y+7 of column k. */
INLINE __m256 column_f32(const uint8_t *tile, int k, int y)
{
    return _mm256_loadu_ps((const float *)(tile + 64 * (size_t)k + 32 * y));
}
INLINE __m256 column_f16(const uint8_t *tile, int k, int y) { return halves_load(tile + 32 * (size_t)k + 16 * y); }
INLINE __m256 column_bf16(const uint8_t *tile, int k, int y)
{
    __m128i raw = _mm_loadu_si128((const __m128i *)(tile + 32 * (size_t)k + 16 * y));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}
typedef __m256 column_fn(const uint8_t *tile, int k, int y);

/* n_tiles and n_rows (1..4) are known when compiled. */
INLINE void float_tiles(const uint8_t *tiles, size_t stride, int n_tiles, int width, const struct dot_input *in, int n_rows,
                        float *const *out, int at, column_fn *column)
{
    __m256 total[4][4][2], acc[4][4][2];
    for (int i = 0; i < n_tiles; i++)
        for (int t = 0; t < n_rows; t++)
            total[i][t][0] = total[i][t][1] = _mm256_set1_ps(-0.0f); /* adds to the first strand without a trace */
    for (int first = 0; first < width; first += TILE_STRAND) {
        int end = width - first < TILE_STRAND ? width : first + TILE_STRAND;
        for (int i = 0; i < n_tiles; i++)
            for (int t = 0; t < n_rows; t++)
                acc[i][t][0] = acc[i][t][1] = _mm256_setzero_ps();
        for (int k = first; k < end; k++)
            for (int i = 0; i < n_tiles; i++)
                for (int y = 0; y < 2; y++) {
                    __m256 w = column(tiles + (size_t)i * stride, k, y);
                    for (int t = 0; t < n_rows; t++)
                        acc[i][t][y] = _mm256_fmadd_ps(w, _mm256_set1_ps(in[t].values[k]), acc[i][t][y]);
                }
        for (int i = 0; i < n_tiles; i++)
            for (int t = 0; t < n_rows; t++)
                for (int y = 0; y < 2; y++)
                    total[i][t][y] = _mm256_add_ps(total[i][t][y], acc[i][t][y]);
    }
    for (int i = 0; i < n_tiles; i++)
        for (int t = 0; t < n_rows; t++)
            for (int y = 0; y < 2; y++)
                _mm256_storeu_ps(out[t] + at + TILE_ROWS * i + 8 * y, total[i][t][y]);
}

INLINE void dot_float(const uint8_t *tiles, size_t stride, int n_tiles, int width, const struct dot_input *in, int n_rows,
                      float *const *out, column_fn *column)
{
    for (int t = 0; t < n_rows; t += 4) {
        int rows = n_rows - t < 4 ? n_rows - t : 4, most = rows > 2 ? 1 : 4 / rows;
        for (int i = 0, step; i < n_tiles; i += step) {
            const uint8_t *tile = tiles + (size_t)i * stride;
            step = n_tiles - i >= most ? most : 1;
#define CASE(s, r)                                                                                                                 \
    if (step == s && rows == r)                                                                                                    \
        float_tiles(tile, stride, s, width, in + t, r, out + t, TILE_ROWS * i, column);
            CASE(4, 1) CASE(1, 1) CASE(2, 2) CASE(1, 2) CASE(1, 3) CASE(1, 4)
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

void dot_float_avx2(struct kernels *k)
{
    k->dot[QUANT_F32] = dot_f32;
    k->dot[QUANT_F16] = dot_f16;
    k->dot[QUANT_BF16] = dot_bf16;
}
