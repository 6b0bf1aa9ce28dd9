/* evaluate - the quality of a model file in figures that can be set beside those of its checkpoint.
 *
 *   evaluate perplexity MODEL.gguf TEXT.txt [TOKENS]    per token, in separate windows of 512 tokens
 *   evaluate kl MODEL.gguf IDS.txt LOGITS.bin           beside the logits of another engine (float32 [n][n_vocab]) over the same tokens
 *   evaluate chat MODEL.gguf PROMPTS.jsonl [LIMIT]      exact answers, greedy: lines with "task", "enable_thinking", "prompt", "answer"
 */
#include <strata.h>

#include "gguf/gguf.h"
#include "text/tokenizer.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct strata_engine *engine;
static struct strata_session *session;
static struct tokenizer *tokenizer;
static struct strata_info info;

static void die(const char *sentence)
{
    fprintf(stderr, "evaluate: %s\n", sentence);
    exit(1);
}

static void open_model(const char *path)
{
    struct strata_error error;
    struct gguf *gguf;
    if (gguf_open(&gguf, path, &error) || tokenizer_create(&tokenizer, gguf, &error) || strata_engine_open(&engine, path, NULL, &error) ||
        strata_session_open(&session, engine, 4096, STRATA_KV_F16, &error))
        die(error.text);
    gguf_close(gguf);
    strata_engine_info(engine, &info);
}

static double log_probability(const float *logits, int32_t token)
{
    double best = logits[0], sum = 0;
    for (int i = 1; i < info.n_vocab; i++)
        best = logits[i] > best ? logits[i] : best;
    for (int i = 0; i < info.n_vocab; i++)
        sum += exp(logits[i] - best);
    return logits[token] - best - log(sum);
}

static int perplexity(const char *path, long limit)
{
    enum { WINDOW = 512 };
    FILE *file = fopen(path, "rb");
    char *text = malloc(16 << 20);
    size_t length = file && text ? fread(text, 1, 16 << 20, file) : 0;
    int32_t *ids;
    struct strata_error error;
    int64_t n = length ? tokenizer_encode(tokenizer, text, length, false, &ids, &error) : 0;
    if (n < WINDOW)
        die("the text is missing or shorter than 512 tokens");
    n = limit && limit < n ? limit : n;
    double total = 0;
    long count = 0;
    for (int64_t start = 0; start + WINDOW <= n; start += WINDOW) {
        /* Asking for one token makes the session, which holds the last window, start anew. */
        for (int at = 0; at < WINDOW; at += STRATA_MAX_ROWS) {
            struct strata_row rows[STRATA_MAX_ROWS];
            if (at == 0 && strata_session_sync(session, ids + start, 1, 1, NULL, NULL, &error))
                die(error.text);
            if (at == 0) {
                total -= log_probability(strata_session_logits(session), ids[start + 1]);
                count++;
            }
            int first = at ? at : 1, rows_n = at + STRATA_MAX_ROWS - first;
            for (int t = 0; t < rows_n; t++)
                rows[t] = (struct strata_row){ session, ids[start + first + t], true, true };
            if (strata_window_run(engine, rows, rows_n, &error))
                die(error.text);
            for (int t = 0; t < rows_n && first + t + 1 < WINDOW; t++, count++)
                total -= log_probability(strata_window_logits(engine, t), ids[start + first + t + 1]);
            if (strata_session_commit(session, rows_n, &error))
                die(error.text);
        }
        fprintf(stderr, "\r%lld of %lld tokens, perplexity %.4f", (long long)(start + WINDOW), (long long)n, exp(total / (double)count));
    }
    fprintf(stderr, "\n");
    printf("perplexity %.4f over %ld tokens in windows of %d\n", exp(total / (double)count), count, WINDOW);
    return 0;
}

static int32_t best_of(const float *logits)
{
    int32_t best = 0;
    for (int i = 1; i < info.n_vocab; i++)
        if (logits[i] > logits[best])
            best = i;
    return best;
}

/* The greedy answer as text, without end tokens and thinking. */
static char *answer_to(const char *prompt, bool thinking)
{
    enum { MOST = 120 };
    int32_t *ids, out[MOST];
    struct strata_error error;
    int64_t n = tokenizer_encode(tokenizer, prompt, strlen(prompt), true, &ids, &error);
    if (n < 1 || strata_session_sync(session, ids, (int)n, STRATA_MAX_ROWS, NULL, NULL, &error))
        die(error.text);
    free(ids);
    int written = 0;
    while (written < MOST) {
        int32_t token = best_of(strata_session_logits(session));
        if (tokenizer_is_end(tokenizer, token))
            break;
        out[written++] = token;
        if (strata_window_run(engine, &(struct strata_row){ session, token, true, true }, 1, &error) || strata_session_commit(session, 1, &error))
            die(error.text);
    }
    char *text, *from;
    if (tokenizer_decode(tokenizer, out, (size_t)written, true, &text, &error) < 0)
        die(error.text);
    from = thinking ? strstr(text, "</think>") : NULL;
    for (char *next; from && (next = strstr(from + 1, "</think>"));)
        from = next;
    from = from ? from + strlen("</think>") : text;
    from += strspn(from, " \n");
    size_t length = strlen(from);
    while (length && strchr(" \n", from[length - 1]))
        length--;
    memmove(text, from, length);
    text[length] = 0;
    return text;
}

