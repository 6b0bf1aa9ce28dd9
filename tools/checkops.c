/* checkops - every operation kernel of every instruction set against `ref`: the same bits, on random and extreme inputs.
 *
 *   checkops [--isa avx2|avx512] [--filter NAME] [--bench [--mb N] [--threads N]] [--seed N]
 *
 * --bench also times the products beside a plain read of the same bytes: from memory with all threads, and from cache. */
#include "base/half.h"
#include "base/pool.h"
#include "ops/kernels.h"
#include "ops/vector.h"

#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

static uint64_t random_state;

static uint64_t random_next(void) /* SplitMix64 */
{
    uint64_t x = random_state += 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

static float random_unit(void) { return (float)(int64_t)(random_next() >> 40) * 0x1p-23f - 1.0f; }

/* Activations of one kind: ordinary, denormal, huge, all zero, one spike among small values, or all of one size (every A8 code is 127 or
 * -127: with extreme weights, what a 16-bit sum must survive). */
enum kind { ORDINARY, DENORMAL, HUGE_VALUES, ZERO, SPIKE, ALL_PLUS, ALL_MINUS, SIGNS, KINDS };
static const char *const kind_names[KINDS] = { "ordinary", "denormal", "huge", "zero", "spike", "all plus", "all minus", "signs" };

static void fill_values(float *x, int n, enum kind kind)
{
    for (int i = 0; i < n; i++) {
        float r = random_unit();
        x[i] = kind == ORDINARY ? 3 * r : kind == DENORMAL ? r * 0x1p-130f : kind == HUGE_VALUES ? r * 0x1p60f : kind == ZERO ? 0 : r * 0.01f;
        if (kind == SPIKE && random_next() % 64 == 0)
            x[i] = 1000 * r;
        if (kind >= ALL_PLUS)
            x[i] = kind == ALL_PLUS || (kind == SIGNS && r > 0) ? 1.5f : -1.5f;
    }
}

static bool finite_block(const struct quant_format *f, const uint8_t *block)
{
    for (int g = 0; g < f->block / 32; g++) {
        struct quant_group group;
        f->group(block, g, &group);
        if (!isfinite(group.d[0]) || !isfinite(group.d[1]) || !isfinite(group.dmin) || fabsf(group.d[0]) >= 1e6f)
            return false;
    }
    return true;
}

/* Random blocks: all bit patterns, but the fp16 and exponent fields are kept finite, so that results are numbers. The fields' places are
 * found by asking the format itself: a random block is kept if its groups decode to finite scales. `pattern` >= 0: every byte that can
 * be that byte is (largest and smallest codes and sub-scales). */
static void fill_row(const struct quant_format *f, uint8_t *row, int width, int pattern)
{
    if (f->is_float) {
        for (int k = 0; k < width; k++) {
            float v = random_unit() * (random_next() % 50 ? 1.0f : 0x1p-20f);
            quant_encode(f, &v, NULL, 1, row + k * f->bytes);
        }
        return;
    }
    for (int b = 0; b < width / f->block; b++) {
        uint8_t *block = row + b * f->bytes;
        do {
            for (int i = 0; i < f->bytes; i++)
                block[i] = (uint8_t)random_next();
        } while (!finite_block(f, block));
        for (int i = 0; pattern >= 0 && i < f->bytes; i++) {
            uint8_t before = block[i];
            block[i] = (uint8_t)pattern;
            if (!finite_block(f, block))
                block[i] = before;
        }
    }
}

struct input { float *values; int8_t *codes; float *scales; int32_t *sums; };

static void *allocate(size_t bytes)
{
    void *p = aligned_alloc(64, (bytes + 127) & ~(size_t)63);
    if (!p)
        exit(2);
    memset(p, 0, (bytes + 127) & ~(size_t)63);
    return p;
}

/* Rows of a window lie `width` apart, so their parts begin anywhere: `row` > 0 gives them the alignment of such a row, of width 32. */
static struct dot_input make_input(const struct kernels *ref, int width, enum kind kind, int row)
{
    size_t n = (size_t)width, shift = (size_t)row;
    struct input in = { (float *)allocate(n * 4 + shift * 128) + shift * 32, (int8_t *)allocate(n + shift * 32) + shift * 32,
                        (float *)allocate(n / 8 + 4 + shift * 4) + shift, (int32_t *)allocate(n / 4 + 4 + shift * 8) + shift * 2 };
    fill_values(in.values, width, kind);
    if (width % 32 == 0)
        ref->quantize(in.values, width, in.codes, in.scales, in.sums);
    return (struct dot_input){ in.values, in.codes, in.scales, in.sums };
}

static void free_input(const struct dot_input *in, int row)
{
    free((void *)(in->values - row * 32));
    free((void *)(in->codes - row * 32));
    free((void *)(in->scales - row));
    free((void *)(in->sums - row * 2));
}

static int n_checks, n_failed, n_skipped;

static void verdict(const char *isa, const char *what, const char *detail, bool same)
{
    n_checks++;
    if (same)
        return;
    if (n_failed++ < 20)
        printf("DIFFERENT: %s %s %s\n", isa, what, detail);
}

/* Bits, but any NaN equals any NaN. */
static bool same_floats(const float *a, const float *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (float_bits(a[i]) != float_bits(b[i]) && !(isnan(a[i]) && isnan(b[i])))
            return false;
    return true;
}

/* ---- Products ---------------------------------------------------------------------------------------------------------------------- */

static void check_dot(const struct kernels *ref, const struct kernels *k, const struct quant_format *f)
{
    static const int widths[] = { 1, 31, 32, 64, 160, 256, 320, 640, 1000, 1024, 2560 };
    static const int patterns[8] = { 0x00, 0xff, 0x80, 0x7f, 0x55, 0xaa, 0x0f, 0xf0 };
    enum { TILES = 3 };
    for (size_t wi = 0; wi < sizeof widths / sizeof *widths; wi++) {
        int width = widths[wi];
        if (width % f->block || (!f->is_float && width % 32))
            continue;
        size_t row_bytes = quant_row_bytes(f, width), bytes = tile_bytes(f, width), stride = bytes + (wi % 2 ? 192 : 0);
        uint8_t *rows = allocate(16 * row_bytes), *tiles = allocate(TILES * stride);
        for (int i = 0; i < TILES; i++) {
            for (int r = 0; r < TILE_ROWS; r++)
                fill_row(f, rows + (size_t)r * row_bytes, width, i == 1 ? patterns[r % 8] : -1);
            tile_pack(f, width, rows, i == TILES - 1 ? 5 : 16, tiles + (size_t)i * stride);
        }
        for (int kind = 0; kind < KINDS; kind++)
            for (int n = 1; n <= KERNEL_MAX_ROWS; n++) {
                struct dot_input in[KERNEL_MAX_ROWS];
                float want[KERNEL_MAX_ROWS][TILES * TILE_ROWS + 1], got[KERNEL_MAX_ROWS][TILES * TILE_ROWS + 1], *want_out[KERNEL_MAX_ROWS], *got_out[KERNEL_MAX_ROWS];
                for (int t = 0; t < n; t++) {
                    in[t] = make_input(ref, width, (enum kind)kind, t);
                    want_out[t] = want[t];
                    got_out[t] = got[t];
                    got[t][TILES * TILE_ROWS] = 12345; /* nobody writes behind the last tile */
                }
                ref->dot[f->type](tiles, stride, TILES, width, in, n, want_out);
                k->dot[f->type](tiles, stride, TILES, width, in, n, got_out);
                bool same = true;
                for (int t = 0; t < n; t++) {
                    same = same && same_floats(want[t], got[t], TILES * TILE_ROWS) && got[t][TILES * TILE_ROWS] == 12345;
                    free_input(&in[t], t);
                }
                char detail[80];
                snprintf(detail, sizeof detail, "width %d, %d rows, %s", width, n, kind_names[kind]);
                verdict(k->name, f->name, detail, same);
            }
        free(rows);
        free(tiles);
    }
}

static void check_quantize(const struct kernels *ref, const struct kernels *k)
{
    for (int kind = 0; kind < KINDS; kind++)
        for (int width = 32; width <= 2560; width *= kind + 2 > 4 ? 4 : 2) {
            float *x = allocate((size_t)width * 4);
            int8_t *a = allocate((size_t)width), *b = allocate((size_t)width);
            float *as = allocate((size_t)width / 8), *bs = allocate((size_t)width / 8);
            int32_t *ai = allocate((size_t)width / 4), *bi = allocate((size_t)width / 4);
            fill_values(x, width, (enum kind)kind);
            x[width - 1] = x[width - 2]; /* equal extremes, and exact halves of a code below */
            if (kind == ORDINARY) {
                x[0] = 127;
                for (int i = 1; i < 32; i++)
                    x[i] = (float)(i * 4 - 64) + 0.5f;
            }
            ref->quantize(x, width, a, as, ai);
            k->quantize(x, width, b, bs, bi);
            verdict(k->name, "quantize", kind_names[kind], !memcmp(a, b, (size_t)width) && same_floats(as, bs, (size_t)width / 32) && !memcmp(ai, bi, (size_t)width / 4));
            free(x); free(a); free(b); free(as); free(bs); free(ai); free(bi);
        }
}

/* ---- Vector kernels: each writes into `out`, which is compared ---------------------------------------------------------------------- */

enum { SIZE = 2560, OUT = 4 * SIZE + 64 };
struct vector_case { const float *a, *b, *c; int kind; float *out; };
typedef void vector_test(const struct vector_kernels *v, const struct vector_case *t);

static void test_rms_norm(const struct vector_kernels *v, const struct vector_case *t)
{
    v->rms_norm(t->a, t->b, 2560, 1e-6f, 256, t->out);
    v->rms_norm(t->a, t->b, 256, 1e-6f, 256, t->out + 2560);
    v->rms_norm(t->a, t->b, 128, 1e-6f, 32, t->out + 2816);
    v->rms_norm(t->a, t->b, 333, 1e-6f, 256, t->out + 3000);
}
static void test_l2_norm(const struct vector_kernels *v, const struct vector_case *t)
{
    memcpy(t->out, t->a, 128 * 4);
    v->l2_norm(t->out, 128, 1e-6f, 0.0883883461f);
}
static void test_dot256(const struct vector_kernels *v, const struct vector_case *t)
{
    t->out[0] = v->dot256(t->a, t->b, 2560);
    t->out[1] = v->dot256(t->a, t->b, 100);
}
static void test_gate_input(const struct vector_kernels *v, const struct vector_case *t) { v->gate_input(t->a, 321, 4, t->out); }
static void test_mix(const struct vector_kernels *v, const struct vector_case *t) { v->mix(t->a, t->b, 4, 640, t->out); }
static void test_write(const struct vector_kernels *v, const struct vector_case *t)
{
    memcpy(t->out, t->c, 2560 * 4);
    v->write(t->out, t->a, t->b, 4, 640);
}
static void test_silu_mul(const struct vector_kernels *v, const struct vector_case *t) { v->silu_mul(t->a, t->b, 2560, t->out); }
static void test_mul_sigmoid(const struct vector_kernels *v, const struct vector_case *t)
{
    memcpy(t->out, t->b, 2560 * 4);
    v->mul_sigmoid(t->out, t->a, 2560);
}
static void test_add2(const struct vector_kernels *v, const struct vector_case *t)
{
    memcpy(t->out, t->a, 2560 * 4);
    v->add2(t->out, t->b, t->c, 2560);
}
static void test_conv_silu(const struct vector_kernels *v, const struct vector_case *t)
{
    v->conv_silu((const float *[]){ t->a, t->b, t->c, t->a + 17 }, t->c, 4, 600, t->out);
}
static void test_delta_rule(const struct vector_kernels *v, const struct vector_case *t)
{
    for (int keep = 0; keep <= 3; keep++) {
        static float state[128 * 32];
        for (int i = 0; i < 128 * 32; i++)
            state[i] = t->c[i % SIZE];
        float *o = t->out + keep * 128;
        float *outs[3] = { o, o + 32, o + 64 };
        const float *q[3] = { t->a, t->b, t->c }, *k[3] = { t->b + 128, t->a + 256, t->c + 5 }, *values[3] = { t->a + 700, t->b + 300, t->a + 900 };
        v->delta_rule(state, 128, 32, 3, keep, q, k, values, (float[]){ 0.9f, 0.0f, 1.0f }, (float[]){ 0.5f, 1.0f, 0.1f }, outs);
        memcpy(t->out + 600 + keep * 2400, state, 2400 * 4); /* the first strip and some of the second */
    }
}
static void test_delta_gates(const struct vector_kernels *v, const struct vector_case *t) { v->delta_gates(t->a, t->b, t->c, t->c + 50, 48, t->out, t->out + 48); }
static void test_rope(const struct vector_kernels *v, const struct vector_case *t)
{
    memcpy(t->out, t->a, 256 * 4);
    v->rope(t->out, t->b, t->c, 32);
}
static void run_attend(const struct vector_kernels *v, const struct vector_case *t, enum kv_type type)
{
    enum { CELLS = 200, HEADS = 2, DIM = 128 };
    static uint16_t keys[CELLS * HEADS * DIM], values[CELLS * HEADS * DIM];
    static float key_scales[CELLS * HEADS * DIM / KV_GROUP], value_scales[CELLS * HEADS * DIM / KV_GROUP];
    struct kv_plane k = { type, keys, key_scales }, w = { type, values, value_scales };
    for (int cell = 0; cell < CELLS; cell++) {
        v->kv_store(&k, cell, t->a + cell, HEADS * DIM);
        v->kv_store(&w, cell, t->b + 2 * cell, HEADS * DIM);
    }
    int32_t cells[CELLS];
    int n = 0;
    for (int cell = 0; cell < CELLS; cell++)
        if (cell % 7 != 3)
            cells[n++] = cell;
    v->attend(t->c, 2 * DIM, 3, DIM, 0.01f, &k, &w, 1, HEADS, cells, n, t->out, DIM);
    v->attend(t->c, DIM, 2, DIM, 0.01f, &k, &w, 0, HEADS, cells, 1, t->out + 3 * DIM, DIM);
    for (int i = 0; i < 1024; i++)
        t->out[1024 + i] = (float)(type == KV_F16 ? keys[i] : ((uint8_t *)keys)[i]);
}
static void test_attend_f16(const struct vector_kernels *v, const struct vector_case *t) { run_attend(v, t, KV_F16); }
static void test_attend_int8(const struct vector_kernels *v, const struct vector_case *t) { run_attend(v, t, KV_INT8); }
static void test_index_scores(const struct vector_kernels *v, const struct vector_case *t) { v->index_scores(t->a, 4, 128, t->b, 1, 20, t->out); }
static void test_route(const struct vector_kernels *v, const struct vector_case *t)
{
    float logits[512];
    for (int i = 0; i < 512; i++) /* many equal logits: ties go to the lower index */
        logits[i] = t->kind == ORDINARY ? floorf(t->a[i]) : t->a[i];
    int32_t ids[10];
    v->route(logits, 512, 10, ids, t->out);
    for (int i = 0; i < 10; i++)
        t->out[10 + i] = (float)ids[i];
}
static void test_combine(const struct vector_kernels *v, const struct vector_case *t)
{
    v->combine((const float *[]){ t->a, t->b, t->c }, (float[]){ 0.5f, 0.3f, 0.2f }, 3, t->a + 9, -0.3f, 2500, t->out);
}
static void test_all_finite(const struct vector_kernels *v, const struct vector_case *t)
{
    float x[100];
    memcpy(x, t->a, sizeof x);
    t->out[0] = v->all_finite(x, 100);
    x[99] = INFINITY;
    t->out[1] = v->all_finite(x, 100);
    x[99] = -NAN;
    t->out[2] = v->all_finite(x, 100);
}

static const struct { const char *name; vector_test *run; } vector_tests[] = {
    { "rms_norm", test_rms_norm }, { "l2_norm", test_l2_norm }, { "dot256", test_dot256 }, { "gate_input", test_gate_input }, { "mix", test_mix },
    { "write", test_write }, { "silu_mul", test_silu_mul }, { "mul_sigmoid", test_mul_sigmoid }, { "add2", test_add2 }, { "conv_silu", test_conv_silu },
    { "delta_rule", test_delta_rule }, { "delta_gates", test_delta_gates }, { "rope", test_rope }, { "attend_f16", test_attend_f16 },
    { "attend_int8", test_attend_int8 }, { "index_scores", test_index_scores }, { "route", test_route }, { "combine", test_combine },
    { "all_finite", test_all_finite },
};

static void check_vectors(const struct kernels *ref, const struct kernels *k, const char *filter)
{
    for (size_t i = 0; i < sizeof vector_tests / sizeof *vector_tests; i++)
        for (int kind = 0; kind < KINDS && (!filter || !strcmp(filter, vector_tests[i].name)); kind++)
            for (int repeat = 0; repeat < 4; repeat++) {
                float *a = allocate(2 * SIZE * 4), *b = allocate(2 * SIZE * 4), *c = allocate(2 * SIZE * 4), *want = allocate(OUT * 4), *got = allocate(OUT * 4);
                fill_values(a, 2 * SIZE, (enum kind)kind);
                fill_values(b, 2 * SIZE, repeat % 2 ? ORDINARY : (enum kind)kind);
                fill_values(c, 2 * SIZE, ORDINARY);
                vector_tests[i].run(ref->vector, &(struct vector_case){ a, b, c, kind, want });
                vector_tests[i].run(k->vector, &(struct vector_case){ a, b, c, kind, got });
                verdict(k->name, vector_tests[i].name, kind_names[kind], same_floats(want, got, OUT));
                free(a); free(b); free(c); free(want); free(got);
            }
}

/* ---- Timing ------------------------------------------------------------------------------------------------------------------------ */

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

struct timing { const struct kernels *k; dot_tiles_fn *dot; const uint8_t *data; size_t tile, tiles; int n, width, item_tiles; struct dot_input *in; };

static void dot_item(void *context, int item)
{
    const struct timing *t = context;
    size_t first = (size_t)item * (size_t)t->item_tiles, left = t->tiles - first;
    int n_tiles = left < (size_t)t->item_tiles ? (int)left : t->item_tiles;
    static _Thread_local float out[KERNEL_MAX_ROWS][4096];
    float *outs[KERNEL_MAX_ROWS];
    for (int r = 0; r < t->n; r++)
        outs[r] = out[r];
    t->dot(t->data + first * t->tile, t->tile, n_tiles, t->width, t->in, t->n, outs);
}

/* The plain read: the best of what this processor has, with the kernels' own prefetch distance, so that the ratio is not flattered by a
 * lazy baseline. Everything is xor-ed, so that nothing can be left out. */
static _Atomic uint64_t read_sink;
enum { READ_AHEAD = 4096 };

#define DEFINE_READ(name, bytes, attributes)                                                                                                         \
    attributes static uint64_t name(const uint8_t *data, size_t n)                                                                                   \
    {                                                                                                                                                \
        typedef uint64_t vec __attribute__((vector_size(bytes), aligned(16), may_alias));                                                            \
        vec sum[4] = { { 0 } };                                                                                                                      \
        for (size_t i = 0; i + 4 * sizeof(vec) <= n; i += 4 * sizeof(vec)) {                                                                         \
            for (size_t line = 0; line < 4 * sizeof(vec); line += 64)                                                                                \
                __builtin_prefetch(data + i + line + READ_AHEAD);                                                                                    \
            for (int j = 0; j < 4; j++)                                                                                                              \
                sum[j] ^= *(const vec *)(data + i + (size_t)j * sizeof(vec));                                                                        \
        }                                                                                                                                            \
        vec all = sum[0] ^ sum[1] ^ sum[2] ^ sum[3];                                                                                                 \
        uint64_t out = 0;                                                                                                                            \
        for (size_t j = 0; j < sizeof(vec) / 8; j++)                                                                                                 \
            out ^= all[j];                                                                                                                           \
        return out;                                                                                                                                  \
    }
#if defined(__x86_64__)
DEFINE_READ(read_512, 64, __attribute__((target("avx512f"))))
DEFINE_READ(read_256, 32, __attribute__((target("avx2"))))
#endif
DEFINE_READ(read_128, 16, )

static void read_item(void *context, int item)
{
    const struct timing *t = context;
    const uint8_t *data = t->data + (size_t)item * (size_t)t->item_tiles * t->tile;
    size_t left = t->tiles - (size_t)item * (size_t)t->item_tiles, n = (left < (size_t)t->item_tiles ? left : (size_t)t->item_tiles) * t->tile;
#if defined(__x86_64__)
    read_sink += kernels_get(ISA_AVX512) ? read_512(data, n) : kernels_get(ISA_AVX2) ? read_256(data, n) : read_128(data, n);
#else
    read_sink += read_128(data, n);
#endif
}

static int compare_double(const void *a, const void *b) { return *(const double *)a < *(const double *)b ? -1 : *(const double *)a > *(const double *)b; }

/* Median GB/s of `repeats` runs over the data. */
static double rate(struct pool *pool, struct timing *t, pool_fn *fn, int repeats)
{
    double seconds[64];
    int items = (int)((t->tiles + (size_t)t->item_tiles - 1) / (size_t)t->item_tiles);
    for (int i = 0; i < repeats; i++) {
        double start = now();
        pool_run(pool, items, fn, t);
        seconds[i] = now() - start;
    }
    qsort(seconds, (size_t)repeats, sizeof *seconds, compare_double);
    return (double)(t->tiles * t->tile) / seconds[repeats / 2] / 1e9;
}

static void bench(const struct kernels *k, const char *filter, size_t mb, int threads)
{
    struct pool *pool, *one;
    if (pool_create(&pool, threads ? threads : pool_default_threads(), NULL) || pool_create(&one, 1, NULL))
        exit(2);
    enum { WIDTH = 2560 };
    size_t size = mb << 20;
    uint8_t *data = mmap(NULL, size + (2 << 20), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED)
        exit(2);
    data = (uint8_t *)(((uintptr_t)data + (2 << 20) - 1) & ~(uintptr_t)((2 << 20) - 1));
    madvise(data, size, MADV_HUGEPAGE);
    struct dot_input in[KERNEL_MAX_ROWS];
    for (int t = 0; t < KERNEL_MAX_ROWS; t++)
        in[t] = make_input(kernels_get(ISA_REF), WIDTH, ORDINARY, 0);
    printf("%s, %d threads, width %d, %zu MB; medians of one run, GB/s of weights\n", k->name, pool_threads(pool), WIDTH, mb);
    printf("%-8s %10s %10s %6s | %14s %14s %12s\n", "format", "read", "1 row", "ratio", "cache 1 row", "cache 4 rows", "4 rows cost");
    for (int type = 0; type < QUANT_TYPE_LIMIT; type++) {
        const struct quant_format *f = quant_format_find((uint32_t)type);
        if (!f || !k->dot[type] || (filter && strcmp(filter, f->name)))
            continue;
        size_t tile = tile_bytes(f, WIDTH), row_bytes = quant_row_bytes(f, WIDTH);
        uint8_t *rows = allocate(16 * row_bytes);
        for (int r = 0; r < TILE_ROWS; r++)
            fill_row(f, rows + (size_t)r * row_bytes, WIDTH, -1);
        struct timing t = { k, k->dot[type], data, tile, size / tile, 1, WIDTH, 0, in };
        tile_pack(f, WIDTH, rows, 16, data);
        for (size_t i = 1; i < t.tiles; i++)
            memcpy(data + i * tile, data, tile);
        t.item_tiles = (int)((256 << 10) / tile) ? (int)((256 << 10) / tile) : 1;
        /* Alternate, so that a noisy neighbour hits both. */
        double read[5], one_row[5];
        for (int i = 0; i < 5; i++) {
            read[i] = rate(pool, &t, read_item, 3);
            one_row[i] = rate(pool, &t, dot_item, 3);
        }
        qsort(read, 5, sizeof *read, compare_double);
        qsort(one_row, 5, sizeof *one_row, compare_double);
        t.tiles = (256 << 10) / tile ? (256 << 10) / tile : 1;
        t.item_tiles = (int)t.tiles;
        double cache1[15], cost[15];
        for (int i = 0; i < 15; i++) {
            t.n = 1;
            cache1[i] = rate(one, &t, dot_item, 7);
            t.n = 4;
            cost[i] = cache1[i] / rate(one, &t, dot_item, 7);
        }
        qsort(cache1, 15, sizeof *cache1, compare_double);
        qsort(cost, 15, sizeof *cost, compare_double);
        printf("%-8s %10.1f %10.1f %5.0f%% | %14.1f %14.1f %11.2fx\n", f->name, read[2], one_row[2], 100 * one_row[2] / read[2], cache1[7], cache1[7] / cost[7], cost[7]);
        fflush(stdout);
        free(rows);
    }
    for (int t = 0; t < KERNEL_MAX_ROWS; t++)
        free_input(&in[t], 0);
    pool_destroy(pool);
    pool_destroy(one);
}

int main(int argc, char **argv)
{
    static const struct option options[] = { { "isa", 1, 0, 'i' }, { "filter", 1, 0, 'f' }, { "bench", 0, 0, 'b' }, { "mb", 1, 0, 'm' }, { "threads", 1, 0, 't' },
                                             { "seed", 1, 0, 's' }, { 0 } };
    const char *only = NULL, *filter = NULL;
    bool timing = false;
    size_t mb = 200;
    int threads = 0;
    random_state = 1;
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;)
        switch (c) {
        case 'i': only = optarg; break;
        case 'f': filter = optarg; break;
        case 'b': timing = true; break;
        case 'm': mb = (size_t)atoi(optarg); break;
        case 't': threads = atoi(optarg); break;
        case 's': random_state = (uint64_t)atoll(optarg); break;
        default: return 2;
        }
    const struct kernels *ref = kernels_get(ISA_REF);
    for (int isa = ISA_REF + 1; isa < ISA_COUNT; isa++) {
        const struct kernels *k = kernels_get((enum isa)isa);
        static const char *const names[] = { "ref", "avx2", "avx512" };
        if (only && strcmp(only, names[isa]))
            continue;
        if (!k) {
            printf("SKIPPED: this processor has no %s\n", names[isa]);
            n_skipped++;
            continue;
        }
        if (timing) {
            bench(k, filter, mb, threads);
            continue;
        }
        for (int type = 0; type < QUANT_TYPE_LIMIT; type++) {
            const struct quant_format *f = quant_format_find((uint32_t)type);
            if (f && (!filter || !strcmp(filter, f->name)))
                check_dot(ref, k, f);
        }
        if (!filter || !strcmp(filter, "quantize"))
            check_quantize(ref, k);
        check_vectors(ref, k, filter);
    }
    if (!timing)
        printf("%d passed, %d failed, %d skipped\n", n_checks - n_failed, n_failed, n_skipped);
    return n_failed != 0;
}
