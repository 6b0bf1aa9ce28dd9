/* convert.c - `strata convert`: a Hugging Face checkpoint becomes a GGUF file. */
#include "cli/making.h"

#include <getopt.h>
#include <stdio.h>

static const char help[] =
    "Usage: strata convert [OPTIONS] DIRECTORY OUT.gguf\n"
    "Makes a GGUF file from a Hugging Face checkpoint of architecture qwen4_exp: config.json, tokenizer.json and safetensors\n"
    "in BF16, F16 or F32. The draft block (MTP) comes along if the checkpoint has one. Without types, tensors keep theirs.\n\n"
    "      --no-mtp      leave the draft block out\n" MAKING_HELP_TEXT;

int cli_convert(int argc, char **argv)
{
    enum { NO_MTP = MAKING_OWN };
    static const struct option options[] = { MAKING_OPTIONS, { "no-mtp", no_argument, NULL, NO_MTP }, { NULL, 0, NULL, 0 } };
    struct making making = { .command = "convert" };
    bool mtp = true, known;
    for (int c; (c = getopt_long(argc, argv, "qh", options, NULL)) != -1;) {
        if (c == 'h' || c == MAKING_HELP) {
            fputs(help, stdout);
            return CLI_OK;
        }
        if (c == NO_MTP)
            mtp = false;
        else if (!making_option(&making, c, optarg, &known))
            return CLI_USAGE;
        else if (!known)
            return CLI_USAGE; /* getopt has said why */
    }
    if (argc - optind != 2)
        return cli_usage("convert", "wanted a checkpoint directory and the name of the file to write");
    struct convert_options convert = making_options(&making, "converting");
    struct convert_summary summary;
    struct strata_error error = { 0 };
    cli_catch_interrupt();
    int code = convert_checkpoint(argv[optind], argv[optind + 1], mtp, &convert, &summary, &error);
    return making_done(&making, argv[optind + 1], code, &summary, &error);
}
