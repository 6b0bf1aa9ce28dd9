#include "expert/trace.h"

#include "base/file.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "a trace's numbers are read as they lie in the file");

enum {
    VERSION = 1,
    MAX_LAYERS = 1024,
    MAX_EXPERTS = 65535, /* an id takes two bytes */
    MAX_USED = 32,
    MAX_ROWS = 8,
    MAX_PACE = 1000000, /* of period, lag and swaps: what the command line allows */
    NAME_BYTES = 32,
};
/* All experts together then have less than 2^58 bytes: no sum or product of them overflows. */
static const uint64_t max_blob_bytes = 1ull << 32;
static const char magic[8] = "STRATATR";

/* The file's beginning, followed by the blob sizes of all layers, 8 bytes each; then the windows. */
struct head {
    char magic[8];
    uint32_t version, n_layers, n_experts, n_used;
    uint64_t bytes; /* from here on: struct residency_options */
    uint32_t period, lag, max_swaps;
    float half_life, admit, hysteresis;
    char policy[NAME_BYTES];
    uint64_t hash; /* xxh64 of all this, up to the first window, with 0 here */
};
_Static_assert(sizeof(struct head) == 96, "docs/FORMAT.md says so");

static size_t header_bytes(uint32_t n_layers) { return sizeof(struct head) + n_layers * sizeof(uint64_t); }

static uint64_t header_hash(struct head *head)
{
    uint64_t there = head->hash;
    head->hash = 0;
    uint64_t hash = XXH64(head, header_bytes(head->n_layers), 0);
    head->hash = there;
    return hash;
}

/* A window: its rows (4 bytes), the ids [n_layers][n_rows][n_used] (2 bytes each), its sum (4 bytes). */
static size_t window_bytes(const struct trace_header *header, int n_rows)
{
    return 4 + (size_t)header->n_layers * (size_t)n_rows * (size_t)header->n_used * sizeof(uint16_t) + 4;
}

/* Of all that stands before the sum. The seed is the window's number, so that a window in the wrong place is noticed too. */
static uint32_t window_sum(const uint8_t *window, size_t bytes, uint64_t number) { return (uint32_t)XXH64(window, bytes - 4, number); }

/* What both sides insist on: a writer makes no file that the reader refuses. */
static int check_head(const char *path, const struct head *h, struct strata_error *error)
{
    const uint64_t *blob_bytes = (const uint64_t *)(h + 1);
    if (h->n_layers < 1 || h->n_layers > MAX_LAYERS || h->n_experts < 1 || h->n_experts > MAX_EXPERTS)
        return error_set(error, STRATA_E_FORMAT, "trace %s: %u layers of %u experts, wanted 1 to %d of 1 to %d", path, h->n_layers, h->n_experts,
                         MAX_LAYERS, MAX_EXPERTS);
    if (h->n_used < 1 || h->n_used > MAX_USED || h->n_used > h->n_experts)
        return error_set(error, STRATA_E_FORMAT, "trace %s: a row uses %u of %u experts, wanted 1 to %d", path, h->n_used, h->n_experts, MAX_USED);
    if (h->lag < 1 || h->lag > h->period || h->period > MAX_PACE || h->max_swaps > MAX_PACE)
        return error_set(error, STRATA_E_FORMAT, "trace %s: %u swaps every %u windows, used after %u; wanted 1 <= used <= every, none above %d", path,
                         h->max_swaps, h->period, h->lag, MAX_PACE);
    if (!isfinite(h->half_life) || h->half_life < 0 || !isfinite(h->admit) || !isfinite(h->hysteresis) || h->hysteresis < 0)
        return error_set(error, STRATA_E_FORMAT, "trace %s: policy settings half-life=%g, admit=%g, hysteresis=%g, wanted finite numbers", path,
                         (double)h->half_life, (double)h->admit, (double)h->hysteresis);
    for (uint32_t i = 0; i < h->n_layers; i++)
        if (blob_bytes[i] < 1 || blob_bytes[i] > max_blob_bytes)
            return error_set(error, STRATA_E_FORMAT, "trace %s, layer %u: an expert has %llu bytes, wanted 1 to %llu", path, i,
                             (unsigned long long)blob_bytes[i], (unsigned long long)max_blob_bytes);
    return 0;
}

/* ---- Writing ----------------------------------------------------------------------------------------------------------- */

