/* Experts in RAM and in packs: the same bytes whatever they are read from and however, and a sentence for everything that can go
 * wrong with memory, a model file or a pack. */
#define _GNU_SOURCE /* asprintf */
#include "base/file.h"
#include "expert/pack.h"
#include "model/model.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>
#include <xxhash.h>

#include <cmocka.h>

#define SOURCE "models/pebble/pebble.gguf"
#define OTHER "models/pebble/pebble-iq3.gguf"
enum { LAYERS = 8, EXPERTS = 48, HEADER = 4096 /* of a pack of 8 layers: 64 + 8 * 64 bytes, rounded up to a page */ };

static char folder[200], pack_path[256], scratch[256], part[300], other_model[256];
static struct gguf *pebble;
static struct model *loaded; /* pebble from its own file */
static struct strata_error error;

/* ---- Helpers --------------------------------------------------------------------------------------------------------------- */

static void assert_says(const char *sentence)
{
    if (!strstr(error.text, sentence))
        fail_msg("wanted '%s' in '%s'", sentence, error.text);
}

#define assert_fails(call, wanted, sentence)                                                                                       \
    do {                                                                                                                           \
        memset(&error, 0, sizeof error);                                                                                           \
        assert_int_equal(call, wanted);                                                                                            \
        assert_says(sentence);                                                                                                     \
    } while (0)

static void assert_done(int code)
{
    if (code)
        fail_msg("%s", error.text);
}

static struct gguf *open_model(const char *path)
{
    struct gguf *gguf;
    assert_done(gguf_open(&gguf, path, &error));
    return gguf;
}

/* Every model has ops of its own: they reserve room once. */
static int try_load(struct model **out, const struct gguf *gguf, int threads, const struct load_options *options)
{
    struct ops *ops;
    *out = NULL;
    assert_done(ops_cpu_create(&ops, isa_detect(), threads, &error));
    int code = model_load(out, gguf, ops, options, &error);
    if (code)
        ops_cpu_destroy(ops);
    return code;
}

static void destroy(struct model *model)
{
    struct ops *ops = model->ops;
    model->arch->destroy(model);
    ops_cpu_destroy(ops);
}

static struct model *load(const struct gguf *gguf, const struct load_options *options)
{
    struct model *model;
    assert_done(try_load(&model, gguf, 2, options));
    return model;
}

/* Loads pebble with a pack, which is to be refused. */
static int load_with(const char *path, bool verify)
{
    struct model *model;
    int code = try_load(&model, pebble, 2, &(struct load_options){ .pack = path, .verify = verify });
    if (!code)
        destroy(model);
    return code;
}

static void assert_same_experts(const struct model *a, const struct model *b)
{
    assert_int_equal(a->experts.n_layers, b->experts.n_layers);
    for (int i = 0; i < a->experts.n_layers; i++) {
        const struct expert_set *x = a->experts.sets[i], *y = b->experts.sets[i];
        assert_int_equal(x->blob_bytes, y->blob_bytes);
        assert_memory_equal(x->blobs, y->blobs, (size_t)x->n_experts * x->blob_bytes);
    }
}

static void copy_file(const char *from, const char *to)
{
    char *command;
    assert_true(asprintf(&command, "cp %s %s", from, to) > 0);
    assert_int_equal(system(command), 0);
    free(command);
}

static uint64_t size_of(const char *path)
{
    struct stat status;
    assert_int_equal(stat(path, &status), 0);
    return (uint64_t)status.st_size;
}

static bool exists(const char *path) { return access(path, F_OK) == 0; }

static bool same_file(const char *a, const char *b)
{
    char *command;
    assert_true(asprintf(&command, "cmp -s %s %s", a, b) > 0);
    int code = system(command);
    free(command);
    return code == 0;
}

static void patch(const char *path, uint64_t at, const void *bytes, size_t n)
{
    int fd = open(path, O_WRONLY);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, bytes, n, (off_t)at), n);
    close(fd);
}

static void flip(const char *path, uint64_t at, uint8_t bits)
{
    int fd = open(path, O_RDWR);
    uint8_t byte;
    assert_int_equal(pread(fd, &byte, 1, (off_t)at), 1);
    byte ^= bits;
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)at), 1);
    close(fd);
}

static uint64_t number_at(const char *path, uint64_t at, int bytes)
{
    uint64_t value = 0;
    int fd = open(path, O_RDONLY);
    assert_int_equal(pread(fd, &value, (size_t)bytes, (off_t)at), bytes);
    close(fd);
    return value;
}

/* Makes the header's hash right again. */
static void seal(const char *path)
{
    static uint8_t header[HEADER];
    int fd = open(path, O_RDWR);
    assert_int_equal(pread(fd, header, HEADER, 0), HEADER);
    memset(header + 40, 0, 8);
    uint64_t hash = XXH64(header, HEADER, 0);
    assert_int_equal(pwrite(fd, &hash, 8, 40), 8);
    close(fd);
}

/* ---- Reading files --------------------------------------------------------------------------------------------------------- */

