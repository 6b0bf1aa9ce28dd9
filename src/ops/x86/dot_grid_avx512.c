/* The codebook formats. A codebook is kept in planes of bytes, which a two-source permute looks up 128 entries at a time: not
 * weights, but the numbers of their magnitudes in the codebook's alphabet, so that several fit in a byte.
 *
 *   IQ3        an entry is 4 weights, numbers of 3 bits, low ones first: columns 0 and 1 in plane 0, columns 3 and 2 in plane 1
 *   IQ2, IQ1   an entry is 8 weights, numbers of 2 bits, low ones first: columns 0..3 in plane 0, columns 4..7 in plane 1
 *
 * Then, for each column j of four, the bits of the number and the weight's sign bit, each in whatever place of the byte it happens
 * to have, are the index of a last lookup that gives the code with its bias (vpermb looks at the low six bits; the table repeats
 * itself for those that do not count). So nearly nothing is shifted, and shifts are what a processor has few of. */
#include "ops/x86/dot_avx512.h"

enum { IQ1_BIAS = 9, IQ2_BIAS = 43, IQ3XXS_BIAS = 62, IQ3S_BIAS = 15 }; /* the largest negative code */

static struct {
    uint8_t iq3xxs[2][256], iq3s[2][512], iq2xxs[2][256], iq2xs[2][512], iq2s[2][1024], iq1[2][2048];
    uint8_t codes_iq3xxs[4][64], codes_iq3s[4][64], codes_iq2[4][64], codes_iq1[4][64]; /* [column j][bits of number and sign] */
    float odd[16];                                                                      /* 2s + 1 */
} lut __attribute__((aligned(64)));

/* Where column j finds its number in the byte of an entry (IQ2, j = 3: of the byte shifted by 6), and its sign in bit1's nibble of
 * signs (j = 0: shifted by 3). */
static const uint8_t number_mask_iq3[4] = { 0x07, 0x38, 0x38, 0x07 }, number_mask_iq2[4] = { 0x03, 0x0c, 0x30, 0x03 };
static const uint8_t sign_bit[4] = { 3, 1, 2, 3 };

/* Entries of one plane. The low seven bits of an index select in a pair of registers, high[] holds the others as masks. */
INLINE __m512i plane_lookup(const uint8_t *plane, int entries, __m512i index, const __mmask64 *high)
{
    __m512i part[16];
    for (int i = 0; i < entries / 128; i++)
        part[i] = _mm512_permutex2var_epi8(load_avx512(plane + 128 * i), index, load_avx512(plane + 128 * i + 64));
    for (int bit = 0, count = entries / 256; count; bit++, count /= 2)
        for (int i = 0; i < count; i++)
            part[i] = _mm512_mask_mov_epi8(part[2 * i], high[bit], part[2 * i + 1]);
    return part[0];
}

INLINE __m512i column_codes(__m512i entry, int number_mask, __m512i signs, int j, const uint8_t (*codes)[64])
{
    const __m512i number = _mm512_set1_epi8((char)number_mask);
    __m512i index =
        _mm512_ternarylogic_epi32(number, entry, j ? signs : _mm512_slli_epi16(signs, 3), 0xca); /* number ? entry : signs */
    return _mm512_permutexvar_epi8(index, load_avx512(codes[j]));
}

/* sign7 with the eighth signs in their places (bits 11 and 15 of each 16-bit word), where the free bits were: the number of
 * negative weights of eight is even. */
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

INLINE __m512 halves_scaled(const uint8_t *p, float factor) { return _mm512_mul_ps(halves_load(p), _mm512_set1_ps(factor)); }

/* ---- IQ3 ---- */

