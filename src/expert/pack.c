#define _GNU_SOURCE /* fallocate */
#include "expert/pack.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <xxhash.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "a pack's numbers are read as they lie in the file");

enum { MAX_LAYERS = 65536 };
static const char magic[8] = "STRATAPK";

/* The file's beginning, followed by a record for every layer and zeros up to the next page; then the runs. */
struct head {
    char magic[8];
    uint32_t version, tiles, n_layers, zero;
    uint64_t fingerprint, file_bytes;
    uint64_t hash; /* xxh64 of all this, up to the first run, with 0 here */
    uint64_t zeros[2];
};
struct record {
    uint32_t n_experts, hidden, width, gate, up, down; /* the last three: ggml type ids */
    uint64_t blob_bytes, offset, bytes;                /* of one expert; of the run */
    uint64_t hash;                                     /* xxh64 of the run */
    uint64_t zero;
};
_Static_assert(sizeof(struct head) == 64 && sizeof(struct record) == 64, "docs/FORMAT.md says so");

static uint64_t header_bytes(uint64_t n_layers)
{
    return (sizeof(struct head) + n_layers * sizeof(struct record) + STORE_PAGE - 1) & ~(uint64_t)(STORE_PAGE - 1);
}

uint64_t pack_file_bytes(const struct expert_store *store) { return header_bytes((uint64_t)store->n_layers) + store_bytes(store); }

static uint64_t header_hash(void *header, uint64_t bytes)
{
    struct head *head = header;
    uint64_t there = head->hash;
    head->hash = 0;
    uint64_t hash = XXH64(header, bytes, 0);
    head->hash = there;
    return hash;
}

/* The header of these sets, but for the hashes; NULL: no memory. */
static void *build_header(const struct expert_store *store, uint64_t fingerprint)
{
    uint64_t n = (uint64_t)store->n_layers, offset = header_bytes(n);
    struct head *head = calloc(1, offset);
    if (!head)
        return NULL;
    *head = (struct head){ .version = PACK_VERSION,
                           .tiles = PACK_TILES,
                           .n_layers = (uint32_t)n,
                           .fingerprint = fingerprint,
                           .file_bytes = pack_file_bytes(store) };
    memcpy(head->magic, magic, sizeof magic);
    struct record *records = (struct record *)(head + 1);
    for (uint64_t i = 0; i < n; i++) {
        const struct expert_set *set = store->sets[i];
        records[i] = (struct record){ (uint32_t)set->n_experts,
                                      (uint32_t)set->hidden,
                                      (uint32_t)set->width,
                                      set->gate->type,
                                      set->up->type,
                                      set->down->type,
                                      set->blob_bytes,
                                      offset,
                                      store_layer_bytes(set),
                                      0,
                                      0 };
        offset += store_layer_bytes(set);
    }
    return head;
}

/* ---- Reading
 * --------------------------------------------------------------------------------------------------------------------------- */

static int read_all(int fd, const char *path, void *out, size_t length, struct strata_error *error)
{
    for (size_t got = 0; got < length;) {
        ssize_t n = pread(fd, (uint8_t *)out + got, length - got, (off_t)got);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return error_set(error, STRATA_E_IO, "pack %s: cannot read its header: %s", path,
                             n ? strerror(errno) : "the file became shorter");
        got += (size_t)n;
    }
    return 0;
}