static void any_range_of_a_file_arrives_whole_both_ways(void **state)
{
    enum { SIZE = 3 * 4096 + 100 };
    static uint8_t bytes[SIZE], got[SIZE];
    for (int i = 0; i < SIZE; i++)
        bytes[i] = (uint8_t)(i * 131 + i / 256);
    int fd = open(scratch, O_RDWR | O_CREAT | O_TRUNC, 0600);
    assert_int_equal(write(fd, bytes, SIZE), SIZE);
    static const int starts[] = { 0, 1, 4095, 4096, 4097, 8192, 12288, SIZE - 1 },
                     lengths[] = { 1, 50, 4095, 4096, 4097, 8192, 12388 };
    for (int direct = 0; direct < 2; direct++) {
        struct file_reader reader;
        struct file_buffer buffer = { 0 };
        file_reader_open(&reader, scratch, fd, direct);
        for (size_t i = 0; i < sizeof starts / sizeof *starts; i++)
            for (size_t j = 0; j < sizeof lengths / sizeof *lengths; j++) {
                int start = starts[i], length = lengths[j] < SIZE - start ? lengths[j] : SIZE - start;
                const uint8_t *fetched;
                memset(got, 0, sizeof got);
                assert_done(file_read(&reader, (uint64_t)start, got, (size_t)length, &error));
                assert_memory_equal(got, bytes + start, length);
                assert_done(file_fetch(&reader, (uint64_t)start, (size_t)length, &buffer, &fetched, &error));
                assert_memory_equal(fetched, bytes + start, length);
            }
        file_buffer_free(&buffer);
        file_reader_close(&reader);
    }
    close(fd);
}

static void a_range_past_the_end_of_a_file_is_an_error_that_names_the_place(void **state)
{
    int fd = open(scratch, O_RDWR | O_CREAT | O_TRUNC, 0600);
    assert_int_equal(ftruncate(fd, 5000), 0);
    uint8_t *out = aligned_alloc(4096, 8192);
    for (int direct = 0; direct < 2; direct++) {
        struct file_reader reader;
        struct file_buffer buffer = { 0 };
        const uint8_t *fetched;
        file_reader_open(&reader, scratch, fd, direct);
        assert_fails(file_read(&reader, 0, out, 8192, &error), STRATA_E_IO,
                     "the file became shorter while it was open: nothing at byte 5000, wanted 3192 more");
        assert_says(scratch);
        assert_fails(file_fetch(&reader, 4990, 20, &buffer, &fetched, &error), STRATA_E_IO,
                     "the file became shorter while it was open: nothing at byte 5000, wanted 10 more");
        file_buffer_free(&buffer);
        file_reader_close(&reader);
    }
    free(out);
    close(fd);
}

static void a_read_that_fails_is_an_error_with_its_reason(void **state)
{
    int fd = open(folder, O_RDONLY | O_DIRECTORY); /* EISDIR */
    struct file_reader reader;
    char byte;
    file_reader_open(&reader, "some/file", fd, false);
    assert_fails(file_read(&reader, 7, &byte, 1, &error), STRATA_E_IO, "some/file: cannot read 1 bytes at 7: Is a directory");
    file_reader_close(&reader);
    close(fd);
}

/* ---- Does it fit? ---------------------------------------------------------------------------------------------------------- */

/* The shapes of Qwen3.8-Flash-Next with experts of one type: 48 layers of 512 experts, hidden 2560, width 640. */
static struct expert_set big_set(const char *type)
{
    struct expert_set set = { .n_experts = 512, .hidden = 2560, .width = 640 };
    set.gate = set.up = set.down = quant_format_named(type);
    set.blob_bytes = (size_t)(3 * 2560 * 640) / (size_t)set.gate->block * (size_t)set.gate->bytes;
    return set;
}

static struct expert_store big_store(struct expert_set *set)
{
    static struct expert_set *sets[48];
    for (int i = 0; i < 48; i++)
        sets[i] = set;
    return (struct expert_store){ .n_layers = 48, .sets = sets };
}

static int check(const struct expert_store *store, double dense, double available)
{
    struct memory_room room = { 1ull << 40, (uint64_t)available, "free memory" };
    return store_check_memory(store, (uint64_t)dense, &room, &error);
}

/* Q8_0: 120,795,955,200 weights x 34 / 32 = 128,345,702,400 bytes (whole pages), with 4,000,000,000 others 132,345,702,400, and a
 * 50th more to compute in: 134,992,616,448. */
static void what_fits_exactly_is_accepted_and_a_byte_less_is_not(void **state)
{
    struct expert_set set = big_set("Q8_0");
    struct expert_store store = big_store(&set);
    assert_int_equal(store_bytes(&store), 128345702400ull);
    assert_int_equal(check(&store, 4e9, 134992616448.0), 0);
    assert_fails(check(&store, 4e9, 134992616447.0), STRATA_E_MEMORY,
                 "the model needs 135.0 GB of RAM (128.3 GB of experts), 135.0 GB are available");
}

static void a_small_model_leaves_64_mib_to_compute_in(void **state)
{
    struct expert_set set = { .n_experts = 1, .hidden = 256, .width = 256, .blob_bytes = 8192 }, *sets[] = { &set };
    set.gate = set.up = set.down = quant_format_named("Q8_0");
    struct expert_store store = { .n_layers = 1, .sets = sets };
    assert_int_equal(check(&store, 1000, 8192 + 1000 + 67108864), 0);
    assert_fails(check(&store, 1000, 8192 + 1000 + 67108863), STRATA_E_MEMORY,
                 "the model needs 67.1 MB of RAM (0.0 MB of experts), 67.1 MB are available");
}

/* 51 GB hold 50 GB of weights, so 46 GB of experts beside 4 GB: 46e9 * 8 / 120,795,955,200 = 3.0464 bits. Of the types: IQ3_XXS
 * takes (2 * 3.0625 + 4.5) / 3 = 3.54 bits, because 640 is no multiple of 256 and down becomes IQ4_NL; IQ2_S (2 * 2.5625 + 4.5) / 3
 * = 3.208; IQ2_XS (2 * 2.3125 + 4.5) / 3 = 3.0417: the widest. */