/* hi4b may be NULL: eight-bit indexes. */
INLINE void iq3_codes(const uint8_t *idx4, const uint8_t *hi4b, const uint8_t *planes, int entries, __m512i signs,
                      const uint8_t (*codes)[64], __m512i code[8])
{
    for (int h = 0; h < 2; h++) {
        __m512i index = load_avx512(idx4 + 64 * h), half_signs = h ? _mm512_srli_epi16(signs, 4) : signs;
        __mmask64 high[2] = { _mm512_movepi8_mask(index), 0 };
        if (hi4b)
            memcpy(&high[1], hi4b + 8 * h, 8);
        __m512i entry[2] = { plane_lookup(planes, entries, index, high), plane_lookup(planes + entries, entries, index, high) };
        for (int j = 0; j < 4; j++)
            code[4 * h + j] = column_codes(entry[j / 2], number_mask_iq3[j], half_signs, j, codes);
    }
}

INLINE void group_iq3_s(const uint8_t *strand, int n, int g, struct group_avx512 *w)
{
    iq3_codes(strand + 128 * g, strand + 1024 + 16 * g, lut.iq3s[0], 512, load_avx512(strand + 1152 + 64 * g), lut.codes_iq3s,
              w->code);
    w->d[0] = _mm512_mul_ps(halves_load(strand + 1728),
                            _mm512_permutexvar_ps(nibs_load(strand + 1664 + 8 * g), _mm512_loadu_ps(lut.odd)));
}
DOT_AVX512(iq3_s, 256, 110, IQ3S_BIAS, PLAIN)

INLINE void group_iq3_xxs(const uint8_t *strand, int n, int g, struct group_avx512 *w)
{
    __m512i sign7 = load_avx512(strand + 1024 + 64 * g);
    iq3_codes(strand + 128 * g, NULL, lut.iq3xxs[0], 256, sign7_complete(sign7), lut.codes_iq3xxs, w->code);
    w->d[0] = _mm512_mul_ps(halves_scaled(strand + 1536, 0.25f), sign7_scale(sign7));
}
DOT_AVX512(iq3_xxs, 256, 98, IQ3XXS_BIAS, PLAIN)

/* ---- IQ2 and IQ1 ---- */

/* high[]: from the second on, the index bits that idx8 lacks, as masks (bit 32h + 2r + i). signs: a bit1 vector per half, the
 * second one where it lies after a shift by 4. */
INLINE void idx8_codes(const uint8_t *idx8, __mmask64 *high, const uint8_t *planes, int entries, const __m512i *signs,
                       const uint8_t (*codes)[64], __m512i code[8])
{
    /* Puts the bytes of both planes side by side: byte 4r + 2i + e of half h is entry 32h + 2r + i of plane e. */
    static const uint8_t weave[64] __attribute__((aligned(64))) = {
        0,  64, 1,  65, 2,  66, 3,  67, 4,  68, 5,  69, 6,  70, 7,  71, 8,  72, 9,  73, 10, 74,
        11, 75, 12, 76, 13, 77, 14, 78, 15, 79, 16, 80, 17, 81, 18, 82, 19, 83, 20, 84, 21, 85,
        22, 86, 23, 87, 24, 88, 25, 89, 26, 90, 27, 91, 28, 92, 29, 93, 30, 94, 31, 95,
    };
    __m512i index = load_avx512(idx8), place = load_avx512(weave);
    high[0] = _mm512_movepi8_mask(index);
    __m512i low = plane_lookup(planes, entries, index, high), up = plane_lookup(planes + entries, entries, index, high);
    for (int h = 0; h < 2; h++) {
        __m512i entry = _mm512_permutex2var_epi8(low, h ? _mm512_add_epi8(place, _mm512_set1_epi8(32)) : place, up);
        for (int j = 0; j < 4; j++)
            code[4 * h + j] = column_codes(j == 3 ? _mm512_srli_epi16(entry, 6) : entry, number_mask_iq2[j], signs[h], j, codes);
    }
}

INLINE void iq2_codes(const uint8_t *idx8, __mmask64 ninth, __mmask64 tenth, const uint8_t *planes, int entries, __m512i signs,
                      __m512i code[8])
{
    __mmask64 high[3] = { 0, ninth, tenth };
    const __m512i half_signs[2] = { signs, _mm512_srli_epi16(signs, 4) };
    idx8_codes(idx8, high, planes, entries, half_signs, lut.codes_iq2, code);
}

