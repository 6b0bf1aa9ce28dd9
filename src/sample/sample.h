/* sample.h - which token comes next, given the logits.
 *
 * Owns the choice and the random numbers behind it. It knows tokens as numbers only: no model, no text, no grammar (a grammar hands
 * in the set of allowed tokens). The invariant: the token is a function of (logits, parameters, history, seed, position) alone, on
 * every machine, so drafts, batches and restarts cannot change it.
 *
 * The steps, in the order of llama.cpp's default chain: allowed tokens, penalties, top-k, top-p, min-p, temperature, draw. Top-p
 * and min-p hence look at the probabilities before the temperature. At temperature 0 the best token after the penalties is taken.
 * "Best first" is by logit, equal logits by lower id. NaN counts as -infinity.
 *
 * Probabilities are integers: weight(token) = e^(logit - best logit) in units of 2^-42, rounded. Sums of integers do not depend on
 * their order, so this needs no written order and any backend may add them up in any way. What is below half a unit, 1e-13 of the
 * best token's probability, is never drawn. The draw takes u * total / 2^64 for the 64 random bits u of (seed, position), and the
 * first token, best first, at which the running sum of the weights passes it.
 */
#ifndef SAMPLE_SAMPLE_H
#define SAMPLE_SAMPLE_H

#include "base/error.h"

enum { SAMPLE_MAX_VOCAB = 1 << 21 }; /* so that a sum of weights stays below 2^63 */

struct sample_params {
    float temperature;       /* 0: greedy */
    float top_p;             /* the fewest best tokens that together have at least this probability; 1: all; 0: the best one */
    float min_p;             /* none below this part of the best token's probability; 0: all */
    int top_k;               /* the k best tokens; 0: all */
    float repeat_penalty;    /* tokens of the window: a logit above 0 is divided by it, others multiplied; 1: none */
    float frequency_penalty; /* subtracted once for every time a token occurs in the window; 0: none */
    float presence_penalty;  /* subtracted once if it occurs at all; 0: none */
    int penalty_last_n;      /* the window: the last n tokens of the history; 0: no penalties, -1: all of it */
    uint64_t seed;
    const uint32_t *allowed; /* [(n_vocab + 31) / 32]: token t may be chosen if bit t%32 of word t/32 is set; NULL: all */
};

/* Says which parameter is out of its range. The ranges: temperature 0 .. 100, top_p and min_p 0 .. 1, top_k >= 0, repeat_penalty
 * 0.01 .. 100, the other penalties -100 .. 100, penalty_last_n >= -1. */
int sample_check(const struct sample_params *params, struct strata_error *error);

/* Scratch memory for vocabularies up to n_vocab (1 .. SAMPLE_MAX_VOCAB); holds no state between calls. One thread at a time. */
struct sampler;
int sampler_create(struct sampler **out, int n_vocab, struct strata_error *error);
void sampler_destroy(struct sampler *sampler); /* NULL is allowed */

/* The token for `position`: the place that it will take in the sequence. logits: [n_vocab]; history: the n_history tokens before
 * it, ids outside the vocabulary are ignored. The parameters passed sample_check. If every allowed logit is -infinity or NaN: the
 * first allowed token. -1 if no token is allowed or n_vocab is not one the sampler was made for. */
int32_t sample_token(struct sampler *sampler, const struct sample_params *params, const float *logits, int n_vocab,
                     const int32_t *history, size_t n_history, uint64_t position);

/* The parts of the definition, for tests and other backends. */

/* Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011). */
void sample_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);
/* 64 uniform random bits: Philox with key = seed and counter = position, low words first; the first two output words, low first. */
uint64_t sample_random(uint64_t seed, uint64_t position);
/* e^x in units of 2^-42, rounded, for x <= 0: 2^42 at 0; 0 from -30 down and for NaN. */
uint64_t sample_weight(double x);

#endif
