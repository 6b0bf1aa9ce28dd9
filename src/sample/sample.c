#include "sample/sample.h"

#include "base/half.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct sampler {
    int n_vocab;
    float *logits;    /* [n_vocab], after mask and penalties: finite or -infinity, no negative zero */
    uint64_t *keys;   /* [n_vocab], candidates: see key_of */
    uint32_t *counts; /* [n_vocab], all zero between calls */
};

static int check_range(const char *name, double value, double low, double high, struct strata_error *error)
{
    if (value >= low && value <= high)
        return 0;
    return error_set(error, STRATA_E_ARGUMENT, "%s is %g, wanted %g to %g", name, value, low, high);
}

int sample_check(const struct sample_params *p, struct strata_error *error)
{
    int code = check_range("temperature", (double)p->temperature, 0, 100, error);
    code = code ? code : check_range("top_p", (double)p->top_p, 0, 1, error);
    code = code ? code : check_range("min_p", (double)p->min_p, 0, 1, error);
    code = code ? code : check_range("repeat_penalty", (double)p->repeat_penalty, (double)0.01f, 100, error);
    code = code ? code : check_range("frequency_penalty", (double)p->frequency_penalty, -100, 100, error);
    code = code ? code : check_range("presence_penalty", (double)p->presence_penalty, -100, 100, error);
    if (code)
        return code;
    if (p->top_k < 0)
        return error_set(error, STRATA_E_ARGUMENT, "top_k is %d, wanted 0 (all) or more", p->top_k);
    if (p->penalty_last_n < -1)
        return error_set(error, STRATA_E_ARGUMENT, "penalty_last_n is %d, wanted -1 (the whole history) or more",
                         p->penalty_last_n);
    return 0;
}

int sampler_create(struct sampler **out, int n_vocab, struct strata_error *error)
{
    *out = NULL;
    if (n_vocab < 1 || n_vocab > SAMPLE_MAX_VOCAB)
        return error_set(error, STRATA_E_ARGUMENT, "sampler: a vocabulary of %d tokens, wanted 1 to %d", n_vocab, SAMPLE_MAX_VOCAB);
    struct sampler *s = calloc(1, sizeof *s);
    size_t n = (size_t)n_vocab;
    if (s) {
        s->n_vocab = n_vocab;
        s->logits = malloc(n * sizeof *s->logits);
        s->keys = malloc(n * sizeof *s->keys);
        s->counts = calloc(n, sizeof *s->counts);
    }
    if (!s || !s->logits || !s->keys || !s->counts) {
        sampler_destroy(s);
        return error_set(error, STRATA_E_MEMORY, "sampler: out of memory for %d tokens", n_vocab);
    }
    *out = s;
    return 0;
}

void sampler_destroy(struct sampler *sampler)
{
    if (!sampler)
        return;
    free(sampler->logits);
    free(sampler->keys);
    free(sampler->counts);
    free(sampler);
}

/* ---- Random numbers and weights --------------------------------------------------------------------------------------------- */

void sample_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3], k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)c0 * 0xd2511f53u, b = (uint64_t)c2 * 0xcd9e8d57u;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)a;
        k0 += 0x9e3779b9u; /* the golden ratio */
        k1 += 0xbb67ae85u; /* sqrt(3) - 1 */
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

uint64_t sample_random(uint64_t seed, uint64_t position)
{
    uint32_t out[4];
    sample_philox((uint32_t[]){ (uint32_t)position, (uint32_t)(position >> 32), 0, 0 },
                  (uint32_t[]){ (uint32_t)seed, (uint32_t)(seed >> 32) }, out);
    return out[0] | (uint64_t)out[1] << 32;
}

static double bits_double(uint64_t u)
{
    double d;
    memcpy(&d, &u, 8);
    return d;
}

static uint64_t double_bits(double d)
{
    uint64_t u;
    memcpy(&u, &d, 8);
    return u;
}

/* x = n ln2 + r, |r| <= ln2/2; ln2 is split so that n * high is exact; Taylor to r^11 leaves 1e-14 of the value. Adding 1.5 * 2^52
 * rounds to an integer, which is then in the low bits. No branches and no conversions, so that the sum over a vocabulary runs in
 * vectors on every x86-64; no fused operations, which are slow where the instruction is missing, and 42 bits need none. */
