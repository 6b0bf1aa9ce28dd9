#include "model/loader.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* A piece is a few tiles of one matrix: small enough that every thread has work and that its staging buffer stays in the cache. */
enum { PIECE_BYTES = 256 << 10 };

struct loader_piece {
    const struct gguf_tensor *tensor;
    int64_t first_row; /* in units of the tensor's rows (all experts counted on) */
    int n_rows;
    uint8_t *tiles;
    size_t stride;
};

void loader_fail(struct loader *l, int code, const char *format, ...)
{
    if (l->code)
        return;
    char text[400];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    l->code = error_set(l->error, code, "%s", text);
}

static const char *shape_text(char *out, size_t size, int n_dims, const int64_t *dims)
{
    int at = 0;
    for (int i = n_dims - 1; i >= 0 && (size_t)at < size; i--)
        at += snprintf(out + at, size - (size_t)at, "%s%lld", i == n_dims - 1 ? "" : " x ", (long long)dims[i]);
    return out;
}

/* The tensor if it exists, is decodable and has `rows` x `width` (x n); NULL after a failure. min_rows: more rows are allowed. */
static const struct gguf_tensor *find(struct loader *l, const char *name, int64_t width, int64_t rows, int64_t n, bool min_rows)
{
    if (l->code)
        return NULL;
    const struct gguf_tensor *t = gguf_tensor_find(l->gguf, name);
    if (!t) {
        loader_fail(l, STRATA_E_FORMAT, "tensor %s is missing", name);
        return NULL;
    }
    if (!t->format) {
        loader_fail(l, STRATA_E_UNSUPPORTED, "tensor %s has type %s, which Strata cannot compute with", name, quant_type_name(t->type));
        return NULL;
    }
    bool right = t->dims[0] == width && t->dims[3] == 1 && t->dims[2] == n && (min_rows ? t->dims[1] >= rows : t->dims[1] == rows);
    if (!right) {
        char found[100], wanted[100];
        loader_fail(l, STRATA_E_FORMAT, "tensor %s has shape %s, wanted %s%s", name, shape_text(found, sizeof found, t->n_dims, t->dims),
                    min_rows ? "at least " : "", shape_text(wanted, sizeof wanted, n > 1 ? 3 : rows > 1 ? 2 : 1, (int64_t[]){ width, rows, n }));
        return NULL;
    }
    if (!t->format->is_float && width % 32) {
        loader_fail(l, STRATA_E_FORMAT, "tensor %s: row width %lld is not a multiple of 32 (%s)", name, (long long)width, t->format->name);
        return NULL;
    }
    return t;
}

#define NAME_FROM(format)                                                                                                                            \
    char name[128];                                                                                                                                  \
    va_list args;                                                                                                                                    \
    va_start(args, format);                                                                                                                          \
    vsnprintf(name, sizeof name, format, args);                                                                                                      \
    va_end(args)

/* Plans the reading of rows [first, first + rows) of a tensor into tiles. */
static void plan(struct loader *l, const struct gguf_tensor *t, int64_t first, int64_t rows, uint8_t *tiles, size_t stride)
{
    int64_t per_piece = PIECE_BYTES / (int64_t)(quant_row_bytes(t->format, t->dims[0]) * TILE_ROWS);
    per_piece = (per_piece < 1 ? 1 : per_piece) * TILE_ROWS;
    for (int64_t row = 0; row < rows && !l->code; row += per_piece) {
        if (l->n_pieces == l->capacity) {
            size_t capacity = l->capacity ? 2 * l->capacity : 1024;
            struct loader_piece *more = realloc(l->pieces, capacity * sizeof *more);
            if (!more) {
                loader_fail(l, STRATA_E_MEMORY, "out of memory while planning the load");
                return;
            }
            l->pieces = more;
            l->capacity = capacity;
        }
        int64_t n = rows - row < per_piece ? rows - row : per_piece;
        l->pieces[l->n_pieces++] = (struct loader_piece){ t, first + row, (int)n, tiles + (size_t)(row / TILE_ROWS) * stride, stride };
    }
}

