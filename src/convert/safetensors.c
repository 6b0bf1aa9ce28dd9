#define _GNU_SOURCE /* asprintf */
#include "convert/safetensors.h"

#include "convert/json.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The format's own limit for its JSON header. */
enum { MAX_HEADER = 100000000 };

static int read_at(const struct safetensors_file *file, uint64_t start, void *out, uint64_t length, struct strata_error *error)
{
    uint8_t *to = out;
    while (length > 0) {
        ssize_t got = pread(file->fd, to, length < 1u << 30 ? (size_t)length : 1u << 30, (off_t)start);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return error_set(error, STRATA_E_IO, "%s: cannot read: %s", file->path, strerror(errno));
        if (got == 0)
            return error_set(error, STRATA_E_FORMAT, "%s ends at byte %" PRIu64 ", %" PRIu64 " more wanted", file->path, start,
                             length);
        to += got;
        start += (uint64_t)got;
        length -= (uint64_t)got;
    }
    return 0;
}

/* ---- One tensor of a header ------------------------------------------------------------------------------------------------- */

static int element_bytes(const char *dtype)
{
    static const struct {
        const char *name;
        int bytes;
    } types[] = {
        { "F32", 4 },  { "F16", 2 },     { "BF16", 2 },    { "F64", 8 },     { "I64", 8 }, { "U64", 8 },
        { "I32", 4 },  { "U32", 4 },     { "I16", 2 },     { "U16", 2 },     { "I8", 1 },  { "U8", 1 },
        { "BOOL", 1 }, { "F8_E4M3", 1 }, { "F8_E5M2", 1 }, { "F8_E8M0", 1 },
    };
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (strcmp(types[i].name, dtype) == 0)
            return types[i].bytes;
    return 0;
}

static int parse_shape(struct safetensor *t, const json_t *shape, const char *path, struct strata_error *error)
{
    if (!json_is_array(shape) || json_array_size(shape) > SAFETENSORS_MAX_DIMS)
        return error_set(error, STRATA_E_FORMAT, "%s: tensor %s has no list of at most %d sizes as its shape", path, t->name,
                         SAFETENSORS_MAX_DIMS);
    t->n_dims = (int)json_array_size(shape);
    t->n_elements = 1;
    for (int i = 0; i < t->n_dims; i++) {
        const json_t *size = json_array_get(shape, (size_t)i);
        t->dims[i] = json_is_integer(size) ? json_integer_value(size) : -1;
        if (t->dims[i] < 0 || __builtin_mul_overflow(t->n_elements, t->dims[i], &t->n_elements))
            return error_set(error, STRATA_E_FORMAT, "%s: tensor %s has a shape that no tensor can have", path, t->name);
    }
    return 0;
}

/* `data`: where the file's data section starts. */
static int parse_tensor(struct safetensor *t, const char *name, const json_t *info, const struct safetensors_file *file,
                        uint64_t data, struct strata_error *error)
{
    t->name = strdup(name);
    if (!t->name)
        return error_set(error, STRATA_E_MEMORY, "out of memory for the tensor names of %s", file->path);
    const char *dtype = json_string_value(json_object_get(info, "dtype"));
    int size = dtype ? element_bytes(dtype) : 0;
    if (!size)
        return error_set(error, STRATA_E_UNSUPPORTED, "%s: tensor %s has dtype %.15s, which is not known", file->path, name,
                         dtype ? dtype : "(none)");
    snprintf(t->dtype, sizeof t->dtype, "%s", dtype);
    const struct quant_format *format = quant_format_named(dtype);
    t->format = format && format->is_float ? format : NULL;
    int code = parse_shape(t, json_object_get(info, "shape"), file->path, error);
    if (code)
        return code;
    const json_t *range = json_object_get(info, "data_offsets");
    const json_t *begin = json_array_get(range, 0), *end = json_array_get(range, 1);
    int64_t from = json_is_integer(begin) ? json_integer_value(begin) : -1,
            to = json_is_integer(end) ? json_integer_value(end) : -1, bytes;
    if (json_array_size(range) != 2 || from < 0 || to < from)
        return error_set(error, STRATA_E_FORMAT, "%s: tensor %s has no pair of ascending data_offsets", file->path, name);
    if ((uint64_t)to > file->size - data)
        return error_set(error, STRATA_E_FORMAT,
                         "%s: tensor %s ends at byte %lld of a data section of %llu bytes; is the download complete?", file->path,
                         name, (long long)to, (unsigned long long)(file->size - data));
    if (__builtin_mul_overflow(t->n_elements, size, &bytes) || bytes != to - from)
        return error_set(error, STRATA_E_FORMAT, "%s: tensor %s has %lld bytes, its shape and dtype %s want %lld elements of %d",
                         file->path, name, (long long)(to - from), dtype, (long long)t->n_elements, size);
    t->offset = data + (uint64_t)from;
    t->bytes = (uint64_t)bytes;
    return 0;
}

