/* Traces, their simulation, and profiles: what was written comes back, what is damaged is refused with a sentence, and the simulator's
 * bound is the one that trying everything finds. */
#define _GNU_SOURCE /* asprintf */
#include "expert/profile.h"
#include "expert/simulate.h"
#include "expert/trace.h"

#include <dirent.h>
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <xxhash.h>

#include <cmocka.h>

enum { HEAD = 96, HASH_AT = 88, LAYERS = 3, EXPERTS = 20, USED = 4, WINDOWS = 12, STRIDE = 32, MAX_ROWS = 8 };

static char folder[200], path[256], other[256];
static struct strata_error error;
static uint64_t sizes[LAYERS] = { 1024, 2048, 1024 };

/* ---- Helpers ----------------------------------------------------------------------------------------------------------- */

static uint64_t random_state = 1;
static int random_below(int n)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (int)((random_state >> 33) % (uint64_t)n);
}

static void assert_says(const char *sentence)
{
    if (!strstr(error.text, sentence))
        fail_msg("wanted '%s' in '%s'", sentence, error.text);
}

#define assert_fails(call, wanted, sentence)                                                                                       \
    do {                                                                                                                           \
        memset(&error, 0, sizeof error);                                                                                           \
        assert_int_equal(call, wanted);                                                                                            \
        assert_int_equal(error.code, wanted);                                                                                      \
        assert_says(sentence);                                                                                                     \
    } while (0)

static void assert_done(int code)
{
    if (code)
        fail_msg("%s", error.text);
}

/* A file's bytes, and how many: to be freed. */
static uint8_t *contents(const char *name, size_t *size)
{
    struct stat status;
    int fd = open(name, O_RDONLY);
    assert_true(fd >= 0 && fstat(fd, &status) == 0);
    *size = (size_t)status.st_size;
    uint8_t *bytes = malloc(*size + 1);
    assert_int_equal(read(fd, bytes, *size), *size);
    close(fd);
    return bytes;
}

static void write_file(const char *name, const void *bytes, size_t size)
{
    unlink(name); /* some file systems wait for the disk where a file is emptied and written again */
    int fd = open(name, O_WRONLY | O_CREAT | O_EXCL, 0644);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, bytes, size), size);
    close(fd);
}

static int files_in_folder(void)
{
    int n = 0;
    DIR *dir = opendir(folder);
    assert_non_null(dir);
    for (struct dirent *entry; (entry = readdir(dir));)
        n += entry->d_name[0] != '.';
    closedir(dir);
    return n;
}

/* Files of this process and its children end here, with an error instead of a signal. */
static void limit_files(rlim_t bytes)
{
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &(struct rlimit){ bytes, RLIM_INFINITY }), 0);
}

/* ---- A recorded run ----------------------------------------------------------------------------------------------------- */

struct window {
    int n_rows;
    int32_t ids[LAYERS][MAX_ROWS][STRIDE]; /* a row has room for more, as the engine's have */
};

static struct trace_header sample_header(void)
{
    struct residency_options options = residency_defaults();
    options.bytes = 65536;
    options.period = 5;
    options.lag = 3;
    options.max_swaps = 7;
    options.policy.half_life = 12.5f;
    options.policy.admit = 0.75f;
    options.policy.hysteresis = 2.25f;
    return (struct trace_header){ LAYERS, EXPERTS, USED, sizes, options };
}

/* Distinct experts per row, as a router chooses them. */
static struct window random_window(int n_rows, int n_experts, int n_used)
{
    struct window w = { .n_rows = n_rows };
    for (int i = 0; i < LAYERS; i++)
        for (int t = 0; t < n_rows; t++)
            for (int k = 0; k < n_used; k++) {
                int32_t id, j;
                do
                    for (id = random_below(n_experts), j = 0; j < k && w.ids[i][t][j] != id; j++) {}
                while (j < k);
                w.ids[i][t][k] = id;
            }
    return w;
}

static void record_layers(struct trace_writer *writer, const struct window *w, int layers)
{
    for (int i = 0; i < layers; i++)
        trace_writer_layer(writer, w->ids[i][0], STRIDE, w->n_rows);
}

static void record(struct trace_writer *writer, const struct window *w)
{
    record_layers(writer, w, LAYERS);
    trace_writer_window(writer, true);
}

static struct trace_writer *create(void)
{
    struct trace_header header = sample_header();
    struct trace_writer *writer;
    assert_done(trace_writer_create(&writer, path, &header, &error));
    return writer;
}

static struct window windows[WINDOWS];
/* Writes the sample to `path`: its windows have 1 to 8 rows. */
static void record_sample(void)
{
    struct trace_writer *writer = create();
    for (int i = 0; i < WINDOWS; i++) {
        windows[i] = random_window(1 + i * 5 % MAX_ROWS, EXPERTS, USED);
        record(writer, &windows[i]);
    }
    assert_done(trace_writer_close(writer, &error));
}

static size_t window_size(int n_rows) { return 4 + 2 * LAYERS * USED * (size_t)n_rows + 4; }
static const size_t first_window = HEAD + 8 * LAYERS;

static struct trace_reader *open_trace(const char *name)
{
    struct trace_reader *reader;
    assert_done(trace_reader_open(&reader, name, &error));
    return reader;
}

static int open_bad(const char *name)
{
    struct trace_reader *reader = (void *)1;
    int code = trace_reader_open(&reader, name, &error);
    if (code)
        assert_null(reader);
    else
        trace_reader_close(reader);
    return code;
}

static void assert_window(const int32_t *ids, int n_rows, const struct window *w)
{
    assert_int_equal(n_rows, w->n_rows);
    for (int i = 0; i < LAYERS; i++)
        for (int t = 0; t < n_rows; t++)
            assert_memory_equal(ids + (i * n_rows + t) * USED, w->ids[i][t], USED * sizeof *ids);
}

/* Reads to the end, comparing with the sample. Returns how it ended; *n windows were there. */
static int read_windows(struct trace_reader *reader, int *n)
{
    const int32_t *ids;
    int n_rows;
    for (*n = 0; (n_rows = trace_reader_next(reader, &ids, &error)) > 0; (*n)++) {
        assert_in_range(*n, 0, WINDOWS - 1);
        assert_window(ids, n_rows, &windows[*n]);
    }
    return n_rows;
}

/* ---- Traces ------------------------------------------------------------------------------------------------------------- */

