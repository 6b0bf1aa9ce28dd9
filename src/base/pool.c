/* The protocol. A job is published by storing its fields and then bumping `ticket`; workers that see a new ticket claim items.
 * `claim` holds (ticket << 32 | items left), so a worker that wakes late cannot take an item of a later job (its compare-and-swap fails,
 * because the ticket half differs) nor one too many of its own (nothing is left). `done` counts finished items; the caller waits for all.
 * The fields of a job are rewritten only when all its items are done, and a worker reads them only while it holds an unfinished one. */
#include "base/pool.h"

#include <hwloc.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

struct pool {
    int n_threads;
    pthread_t *workers; /* [n_threads - 1] */
    int n_started;

    _Alignas(64) _Atomic uint64_t claim; /* ticket << 32 | items left */
    _Alignas(64) _Atomic uint32_t done;
    _Alignas(64) _Atomic uint32_t ticket; /* the futex word */
    _Atomic uint32_t sleepers;
    _Atomic bool stopping;

    uint32_t n_items;
    pool_fn *fn;
    void *context;
};

static inline void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* About 50 us of `pause` on current processors (20-60 ns each): longer than the gaps between the operations of one layer. */
enum { SPIN_ROUNDS = 2000 };

static void work_on(struct pool *pool, uint32_t ticket)
{
    uint64_t claim = atomic_load_explicit(&pool->claim, memory_order_acquire);
    for (;;) {
        uint32_t left = (uint32_t)claim;
        if ((uint32_t)(claim >> 32) != ticket || left == 0)
            return;
        if (!atomic_compare_exchange_weak_explicit(&pool->claim, &claim, claim - 1, memory_order_acq_rel, memory_order_acquire))
            continue;
        pool->fn(pool->context, (int)(pool->n_items - left));
        atomic_fetch_add_explicit(&pool->done, 1, memory_order_release);
        claim = atomic_load_explicit(&pool->claim, memory_order_acquire);
    }
}

static void *worker_main(void *argument)
{
    struct pool *pool = argument;
    uint32_t seen = 0;
    for (;;) {
        uint32_t ticket = atomic_load_explicit(&pool->ticket, memory_order_acquire);
        for (int i = 0; i < SPIN_ROUNDS && ticket == seen; i++) {
            pause_cpu();
            ticket = atomic_load_explicit(&pool->ticket, memory_order_acquire);
        }
        while (ticket == seen) {
            atomic_fetch_add(&pool->sleepers, 1);
            syscall(SYS_futex, &pool->ticket, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
            atomic_fetch_sub(&pool->sleepers, 1);
            ticket = atomic_load_explicit(&pool->ticket, memory_order_acquire);
        }
        if (atomic_load(&pool->stopping))
            return NULL;
        seen = ticket;
        work_on(pool, ticket);
    }
}

static void publish(struct pool *pool)
{
    atomic_fetch_add(&pool->ticket, 1);
    if (atomic_load(&pool->sleepers))
        syscall(SYS_futex, &pool->ticket, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

void pool_run(struct pool *pool, int n_items, pool_fn *fn, void *context)
{
    if (pool->n_threads == 1 || n_items <= 1) {
        for (int i = 0; i < n_items; i++)
            fn(context, i);
        return;
    }
    uint32_t ticket = atomic_load_explicit(&pool->ticket, memory_order_relaxed) + 1;
    pool->fn = fn;
    pool->context = context;
    pool->n_items = (uint32_t)n_items;
    atomic_store_explicit(&pool->done, 0, memory_order_relaxed);
    atomic_store_explicit(&pool->claim, (uint64_t)ticket << 32 | (uint32_t)n_items, memory_order_release);
    publish(pool);
    work_on(pool, ticket);
    for (int i = 0; atomic_load_explicit(&pool->done, memory_order_acquire) < (uint32_t)n_items; i++) {
        pause_cpu();
        if (i % SPIN_ROUNDS == SPIN_ROUNDS - 1) /* more threads than cores: let the worker that holds the last item run */
            sched_yield();
    }
}

int pool_threads(const struct pool *pool) { return pool->n_threads; }

int pool_create(struct pool **out, int n_threads, struct strata_error *error)
{
    if (n_threads < 1 || n_threads > 1024)
        return error_set(error, STRATA_E_ARGUMENT, "%d threads: wanted 1 to 1024", n_threads);
    struct pool *pool = aligned_alloc(64, sizeof *pool);
    if (!pool)
        return error_set(error, STRATA_E_MEMORY, "out of memory for the thread pool");
    memset(pool, 0, sizeof *pool);
    pool->n_threads = n_threads;
    pool->workers = calloc((size_t)n_threads, sizeof *pool->workers);
    if (!pool->workers) {
        free(pool);
        return error_set(error, STRATA_E_MEMORY, "out of memory for the thread pool");
    }
    for (; pool->n_started < n_threads - 1; pool->n_started++) {
        int failed = pthread_create(&pool->workers[pool->n_started], NULL, worker_main, pool);
        if (failed) {
            int started = pool->n_started;
            pool_destroy(pool);
            return error_set(error, STRATA_E_MEMORY, "cannot start worker thread %d of %d: %s", started + 1, n_threads - 1, strerror(failed));
        }
    }
    *out = pool;
    return 0;
}

void pool_destroy(struct pool *pool)
{
    if (!pool)
        return;
    atomic_store(&pool->stopping, true);
    publish(pool);
    for (int i = 0; i < pool->n_started; i++)
        pthread_join(pool->workers[i], NULL);
    free(pool->workers);
    free(pool);
}

/* CPUs granted by cgroup v2 (quota / period), rounded up; 0 if there is no limit. */
static int cgroup_cpus(void)
{
    FILE *file = fopen("/sys/fs/cgroup/cpu.max", "re");
    if (!file)
        return 0;
    long quota = 0, period = 0;
    int got = fscanf(file, "%ld %ld", &quota, &period);
    fclose(file);
    return got == 2 && quota > 0 && period > 0 ? (int)((quota + period - 1) / period) : 0;
}

int pool_default_threads(void)
{
    int cores = 0;
    hwloc_topology_t topology;
    if (hwloc_topology_init(&topology) == 0) {
        if (hwloc_topology_load(topology) == 0) {
            hwloc_cpuset_t mask = hwloc_bitmap_alloc();
            bool bound = mask && hwloc_get_cpubind(topology, mask, HWLOC_CPUBIND_PROCESS) == 0;
            /* A core counts if one of its hardware threads is allowed: masks like 0-3 often hold only the first of each. */
            for (hwloc_obj_t core = NULL; bound && (core = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_CORE, core));)
                cores += hwloc_bitmap_intersects(core->cpuset, mask);
            hwloc_bitmap_free(mask);
        }
        hwloc_topology_destroy(topology);
    }
    if (cores < 1)
        cores = (int)sysconf(_SC_NPROCESSORS_ONLN);
    int limit = cgroup_cpus();
    if (limit && limit < cores)
        cores = limit;
    return cores < 1 ? 1 : cores;
}
