/* The codebook formats. A codebook is looked up with two-source permutes, 64 entries of 16 bits or 128 of 8 bits at a time, so its
 * entries are kept as small as they can be: not weights but the numbers of their magnitudes in the codebook's alphabet. The sign
 * of a weight joins the number of its magnitude, and one last lookup gives the code with its bias.
 *
 *   IQ3: an entry is 4 weights, two planes of bytes: one nibble a weight, columns j = 0, 1 in the first plane, 2, 3 in the second
 *   IQ2: an entry is 8 weights of 2 bits, which is a pair of neighbouring bytes of a bit2 vector */
#include "ops/x86/dot_avx512.h"

enum { IQ2_BIAS = 43, IQ3XXS_BIAS = 62, IQ3S_BIAS = 15 }; /* the largest magnitude */

static struct {
    uint8_t iq3xxs[2][256], iq3s[2][512];
    uint16_t iq2xxs[256], iq2xs[512], iq2s[1024];
    uint8_t codes_iq3xxs[64], codes_iq3s[64]; /* by number (3 bits) and sign (bit 3) */
    uint8_t codes_iq2[64];                    /* by number (2 bits) and sign (bit 2); higher index bits do not count */
    uint8_t sign_nibbles[2][64];              /* four signs, columns j = 0..3, as the bits 3 and 7 that belong into each plane */
    float odd[16];                            /* 2s + 1 */
} lut __attribute__((aligned(64)));

/* ---- IQ3 ---- */

/* Entries of a byte plane. The low seven bits of an index select in a pair of registers, high[] holds the others as masks. */
INLINE __m512i lookup_bytes(const uint8_t *plane, int entries, __m512i index, const __mmask64 *high)
{
    __m512i part[4];
    for (int i = 0; i < entries / 128; i++)
        part[i] = _mm512_permutex2var_epi8(load_avx512(plane + 128 * i), index, load_avx512(plane + 128 * i + 64));
    for (int i = 0; i < entries / 256; i++)
        part[i] = _mm512_mask_mov_epi8(part[2 * i], high[0], part[2 * i + 1]);
    return entries == 512 ? _mm512_mask_mov_epi8(part[0], high[1], part[1]) : part[0];
}

/* hi4b may be NULL: eight-bit indexes. */
INLINE void iq3_codes(const uint8_t *idx4, const uint8_t *hi4b, const uint8_t *plane, int entries, __m512i signs, const uint8_t *codes, __m512i code[8])
{
    const __m512i table = load_avx512(codes);
    for (int h = 0; h < 2; h++) {
        __m512i index = load_avx512(idx4 + 64 * h);
        __mmask64 high[2] = { _mm512_movepi8_mask(index), 0 };
        if (hi4b)
            memcpy(&high[1], hi4b + 8 * h, 8);
        for (int p = 0; p < 2; p++) {
            __m512i sign = _mm512_permutexvar_epi8(h ? _mm512_srli_epi16(signs, 4) : signs, load_avx512(lut.sign_nibbles[p]));
            __m512i pair = _mm512_or_si512(lookup_bytes(plane + p * entries, entries, index, high), sign);
            code[4 * h + 2 * p] = _mm512_permutexvar_epi8(pair, table);
            code[4 * h + 2 * p + 1] = _mm512_permutexvar_epi8(_mm512_srli_epi16(pair, 4), table);
        }
    }
}

/* sign7 with the eighth signs in their places (bits 11 and 15 of each 16-bit word), where the free bits were: the number of negative
 * weights of eight is even. */
INLINE __m512i sign7_complete(__m512i v)
{
    v = and_avx512(v, 0x77ff77ff);
    __m512i parity = _mm512_xor_si512(v, _mm512_srli_epi16(v, 8)); /* of bits 0..3 and of bits 4..7 */
    parity = _mm512_xor_si512(parity, _mm512_srli_epi16(parity, 2));
    parity = _mm512_xor_si512(parity, _mm512_srli_epi16(parity, 1));
    return _mm512_or_si512(v, _mm512_slli_epi16(and_avx512(parity, 0x00110011), 11));
}

/* The 4-bit number in the free bits of sign7, bits 11, 15, 27, 31 of a lane, as the fp32 2s + 1. */
INLINE __m512 sign7_scale(__m512i v)
{
    v = and_avx512(_mm512_srli_epi32(v, 11), 0x00110011);
    v = _mm512_or_si512(v, _mm512_srli_epi32(v, 3));
    v = _mm512_or_si512(v, _mm512_srli_epi32(v, 14));
    return _mm512_permutexvar_ps(v, _mm512_loadu_ps(lut.odd)); /* looks at four bits only */
}

