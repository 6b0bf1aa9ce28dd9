/* gguf.c - reads and checks the header of one file, and closes it again.
 *
 * The header has no length field, so it is read through *windows*: blocks of memory that the open file keeps, each starting
 * where the last one no longer held the next item whole. An item therefore lies in one piece, and what was parsed stays where it
 * is: values point into windows. A string moves down by one byte, into its own length field, to make room for its terminator.
 *
 * No number in a file is believed before it was compared with the bytes that are left: a count is divided by the smallest size of
 * what it counts, so no allocation exceeds a few times the file (or HEADER_LIMIT). */
#include "gguf/private.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The largest headers in use, vocabularies of 250 thousand tokens with their merges, have 10-20 MB. */
#define HEADER_LIMIT (UINT64_C(1) << 30)
#define WINDOW_BYTES (UINT64_C(1) << 20)

/* The fewest bytes an item can take in a file: a key of one byte and its value, a tensor of one-byte name and no dimensions. */
enum { ENTRY_MIN_BYTES = 8 + 1 + 4 + 1, TENSOR_MIN_BYTES = 8 + 1 + 4 + 4 + 8, STRING_MIN_BYTES = 8 };

const uint8_t gguf_type_bytes[GGUF_TYPE_COUNT] = { 1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8 };
const char *const gguf_type_names[GGUF_TYPE_COUNT] = {
    "u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64",
};

/* Types that have a name and a size, but that Strata cannot decode. Files with them open, so that `info` can show them. */
static const struct {
    uint32_t type;
    int block, bytes;
} foreign_types[] = {
    { 9, 32, 36 },    /* Q8_1 */
    { 15, 256, 292 }, /* Q8_K */
    { 24, 1, 1 },     /* I8 */
    { 25, 1, 2 },     /* I16 */
    { 26, 1, 4 },     /* I32 */
    { 27, 1, 8 },     /* I64 */
    { 28, 1, 8 },     /* F64 */
    { 34, 256, 54 },  /* TQ1_0 */
    { 35, 256, 66 },  /* TQ2_0 */
};

/* Ids that the format gave up; files of 2023 and 2024 hold some of them. */
static const char *const withdrawn_types[] = {
    [4] = "Q4_2",      [5] = "Q4_3",        [31] = "Q4_0_4_4",   [32] = "Q4_0_4_8",
    [33] = "Q4_0_8_8", [36] = "IQ4_NL_4_4", [37] = "IQ4_NL_4_8", [38] = "IQ4_NL_8_8",
};

/* ---- Memory ---------------------------------------------------------------------------------------------------------------- */

struct gguf_block {
    struct gguf_block *next;
    _Alignas(max_align_t) uint8_t data[];
};

void *gguf_memory_take(struct gguf_memory *memory, uint64_t count, uint64_t size)
{
    uint64_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes) || bytes > PTRDIFF_MAX - sizeof(struct gguf_block))
        return NULL;
    struct gguf_block *block = calloc(1, sizeof *block + bytes);
    if (!block)
        return NULL;
    block->next = memory->blocks;
    memory->blocks = block;
    return block->data;
}

void gguf_memory_move(struct gguf_memory *to, struct gguf_memory *from)
{
    struct gguf_block **end = &from->blocks;
    while (*end)
        end = &(*end)->next;
    *end = to->blocks;
    to->blocks = from->blocks;
    from->blocks = NULL;
}

/* ---- The cursor ------------------------------------------------------------------------------------------------------------ */

struct cursor {
    int fd;
    uint64_t size; /* of the file */
    uint64_t at;   /* of the next item, in the file */
    struct gguf_memory *memory;
    uint8_t *window;
    uint64_t window_start, window_bytes;
    /* For error sentences: "key 3 of 67 ('general.name')" */
    const char *place;
    uint64_t number, total; /* total 0: the place has no number */
    struct gguf_string name;
    struct strata_error *error;
};

struct where {
    char text[160];
};