/* NVFP4's optional companion "NAME.scale" (".weight" dropped): n values. NULL if absent. */
static const float *companion_scale(struct loader *l, const char *name, int64_t n)
{
    char scale[140];
    size_t length = strlen(name);
    if (length > 7 && strcmp(name + length - 7, ".weight") == 0)
        length -= 7;
    snprintf(scale, sizeof scale, "%.*s.scale", (int)length, name);
    const float *out = NULL;
    if (gguf_tensor_find(l->gguf, scale))
        loader_vector(l, &out, n, "%s", scale);
    return out;
}

void loader_matrix(struct loader *l, struct matrix *out, int64_t rows, int64_t width, const char *format, ...)
{
    NAME_FROM(format);
    const struct gguf_tensor *t = find(l, name, width, rows, 1, false);
    if (!t)
        return;
    size_t stride = tile_bytes(t->format, width);
    *out = (struct matrix){ t->format, (int)rows, (int)width, NULL, stride, 1.0f };
    const float *scale = companion_scale(l, name, 1);
    if (l->dry)
        return;
    uint8_t *tiles = arena_alloc(l->arena, stride * (size_t)tile_count(rows));
    out->tiles = tiles;
    plan(l, t, 0, rows, tiles, stride);
    if (scale)
        out->scale = *scale;
}

void loader_table(struct loader *l, struct row_table *out, int64_t min_rows, int64_t width, const char *format, ...)
{
    NAME_FROM(format);
    const struct gguf_tensor *t = find(l, name, width, min_rows, 1, true);
    if (!t)
        return;
    *out = (struct row_table){ t->format, t->dims[1], (int)width, NULL };
    if (l->dry)
        return;
    /* A few rows of it are read per token: the file itself is the storage, and the system caches what is used. */
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), start = t->offset / page * page;
    size_t length = (size_t)(t->offset - start + t->bytes);
    void *base = mmap(NULL, length, PROT_READ, MAP_SHARED, l->gguf->files[t->file].fd, (off_t)start);
    if (base == MAP_FAILED) {
        loader_fail(l, STRATA_E_IO, "cannot map tensor %s of %s: %s", name, l->gguf->files[t->file].path, strerror(errno));
        return;
    }
    madvise(base, length, MADV_RANDOM);
    l->maps[l->n_maps++] = (struct mapping){ base, length };
    out->data = (uint8_t *)base + (t->offset - start);
}

/* Whether the n values of a float format are numbers. A damaged scale of a block format shows in its products instead. */
static bool all_numbers(const struct quant_format *format, const uint8_t *raw, size_t n)
{
    bool good = true;
    for (size_t i = 0; i < n; i++) {
        uint32_t wide;
        uint16_t half;
        if (format->type == QUANT_F32)
            good &= (memcpy(&wide, raw + 4 * i, 4), (wide & 0x7f800000) != 0x7f800000);
        else if (format->type == QUANT_F16)
            good &= (memcpy(&half, raw + 2 * i, 2), (half & 0x7c00) != 0x7c00);
        else if (format->type == QUANT_BF16)
            good &= (memcpy(&half, raw + 2 * i, 2), (half & 0x7f80) != 0x7f80);
    }
    return good;
}

static int not_a_number(const struct gguf_tensor *t, struct strata_error *error)
{
    return error_set(error, STRATA_E_NUMERIC, "tensor %s holds a value that is not finite: the file is damaged", t->name);
}

