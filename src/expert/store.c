#include "expert/store.h"

#include <stdio.h>
#include <stdlib.h>
#include <xxhash.h>

int store_create(struct expert_store *store, int n_layers, struct strata_error *error)
{
    *store = (struct expert_store){ .n_layers = n_layers, .sets = calloc((size_t)n_layers, sizeof *store->sets) };
    return store->sets ? 0 : error_set(error, STRATA_E_MEMORY, "out of memory for the experts of %d layers", n_layers);
}

void store_destroy(struct expert_store *store)
{
    arena_destroy(&store->arena);
    free(store->sets);
    *store = (struct expert_store){ 0 };
}

size_t store_bytes(const struct expert_store *store)
{
    size_t total = 0;
    for (int i = 0; i < store->n_layers; i++)
        total += store_layer_bytes(store->sets[i]);
    return total;
}

int store_reserve(struct expert_store *store, struct strata_error *error)
{
    int code = arena_create(&store->arena, store_bytes(store), "the experts", error);
    for (int i = 0; !code && i < store->n_layers; i++)
        store->sets[i]->blobs = arena_alloc(&store->arena, store_layer_bytes(store->sets[i]));
    return code;
}

uint64_t store_layer_hash(const struct expert_set *set, const uint8_t *blobs) { return XXH64(blobs, store_layer_bytes(set), 0); }

/* ---- Does it fit?
 * ---------------------------------------------------------------------------------------------------------------------- */

/* Left free for states, windows and the program itself: 1/50 of the weights, at least 64 MiB. */
enum { WORKING_BYTES = 64 << 20, WORKING_PART = 50 };

static uint64_t with_working_bytes(uint64_t weights)
{
    return weights + (weights / WORKING_PART > WORKING_BYTES ? weights / WORKING_PART : WORKING_BYTES);
}

/* The most weights that fit so: the inverse. */
static uint64_t most_weights(uint64_t available)
{
    uint64_t by_part = available / (WORKING_PART + 1) * WORKING_PART,
             by_bytes = available > WORKING_BYTES ? available - WORKING_BYTES : 0;
    return by_part < by_bytes ? by_part : by_bytes;
}

static const struct quant_format *that_divides(const struct quant_format *format, int width)
{
    if (width % format->block == 0)
        return format;
    /* As `strata quantize` decides: the next type with smaller blocks and no fewer bits. */
    const struct quant_format *next = quant_format_find(format->bytes * 16 <= format->block * 9 ? QUANT_IQ4_NL : QUANT_Q8_0);
    return width % next->block ? quant_format_find(QUANT_F16) : next;
}

/* Bytes of all experts if they had this type. */
static uint64_t bytes_in(const struct expert_store *store, const struct quant_format *format)
{
    uint64_t total = 0;
    for (int i = 0; i < store->n_layers; i++) {
        struct expert_set set = *store->sets[i];
        set.blob_bytes = (size_t)tile_count(set.width) * 2 * tile_bytes(that_divides(format, set.hidden), set.hidden) +
                         (size_t)tile_count(set.hidden) * tile_bytes(that_divides(format, set.width), set.width);
        total += store_layer_bytes(&set);
    }
    return total;
}

/* The type whose experts take most of `bytes`, or NULL. Of equals the newest that Strata can write. */
static const struct quant_format *widest(const struct expert_store *store, uint64_t bytes)
{
    const struct quant_format *best = NULL;
    uint64_t best_bytes = 0;
    for (uint32_t type = 0; type < QUANT_TYPE_LIMIT; type++) {
        const struct quant_format *format = quant_format_find(type);
        uint64_t takes = format ? bytes_in(store, format) : UINT64_MAX;
        if (takes <= bytes && (takes > best_bytes || (takes == best_bytes && format->encode))) {
            best = format;
            best_bytes = takes;
        }
    }
    return best;
}

struct store_amount store_amount(double bytes)
{
    struct store_amount a;
    snprintf(a.text, sizeof a.text, bytes < 1e9 ? "%.1f MB" : "%.1f GB", bytes / (bytes < 1e9 ? 1e6 : 1e9));
    return a;
}

int store_check_memory(const struct expert_store *store, uint64_t dense_bytes, const struct memory_room *room,
                       struct strata_error *error)
{
    uint64_t expert_bytes = store_bytes(store), needed = with_working_bytes(dense_bytes + expert_bytes), n_weights = 0;
    if (needed <= room->available_bytes)
        return 0;
    for (int i = 0; i < store->n_layers; i++)
        n_weights += 3 * (uint64_t)store->sets[i]->n_experts * (uint64_t)store->sets[i]->hidden * (uint64_t)store->sets[i]->width;
    uint64_t most = most_weights(room->available_bytes), left = most > dense_bytes ? most - dense_bytes : 0;
    const struct quant_format *fits = widest(store, left);
    char advice[160] = "nothing smaller would fit";
    if (fits) /* in hundredths, rounded down */
        snprintf(advice, sizeof advice, "experts of at most %.2f bits per weight would fit, for example %s",
                 (double)(uint64_t)((double)left * 800 / (double)n_weights) / 100, fits->name);
    return error_set(error, STRATA_E_MEMORY, "the model needs %s of RAM (%s of experts), %s are available (%s): %s",
                     store_amount((double)needed).text, store_amount((double)expert_bytes).text,
                     store_amount((double)room->available_bytes).text, room->limited_by, advice);
}
