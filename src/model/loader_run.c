/* loader_run.c - reads what loader.c planned, with all threads: rows of the model file into tiles, or runs of a pack as they are.
 * And the way back: writes the tiles of a model's experts into a pack. */
#define _GNU_SOURCE /* asprintf */
#include "base/file.h"
#include "base/memory.h"
#include "expert/pack.h"
#include "model/loader.h"
#include "model/model.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <xxhash.h>

/* Bytes of a pack go where they stay, in larger pieces than rows that are staged. */
enum { PACK_PIECE_BYTES = 4 << 20 };

/* A number that another model file, also one of the same shapes, has not got: of the tensor table, the files' sizes, and 4 KB here
 * and there in every tensor of experts. */
static int fingerprint(const struct gguf *gguf, uint64_t *out, struct strata_error *error)
{
    enum { SAMPLE = 4096, SAMPLES = 64 };
    XXH64_state_t *hashing = XXH64_createState();
    if (!hashing)
        return error_set(error, STRATA_E_MEMORY, "out of memory for a hash");
    XXH64_reset(hashing, 0);
    uint64_t n_expert_tensors = 0;
    for (int i = 0; i < gguf->n_files; i++)
        XXH64_update(hashing, &gguf->files[i].size, sizeof gguf->files[i].size);
    for (uint64_t i = 0; i < gguf->n_tensors; i++) {
        const struct gguf_tensor *t = &gguf->tensors[i];
        uint64_t numbers[] = {
            t->type,  (uint64_t)t->dims[0], (uint64_t)t->dims[1], (uint64_t)t->dims[2], (uint64_t)t->dims[3], (uint64_t)t->file,
            t->offset
        };
        XXH64_update(hashing, t->name, strlen(t->name) + 1);
        XXH64_update(hashing, numbers, sizeof numbers);
        n_expert_tensors += strstr(t->name, "_exps.") != NULL;
    }
    int code = 0;
    for (uint64_t i = 0; i < gguf->n_tensors && !code; i++) {
        const struct gguf_tensor *t = &gguf->tensors[i];
        uint64_t n = strstr(t->name, "_exps.") ? (SAMPLES + n_expert_tensors - 1) / n_expert_tensors : 0;
        for (uint64_t k = 0; k < n && !code; k++) {
            uint8_t sample[SAMPLE];
            uint64_t length = t->bytes < SAMPLE ? t->bytes : SAMPLE, start = (t->bytes - length) / (2 * n) * (2 * k + 1);
            code = gguf_read(gguf, t, start, sample, length, error);
            if (!code)
                XXH64_update(hashing, sample, length);
        }
    }
    *out = XXH64_digest(hashing);
    XXH64_freeState(hashing);
    return code;
}

/* ---- Running
 * --------------------------------------------------------------------------------------------------------------------------- */

struct run {
    const struct loader *l;
    const struct pack *pack;     /* or NULL */
    struct file_reader *files;   /* [gguf->n_files], then the pack's */
    struct file_buffer *buffers; /* one per thread; the first n_free are not in use */
    int n_threads, n_free;
    pthread_mutex_t lock; /* of the buffers and `error` */
    _Atomic int code;     /* the first failure; the pieces that follow do nothing */
    struct strata_error error;
    _Atomic uint64_t done; /* bytes */
    uint64_t total;
    pthread_t caller; /* its thread alone calls `progress` */
    const char *what; /* for the sentence when that stops it */
    bool (*progress)(void *context, double part);
    void *progress_context;
};

/* The caller filled in l, pack, lock, total, what and the progress. */
static int run_start(struct run *run, struct pool *pool, bool direct, struct strata_error *error)
{
    const struct gguf *gguf = run->l->gguf;
    run->caller = pthread_self();
    run->n_threads = run->n_free = pool_threads(pool);
    run->buffers = calloc((size_t)run->n_threads, sizeof *run->buffers);
    run->files = calloc((size_t)gguf->n_files + 1, sizeof *run->files);
    if (!run->buffers || !run->files)
        return error_set(error, STRATA_E_MEMORY, "out of memory for reading");
    for (int i = 0; i < gguf->n_files; i++)
        file_reader_open(&run->files[i], gguf->files[i].path, gguf->files[i].fd, direct);
    if (run->pack)
        file_reader_open(&run->files[gguf->n_files], run->pack->path, run->pack->fd, direct);
    return 0;
}

static void run_end(struct run *run)
{
    for (int i = 0; run->files && i < run->l->gguf->n_files + (run->pack != NULL); i++)
        file_reader_close(&run->files[i]);
    for (int i = 0; run->buffers && i < run->n_threads; i++)
        file_buffer_free(&run->buffers[i]);
    free(run->files);
    free(run->buffers);
}