struct trace_writer {
    char *path;
    int fd;
    struct trace_header shape; /* its counts alone */
    uint64_t n_windows;        /* written */
    uint8_t *window;           /* the current one, as it will lie in the file */
    int layer, n_rows;         /* layers that it has so far, and their rows */
    struct strata_error error; /* .code 0: none yet */
};

/* 0, or why not all of it was written. */
static int write_all(int fd, const void *bytes, size_t length)
{
    for (size_t done = 0; done < length;) {
        ssize_t n = write(fd, (const uint8_t *)bytes + done, length - done);
        if (n < 0 && errno != EINTR)
            return errno;
        done += n < 0 ? 0 : (size_t)n;
    }
    return 0;
}

/* *out to be freed. */
static int build_head(struct head **out, const char *path, const struct trace_header *header, struct strata_error *error)
{
    const struct residency_options *o = &header->options;
    *out = NULL;
    if (header->n_layers < 1 || header->n_layers > MAX_LAYERS)
        return error_set(error, STRATA_E_ARGUMENT, "trace %s: %d layers, wanted 1 to %d", path, header->n_layers, MAX_LAYERS);
    if (strlen(o->policy.name) >= NAME_BYTES)
        return error_set(error, STRATA_E_ARGUMENT, "trace %s: policy name %s, wanted less than %d bytes", path, o->policy.name, NAME_BYTES);
    struct head *head = *out = calloc(1, header_bytes((uint32_t)header->n_layers));
    if (!head)
        return error_set(error, STRATA_E_MEMORY, "out of memory for trace %s", path);
    *head = (struct head){ .version = VERSION, .n_layers = (uint32_t)header->n_layers, .n_experts = (uint32_t)header->n_experts,
                           .n_used = (uint32_t)header->n_used, .bytes = o->bytes, .period = (uint32_t)o->period, .lag = (uint32_t)o->lag,
                           .max_swaps = (uint32_t)o->max_swaps, .half_life = o->policy.half_life, .admit = o->policy.admit,
                           .hysteresis = o->policy.hysteresis };
    memcpy(head->magic, magic, sizeof magic);
    memcpy(head->policy, o->policy.name, strlen(o->policy.name));
    memcpy(head + 1, header->blob_bytes, head->n_layers * sizeof *header->blob_bytes);
    head->hash = header_hash(head);
    return check_head(path, head, error);
}

int trace_writer_create(struct trace_writer **out, const char *path, const struct trace_header *header, struct strata_error *error)
{
    *out = NULL;
    struct head *head;
    int code = build_head(&head, path, header, error), reason = 0;
    if (code) {
        free(head);
        return code;
    }
    struct trace_writer *w = calloc(1, sizeof *w);
    if (w)
        *w = (struct trace_writer){ .path = strdup(path), .fd = -1, .shape = { .n_layers = header->n_layers, .n_used = header->n_used },
                                    .window = malloc(window_bytes(header, MAX_ROWS)) };
    if (!w || !w->path || !w->window)
        code = error_set(error, STRATA_E_MEMORY, "out of memory for trace %s", path);
    else if ((code = file_may_replace(path, magic, "trace", error)))
        ;
    else if ((w->fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)) < 0)
        code = error_set(error, STRATA_E_IO, "trace %s: cannot create: %s", path, strerror(errno));
    else if ((reason = write_all(w->fd, head, header_bytes(head->n_layers))))
        code = error_set(error, STRATA_E_IO, "trace %s: cannot write: %s", path, strerror(reason));
    free(head);
    if (code && w)
        trace_writer_close(w, NULL);
    else
        *out = w;
    return code;
}

void trace_writer_layer(struct trace_writer *w, const int32_t *ids, int stride, int n_rows)
{
    int n_used = w->shape.n_used;
    if (w->layer == 0)
        w->n_rows = n_rows;
    assert(w->layer < w->shape.n_layers && n_rows == w->n_rows && n_rows >= 1 && n_rows <= MAX_ROWS);
    uint16_t *to = (uint16_t *)(w->window + 4) + (size_t)w->layer++ * (size_t)(n_rows * n_used);
    for (int t = 0; t < n_rows; t++)
        for (int k = 0; k < n_used; k++)
            *to++ = (uint16_t)ids[t * stride + k];
}

