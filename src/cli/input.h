/* input.h - a prompt from an option, a file or stdin. */
#ifndef CLI_INPUT_H
#define CLI_INPUT_H

#include "base/error.h"

/* `text` if given, else the file, else stdin. A malloc'd copy, zero-terminated. */
int input_text(const char *text, const char *file, char **out, size_t *length, struct strata_error *error);

#endif
