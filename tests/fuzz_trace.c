/* fuzz_trace.c - any bytes as a trace: refused with a sentence, or read to its end and simulated. The first byte says whether magic, hash and
 * sums are made right before, because no mutation hits a hash. */
#define _GNU_SOURCE /* memfd_create */
#include "expert/simulate.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xxhash.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(bool holds)
{
    if (!holds)
        abort();
}

static uint32_t number(const uint8_t *at)
{
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* docs/FORMAT.md, "Trace". */
static void sign(uint8_t *file, size_t size)
{
    enum { HEAD = 96, HASH = 88 };
    if (size < HEAD)
        return;
    memcpy(file, "STRATATR\1\0\0\0", 12);
    uint64_t n_layers = number(file + 12), n_used = number(file + 20), at = HEAD + 8 * n_layers, window = 0, bytes;
    if (size < at)
        return;
    memset(file + HASH, 0, 8);
    memcpy(file + HASH, &(uint64_t){ XXH64(file, at, 0) }, 8);
    for (; size - at >= 8 && n_layers <= 1024 && n_used <= 32 && number(file + at) <= 8; at += bytes, window++) {
        bytes = 8 + 2 * n_layers * n_used * number(file + at);
        if (size - at < bytes)
            return;
        memcpy(file + at + bytes - 4, &(uint32_t){ (uint32_t)XXH64(file + at, bytes - 4, window) }, 4);
    }
}

/* What a simulation must say of any trace. Large shapes are left out: they only take long. */
static void run(struct trace_reader *reader, bool readable)
{
    enum { MANY = 4096 };
    const struct trace_header *h = trace_reader_header(reader);
    struct residency_options options = h->options;
    struct simulation s;
    struct strata_error error = { 0 };
    if (h->n_layers * h->n_experts > MANY)
        return;
    for (int all = 0; all < 2; all++) {
        int code = simulate(&s, reader, &options, NULL, &error);
        check(readable ? code == 0 : code == STRATA_E_FORMAT && error.text[0]);
        check(s.counters.hits <= s.counters.requests && s.belady_hits <= s.counters.requests && s.slots <= h->n_layers * h->n_experts);
        check(!all || (s.counters.hits == s.counters.requests && s.belady_hits == s.counters.requests));
        options.bytes = UINT64_MAX;
    }
}

static void walk(struct trace_reader *reader)
{
    const struct trace_header *h = trace_reader_header(reader);
    const int32_t *ids;
    struct strata_error error = { 0 };
    int n_rows;
    while ((n_rows = trace_reader_next(reader, &ids, &error)) > 0)
        for (int i = 0; i < h->n_layers * n_rows * h->n_used; i++)
            check(ids[i] >= 0 && ids[i] < h->n_experts);
    check(n_rows == 0 || (error.code == n_rows && error.text[0]));
    run(reader, n_rows == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int file = -1;
    static char path[64];
    if (file < 0) {
        file = memfd_create("fuzz_trace", MFD_CLOEXEC);
        check(file >= 0);
        snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    }
    if (size < 1)
        return 0;
    uint8_t *bytes = malloc(size);
    check(bytes);
    memcpy(bytes, data + 1, size - 1);
    if (data[0] & 1)
        sign(bytes, size - 1);
    check(ftruncate(file, 0) == 0 && pwrite(file, bytes, size - 1, 0) == (ssize_t)(size - 1));
    free(bytes);

    struct trace_reader *reader;
    struct strata_error error = { 0 };
    int code = trace_reader_open(&reader, path, &error);
    if (code < 0) {
        check(!reader && error.code == code && error.text[0]);
        return 0;
    }
    walk(reader);
    trace_reader_close(reader);
    return 0;
}