/* A header that is whole, of this version: *out, to be freed. */
static int read_header(int fd, const char *path, uint64_t size, struct head **out, struct strata_error *error)
{
    struct head head = { 0 };
    int code = read_all(fd, path, &head, size < sizeof head ? (size_t)size : sizeof head, error);
    if (code)
        return code;
    if (memcmp(head.magic, magic, sizeof magic))
        return error_set(error, STRATA_E_FORMAT, "%s is not a pack: it does not begin with %.8s", path, magic);
    if (size >= 16 && (head.version != PACK_VERSION || head.tiles != PACK_TILES))
        return error_set(error, STRATA_E_UNSUPPORTED,
                         "pack %s has version %u.%u, this program reads %d.%d: make it again with 'strata pack'", path,
                         head.version, head.tiles, PACK_VERSION, PACK_TILES);
    if (size < sizeof head || (head.n_layers <= MAX_LAYERS && size < header_bytes(head.n_layers)))
        return error_set(error, STRATA_E_FORMAT, "pack %s is cut short: it has %llu bytes, less than its header", path,
                         (unsigned long long)size);
    if (head.n_layers > MAX_LAYERS)
        return error_set(error, STRATA_E_FORMAT, "pack %s is damaged: %u layers", path, head.n_layers);
    size_t bytes = (size_t)header_bytes(head.n_layers);
    if (!(*out = malloc(bytes)))
        return error_set(error, STRATA_E_MEMORY, "out of memory for the header of pack %s", path);
    code = read_all(fd, path, *out, bytes, error);
    if (!code && ((*out)->n_layers != head.n_layers || header_hash(*out, bytes) != (*out)->hash))
        code = error_set(error, STRATA_E_FORMAT, "pack %s is damaged: its header differs from the header's hash", path);
    return code;
}

/* Everything but the hashes has one right value. */
static int check_header(const struct head *head, const struct head *wanted, uint64_t size, const char *path, const char *model_path,
                        struct strata_error *error)
{
    if (head->fingerprint != wanted->fingerprint)
        return error_set(error, STRATA_E_FORMAT,
                         "pack %s was made from another model file than %s: make it again with 'strata pack'", path, model_path);
    if (head->n_layers != wanted->n_layers)
        return error_set(error, STRATA_E_FORMAT, "pack %s has %u layers, wanted %u", path, head->n_layers, wanted->n_layers);
    const struct record *found = (const struct record *)(head + 1), *right = (const struct record *)(wanted + 1);
    for (uint32_t i = 0; i < head->n_layers; i++) {
        struct record record = found[i];
        record.hash = 0;
        if (memcmp(&record, &right[i], sizeof record))
            return error_set(
                error, STRATA_E_FORMAT,
                "pack %s, layer %u: %u experts of %llu bytes at %llu, wanted %u of %llu at %llu in the model's types and shapes",
                path, i, record.n_experts, (unsigned long long)record.blob_bytes, (unsigned long long)record.offset,
                right[i].n_experts, (unsigned long long)right[i].blob_bytes, (unsigned long long)right[i].offset);
    }
    if (size != wanted->file_bytes)
        return error_set(error, STRATA_E_FORMAT, "pack %s %s: it has %llu bytes, wanted %llu", path,
                         size < wanted->file_bytes ? "is cut short" : "is too long", (unsigned long long)size,
                         (unsigned long long)wanted->file_bytes);
    return 0;
}

static int take_layers(struct pack *pack, const struct head *head, struct strata_error *error)
{
    const struct record *records = (const struct record *)(head + 1);
    pack->n_layers = (int)head->n_layers;
    pack->layers = calloc((size_t)pack->n_layers + 1, sizeof *pack->layers);
    if (!pack->layers)
        return error_set(error, STRATA_E_MEMORY, "out of memory for the header of pack %s", pack->path);
    for (int i = 0; i < pack->n_layers; i++)
        pack->layers[i] = (struct pack_layer){ records[i].offset, records[i].bytes, records[i].hash };
    return 0;
}

int pack_open(struct pack *out, const char *path, const struct expert_store *store, uint64_t fingerprint, const char *model_path,
              struct strata_error *error)
{
    *out = (struct pack){ .path = path, .fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK) };
    struct stat status;
    if (out->fd < 0 || fstat(out->fd, &status)) {
        int reason = errno;
        pack_close(out);
        return error_set(error, STRATA_E_IO, "pack %s: cannot open: %s", path, strerror(reason));
    }
    struct head *head = NULL, *wanted = build_header(store, fingerprint);
    int code = 0;
    if (!S_ISREG(status.st_mode))
        code = error_set(error, STRATA_E_FORMAT, "%s is not a pack: it is %s", path,
                         S_ISDIR(status.st_mode) ? "a directory" : "not a regular file");
    else if (!wanted)
        code = error_set(error, STRATA_E_MEMORY, "out of memory for the header of pack %s", path);
    if (!code)
        code = read_header(out->fd, path, (uint64_t)status.st_size, &head, error);
    if (!code)
        code = check_header(head, wanted, (uint64_t)status.st_size, path, model_path, error);
    if (!code)
        code = take_layers(out, head, error);
    free(head);
    free(wanted);
    if (code)
        pack_close(out);
    return code;
}

