/* synth.c - `strata synth`: random weights in real shapes, to measure speed without a download. */
#include "cli/making.h"

#include <getopt.h>
#include <stdio.h>

static const char help[] =
    "Usage: strata synth [OPTIONS] OUT.gguf\n"
    "Writes a model with the shapes of a real one and random weights. It says nothing sensible, at the real model's speed.\n\n"
    "      --like NAME       qwen3.8-flash-next (default), or tiny: a few MB, for tests\n"
    "      --layers N        default: all of the model's (48 with Q2_0 experts are 40 GB, 4 are 4.8 GB)\n"
    "      --ngram-rows N    rows of the n-gram table (default 1048576; the real one has 320001536)\n"
    "      --skew S          how unequal the experts are: the r-th most popular of a layer is chosen about r^-S as\n"
    "                        often as the first. 0: all alike. Default 0.6\n"
    "      --locality L      0 to 1: how much neighbouring token ids have in common. Near 1, a text of neighbouring ids\n"
    "                        keeps choosing the same experts, and the text that the model writes stays among such\n"
    "                        neighbours; at 0 every token chooses anew. Default 0.6\n"
    "      --seed N          default 1\n\n"
    "Types (default: Q8_0, experts Q2_0):\n" MAKING_HELP_TEXT;

int cli_synth(int argc, char **argv)
{
    enum { LIKE = MAKING_OWN, LAYERS, NGRAM_ROWS, SKEW, LOCALITY, SEED };
    static const struct option options[] = {
        MAKING_OPTIONS,
        { "like", required_argument, NULL, LIKE },
        { "layers", required_argument, NULL, LAYERS },
        { "ngram-rows", required_argument, NULL, NGRAM_ROWS },
        { "skew", required_argument, NULL, SKEW },
        { "locality", required_argument, NULL, LOCALITY },
        { "seed", required_argument, NULL, SEED },
        { NULL, 0, NULL, 0 },
    };
    struct making making = { .command = "synth" };
    struct convert_synth synth = { .like = "qwen3.8-flash-next", .skew = 0.6, .locality = 0.6, .seed = 1 };
    long long layers = 0, rows = 0, seed = 1;
    for (int c; (c = getopt_long(argc, argv, "qh", options, NULL)) != -1;) {
        bool ok = true, known = true;
        switch (c) {
        case 'h':
        case MAKING_HELP:
            fputs(help, stdout);
            return CLI_OK;
        case LIKE:
            synth.like = optarg;
            break;
        case LAYERS:
            ok = cli_integer("synth", "--layers", optarg, 2, 1023, &layers);
            break;
        case NGRAM_ROWS:
            ok = cli_integer("synth", "--ngram-rows", optarg, 1024, INT32_MAX, &rows);
            break;
        case SKEW:
            ok = cli_number("synth", "--skew", optarg, 0, 4, &synth.skew);
            break;
        case LOCALITY:
            ok = cli_number("synth", "--locality", optarg, 0, 1, &synth.locality);
            break;
        case SEED:
            ok = cli_integer("synth", "--seed", optarg, 0, INT64_MAX, &seed);
            break;
        default:
            ok = making_option(&making, c, optarg, &known);
        }
        if (!ok || !known)
            return CLI_USAGE;
    }
    if (argc - optind != 1)
        return cli_usage("synth", "wanted the name of the file to write");
    synth.n_layers = (int)layers;
    synth.ngram_rows = rows;
    synth.seed = (uint64_t)seed;
    struct convert_options convert = making_options(&making, "writing");
    struct convert_summary summary;
    struct strata_error error = { 0 };
    cli_catch_interrupt();
    int code = convert_synthetic(argv[optind], &synth, &convert, &summary, &error);
    return making_done(&making, argv[optind], code, &summary, &error);
}
