/* shape.h - inside convert/ only: the numbers of a qwen4exp model, and the GGUF keys that they become (spec/model.md section 1). */
#ifndef CONVERT_SHAPE_H
#define CONVERT_SHAPE_H

#include "gguf/gguf.h"

enum { SHAPE_MAX_LAYERS = 1024, SHAPE_MAX_NGRAM_HEADS = 64 };

struct shape {
    int hidden, vocab, layers /* without the draft block */, context;
    int heads, kv_heads, head_dim, rope_dims;
    double rope_theta, eps;
    int n_sections, sections[4];
    int index_heads, index_dim, index_budget, index_block;
    int interval; /* layer i attends if (i + 1) % interval == 0; the others are DeltaNet layers */
    int k_heads, v_heads, k_dim, v_dim, conv_taps;
    int experts, experts_used, expert_width, shared_width;
    int streams, low_rank;
    int ngram_layer, ngram_size, ngram_heads /* of all orders */, ngram_width, ngram_taps;
    uint64_t multipliers[3], head_sizes[SHAPE_MAX_NGRAM_HEADS], head_offsets[SHAPE_MAX_NGRAM_HEADS];
    int hash_eos, image_token; /* image_token: -1 if there is none */
    bool mtp;                  /* a draft block follows the layers */
};

static inline bool shape_attends(const struct shape *s, int layer) { return (layer + 1) % s->interval == 0; }
static inline int64_t shape_wide(const struct shape *s) { return (int64_t)s->streams * s->hidden; }
/* Rows that the n-gram table must have. */
int64_t shape_ngram_rows(const struct shape *s);

/* general.architecture, general.type and every qwen4exp.* key. */
void shape_put_keys(const struct shape *s, struct gguf_writer *writer);

/* The n-gram hash's constants as the model's authors derive them: multipliers from a seed, head sizes as consecutive primes from
 * `base` on. */
void shape_hash_multipliers(uint64_t seed, int ngram_layer_index, int vocab, uint64_t out[3]);
void shape_hash_sizes(uint64_t base, int n_heads, uint64_t *sizes, uint64_t *offsets);

#endif
