/* making.h - what convert, quantize and synth share: options for types, and the line that says what was made. */
#ifndef CLI_MAKING_H
#define CLI_MAKING_H

#include "cli/cli.h"
#include "convert/convert.h"

/* getopt_long values; commands number their own options from MAKING_OWN on. */
enum {
    MAKING_TYPE = 256,
    MAKING_EXPERTS,
    MAKING_DENSE,
    MAKING_GATE_UP,
    MAKING_DOWN,
    MAKING_NGRAM,
    MAKING_THREADS,
    MAKING_HELP,
    MAKING_OWN
};

#define MAKING_OPTIONS                                                                                                             \
    { "type", required_argument, NULL, MAKING_TYPE }, { "experts", required_argument, NULL, MAKING_EXPERTS },                      \
        { "dense", required_argument, NULL, MAKING_DENSE }, { "gate-up", required_argument, NULL, MAKING_GATE_UP },                \
        { "down", required_argument, NULL, MAKING_DOWN }, { "ngram", required_argument, NULL, MAKING_NGRAM },                      \
        { "threads", required_argument, NULL, MAKING_THREADS }, { "help", no_argument, NULL, MAKING_HELP },                        \
    {                                                                                                                              \
        "quiet", no_argument, NULL, 'q'                                                                                            \
    }

#define MAKING_HELP_TEXT                                                                                                           \
    "      --type T      everything (F32, F16, BF16, Q8_0, Q4_K, IQ4_NL, IQ3_S, Q2_0, ...); or part by part:\n"                    \
    "      --dense T     projections, embedding, head, shared expert\n"                                                            \
    "      --experts T   the experts; --gate-up T and --down T say it for their two parts\n"                                       \
    "      --ngram T     the n-gram table (where nothing is said: as --dense)\n"                                                   \
    "Norms, convolutions, router and other small tensors stay F32, the indexer's projections 16 bits wide (unless\n"               \
    "--dense is F32). Rows that do not divide into a type's blocks (the experts' down projection of most models) become\n"         \
    "IQ4_NL, Q8_0 or F16, the first that fits and has no fewer bits.\n\n"                                                          \
    "      --threads N   default: one per physical core\n"                                                                         \
    "  -q, --quiet       no progress, no summary\n"                                                                                \
    "A file of that name is replaced when the new one is complete; Ctrl-C leaves nothing behind.\n"

struct making {
    const char *command;
    const struct quant_format *type, *experts, *dense, *gate_up, *down, *ngram;
    long long threads;
    bool quiet;
};

/* Takes one of the shared options; false (after a usage line) if its value is wrong. An option that is none of them: true, *known =
 * false. */
bool making_option(struct making *making, int option, const char *value, bool *known);
/* The options as the library wants them. `label` is shown beside the progress bar. */
struct convert_options making_options(const struct making *making, const char *label);
/* Prints what was made to stderr, or the error; returns the exit code. */
int making_done(const struct making *making, const char *out, int code, const struct convert_summary *summary,
                const struct strata_error *error);

#endif
