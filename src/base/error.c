#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void error_write(struct strata_error *error, int code, const char *format, ...)
{
    if (!error)
        return;
    va_list args;
    va_start(args, format);
    vsnprintf(error->text, sizeof error->text, format, args);
    va_end(args);
    error->code = code;
}

int error_prefix(struct strata_error *error, int code, const char *format, ...)
{
    if (!error)
        return code;
    char before[sizeof error->text], rest[sizeof error->text];
    va_list args;
    va_start(args, format);
    vsnprintf(before, sizeof before, format, args);
    va_end(args);
    memcpy(rest, error->text, sizeof rest);
    /* Both halves may be long: the prefix keeps at most half, so that the cause stays readable. */
    snprintf(error->text, sizeof error->text, "%.255s: %.254s", before, rest);
    return code;
}
