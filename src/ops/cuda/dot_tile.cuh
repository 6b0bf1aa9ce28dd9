/* dot_tile.cuh - groups of quantized weights as tensor cores want them: from the tiles of quant/tile.h to an A fragment and its scales.
 *
 * A tile's group (16 rows, 32 columns) is one m16n8k32 product of int8; its columns of B are up to 8 rows of activations. The sum over a group is an
 * exact int32, so the order of its columns is free as long as both sides agree, and so is the order of the 16 rows. Both are chosen for the loads:
 * lane = 4*pair + quad has tile rows 2*pair and 2*pair + 1, which lie side by side, and of each two dwords of four columns: 2*quad and 2*quad + 1
 * (PAIRS), or quad and quad + 4 (SPLIT: one of each half, where halves have scales of their own or one byte holds both). A dword's columns are those
 * of A8 order, or four neighbours (NATURAL: what a codebook entry holds; the activations are turned instead).
 *
 * `type` is a constant wherever this is inlined, so every switch folds.
 */
#ifndef OPS_CUDA_DOT_TILE_CUH
#define OPS_CUDA_DOT_TILE_CUH

#include "ops/cuda/cuda_text.h"
#include "ops/cuda/dot_args.h"

#ifdef __CUDACC__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL
#endif

enum dot_shape {
    DOT_PLAIN,      /* one scale for 32 */
    DOT_MIN,        /* and a minimum for 32 */
    DOT_HALVES,     /* an integer scale for each 16 */
    DOT_HALVES_MIN, /* and an integer minimum for each 16 */
    DOT_TWO_SCALES, /* an fp32 scale for each 16, added one after the other */
};
enum dot_order { DOT_PAIRS, DOT_SPLIT, DOT_NATURAL_PAIRS, DOT_NATURAL_SPLIT };

DEVICE_FN int dot_shape(int type)
{
    switch (type) {
    case QUANT_Q4_1: case QUANT_Q5_1: case QUANT_Q4_K: case QUANT_Q5_K: return DOT_MIN;
    case QUANT_Q3_K: case QUANT_Q6_K: case QUANT_IQ2_XS: case QUANT_IQ2_S: case QUANT_IQ1_M: return DOT_HALVES;
    case QUANT_Q2_K: return DOT_HALVES_MIN;
    case QUANT_NVFP4: return DOT_TWO_SCALES;
    default: return DOT_PLAIN;
    }
}

DEVICE_FN int dot_order(int type)
{
    switch (type) {
    case QUANT_Q8_0: case QUANT_Q1_0: case QUANT_Q2_0: return DOT_PAIRS;
    case QUANT_IQ2_XXS: case QUANT_IQ3_XXS: case QUANT_IQ3_S: case QUANT_IQ1_S: return DOT_NATURAL_PAIRS;
    case QUANT_IQ2_XS: case QUANT_IQ2_S: case QUANT_IQ1_M: return DOT_NATURAL_SPLIT;
    default: return DOT_SPLIT;
    }
}

/* What the codes of a fragment are too large by; the activations' sums take it off. */
DEVICE_FN int dot_bias(int type)
{
    switch (type) {
    case QUANT_Q1_0: case QUANT_Q2_0: return 1;
    case QUANT_Q3_K: return 4;
    case QUANT_Q4_0: return 8;
    case QUANT_IQ1_S: case QUANT_IQ1_M: return 9;
    case QUANT_Q5_0: return 16;
    case QUANT_Q6_K: return 32;
    default: return 0;
    }
}

/* A codebook whose signs lie apart: the fragment holds ~code where it is negative, and `negative` -1 there. */
DEVICE_FN bool dot_is_signed(int type)
{
    return type == QUANT_IQ2_XXS || type == QUANT_IQ2_XS || type == QUANT_IQ2_S || type == QUANT_IQ3_XXS || type == QUANT_IQ3_S;
}