static void run_fail(struct run *run, int code, const struct strata_error *error)
{
    pthread_mutex_lock(&run->lock);
    if (!atomic_load(&run->code)) {
        run->error = *error;
        atomic_store(&run->code, code);
    }
    pthread_mutex_unlock(&run->lock);
}

/* Whether to go on; shows the progress if this is the caller's thread. */
static bool run_goes_on(struct run *run)
{
    if (atomic_load(&run->code))
        return false;
    if (!run->progress || !pthread_equal(pthread_self(), run->caller) ||
        run->progress(run->progress_context, (double)atomic_load(&run->done) / (double)(run->total + 1)))
        return true;
    struct strata_error error;
    run_fail(run, error_set(&error, STRATA_E_STOPPED, "%s was stopped", run->what), &error);
    return false;
}

static int read_tiles(struct run *run, const struct loader_piece *p, struct file_buffer *buffer, struct strata_error *error)
{
    const struct gguf_tensor *t = p->tensor;
    size_t row_bytes = quant_row_bytes(t->format, t->dims[0]);
    const uint8_t *raw;
    int code = file_fetch(&run->files[t->file], t->offset + p->first * row_bytes, p->n * row_bytes, buffer, &raw, error);
    if (code)
        return error_prefix(error, code, "tensor %s", t->name);
    if ((code = loader_check_numbers(t, raw, p->n * (size_t)t->dims[0], error)))
        return code;
    for (size_t row = 0; row < p->n; row += TILE_ROWS)
        tile_pack(t->format, t->dims[0], raw + row * row_bytes, p->n - row < TILE_ROWS ? (int)(p->n - row) : TILE_ROWS,
                  p->out + row / TILE_ROWS * p->stride);
    return 0;
}

static uint64_t piece_bytes(const struct loader_piece *p)
{
    return p->tensor ? p->n * quant_row_bytes(p->tensor->format, p->tensor->dims[0]) : p->n;
}

static void run_piece(void *context, int item)
{
    struct run *run = context;
    const struct loader_piece *p = &run->l->pieces[item];
    if (!run_goes_on(run))
        return;
    pthread_mutex_lock(&run->lock);
    struct file_buffer buffer = run->buffers[--run->n_free];
    pthread_mutex_unlock(&run->lock);
    struct strata_error error = { 0 };
    int code = p->tensor ? read_tiles(run, p, &buffer, &error)
                         : file_read(&run->files[run->l->gguf->n_files], p->first, p->out, p->n, &error);
    pthread_mutex_lock(&run->lock);
    run->buffers[run->n_free++] = buffer;
    pthread_mutex_unlock(&run->lock);
    atomic_fetch_add(&run->done, piece_bytes(p));
    if (code)
        run_fail(run, code, &error);
}

static void verify_layer(void *context, int layer)
{
    struct run *run = context;
    if (!run_goes_on(run))
        return;
    const struct expert_set *set = run->l->store->sets[layer];
    uint64_t found = store_layer_hash(set, set->blobs), wanted = run->pack->layers[layer].hash;
    struct strata_error error;
    if (found != wanted)
        run_fail(run,
                 error_set(&error, STRATA_E_FORMAT,
                           "layer %d of pack %s is damaged: its hash is %016llx, wanted %016llx: make it again with 'strata pack'",
                           layer, run->pack->path, (unsigned long long)found, (unsigned long long)wanted),
                 &error);
}

/* Through the page cache the file is there for the next start; but only as long as it leaves room for what is read from it. */
static bool wants_direct(int wish, uint64_t bytes) { return wish ? wish > 0 : bytes > memory_room().total_bytes / 4; }

static void plan_pack(struct loader *l, const struct pack_layer *layer, uint8_t *blobs)
{
    for (uint64_t at = 0; at < layer->bytes && !l->code; at += PACK_PIECE_BYTES) {
        uint64_t n = layer->bytes - at < PACK_PIECE_BYTES ? layer->bytes - at : PACK_PIECE_BYTES;
        loader_add_piece(l, (struct loader_piece){ .first = layer->offset + at, .n = (size_t)n, .out = blobs + at });
    }
}

static int run_all(struct loader *l, struct pool *pool, const struct pack *pack, const struct load_options *options)
{
    for (int i = 0; !l->code && i < l->store->n_layers; i++) {
        uint8_t *blobs = (uint8_t *)l->store->sets[i]->blobs; /* read-only once it is filled */
        if (pack)
            plan_pack(l, &pack->layers[i], blobs);
        else
            loader_plan_experts(l, l->store->sets[i], blobs);
    }
    if (l->code)
        return l->code;
    struct run run = { .l = l,
                       .pack = pack,
                       .lock = PTHREAD_MUTEX_INITIALIZER,
                       .what = "loading",
                       .progress = options->progress,
                       .progress_context = options->progress_context };
    for (size_t i = 0; i < l->n_pieces; i++)
        run.total += piece_bytes(&l->pieces[i]);
    l->code = run_start(&run, pool, wants_direct(options->direct, run.total), l->error);
    if (!l->code)
        pool_run(pool, (int)l->n_pieces, run_piece, &run);
    if (!l->code && options->verify)
        pool_run(pool, l->store->n_layers, verify_layer, &run);
    if (!l->code && atomic_load(&run.code))
        loader_fail(l, atomic_load(&run.code), "%s", run.error.text);
    run_end(&run);
    if (!l->code && options->progress)
        options->progress(options->progress_context, 1.0);
    return l->code;
}