static void a_trace_comes_back_as_it_was_written(void **state)
{
    record_sample();
    struct trace_header wanted = sample_header();
    struct trace_reader *reader = open_trace(path);
    const struct trace_header *h = trace_reader_header(reader);
    assert_int_equal(h->n_layers, LAYERS);
    assert_int_equal(h->n_experts, EXPERTS);
    assert_int_equal(h->n_used, USED);
    assert_memory_equal(h->blob_bytes, sizes, sizeof sizes);
    assert_int_equal(h->options.bytes, 65536);
    assert_int_equal(h->options.period, 5);
    assert_int_equal(h->options.lag, 3);
    assert_int_equal(h->options.max_swaps, 7);
    assert_string_equal(h->options.policy.name, wanted.options.policy.name);
    assert_ptr_equal(h->options.policy.value, wanted.options.policy.value);
    assert_true(h->options.policy.half_life == 12.5f && h->options.policy.admit == 0.75f && h->options.policy.hysteresis == 2.25f);
    for (int again = 0; again < 2; again++) {
        int n;
        assert_int_equal(read_windows(reader, &n), 0);
        assert_int_equal(n, WINDOWS);
        assert_false(trace_reader_cut(reader));
        assert_done(trace_reader_rewind(reader, &error));
    }
    trace_reader_close(reader);
}

static void every_policy_comes_back(void **state)
{
    for (const struct expert_policy *p = expert_policies; p->name; p++) {
        struct trace_header header = sample_header();
        struct trace_writer *writer;
        header.options.policy = *p;
        assert_done(trace_writer_create(&writer, path, &header, &error));
        assert_done(trace_writer_close(writer, &error));
        struct trace_reader *reader = open_trace(path);
        assert_memory_equal(&trace_reader_header(reader)->options.policy, p, sizeof *p);
        trace_reader_close(reader);
    }
}

static void put(uint8_t *file, size_t at, const void *bytes, size_t n) { memcpy(file + at, bytes, n); }
static void put32(uint8_t *file, size_t at, uint32_t value) { put(file, at, &value, 4); }
static void put64(uint8_t *file, size_t at, uint64_t value) { put(file, at, &value, 8); }

/* Makes the hash of a changed header, or the sum of a changed window, right again. */
static void sign_header(uint8_t *file, size_t bytes)
{
    put64(file, HASH_AT, 0);
    put64(file, HASH_AT, XXH64(file, bytes, 0));
}
static void sign_window(uint8_t *window, size_t bytes, int number) { put32(window, bytes - 4, (uint32_t)XXH64(window, bytes - 4, (uint64_t)number)); }

/* docs/FORMAT.md, "Trace", written out by hand. */
static void the_bytes_are_those_of_the_format(void **state)
{
    static const uint16_t ids[2][LAYERS * 2 * USED] = { { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12 },
                                                        { 0, 19, 1, 18, 19, 0, 18, 1, 2, 17, 3, 16, 17, 2, 16, 3, 4, 5, 6, 7, 8, 9, 10, 11 } };
    uint8_t wanted[HEAD + 8 * LAYERS + 4 + 24 + 4 + 4 + 48 + 4] = "STRATATR";
    struct trace_header header = sample_header();
    put32(wanted, 8, 1); /* version */
    put32(wanted, 12, LAYERS);
    put32(wanted, 16, EXPERTS);
    put32(wanted, 20, USED);
    put64(wanted, 24, 65536); /* device memory */
    put32(wanted, 32, 5);     /* period */
    put32(wanted, 36, 3);     /* lag */
    put32(wanted, 40, 7);     /* swaps */
    put32(wanted, 44, 0x41480000); /* 12.5 */
    put32(wanted, 48, 0x3f400000); /* 0.75 */
    put32(wanted, 52, 0x40100000); /* 2.25 */
    put(wanted, 56, header.options.policy.name, strlen(header.options.policy.name));
    for (int i = 0; i < LAYERS; i++)
        put64(wanted, HEAD + 8 * (size_t)i, sizes[i]);
    sign_header(wanted, first_window);
    uint8_t *at = wanted + first_window;
    for (int n = 1; n <= 2; n++) {
        put32(at, 0, (uint32_t)n);
        put(at, 4, ids[n - 1], 24 * (size_t)n);
        sign_window(at, 8 + 24 * (size_t)n, n - 1);
        at += 8 + 24 * n;
    }

    struct trace_writer *writer = create();
    for (int n = 1; n <= 2; n++) {
        struct window w = { .n_rows = n };
        for (int i = 0; i < LAYERS * n * USED; i++)
            w.ids[i / (n * USED)][i / USED % n][i % USED] = ids[n - 1][i];
        record(writer, &w);
    }
    assert_done(trace_writer_close(writer, &error));
    size_t size;
    uint8_t *found = contents(path, &size);
    assert_int_equal(size, sizeof wanted);
    assert_memory_equal(found, wanted, size);
    free(found);
}

static void the_largest_shape_comes_back(void **state)
{
    enum { MOST_LAYERS = 1024, MOST_EXPERTS = 65535, MOST_USED = 32 };
    uint64_t *blobs = malloc(MOST_LAYERS * sizeof *blobs);
    for (int i = 0; i < MOST_LAYERS; i++)
        blobs[i] = 1ull << 32;
    struct trace_header header = sample_header();
    header.n_layers = MOST_LAYERS;
    header.n_experts = MOST_EXPERTS;
    header.n_used = MOST_USED;
    header.blob_bytes = blobs;
    struct trace_writer *writer;
    assert_done(trace_writer_create(&writer, path, &header, &error));
    int32_t row[MAX_ROWS * MOST_USED];
    for (int i = 0; i < MAX_ROWS * MOST_USED; i++)
        row[i] = MOST_EXPERTS - 1 - i;
    for (int i = 0; i < MOST_LAYERS; i++)
        trace_writer_layer(writer, row, MOST_USED, MAX_ROWS);
    trace_writer_window(writer, true);
    assert_done(trace_writer_close(writer, &error));

    struct trace_reader *reader = open_trace(path);
    const int32_t *ids;
    assert_int_equal(trace_reader_next(reader, &ids, &error), MAX_ROWS);
    for (int i = 0; i < MOST_LAYERS; i++)
        assert_memory_equal(ids + (size_t)i * MAX_ROWS * MOST_USED, row, sizeof row);
    assert_int_equal(trace_reader_next(reader, &ids, &error), 0);
    trace_reader_close(reader);
    free(blobs);
}