static void the_widest_type_that_fits_is_named(void **state)
{
    struct expert_set set = big_set("Q8_0");
    struct expert_store store = big_store(&set);
    assert_fails(check(&store, 4e9, 51e9), STRATA_E_MEMORY,
                 "51.0 GB are available (free memory): experts of at most 3.04 bits per weight would fit, for example IQ2_XS");
    /* 102 GB: 96 GB, 6.357 bits; Q5_K (2 * 5.5 + 8.5) / 3 = 6.5, Q5_1 6.0, Q4_K 4.5. */
    assert_fails(check(&store, 4e9, 102e9), STRATA_E_MEMORY, "at most 6.35 bits per weight would fit, for example Q5_1");
    /* 20.4 GB: 16 GB, 1.0596 bits; Q1_0 takes 1.125. */
    assert_fails(check(&store, 4e9, 20.4e9), STRATA_E_MEMORY, "20.4 GB are available (free memory): nothing smaller would fit");
    /* Not even the other weights. */
    assert_fails(check(&store, 4e9, 1e9), STRATA_E_MEMORY, "nothing smaller would fit");
}

static void types_that_take_the_same_are_told_apart_by_what_can_be_written(void **state)
{
    struct expert_set set = big_set("Q8_0");
    struct expert_store store = big_store(&set);
    /* 4.5 bits: Q4_0, Q4_K (down as IQ4_NL), IQ4_NL, NVFP4; the last cannot be written. 76.5 GB: 71 GB, 4.702 bits. */
    assert_fails(check(&store, 4e9, 76.5e9), STRATA_E_MEMORY, "for example IQ4_NL");
}

static void the_sentence_names_the_limit(void **state)
{
    struct expert_set set = big_set("Q8_0");
    struct expert_store store = big_store(&set);
    struct memory_room room = { 1ull << 36, 0, "the container's memory limit" };
    assert_fails(store_check_memory(&store, 0, &room, &error), STRATA_E_MEMORY,
                 "0.0 MB are available (the container's memory limit)");
}

static void a_system_that_does_not_say_has_room(void **state)
{
    struct expert_set set = big_set("Q8_0");
    struct expert_store store = big_store(&set);
    struct memory_room room = { UINT64_MAX, UINT64_MAX, "free memory" };
    assert_int_equal(store_check_memory(&store, 4000000000, &room, &error), 0);
}

/* pebble with other experts, in F32: a file whose data is all hole. */
static void write_hollow(const char *path, int64_t n_experts, int64_t width)
{
    struct gguf_writer *writer;
    uint64_t end = 0;
    assert_done(gguf_writer_create(&writer, path, &error));
    for (uint64_t i = 0; i < pebble->n_entries; i++) {
        const struct gguf_entry *entry = &pebble->entries[i];
        if (!strcmp(entry->key.data, "qwen4exp.expert_count"))
            gguf_put_u32(writer, entry->key.data, (uint32_t)n_experts);
        else if (!strcmp(entry->key.data, "qwen4exp.expert_feed_forward_length"))
            gguf_put_u32(writer, entry->key.data, (uint32_t)width);
        else
            gguf_put_entry(writer, entry);
    }
    const struct quant_format *f32 = quant_format_named("F32");
    for (uint64_t i = 0; i < pebble->n_tensors; i++) {
        const struct gguf_tensor *t = &pebble->tensors[i];
        bool experts = strstr(t->name, "_exps."), router = strstr(t->name, "ffn_gate_inp.weight"),
             down = strstr(t->name, "down_exps.");
        int64_t dims[4] = { down ? width : 256, router ? n_experts : down ? 256 : width, n_experts, 1 };
        gguf_put_tensor(writer, t->name, experts ? f32 : t->format, t->n_dims, experts || router ? dims : t->dims);
        uint64_t bytes = (uint64_t)(experts ? n_experts * 256 * width * 4 : router ? n_experts * 256 * 4 : (int64_t)t->bytes);
        end += (bytes + 31) & ~31ull;
    }
    assert_done(gguf_writer_begin_data(writer, &error));
    char temporary[300];
    snprintf(temporary, sizeof temporary, "%s.%ld-0.part", path, (long)getpid());
    assert_int_equal(truncate(temporary, (off_t)(size_of(temporary) + end)), 0);
    assert_int_equal(rename(temporary, path), 0);
    gguf_writer_destroy(writer);
}

/* 8 layers x 65535 x 3 x 256 x 256 x 4 bytes = 412 GB. */
static void write_huge(const char *path) { write_hollow(path, 65535, 256); }

static bool stop(void *context, double done) { return false; }

static void a_model_that_does_not_fit_is_refused_before_it_is_read_unless_that_is_ignored(void **state)
{
    if (memory_room().available_bytes > 300000000000)
        skip(); /* it might fit */
    write_huge(scratch);
    struct gguf *huge = open_model(scratch);
    struct model *model = NULL;
    assert_fails(try_load(&model, huge, 2, NULL), STRATA_E_MEMORY, "GB of RAM (412.3 GB of experts), ");
    assert_fails(try_load(&model, huge, 2, &(struct load_options){ .ignore_memory = true, .progress = stop }),
                 STRATA_E_STOPPED, "loading was stopped");
    assert_null(model);
    gguf_close(huge);
}

