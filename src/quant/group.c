/* group.c - reading 32 weights of the scalar formats: every code is a number of its own, or an index into 16 levels.
 *
 * The products written here in float are exact: a binary16 scale has 11 significant bits and the integer sub-scales have at
 * most 6, so `d` and `dmin` hold them without rounding. */
#include "quant/formats.h"

/* weight = d*code - dmin for the whole group. */
static void scale_and_min(struct quant_group *out, float d, float dmin)
{
    group_one_scale(out, d);
    out->min[0] = out->min[1] = 1;
    out->dmin = dmin;
}

/* The older 4-bit order: low nibbles are weights 0..15, high nibbles weights 16..31. */
static int split_nibble(const uint8_t *qs, int i) { return i < 16 ? qs[i] & 15 : qs[i - 16] >> 4; }

void quant_group_q4_0(const uint8_t *row, int g, struct quant_group *out)
{
    const uint8_t *block = row + (size_t)g * 18;
    group_one_scale(out, load_half(block));
    for (int i = 0; i < 32; i++)
        out->code[i] = (int16_t)(split_nibble(block + 2, i) - 8);
}

void quant_group_q4_1(const uint8_t *row, int g, struct quant_group *out)
{
    const uint8_t *block = row + (size_t)g * 20;
    scale_and_min(out, load_half(block), -load_half(block + 2));
    for (int i = 0; i < 32; i++)
        out->code[i] = (int16_t)split_nibble(block + 4, i);
}

void quant_group_q5_0(const uint8_t *row, int g, struct quant_group *out)
{
    const uint8_t *block = row + (size_t)g * 22;
    uint32_t fifth = load_u32(block + 2);
    group_one_scale(out, load_half(block));
    for (int i = 0; i < 32; i++)
        out->code[i] = (int16_t)((split_nibble(block + 6, i) | (fifth >> i & 1) << 4) - 16);
}

void quant_group_q5_1(const uint8_t *row, int g, struct quant_group *out)
{
    const uint8_t *block = row + (size_t)g * 24;
    uint32_t fifth = load_u32(block + 4);
    scale_and_min(out, load_half(block), -load_half(block + 2));
    for (int i = 0; i < 32; i++)
        out->code[i] = (int16_t)(split_nibble(block + 8, i) | (fifth >> i & 1) << 4);
}

void quant_group_q8_0(const uint8_t *row, int g, struct quant_group *out)
{
    const uint8_t *block = row + (size_t)g * 34;
    group_one_scale(out, load_half(block));
    for (int i = 0; i < 32; i++)
        out->code[i] = (int8_t)block[2 + i];
}

void quant_group_q1_0(const uint8_t *row, int g, struct quant_group *out)
{
    const uint8_t *block = row + (size_t)(g / 4) * 18;
    uint32_t bits = load_u32(block + 2 + 4 * (g % 4));
    group_one_scale(out, load_half(block));
    for (int i = 0; i < 32; i++)
        out->code[i] = bits >> i & 1 ? 1 : -1;
}

void quant_group_q2_0(const uint8_t *row, int g, struct quant_group *out)
{
    const uint8_t *block = row + (size_t)(g / 2) * 18, *qs = block + 2 + 8 * (g % 2);
    group_one_scale(out, load_half(block));
    for (int i = 0; i < 32; i++)
        out->code[i] = (int16_t)((qs[i / 4] >> 2 * (i % 4) & 3) - 1);
}

void quant_group_iq4_nl(const uint8_t *row, int g, struct quant_group *out)
{
    const uint8_t *block = row + (size_t)g * 18;
    group_one_scale(out, load_half(block));
    for (int i = 0; i < 32; i++)
        out->code[i] = quant_iq4nl[split_nibble(block + 2, i)];
}

void quant_group_mxfp4(const uint8_t *row, int g, struct quant_group *out)
{
    const uint8_t *block = row + (size_t)g * 17;
    /* 2^(e - 128), because the codes are twice E2M1; the two smallest are denormals. */
    group_one_scale(out, bits_float(block[0] < 2 ? 0x00200000u << block[0] : (uint32_t)(block[0] - 1) << 23));
    for (int i = 0; i < 32; i++)
        out->code[i] = quant_fp4[split_nibble(block + 1, i)];
}

/* Half of an unsigned E4M3 (the codes are twice E2M1); bit 7 is ignored, 0x7f is "not a number" and reads as 0. */
static float ue4m3_half(uint8_t x)
{
    int exponent = x >> 3 & 15, mantissa = x & 7;
    if (x == 0x7f)
        return 0;
    if (exponent == 0)
        return (float)mantissa * 0x1p-10f;
    return (float)(8 + mantissa) * bits_float((uint32_t)(exponent + 127 - 11) << 23); /* (1 + m/8) * 2^(e-7) / 2 */
}

void quant_group_nvfp4(const uint8_t *row, int g, struct quant_group *out)
{
    const uint8_t *block = row + (size_t)(g / 2) * 36, *scales = block + 2 * (g % 2), *qs = block + 4 + 16 * (g % 2);
    group_one_scale(out, ue4m3_half(scales[0]));
    out->d[1] = ue4m3_half(scales[1]);
    out->split = true;
    for (int i = 0; i < 32; i++) {
        uint8_t byte = qs[8 * (i / 16) + i % 8];
        out->code[i] = quant_fp4[i % 16 < 8 ? byte & 15 : byte >> 4];
    }
}

