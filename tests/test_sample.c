/* Choosing tokens: hand-computed cases for every parameter, the random numbers against their published vectors and by their
 * statistics, and many random cases against a slow sampler that sorts everything. */
#include "sample/sample.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { N_VOCAB = 1000 };
static const struct sample_params greedy = { .top_p = 1, .repeat_penalty = 1 };
static const struct sample_params plain = { .temperature = 1, .top_p = 1, .repeat_penalty = 1 };
static struct sampler *sampler;
static float quarter[4]; /* logits of the probabilities 0.3, 0.05, 0.5, 0.15 */

static int create(void **state)
{
    static const float p[4] = { 0.3f, 0.05f, 0.5f, 0.15f };
    for (int i = 0; i < 4; i++)
        quarter[i] = logf(p[i]) + 4;
    return sampler_create(&sampler, N_VOCAB, NULL);
}

static int destroy(void **state)
{
    sampler_destroy(sampler);
    return 0;
}

static int32_t pick(const struct sample_params *p, const float *logits, int n)
{
    return sample_token(sampler, p, logits, n, NULL, 0, 1);
}

static int32_t pick_after(const struct sample_params *p, const float *logits, int n, const int32_t *history, size_t n_history)
{
    return sample_token(sampler, p, logits, n, history, n_history, n_history);
}

/* Counts of 10000 draws; a token's share must differ from zero by more than chance if it can be drawn at all. */
static void draw_many(const struct sample_params *p, const float *logits, int n, int *counts)
{
    memset(counts, 0, (size_t)n * sizeof *counts);
    for (uint64_t position = 0; position < 10000; position++)
        counts[sample_token(sampler, p, logits, n, NULL, 0, position)]++;
}

/* Exactly the tokens whose bit is set in `set` are drawn. */
static void assert_drawn_set(const struct sample_params *p, const float *logits, int n, unsigned set)
{
    int counts[32];
    draw_many(p, logits, n, counts);
    for (int i = 0; i < n; i++)
        assert_int_equal(counts[i] > 0, set >> i & 1);
}

/* Random logits with a spread like a model's; `state` advances. */
static void random_logits(uint64_t *state, float *logits, int n)
{
    for (int i = 0; i < n; i++) {
        uint64_t bits = sample_random(99, (*state)++);
        logits[i] = (float)((double)(bits >> 32) * 0x1p-32 + (double)(bits & 0xffffffff) * 0x1p-32) * 20 - 20;
    }
}

/* ---- Greedy --------------------------------------------------------------------------------------------------------------- */

static void greedy_takes_the_largest_logit(void **state)
{
    float logits[] = { -3, 1.5f, 7, 6.9999f };
    assert_int_equal(pick(&greedy, logits, 4), 2);
}

static void greedy_takes_the_lower_id_of_equal_logits(void **state)
{
    float logits[40] = { 0 };
    logits[19] = logits[23] = logits[37] = 2;
    assert_int_equal(pick(&greedy, logits, 40), 19);
    float zeros[] = { -0.0f, 0.0f };
    assert_int_equal(pick(&greedy, zeros, 2), 0);
}

static void a_nan_logit_is_never_chosen(void **state)
{
    float logits[] = { NAN, -5, NAN, -6 };
    assert_int_equal(pick(&greedy, logits, 4), 1);
    assert_drawn_set(&plain, logits, 4, 1 << 1 | 1 << 3);
}

static void an_infinite_logit_beats_all_others(void **state)
{
    float logits[] = { 3e38f, 0, INFINITY, -INFINITY };
    assert_int_equal(pick(&greedy, logits, 4), 2);
    assert_drawn_set(&plain, logits, 4, 1 << 2);
}

static void the_first_token_is_chosen_when_no_logit_is_a_number(void **state)
{
    float logits[] = { NAN, -INFINITY, NAN };
    uint32_t allowed = 6;
    struct sample_params p = plain;
    assert_int_equal(pick(&greedy, logits, 3), 0);
    assert_int_equal(pick(&plain, logits, 3), 0);
    p.allowed = &allowed;
    assert_int_equal(pick(&p, logits, 3), 1);
}

