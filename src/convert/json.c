#define _GNU_SOURCE /* asprintf */
#include "convert/json.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FLAGS = JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL };

static int check(json_t *json, const json_error_t *bad, const char *where, struct strata_error *error)
{
    if (!json)
        return error_set(error, STRATA_E_FORMAT, "%s: not valid JSON at line %d, column %d: %s", where, bad->line, bad->column,
                         bad->text);
    if (json_is_object(json))
        return 0;
    json_decref(json);
    return error_set(error, STRATA_E_FORMAT, "%s: the JSON text is not an object", where);
}

int json_parse(json_t **out, const char *text, size_t length, const char *where, struct strata_error *error)
{
    json_error_t bad;
    json_t *json = json_loadb(text, length, FLAGS, &bad);
    int code = check(json, &bad, where, error);
    *out = code ? NULL : json;
    return code;
}

int json_read(json_t **out, const char *directory, const char *name, bool required, struct strata_error *error)
{
    *out = NULL;
    char *path = NULL;
    if (asprintf(&path, "%s/%s", directory, name) < 0)
        return error_set(error, STRATA_E_MEMORY, "out of memory for a file name");
    int code = 0;
    FILE *file = fopen(path, "rb");
    if (!file) {
        if (required || errno != ENOENT)
            code = error_set(error, STRATA_E_IO, "%s: cannot open: %s", path, strerror(errno));
    } else {
        json_error_t bad;
        json_t *json = json_loadf(file, FLAGS, &bad);
        code = check(json, &bad, path, error);
        *out = code ? NULL : json;
        fclose(file);
    }
    free(path);
    return code;
}