/* In a child whose address space may grow by `more` bytes: the exit code is 0 if loading fails with this sentence. */
static void assert_refused_with_address_space(size_t more, const char *sentence)
{
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        struct ops *own;
        struct model *model;
        unsigned long pages = 0;
        FILE *file = fopen("/proc/self/statm", "r");
        if (ops_cpu_create(&own, isa_detect(), 1, &error) || !file || fscanf(file, "%lu", &pages) != 1)
            _exit(2);
        fclose(file);
        struct rlimit limit = { pages * 4096 + more, pages * 4096 + more };
        if (setrlimit(RLIMIT_AS, &limit))
            _exit(3);
        int code = model_load(&model, pebble, own, NULL, &error);
        if (code != STRATA_E_MEMORY || !strstr(error.text, sentence)) {
            fprintf(stderr, "%d: %s\n", code, error.text);
            _exit(4);
        }
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

/* pebble: 14 MB outside the experts, 10.6 MB of experts; an arena takes 2 MB more and whole 2 MB. */
static void memory_that_the_system_refuses_is_a_sentence(void **state)
{
    if (getenv("STRATA_TEST_SANITIZER"))
        skip(); /* it reserves terabytes itself */
    assert_refused_with_address_space(4 << 20,
                                      "cannot reserve 14 MB of memory for the weights outside the experts: Cannot allocate memory");
    assert_refused_with_address_space(24 << 20, "cannot reserve 12 MB of memory for the experts: Cannot allocate memory");
}

/* ---- Loading --------------------------------------------------------------------------------------------------------------- */

/* Tiles of rows back into the file's order, by the inverse of what made them. */
static void assert_tiles_hold(const uint8_t *tiles, size_t stride, const struct gguf_tensor *t, int64_t first, int64_t rows)
{
    size_t row_bytes = quant_row_bytes(t->format, t->dims[0]);
    uint8_t *file = malloc((size_t)rows * row_bytes), *tile = malloc(16 * row_bytes);
    assert_int_equal(gguf_read(pebble, t, (uint64_t)first * row_bytes, file, (uint64_t)rows * row_bytes, NULL), 0);
    for (int64_t row = 0; row < rows; row += 16) {
        tile_unpack(t->format, t->dims[0], tiles + (size_t)(row / 16) * stride, tile);
        assert_memory_equal(tile, file + (size_t)row * row_bytes, (size_t)(rows - row < 16 ? rows - row : 16) * row_bytes);
    }
    free(file);
    free(tile);
}

static void the_blobs_hold_the_rows_of_the_file(void **state)
{
    for (int i = 0; i < LAYERS; i++) {
        const struct expert_set *set = loaded->experts.sets[i];
        char name[3][64];
        static const char *const parts[] = { "gate", "up", "down" };
        for (int k = 0; k < 3; k++)
            snprintf(name[k], sizeof name[k], "blk.%d.ffn_%s_exps.weight", i, parts[k]);
        for (int e = 0; e < EXPERTS; e++) {
            const uint8_t *blob = set->blobs + (size_t)e * set->blob_bytes;
            size_t pair = set->gate_bytes + set->up_bytes;
            assert_tiles_hold(blob, pair, gguf_tensor_find(pebble, name[0]), e * 64, 64);
            assert_tiles_hold(blob + set->gate_bytes, pair, gguf_tensor_find(pebble, name[1]), e * 64, 64);
            assert_tiles_hold(blob + 4 * pair, set->down_bytes, gguf_tensor_find(pebble, name[2]), e * 256, 256);
        }
    }
}

static void every_layer_has_its_number_and_begins_on_a_page_after_the_last(void **state)
{
    const struct expert_store *store = &loaded->experts;
    assert_int_equal(store->n_layers, LAYERS);
    size_t at = 0;
    for (int i = 0; i < LAYERS; i++) {
        const struct expert_set *set = store->sets[i];
        assert_int_equal(set->layer, i);
        assert_int_equal((uintptr_t)set->blobs % 4096, 0);
        assert_int_equal(set->blobs - store->arena.base, at);
        at += ((size_t)EXPERTS * set->blob_bytes + 4095) / 4096 * 4096;
    }
    assert_int_equal(store->arena.used, at);
}

static void the_weights_in_memory_are_counted_exactly(void **state)
{
    /* What the file holds as tiles or floats: all but the two tables; its names and padding are no weights. A tensor ends on 64
     * bytes, a matrix on a tile of 16 rows, taps exist twice while they are turned. */
    uint64_t dense = 0;
    for (uint64_t i = 0; i < pebble->n_tensors; i++) {
        const struct gguf_tensor *t = &pebble->tensors[i];
        bool vector = t->n_dims == 1 && !strstr(t->name, "gate_inp_shexp"), taps = strstr(t->name, "conv1d") != NULL;
        uint64_t rows = vector || taps ? (uint64_t)t->dims[1] : ((uint64_t)t->dims[1] + 15) / 16 * 16;
        uint64_t bytes = (rows * quant_row_bytes(t->format, t->dims[0]) + 63) / 64 * 64;
        if (!strstr(t->name, "_exps.") && !strstr(t->name, "token_embd."))
            dense += taps ? 2 * bytes : bytes;
    }
    assert_in_range(loaded->weight_bytes, loaded->experts.arena.used + dense - 64, loaded->experts.arena.used + dense);
}

static bool count_progress(void *context, double done)
{
    double *last = context;
    assert_true(done >= *last && done <= 1);
    *last = done;
    return true;
}

static void the_bytes_are_the_same_from_file_and_pack_past_and_through_the_cache(void **state)
{
    for (int from_pack = 0; from_pack < 2; from_pack++)
        for (int direct = -1; direct < 2; direct++) {
            double part_done = 0;
            struct load_options options = {
                .pack = from_pack ? pack_path : NULL, .direct = direct, .progress = count_progress, .progress_context = &part_done
            };
            struct model *model = load(pebble, &options);
            assert_same_experts(model, loaded);
            assert_int_equal(model->weight_bytes, loaded->weight_bytes);
            assert_true(part_done == 1);
            destroy(model);
        }
}

static void the_number_of_threads_does_not_matter(void **state)
{
    static const int counts[] = { 1, 3, 7 };
    for (int i = 0; i < 3; i++) {
        struct model *model;
        assert_done(try_load(&model, pebble, counts[i], &(struct load_options){ .direct = 1 }));
        assert_same_experts(model, loaded);
        destroy(model);
        assert_done(model_pack(pebble, scratch, counts[i], NULL, NULL, &error));
        assert_true(same_file(scratch, pack_path));
    }
}

static void other_types_of_experts_are_packed_too(void **state)
{
    struct gguf *other = open_model(OTHER);
    assert_done(model_pack(other, scratch, 2, NULL, NULL, &error));
    struct model *plain = load(other, NULL), *packed = load(other, &(struct load_options){ .pack = scratch, .verify = true });
    assert_same_experts(packed, plain);
    destroy(plain);
    destroy(packed);
    gguf_close(other);
}

static void without_ops_a_model_has_shapes_alone(void **state)
{
    struct model *model;
    assert_done(model_load(&model, pebble, NULL, NULL, &error));
    assert_int_equal(model->experts.sets[7]->n_experts, EXPERTS);
    assert_null(model->experts.sets[7]->blobs);
    assert_int_equal(model->weight_bytes, 0);
    destroy(model);
}

struct stopper {
    double at;
    const char *cut;
    int calls;
};

static bool stop_at(void *context, double done)
{
    struct stopper *s = context;
    s->calls++;
    if (done < s->at)
        return true;
    if (!s->cut)
        return false;
    assert_int_equal(truncate(s->cut, 1 << 20), 0);
    return true;
}

static void loading_can_be_stopped_anywhere(void **state)
{
    struct model *model = NULL;
    /* With one thread: others do not ask whether to stop. */
    for (int from_pack = 0; from_pack < 2; from_pack++)
        for (int i = 0; i < 5; i++) {
            struct stopper stopper = { .at = i * 0.2 };
            struct load_options options = { .pack = from_pack ? pack_path : NULL,
                                            .progress = stop_at,
                                            .progress_context = &stopper };
            assert_fails(try_load(&model, pebble, 1, &options), STRATA_E_STOPPED, "loading was stopped");
        }
}

static void a_file_that_becomes_shorter_while_it_is_read_is_an_error(void **state)
{
    struct model *model = NULL;
    for (int from_pack = 0; from_pack < 2; from_pack++)
        for (int direct = -1; direct < 2; direct += 2) {
            copy_file(from_pack ? pack_path : SOURCE, scratch);
            struct gguf *gguf = open_model(from_pack ? SOURCE : scratch);
            struct stopper cut = { .at = 0.01, .cut = scratch };
            struct load_options options = {
                .pack = from_pack ? scratch : NULL, .direct = direct, .progress = stop_at, .progress_context = &cut
            };
            assert_fails(try_load(&model, gguf, 2, &options), STRATA_E_IO,
                         "the file became shorter while it was open: nothing at byte ");
            assert_says(scratch);
            assert_null(model);
            gguf_close(gguf);
        }
}

static void verify_without_a_pack_is_refused(void **state)
{
    struct model *model;
    assert_fails(try_load(&model, pebble, 2, &(struct load_options){ .verify = true }), STRATA_E_ARGUMENT,
                 "--verify needs --pack: a GGUF file has no hashes to compare with");
}

/* ---- Packs that are refused ------------------------------------------------------------------------------------------------ */

static void a_pack_is_what_the_format_says(void **state)
{
    assert_int_equal(number_at(pack_path, 0, 8), 0x4b50415441525453ull); /* "STRATAPK" */
    assert_int_equal(number_at(pack_path, 8, 4), 1);
    assert_int_equal(number_at(pack_path, 12, 4), 1);
    assert_int_equal(number_at(pack_path, 16, 4), LAYERS);
    /* An expert: 3 x 64 x 256 weights of IQ4_NL, 4.5 bits each: 27648 bytes; 48 of them: 324 pages. */
    assert_int_equal(number_at(pack_path, 32, 8), HEADER + 8 * 1327104);
    assert_int_equal(size_of(pack_path), HEADER + 8 * 1327104);
    for (uint64_t i = 0; i < LAYERS; i++) {
        static const uint32_t small[] = { 48, 256, 64, QUANT_IQ4_NL, QUANT_IQ4_NL, QUANT_IQ4_NL };
        uint64_t record = 64 + 64 * i, offset = HEADER + i * 1327104;
        for (uint64_t k = 0; k < 6; k++)
            assert_int_equal(number_at(pack_path, record + 4 * k, 4), small[k]);
        assert_int_equal(number_at(pack_path, record + 24, 8), 27648);
        assert_int_equal(number_at(pack_path, record + 32, 8), offset);
        assert_int_equal(number_at(pack_path, record + 40, 8), 1327104);
        assert_int_equal(number_at(pack_path, record + 48, 8), XXH64(loaded->experts.sets[i]->blobs, 1327104, 0));
    }
}

static void the_pack_of_another_model_is_refused(void **state)
{
    struct gguf *other = open_model(OTHER);
    assert_done(model_pack(other, scratch, 0, NULL, NULL, &error));
    gguf_close(other);
    assert_fails(load_with(scratch, false), STRATA_E_FORMAT,
                 " was made from another model file than models/pebble/pebble.gguf: make it again with 'strata pack'");
    assert_says(scratch);
}

static void a_model_of_the_same_shapes_with_one_other_tensor_of_experts_is_another(void **state)
{
    static const char *const names[] = { "blk.0.ffn_gate_exps.weight", "blk.4.ffn_up_exps.weight", "blk.7.ffn_down_exps.weight" };
    for (int i = 0; i < 3; i++) {
        const struct gguf_tensor *t = gguf_tensor_find(pebble, names[i]),
                                 *from = gguf_tensor_find(pebble, "blk.3.ffn_gate_exps.weight");
        uint8_t *bytes = malloc((size_t)from->bytes);
        assert_int_equal(gguf_read(pebble, from, 0, bytes, from->bytes, NULL), 0);
        copy_file(SOURCE, scratch);
        patch(scratch, t->offset, bytes, (size_t)from->bytes);
        free(bytes);
        struct gguf *gguf = open_model(scratch);
        struct model *model;
        assert_fails(try_load(&model, gguf, 2, &(struct load_options){ .pack = pack_path }), STRATA_E_FORMAT,
                     "was made from another model file than");
        gguf_close(gguf);
    }
}

static void a_copy_of_the_model_takes_the_same_pack(void **state)
{
    copy_file(SOURCE, scratch);
    struct gguf *gguf = open_model(scratch);
    struct model *model = load(gguf, &(struct load_options){ .pack = pack_path, .verify = true });
    assert_same_experts(model, loaded);
    destroy(model);
    gguf_close(gguf);
}

static void a_pack_of_another_version_is_refused(void **state)
{
    copy_file(pack_path, scratch);
    patch(scratch, 8, &(uint32_t){ 2 }, 4);
    assert_fails(load_with(scratch, false), STRATA_E_UNSUPPORTED,
                 " has version 2.1, this program reads 1.1: make it again with 'strata pack'");
    patch(scratch, 8, &(uint32_t){ 1 }, 4);
    patch(scratch, 12, &(uint32_t){ 7 }, 4); /* the tiles' */
    assert_fails(load_with(scratch, false), STRATA_E_UNSUPPORTED, " has version 1.7, this program reads 1.1");
}

static void what_is_no_pack_is_refused(void **state)
{
    assert_fails(load_with("models/none.pack", false), STRATA_E_IO,
                 "pack models/none.pack: cannot open: No such file or directory");
    assert_fails(load_with(folder, false), STRATA_E_FORMAT, " is not a pack: it is a directory");
    assert_fails(load_with("/dev/null", false), STRATA_E_FORMAT, "/dev/null is not a pack: it is not a regular file");
    assert_fails(load_with(SOURCE, false), STRATA_E_FORMAT, SOURCE " is not a pack: it does not begin with STRATAPK");
}

static void a_pack_cut_short_or_too_long_is_refused(void **state)
{
    uint64_t size = size_of(pack_path);
    static const uint64_t small[] = { 0, 1, 7 }, header[] = { 8, 11, 12, 15, 16, 17, 20, 63, 64, 65, 128, 575, 576, 4095 };
    copy_file(pack_path, scratch);
    for (uint64_t at = 1; at < 10; at++) { /* from the end, so that one copy serves */
        uint64_t left = at == 1 ? size - 1 : at == 2 ? size - 4096 : size / 10 * (10 - at);
        assert_int_equal(truncate(scratch, (off_t)left), 0);
        assert_fails(load_with(scratch, false), STRATA_E_FORMAT, " is cut short: it has ");
        assert_says("bytes, wanted 10620928");
    }
    assert_int_equal(truncate(scratch, HEADER), 0);
    assert_fails(load_with(scratch, false), STRATA_E_FORMAT, " is cut short: it has 4096 bytes, wanted 10620928");
    for (int i = sizeof header / sizeof *header; i-- > 0;) {
        assert_int_equal(truncate(scratch, (off_t)header[i]), 0);
        assert_fails(load_with(scratch, false), STRATA_E_FORMAT, " is cut short: it has ");
        assert_says("bytes, less than its header");
    }
    for (int i = sizeof small / sizeof *small; i-- > 0;) {
        assert_int_equal(truncate(scratch, (off_t)small[i]), 0);
        assert_fails(load_with(scratch, false), STRATA_E_FORMAT, " is not a pack: it does not begin with STRATAPK");
    }
    copy_file(pack_path, scratch);
    assert_int_equal(truncate(scratch, (off_t)size + 1), 0);
    assert_fails(load_with(scratch, false), STRATA_E_FORMAT, " is too long: it has 10620929 bytes, wanted 10620928");
}

/* Straight to pack_open: a load for each of 4096 bytes takes long. */
static void every_flipped_byte_of_a_header_is_noticed(void **state)
{
    uint64_t fingerprint = number_at(pack_path, 24, 8);
    struct pack pack;
    copy_file(pack_path, scratch);
    assert_done(pack_open(&pack, scratch, &loaded->experts, fingerprint, SOURCE, &error));
    pack_close(&pack);
    for (uint64_t at = 0; at < HEADER; at++) {
        flip(scratch, at, 1 << (at % 8));
        memset(&error, 0, sizeof error);
        int code = pack_open(&pack, scratch, &loaded->experts, fingerprint, SOURCE, &error);
        if (code != (at >= 8 && at < 16 ? STRATA_E_UNSUPPORTED : STRATA_E_FORMAT))
            fail_msg("byte %d: %d %s", (int)at, code, error.text);
        assert_says(at < 8                ? "is not a pack"
                    : at < 16             ? "has version "
                    : at >= 16 && at < 20 ? "pack "
                                          : " is damaged: its header differs from the header's hash");
        flip(scratch, at, 1 << (at % 8));
    }
}

/* With a hash that is right again, as somebody who means harm would write it. */
static void every_number_of_a_header_is_compared_with_the_model(void **state)
{
    static const struct {
        uint64_t at;
        const char *sentence;
    } fields[] = {
        { 24, "was made from another model file" },
        { 16, " layers, wanted 8" },
        { 64, ", layer 0: 49 experts of 27648 bytes at 4096, wanted 48 of 27648 at 4096" },
        { 68, ", layer 0: " },
        { 72, ", layer 0: " },
        { 76, ", layer 0: " },
        { 80, ", layer 0: " },
        { 84, ", layer 0: " },
        { 88, ", layer 0: 48 experts of 27649 bytes at" },
        { 96, ", layer 0: 48 experts of 27648 bytes at 4097" },
        { 104, ", layer 0: " },
        { 64 + 3 * 64 + 36, ", layer 3: " },
        { 64 + 7 * 64 + 47, ", layer 7: " },
    };
    uint64_t fingerprint = number_at(pack_path, 24, 8);
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        struct pack pack;
        copy_file(pack_path, scratch);
        flip(scratch, fields[i].at, 1);
        seal(scratch);
        assert_fails(pack_open(&pack, scratch, &loaded->experts, fingerprint, SOURCE, &error), STRATA_E_FORMAT, fields[i].sentence);
    }
}

