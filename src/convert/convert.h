/* convert.h - making model files: from a Hugging Face checkpoint, from another GGUF file, or out of random numbers.
 *
 * Owns the mapping of names, orders and values between a checkpoint and GGUF, and the choice of a type for every tensor. It never
 * runs a model. The invariant: memory use does not grow with the model, because every tensor passes in pieces of a few megabytes;
 * and the output file appears under its name only when it is complete.
 *
 * Names, permutations and keys: spec/model.md sections 1 and 2.
 */
#ifndef CONVERT_CONVERT_H
#define CONVERT_CONVERT_H

#include "quant/quant.h"

/* What the large tensors should become. NULL: the type that the source has. Small and sensitive tensors (vectors, convolutions,
 * router, ssm_alpha, ssm_beta, hc_*_inject) are always F32, and the indexer's projections keep 16 bits unless `dense` is F32. */
struct convert_types {
    const struct quant_format *dense;   /* projections, embedding, head, shared expert */
    const struct quant_format *gate_up; /* the experts' gate and up projections */
    const struct quant_format *down;    /* the experts' down projections */
    const struct quant_format *ngram;   /* the n-gram table */
};

struct convert_options {
    struct convert_types types;
    int threads;                                  /* 0: one per physical core */
    bool (*progress)(void *context, double part); /* 0..1; returns false to stop (STRATA_E_STOPPED). NULL: silent */
    void *progress_context;
};

/* What was done, for one line of text. */
struct convert_summary {
    uint64_t n_tensors, bytes; /* tensors and bytes of tensor data written */
    uint64_t n_fallbacks;      /* tensors whose rows do not divide into blocks of the wanted type */
    char fallbacks[160];       /* "96 x IQ3_S -> IQ4_NL, 1 x Q2_0 -> F16", may be cut short */
    uint64_t n_ignored;        /* checkpoint tensors without a place in the output (a vision tower) */
    char ignored[128];         /* the first one's name */
};

/* A checkpoint directory of architecture qwen4_exp (config.json, tokenizer.json, safetensors) -> GGUF. `mtp`: take the draft block
 * along if there is one. */
int convert_checkpoint(const char *directory, const char *out, bool mtp, const struct convert_options *options,
                       struct convert_summary *summary, struct strata_error *error);

/* A GGUF file (the first of a split one) -> one GGUF file with other types. */
int convert_quantize(const char *in, const char *out, const struct convert_options *options, struct convert_summary *summary,
                     struct strata_error *error);

/* Random weights in the shapes of a real model: loads and runs, at the real model's speed. */
struct convert_synth {
    const char *like;   /* "qwen3.8-flash-next", or "tiny" for tests */
    int n_layers;       /* 0: all */
    int64_t ngram_rows; /* rows of the n-gram table; 0: 1048576 (tiny: 4096) */
    double skew;        /* popularity of an expert: about rank^-skew; 0: all alike */
    double locality;    /* 0..1: how much of an embedding neighbouring tokens share, and so how many experts */
    uint64_t seed;
};
int convert_synthetic(const char *out, const struct convert_synth *synth, const struct convert_options *options,
                      struct convert_summary *summary, struct strata_error *error);

#endif
