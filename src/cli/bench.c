/* bench.c - `strata bench`: prompt and decoding speed of a model, medians of several runs. */
#include "cli/cli.h"
#include "cli/engine_options.h"

#include "gguf/gguf.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "Usage: strata bench -m FILE [OPTIONS]\n"
    "Reads a prompt of random tokens and then decodes greedily; prints medians over the runs.\n\n"
    "  -m, --model FILE    model (GGUF)\n"
    "  -p, --prompt N      prompt tokens (default 128)\n"
    "  -n, --tokens N      tokens to decode (default 64)\n"
    "  -r, --runs N        runs (default 5)\n"
    "      --window N      rows per pass while reading the prompt (default 8)\n\n"
    ENGINE_OPTIONS_HELP;

enum { MAX_RUNS = 99 };

static int compare(const void *a, const void *b) { return *(const double *)a < *(const double *)b ? -1 : *(const double *)a > *(const double *)b; }

static int32_t best(const float *logits, int n)
{
    int32_t at = 0;
    for (int i = 1; i < n; i++)
        if (logits[i] > logits[at])
            at = i;
    return at;
}

struct bench { const char *model; long long prompt, tokens, runs, window; struct engine_options computing; };

/* One run on a fresh session; seconds per part. */
static int measure(struct strata_engine *engine, const struct bench *b, const int32_t *ids, double *prompt, double *decode, struct strata_error *error)
{
    struct strata_session *session;
    struct strata_info info;
    strata_engine_info(engine, &info);
    int code = strata_session_open(&session, engine, (int)(b->prompt + b->tokens), STRATA_KV_F16, error);
    if (code)
        return code;
    double start = cli_seconds();
    code = strata_session_sync(session, ids, (int)b->prompt, (int)b->window, cli_progress, "reading the prompt", error);
    double read = cli_seconds();
    for (int i = 0; !code && i < b->tokens; i++) {
        if (cli_interrupted())
            code = error_set(error, STRATA_E_STOPPED, "stopped");
        struct strata_row row = { session, best(strata_session_logits(session), info.n_vocab), true, true };
        code = code ? code : strata_window_run(engine, &row, 1, error);
        code = code ? code : strata_session_commit(session, 1, error);
    }
    *prompt = read - start;
    *decode = cli_seconds() - read;
    strata_session_close(session);
    return code;
}

static int bench(struct bench *b, struct strata_error *error)
{
    struct strata_engine *engine;
    struct gguf *gguf;
    bool synthetic = false;
    int code = gguf_open(&gguf, b->model, error);
    if (code)
        return code;
    gguf_get_bool(gguf, "strata.synthetic", &synthetic, NULL);
    gguf_close(gguf);
    b->computing.options.progress = cli_progress;
    b->computing.options.progress_context = "loading";
    code = strata_engine_open(&engine, b->model, &b->computing.options, error);
    if (code)
        return code;
    struct strata_info info;
    strata_engine_info(engine, &info);
    int32_t *ids = malloc((size_t)b->prompt * sizeof *ids);
    double prompt[MAX_RUNS], decode[MAX_RUNS];
    if (!ids)
        code = error_set(error, STRATA_E_MEMORY, "out of memory");
    for (int i = 0; ids && i < b->prompt; i++) /* a fixed sequence over the ordinary tokens */
        ids[i] = (int32_t)((uint64_t)(i + 1) * 2654435761u % (uint64_t)(info.n_vocab < 2 ? 1 : info.n_vocab * 9LL / 10));
    for (int r = 0; !code && r < b->runs; r++)
        code = measure(engine, b, ids, &prompt[r], &decode[r], error);
    if (!code) {
        qsort(prompt, (size_t)b->runs, sizeof *prompt, compare);
        qsort(decode, (size_t)b->runs, sizeof *decode, compare);
        printf("%s%s: %s, %d threads; median of %lld runs: prompt %lld tokens %.1f tok/s, decode %lld tokens %.1f tok/s; peak memory %.0f MB\n",
               synthetic ? "synthetic: " : "", b->model, info.isa, info.threads, b->runs, b->prompt, (double)b->prompt / prompt[b->runs / 2], b->tokens,
               (double)b->tokens / decode[b->runs / 2], cli_peak_memory_mb());
        code = engine_options_report(&b->computing, engine, error);
    }
    free(ids);
    strata_engine_close(engine);
    return code;
}

int cli_bench(int argc, char **argv)
{
    static const struct option options[] = { { "model", required_argument, NULL, 'm' }, { "prompt", required_argument, NULL, 'p' },
                                             { "tokens", required_argument, NULL, 'n' }, { "runs", required_argument, NULL, 'r' },
                                             { "window", required_argument, NULL, 'w' }, ENGINE_OPTIONS,
                                             { "help", no_argument, NULL, 'h' }, { 0 } };
    struct bench b = { .prompt = 128, .tokens = 64, .runs = 5, .window = STRATA_MAX_ROWS };
    bool ok = true;
    engine_options_init(&b.computing);
    optind = 1;
    for (int c; ok && (c = getopt_long(argc, argv, "m:p:n:r:h", options, NULL)) != -1;)
        switch (c) {
        case 'm': b.model = optarg; break;
        case 'p': ok = cli_integer("bench", "-p", optarg, 1, 1 << 20, &b.prompt); break;
        case 'n': ok = cli_integer("bench", "-n", optarg, 1, 1 << 20, &b.tokens); break;
        case 'r': ok = cli_integer("bench", "-r", optarg, 1, MAX_RUNS, &b.runs); break;
        case 'w': ok = cli_integer("bench", "--window", optarg, 1, STRATA_MAX_ROWS, &b.window); break;
        case 'h': fputs(help, stdout); return CLI_OK;
        default: {
            int taken = engine_option(&b.computing, "bench", c, optarg);
            if (taken == 0)
                return cli_usage("bench", "wrong option");
            ok = taken > 0;
        }
        }
    if (!ok || !engine_options_finish(&b.computing, "bench"))
        return CLI_USAGE;
    if (optind < argc || !b.model)
        return optind < argc ? cli_usage("bench", "unexpected argument '%s'", argv[optind]) : cli_usage("bench", "no model: -m FILE");
    cli_catch_interrupt();
    struct strata_error error = { 0 };
    return bench(&b, &error) < 0 ? cli_fail(&error) : CLI_OK;
}
