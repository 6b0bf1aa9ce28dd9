/* vocab_gguf.c - a GGUF file with a vocabulary and nothing else, made of a Hugging Face tokenizer.json: for tests and for packages
 * that need a tokenizer without a model.
 *
 *     vocab_gguf TOKENIZER.json OUT.gguf
 */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gguf/gguf.h"
#include "text/tokenizer.h"

enum { MAX_TOKENS = 1 << 24 };

struct vocabulary {
    int32_t n_tokens, n_merges;
    struct gguf_string *tokens; /* [n_tokens] */
    int32_t *types;             /* [n_tokens] */
    struct gguf_string *merges; /* [n_merges] */
};

static struct gguf_string keep(const char *text) { return (struct gguf_string){ strdup(text), strlen(text) }; }

static int32_t find_token(const struct vocabulary *vocabulary, const char *text)
{
    for (int32_t id = 0; id < vocabulary->n_tokens; id++)
        if (strcmp(vocabulary->tokens[id].data, text) == 0)
            return id;
    return -1;
}

static int put_token(struct vocabulary *vocabulary, const char *text, const json_t *number, int32_t type,
                     struct strata_error *error)
{
    json_int_t id = json_is_integer(number) ? json_integer_value(number) : -1;
    if (id < 0 || id >= vocabulary->n_tokens)
        return error_set(error, STRATA_E_FORMAT, "token \"%.64s\" has the number %lld; numbers are 0 to %d", text, (long long)id,
                         vocabulary->n_tokens - 1);
    free((char *)vocabulary->tokens[id].data);
    vocabulary->tokens[id] = keep(text);
    vocabulary->types[id] = type;
    return 0;
}

static int read_tokens(struct vocabulary *vocabulary, const json_t *root, struct strata_error *error)
{
    json_t *vocab = json_object_get(json_object_get(root, "model"), "vocab"), *added = json_object_get(root, "added_tokens"),
           *value;
    const char *text;
    size_t i;
    int code = 0;
    if (!json_is_object(vocab) || !json_is_array(added))
        return error_set(error, STRATA_E_FORMAT, "it has no model.vocab or no added_tokens");
    json_int_t last = -1;
    json_object_foreach(vocab, text, value) { last = json_integer_value(value) > last ? json_integer_value(value) : last; }
    json_array_foreach(added, i, value)
    {
        json_int_t id = json_integer_value(json_object_get(value, "id"));
        last = id > last ? id : last;
    }
    if (last < 0 || last >= MAX_TOKENS)
        return error_set(error, STRATA_E_FORMAT, "its last token has the number %lld; wanted 0 to %d", (long long)last,
                         MAX_TOKENS - 1);
    vocabulary->n_tokens = (int32_t)last + 1;
    vocabulary->tokens = calloc((size_t)vocabulary->n_tokens, sizeof *vocabulary->tokens);
    vocabulary->types = calloc((size_t)vocabulary->n_tokens, sizeof *vocabulary->types);
    if (!vocabulary->tokens || !vocabulary->types)
        return error_set(error, STRATA_E_MEMORY, "out of memory");
    json_object_foreach(vocab, text, value)
    {
        if ((code = put_token(vocabulary, text, value, TOKEN_NORMAL, error)) < 0)
            return code;
    }
    json_array_foreach(added, i, value)
    {
        const char *content = json_string_value(json_object_get(value, "content"));
        int32_t type = json_is_true(json_object_get(value, "special")) ? TOKEN_CONTROL : TOKEN_USER_DEFINED;
        if ((code = put_token(vocabulary, content ? content : "", json_object_get(value, "id"), type, error)) < 0)
            return code;
    }
    for (int32_t id = 0; id < vocabulary->n_tokens; id++)
        if (!vocabulary->types[id]) {
            char name[32];
            snprintf(name, sizeof name, "[PAD%d]", id);
            vocabulary->tokens[id] = keep(name);
            vocabulary->types[id] = TOKEN_UNUSED;
        }
    return 0;
}

