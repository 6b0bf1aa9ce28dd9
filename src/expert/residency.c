#include "expert/residency.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The profile is a memory of some ten thousand windows; one that was read from a file weighs as much as this many new windows. */
static const double profile_half_life = 10000, profile_weight = 512;

/* An expert and what it is worth. */
struct worth { float value; int32_t index; /* layer * n_experts + expert */ };

struct swap { struct worth newcomer, victim; };

/* Layers of equal blobs share slots [first, first + n). */
struct class { uint64_t bytes; int first, n, n_layers; };

struct residency {
    int n_layers, n_experts, n_classes, n_slots;
    struct residency_options options;
    struct residency_counters counters;
    uint64_t bytes;
    float decay;
    double rate_weight; /* windows that the rates stand for, faded */

    struct class *classes;    /* [n_classes] */
    int32_t *class_of;        /* [n_layers] */
    uint64_t *blob_bytes;     /* [n_layers] */
    int32_t *table;           /* [n_layers][n_experts]: slot or -1 */
    int32_t *owner;           /* [n_slots]: layer * n_experts + expert that is there, or is on its way there */
    uint64_t *offsets;        /* [n_slots] */
    float *heat, *rates;      /* [n_layers][n_experts]; rates: requests, fading slowly */
    uint64_t *last;           /* [n_layers][n_experts]: window of the last request, from 1; 0: none */

    struct worth *newcomers, *victims; /* [max_swaps], heaps */
    struct swap *planned;              /* [n_classes * max_swaps] */
    struct residency_swap *swaps;      /* [max_swaps] */
    int n_swaps;                       /* on their way */
    uint64_t due;                      /* after this window they are admitted */
};

struct residency_options residency_defaults(void) { return (struct residency_options){ .policy = expert_policies[0], .period = 4, .lag = 4, .max_swaps = 96 }; }

static size_t n_all(const struct residency *r) { return (size_t)r->n_layers * (size_t)r->n_experts; }
static uint64_t aligned(uint64_t bytes) { return (bytes + 255) & ~(uint64_t)255; }

/* ---- Creating ---------------------------------------------------------------------------------------------------------------------- */

/* Finds the classes and gives each its part of the memory; what rounding leaves goes to the first that it suffices for. */
static void cut_slots(struct residency *r)
{
    uint64_t all = 0, left = r->options.bytes;
    for (int i = 0; i < r->n_layers; i++) {
        int c = 0;
        while (c < r->n_classes && r->classes[c].bytes != aligned(r->blob_bytes[i]))
            c++;
        if (c == r->n_classes)
            r->classes[r->n_classes++] = (struct class){ .bytes = aligned(r->blob_bytes[i]) };
        r->classes[c].n_layers++;
        r->class_of[i] = c;
        all += aligned(r->blob_bytes[i]) * (uint64_t)r->n_experts;
    }
    uint64_t budget = left < all ? left : all;
    for (int c = 0; c < r->n_classes; c++) {
        struct class *class = &r->classes[c];
        class->n = (int)((unsigned __int128)class->n_layers * (unsigned)r->n_experts * budget / all);
        left -= (uint64_t)class->n * class->bytes;
    }
    for (int c = 0; c < r->n_classes; c++) {
        struct class *class = &r->classes[c];
        int more = class->n_layers * r->n_experts - class->n;
        if (left / class->bytes < (uint64_t)more)
            more = (int)(left / class->bytes);
        class->n += more;
        left -= (uint64_t)more * class->bytes;
        class->first = r->n_slots;
        r->n_slots += class->n;
        r->bytes += (uint64_t)class->n * class->bytes;
    }
}

struct seed { float rate; int32_t expert, layer; };

static int better_seed(const void *a, const void *b)
{
    const struct seed *x = a, *y = b;
    if (x->rate != y->rate)
        return x->rate > y->rate ? -1 : 1;
    return x->expert != y->expert ? x->expert - y->expert : x->layer - y->layer;
}

/* The best of every class get its slots. */
static void fill(struct residency *r, struct seed *seeds, const float *profile)
{
    for (size_t i = 0; i < n_all(r); i++) {
        int32_t layer = (int32_t)(i / (size_t)r->n_experts), expert = (int32_t)(i % (size_t)r->n_experts);
        seeds[i] = (struct seed){ profile ? profile[i] : 0, expert, layer };
        r->table[i] = -1;
    }
    qsort(seeds, n_all(r), sizeof *seeds, better_seed);
    uint64_t offset = 0;
    for (int c = 0; c < r->n_classes; c++) {
        const struct class *class = &r->classes[c];
        int slot = class->first;
        for (size_t i = 0; i < n_all(r) && slot < class->first + class->n; i++) {
            if (r->class_of[seeds[i].layer] != c)
                continue;
            r->owner[slot] = seeds[i].layer * r->n_experts + seeds[i].expert;
            r->table[r->owner[slot]] = slot;
            r->offsets[slot++] = offset;
            offset += class->bytes;
        }
    }
}

