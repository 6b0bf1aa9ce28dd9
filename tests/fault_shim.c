/* fault_shim.c - an LD_PRELOAD library that makes reads and writes of regular files go wrong, for tests/pack_test.sh and its like.
 *
 *     STRATA_FAULT_READ=KIND:N    the N-th pread of the process (from 1) goes wrong: eio (it fails), short (half of it arrives),
 * end (nothing arrives, as if the file had become shorter), kill (the process dies there) STRATA_FAULT_WRITE=KIND:N   the N-th
 * write or pwrite: full (ENOSPC), eio, short, kill STRATA_FAULT_SLOW=US        every read and write takes so long, so that
 * something can happen meanwhile
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum kind { NONE, FAIL_EIO, FAIL_FULL, SHORT, END, KILL };

struct fault {
    const char *variable;
    atomic_long count;
};
static struct fault reading = { "STRATA_FAULT_READ", 0 }, writing = { "STRATA_FAULT_WRITE", 0 };

static enum kind next(struct fault *fault, int fd)
{
    static const struct {
        const char *name;
        enum kind kind;
    } names[] = { { "eio:", FAIL_EIO }, { "full:", FAIL_FULL }, { "short:", SHORT }, { "end:", END }, { "kill:", KILL } };
    struct stat status;
    if (fstat(fd, &status) || !S_ISREG(status.st_mode))
        return NONE;
    const char *slow = getenv("STRATA_FAULT_SLOW"), *wish = getenv(fault->variable);
    if (slow)
        usleep((useconds_t)atoi(slow));
    long now = atomic_fetch_add(&fault->count, 1) + 1;
    for (size_t i = 0; wish && i < sizeof names / sizeof *names; i++) {
        size_t n = strlen(names[i].name);
        if (!strncmp(wish, names[i].name, n) && atol(wish + n) == now)
            return names[i].kind;
    }
    return NONE;
}

/* Whether the call ends here, with *result; otherwise *length of it are to be done. */
static bool strikes(struct fault *fault, int fd, size_t *length, ssize_t *result)
{
    switch (next(fault, fd)) {
    case FAIL_EIO:
        errno = EIO;
        *result = -1;
        return true;
    case FAIL_FULL:
        errno = ENOSPC;
        *result = -1;
        return true;
    case END:
        *result = 0;
        return true;
    case KILL:
        raise(SIGKILL);
        return false;
    case SHORT:
        *length = *length > 1 ? *length / 2 : *length;
        return false;
    case NONE:
        break;
    }
    return false;
}

typedef ssize_t read_fn(int, void *, size_t, off_t);
typedef ssize_t write_fn(int, const void *, size_t, off_t);
typedef ssize_t plain_write_fn(int, const void *, size_t);

#define READ(name)                                                                                                                 \
    ssize_t name(int fd, void *out, size_t length, off_t offset);                                                                  \
    ssize_t name(int fd, void *out, size_t length, off_t offset)                                                                   \
    {                                                                                                                              \
        ssize_t result;                                                                                                            \
        return strikes(&reading, fd, &length, &result) ? result : ((read_fn *)dlsym(RTLD_NEXT, #name))(fd, out, length, offset);   \
    }
#define WRITE(name)                                                                                                                \
    ssize_t name(int fd, const void *data, size_t length, off_t offset);                                                           \
    ssize_t name(int fd, const void *data, size_t length, off_t offset)                                                            \
    {                                                                                                                              \
        ssize_t result;                                                                                                            \
        return strikes(&writing, fd, &length, &result) ? result : ((write_fn *)dlsym(RTLD_NEXT, #name))(fd, data, length, offset); \
    }
READ(pread)
READ(pread64)
WRITE(pwrite)
WRITE(pwrite64)

ssize_t write(int fd, const void *data, size_t length)
{
    ssize_t result;
    return strikes(&writing, fd, &length, &result) ? result : ((plain_write_fn *)dlsym(RTLD_NEXT, "write"))(fd, data, length);
}
