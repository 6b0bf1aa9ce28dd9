/* hf.h - inside convert/ only: a Hugging Face checkpoint of architecture qwen4_exp, opened and understood.
 *
 * hf_config.c reads the numbers, hf_tensors.c maps the tensors, hf_tokenizer.c the vocabulary, hf.c puts the file together. */
#ifndef CONVERT_HF_H
#define CONVERT_HF_H

#include "convert/emit.h"
#include "convert/json.h"
#include "convert/safetensors.h"

enum { HF_MAX_LAYERS = 1024, HF_MAX_NGRAM_HEADS = 64 };

struct hf {
    const char *directory;
    struct safetensors *st;
    json_t *config, *generation; /* generation: NULL if the file is missing */
    const json_t *text;          /* the text model's part of config */
    const char *prefix;          /* "model." or "model.language_model." */

    int hidden, vocab, layers, context;
    int heads, kv_heads, head_dim, rope_dims;
    double rope_theta, eps;
    int n_sections, sections[4];
    int index_heads, index_dim, index_budget, index_block;
    int interval; /* layer i attends if (i + 1) % interval == 0; the others are DeltaNet layers */
    int k_heads, v_heads, k_dim, v_dim, conv_taps;
    int experts, experts_used, expert_width, shared_width;
    int streams, low_rank;
    int ngram_layer, ngram_size, ngram_heads /* of all orders */, ngram_width, ngram_taps;
    uint64_t multipliers[3], head_sizes[HF_MAX_NGRAM_HEADS], head_offsets[HF_MAX_NGRAM_HEADS];
    int hash_eos, image_token; /* image_token: -1 if there is none */
    bool mtp;
};

int hf_open(struct hf *hf, const char *directory, struct strata_error *error); /* after a failure too: hf_close */
void hf_close(struct hf *hf);

/* An integer of the configuration in [min, max]; fallback < min: required. */
int hf_int(const struct hf *hf, const json_t *object, const char *key, int min, int max, int fallback, int *out, struct strata_error *error);

/* Finds "PREFIX" "name" of the trunk (`name` without it), or NULL. */
struct safetensor *hf_find(const struct hf *hf, const char *prefix, const char *name);

int hf_put_keys(const struct hf *hf, struct gguf_writer *writer, struct strata_error *error);
int hf_put_tokenizer(const struct hf *hf, struct gguf_writer *writer, struct strata_error *error);
int hf_add_tensors(struct hf *hf, struct emit *emit, struct strata_error *error);

/* The n-gram hash's constants as the checkpoint's authors derive them: multipliers from a seed, head sizes as consecutive primes from `base` on. */
void hf_hash_multipliers(uint64_t seed, int ngram_layer_index, int vocab, uint64_t out[3]);
void hf_hash_sizes(uint64_t base, int n_heads, uint64_t *sizes, uint64_t *offsets);

#endif
