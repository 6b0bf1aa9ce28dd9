/* llama_peer.c - llama.cpp's library as an independent judge of Strata's logits and tokens, and as a peer for its speed.
 *
 *     llama_peer logits MODEL.gguf IDS.txt OUT.bin THREADS     every position's logits, float32 [n_ids][n_vocab]
 *     llama_peer bench MODEL.gguf THREADS N_PROMPT N_GEN [RUNS]    tokens a second, like `strata bench`
 *     llama_peer tokenize MODEL.gguf [special] < TEXT          token ids, one line; special: control tokens count as such
 *
 * Compiled by tools/oracle/peer.sh with the library's own headers. CPU only.
 */
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include <llama.h>

enum { BATCH = 512, MAX_RUNS = 99 };

static void __attribute__((noreturn, format(printf, 1, 2))) fail(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "llama_peer: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    exit(1);
}

static void *allocate(size_t bytes)
{
    void *p = malloc(bytes ? bytes : 1);
    if (!p)
        fail("out of memory");
    return p;
}

static int number(const char *name, const char *text, long low, long high)
{
    char *end;
    errno = 0;
    long value = strtol(text, &end, 10);
    if (errno || end == text || *end || value < low || value > high)
        fail("%s is '%s', wanted %ld to %ld", name, text, low, high);
    return (int)value;
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void only_errors(enum ggml_log_level level, const char *text, void *context)
{
    (void)context;
    if (level == GGML_LOG_LEVEL_ERROR)
        fputs(text, stderr);
}

/* The CPU's code is in libraries of their own, one for each instruction set, beside libllama. */
static void load_backends(void)
{
    Dl_info info;
    if (!dladdr((void *)llama_backend_init, &info))
        fail("cannot find where libllama was loaded from");
    char *folder = strdup(info.dli_fname), *slash = folder ? strrchr(folder, '/') : NULL;
    if (!slash)
        fail("cannot find the folder of %s", info.dli_fname);
    *slash = 0;
    ggml_backend_load_all_from_path(folder);
    free(folder);
    llama_backend_init();
}

static struct llama_model *open_model(const char *path, bool vocabulary_only)
{
    llama_log_set(only_errors, NULL);
    load_backends();
    struct llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = 0;
    params.vocab_only = vocabulary_only;
    struct llama_model *model = llama_model_load_from_file(path, params);
    if (!model)
        fail("llama.cpp cannot load %s", path);
    return model;
}

static struct llama_context *open_context(struct llama_model *model, int length, int threads)
{
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = (uint32_t)length;
    params.n_batch = params.n_ubatch = BATCH;
    params.n_threads = params.n_threads_batch = threads;
    struct llama_context *context = llama_init_from_model(model, params);
    if (!context)
        fail("llama.cpp cannot make a context of %d tokens", length);
    return context;
}

/* Appends n tokens from `position` on; logits of all of them, or of the last. */
static void decode(struct llama_context *context, struct llama_batch *batch, const int32_t *ids, int n, int position,
                   bool all_logits)
{
    for (int i = 0; i < n; i++) {
        batch->token[i] = ids[i];
        batch->pos[i] = position + i;
        batch->n_seq_id[i] = 1;
        batch->seq_id[i][0] = 0;
        batch->logits[i] = all_logits || i == n - 1;
    }
    batch->n_tokens = n;
    int code = llama_decode(context, *batch);
    if (code)
        fail("llama_decode at position %d: code %d", position, code);
}

static const float *logits_at(struct llama_context *context, int i)
{
    const float *logits = llama_get_logits_ith(context, i);
    if (!logits)
        fail("no logits for row %d", i);
    return logits;
}

static int32_t *read_ids(const char *path, int n_vocab, int *n)
{
    FILE *file = fopen(path, "r");
    if (!file)
        fail("%s: %s", path, strerror(errno));
    int room = 0, read;
    int32_t *ids = NULL;
    for (*n = 0;; ++*n) {
        if (*n == room) {
            room = room ? 2 * room : 1024;
            ids = realloc(ids, (size_t)room * sizeof *ids);
            if (!ids)
                fail("out of memory");
        }
        read = fscanf(file, "%d", &ids[*n]);
        if (read != 1)
            break;
        if (ids[*n] < 0 || ids[*n] >= n_vocab)
            fail("%s: token %d is %d, the model has 0 to %d", path, *n, ids[*n], n_vocab - 1);
    }
    if (read != EOF)
        fail("%s: after %d tokens something that is not a number", path, *n);
    if (*n == 0)
        fail("%s: no token in it", path);
    fclose(file);
    return ids;
}

static void write_logits(const char *model_path, const char *ids_path, const char *out_path, int threads)
{
    struct llama_model *model = open_model(model_path, false);
    int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model)), n;
    int32_t *ids = read_ids(ids_path, n_vocab, &n);
    struct llama_context *context = open_context(model, n, threads);
    struct llama_batch batch = llama_batch_init(BATCH, 0, 1);
    FILE *out = fopen(out_path, "wb");
    if (!out)
        fail("%s: %s", out_path, strerror(errno));
    for (int done = 0, rows; done < n; done += rows) {
        rows = n - done < BATCH ? n - done : BATCH;
        decode(context, &batch, ids + done, rows, done, true);
        for (int i = 0; i < rows; i++)
            if (fwrite(logits_at(context, i), sizeof(float), (size_t)n_vocab, out) != (size_t)n_vocab)
                fail("%s: %s", out_path, strerror(errno));
    }
    if (fclose(out))
        fail("%s: %s", out_path, strerror(errno));
    printf("%d positions, %d logits each\n", n, n_vocab);
    llama_batch_free(batch);
    llama_free(context);
    llama_model_free(model);
    free(ids);
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int32_t best(const float *logits, int n)
{
    int32_t at = 0;
    for (int i = 1; i < n; i++)
        if (logits[i] > logits[at])
            at = i;
    return at;
}