static void a_flipped_byte_in_a_layer_is_found_by_verify(void **state)
{
    static const int layers[] = { 0, 3, 7 };
    for (int i = 0; i < 3; i++) {
        char sentence[100];
        snprintf(sentence, sizeof sentence, "layer %d of pack ", layers[i]);
        copy_file(pack_path, scratch);
        flip(scratch, HEADER + (uint64_t)layers[i] * 1327104 + (i == 2 ? 1327103 : 12345), 4);
        assert_fails(load_with(scratch, true), STRATA_E_FORMAT, sentence);
        assert_says(" is damaged: its hash is ");
        assert_int_equal(load_with(scratch, false), 0);
    }
}

/* ---- Packing ---------------------------------------------------------------------------------------------------------------- */

static int pack_to(const char *path) { return model_pack(pebble, path, 2, NULL, NULL, &error); }

static void a_pack_that_is_stopped_leaves_nothing(void **state)
{
    for (int i = 0; i < 10; i++) {
        struct stopper stopper = { .at = i * 0.1 };
        assert_fails(model_pack(pebble, scratch, 1, stop_at, &stopper, &error), STRATA_E_STOPPED, "packing was stopped");
        assert_false(exists(scratch));
        assert_false(exists(part));
    }
}

static void an_older_pack_stays_until_the_new_one_is_whole(void **state)
{
    copy_file(SOURCE, scratch);
    struct stopper stopper = { .at = 0.5 };
    assert_fails(model_pack(pebble, scratch, 1, stop_at, &stopper, &error), STRATA_E_STOPPED, "packing was stopped");
    assert_true(same_file(scratch, SOURCE));
    assert_done(pack_to(scratch));
    assert_true(same_file(scratch, pack_path));
}

