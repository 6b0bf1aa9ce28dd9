/* gguf.h - the GGUF container: metadata and tensor table of one model, possibly split over several files.
 *
 * Owns the open files and the parsed header. It never interprets a model: it knows keys, types and byte ranges, not layers. The
 * invariant: after gguf_open succeeded, every tensor's bytes lie inside its file, every string is NUL-terminated inside the
 * parsed header, and every element count was checked against the file's size. Files are hostile until then.
 *
 * Format: spec/model.md section 5; versions 2 and 3, little-endian.
 */
#ifndef GGUF_GGUF_H
#define GGUF_GGUF_H

#include "quant/quant.h"

enum gguf_type {
    GGUF_U8, GGUF_I8, GGUF_U16, GGUF_I16, GGUF_U32, GGUF_I32, GGUF_F32, GGUF_BOOL, GGUF_STRING, GGUF_ARRAY, GGUF_U64, GGUF_I64, GGUF_F64,
};

enum { GGUF_MAX_DIMS = 4, GGUF_MAX_NAME = 64 };

struct gguf_string { const char *data; uint64_t length; }; /* data[length] == 0; may hold other zeros */

struct gguf_value {
    enum gguf_type type;         /* GGUF_ARRAY: element type in `element` */
    enum gguf_type element;
    uint64_t count;              /* 1 for scalars */
    const void *data;            /* packed little-endian scalars, not aligned; for strings: struct gguf_string[count] */
};

struct gguf_entry { struct gguf_string key; struct gguf_value value; };

struct gguf_tensor {
    const char *name;
    uint32_t type;               /* ggml id; always one that quant_type_name knows */
    const struct quant_format *format; /* NULL if Strata cannot decode the type (gguf_open succeeds: `info` shows it) */
    int n_dims;
    int64_t dims[GGUF_MAX_DIMS]; /* ne0 (row width) first; unused ones are 1 */
    int file;                    /* index into gguf->files */
    uint64_t offset;             /* absolute, in that file */
    uint64_t bytes;
};

struct gguf_file { char *path; int fd; uint64_t size; };

struct gguf {
    uint32_t version;
    uint64_t alignment;
    uint64_t n_entries; struct gguf_entry *entries;
    uint64_t n_tensors; struct gguf_tensor *tensors;
    int n_files; struct gguf_file *files;
    void *memory;                /* private */
};

/* Opens a model: one file, or the first file of a split model (its siblings are found by name). Errors name the file, what was found
 * and what was wanted. gguf_close(NULL) is allowed. */
int gguf_open(struct gguf **out, const char *path, struct strata_error *error);
/* The same for one file alone, whatever its split.no says: for tools that look at a shard. */
int gguf_open_single(struct gguf **out, const char *path, struct strata_error *error);
void gguf_close(struct gguf *gguf);

const struct gguf_value *gguf_find(const struct gguf *gguf, const char *key); /* NULL if absent */
const struct gguf_tensor *gguf_tensor_find(const struct gguf *gguf, const char *name);

/* Typed reads. "present": false if the key is absent (out keeps its value; `error` untouched); a wrong type or a value that does not fit
 * returns a negative code with a sentence. Return 1 if present, 0 if absent. Any integer width and sign is accepted where the value fits. */
int gguf_get_u32(const struct gguf *gguf, const char *key, uint32_t *out, struct strata_error *error);
int gguf_get_f32(const struct gguf *gguf, const char *key, float *out, struct strata_error *error);
int gguf_get_bool(const struct gguf *gguf, const char *key, bool *out, struct strata_error *error);
int gguf_get_string(const struct gguf *gguf, const char *key, struct gguf_string *out, struct strata_error *error);
/* Element i of an integer scalar or array (scalars have one element); the caller checked i < value->count. Not an integer: error. */
int gguf_value_u64(const struct gguf_value *value, const char *key, uint64_t i, uint64_t *out, struct strata_error *error);

/* Reads bytes [start, start+length) of a tensor with pread; the range is checked. Thread-safe. */
int gguf_read(const struct gguf *gguf, const struct gguf_tensor *tensor, uint64_t start, void *out, uint64_t length, struct strata_error *error);

/* ---- Writing ----------------------------------------------------------------------------------------------------------------------------
 * Build the whole header in memory first (keys, tensor infos), then stream the data tensor by tensor, in the order of the
 * infos. The file appears under its final name only when gguf_writer_finish succeeded (a temporary name beside it before). */
struct gguf_writer;
int gguf_writer_create(struct gguf_writer **out, const char *path, struct strata_error *error);
void gguf_writer_destroy(struct gguf_writer *writer); /* without finish: removes the temporary file */

/* Errors in these calls (duplicate key, out of memory, ...) are remembered and reported by gguf_writer_begin_data. */
void gguf_put_u32(struct gguf_writer *writer, const char *key, uint32_t value);
void gguf_put_u64(struct gguf_writer *writer, const char *key, uint64_t value);
void gguf_put_i32(struct gguf_writer *writer, const char *key, int32_t value);
void gguf_put_f32(struct gguf_writer *writer, const char *key, float value);
void gguf_put_bool(struct gguf_writer *writer, const char *key, bool value);
void gguf_put_string(struct gguf_writer *writer, const char *key, const char *value);
void gguf_put_string_n(struct gguf_writer *writer, const char *key, const char *value, size_t length);
/* Arrays of scalars: `data` is packed little-endian elements. */
void gguf_put_array(struct gguf_writer *writer, const char *key, enum gguf_type element, const void *data, uint64_t count);
void gguf_put_string_array(struct gguf_writer *writer, const char *key, const struct gguf_string *strings, uint64_t count);
/* Copies an entry of another file. */
void gguf_put_entry(struct gguf_writer *writer, const struct gguf_entry *entry);
/* Declares a tensor; ne0 must be a multiple of the format's block. */
void gguf_put_tensor(struct gguf_writer *writer, const char *name, const struct quant_format *format, int n_dims, const int64_t *dims);

/* Writes the header. Afterwards only gguf_write and gguf_writer_finish. */
int gguf_writer_begin_data(struct gguf_writer *writer, struct strata_error *error);
/* The next bytes of the current tensor; when a tensor is complete, padding follows by itself and the next one begins. Writing past the
 * end of a tensor in one call is an error. */
int gguf_write(struct gguf_writer *writer, const void *data, uint64_t length, struct strata_error *error);
/* Checks that every tensor is complete, flushes to disk, renames. Destroys nothing: call gguf_writer_destroy afterwards. */
int gguf_writer_finish(struct gguf_writer *writer, struct strata_error *error);

#endif