int residency_create(struct residency **out, const struct residency_shape *shape, const struct residency_options *options, const float *profile,
                     struct strata_error *error)
{
    struct residency *r = calloc(1, sizeof *r);
    if (!r)
        return error_set(error, STRATA_E_MEMORY, "out of memory for the tables of experts");
    *r = (struct residency){ .n_layers = shape->n_layers, .n_experts = shape->n_experts, .options = *options };
    size_t all = n_all(r), layers = (size_t)shape->n_layers;
    r->options.max_swaps = options->max_swaps < (int)all ? options->max_swaps : (int)all;
    r->classes = calloc(layers, sizeof *r->classes);
    r->class_of = calloc(layers, sizeof *r->class_of);
    r->blob_bytes = calloc(layers, sizeof *r->blob_bytes);
    if (r->classes && r->class_of && r->blob_bytes) {
        memcpy(r->blob_bytes, shape->blob_bytes, layers * sizeof *r->blob_bytes);
        cut_slots(r);
    }
    size_t slots = (size_t)r->n_slots, swaps = (size_t)r->options.max_swaps;
    struct seed *seeds = calloc(all, sizeof *seeds);
    r->table = calloc(all, sizeof *r->table);
    r->owner = calloc(slots + 1, sizeof *r->owner);
    r->offsets = calloc(slots + 1, sizeof *r->offsets);
    r->heat = calloc(all, sizeof *r->heat);
    r->rates = calloc(all, sizeof *r->rates);
    r->last = calloc(all, sizeof *r->last);
    r->newcomers = calloc(swaps + 1, sizeof *r->newcomers);
    r->victims = calloc(swaps + 1, sizeof *r->victims);
    r->planned = calloc(swaps * layers + 1, sizeof *r->planned);
    r->swaps = calloc(swaps + 1, sizeof *r->swaps);
    if (!r->classes || !r->class_of || !r->blob_bytes || !seeds || !r->table || !r->owner || !r->offsets || !r->heat || !r->rates || !r->last || !r->newcomers || !r->victims ||
        !r->planned || !r->swaps) {
        free(seeds);
        residency_destroy(r);
        return error_set(error, STRATA_E_MEMORY, "out of memory for the tables of experts");
    }
    float half_life = options->policy.half_life;
    r->decay = half_life > 0 ? exp2f(-1 / half_life) : 1;
    double steady = r->decay < 1 ? (double)r->decay / (1 - (double)r->decay) : profile_weight; /* heat after a window, if every one requests it */
    steady = steady < profile_weight ? steady : profile_weight;
    r->rate_weight = profile ? profile_weight : 0;
    for (size_t i = 0; profile && i < all; i++) {
        r->heat[i] = (float)(profile[i] * steady);
        r->rates[i] = (float)(profile[i] * profile_weight);
    }
    fill(r, seeds, profile);
    free(seeds);
    *out = r;
    return 0;
}

void residency_destroy(struct residency *r)
{
    if (!r)
        return;
    free(r->classes);
    free(r->class_of);
    free(r->blob_bytes);
    free(r->table);
    free(r->owner);
    free(r->offsets);
    free(r->heat);
    free(r->rates);
    free(r->last);
    free(r->newcomers);
    free(r->victims);
    free(r->planned);
    free(r->swaps);
    free(r);
}

/* ---- Looking ----------------------------------------------------------------------------------------------------------------------- */

int residency_slots(const struct residency *r) { return r->n_slots; }
uint64_t residency_bytes(const struct residency *r) { return r->bytes; }
const int32_t *residency_table(const struct residency *r, int layer) { return r->table + (size_t)layer * (size_t)r->n_experts; }
uint64_t residency_offset(const struct residency *r, int slot) { return r->offsets[slot]; }
const struct residency_counters *residency_counters(const struct residency *r) { return &r->counters; }

void residency_profile(const struct residency *r, float *profile)
{
    for (size_t i = 0; i < n_all(r); i++)
        profile[i] = r->rate_weight > 0 ? (float)(r->rates[i] / r->rate_weight) : 0;
}

/* ---- Windows ----------------------------------------------------------------------------------------------------------------------- */

bool residency_due(const struct residency *r) { return r->n_swaps && r->counters.windows >= r->due; }

void residency_admit(struct residency *r)
{
    for (int i = 0; i < r->n_swaps; i++)
        r->table[r->owner[r->swaps[i].slot]] = r->swaps[i].slot;
    r->n_swaps = 0;
}

void residency_use(struct residency *r, int layer, const int32_t *ids, int stride, int n_rows, int n_used)
{
    uint64_t window = r->counters.windows + 1;
    size_t base = (size_t)layer * (size_t)r->n_experts;
    for (int t = 0; t < n_rows; t++)
        for (int k = 0; k < n_used; k++) {
            size_t at = base + (size_t)ids[t * stride + k];
            if (r->last[at] == window)
                continue;
            r->last[at] = window;
            r->heat[at] += 1;
            r->rates[at] += 1;
            r->counters.requests++;
            r->counters.hits += r->table[at] >= 0;
        }
}

/* Of equals the lower index is worth more: any order will do, but it must be one. */
static bool worth_less(struct worth a, struct worth b) { return a.value != b.value ? a.value < b.value : a.index > b.index; }