static void what_a_killed_run_left_is_written_over(void **state)
{
    copy_file(SOURCE, part); /* longer than the pack, and other bytes */
    assert_done(pack_to(scratch));
    assert_true(same_file(scratch, pack_path));
    assert_false(exists(part));
}

static void two_runs_to_one_name_do_not_meet(void **state)
{
    int fd = open(part, O_WRONLY | O_CREAT, 0600);
    assert_int_equal(write(fd, "theirs", 6), 6);
    assert_int_equal(flock(fd, LOCK_EX), 0);
    assert_fails(pack_to(scratch), STRATA_E_IO, ".part is being written by another program");
    assert_int_equal(size_of(part), 6);
    close(fd);
}

static void a_model_is_never_written_over(void **state)
{
    char link_path[300];
    snprintf(link_path, sizeof link_path, "%s/link", folder);
    copy_file(SOURCE, scratch);
    struct gguf *gguf = open_model(scratch);
    assert_fails(model_pack(gguf, scratch, 1, NULL, NULL, &error), STRATA_E_ARGUMENT,
                 " is a file of the model itself: choose another name for the pack");
    assert_int_equal(link(scratch, link_path), 0);
    assert_fails(model_pack(gguf, link_path, 1, NULL, NULL, &error), STRATA_E_ARGUMENT, " is a file of the model itself");
    unlink(link_path);
    assert_int_equal(link(scratch, part), 0); /* the model is called like the unfinished pack would be */
    assert_int_equal(unlink(scratch), 0);
    assert_fails(model_pack(gguf, scratch, 1, NULL, NULL, &error), STRATA_E_ARGUMENT, ".part is a file of the model itself");
    assert_true(same_file(part, SOURCE));
    gguf_close(gguf);
}