/* Blocks of 256: no strand is short. */
DEVICE_FN bool dot_full_strands(int type)
{
    switch (type) {
    case QUANT_Q8_0: case QUANT_Q4_0: case QUANT_Q4_1: case QUANT_Q5_0: case QUANT_Q5_1: case QUANT_IQ4_NL: case QUANT_MXFP4: case QUANT_NVFP4:
    case QUANT_Q1_0: case QUANT_Q2_0: return false;
    default: return true;
    }
}

/* Bytes of 16 rows by 32 columns. */
DEVICE_FN int dot_group_bytes(int type)
{
    switch (type) {
    case QUANT_Q8_0: return 544;
    case QUANT_Q4_0: case QUANT_IQ4_NL: case QUANT_NVFP4: case QUANT_Q4_K: return 288;
    case QUANT_Q4_1: return 320;
    case QUANT_Q5_0: case QUANT_Q5_K: return 352;
    case QUANT_Q5_1: return 384;
    case QUANT_Q2_K: return 168;
    case QUANT_Q3_K: case QUANT_IQ3_S: return 220;
    case QUANT_Q6_K: return 420;
    case QUANT_IQ4_XS: case QUANT_MXFP4: return 272;
    case QUANT_IQ3_XXS: return 196;
    case QUANT_IQ2_XXS: return 132;
    case QUANT_IQ2_XS: return 148;
    case QUANT_IQ2_S: return 164;
    case QUANT_IQ1_S: return 100;
    case QUANT_IQ1_M: return 112;
    case QUANT_Q1_0: return 72;
    case QUANT_Q2_0: return 144;
    case QUANT_F32: return 2048;
    default: return 1024; /* F16, BF16 */
    }
}

DEVICE_FN bool dot_is_float(int type) { return type == QUANT_F32 || type == QUANT_F16 || type == QUANT_BF16; }

/* Copies of the codebook in shared memory. */
DEVICE_FN int dot_copies(int type) { return DOT_TABLE_BYTES / dot_codebook_bytes(type); }

/* ---- Small things ---------------------------------------------------------------------------------------------------------------------- */

/* Byte i of the result is the byte of (low, high) that nibble i of `selector` names; with bit 3 set, its sign bit eight times. */
DEVICE_FN uint32_t permute(uint32_t low, uint32_t high, uint32_t selector)
{
#ifdef __CUDA_ARCH__ /* __byte_perm clears bit 3 first */
    uint32_t result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
    return result;
#else
    return __byte_perm(low, high, selector);
#endif
}

/* Four sign bits as four bytes of 0 or -1: the product puts bit j at bit 8j + 7. */
DEVICE_FN uint32_t sign_bytes(uint32_t four) { return permute(four * 0x10204080u, 0, 0xba98); }

DEVICE_FN uint32_t load_8(const uint8_t *p) { return __ldg(p); }
DEVICE_FN uint32_t load_16(const uint8_t *p) { return __ldg((const uint16_t *)(const void *)p); }
DEVICE_FN uint32_t load_32(const uint8_t *p) { return __ldg((const uint32_t *)(const void *)p); }
DEVICE_FN void load_64(const uint8_t *p, uint32_t *out)
{
    uint2 v = __ldg((const uint2 *)(const void *)p);
    out[0] = v.x;
    out[1] = v.y;
}

/* ---- Loads ----------------------------------------------------------------------------------------------------------------------------- */

/* What a lane reads of a group; `w` as the format likes it, rows 2*pair and 2*pair + 1 side by side. */
struct dot_raw { uint32_t w[8], d, dmin; };