/* A heap of at most `limit` that keeps the most valuable (sign 1: the root is its least) or the least valuable (sign -1). */
static bool above(int sign, struct worth a, struct worth b) { return sign > 0 ? worth_less(a, b) : worth_less(b, a); }

static void heap_down(struct worth *heap, int n, int at, int sign)
{
    for (int child; (child = 2 * at + 1) < n; at = child) {
        child += child + 1 < n && above(sign, heap[child + 1], heap[child]);
        if (!above(sign, heap[child], heap[at]))
            return;
        struct worth w = heap[at];
        heap[at] = heap[child];
        heap[child] = w;
    }
}

static void heap_keep(struct worth *heap, int *n, int limit, struct worth w, int sign)
{
    if (*n == limit) {
        if (!above(sign, heap[0], w))
            return;
        heap[0] = w;
        heap_down(heap, *n, 0, sign);
        return;
    }
    int at = (*n)++;
    for (; at && above(sign, w, heap[(at - 1) / 2]); at = (at - 1) / 2)
        heap[at] = heap[(at - 1) / 2];
    heap[at] = w;
}

/* Root last: the most valuable first with sign 1, the least valuable first with sign -1. */
static void heap_sort(struct worth *heap, int n, int sign)
{
    while (n > 1) {
        struct worth w = heap[0];
        heap[0] = heap[--n];
        heap[n] = w;
        heap_down(heap, n, 0, sign);
    }
}

/* Pairs the most valuable absent experts of a class with its least valuable present ones. */
static int pair(struct residency *r, int class, struct swap *out)
{
    const struct expert_policy *p = &r->options.policy;
    int n_new = 0, n_old = 0, n = 0, limit = r->options.max_swaps;
    for (int layer = 0; layer < r->n_layers; layer++) {
        size_t base = (size_t)layer * (size_t)r->n_experts;
        for (int e = 0; r->class_of[layer] == class && e < r->n_experts; e++) {
            size_t at = base + (size_t)e;
            uint64_t age = r->last[at] ? r->counters.windows - r->last[at] : UINT32_MAX;
            struct worth w = { p->value(r->heat[at], age < UINT32_MAX ? (uint32_t)age : UINT32_MAX), (int32_t)at };
            if (r->table[at] >= 0)
                heap_keep(r->victims, &n_old, limit, w, -1);
            else if (w.value >= p->admit)
                heap_keep(r->newcomers, &n_new, limit, w, 1);
        }
    }
    heap_sort(r->newcomers, n_new, 1);
    heap_sort(r->victims, n_old, -1);
    for (; n < n_new && n < n_old; n++) {
        float newcomer = r->newcomers[n].value, victim = r->victims[n].value;
        if (!(newcomer > victim && newcomer >= victim + p->hysteresis))
            break;
        out[n] = (struct swap){ r->newcomers[n], r->victims[n] };
    }
    return n;
}

static int larger_gain(const void *a, const void *b)
{
    const struct swap *x = a, *y = b;
    float gain_x = x->newcomer.value - x->victim.value, gain_y = y->newcomer.value - y->victim.value;
    if (gain_x != gain_y)
        return gain_x > gain_y ? -1 : 1;
    return x->newcomer.index < y->newcomer.index ? -1 : 1;
}

static void plan(struct residency *r)
{
    int n = 0;
    for (int c = 0; c < r->n_classes; c++)
        n += pair(r, c, r->planned + n);
    if (n > r->options.max_swaps) {
        qsort(r->planned, (size_t)n, sizeof *r->planned, larger_gain);
        n = r->options.max_swaps;
    }
    for (int i = 0; i < n; i++) {
        int newcomer = r->planned[i].newcomer.index, slot = r->table[r->planned[i].victim.index];
        r->table[r->planned[i].victim.index] = -1;
        r->owner[slot] = newcomer;
        r->swaps[i] = (struct residency_swap){ newcomer / r->n_experts, newcomer % r->n_experts, slot, r->offsets[slot] };
        r->counters.swaps++;
        r->counters.swap_bytes += r->blob_bytes[newcomer / r->n_experts];
    }
    r->n_swaps = n;
    r->due = r->counters.windows + (uint64_t)r->options.lag - 1;
}

/* Heat below this counts as none: denormals would make the loop a hundred times slower. */
static const float cold = 1e-6f;

int residency_end(struct residency *r, const struct residency_swap **swaps)
{
    r->counters.windows++;
    bool planning = r->options.policy.value && r->n_slots && r->options.max_swaps > 0 && r->counters.windows % (uint64_t)r->options.period == 0;
    if (planning) /* with lag <= period nothing is on its way here: the caller admits what is due before every window */
        plan(r);
    float decay = r->decay, slow = (float)exp2(-1 / profile_half_life);
    for (size_t i = 0; i < n_all(r); i++) {
        r->heat[i] = r->heat[i] * decay >= cold ? r->heat[i] * decay : 0;
        r->rates[i] = r->rates[i] * slow >= cold ? r->rates[i] * slow : 0;
    }
    r->rate_weight = (r->rate_weight + 1) * (double)slow;
    *swaps = r->swaps;
    return planning ? r->n_swaps : 0;
}