static int chat(const char *path, long limit)
{
    struct { char name[40]; int right, all; } tasks[100] = { 0 };
    int n_tasks = 0, right[2] = { 0 }, all[2] = { 0 };
    FILE *file = fopen(path, "rb");
    if (!file)
        die("cannot read the prompts");
    for (long line = 0; !limit || line < limit; line++) {
        json_t *entry = json_loadf(file, JSON_DISABLE_EOF_CHECK, NULL);
        if (!entry)
            break;
        const char *task = json_string_value(json_object_get(entry, "task")), *prompt = json_string_value(json_object_get(entry, "prompt"));
        const char *want = json_string_value(json_object_get(entry, "answer"));
        bool thinking = json_is_true(json_object_get(entry, "enable_thinking"));
        if (!task || !prompt || !want)
            die("a line lacks task, prompt or answer");
        char *got = answer_to(prompt, thinking);
        int at = 0;
        while (at < n_tasks && strcmp(tasks[at].name, task))
            at++;
        if (at == n_tasks && n_tasks < 99)
            snprintf(tasks[n_tasks++].name, sizeof tasks[0].name, "%s", task);
        bool ok = strcmp(got, want) == 0;
        tasks[at].right += ok;
        tasks[at].all++;
        right[thinking] += ok;
        all[thinking]++;
        free(got);
        json_decref(entry);
        fprintf(stderr, "\r%ld prompts", line + 1);
    }
    fclose(file);
    fprintf(stderr, "\n");
    for (int i = 0; i < n_tasks; i++)
        printf("%-14s %d/%d\n", tasks[i].name, tasks[i].right, tasks[i].all);
    printf("all: non-thinking %d/%d, thinking %d/%d\n", right[0], all[0], right[1], all[1]);
    return 0;
}

/* Kullback-Leibler divergence from the other engine's distribution to ours, and how often both would choose the same token. */
static int kl(const char *ids_path, const char *logits_path)
{
    FILE *ids_file = fopen(ids_path, "r"), *logits_file = fopen(logits_path, "rb");
    float *other = malloc((size_t)info.n_vocab * sizeof *other);
    if (!ids_file || !logits_file || !other)
        die("cannot read the token or logits file");
    int32_t ids[4096];
    int n = 0, same = 0;
    double total = 0, worst = 0;
    while (n < 4096 && fscanf(ids_file, "%d", &ids[n]) == 1)
        n++;
    for (int i = 0; i < n; i++) {
        struct strata_error error;
        if (fread(other, sizeof *other, (size_t)info.n_vocab, logits_file) != (size_t)info.n_vocab)
            die("the logits file is too short");
        if (strata_session_sync(session, ids, i + 1, 1, NULL, NULL, &error))
            die(error.text);
        const float *ours = strata_session_logits(session);
        double base_other = log_probability(other, 0) - other[0], base_ours = log_probability(ours, 0) - ours[0], divergence = 0;
        for (int v = 0; v < info.n_vocab; v++) {
            double p = other[v] + base_other;
            divergence += exp(p) * (p - (ours[v] + base_ours));
        }
        total += divergence;
        worst = divergence > worst ? divergence : worst;
        same += best_of(ours) == best_of(other);
    }
    printf("%d tokens: same choice at %.2f %%, mean KL %.3e, largest %.3e\n", n, 100.0 * same / n, total / n, worst);
    return 0;
}

int main(int argc, char **argv)
{
    bool is_kl = argc == 5 && !strcmp(argv[1], "kl");
    if (argc < 4 || argc > 5 || (!is_kl && strcmp(argv[1], "perplexity") && strcmp(argv[1], "chat"))) {
        fprintf(stderr, "usage: evaluate perplexity|chat MODEL.gguf FILE [LIMIT]\n       evaluate kl MODEL.gguf IDS.txt LOGITS.bin\n");
        return 2;
    }
    open_model(argv[2]);
    long limit = argc == 5 ? atol(argv[4]) : 0;
    int code = is_kl ? kl(argv[3], argv[4]) : strcmp(argv[1], "chat") ? perplexity(argv[3], limit) : chat(argv[3], limit);
    strata_session_close(session);
    strata_engine_close(engine);
    tokenizer_destroy(tokenizer);
    return code;
}