static inline uint64_t weight_of(double x)
{
    double inside = x > -30 ? x : -30; /* there 0.4 units: rounds to 0 */
    double shifted = inside * 0x1.71547652b82fep0 + 0x1.8p52;
    double n = shifted - 0x1.8p52;
    double r = (inside - n * 0x1.62e42feep-1) - n * 0x1.a39ef35793c76p-33;
    double p = 1.0 / 39916800;
    p = p * r + 1.0 / 3628800;
    p = p * r + 1.0 / 362880;
    p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    p = p * r + 1;
    p = p * r + 1;
    double scale = bits_double((double_bits(shifted) + 42 + 1023) << 52); /* 2^(n + 42), n = -43 .. 0 */
    return double_bits(p * scale + 0x1.8p52) - double_bits(0x1.8p52);
}

uint64_t sample_weight(double x) { return weight_of(x); }

/* ---- Logits ----------------------------------------------------------------------------------------------------------------- */

/* NaN to -infinity, +infinity to the largest float, -0 to +0. */
static inline float settled(float x)
{
    float low = x < FLT_MAX ? x : FLT_MAX; /* NaN gives FLT_MAX here and is caught below */
    return x >= -FLT_MAX ? low + 0.0f : -INFINITY;
}

static float penalized(float logit, uint32_t count, const struct sample_params *p)
{
    logit = logit > 0 ? logit / p->repeat_penalty : logit * p->repeat_penalty;
    return logit - (float)count * p->frequency_penalty - p->presence_penalty;
}

static void apply_penalties(struct sampler *s, const struct sample_params *p, int n_vocab, const int32_t *history, size_t n_history)
{
    if (p->penalty_last_n >= 0 && (size_t)p->penalty_last_n < n_history) {
        history += n_history - (size_t)p->penalty_last_n;
        n_history = (size_t)p->penalty_last_n;
    }
    for (size_t i = 0; i < n_history; i++)
        if (history[i] >= 0 && history[i] < n_vocab)
            s->counts[history[i]]++;
    for (size_t i = 0; i < n_history; i++) {
        int32_t token = history[i];
        if (token < 0 || token >= n_vocab || !s->counts[token])
            continue;
        if (s->logits[token] > -INFINITY)
            s->logits[token] = settled(penalized(s->logits[token], s->counts[token], p));
        s->counts[token] = 0; /* done, and ready for the next call */
    }
}

static bool is_allowed(const uint32_t *allowed, int token) { return !allowed || (allowed[token / 32] >> token % 32 & 1); }

static float largest_of(const float *logits, int n)
{
    float part[16]; /* independent chains, so that the compiler can use vectors */
    for (int j = 0; j < 16; j++)
        part[j] = -INFINITY;
    int i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < 16; j++)
            part[j] = logits[i + j] > part[j] ? logits[i + j] : part[j];
    for (; i < n; i++)
        part[0] = logits[i] > part[0] ? logits[i] : part[0];
    for (int j = 1; j < 16; j++)
        part[0] = part[j] > part[0] ? part[j] : part[0];
    return part[0];
}

/* ---- Candidates ------------------------------------------------------------------------------------------------------------- */

/* A candidate is one number that sorts: the logit's bits, made to grow with the logit, above the complement of the id. A smaller
 * key is worse. */
static uint64_t key_of(float logit, int token)
{
    uint32_t bits = float_bits(logit);
    bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u;
    return (uint64_t)bits << 32 | (0xffffffffu - (uint32_t)token);
}

static float key_logit(uint64_t key)
{
    uint32_t bits = (uint32_t)(key >> 32);
    return bits_float(bits ^ (bits >> 31 ? 0x80000000u : 0xffffffffu));
}

static int32_t key_token(uint64_t key) { return (int32_t)(0xffffffffu - (uint32_t)key); }

/* Heaps have the worst key on top. */
static void sift_down(uint64_t *heap, size_t n, size_t at)
{
    uint64_t moved = heap[at];
    for (size_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && heap[child + 1] < heap[child])
            child++;
        if (moved <= heap[child])
            break;
        heap[at] = heap[child];
    }
    heap[at] = moved;
}

/* Writes the keys of the k best tokens, best first. One pass: a heap holds the k best so far, its top is what a token must beat,
 * and few do. */
