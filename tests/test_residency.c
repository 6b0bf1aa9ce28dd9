/* Residency: after every window the tables, hits and swaps are those of a slow model written from residency.h, which keeps the
 * windows themselves and works everything out of them anew. */
#include "expert/residency.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MAX_LAYERS = 8, MAX_EXPERTS = 40, MAX_ALL = MAX_LAYERS * MAX_EXPERTS, MAX_WINDOWS = 1500, MAX_ROWS = 8, MAX_USED = 6 };

static struct strata_error error;

/* ---- Random numbers
 * -------------------------------------------------------------------------------------------------------------- */

static uint64_t random_state = 1;
static int random_below(int n)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (int)((random_state >> 33) % (uint64_t)n);
}

static double random_part(void) { return random_below(1 << 24) / (double)(1 << 24); }

/* ---- The slow model
 * -------------------------------------------------------------------------------------------------------------- */

struct planned {
    int newcomer, victim;
    float gain;
};

/* An expert is layer * n_experts + its number. */
struct slow {
    struct residency_shape shape;
    struct residency_options options;
    int n, windows, n_due; /* newcomers on their way, in force before window `due` */
    uint64_t hits, requests, swaps, swap_bytes, due;
    float start[MAX_ALL];                          /* heat before the first window */
    unsigned char requested[MAX_WINDOWS][MAX_ALL]; /* the history */
    int slot[MAX_ALL], due_expert[MAX_ALL], due_slot[MAX_ALL];
};

static uint64_t slot_bytes(const struct slow *s, int expert)
{
    return (s->shape.blob_bytes[expert / s->shape.n_experts] + 255) / 256 * 256;
}

/* Heat counts requests: plus one in a window that requests the expert, times 2^(-1 / half-life) after every window, rounded to a
 * float each time; what is below a millionth is none. */
static void heat_now(const struct slow *s, float *heat)
{
    float half_life = s->options.policy.half_life, decay = half_life > 0 ? exp2f(-1 / half_life) : 1;
    memcpy(heat, s->start, sizeof s->start);
    for (int w = 0; w < s->windows; w++)
        for (int i = 0; i < s->n; i++) {
            if (w)
                heat[i] = heat[i] * decay >= 1e-6f ? heat[i] * decay : 0;
            heat[i] += s->requested[w][i];
        }
}

/* Windows since the last request, the one that has just ended being 0; -1: never. */
static int age_now(const struct slow *s, int expert)
{
    for (int w = s->windows - 1; w >= 0; w--)
        if (s->requested[w][expert])
            return s->windows - 1 - w;
    return -1;
}

static float worth(const char *policy, float heat, int age)
{
    float last = age < 0 ? -1e6f : -(float)age;
    if (!strcmp(policy, "lfu"))
        return heat;
    if (!strcmp(policy, "lru"))
        return last;
    if (!strcmp(policy, "lfru"))
        return heat / (1 + (age < 0 ? (float)UINT32_MAX : (float)age));
    if (!strcmp(policy, "stale"))
        return age >= 0 && age < 16 ? heat : last;
    fail_msg("there is a policy '%s' that this test does not know", policy);
    return 0;
}

/* The most valuable expert of a class that is absent (sign 1), the least valuable present one (sign -1), or -1. Of equals the lower
 * index is worth more. */
static int extreme(const struct slow *s, uint64_t bytes, const float *value, const bool *taken, int sign)
{
    int found = -1;
    for (int i = 0; i < s->n; i++) {
        bool candidate = slot_bytes(s, i) == bytes && !taken[i] && (s->slot[i] < 0) == (sign > 0) &&
                         (sign < 0 || value[i] >= s->options.policy.admit);
        if (candidate && (found < 0 || (sign > 0 ? value[i] > value[found] : value[i] <= value[found])))
            found = i;
    }
    return found;
}

static int by_gain(const void *a, const void *b)
{
    const struct planned *x = a, *y = b;
    return x->gain != y->gain ? (x->gain > y->gain ? -1 : 1) : x->newcomer - y->newcomer;
}

/* In every class the most valuable newcomer for the least valuable victim, and so on while it is worth so much more and the plan
 * has room; of all classes the greatest gains, as differences of floats. Of equal gains the newcomer of the lower index. */
static int slow_plan(struct slow *s, struct planned *out)
{
    static float heat[MAX_ALL], value[MAX_ALL];
    bool taken[MAX_ALL] = { false };
    const struct expert_policy *p = &s->options.policy;
    int n = 0;
    heat_now(s, heat);
    for (int i = 0; i < s->n; i++)
        value[i] = worth(p->name, heat[i], age_now(s, i));
    for (int layer = 0; layer < s->shape.n_layers; layer++) {
        uint64_t bytes = slot_bytes(s, layer * s->shape.n_experts);
        int same = 0;
        while (slot_bytes(s, same * s->shape.n_experts) != bytes)
            same++;
        if (same < layer) /* of a class that was paired */
            continue;
        for (int first = n; n - first < s->options.max_swaps;) {
            int newcomer = extreme(s, bytes, value, taken, 1), victim = extreme(s, bytes, value, taken, -1);
            if (newcomer < 0 || victim < 0 || value[newcomer] <= value[victim] || value[newcomer] < value[victim] + p->hysteresis)
                break;
            taken[newcomer] = taken[victim] = true;
            out[n++] = (struct planned){ newcomer, victim, value[newcomer] - value[victim] };
        }
    }
    qsort(out, (size_t)n, sizeof *out, by_gain);
    return n < s->options.max_swaps ? n : s->options.max_swaps;
}