static struct where where(const struct cursor *cursor)
{
    struct where where;
    if (!cursor->total)
        snprintf(where.text, sizeof where.text, "%s", cursor->place);
    else if (!cursor->name.data)
        snprintf(where.text, sizeof where.text, "%s %" PRIu64 " of %" PRIu64, cursor->place, cursor->number, cursor->total);
    else
        snprintf(where.text, sizeof where.text, "%s %" PRIu64 " of %" PRIu64 " ('%s')", cursor->place, cursor->number,
                 cursor->total, gguf_show(cursor->name.data, cursor->name.length).text);
    return where;
}

static int no_memory(struct strata_error *error) { return error_set(error, STRATA_E_MEMORY, "out of memory for the header"); }

/* Bytes that may still belong to the header. */
static uint64_t bytes_left(const struct cursor *cursor)
{
    uint64_t end = cursor->size < HEADER_LIMIT ? cursor->size : HEADER_LIMIT;
    return end - cursor->at;
}

static int too_short(const struct cursor *cursor, const char *what, uint64_t wanted)
{
    if (cursor->size > HEADER_LIMIT && wanted <= cursor->size - cursor->at)
        return error_set(cursor->error, STRATA_E_UNSUPPORTED, "%s: the header goes on past %" PRIu64 " MiB, wanted a shorter one",
                         where(cursor).text, (uint64_t)(HEADER_LIMIT >> 20));
    return error_set(cursor->error, STRATA_E_FORMAT,
                     "%s: %s needs %" PRIu64 " bytes, but the file has only %" PRIu64 " more (download cut short?)",
                     where(cursor).text, what, wanted, cursor->size - cursor->at);
}

/* Makes the next `bytes` bytes available in one piece, without moving on. */
static int peek(struct cursor *cursor, const char *what, uint64_t bytes, uint8_t **out)
{
    uint64_t left = bytes_left(cursor);
    if (bytes > left)
        return too_short(cursor, what, bytes);
    if (!cursor->window || cursor->at + bytes > cursor->window_start + cursor->window_bytes) {
        uint64_t size = bytes > WINDOW_BYTES ? bytes : WINDOW_BYTES < left ? WINDOW_BYTES : left;
        cursor->window = gguf_memory_take(cursor->memory, size, 1);
        if (!cursor->window)
            return no_memory(cursor->error);
        cursor->window_start = cursor->at;
        cursor->window_bytes = size;
        int code = gguf_read_at(cursor->fd, cursor->at, cursor->window, size, cursor->error);
        if (code < 0)
            return code;
    }
    *out = cursor->window + (cursor->at - cursor->window_start);
    return 0;
}

static int take(struct cursor *cursor, const char *what, uint64_t bytes, uint8_t **out)
{
    int code = peek(cursor, what, bytes, out);
    if (code == 0)
        cursor->at += bytes;
    return code;
}

static int take_u32(struct cursor *cursor, const char *what, uint32_t *out)
{
    uint8_t *bytes = NULL;
    int code = take(cursor, what, sizeof *out, &bytes);
    if (code == 0)
        memcpy(out, bytes, sizeof *out);
    return code;
}

static int take_u64(struct cursor *cursor, const char *what, uint64_t *out)
{
    uint8_t *bytes = NULL;
    int code = take(cursor, what, sizeof *out, &bytes);
    if (code == 0)
        memcpy(out, bytes, sizeof *out);
    return code;
}

static int take_string(struct cursor *cursor, const char *what, struct gguf_string *out)
{
    uint8_t *bytes = NULL;
    uint64_t length;
    int code = peek(cursor, what, sizeof length, &bytes);
    if (code < 0)
        return code;
    memcpy(&length, bytes, sizeof length);
    if (length > bytes_left(cursor) - sizeof length) {
        cursor->at += sizeof length; /* the sentence counts from here */
        return too_short(cursor, what, length);
    }
    code = take(cursor, what, sizeof length + length, &bytes);
    if (code < 0)
        return code;
    char *text = (char *)bytes + sizeof length - 1;
    memmove(text, text + 1, length);
    text[length] = 0;
    *out = (struct gguf_string){ text, length };
    return 0;
}