static void a_window_that_failed_leaves_nothing(void **state)
{
    struct trace_writer *writer = create();
    for (int i = 0; i < WINDOWS; i++) {
        windows[i] = random_window(1 + i % MAX_ROWS, EXPERTS, USED);
        record_layers(writer, &windows[(i + 1) % WINDOWS], i % LAYERS); /* of another width */
        trace_writer_window(writer, false);
        record(writer, &windows[i]);
    }
    assert_done(trace_writer_close(writer, &error));
    struct trace_reader *reader = open_trace(path);
    int n;
    assert_int_equal(read_windows(reader, &n), 0);
    assert_int_equal(n, WINDOWS);
    trace_reader_close(reader);
}

static void a_run_that_is_killed_leaves_its_whole_windows(void **state)
{
    for (int i = 0; i < WINDOWS; i++)
        windows[i] = random_window(2, EXPERTS, USED);
    pid_t child = fork();
    if (child == 0) {
        struct trace_writer *writer = create();
        for (int i = 0; i < 5; i++)
            record(writer, &windows[i]);
        record_layers(writer, &windows[5], 2);
        kill(getpid(), SIGKILL);
    }
    int status;
    waitpid(child, &status, 0);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    struct trace_reader *reader = open_trace(path);
    int n;
    assert_int_equal(read_windows(reader, &n), 0);
    assert_int_equal(n, 5);
    assert_false(trace_reader_cut(reader));
    trace_reader_close(reader);
}

/* In a child, whose files end in the middle of window 5. */
static void a_write_error_is_kept_for_the_end(void **state)
{
    for (int i = 0; i < WINDOWS; i++)
        windows[i] = random_window(2, EXPERTS, USED);
    pid_t child = fork();
    if (child == 0) {
        struct trace_writer *writer = create();
        limit_files(first_window + 5 * window_size(2) + 20);
        for (int i = 0; i < WINDOWS; i++) {
            if (i == 8) /* the disk has room again: the trace must not go on behind a hole */
                limit_files(RLIM_INFINITY);
            record(writer, &windows[i]);
        }
        char wanted[400];
        snprintf(wanted, sizeof wanted, "trace %s: cannot write window 5: File too large", path);
        _exit(trace_writer_close(writer, &error) == STRATA_E_IO && error.code == STRATA_E_IO && !strcmp(error.text, wanted) ? 0 : 1);
    }
    int status, n;
    waitpid(child, &status, 0);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    struct trace_reader *reader = open_trace(path);
    for (int again = 0; again < 2; again++) {
        assert_int_equal(read_windows(reader, &n), 0);
        assert_int_equal(n, 5);
        assert_true(trace_reader_cut(reader));
        assert_done(trace_reader_rewind(reader, &error));
        assert_false(trace_reader_cut(reader));
    }
    trace_reader_close(reader);
}

static void a_trace_of_any_length_is_read_as_far_as_it_is_whole(void **state)
{
    record_sample();
    size_t size, end = first_window;
    int whole = 0;
    uint8_t *file = contents(path, &size);
    for (size_t length = 0; length <= size; length++) {
        write_file(other, file, length);
        if (length < 8) {
            assert_fails(open_bad(other), STRATA_E_FORMAT, "is not a trace: it does not begin with STRATATR");
            continue;
        }
        if (length < first_window) {
            assert_fails(open_bad(other), STRATA_E_FORMAT, "is cut short: it has ");
            continue;
        }
        if (whole < WINDOWS && length == end + window_size(windows[whole].n_rows))
            end += window_size(windows[whole++].n_rows);
        struct trace_reader *reader = open_trace(other);
        int n;
        assert_int_equal(read_windows(reader, &n), 0);
        assert_int_equal(n, whole);
        assert_int_equal(trace_reader_cut(reader), length != end);
        trace_reader_close(reader);
    }
    assert_int_equal(whole, WINDOWS);
    free(file);
}

static void every_damaged_byte_is_noticed(void **state)
{
    record_sample();
    size_t size;
    uint8_t *file = contents(path, &size);
    for (size_t at = 0; at < size; at++) {
        uint8_t bits = (uint8_t)(1 << at % 8);
        file[at] ^= bits;
        write_file(other, file, size);
        memset(&error, 0, sizeof error);
        if (at < first_window) {
            assert_true(open_bad(other) < 0 && error.text[0]);
        } else { /* the windows before are right, and the end is no end: an error, or cut if the rows of the last became more */
            struct trace_reader *reader = open_trace(other);
            int n, code = read_windows(reader, &n);
            assert_true(n < WINDOWS);
            assert_true(code == STRATA_E_FORMAT ? error.code == code : code == 0 && trace_reader_cut(reader));
            trace_reader_close(reader);
        }
        file[at] ^= bits;
    }
    free(file);
}

