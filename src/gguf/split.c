/* split.c - models in several files: BASE-00001-of-0000N.gguf and its siblings become one struct gguf.
 *
 * The first file holds all keys (and perhaps no tensors), the others their own tensor tables. The keys split.no (from 0) and
 * split.count say what a file is; its name (from 1) only serves to find the siblings. */
#include "gguf/private.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SPLIT_MAX_FILES = 99999 /* five digits */ };
#define SPLIT_SUFFIX "-00001-of-00001.gguf"

struct split {
    uint32_t count; /* 0 or 1: not split */
    uint32_t no;
};

static int read_split(const struct gguf *gguf, struct split *split, struct strata_error *error)
{
    *split = (struct split){ 0 };
    int found = gguf_get_u32(gguf, "split.count", &split->count, error);
    if (found < 0 || split->count < 2)
        return found < 0 ? found : 0;
    const char *path = gguf->files[0].path;
    if (split->count > SPLIT_MAX_FILES)
        return error_set(error, STRATA_E_FORMAT, "%s: key 'split.count' is %" PRIu32 ", wanted at most %d", path, split->count,
                         SPLIT_MAX_FILES);
    found = gguf_get_u32(gguf, "split.no", &split->no, error);
    if (found < 0)
        return found;
    if (!found)
        return error_set(error, STRATA_E_FORMAT, "%s: key 'split.no' is missing in a file of a split model of %" PRIu32 " files",
                         path, split->count);
    if (split->no >= split->count)
        return error_set(error, STRATA_E_FORMAT, "%s: key 'split.no' is %" PRIu32 ", wanted less than split.count, %" PRIu32, path,
                         split->no, split->count);
    return 0;
}

/* The length of BASE if a path ends as the files of a split model of `count` files do, or 0. */
static size_t base_length(const char *path, uint32_t count)
{
    size_t length = strlen(path), suffix_length = strlen(SPLIT_SUFFIX);
    if (length <= suffix_length)
        return 0;
    const char *suffix = path + length - suffix_length;
    for (size_t i = 0; i < suffix_length; i++) {
        bool digit = suffix[i] >= '0' && suffix[i] <= '9', wanted = SPLIT_SUFFIX[i] >= '0' && SPLIT_SUFFIX[i] <= '9';
        if (wanted ? !digit : suffix[i] != SPLIT_SUFFIX[i])
            return 0;
    }
    char expected[16];
    snprintf(expected, sizeof expected, "-of-%05" PRIu32 ".gguf", count);
    return strcmp(path + length - strlen(expected), expected) == 0 ? length - suffix_length : 0;
}

/* The path of file `no` (from 0); `out` has strlen(path of a sibling) + 1 bytes. */
static void sibling_path(char *out, size_t size, const char *path, size_t base, uint32_t no, uint32_t count)
{
    snprintf(out, size, "%.*s-%05" PRIu32 "-of-%05" PRIu32 ".gguf", (int)base, path, no + 1, count);
}

static const char *file_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* One sentence for all missing files, before any is opened. `room` has space for a path. */
static int check_presence(const char *path, size_t base, uint32_t count, char *room, size_t size, struct strata_error *error)
{
    uint32_t missing = 0, first = 0;
    for (uint32_t no = 1; no < count; no++) {
        sibling_path(room, size, path, base, no, count);
        if (access(room, F_OK) == 0 || (errno != ENOENT && errno != ENOTDIR)) /* other troubles get their own sentence from open */
            continue;
        if (missing++ == 0)
            first = no;
    }
    if (!missing)
        return 0;
    sibling_path(room, size, path, base, first, count);
    return error_set(error, STRATA_E_IO,
                     "%s: the model has %" PRIu32 " files, of which %" PRIu32 " %s missing beside this one: %s%s", path, count,
                     missing, missing == 1 ? "is" : "are", file_name(room), missing == 1 ? "" : " is the first");
}

/* Moves the tensors of `shard` to the end of the list and its file and memory into `gguf`; closes what remains of it. */
static void adopt(struct gguf *gguf, struct gguf *shard)
{
    for (uint64_t i = 0; i < shard->n_tensors; i++) {
        struct gguf_tensor *tensor = &gguf->tensors[gguf->n_tensors++];
        *tensor = shard->tensors[i];
        tensor->file = gguf->n_files;
    }
    gguf->files[gguf->n_files++] = shard->files[0];
    gguf_memory_move(gguf->memory, shard->memory);
    shard->n_files = 0;
    gguf_close(shard);
}

static int check_shard(const struct gguf *shard, const struct split *first, uint32_t no, struct strata_error *error)
{
    struct split split;
    int code = read_split(shard, &split, error);
    if (code < 0)
        return code;
    const char *path = shard->files[0].path;
    if (!gguf_find(shard, "split.count"))
        return error_set(error, STRATA_E_FORMAT, "%s: key 'split.count' is missing, wanted %" PRIu32 " as in the first file", path,
                         first->count);
    if (split.count != first->count)
        return error_set(error, STRATA_E_FORMAT,
                         "%s: key 'split.count' is %" PRIu32 ", wanted %" PRIu32 " as in the first file (files of two models?)",
                         path, split.count, first->count);
    if (split.no != no)
        return error_set(error, STRATA_E_FORMAT,
                         "%s: key 'split.no' is %" PRIu32 ", wanted %" PRIu32 " as the name says (renamed?)", path, split.no, no);
    return 0;
}

