/* hf_tokenizer.c - the vocabulary, the merges and the chat template of a checkpoint, as GGUF keys (spec/model.md section 2.4). */
#include "convert/hf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum token_type { TOKEN_NORMAL = 1, TOKEN_CONTROL = 3, TOKEN_USER_DEFINED = 4, TOKEN_UNUSED = 5 };

struct vocabulary {
    struct gguf_string *tokens; /* [n], pointing into the JSON or into `padding` */
    int32_t *types;             /* [n] */
    char (*padding)[16];        /* [n] */
    struct gguf_string *merges;
    size_t n_merges;
};

static int place(const struct hf *hf, struct vocabulary *v, const json_t *id, const char *text, size_t length, enum token_type type,
                 struct strata_error *error)
{
    json_int_t at = json_is_integer(id) ? json_integer_value(id) : -1;
    if (at < 0 || at >= hf->shape.vocab)
        return error_set(error, STRATA_E_FORMAT, "%s/tokenizer.json: token '%.60s' has id %lld, wanted 0 to %d", hf->directory,
                         text, (long long)at, hf->shape.vocab - 1);
    /* An added token may repeat one of the base vocabulary; two texts for one id would lose one. */
    if (v->tokens[at].data && (v->tokens[at].length != length || memcmp(v->tokens[at].data, text, length) != 0))
        return error_set(error, STRATA_E_FORMAT, "%s/tokenizer.json: tokens '%.60s' and '%.60s' both have id %lld", hf->directory,
                         v->tokens[at].data, text, (long long)at);
    v->tokens[at] = (struct gguf_string){ text, length };
    v->types[at] = type;
    return 0;
}

static int read_tokens(const struct hf *hf, const json_t *tokenizer, struct vocabulary *v, struct strata_error *error)
{
    const json_t *base = json_object_get(json_object_get(tokenizer, "model"), "vocab"),
                 *added = json_object_get(tokenizer, "added_tokens");
    if (!json_is_object(base))
        return error_set(error, STRATA_E_FORMAT, "%s/tokenizer.json: model.vocab is missing", hf->directory);
    const char *text;
    json_t *id;
    int code;
    json_object_foreach((json_t *)base, text,
                        id) if ((code = place(hf, v, id, text, strlen(text), TOKEN_NORMAL, error)) != 0) return code;
    for (size_t i = 0; i < json_array_size(added); i++) {
        const json_t *token = json_array_get(added, i), *content = json_object_get(token, "content");
        if (!json_is_string(content) || json_string_length(content) == 0)
            return error_set(error, STRATA_E_FORMAT, "%s/tokenizer.json: added token %zu has no content", hf->directory, i);
        enum token_type type = json_is_true(json_object_get(token, "special")) ? TOKEN_CONTROL : TOKEN_USER_DEFINED;
        if ((code = place(hf, v, json_object_get(token, "id"), json_string_value(content), json_string_length(content), type,
                          error)) != 0)
            return code;
    }
    for (int i = 0; i < hf->shape.vocab; i++)
        if (!v->tokens[i].data) { /* the embedding has more rows than there are tokens */
            int length = snprintf(v->padding[i], sizeof v->padding[i], "[PAD%d]", i);
            v->tokens[i] = (struct gguf_string){ v->padding[i], (uint64_t)length };
            v->types[i] = TOKEN_UNUSED;
        }
    return 0;
}

/* Merges are "left right", older files; or ["left", "right"]. */
static int read_merges(const struct hf *hf, const json_t *tokenizer, struct vocabulary *v, struct strata_error *error)
{
    const json_t *merges = json_object_get(json_object_get(tokenizer, "model"), "merges");
    size_t n = json_array_size(merges);
    v->merges = calloc(n + 1, sizeof *v->merges);
    if (!v->merges)
        return error_set(error, STRATA_E_MEMORY, "out of memory for %zu merges", n);
    for (; v->n_merges < n; v->n_merges++) {
        const json_t *merge = json_array_get(merges, v->n_merges);
        const char *left = json_string_value(json_array_get(merge, 0)), *right = json_string_value(json_array_get(merge, 1));
        if (json_is_string(merge))
            left = json_string_value(merge);
        if (!left || (!right && !json_is_string(merge)) || (json_is_string(merge) && !strchr(left, ' ')))
            return error_set(error, STRATA_E_FORMAT, "%s/tokenizer.json: merge %zu is not a pair of tokens", hf->directory,
                             v->n_merges);
        char *text = NULL;
        size_t size = strlen(left) + (right ? strlen(right) : 0) + 2;
        if (!(text = malloc(size)))
            return error_set(error, STRATA_E_MEMORY, "out of memory for %zu merges", n);
        snprintf(text, size, "%s%s%s", left, right ? " " : "", right ? right : "");
        v->merges[v->n_merges] = (struct gguf_string){ text, strlen(text) };
    }
    return 0;
}