static void top_k_1_equals_greedy(void **state)
{
    static float logits[N_VOCAB];
    struct sample_params p = plain;
    p.top_k = 1;
    for (uint64_t i = 0, random = 0; i < 200; i++) {
        random_logits(&random, logits, N_VOCAB);
        assert_int_equal(sample_token(sampler, &p, logits, N_VOCAB, NULL, 0, i), pick(&greedy, logits, N_VOCAB));
    }
}

/* ---- Cuts ----------------------------------------------------------------------------------------------------------------- */

static void top_k_keeps_the_k_best(void **state)
{
    struct sample_params p = plain;
    p.top_k = 3;
    assert_drawn_set(&p, quarter, 4, 1 << 2 | 1 << 0 | 1 << 3);
}

static void top_k_keeps_the_lower_ids_of_equal_logits(void **state)
{
    float logits[] = { 1, 1, 2, 1, 1 };
    struct sample_params p = plain;
    p.top_k = 3;
    assert_drawn_set(&p, logits, 5, 1 << 0 | 1 << 1 | 1 << 2);
}

static void top_p_keeps_the_token_that_reaches_it(void **state)
{
    struct sample_params p = plain;
    p.top_p = 0.6f;
    assert_drawn_set(&p, quarter, 4, 1 << 2 | 1 << 0);
    p.top_p = 0.49f;
    assert_drawn_set(&p, quarter, 4, 1 << 2);
    p.top_p = 0.81f;
    assert_drawn_set(&p, quarter, 4, 1 << 2 | 1 << 0 | 1 << 3);
}

static void top_p_0_keeps_the_best_token(void **state)
{
    struct sample_params p = plain;
    p.top_p = 0;
    assert_drawn_set(&p, quarter, 4, 1 << 2);
}

static void top_p_counts_what_top_k_left(void **state) /* 0.5 / 0.8 = 0.625 */
{
    struct sample_params p = plain;
    p.top_k = 2;
    p.top_p = 0.6f;
    assert_drawn_set(&p, quarter, 4, 1 << 2);
}

static void top_p_looks_at_probabilities_before_the_temperature(void **state)
{
    struct sample_params p = plain;
    p.top_p = 0.6f;
    p.temperature = 50; /* alone, this makes all four equally likely */
    assert_drawn_set(&p, quarter, 4, 1 << 2 | 1 << 0);
}

static void min_p_compares_with_the_best_token(void **state) /* 0.15 / 0.5 = 0.3 */
{
    struct sample_params p = plain;
    p.min_p = 0.29f;
    assert_drawn_set(&p, quarter, 4, 1 << 2 | 1 << 0 | 1 << 3);
    p.min_p = 0.31f;
    assert_drawn_set(&p, quarter, 4, 1 << 2 | 1 << 0);
    p.min_p = 1;
    assert_drawn_set(&p, quarter, 4, 1 << 2);
}

static void min_p_1_keeps_all_equally_good_tokens(void **state)
{
    float logits[] = { 2, 1.9999f, 2 };
    struct sample_params p = plain;
    p.min_p = 1;
    assert_drawn_set(&p, logits, 3, 1 << 0 | 1 << 2);
}

static void top_p_counts_tokens_that_min_p_drops(void **state) /* of all four, 0.55 needs two; of the two left, one has 0.5 / 0.8 */
{
    struct sample_params p = plain;
    p.min_p = 0.31f; /* leaves 0.5 and 0.3 */
    p.top_p = 0.55f;
    assert_drawn_set(&p, quarter, 4, 1 << 2 | 1 << 0);
}

static void a_token_that_is_not_allowed_is_never_chosen(void **state)
{
    float logits[70];
    for (int i = 0; i < 70; i++)
        logits[i] = (float)i;
    uint32_t allowed[3] = { 1u << 31 | 1, 0, 1u << 2 }; /* 0, 31, 66 */
    struct sample_params p = greedy;
    p.allowed = allowed;
    assert_int_equal(pick(&p, logits, 70), 66);
    p.temperature = 100;
    for (uint64_t position = 0; position < 1000; position++) {
        int32_t token = sample_token(sampler, &p, logits, 70, NULL, 0, position);
        assert_true(token == 0 || token == 31 || token == 66);
    }
}

static void no_token_is_chosen_when_none_is_allowed(void **state)
{
    float logits[] = { 1, 2 };
    uint32_t allowed = 1u << 2; /* beyond the vocabulary */
    struct sample_params p = plain;
    p.allowed = &allowed;
    assert_int_equal(pick(&p, logits, 2), -1);
}

