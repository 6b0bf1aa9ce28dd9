/* experts - the cpu lane beside a plain read: GB/s of expert weights that lie all over a store larger than any cache.
 *
 *   experts [THREADS [GIB]]
 *
 * The store (2 GiB by default) holds experts of Qwen3.8-Flash-Next's shape, in Q2_0 and then in IQ3_S. A layer is one row and ten
 * experts; the experts follow in a random order in which each comes once before any comes again. In every round some layers are
 * computed, and then as many experts that come next are only read, by the same threads, without a barrier: a noisy neighbour hits
 * both. The ratio is the median over the rounds. */
#include "base/arena.h"
#include "base/memory.h"
#include "ops/ops.h"
#include "read.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { HIDDEN = 2560, WIDTH = 640, USED = 10, LAYERS = 16, ROUNDS = 41, PALETTE = 16, READ_BYTES = 256 << 10 };

static const struct {
    enum quant_type type;
    double bar;
} cases[] = { { QUANT_Q2_0, 85 }, { QUANT_IQ3_S, 60 } };

static uint64_t random_state = 1;

static uint64_t random_next(void) /* SplitMix64 */
{
    uint64_t x = random_state += 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, int n)
{
    qsort(x, (size_t)n, sizeof *x, ascending);
    return x[n / 2];
}

static void *allocate(size_t bytes)
{
    void *p = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
    if (!p) {
        fprintf(stderr, "experts: out of memory\n");
        exit(1);
    }
    return memset(p, 0, bytes);
}

/* ---- The store --------------------------------------------------------------------------------------------------------------- */

/* Scales of the size that trained weights have: results stay far from infinity and from denormals. */
static bool ordinary_block(const struct quant_format *f, const uint8_t *block)
{
    for (int g = 0; g < f->block / 32; g++) {
        struct quant_group group;
        f->group(block, g, &group);
        if (!(fabsf(group.d[0]) > 0x1p-14f && fabsf(group.d[0]) < 0x1p-4f))
            return false;
    }
    return true;
}

/* Random blocks, kept if their scales are ordinary. */
static void random_tile(const struct quant_format *f, int width, uint8_t *tile)
{
    size_t row_bytes = quant_row_bytes(f, width);
    uint8_t *rows = allocate(TILE_ROWS * row_bytes);
    for (uint8_t *block = rows; block < rows + TILE_ROWS * row_bytes; block += f->bytes)
        do
            for (int i = 0; i < f->bytes; i++)
                block[i] = (uint8_t)random_next();
        while (!ordinary_block(f, block));
    tile_pack(f, width, rows, TILE_ROWS, tile);
    free(rows);
}

/* A few random tiles of one width, for the blobs to choose from: what a tile says does not change its time, only where it lies. */
static uint8_t *random_tiles(const struct quant_format *f, int width)
{
    size_t bytes = tile_bytes(f, width);
    uint8_t *tiles = allocate(PALETTE * bytes);
    for (size_t i = 0; i < PALETTE; i++)
        random_tile(f, width, tiles + i * bytes);
    return tiles;
}

static struct expert_set make_set(const struct quant_format *f, int n_experts, uint8_t *blobs)
{
    struct expert_set set = {
        .n_experts = n_experts, .hidden = HIDDEN, .width = WIDTH, .gate = f, .up = f, .down = f, .blobs = blobs
    };
    set.gate_bytes = set.up_bytes = tile_bytes(f, HIDDEN);
    set.down_bytes = tile_bytes(f, WIDTH);
    set.down_offset = (size_t)tile_count(WIDTH) * (set.gate_bytes + set.up_bytes);
    set.blob_bytes = set.down_offset + (size_t)tile_count(HIDDEN) * set.down_bytes;
    return set;
}