/* hi8b: bit b of both halves. */
INLINE __mmask64 hi8b_mask(const uint8_t *p, int bits, int b)
{
    uint32_t half[2];
    for (int h = 0; h < 2; h++)
        memcpy(&half[h], p + 4 * (h * bits + b), 4);
    return half[0] | (__mmask64)half[1] << 32;
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
    iq2_codes(strand + 64 * g, 0, 0, lut.iq2xxs[0], 256, sign7_complete(sign7), w->code);
    w->d[0] = _mm512_mul_ps(halves_scaled(strand + 1024, 0.125f), sign7_scale(sign7));
}
DOT_AVX512(iq2_xxs, 256, 66, IQ2_BIAS, PLAIN)

INLINE void group_iq2_xs(const uint8_t *strand, int n, int g, struct group_avx512 *w)
{
    __m512i sign7 = load_avx512(strand + 512 + 64 * g);
    __mmask64 ninth = _mm512_kunpackd(_mm512_movepi16_mask(sign7), _mm512_test_epi16_mask(sign7, _mm512_set1_epi16(1 << 11)));
    iq2_codes(strand + 64 * g, ninth, 0, lut.iq2xs[0], 512, sign7_complete(sign7), w->code);
    odd_scales(strand + 1024 + 16 * g, w->scale);
    w->d[0] = halves_scaled(strand + 1152, 0.125f);
}
DOT_AVX512(iq2_xs, 256, 74, IQ2_BIAS, HALVES)

INLINE void group_iq2_s(const uint8_t *strand, int n, int g, struct group_avx512 *w)
{
    const uint8_t *hi8b = strand + 512 + 16 * g;
    iq2_codes(strand + 64 * g, hi8b_mask(hi8b, 2, 0), hi8b_mask(hi8b, 2, 1), lut.iq2s[0], 1024, load_avx512(strand + 640 + 64 * g),
              w->code);
    odd_scales(strand + 1152 + 16 * g, w->scale);
    w->d[0] = halves_scaled(strand + 1280, 0.125f);
}
DOT_AVX512(iq2_s, 256, 82, IQ2_BIAS, HALVES)

/* IQ1: instead of signs, each entry has the sign of the eighth added to all its weights. negative[h]: all ones where it is -1. */
INLINE void iq1_codes(const uint8_t *idx8, const uint8_t *hi8b, const __m512i *negative, __m512i code[8])
{
    __mmask64 high[4] = { 0, hi8b_mask(hi8b, 3, 0), hi8b_mask(hi8b, 3, 1), hi8b_mask(hi8b, 3, 2) };
    idx8_codes(idx8, high, lut.iq1[0], 2048, negative, lut.codes_iq1, code);
}

INLINE void group_iq1_s(const uint8_t *strand, int n, int g, struct group_avx512 *w)
{
    __m512i scale = nibs_load(strand + 704 + 8 * g), sign = _mm512_movm_epi32(_mm512_test_epi32_mask(scale, _mm512_set1_epi32(8)));
    const __m512i negative[2] = { sign, sign };
    iq1_codes(strand + 64 * g, strand + 512 + 24 * g, negative, w->code);
    w->d[0] =
        _mm512_mul_ps(halves_scaled(strand + 768, 0.125f), _mm512_permutexvar_ps(and_avx512(scale, 7), _mm512_loadu_ps(lut.odd)));
}
DOT_AVX512(iq1_s, 256, 50, IQ1_BIAS, PLAIN)

INLINE void group_iq1_m(const uint8_t *strand, int n, int g, struct group_avx512 *w)
{
    uint32_t deltas[2];
    memcpy(deltas, strand + 704 + 8 * g, 8);
    const __m512i negative[2] = { _mm512_movm_epi16(deltas[0]), _mm512_movm_epi16(deltas[1]) };
    iq1_codes(strand + 64 * g, strand + 512 + 24 * g, negative, w->code);
    for (int h = 0; h < 2; h++) {
        w->scale[h] = _mm512_set1_epi32(1);
        for (int b = 0; b < 3; b++) {
            uint16_t bit;
            memcpy(&bit, strand + 768 + 12 * g + 6 * h + 2 * b, 2);
            w->scale[h] = _mm512_mask_add_epi32(w->scale[h], bit, w->scale[h], _mm512_set1_epi32(2 << b));
        }
    }
    w->d[0] = halves_scaled(strand + 864, 0.125f);
}
DOT_AVX512(iq1_m, 256, 56, IQ1_BIAS, HALVES)