static void a_vocabulary_larger_than_the_scratch_memory_is_refused(void **state)
{
    static float logits[N_VOCAB + 1];
    assert_int_equal(pick(&greedy, logits, N_VOCAB + 1), -1);
    assert_int_equal(pick(&greedy, logits, 0), -1);
}

/* ---- Penalties ------------------------------------------------------------------------------------------------------------ */

static const int32_t said_0_0_1[] = { 0, 0, 1 };

static void the_repeat_penalty_divides_positive_logits(void **state) /* 3 / 2 = 1.5 < 1.6, however often it was said */
{
    float logits[] = { 3, 0, 1.6f }, higher[] = { 3, 0, 1.4f };
    struct sample_params p = greedy;
    p.repeat_penalty = 2;
    p.penalty_last_n = -1;
    assert_int_equal(pick_after(&p, logits, 3, said_0_0_1, 3), 2);
    assert_int_equal(pick_after(&p, higher, 3, said_0_0_1, 3), 0);
}

static void the_repeat_penalty_multiplies_negative_logits(void **state) /* -1 * 2 = -2 */
{
    float logits[] = { -1, -9, -1.9f }, lower[] = { -1, -9, -2.1f };
    struct sample_params p = greedy;
    p.repeat_penalty = 2;
    p.penalty_last_n = -1;
    assert_int_equal(pick_after(&p, logits, 3, said_0_0_1, 3), 2);
    assert_int_equal(pick_after(&p, lower, 3, said_0_0_1, 3), 0);
}

static void the_frequency_penalty_counts_every_time(void **state) /* token 0: 5 - 2*1.5 = 2, token 1: 3 - 1.5 = 1.5 */
{
    float logits[] = { 5, 3, 1.9f }, higher[] = { 5, 3, 2.1f };
    struct sample_params p = greedy;
    p.frequency_penalty = 1.5f;
    p.penalty_last_n = -1;
    assert_int_equal(pick_after(&p, logits, 3, said_0_0_1, 3), 0);
    assert_int_equal(pick_after(&p, higher, 3, said_0_0_1, 3), 2);
}

static void the_presence_penalty_counts_once(void **state) /* 5 - 1.5 = 3.5 */
{
    float logits[] = { 5, 3, 3.4f }, higher[] = { 5, 3, 3.6f };
    struct sample_params p = greedy;
    p.presence_penalty = 1.5f;
    p.penalty_last_n = -1;
    assert_int_equal(pick_after(&p, logits, 3, said_0_0_1, 3), 0);
    assert_int_equal(pick_after(&p, higher, 3, said_0_0_1, 3), 2);
}

static void penalties_look_back_on_the_last_n_tokens(void **state)
{
    float logits[] = { 5, 3, 4 };
    struct sample_params p = greedy;
    p.presence_penalty = 2;
    p.penalty_last_n = 1; /* only the 1 */
    assert_int_equal(pick_after(&p, logits, 3, said_0_0_1, 3), 0);
    p.penalty_last_n = 2;
    assert_int_equal(pick_after(&p, logits, 3, said_0_0_1, 3), 2);
    p.penalty_last_n = 0;
    assert_int_equal(pick_after(&p, logits, 3, said_0_0_1, 3), 0);
}

static void penalties_leave_no_trace_for_the_next_call(void **state)
{
    float logits[] = { 5, 3, 4 };
    struct sample_params p = greedy;
    p.frequency_penalty = 2;
    p.penalty_last_n = -1;
    assert_int_equal(pick_after(&p, logits, 3, said_0_0_1, 1), 2);
    assert_int_equal(pick_after(&p, logits, 3, said_0_0_1, 0), 0);
    assert_int_equal(pick_after(&p, logits, 3, said_0_0_1, 1), 2);
}

static void history_outside_the_vocabulary_is_ignored(void **state)
{
    float logits[] = { 5, 3, 4 };
    int32_t history[] = { -1, 3, INT32_MAX, INT32_MIN, N_VOCAB };
    struct sample_params p = greedy;
    p.presence_penalty = 2;
    p.penalty_last_n = -1;
    assert_int_equal(pick_after(&p, logits, 3, history, 5), 0);
}

