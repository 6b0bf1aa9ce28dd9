/* run.c - `strata run`: text in, text out. */
#include "cli/cli.h"
#include "cli/engine_options.h"
#include "cli/input.h"

#include "gguf/gguf.h"
#include "sample/sample.h"
#include "text/tokenizer.h"

#include <getopt.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

static const char help[] =
    "Usage: strata run -m FILE [OPTIONS]\n"
    "Reads a prompt and continues it; the text goes to stdout as it is made, statistics to stderr.\n"
    "The same model, prompt and seed give the same text on every machine, with any number of threads.\n\n"
    "  -m, --model FILE        model (GGUF; the first file of a split model)\n"
    "  -p, --prompt TEXT       the prompt; or\n"
    "  -f, --file FILE         a file with the prompt; without either, stdin\n"
    "  -n, --tokens N          most tokens to write (default: until the model ends or the context is full)\n"
    "  -c, --context N         most tokens of prompt and text (default: 8192, more if the prompt\n"
    "                          and -n need it; never more than the model takes)\n"
    "      --special           control tokens such as <|im_start|> in the prompt count as such\n"
    "      --show-special      show control tokens in the text\n"
    "      --ignore-eos        go on after an end token\n"
    "  -q, --quiet             no statistics, no progress\n\n"
    "Choosing tokens (defaults: the file's own hints; greedy if it has none):\n"
    "      --temp X            temperature; 0 is greedy\n"
    "      --top-k N           only the N likeliest (0: all)      --top-p X   the likeliest that make up X\n"
    "      --min-p X           none less likely than X times the best\n"
    "      --repeat-penalty X  1: none      --frequency-penalty X, --presence-penalty X  0: none\n"
    "      --penalty-last-n N  tokens the penalties look back on (default 64; -1: all)\n"
    "      --seed N            default: a random one, printed\n\n"
    "      --kv f16|int8       type of the KV cache (default f16); the one setting that changes the arithmetic\n\n"
    ENGINE_OPTIONS_HELP
    "\n      --window N          rows per pass while reading the prompt, 1 to 8 (default 8)\n"
    "      --hash[=layers]     print a hash of every position's logits (and of every layer) instead of the text\n";

struct run {
    const char *model, *prompt, *file;
    long long n_tokens, context, window;
    bool special, show_special, ignore_eos, quiet, hash, hash_layers, seeded, help;
    enum strata_kv kv;
    struct engine_options computing;
    struct sample_params sample;
    struct gguf *gguf;
    struct tokenizer *tokenizer;
    struct strata_engine *engine;
    struct strata_session *session;
    struct sampler *sampler;
    uint32_t *allowed;      /* a bit per token: padding of the vocabulary is never written */
    uint64_t *layer_hashes; /* [STRATA_MAX_ROWS][n_layers] of the last window's positions, by position % STRATA_MAX_ROWS */
    int n_layers;
};

enum { OPT_SPECIAL = 256, OPT_SHOW_SPECIAL, OPT_IGNORE_EOS, OPT_TEMP, OPT_TOP_K, OPT_TOP_P, OPT_MIN_P, OPT_REPEAT, OPT_FREQUENCY, OPT_PRESENCE, OPT_LAST_N,
       OPT_SEED, OPT_KV, OPT_WINDOW, OPT_HASH };

static const struct option options[] = {
    { "model", required_argument, NULL, 'm' }, { "prompt", required_argument, NULL, 'p' }, { "file", required_argument, NULL, 'f' },
    { "tokens", required_argument, NULL, 'n' }, { "context", required_argument, NULL, 'c' }, { "quiet", no_argument, NULL, 'q' },
    { "help", no_argument, NULL, 'h' }, { "special", no_argument, NULL, OPT_SPECIAL }, { "show-special", no_argument, NULL, OPT_SHOW_SPECIAL },
    { "ignore-eos", no_argument, NULL, OPT_IGNORE_EOS }, { "temp", required_argument, NULL, OPT_TEMP }, { "top-k", required_argument, NULL, OPT_TOP_K },
    { "top-p", required_argument, NULL, OPT_TOP_P }, { "min-p", required_argument, NULL, OPT_MIN_P }, { "repeat-penalty", required_argument, NULL, OPT_REPEAT },
    { "frequency-penalty", required_argument, NULL, OPT_FREQUENCY }, { "presence-penalty", required_argument, NULL, OPT_PRESENCE },
    { "penalty-last-n", required_argument, NULL, OPT_LAST_N }, { "seed", required_argument, NULL, OPT_SEED }, 
    { "kv", required_argument, NULL, OPT_KV }, { "window", required_argument, NULL, OPT_WINDOW }, { "hash", optional_argument, NULL, OPT_HASH },
    ENGINE_OPTIONS, { 0 },
};

