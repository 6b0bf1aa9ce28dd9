/* dot_gather.cu - rows of a table in the file's layout, decoded to floats: embeddings. A thread takes a group of 32 weights; so few rows are fetched
 * that their bytes are read as they come. Formulas: spec of the formats as in src/quant/group.c and group_grid.c, for any alignment. */
#include "ops/cuda/cuda_text.h"
#include "ops/cuda/dot_args.h"

/* weight[i] = d[half] * code[i] - dmin * min[half], half = i / 16: struct quant_group. */
struct gather_group {
    float d[2], dmin;
    int32_t min[2];
    int32_t code[32];
};

DEVICE_FN uint32_t u16_at(const uint8_t *p) { return (uint32_t)p[0] | (uint32_t)p[1] << 8; }
DEVICE_FN uint32_t u32_at(const uint8_t *p) { return u16_at(p) | u16_at(p + 2) << 16; }
DEVICE_FN float half_at(const uint8_t *p) { return half_value((uint16_t)u16_at(p)); }
DEVICE_FN int nibble_at(const uint8_t *qs, int i) { return i < 16 ? qs[i] & 15 : qs[i - 16] >> 4; }

DEVICE_FN int fp4_code(int index)
{
    int e = index >> 1 & 3, magnitude = e ? (2 + (index & 1)) << (e - 1) : index & 1;
    return index & 8 ? -magnitude : magnitude;
}

DEVICE_FN int iq4nl_code(int index)
{
    const uint64_t low = 0xf6eaddcfbfad9881u, high = 0x7159453526190d01u;
    return (int8_t)((index < 8 ? low : high) >> 8 * (index & 7));
}

DEVICE_FN float half_e4m3(uint32_t x)
{
    float value = half_value((uint16_t)(x << 7 & 0x3f80)) * 0x1p7f;
    return x == 0x7f ? 0.0f : value;
}

/* `n` weights of a codebook entry, negated where `signs` has a bit. */
DEVICE_FN void put_signed(int32_t *code, const uint8_t *entry, int n, uint32_t signs, int scale)
{
    for (int j = 0; j < n; j++)
        code[j] = (signs >> j & 1 ? -(int)entry[j] : (int)entry[j]) * scale;
}

DEVICE_FN uint32_t sign8(uint32_t seven) { return seven | (uint32_t)(__popc(seven) & 1) << 7; }

DEVICE_FN void scales_k(const uint8_t *block, int ib, struct gather_group *out)
{
    const uint8_t *packed = block + 4;
    int scale = ib < 4 ? packed[ib] & 63 : (packed[ib + 4] & 15) | (packed[ib - 4] >> 6) << 4;
    int min = ib < 4 ? packed[ib + 4] & 63 : packed[ib + 4] >> 4 | (packed[ib] >> 6) << 4;
    out->d[0] = half_at(block) * (float)scale;
    out->dmin = half_at(block + 2) * (float)min;
    out->min[0] = out->min[1] = 1;
}

DEVICE_FN void gather_simple(int type, const uint8_t *row, int g, struct gather_group *out)
{
    const uint8_t *b;
    uint32_t bits = 0;
    int *code = out->code;
    switch (type) {
    case QUANT_Q4_0: case QUANT_IQ4_NL:
        b = row + (size_t)g * 18;
        out->d[0] = half_at(b);
        for (int i = 0; i < 32; i++)
            code[i] = type == QUANT_Q4_0 ? nibble_at(b + 2, i) - 8 : iq4nl_code(nibble_at(b + 2, i));
        break;
    case QUANT_Q4_1: case QUANT_Q5_1: case QUANT_Q5_0: {
        bool five = type != QUANT_Q4_1, offset = type != QUANT_Q5_0;
        b = row + (size_t)g * (type == QUANT_Q4_1 ? 20 : five && offset ? 24 : 22);
        out->d[0] = half_at(b);
        if (offset) {
            out->dmin = -half_at(b + 2);
            out->min[0] = out->min[1] = 1;
        }
        b += offset ? 4 : 2;
        if (five) {
            bits = u32_at(b);
            b += 4;
        }
        for (int i = 0; i < 32; i++)
            code[i] = (nibble_at(b, i) | (int)(bits >> i & 1) << 4) - (offset ? 0 : 16);
        break;
    }
    case QUANT_Q8_0:
        b = row + (size_t)g * 34;
        out->d[0] = half_at(b);
        for (int i = 0; i < 32; i++)
            code[i] = (int8_t)b[2 + i];
        break;
    case QUANT_Q1_0:
        b = row + (size_t)(g / 4) * 18;
        bits = u32_at(b + 2 + 4 * (g % 4));
        out->d[0] = half_at(b);
        for (int i = 0; i < 32; i++)
            code[i] = bits >> i & 1 ? 1 : -1;
        break;
    case QUANT_Q2_0:
        b = row + (size_t)(g / 2) * 18;
        out->d[0] = half_at(b);
        for (int i = 0; i < 32; i++)
            code[i] = (b[2 + 8 * (g % 2) + i / 4] >> 2 * (i % 4) & 3) - 1;
        break;
    case QUANT_MXFP4:
        b = row + (size_t)g * 17;
        out->d[0] = bits_float(b[0] < 2 ? 0x00200000u << b[0] : (uint32_t)(b[0] - 1) << 23);
        for (int i = 0; i < 32; i++)
            code[i] = fp4_code(nibble_at(b + 1, i));
        break;
    case QUANT_NVFP4:
        b = row + (size_t)(g / 2) * 36;
        for (int h = 0; h < 2; h++) {
            out->d[h] = half_e4m3(b[2 * (g % 2) + h]);
            for (int i = 0; i < 16; i++)
                code[16 * h + i] = fp4_code(nibble_at(b + 4 + 16 * (g % 2) + 8 * h, i < 8 ? i : i + 8));
        }
        return;
    }
    out->d[1] = out->d[0];
}