static void penalties_come_before_top_k(void **state)
{
    float logits[] = { 5, 3, 4 };
    struct sample_params p = plain;
    p.presence_penalty = 10;
    p.penalty_last_n = -1;
    p.top_k = 2;
    for (uint64_t position = 0; position < 1000; position++)
        assert_int_not_equal(sample_token(sampler, &p, logits, 3, said_0_0_1, 1, position), 0);
}

/* ---- Random numbers and weights ------------------------------------------------------------------------------------------- */

static void philox_gives_its_published_vectors(void **state)
{
    static const struct {
        uint32_t counter[4], key[2], wanted[4];
    } vectors[] = {
        { { 0 }, { 0 }, { 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8 } },
        { { ~0u, ~0u, ~0u, ~0u }, { ~0u, ~0u }, { 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd } },
        { { 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344 },
          { 0xa4093822, 0x299f31d0 },
          { 0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1 } },
    };
    for (int i = 0; i < 3; i++) {
        uint32_t out[4];
        sample_philox(vectors[i].counter, vectors[i].key, out);
        assert_memory_equal(out, vectors[i].wanted, sizeof out);
    }
}

static void the_random_number_uses_all_bits_of_seed_and_position(void **state)
{
    assert_true(sample_random(0, 0) == 0xe169c58d6627e8d5u);
    for (int bit = 0; bit < 64; bit++) {
        assert_true(sample_random(1ull << bit, 0) != sample_random(0, 0));
        assert_true(sample_random(0, 1ull << bit) != sample_random(0, 0));
    }
}

/* 256 bins, 255 degrees of freedom: mean 255, standard deviation 22.6; the limits are 5 of those away. */
static void assert_uniform(uint64_t (*draw)(uint64_t), int shift)
{
    double counts[256] = { 0 }, chi = 0, wanted = 100000 / 256.0;
    for (uint64_t i = 0; i < 100000; i++)
        counts[draw(i) >> shift & 255]++;
    for (int i = 0; i < 256; i++)
        chi += (counts[i] - wanted) * (counts[i] - wanted) / wanted;
    assert_true(chi > 142 && chi < 368);
}

static uint64_t by_position(uint64_t i) { return sample_random(7, i); }
static uint64_t by_seed(uint64_t i) { return sample_random(i, 7); }
static uint64_t neighbours(uint64_t i) { return sample_random(7, i) - sample_random(7, i + 1); }

static void random_numbers_are_uniform_over_positions(void **state)
{
    assert_uniform(by_position, 56), assert_uniform(by_position, 0);
}
static void random_numbers_are_uniform_over_seeds(void **state) { assert_uniform(by_seed, 56); }
static void random_numbers_of_neighbours_are_unrelated(void **state) { assert_uniform(neighbours, 56); }

static void weights_are_e_to_the_x_rounded(void **state)
{
    for (double x = 0; x > -31; x -= 0.000123)
        assert_true(fabs((double)sample_weight(x) - exp(x) * 0x1p42) <= 0.6);
    assert_true(sample_weight(0) == 1ull << 42);
    assert_true(sample_weight(-0x1p-42) == (1ull << 42) - 1);
}

static void weights_of_hopeless_values_are_zero(void **state)
{
    assert_true(sample_weight(-30) == 0 && sample_weight(-1e300) == 0 && sample_weight(-INFINITY) == 0 && sample_weight(NAN) == 0);
}

/* ---- Draws ---------------------------------------------------------------------------------------------------------------- */

/* Chi-square of 100000 draws of 8 tokens against the softmax at this temperature: 7 degrees of freedom, 29.9 is passed once in
 * 10000. */
static void assert_softmax(float temperature)
{
    float logits[] = { 0.5f, -1, 2, 1.7f, 0, -0.3f, 1, -2 };
    double wanted[8], counts[8] = { 0 }, sum = 0, chi = 0;
    struct sample_params p = plain;
    p.temperature = temperature;
    p.seed = 3;
    for (int i = 0; i < 8; i++)
        sum += wanted[i] = exp((double)logits[i] / (double)temperature);
    for (uint64_t position = 0; position < 100000; position++)
        counts[sample_token(sampler, &p, logits, 8, NULL, 0, position)]++;
    for (int i = 0; i < 8; i++) {
        double w = wanted[i] / sum * 100000;
        chi += (counts[i] - w) * (counts[i] - w) / w;
    }
    assert_true(chi < 29.9);
}

