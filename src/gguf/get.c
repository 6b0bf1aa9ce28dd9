/* get.c - what callers ask of an open file: keys, tensors, bytes. */
#include "gguf/private.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

const struct gguf_value *gguf_find(const struct gguf *gguf, const char *key)
{
    const struct gguf_memory *memory = gguf->memory;
    uint64_t i = gguf_names_find(memory->keys, gguf->n_entries, key);
    return i == UINT64_MAX ? NULL : &gguf->entries[i].value;
}

const struct gguf_tensor *gguf_tensor_find(const struct gguf *gguf, const char *name)
{
    const struct gguf_memory *memory = gguf->memory;
    uint64_t i = gguf_names_find(memory->tensors, gguf->n_tensors, name);
    return i == UINT64_MAX ? NULL : &gguf->tensors[i];
}

/* ---- Values ---------------------------------------------------------------------------------------------------------------- */

int gguf_value_u64(const struct gguf_value *value, const char *key, uint64_t i, uint64_t *out, struct strata_error *error)
{
    static const bool is_signed[GGUF_TYPE_COUNT] = { [GGUF_I8] = true, [GGUF_I16] = true, [GGUF_I32] = true, [GGUF_I64] = true };
    static const bool is_unsigned[GGUF_TYPE_COUNT] = { [GGUF_U8] = true, [GGUF_U16] = true, [GGUF_U32] = true, [GGUF_U64] = true };
    if (!is_signed[value->element] && !is_unsigned[value->element])
        return error_set(error, STRATA_E_FORMAT, "key '%s' holds %s, wanted an integer", key, gguf_type_names[value->element]);
    size_t bytes = gguf_type_bytes[value->element];
    uint64_t bits = 0;
    memcpy(&bits, (const uint8_t *)value->data + i * bytes, bytes);
    if (is_signed[value->element] && bits >> (8 * bytes - 1)) {
        int64_t negative = (int64_t)(bytes == 8 ? bits : bits | ~UINT64_C(0) << 8 * bytes);
        return error_set(error, STRATA_E_FORMAT, "key '%s' is %" PRId64 ", wanted 0 or more", key, negative);
    }
    *out = bits;
    return 0;
}

/* Finds a key that must be a scalar: 1 found, 0 absent, negative when it is an array. */
static int find_scalar(const struct gguf *gguf, const char *key, const char *wanted, const struct gguf_value **out,
                       struct strata_error *error)
{
    *out = gguf_find(gguf, key);
    if (!*out)
        return 0;
    if ((*out)->type == GGUF_ARRAY)
        return error_set(error, STRATA_E_FORMAT, "key '%s' is an array of %" PRIu64 " %s, wanted %s", key, (*out)->count,
                         gguf_type_names[(*out)->element], wanted);
    return 1;
}

static int wrong_type(const struct gguf_value *value, const char *key, const char *wanted, struct strata_error *error)
{
    return error_set(error, STRATA_E_FORMAT, "key '%s' holds %s, wanted %s", key, gguf_type_names[value->type], wanted);
}

/* Sentences of a model name its first file, where all its keys are. */
static int in_file(const struct gguf *gguf, int code, struct strata_error *error)
{
    return code < 0 ? error_prefix(error, code, "%s", gguf->files[0].path) : code;
}

static int get_u32(const struct gguf *gguf, const char *key, uint32_t *out, struct strata_error *error)
{
    const struct gguf_value *value;
    int found = find_scalar(gguf, key, "an integer", &value, error);
    if (found <= 0)
        return found;
    uint64_t wide;
    int code = gguf_value_u64(value, key, 0, &wide, error);
    if (code < 0)
        return code;
    if (wide > UINT32_MAX)
        return error_set(error, STRATA_E_FORMAT, "key '%s' is %" PRIu64 ", wanted at most %" PRIu32, key, wide, UINT32_MAX);
    *out = (uint32_t)wide;
    return 1;
}

