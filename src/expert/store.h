/* store.h - all experts of a model in RAM, and the pack file that keeps them in this form.
 *
 * One arena (huge pages where the system gives them) holds the blobs of all layers; a layer is one run of bytes that begins on a
 * page: n_experts blobs, blob_bytes apart, zeros up to the next page. A pack is a header and the same runs, so that reading it is
 * reading, nothing else (pack.h). The store never computes; who reads it is lanes.h.
 */
#ifndef EXPERT_STORE_H
#define EXPERT_STORE_H

#include "base/arena.h"
#include "base/memory.h"
#include "ops/ops.h"

enum { STORE_PAGE = 4096 };

struct expert_store {
    struct arena arena;
    int n_layers;
    struct expert_set **sets; /* [n_layers]; blobs point into the arena. The sets are the model's, filled by its loader */
};

/* Bytes that a layer takes in the arena and in a pack. */
static inline size_t store_layer_bytes(const struct expert_set *set)
{
    return ((size_t)set->n_experts * set->blob_bytes + STORE_PAGE - 1) & ~(size_t)(STORE_PAGE - 1);
}

/* Room for n_layers pointers to sets. */
int store_create(struct expert_store *store, int n_layers, struct strata_error *error);
void store_destroy(struct expert_store *store);
/* Of all layers. */
size_t store_bytes(const struct expert_store *store);
/* Reserves the arena, exactly as large as the sets need, and points them into it. */
int store_reserve(struct expert_store *store, struct strata_error *error);
/* xxh64 of a layer's run of bytes. */
uint64_t store_layer_hash(const struct expert_set *set, const uint8_t *blobs);

/* "1.4 GB", for sentences. */
struct store_amount {
    char text[32];
};
struct store_amount store_amount(double bytes);

/* Whether the sets and `dense_bytes` of other weights fit into `room`, with something left to compute in. If not: STRATA_E_MEMORY,
 * and the sentence says what is needed, what there is, and which type of experts would fit. A pure function. */
int store_check_memory(const struct expert_store *store, uint64_t dense_bytes, const struct memory_room *room,
                       struct strata_error *error);

#endif
