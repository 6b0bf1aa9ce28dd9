/* emit.h - inside convert/ only: the list of tensors to write, where their rows come from, and the loop that streams them out.
 *
 * The three ways to make a file differ in where rows come from and share everything else: the choice of types, encoding in
 * parallel, order, progress, stopping. */
#ifndef CONVERT_EMIT_H
#define CONVERT_EMIT_H

#include "convert/convert.h"
#include "gguf/gguf.h"

/* Where the rows of one tensor come from. Exactly one function is set; both are called from several threads at once. */
struct emit_source {
    /* Rows [first, first + n) as floats, out [n][width]: encoded here. */
    int (*floats)(const void *context, int64_t first, int64_t n, float *out, struct strata_error *error);
    /* The same rows, already in the output's format. */
    int (*bytes)(const void *context, int64_t first, int64_t n, uint8_t *out, struct strata_error *error);
    void *context; /* freed with free() by emit_destroy; may be NULL */
};

struct emit_tensor {
    char name[GGUF_MAX_NAME];
    const struct quant_format *format;
    int n_dims;
    int64_t dims[GGUF_MAX_DIMS];
    struct emit_source source;
};

struct emit {
    const struct convert_options *options;
    struct convert_summary *summary;
    struct emit_tensor *tensors;
    size_t n, capacity;
    struct {
        const struct quant_format *wanted, *got;
        uint64_t n;
    } fallbacks[8]; /* for the summary; more kinds are only counted */
    int n_fallback_kinds;
};

void emit_create(struct emit *emit, const struct convert_options *options, struct convert_summary *summary);
void emit_destroy(struct emit *emit);

/* The format for a tensor: what `types` ask for by its role (told by its name), `from` where they do not, F32 where it must be; a
 * type whose blocks do not divide the width falls back to IQ4_NL, Q8_0 or F16. */
const struct quant_format *emit_format(struct emit *emit, const char *name, int n_dims, int64_t width,
                                       const struct quant_format *from);

/* Appends a tensor. Takes source.context over, also when it fails. */
int emit_add(struct emit *emit, const char *name, const struct quant_format *format, int n_dims, const int64_t *dims,
             struct emit_source source, struct strata_error *error);

/* Puts general.file_type and general.quantization_version as the tensors in the list have them. */
void emit_put_file_type(const struct emit *emit, struct gguf_writer *writer);

/* Declares all tensors, writes the header and all data, and finishes the file. */
int emit_run(struct emit *emit, struct gguf_writer *writer, struct strata_error *error);

#endif
