/* The codebook formats. Entries of a codebook (8 weights, or 4 in IQ3) are looked up with ordinary loads, one after the other,
 * which is faster than gathering: on a Zen 5 the products of IQ2_XXS run at 6.7 GB/s against 4.3 with vpgatherdd, those of IQ3_XXS
 * at 5.8 against 4.4; older processors, and Intel's with the fix for downfall, gather slower still. A table holds no weights but
 * 4-bit numbers that stand for them, 32 bits an entry and two columns a byte, so that few steps bring them to where quant/tile.h
 * wants them.
 *
 * Signs come in by a lookup of four sign bits, and most formats turn number and sign into a biased code by a last lookup. */
#include "ops/x86/dot_avx2.h"

enum { IQ1_BIAS = 9, IQ2_BIAS = 43, IQ3XXS_BIAS = 31, IQ3S_BIAS = 15 }; /* what makes all codes positive */

static uint32_t lut_iq3xxs[256], lut_iq3s[512], lut_iq2xxs[256], lut_iq2xs[512], lut_iq2s[1024], lut_iq1[2048];

/* Indexes of `bits` (8 or 16) each, in words that stay in registers: through memory, bytes of what was just stored come slowly. */
struct indexes {
    uint64_t word[8];
    int bits;
};

INLINE uint64_t index_at(const struct indexes *x, int i)
{
    uint64_t word = x->word[i * x->bits / 64] >> i * x->bits % 64;
    return x->bits == 8 ? (uint8_t)word : (uint16_t)word;
}

INLINE struct indexes indexes_load(const uint8_t *p, int n)
{
    struct indexes x = { .bits = 8 };
    memcpy(x.word, p, (size_t)n);
    return x;
}

/* The same with more bits: `high` has them as they are in the indexes, 16 a vector. */
INLINE struct indexes indexes_join(const uint8_t *p, int n, const __m256i *high)
{
    struct indexes x = { .bits = 16 };
    for (int i = 0; i < n / 16; i++) {
        __m256i v = _mm256_or_si256(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(p + 16 * i))), high[i]);
        x.word[4 * i] = (uint64_t)_mm256_extract_epi64(v, 0);
        x.word[4 * i + 1] = (uint64_t)_mm256_extract_epi64(v, 1);
        x.word[4 * i + 2] = (uint64_t)_mm256_extract_epi64(v, 2);
        x.word[4 * i + 3] = (uint64_t)_mm256_extract_epi64(v, 3);
    }
    return x;
}

/* Entries of eight rows, whose indexes are `step` apart. */
INLINE __m256i entries_load(const uint32_t *lut, const struct indexes *x, int first, int step)
{
    __m128i four[2];
    for (int i = 0; i < 2; i++, first += 4 * step) {
        four[i] = _mm_cvtsi32_si128((int)lut[index_at(x, first)]);
        four[i] = _mm_insert_epi32(four[i], (int)lut[index_at(x, first + step)], 1);
        four[i] = _mm_insert_epi32(four[i], (int)lut[index_at(x, first + 2 * step)], 2);
        four[i] = _mm_insert_epi32(four[i], (int)lut[index_at(x, first + 3 * step)], 3);
    }
    return _mm256_set_m128i(four[1], four[0]);
}

/* Numbers of 16 columns of eight rows: byte 4r + q of planes[0] has columns 4q (low nibble) and 4q + 1, that of planes[1] the two
 * after them. pair[i] has the bytes q = 2i and 2i + 1 of both, those of planes[0] in its low 16 bits. */
INLINE void planes_join(const __m256i pair[2], __m256i planes[2])
{
    planes[0] = _mm256_blend_epi16(pair[0], _mm256_slli_epi32(pair[1], 16), 0xaa);
    planes[1] = _mm256_blend_epi16(_mm256_srli_epi32(pair[0], 16), pair[1], 0xaa);
}