/* The file's hints apply where the command line is silent; NAN and -1 mark silence until the file is open. */
static int parse(struct run *run, int argc, char **argv)
{
    double temperature = NAN, top_p = NAN, min_p = 0, repeat = 1, frequency = 0, presence = 0;
    long long top_k = -1, last_n = 64, seed = 0;
    bool ok = true;
    optind = 1;
    for (int c; ok && (c = getopt_long(argc, argv, "m:p:f:n:c:qh", options, NULL)) != -1;)
        switch (c) {
        case 'm': run->model = optarg; break;
        case 'p': run->prompt = optarg; break;
        case 'f': run->file = optarg; break;
        case 'n': ok = cli_integer("run", "-n", optarg, 0, 1 << 24, &run->n_tokens); break;
        case 'c': ok = cli_integer("run", "-c", optarg, 1, 1 << 24, &run->context); break;
        case 'q': run->quiet = true; break;
        case 'h': fputs(help, stdout); run->help = true; return CLI_OK;
        case OPT_SPECIAL: run->special = true; break;
        case OPT_SHOW_SPECIAL: run->show_special = true; break;
        case OPT_IGNORE_EOS: run->ignore_eos = true; break;
        case OPT_TEMP: ok = cli_number("run", "--temp", optarg, 0, 100, &temperature); break;
        case OPT_TOP_K: ok = cli_integer("run", "--top-k", optarg, 0, 1 << 24, &top_k); break;
        case OPT_TOP_P: ok = cli_number("run", "--top-p", optarg, 0, 1, &top_p); break;
        case OPT_MIN_P: ok = cli_number("run", "--min-p", optarg, 0, 1, &min_p); break;
        case OPT_REPEAT: ok = cli_number("run", "--repeat-penalty", optarg, 0.01, 100, &repeat); break;
        case OPT_FREQUENCY: ok = cli_number("run", "--frequency-penalty", optarg, -100, 100, &frequency); break;
        case OPT_PRESENCE: ok = cli_number("run", "--presence-penalty", optarg, -100, 100, &presence); break;
        case OPT_LAST_N: ok = cli_integer("run", "--penalty-last-n", optarg, -1, 1 << 24, &last_n); break;
        case OPT_SEED: ok = cli_integer("run", "--seed", optarg, 0, INT64_MAX, &seed); run->seeded = true; break;
        case OPT_WINDOW: ok = cli_integer("run", "--window", optarg, 1, STRATA_MAX_ROWS, &run->window); break;
        case OPT_KV:
            if (strcmp(optarg, "f16") && strcmp(optarg, "int8"))
                return cli_usage("run", "--kv %s: wanted f16 or int8", optarg);
            run->kv = strcmp(optarg, "int8") ? STRATA_KV_F16 : STRATA_KV_INT8;
            break;
        case OPT_HASH:
            if (optarg && strcmp(optarg, "layers"))
                return cli_usage("run", "--hash=%s: wanted --hash or --hash=layers", optarg);
            run->hash = true;
            run->hash_layers = optarg != NULL;
            break;
        default: {
            int taken = engine_option(&run->computing, "run", c, optarg);
            if (taken == 0)
                return cli_usage("run", "wrong option");
            ok = taken > 0;
        }
        }
    if (!ok)
        return CLI_USAGE;
    if (optind < argc)
        return cli_usage("run", "unexpected argument '%s'", argv[optind]);
    if (!run->model)
        return cli_usage("run", "no model: -m FILE");
    if (run->prompt && run->file)
        return cli_usage("run", "-p and -f exclude each other");
    if (!engine_options_finish(&run->computing, "run"))
        return CLI_USAGE;
    run->sample = (struct sample_params){ .temperature = (float)temperature, .top_p = (float)top_p, .min_p = (float)min_p, .top_k = (int)top_k,
                                          .repeat_penalty = (float)repeat, .frequency_penalty = (float)frequency, .presence_penalty = (float)presence,
                                          .penalty_last_n = (int)last_n, .seed = (uint64_t)seed };
    return CLI_OK;
}

/* Fills what the command line left open from the file's sampling hints. */
static int apply_hints(struct run *run, struct strata_error *error)
{
    float temperature = 0, top_p = 1;
    uint32_t top_k = 0;
    int code = gguf_get_f32(run->gguf, "general.sampling.temp", &temperature, error);
    if (code >= 0)
        code = gguf_get_f32(run->gguf, "general.sampling.top_p", &top_p, error);
    if (code >= 0)
        code = gguf_get_u32(run->gguf, "general.sampling.top_k", &top_k, error);
    if (code < 0)
        return code;
    if (isnan(run->sample.temperature))
        run->sample.temperature = temperature;
    if (isnan(run->sample.top_p))
        run->sample.top_p = top_p;
    if (run->sample.top_k < 0)
        run->sample.top_k = (int)top_k;
    if (!run->seeded && getentropy(&run->sample.seed, sizeof run->sample.seed))
        run->sample.seed = (uint64_t)(cli_seconds() * 1e9);
    if (!run->seeded)
        run->sample.seed &= 0xffffffff; /* short enough to type again */
    return sample_check(&run->sample, error);
}