/* A count of things that take at least `min_bytes` each. */
static int check_count(struct cursor *cursor, const char *what, uint64_t count, uint64_t min_bytes)
{
    if (count <= bytes_left(cursor) / min_bytes)
        return 0;
    return error_set(cursor->error, STRATA_E_FORMAT,
                     "%s: the count of %s is %" PRIu64 ", which cannot fit in the %" PRIu64
                     " bytes that follow (download cut short?)",
                     where(cursor).text, what, count, bytes_left(cursor));
}

/* ---- The parts of a header ------------------------------------------------------------------------------------------------- */

/* Files that are often taken for a model. */
static const struct {
    const char *start, *sentence;
} mistaken[] = {
    { "version https://git-lfs", "a Git LFS pointer, not the model itself: fetch the file with git lfs, or download it directly" },
    { "<!DOCTYPE", "a web page, not a model: the download saved a page instead of the file" },
    { "<!doctype", "a web page, not a model: the download saved a page instead of the file" },
    { "<html", "a web page, not a model: the download saved a page instead of the file" },
    { "tjgg", "a GGML file from before GGUF (\"ggjt\"), wanted GGUF: convert the model again" },
    { "lmgg", "a GGML file from before GGUF, wanted GGUF: convert the model again" },
    { "PK\3\4", "a zip archive (PyTorch checkpoint?), wanted GGUF: convert the model first" },
};

static int read_magic(struct cursor *cursor, uint32_t *version)
{
    uint8_t *bytes = NULL;
    uint64_t n = cursor->size < 32 ? cursor->size : 32;
    int code = peek(cursor, "the magic", n, &bytes);
    if (code < 0)
        return code;
    if (n == 0)
        return error_set(cursor->error, STRATA_E_FORMAT, "the file is empty, wanted a GGUF file");
    for (size_t i = 0; i < sizeof mistaken / sizeof mistaken[0]; i++) {
        size_t length = strlen(mistaken[i].start);
        if (length <= n && memcmp(bytes, mistaken[i].start, length) == 0)
            return error_set(cursor->error, STRATA_E_FORMAT, "this is %s", mistaken[i].sentence);
    }
    if (n >= 4 && memcmp(bytes, "GGUF", 4) != 0)
        return error_set(cursor->error, STRATA_E_FORMAT,
                         "not a GGUF file: it starts with the bytes %02x %02x %02x %02x, wanted 47 47 55 46 (\"GGUF\")", bytes[0],
                         bytes[1], bytes[2], bytes[3]);
    code = take(cursor, "the magic", 4, &bytes);
    if (code < 0)
        return code;
    code = take_u32(cursor, "the version", version);
    if (code < 0)
        return code;
    if ((*version & 0xffff) == 0)
        return error_set(cursor->error, STRATA_E_UNSUPPORTED,
                         "a big-endian GGUF file (version field %08x), wanted a little-endian one: convert it again", *version);
    if (*version == 1)
        return error_set(cursor->error, STRATA_E_UNSUPPORTED,
                         "GGUF version 1, wanted 2 or 3: convert the model again with a newer converter");
    if (*version != 2 && *version != 3)
        return error_set(cursor->error, STRATA_E_UNSUPPORTED, "GGUF version %u, wanted 2 or 3", *version);
    return 0;
}

static int read_elements(struct cursor *cursor, struct gguf_value *value)
{
    if (value->element == GGUF_STRING) {
        int code = check_count(cursor, "strings", value->count, STRING_MIN_BYTES);
        if (code < 0)
            return code;
        struct gguf_string *strings = gguf_memory_take(cursor->memory, value->count, sizeof *strings);
        if (!strings)
            return no_memory(cursor->error);
        value->data = strings;
        for (uint64_t i = 0; i < value->count && code == 0; i++)
            code = take_string(cursor, "a string", &strings[i]);
        return code;
    }
    uint64_t size = gguf_type_bytes[value->element];
    int code = check_count(cursor, "elements", value->count, size);
    if (code < 0)
        return code;
    uint8_t *bytes = NULL;
    code = take(cursor, "the value", value->count * size, &bytes);
    if (code == 0)
        value->data = bytes;
    return code;
}

