#include "cli/cli.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

int cli_fail(const struct strata_error *error)
{
    if (error->code == STRATA_E_STOPPED)
        return CLI_STOPPED;
    fputs("strata: ", stderr); /* the sentence may quote a file */
    cli_print_text(stderr, error->text, strlen(error->text));
    fputc('\n', stderr);
    return CLI_FAILED;
}

void cli_print_text(FILE *out, const char *text, size_t length)
{
    for (size_t i = 0; i < length; i++) {
        unsigned char c = (unsigned char)text[i], next = i + 1 < length ? (unsigned char)text[i + 1] : 0;
        bool wide = c == 0xc2 && next >= 0x80 && next < 0xa0; /* U+0080 to U+009F in UTF-8: some terminals obey them */
        putc(c < 32 || c == 127 || wide ? ' ' : c, out);
        i += wide;
    }
}

int cli_usage(const char *command, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "strata: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\nTry 'strata%s%s --help'.\n", *command ? " " : "", command);
    va_end(args);
    return CLI_USAGE;
}

bool cli_integer(const char *command, const char *option, const char *text, long long min, long long max, long long *out)
{
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (errno || end == text || *end || value < min || value > max) {
        cli_usage(command, "%s %s: wanted a whole number from %lld to %lld", option, text, min, max);
        return false;
    }
    *out = value;
    return true;
}

bool cli_number(const char *command, const char *option, const char *text, double min, double max, double *out)
{
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end || !(value >= min && value <= max)) {
        cli_usage(command, "%s %s: wanted a number from %g to %g", option, text, min, max);
        return false;
    }
    *out = value;
    return true;
}

bool cli_size(const char *command, const char *option, const char *text, double *out)
{
    char *end;
    double value = strtod(text, &end);
    bool ok = end != text && value >= 0;
    static const char prefixes[] = "KMGT";
    const char *prefix = *end ? strchr(prefixes, *end == 'k' ? 'K' : *end) : NULL;
    if (ok && prefix) {
        double base = end[1] == 'i' ? 1024 : 1000;
        end += end[1] == 'i' ? 2 : 1;
        for (const char *p = prefixes; p <= prefix; p++)
            value *= base;
    }
    if (*end == 'B')
        end++;
    if (!ok || *end || !(value <= 1e15)) {
        cli_usage(command, "%s %s: wanted a size such as 4M, 1.5G or 512Ki", option, text);
        return false;
    }
    *out = value;
    return true;
}

static volatile sig_atomic_t interrupted;

static void on_interrupt(int signal)
{
    (void)signal;
    if (interrupted)
        _exit(CLI_STOPPED);
    interrupted = 1;
}

void cli_catch_interrupt(void)
{
    struct sigaction action = { .sa_handler = on_interrupt };
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

bool cli_interrupted(void) { return interrupted; }

bool cli_progress(void *context, double part)
{
    enum { WIDTH = 30 };
    static int shown = -1;
    int percent = (int)(part * 100);
    if (isatty(STDERR_FILENO) && percent != shown) {
        shown = percent;
        int filled = (int)(part * WIDTH);
        fprintf(stderr, "\r%s [%.*s%.*s] %3d %%", (const char *)context, filled, "##############################", WIDTH - filled,
                "..............................", percent);
        if (part >= 1) {
            fprintf(stderr, "\r\033[K");
            shown = -1;
        }
        fflush(stderr);
    }
    return !interrupted;
}

bool cli_silent_progress(void *context, double part)
{
    (void)context;
    (void)part;
    return !interrupted;
}

double cli_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

double cli_peak_memory_mb(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)usage.ru_maxrss * 1024 / 1e6;
}

const char *cli_bytes(char out[32], double bytes)
{
    static const char *const units[] = { "B", "KB", "MB", "GB", "TB" };
    int unit = 0;
    for (; bytes >= 1000 && unit < 4; unit++)
        bytes /= 1000;
    snprintf(out, 32, unit ? "%.1f %s" : "%.0f %s", bytes, units[unit]);
    return out;
}