static void a_header_with_wrong_numbers_is_refused(void **state)
{
    static const struct {
        size_t at, bytes;
        uint64_t value;
        int code;
        const char *sentence;
    } cases[] = {
        { 0, 1, 'T', STRATA_E_FORMAT, "is not a trace: it does not begin with STRATATR" },
        { 8, 4, 2, STRATA_E_UNSUPPORTED, "has version 2, this program reads 1" },
        { 8, 4, 0, STRATA_E_UNSUPPORTED, "has version 0, this program reads 1" },
        { 12, 4, 0, STRATA_E_FORMAT, ": 0 layers of 20 experts, wanted 1 to 1024 of 1 to 65535" },
        { 12, 4, 1025, STRATA_E_FORMAT, ": 1025 layers, wanted 1 to 1024" },
        { 12, 4, UINT32_MAX, STRATA_E_FORMAT, ": 4294967295 layers, wanted 1 to 1024" },
        { 12, 4, 1024, STRATA_E_FORMAT, "is cut short" },
        { 16, 4, 0, STRATA_E_FORMAT, ": 3 layers of 0 experts, wanted 1 to 1024 of 1 to 65535" },
        { 16, 4, 65536, STRATA_E_FORMAT, ": 3 layers of 65536 experts, wanted 1 to 1024 of 1 to 65535" },
        { 20, 4, 0, STRATA_E_FORMAT, ": a row uses 0 of 20 experts, wanted 1 to 32" },
        { 20, 4, 33, STRATA_E_FORMAT, ": a row uses 33 of 20 experts, wanted 1 to 32" },
        { 20, 4, 21, STRATA_E_FORMAT, ": a row uses 21 of 20 experts, wanted 1 to 32" },
        { 32, 4, 0, STRATA_E_FORMAT, ": 7 swaps every 0 windows, used after 3; wanted 1 <= used <= every, none above 1000000" },
        { 32, 4, 1000001, STRATA_E_FORMAT, ": 7 swaps every 1000001 windows" },
        { 36, 4, 0, STRATA_E_FORMAT, ": 7 swaps every 5 windows, used after 0" },
        { 36, 4, 6, STRATA_E_FORMAT, ": 7 swaps every 5 windows, used after 6" },
        { 40, 4, 1000001, STRATA_E_FORMAT, ": 1000001 swaps every 5 windows" },
        { 40, 4, UINT32_MAX, STRATA_E_FORMAT, ": 4294967295 swaps every 5 windows" },
        { 44, 4, 0x7fc00000, STRATA_E_FORMAT, "half-life=nan, admit=0.75, hysteresis=2.25, wanted finite numbers" },
        { 44, 4, 0xbf800000, STRATA_E_FORMAT, "half-life=-1, " },
        { 44, 4, 0x7f800000, STRATA_E_FORMAT, "half-life=inf" },
        { 48, 4, 0x7fc00000, STRATA_E_FORMAT, "admit=nan" },
        { 48, 4, 0xff800000, STRATA_E_FORMAT, "admit=-inf" },
        { 52, 4, 0x7fc00000, STRATA_E_FORMAT, "hysteresis=nan" },
        { 52, 4, 0xbf800000, STRATA_E_FORMAT, "hysteresis=-1" },
        { 56, 1, 'X', STRATA_E_UNSUPPORTED, ": there is no policy 'X" },
        { 56, 1, 0, STRATA_E_UNSUPPORTED, ": there is no policy ''" },
        { 96, 8, 0, STRATA_E_FORMAT, ", layer 0: an expert has 0 bytes, wanted 1 to 4294967296" },
        { 112, 8, 4294967297, STRATA_E_FORMAT, ", layer 2: an expert has 4294967297 bytes, wanted 1 to 4294967296" },
        { 112, 8, UINT64_MAX, STRATA_E_FORMAT, ", layer 2: an expert has 18446744073709551615 bytes" },
    };
    record_sample();
    size_t size;
    uint8_t *file = contents(path, &size), *changed = malloc(size);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        memcpy(changed, file, size);
        put(changed, cases[i].at, &cases[i].value, cases[i].bytes);
        size_t n_layers = cases[i].at == 12 ? (size_t)cases[i].value : LAYERS;
        if (HEAD + 8 * n_layers <= size)
            sign_header(changed, HEAD + 8 * n_layers);
        write_file(other, changed, size);
        assert_fails(open_bad(other), cases[i].code, cases[i].sentence);
    }
    memcpy(changed, file, size); /* a name that fills its place, without a zero */
    memset(changed + 56, 'y', 32);
    sign_header(changed, first_window);
    write_file(other, changed, size);
    assert_fails(open_bad(other), STRATA_E_UNSUPPORTED, ": there is no policy 'yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy'");
    free(changed);
    free(file);
}

/* Opens `other` and wants it to end so after `n` good windows. */
static void assert_ends(int wanted_n, int wanted_code, const char *sentence)
{
    struct trace_reader *reader = open_trace(other);
    int n;
    assert_fails(read_windows(reader, &n), wanted_code, sentence);
    assert_int_equal(n, wanted_n);
    trace_reader_close(reader);
}

static void a_window_with_wrong_numbers_is_refused(void **state)
{
    record_sample();
    size_t size, second = window_size(windows[1].n_rows), at = first_window + window_size(windows[0].n_rows);
    uint8_t *file = contents(path, &size);
    static const uint32_t rows[] = { 0, 9, UINT32_MAX };
    char sentence[100];
    for (int i = 0; i < 3; i++) {
        put32(file, at, rows[i]);
        write_file(other, file, size);
        snprintf(sentence, sizeof sentence, "is damaged: window 1 (at byte %zu) has %u rows, wanted 1 to 8", at, rows[i]);
        assert_ends(1, STRATA_E_FORMAT, sentence);
    }
    put32(file, at, (uint32_t)windows[1].n_rows);
    size_t id = at + 4 + 2 * (size_t)(USED * windows[1].n_rows); /* the first of layer 1 */
    for (int wrong = EXPERTS; wrong <= 65535; wrong += 65535 - EXPERTS) {
        put(file, id, &(uint16_t){ (uint16_t)wrong }, 2);
        sign_window(file + at, second, 1);
        write_file(other, file, size);
        snprintf(sentence, sizeof sentence, ": window 1, layer 1: expert %d, the model has 20", wrong);
        assert_ends(1, STRATA_E_FORMAT, sentence);
    }
    free(file);
}

static void windows_in_another_order_are_refused(void **state)
{
    struct trace_writer *writer = create();
    for (int i = 0; i < 3; i++) {
        windows[i] = random_window(2, EXPERTS, USED);
        record(writer, &windows[i]);
    }
    assert_done(trace_writer_close(writer, &error));
    size_t size, bytes = window_size(2);
    uint8_t *file = contents(path, &size), *changed = malloc(size);
    memcpy(changed, file, size);
    memcpy(changed + first_window + bytes, file + first_window + 2 * bytes, bytes); /* the second is lost */
    write_file(other, changed, size - bytes);
    assert_ends(1, STRATA_E_FORMAT, "is damaged: window 1 (at byte ");
    free(changed);
    free(file);
}

static void what_is_no_trace_is_refused(void **state)
{
    assert_fails(open_bad("tests/no-such-file"), STRATA_E_IO, "trace tests/no-such-file: cannot open: No such file or directory");
    assert_fails(open_bad("tests"), STRATA_E_FORMAT, "tests is not a trace: it is a directory");
    assert_fails(open_bad("/dev/null"), STRATA_E_FORMAT, "/dev/null is not a trace: it is not a regular file");
    assert_int_equal(mkfifo(other, 0644), 0); /* must not wait for a writer */
    assert_fails(open_bad(other), STRATA_E_FORMAT, "it is not a regular file");
    unlink(other);
    assert_fails(open_bad("tests/test_trace.c"), STRATA_E_FORMAT, "tests/test_trace.c is not a trace: it does not begin with STRATATR");
}

static void a_trace_that_becomes_shorter_while_it_is_read_is_an_error(void **state)
{
    record_sample();
    struct trace_reader *reader = open_trace(path);
    assert_int_equal(truncate(path, (off_t)(first_window + window_size(windows[0].n_rows) + 10)), 0);
    int n;
    assert_fails(read_windows(reader, &n), STRATA_E_IO, "the file became shorter while it was open");
    assert_int_equal(n, 1);
    trace_reader_close(reader);
}