static void slow_admit(struct slow *s)
{
    for (int i = 0; i < s->n_due; i++)
        s->slot[s->due_expert[i]] = s->due_slot[i];
    s->n_due = 0;
}

static void slow_use(struct slow *s, int layer, const int32_t *ids, int stride, int n_rows, int n_used)
{
    for (int t = 0; t < n_rows; t++)
        for (int k = 0; k < n_used; k++)
            s->requested[s->windows][layer * s->shape.n_experts + ids[t * stride + k]] = 1;
}

static int slow_end(struct slow *s)
{
    static struct planned planned[MAX_ALL];
    for (int i = 0; i < s->n; i++) {
        s->requests += s->requested[s->windows][i];
        s->hits += s->requested[s->windows][i] && s->slot[i] >= 0;
    }
    s->windows++;
    if (!strcmp(s->options.policy.name, "none") || s->windows % s->options.period)
        return 0;
    s->n_due = slow_plan(s, planned);
    s->due = (uint64_t)(s->windows + s->options.lag); /* windows are counted from 1 */
    for (int i = 0; i < s->n_due; i++) {
        s->due_expert[i] = planned[i].newcomer;
        s->due_slot[i] = s->slot[planned[i].victim];
        s->slot[planned[i].victim] = -1;
        s->swaps++;
        s->swap_bytes += s->shape.blob_bytes[planned[i].newcomer / s->shape.n_experts];
    }
    return s->n_due;
}

/* Slots of a class: its part of the experts' number, by bytes; then as many as there is room for, class by class. */
static int slots_of_class(const struct residency_shape *shape, uint64_t bytes, int layer)
{
    uint64_t sizes[MAX_LAYERS], all = 0, left = bytes;
    int n[MAX_LAYERS] = { 0 }, most[MAX_LAYERS] = { 0 }, class_of[MAX_LAYERS];
    for (int i = 0; i < shape->n_layers; i++) {
        sizes[i] = (shape->blob_bytes[i] + 255) / 256 * 256;
        all += sizes[i] * (uint64_t)shape->n_experts;
        for (class_of[i] = 0; sizes[class_of[i]] != sizes[i]; class_of[i]++) {}
        most[class_of[i]] += shape->n_experts;
    }
    for (int c = 0; c < shape->n_layers; c++) {
        n[c] = (int)((double)most[c] * (double)(bytes < all ? bytes : all) / (double)all);
        left -= (uint64_t)n[c] * sizes[c];
    }
    for (int c = 0; c < shape->n_layers; c++)
        for (; n[c] < most[c] && left >= sizes[c]; left -= sizes[c])
            n[c]++;
    return n[class_of[layer]];
}

/* Whether a comes before b in the profile's order: the higher part, then the lower number in its layer, then the lower layer. */
static bool preferred(const struct residency_shape *shape, const float *profile, int a, int b)
{
    float pa = profile ? profile[a] : 0, pb = profile ? profile[b] : 0;
    int ea = a % shape->n_experts, eb = b % shape->n_experts;
    return pa != pb ? pa > pb : ea != eb ? ea < eb : a < b;
}

/* Which experts are there before the first window: those that fewer experts of their class come before than it has slots. */
static void seeds_of(const struct residency_shape *shape, uint64_t bytes, const float *profile, bool *there)
{
    int n = shape->n_layers * shape->n_experts;
    for (int i = 0; i < n; i++) {
        int before = 0;
        for (int j = 0; j < n; j++)
            before +=
                (shape->blob_bytes[i / shape->n_experts] + 255) / 256 == (shape->blob_bytes[j / shape->n_experts] + 255) / 256 &&
                preferred(shape, profile, j, i);
        there[i] = before < slots_of_class(shape, bytes, i / shape->n_experts);
    }
}

/* ---- Both, side by side
 * ---------------------------------------------------------------------------------------------------------- */

static int32_t entry(const struct residency *r, const struct residency_shape *shape, int expert)
{
    return residency_table(r, expert / shape->n_experts)[expert % shape->n_experts];
}

static struct residency *create(const struct residency_shape *shape, const struct residency_options *options, const float *profile)
{
    struct residency *r;
    if (residency_create(&r, shape, options, profile, &error))
        fail_msg("%s", error.text);
    return r;
}

