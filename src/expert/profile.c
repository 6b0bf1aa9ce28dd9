#define _GNU_SOURCE /* asprintf, mkostemp */
#include "expert/profile.h"

#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "a profile's numbers are read as they lie in the file");

enum { VERSION = 1 };
static const char magic[8] = "STRATAPR";

/* The whole file. */
struct contents {
    char magic[8];
    uint32_t version, n_layers, n_experts, zero;
    uint64_t hash; /* xxh64 of the whole file, with 0 here */
    float parts[]; /* [n_layers][n_experts]: of the windows that requested the expert */
};
_Static_assert(sizeof(struct contents) == 32, "docs/FORMAT.md says so");

static size_t parts_bytes(int n_layers, int n_experts) { return (size_t)n_layers * (size_t)n_experts * sizeof(float); }

static uint64_t contents_hash(struct contents *c, size_t size)
{
    uint64_t there = c->hash;
    c->hash = 0;
    uint64_t hash = XXH64(c, size, 0);
    c->hash = there;
    return hash;
}

/* What both sides insist on: a profile that was written can be read. */
static int check_parts(const char *path, int n_layers, int n_experts, const float *profile, struct strata_error *error)
{
    for (int i = 0; i < n_layers; i++)
        for (int e = 0; e < n_experts; e++, profile++)
            if (!isfinite(*profile) || *profile < 0)
                return error_set(error, STRATA_E_FORMAT, "profile %s: layer %d, expert %d: %g, wanted a finite number that is not negative", path,
                                 i, e, (double)*profile);
    return 0;
}

/* ---- Reading ----------------------------------------------------------------------------------------------------------- */

/* Of a file of `size` bytes, as many as there are up to `wanted` were read. */
static int check_contents(const char *path, struct contents *c, uint64_t size, size_t wanted, int n_layers, int n_experts, struct strata_error *error)
{
    if (memcmp(c->magic, magic, sizeof magic))
        return error_set(error, STRATA_E_FORMAT, "%s is not a profile: it does not begin with %.8s", path, magic);
    if (size >= 12 && c->version != VERSION)
        return error_set(error, STRATA_E_UNSUPPORTED, "profile %s has version %u, this program reads %d", path, c->version, VERSION);
    if (size >= sizeof *c && (c->n_layers != (uint32_t)n_layers || c->n_experts != (uint32_t)n_experts))
        return error_set(error, STRATA_E_FORMAT, "profile %s is of a model with %u layers of %u experts, wanted %d of %d", path, c->n_layers, c->n_experts,
                         n_layers, n_experts);
    if (size != wanted)
        return error_set(error, STRATA_E_FORMAT, "profile %s %s: it has %llu bytes, wanted %zu", path, size < wanted ? "is cut short" : "is too long",
                         (unsigned long long)size, wanted);
    uint64_t hash = contents_hash(c, wanted);
    if (hash != c->hash)
        return error_set(error, STRATA_E_FORMAT, "profile %s is damaged: its hash is %016llx, wanted %016llx", path, (unsigned long long)hash,
                         (unsigned long long)c->hash);
    return check_parts(path, n_layers, n_experts, c->parts, error);
}

static int read_profile(const char *path, int fd, int n_layers, int n_experts, float *profile, struct strata_error *error)
{
    struct stat status;
    if (fd < 0 || fstat(fd, &status))
        return error_set(error, STRATA_E_IO, "profile %s: cannot open: %s", path, strerror(errno));
    if (!S_ISREG(status.st_mode))
        return error_set(error, STRATA_E_FORMAT, "%s is not a profile: it is %s", path, S_ISDIR(status.st_mode) ? "a directory" : "not a regular file");
    uint64_t size = (uint64_t)status.st_size;
    size_t wanted = sizeof(struct contents) + parts_bytes(n_layers, n_experts);
    struct contents *c = calloc(1, wanted);
    if (!c)
        return error_set(error, STRATA_E_MEMORY, "out of memory for profile %s", path);
    struct file_reader file;
    file_reader_open(&file, path, fd, false);
    int code = file_read(&file, 0, c, size < wanted ? (size_t)size : wanted, error);
    file_reader_close(&file);
    code = code ? code : check_contents(path, c, size, wanted, n_layers, n_experts, error);
    if (!code)
        memcpy(profile, c->parts, parts_bytes(n_layers, n_experts));
    free(c);
    return code;
}

int profile_read(const char *path, int n_layers, int n_experts, float *profile, struct strata_error *error)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), code = read_profile(path, fd, n_layers, n_experts, profile, error);
    if (fd >= 0)
        close(fd);
    return code;
}

/* ---- Writing ----------------------------------------------------------------------------------------------------------- */

/* Everything but the name. 0, or why not. */
static int write_contents(int fd, mode_t mode, const struct contents *c, size_t size)
{
    for (size_t done = 0; done < size;) {
        ssize_t n = write(fd, (const uint8_t *)c + done, size - done);
        if (n < 0 && errno != EINTR)
            return errno;
        done += n < 0 ? 0 : (size_t)n;
    }
    return fchmod(fd, mode) || fsync(fd) ? errno : 0;
}

/* Writes beside `path`, then renames. The name of the part is nobody else's, also when two programs save to one place. */
static int replace_file(const char *path, const struct contents *c, size_t size, struct strata_error *error)
{
    struct stat old;
    bool replaces = stat(path, &old) == 0;
    if (replaces && !S_ISREG(old.st_mode)) /* renaming over /dev/null would replace it */
        return error_set(error, STRATA_E_ARGUMENT, "profile %s: this is %s, wanted the name of a file to write", path,
                         S_ISDIR(old.st_mode) ? "a directory" : "not a regular file");
    char *part;
    if (asprintf(&part, "%s.XXXXXX", path) < 0)
        return error_set(error, STRATA_E_MEMORY, "out of memory for profile %s", path);
    int fd = mkostemp(part, O_CLOEXEC), code = 0;
    if (fd < 0) {
        code = error_set(error, STRATA_E_IO, "profile %s: cannot create a file beside it: %s", path, strerror(errno));
        free(part);
        return code;
    }
    int reason = write_contents(fd, replaces ? old.st_mode & 0777 : 0644, c, size); /* mkostemp's mode is for secrets */
    if (close(fd) && !reason)
        reason = errno;
    if (reason)
        code = error_set(error, STRATA_E_IO, "profile %s: cannot write %s: %s", path, part, strerror(reason));
    else if (rename(part, path))
        code = error_set(error, STRATA_E_IO, "profile %s: cannot rename %s to this name: %s", path, part, strerror(errno));
    if (code)
        unlink(part);
    free(part);
    return code;
}

int profile_write(const char *path, int n_layers, int n_experts, const float *profile, struct strata_error *error)
{
    int code = check_parts(path, n_layers, n_experts, profile, error);
    if (!code)
        code = file_may_replace(path, magic, "profile", error);
    if (code)
        return code;
    size_t bytes = parts_bytes(n_layers, n_experts), size = sizeof(struct contents) + bytes;
    struct contents *c = malloc(size);
    if (!c)
        return error_set(error, STRATA_E_MEMORY, "out of memory for profile %s", path);
    *c = (struct contents){ .version = VERSION, .n_layers = (uint32_t)n_layers, .n_experts = (uint32_t)n_experts };
    memcpy(c->magic, magic, sizeof magic);
    memcpy(c->parts, profile, bytes);
    c->hash = contents_hash(c, size);
    code = replace_file(path, c, size, error);
    free(c);
    return code;
}