/* Sixteen bits as 16-bit numbers: 0 or `value`. */
INLINE __m256i bits_load(const uint8_t *p, int value)
{
    const __m256i bit = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, -32768);
    short bits;
    memcpy(&bits, p, 2);
    __m256i set = _mm256_cmpeq_epi16(_mm256_and_si256(_mm256_set1_epi16(bits), bit), bit);
    return _mm256_and_si256(set, _mm256_set1_epi16((short)value));
}

/* Of half h, in the low four bits of each byte. */
INLINE __m256i half_signs(__m256i signs, int h) { return and_avx2(h ? _mm256_srli_epi16(signs, 4) : signs, 0x0f0f0f0f); }

/* Flips the bits `flip` of the numbers whose sign is set. signs: bit j of byte 4r + q is that of column 4q + j. */
INLINE void signs_add(__m256i signs, int flip, __m256i planes[2])
{
    const __m128i first = _mm_set1_epi32((int)((unsigned)flip * 0x11100100)); /* for no sign, the first, the second, both */
    for (int i = 0; i < 2; i++) {
        __m128i table = i ? _mm_shuffle_epi8(first, _mm_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3)) : first;
        planes[i] = _mm256_xor_si256(planes[i], _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), signs));
    }
}

/* sign7 with the eighth signs in their places (bits 11 and 15 of each 16-bit word), where the free bits were: the number of
 * negative weights of eight is even. */
INLINE __m256i sign7_complete(__m256i v)
{
    v = and_avx2(v, 0x77ff77ff);
    __m256i parity = _mm256_xor_si256(v, _mm256_srli_epi16(v, 8)); /* of bits 0..3 and of bits 4..7 */
    parity = _mm256_xor_si256(parity, _mm256_srli_epi16(parity, 2));
    parity = _mm256_xor_si256(parity, _mm256_srli_epi16(parity, 1));
    return _mm256_or_si256(v, _mm256_slli_epi16(and_avx2(parity, 0x00110011), 11));
}

/* s as 2s + 1, where s is the low four bits of each lane. */
INLINE __m256i odd(__m256i s) { return _mm256_or_si256(and_avx2(_mm256_slli_epi32(s, 1), 0x1e), _mm256_set1_epi32(1)); }

/* The scale in the free bits of sign7, bits 11, 15, 27, 31 of a lane. */
INLINE __m256 sign7_scale(__m256i v)
{
    v = and_avx2(_mm256_srli_epi32(v, 11), 0x00110011);
    v = _mm256_or_si256(v, _mm256_srli_epi32(v, 3));
    v = _mm256_or_si256(v, _mm256_srli_epi32(v, 14));
    return _mm256_cvtepi32_ps(odd(v));
}

INLINE __m256 halves_scaled(const uint8_t *p, float factor) { return _mm256_mul_ps(halves_load(p), _mm256_set1_ps(factor)); }

/* The last lookup, of numbers of three bits, sign included: bit 7 of each byte is clear, so that nothing need be masked off. */
INLINE void nibbles_lookup(const __m256i planes[2], __m128i levels, __m256i code[4])
{
    __m256i table = _mm256_broadcastsi128_si256(levels);
    for (int j = 0; j < 4; j++)
        code[j] = _mm256_shuffle_epi8(table, j % 2 ? _mm256_srli_epi16(planes[j / 2], 4) : planes[j / 2]);
}

/* ---- IQ3 ---- */

/* Numbers with signs of half a group, in codes of four bits. */
INLINE void iq3_codes(const uint32_t *lut, const struct indexes *x, __m256i signs, int flip, __m256i code[4])
{
    __m256i pair[2], planes[2];
    for (int i = 0; i < 2; i++)
        pair[i] = _mm256_or_si256(entries_load(lut, x, 2 * i, 4), _mm256_slli_epi32(entries_load(lut, x, 2 * i + 1, 4), 8));
    planes_join(pair, planes);
    signs_add(signs, flip, planes);
    for (int j = 0; j < 4; j++)
        code[j] = and_avx2(j % 2 ? _mm256_srli_epi16(planes[j / 2], 4) : planes[j / 2], 0x0f0f0f0f);
}

