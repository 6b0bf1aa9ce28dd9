/* loader.h - brings tensors from a GGUF file into the layouts that operations want, naming what is wrong with each.
 *
 * Two phases: the model asks for every tensor (names, shapes and types are checked, places in the arena are given out, nothing large is
 * read), then loader_run reads everything with all threads. So a wrong file fails at once, and the weights exist once in memory.
 */
#ifndef MODEL_LOADER_H
#define MODEL_LOADER_H

#include "base/arena.h"
#include "gguf/gguf.h"
#include "ops/ops.h"

struct loader_piece;

struct loader {
    const struct gguf *gguf;
    struct arena *arena;
    bool dry;                  /* check only: no memory, no reading */
    int code;                  /* the first failure; later calls do nothing */
    struct strata_error *error;
    struct loader_piece *pieces;
    size_t n_pieces, capacity;
    struct mapping { void *base; size_t length; } maps[4];
    int n_maps;
};

/* Upper bound of the arena for all tensors of the file. */
size_t loader_arena_bytes(const struct gguf *gguf);

/* Each finds `name` (printf style), checks its shape, and fills *out. A failure is remembered in loader->code. */
void loader_matrix(struct loader *l, struct matrix *out, int64_t rows, int64_t width, const char *name, ...) __attribute__((format(printf, 5, 6)));
void loader_table(struct loader *l, struct row_table *out, int64_t min_rows, int64_t width, const char *name, ...) __attribute__((format(printf, 5, 6)));
/* Small tensors become float32 vectors of n values, read at once. */
void loader_vector(struct loader *l, const float **out, int64_t n, const char *name, ...) __attribute__((format(printf, 4, 5)));
/* [channels][taps] in the file, [taps][channels] in memory. */
void loader_taps(struct loader *l, const float **out, int64_t channels, int64_t taps, const char *name, ...) __attribute__((format(printf, 5, 6)));
void loader_experts(struct loader *l, struct expert_set *out, int n_experts, int hidden, int width, int block);
void loader_fail(struct loader *l, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Reads all that was asked for. */
int loader_run(struct loader *l, struct pool *pool, bool (*progress)(void *, double), void *progress_context);
/* Frees what the loader used for loading (not the arena, not the mappings). */
void loader_finish(struct loader *l);

#endif
