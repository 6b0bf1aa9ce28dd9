#include "convert/emit.h"

#include "base/pool.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Types ------------------------------------------------------------------------------------------------------------------ */

enum role { ROLE_FLOAT, ROLE_INDEXER, ROLE_GATE_UP, ROLE_DOWN, ROLE_NGRAM, ROLE_DENSE };

/* The name's part after "blk.N.". */
static const char *local_name(const char *name)
{
    if (strncmp(name, "blk.", 4) != 0)
        return name;
    const char *dot = strchr(name + 4, '.');
    return dot ? dot + 1 : name;
}

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);
    return n >= m && memcmp(text + n - m, end, m) == 0;
}

static enum role role_of(const char *name, int n_dims)
{
    static const struct {
        const char *name;
        enum role role;
    } exact[] = {
        { "ffn_gate_inp.weight", ROLE_FLOAT },     { "ssm_alpha.weight", ROLE_FLOAT },
        { "ssm_beta.weight", ROLE_FLOAT },         { "ssm_conv1d.weight", ROLE_FLOAT },
        { "ple_conv1d.weight", ROLE_FLOAT },       { "indexer.q_proj.weight", ROLE_INDEXER },
        { "indexer.k_proj.weight", ROLE_INDEXER }, { "ffn_gate_exps.weight", ROLE_GATE_UP },
        { "ffn_up_exps.weight", ROLE_GATE_UP },    { "ffn_gate_up_exps.weight", ROLE_GATE_UP },
        { "ffn_down_exps.weight", ROLE_DOWN },     { "per_layer_token_embd.weight", ROLE_NGRAM },
    };
    const char *local = local_name(name);
    if (n_dims <= 1 || ends_with(local, "_inject.weight") || ends_with(local, "_norm.weight") || ends_with(local, ".scale"))
        return ROLE_FLOAT;
    for (size_t i = 0; i < sizeof exact / sizeof *exact; i++)
        if (strcmp(local, exact[i].name) == 0)
            return exact[i].role;
    return ROLE_DENSE;
}

static void count_fallback(struct emit *emit, const struct quant_format *wanted, const struct quant_format *got)
{
    emit->summary->n_fallbacks++;
    int i = 0;
    while (i < emit->n_fallback_kinds && (emit->fallbacks[i].wanted != wanted || emit->fallbacks[i].got != got))
        i++;
    if (i == (int)(sizeof emit->fallbacks / sizeof *emit->fallbacks))
        return;
    emit->n_fallback_kinds += i == emit->n_fallback_kinds;
    emit->fallbacks[i].wanted = wanted;
    emit->fallbacks[i].got = got;
    emit->fallbacks[i].n++;
}

const struct quant_format *emit_format(struct emit *emit, const char *name, int n_dims, int64_t width,
                                       const struct quant_format *from)
{
    const struct convert_types *types = &emit->options->types;
    const struct quant_format *f32 = quant_format_find(QUANT_F32), *bf16 = quant_format_find(QUANT_BF16), *wanted = NULL;
    switch (role_of(name, n_dims)) {
    case ROLE_FLOAT:
        return f32;
    case ROLE_INDEXER: /* block choices are close calls, and these matrices are small */
        return types->dense == f32 ? f32 : from->type == QUANT_F16 ? from : types->dense || from != f32 ? bf16 : f32;
    case ROLE_GATE_UP:
        wanted = types->gate_up;
        break;
    case ROLE_DOWN:
        wanted = types->down;
        break;
    case ROLE_NGRAM:
        wanted = types->ngram;
        break;
    case ROLE_DENSE:
        wanted = types->dense;
        break;
    }
    if (!wanted)
        wanted = from;
    if (width % wanted->block == 0)
        return wanted;
    /* Never fewer bits than asked for: above 4.5 a weight the next type with blocks of 32 is Q8_0. */
    const struct quant_format *got = quant_format_find(wanted->bytes * 16 <= wanted->block * 9 ? QUANT_IQ4_NL : QUANT_Q8_0);
    if (width % got->block)
        got = quant_format_find(QUANT_F16);
    count_fallback(emit, wanted, got);
    return got;
}

