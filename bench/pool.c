/* pool - what a layer of the expert lane costs apart from its work: two pool_run calls, four empty items for every thread each.
 *
 *   pool [THREADS]
 *
 * For three gaps before the layer: none; 300 us in which the calling thread is busy and the workers have nothing to do (a GPU's
 * part of a layer: they must still be awake); 20 ms in which everybody sleeps. With the calling thread free, and bound to the
 * pool's first core. */
#include "base/pool.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum gap { NONE, BUSY_300_US, ASLEEP_20_MS, GAPS };
static const char *const gap_names[GAPS] = { "back to back", "after 300 us, caller busy", "after 20 ms, all asleep" };
static const int gap_rounds[GAPS] = { 20000, 3000, 300 };

static double now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

static void nothing(void *context, int item) {}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void measure(struct pool *pool, enum gap gap, const char *caller)
{
    enum { MOST = 20000 };
    static double us[MOST];
    int n = gap_rounds[gap], items = 4 * pool_threads(pool);
    for (double start = now_us(); now_us() - start < 100e3;) /* workers start, threads find their cores */
        pool_run(pool, items, nothing, NULL);
    for (int i = 0; i < n; i++) {
        double start = now_us();
        if (gap == BUSY_300_US)
            while (now_us() - start < 300)
                ;
        if (gap == ASLEEP_20_MS)
            nanosleep(&(struct timespec){ 0, 20 * 1000 * 1000 }, NULL);
        start = now_us();
        pool_run(pool, items, nothing, NULL);
        pool_run(pool, items, nothing, NULL);
        us[i] = now_us() - start;
    }
    qsort(us, (size_t)n, sizeof us[0], ascending);
    printf("%-26s caller %-6s  median %7.2f us  p95 %7.2f us  (%d layers)\n", gap_names[gap], caller, us[n / 2], us[n * 95 / 100],
           n);
}

int main(int argc, char **argv)
{
    struct pool *pool;
    struct strata_error error;
    if (pool_create(&pool, argc > 1 ? atoi(argv[1]) : pool_default_threads(), &error)) {
        fprintf(stderr, "pool: %s\n", error.text);
        return 1;
    }
    printf("an empty layer (two jobs of %d items), %d threads\n", 4 * pool_threads(pool), pool_threads(pool));
    for (enum gap gap = 0; gap < GAPS; gap++)
        measure(pool, gap, "free");
    pool_pin_caller(pool);
    for (enum gap gap = 0; gap < GAPS; gap++)
        measure(pool, gap, "pinned");
    pool_destroy(pool);
    return 0;
}