/* The numbers of the slots are the engine's own; which experts are in them is not. */
static void slow_create(struct slow *s, const struct residency *r, const struct residency_shape *shape,
                        const struct residency_options *options, const float *profile)
{
    bool there[MAX_ALL];
    float half_life = options->policy.half_life, decay = half_life > 0 ? exp2f(-1 / half_life) : 1;
    memset(s, 0, sizeof *s);
    s->shape = *shape;
    s->options = *options;
    s->n = shape->n_layers * shape->n_experts;
    seeds_of(shape, options->bytes, profile, there);
    for (int i = 0; i < s->n; i++) {
        s->slot[i] = entry(r, shape, i);
        if ((s->slot[i] >= 0) != there[i])
            fail_msg("layer %d, expert %d: slot %d at the start", i / shape->n_experts, i % shape->n_experts, s->slot[i]);
        /* many windows of the profile: the sum of decay^1, decay^2, ...; 512 windows if nothing fades */
        double windows = half_life > 0 ? (double)decay / (1 - (double)decay) : 512;
        s->start[i] = profile ? (float)(profile[i] * windows) : 0;
    }
}

static void compare(const struct slow *s, const struct residency *r, const char *what)
{
    const struct residency_counters *c = residency_counters(r);
    if (c->windows != (uint64_t)s->windows || c->requests != s->requests || c->hits != s->hits || c->swaps != s->swaps ||
        c->swap_bytes != s->swap_bytes)
        fail_msg("%s, window %d: %llu windows, %llu of %llu hits, %llu swaps of %llu bytes; wanted %d, %llu of %llu, %llu of %llu",
                 what, s->windows, (unsigned long long)c->windows, (unsigned long long)c->hits, (unsigned long long)c->requests,
                 (unsigned long long)c->swaps, (unsigned long long)c->swap_bytes, s->windows, (unsigned long long)s->hits,
                 (unsigned long long)s->requests, (unsigned long long)s->swaps, (unsigned long long)s->swap_bytes);
    for (int i = 0; i < s->n; i++)
        if (entry(r, &s->shape, i) != s->slot[i])
            fail_msg("%s, window %d: layer %d, expert %d is in slot %d, wanted %d", what, s->windows, i / s->shape.n_experts,
                     i % s->shape.n_experts, entry(r, &s->shape, i), s->slot[i]);
}

static void compare_swaps(const struct slow *s, const struct residency *r, const struct residency_swap *swaps, int n, int wanted,
                          const char *what)
{
    if (n != wanted)
        fail_msg("%s, window %d: %d swaps planned, wanted %d", what, s->windows, n, wanted);
    for (int i = 0; i < n; i++) {
        int at = 0;
        while (at < n && s->due_expert[at] != swaps[i].layer * s->shape.n_experts + swaps[i].expert)
            at++;
        assert_true(at < n && swaps[i].slot == s->due_slot[at]);
        assert_true(swaps[i].offset == residency_offset(r, swaps[i].slot));
    }
}

/* Routing as texts have it: each layer has favourites, which drift, and chance. Of `heads` rows each chooses n_used different
 * experts. */
struct routing {
    int n_used, stride;
    int32_t ids[MAX_ROWS * (MAX_USED + 2)];
};

static void route(struct routing *g, const struct residency_shape *shape, int window, int layer, int n_rows)
{
    for (int t = 0; t < n_rows; t++)
        for (int k = 0; k < g->n_used; k++) {
            int32_t *row = g->ids + t * g->stride;
            int j, favourite = window / 60 * 7 + layer * 5;
            do {
                double part = random_part();
                row[k] = (int32_t)(favourite + (int)(part * part * part * shape->n_experts)) % shape->n_experts;
                for (j = 0; j < k && row[j] != row[k]; j++) {}
            } while (j < k);
        }
}

/* Runs both; *swaps grows by what was swapped. */
static void run(const struct residency_shape *shape, const struct residency_options *options, const float *profile, int windows,
                const char *what, uint64_t *swaps)
{
    static struct slow s;
    struct residency *r = create(shape, options, profile);
    slow_create(&s, r, shape, options, profile);
    compare(&s, r, what);
    struct routing g = { .n_used = 1 + random_below(MAX_USED) };
    g.stride = g.n_used + random_below(3);
    for (int w = 0; w < windows; w++) {
        bool due = s.n_due && s.due == (uint64_t)w + 1;
        if (residency_due(r) != due)
            fail_msg("%s: swaps are %s before window %d", what, due ? "not due" : "due", w + 1);
        if (due) {
            residency_admit(r);
            slow_admit(&s);
            compare(&s, r, what);
        }
        int n_rows = random_below(3) ? 1 : 1 + random_below(MAX_ROWS);
        for (int layer = 0; layer < shape->n_layers; layer++) {
            route(&g, shape, w, layer, n_rows);
            residency_use(r, layer, g.ids, g.stride, n_rows, g.n_used);
            slow_use(&s, layer, g.ids, g.stride, n_rows, g.n_used);
        }
        const struct residency_swap *planned = NULL;
        int n = residency_end(r, &planned), wanted = slow_end(&s);
        compare_swaps(&s, r, planned, n, wanted, what);
        compare(&s, r, what);
    }
    *swaps += s.swaps;
    residency_destroy(r);
}

