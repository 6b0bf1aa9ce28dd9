/* quant_random.h - random blocks and weights that tests/test_quant.c and tools/oracle/ggml_vectors.c both make from a seed, so that
 * only hashes need recording. Integers only, hence the same everywhere. */
#ifndef TESTS_QUANT_RANDOM_H
#define TESTS_QUANT_RANDOM_H

#include <stdint.h>

enum { QUANT_VECTOR_BLOCKS = 64, QUANT_VECTOR_WEIGHTS = 64 * 256 };

/* A block format as ggml sees it, independently of src/quant. `half` lists the offsets of the block's binary16 fields, -1: none. */
struct quant_layout {
    const char *name;
    uint32_t type;
    int block, bytes, half[2];
};

static const struct quant_layout quant_layouts[] = {
    { "q4_0", 2, 32, 18, { 0, -1 } },      { "q4_1", 3, 32, 20, { 0, 2 } },       { "q5_0", 6, 32, 22, { 0, -1 } },
    { "q5_1", 7, 32, 24, { 0, 2 } },       { "q8_0", 8, 32, 34, { 0, -1 } },      { "q2_K", 10, 256, 84, { 80, 82 } },
    { "q3_K", 11, 256, 110, { 108, -1 } }, { "q4_K", 12, 256, 144, { 0, 2 } },    { "q5_K", 13, 256, 176, { 0, 2 } },
    { "q6_K", 14, 256, 210, { 208, -1 } }, { "iq2_xxs", 16, 256, 66, { 0, -1 } }, { "iq2_xs", 17, 256, 74, { 0, -1 } },
    { "iq3_xxs", 18, 256, 98, { 0, -1 } }, { "iq1_s", 19, 256, 50, { 0, -1 } },   { "iq4_nl", 20, 32, 18, { 0, -1 } },
    { "iq3_s", 21, 256, 110, { 0, -1 } },  { "iq2_s", 22, 256, 82, { 0, -1 } },   { "iq4_xs", 23, 256, 136, { 0, -1 } },
    { "iq1_m", 29, 256, 56, { -1, -1 } },  { "mxfp4", 39, 32, 17, { -1, -1 } },   { "nvfp4", 40, 64, 36, { -1, -1 } },
    { "q1_0", 41, 128, 18, { 0, -1 } },    { "q2_0", 42, 64, 18, { 0, -1 } },
};
enum { QUANT_LAYOUTS = sizeof quant_layouts / sizeof *quant_layouts };

static inline uint64_t quant_random(uint64_t *state) /* splitmix64 */
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Any bits, except that binary16 scales are finite. */
static inline void quant_random_block(const struct quant_layout *layout, uint64_t *state, uint8_t *out)
{
    for (int i = 0; i < layout->bytes; i++)
        out[i] = (uint8_t)(quant_random(state) >> 32);
    for (int k = 0; k < 2; k++) {
        uint8_t *high = out + layout->half[k] + 1;
        if (layout->half[k] >= 0 && (*high & 0x7c) == 0x7c)
            *high ^= 0x40;
    }
    if (layout->type == 29 && (out[55] & 0x70) == 0x70 &&
        (out[53] & 0xc0) == 0xc0) /* IQ1_M: exponent in the top nibbles of two words */
        out[55] ^= 0x40;
}

/* Nearly normal with deviation 1: the sum of 12 uniform numbers, an exact multiple of 2^-16. */
static inline float quant_random_normal(uint64_t *state)
{
    int64_t sum = 0;
    for (int i = 0; i < 12; i++)
        sum += (int64_t)(quant_random(state) >> 48);
    return (float)(sum - 6 * 65536) * 0x1p-16f;
}

/* Weights as a trained matrix has them, about 0.02 in size, and their importances: between 1/16 and 16, independent of the weights.
 */
static inline void quant_random_weights(float *weights, float *importance)
{
    uint64_t state = 2026;
    for (int i = 0; i < QUANT_VECTOR_WEIGHTS; i++) {
        float u = (float)(quant_random(&state) >> 48) * 0x1p-14f; /* 0..4 */
        weights[i] = quant_random_normal(&state) * 0.02f;
        importance[i] = u * u + 0.0625f;
    }
}

#endif