static int take_type(struct cursor *cursor, const char *what, enum gguf_type *out)
{
    uint32_t type = 0;
    int code = take_u32(cursor, what, &type);
    if (code < 0)
        return code;
    if (type >= GGUF_TYPE_COUNT)
        return error_set(cursor->error, STRATA_E_FORMAT, "%s: %s is %" PRIu32 ", wanted 0 to %d", where(cursor).text, what, type,
                         GGUF_TYPE_COUNT - 1);
    *out = (enum gguf_type)type;
    return 0;
}

static int read_entry(struct cursor *cursor, struct gguf_entry *entry)
{
    struct gguf_value *value = &entry->value;
    int code = take_string(cursor, "the key", &entry->key);
    if (code < 0)
        return code;
    if (entry->key.length == 0)
        return error_set(cursor->error, STRATA_E_FORMAT, "%s: the key is empty, wanted a name", where(cursor).text);
    cursor->name = entry->key;
    code = take_type(cursor, "the value type", &value->type);
    if (code < 0)
        return code;
    value->element = value->type;
    value->count = 1;
    if (value->type == GGUF_ARRAY) {
        code = take_type(cursor, "the element type", &value->element);
        if (code < 0)
            return code;
        if (value->element == GGUF_ARRAY)
            return error_set(cursor->error, STRATA_E_UNSUPPORTED, "%s: an array of arrays, wanted an array of scalars or strings",
                             where(cursor).text);
        code = take_u64(cursor, "the element count", &value->count);
        if (code < 0)
            return code;
    }
    return read_elements(cursor, value);
}

static int read_entries(struct cursor *cursor, struct gguf *gguf)
{
    gguf->entries = gguf_memory_take(cursor->memory, gguf->n_entries, sizeof *gguf->entries);
    struct gguf_name *names = gguf_memory_take(cursor->memory, gguf->n_entries, sizeof *names);
    if (!gguf->entries || !names)
        return no_memory(cursor->error);
    cursor->place = "key";
    cursor->total = gguf->n_entries;
    for (uint64_t i = 0; i < gguf->n_entries; i++) {
        cursor->number = i + 1;
        cursor->name.data = NULL;
        int code = read_entry(cursor, &gguf->entries[i]);
        if (code < 0)
            return code;
        names[i] = (struct gguf_name){ gguf->entries[i].key, i };
    }
    const struct gguf_name *twice = gguf_names_sort(names, gguf->n_entries);
    if (twice)
        return error_set(cursor->error, STRATA_E_FORMAT, "key '%s' occurs twice (keys %" PRIu64 " and %" PRIu64 " of %" PRIu64 ")",
                         gguf_show(twice->string.data, twice->string.length).text, twice[0].position + 1, twice[1].position + 1,
                         gguf->n_entries);
    cursor->memory->keys = names;
    return 0;
}

static int read_alignment(struct cursor *cursor, struct gguf *gguf)
{
    gguf->alignment = GGUF_DEFAULT_ALIGNMENT;
    const struct gguf_value *value = gguf_find(gguf, "general.alignment");
    if (!value)
        return 0;
    if (value->type != GGUF_U32)
        return error_set(cursor->error, STRATA_E_FORMAT, "key 'general.alignment' is of type %s, wanted u32",
                         gguf_type_names[value->type]);
    uint32_t alignment;
    memcpy(&alignment, value->data, sizeof alignment);
    if (alignment == 0 || (alignment & (alignment - 1)) != 0)
        return error_set(cursor->error, STRATA_E_FORMAT, "key 'general.alignment' is %" PRIu32 ", wanted a power of two",
                         alignment);
    gguf->alignment = alignment;
    return 0;
}