static int create_bad(const char *name, const struct trace_header *header)
{
    struct trace_writer *writer = (void *)1;
    int code = trace_writer_create(&writer, name, header, &error);
    if (code)
        assert_null(writer);
    else
        trace_writer_close(writer, NULL);
    return code;
}

static void a_place_that_cannot_be_written_is_named(void **state)
{
    struct trace_header header = sample_header();
    assert_fails(create_bad("/no/folder/trace", &header), STRATA_E_IO, "trace /no/folder/trace: cannot create: No such file or directory");
    assert_fails(create_bad("tests", &header), STRATA_E_IO, "trace tests: cannot create: Is a directory");
    assert_fails(create_bad("/dev/full", &header), STRATA_E_IO, "trace /dev/full: cannot write: No space left on device");
}

static void a_header_that_could_not_be_read_is_not_written(void **state)
{
    record_sample();
    size_t size, size_now;
    uint8_t *before = contents(path, &size);
    struct trace_header header = sample_header();
    header.n_layers = 0;
    assert_fails(create_bad(path, &header), STRATA_E_ARGUMENT, ": 0 layers, wanted 1 to 1024");
    header = sample_header();
    header.n_used = -1;
    assert_fails(create_bad(path, &header), STRATA_E_FORMAT, ": a row uses 4294967295 of 20 experts, wanted 1 to 32");
    header = sample_header();
    header.options.lag = header.options.period + 1;
    assert_fails(create_bad(path, &header), STRATA_E_FORMAT, ": 7 swaps every 5 windows, used after 6");
    header = sample_header();
    header.options.policy.name = "a-policy-with-a-name-of-32-bytes";
    assert_fails(create_bad(path, &header), STRATA_E_ARGUMENT, "policy name a-policy-with-a-name-of-32-bytes, wanted less than 32 bytes");
    uint8_t *after = contents(path, &size_now);
    assert_int_equal(size_now, size);
    assert_memory_equal(after, before, size); /* and what was there stays */
    free(after);
    free(before);
}

/* ---- The simulator ------------------------------------------------------------------------------------------------------ */

enum { LONG = 4000 };

/* A random run of any shape: LAYERS layers of blob sizes `blobs`. */
struct run {
    struct trace_header header;
    uint64_t blobs[LAYERS];
    int n_windows;
    struct window *windows; /* room for [LONG] */
};

static void run_record(const struct run *run)
{
    struct trace_writer *writer;
    assert_done(trace_writer_create(&writer, path, &run->header, &error));
    for (int i = 0; i < run->n_windows; i++)
        record(writer, &run->windows[i]);
    assert_done(trace_writer_close(writer, &error));
}

/* Slots are multiples of 256 bytes, and layers whose slots have the same size share them. */
static uint64_t slot_bytes(uint64_t blob) { return (blob + 255) / 256 * 256; }

/* One, two or three classes; the ids are skewed, and what is popular drifts. */
static void run_make(struct run *run, int n_windows, int n_experts, int n_used, int max_rows)
{
    run->n_windows = n_windows;
    for (int i = 0; i < LAYERS; i++)
        run->blobs[i] = 512 * (1 + (uint64_t)random_below(3)) - (uint64_t)random_below(256);
    run->header = (struct trace_header){ LAYERS, n_experts, n_used, run->blobs, residency_defaults() };
    for (int i = 0; i < n_windows; i++) {
        int hot = 1 + random_below(n_experts), base = i / 16;
        run->windows[i] = random_window(1 + random_below(max_rows), hot < n_used ? n_used : hot, n_used);
        for (int j = 0; j < LAYERS * MAX_ROWS * STRIDE; j++)
            (&run->windows[i].ids[0][0][0])[j] = ((&run->windows[i].ids[0][0][0])[j] + base) % n_experts;
    }
}

static struct residency_options part_of(const struct run *run, int part, int parts)
{
    struct residency_options options = run->header.options;
    uint64_t all = 0;
    for (int i = 0; i < LAYERS; i++)
        all += (uint64_t)run->header.n_experts * slot_bytes(run->blobs[i]);
    options.bytes = all * (uint64_t)part / (uint64_t)parts;
    return options;
}

static struct simulation simulated(const struct residency_options *options, const float *profile)
{
    struct trace_reader *reader = open_trace(path);
    struct simulation s;
    assert_done(simulate(&s, reader, options, profile, &error));
    trace_reader_close(reader);
    return s;
}

/* The requests of all layers with slots of this size, in order: (layer, expert) as one number. Returns how many. */
static int requests_of(const struct run *run, uint64_t slot, int *out)
{
    int n = 0;
    for (int w = 0; w < run->n_windows; w++)
        for (int i = 0; i < LAYERS; i++)
            for (int t = 0, start = n; slot_bytes(run->blobs[i]) == slot && t < run->windows[w].n_rows; t++)
                for (int k = 0; k < run->header.n_used; k++) {
                    int key = i * run->header.n_experts + run->windows[w].ids[i][t][k], j = start;
                    while (j < n && out[j] != key)
                        j++;
                    if (j == n)
                        out[n++] = key;
                }
    return n;
}

/* How many slots of this size there are. */
static int slots_of(const struct run *run, const struct residency_options *options, uint64_t slot)
{
    struct residency *r;
    struct residency_shape shape = { LAYERS, run->header.n_experts, run->blobs };
    assert_done(residency_create(&r, &shape, options, NULL, &error));
    int n = 0;
    for (int i = 0; i < LAYERS; i++)
        for (int e = 0; slot_bytes(run->blobs[i]) == slot && e < run->header.n_experts; e++)
            n += residency_table(r, i)[e] >= 0;
    residency_destroy(r);
    return n;
}

/* The most hits by trying everything: for every possible content, the most hits so far. Keys are at most 12. */
static int tried_hits(const int *requests, int n, int n_keys, int slots)
{
    enum { MOST = 1 << 12 };
    static int best[MOST], then[MOST];
    for (int set = 0; set < 1 << n_keys; set++)
        best[set] = __builtin_popcount((unsigned)set) <= slots ? 0 : -1; /* any content to start with; -1: cannot be */
    for (int i = 0; i < n; i++) {
        int bit = 1 << requests[i];
        for (int set = 0; set < 1 << n_keys; set++)
            then[set] = best[set] < 0 ? -1 : best[set] + ((set & bit) != 0);
        for (int set = 0; set < 1 << n_keys; set++) {
            if (best[set] < 0 || (set & bit))
                continue;
            for (int gone = 0; gone <= n_keys; gone++) { /* instead of one that is there, or in a free slot */
                int loaded = (gone < n_keys ? set & ~(1 << gone) : set) | bit;
                if (__builtin_popcount((unsigned)loaded) <= slots && best[set] > then[loaded])
                    then[loaded] = best[set];
            }
        }
        memcpy(best, then, sizeof best);
    }
    int most = 0;
    for (int set = 0; set < 1 << n_keys; set++)
        most = best[set] > most ? best[set] : most;
    return most;
}

