/* file.h - parts of large files, read by several threads at once, past the page cache where that is wanted.
 *
 * What is read the usual way stays in the page cache, and a file that fills an arena as large as the RAM would be in memory twice
 * and push other programs' pages out. A `direct` reader opens the file a second time with O_DIRECT, and reads as usual whatever the
 * system or the alignment does not allow that way. The invariant: exactly the bytes asked for arrive, or a sentence names the file,
 * the place and the reason.
 */
#ifndef BASE_FILE_H
#define BASE_FILE_H

#include "base/error.h"

enum { FILE_PAGE = 4096 }; /* offsets, lengths and addresses of direct reads are multiples of it: enough for every disk */

struct file_reader {
    const char *path; /* for sentences */
    int fd;           /* the caller's */
    int direct_fd;    /* the same file with O_DIRECT; -1: none */
};

/* `path` and `fd` (open for reading) stay the caller's and outlive the reader. Without O_DIRECT it works too, so this cannot fail.
 */
void file_reader_open(struct file_reader *out, const char *path, int fd, bool direct);
void file_reader_close(struct file_reader *reader);

/* Memory that one thread at a time reads into; starts as { 0 } and grows. */
struct file_buffer {
    uint8_t *data;
    size_t size;
};
void file_buffer_free(struct file_buffer *buffer);

/* Bytes [offset, offset + length) to `out`; past the page cache if all three are multiples of FILE_PAGE. Thread-safe. */
int file_read(const struct file_reader *reader, uint64_t offset, void *out, size_t length, struct strata_error *error);
/* The same bytes somewhere in the buffer: *out, valid until its next use. Any offset and length goes past the page cache. */
int file_fetch(const struct file_reader *reader, uint64_t offset, size_t length, struct file_buffer *buffer, const uint8_t **out,
               struct strata_error *error);

/* Whether an output may take this name: 0, unless a file with something else in it stands there (it does not begin with `magic`, 8 bytes): then
 * STRATA_E_ARGUMENT, and `what` is in the sentence. Somebody's model must not become a trace. */
int file_may_replace(const char *path, const char *magic, const char *what, struct strata_error *error);

#endif