static void places_that_cannot_be_written_are_named(void **state)
{
    char path[300];
    snprintf(path, sizeof path, "%s/no/pack", folder);
    assert_fails(pack_to(path), STRATA_E_IO, "/no/pack.part: cannot create: No such file or directory");
    assert_fails(pack_to(folder), STRATA_E_ARGUMENT, ": this is a directory, wanted the name of a file to write");
    assert_fails(pack_to("/dev/null"), STRATA_E_ARGUMENT,
                 "/dev/null: this is not a regular file, wanted the name of a file to write");
    assert_int_equal(symlink("/nowhere", part), 0);
    assert_fails(pack_to(scratch), STRATA_E_IO, ".part: cannot create: ");
}

static void damaged_experts_are_not_packed(void **state)
{
    write_hollow(other_model, 48, 64);
    struct gguf *gguf = open_model(other_model);
    uint32_t nan = 0x7fc00000;
    patch(other_model, gguf_tensor_find(gguf, "blk.5.ffn_up_exps.weight")->offset + 4000, &nan, 4);
    assert_fails(model_pack(gguf, scratch, 2, NULL, NULL, &error), STRATA_E_NUMERIC,
                 "tensor blk.5.ffn_up_exps.weight holds a value that is not finite");
    assert_false(exists(part));
    assert_false(exists(scratch));
    gguf_close(gguf);
}