/* general.file_type, the label that other programs show: numbers of the hub's list, by the type of most of the weights. */
static int file_type_of(const struct quant_format *format)
{
    static const int8_t labels[QUANT_TYPE_LIMIT] = {
        [QUANT_F16] = 1,     [QUANT_Q4_0] = 2,     [QUANT_Q4_1] = 3,    [QUANT_Q8_0] = 7,     [QUANT_Q5_0] = 8,
        [QUANT_Q5_1] = 9,    [QUANT_Q2_K] = 10,    [QUANT_Q3_K] = 11,   [QUANT_Q4_K] = 14,    [QUANT_Q5_K] = 16,
        [QUANT_Q6_K] = 18,   [QUANT_IQ2_XXS] = 19, [QUANT_IQ2_XS] = 20, [QUANT_IQ3_XXS] = 23, [QUANT_IQ1_S] = 24,
        [QUANT_IQ4_NL] = 25, [QUANT_IQ3_S] = 26,   [QUANT_IQ2_S] = 28,  [QUANT_IQ4_XS] = 30,  [QUANT_IQ1_M] = 31,
        [QUANT_BF16] = 32,   [QUANT_MXFP4] = 38,   [QUANT_NVFP4] = 39,  [QUANT_Q1_0] = 40,    [QUANT_Q2_0] = 41,
    };
    return labels[format->type];
}

static int64_t tensor_rows(const struct emit_tensor *t)
{
    int64_t rows = 1;
    for (int i = 1; i < t->n_dims; i++)
        rows *= t->dims[i];
    return rows;
}

void emit_put_file_type(const struct emit *emit, struct gguf_writer *writer)
{
    double weights[QUANT_TYPE_LIMIT] = { 0 };
    int most = QUANT_F32;
    for (size_t i = 0; i < emit->n; i++) {
        const struct emit_tensor *t = &emit->tensors[i];
        if (role_of(t->name, t->n_dims) == ROLE_NGRAM) /* rows that are looked up, not computed with, give a file no name */
            continue;
        weights[t->format->type] += (double)tensor_rows(t) * (double)t->dims[0];
        if (weights[t->format->type] > weights[most])
            most = (int)t->format->type;
    }
    gguf_put_u32(writer, "general.file_type", (uint32_t)file_type_of(quant_format_find((uint32_t)most)));
    gguf_put_u32(writer, "general.quantization_version", 2);
}

/* ---- The list --------------------------------------------------------------------------------------------------------------- */

void emit_create(struct emit *emit, const struct convert_options *options, struct convert_summary *summary)
{
    *emit = (struct emit){ .options = options, .summary = summary };
    *summary = (struct convert_summary){ 0 };
}

void emit_destroy(struct emit *emit)
{
    for (size_t i = 0; i < emit->n; i++)
        free(emit->tensors[i].source.context);
    free(emit->tensors);
}

int emit_add(struct emit *emit, const char *name, const struct quant_format *format, int n_dims, const int64_t *dims,
             struct emit_source source, struct strata_error *error)
{
    int code = 0;
    if (strlen(name) >= GGUF_MAX_NAME)
        code = error_set(error, STRATA_E_FORMAT, "tensor %.100s: the name has %zu bytes, wanted at most %d", name, strlen(name),
                         GGUF_MAX_NAME - 1);
    else if (source.floats && !format->is_float && !format->encode)
        code = error_set(error, STRATA_E_UNSUPPORTED, "tensor %s: Strata reads %s but cannot write it", name, format->name);
    else if (emit->n == emit->capacity) {
        size_t capacity = emit->capacity ? 2 * emit->capacity : 256;
        struct emit_tensor *more = realloc(emit->tensors, capacity * sizeof *more);
        if (!more)
            code = error_set(error, STRATA_E_MEMORY, "out of memory for a list of %zu tensors", capacity);
        else {
            emit->tensors = more;
            emit->capacity = capacity;
        }
    }
    if (code) {
        free(source.context);
        return code;
    }
    struct emit_tensor *t = &emit->tensors[emit->n++];
    *t = (struct emit_tensor){ .format = format, .n_dims = n_dims, .source = source };
    strcpy(t->name, name);
    memcpy(t->dims, dims, (size_t)n_dims * sizeof *dims);
    return 0;
}

/* ---- Streaming -------------------------------------------------------------------------------------------------------------- */

/* An item is one thread's work: 256 KB of floats stay in its cache. A batch is written at once. */
enum { ITEM_WEIGHTS = 64 << 10, BATCH_ITEMS = 64 };

struct batch {
    const struct emit_tensor *tensor;
    int64_t first, n_rows, item_rows;
    size_t row_bytes;
    uint8_t *out; /* [n_rows][row_bytes] */
    _Atomic int code;
    _Atomic bool taken; /* error was set by the first item that failed */
    struct strata_error error;
};