static int open_shards(struct gguf *gguf, const struct split *first, struct gguf **shards, struct strata_error *error)
{
    const char *path = gguf->files[0].path;
    size_t base = base_length(path, first->count), size = strlen(path) + 1;
    if (!base)
        return error_set(error, STRATA_E_ARGUMENT,
                         "%s: this is the first of %" PRIu32 " files, but its name does not end in -00001-of-%05" PRIu32
                         ".gguf, so the others cannot be found",
                         path, first->count, first->count);
    char *name = gguf_memory_take(gguf->memory, size, 1);
    if (!name)
        return error_set(error, STRATA_E_MEMORY, "out of memory for the header");
    sibling_path(name, size, path, base, 0, first->count);
    if (strcmp(name, path) != 0)
        return error_set(error, STRATA_E_FORMAT, "%s: key 'split.no' is 0, so the name should be %s (renamed?)", path,
                         file_name(name));
    int code = check_presence(path, base, first->count, name, size, error);
    for (uint32_t no = 1; no < first->count && code == 0; no++) {
        sibling_path(name, size, path, base, no, first->count);
        code = gguf_open_single(&shards[no], name, error);
        if (code == 0)
            code = check_shard(shards[no], first, no, error);
    }
    return code;
}

static int check_total(const struct gguf *gguf, uint64_t total, const struct split *first, struct strata_error *error)
{
    const char *path = gguf->files[0].path;
    uint32_t wanted;
    int found = gguf_get_u32(gguf, "split.tensors.count", &wanted, error);
    if (found < 0)
        return found;
    if (!found)
        return error_set(error, STRATA_E_FORMAT, "%s: key 'split.tensors.count' is missing in the first file of a split model",
                         path);
    if (total != wanted)
        return error_set(error, STRATA_E_FORMAT,
                         "%s: the %" PRIu32 " files have %" PRIu64 " tensors together, wanted %" PRIu32 " (split.tensors.count)",
                         path, first->count, total, wanted);
    return 0;
}

/* Makes one model of the first file and shards[1 .. count-1]; those it adopted are NULL afterwards. */
static int join(struct gguf *gguf, const struct split *first, struct gguf **shards, struct strata_error *error)
{
    uint64_t total = gguf->n_tensors;
    for (uint32_t no = 1; no < first->count; no++)
        total += shards[no]->n_tensors;
    int code = check_total(gguf, total, first, error);
    if (code < 0)
        return code;
    struct gguf_tensor *tensors = gguf_memory_take(gguf->memory, total, sizeof *tensors);
    struct gguf_file *files = gguf_memory_take(gguf->memory, first->count, sizeof *files);
    if (!tensors || !files)
        return error_set(error, STRATA_E_MEMORY, "out of memory for the header");
    for (uint64_t i = 0; i < gguf->n_tensors; i++)
        tensors[i] = gguf->tensors[i];
    files[0] = gguf->files[0];
    gguf->tensors = tensors;
    gguf->files = files;
    for (uint32_t no = 1; no < first->count; no++) {
        adopt(gguf, shards[no]);
        shards[no] = NULL;
    }
    code = gguf_index_tensors(gguf, error);
    return code < 0 ? error_prefix(error, code, "%s and its other files", gguf->files[0].path) : code;
}

static int open_rest(struct gguf *gguf, const struct split *first, struct strata_error *error)
{
    struct gguf **shards = calloc(first->count, sizeof *shards);
    if (!shards)
        return error_set(error, STRATA_E_MEMORY, "out of memory for the header");
    int code = open_shards(gguf, first, shards, error);
    if (code == 0)
        code = join(gguf, first, shards, error);
    for (uint32_t no = 1; no < first->count; no++)
        gguf_close(shards[no]);
    free(shards);
    return code;
}

/* The sentence for somebody who opened a later file. */
static int not_the_first(const struct gguf *gguf, const struct split *split, struct strata_error *error)
{
    const char *path = gguf->files[0].path;
    size_t base = base_length(path, split->count), size = strlen(path) + 1;
    char *first = base ? gguf_memory_take(gguf->memory, size, 1) : NULL;
    if (first)
        sibling_path(first, size, path, base, 0, split->count);
    return error_set(error, STRATA_E_ARGUMENT,
                     "%s: this is file %" PRIu32 " of %" PRIu32 " of a split model: open the first one, %s", path, split->no + 1,
                     split->count, first ? file_name(first) : "the file whose split.no is 0");
}

int gguf_open(struct gguf **out, const char *path, struct strata_error *error)
{
    *out = NULL;
    struct gguf *gguf;
    struct split split;
    int code = gguf_open_single(&gguf, path, error);
    if (code < 0)
        return code;
    code = read_split(gguf, &split, error);
    if (code == 0 && split.count > 1)
        code = split.no == 0 ? open_rest(gguf, &split, error) : not_the_first(gguf, &split, error);
    if (code < 0) {
        gguf_close(gguf);
        return code;
    }
    *out = gguf;
    return 0;
}