void trace_writer_window(struct trace_writer *w, bool complete)
{
    int layers = w->layer;
    w->layer = 0;
    if (!complete || w->error.code) /* what follows a window that is not whole could not be read */
        return;
    assert(layers == w->shape.n_layers);
    size_t bytes = window_bytes(&w->shape, w->n_rows);
    memcpy(w->window, &(uint32_t){ (uint32_t)w->n_rows }, 4);
    memcpy(w->window + bytes - 4, &(uint32_t){ window_sum(w->window, bytes, w->n_windows) }, 4);
    int reason = write_all(w->fd, w->window, bytes);
    if (reason)
        error_write(&w->error, STRATA_E_IO, "trace %s: cannot write window %llu: %s", w->path, (unsigned long long)w->n_windows, strerror(reason));
    else
        w->n_windows++;
}

int trace_writer_close(struct trace_writer *w, struct strata_error *error)
{
    if (w->fd >= 0 && close(w->fd) && !w->error.code) /* some file systems say only now that the disk is full */
        error_write(&w->error, STRATA_E_IO, "trace %s: cannot write: %s", w->path, strerror(errno));
    int code = w->error.code;
    if (code && error)
        *error = w->error;
    free(w->path);
    free(w->window);
    free(w);
    return code;
}

/* ---- Reading ----------------------------------------------------------------------------------------------------------- */

struct trace_reader {
    struct trace_header header;
    char *path;
    struct file_reader file;
    uint64_t size, start, at; /* of the file; the first window; the next one */
    uint64_t n_windows;       /* read since the start */
    uint8_t *window;
    int32_t *ids;
    bool cut;
};

/* A header that is whole: *out, to be freed. */
static int read_head(struct head **out, const struct trace_reader *r, struct strata_error *error)
{
    struct head head = { 0 };
    *out = NULL;
    int code = file_read(&r->file, 0, &head, r->size < sizeof head ? (size_t)r->size : sizeof head, error);
    if (code)
        return code;
    if (memcmp(head.magic, magic, sizeof magic))
        return error_set(error, STRATA_E_FORMAT, "%s is not a trace: it does not begin with %.8s", r->path, magic);
    if (r->size >= 12 && head.version != VERSION)
        return error_set(error, STRATA_E_UNSUPPORTED, "trace %s has version %u, this program reads %d", r->path, head.version, VERSION);
    if (r->size >= 16 && head.n_layers > MAX_LAYERS)
        return error_set(error, STRATA_E_FORMAT, "trace %s: %u layers, wanted 1 to %d", r->path, head.n_layers, MAX_LAYERS);
    if (r->size < header_bytes(head.n_layers))
        return error_set(error, STRATA_E_FORMAT, "trace %s is cut short: it has %llu bytes, less than its header", r->path,
                         (unsigned long long)r->size);
    size_t bytes = header_bytes(head.n_layers);
    if (!(*out = malloc(bytes)))
        return error_set(error, STRATA_E_MEMORY, "out of memory for trace %s", r->path);
    code = file_read(&r->file, 0, *out, bytes, error);
    if (!code && ((*out)->n_layers != head.n_layers || header_hash(*out) != (*out)->hash))
        code = error_set(error, STRATA_E_FORMAT, "trace %s is damaged: its header differs from the header's hash", r->path);
    return code ? code : check_head(r->path, *out, error);
}

static int take_policy(struct expert_policy *out, const char *path, const struct head *head, struct strata_error *error)
{
    const struct expert_policy *p = expert_policies;
    while (p->name && strncmp(p->name, head->policy, NAME_BYTES))
        p++;
    if (!p->name)
        return error_set(error, STRATA_E_UNSUPPORTED, "trace %s: there is no policy '%.*s'", path, NAME_BYTES, head->policy);
    *out = *p;
    out->half_life = head->half_life;
    out->admit = head->admit;
    out->hysteresis = head->hysteresis;
    return 0;
}

static int take_header(struct trace_reader *r, const struct head *head, struct strata_error *error)
{
    struct trace_header *h = &r->header;
    struct residency_options *o = &h->options;
    *h = (struct trace_header){ .n_layers = (int)head->n_layers, .n_experts = (int)head->n_experts, .n_used = (int)head->n_used };
    *o = (struct residency_options){ .bytes = head->bytes, .period = (int)head->period, .lag = (int)head->lag, .max_swaps = (int)head->max_swaps };
    int code = take_policy(&o->policy, r->path, head, error);
    if (code)
        return code;
    size_t sizes = head->n_layers * sizeof *h->blob_bytes, bytes = window_bytes(h, MAX_ROWS);
    h->blob_bytes = malloc(sizes);
    r->window = malloc(bytes);
    r->ids = malloc((bytes - 8) / sizeof(uint16_t) * sizeof *r->ids);
    if (!h->blob_bytes || !r->window || !r->ids)
        return error_set(error, STRATA_E_MEMORY, "out of memory for trace %s", r->path);
    memcpy(h->blob_bytes, head + 1, sizes);
    r->start = r->at = header_bytes(head->n_layers);
    return 0;
}