/* Block and bytes of tensor->type, and its format if Strata can decode it. */
static int find_layout(struct cursor *cursor, struct gguf_tensor *tensor, int64_t *block, uint64_t *block_bytes)
{
    const char *name = quant_type_name(tensor->type);
    if (!name && tensor->type < sizeof withdrawn_types / sizeof withdrawn_types[0] && withdrawn_types[tensor->type])
        return error_set(cursor->error, STRATA_E_UNSUPPORTED,
                         "%s: type %s (id %" PRIu32 ") was withdrawn from GGUF: convert the model again", where(cursor).text,
                         withdrawn_types[tensor->type], tensor->type);
    if (!name)
        return error_set(cursor->error, STRATA_E_UNSUPPORTED,
                         "%s: type id %" PRIu32 " is unknown: the file needs a newer Strata, or is damaged", where(cursor).text,
                         tensor->type);
    tensor->format = quant_format_find(tensor->type);
    if (tensor->format) {
        *block = tensor->format->block;
        *block_bytes = (uint64_t)tensor->format->bytes;
        return 0;
    }
    for (size_t i = 0; i < sizeof foreign_types / sizeof foreign_types[0]; i++)
        if (foreign_types[i].type == tensor->type) {
            *block = foreign_types[i].block;
            *block_bytes = (uint64_t)foreign_types[i].bytes;
            return 0;
        }
    return error_set(cursor->error, STRATA_E_UNSUPPORTED, "%s: the size of type %s (id %" PRIu32 ") is not known to this reader",
                     where(cursor).text, name, tensor->type);
}

static int measure(struct cursor *cursor, struct gguf_tensor *tensor)
{
    int64_t block = 1;
    uint64_t block_bytes = 0;
    int code = find_layout(cursor, tensor, &block, &block_bytes);
    if (code < 0)
        return code;
    if (tensor->dims[0] % block != 0)
        return error_set(cursor->error, STRATA_E_FORMAT,
                         "%s: row width %" PRId64 " is not a multiple of %" PRId64 ", the block of %s", where(cursor).text,
                         tensor->dims[0], block, quant_type_name(tensor->type));
    /* Also the number of weights must fit an int64, so that nobody has to check a product of dims again. */
    int64_t weights = 1;
    bool overflow = false;
    for (int i = 0; i < GGUF_MAX_DIMS; i++)
        overflow |= __builtin_mul_overflow(weights, tensor->dims[i], &weights);
    if (overflow || __builtin_mul_overflow((uint64_t)(weights / block), block_bytes, &tensor->bytes) || tensor->bytes > INT64_MAX)
        return error_set(cursor->error, STRATA_E_FORMAT,
                         "%s: %" PRId64 " x %" PRId64 " x %" PRId64 " x %" PRId64 " weights are more than a file can hold",
                         where(cursor).text, tensor->dims[0], tensor->dims[1], tensor->dims[2], tensor->dims[3]);
    return 0;
}

/* One tensor info; leaves the offset as the file has it, relative to the data section. */
static int read_tensor(struct cursor *cursor, struct gguf_tensor *tensor)
{
    struct gguf_string name;
    int code = take_string(cursor, "the name", &name);
    if (code < 0)
        return code;
    cursor->name = name;
    if (name.length == 0)
        return error_set(cursor->error, STRATA_E_FORMAT, "%s: the name is empty", where(cursor).text);
    if (name.length >= GGUF_MAX_NAME)
        return error_set(cursor->error, STRATA_E_FORMAT, "%s: the name has %" PRIu64 " bytes, wanted at most %d",
                         where(cursor).text, name.length, GGUF_MAX_NAME - 1);
    if (memchr(name.data, 0, name.length))
        return error_set(cursor->error, STRATA_E_FORMAT, "%s: the name holds a zero byte", where(cursor).text);
    tensor->name = name.data;

    uint32_t n_dims = 0;
    code = take_u32(cursor, "the number of dimensions", &n_dims);
    if (code < 0)
        return code;
    if (n_dims > GGUF_MAX_DIMS)
        return error_set(cursor->error, STRATA_E_FORMAT, "%s: %" PRIu32 " dimensions, wanted at most %d", where(cursor).text,
                         n_dims, GGUF_MAX_DIMS);
    tensor->n_dims = (int)n_dims;
    for (int i = 0; i < GGUF_MAX_DIMS; i++) {
        uint64_t dim = 1;
        if (i < tensor->n_dims)
            code = take_u64(cursor, "a dimension", &dim);
        if (code < 0)
            return code;
        tensor->dims[i] = (int64_t)dim;
        if (tensor->dims[i] < 1)
            return error_set(cursor->error, STRATA_E_FORMAT, "%s: dimension %d is %" PRId64 ", wanted at least 1",
                             where(cursor).text, i, tensor->dims[i]);
    }
    code = take_u32(cursor, "the type", &tensor->type);
    if (code < 0)
        return code;
    code = take_u64(cursor, "the offset", &tensor->offset);
    if (code < 0)
        return code;
    return measure(cursor, tensor);
}