/* Two sizes of blobs in turn, neither a multiple of 256, and a third of one layer. */
static const uint64_t blobs[MAX_LAYERS] = { 1000, 5001, 1001, 4999, 1000, 5001, 70000, 5001 };

static uint64_t all_bytes(const struct residency_shape *shape)
{
    uint64_t bytes = 0;
    for (int i = 0; i < shape->n_layers; i++)
        bytes += (shape->blob_bytes[i] + 255) / 256 * 256 * (uint64_t)shape->n_experts;
    return bytes;
}

static void random_profile(const struct residency_shape *shape, float *profile)
{
    for (int i = 0; i < shape->n_layers * shape->n_experts; i++) {
        float part = (float)random_part();
        profile[i] = random_below(4) ? part * part * part : 0; /* many are never used: equals */
    }
}

/* Memory for nothing, one slot, a few, half, all, more. */
static uint64_t memory_of(const struct residency_shape *shape, int kind)
{
    uint64_t all = all_bytes(shape);
    return kind == 0   ? 0
           : kind == 1 ? 1024
           : kind == 2 ? all / 20
           : kind == 3 ? all / 2
           : kind == 4 ? all
           : kind == 5 ? 2 * all
                       : all * (uint64_t)random_below(100) / 100;
}

static const char *const settings[] = { "",
                                        ":half-life=3",
                                        ":half-life=0",
                                        ":half-life=100,hysteresis=0",
                                        ":admit=-1e9,hysteresis=0",
                                        ":half-life=0.25,admit=1",
                                        ":hysteresis=0.1,admit=0.5",
                                        ":half-life=20,hysteresis=5" };
enum { SETTINGS = sizeof settings / sizeof *settings };

/* Many short runs of one policy: every memory meets every setting, the rest is drawn. */
static void follow(const char *policy, bool swaps)
{
    float profile[MAX_ALL];
    uint64_t total = 0;
    for (int memory = 0; memory < 7; memory++)
        for (int i = 0; i < SETTINGS; i++) {
            char text[80], what[200];
            struct residency_shape shape = { 1 + random_below(MAX_LAYERS), MAX_USED + random_below(MAX_EXPERTS - MAX_USED + 1),
                                             blobs };
            struct residency_options options = residency_defaults();
            snprintf(text, sizeof text, "%s%s", policy, settings[i]);
            assert_int_equal(expert_policy_parse(&options.policy, text, &error), 0);
            options.bytes = memory_of(&shape, memory);
            options.period = 1 + random_below(random_below(2) ? 3 : 9);
            options.lag = random_below(3) ? 1 + random_below(options.period) : options.period;
            options.max_swaps = random_below(4) ? 1 + random_below(12) : random_below(2) ? 1000 : 0;
            bool profiled = random_below(2);
            random_profile(&shape, profile);
            snprintf(what, sizeof what, "%s, %d layers of %d, %llu bytes, %s profile, at most %d swaps every %d, used after %d",
                     text, shape.n_layers, shape.n_experts, (unsigned long long)options.bytes, profiled ? "a" : "no",
                     options.max_swaps, options.period, options.lag);
            run(&shape, &options, profiled ? profile : NULL, 150, what, &total);
        }
    assert_int_equal(total > 300, swaps);
}

static void lfu_swaps_what_the_slow_model_swaps(void **state) { follow("lfu", true); }
static void lru_swaps_what_the_slow_model_swaps(void **state) { follow("lru", true); }
static void lfru_swaps_what_the_slow_model_swaps(void **state) { follow("lfru", true); }
static void stale_swaps_what_the_slow_model_swaps(void **state) { follow("stale", true); }
static void none_never_swaps(void **state) { follow("none", false); }

static void a_long_run_is_what_the_slow_model_says(void **state)
{
    static const char *const policies[] = { "lfu:half-life=32,hysteresis=0.5", "lru", "lfru:half-life=16", "stale:half-life=50" };
    struct residency_shape shape = { 5, 24, blobs };
    for (int i = 0; i < 4; i++) {
        struct residency_options options = residency_defaults();
        uint64_t swaps = 0;
        assert_int_equal(expert_policy_parse(&options.policy, policies[i], &error), 0);
        options.bytes = all_bytes(&shape) / 3;
        run(&shape, &options, NULL, getenv("STRATA_TEST_SANITIZER") ? 300 : MAX_WINDOWS, policies[i], &swaps);
        assert_true(swaps > 100);
    }
}

static void every_policy_is_followed(void **state)
{
    static const char *const known[] = { "lfu", "lru", "lfru", "stale", "none" };
    int n = 0;
    for (const struct expert_policy *p = expert_policies; p->name; p++, n++) {
        int i = 0;
        while (i < 5 && strcmp(known[i], p->name))
            i++;
        if (i == 5)
            fail_msg("no test follows policy '%s'", p->name);
    }
    assert_int_equal(n, 5);
}