static void draws_follow_the_softmax(void **state) { assert_softmax(1); }
static void draws_follow_a_low_temperature(void **state) { assert_softmax(0.5f); }
static void draws_follow_a_high_temperature(void **state) { assert_softmax(3); }

static void a_draw_depends_on_seed_and_position_not_on_the_calls_before(void **state)
{
    enum { N = 500 };
    static float logits[N_VOCAB];
    uint64_t random = 0;
    random_logits(&random, logits, N_VOCAB);
    struct sample_params p = plain;
    p.seed = 42;
    p.top_k = 40;
    p.top_p = 0.95f;
    int32_t forward[N];
    for (int i = 0; i < N; i++)
        forward[i] = sample_token(sampler, &p, logits, N_VOCAB, NULL, 0, (uint64_t)i);
    struct sampler *other;
    assert_int_equal(sampler_create(&other, 2 * N_VOCAB, NULL), 0);
    for (int i = N; i-- > 0;) {
        pick(&plain, logits, N_VOCAB / 2);
        assert_int_equal(sample_token(other, &p, logits, N_VOCAB, NULL, 0, (uint64_t)i), forward[i]);
        assert_int_equal(sample_token(sampler, &p, logits, N_VOCAB, NULL, 0, (uint64_t)i), forward[i]);
    }
    sampler_destroy(other);
}

static void draws_do_not_see_the_sign_of_zero(void **state)
{
    float zeros[4] = { 0 }, mixed[] = { -0.0f, 0, -0.0f, 0 };
    for (uint64_t position = 0; position < 1000; position++)
        assert_int_equal(sample_token(sampler, &plain, mixed, 4, NULL, 0, position),
                         sample_token(sampler, &plain, zeros, 4, NULL, 0, position));
}