/* Older files write a merge as "left right", newer ones as ["left", "right"]. */
static int read_merges(struct vocabulary *vocabulary, const json_t *root, struct strata_error *error)
{
    json_t *merges = json_object_get(json_object_get(root, "model"), "merges"), *merge;
    size_t i;
    if (!json_is_array(merges) || json_array_size(merges) > MAX_TOKENS)
        return error_set(error, STRATA_E_FORMAT, "it has no model.merges");
    vocabulary->merges = calloc(json_array_size(merges) + 1, sizeof *vocabulary->merges);
    if (!vocabulary->merges)
        return error_set(error, STRATA_E_MEMORY, "out of memory");
    json_array_foreach(merges, i, merge)
    {
        const char *left = json_string_value(json_array_get(merge, 0)), *right = json_string_value(json_array_get(merge, 1));
        if (json_is_string(merge)) {
            vocabulary->merges[i] = keep(json_string_value(merge));
        } else if (left && right) {
            size_t length = strlen(left) + 1 + strlen(right);
            char *text = malloc(length + 1);
            snprintf(text, length + 1, "%s %s", left, right);
            vocabulary->merges[i] = (struct gguf_string){ text, length };
        } else {
            return error_set(error, STRATA_E_FORMAT, "its merge %zu is not a pair of tokens", i);
        }
        vocabulary->n_merges++;
    }
    return 0;
}

/* The two generations of Qwen's pattern differ in whether combining marks belong to words. */
static const char *pretokenizer_name(const json_t *root)
{
    json_t *steps = json_object_get(json_object_get(root, "pre_tokenizer"), "pretokenizers");
    const char *pattern = json_string_value(json_object_get(json_object_get(json_array_get(steps, 0), "pattern"), "Regex"));
    if (!pattern || !strstr(pattern, "|\\p{N}|"))
        return NULL;
    return strstr(pattern, "\\p{M}") ? "qwen35" : "qwen2";
}

static void put_id(struct gguf_writer *writer, const char *key, int32_t id)
{
    if (id >= 0)
        gguf_put_u32(writer, key, (uint32_t)id);
}

static int write_file(const struct vocabulary *vocabulary, const char *pre, const char *path, struct strata_error *error)
{
    struct gguf_writer *writer;
    int code = gguf_writer_create(&writer, path, error);
    if (code < 0)
        return code;
    int32_t end = find_token(vocabulary, "<|endoftext|>");
    gguf_put_string(writer, "general.architecture", "vocab");
    gguf_put_string(writer, "tokenizer.ggml.model", "gpt2");
    gguf_put_string(writer, "tokenizer.ggml.pre", pre);
    gguf_put_string_array(writer, "tokenizer.ggml.tokens", vocabulary->tokens, (uint64_t)vocabulary->n_tokens);
    gguf_put_array(writer, "tokenizer.ggml.token_type", GGUF_I32, vocabulary->types, (uint64_t)vocabulary->n_tokens);
    gguf_put_string_array(writer, "tokenizer.ggml.merges", vocabulary->merges, (uint64_t)vocabulary->n_merges);
    put_id(writer, "tokenizer.ggml.bos_token_id", end);
    put_id(writer, "tokenizer.ggml.eos_token_id", find_token(vocabulary, "<|im_end|>"));
    put_id(writer, "tokenizer.ggml.padding_token_id", end);
    gguf_put_bool(writer, "tokenizer.ggml.add_bos_token", false);
    code = gguf_writer_begin_data(writer, error);
    if (code == 0)
        code = gguf_writer_finish(writer, error);
    gguf_writer_destroy(writer);
    return code;
}

int main(int argc, char **argv)
{
    if (argc != 3) {
        fprintf(stderr, "usage: vocab_gguf TOKENIZER.json OUT.gguf\n");
        return 2;
    }
    struct strata_error error = { 0 };
    struct vocabulary vocabulary = { 0 };
    json_error_t problem;
    json_t *root = json_load_file(argv[1], JSON_ALLOW_NUL, &problem);
    const char *pre = pretokenizer_name(root);
    int code;
    if (!root)
        code = error_set(&error, STRATA_E_FORMAT, "line %d: %s", problem.line, problem.text);
    else if (!pre)
        code = error_set(&error, STRATA_E_UNSUPPORTED, "its pre_tokenizer is not one of Qwen's");
    else if ((code = read_tokens(&vocabulary, root, &error)) == 0 && (code = read_merges(&vocabulary, root, &error)) == 0)
        code = write_file(&vocabulary, pre, argv[2], &error);
    if (code < 0)
        fprintf(stderr, "vocab_gguf: %s: %s\n", argv[1], error.text);
    for (int32_t i = 0; vocabulary.tokens && i < vocabulary.n_tokens; i++)
        free((char *)vocabulary.tokens[i].data);
    for (int32_t i = 0; i < vocabulary.n_merges; i++)
        free((char *)vocabulary.merges[i].data);
    free(vocabulary.tokens);
    free(vocabulary.types);
    free(vocabulary.merges);
    json_decref(root);
    return code < 0;
}
