/* loader.h - brings tensors from a GGUF file into the layouts that operations want, naming what is wrong with each.
 *
 * The model asks for all its tensors twice. First dry: names, shapes and types are checked and sizes counted, so that a wrong file
 * and a model that does not fit fail at once. loader_reserve then takes exactly the memory that was counted; asked again, every
 * tensor gets its place in it (small ones are read), and loader_run reads the rest with all threads: the experts as tiles of the
 * GGUF file's rows, or as they are from a pack. So the weights exist once in memory.
 */
#ifndef MODEL_LOADER_H
#define MODEL_LOADER_H

#include "base/arena.h"
#include "expert/store.h"
#include "gguf/gguf.h"
#include "ops/ops.h"

struct load_options; /* model.h */

/* A part of the work that one thread does at once. */
struct loader_piece {
    const struct gguf_tensor *tensor; /* NULL: bytes of the pack */
    uint64_t first;                   /* row of the tensor (all experts counted on), or place in the pack */
    size_t n;                         /* rows, or bytes */
    uint8_t *out;                     /* of tiles `stride` apart, or of the bytes */
    size_t stride;
};

struct loader {
    const struct gguf *gguf;
    struct arena *arena; /* of the dense weights */
    struct expert_store *store;
    bool dry; /* check and count only: no memory, no reading */
    int code; /* the first failure; later calls do nothing */
    struct strata_error *error;
    uint64_t dense_bytes; /* counted so far */
    struct loader_piece *pieces;
    size_t n_pieces, capacity;
    struct mapping {
        void *base;
        size_t length;
    } maps[4];
    int n_maps;
};

/* Each finds `name` (printf style), checks its shape, and fills *out. A failure is remembered in loader->code. */
void loader_matrix(struct loader *l, struct matrix *out, int64_t rows, int64_t width, const char *name, ...)
    __attribute__((format(printf, 5, 6)));
void loader_table(struct loader *l, struct row_table *out, int64_t min_rows, int64_t width, const char *name, ...)
    __attribute__((format(printf, 5, 6)));
/* Small tensors become float32 vectors of n values, read at once. */
void loader_vector(struct loader *l, const float **out, int64_t n, const char *name, ...) __attribute__((format(printf, 4, 5)));
/* [channels][taps] in the file, [taps][channels] in memory. */
void loader_taps(struct loader *l, const float **out, int64_t channels, int64_t taps, const char *name, ...)
    __attribute__((format(printf, 5, 6)));
/* The experts of a block become the store's set of that layer. */
void loader_experts(struct loader *l, struct expert_set *out, int n_experts, int hidden, int width, int block);
void loader_fail(struct loader *l, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* After the dry pass: the memory check (unless the options say otherwise) and both arenas. Ends the dryness. */
void loader_reserve(struct loader *l, const struct load_options *options);
/* Between the two files of the loader: plans one piece; plans the making of a layer's blobs at `blobs`; whether n weights of a
 * float format, as they are in the file, are numbers. */
void loader_add_piece(struct loader *l, struct loader_piece piece);
void loader_plan_experts(struct loader *l, const struct expert_set *set, uint8_t *blobs);
int loader_check_numbers(const struct gguf_tensor *tensor, const uint8_t *raw, size_t n, struct strata_error *error);

/* After the second pass: reads all that was asked for. */
int loader_run(struct loader *l, struct pool *pool, const struct load_options *options);
/* Frees what the loader used for loading (not the arenas, not the mappings). */
void loader_finish(struct loader *l);

/* Writes the experts of a model, whose sets a dry pass filled, as a pack. One layer at a time is in memory. */
int loader_pack(const struct gguf *gguf, const struct expert_store *store, const char *path, struct pool *pool,
                bool (*progress)(void *context, double part), void *progress_context, struct strata_error *error);

#endif