static void fill_store(const struct expert_set *set, uint8_t *blobs)
{
    uint8_t *in = random_tiles(set->gate, HIDDEN), *down = random_tiles(set->down, WIDTH), *to = blobs;
    double start = now();
    bool shown = false;
    for (int e = 0; e < set->n_experts; e++) {
        for (int i = 0; i < 2 * (int)tile_count(WIDTH); i++, to += set->gate_bytes)
            memcpy(to, in + random_next() % PALETTE * set->gate_bytes, set->gate_bytes);
        for (int i = 0; i < (int)tile_count(HIDDEN); i++, to += set->down_bytes)
            memcpy(to, down + random_next() % PALETTE * set->down_bytes, set->down_bytes);
        if (isatty(2) && now() - start > 2 && e % 16 == 0)
            shown = fprintf(stderr, "\rfilling the store: %d %%", 100 * e / set->n_experts) > 0;
    }
    if (shown)
        fprintf(stderr, "\r\033[K");
    free(in);
    free(down);
}

/* How much of this program's memory is in huge pages, in MB; -1 if the system does not say. */
static int huge_page_mb(void)
{
    FILE *f = fopen("/proc/self/smaps_rollup", "re");
    char line[256];
    long kb = -1;
    while (f && fgets(line, sizeof line, f))
        sscanf(line, "AnonHugePages: %ld kB", &kb);
    if (f)
        fclose(f);
    return kb < 0 ? -1 : (int)(kb / 1000);
}

/* ---- Measuring --------------------------------------------------------------------------------------------------------------- */

struct walk {
    const struct expert_set *set;
    enum isa isa;
    int *order; /* [n_experts]: a random permutation, walked in a circle */
    int at;
    const uint8_t *blobs[LAYERS * USED]; /* what comes next */
    _Atomic uint64_t sum;
};

static void next_experts(struct walk *w)
{
    for (int i = 0; i < LAYERS * USED; i++, w->at = (w->at + 1) % w->set->n_experts)
        w->blobs[i] = w->set->blobs + (size_t)w->order[w->at] * w->set->blob_bytes;
}

static int pieces(const struct expert_set *set) { return (int)((set->blob_bytes + READ_BYTES - 1) / READ_BYTES); }

static void read_piece(void *context, int item)
{
    struct walk *w = context;
    size_t n = w->set->blob_bytes, at = (size_t)(item % pieces(w->set)) * READ_BYTES, left = n - at;
    w->sum += read_memory(w->isa, w->blobs[item / pieces(w->set)] + at, left < READ_BYTES ? left : READ_BYTES);
}

/* Seconds; layer_us[LAYERS]: of each. */
static double compute_layers(struct walk *w, struct ops *ops, const struct activations *x, float *parts, double *layer_us)
{
    double start = now(), last = start;
    for (int layer = 0; layer < LAYERS; layer++) {
        struct expert_job jobs[USED];
        for (int k = 0; k < USED; k++)
            jobs[k] = (struct expert_job){ .n_rows = 1, .rank = { (uint8_t)k }, .blob = w->blobs[layer * USED + k] };
        ops_cpu_experts(ops, USED, w->set, x, jobs, USED, parts, 0);
        double at = now();
        layer_us[layer] = (at - last) * 1e6;
        last = at;
    }
    return last - start;
}

static double read_layers(struct walk *w, struct ops *ops)
{
    double start = now();
    pool_run(ops_cpu_pool(ops), LAYERS * USED * pieces(w->set), read_piece, w);
    return now() - start;
}

