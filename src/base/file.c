#define _GNU_SOURCE /* O_DIRECT */
#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

void file_reader_open(struct file_reader *out, const char *path, int fd, bool direct)
{
    /* Not by its path, which may lead to another file by now: what was checked is behind `fd`. */
    char same[40];
    snprintf(same, sizeof same, "/proc/self/fd/%d", fd);
    *out = (struct file_reader){ path, fd, direct ? open(same, O_RDONLY | O_DIRECT | O_CLOEXEC) : -1 };
}

void file_reader_close(struct file_reader *reader)
{
    if (reader->direct_fd >= 0)
        close(reader->direct_fd);
    reader->direct_fd = -1;
}

void file_buffer_free(struct file_buffer *buffer)
{
    free(buffer->data);
    *buffer = (struct file_buffer){ 0 };
}

static int cannot_read(const struct file_reader *r, uint64_t offset, size_t length, int reason, struct strata_error *error)
{
    return error_set(error, STRATA_E_IO, "%s: cannot read %zu bytes at %llu: %s", r->path, length, (unsigned long long)offset,
                     strerror(reason));
}

/* As usual: bytes [offset, offset + length), of which the first `got` are there. */
static int read_rest(const struct file_reader *r, uint64_t offset, uint8_t *out, size_t length, size_t got,
                     struct strata_error *error)
{
    while (got < length) {
        ssize_t n = pread(r->fd, out + got, length - got, (off_t)(offset + got));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return cannot_read(r, offset, length, errno, error);
        if (n == 0)
            return error_set(error, STRATA_E_IO,
                             "%s: the file became shorter while it was open: nothing at byte %llu, wanted %zu more", r->path,
                             (unsigned long long)(offset + got), length - got);
        got += (size_t)n;
    }
    return 0;
}

/* One aligned range with O_DIRECT; *got bytes of it arrived: all, fewer at the end of the file, or none where this way is refused.
 */
static int read_direct(const struct file_reader *r, uint64_t offset, uint8_t *out, size_t length, size_t *got,
                       struct strata_error *error)
{
    ssize_t n;
    do
        n = pread(r->direct_fd, out, length, (off_t)offset);
    while (n < 0 && errno == EINTR);
    if (n < 0 && errno != EINVAL && errno != EOPNOTSUPP)
        return cannot_read(r, offset, length, errno, error);
    *got = n < 0 ? 0 : (size_t)n;
    return 0;
}

int file_read(const struct file_reader *r, uint64_t offset, void *out, size_t length, struct strata_error *error)
{
    size_t got = 0;
    int code = 0;
    if (r->direct_fd >= 0 && (offset | length | (uintptr_t)out) % FILE_PAGE == 0)
        code = read_direct(r, offset, out, length, &got, error);
    return code ? code : read_rest(r, offset, out, length, got, error);
}

int file_fetch(const struct file_reader *r, uint64_t offset, size_t length, struct file_buffer *buffer, const uint8_t **out,
               struct strata_error *error)
{
    size_t before = r->direct_fd >= 0 ? offset % FILE_PAGE : 0, span = (before + length + FILE_PAGE - 1) & ~(size_t)(FILE_PAGE - 1),
           got = 0;
    if (buffer->size < span) {
        free(buffer->data);
        buffer->data = aligned_alloc(FILE_PAGE, span);
        buffer->size = buffer->data ? span : 0;
        if (!buffer->data)
            return error_set(error, STRATA_E_MEMORY, "out of memory for reading %zu bytes of %s", length, r->path);
    }
    int code = 0;
    if (r->direct_fd >= 0)
        code = read_direct(r, offset - before, buffer->data, span, &got, error);
    *out = buffer->data + before;
    return code ? code : read_rest(r, offset - before, buffer->data, before + length, got, error);
}

int file_may_replace(const char *path, const char *magic, const char *what, struct strata_error *error)
{
    struct stat there;
    char begins[8];
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return 0; /* not there, or its opening for writing says why not */
    bool other = fstat(fd, &there) == 0 && S_ISREG(there.st_mode) && there.st_size > 0 &&
                 (read(fd, begins, sizeof begins) != (ssize_t)sizeof begins || memcmp(begins, magic, sizeof begins) != 0);
    close(fd);
    return other ? error_set(error, STRATA_E_ARGUMENT, "%s exists and is no %s: it is not replaced", path, what) : 0;
}