/* Belady's rule by looking ahead, request by request: what is used last goes. */
static int looked_ahead_hits(const int *requests, int n, int n_keys, int slots)
{
    bool there[LAYERS * 64];
    int hits = 0, used = n_keys;
    assert_true(n_keys <= LAYERS * 64);
    memset(there, true, sizeof there); /* everything, before there are too many */
    for (int i = -1; i < n; i++) {
        if (i >= 0) {
            hits += there[requests[i]];
            used += !there[requests[i]];
            there[requests[i]] = true;
        }
        while (used > slots) {
            int farthest = -1, at = -1;
            for (int key = 0; key < n_keys; key++) {
                int next = i + 1;
                while (there[key] && next < n && requests[next] != key)
                    next++;
                if (there[key] && next > farthest) {
                    farthest = next;
                    at = key;
                }
            }
            there[at] = false;
            used--;
        }
    }
    return hits;
}

typedef int hits_fn(const int *requests, int n, int n_keys, int slots);

static uint64_t bound(const struct run *run, const struct residency_options *options, hits_fn *hits)
{
    static int requests[LONG * LAYERS * 64];
    uint64_t total = 0;
    for (int i = 0; i < LAYERS; i++) {
        uint64_t slot = slot_bytes(run->blobs[i]);
        bool first = true;
        for (int j = 0; j < i; j++)
            first &= slot_bytes(run->blobs[j]) != slot;
        if (first)
            total += (uint64_t)hits(requests, requests_of(run, slot, requests), LAYERS * run->header.n_experts, slots_of(run, options, slot));
    }
    return total;
}

static void beladys_bound_is_what_trying_everything_finds(void **state)
{
    struct run run = { .windows = malloc(LONG * sizeof *run.windows) };
    int n_between = 0; /* neither nothing nor all */
    for (int i = 0; i < 150; i++) {
        int n_experts = 1 + random_below(4), n_used = 1 + random_below(n_experts < 2 ? 1 : 2);
        run_make(&run, random_below(10), n_experts, n_used, 3);
        run_record(&run);
        for (int part = 0; part <= 4; part++) {
            struct residency_options options = part_of(&run, part, 4);
            struct simulation s = simulated(&options, NULL);
            assert_int_equal(s.belady_hits, bound(&run, &options, tried_hits));
            n_between += s.belady_hits > 0 && s.belady_hits < s.counters.requests;
        }
    }
    assert_true(n_between > 100);
    free(run.windows);
}

static void beladys_bound_of_long_runs_is_what_looking_ahead_finds(void **state)
{
    struct run run = { .windows = malloc(LONG * sizeof *run.windows) };
    for (int i = 0; i < 12; i++) {
        run_make(&run, 100 + random_below(400), 8 + random_below(24), 1 + random_below(4), 4);
        run_record(&run);
        for (int part = 1; part <= 3; part++) {
            struct residency_options options = part_of(&run, part * part, 12);
            assert_int_equal(simulated(&options, NULL).belady_hits, bound(&run, &options, looked_ahead_hits));
        }
    }
    free(run.windows);
}

/* The two models of this file agree too, so neither is wrong alone. */
static void looking_ahead_finds_what_trying_everything_finds(void **state)
{
    for (int i = 0; i < 2000; i++) {
        int requests[24], n = random_below(25), n_keys = 1 + random_below(6), slots = random_below(n_keys + 1);
        for (int j = 0; j < n; j++)
            requests[j] = random_below(n_keys);
        assert_int_equal(looked_ahead_hits(requests, n, n_keys, slots), tried_hits(requests, n, n_keys, slots));
    }
}

/* The requests and hits of a cache that is never changed are counted by hand. */
static void a_cache_that_never_swaps_hits_what_it_was_seeded_with(void **state)
{
    struct run run = { .windows = malloc(LONG * sizeof *run.windows) };
    struct expert_policy none;
    assert_done(expert_policy_parse(&none, "none", &error));
    for (int i = 0; i < 20; i++) {
        float profile[LAYERS * 30];
        int n_experts = 10 + random_below(20), requests[LONG];
        run_make(&run, 20 + random_below(20), n_experts, 2, 3);
        run_record(&run);
        for (int j = 0; j < LAYERS * n_experts; j++)
            profile[j] = (float)random_below(100);
        struct residency_options options = part_of(&run, 1, 3);
        options.policy = none;
        struct residency *r;
        struct residency_shape shape = { LAYERS, n_experts, run.blobs };
        assert_done(residency_create(&r, &shape, &options, i % 2 ? profile : NULL, &error));
        uint64_t n_requests = 0, hits = 0;
        for (int j = 0; j < LAYERS; j++) {
            struct run one = run; /* this layer's requests alone */
            for (int k = 0; k < LAYERS; k++)
                one.blobs[k] = k == j ? 256 : 512;
            int n = requests_of(&one, 256, requests);
            n_requests += (uint64_t)n;
            for (int k = 0; k < n; k++)
                hits += residency_table(r, j)[requests[k] - j * n_experts] >= 0;
        }
        struct simulation s = simulated(&options, i % 2 ? profile : NULL);
        assert_int_equal(s.counters.windows, run.n_windows);
        assert_int_equal(s.counters.requests, n_requests);
        assert_int_equal(s.counters.hits, hits);
        assert_int_equal(s.counters.swaps, 0);
        assert_int_equal(s.counters.swap_bytes, 0);
        assert_int_equal(s.slots, residency_slots(r));
        assert_true(hits > 0 && s.belady_hits > hits);
        residency_destroy(r);
    }
    free(run.windows);
}

