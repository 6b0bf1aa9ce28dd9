/* simulate.h - a trace replayed through residency.h: the counters of the engine, without the engine. */
#ifndef EXPERT_SIMULATE_H
#define EXPERT_SIMULATE_H

#include "expert/trace.h"

struct simulation {
    struct residency_counters counters;
    int slots;
    /* Belady's bound: the hits of a cache of the same slots per class that knows the future, starts with the best contents, loads on a miss if
     * that pays, and swaps without limit or delay. */
    uint64_t belady_hits;
};

/* Replays the whole trace. `profile` as in residency_create. */
int simulate(struct simulation *out, struct trace_reader *trace, const struct residency_options *options, const float *profile, struct strata_error *error);

#endif
