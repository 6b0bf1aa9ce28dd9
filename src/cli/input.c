#include "cli/input.h"

#include "cli/cli.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_INPUT = 64 << 20 };

int input_text(const char *text, const char *file, char **out, size_t *length, struct strata_error *error)
{
    if (text) {
        *length = strlen(text);
        *out = strdup(text);
        return *out ? 0 : error_set(error, STRATA_E_MEMORY, "out of memory for the prompt");
    }
    FILE *in = file ? fopen(file, "rb") : stdin;
    if (!in)
        return error_set(error, STRATA_E_IO, "cannot read %s: %s", file, strerror(errno));
    size_t used = 0, capacity = 1 << 16;
    char *data = malloc(capacity + 1);
    while (data) {
        used += fread(data + used, 1, capacity - used, in);
        if (used < capacity || used >= MAX_INPUT)
            break;
        char *more = realloc(data, 2 * capacity + 1);
        if (!more)
            free(data);
        data = more;
        capacity *= 2;
    }
    int code = 0;
    if (!data)
        code = error_set(error, STRATA_E_MEMORY, "out of memory for the prompt");
    else if (cli_interrupted())
        code = error_set(error, STRATA_E_STOPPED, "stopped");
    else if (ferror(in))
        code = error_set(error, STRATA_E_IO, "cannot read %s: %s", file ? file : "the prompt from stdin", strerror(errno));
    else if (used >= MAX_INPUT)
        code = error_set(error, STRATA_E_ARGUMENT, "the prompt is longer than %d MB", MAX_INPUT >> 20);
    if (file)
        fclose(in);
    if (code) {
        free(data);
        return code;
    }
    data[used] = 0;
    *out = data;
    *length = used;
    return 0;
}