int loader_run(struct loader *l, struct pool *pool, const struct load_options *options)
{
    struct pack pack = { .fd = -1 };
    uint64_t mark;
    if (!l->code && options->pack) {
        l->code = fingerprint(l->gguf, &mark, l->error);
        if (!l->code)
            l->code = pack_open(&pack, options->pack, l->store, mark, l->gguf->files[0].path, l->error);
    }
    if (!l->code)
        run_all(l, pool, options->pack ? &pack : NULL, options);
    pack_close(&pack);
    return l->code;
}

/* ---- Packing
 * --------------------------------------------------------------------------------------------------------------------------- */

/* Writing over an input would destroy a download that cannot be made again. */
static int refuse_model_file(const struct gguf *gguf, const char *path, const char *ending, struct strata_error *error)
{
    struct stat target, source;
    char *name = NULL;
    if (asprintf(&name, "%s%s", path, ending) < 0)
        return error_set(error, STRATA_E_MEMORY, "out of memory for a name");
    int code = 0;
    for (int i = 0; !code && stat(name, &target) == 0 && i < gguf->n_files; i++)
        if (fstat(gguf->files[i].fd, &source) == 0 && source.st_dev == target.st_dev && source.st_ino == target.st_ino)
            code = error_set(error, STRATA_E_ARGUMENT, "%s is a file of the model itself: choose another name for the pack", name);
    free(name);
    return code;
}

/* One layer: read into `blobs`, and from there into the file. */
static int pack_layer(struct loader *l, struct run *run, struct pool *pool, const struct expert_set *set, uint8_t *blobs,
                      struct pack_writer *writer)
{
    size_t blob_bytes = (size_t)set->n_experts * set->blob_bytes, bytes = store_layer_bytes(set);
    l->n_pieces = 0;
    loader_plan_experts(l, set, blobs);
    memset(blobs + blob_bytes, 0, bytes - blob_bytes);
    if (!l->code)
        pool_run(pool, (int)l->n_pieces, run_piece, run);
    for (size_t at = 0; !l->code && at < bytes && run_goes_on(run); at += PACK_PIECE_BYTES) {
        size_t n = bytes - at < PACK_PIECE_BYTES ? bytes - at : PACK_PIECE_BYTES;
        l->code = pack_writer_write(writer, blobs + at, n, l->error);
        atomic_fetch_add(&run->done, n);
    }
    if (atomic_load(&run->code))
        loader_fail(l, atomic_load(&run->code), "%s", run->error.text);
    return l->code;
}

int loader_pack(const struct gguf *gguf, const struct expert_store *store, const char *path, struct pool *pool,
                bool (*progress)(void *context, double part), void *progress_context, struct strata_error *error)
{
    struct loader l = { .gguf = gguf, .error = error };
    struct run run = { .l = &l,
                       .lock = PTHREAD_MUTEX_INITIALIZER,
                       .total = 2 * (uint64_t)store_bytes(store),
                       .what = "packing",
                       .progress = progress,
                       .progress_context = progress_context };
    struct arena layer = { 0 };
    struct pack_writer *writer = NULL;
    size_t largest = 0;
    uint64_t mark = 0;
    for (int i = 0; i < store->n_layers; i++)
        largest = store_layer_bytes(store->sets[i]) > largest ? store_layer_bytes(store->sets[i]) : largest;
    l.code = refuse_model_file(gguf, path, "", error);
    if (!l.code)
        l.code = refuse_model_file(gguf, path, ".part", error);
    if (!l.code)
        l.code = fingerprint(gguf, &mark, error);
    if (!l.code)
        l.code = arena_create(&layer, largest, "a layer of experts", error);
    if (!l.code)
        l.code = run_start(&run, pool, wants_direct(0, store_bytes(store)), error);
    if (!l.code)
        l.code = pack_writer_create(&writer, path, store, mark, error);
    for (int i = 0; !l.code && i < store->n_layers; i++)
        pack_layer(&l, &run, pool, store->sets[i], layer.base, writer);
    if (!l.code)
        l.code = pack_writer_finish(writer, error);
    pack_writer_destroy(writer);
    run_end(&run);
    arena_destroy(&layer);
    loader_finish(&l);
    if (!l.code && progress)
        progress(progress_context, 1.0);
    return l.code;
}