/* The same work as `strata bench`: the same prompt, then greedy decoding, from an empty context each time. */
static void bench(const char *model_path, int threads, int n_prompt, int n_gen, int runs)
{
    struct llama_model *model = open_model(model_path, false);
    int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    struct llama_context *context = open_context(model, n_prompt + n_gen, threads);
    struct llama_batch batch = llama_batch_init(BATCH, 0, 1);
    int32_t *ids = allocate((size_t)n_prompt * sizeof *ids);
    double prompt[MAX_RUNS], generate[MAX_RUNS];
    for (int i = 0; i < n_prompt; i++)
        ids[i] = (int32_t)((uint64_t)(i + 1) * 2654435761u % (uint64_t)(n_vocab * 9 / 10));
    for (int r = 0; r < runs; r++) {
        llama_memory_clear(llama_get_memory(context), true);
        double start = seconds();
        for (int done = 0, rows; done < n_prompt; done += rows) {
            rows = n_prompt - done < BATCH ? n_prompt - done : BATCH;
            decode(context, &batch, ids + done, rows, done, false);
        }
        const float *logits = logits_at(context, -1);
        double read = seconds();
        for (int i = 0; i < n_gen; i++) {
            int32_t token = best(logits, n_vocab);
            decode(context, &batch, &token, 1, n_prompt + i, false);
            logits = logits_at(context, -1);
        }
        prompt[r] = read - start;
        generate[r] = seconds() - read;
    }
    qsort(prompt, (size_t)runs, sizeof *prompt, compare);
    qsort(generate, (size_t)runs, sizeof *generate, compare);
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    printf("%s: llama.cpp, %d threads; median of %d runs: prompt %d tokens %.1f tok/s, decode %d tokens %.1f tok/s; peak memory "
           "%.0f MB\n",
           model_path, threads, runs, n_prompt, n_prompt / prompt[runs / 2], n_gen, n_gen / generate[runs / 2],
           (double)usage.ru_maxrss / 1024);
    llama_batch_free(batch);
    llama_free(context);
    llama_model_free(model);
    free(ids);
}

static void tokenize(const char *model_path, bool special)
{
    struct llama_model *model = open_model(model_path, true);
    char *text = NULL;
    size_t room = 0, length = 0, n;
    do {
        if (length == room) {
            room = room ? 2 * room : 65536;
            text = realloc(text, room);
            if (!text)
                fail("out of memory");
        }
        n = fread(text + length, 1, room - length, stdin);
        length += n;
    } while (n > 0);
    if (length >= INT32_MAX / 2)
        fail("a text of %zu bytes is too long", length);
    int limit = (int)length + 16; /* a token is at least a byte; a few may be added around */
    int32_t *ids = allocate((size_t)limit * sizeof *ids);
    int count = llama_tokenize(llama_model_get_vocab(model), text, (int32_t)length, ids, limit, false, special);
    if (count < 0)
        fail("llama_tokenize: code %d", count);
    for (int i = 0; i < count; i++)
        printf(i ? " %d" : "%d", ids[i]);
    printf("\n");
    llama_model_free(model);
    free(ids);
    free(text);
}

int main(int argc, char **argv)
{
    const char *command = argc > 1 ? argv[1] : "";
    if (!strcmp(command, "logits") && argc == 6)
        write_logits(argv[2], argv[3], argv[4], number("THREADS", argv[5], 1, 1024));
    else if (!strcmp(command, "bench") && (argc == 6 || argc == 7))
        bench(argv[2], number("THREADS", argv[3], 1, 1024), number("N_PROMPT", argv[4], 1, 1 << 20),
              number("N_GEN", argv[5], 1, 1 << 20), argc == 7 ? number("RUNS", argv[6], 1, MAX_RUNS) : 5);
    else if (!strcmp(command, "tokenize") && (argc == 3 || (argc == 4 && !strcmp(argv[3], "special"))))
        tokenize(argv[2], argc == 4);
    else {
        fprintf(stderr, "usage: llama_peer logits MODEL.gguf IDS.txt OUT.bin THREADS\n"
                        "       llama_peer bench MODEL.gguf THREADS N_PROMPT N_GEN [RUNS]\n"
                        "       llama_peer tokenize MODEL.gguf [special] < TEXT\n");
        return 2;
    }
    return 0;
}
