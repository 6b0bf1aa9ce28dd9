/* quantize.c - one GGUF file to another with other types. Tensors whose type stays are copied byte by byte, so that nothing is lost
 * twice. */
#include "convert/emit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

struct input {
    const struct gguf *gguf;
    const struct gguf_tensor *tensor;
};

static int copy_rows(const void *context, int64_t first, int64_t n, uint8_t *out, struct strata_error *error)
{
    const struct input *in = context;
    uint64_t row_bytes = quant_row_bytes(in->tensor->format, in->tensor->dims[0]);
    return gguf_read(in->gguf, in->tensor, (uint64_t)first * row_bytes, out, (uint64_t)n * row_bytes, error);
}

static int decode_rows(const void *context, int64_t first, int64_t n, float *out, struct strata_error *error)
{
    const struct input *in = context;
    int64_t width = in->tensor->dims[0];
    size_t row_bytes = quant_row_bytes(in->tensor->format, width);
    uint8_t *raw = malloc((size_t)n * row_bytes);
    if (!raw)
        return error_set(error, STRATA_E_MEMORY, "out of memory for %lld rows of tensor %s", (long long)n, in->tensor->name);
    int code = copy_rows(context, first, n, raw, error);
    for (int64_t row = 0; !code && row < n; row++)
        quant_decode(in->tensor->format, raw + (size_t)row * row_bytes, width, out + row * width);
    free(raw);
    return code;
}

static int add_tensor(struct emit *emit, const struct gguf *gguf, const struct gguf_tensor *t, struct strata_error *error)
{
    if (!t->format)
        return error_set(error, STRATA_E_UNSUPPORTED, "tensor %s has type %s, which Strata cannot read", t->name,
                         quant_type_name(t->type));
    struct input *in = malloc(sizeof *in);
    if (!in)
        return error_set(error, STRATA_E_MEMORY, "out of memory for a list of tensors");
    *in = (struct input){ gguf, t };
    const struct quant_format *format = emit_format(emit, t->name, t->n_dims, t->dims[0], t->format);
    struct emit_source source = { .context = in };
    if (format == t->format)
        source.bytes = copy_rows;
    else
        source.floats = decode_rows;
    return emit_add(emit, t->name, format, t->n_dims, t->dims, source, error);
}

/* Everything except what describes the old file's types and its parts. */
static void copy_keys(const struct gguf *gguf, struct gguf_writer *writer)
{
    static const char *const dropped[] = {
        "general.file_type", "general.quantization_version", "split.no", "split.count", "split.tensors.count",
    };
    for (uint64_t i = 0; i < gguf->n_entries; i++) {
        bool keep = true;
        for (size_t k = 0; k < sizeof dropped / sizeof *dropped; k++)
            keep &= strcmp(gguf->entries[i].key.data, dropped[k]) != 0;
        if (keep)
            gguf_put_entry(writer, &gguf->entries[i]);
    }
}

/* Writing over an input would destroy a download that cannot be made again. */
static int refuse_same_file(const struct gguf *gguf, const char *out, struct strata_error *error)
{
    struct stat target, source;
    for (int i = 0; stat(out, &target) == 0 && i < gguf->n_files; i++)
        if (fstat(gguf->files[i].fd, &source) == 0 && source.st_dev == target.st_dev && source.st_ino == target.st_ino)
            return error_set(error, STRATA_E_ARGUMENT, "%s is the input itself: choose another name for the output", out);
    return 0;
}

int convert_quantize(const char *in, const char *out, const struct convert_options *options, struct convert_summary *summary,
                     struct strata_error *error)
{
    struct gguf *gguf = NULL;
    struct gguf_writer *writer = NULL;
    struct emit emit;
    emit_create(&emit, options, summary);
    int code = gguf_open(&gguf, in, error);
    if (!code)
        code = refuse_same_file(gguf, out, error);
    for (uint64_t i = 0; !code && i < gguf->n_tensors; i++)
        code = add_tensor(&emit, gguf, &gguf->tensors[i], error);
    if (!code)
        code = gguf_writer_create(&writer, out, error);
    if (!code) {
        copy_keys(gguf, writer);
        emit_put_file_type(&emit, writer);
        code = emit_run(&emit, writer, error);
    }
    gguf_writer_destroy(writer);
    emit_destroy(&emit);
    gguf_close(gguf);
    return code;
}