void pack_close(struct pack *pack)
{
    if (pack->fd >= 0)
        close(pack->fd);
    free(pack->layers);
    *pack = (struct pack){ .fd = -1 };
}

/* ---- Writing
 * --------------------------------------------------------------------------------------------------------------------------- */

struct pack_writer {
    char *path, *part;
    int fd; /* -1: nothing there to remove */
    struct head *head;
    uint32_t layer;         /* being written */
    uint64_t at;            /* where in the file */
    XXH64_state_t *hashing; /* of that layer so far */
};

static struct record *records_of(const struct pack_writer *w) { return (struct record *)(w->head + 1); }

/* Opens PATH.part, for this process alone: two runs to the same name must not write into one file. */
static int open_part(struct pack_writer *w, struct strata_error *error)
{
    struct stat mine, named;
    int fd = open(w->part, O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
    if (fd < 0)
        return error_set(error, STRATA_E_IO, "%s: cannot create: %s", w->part, strerror(errno));
    int code = 0;
    if (fstat(fd, &mine) || !S_ISREG(mine.st_mode))
        code = error_set(error, STRATA_E_ARGUMENT, "%s is not a regular file", w->part);
    else if ((flock(fd, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK) || lstat(w->part, &named) || named.st_dev != mine.st_dev ||
             named.st_ino != mine.st_ino)
        code = error_set(error, STRATA_E_IO, "%s is being written by another program", w->part);
    else if (ftruncate(fd, 0))
        code = error_set(error, STRATA_E_IO, "%s: cannot write: %s", w->part, strerror(errno));
    if (code)
        close(fd);
    else
        w->fd = fd;
    return code;
}

/* What the disk has for this file, with what it holds already; UINT64_MAX if it does not say. */
static uint64_t disk_room(const struct pack_writer *w)
{
    struct statvfs disk;
    struct stat status;
    if (fstatvfs(w->fd, &disk) || fstat(w->fd, &status))
        return UINT64_MAX;
    return (uint64_t)disk.f_bavail * disk.f_frsize + (uint64_t)status.st_blocks * 512;
}

static int cannot_write(const struct pack_writer *w, int reason, struct strata_error *error)
{
    uint64_t room = disk_room(w);
    if (reason != ENOSPC || room == UINT64_MAX)
        return error_set(error, STRATA_E_IO, "%s: cannot write: %s", w->part, strerror(reason));
    return error_set(error, STRATA_E_IO, "%s: the pack needs %s, the disk has %s for it: %s", w->part,
                     store_amount((double)w->head->file_bytes).text, store_amount((double)room).text, strerror(reason));
}

/* All of it now, where the file system can: a full disk is noticed before the work. */
static int take_room(struct pack_writer *w, struct strata_error *error)
{
    if (disk_room(w) < w->head->file_bytes) /* the attempt would fill the disk for a moment */
        return cannot_write(w, ENOSPC, error);
    bool refused = fallocate(w->fd, 0, 0, (off_t)w->head->file_bytes) && (errno == ENOSPC || errno == EDQUOT || errno == EFBIG);
    return refused ? cannot_write(w, errno, error) : 0;
}

static int write_at(struct pack_writer *w, uint64_t offset, const void *bytes, size_t length, struct strata_error *error)
{
    for (size_t done = 0; done < length;) {
        ssize_t n = pwrite(w->fd, (const uint8_t *)bytes + done, length - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return cannot_write(w, errno, error);
        done += (size_t)n;
    }
    return 0;
}

int pack_writer_create(struct pack_writer **out, const char *path, const struct expert_store *store, uint64_t fingerprint,
                       struct strata_error *error)
{
    *out = NULL;
    struct stat status;
    if (stat(path, &status) == 0 && !S_ISREG(status.st_mode)) /* renaming over /dev/null would replace it */
        return error_set(error, STRATA_E_ARGUMENT, "%s: this is %s, wanted the name of a file to write", path,
                         S_ISDIR(status.st_mode) ? "a directory" : "not a regular file");
    struct pack_writer *w = calloc(1, sizeof *w);
    if (!w)
        return error_set(error, STRATA_E_MEMORY, "out of memory for a pack");
    *w = (struct pack_writer){ .path = strdup(path),
                               .fd = -1,
                               .head = build_header(store, fingerprint),
                               .at = header_bytes((uint64_t)store->n_layers),
                               .hashing = XXH64_createState() };
    int code = asprintf(&w->part, "%s.part", path) < 0 ? STRATA_E_MEMORY : 0;
    if (code)
        w->part = NULL;
    if (code || !w->path || !w->head || !w->hashing)
        code = error_set(error, STRATA_E_MEMORY, "out of memory for a pack");
    if (!code)
        code = open_part(w, error);
    if (!code)
        code = take_room(w, error);
    if (code) {
        pack_writer_destroy(w);
        return code;
    }
    XXH64_reset(w->hashing, 0);
    *out = w;
    return 0;
}

int pack_writer_write(struct pack_writer *w, const uint8_t *bytes, size_t length, struct strata_error *error)
{
    if (w->layer == w->head->n_layers || length > records_of(w)[w->layer].offset + records_of(w)[w->layer].bytes - w->at)
        return error_set(error, STRATA_E_ARGUMENT, "%s: %zu bytes past the end of layer %u", w->part, length, w->layer);
    int code = write_at(w, w->at, bytes, length, error);
    if (code)
        return code;
    struct record *record = &records_of(w)[w->layer];
    XXH64_update(w->hashing, bytes, length);
    w->at += length;
    if (w->at == record->offset + record->bytes) {
        record->hash = XXH64_digest(w->hashing);
        XXH64_reset(w->hashing, 0);
        w->layer++;
    }
    return 0;
}

/* Makes the rename itself durable. A file system that cannot sync a directory has still got the file. */
static void sync_folder(const char *path)
{
    const char *slash = strrchr(path, '/');
    char *folder = slash == path ? strdup("/") : slash ? strndup(path, (size_t)(slash - path)) : strdup(".");
    int fd = folder ? open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    free(folder);
    if (fd >= 0) {
        fsync(fd);
        close(fd);
    }
}

int pack_writer_finish(struct pack_writer *w, struct strata_error *error)
{
    if (w->layer < w->head->n_layers)
        return error_set(error, STRATA_E_ARGUMENT, "%s: %u of %u layers are there", w->part, w->layer, w->head->n_layers);
    uint64_t bytes = header_bytes(w->head->n_layers);
    w->head->hash = header_hash(w->head, bytes);
    int code = write_at(w, 0, w->head, (size_t)bytes, error);
    if (!code && fsync(w->fd))
        code = cannot_write(w, errno, error);
    if (!code && rename(w->part, w->path))
        code = error_set(error, STRATA_E_IO, "%s: cannot rename %s to this name: %s", w->path, w->part, strerror(errno));
    if (code)
        return code;
    close(w->fd);
    w->fd = -1;
    sync_folder(w->path);
    return 0;
}

void pack_writer_destroy(struct pack_writer *w)
{
    if (!w)
        return;
    if (w->fd >= 0) {
        unlink(w->part); /* first: the lock ends with the file */
        close(w->fd);
    }
    free(w->path);
    free(w->part);
    free(w->head);
    XXH64_freeState(w->hashing);
    free(w);
}
