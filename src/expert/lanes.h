/* lanes.h - the experts of a running model: who computes which, how long it takes, and what is done when a lane hangs.
 *
 * Owns the residency tables, the costs, the trace and the statistics. With a device a window runs there and the calling thread serves its
 * doorbell: plan, cpu lane, answer. Without one every expert is in the cpu lane and is computed when the model asks. The invariant: a result
 * does not depend on any of it (design.md section 2, rule 7).
 */
#ifndef EXPERT_LANES_H
#define EXPERT_LANES_H

#include "expert/controller.h"
#include "expert/device.h"
#include "expert/residency.h"

struct lanes_options {
    struct residency_options residency;
    int share;               /* 0..256: misses * share / 256 go over the link; -1: the controller chooses */
    double watchdog_s;       /* a lane that does nothing for so long has hung */
    const char *profile;     /* seeds the residency; NULL: none */
    const char *trace;       /* records the routing; NULL: not */
    uint32_t delay_us;       /* stress, as in sim_options */
    bool stall_cpu; int stall_layer; uint64_t stall_window;
};

struct expert_lanes;

/* `host`: the CPU backend. `device` may be NULL; the lanes own it from here on, also after a failure. Fills the slots (progress as everywhere) and
 * measures the lanes. */
int lanes_create(struct expert_lanes **out, const struct expert_store *store, int n_used, struct ops *host, struct expert_device *device,
                 const struct lanes_options *options, bool (*progress)(void *, double), void *progress_context, struct strata_error *error);
/* Closes the trace. Returns false if something hangs: then nothing that the lanes, the device or the pool use may be freed. */
bool lanes_destroy(struct expert_lanes *lanes);

/* The ops a model must be run with: the device's, or the host's. */
struct ops *lanes_ops(struct expert_lanes *lanes);
/* Runs one window of n rows: body(context), which calls the ops' experts once per layer, in order.
 * Returns its code, or that of a lane that failed. */
int lanes_window(struct expert_lanes *lanes, int n_rows, int (*body)(void *context), void *context, struct strata_error *error);

int lanes_save_profile(const struct expert_lanes *lanes, const char *path, struct strata_error *error);
int lanes_close_trace(struct expert_lanes *lanes, struct strata_error *error);

/* Times of the last LANES_SAMPLES windows. */
enum { LANES_SAMPLES = 256 };
struct lane_times { double mean_us, p95_us; };
struct lanes_stats {
    struct residency_counters counters;
    int slots;
    uint64_t slot_bytes, experts[N_LANES], bytes[N_LANES];
    struct lane_times lane[N_LANES], layer; /* of one layer, where the lane had work */
};
/* layer -1: all layers together. */
void lanes_stats(const struct expert_lanes *lanes, int layer, struct lanes_stats *out);

#endif
