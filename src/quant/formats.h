/* formats.h - inside quant/ only: the functions behind the format table of quant.c, and little-endian loads.
 *
 * A format's `group` reads the file's bytes (group.c: scalar formats, group_grid.c: codebook formats), its `encode` writes one
 * block (encode.c, encode_super.c, encode_grid.c). Both know the block's fields by their byte offsets, as listed in spec/model.md
 * section 4.
 */
#ifndef QUANT_FORMATS_H
#define QUANT_FORMATS_H

#include "base/half.h"
#include "quant/quant.h"

typedef void quant_group_fn(const uint8_t *row, int g, struct quant_group *out);
typedef void quant_encode_fn(const float *weights, const float *importance, uint8_t *out);

quant_group_fn quant_group_q4_0, quant_group_q4_1, quant_group_q5_0, quant_group_q5_1, quant_group_q8_0, quant_group_q1_0,
    quant_group_q2_0;
quant_group_fn quant_group_q2_k, quant_group_q3_k, quant_group_q4_k, quant_group_q5_k, quant_group_q6_k;
quant_group_fn quant_group_iq4_nl, quant_group_iq4_xs, quant_group_mxfp4, quant_group_nvfp4;
quant_group_fn quant_group_iq2_xxs, quant_group_iq2_xs, quant_group_iq2_s, quant_group_iq3_xxs, quant_group_iq3_s;
quant_group_fn quant_group_iq1_s, quant_group_iq1_m;

quant_encode_fn quant_encode_q4_0, quant_encode_q4_1, quant_encode_q5_0, quant_encode_q5_1, quant_encode_q8_0, quant_encode_q1_0,
    quant_encode_q2_0;
quant_encode_fn quant_encode_iq4_nl, quant_encode_mxfp4;
quant_encode_fn quant_encode_q2_k, quant_encode_q3_k, quant_encode_q4_k, quant_encode_q5_k, quant_encode_q6_k, quant_encode_iq4_xs;
quant_encode_fn quant_encode_iq2_xxs, quant_encode_iq2_xs, quant_encode_iq2_s, quant_encode_iq3_xxs, quant_encode_iq3_s;

static inline uint16_t load_u16(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }
static inline uint32_t load_u32(const uint8_t *p) { return load_u16(p) | (uint32_t)load_u16(p + 2) << 16; }
static inline float load_half(const uint8_t *p) { return half_to_float(load_u16(p)); }

static inline void store_u16(uint8_t *p, uint32_t v)
{
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
}

static inline void store_u32(uint8_t *p, uint32_t v)
{
    store_u16(p, v);
    store_u16(p + 2, v >> 16);
}

/* A group with one scale for all 32 weights and no minimum; `group` functions overwrite what differs. */
static inline void group_one_scale(struct quant_group *out, float d)
{
    out->d[0] = out->d[1] = d;
    out->min[0] = out->min[1] = 0;
    out->dmin = 0;
    out->split = false;
}

/* Eight sign bits (bit j set: weight j is negative) from the seven that IQ2_XXS, IQ2_XS and IQ3_XXS store: the number of negative
 * weights is even. */
static inline uint32_t quant_sign8(uint32_t seven) { return seven | (uint32_t)__builtin_parity(seven) << 7; }

#endif