INLINE void group_iq3_s(const uint8_t *strand, int n, int g, struct group_avx512 *w)
{
    iq3_codes(strand + 128 * g, strand + 1024 + 16 * g, lut.iq3s[0], 512, load_avx512(strand + 1152 + 64 * g), lut.codes_iq3s, w->code);
    w->d[0] = _mm512_mul_ps(halves_load(strand + 1728), _mm512_permutexvar_ps(nibs_load(strand + 1664 + 8 * g), _mm512_loadu_ps(lut.odd)));
}
DOT_AVX512(iq3_s, 256, 110, IQ3S_BIAS, PLAIN)

INLINE void group_iq3_xxs(const uint8_t *strand, int n, int g, struct group_avx512 *w)
{
    __m512i sign7 = load_avx512(strand + 1024 + 64 * g);
    iq3_codes(strand + 128 * g, NULL, lut.iq3xxs[0], 256, sign7_complete(sign7), lut.codes_iq3xxs, w->code);
    w->d[0] = _mm512_mul_ps(_mm512_mul_ps(halves_load(strand + 1536), _mm512_set1_ps(0.25f)), sign7_scale(sign7));
}
DOT_AVX512(iq3_xxs, 256, 98, IQ3XXS_BIAS, PLAIN)

/* ---- IQ2 ---- */

/* 16-bit entries; six bits of an index select in a pair of registers. */
INLINE __m512i lookup_words(const uint16_t *table, int entries, __m512i index, const __mmask32 *high)
{
    __m512i part[16];
    for (int i = 0; i < entries / 64; i++)
        part[i] = _mm512_permutex2var_epi16(load_avx512(table + 64 * i), index, load_avx512(table + 64 * i + 32));
    for (int bit = 0, count = entries / 128; count; bit++, count /= 2)
        for (int i = 0; i < count; i++)
            part[i] = _mm512_mask_mov_epi16(part[2 * i], high[bit], part[2 * i + 1]);
    return part[0];
}

/* ninth, tenth: masks of the extra index bits of each half, where there are any. */
INLINE void iq2_codes(const uint8_t *idx8, const __mmask32 *ninth, const __mmask32 *tenth, const uint16_t *table, int entries, __m512i signs, __m512i code[8])
{
    const __m512i codes = load_avx512(lut.codes_iq2), number = _mm512_set1_epi8(3);
    for (int h = 0; h < 2; h++) {
        __m512i index = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(idx8 + 32 * h)));
        __mmask32 high[4] = { _mm512_test_epi16_mask(index, _mm512_set1_epi16(64)), _mm512_test_epi16_mask(index, _mm512_set1_epi16(128)),
                              ninth ? ninth[h] : 0, tenth ? tenth[h] : 0 };
        __m512i entry = lookup_words(table, entries, index, high);
        for (int j = 0; j < 4; j++) {
            int m = 4 * h + j;
            __m512i sign = m < 2 ? _mm512_slli_epi16(signs, 2 - m) : _mm512_srli_epi16(signs, m - 2); /* bit 2 is what counts */
            __m512i both = _mm512_ternarylogic_epi32(number, _mm512_srli_epi16(entry, 2 * j), sign, 0xca); /* number ? entry : sign */
            code[m] = _mm512_permutexvar_epi8(both, codes);
        }
    }
}

/* A byte with two 4-bit sub-scales s, each meaning 2s + 1. */
INLINE void odd_scales(const uint8_t *p, __m512i scale[2])
{
    __m512i both = bytes_load(p), one = _mm512_set1_epi32(1);
    scale[0] = _mm512_or_si512(and_avx512(_mm512_slli_epi32(both, 1), 0x1e), one);
    scale[1] = _mm512_or_si512(and_avx512(_mm512_srli_epi32(both, 3), 0x1e), one);
}

INLINE void group_iq2_xxs(const uint8_t *strand, int n, int g, struct group_avx512 *w)
{
    __m512i sign7 = load_avx512(strand + 512 + 64 * g);
    iq2_codes(strand + 64 * g, NULL, NULL, lut.iq2xxs, 256, sign7_complete(sign7), w->code);
    w->d[0] = _mm512_mul_ps(_mm512_mul_ps(halves_load(strand + 1024), _mm512_set1_ps(0.125f)), sign7_scale(sign7));
}
DOT_AVX512(iq2_xxs, 256, 66, IQ2_BIAS, PLAIN)