static int get_f32(const struct gguf *gguf, const char *key, float *out, struct strata_error *error)
{
    const struct gguf_value *value;
    int found = find_scalar(gguf, key, "an f32", &value, error);
    if (found <= 0)
        return found;
    if (value->type == GGUF_F32) {
        memcpy(out, value->data, sizeof *out);
        return 1;
    }
    if (value->type != GGUF_F64)
        return wrong_type(value, key, "an f32", error);
    double wide;
    memcpy(&wide, value->data, sizeof wide);
    if (isfinite(wide) && !isfinite((float)wide))
        return error_set(error, STRATA_E_FORMAT, "key '%s' is %g, wanted a number that fits an f32", key, wide);
    *out = (float)wide;
    return 1;
}

static int get_bool(const struct gguf *gguf, const char *key, bool *out, struct strata_error *error)
{
    const struct gguf_value *value;
    int found = find_scalar(gguf, key, "a bool", &value, error);
    if (found <= 0)
        return found;
    if (value->type != GGUF_BOOL)
        return wrong_type(value, key, "a bool", error);
    *out = *(const uint8_t *)value->data != 0;
    return 1;
}

static int get_string(const struct gguf *gguf, const char *key, struct gguf_string *out, struct strata_error *error)
{
    const struct gguf_value *value;
    int found = find_scalar(gguf, key, "a string", &value, error);
    if (found <= 0)
        return found;
    if (value->type != GGUF_STRING)
        return wrong_type(value, key, "a string", error);
    *out = *(const struct gguf_string *)value->data;
    return 1;
}

int gguf_get_u32(const struct gguf *gguf, const char *key, uint32_t *out, struct strata_error *error)
{
    return in_file(gguf, get_u32(gguf, key, out, error), error);
}

int gguf_get_f32(const struct gguf *gguf, const char *key, float *out, struct strata_error *error)
{
    return in_file(gguf, get_f32(gguf, key, out, error), error);
}

int gguf_get_bool(const struct gguf *gguf, const char *key, bool *out, struct strata_error *error)
{
    return in_file(gguf, get_bool(gguf, key, out, error), error);
}

int gguf_get_string(const struct gguf *gguf, const char *key, struct gguf_string *out, struct strata_error *error)
{
    return in_file(gguf, get_string(gguf, key, out, error), error);
}

/* ---- Bytes ----------------------------------------------------------------------------------------------------------------- */

int gguf_read_at(int fd, uint64_t start, void *out, uint64_t length, struct strata_error *error)
{
    uint8_t *to = out;
    while (length > 0) {
        size_t piece = length < (UINT64_C(1) << 30) ? (size_t)length : (size_t)1 << 30; /* pread moves less than 2 GiB at once */
        ssize_t got = pread(fd, to, piece, (off_t)start);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return error_set(error, STRATA_E_IO, "cannot read %" PRIu64 " bytes at %" PRIu64 ": %s", length, start,
                             strerror(errno));
        if (got == 0)
            return error_set(error, STRATA_E_IO,
                             "the file became shorter while it was open: nothing at byte %" PRIu64 ", wanted %" PRIu64 " more",
                             start, length);
        to += got;
        start += (uint64_t)got;
        length -= (uint64_t)got;
    }
    return 0;
}

int gguf_read(const struct gguf *gguf, const struct gguf_tensor *tensor, uint64_t start, void *out, uint64_t length,
              struct strata_error *error)
{
    const struct gguf_file *file = &gguf->files[tensor->file];
    if (start > tensor->bytes || length > tensor->bytes - start)
        return error_set(error, STRATA_E_ARGUMENT, "%s: tensor '%s' has %" PRIu64 " bytes, asked for %" PRIu64 " at %" PRIu64,
                         file->path, gguf_show(tensor->name, strlen(tensor->name)).text, tensor->bytes, length, start);
    int code = gguf_read_at(file->fd, tensor->offset + start, out, length, error);
    return code < 0 ? error_prefix(error, code, "%s", file->path) : code;
}