/* ---- Memory
 * ---------------------------------------------------------------------------------------------------------------------- */

static void for_memories(void (*check)(const struct residency *r, const struct residency_shape *shape, uint64_t bytes))
{
    for (int i = 0; i < 300; i++) {
        struct residency_shape shape = { 1 + random_below(MAX_LAYERS), 1 + random_below(MAX_EXPERTS), blobs };
        struct residency_options options = residency_defaults();
        options.bytes = i % 3 ? memory_of(&shape, 6) : memory_of(&shape, i / 3 % 6);
        struct residency *r = create(&shape, &options, NULL);
        check(r, &shape, options.bytes);
        residency_destroy(r);
    }
}

static void check_bytes(const struct residency *r, const struct residency_shape *shape, uint64_t bytes)
{
    uint64_t taken = 0, smallest = UINT64_MAX;
    int absent = 0;
    for (int i = 0; i < shape->n_layers * shape->n_experts; i++) {
        uint64_t size = (blobs[i / shape->n_experts] + 255) / 256 * 256;
        absent += entry(r, shape, i) < 0;
        taken += entry(r, shape, i) < 0 ? 0 : size;
        if (entry(r, shape, i) < 0 && size < smallest)
            smallest = size;
    }
    assert_true(residency_bytes(r) == taken && taken <= bytes);
    assert_int_equal(residency_slots(r), shape->n_layers * shape->n_experts - absent);
    assert_true(!absent || bytes - taken < smallest); /* nothing that would hold one more is left */
}

static void slots_take_what_there_is_and_no_more(void **state) { for_memories(check_bytes); }

static void check_places(const struct residency *r, const struct residency_shape *shape, uint64_t bytes)
{
    int owner[MAX_ALL];
    memset(owner, -1, sizeof owner);
    for (int i = 0; i < shape->n_layers * shape->n_experts; i++) {
        int32_t slot = entry(r, shape, i);
        if (slot < 0)
            continue;
        assert_in_range(slot, 0, residency_slots(r) - 1);
        assert_int_equal(owner[slot], -1);
        owner[slot] = i;
        assert_int_equal(residency_offset(r, slot) % 256, 0);
        assert_true(residency_offset(r, slot) + blobs[i / shape->n_experts] <= residency_bytes(r));
    }
    for (int a = 0; a < residency_slots(r); a++)
        for (int b = 0; b < residency_slots(r); b++)
            assert_true(a == b || residency_offset(r, a) >= residency_offset(r, b) + blobs[owner[b] / shape->n_experts] ||
                        residency_offset(r, b) >= residency_offset(r, a) + blobs[owner[a] / shape->n_experts]);
}

static void slots_are_aligned_and_do_not_overlap(void **state) { for_memories(check_places); }

static void check_classes(const struct residency *r, const struct residency_shape *shape, uint64_t bytes)
{
    uint64_t all = all_bytes(shape);
    for (int layer = 0; layer < shape->n_layers; layer++) {
        int slots = 0, experts = 0;
        for (int i = 0; i < shape->n_layers * shape->n_experts; i++)
            if ((blobs[i / shape->n_experts] + 255) / 256 == (blobs[layer] + 255) / 256) {
                experts++;
                slots += entry(r, shape, i) >= 0;
            }
        assert_true(slots >= (int)((double)experts * (double)(bytes < all ? bytes : all) / (double)all));
    }
}

static void every_class_gets_at_least_its_part(void **state) { for_memories(check_classes); }

/* Sizes that differ by the alignment only share their slots: else a layer might get none. By hand: of 1000 and 1001 bytes, 1024
 * each. */
static void layers_whose_blobs_need_the_same_room_share_slots(void **state)
{
    static const uint64_t sizes[] = { 1000, 1001 };
    struct residency_shape shape = { 2, 4, sizes };
    struct residency_options options = residency_defaults();
    static const float profile[8] = { 0, 0, 0, 0, 0.9f, 0.8f, 0.7f, 0.6f };
    options.bytes = 4 * 1024 + 1023;
    struct residency *r = create(&shape, &options, profile);
    assert_int_equal(residency_slots(r), 4);
    assert_true(residency_bytes(r) == 4096);
    for (int e = 0; e < 4; e++)
        assert_true(residency_table(r, 0)[e] < 0 && residency_table(r, 1)[e] >= 0);
    residency_destroy(r);
}

/* ---- Examples by hand
 * ------------------------------------------------------------------------------------------------------------ */

/* One layer of four experts in classes of 1 KB. */
static struct residency *small(const char *policy, int slots, int period, int lag, const float *profile)
{
    static const uint64_t size = 1024;
    struct residency_shape shape = { 1, 4, &size };
    struct residency_options options = residency_defaults();
    assert_int_equal(expert_policy_parse(&options.policy, policy, &error), 0);
    options.bytes = (uint64_t)slots * 1024;
    options.period = period;
    options.lag = lag;
    return create(&shape, &options, profile);
}