/* ---- Blocks of 256: group `ib` of 8 inside the block ---- */

void quant_group_q2_k(const uint8_t *row, int g, struct quant_group *out)
{
    const uint8_t *block = row + (size_t)(g / 8) * 84;
    int ib = g % 8, shift = 2 * (ib % 4);
    const uint8_t *scales = block + 2 * ib, *qs = block + 16 + 32 * (ib / 4);
    group_one_scale(out, load_half(block + 80));
    out->dmin = load_half(block + 82);
    for (int h = 0; h < 2; h++)
        out->min[h] = scales[h] >> 4;
    for (int i = 0; i < 32; i++)
        out->code[i] = (int16_t)((qs[i] >> shift & 3) * (scales[i / 16] & 15));
}

void quant_group_q3_k(const uint8_t *row, int g, struct quant_group *out)
{
    const uint8_t *block = row + (size_t)(g / 8) * 110;
    int ib = g % 8, shift = 2 * (ib % 4), scale[2];
    const uint8_t *hmask = block, *qs = block + 32 + 32 * (ib / 4), *packed = block + 96;
    group_one_scale(out, load_half(block + 108));
    for (int h = 0; h < 2; h++) { /* sixteen 6-bit scales: low nibbles in 8 bytes, then 2 high bits each in 4 bytes */
        int s = 2 * ib + h;
        int low = s < 8 ? packed[s] & 15 : packed[s - 8] >> 4;
        scale[h] = (low | (packed[8 + s % 4] >> 2 * (s / 4) & 3) << 4) - 32;
    }
    for (int i = 0; i < 32; i++) {
        int q = (qs[i] >> shift & 3) - (hmask[i] >> ib & 1 ? 0 : 4);
        out->code[i] = (int16_t)(q * scale[i / 16]);
    }
}

/* Scale and minimum of sub-block k (0..7): 6 bits each, packed in 12 bytes; the last four borrow the top bits of the first eight
 * bytes. */
static void k_scale_min(const uint8_t *packed, int k, int *scale, int *min)
{
    if (k < 4) {
        *scale = packed[k] & 63;
        *min = packed[k + 4] & 63;
    } else {
        *scale = (packed[k + 4] & 15) | (packed[k - 4] >> 6) << 4;
        *min = packed[k + 4] >> 4 | (packed[k] >> 6) << 4;
    }
}

/* Q4_K and Q5_K share their first 16 bytes: d, dmin, scales. */
static void k_scales(const uint8_t *block, int ib, struct quant_group *out)
{
    int scale, min;
    k_scale_min(block + 4, ib, &scale, &min);
    scale_and_min(out, load_half(block) * (float)scale, load_half(block + 2) * (float)min);
}

void quant_group_q4_k(const uint8_t *row, int g, struct quant_group *out)
{
    const uint8_t *block = row + (size_t)(g / 8) * 144;
    int ib = g % 8;
    const uint8_t *qs = block + 16 + 32 * (ib / 2);
    k_scales(block, ib, out);
    for (int i = 0; i < 32; i++)
        out->code[i] = qs[i] >> 4 * (ib % 2) & 15;
}

void quant_group_q5_k(const uint8_t *row, int g, struct quant_group *out)
{
    const uint8_t *block = row + (size_t)(g / 8) * 176;
    int ib = g % 8;
    const uint8_t *fifth = block + 16, *qs = block + 48 + 32 * (ib / 2);
    k_scales(block, ib, out);
    for (int i = 0; i < 32; i++)
        out->code[i] = (int16_t)((qs[i] >> 4 * (ib % 2) & 15) | (fifth[i] >> ib & 1) << 4);
}

void quant_group_q6_k(const uint8_t *row, int g, struct quant_group *out)
{
    const uint8_t *block = row + (size_t)(g / 8) * 210;
    int ib = g % 8, k = ib % 4;
    const uint8_t *low = block + 64 * (ib / 4) + 32 * (k % 2), *high = block + 128 + 32 * (ib / 4), *scales = block + 192 + 2 * ib;
    group_one_scale(out, load_half(block + 208));
    for (int i = 0; i < 32; i++) {
        int q = ((low[i] >> 4 * (k / 2) & 15) | (high[i] >> 2 * k & 3) << 4) - 32;
        out->code[i] = (int16_t)(q * (int8_t)scales[i / 16]);
    }
}

void quant_group_iq4_xs(const uint8_t *row, int g, struct quant_group *out)
{
    const uint8_t *block = row + (size_t)(g / 8) * 136;
    int ib = g % 8;
    int scale = (block[4 + ib / 2] >> 4 * (ib % 2) & 15) | (load_u16(block + 2) >> 2 * ib & 3) << 4;
    group_one_scale(out, load_half(block) * (float)(scale - 32));
    for (int i = 0; i < 32; i++)
        out->code[i] = quant_iq4nl[split_nibble(block + 8 + 16 * ib, i)];
}
