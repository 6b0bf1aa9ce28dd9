#include "model/loader.h"

#include "base/memory.h"
#include "model/model.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* A piece is a few tiles of one matrix: small enough that every thread has work and that its staging buffer stays in the cache. */
enum { PIECE_BYTES = 256 << 10 };

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
        loader_fail(l, STRATA_E_UNSUPPORTED, "tensor %s has type %s, which Strata cannot compute with", name,
                    quant_type_name(t->type));
        return NULL;
    }
    bool right = t->dims[0] == width && t->dims[3] == 1 && t->dims[2] == n && (min_rows ? t->dims[1] >= rows : t->dims[1] == rows);
    if (!right) {
        char found[100], wanted[100];
        loader_fail(l, STRATA_E_FORMAT, "tensor %s has shape %s, wanted %s%s", name,
                    shape_text(found, sizeof found, t->n_dims, t->dims), min_rows ? "at least " : "",
                    shape_text(wanted, sizeof wanted,
                               n > 1      ? 3
                               : rows > 1 ? 2
                                          : 1,
                               (int64_t[]){ width, rows, n }));
        return NULL;
    }
    if (!t->format->is_float && width % 32) {
        loader_fail(l, STRATA_E_FORMAT, "tensor %s: row width %lld is not a multiple of 32 (%s)", name, (long long)width,
                    t->format->name);
        return NULL;
    }
    if (t->bytes >> 46) { /* no machine holds it: sums of sizes stay in range */
        loader_fail(l, STRATA_E_UNSUPPORTED, "tensor %s is larger than 64 TB", name);
        return NULL;
    }
    return t;
}

/* A place among the dense weights; in the dry pass it is only counted (rounded as the arena does). */
static void *take(struct loader *l, uint64_t bytes)
{
    if (!l->dry)
        return arena_alloc(l->arena, (size_t)bytes);
    if (l->dense_bytes < 1ull << 56)
        l->dense_bytes += (bytes + 63) & ~(uint64_t)63;
    return NULL;
}

#define NAME_FROM(format)                                                                                                          \
    char name[128];                                                                                                                \
    va_list args;                                                                                                                  \
    va_start(args, format);                                                                                                        \
    vsnprintf(name, sizeof name, format, args);                                                                                    \
    va_end(args)

void loader_add_piece(struct loader *l, struct loader_piece piece)
{
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
    l->pieces[l->n_pieces++] = piece;
}