/* A window that uses the experts of a string of digits. Returns the number of swaps planned. */
static int window(struct residency *r, const char *experts)
{
    const struct residency_swap *swaps;
    int32_t ids[8];
    int n = 0;
    for (; experts[n]; n++)
        ids[n] = experts[n] - '0';
    if (residency_due(r))
        residency_admit(r);
    residency_use(r, 0, ids, n, 1, n);
    return residency_end(r, &swaps);
}

static void assert_there(const struct residency *r, const char *experts)
{
    for (int e = 0; e < 4; e++)
        if ((residency_table(r, 0)[e] >= 0) != (strchr(experts, '0' + e) != NULL))
            fail_msg("expert %d is %s, wanted %s", e, residency_table(r, 0)[e] >= 0 ? "there" : "not there", experts);
}

static void a_victim_leaves_at_once_and_the_newcomer_comes_after_the_lag(void **state)
{
    for (int lag = 1; lag <= 3; lag++) {
        struct residency *r = small("lru", 1, 3, lag, NULL);
        window(r, "3");
        window(r, "3");
        assert_there(r, "0");
        assert_int_equal(window(r, "3"), 1);
        assert_there(r, "");
        for (int i = 1; i < lag; i++) {
            assert_false(residency_due(r));
            assert_int_equal(window(r, "1"), 0);
            assert_there(r, "");
        }
        assert_true(residency_due(r));
        residency_admit(r);
        assert_there(r, "3");
        assert_false(residency_due(r));
        residency_destroy(r);
    }
}

/* Half-life 1: heat of a request three windows ago is 1/8. Expert 2: 1 + 1/2; expert 0: 1/4 + 1/8, so it is worth less. */
static void heat_halves_every_half_life(void **state)
{
    struct residency *r = small("lfu:half-life=1,admit=0,hysteresis=1.125", 1, 4, 1, NULL);
    window(r, "0");
    window(r, "0");
    window(r, "2");
    assert_int_equal(window(r, "2"), 1); /* 1.5 - 0.375 = 1.125 */
    residency_destroy(r);
    r = small("lfu:half-life=1,admit=0,hysteresis=1.126", 1, 4, 1, NULL);
    window(r, "0");
    window(r, "0");
    window(r, "2");
    assert_int_equal(window(r, "2"), 0);
    residency_destroy(r);
}

static void a_newcomer_below_the_least_value_is_not_admitted(void **state)
{
    struct residency *r = small("lfu:half-life=0,admit=2,hysteresis=0", 1, 1, 1, NULL);
    assert_int_equal(window(r, "3"), 0);
    assert_int_equal(window(r, "3"), 1);
    residency_destroy(r);
}

static void equals_are_not_swapped(void **state)
{
    struct residency *r = small("lfu:half-life=0,admit=0,hysteresis=0", 2, 1, 1, NULL);
    assert_int_equal(window(r, "0123"), 0);
    assert_int_equal(window(r, "0123"), 0);
    assert_int_equal(window(r, "3"), 1);
    assert_there(r, "0"); /* of 0 and 1, worth the same, 1 goes */
    residency_destroy(r);
}

static void lru_knows_which_was_used_last_a_long_time_ago(void **state)
{
    struct residency *r = small("lru", 2, 300, 1, NULL);
    window(r, "0");
    window(r, "1");
    for (int i = 2; i < 299; i++)
        window(r, "");
    assert_int_equal(window(r, "3"), 1);
    assert_there(r, "1");
    residency_destroy(r);
}

/* An expert that several rows choose is one request; a window's requests meet the tables of that window. */
static void requests_are_distinct_experts(void **state)
{
    static const int32_t ids[] = { 0, 1, -1, 1, 3, -1, 1, 0, -1 };
    const struct residency_swap *swaps;
    struct residency *r = small("none", 2, 1, 1, NULL);
    residency_use(r, 0, ids, 3, 3, 2);
    residency_end(r, &swaps);
    assert_int_equal(residency_counters(r)->requests, 3);
    assert_int_equal(residency_counters(r)->hits, 2);
    residency_destroy(r);
}

static void what_was_hot_goes_when_nobody_asks_for_it_any_more(void **state)
{
    static const float profile[] = { 1, 1, 0, 0 };
    struct residency *r = small("lfu:half-life=4", 2, 1, 1, profile);
    for (int i = 0; i < 20; i++)
        window(r, "23");
    assert_there(r, "23");
    residency_destroy(r);
}

/* The largest half-life that a setting may have fades nothing; heat is still a number, and what is asked for comes in. */
static void a_half_life_without_end_forgets_a_profile_in_time(void **state)
{
    static const float profile[] = { 1, 0.5f, 0, 0 };
    struct residency *r = small("lfu:half-life=1e9", 2, 1, 1, profile);
    for (int i = 0; i < 600; i++)
        window(r, "23");
    assert_there(r, "23"); /* the profile counted as 512 windows */
    residency_destroy(r);
}