static void draws_are_the_recorded_ones(void **state) /* the same on every machine and in every version */
{
    static const int32_t wanted[] = { 73, 57, 60, 87, 58, 34, 84, 57, 14, 37, 50, 73, 60, 84, 98, 34, 73, 98, 87, 73 };
    float logits[100];
    uint64_t random = 0;
    random_logits(&random, logits, 100);
    struct sample_params p = plain;
    p.seed = 1234567890123;
    p.temperature = 1.5f;
    for (uint64_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        assert_int_equal(sample_token(sampler, &p, logits, 100, NULL, 0, i), wanted[i]);
}

/* The definition without tricks: sort all, cut, sum, walk. */
struct ranked {
    float logit;
    int32_t token;
};

static int better_first(const void *a, const void *b)
{
    const struct ranked *x = a, *y = b;
    return x->logit > y->logit ? -1 : x->logit < y->logit ? 1 : x->token - y->token;
}

static uint64_t slow_weight(float logit, float best, double temperature)
{
    return sample_weight(((double)logit - (double)best) / temperature);
}

static int32_t slow_token(const struct sample_params *p, const float *logits, int n, uint64_t position)
{
    static struct ranked all[N_VOCAB];
    for (int i = 0; i < n; i++)
        all[i] = (struct ranked){ logits[i], i };
    qsort(all, (size_t)n, sizeof *all, better_first);
    float best = all[0].logit;
    if (p->top_k && p->top_k < n)
        n = p->top_k;
    uint64_t total = 0, sum = 0;
    for (int i = 0; i < n; i++)
        total += slow_weight(all[i].logit, best, 1);
    int kept = 0;
    while (kept < n && (kept == 0 || p->top_p == 1 || (double)sum < (double)p->top_p * (double)total))
        sum += slow_weight(all[kept++].logit, best, 1);
    while ((double)slow_weight(all[kept - 1].logit, best, 1) < (double)p->min_p * 0x1p42)
        kept--;
    total = sum = 0;
    for (int i = 0; i < kept; i++)
        total += slow_weight(all[i].logit, best, (double)p->temperature);
    uint64_t target = (uint64_t)((unsigned __int128)sample_random(p->seed, position) * total >> 64);
    for (int i = 0; i < kept; i++)
        if ((sum += slow_weight(all[i].logit, best, (double)p->temperature)) > target)
            return all[i].token;
    return -1;
}

static void random_cases_equal_a_sampler_that_sorts_everything(void **state)
{
    static const int top_k[] = { 0, 2, 3, 20, 64, 500, 999, 1000, 5000 };
    static const float top_p[] = { 1, 0, 0.1f, 0.5f, 0.9f, 0.95f, 0.9999f };
    static const float min_p[] = { 0, 0.001f, 0.05f, 0.5f };
    static const float temperature[] = { 1, 0.001f, 0.3f, 0.7f, 2, 100 };
    static float logits[N_VOCAB];
    uint64_t random = 0;
    for (uint64_t i = 0; i < 4000; i++) {
        int n = i % 3 ? N_VOCAB : 1 + (int)(sample_random(5, i) % N_VOCAB);
        random_logits(&random, logits, n);
        for (int j = 0; i % 4 == 0 && j < n; j++) /* every fourth case: many equal logits */
            logits[j] = roundf(logits[j]);
        struct sample_params p = { .temperature = temperature[i % 6],
                                   .top_p = top_p[i % 7],
                                   .min_p = min_p[i / 7 % 4],
                                   .top_k = top_k[i / 3 % 9],
                                   .repeat_penalty = 1,
                                   .seed = i };
        assert_int_equal(sample_token(sampler, &p, logits, n, NULL, 0, i), slow_token(&p, logits, n, i));
    }
}

static void any_bits_as_logits_give_a_token_of_the_vocabulary(void **state)
{
    static float logits[N_VOCAB];
    int32_t history[64];
    for (uint64_t i = 0; i < 2000; i++) {
        for (uint64_t j = 0; j < N_VOCAB; j++) {
            uint32_t bits = (uint32_t)sample_random(i, j);
            memcpy(&logits[j], &bits, 4);
        }
        for (uint64_t j = 0; j < 64; j++)
            history[j] = (int32_t)(sample_random(i, j) % 1100) - 50;
        struct sample_params p = { .temperature = i % 3 ? 1.3f : 0,
                                   .top_p = i % 2 ? 1 : 0.9f,
                                   .min_p = i % 5 ? 0 : 0.1f,
                                   .top_k = (int)(i % 50),
                                   .repeat_penalty = 1.1f,
                                   .frequency_penalty = 100,
                                   .presence_penalty = -100,
                                   .penalty_last_n = 50 };
        int32_t token = sample_token(sampler, &p, logits, N_VOCAB, history, 64, i);
        assert_in_range(token, 0, N_VOCAB - 1);
        assert_false(isnan(logits[token]));
    }
}

/* ---- Parameters ----------------------------------------------------------------------------------------------------------- */

static void usual_parameters_are_accepted(void **state)
{
    struct sample_params p = {
        .temperature = 1, .top_p = 0.95f, .top_k = 20, .repeat_penalty = 1, .presence_penalty = 1.5f, .penalty_last_n = 64
    };
    assert_int_equal(sample_check(&p, NULL), 0);
    assert_int_equal(sample_check(&greedy, NULL), 0);
    p.repeat_penalty = 0.01f;
    p.penalty_last_n = -1;
    assert_int_equal(sample_check(&p, NULL), 0);
}

static void a_wrong_parameter_is_named(void **state)
{
    static const struct {
        struct sample_params params;
        const char *sentence;
    } cases[] = {
        { { .temperature = -1, .top_p = 1, .repeat_penalty = 1 }, "temperature is -1, wanted 0 to 100" },
        { { .temperature = NAN, .top_p = 1, .repeat_penalty = 1 }, "temperature is nan, wanted 0 to 100" },
        { { .top_p = 1.5f, .repeat_penalty = 1 }, "top_p is 1.5, wanted 0 to 1" },
        { { .top_p = 1, .min_p = -0.5f, .repeat_penalty = 1 }, "min_p is -0.5, wanted 0 to 1" },
        { { .top_p = 1 }, "repeat_penalty is 0, wanted 0.01 to 100" },
        { { .top_p = 1, .repeat_penalty = 1, .frequency_penalty = INFINITY }, "frequency_penalty is inf, wanted -100 to 100" },
        { { .top_p = 1, .repeat_penalty = 1, .presence_penalty = 101 }, "presence_penalty is 101, wanted -100 to 100" },
        { { .top_p = 1, .repeat_penalty = 1, .top_k = -1 }, "top_k is -1, wanted 0 (all) or more" },
        { { .top_p = 1, .repeat_penalty = 1, .penalty_last_n = -2 },
          "penalty_last_n is -2, wanted -1 (the whole history) or more" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct strata_error error = { 0 };
        assert_int_equal(sample_check(&cases[i].params, &error), STRATA_E_ARGUMENT);
        assert_string_equal(error.text, cases[i].sentence);
    }
}

static void an_impossible_vocabulary_is_refused(void **state)
{
    struct strata_error error = { 0 };
    struct sampler *none;
    assert_int_equal(sampler_create(&none, 0, &error), STRATA_E_ARGUMENT);
    assert_string_equal(error.text, "sampler: a vocabulary of 0 tokens, wanted 1 to 2097152");
    assert_int_equal(sampler_create(&none, SAMPLE_MAX_VOCAB + 1, &error), STRATA_E_ARGUMENT);
    assert_null(none);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(greedy_takes_the_largest_logit),
        cmocka_unit_test(greedy_takes_the_lower_id_of_equal_logits),
        cmocka_unit_test(a_nan_logit_is_never_chosen),
        cmocka_unit_test(an_infinite_logit_beats_all_others),
        cmocka_unit_test(the_first_token_is_chosen_when_no_logit_is_a_number),
        cmocka_unit_test(top_k_1_equals_greedy),
        cmocka_unit_test(top_k_keeps_the_k_best),
        cmocka_unit_test(top_k_keeps_the_lower_ids_of_equal_logits),
        cmocka_unit_test(top_p_keeps_the_token_that_reaches_it),
        cmocka_unit_test(top_p_0_keeps_the_best_token),
        cmocka_unit_test(top_p_counts_what_top_k_left),
        cmocka_unit_test(top_p_looks_at_probabilities_before_the_temperature),
        cmocka_unit_test(min_p_compares_with_the_best_token),
        cmocka_unit_test(min_p_1_keeps_all_equally_good_tokens),
        cmocka_unit_test(top_p_counts_tokens_that_min_p_drops),
        cmocka_unit_test(a_token_that_is_not_allowed_is_never_chosen),
        cmocka_unit_test(no_token_is_chosen_when_none_is_allowed),
        cmocka_unit_test(a_vocabulary_larger_than_the_scratch_memory_is_refused),
        cmocka_unit_test(the_repeat_penalty_divides_positive_logits),
        cmocka_unit_test(the_repeat_penalty_multiplies_negative_logits),
        cmocka_unit_test(the_frequency_penalty_counts_every_time),
        cmocka_unit_test(the_presence_penalty_counts_once),
        cmocka_unit_test(penalties_look_back_on_the_last_n_tokens),
        cmocka_unit_test(penalties_leave_no_trace_for_the_next_call),
        cmocka_unit_test(history_outside_the_vocabulary_is_ignored),
        cmocka_unit_test(penalties_come_before_top_k),
        cmocka_unit_test(philox_gives_its_published_vectors),
        cmocka_unit_test(the_random_number_uses_all_bits_of_seed_and_position),
        cmocka_unit_test(random_numbers_are_uniform_over_positions),
        cmocka_unit_test(random_numbers_are_uniform_over_seeds),
        cmocka_unit_test(random_numbers_of_neighbours_are_unrelated),
        cmocka_unit_test(weights_are_e_to_the_x_rounded),
        cmocka_unit_test(weights_of_hopeless_values_are_zero),
        cmocka_unit_test(draws_follow_the_softmax),
        cmocka_unit_test(draws_follow_a_low_temperature),
        cmocka_unit_test(draws_follow_a_high_temperature),
        cmocka_unit_test(a_draw_depends_on_seed_and_position_not_on_the_calls_before),
        cmocka_unit_test(draws_do_not_see_the_sign_of_zero),
        cmocka_unit_test(draws_are_the_recorded_ones),
        cmocka_unit_test(random_cases_equal_a_sampler_that_sorts_everything),
        cmocka_unit_test(any_bits_as_logits_give_a_token_of_the_vocabulary),
        cmocka_unit_test(usual_parameters_are_accepted),
        cmocka_unit_test(a_wrong_parameter_is_named),
        cmocka_unit_test(an_impossible_vocabulary_is_refused),
    };
    return cmocka_run_group_tests(tests, create, destroy);
}
