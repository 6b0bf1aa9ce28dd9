/* group_grid.c - reading 32 weights of the codebook formats: an index names 8 (IQ2, IQ1) or 4 (IQ3) weights at once.
 *
 * All are blocks of 256 with one binary16 scale. A sub-scale of 32 weights goes into `d`; where it covers 16 weights it is an odd
 * integer 2s+1 and goes into the codes. Factors like 1/8 keep the codes integers; multiplying by them is exact. */
#include "quant/formats.h"

/* Puts `n` weights of a codebook entry, negated where `signs` has a bit (bit 0 = the first), times an integer. */
static void put_signed(int16_t *code, const uint8_t *entry, int n, uint32_t signs, int scale)
{
    for (int j = 0; j < n; j++)
        code[j] = (int16_t)((signs >> j & 1 ? -entry[j] : entry[j]) * scale);
}

void quant_group_iq2_xxs(const uint8_t *row, int g, struct quant_group *out)
{
    const uint8_t *block = row + (size_t)(g / 8) * 66, *index = block + 2 + 8 * (g % 8);
    uint32_t signs_scale = load_u32(index + 4); /* four times 7 signs, then a 4-bit scale */
    group_one_scale(out, load_half(block) * (float)(2 * (signs_scale >> 28) + 1) * 0.125f);
    for (int l = 0; l < 4; l++)
        put_signed(out->code + 8 * l, quant_grid_iq2xxs[index[l]], 8, quant_sign8(signs_scale >> 7 * l & 127), 1);
}

void quant_group_iq2_xs(const uint8_t *row, int g, struct quant_group *out)
{
    const uint8_t *block = row + (size_t)(g / 8) * 74, *q = block + 2 + 8 * (g % 8);
    int scales = block[66 + g % 8];
    group_one_scale(out, load_half(block) * 0.125f);
    for (int l = 0; l < 4; l++) {
        uint32_t v = load_u16(q + 2 * l); /* 9 bits of index, 7 signs */
        put_signed(out->code + 8 * l, quant_grid_iq2xs[v & 511], 8, quant_sign8(v >> 9), 2 * (scales >> 4 * (l / 2) & 15) + 1);
    }
}

void quant_group_iq2_s(const uint8_t *row, int g, struct quant_group *out)
{
    const uint8_t *block = row + (size_t)(g / 8) * 82, *low = block + 2 + 4 * (g % 8), *signs = block + 34 + 4 * (g % 8);
    int high = block[66 + g % 8], scales = block[74 + g % 8];
    group_one_scale(out, load_half(block) * 0.125f);
    for (int l = 0; l < 4; l++)
        put_signed(out->code + 8 * l, quant_grid_iq2s[low[l] | (high >> 2 * l & 3) << 8], 8, signs[l],
                   2 * (scales >> 4 * (l / 2) & 15) + 1);
}

void quant_group_iq3_xxs(const uint8_t *row, int g, struct quant_group *out)
{
    const uint8_t *block = row + (size_t)(g / 8) * 98, *index = block + 2 + 8 * (g % 8);
    uint32_t signs_scale = load_u32(block + 66 + 4 * (g % 8)); /* four times 7 signs, then a 4-bit scale */
    group_one_scale(out, load_half(block) * (float)(2 * (signs_scale >> 28) + 1) * 0.25f);
    for (int k = 0; k < 8; k++)
        put_signed(out->code + 4 * k, quant_grid_iq3xxs[index[k]], 4, quant_sign8(signs_scale >> 7 * (k / 2) & 127) >> 4 * (k % 2),
                   1);
}

void quant_group_iq3_s(const uint8_t *row, int g, struct quant_group *out)
{
    const uint8_t *block = row + (size_t)(g / 8) * 110;
    int ib = g % 8, high = block[66 + ib], scale = block[106 + ib / 2] >> 4 * (ib % 2) & 15;
    const uint8_t *low = block + 2 + 8 * ib, *signs = block + 74 + 4 * ib;
    group_one_scale(out, load_half(block) * (float)(2 * scale + 1));
    for (int k = 0; k < 8; k++)
        put_signed(out->code + 4 * k, quant_grid_iq3s[low[k] | (high >> k & 1) << 8], 4, signs[k / 2] >> 4 * (k % 2), 1);
}

/* The IQ1 formats shift every weight by a positive or negative eighth; codes are in eighths. */
static void put_shifted(int16_t *code, const int8_t *entry, bool negative, int scale)
{
    for (int j = 0; j < 8; j++)
        code[j] = (int16_t)((8 * entry[j] + (negative ? -1 : 1)) * scale);
}

void quant_group_iq1_s(const uint8_t *row, int g, struct quant_group *out)
{
    const uint8_t *block = row + (size_t)(g / 8) * 50, *low = block + 2 + 4 * (g % 8);
    int high = load_u16(block + 34 + 2 * (g % 8)); /* four times 3 index bits, a 3-bit scale, the shift's sign */
    group_one_scale(out, load_half(block) * (float)(2 * (high >> 12 & 7) + 1) * 0.125f);
    for (int l = 0; l < 4; l++)
        put_shifted(out->code + 8 * l, quant_grid_iq1s[low[l] | (high >> 3 * l & 7) << 8], high >> 15, 1);
}

void quant_group_iq1_m(const uint8_t *row, int g, struct quant_group *out)
{
    const uint8_t *block = row + (size_t)(g / 8) * 56, *scales = block + 48;
    int ib = g % 8, d = 0;
    const uint8_t *low = block + 4 * ib, *high = block + 32 + 2 * ib;
    for (int k = 0; k < 4; k++) /* the block's scale is spread over the top nibbles of the four 16-bit scale words */
        d |= (load_u16(scales + 2 * k) >> 12) << 4 * k;
    group_one_scale(out, half_to_float((uint16_t)d) * 0.125f);
    int pair = load_u16(scales + 2 * (ib / 2)) >> 6 * (ib % 2);
    for (int l = 0; l < 4; l++) {
        int extra = high[l / 2] >> 4 * (l % 2); /* 3 index bits, the shift's sign */
        put_shifted(out->code + 8 * l, quant_grid_iq1s[low[l] | (extra & 7) << 8], extra & 8, 2 * (pair >> 3 * (l / 2) & 7) + 1);
    }
}