/* ---- Tables ---- */

static int number_iq1(int value) { return value + 1; }            /* -1, 0, 1 */
static int number_iq2(int magnitude) { return magnitude / 16; }   /* 8, 25, 43 */
static int number_iq3xxs(int magnitude) { return magnitude / 8; } /* 4, 12 .. 52, 62 */
static int number_iq3s(int magnitude) { return magnitude / 2; }   /* 1, 3 .. 15 */

static void planes_iq3(const uint8_t (*grid)[4], int entries, int (*number)(int), uint8_t *planes)
{
    for (int i = 0; i < entries; i++) {
        planes[i] = (uint8_t)(number(grid[i][0]) | number(grid[i][1]) << 3);
        planes[entries + i] = (uint8_t)(number(grid[i][3]) | number(grid[i][2]) << 3);
    }
}

static void planes_iq2(const void *grid, bool is_signed, int entries, int (*number)(int), uint8_t *planes)
{
    for (int i = 0; i < 8 * entries; i++) {
        int value = is_signed ? ((const int8_t *)grid)[i] : ((const uint8_t *)grid)[i];
        planes[i % 8 / 4 * entries + i / 8] |= (uint8_t)(number(value) << 2 * (i % 4));
    }
}

/* The last lookup: value[number], negated by a sign; IQ1: the value is eighths, and the sign that of one eighth more. */
static void codes_fill(const uint8_t *number_mask, const uint8_t *value, int bias, bool iq1, uint8_t (*codes)[64])
{
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < 64; i++) {
            int v = value[(i & number_mask[j]) >> __builtin_ctz(number_mask[j])];
            bool negative = i >> sign_bit[j] & 1;
            codes[j][i] = (uint8_t)(bias + (iq1 ? v - 8 + (negative ? -1 : 1) : negative ? -v : v));
        }
}

static void lut_fill(void)
{
    static const uint8_t iq3xxs[8] = { 4, 12, 20, 28, 36, 44, 52, 62 }, iq3s[8] = { 1, 3, 5, 7, 9, 11, 13, 15 };
    static const uint8_t iq2[4] = { 8, 25, 43, 0 }, iq1[4] = { 0, 8, 16, 0 };
    memset(&lut, 0, sizeof lut);
    planes_iq3(quant_grid_iq3xxs, 256, number_iq3xxs, lut.iq3xxs[0]);
    planes_iq3(quant_grid_iq3s, 512, number_iq3s, lut.iq3s[0]);
    planes_iq2(quant_grid_iq2xxs, false, 256, number_iq2, lut.iq2xxs[0]);
    planes_iq2(quant_grid_iq2xs, false, 512, number_iq2, lut.iq2xs[0]);
    planes_iq2(quant_grid_iq2s, false, 1024, number_iq2, lut.iq2s[0]);
    planes_iq2(quant_grid_iq1s, true, 2048, number_iq1, lut.iq1[0]);
    codes_fill(number_mask_iq3, iq3xxs, IQ3XXS_BIAS, false, lut.codes_iq3xxs);
    codes_fill(number_mask_iq3, iq3s, IQ3S_BIAS, false, lut.codes_iq3s);
    codes_fill(number_mask_iq2, iq2, IQ2_BIAS, false, lut.codes_iq2);
    codes_fill(number_mask_iq2, iq1, IQ1_BIAS, true, lut.codes_iq1);
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
    k->dot[QUANT_IQ1_S] = dot_iq1_s;
    k->dot[QUANT_IQ1_M] = dot_iq1_m;
}