static int run_floats(const struct emit_tensor *t, int64_t first, int64_t n, size_t row_bytes, uint8_t *out,
                      struct strata_error *error)
{
    float *values = malloc((size_t)(n * t->dims[0]) * sizeof *values);
    if (!values)
        return error_set(error, STRATA_E_MEMORY, "out of memory for %lld rows of tensor %s", (long long)n, t->name);
    int code = t->source.floats(t->source.context, first, n, values, error);
    for (int64_t row = 0; !code && row < n; row++)
        quant_encode(t->format, values + row * t->dims[0], NULL, t->dims[0], out + (size_t)row * row_bytes);
    free(values);
    return code;
}

static void run_item(void *context, int item)
{
    struct batch *b = context;
    if (atomic_load(&b->code))
        return;
    const struct emit_tensor *t = b->tensor;
    int64_t at = item * b->item_rows, n = b->n_rows - at < b->item_rows ? b->n_rows - at : b->item_rows;
    uint8_t *out = b->out + (size_t)at * b->row_bytes;
    struct strata_error error = { 0 };
    int code = t->source.bytes ? t->source.bytes(t->source.context, b->first + at, n, out, &error)
                               : run_floats(t, b->first + at, n, b->row_bytes, out, &error);
    if (code && !atomic_exchange(&b->taken, true)) {
        b->error = error;
        atomic_store(&b->code, code);
    }
}

static uint64_t tensor_bytes(const struct emit_tensor *t)
{
    return (uint64_t)tensor_rows(t) * quant_row_bytes(t->format, t->dims[0]);
}

static int stream_tensor(const struct emit *emit, const struct emit_tensor *t, struct pool *pool, struct gguf_writer *writer,
                         uint64_t done, uint64_t total, struct strata_error *error)
{
    struct batch b = { .tensor = t, .row_bytes = quant_row_bytes(t->format, t->dims[0]) };
    int64_t rows = tensor_rows(t), batch_rows;
    b.item_rows = t->dims[0] < ITEM_WEIGHTS ? ITEM_WEIGHTS / t->dims[0] : 1;
    batch_rows = b.item_rows * BATCH_ITEMS < rows ? b.item_rows * BATCH_ITEMS : rows;
    b.out = malloc((size_t)batch_rows * b.row_bytes);
    int code =
        b.out ? 0 : error_set(error, STRATA_E_MEMORY, "out of memory for %lld rows of tensor %s", (long long)batch_rows, t->name);
    for (; !code && b.first < rows; b.first += b.n_rows) {
        b.n_rows = rows - b.first < batch_rows ? rows - b.first : batch_rows;
        pool_run(pool, (int)((b.n_rows + b.item_rows - 1) / b.item_rows), run_item, &b);
        if ((code = atomic_load(&b.code)) != 0) {
            if (error)
                *error = b.error;
            break;
        }
        code = gguf_write(writer, b.out, (uint64_t)b.n_rows * b.row_bytes, error);
        done += (uint64_t)b.n_rows * b.row_bytes;
        if (!code && emit->options->progress &&
            !emit->options->progress(emit->options->progress_context, (double)done / (double)total))
            code = error_set(error, STRATA_E_STOPPED, "stopped");
    }
    free(b.out);
    return code;
}

static void describe_fallbacks(const struct emit *emit)
{
    char *out = emit->summary->fallbacks;
    size_t size = sizeof emit->summary->fallbacks, at = 0;
    for (int i = 0; i < emit->n_fallback_kinds && at < size; i++)
        at += (size_t)snprintf(out + at, size - at, "%s%llu x %s -> %s", i ? ", " : "", (unsigned long long)emit->fallbacks[i].n,
                               emit->fallbacks[i].wanted->name, emit->fallbacks[i].got->name);
}

int emit_run(struct emit *emit, struct gguf_writer *writer, struct strata_error *error)
{
    uint64_t total = 0;
    for (size_t i = 0; i < emit->n; i++) {
        const struct emit_tensor *t = &emit->tensors[i];
        gguf_put_tensor(writer, t->name, t->format, t->n_dims, t->dims);
        total += tensor_bytes(t);
    }
    struct pool *pool = NULL;
    int code = gguf_writer_begin_data(writer, error);
    if (!code)
        code = pool_create(&pool, emit->options->threads ? emit->options->threads : pool_default_threads(), error);
    for (size_t i = 0; !code && i < emit->n; i++) {
        code = stream_tensor(emit, &emit->tensors[i], pool, writer, emit->summary->bytes, total, error);
        emit->summary->bytes += tensor_bytes(&emit->tensors[i]);
    }
    pool_destroy(pool);
    if (!code)
        code = gguf_writer_finish(writer, error);
    emit->summary->n_tensors = emit->n;
    describe_fallbacks(emit);
    return code;
}
