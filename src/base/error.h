/* error.h - how a function says what went wrong: a code for programs and a sentence for the person who must act. */
#ifndef BASE_ERROR_H
#define BASE_ERROR_H

#include <strata.h>

/* Writes the sentence (printf style) into `error` (may be NULL) and returns `code`, so that callers can
 * `return error_set(error, STRATA_E_FORMAT, "...")`. A later call replaces an earlier sentence. */
int error_set(struct strata_error *error, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Puts "prefix: " in front of the sentence that is already there; returns the code unchanged. */
int error_prefix(struct strata_error *error, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

#endif