/* Group g of a strand of n groups (8 for blocks of 256). */
DEVICE_FN void dot_load(int type, const uint8_t *strand, int n, int g, struct dot_raw *raw)
{
    int pair = lane_id() >> 2, quad = lane_id() & 3, half = quad >> 1;
    uint32_t *w = raw->w;
    switch (type) {
    case QUANT_Q8_0:
        load_64(strand + 512 * g + 128 * quad + 8 * pair, w);
        load_64(strand + 512 * g + 128 * quad + 64 + 8 * pair, w + 2);
        raw->d = load_32(strand + 512 * n + 32 * g + 4 * pair);
        break;
    case QUANT_Q1_0:
        load_64(strand + 64 * g + 8 * pair, w);
        raw->d = load_32(strand + 64 * n + 32 * (g / 4) + 4 * pair);
        break;
    case QUANT_Q2_0:
        load_64(strand + 128 * g + 64 * half + 8 * pair, w);
        raw->d = load_32(strand + 128 * n + 32 * (g / 2) + 4 * pair);
        break;

    case QUANT_Q4_0: case QUANT_Q4_1: case QUANT_IQ4_NL:
        load_64(strand + 256 * g + 64 * quad + 8 * pair, w);
        raw->d = load_32(strand + 256 * n + 32 * g + 4 * pair);
        if (type == QUANT_Q4_1)
            raw->dmin = load_32(strand + 288 * n + 32 * g + 4 * pair);
        break;
    case QUANT_Q5_0: case QUANT_Q5_1:
        load_64(strand + 256 * g + 64 * quad + 8 * pair, w);
        load_64(strand + 256 * n + 64 * g + 8 * pair, w + 2);
        raw->d = load_32(strand + 320 * n + 32 * g + 4 * pair);
        if (type == QUANT_Q5_1)
            raw->dmin = load_32(strand + 352 * n + 32 * g + 4 * pair);
        break;
    case QUANT_MXFP4:
        load_64(strand + 256 * g + 64 * quad + 8 * pair, w);
        raw->d = load_16(strand + 256 * n + 16 * g + 2 * pair);
        break;
    case QUANT_NVFP4:
        load_64(strand + 256 * g + 64 * quad + 8 * pair, w);
        raw->d = load_16(strand + 256 * n + 32 * g + 2 * pair);
        raw->dmin = load_16(strand + 256 * n + 32 * g + 16 + 2 * pair);
        break;
    case QUANT_IQ4_XS:
        load_64(strand + 256 * g + 64 * quad + 8 * pair, w);
        w[2] = load_16(strand + 2048 + 8 * g + (2 * pair & 6));
        w[3] = load_16(strand + 2112 + 4 * g + (2 * pair & 2));
        raw->d = load_32(strand + 2144 + 4 * pair);
        break;

    case QUANT_Q2_K:
        load_64(strand + 128 * g + 8 * pair, w);
        load_64(strand + 128 * g + 64 + 8 * pair, w + 2);
        w[4] = load_16(strand + 1024 + 32 * g + 2 * pair);
        w[5] = load_16(strand + 1024 + 32 * g + 16 + 2 * pair);
        raw->d = load_32(strand + 1280 + 4 * pair);
        raw->dmin = load_32(strand + 1312 + 4 * pair);
        break;
    case QUANT_Q3_K:
        load_64(strand + 128 * g + 8 * pair, w);
        load_64(strand + 128 * g + 64 + 8 * pair, w + 2);
        load_64(strand + 1024 + 64 * g + 8 * pair, w + 4);
        w[6] = load_16(strand + 1536 + 16 * g + (2 * pair & 6)) | load_16(strand + 1544 + 16 * g + (2 * pair & 6)) << 16;
        w[7] = load_16(strand + 1664 + 8 * g + (2 * pair & 2)) | load_16(strand + 1668 + 8 * g + (2 * pair & 2)) << 16;
        raw->d = load_32(strand + 1728 + 4 * pair);
        break;
    case QUANT_Q4_K: case QUANT_Q5_K: {
        const uint8_t *scales = strand + (type == QUANT_Q4_K ? 2048 : 2560);
        load_64(strand + 256 * g + 64 * quad + 8 * pair, w);
        if (type == QUANT_Q5_K)
            load_64(strand + 2048 + 64 * g + 8 * pair, w + 2);
        for (int i = 0; i < 3; i++)
            w[4 + i] = load_16(scales + 64 * i + 8 * g + (2 * pair & 6));
        raw->d = load_32(scales + 192 + 4 * pair);
        raw->dmin = load_32(scales + 224 + 4 * pair);
        break;
    }
    case QUANT_Q6_K:
        load_64(strand + 256 * g + 64 * quad + 8 * pair, w);
        load_64(strand + 2048 + 128 * g + 8 * pair, w + 2);
        load_64(strand + 2048 + 128 * g + 64 + 8 * pair, w + 4);
        w[6] = load_16(strand + 3072 + 32 * g + 2 * pair);
        w[7] = load_16(strand + 3072 + 32 * g + 16 + 2 * pair);
        raw->d = load_32(strand + 3328 + 4 * pair);
        break;

    case QUANT_IQ3_S:
        load_64(strand + 128 * g + 64 * half + 8 * pair, w);
        load_64(strand + 1152 + 64 * g + 8 * pair, w + 2);
        w[4] = load_8(strand + 1024 + 16 * g + 8 * half + pair);
        w[5] = load_16(strand + 1664 + 8 * g + (2 * pair & 6));
        raw->d = load_32(strand + 1728 + 4 * pair);
        break;
    case QUANT_IQ3_XXS:
        load_64(strand + 128 * g + 64 * half + 8 * pair, w);
        load_64(strand + 1024 + 64 * g + 8 * pair, w + 2);
        raw->d = load_32(strand + 1536 + 4 * pair);
        break;
    case QUANT_IQ2_XXS:
        w[0] = load_32(strand + 64 * g + 32 * half + 4 * pair);
        load_64(strand + 512 + 64 * g + 8 * pair, w + 2);
        raw->d = load_32(strand + 1024 + 4 * pair);
        break;
    case QUANT_IQ2_XS:
        w[0] = load_32(strand + 64 * g + 4 * pair);
        w[1] = load_32(strand + 64 * g + 32 + 4 * pair);
        load_64(strand + 512 + 64 * g + 8 * pair, w + 2);
        w[4] = load_16(strand + 1024 + 16 * g + 2 * pair);
        raw->d = load_32(strand + 1152 + 4 * pair);
        break;
    case QUANT_IQ2_S:
        w[0] = load_32(strand + 64 * g + 4 * pair);
        w[1] = load_32(strand + 64 * g + 32 + 4 * pair);
        load_64(strand + 640 + 64 * g + 8 * pair, w + 2);
        w[4] = load_16(strand + 1152 + 16 * g + 2 * pair);
        for (int h = 0; h < 2; h++)
            w[5 + h] = load_8(strand + 512 + 16 * g + 8 * h + (pair >> 1)) | load_8(strand + 516 + 16 * g + 8 * h + (pair >> 1)) << 8;
        raw->d = load_32(strand + 1280 + 4 * pair);
        break;
    case QUANT_IQ1_S:
        w[0] = load_32(strand + 64 * g + 32 * half + 4 * pair);
        for (int b = 0; b < 3; b++)
            w[1 + b] = load_8(strand + 512 + 24 * g + 12 * half + 4 * b + (pair >> 1));
        w[4] = load_16(strand + 704 + 8 * g + (2 * pair & 6));
        raw->d = load_32(strand + 768 + 4 * pair);
        break;
    case QUANT_IQ1_M:
        w[0] = load_32(strand + 64 * g + 4 * pair);
        w[1] = load_32(strand + 64 * g + 32 + 4 * pair);
        for (int h = 0; h < 2; h++) {
            w[2 + h] = load_8(strand + 704 + 8 * g + 4 * h + (pair >> 1)) << 24;
            w[4 + h] = 0;
            for (int b = 0; b < 3; b++) {
                w[2 + h] |= load_8(strand + 512 + 24 * g + 12 * h + 4 * b + (pair >> 1)) << 8 * b;
                w[4 + h] |= (load_16(strand + 768 + 12 * g + 6 * h + 2 * b) >> 2 * pair & 3) << 2 * b;
            }
        }
        raw->d = load_32(strand + 864 + 4 * pair);
        break;
    }
}