int trace_reader_open(struct trace_reader **out, const char *path, struct strata_error *error)
{
    *out = NULL;
    struct trace_reader *r = calloc(1, sizeof *r);
    if (!r || !(r->path = strdup(path))) {
        free(r);
        return error_set(error, STRATA_E_MEMORY, "out of memory for trace %s", path);
    }
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), code = 0;
    struct stat status;
    struct head *head = NULL;
    file_reader_open(&r->file, r->path, fd, false);
    if (fd < 0 || fstat(fd, &status))
        code = error_set(error, STRATA_E_IO, "trace %s: cannot open: %s", path, strerror(errno));
    else if (!S_ISREG(status.st_mode))
        code = error_set(error, STRATA_E_FORMAT, "%s is not a trace: it is %s", path, S_ISDIR(status.st_mode) ? "a directory" : "not a regular file");
    else
        r->size = (uint64_t)status.st_size;
    code = code ? code : read_head(&head, r, error);
    code = code ? code : take_header(r, head, error);
    free(head);
    if (code)
        trace_reader_close(r);
    else
        *out = r;
    return code;
}

const struct trace_header *trace_reader_header(const struct trace_reader *r) { return &r->header; }
bool trace_reader_cut(const struct trace_reader *r) { return r->cut; }

/* The next window's bytes, checked as a whole: returns its rows, 0 at the end. */
static int read_window(struct trace_reader *r, struct strata_error *error)
{
    uint64_t left = r->size - r->at;
    uint32_t n_rows, sum;
    r->cut = left > 0 && left < sizeof n_rows;
    if (left < sizeof n_rows)
        return 0;
    int code = file_read(&r->file, r->at, &n_rows, sizeof n_rows, error);
    if (code)
        return code;
    if (n_rows < 1 || n_rows > MAX_ROWS)
        return error_set(error, STRATA_E_FORMAT, "trace %s is damaged: window %llu (at byte %llu) has %u rows, wanted 1 to %d", r->path,
                         (unsigned long long)r->n_windows, (unsigned long long)r->at, n_rows, MAX_ROWS);
    size_t bytes = window_bytes(&r->header, (int)n_rows);
    r->cut = left < bytes;
    if (r->cut)
        return 0;
    code = file_read(&r->file, r->at, r->window, bytes, error);
    if (code)
        return code;
    memcpy(&sum, r->window + bytes - sizeof sum, sizeof sum);
    if (memcmp(r->window, &n_rows, sizeof n_rows) || sum != window_sum(r->window, bytes, r->n_windows))
        return error_set(error, STRATA_E_FORMAT, "trace %s is damaged: window %llu (at byte %llu) differs from its sum", r->path,
                         (unsigned long long)r->n_windows, (unsigned long long)r->at);
    return (int)n_rows;
}

int trace_reader_next(struct trace_reader *r, const int32_t **ids, struct strata_error *error)
{
    int n_rows = read_window(r, error), a_layer = n_rows * r->header.n_used;
    *ids = r->ids;
    if (n_rows <= 0)
        return n_rows;
    const uint16_t *from = (const uint16_t *)(r->window + 4);
    for (int i = 0; i < r->header.n_layers * a_layer; i++) {
        if (from[i] >= r->header.n_experts)
            return error_set(error, STRATA_E_FORMAT, "trace %s: window %llu, layer %d: expert %u, the model has %d", r->path,
                             (unsigned long long)r->n_windows, i / a_layer, from[i], r->header.n_experts);
        r->ids[i] = from[i];
    }
    r->at += window_bytes(&r->header, n_rows);
    r->n_windows++;
    return n_rows;
}

int trace_reader_rewind(struct trace_reader *r, struct strata_error *error)
{
    r->at = r->start;
    r->n_windows = 0;
    r->cut = false;
    return 0;
}

void trace_reader_close(struct trace_reader *r)
{
    if (!r)
        return;
    file_reader_close(&r->file);
    if (r->file.fd >= 0)
        close(r->file.fd);
    free(r->path);
    free(r->header.blob_bytes);
    free(r->window);
    free(r->ids);
    free(r);
}