INLINE void group_iq2_xs(const uint8_t *strand, int n, int g, struct group_avx512 *w)
{
    __m512i sign7 = load_avx512(strand + 512 + 64 * g);
    __mmask32 ninth[2] = { _mm512_test_epi16_mask(sign7, _mm512_set1_epi16(1 << 11)), _mm512_test_epi16_mask(sign7, _mm512_set1_epi16((short)(1 << 15))) };
    iq2_codes(strand + 64 * g, ninth, NULL, lut.iq2xs, 512, sign7_complete(sign7), w->code);
    odd_scales(strand + 1024 + 16 * g, w->scale);
    w->d[0] = _mm512_mul_ps(halves_load(strand + 1152), _mm512_set1_ps(0.125f));
}
DOT_AVX512(iq2_xs, 256, 74, IQ2_BIAS, HALVES)

INLINE void group_iq2_s(const uint8_t *strand, int n, int g, struct group_avx512 *w)
{
    uint32_t hi8b[4];
    memcpy(hi8b, strand + 512 + 16 * g, 16);
    __mmask32 ninth[2] = { hi8b[0], hi8b[2] }, tenth[2] = { hi8b[1], hi8b[3] };
    iq2_codes(strand + 64 * g, ninth, tenth, lut.iq2s, 1024, load_avx512(strand + 640 + 64 * g), w->code);
    odd_scales(strand + 1152 + 16 * g, w->scale);
    w->d[0] = _mm512_mul_ps(halves_load(strand + 1280), _mm512_set1_ps(0.125f));
}
DOT_AVX512(iq2_s, 256, 82, IQ2_BIAS, HALVES)

/* ---- Tables ---- */

static void planes_fill(const uint8_t (*grid)[4], int entries, int (*number)(int magnitude), uint8_t *plane)
{
    for (int i = 0; i < entries; i++)
        for (int p = 0; p < 2; p++)
            plane[p * entries + i] = (uint8_t)(number(grid[i][2 * p]) | number(grid[i][2 * p + 1]) << 4);
}

static void words_fill(const uint8_t (*grid)[8], int entries, uint16_t *words)
{
    for (int i = 0; i < entries; i++)
        for (int k = 0; k < 8; k++)
            words[i] = (uint16_t)(words[i] | grid[i][k] / 16 << 2 * k); /* 8, 25, 43 are 0, 1, 2 */
}

static int number_iq3xxs(int magnitude) { return magnitude / 8; } /* 4, 12 .. 52, 62 */
static int number_iq3s(int magnitude) { return magnitude / 2; }   /* 1, 3 .. 15 */

static void lut_fill(void)
{
    static const uint8_t magnitudes_iq3xxs[8] = { 4, 12, 20, 28, 36, 44, 52, 62 }, magnitudes_iq2[4] = { 8, 25, 43, 0 };
    memset(&lut, 0, sizeof lut);
    planes_fill(quant_grid_iq3xxs, 256, number_iq3xxs, lut.iq3xxs[0]);
    planes_fill(quant_grid_iq3s, 512, number_iq3s, lut.iq3s[0]);
    words_fill(quant_grid_iq2xxs, 256, lut.iq2xxs);
    words_fill(quant_grid_iq2xs, 512, lut.iq2xs);
    words_fill(quant_grid_iq2s, 1024, lut.iq2s);
    for (int i = 0; i < 64; i++) {
        int xxs = magnitudes_iq3xxs[i & 7], s = 2 * (i & 7) + 1, iq2 = magnitudes_iq2[i & 3];
        lut.codes_iq3xxs[i] = (uint8_t)(IQ3XXS_BIAS + (i & 8 ? -xxs : xxs));
        lut.codes_iq3s[i] = (uint8_t)(IQ3S_BIAS + (i & 8 ? -s : s));
        lut.codes_iq2[i] = (uint8_t)(IQ2_BIAS + (i & 4 ? -iq2 : iq2));
        for (int p = 0; p < 2; p++)
            lut.sign_nibbles[p][i] = (uint8_t)((i >> 2 * p & 1) << 3 | (i >> (2 * p + 1) & 1) << 7);
    }
    for (int i = 0; i < 16; i++)
        lut.odd[i] = (float)(2 * i + 1);
}

void dot_grid_avx512(struct kernels *k)
{
    lut_fill();
    k->dot[QUANT_IQ3_S] = dot_iq3_s;
    k->dot[QUANT_IQ3_XXS] = dot_iq3_xxs;
    k->dot[QUANT_IQ2_XXS] = dot_iq2_xxs;
    k->dot[QUANT_IQ2_XS] = dot_iq2_xs;
    k->dot[QUANT_IQ2_S] = dot_iq2_s;
}