static void measure(struct walk *w, struct ops *ops, const struct activations *x, float *parts, double bar)
{
    double experts[ROUNDS], plain[ROUNDS], ratio[ROUNDS], layer_us[ROUNDS * LAYERS];
    double gb = (double)w->set->blob_bytes * LAYERS * USED * 1e-9;
    for (int i = -1; i < ROUNDS; i++) { /* one round to wake up */
        int to = i < 0 ? 0 : i;
        next_experts(w);
        experts[to] = gb / compute_layers(w, ops, x, parts, layer_us + to * LAYERS);
        next_experts(w);
        plain[to] = gb / read_layers(w, ops);
        ratio[to] = 100 * experts[to] / plain[to];
    }
    if (!ops->all_finite(ops, parts, (size_t)USED * (size_t)ops_padded(HIDDEN))) {
        fprintf(stderr, "experts: the results are not finite\n");
        exit(1);
    }
    double percent = median(ratio, ROUNDS);
    printf("%-8s %9.1f %12.1f %9.0f%% (%.0f-%.0f) %11.0f us   %s\n", w->set->gate->name, median(experts, ROUNDS),
           median(plain, ROUNDS), percent, ratio[ROUNDS / 4], ratio[ROUNDS * 3 / 4], median(layer_us, ROUNDS * LAYERS),
           w->isa != ISA_AVX512 ? "no bar without AVX-512"
           : percent >= bar     ? "holds"
                                : "MISSED");
    fflush(stdout);
}

static void bench(struct ops *ops, enum isa isa, struct arena *arena, const struct quant_format *f, double bar)
{
    struct expert_set set = make_set(f, 1, arena->base);
    set = make_set(f, (int)(arena->size / set.blob_bytes), arena->base);
    fill_store(&set, arena->base);
    if (f->type == cases[0].type)
        printf("%d of %zu MB in huge pages\n%-8s %9s %12s %10s (quarters) %8s   bar\n", huge_page_mb(), arena->size / 1000000, "",
               "GB/s", "plain read", "ratio", "a layer");

    struct walk walk = { .set = &set, .isa = isa, .order = allocate((size_t)set.n_experts * sizeof(int)) };
    for (int i = 0; i < set.n_experts; i++) {
        int j = (int)(random_next() % (uint64_t)(i + 1));
        walk.order[i] = walk.order[j];
        walk.order[j] = i;
    }
    struct activations x = { HIDDEN, allocate((size_t)ops_padded(HIDDEN) * 4), allocate(HIDDEN), allocate(HIDDEN / 8),
                             allocate(HIDDEN / 4) };
    float *parts = allocate((size_t)USED * (size_t)ops_padded(HIDDEN) * 4);
    for (int i = 0; i < HIDDEN; i++)
        x.values[i] = (float)(int64_t)(random_next() >> 40) * 0x1p-23f - 1.0f;
    ops->quantize(ops, 1, &x);
    measure(&walk, ops, &x, parts, bar);
    free(walk.order);
    free(x.values);
    free(x.codes);
    free(x.scales);
    free(x.sums);
    free(parts);
}

int main(int argc, char **argv)
{
    int threads = argc > 1 ? atoi(argv[1]) : pool_default_threads();
    double gib = argc > 2 ? atof(argv[2]) : 2;
    struct memory_room room = memory_room();
    struct strata_error error;
    struct arena arena;
    struct ops *ops;
    if (threads < 1 || !(gib >= 0.5 && gib <= 1024)) {
        fprintf(stderr, "usage: experts [THREADS [GIB]], at least half a GiB\n");
        return 2;
    }
    size_t bytes = (size_t)(gib * (1 << 30));
    if (bytes + bytes / 8 > room.available_bytes) {
        printf("SKIPPED: a store of %.1f GiB does not fit into RAM (%s)\n", gib, room.limited_by);
        return 0;
    }
    if (arena_create(&arena, bytes, "the experts", &error) || ops_cpu_create(&ops, isa_detect(), threads, &error) ||
        ops_cpu_reserve_experts(ops, WIDTH, USED, &error)) {
        fprintf(stderr, "experts: %s\n", error.text);
        return 1;
    }
    printf("the cpu lane, %s, %d threads: layers of one row and %d experts of %d x %d; ", ops_cpu_name(ops), threads, USED, HIDDEN,
           WIDTH);
    fflush(stdout);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        bench(ops, isa_detect(), &arena, quant_format_find(cases[i].type), cases[i].bar);
    ops_cpu_destroy(ops);
    arena_destroy(&arena);
    return 0;
}
