/* hf.h - inside convert/ only: a Hugging Face checkpoint of architecture qwen4_exp, opened and understood.
 *
 * hf_config.c reads the numbers, hf_tensors.c maps the tensors, hf_tokenizer.c the vocabulary, hf.c puts the file together. */
#ifndef CONVERT_HF_H
#define CONVERT_HF_H

#include "convert/emit.h"
#include "convert/json.h"
#include "convert/safetensors.h"
#include "convert/shape.h"

struct hf {
    const char *directory;
    struct safetensors *st;
    json_t *config, *generation; /* generation: NULL if the file is missing */
    const json_t *text;          /* the text model's part of config */
    const char *prefix;          /* "model." or "model.language_model." */

    struct shape shape;
};

int hf_open(struct hf *hf, const char *directory, struct strata_error *error); /* after a failure too: hf_close */
void hf_close(struct hf *hf);

/* An integer of the configuration in [min, max]; fallback < min: required. */
int hf_int(const struct hf *hf, const json_t *object, const char *key, int min, int max, int fallback, int *out,
           struct strata_error *error);

/* Finds "PREFIX" "name" of the trunk (`name` without it), or NULL. */
struct safetensor *hf_find(const struct hf *hf, const char *prefix, const char *name);

int hf_put_keys(const struct hf *hf, struct gguf_writer *writer, struct strata_error *error);
int hf_put_tokenizer(const struct hf *hf, struct gguf_writer *writer, struct strata_error *error);
int hf_add_tensors(struct hf *hf, struct emit *emit, struct strata_error *error);

#endif