static void a_disk_that_is_too_small_is_named_before_the_work(void **state)
{
    write_huge(other_model);
    struct gguf *gguf = open_model(other_model);
    struct statvfs disk;
    assert_int_equal(statvfs(folder, &disk), 0);
    if ((double)disk.f_bavail * (double)disk.f_frsize > 400e9) {
        gguf_close(gguf);
        skip();
    }
    assert_fails(model_pack(gguf, scratch, 2, stop, NULL, &error), STRATA_E_IO, ".part: the pack needs 412.3 GB, the disk has ");
    assert_says(" for it: No space left on device");
    assert_false(exists(part));
    gguf_close(gguf);
}

/* ---- Beginning and end ------------------------------------------------------------------------------------------------------ */

static int clean(void **state)
{
    unlink(scratch);
    unlink(part);
    unlink(other_model);
    return 0;
}

static int set_up(void **state)
{
    const char *temporary = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/strata-test-store-XXXXXX", temporary && strlen(temporary) < 100 ? temporary : "/tmp");
    if (!mkdtemp(folder))
        return -1;
    snprintf(pack_path, sizeof pack_path, "%s/pebble.pack", folder);
    snprintf(scratch, sizeof scratch, "%s/scratch", folder);
    snprintf(part, sizeof part, "%s.part", scratch);
    snprintf(other_model, sizeof other_model, "%s/other.gguf", folder);
    if (gguf_open(&pebble, SOURCE, &error) || try_load(&loaded, pebble, 2, NULL) || pack_to(pack_path)) {
        print_error("%s\n", error.text);
        return -1;
    }
    return 0;
}

static int tear_down(void **state)
{
    destroy(loaded);
    gguf_close(pebble);
    unlink(pack_path);
    clean(NULL);
    rmdir(folder);
    return 0;
}

#define TEST(name) cmocka_unit_test_teardown(name, clean)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(any_range_of_a_file_arrives_whole_both_ways),
        TEST(a_range_past_the_end_of_a_file_is_an_error_that_names_the_place),
        TEST(a_read_that_fails_is_an_error_with_its_reason),
        TEST(what_fits_exactly_is_accepted_and_a_byte_less_is_not),
        TEST(a_small_model_leaves_64_mib_to_compute_in),
        TEST(the_widest_type_that_fits_is_named),
        TEST(types_that_take_the_same_are_told_apart_by_what_can_be_written),
        TEST(the_sentence_names_the_limit),
        TEST(a_system_that_does_not_say_has_room),
        TEST(a_model_that_does_not_fit_is_refused_before_it_is_read_unless_that_is_ignored),
        TEST(memory_that_the_system_refuses_is_a_sentence),
        TEST(the_blobs_hold_the_rows_of_the_file),
        TEST(every_layer_has_its_number_and_begins_on_a_page_after_the_last),
        TEST(the_weights_in_memory_are_counted_exactly),
        TEST(the_bytes_are_the_same_from_file_and_pack_past_and_through_the_cache),
        TEST(the_number_of_threads_does_not_matter),
        TEST(other_types_of_experts_are_packed_too),
        TEST(without_ops_a_model_has_shapes_alone),
        TEST(loading_can_be_stopped_anywhere),
        TEST(a_file_that_becomes_shorter_while_it_is_read_is_an_error),
        TEST(verify_without_a_pack_is_refused),
        TEST(a_pack_is_what_the_format_says),
        TEST(the_pack_of_another_model_is_refused),
        TEST(a_model_of_the_same_shapes_with_one_other_tensor_of_experts_is_another),
        TEST(a_copy_of_the_model_takes_the_same_pack),
        TEST(a_pack_of_another_version_is_refused),
        TEST(what_is_no_pack_is_refused),
        TEST(a_pack_cut_short_or_too_long_is_refused),
        TEST(every_flipped_byte_of_a_header_is_noticed),
        TEST(every_number_of_a_header_is_compared_with_the_model),
        TEST(a_flipped_byte_in_a_layer_is_found_by_verify),
        TEST(a_pack_that_is_stopped_leaves_nothing),
        TEST(an_older_pack_stays_until_the_new_one_is_whole),
        TEST(what_a_killed_run_left_is_written_over),
        TEST(two_runs_to_one_name_do_not_meet),
        TEST(a_model_is_never_written_over),
        TEST(places_that_cannot_be_written_are_named),
        TEST(damaged_experts_are_not_packed),
        TEST(a_disk_that_is_too_small_is_named_before_the_work),
    };
    return cmocka_run_group_tests_name("store and pack", tests, set_up, tear_down);
}
