/* answers.h - what the tests of one answer share: a real text, read in windows of any width, and the hashes that it leaves behind.
 *
 * A run is recorded as a hash of every position's residual after every layer, and of its logits; two runs are compared position by position
 * and layer by layer, so that a failure names the first place that differs. */
#ifndef TESTS_ANSWERS_H
#define TESTS_ANSWERS_H

#include <strata.h>

#include "gguf/gguf.h"
#include "text/tokenizer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include <cmocka.h>

enum { MAX_TOKENS = 312, MAX_LAYERS = 16, SEQUENCES = 4 };

static const char *model_file;
static int32_t tokens[MAX_TOKENS];
static int n_tokens, n_layers, n_vocab;

/* [position][layer], the last entry of a position is its logits' hash. */
typedef uint64_t answers[MAX_TOKENS + STRATA_MAX_ROWS][MAX_LAYERS + 1];

struct recorder { const struct strata_session *sessions[SEQUENCES]; answers *out; };

static void record_layer(void *context, const struct strata_session *session, int position, int layer, const float *residual, int width)
{
    struct recorder *recorder = context;
    for (int s = 0; s < SEQUENCES; s++)
        if (recorder->sessions[s] == session)
            recorder->out[s][position][layer] = XXH64(residual, (size_t)width * sizeof *residual, 0);
}

static struct strata_session *open_session(struct strata_engine *engine, enum strata_kv kv)
{
    struct strata_session *session;
    struct strata_error error;
    if (strata_session_open(&session, engine, MAX_TOKENS + STRATA_MAX_ROWS, kv, &error))
        fail_msg("%s", error.text);
    return session;
}

static void run_window(struct strata_engine *engine, const struct strata_row *rows, int n)
{
    struct strata_error error;
    if (strata_window_run(engine, rows, n, &error))
        fail_msg("%s", error.text);
}

static void record_logits(const struct strata_engine *engine, int row, int position, answers *out)
{
    (*out)[position][n_layers] = XXH64(strata_window_logits(engine, row), (size_t)n_vocab * sizeof(float), 0);
}

/* Reads the text in windows whose widths come from `width` (called with the window's number). */
static void read_text(struct strata_engine *engine, int (*width)(int), enum strata_kv kv, answers *out)
{
    struct strata_session *session = open_session(engine, kv);
    struct recorder recorder = { { session }, out };
    strata_engine_probe(engine, record_layer, &recorder);
    for (int at = 0, window = 0; at < n_tokens; window++) {
        struct strata_row rows[STRATA_MAX_ROWS];
        int n = width(window) < n_tokens - at ? width(window) : n_tokens - at;
        for (int t = 0; t < n; t++)
            rows[t] = (struct strata_row){ session, tokens[at + t], true, true };
        run_window(engine, rows, n);
        for (int t = 0; t < n; t++)
            record_logits(engine, t, at + t, out);
        assert_int_equal(strata_session_commit(session, n, NULL), 0);
        at += n;
    }
    strata_engine_probe(engine, NULL, NULL);
    strata_session_close(session);
}

static void assert_same(const answers *got, const answers *want, const char *what)
{
    for (int position = 0; position < n_tokens; position++)
        for (int layer = 0; layer <= n_layers; layer++)
            if ((*got)[position][layer] != (*want)[position][layer])
                fail_msg("%s: first difference at position %d, %s %d", what, position, layer < n_layers ? "layer" : "logits after layer", layer);
}

static int one(int window) { (void)window; return 1; }
static __attribute__((unused)) int two(int window) { (void)window; return 2; }
static int three(int window) { (void)window; return 3; }
static int eight(int window) { (void)window; return 8; }
static int ragged(int window) { return 1 + (window * 7 + window / 3) % 8; }

/* The first n tokens of a file; false if it has fewer. */
static bool load_text(const char *path, bool special, int n)
{
    struct gguf *gguf;
    struct tokenizer *tokenizer;
    struct strata_error error;
    if (gguf_open(&gguf, model_file, &error) || tokenizer_create(&tokenizer, gguf, &error)) {
        print_error("%s\n", error.text);
        return false;
    }
    FILE *file = fopen(path, "rb");
    static char text[4000];
    size_t length = file ? fread(text, 1, sizeof text, file) : 0;
    if (file)
        fclose(file);
    int32_t *ids = NULL;
    bool enough = tokenizer_encode(tokenizer, text, length, special, &ids, &error) >= n;
    tokenizer_destroy(tokenizer);
    gguf_close(gguf);
    if (enough)
        memcpy(tokens, ids, (size_t)n * sizeof *tokens);
    free(ids);
    n_tokens = n;
    return enough;
}

static void note_shape(const struct strata_engine *engine)
{
    struct strata_info info;
    strata_engine_info(engine, &info);
    n_layers = info.n_layers;
    n_vocab = info.n_vocab;
}

#endif
