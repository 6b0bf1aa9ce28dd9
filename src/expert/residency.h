/* residency.h - which experts a device holds, and which it should hold instead.
 *
 * Device memory for experts is cut into slots; a slot belongs to a *class* of layers whose blobs have the same size. The tables (expert ->
 * slot, per layer) change only between windows: residency_admit admits what has landed, residency_end counts what a window used and may plan
 * swaps. A planned swap evicts its victim at once (it is a miss from then on), the newcomer is there from the lag-th window after the plan on: by
 * then the caller has copied it (and waits if the copy is late), so the tables depend on the routing alone, never on the speed of a copy. That is what
 * makes the simulator exact (simulate.h), which uses this same code.
 *
 * Counting: a *request* is one distinct expert of one layer of one window; it is a hit if the table holds it. A *profile* says in what
 * part of the windows each expert was requested, over a long time: [n_layers][n_experts].
 */
#ifndef EXPERT_RESIDENCY_H
#define EXPERT_RESIDENCY_H

#include "base/error.h"

/* How a policy values an expert: the most valuable should be resident. `heat` counts requests, halved every half_life windows; `age` is the
 * windows since the last request (0: in this one, UINT32_MAX: never). */
struct expert_policy {
    const char *name, *summary;
    float (*value)(float heat, uint32_t age);   /* NULL: never swap */
    float half_life;                            /* windows; 0: heat never fades */
    float admit;       /* least value of a newcomer */
    float hysteresis;  /* a newcomer must be worth so much more than its victim */
};

/* The policies by name; NULL-terminated. The first is the default (docs/LEARNED.md says why). */
extern const struct expert_policy expert_policies[];
/* By name, with optional settings: "lfu", "lfu:half-life=16,hysteresis=1.5,admit=1". */
int expert_policy_parse(struct expert_policy *out, const char *text, struct strata_error *error);

struct residency_shape {
    int n_layers, n_experts;
    const uint64_t *blob_bytes; /* [n_layers] */
};

struct residency_options {
    struct expert_policy policy;
    uint64_t bytes;    /* device memory for slots */
    int period, lag;   /* a plan after every `period` windows, in force from the lag-th window after it (1: the next) on; 1 <= lag <= period */
    int max_swaps;     /* per plan */
};
/* period 4, lag 4, 96 swaps, the default policy, no memory. */
struct residency_options residency_defaults(void);

struct residency_counters {
    uint64_t windows, requests, hits, swaps, swap_bytes;
};

/* The expert to copy, and where to. */
struct residency_swap { int layer, expert, slot; uint64_t offset; /* of the slot in device memory */ };

struct residency;

/* Divides the memory into slots: the same part of every class, at most all experts. The tables begin with the experts that the profile
 * prefers (NULL: the first of every layer), and the heat as it would be after many windows of that profile. They count as resident at once: the
 * caller copies them before the first window. */
int residency_create(struct residency **out, const struct residency_shape *shape, const struct residency_options *options, const float *profile,
                     struct strata_error *error);
void residency_destroy(struct residency *r);

int residency_slots(const struct residency *r);                       /* in all classes */
uint64_t residency_bytes(const struct residency *r);                  /* of device memory that the slots take, <= options.bytes */
const int32_t *residency_table(const struct residency *r, int layer); /* [n_experts]: slot, or -1 */
uint64_t residency_offset(const struct residency *r, int slot);       /* of a slot in device memory; aligned to 256 bytes */
const struct residency_counters *residency_counters(const struct residency *r);
/* What was learned: the profile it began with and all windows since, older ones fading slowly. */
void residency_profile(const struct residency *r, float *profile);

/* Before a window. Returns true if swaps are due: the caller makes sure that their copies have landed and calls residency_admit. */
bool residency_due(const struct residency *r);
void residency_admit(struct residency *r);
/* During a window: row t of a layer chose ids[t * stride .. + n_used). Counts requests and hits. */
void residency_use(struct residency *r, int layer, const int32_t *ids, int stride, int n_rows, int n_used);
/* After a window. Returns the swaps just planned (0 mostly), valid until the next call: their victims are out of the tables, the caller
 * starts copying the newcomers. */
int residency_end(struct residency *r, const struct residency_swap **swaps);

#endif