/* What the engine does, without an engine: rows with a stride, swaps admitted when they are due. */
static void a_simulation_repeats_the_run_that_was_recorded(void **state)
{
    static const struct {
        int period, lag, swaps;
    } paces[] = { { 4, 4, 96 }, { 1, 1, 3 }, { 5, 2, 10 } };
    struct run run = { .windows = malloc(LONG * sizeof *run.windows) };
    uint64_t swaps = 0;
    for (int i = 0; i < 9; i++) {
        run_make(&run, 200, 32, 4, 4);
        struct residency_options options = part_of(&run, 1, 4);
        options.period = paces[i % 3].period;
        options.lag = paces[i % 3].lag;
        options.max_swaps = paces[i % 3].swaps;
        run.header.options = options;
        run_record(&run);
        struct residency *r;
        struct residency_shape shape = { LAYERS, 32, run.blobs };
        assert_done(residency_create(&r, &shape, &options, NULL, &error));
        for (int w = 0; w < run.n_windows; w++) {
            if (residency_due(r))
                residency_admit(r);
            for (int j = 0; j < LAYERS; j++)
                residency_use(r, j, run.windows[w].ids[j][0], STRIDE, run.windows[w].n_rows, 4);
            const struct residency_swap *planned;
            residency_end(r, &planned);
        }
        struct trace_reader *reader = open_trace(path);
        struct simulation s;
        const int32_t *ids;
        assert_true(trace_reader_next(reader, &ids, &error) > 0); /* it begins at the first window all the same */
        assert_done(simulate(&s, reader, &trace_reader_header(reader)->options, NULL, &error));
        trace_reader_close(reader);
        assert_memory_equal(&s.counters, residency_counters(r), sizeof s.counters);
        assert_int_equal(s.slots, residency_slots(r));
        swaps += s.counters.swaps;
        residency_destroy(r);
    }
    assert_true(swaps > 0);
    free(run.windows);
}

static void a_trace_without_windows_is_simulated(void **state)
{
    assert_done(trace_writer_close(create(), &error));
    struct residency_options options = sample_header().options;
    struct simulation s = simulated(&options, NULL);
    assert_int_equal(s.counters.windows + s.counters.requests + s.belady_hits, 0);
    assert_true(s.slots > 0);
}

static void a_damaged_trace_is_not_simulated(void **state)
{
    record_sample();
    size_t size;
    uint8_t *file = contents(path, &size);
    file[size - 1] ^= 1;
    write_file(other, file, size);
    free(file);
    struct trace_reader *reader = open_trace(other);
    struct simulation s;
    assert_fails(simulate(&s, reader, &trace_reader_header(reader)->options, NULL, &error), STRATA_E_FORMAT, "is damaged: window 11");
    trace_reader_close(reader);
}

/* ---- Profiles ----------------------------------------------------------------------------------------------------------- */

enum { SHARES = LAYERS * EXPERTS, PROFILE = 32 + 4 * SHARES };

static const float *sample_profile(void)
{
    static float profile[SHARES];
    for (int i = 0; i < SHARES; i++)
        profile[i] = (float)random_below(100000) / 7;
    profile[3] = 0;
    profile[4] = 1e-40f; /* not a normal number */
    profile[5] = 3.4e38f;
    return profile;
}

static int read_bad(const char *name)
{
    float profile[SHARES];
    memset(profile, 0x55, sizeof profile);
    int code = profile_read(name, LAYERS, EXPERTS, profile, &error);
    for (size_t i = 0; code && i < sizeof profile; i++)
        assert_int_equal(((uint8_t *)profile)[i], 0x55);
    return code;
}

static void a_profile_comes_back_as_it_was_written(void **state)
{
    float found[SHARES];
    for (int again = 0; again < 2; again++) { /* the second replaces the first */
        const float *profile = sample_profile();
        assert_done(profile_write(path, LAYERS, EXPERTS, profile, &error));
        assert_done(profile_read(path, LAYERS, EXPERTS, found, &error));
        assert_memory_equal(found, profile, sizeof found);
        assert_int_equal(files_in_folder(), 1);
    }
}

static void a_profile_keeps_the_mode_of_the_old_one(void **state)
{
    struct stat status;
    assert_done(profile_write(path, LAYERS, EXPERTS, sample_profile(), &error));
    assert_int_equal(stat(path, &status), 0);
    assert_int_equal(status.st_mode & 0777, 0644);
    assert_int_equal(chmod(path, 0600), 0);
    assert_done(profile_write(path, LAYERS, EXPERTS, sample_profile(), &error));
    assert_int_equal(stat(path, &status), 0);
    assert_int_equal(status.st_mode & 0777, 0600);
}

/* docs/FORMAT.md, "Profile", written out by hand. */
static void the_bytes_of_a_profile_are_those_of_the_format(void **state)
{
    static const float profile[6] = { 0, 1, 2.5f, 3, 4, 5 };
    static const uint32_t bits[6] = { 0, 0x3f800000, 0x40200000, 0x40400000, 0x40800000, 0x40a00000 };
    uint8_t wanted[32 + 24] = "STRATAPR";
    put32(wanted, 8, 1);
    put32(wanted, 12, 2);
    put32(wanted, 16, 3);
    put(wanted, 32, bits, sizeof bits);
    put64(wanted, 24, XXH64(wanted, sizeof wanted, 0));
    assert_done(profile_write(path, 2, 3, profile, &error));
    size_t size;
    uint8_t *found = contents(path, &size);
    assert_int_equal(size, sizeof wanted);
    assert_memory_equal(found, wanted, size);
    free(found);
}

static void a_damaged_profile_is_refused(void **state)
{
    size_t size;
    assert_done(profile_write(path, LAYERS, EXPERTS, sample_profile(), &error));
    uint8_t *file = contents(path, &size);
    assert_int_equal(size, PROFILE);
    for (size_t at = 0; at < size; at++) {
        uint8_t bits = (uint8_t)(1 << at % 8);
        file[at] ^= bits;
        write_file(other, file, size);
        const char *sentence = at < 8 ? "is not a profile: it does not begin with STRATAPR" : at < 12 ? "this program reads 1" :
                               at < 20 ? "wanted 3 of 20" : "is damaged: its hash is ";
        assert_fails(read_bad(other), at >= 8 && at < 12 ? STRATA_E_UNSUPPORTED : STRATA_E_FORMAT, sentence);
        file[at] ^= bits;
    }
    for (size_t length = 0; length < size; length++) {
        write_file(other, file, length);
        assert_fails(read_bad(other), STRATA_E_FORMAT, length < 8 ? "is not a profile" : "is cut short: it has ");
    }
    file[size] = 0;
    write_file(other, file, size + 1);
    assert_fails(read_bad(other), STRATA_E_FORMAT, "is too long: it has 273 bytes, wanted 272");
    free(file);
}

