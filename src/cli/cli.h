/* cli.h - what the commands share. Only this room prints and exits: results go to stdout, everything else to stderr.
 *
 * Exit codes: 0 done, 1 it failed (one line on stderr, "strata: ..."), 2 wrong usage, 130 stopped by Ctrl-C.
 */
#ifndef CLI_CLI_H
#define CLI_CLI_H

#include "base/error.h"

#include <stdio.h>

int cli_run(int argc, char **argv);
int cli_info(int argc, char **argv);
int cli_bench(int argc, char **argv);
int cli_convert(int argc, char **argv);
int cli_quantize(int argc, char **argv);
int cli_synth(int argc, char **argv);
int cli_pack(int argc, char **argv);
int cli_sim(int argc, char **argv);

enum { CLI_OK = 0, CLI_FAILED = 1, CLI_USAGE = 2, CLI_STOPPED = 130 };

/* Prints "strata: " and the sentence; returns the exit code. */
int cli_fail(const struct strata_error *error);
/* Prints text of a file so that it cannot harm a terminal: control characters become spaces. */
void cli_print_text(FILE *out, const char *text, size_t length);
/* Prints the sentence and where help is; returns CLI_USAGE. */
int cli_usage(const char *command, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Numbers from the command line: the whole text, in [min, max]. False (and a usage line) if not. */
bool cli_integer(const char *command, const char *option, const char *text, long long min, long long max, long long *out);
bool cli_number(const char *command, const char *option, const char *text, double min, double max, double *out);
/* Bytes: "4M", "1.5G", "512Ki"; decimal prefixes, binary with an i. */
bool cli_size(const char *command, const char *option, const char *text, double *out);

/* Ctrl-C sets a flag once; the second time it ends the program at once. */
void cli_catch_interrupt(void);
bool cli_interrupted(void);

/* A progress bar on stderr if that is a terminal, else nothing. `label` is what is being done. Returns false after Ctrl-C. Suits the
 * callbacks of strata.h: `context` is the label. */
bool cli_progress(void *context, double part);
/* The same without the bar: only notices Ctrl-C. */
bool cli_silent_progress(void *context, double part);

double cli_seconds(void);                /* a monotonic clock */
double cli_peak_memory_mb(void);         /* of this process, MB (10^6 bytes) */
/* "1.4 GB" */
const char *cli_bytes(char out[32], double bytes);

#endif