/* ---- Decoding -------------------------------------------------------------------------------------------------------------------------- */

/* Index [row] or [2*half + row]: row 0 is tile row 2*pair, row 1 the next. */
struct dot_group {
    uint32_t code[4];     /* A fragment: rows of the first dword, rows of the second */
    uint32_t negative[4]; /* dot_is_signed */
    float d[2], other[2]; /* other: dmin, or the second half's d */
    int32_t scale[4], min[4];
};

DEVICE_FN void halves_value(uint32_t two, float *d)
{
    d[0] = half_value((uint16_t)two);
    d[1] = half_value((uint16_t)(two >> 16));
}

/* Two rows' entries of a nibs section, from the 16 bits that hold them: rows 8..15 are the high nibbles. */
DEVICE_FN uint32_t nibs_value(uint32_t v, int row) { return v >> (8 * row + (lane_id() >> 4) * 4) & 15; }
/* And of a two section. */
DEVICE_FN uint32_t two_value(uint32_t v, int row) { return v >> (8 * row + (lane_id() >> 3) * 2) & 3; }

/* Nibbles as two dwords of indexes into 16 levels: `low` from the low nibbles. Each half of the levels is looked up, then the right one picked. */
DEVICE_FN void nib4_lookup(uint32_t v, const uint32_t *levels, uint32_t *low, uint32_t *high)
{
    uint32_t index = v & 0x77777777u, pick = (v >> 1 & 0x44444444u) | 0x32103210u, mixed[2];
    for (int i = 0; i < 2; i++)
        mixed[i] = permute(permute(levels[0], levels[1], index >> 16 * i), permute(levels[2], levels[3], index >> 16 * i), pick >> 16 * i);
    *low = permute(mixed[0], mixed[1], 0x6420);
    *high = permute(mixed[0], mixed[1], 0x7531);
}