/* Blocks of 256 with scalar codes. */
DEVICE_FN void gather_super(int type, const uint8_t *row, int g, struct gather_group *out)
{
    int ib = g % 8, *code = out->code;
    const uint8_t *b = row + (size_t)(g / 8) * (type == QUANT_Q2_K ? 84 : type == QUANT_Q3_K ? 110 : type == QUANT_Q4_K ? 144 : type == QUANT_Q5_K ? 176
                                                 : type == QUANT_Q6_K ? 210 : 136);
    switch (type) {
    case QUANT_Q2_K:
        out->d[0] = half_at(b + 80);
        out->dmin = half_at(b + 82);
        for (int i = 0; i < 32; i++)
            code[i] = (b[16 + 32 * (ib / 4) + i] >> 2 * (ib % 4) & 3) * (b[2 * ib + i / 16] & 15);
        for (int h = 0; h < 2; h++)
            out->min[h] = b[2 * ib + h] >> 4;
        break;
    case QUANT_Q3_K:
        out->d[0] = half_at(b + 108);
        for (int i = 0; i < 32; i++) {
            int s = 2 * ib + i / 16, low = s < 8 ? b[96 + s] & 15 : b[96 + s - 8] >> 4;
            int scale = (low | (b[104 + s % 4] >> 2 * (s / 4) & 3) << 4) - 32;
            code[i] = ((b[32 + 32 * (ib / 4) + i] >> 2 * (ib % 4) & 3) - (b[i] >> ib & 1 ? 0 : 4)) * scale;
        }
        break;
    case QUANT_Q4_K: case QUANT_Q5_K:
        scales_k(b, ib, out);
        for (int i = 0; i < 32; i++)
            code[i] = type == QUANT_Q4_K ? b[16 + 32 * (ib / 2) + i] >> 4 * (ib % 2) & 15
                                         : (b[48 + 32 * (ib / 2) + i] >> 4 * (ib % 2) & 15) | (b[16 + i] >> ib & 1) << 4;
        break;
    case QUANT_Q6_K:
        out->d[0] = half_at(b + 208);
        for (int i = 0; i < 32; i++) {
            int k = ib % 4, low = b[64 * (ib / 4) + 32 * (k % 2) + i] >> 4 * (k / 2) & 15, high = b[128 + 32 * (ib / 4) + i] >> 2 * k & 3;
            code[i] = ((low | high << 4) - 32) * (int8_t)b[192 + 2 * ib + i / 16];
        }
        break;
    case QUANT_IQ4_XS: {
        int scale = (b[4 + ib / 2] >> 4 * (ib % 2) & 15) | (int)(u16_at(b + 2) >> 2 * ib & 3) << 4;
        out->d[0] = half_at(b) * (float)(scale - 32);
        for (int i = 0; i < 32; i++)
            code[i] = iq4nl_code(nibble_at(b + 8 + 16 * ib, i));
        break;
    }
    }
    out->d[1] = out->d[0];
}