static void hash_layer(void *context, const struct strata_session *session, int position, int layer, const float *residual, int width)
{
    struct run *run = context;
    run->layer_hashes[position % STRATA_MAX_ROWS * run->n_layers + layer] = XXH64(residual, (size_t)width * sizeof *residual, 0);
}

static void print_hash(const struct run *run, const struct strata_info *info, int row, int position)
{
    printf("%d %016" PRIx64, position, (uint64_t)XXH64(strata_window_logits(run->engine, row), (size_t)info->n_vocab * sizeof(float), 0));
    for (int i = 0; run->hash_layers && i < info->n_layers; i++)
        printf(" %016" PRIx64, run->layer_hashes[position % STRATA_MAX_ROWS * info->n_layers + i]);
    printf("\n");
}

/* Reads the prompt; with --hash every position's logits are wanted. */
static int read_prompt(struct run *run, const struct strata_info *info, const int32_t *ids, int n, struct strata_error *error)
{
    if (!run->hash)
        return strata_session_sync(run->session, ids, n, (int)run->window, run->quiet ? cli_silent_progress : cli_progress, "reading the prompt", error);
    int code = 0;
    for (int at = 0, count; !code && at < n && !cli_interrupted() && !ferror(stdout); at += count) {
        struct strata_row rows[STRATA_MAX_ROWS];
        count = n - at < run->window ? n - at : (int)run->window;
        for (int t = 0; t < count; t++)
            rows[t] = (struct strata_row){ run->session, ids[at + t], true, true };
        code = strata_window_run(run->engine, rows, count, error);
        for (int t = 0; !code && t < count; t++)
            print_hash(run, info, t, at + t);
        if (!code)
            code = strata_session_commit(run->session, count, error);
    }
    return code;
}

/* Writes tokens until one ends the text, a limit is reached or the user stops. Returns how many, or a negative code. */
static int write_text(struct run *run, const struct strata_info *info, struct strata_error *error)
{
    struct utf8_stream stream = { 0 };
    const struct tokenizer_info *vocabulary = tokenizer_info(run->tokenizer);
    char *out = malloc(UTF8_STREAM_ROOM(vocabulary->max_piece));
    if (!out)
        return error_set(error, STRATA_E_MEMORY, "out of memory");
    int written = 0, code = 0;
    while (written < run->n_tokens && strata_session_length(run->session) < run->context && !cli_interrupted() && !ferror(stdout)) {
        int length = strata_session_length(run->session);
        int32_t token = sample_token(run->sampler, &run->sample, strata_session_logits(run->session), info->n_vocab, strata_session_tokens(run->session),
                                     (size_t)length, (uint64_t)length);
        written++;
        bool end = tokenizer_is_end(run->tokenizer, token);
        if (!run->hash) {
            const char *piece;
            size_t bytes = tokenizer_piece(run->tokenizer, token, run->show_special, &piece);
            fwrite(out, 1, utf8_stream_push(&stream, piece, bytes, out), stdout);
            fflush(stdout);
        }
        if (end && !run->ignore_eos)
            break;
        if (written == run->n_tokens && !run->hash)
            break; /* nothing reads this token's logits */
        code = strata_window_run(run->engine, &(struct strata_row){ run->session, token, true, true }, 1, error);
        if (!code)
            code = strata_session_commit(run->session, 1, error);
        if (code)
            break;
        if (run->hash)
            print_hash(run, info, 0, length);
    }
    if (!run->hash) {
        fwrite(out, 1, utf8_stream_end(&stream, out), stdout);
        fputc('\n', stdout);
        fflush(stdout);
    }
    free(out);
    return code ? code : written;
}