#define LEVELS(a, b, c, d) ((uint32_t)(uint8_t)(a) | (uint32_t)(uint8_t)(b) << 8 | (uint32_t)(uint8_t)(c) << 16 | (uint32_t)(uint8_t)(d) << 24)

DEVICE_FN void nib4_codes(int type, const uint32_t *w, uint32_t *code)
{
    const uint32_t iq4nl[4] = { LEVELS(-127, -104, -83, -65), LEVELS(-49, -35, -22, -10), LEVELS(1, 13, 25, 38), LEVELS(53, 69, 89, 113) };
    const uint32_t fp4[4] = { LEVELS(0, 1, 2, 3), LEVELS(4, 6, 8, 12), LEVELS(0, -1, -2, -3), LEVELS(-4, -6, -8, -12) };
    for (int row = 0; row < 2; row++)
        if (type == QUANT_IQ4_NL || type == QUANT_IQ4_XS) {
            nib4_lookup(w[row], iq4nl, &code[row], &code[2 + row]);
        } else if (type == QUANT_MXFP4 || type == QUANT_NVFP4) {
            nib4_lookup(w[row], fp4, &code[row], &code[2 + row]);
        } else {
            code[row] = w[row] & 0x0f0f0f0fu;
            code[2 + row] = w[row] >> 4 & 0x0f0f0f0fu;
        }
}

/* Bit `quad` and bit quad + 4 of each byte of a bit1 section, times `value`. */
DEVICE_FN void bit1_add(const uint32_t *w, int value, uint32_t *code)
{
    int quad = lane_id() & 3;
    for (int row = 0; row < 2; row++) {
        code[row] |= (w[row] >> quad & 0x01010101u) * (uint32_t)value;
        code[2 + row] |= (w[row] >> (quad + 4) & 0x01010101u) * (uint32_t)value;
    }
}