/* Reads a small tensor as floats into freshly allocated memory of the arena. */
static float *read_floats(struct loader *l, const struct gguf_tensor *t, int64_t n)
{
    float *out = arena_alloc(l->arena, (size_t)n * sizeof(float));
    uint8_t *raw = malloc((size_t)t->bytes);
    if (!raw) {
        loader_fail(l, STRATA_E_MEMORY, "out of memory for tensor %s", t->name);
        return NULL;
    }
    l->code = gguf_read(l->gguf, t, 0, raw, t->bytes, l->error);
    if (!l->code && !all_numbers(t->format, raw, (size_t)n))
        l->code = not_a_number(t, l->error);
    if (!l->code)
        for (int64_t row = 0; row < t->dims[1]; row++)
            quant_decode(t->format, raw + (size_t)row * quant_row_bytes(t->format, t->dims[0]), t->dims[0], out + row * t->dims[0]);
    free(raw);
    return out;
}

void loader_vector(struct loader *l, const float **out, int64_t n, const char *format, ...)
{
    NAME_FROM(format);
    const struct gguf_tensor *t = find(l, name, n, 1, 1, false);
    if (t && !l->dry)
        *out = read_floats(l, t, n);
}

void loader_taps(struct loader *l, const float **out, int64_t channels, int64_t taps, const char *format, ...)
{
    NAME_FROM(format);
    const struct gguf_tensor *t = find(l, name, taps, channels, 1, false);
    if (!t || l->dry)
        return;
    float *in = read_floats(l, t, channels * taps), *transposed = arena_alloc(l->arena, (size_t)(channels * taps) * sizeof(float));
    if (!in)
        return;
    for (int64_t c = 0; c < channels; c++)
        for (int64_t j = 0; j < taps; j++)
            transposed[j * channels + c] = in[c * taps + j];
    *out = transposed;
}

void loader_experts(struct loader *l, struct expert_set *out, int n_experts, int hidden, int width, int block)
{
    char name[3][GGUF_MAX_NAME], fused_name[GGUF_MAX_NAME];
    snprintf(name[0], sizeof name[0], "blk.%d.ffn_gate_exps.weight", block);
    snprintf(name[1], sizeof name[1], "blk.%d.ffn_up_exps.weight", block);
    snprintf(name[2], sizeof name[2], "blk.%d.ffn_down_exps.weight", block);
    snprintf(fused_name, sizeof fused_name, "blk.%d.ffn_gate_up_exps.weight", block);
    /* Some files hold gate and up as one tensor, gate rows first. */
    bool fused = gguf_tensor_find(l->gguf, fused_name) != NULL;
    const struct gguf_tensor *gate = fused ? find(l, fused_name, hidden, 2 * width, n_experts, false) : find(l, name[0], hidden, width, n_experts, false);
    const struct gguf_tensor *up = fused ? gate : find(l, name[1], hidden, width, n_experts, false);
    const struct gguf_tensor *down = find(l, name[2], width, hidden, n_experts, false);
    if (!gate || !up || !down)
        return;
    struct expert_set set = { .n_experts = n_experts, .hidden = hidden, .width = width, .gate = gate->format, .up = up->format, .down = down->format };
    set.gate_bytes = tile_bytes(set.gate, hidden);
    set.up_bytes = tile_bytes(set.up, hidden);
    set.down_bytes = tile_bytes(set.down, width);
    set.down_offset = (size_t)tile_count(width) * (set.gate_bytes + set.up_bytes);
    set.blob_bytes = set.down_offset + (size_t)tile_count(hidden) * set.down_bytes;
    set.gate_scale = companion_scale(l, fused ? fused_name : name[0], n_experts);
    set.up_scale = fused ? set.gate_scale : companion_scale(l, name[1], n_experts);
    set.down_scale = companion_scale(l, name[2], n_experts);
    *out = set;
    if (l->dry)
        return;
    uint8_t *blobs = arena_alloc(l->arena, (size_t)n_experts * set.blob_bytes);
    out->blobs = blobs;
    for (int e = 0; e < n_experts; e++) {
        uint8_t *blob = blobs + (size_t)e * set.blob_bytes;
        int64_t rows = fused ? 2 * width : width;
        plan(l, gate, e * rows, width, blob, set.gate_bytes + set.up_bytes);
        plan(l, up, e * rows + (fused ? width : 0), width, blob + set.gate_bytes, set.gate_bytes + set.up_bytes);
        plan(l, down, (int64_t)e * hidden, hidden, blob + set.down_offset, set.down_bytes);
    }
}

