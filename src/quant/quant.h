/* quant.h - the block formats of GGUF tensors: names, sizes, decoding, encoding.
 *
 * Owns the knowledge of what the bytes of a quantized row mean. It never touches files or models, and it never computes a
 * product (ops/ does). Everything here works on rows in the layout of the file; quant/tile.h re-orders them.
 *
 * Every format is described by one function that reads a *group* of 32 consecutive weights, because a group is the unit of the
 * quantized dot product (design.md, "Numbers", rule 2). Decoding to floats follows from it:
 *
 *     weight[i] = d[half] * code[i] - dmin * min[half],        half = i / 16
 *
 * Formulas: spec/model.md section 4, checked against ggml's decoders (tests/test_quant.c, tools/oracle/).
 */
#ifndef QUANT_QUANT_H
#define QUANT_QUANT_H

#include "base/error.h"

/* ggml's type ids, as stored in GGUF tensor infos. */
enum quant_type {
    QUANT_F32 = 0, QUANT_F16 = 1, QUANT_Q4_0 = 2, QUANT_Q4_1 = 3, QUANT_Q5_0 = 6, QUANT_Q5_1 = 7, QUANT_Q8_0 = 8,
    QUANT_Q2_K = 10, QUANT_Q3_K = 11, QUANT_Q4_K = 12, QUANT_Q5_K = 13, QUANT_Q6_K = 14,
    QUANT_IQ2_XXS = 16, QUANT_IQ2_XS = 17, QUANT_IQ3_XXS = 18, QUANT_IQ1_S = 19, QUANT_IQ4_NL = 20, QUANT_IQ3_S = 21,
    QUANT_IQ2_S = 22, QUANT_IQ4_XS = 23, QUANT_IQ1_M = 29, QUANT_BF16 = 30, QUANT_MXFP4 = 39, QUANT_NVFP4 = 40,
    QUANT_Q1_0 = 41, QUANT_Q2_0 = 42,
    QUANT_TYPE_LIMIT = 43,
};

/* 32 weights as exact integers and fp32 scales. Sub-scales of 16 weights that are integers are multiplied into `code`; scales
 * that cover the whole group are in `d` (exact in fp32). Only NVFP4 has two different d's: `split` is set, and a dot product
 * adds its two halves one after the other. */
struct quant_group {
    int16_t code[32];
    int16_t min[2]; /* integer minimum per half, 0 where the format has none */
    float d[2];
    float dmin;     /* weight = d*code - dmin*min; +m formats (Q4_1, Q5_1) give dmin = -m, min = 1 */
    bool split;
};

struct quant_format {
    const char *name;    /* as llama.cpp spells it: "Q8_0", "IQ3_S", "F32" */
    enum quant_type type;
    int block;           /* weights per block: 1, 32, 64, 128 or 256 */
    int bytes;           /* bytes per block */
    bool is_float;       /* F32, F16, BF16: no groups; ops read the values directly */
    bool has_min;        /* the group's minimum term is part of the dot product */
    /* Reads group `g` (weights 32g .. 32g+31) of a row. NULL for float formats. */
    void (*group)(const uint8_t *row, int g, struct quant_group *out);
    /* Encodes one block of `block` floats; `importance` [block] weighs the errors and may be NULL. NULL when Strata cannot write the format. */
    void (*encode)(const float *weights, const float *importance, uint8_t *out);
};

/* The format of a ggml type id, or NULL if Strata does not know it. */
const struct quant_format *quant_format_find(uint32_t type);
/* By name, any case ("q8_0"); NULL if unknown. */
const struct quant_format *quant_format_named(const char *name);
/* A name for any ggml type id, also those Strata cannot run ("TQ1_0"), or NULL: for error messages. */
const char *quant_type_name(uint32_t type);

/* Bytes of a row of `width` weights; width must be a multiple of the block. */
size_t quant_row_bytes(const struct quant_format *format, int64_t width);
/* Decodes / encodes a whole row; width is a multiple of the block. quant_encode needs format->encode (or a float format). */
void quant_decode(const struct quant_format *format, const uint8_t *row, int64_t width, float *out);
void quant_encode(const struct quant_format *format, const float *weights, const float *importance, int64_t width, uint8_t *row);

/* The codebooks (quant/grid.c), expanded: one entry is 8 (IQ2, IQ1) or 4 (IQ3) weights. SHA-256 in spec/model.md section 4. */
extern const uint8_t quant_grid_iq2xxs[256][8], quant_grid_iq2xs[512][8], quant_grid_iq2s[1024][8];
extern const uint8_t quant_grid_iq3xxs[256][4], quant_grid_iq3s[512][4];
extern const int8_t quant_grid_iq1s[2048][8];
extern const int8_t quant_iq4nl[16];  /* the IQ4_NL levels */
extern const int8_t quant_fp4[16];    /* twice the E2M1 values: MXFP4, NVFP4 */

#endif