/* ---- Profiles
 * -------------------------------------------------------------------------------------------------------------------- */

static void the_tables_begin_with_the_best_of_the_profile(void **state)
{
    static const float profile[] = { 0.1f, 0.5f, 0.5f, 0.4f };
    struct residency *r = small("none", 0, 1, 1, profile);
    assert_there(r, "");
    residency_destroy(r);
    r = small("none", 1, 1, 1, profile);
    assert_there(r, "1");
    residency_destroy(r);
    r = small("none", 3, 1, 1, profile);
    assert_there(r, "123");
    residency_destroy(r);
}

static void a_profile_comes_back_before_the_first_window(void **state)
{
    struct residency_shape shape = { 5, 24, blobs };
    struct residency_options options = residency_defaults();
    float profile[MAX_ALL], found[MAX_ALL];
    random_profile(&shape, profile);
    struct residency *r = create(&shape, &options, profile);
    residency_profile(r, found);
    for (int i = 0; i < 5 * 24; i++)
        assert_true(fabsf(found[i] - profile[i]) <= 1e-6f * profile[i]);
    residency_destroy(r);
    r = create(&shape, &options, NULL);
    residency_profile(r, found);
    for (int i = 0; i < 5 * 24; i++)
        assert_true(found[i] == 0); /* nothing was learned yet, and that is a number too */
    residency_destroy(r);
}

/* Runs windows and returns what was learned; parts[i] is counted by hand. */
static void learn(struct residency *r, const struct residency_shape *shape, int windows, float *learned, double *parts)
{
    struct routing g = { .n_used = 4, .stride = 4 };
    const struct residency_swap *swaps;
    memset(parts, 0, MAX_ALL * sizeof *parts);
    for (int w = 0; w < windows; w++) {
        if (residency_due(r))
            residency_admit(r);
        for (int layer = 0; layer < shape->n_layers; layer++) {
            bool seen[MAX_EXPERTS] = { false };
            route(&g, shape, 0, layer, 2);
            residency_use(r, layer, g.ids, g.stride, 2, g.n_used);
            for (int i = 0; i < 8; i++) {
                parts[layer * shape->n_experts + g.ids[i]] += seen[g.ids[i]] ? 0 : 1.0 / windows;
                seen[g.ids[i]] = true;
            }
        }
        residency_end(r, &swaps);
    }
    residency_profile(r, learned);
}

/* Windows fade slowly: over 800 of them a part may be off by what 800 of some ten thousand weigh. */
static void what_is_learned_is_the_part_of_the_windows_that_asked(void **state)
{
    struct residency_shape shape = { 5, 24, blobs };
    struct residency_options options = residency_defaults();
    float learned[MAX_ALL];
    double parts[MAX_ALL];
    options.bytes = all_bytes(&shape) / 4;
    struct residency *r = create(&shape, &options, NULL);
    learn(r, &shape, 800, learned, parts);
    for (int i = 0; i < 5 * 24; i++)
        assert_true(isfinite(learned[i]) && learned[i] >= 0 && learned[i] <= 1.000001f && fabs(learned[i] - parts[i]) < 0.02);
    residency_destroy(r);
}

static void an_old_profile_is_not_forgotten_at_once(void **state)
{
    static const float profile[] = { 1, 0, 0, 0 };
    float learned[4];
    struct residency *r = small("none", 1, 1, 1, profile);
    for (int i = 0; i < 100; i++)
        window(r, "2");
    residency_profile(r, learned);
    assert_true(learned[0] > 0.5f && learned[0] < 1 && learned[2] > 0 && learned[2] < 0.5f);
    for (int i = 0; i < 2000; i++)
        window(r, "2");
    residency_profile(r, learned);
    assert_true(learned[0] < 0.5f && learned[2] > 0.5f && learned[1] == 0);
    residency_destroy(r);
}

static void a_restart_begins_with_what_was_used_most(void **state)
{
    struct residency_shape shape = { 5, 24, blobs };
    struct residency_options options = residency_defaults();
    float learned[MAX_ALL], again[MAX_ALL];
    double parts[MAX_ALL];
    struct residency *r = create(&shape, &options, NULL);
    learn(r, &shape, 400, learned, parts);
    residency_destroy(r);
    for (int tenths = 1; tenths < 10; tenths++) {
        bool there[MAX_ALL];
        options.bytes = all_bytes(&shape) * (uint64_t)tenths / 10;
        r = create(&shape, &options, learned);
        seeds_of(&shape, options.bytes, learned, there);
        for (int i = 0; i < 5 * 24; i++)
            assert_int_equal(entry(r, &shape, i) >= 0, there[i]);
        for (int i = 0; i < 5 * 24; i++) /* and what is there was asked for as often as what is not, but for what fading moves */
            for (int j = 0; j < 5 * 24; j++)
                if (i / 24 % 2 == j / 24 % 2 && there[i] && !there[j])
                    assert_true(parts[i] > parts[j] - 0.02);
        residency_profile(r, again);
        residency_destroy(r);
        r = create(&shape, &options, again);
        for (int i = 0; i < 5 * 24; i++)
            assert_int_equal(entry(r, &shape, i) >= 0, there[i]);
        residency_destroy(r);
    }
}

