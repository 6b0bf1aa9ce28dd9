#define _GNU_SOURCE /* basename that leaves its argument alone */
#include "convert/hf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The directory's own name is what people call the model. */
static void put_name(const struct hf *hf, struct gguf_writer *writer)
{
    char *path = realpath(hf->directory, NULL);
    const char *name = path ? basename(path) : "";
    gguf_put_string(writer, "general.name", *name ? name : "model");
    free(path);
}

static void put_sampling(const struct hf *hf, struct gguf_writer *writer)
{
    static const struct {
        const char *key, *field;
    } hints[] = { { "general.sampling.temp", "temperature" }, { "general.sampling.top_p", "top_p" } };
    for (size_t i = 0; i < sizeof hints / sizeof *hints; i++) {
        const json_t *value = json_object_get(hf->generation, hints[i].field);
        if (json_is_number(value))
            gguf_put_f32(writer, hints[i].key, (float)json_number_value(value));
    }
    const json_t *top_k = json_object_get(hf->generation, "top_k");
    if (json_is_integer(top_k) && json_integer_value(top_k) >= 0 && json_integer_value(top_k) <= INT32_MAX)
        gguf_put_i32(writer, "general.sampling.top_k", (int32_t)json_integer_value(top_k));
}

int hf_put_keys(const struct hf *hf, struct gguf_writer *writer, struct strata_error *error)
{
    put_name(hf, writer);
    put_sampling(hf, writer);
    shape_put_keys(&hf->shape, writer);
    return hf_put_tokenizer(hf, writer, error);
}

static void count_ignored(const struct hf *hf, struct convert_summary *summary)
{
    for (size_t i = 0; i < hf->st->n_tensors; i++)
        if (!hf->st->tensors[i].used && summary->n_ignored++ == 0)
            snprintf(summary->ignored, sizeof summary->ignored, "%s", hf->st->tensors[i].name);
}

int convert_checkpoint(const char *directory, const char *out, bool mtp, const struct convert_options *options,
                       struct convert_summary *summary, struct strata_error *error)
{
    struct hf hf;
    struct emit emit;
    struct gguf_writer *writer = NULL;
    emit_create(&emit, options, summary);
    int code = hf_open(&hf, directory, error);
    hf.shape.mtp = hf.shape.mtp && mtp;
    if (!code)
        code = hf_add_tensors(&hf, &emit, error);
    if (!code)
        code = gguf_writer_create(&writer, out, error);
    if (!code)
        code = hf_put_keys(&hf, writer, error);
    if (!code) {
        count_ignored(&hf, summary);
        emit_put_file_type(&emit, writer);
        code = emit_run(&emit, writer, error);
    }
    gguf_writer_destroy(writer);
    emit_destroy(&emit);
    hf_close(&hf);
    return code;
}