/* Blocks of 256 whose indexes name entries of a codebook. */
DEVICE_FN void gather_grid(int type, const uint8_t *row, int g, const uint8_t *book, struct gather_group *out)
{
    int ib = g % 8, *code = out->code;
    const uint8_t *b = row + (size_t)(g / 8) * (type == QUANT_IQ2_XXS ? 66 : type == QUANT_IQ2_XS ? 74 : type == QUANT_IQ2_S ? 82 : type == QUANT_IQ3_XXS ? 98
                                                 : type == QUANT_IQ3_S ? 110 : type == QUANT_IQ1_S ? 50 : 56);
    out->d[0] = type == QUANT_IQ1_M ? 0 : half_at(b);
    switch (type) {
    case QUANT_IQ2_XXS: {
        const uint8_t *index = b + 2 + 8 * ib;
        uint32_t v = u32_at(index + 4);
        out->d[0] *= (float)(2 * (v >> 28) + 1) * 0.125f;
        for (int l = 0; l < 4; l++)
            put_signed(code + 8 * l, book + 8 * index[l], 8, sign8(v >> 7 * l & 127), 1);
        break;
    }
    case QUANT_IQ2_XS:
        out->d[0] *= 0.125f;
        for (int l = 0; l < 4; l++) {
            uint32_t v = u16_at(b + 2 + 8 * ib + 2 * l);
            put_signed(code + 8 * l, book + 8 * (v & 511), 8, sign8(v >> 9), 2 * (b[66 + ib] >> 4 * (l / 2) & 15) + 1);
        }
        break;
    case QUANT_IQ2_S:
        out->d[0] *= 0.125f;
        for (int l = 0; l < 4; l++)
            put_signed(code + 8 * l, book + 8 * (b[2 + 4 * ib + l] | (b[66 + ib] >> 2 * l & 3) << 8), 8, b[34 + 4 * ib + l],
                       2 * (b[74 + ib] >> 4 * (l / 2) & 15) + 1);
        break;
    case QUANT_IQ3_XXS: {
        uint32_t v = u32_at(b + 66 + 4 * ib);
        out->d[0] *= (float)(2 * (v >> 28) + 1) * 0.25f;
        for (int k = 0; k < 8; k++)
            put_signed(code + 4 * k, book + 4 * b[2 + 8 * ib + k], 4, sign8(v >> 7 * (k / 2) & 127) >> 4 * (k % 2), 1);
        break;
    }
    case QUANT_IQ3_S:
        out->d[0] *= (float)(2 * (b[106 + ib / 2] >> 4 * (ib % 2) & 15) + 1);
        for (int k = 0; k < 8; k++)
            put_signed(code + 4 * k, book + 4 * (b[2 + 8 * ib + k] | (b[66 + ib] >> k & 1) << 8), 4, (uint32_t)b[74 + 4 * ib + k / 2] >> 4 * (k % 2), 1);
        break;
    case QUANT_IQ1_S: {
        uint32_t v = u16_at(b + 34 + 2 * ib);
        out->d[0] *= (float)(2 * (v >> 12 & 7) + 1) * 0.125f;
        for (int i = 0; i < 32; i++) /* the book has eighths, one weight up */
            code[i] = book[8 * (b[2 + 4 * ib + i / 8] | (v >> 3 * (i / 8) & 7) << 8) + i % 8] - 8 + (v >> 15 ? -1 : 1);
        break;
    }
    default: { /* IQ1_M: the scale's nibbles are the top ones of four words */
        uint32_t d = 0, scales = u16_at(b + 48 + 2 * (ib / 2)) >> 6 * (ib % 2);
        for (int k = 0; k < 4; k++)
            d |= (u16_at(b + 48 + 2 * k) >> 12) << 4 * k;
        out->d[0] = half_value((uint16_t)d) * 0.125f;
        for (int i = 0; i < 32; i++) {
            uint32_t l = (uint32_t)i / 8, extra = (uint32_t)b[32 + 2 * ib + i / 16] >> 4 * (l % 2);
            int weight = book[8 * (b[4 * ib + i / 8] | (extra & 7) << 8) + i % 8] - 8 + (extra & 8 ? -1 : 1);
            code[i] = weight * (int)(2 * (scales >> 3 * (i / 16) & 7) + 1);
        }
    }
    }
    out->d[1] = out->d[0];
}

KERNEL_BOUNDS(dot_gather, 128, 1)
{
    int groups = (a.width + 31) / 32, k = (int)(blockIdx.x * blockDim.x + threadIdx.x), i = k / groups, g = k % groups;
    if (i >= a.n)
        return;
    const uint8_t *row = a.table + a.ids[i] * a.row_bytes;
    float *out = a.out + (size_t)i * (size_t)a.width + 32 * g;
    int count = a.width - 32 * g < 32 ? a.width - 32 * g : 32;
    if (a.type == QUANT_F32 || a.type == QUANT_F16 || a.type == QUANT_BF16) {
        for (int c = 0; c < count; c++) {
            int at = 32 * g + c;
            out[c] = a.type == QUANT_F32 ? bits_float(u32_at(row + 4 * at)) : a.type == QUANT_F16 ? half_at(row + 2 * at)
                                                                                                   : bfloat_to_float((uint16_t)u16_at(row + 2 * at));
        }
        return;
    }
    struct gather_group w = { { 0 }, 0, { 0 }, { 0 } };
    if (dot_codebook_bytes(a.type))
        gather_grid(a.type, row, g, a.codebooks + dot_codebook_at(a.type), &w);
    else if (a.type == QUANT_Q2_K || a.type == QUANT_Q3_K || a.type == QUANT_Q4_K || a.type == QUANT_Q5_K || a.type == QUANT_Q6_K || a.type == QUANT_IQ4_XS)
        gather_super(a.type, row, g, &w);
    else
        gather_simple(a.type, row, g, &w);
    for (int c = 0; c < 32; c++)
        out[c] = w.d[c / 16] * (float)w.code[c] - w.dmin * (float)w.min[c / 16];
}
