/* quantize.c - `strata quantize`: the same model in other types. */
#include "cli/making.h"

#include <getopt.h>
#include <stdio.h>

static const char help[] =
    "Usage: strata quantize [OPTIONS] IN.gguf OUT.gguf\n"
    "Re-encodes a model; IN may be the first file of a split one. Tensors whose type stays are copied unchanged, so with\n"
    "--experts alone only the experts change. --type F32 expands a model; what quantizing lost does not come "
    "back.\n\n" MAKING_HELP_TEXT;

int cli_quantize(int argc, char **argv)
{
    static const struct option options[] = { MAKING_OPTIONS, { NULL, 0, NULL, 0 } };
    struct making making = { .command = "quantize" };
    bool known;
    for (int c; (c = getopt_long(argc, argv, "qh", options, NULL)) != -1;) {
        if (c == 'h' || c == MAKING_HELP) {
            fputs(help, stdout);
            return CLI_OK;
        }
        if (!making_option(&making, c, optarg, &known) || !known)
            return CLI_USAGE;
    }
    if (argc - optind != 2)
        return cli_usage("quantize", "wanted the file to read and the file to write");
    if (!making.type && !making.experts && !making.dense && !making.gate_up && !making.down && !making.ngram)
        return cli_usage("quantize", "wanted a type: --type, or one for a part");
    struct convert_options convert = making_options(&making, "quantizing");
    struct convert_summary summary;
    struct strata_error error = { 0 };
    cli_catch_interrupt();
    int code = convert_quantize(argv[optind], argv[optind + 1], &convert, &summary, &error);
    return making_done(&making, argv[optind + 1], code, &summary, &error);
}