size_t loader_arena_bytes(const struct gguf *gguf)
{
    size_t total = 0;
    for (uint64_t i = 0; i < gguf->n_tensors; i++) {
        const struct gguf_tensor *t = &gguf->tensors[i];
        if (!t->format)
            continue;
        /* Experts share alignment per layer only, and gate and up in one tensor end in a tile each; vectors and taps become floats (taps
         * twice). No machine holds 2^46 bytes: the sum stays in range, and the reservation fails with its own sentence. */
        if (t->bytes >> 46 || total >> 46)
            return SIZE_MAX / 2;
        size_t tiles = (size_t)(tile_count(t->dims[1]) + 1) * (size_t)(t->dims[2] * t->dims[3]) * tile_bytes(t->format, t->dims[0]);
        size_t floats = t->dims[1] == 1 || t->dims[0] < 32 ? (size_t)(t->dims[0] * t->dims[1]) * 8 : 0;
        total += (tiles > floats ? tiles : floats) + 256;
    }
    return total;
}

struct run { struct loader *l; size_t first; _Atomic int code; struct strata_error error; _Atomic bool taken; };

static void run_piece(void *context, int item)
{
    struct run *run = context;
    const struct loader_piece *p = &run->l->pieces[run->first + (size_t)item];
    const struct gguf_tensor *t = p->tensor;
    size_t row_bytes = quant_row_bytes(t->format, t->dims[0]), bytes = (size_t)p->n_rows * row_bytes;
    struct strata_error error = { 0 };
    uint8_t *raw = atomic_load(&run->code) ? NULL : malloc(bytes);
    int code = atomic_load(&run->code);
    if (!code && !raw)
        code = error_set(&error, STRATA_E_MEMORY, "out of memory while reading tensor %s", t->name);
    if (!code)
        code = gguf_read(run->l->gguf, t, (uint64_t)p->first_row * row_bytes, raw, bytes, &error);
    if (!code && !all_numbers(t->format, raw, (size_t)p->n_rows * (size_t)t->dims[0]))
        code = not_a_number(t, &error);
    for (int row = 0; !code && row < p->n_rows; row += TILE_ROWS)
        tile_pack(t->format, t->dims[0], raw + (size_t)row * row_bytes, p->n_rows - row < TILE_ROWS ? p->n_rows - row : TILE_ROWS,
                  p->tiles + (size_t)(row / TILE_ROWS) * p->stride);
    free(raw);
    if (code && !atomic_exchange(&run->taken, true)) {
        run->error = error;
        atomic_store(&run->code, code);
    }
}

int loader_run(struct loader *l, struct pool *pool, bool (*progress)(void *, double), void *progress_context)
{
    /* In batches of about 64 MB, so that progress can be shown and the user can stop. */
    enum { BATCH = 256 };
    struct run run = { .l = l };
    for (; !l->code && run.first < l->n_pieces; run.first += BATCH) {
        if (progress && !progress(progress_context, (double)run.first / (double)l->n_pieces))
            loader_fail(l, STRATA_E_STOPPED, "loading was stopped");
        size_t left = l->n_pieces - run.first;
        if (!l->code)
            pool_run(pool, left < BATCH ? (int)left : BATCH, run_piece, &run);
        if (atomic_load(&run.code))
            loader_fail(l, atomic_load(&run.code), "%s", run.error.text);
    }
    if (!l->code && progress)
        progress(progress_context, 1.0);
    return l->code;
}

void loader_finish(struct loader *l)
{
    free(l->pieces);
    l->pieces = NULL;
}
