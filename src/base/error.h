/* error.h - how a function says what went wrong: a code for programs and a sentence for the person who must act. */
#ifndef BASE_ERROR_H
#define BASE_ERROR_H

#include <strata.h>

/* Writes the sentence (printf style) into `error` (may be NULL; a later call replaces an earlier sentence) and has the value `code`, so that
 * callers can `return error_set(error, STRATA_E_FORMAT, "...")`. A macro, so that the compiler sees which value is returned. */
#define error_set(error, code, ...) (error_write((error), (code), __VA_ARGS__), (code))
void error_write(struct strata_error *error, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Puts "prefix: " in front of the sentence that is already there; returns the code unchanged. */
int error_prefix(struct strata_error *error, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

#endif
