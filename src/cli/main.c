#include "cli/cli.h"

#include <errno.h>
#include <fcntl.h>
#include <locale.h>
#include <string.h>

static const struct { const char *name; int (*main)(int, char **); const char *summary; } commands[] = {
    { "run", cli_run, "write text with a model" },
    { "info", cli_info, "show what is in a model file, and whether it runs" },
    { "bench", cli_bench, "measure prompt and decoding speed" },
    { "convert", cli_convert, "make a GGUF file from a Hugging Face checkpoint" },
    { "quantize", cli_quantize, "re-encode a GGUF file in other types" },
    { "synth", cli_synth, "write a model of real shapes with random weights" },
    { "pack", cli_pack, "write the experts in their tiled form, for faster starts" },
    { "sim", cli_sim, "replay a trace through expert cache policies and sizes" },
};

static void print_help(FILE *out)
{
    fprintf(out, "Strata runs huge sparse mixture-of-experts language models on one PC.\n\nUsage: strata COMMAND [OPTIONS]\n\nCommands:\n");
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        fprintf(out, "  %-10s %s\n", commands[i].name, commands[i].summary);
    fprintf(out, "\n'strata COMMAND --help' explains a command.\nExit codes: 0 done, 1 failed, 2 wrong usage, 130 stopped by Ctrl-C.\n");
}

/* A program started with stdin, stdout or stderr closed would get its next file in that place, and print into it. A file that cannot be
 * used that way takes the place: what is printed then fails, as it should. */
static void fill_closed_places(void)
{
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0)
            open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY);
}

/* Results that did not arrive (a full disk) are a failure, whatever the command says. */
static int finish(int code)
{
    if ((fflush(stdout) || ferror(stdout)) && code == CLI_OK) {
        struct strata_error error;
        return error_set(&error, STRATA_E_IO, "cannot write the output: %s", strerror(errno)) ? cli_fail(&error) : code;
    }
    return code;
}

int main(int argc, char **argv)
{
    fill_closed_places();
    setlocale(LC_CTYPE, "");
    if (argc < 2) {
        print_help(stderr);
        return CLI_USAGE;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || !strcmp(argv[1], "help")) {
        print_help(stdout);
        return finish(CLI_OK);
    }
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        if (!strcmp(argv[1], commands[i].name))
            return finish(commands[i].main(argc - 1, argv + 1));
    return cli_usage("", "'%s' is not a command", argv[1]);
}