/* ---- Files ------------------------------------------------------------------------------------------------------------------ */

static int read_header(const struct safetensors_file *file, json_t **out, uint64_t *data, struct strata_error *error)
{
    uint8_t length_bytes[8];
    uint64_t length = 0;
    if (file->size < 8)
        return error_set(error, STRATA_E_FORMAT, "%s: a file of %" PRIu64 " bytes is no safetensors file", file->path, file->size);
    int code = read_at(file, 0, length_bytes, 8, error);
    if (code)
        return code;
    for (int i = 7; i >= 0; i--)
        length = length << 8 | length_bytes[i];
    if (length > MAX_HEADER || length > file->size - 8)
        return error_set(error, STRATA_E_FORMAT, "%s: a header of %" PRIu64 " bytes, the file has %" PRIu64 " (at most %d allowed)",
                         file->path, length, file->size, MAX_HEADER);
    char *text = malloc((size_t)length + 1);
    if (!text)
        return error_set(error, STRATA_E_MEMORY, "out of memory for the header of %s", file->path);
    code = read_at(file, 8, text, length, error);
    if (!code)
        code = json_parse(out, text, (size_t)length, file->path, error);
    free(text);
    *data = 8 + length;
    return code;
}

static int read_table(struct safetensors *st, int file_index, struct strata_error *error)
{
    const struct safetensors_file *file = &st->files[file_index];
    json_t *header = NULL;
    uint64_t data;
    int code = read_header(file, &header, &data, error);
    if (code)
        return code;
    struct safetensor *more = realloc(st->tensors, (st->n_tensors + json_object_size(header) + 1) * sizeof *more);
    if (!more)
        code = error_set(error, STRATA_E_MEMORY, "out of memory for the tensor names of %s", file->path);
    else
        st->tensors = more;
    const char *name;
    json_t *info;
    if (!code)
        json_object_foreach(header, name, info)
        {
            if (strcmp(name, "__metadata__") == 0)
                continue;
            struct safetensor *t = &st->tensors[st->n_tensors++];
            *t = (struct safetensor){ .file = file_index };
            code = parse_tensor(t, name, info, file, data, error);
            if (code)
                break;
        }
    json_decref(header);
    return code;
}

static int open_file(struct safetensors *st, const char *directory, const char *name, struct strata_error *error)
{
    for (int i = 0; i < st->n_files; i++)
        if (strcmp(strrchr(st->files[i].path, '/') + 1, name) == 0)
            return 0;
    if (!*name || strchr(name, '/')) /* an index must not lead out of its directory */
        return error_set(error, STRATA_E_FORMAT, "%s: the index names the file '%.100s', wanted a plain file name", directory,
                         name);
    struct safetensors_file *more = realloc(st->files, ((size_t)st->n_files + 1) * sizeof *more);
    if (!more)
        return error_set(error, STRATA_E_MEMORY, "out of memory for %d file names", st->n_files + 1);
    st->files = more;
    struct safetensors_file *file = &st->files[st->n_files];
    *file = (struct safetensors_file){ .fd = -1 };
    if (asprintf(&file->path, "%s/%s", directory, name) < 0)
        return error_set(error, STRATA_E_MEMORY, "out of memory for a file name");
    st->n_files++;
    struct stat status;
    file->fd = open(file->path, O_RDONLY | O_CLOEXEC);
    if (file->fd < 0 || fstat(file->fd, &status) < 0)
        return error_set(error, STRATA_E_IO, "%s: cannot open: %s", file->path, strerror(errno));
    if (!S_ISREG(status.st_mode))
        return error_set(error, STRATA_E_IO, "%s: not a regular file", file->path);
    file->size = (uint64_t)status.st_size;
    return read_table(st, st->n_files - 1, error);
}

