#include "text/bpe.h"

#include <stdlib.h>

#define NONE UINT32_MAX /* no such rank, no such position */

int bpe_create(struct bpe *bpe, uint32_t n_merges, struct strata_error *error)
{
    uint64_t n_slots = 16;
    while (n_slots < 2 * (uint64_t)n_merges) /* at most half full */
        n_slots *= 2;
    bpe->mask = (uint32_t)(n_slots - 1);
    bpe->n_merges = 0;
    bpe->merges = malloc(((size_t)n_merges + 1) * sizeof *bpe->merges);
    bpe->slots = calloc(n_slots, sizeof *bpe->slots);
    if (bpe->merges && bpe->slots)
        return 0;
    bpe_destroy(bpe);
    return error_set(error, STRATA_E_MEMORY, "a table of %u merges: out of memory", n_merges);
}

void bpe_destroy(struct bpe *bpe)
{
    free(bpe->merges);
    free(bpe->slots);
    bpe->merges = NULL;
    bpe->slots = NULL;
}

/* The slot that holds the pair, or the free one where it belongs. */
static uint32_t find_slot(const struct bpe *bpe, int32_t left, int32_t right)
{
    uint64_t hash = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) * 0x9e3779b97f4a7c15u;
    uint32_t i = (uint32_t)(hash >> 32) & bpe->mask;
    for (;; i = (i + 1) & bpe->mask) {
        if (!bpe->slots[i])
            return i;
        const struct bpe_merge *merge = &bpe->merges[bpe->slots[i] - 1];
        if (merge->left == left && merge->right == right)
            return i;
    }
}

void bpe_add(struct bpe *bpe, struct bpe_merge merge)
{
    uint32_t slot = find_slot(bpe, merge.left, merge.right);
    bpe->merges[bpe->n_merges++] = merge;
    if (!bpe->slots[slot])
        bpe->slots[slot] = bpe->n_merges;
}

static uint32_t find_rank(const struct bpe *bpe, int32_t left, int32_t right)
{
    return bpe->slots[find_slot(bpe, left, right)] - 1; /* a free slot holds 0: NONE */
}

void bpe_work_free(struct bpe_work *work)
{
    free(work->symbols);
    free(work->heap);
    *work = (struct bpe_work){ 0 };
}

static int reserve(struct bpe_work *work, size_t n, struct strata_error *error)
{
    if (n <= work->room)
        return 0;
    if (n >= UINT32_MAX / 4)
        return error_set(error, STRATA_E_ARGUMENT, "a word of %zu bytes is too long to be encoded", n);
    bpe_work_free(work);
    size_t room = n < 256 ? 256 : n + n / 2;
    work->symbols = malloc(room * sizeof *work->symbols);
    /* n - 1 pairs at first; each of up to n - 1 merges takes one and adds two. */
    work->heap = malloc(2 * room * sizeof *work->heap);
    if (!work->symbols || !work->heap) {
        bpe_work_free(work);
        return error_set(error, STRATA_E_MEMORY, "encoding a word of %zu bytes: out of memory", n);
    }
    work->room = room;
    return 0;
}

/* A pair that has a merge becomes a candidate: rank << 32 | position, so that the smallest is the next merge, the lowest rank and
 * then the leftmost. `left` is the position of the pair's left side. */
static void consider(const struct bpe *bpe, struct bpe_work *work, uint32_t left)
{
    if (left == NONE || work->symbols[left].next == NONE)
        return;
    uint32_t rank = find_rank(bpe, work->symbols[left].token, work->symbols[work->symbols[left].next].token);
    if (rank == NONE)
        return;
    uint64_t candidate = (uint64_t)rank << 32 | left, *heap = work->heap;
    size_t i = work->n_candidates++;
    for (; i && heap[(i - 1) / 2] > candidate; i = (i - 1) / 2)
        heap[i] = heap[(i - 1) / 2];
    heap[i] = candidate;
}

static uint64_t take_smallest(struct bpe_work *work)
{
    uint64_t *heap = work->heap, smallest = heap[0], last = heap[--work->n_candidates];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < work->n_candidates; i = child) {
        child += child + 1 < work->n_candidates && heap[child + 1] < heap[child];
        if (heap[child] >= last)
            break;
        heap[i] = heap[child];
    }
    heap[i] = last;
    return smallest;
}

int64_t bpe_encode(const struct bpe *bpe, struct bpe_work *work, const uint8_t *bytes, size_t n, int32_t *out,
                   struct strata_error *error)
{
    int code = reserve(work, n, error);
    if (code < 0)
        return code;
    struct bpe_symbol *symbols = work->symbols;
    for (uint32_t i = 0; i < n; i++)
        symbols[i] = (struct bpe_symbol){ bpe->byte_token[bytes[i]], i ? i - 1 : NONE, i + 1 < n ? i + 1 : NONE };
    for (uint32_t i = 0; i < n; i++)
        consider(bpe, work, i);
    while (work->n_candidates) {
        uint64_t candidate = take_smallest(work);
        const struct bpe_merge *merge = &bpe->merges[candidate >> 32];
        uint32_t at = (uint32_t)candidate;
        struct bpe_symbol *left = &symbols[at];
        /* An earlier merge may have taken either side since the candidate was noted. */
        if (left->token != merge->left || left->next == NONE || symbols[left->next].token != merge->right)
            continue;
        symbols[left->next].token = -1; /* no token: whatever was noted for this position is void */
        left->token = merge->result;
        left->next = symbols[left->next].next;
        if (left->next != NONE)
            symbols[left->next].previous = at;
        consider(bpe, work, at);
        consider(bpe, work, left->previous);
    }
    int64_t n_out = 0;
    for (uint32_t i = 0; i != NONE; i = symbols[i].next)
        out[n_out++] = symbols[i].token;
    return n_out;
}