/* ---- Policies by name
 * ------------------------------------------------------------------------------------------------------------ */

static void settings_are_read(void **state)
{
    struct expert_policy p, plain;
    assert_int_equal(expert_policy_parse(&p, "lfru:half-life=16.5,hysteresis=1.5,admit=-2", &error), 0);
    assert_string_equal(p.name, "lfru");
    assert_true(p.half_life == 16.5f && p.hysteresis == 1.5f && p.admit == -2);
    assert_int_equal(expert_policy_parse(&plain, "lfru", &error), 0);
    assert_int_equal(expert_policy_parse(&p, "lfru:admit=3,admit=4", &error), 0);
    assert_true(p.half_life == plain.half_life && p.hysteresis == plain.hysteresis && p.admit == 4);
    assert_string_equal(residency_defaults().policy.name, expert_policies[0].name);
}

static void refused(const char *text, const char *sentence)
{
    struct expert_policy p;
    memset(&error, 0, sizeof error);
    assert_int_equal(expert_policy_parse(&p, text, &error), STRATA_E_ARGUMENT);
    assert_int_equal(error.code, STRATA_E_ARGUMENT);
    assert_string_equal(error.text, sentence);
}

static void what_is_no_policy_is_refused(void **state)
{
    static const char *const names[] = { "", "lf", "lfuu", "LFU", " lfu", "lfu,admit=1", "fifo" };
    for (int i = 0; i < 7; i++) {
        char sentence[120];
        snprintf(sentence, sizeof sentence, "there is no policy '%s': wanted lfu, lru, lfru, stale or none", names[i]);
        refused(names[i], sentence);
    }
    refused(":admit=1", "there is no policy '': wanted lfu, lru, lfru, stale or none");
}

static void what_is_no_setting_is_refused(void **state)
{
    static const char *const wrong[] = {
        "",          "admit",        "admit=",          "admit=x",         "admit=1x",   "admit=nan", "admit=inf",
        "admit=2e9", "half-life=-1", "hysteresis=-0.5", "hysteresis=1e39", "halflife=3", "half-life", "Admit=1",
        ":"
    };
    for (int i = 0; i < 15; i++) {
        char text[80], sentence[120];
        snprintf(sentence, sizeof sentence, "policy setting '%s': wanted half-life=N (windows), admit=N or hysteresis=N", wrong[i]);
        snprintf(text, sizeof text, "lfu:%s", wrong[i]);
        refused(text, sentence);
        snprintf(text, sizeof text, "lru:admit=1,%s", wrong[i]);
        refused(text, sentence);
        snprintf(text, sizeof text, "none:%s,admit=1", wrong[i]);
        refused(text, sentence);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lfu_swaps_what_the_slow_model_swaps),
        cmocka_unit_test(lru_swaps_what_the_slow_model_swaps),
        cmocka_unit_test(lfru_swaps_what_the_slow_model_swaps),
        cmocka_unit_test(stale_swaps_what_the_slow_model_swaps),
        cmocka_unit_test(none_never_swaps),
        cmocka_unit_test(a_long_run_is_what_the_slow_model_says),
        cmocka_unit_test(every_policy_is_followed),
        cmocka_unit_test(slots_take_what_there_is_and_no_more),
        cmocka_unit_test(slots_are_aligned_and_do_not_overlap),
        cmocka_unit_test(every_class_gets_at_least_its_part),
        cmocka_unit_test(layers_whose_blobs_need_the_same_room_share_slots),
        cmocka_unit_test(a_victim_leaves_at_once_and_the_newcomer_comes_after_the_lag),
        cmocka_unit_test(heat_halves_every_half_life),
        cmocka_unit_test(a_newcomer_below_the_least_value_is_not_admitted),
        cmocka_unit_test(equals_are_not_swapped),
        cmocka_unit_test(lru_knows_which_was_used_last_a_long_time_ago),
        cmocka_unit_test(requests_are_distinct_experts),
        cmocka_unit_test(what_was_hot_goes_when_nobody_asks_for_it_any_more),
        cmocka_unit_test(a_half_life_without_end_forgets_a_profile_in_time),
        cmocka_unit_test(the_tables_begin_with_the_best_of_the_profile),
        cmocka_unit_test(a_profile_comes_back_before_the_first_window),
        cmocka_unit_test(what_is_learned_is_the_part_of_the_windows_that_asked),
        cmocka_unit_test(an_old_profile_is_not_forgotten_at_once),
        cmocka_unit_test(a_restart_begins_with_what_was_used_most),
        cmocka_unit_test(settings_are_read),
        cmocka_unit_test(what_is_no_policy_is_refused),
        cmocka_unit_test(what_is_no_setting_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