/* The magnitudes 2k + 1 are stored as 8 + k: flipping all four bits gives 7 - k, and twice either of them less 15 is the weight. */
INLINE void group_iq3_s(const uint8_t *strand, int n, int g, int y, struct group_avx2 *w)
{
    __m256i signs = load_avx2(strand + 1152 + 64 * g + 32 * y);
#pragma GCC unroll 2 /* what the compiler would not do: a sixth of the speed */
    for (int h = 0; h < 2; h++) {
        const uint8_t *ninth = strand + 1024 + 16 * g + 8 * h + 4 * y;
        const __m256i high[2] = { bits_load(ninth, 0x100), bits_load(ninth + 2, 0x100) };
        const struct indexes x = indexes_join(strand + 128 * g + 64 * h + 32 * y, 32, high);
        iq3_codes(lut_iq3s, &x, half_signs(signs, h), 15, w->code + 4 * h);
    }
    w->d[0] = _mm256_mul_ps(halves_load(strand + 1728 + 16 * y), _mm256_cvtepi32_ps(odd(nibs_load(strand + 1664 + 8 * g, y))));
}
DOT_AVX2(iq3_s, 256, 110, 15, IQ3S_BIAS, 2, PLAIN)

/* All magnitudes are even, so their halves are looked up. */
INLINE void group_iq3_xxs(const uint8_t *strand, int n, int g, int y, struct group_avx2 *w)
{
    enum { B = IQ3XXS_BIAS };
    const __m128i levels = _mm_setr_epi8(B + 2, B + 6, B + 10, B + 14, B + 18, B + 22, B + 26, B + 31, /* half of 4, 12 .. 52, 62 */
                                         B - 2, B - 6, B - 10, B - 14, B - 18, B - 22, B - 26, B - 31);
    __m256i sign7 = load_avx2(strand + 1024 + 64 * g + 32 * y), signs = sign7_complete(sign7);
#pragma GCC unroll 2 /* what the compiler would not do: a sixth of the speed */
    for (int h = 0; h < 2; h++) {
        const struct indexes x = indexes_load(strand + 128 * g + 64 * h + 32 * y, 32);
        iq3_codes(lut_iq3xxs, &x, half_signs(signs, h), 8, w->code + 4 * h);
        for (int j = 0; j < 4; j++)
            w->code[4 * h + j] = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(levels), w->code[4 * h + j]);
    }
    w->d[0] = _mm256_mul_ps(halves_scaled(strand + 1536 + 16 * y, 0.25f), sign7_scale(sign7));
}
DOT_AVX2(iq3_xxs, 256, 98, 2 * IQ3XXS_BIAS, 2 * IQ3XXS_BIAS, 2, PLAIN)

/* ---- IQ2 ---- */