/* Plans the reading of rows [first, first + rows) of a tensor into tiles. */
static void plan(struct loader *l, const struct gguf_tensor *t, int64_t first, int64_t rows, uint8_t *tiles, size_t stride)
{
    int64_t per_piece = PIECE_BYTES / (int64_t)(quant_row_bytes(t->format, t->dims[0]) * TILE_ROWS);
    per_piece = (per_piece < 1 ? 1 : per_piece) * TILE_ROWS;
    for (int64_t row = 0; row < rows && !l->code; row += per_piece) {
        int64_t n = rows - row < per_piece ? rows - row : per_piece;
        loader_add_piece(
            l, (struct loader_piece){ t, (uint64_t)(first + row), (size_t)n, tiles + (size_t)(row / TILE_ROWS) * stride, stride });
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
    uint8_t *tiles = take(l, stride * (uint64_t)tile_count(rows));
    if (l->dry)
        return;
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

int loader_check_numbers(const struct gguf_tensor *t, const uint8_t *raw, size_t n, struct strata_error *error)
{
    return all_numbers(t->format, raw, n)
               ? 0
               : error_set(error, STRATA_E_NUMERIC, "tensor %s holds a value that is not finite: the file is damaged", t->name);
}

/* Reads a small tensor as floats into the arena; NULL in the dry pass. */
static float *read_floats(struct loader *l, const struct gguf_tensor *t, int64_t n)
{
    float *out = take(l, (uint64_t)n * sizeof(float));
    if (l->dry)
        return NULL;
    uint8_t *raw = malloc((size_t)t->bytes);
    if (!raw) {
        loader_fail(l, STRATA_E_MEMORY, "out of memory for tensor %s", t->name);
        return NULL;
    }
    l->code = gguf_read(l->gguf, t, 0, raw, t->bytes, l->error);
    if (!l->code)
        l->code = loader_check_numbers(t, raw, (size_t)n, l->error);
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
    if (t)
        *out = read_floats(l, t, n);
}

void loader_taps(struct loader *l, const float **out, int64_t channels, int64_t taps, const char *format, ...)
{
    NAME_FROM(format);
    const struct gguf_tensor *t = find(l, name, taps, channels, 1, false);
    if (!t)
        return;
    float *in = read_floats(l, t, channels * taps), *transposed = take(l, (uint64_t)(channels * taps) * sizeof(float));
    if (!in)
        return;
    for (int64_t c = 0; c < channels; c++)
        for (int64_t j = 0; j < taps; j++)
            transposed[j * channels + c] = in[c * taps + j];
    *out = transposed;
}

/* ---- Experts
 * --------------------------------------------------------------------------------------------------------------------------- */

/* Some files hold gate and up as one tensor, gate rows first. */
struct expert_names {
    bool fused;
    char gate[GGUF_MAX_NAME], up[GGUF_MAX_NAME], down[GGUF_MAX_NAME];
};

static struct expert_names expert_names(const struct gguf *gguf, int block)
{
    struct expert_names n;
    snprintf(n.gate, sizeof n.gate, "blk.%d.ffn_gate_up_exps.weight", block);
    n.fused = gguf_tensor_find(gguf, n.gate) != NULL;
    if (!n.fused)
        snprintf(n.gate, sizeof n.gate, "blk.%d.ffn_gate_exps.weight", block);
    snprintf(n.up, sizeof n.up, "blk.%d.ffn_up_exps.weight", block);
    snprintf(n.down, sizeof n.down, "blk.%d.ffn_down_exps.weight", block);
    return n;
}

void loader_experts(struct loader *l, struct expert_set *out, int n_experts, int hidden, int width, int block)
{
    struct expert_names names = expert_names(l->gguf, block);
    const struct gguf_tensor *gate = find(l, names.gate, hidden, names.fused ? 2 * width : width, n_experts, false);
    const struct gguf_tensor *up = names.fused ? gate : find(l, names.up, hidden, width, n_experts, false);
    const struct gguf_tensor *down = find(l, names.down, width, hidden, n_experts, false);
    if (!gate || !up || !down)
        return;
    struct expert_set set = { .layer = block,
                              .n_experts = n_experts,
                              .hidden = hidden,
                              .width = width,
                              .gate = gate->format,
                              .up = up->format,
                              .down = down->format,
                              .blobs = l->dry ? NULL : out->blobs }; /* loader_reserve has given it its place */
    set.gate_bytes = tile_bytes(set.gate, hidden);
    set.up_bytes = tile_bytes(set.up, hidden);
    set.down_bytes = tile_bytes(set.down, width);
    set.down_offset = (size_t)tile_count(width) * (set.gate_bytes + set.up_bytes);
    set.blob_bytes = set.down_offset + (size_t)tile_count(hidden) * set.down_bytes;
    set.gate_scale = companion_scale(l, names.gate, n_experts);
    set.up_scale = names.fused ? set.gate_scale : companion_scale(l, names.up, n_experts);
    set.down_scale = companion_scale(l, names.down, n_experts);
    *out = set;
    l->store->sets[block] = out;
}

void loader_plan_experts(struct loader *l, const struct expert_set *set, uint8_t *blobs)
{
    struct expert_names names = expert_names(l->gguf, set->layer);
    const struct gguf_tensor *gate = gguf_tensor_find(l->gguf, names.gate),
                             *up = names.fused ? gate : gguf_tensor_find(l->gguf, names.up);
    const struct gguf_tensor *down = gguf_tensor_find(l->gguf, names.down);
    for (int e = 0; e < set->n_experts; e++) {
        uint8_t *blob = blobs + (size_t)e * set->blob_bytes;
        int64_t width = set->width, rows = names.fused ? 2 * width : width;
        plan(l, gate, e * rows, width, blob, set->gate_bytes + set->up_bytes);
        plan(l, up, e * rows + (names.fused ? width : 0), width, blob + set->gate_bytes, set->gate_bytes + set->up_bytes);
        plan(l, down, (int64_t)e * set->hidden, set->hidden, blob + set->down_offset, set->down_bytes);
    }
}

/* ---- Memory
 * ---------------------------------------------------------------------------------------------------------------------------- */

void loader_reserve(struct loader *l, const struct load_options *options)
{
    if (!l->code && options->verify && !options->pack)
        loader_fail(l, STRATA_E_ARGUMENT, "--verify needs --pack: a GGUF file has no hashes to compare with");
    struct memory_room room = memory_room();
    if (!l->code && !options->ignore_memory)
        l->code = store_check_memory(l->store, l->dense_bytes, &room, l->error);
    if (!l->code)
        l->code = arena_create(l->arena, (size_t)l->dense_bytes, "the weights outside the experts", l->error);
    if (!l->code)
        l->code = store_reserve(l->store, l->error);
    l->dry = false;
}

void loader_finish(struct loader *l)
{
    free(l->pieces);
    l->pieces = NULL;
    l->n_pieces = l->capacity = 0;
}