static void best_keys(const float *logits, int n_vocab, int k, uint64_t *keys)
{
    size_t n = (size_t)k;
    for (int i = 0; i < k; i++)
        keys[i] = key_of(logits[i], i);
    for (size_t i = n / 2; i-- > 0;)
        sift_down(keys, n, i);
    float worst = key_logit(keys[0]);
    for (int i = k; i < n_vocab; i++) {
        if (!(logits[i] > worst)) /* an equal logit loses by its higher id */
            continue;
        keys[0] = key_of(logits[i], i);
        sift_down(keys, n, 0);
        worst = key_logit(keys[0]);
    }
    while (n > 1) { /* the worst goes to the end */
        uint64_t moved = keys[0];
        keys[0] = keys[--n];
        keys[n] = moved;
        sift_down(keys, n, 0);
    }
}

/* The tokens that may be drawn, best first. Without top-k that is the whole vocabulary, of which only the first few matter nearly
 * always: they are ranked as far as somebody asks, in steps that multiply. */
struct ranking {
    const struct sampler *s;
    int n_vocab, limit, ranked; /* `limit` tokens may be drawn, the first `ranked` of them are in s->keys */
};

enum { FIRST_RANKED = 128, RANKED_STEP = 8 };

static uint64_t ranking_key(struct ranking *r, int i)
{
    if (i >= r->ranked) {
        int wanted = r->limit < r->n_vocab ? r->limit : r->ranked ? r->ranked * RANKED_STEP : FIRST_RANKED;
        r->ranked = wanted < r->limit ? wanted : r->limit;
        best_keys(r->s->logits, r->n_vocab, r->ranked, r->s->keys);
    }
    return r->s->keys[i];
}

static uint64_t weight_at(struct ranking *r, int i, double best, double temperature)
{
    return weight_of(((double)key_logit(ranking_key(r, i)) - best) / temperature);
}

static uint64_t total_weight(struct ranking *r, double best, double temperature)
{
    uint64_t total = 0;
    if (r->limit < r->n_vocab)
        for (int i = 0; i < r->limit; i++)
            total += weight_at(r, i, best, temperature);
    else
        for (int i = 0; i < r->n_vocab; i++) /* needs no ranking */
            total += weight_of(((double)r->s->logits[i] - best) / temperature);
    return total;
}

/* Top-p and min-p: each keeps the first so many, the limit becomes the smaller of the two. */
static void cut(struct ranking *r, const struct sample_params *p, double best)
{
    if (p->top_p >= 1 && p->min_p <= 0)
        return;
    double enough = p->top_p < 1 ? (double)p->top_p * (double)total_weight(r, best, 1) : INFINITY;
    double least = (double)p->min_p * 0x1p42;
    uint64_t sum = weight_at(r, 0, best, 1), weight;
    int kept = 1;
    for (; kept < r->limit && (double)sum < enough; kept++, sum += weight)
        if ((double)(weight = weight_at(r, kept, best, 1)) < least)
            break;
    r->limit = kept;
}

/* ---- The choice ------------------------------------------------------------------------------------------------------------- */

int32_t sample_token(struct sampler *s, const struct sample_params *p, const float *logits, int n_vocab, const int32_t *history,
                     size_t n_history, uint64_t position)
{
    if (n_vocab < 1 || n_vocab > s->n_vocab)
        return -1;
    for (int i = 0; i < n_vocab; i++)
        s->logits[i] = settled(logits[i]);
    for (int i = 0; p->allowed && i < n_vocab; i++)
        if (!is_allowed(p->allowed, i))
            s->logits[i] = -INFINITY;
    apply_penalties(s, p, n_vocab, history, n_history);

    float largest = largest_of(s->logits, n_vocab);
    double best = (double)largest, temperature = (double)p->temperature;
    if (largest == -INFINITY || temperature == 0) {
        int32_t token = 0;
        while (token < n_vocab && (s->logits[token] != largest || !is_allowed(p->allowed, token)))
            token++;
        return token < n_vocab ? token : -1;
    }

    struct ranking r = { s, n_vocab, p->top_k > 0 && p->top_k < n_vocab ? p->top_k : n_vocab, 0 };
    cut(&r, p, best);
    uint64_t total = total_weight(&r, best, temperature), sum = 0;
    uint64_t target = (uint64_t)((unsigned __int128)sample_random(p->seed, position) * total >> 64);
    int i = 0;
    while ((sum += weight_at(&r, i, best, temperature)) <= target && i + 1 < r.limit)
        i++;
    return key_token(ranking_key(&r, i));
}
