/* writer.c - writes a GGUF file (version 3): keys and tensor infos are collected in memory, tensor data is streamed.
 *
 * The bytes go to a temporary file beside the final one, which is renamed at the very end. The first error sticks: every later
 * call that can report one reports it again, so a caller may check as late as it likes and never gets a broken file. */
#include "gguf/private.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct bytes {
    uint8_t *data;
    uint64_t size, capacity;
};

struct tensor_plan {
    char name[GGUF_MAX_NAME];
    uint32_t type;
    int n_dims;
    int64_t dims[GGUF_MAX_DIMS];
    uint64_t bytes;
};

enum stage { COLLECTING, STREAMING, FINISHED };

struct gguf_writer {
    char *path, *temporary;
    int fd;
    enum stage stage;
    struct strata_error error; /* the first one; code 0: none */

    uint64_t alignment;
    struct bytes entries; /* as they go into the file */
    uint64_t n_entries, keys_capacity;
    struct gguf_name *keys; /* [n_entries]: position = offset of the key's bytes in `entries` */
    uint64_t n_tensors, tensors_capacity;
    struct tensor_plan *tensors;

    uint64_t current, written; /* tensor being streamed, bytes of it so far */
};

static void remember(struct gguf_writer *writer, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void remember(struct gguf_writer *writer, int code, const char *format, ...)
{
    if (writer->error.code)
        return;
    va_list args;
    va_start(args, format);
    vsnprintf(writer->error.text, sizeof writer->error.text, format, args);
    va_end(args);
    error_prefix(&writer->error, code, "%s", writer->path);
    writer->error.code = code;
}

static int report(const struct gguf_writer *writer, struct strata_error *error)
{
    if (error && writer->error.code)
        *error = writer->error;
    return writer->error.code;
}

/* Room for `wanted` items in the list whose pointer is at `list`; false when there is no memory. */
static bool grow(void *list, uint64_t *capacity, uint64_t wanted, size_t item)
{
    if (wanted <= *capacity)
        return true;
    uint64_t next = *capacity ? *capacity * 2 : 64;
    while (next < wanted)
        next *= 2;
    void *old, *new;
    memcpy(&old, list, sizeof old);
    size_t size;
    if (__builtin_mul_overflow(next, item, &size) || !(new = realloc(old, size)))
        return false;
    memcpy(list, &new, sizeof new);
    *capacity = next;
    return true;
}

static void append(struct gguf_writer *writer, struct bytes *bytes, const void *data, uint64_t length)
{
    if (writer->error.code || length == 0)
        return;
    uint64_t wanted;
    if (__builtin_add_overflow(bytes->size, length, &wanted) || wanted > PTRDIFF_MAX / 2 ||
        !grow(&bytes->data, &bytes->capacity, wanted, 1)) {
        remember(writer, STRATA_E_MEMORY, "out of memory for a header of %" PRIu64 " bytes and %" PRIu64 " more", bytes->size,
                 length);
        return;
    }
    memcpy(bytes->data + bytes->size, data, length);
    bytes->size += length;
}

static void append_u32(struct gguf_writer *writer, struct bytes *bytes, uint32_t value)
{
    append(writer, bytes, &value, sizeof value);
}
static void append_u64(struct gguf_writer *writer, struct bytes *bytes, uint64_t value)
{
    append(writer, bytes, &value, sizeof value);
}

static void append_string(struct gguf_writer *writer, struct bytes *bytes, const char *data, uint64_t length)
{
    append_u64(writer, bytes, length);
    append(writer, bytes, data, length);
}

/* ---- Collecting ------------------------------------------------------------------------------------------------------------ */

/* True if more keys and tensors may be put. */
static bool collecting(struct gguf_writer *writer, const char *name)
{
    if (writer->stage != COLLECTING)
        remember(writer, STRATA_E_ARGUMENT, "'%s' was put after the header was written", name);
    return writer->error.code == 0;
}

static void put(struct gguf_writer *writer, struct gguf_string key, const struct gguf_value *value)
{
    struct gguf_shown shown = gguf_show(key.data, key.length);
    if (!collecting(writer, shown.text))
        return;
    if (key.length == 0) {
        remember(writer, STRATA_E_ARGUMENT, "an empty key was put, wanted a name");
        return;
    }
    if ((int)value->element >= GGUF_TYPE_COUNT || value->element == GGUF_ARRAY) {
        remember(writer, STRATA_E_ARGUMENT, "key '%s': element type %d, wanted a scalar or string", shown.text,
                 (int)value->element);
        return;
    }
    if (key.length == strlen("general.alignment") && memcmp(key.data, "general.alignment", key.length) == 0) {
        uint32_t alignment = 0;
        if (value->type == GGUF_U32)
            memcpy(&alignment, value->data, sizeof alignment);
        if (alignment == 0 || (alignment & (alignment - 1)) != 0) {
            remember(writer, STRATA_E_ARGUMENT, "key 'general.alignment' must be a u32 and a power of two");
            return;
        }
        writer->alignment = alignment;
    }
    if (!grow(&writer->keys, &writer->keys_capacity, writer->n_entries + 1, sizeof *writer->keys)) {
        remember(writer, STRATA_E_MEMORY, "out of memory for %" PRIu64 " keys", writer->n_entries + 1);
        return;
    }
    struct bytes *bytes = &writer->entries;
    append_u64(writer, bytes, key.length);
    writer->keys[writer->n_entries++] = (struct gguf_name){ { NULL, key.length }, bytes->size };
    append(writer, bytes, key.data, key.length);
    append_u32(writer, bytes, value->type);
    if (value->type == GGUF_ARRAY) {
        append_u32(writer, bytes, value->element);
        append_u64(writer, bytes, value->count);
    }
    if (value->element == GGUF_STRING) {
        const struct gguf_string *strings = value->data;
        for (uint64_t i = 0; i < value->count; i++)
            append_string(writer, bytes, strings[i].data, strings[i].length);
        return;
    }
    uint64_t length;
    if (__builtin_mul_overflow(value->count, (uint64_t)gguf_type_bytes[value->element], &length))
        remember(writer, STRATA_E_ARGUMENT, "key '%s': %" PRIu64 " elements are more than a file can hold", shown.text,
                 value->count);
    else
        append(writer, bytes, value->data, length);
}

static void put_scalar(struct gguf_writer *writer, const char *key, enum gguf_type type, const void *data)
{
    put(writer, (struct gguf_string){ key, strlen(key) }, &(struct gguf_value){ type, type, 1, data });
}

void gguf_put_u32(struct gguf_writer *writer, const char *key, uint32_t value) { put_scalar(writer, key, GGUF_U32, &value); }
void gguf_put_u64(struct gguf_writer *writer, const char *key, uint64_t value) { put_scalar(writer, key, GGUF_U64, &value); }
void gguf_put_i32(struct gguf_writer *writer, const char *key, int32_t value) { put_scalar(writer, key, GGUF_I32, &value); }
void gguf_put_f32(struct gguf_writer *writer, const char *key, float value) { put_scalar(writer, key, GGUF_F32, &value); }
void gguf_put_bool(struct gguf_writer *writer, const char *key, bool value)
{
    put_scalar(writer, key, GGUF_BOOL, &(uint8_t){ value });
}

void gguf_put_string(struct gguf_writer *writer, const char *key, const char *value)
{
    gguf_put_string_n(writer, key, value, strlen(value));
}

void gguf_put_string_n(struct gguf_writer *writer, const char *key, const char *value, size_t length)
{
    put_scalar(writer, key, GGUF_STRING, &(struct gguf_string){ value, length });
}

void gguf_put_array(struct gguf_writer *writer, const char *key, enum gguf_type element, const void *data, uint64_t count)
{
    put(writer, (struct gguf_string){ key, strlen(key) }, &(struct gguf_value){ GGUF_ARRAY, element, count, data });
}

void gguf_put_string_array(struct gguf_writer *writer, const char *key, const struct gguf_string *strings, uint64_t count)
{
    gguf_put_array(writer, key, GGUF_STRING, strings, count);
}

void gguf_put_entry(struct gguf_writer *writer, const struct gguf_entry *entry) { put(writer, entry->key, &entry->value); }

void gguf_put_tensor(struct gguf_writer *writer, const char *name, const struct quant_format *format, int n_dims,
                     const int64_t *dims)
{
    size_t length = strlen(name);
    struct gguf_shown shown = gguf_show(name, length);
    if (!collecting(writer, shown.text))
        return;
    if (length == 0 || length >= GGUF_MAX_NAME) {
        remember(writer, STRATA_E_ARGUMENT, "tensor '%s': the name has %zu bytes, wanted 1 to %d", shown.text, length,
                 GGUF_MAX_NAME - 1);
        return;
    }
    if (n_dims < 1 || n_dims > GGUF_MAX_DIMS) {
        remember(writer, STRATA_E_ARGUMENT, "tensor '%s': %d dimensions, wanted 1 to %d", shown.text, n_dims, GGUF_MAX_DIMS);
        return;
    }
    struct tensor_plan plan = { .type = format->type, .n_dims = n_dims };
    memcpy(plan.name, name, length);
    int64_t weights = 1;
    bool overflow = false;
    for (int i = 0; i < n_dims; i++) {
        if (dims[i] < 1) {
            remember(writer, STRATA_E_ARGUMENT, "tensor '%s': dimension %d is %" PRId64 ", wanted at least 1", shown.text, i,
                     dims[i]);
            return;
        }
        plan.dims[i] = dims[i];
        overflow |= __builtin_mul_overflow(weights, dims[i], &weights);
    }
    if (dims[0] % format->block != 0) {
        remember(writer, STRATA_E_ARGUMENT, "tensor '%s': row width %" PRId64 " is not a multiple of %d, the block of %s",
                 shown.text, dims[0], format->block, format->name);
        return;
    }
    /* Far above any disk; below 2^56 the sum of two sizes cannot overflow, and build_header checks the sum of all in steps. */
    if (overflow || __builtin_mul_overflow((uint64_t)(weights / format->block), (uint64_t)format->bytes, &plan.bytes) ||
        plan.bytes >> 56) {
        remember(writer, STRATA_E_ARGUMENT, "tensor '%s' is larger than a file can be", shown.text);
        return;
    }
    if (!grow(&writer->tensors, &writer->tensors_capacity, writer->n_tensors + 1, sizeof *writer->tensors)) {
        remember(writer, STRATA_E_MEMORY, "out of memory for %" PRIu64 " tensors", writer->n_tensors + 1);
        return;
    }
    writer->tensors[writer->n_tensors++] = plan;
}

/* ---- The file -------------------------------------------------------------------------------------------------------------- */

static void write_all(struct gguf_writer *writer, const void *data, uint64_t length)
{
    const uint8_t *from = data;
    while (length > 0 && writer->error.code == 0) {
        size_t piece = length < (UINT64_C(1) << 30) ? (size_t)length : (size_t)1 << 30;
        ssize_t put_bytes = write(writer->fd, from, piece);
        if (put_bytes < 0 && errno == EINTR)
            continue;
        if (put_bytes < 0) {
            remember(writer, STRATA_E_IO, "cannot write %" PRIu64 " bytes: %s", length, strerror(errno));
            return;
        }
        from += put_bytes;
        length -= (uint64_t)put_bytes;
    }
}

/* Zeros from `position` (of anything that starts aligned) to the next multiple of the alignment. */
static void write_padding(struct gguf_writer *writer, uint64_t position)
{
    static const uint8_t zeros[4096];
    uint64_t left = gguf_pad(position, writer->alignment) - position;
    while (left > 0 && writer->error.code == 0) {
        uint64_t piece = left < sizeof zeros ? left : sizeof zeros;
        write_all(writer, zeros, piece);
        left -= piece;
    }
}

static int open_temporary(struct gguf_writer *writer, const char *path, struct strata_error *error)
{
    struct stat status;
    if (stat(path, &status) == 0 && !S_ISREG(status.st_mode)) /* renaming over /dev/null would replace it */
        return error_set(error, STRATA_E_ARGUMENT, "%s: this is %s, wanted the name of a file to write", path,
                         S_ISDIR(status.st_mode) ? "a directory" : "not a regular file");
    size_t size = strlen(path) + 40;
    writer->path = strdup(path);
    writer->temporary = malloc(size);
    if (!writer->path || !writer->temporary)
        return error_set(error, STRATA_E_MEMORY, "out of memory for a writer");
    for (int attempt = 0; attempt < 100 && writer->fd < 0; attempt++) { /* two writers of one process must not meet */
        snprintf(writer->temporary, size, "%s.%ld-%d.part", path, (long)getpid(), attempt);
        writer->fd = open(writer->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (writer->fd < 0 && errno != EEXIST)
            break;
    }
    if (writer->fd < 0)
        return error_set(error, STRATA_E_IO, "%s: cannot create: %s", writer->temporary, strerror(errno));
    return 0;
}

int gguf_writer_create(struct gguf_writer **out, const char *path, struct strata_error *error)
{
    *out = NULL;
    struct gguf_writer *writer = calloc(1, sizeof *writer);
    if (!writer)
        return error_set(error, STRATA_E_MEMORY, "out of memory for a writer");
    writer->fd = -1;
    writer->alignment = GGUF_DEFAULT_ALIGNMENT;
    int code = open_temporary(writer, path, error);
    if (code < 0) {
        gguf_writer_destroy(writer);
        return code;
    }
    *out = writer;
    return 0;
}

void gguf_writer_destroy(struct gguf_writer *writer)
{
    if (!writer)
        return;
    if (writer->fd >= 0) {
        close(writer->fd);
        unlink(writer->temporary);
    }
    free(writer->path);
    free(writer->temporary);
    free(writer->entries.data);
    free(writer->keys);
    free(writer->tensors);
    free(writer);
}

/* Duplicates are looked for here, once, because sorting all names is cheaper than searching at every put. */
static void check_names(struct gguf_writer *writer)
{
    for (uint64_t i = 0; i < writer->n_entries; i++)
        writer->keys[i].string.data = (const char *)writer->entries.data + writer->keys[i].position;
    const struct gguf_name *twice = gguf_names_sort(writer->keys, writer->n_entries);
    if (twice) {
        remember(writer, STRATA_E_ARGUMENT, "key '%s' was put twice", gguf_show(twice->string.data, twice->string.length).text);
        return;
    }
    struct gguf_name *names = calloc(writer->n_tensors + 1, sizeof *names);
    if (!names) {
        remember(writer, STRATA_E_MEMORY, "out of memory for %" PRIu64 " tensors", writer->n_tensors);
        return;
    }
    for (uint64_t i = 0; i < writer->n_tensors; i++)
        names[i] = (struct gguf_name){ { writer->tensors[i].name, strlen(writer->tensors[i].name) }, i };
    twice = gguf_names_sort(names, writer->n_tensors);
    if (twice)
        remember(writer, STRATA_E_ARGUMENT, "tensor '%s' was put twice", gguf_show(twice->string.data, twice->string.length).text);
    free(names);
}

/* Everything before the data: head, entries, tensor infos. */
static void build_header(struct gguf_writer *writer, struct bytes *header)
{
    append(writer, header, "GGUF", 4);
    append_u32(writer, header, 3);
    append_u64(writer, header, writer->n_tensors);
    append_u64(writer, header, writer->n_entries);
    append(writer, header, writer->entries.data, writer->entries.size);
    uint64_t offset = 0;
    for (uint64_t i = 0; i < writer->n_tensors && writer->error.code == 0; i++) {
        const struct tensor_plan *plan = &writer->tensors[i];
        append_string(writer, header, plan->name, strlen(plan->name));
        append_u32(writer, header, (uint32_t)plan->n_dims);
        append(writer, header, plan->dims, (uint64_t)plan->n_dims * sizeof plan->dims[0]);
        append_u32(writer, header, plan->type);
        append_u64(writer, header, offset);
        offset = gguf_pad(offset + plan->bytes, writer->alignment);
        if (offset >> 56)
            remember(writer, STRATA_E_ARGUMENT, "the tensors up to '%s' are larger than a file can be", plan->name);
    }
}

int gguf_writer_begin_data(struct gguf_writer *writer, struct strata_error *error)
{
    if (writer->stage != COLLECTING)
        remember(writer, STRATA_E_ARGUMENT, "the header was written twice");
    if (writer->error.code == 0)
        check_names(writer);
    struct bytes header = { 0 };
    build_header(writer, &header);
    write_all(writer, header.data, header.size);
    write_padding(writer, header.size);
    free(header.data);
    writer->stage = STREAMING;
    return report(writer, error);
}

int gguf_write(struct gguf_writer *writer, const void *data, uint64_t length, struct strata_error *error)
{
    if (writer->stage != STREAMING)
        remember(writer, STRATA_E_ARGUMENT, "tensor data came %s",
                 writer->stage == COLLECTING ? "before the header was written" : "after the end");
    if (writer->error.code || length == 0)
        return report(writer, error);
    if (writer->current == writer->n_tensors) {
        remember(writer, STRATA_E_ARGUMENT, "%" PRIu64 " more bytes after the last tensor", length);
        return report(writer, error);
    }
    const struct tensor_plan *plan = &writer->tensors[writer->current];
    if (length > plan->bytes - writer->written)
        remember(writer, STRATA_E_ARGUMENT,
                 "tensor '%s' has %" PRIu64 " bytes, of which %" PRIu64 " are left, but %" PRIu64 " came", plan->name, plan->bytes,
                 plan->bytes - writer->written, length);
    write_all(writer, data, length);
    writer->written += length;
    if (writer->written == plan->bytes) {
        write_padding(writer, plan->bytes);
        writer->current++;
        writer->written = 0;
    }
    return report(writer, error);
}

/* Makes the rename itself durable. A file system that cannot sync a directory has still got the file. */
static void sync_directory(const char *path)
{
    const char *slash = strrchr(path, '/');
    char *directory = slash == path ? strdup("/") : slash ? strndup(path, (size_t)(slash - path)) : strdup(".");
    int fd = directory ? open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    free(directory);
    if (fd >= 0) {
        fsync(fd);
        close(fd);
    }
}

int gguf_writer_finish(struct gguf_writer *writer, struct strata_error *error)
{
    if (writer->stage != STREAMING)
        remember(writer, STRATA_E_ARGUMENT, "the file was finished %s",
                 writer->stage == COLLECTING ? "before its header was written" : "twice");
    if (writer->error.code == 0 && writer->current < writer->n_tensors)
        remember(writer, STRATA_E_ARGUMENT, "tensor '%s' is not complete: %" PRIu64 " of %" PRIu64 " bytes came",
                 writer->tensors[writer->current].name, writer->written, writer->tensors[writer->current].bytes);
    if (writer->error.code == 0 && fsync(writer->fd) < 0)
        remember(writer, STRATA_E_IO, "cannot flush to disk: %s", strerror(errno));
    if (writer->error.code == 0 && rename(writer->temporary, writer->path) < 0)
        remember(writer, STRATA_E_IO, "cannot rename %s to this name: %s", writer->temporary, strerror(errno));
    if (writer->error.code)
        return report(writer, error);
    close(writer->fd);
    writer->fd = -1; /* nothing left to remove */
    writer->stage = FINISHED;
    sync_directory(writer->path);
    return 0;
}