static int put_vocabulary(const struct hf *hf, struct gguf_writer *writer, struct strata_error *error)
{
    json_t *tokenizer = NULL;
    int code = json_read(&tokenizer, hf->directory, "tokenizer.json", true, error);
    if (code)
        return code;
    size_t n = (size_t)hf->shape.vocab;
    struct vocabulary v = { calloc(n, sizeof *v.tokens), calloc(n, sizeof *v.types), calloc(n, sizeof *v.padding), NULL, 0 };
    if (!v.tokens || !v.types || !v.padding)
        code = error_set(error, STRATA_E_MEMORY, "out of memory for a vocabulary of %zu tokens", n);
    if (!code && !(code = read_tokens(hf, tokenizer, &v, error)) && !(code = read_merges(hf, tokenizer, &v, error))) {
        gguf_put_string(writer, "tokenizer.ggml.model", "gpt2"); /* byte-level BPE */
        gguf_put_string(writer, "tokenizer.ggml.pre", "qwen35");
        gguf_put_string_array(writer, "tokenizer.ggml.tokens", v.tokens, n);
        gguf_put_array(writer, "tokenizer.ggml.token_type", GGUF_I32, v.types, n);
        gguf_put_string_array(writer, "tokenizer.ggml.merges", v.merges, v.n_merges);
    }
    for (size_t i = 0; i < v.n_merges; i++)
        free((char *)v.merges[i].data);
    free(v.merges);
    free(v.padding);
    free(v.types);
    free(v.tokens);
    json_decref(tokenizer);
    return code;
}

/* An id of generation_config.json, or else of config.json; nothing is put if neither has it. */
static int put_id(const struct hf *hf, struct gguf_writer *writer, const char *key, const char *field, struct strata_error *error)
{
    const json_t *from = json_object_get(hf->generation, field) ? hf->generation : hf->text;
    int id, code = hf_int(hf, from, field, 0, hf->shape.vocab - 1, hf->shape.vocab, &id, error);
    if (!code && id < hf->shape.vocab)
        gguf_put_u32(writer, key, (uint32_t)id);
    return code;
}

/* One template, or a list of named ones of which "default" is meant. */
static const json_t *find_template(const json_t *template)
{
    for (size_t i = 0; i < json_array_size(template); i++) {
        const json_t *item = json_array_get(template, i);
        const char *name = json_string_value(json_object_get(item, "name"));
        if (name && strcmp(name, "default") == 0)
            return json_object_get(item, "template");
    }
    return template;
}

/* chat_template.jinja, where newer checkpoints keep it. */
static int put_template_file(const struct hf *hf, struct gguf_writer *writer, struct strata_error *error)
{
    enum { MOST = 1 << 20 };
    char path[4096];
    snprintf(path, sizeof path, "%s/chat_template.jinja", hf->directory);
    FILE *file = fopen(path, "rb");
    if (!file)
        return 0;
    char *text = malloc(MOST);
    size_t length = text ? fread(text, 1, MOST, file) : 0;
    int code = 0;
    if (!text)
        code = error_set(error, STRATA_E_MEMORY, "out of memory for %s", path);
    else if (ferror(file) || length == MOST)
        code = error_set(error, STRATA_E_FORMAT, "%s: cannot be read, or is larger than %d bytes", path, MOST - 1);
    else
        gguf_put_string_n(writer, "tokenizer.chat_template", text, length);
    free(text);
    fclose(file);
    return code;
}

static int put_template(const struct hf *hf, struct gguf_writer *writer, struct strata_error *error)
{
    json_t *config = NULL;
    int code = json_read(&config, hf->directory, "tokenizer_config.json", false, error);
    if (code)
        return code;
    const json_t *template = find_template(json_object_get(config, "chat_template"));
    if (json_is_string(template))
        gguf_put_string_n(writer, "tokenizer.chat_template", json_string_value(template), json_string_length(template));
    else
        code = put_template_file(hf, writer, error);
    json_decref(config);
    return code;
}

int hf_put_tokenizer(const struct hf *hf, struct gguf_writer *writer, struct strata_error *error)
{
    int code;
    if ((code = put_vocabulary(hf, writer, error)) ||
        (code = put_id(hf, writer, "tokenizer.ggml.eos_token_id", "eos_token_id", error)) ||
        (code = put_id(hf, writer, "tokenizer.ggml.bos_token_id", "bos_token_id", error)) ||
        (code = put_id(hf, writer, "tokenizer.ggml.padding_token_id", "pad_token_id", error)))
        return code;
    gguf_put_bool(writer, "tokenizer.ggml.add_bos_token", false);
    return put_template(hf, writer, error);
}
