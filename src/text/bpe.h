/* bpe.h - byte-pair encoding: which neighbouring tokens merge into which, and the merging of one piece.
 *
 * Owns the merge table. It knows bytes and token numbers, no texts. The rule: of all neighbours that have a merge, the one of the
 * lowest rank merges first, the leftmost among equals, until none is left. A piece of n bytes takes O(n log n).
 */
#ifndef TEXT_BPE_H
#define TEXT_BPE_H

#include "base/error.h"

struct bpe_merge {
    int32_t left, right, result;
};

struct bpe {
    uint32_t n_merges;
    struct bpe_merge *merges; /* [n_merges], by rank */
    uint32_t *slots;          /* [mask + 1], hash of (left, right) -> rank + 1; 0 is free */
    uint32_t mask;
    int32_t byte_token[256]; /* the token of each single byte */
};

/* Reserves the table for `n_merges`. byte_token is the caller's: fill it before or after. */
int bpe_create(struct bpe *bpe, uint32_t n_merges, struct strata_error *error);
void bpe_destroy(struct bpe *bpe);
/* Appends the merge of the next rank. A pair that has a rank keeps it: the new one is never used. */
void bpe_add(struct bpe *bpe, struct bpe_merge merge);

/* Working memory of one thread. Start from a zeroed struct. */
struct bpe_symbol {
    int32_t token;
    uint32_t previous, next;
};
struct bpe_work {
    struct bpe_symbol *symbols; /* [room] */
    uint64_t *heap;             /* [2 * room] */
    size_t n_candidates, room;
};
void bpe_work_free(struct bpe_work *work);

/* Merges the n >= 1 bytes of a piece; `out` has room for n tokens. Returns their number, or a negative code. */
int64_t bpe_encode(const struct bpe *bpe, struct bpe_work *work, const uint8_t *bytes, size_t n, int32_t *out,
                   struct strata_error *error);

#endif