static int read_tensors(struct cursor *cursor, struct gguf *gguf)
{
    gguf->tensors = gguf_memory_take(cursor->memory, gguf->n_tensors, sizeof *gguf->tensors);
    if (!gguf->tensors)
        return no_memory(cursor->error);
    cursor->place = "tensor";
    cursor->total = gguf->n_tensors;
    uint64_t wanted = 0;
    for (uint64_t i = 0; i < gguf->n_tensors; i++) {
        struct gguf_tensor *tensor = &gguf->tensors[i];
        cursor->number = i + 1;
        cursor->name.data = NULL;
        int code = read_tensor(cursor, tensor);
        if (code < 0)
            return code;
        if (tensor->offset != wanted)
            return error_set(cursor->error, STRATA_E_FORMAT,
                             "%s: its data is at offset %" PRIu64 ", wanted %" PRIu64 " (the tensors before it, padded to %" PRIu64
                             ")",
                             where(cursor).text, tensor->offset, wanted, gguf->alignment);
        /* Past 2^62 no file goes; stopping here keeps every later sum in range. */
        if (tensor->bytes > INT64_MAX / 2 - wanted)
            return error_set(cursor->error, STRATA_E_FORMAT, "%s: its %" PRIu64 " bytes are more than a file can hold",
                             where(cursor).text, tensor->bytes);
        wanted = gguf_pad(wanted + tensor->bytes, gguf->alignment);
        if (wanted > INT64_MAX / 2)
            return error_set(cursor->error, STRATA_E_FORMAT, "%s: its padding ends past what a file can hold", where(cursor).text);
    }
    return gguf_index_tensors(gguf, cursor->error);
}

int gguf_index_tensors(struct gguf *gguf, struct strata_error *error)
{
    struct gguf_memory *memory = gguf->memory;
    struct gguf_name *names = gguf_memory_take(memory, gguf->n_tensors, sizeof *names);
    if (!names)
        return no_memory(error);
    for (uint64_t i = 0; i < gguf->n_tensors; i++)
        names[i] = (struct gguf_name){ { gguf->tensors[i].name, strlen(gguf->tensors[i].name) }, i };
    const struct gguf_name *twice = gguf_names_sort(names, gguf->n_tensors);
    if (twice)
        return error_set(error, STRATA_E_FORMAT, "tensor '%s' occurs twice (tensors %" PRIu64 " and %" PRIu64 " of %" PRIu64 ")",
                         gguf_show(twice->string.data, twice->string.length).text, twice[0].position + 1, twice[1].position + 1,
                         gguf->n_tensors);
    memory->tensors = names;
    return 0;
}

/* Offsets become absolute; the data must lie inside the file. */
static int place_data(struct cursor *cursor, struct gguf *gguf)
{
    uint64_t start = gguf_pad(cursor->at, gguf->alignment), end = start;
    const struct gguf_tensor *outside = NULL;
    for (uint64_t i = 0; i < gguf->n_tensors; i++) {
        struct gguf_tensor *tensor = &gguf->tensors[i];
        tensor->offset += start;
        end = tensor->offset + tensor->bytes;
        if (end > cursor->size && !outside)
            outside = tensor;
    }
    if (!outside)
        return 0;
    return error_set(cursor->error, STRATA_E_FORMAT,
                     "data past end of file: tensor '%s' ends at byte %" PRIu64 " and the last one at %" PRIu64
                     ", but the file has %" PRIu64 " bytes (download cut short?)",
                     gguf_show(outside->name, strlen(outside->name)).text, outside->offset + outside->bytes, end, cursor->size);
}