static int open_all(struct safetensors *st, const char *directory, json_t **index, struct strata_error *error)
{
    int code = json_read(index, directory, "model.safetensors.index.json", false, error);
    if (code)
        return code;
    if (!*index)
        return open_file(st, directory, "model.safetensors", error);
    const json_t *map = json_object_get(*index, "weight_map");
    if (!json_is_object(map))
        return error_set(error, STRATA_E_FORMAT, "%s/model.safetensors.index.json has no weight_map", directory);
    const char *tensor;
    json_t *file;
    json_object_foreach((json_t *)map, tensor, file)
    {
        if (!json_is_string(file))
            return error_set(error, STRATA_E_FORMAT, "%s/model.safetensors.index.json: %.200s has no file name", directory, tensor);
        if ((code = open_file(st, directory, json_string_value(file), error)) != 0)
            return code;
    }
    return 0;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct safetensor *)a)->name, ((const struct safetensor *)b)->name);
}

/* Sorts, and looks for a name in two files (in one file the JSON reader refuses it), and for names that only the index has. */
static int check_names(struct safetensors *st, const json_t *index, struct strata_error *error)
{
    qsort(st->tensors, st->n_tensors, sizeof *st->tensors, by_name);
    for (size_t i = 1; i < st->n_tensors; i++)
        if (strcmp(st->tensors[i - 1].name, st->tensors[i].name) == 0)
            return error_set(error, STRATA_E_FORMAT, "tensor %.150s is in %.150s and in %.150s", st->tensors[i].name,
                             st->files[st->tensors[i - 1].file].path, st->files[st->tensors[i].file].path);
    const char *name;
    json_t *file;
    json_object_foreach(json_object_get(index, "weight_map"), name, file)
    {
        const struct safetensor *t = safetensors_find(st, name);
        if (!t || strcmp(strrchr(st->files[t->file].path, '/') + 1, json_string_value(file)) != 0)
            return error_set(error, STRATA_E_FORMAT, "tensor %.200s is missing from %.200s, where the index has it", name,
                             json_string_value(file));
    }
    return 0;
}

int safetensors_open(struct safetensors **out, const char *directory, struct strata_error *error)
{
    *out = NULL;
    struct safetensors *st = calloc(1, sizeof *st);
    if (!st)
        return error_set(error, STRATA_E_MEMORY, "out of memory for a checkpoint");
    json_t *index = NULL;
    int code = open_all(st, directory, &index, error);
    if (!code)
        code = check_names(st, index, error);
    json_decref(index);
    if (code) {
        safetensors_close(st);
        return code;
    }
    *out = st;
    return 0;
}

void safetensors_close(struct safetensors *st)
{
    if (!st)
        return;
    for (size_t i = 0; i < st->n_tensors; i++)
        free(st->tensors[i].name);
    for (int i = 0; i < st->n_files; i++) {
        if (st->files[i].fd >= 0)
            close(st->files[i].fd);
        free(st->files[i].path);
    }
    free(st->tensors);
    free(st->files);
    free(st);
}

/* ---- Reading ---------------------------------------------------------------------------------------------------------------- */

struct safetensor *safetensors_find(const struct safetensors *st, const char *name)
{
    struct safetensor key = { .name = (char *)name };
    return st->n_tensors ? bsearch(&key, st->tensors, st->n_tensors, sizeof key, by_name) : NULL;
}

int safetensors_read_floats(const struct safetensors *st, const struct safetensor *t, int64_t first, int64_t n, float *out,
                            struct strata_error *error)
{
    size_t bytes = (size_t)n * (size_t)t->format->bytes;
    uint8_t *raw = malloc(bytes);
    if (!raw)
        return error_set(error, STRATA_E_MEMORY, "out of memory for %lld values of tensor %s", (long long)n, t->name);
    int code = read_at(&st->files[t->file], t->offset + (uint64_t)first * (uint64_t)t->format->bytes, raw, bytes, error);
    if (!code)
        quant_decode(t->format, raw, n, out);
    free(raw);
    return code;
}

int safetensors_read_i64(const struct safetensors *st, const struct safetensor *t, int64_t n, int64_t *out,
                         struct strata_error *error)
{
    if (strcmp(t->dtype, "I64") != 0 || t->n_elements != n)
        return error_set(error, STRATA_E_FORMAT, "%s: tensor %s has %lld elements of dtype %s, wanted %lld of I64",
                         st->files[t->file].path, t->name, (long long)t->n_elements, t->dtype, (long long)n);
    return read_at(&st->files[t->file], t->offset, out, (uint64_t)n * 8, error); /* little-endian, as the machine */
}