INLINE void iq2_codes(const uint32_t *lut, const struct indexes *x, __m256i signs, __m256i code[4])
{
    enum { B = IQ2_BIAS };
    const __m128i levels = _mm_setr_epi8(B + 8, B + 25, B + 43, 0, B - 8, B - 25, B - 43, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m256i pair[2] = { entries_load(lut, x, 0, 2), entries_load(lut, x, 1, 2) };
    __m256i planes[2];
    planes_join(pair, planes);
    signs_add(signs, 4, planes);
    nibbles_lookup(planes, levels, code);
}

/* A byte with two 4-bit sub-scales s, each meaning 2s + 1. */
INLINE void odd_scales(const uint8_t *p, __m256i scale[2])
{
    __m256i both = bytes_load(p);
    scale[0] = twice(odd(both));
    scale[1] = twice(odd(_mm256_srli_epi32(both, 4)));
}

INLINE void group_iq2_xxs(const uint8_t *strand, int n, int g, int y, struct group_avx2 *w)
{
    __m256i sign7 = load_avx2(strand + 512 + 64 * g + 32 * y), signs = sign7_complete(sign7);
    for (int h = 0; h < 2; h++) {
        const struct indexes x = indexes_load(strand + 64 * g + 32 * h + 16 * y, 16);
        iq2_codes(lut_iq2xxs, &x, half_signs(signs, h), w->code + 4 * h);
    }
    w->d[0] = _mm256_mul_ps(halves_scaled(strand + 1024 + 16 * y, 0.125f), sign7_scale(sign7));
}
DOT_AVX2(iq2_xxs, 256, 66, 2 * IQ2_BIAS, IQ2_BIAS, 1, PLAIN)

INLINE void group_iq2_xs(const uint8_t *strand, int n, int g, int y, struct group_avx2 *w)
{
    __m256i sign7 = load_avx2(strand + 512 + 64 * g + 32 * y), signs = sign7_complete(sign7);
    for (int h = 0; h < 2; h++) {
        const __m256i ninth = and_avx2(_mm256_srli_epi16(sign7, h ? 7 : 3), 0x01000100);
        const struct indexes x = indexes_join(strand + 64 * g + 32 * h + 16 * y, 16, &ninth);
        iq2_codes(lut_iq2xs, &x, half_signs(signs, h), w->code + 4 * h);
    }
    odd_scales(strand + 1024 + 16 * g + 8 * y, w->scale);
    w->d[0] = halves_scaled(strand + 1152 + 16 * y, 0.125f);
}
DOT_AVX2(iq2_xs, 256, 74, 2 * IQ2_BIAS, IQ2_BIAS, 1, HALVES)

/* The bits of hi8b as high bits of indexes. */
INLINE __m256i hi8b_load(const uint8_t *p, int bits)
{
    __m256i high = bits_load(p, 0x100);
    for (int b = 1; b < bits; b++)
        high = _mm256_or_si256(high, bits_load(p + 4 * b, 0x100 << b));
    return high;
}

INLINE void group_iq2_s(const uint8_t *strand, int n, int g, int y, struct group_avx2 *w)
{
    __m256i signs = load_avx2(strand + 640 + 64 * g + 32 * y);
    for (int h = 0; h < 2; h++) {
        const __m256i high = hi8b_load(strand + 512 + 16 * g + 8 * h + 2 * y, 2);
        const struct indexes x = indexes_join(strand + 64 * g + 32 * h + 16 * y, 16, &high);
        iq2_codes(lut_iq2s, &x, half_signs(signs, h), w->code + 4 * h);
    }
    odd_scales(strand + 1152 + 16 * g + 8 * y, w->scale);
    w->d[0] = halves_scaled(strand + 1280 + 16 * y, 0.125f);
}
DOT_AVX2(iq2_s, 256, 82, 2 * IQ2_BIAS, IQ2_BIAS, 1, HALVES)

/* ---- IQ1: codes are eighths, and what others call the sign is that of one eighth that is added to all weights of an entry ---- */

/* negative: 16-bit words, all ones or zero. */
INLINE void iq1_codes(const uint8_t *idx8, const uint8_t *hi8b, __m256i negative, __m256i code[4])
{
    enum { B = IQ1_BIAS };
    const __m128i levels = _mm_setr_epi8(B - 7, B + 1, B + 9, 0, B - 9, B - 1, B + 7, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m256i high = hi8b_load(hi8b, 3);
    const struct indexes x = indexes_join(idx8, 16, &high);
    const __m256i pair[2] = { entries_load(lut_iq1, &x, 0, 2), entries_load(lut_iq1, &x, 1, 2) };
    __m256i planes[2];
    planes_join(pair, planes);
    negative = and_avx2(negative, 0x44444444);
    for (int i = 0; i < 2; i++)
        planes[i] = _mm256_or_si256(planes[i], negative);
    nibbles_lookup(planes, levels, code);
}

INLINE void group_iq1_s(const uint8_t *strand, int n, int g, int y, struct group_avx2 *w)
{
    __m256i scale = nibs_load(strand + 704 + 8 * g, y), negative = _mm256_srai_epi32(_mm256_slli_epi32(scale, 28), 31);
#pragma GCC unroll 2 /* what the compiler would not do: a sixth of the speed */
    for (int h = 0; h < 2; h++)
        iq1_codes(strand + 64 * g + 32 * h + 16 * y, strand + 512 + 24 * g + 12 * h + 2 * y, negative, w->code + 4 * h);
    w->d[0] = _mm256_mul_ps(halves_scaled(strand + 768 + 16 * y, 0.125f), _mm256_cvtepi32_ps(odd(and_avx2(scale, 7))));
}
DOT_AVX2(iq1_s, 256, 50, 2 * IQ1_BIAS, IQ1_BIAS, 1, PLAIN)

INLINE void group_iq1_m(const uint8_t *strand, int n, int g, int y, struct group_avx2 *w)
{
    const __m256i row_bit = _mm256_setr_epi32(0x10001, 0x20002, 0x40004, 0x80008, 0x100010, 0x200020, 0x400040, 0x800080);
#pragma GCC unroll 2 /* what the compiler would not do: a sixth of the speed */
    for (int h = 0; h < 2; h++) {
        iq1_codes(strand + 64 * g + 32 * h + 16 * y, strand + 512 + 24 * g + 12 * h + 2 * y,
                  bits_load(strand + 704 + 8 * g + 4 * h + 2 * y, -1), w->code + 4 * h);
        w->scale[h] = _mm256_set1_epi16(1);
        for (int b = 0; b < 3; b++) {
            __m256i bits = _mm256_set1_epi16(strand[768 + 12 * g + 6 * h + 2 * b + y]);
            __m256i set = _mm256_cmpeq_epi16(_mm256_and_si256(bits, row_bit), row_bit);
            w->scale[h] = _mm256_or_si256(w->scale[h], _mm256_and_si256(set, _mm256_set1_epi16((short)(2 << b))));
        }
    }
    w->d[0] = halves_scaled(strand + 864 + 16 * y, 0.125f);
}
DOT_AVX2(iq1_m, 256, 56, 2 * IQ1_BIAS, IQ1_BIAS, 1, HALVES)

/* ---- Tables ---- */

static int number_iq1(int value) { return value + 1; }              /* -1, 0, 1 */
static int number_iq2(int magnitude) { return magnitude / 16; }     /* 8, 25, 43 */
static int number_iq3xxs(int magnitude) { return magnitude / 8; }   /* 4, 12 .. 52, 62 */
static int number_iq3s(int magnitude) { return 8 + magnitude / 2; } /* 1, 3 .. 15 */

/* grid: entries of `n` (4 or 8) weights, IQ1's signed ones. */
static void lut_fill(const void *grid, int entries, int n, bool is_signed, int (*number)(int), uint32_t *lut)
{
    memset(lut, 0, (size_t)entries * sizeof *lut);
    for (int i = 0; i < entries * n; i++) {
        int value = is_signed ? ((const int8_t *)grid)[i] : ((const uint8_t *)grid)[i], j = i % 4, q = i % n / 4;
        lut[i / n] |= (uint32_t)number(value) << (4 * (j % 2) + 16 * (j / 2) + 8 * q);
    }
}

void dot_grid_avx2(struct kernels *k)
{
    lut_fill(quant_grid_iq3xxs, 256, 4, false, number_iq3xxs, lut_iq3xxs);
    lut_fill(quant_grid_iq3s, 512, 4, false, number_iq3s, lut_iq3s);
    lut_fill(quant_grid_iq2xxs, 256, 8, false, number_iq2, lut_iq2xxs);
    lut_fill(quant_grid_iq2xs, 512, 8, false, number_iq2, lut_iq2xs);
    lut_fill(quant_grid_iq2s, 1024, 8, false, number_iq2, lut_iq2s);
    lut_fill(quant_grid_iq1s, 2048, 8, true, number_iq1, lut_iq1);
    k->dot[QUANT_IQ3_S] = dot_iq3_s;
    k->dot[QUANT_IQ3_XXS] = dot_iq3_xxs;
    k->dot[QUANT_IQ2_XXS] = dot_iq2_xxs;
    k->dot[QUANT_IQ2_XS] = dot_iq2_xs;
    k->dot[QUANT_IQ2_S] = dot_iq2_s;
    k->dot[QUANT_IQ1_S] = dot_iq1_s;
    k->dot[QUANT_IQ1_M] = dot_iq1_m;
}