static int run_model(struct run *run, struct strata_error *error)
{
    double start = cli_seconds();
    int code = gguf_open(&run->gguf, run->model, error);
    if (code)
        return code;
    bool synthetic = false;
    code = gguf_get_bool(run->gguf, "strata.synthetic", &synthetic, error);
    if (code >= 0)
        code = apply_hints(run, error);
    struct strata_options *engine_options = &run->computing.options;
    engine_options->progress = run->quiet ? cli_silent_progress : cli_progress;
    engine_options->progress_context = "loading";
    if (code >= 0)
        code = strata_engine_open(&run->engine, run->model, engine_options, error);
    if (code >= 0)
        code = tokenizer_create(&run->tokenizer, run->gguf, error);
    if (code < 0)
        return code;
    struct strata_info info;
    strata_engine_info(run->engine, &info);

    char *text;
    size_t length;
    code = input_text(run->prompt, run->file, &text, &length, error);
    if (code)
        return code;
    int32_t *ids = NULL;
    int64_t n = tokenizer_encode(run->tokenizer, text, length, run->special, &ids, error);
    free(text);
    if (n < 0)
        return (int)n;
    const struct tokenizer_info *vocabulary = tokenizer_info(run->tokenizer);
    if (n == 0 && vocabulary->eos >= 0) { /* an empty prompt: start where a text starts */
        ids = realloc(ids, sizeof *ids);
        if (!ids)
            return error_set(error, STRATA_E_MEMORY, "out of memory");
        ids[n++] = vocabulary->bos >= 0 ? vocabulary->bos : vocabulary->eos;
    }
    if (!run->context)
        run->context = run->n_tokens < 0 || n + run->n_tokens < 8192 ? 8192 : n + run->n_tokens;
    if (run->context > info.max_context)
        run->context = info.max_context;
    if (n > run->context) {
        free(ids);
        return error_set(error, STRATA_E_ARGUMENT, "the prompt has %lld tokens, the context takes %lld (-c)", (long long)n, run->context);
    }
    if (run->n_tokens < 0)
        run->n_tokens = run->context;
    code = strata_session_open(&run->session, run->engine, (int)run->context, run->kv, error);
    run->n_layers = info.n_layers;
    run->layer_hashes = calloc((size_t)info.n_layers * STRATA_MAX_ROWS, sizeof *run->layer_hashes);
    run->allowed = calloc((size_t)info.n_vocab / 32 + 1, sizeof *run->allowed);
    if (!code && (!run->layer_hashes || !run->allowed))
        code = error_set(error, STRATA_E_MEMORY, "out of memory");
    for (int id = 0; !code && id < info.n_vocab; id++)
        if (tokenizer_type(run->tokenizer, id) != TOKEN_UNUSED)
            run->allowed[id / 32] |= 1u << id % 32;
    run->sample.allowed = run->allowed;
    if (!code)
        code = sampler_create(&run->sampler, info.n_vocab, error);
    if (!code && run->hash_layers)
        strata_engine_probe(run->engine, hash_layer, run);
    if (synthetic)
        fprintf(stderr, "synthetic model: random weights, the text means nothing\n");

    double loaded = cli_seconds();
    if (!code)
        code = read_prompt(run, &info, ids, (int)n, error);
    free(ids);
    double read = cli_seconds();
    if (!code && !run->hash && run->prompt)
        fputs(run->prompt, stdout);
    int written = code || cli_interrupted() ? 0 : write_text(run, &info, error);
    if (written < 0)
        code = written;
    double end = cli_seconds();
    if (!code && !run->quiet) {
        char bytes[32];
        fprintf(stderr, "\n%sloaded %s in %.2f s; prompt %lld tokens in %.2f s (%.1f tok/s); wrote %d tokens in %.2f s (%.1f tok/s)\n",
                synthetic ? "synthetic: " : "", cli_bytes(bytes, (double)info.weight_bytes), loaded - start, (long long)n, read - loaded, (double)n / (read - loaded),
                written, end - read, (double)written / (end - read));
        fprintf(stderr, "%s, %d threads; peak memory %.0f MB; temperature %g, top-k %d, top-p %g, seed %" PRIu64 "\n", info.isa, info.threads,
                cli_peak_memory_mb(), (double)run->sample.temperature, run->sample.top_k, (double)run->sample.top_p, run->sample.seed);
    }
    if (!code)
        code = engine_options_report(&run->computing, run->engine, error);
    return !code && cli_interrupted() ? error_set(error, STRATA_E_STOPPED, "stopped") : code;
}

int cli_run(int argc, char **argv)
{
    struct run run = { .n_tokens = -1, .window = STRATA_MAX_ROWS };
    engine_options_init(&run.computing);
    int exit_code = parse(&run, argc, argv);
    if (exit_code || run.help)
        return exit_code;
    cli_catch_interrupt();
    struct strata_error error = { 0 };
    int code = run_model(&run, &error);
    sampler_destroy(run.sampler);
    strata_session_close(run.session);
    strata_engine_close(run.engine);
    tokenizer_destroy(run.tokenizer);
    gguf_close(run.gguf);
    free(run.layer_hashes);
    free(run.allowed);
    return code < 0 ? cli_fail(&error) : CLI_OK;
}
