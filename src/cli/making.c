#include "cli/making.h"

#include <stdio.h>

bool making_option(struct making *making, int option, const char *value, bool *known)
{
    static const struct {
        int option;
        const char *name;
    } types[] = {
        { MAKING_TYPE, "--type" },       { MAKING_EXPERTS, "--experts" }, { MAKING_DENSE, "--dense" },
        { MAKING_GATE_UP, "--gate-up" }, { MAKING_DOWN, "--down" },       { MAKING_NGRAM, "--ngram" },
    };
    const struct quant_format **formats[] = { &making->type,    &making->experts, &making->dense,
                                              &making->gate_up, &making->down,    &making->ngram };
    *known = true;
    if (option == 'q')
        return making->quiet = true;
    if (option == MAKING_THREADS)
        return cli_integer(making->command, "--threads", value, 1, 1024, &making->threads);
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (option != types[i].option)
            continue;
        *formats[i] = quant_format_named(value);
        if (!*formats[i] || (!(*formats[i])->is_float && !(*formats[i])->encode)) {
            cli_usage(making->command, "%s %s: %s", types[i].name, value,
                      *formats[i] ? "Strata reads this type but cannot write it" : "not a type that Strata knows");
            return false;
        }
        return true;
    }
    *known = false;
    return true;
}

static const struct quant_format *first(const struct quant_format *a, const struct quant_format *b) { return a ? a : b; }

struct convert_options making_options(const struct making *m, const char *label)
{
    const struct quant_format *experts = first(m->experts, m->type), *dense = first(m->dense, m->type);
    return (struct convert_options){
        .types = { .dense = dense,
                   .gate_up = first(m->gate_up, experts),
                   .down = first(m->down, experts),
                   .ngram = first(m->ngram, dense) },
        .threads = (int)m->threads,
        .progress = m->quiet ? cli_silent_progress : cli_progress,
        .progress_context = (void *)label,
    };
}

int making_done(const struct making *m, const char *out, int code, const struct convert_summary *s,
                const struct strata_error *error)
{
    if (code)
        return cli_fail(error);
    if (m->quiet)
        return CLI_OK;
    char size[32];
    fprintf(stderr, "%s: %llu tensors, %s", out, (unsigned long long)s->n_tensors, cli_bytes(size, (double)s->bytes));
    if (s->n_fallbacks)
        fprintf(stderr, "; row width no multiple of the block: %s", s->fallbacks);
    if (s->n_ignored)
        fprintf(stderr, "; %llu tensors left out (%s%s)", (unsigned long long)s->n_ignored, s->ignored,
                s->n_ignored > 1 ? ", ..." : "");
    fputc('\n', stderr);
    return CLI_OK;
}
