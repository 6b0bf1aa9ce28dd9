/* oracle_compare - a model's logits beside recorded reference figures (tools/oracle/README.md says how they are recorded).
 *
 *   oracle_compare MODEL.gguf ORACLE.bin
 *
 * ORACLE.bin, little-endian: "STRORCL1", u32 n_vocab, u32 n_prompts, then per prompt: char name[32], u32 n (prompt tokens), u32 n_greedy,
 * i32 ids[n], i32 greedy[n_greedy], i32 argmax[n] (at every prompt position), f32 margin[n + n_greedy] (best minus second, over prompt and
 * continuation), f32 last_logits[n_vocab] (at the last prompt position).
 *
 * Passes if, for every prompt, the last logits differ by at most 2e-3 of their range; if the argmax is equal at 99.5 % of all positions and every
 * difference has a reference margin below 1e-2; and if the greedy continuation is equal wherever the reference margin is at least 1e-3. */
#include <strata.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct prompt { char name[32]; uint32_t n, n_greedy; int32_t *ids, *greedy, *argmax; float *margin, *last_logits; };

static void *read_items(FILE *file, size_t n)
{
    void *p = malloc(4 * n + 4);
    if (!p || fread(p, 4, n, file) != n) {
        fprintf(stderr, "oracle_compare: the reference file is cut short\n");
        exit(1);
    }
    return p;
}

static int32_t best(const float *logits, int n)
{
    int32_t at = 0;
    for (int i = 1; i < n; i++)
        if (logits[i] > logits[at])
            at = i;
    return at;
}

static int n_positions, n_different;

/* Returns whether the prompt passes. */
static bool compare(struct strata_session *session, const struct prompt *p, int n_vocab)
{
    bool ok = true;
    int different = 0;
    float worst_margin = 0;
    for (uint32_t i = 0; i < p->n; i++) {
        struct strata_error error;
        if (strata_session_sync(session, p->ids, (int)i + 1, 1, NULL, NULL, &error)) {
            fprintf(stderr, "oracle_compare: %s\n", error.text);
            exit(1);
        }
        if (best(strata_session_logits(session), n_vocab) != p->argmax[i]) {
            different++;
            worst_margin = p->margin[i] > worst_margin ? p->margin[i] : worst_margin;
        }
    }
    n_positions += (int)p->n;
    n_different += different;
    const float *logits = strata_session_logits(session);
    float low = p->last_logits[0], high = low, worst = 0;
    for (int i = 0; i < n_vocab; i++) {
        low = fminf(low, p->last_logits[i]);
        high = fmaxf(high, p->last_logits[i]);
        worst = fmaxf(worst, fabsf(logits[i] - p->last_logits[i]));
    }
    ok = worst <= 2e-3f * (high - low) && worst_margin < 1e-2f;

    int32_t *all = malloc((p->n + p->n_greedy) * sizeof *all);
    memcpy(all, p->ids, p->n * sizeof *all);
    /* Where the reference itself hardly decides, its choice is taken and the walk goes on. */
    uint32_t same = 0, undecided = 0;
    for (; same < p->n_greedy; same++) {
        int32_t token = best(strata_session_logits(session), n_vocab);
        if (token != p->greedy[same] && p->margin[p->n - 1 + same] >= 1e-3f)
            break;
        undecided += token != p->greedy[same];
        all[p->n + same] = p->greedy[same];
        if (strata_session_sync(session, all, (int)(p->n + same + 1), 1, NULL, NULL, NULL))
            exit(1);
    }
    free(all);
    ok = ok && same == p->n_greedy;
    printf("%-14s %4u tokens: last logits within %.1e of the range, argmax differs at %d positions (largest margin %.1e), greedy follows %u of %u (%u undecided): %s\n", p->name, p->n,
           (double)(worst / (high - low)), different, (double)worst_margin, same, p->n_greedy, undecided, ok ? "ok" : "WRONG");
    return ok;
}

int main(int argc, char **argv)
{
    if (argc != 3) {
        fprintf(stderr, "usage: oracle_compare MODEL.gguf ORACLE.bin\n");
        return 2;
    }
    struct strata_engine *engine;
    struct strata_session *session;
    struct strata_error error;
    FILE *file = fopen(argv[2], "rb");
    char magic[8];
    uint32_t sizes[2];
    if (!file || fread(magic, 8, 1, file) != 1 || memcmp(magic, "STRORCL1", 8) || fread(sizes, 4, 2, file) != 2) {
        fprintf(stderr, "oracle_compare: %s is not a reference file\n", argv[2]);
        return 1;
    }
    if (strata_engine_open(&engine, argv[1], NULL, &error) || strata_session_open(&session, engine, 4096, STRATA_KV_F16, &error)) {
        fprintf(stderr, "oracle_compare: %s\n", error.text);
        return 1;
    }
    struct strata_info info;
    strata_engine_info(engine, &info);
    if ((uint32_t)info.n_vocab != sizes[0]) {
        fprintf(stderr, "oracle_compare: %d tokens in the model, %u in the reference\n", info.n_vocab, sizes[0]);
        return 1;
    }
    bool ok = sizes[1] > 0;
    for (uint32_t i = 0; i < sizes[1]; i++) {
        struct prompt p;
        uint32_t counts[2];
        if (fread(p.name, 32, 1, file) != 1 || fread(counts, 4, 2, file) != 2 || counts[0] < 1 || counts[0] > 3000 || counts[1] > 1000) {
            fprintf(stderr, "oracle_compare: the reference file is cut short\n");
            return 1;
        }
        p.name[31] = 0;
        p.n = counts[0];
        p.n_greedy = counts[1];
        p.ids = read_items(file, p.n);
        p.greedy = read_items(file, p.n_greedy);
        p.argmax = read_items(file, p.n);
        p.margin = read_items(file, p.n + p.n_greedy);
        p.last_logits = read_items(file, sizes[0]);
        ok &= compare(session, &p, info.n_vocab);
        free(p.ids);
        free(p.greedy);
        free(p.argmax);
        free(p.margin);
        free(p.last_logits);
    }
    fclose(file);
    double equal = 100.0 * (n_positions - n_different) / n_positions;
    ok &= equal >= 99.5;
    printf("argmax equal at %d of %d positions (%.2f %%, wanted 99.5 %%): %s\n", n_positions - n_different, n_positions, equal, ok ? "ok" : "WRONG");
    strata_session_close(session);
    strata_engine_close(engine);
    return !ok;
}
