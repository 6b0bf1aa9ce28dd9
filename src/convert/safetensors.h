/* safetensors.h - reads Hugging Face checkpoints: one model.safetensors, or shards listed in model.safetensors.index.json.
 *
 * Owns the open files and the table of tensors. It knows names, shapes and byte ranges, nothing of models. The invariant: after
 * safetensors_open succeeded every tensor's bytes lie inside its file, fit its shape, and no name occurs twice.
 */
#ifndef CONVERT_SAFETENSORS_H
#define CONVERT_SAFETENSORS_H

#include "quant/quant.h"

enum { SAFETENSORS_MAX_DIMS = 8 };

struct safetensor {
    char *name;
    char dtype[16];                     /* as the file spells it: "BF16", "I64", "F8_E4M3" */
    const struct quant_format *format;  /* F32, F16, BF16; NULL for every other type */
    int n_dims;                         /* 0: a scalar */
    int64_t dims[SAFETENSORS_MAX_DIMS]; /* slowest first, as the file has them */
    int64_t n_elements;
    int file;
    uint64_t offset, bytes; /* absolute, in that file */
    bool used;              /* for the caller's book-keeping */
};

struct safetensors_file {
    char *path;
    int fd;
    uint64_t size;
};

struct safetensors {
    int n_files;
    struct safetensors_file *files;
    size_t n_tensors;
    struct safetensor *tensors; /* sorted by name */
};

int safetensors_open(struct safetensors **out, const char *directory, struct strata_error *error);
void safetensors_close(struct safetensors *st); /* NULL is allowed */

struct safetensor *safetensors_find(const struct safetensors *st, const char *name); /* NULL if absent */

/* Reads elements [first, first + n) of an F32, F16 or BF16 tensor as floats. Thread-safe. */
int safetensors_read_floats(const struct safetensors *st, const struct safetensor *t, int64_t first, int64_t n, float *out,
                            struct strata_error *error);
/* All of a small I64 tensor; n must be its element count. */
int safetensors_read_i64(const struct safetensors *st, const struct safetensor *t, int64_t n, int64_t *out,
                         struct strata_error *error);

#endif
