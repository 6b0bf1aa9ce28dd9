/* pack.c - `strata pack`: the experts of a model in the form that RAM holds them, so that later starts are plain reads. */
#include "cli/cli.h"

#include "gguf/gguf.h"
#include "model/model.h"

#include <getopt.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

static const char help[] =
    "Usage: strata pack [OPTIONS] MODEL.gguf OUT\n"
    "Writes the experts of a model in the form that memory holds them, so that 'strata run --pack OUT' starts with plain reads.\n"
    "MODEL may be the first file of a split one, and is still needed for everything else. OUT is about as large as the experts; "
    "it\n"
    "fits this very model file, and this version of Strata. One layer at a time is in memory.\n\n"
    "      --threads N   default: one per physical core\n"
    "  -q, --quiet       no progress, no summary\n"
    "A file of that name is replaced when the new one is complete. Ctrl-C leaves nothing behind, a killed run OUT.part.\n";

static int done(const char *model, const char *path, double seconds)
{
    struct stat status;
    char size[32];
    cli_print_text(stderr, path, strlen(path));
    fprintf(stderr, ": %s in %.1f s. Use it, or check it while it is read, with\n",
            cli_bytes(size, stat(path, &status) ? 0 : (double)status.st_size), seconds);
    for (int verify = 0; verify < 2; verify++) {
        fprintf(stderr, "  strata run -m ");
        cli_print_text(stderr, model, strlen(model));
        fprintf(stderr, " --pack ");
        cli_print_text(stderr, path, strlen(path));
        fprintf(stderr, "%s\n", verify ? " --verify" : "");
    }
    return CLI_OK;
}

int cli_pack(int argc, char **argv)
{
    enum { THREADS = 256 };
    static const struct option options[] = {
        { "threads", required_argument, NULL, THREADS },
        { "quiet", no_argument, NULL, 'q' },
        { "help", no_argument, NULL, 'h' },
        { NULL, 0, NULL, 0 },
    };
    long long threads = 0;
    bool quiet = false;
    for (int c; (c = getopt_long(argc, argv, "qh", options, NULL)) != -1;)
        switch (c) {
        case 'h':
            fputs(help, stdout);
            return CLI_OK;
        case 'q':
            quiet = true;
            break;
        case THREADS:
            if (!cli_integer("pack", "--threads", optarg, 1, 1024, &threads))
                return CLI_USAGE;
            break;
        default:
            return cli_usage("pack", "wrong option");
        }
    if (argc - optind != 2)
        return cli_usage("pack", "wanted the model to read and the file to write");
    const char *model = argv[optind], *path = argv[optind + 1];
    struct strata_error error = { 0 };
    struct gguf *gguf = NULL;
    double start = cli_seconds();
    cli_catch_interrupt();
    int code = gguf_open(&gguf, model, &error);
    if (!code)
        code = model_pack(gguf, path, (int)threads, quiet ? cli_silent_progress : cli_progress, "packing", &error);
    gguf_close(gguf);
    if (code)
        return cli_fail(&error);
    return quiet ? CLI_OK : done(model, path, cli_seconds() - start);
}
