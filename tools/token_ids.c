/* token_ids.c - the tokenizer as a filter, for tests that compare it with another one.
 *
 *     token_ids MODEL.gguf
 *
 * reads lines {"text": "...", "special": true} and answers each with {"ids": [...], "text": "..."}: the tokens, with control tokens
 * parsed or not, and the text that they decode to, control tokens shown.
 */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

#include "text/tokenizer.h"

static int answer(const struct tokenizer *tokenizer, const json_t *request, struct strata_error *error)
{
    json_t *text = json_object_get(request, "text");
    bool special = json_is_true(json_object_get(request, "special"));
    int32_t *ids;
    char *decoded;
    if (!json_is_string(text))
        return error_set(error, STRATA_E_ARGUMENT, "the request has no text");
    int64_t n = tokenizer_encode(tokenizer, json_string_value(text), json_string_length(text), special, &ids, error);
    if (n < 0)
        return (int)n;
    int64_t length = tokenizer_decode(tokenizer, ids, (size_t)n, true, &decoded, error);
    if (length < 0) {
        free(ids);
        return (int)length;
    }
    json_t *list = json_array();
    for (int64_t i = 0; i < n; i++)
        json_array_append_new(list, json_integer(ids[i]));
    json_t *reply = json_pack("{s:o, s:o}", "ids", list, "text", json_stringn(decoded, (size_t)length));
    json_dumpf(reply, stdout, JSON_COMPACT);
    putchar('\n');
    json_decref(reply);
    free(decoded);
    free(ids);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: token_ids MODEL.gguf < REQUESTS\n");
        return 2;
    }
    struct strata_error error = { 0 };
    struct gguf *gguf = NULL;
    struct tokenizer *tokenizer = NULL;
    int code = gguf_open(&gguf, argv[1], &error);
    if (code == 0)
        code = tokenizer_create(&tokenizer, gguf, &error);
    gguf_close(gguf);
    char *line = NULL;
    size_t room = 0;
    for (ssize_t n; code == 0 && (n = getline(&line, &room, stdin)) > 0;) {
        json_error_t problem;
        json_t *request = json_loadb(line, (size_t)n, JSON_ALLOW_NUL, &problem);
        code = request ? answer(tokenizer, request, &error)
                       : error_set(&error, STRATA_E_ARGUMENT, "a request is not JSON: %s", problem.text);
        json_decref(request);
    }
    free(line);
    tokenizer_destroy(tokenizer);
    if (code < 0)
        fprintf(stderr, "token_ids: %s\n", error.text);
    return code < 0;
}