/* Half of an unsigned E4M3: as the exponent and mantissa of a binary16 it is short of 2^7; 0x7f is zero, bit 7 is ignored. */
DEVICE_FN float ue4m3_half(uint32_t x)
{
    float value = half_value((uint16_t)(x << 7 & 0x3f80)) * 0x1p7f;
    return x == 0x7f ? 0.0f : value;
}

/* The 8 columns `group of 8` of sign7: seven signs and their parity; columns 0..3 in bits 0..3, columns 4..7 in bits 8..11. `v` is shifted to them. */
DEVICE_FN uint32_t sign7_complete(uint32_t v)
{
    v &= 0x70f;
    return v | (uint32_t)(__popc(v) & 1) << 11;
}

/* The four free bits of sign7 (11, 15, 27, 31) as a number: the product brings them together at the top. */
DEVICE_FN uint32_t sign7_free(uint32_t v) { return (v & 0x88008800u) * 0x24009u >> 28; }

/* An entry of four weights (IQ3). */
DEVICE_FN uint32_t entry_4(int type, const uint32_t *table, uint32_t index)
{
    return table[index * (uint32_t)dot_copies(type) + (uint32_t)(lane_id() & (dot_copies(type) - 1))];
}

/* An entry of eight weights (IQ2, IQ1), and one half of it: lanes 2k and 2k + 1 read the two halves of one entry. */
DEVICE_FN uint2 entry_8(int type, const uint32_t *table, uint32_t index)
{
    return ((const uint2 *)(const void *)table)[index * (uint32_t)dot_copies(type) + (uint32_t)(lane_id() & (dot_copies(type) - 1))];
}
DEVICE_FN uint32_t entry_8_half(int type, const uint32_t *table, uint32_t index)
{
    uint32_t copy = (uint32_t)(lane_id() >> 1 & (dot_copies(type) - 1));
    return table[2 * (index * (uint32_t)dot_copies(type) + copy) + (uint32_t)(lane_id() & 1)];
}

/* IQ3: two entries a row, neighbours of one half. high(row): the ninth bits, in bits 0 and 1. */
DEVICE_FN void iq3_codes(int type, const uint32_t *w, const uint32_t *high, const uint32_t *signs, const uint32_t *table, struct dot_group *out)
{
    int shift = 16 * (lane_id() & 1);
    for (int row = 0; row < 2; row++) {
        uint32_t two = w[row] >> shift;
        for (int k = 0; k < 2; k++) {
            uint32_t index = (two >> 8 * k & 255) | (high[row] >> k & 1) << 8;
            out->negative[2 * k + row] = sign_bytes(signs[row] >> 8 * k & 15);
            out->code[2 * k + row] = entry_4(type, table, index) ^ out->negative[2 * k + row];
        }
    }
}

