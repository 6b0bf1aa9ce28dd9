/* json.h - inside convert/ only: JSON files as hostile input, with sentences. */
#ifndef CONVERT_JSON_H
#define CONVERT_JSON_H

#include "base/error.h"

#include <jansson.h>

/* Parses an object; a key that occurs twice is an error. `where` is named in sentences. The caller calls json_decref. */
int json_parse(json_t **out, const char *text, size_t length, const char *where, struct strata_error *error);
/* The same for directory/name. A missing file is an error if `required`, else *out is NULL. */
int json_read(json_t **out, const char *directory, const char *name, bool required, struct strata_error *error);

#endif