static int read_header(struct gguf *gguf, struct strata_error *error)
{
    struct cursor cursor = {
        .fd = gguf->files[0].fd,
        .size = gguf->files[0].size,
        .memory = gguf->memory,
        .place = "the first 24 bytes",
        .error = error,
    };
    int code = read_magic(&cursor, &gguf->version);
    if (code < 0)
        return code;
    code = take_u64(&cursor, "the tensor count", &gguf->n_tensors);
    if (code < 0)
        return code;
    code = take_u64(&cursor, "the key count", &gguf->n_entries);
    if (code < 0)
        return code;
    code = check_count(&cursor, "keys", gguf->n_entries, ENTRY_MIN_BYTES);
    if (code < 0)
        return code;
    code = check_count(&cursor, "tensors", gguf->n_tensors, TENSOR_MIN_BYTES);
    if (code < 0)
        return code;
    code = read_entries(&cursor, gguf);
    if (code < 0)
        return code;
    code = read_alignment(&cursor, gguf);
    if (code < 0)
        return code;
    code = read_tensors(&cursor, gguf);
    if (code < 0)
        return code;
    return place_data(&cursor, gguf);
}

/* ---- Opening and closing --------------------------------------------------------------------------------------------------- */

static int open_file(struct gguf_file *file, const char *path, struct strata_error *error)
{
    /* O_NONBLOCK: opening a pipe by mistake must not wait for a writer; it means nothing for files. */
    file->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file->fd < 0)
        return error_set(error, STRATA_E_IO, "cannot open: %s", strerror(errno));
    struct stat status;
    if (fstat(file->fd, &status) < 0)
        return error_set(error, STRATA_E_IO, "cannot ask for the size: %s", strerror(errno));
    if (!S_ISREG(status.st_mode))
        return error_set(error, STRATA_E_ARGUMENT, "this is %s, wanted a GGUF file",
                         S_ISDIR(status.st_mode) ? "a directory" : "not a regular file");
    file->size = (uint64_t)status.st_size;
    return 0;
}

static int open_into(struct gguf *gguf, const char *path, struct strata_error *error)
{
    gguf->memory = calloc(1, sizeof(struct gguf_memory));
    if (!gguf->memory)
        return no_memory(error);
    size_t path_bytes = strlen(path) + 1;
    gguf->files = gguf_memory_take(gguf->memory, 1, sizeof *gguf->files);
    char *copy = gguf_memory_take(gguf->memory, path_bytes, 1);
    if (!gguf->files || !copy)
        return no_memory(error);
    memcpy(copy, path, path_bytes);
    gguf->files[0] = (struct gguf_file){ .path = copy, .fd = -1 };
    gguf->n_files = 1;
    int code = open_file(&gguf->files[0], path, error);
    return code < 0 ? code : read_header(gguf, error);
}

int gguf_open_single(struct gguf **out, const char *path, struct strata_error *error)
{
    *out = NULL;
    struct gguf *gguf = calloc(1, sizeof *gguf);
    if (!gguf)
        return no_memory(error);
    int code = open_into(gguf, path, error);
    if (code < 0) {
        gguf_close(gguf);
        return error_prefix(error, code, "%s", path);
    }
    *out = gguf;
    return 0;
}

void gguf_close(struct gguf *gguf)
{
    if (!gguf)
        return;
    for (int i = 0; i < gguf->n_files; i++)
        if (gguf->files[i].fd >= 0)
            close(gguf->files[i].fd);
    struct gguf_memory *memory = gguf->memory;
    for (struct gguf_block *block = memory ? memory->blocks : NULL, *next; block; block = next) {
        next = block->next;
        free(block);
    }
    free(memory);
    free(gguf);
}