static void a_profile_with_wrong_numbers_is_refused(void **state)
{
    static const uint32_t wrong[] = { 0x7f800000, 0xff800000, 0x7fc00000, 0xbf800000 };
    size_t size;
    assert_done(profile_write(path, LAYERS, EXPERTS, sample_profile(), &error));
    uint8_t *file = contents(path, &size);
    for (int i = 0; i < 4; i++) {
        put32(file, 32 + 4 * (2 * EXPERTS + 7), wrong[i]);
        put64(file, 24, 0);
        put64(file, 24, XXH64(file, size, 0));
        write_file(other, file, size);
        assert_fails(read_bad(other), STRATA_E_FORMAT, ": layer 2, expert 7: ");
    }
    free(file);
}

static void the_profile_of_another_model_is_refused(void **state)
{
    float profile[SHARES + EXPERTS] = { 0 };
    assert_done(profile_write(path, LAYERS, EXPERTS, sample_profile(), &error));
    assert_fails(profile_read(path, LAYERS + 1, EXPERTS, profile, &error), STRATA_E_FORMAT, "is of a model with 3 layers of 20 experts, wanted 4 of 20");
    assert_fails(profile_read(path, EXPERTS, LAYERS, profile, &error), STRATA_E_FORMAT, "is of a model with 3 layers of 20 experts, wanted 20 of 3");
}

static void what_is_no_profile_is_refused(void **state)
{
    assert_fails(read_bad("tests/no-such-file"), STRATA_E_IO, "profile tests/no-such-file: cannot open: No such file or directory");
    assert_fails(read_bad("tests"), STRATA_E_FORMAT, "tests is not a profile: it is a directory");
    assert_fails(read_bad("/dev/null"), STRATA_E_FORMAT, "/dev/null is not a profile: it is not a regular file");
    assert_fails(read_bad("tests/test_trace.c"), STRATA_E_FORMAT, "is not a profile: it does not begin with STRATAPR");
}

/* In a child: a write that fails leaves the old profile and nothing else. */
static void assert_old_profile_stays(const float *profile, rlim_t limit, const char *sentence)
{
    float found[SHARES];
    const float *old = sample_profile();
    assert_done(profile_write(path, LAYERS, EXPERTS, old, &error));
    pid_t child = fork();
    if (child == 0) {
        limit_files(limit);
        _exit(profile_write(path, LAYERS, EXPERTS, profile, &error) < 0 && strstr(error.text, sentence) ? 0 : 1);
    }
    int status;
    waitpid(child, &status, 0);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_done(profile_read(path, LAYERS, EXPERTS, found, &error));
    assert_memory_equal(found, old, sizeof found);
    assert_int_equal(files_in_folder(), 1);
}

static void a_profile_that_cannot_be_written_leaves_the_old_one(void **state)
{
    float profile[SHARES] = { 1 };
    static const rlim_t limits[] = { 0, 1, 32, PROFILE - 1 };
    for (int i = 0; i < 4; i++)
        assert_old_profile_stays(profile, limits[i], ": File too large");
    profile[25] = NAN;
    assert_old_profile_stays(profile, RLIM_INFINITY, ": layer 1, expert 5: nan, wanted a finite number that is not negative");
}

static void a_place_for_a_profile_that_cannot_be_written_is_named(void **state)
{
    float profile[SHARES] = { 0 };
    assert_fails(profile_write("/no/folder/profile", LAYERS, EXPERTS, profile, &error), STRATA_E_IO,
                 "profile /no/folder/profile: cannot create a file beside it: No such file or directory");
    assert_fails(profile_write("/proc/profile", LAYERS, EXPERTS, profile, &error), STRATA_E_IO, "profile /proc/profile: cannot create a file beside it: ");
    assert_fails(profile_write("tests", LAYERS, EXPERTS, profile, &error), STRATA_E_ARGUMENT, "profile tests: this is a directory");
    assert_fails(profile_write("/dev/null", LAYERS, EXPERTS, profile, &error), STRATA_E_ARGUMENT, "profile /dev/null: this is not a regular file");
}

static int set_up(void **state)
{
    snprintf(folder, sizeof folder, "%s/strata-trace-XXXXXX", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
    if (!mkdtemp(folder))
        return -1;
    snprintf(path, sizeof path, "%s/file", folder);
    snprintf(other, sizeof other, "%s/other", folder);
    return 0;
}

static int clean(void **state)
{
    unlink(path);
    unlink(other);
    return 0;
}

static int tear_down(void **state) { return rmdir(folder); }

#define test(name) cmocka_unit_test_teardown(name, clean)

int main(void)
{
    const struct CMUnitTest tests[] = {
        test(a_trace_comes_back_as_it_was_written),
        test(every_policy_comes_back),
        test(the_bytes_are_those_of_the_format),
        test(the_largest_shape_comes_back),
        test(a_window_that_failed_leaves_nothing),
        test(a_run_that_is_killed_leaves_its_whole_windows),
        test(a_write_error_is_kept_for_the_end),
        test(a_trace_of_any_length_is_read_as_far_as_it_is_whole),
        test(every_damaged_byte_is_noticed),
        test(a_header_with_wrong_numbers_is_refused),
        test(a_window_with_wrong_numbers_is_refused),
        test(windows_in_another_order_are_refused),
        test(what_is_no_trace_is_refused),
        test(a_trace_that_becomes_shorter_while_it_is_read_is_an_error),
        test(a_place_that_cannot_be_written_is_named),
        test(a_header_that_could_not_be_read_is_not_written),
        test(looking_ahead_finds_what_trying_everything_finds),
        test(beladys_bound_is_what_trying_everything_finds),
        test(beladys_bound_of_long_runs_is_what_looking_ahead_finds),
        test(a_cache_that_never_swaps_hits_what_it_was_seeded_with),
        test(a_simulation_repeats_the_run_that_was_recorded),
        test(a_trace_without_windows_is_simulated),
        test(a_damaged_trace_is_not_simulated),
        test(a_profile_comes_back_as_it_was_written),
        test(a_profile_keeps_the_mode_of_the_old_one),
        test(the_bytes_of_a_profile_are_those_of_the_format),
        test(a_damaged_profile_is_refused),
        test(a_profile_with_wrong_numbers_is_refused),
        test(the_profile_of_another_model_is_refused),
        test(what_is_no_profile_is_refused),
        test(a_profile_that_cannot_be_written_leaves_the_old_one),
        test(a_place_for_a_profile_that_cannot_be_written_is_named),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