DEVICE_FN void dot_decode(int type, const struct dot_raw *raw, const uint32_t *table, struct dot_group *out)
{
    int pair = lane_id() >> 2, quad = lane_id() & 3, half = quad >> 1, eight = quad & 1; /* PAIRS: half and eight columns that this lane has */
    const uint32_t *w = raw->w;
    if (type != QUANT_MXFP4 && type != QUANT_NVFP4)
        halves_value(raw->d, out->d);
    switch (type) {
    case QUANT_Q8_0:
        for (int i = 0; i < 4; i++)
            out->code[i] = w[i];
        break;
    case QUANT_Q1_0:
        for (int row = 0; row < 2; row++) {
            uint32_t v = w[row] >> 2 * quad;
            out->code[row] = (v & 0x01010101u) << 1;
            out->code[2 + row] = v & 0x02020202u;
        }
        break;
    case QUANT_Q2_0:
        for (int row = 0; row < 2; row++) {
            uint32_t v = w[row] >> 4 * eight;
            out->code[row] = v & 0x03030303u;
            out->code[2 + row] = v >> 2 & 0x03030303u;
        }
        break;

    case QUANT_Q4_0: case QUANT_IQ4_NL:
        nib4_codes(type, w, out->code);
        break;
    case QUANT_Q5_0:
        nib4_codes(type, w, out->code);
        bit1_add(w + 2, 16, out->code);
        break;
    case QUANT_Q4_1: case QUANT_Q5_1:
        nib4_codes(type, w, out->code);
        if (type == QUANT_Q5_1)
            bit1_add(w + 2, 16, out->code);
        halves_value(raw->dmin ^ 0x80008000u, out->other);
        break;
    case QUANT_MXFP4:
        nib4_codes(type, w, out->code);
        for (int row = 0; row < 2; row++) {
            uint32_t e = raw->d >> 8 * row & 255; /* 2^(e - 128): the codes are twice E2M1; the two smallest are denormals */
            out->d[row] = bits_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
        }
        break;
    case QUANT_NVFP4:
        nib4_codes(type, w, out->code);
        for (int row = 0; row < 2; row++) {
            out->d[row] = ue4m3_half(raw->d >> 8 * row & 255);
            out->other[row] = ue4m3_half(raw->dmin >> 8 * row & 255);
        }
        break;
    case QUANT_IQ4_XS:
        nib4_codes(type, w, out->code);
        for (int row = 0; row < 2; row++)
            out->d[row] *= (float)((int32_t)(nibs_value(w[2], row) | two_value(w[3], row) << 4) - 32);
        break;

    case QUANT_Q2_K:
        for (int i = 0; i < 4; i++) {
            uint32_t both = w[4 + i / 2] >> 8 * (i % 2) & 255;
            out->code[i] = w[i] >> 2 * quad & 0x03030303u;
            out->scale[i] = (int32_t)(both & 15);
            out->min[i] = (int32_t)(both >> 4);
        }
        halves_value(raw->dmin, out->other);
        break;
    case QUANT_Q3_K:
        for (int i = 0; i < 4; i++) {
            uint32_t low = nibs_value(w[6] >> 16 * (i / 2), i % 2), high = two_value(w[7] >> 16 * (i / 2), i % 2);
            out->code[i] = w[i] >> 2 * quad & 0x03030303u;
            out->scale[i] = (int32_t)(low | high << 4) - 32;
        }
        bit1_add(w + 4, 4, out->code);
        break;
    case QUANT_Q4_K: case QUANT_Q5_K: {
        float m[2];
        nib4_codes(type, w, out->code);
        if (type == QUANT_Q5_K)
            bit1_add(w + 2, 16, out->code);
        halves_value(raw->dmin, m);
        for (int row = 0; row < 2; row++) {
            uint32_t high = nibs_value(w[6], row);
            out->d[row] *= (float)(nibs_value(w[4], row) | (high & 3) << 4);
            out->other[row] = m[row] * (float)(nibs_value(w[5], row) | (high & 12) << 2);
        }
        break;
    }
    case QUANT_Q6_K:
        nib4_codes(type, w, out->code);
        for (int i = 0; i < 4; i++) {
            out->code[i] |= (w[2 + i] >> 2 * quad & 0x03030303u) << 4;
            out->scale[i] = (int8_t)(w[6 + i / 2] >> 8 * (i % 2));
        }
        break;

    case QUANT_IQ3_S: {
        uint32_t high[2], signs[2];
        for (int row = 0; row < 2; row++) {
            high[row] = w[4] >> (4 * row + 2 * eight);
            signs[row] = w[2 + row] >> (16 * eight + 4 * half);
            out->d[row] *= (float)(2 * nibs_value(w[5], row) + 1);
        }
        iq3_codes(type, w, high, signs, table, out);
        break;
    }
    case QUANT_IQ3_XXS: {
        uint32_t high[2] = { 0, 0 }, signs[2];
        for (int row = 0; row < 2; row++) {
            signs[row] = sign7_complete(w[2 + row] >> (16 * eight + 4 * half));
            out->d[row] *= 0.25f * (float)(2 * sign7_free(w[2 + row]) + 1);
        }
        iq3_codes(type, w, high, signs, table, out);
        break;
    }
    case QUANT_IQ2_XXS:
        for (int row = 0; row < 2; row++) {
            uint2 entry = entry_8(type, table, w[0] >> (16 * row + 8 * eight) & 255);
            uint32_t signs = sign7_complete(w[2 + row] >> (16 * eight + 4 * half));
            out->negative[row] = sign_bytes(signs & 15);
            out->negative[2 + row] = sign_bytes(signs >> 8);
            out->code[row] = entry.x ^ out->negative[row];
            out->code[2 + row] = entry.y ^ out->negative[2 + row];
            out->d[row] *= 0.125f * (float)(2 * sign7_free(w[2 + row]) + 1);
        }
        break;
    case QUANT_IQ2_XS: case QUANT_IQ2_S: /* SPLIT: columns 4*quad of both halves, so eight = quad / 2 and the entry's half quad % 2 */
        for (int i = 0; i < 4; i++) {
            int h = i / 2, row = i % 2;
            uint32_t index = w[h] >> (16 * row + 8 * half) & 255, signs = w[2 + row] >> (16 * half + 4 * h);
            if (type == QUANT_IQ2_XS) {
                index |= (signs >> 11 & 1) << 8; /* the free bit */
                signs = sign7_complete(signs) >> 8 * eight & 15;
            } else {
                uint32_t bit = (uint32_t)(4 * (pair & 1) + 2 * row + half);
                index |= (w[5 + h] >> bit & 1) << 8 | (w[5 + h] >> (8 + bit) & 1) << 9;
                signs = signs >> 8 * eight & 15;
            }
            out->negative[i] = sign_bytes(signs);
            out->code[i] = entry_8_half(type, table, index) ^ out->negative[i];
            out->scale[i] = (int32_t)(2 * (w[4] >> (8 * row + 4 * h) & 15) + 1);
        }
        for (int row = 0; row < 2; row++)
            out->d[row] *= 0.125f;
        break;
    case QUANT_IQ1_S:
        for (int row = 0; row < 2; row++) {
            uint32_t bit = (uint32_t)(4 * (pair & 1) + 2 * row + eight), index = w[0] >> (16 * row + 8 * eight) & 255, scale = nibs_value(w[4], row);
            for (int b = 0; b < 3; b++)
                index |= (w[1 + b] >> bit & 1) << (8 + b);
            uint2 entry = entry_8(type, table, index);
            uint32_t up = scale & 8 ? 0 : 0x02020202u; /* an eighth down or up, the bias being nine */
            out->code[row] = entry.x + up;
            out->code[2 + row] = entry.y + up;
            out->d[row] *= 0.125f * (float)(2 * (scale & 7) + 1);
        }
        break;
    case QUANT_IQ1_M:
        for (int i = 0; i < 4; i++) {
            int h = i / 2, row = i % 2;
            uint32_t bit = (uint32_t)(4 * (pair & 1) + 2 * row + half), index = w[h] >> (16 * row + 8 * half) & 255, scale = 0;
            for (int b = 0; b < 3; b++) {
                index |= (w[2 + h] >> (8 * b + bit) & 1) << (8 + b);
                scale |= (w[4 + h] >> (2 * b + row) & 1) << b;
            }
            out->code[i] = entry_8_half(type, table, index) + (w[2 + h] >> (24 + bit) & 1 ? 0 : 0x02020202u);
            out->scale[i] = (int32_t)(2 * scale + 1);
        }
        for (int row = 0; row < 2; row++)
            out->d[row] *= 0.125f;
        break;
    }
}

#endif
