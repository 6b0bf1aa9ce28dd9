/* The protocol. A job is published by storing its fields and then bumping `ticket`; workers that see a new ticket claim items.
 * `claim` holds (ticket << 32 | items left), so a worker that wakes late cannot take an item of a later job (its compare-and-swap
 * fails, because the ticket half differs) nor one too many of its own (nothing is left). `done` counts finished items; the caller
 * waits for all. The fields of a job are rewritten only when all its items are done, and a worker reads them only while it holds an
 * unfinished one.
 *
 * A job that is given up has no items left to claim (the caller waits only when it finds none), so a stalled pool needs no more
 * than to publish nothing: the hanging thread still holds an unfinished item, and its fields stay as they are. */
#define _GNU_SOURCE /* pthread_setaffinity_np */
#include "base/pool.h"

#include "base/topology.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* What `running` says when it is not the number of an item. CLAIMING: may own one already and has not said so yet. */
enum { NOTHING = -1, CLAIMING = -2 };

/* One of the pool's threads; number 0 is the caller's. */
struct participant {
    _Alignas(64) _Atomic int32_t running;
    _Alignas(64) struct pool *pool;
    pthread_t thread;
    cpu_set_t place;
};

struct pool {
    int n_threads, n_started;
    int64_t spin_ns;
    bool placed; /* participants[].place says where each belongs */
    bool caller_pinned;
    cpu_set_t caller_mask;        /* as it was before */
    _Atomic int32_t stalled_item; /* -1: not stalled */
    _Atomic int users;            /* the owner and every worker; the last one frees */

    _Alignas(64) _Atomic uint64_t claim; /* ticket << 32 | items left */
    _Alignas(64) _Atomic uint32_t done;
    _Alignas(64) _Atomic uint32_t ticket; /* the futex word */
    _Atomic uint32_t sleepers;
    _Atomic bool stopping;

    _Alignas(64) uint32_t n_items;
    pool_fn *fn;
    void *context;
    void (*hook)(void *context);
    void *hook_context;

    struct participant participants[]; /* [n_threads] */
};

static inline void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static int64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* A waiting thread looks at the clock and offers its core to others (the thread with the last item, when there are more threads
 * than cores) once in this many pauses: 25-50 us on current processors, where a yield costs under 1 us if nobody takes the core. */
enum { PAUSES_PER_LOOK = 1024 };
/* How long workers stay awake: between two layers of one window a GPU works for about 0.3 ms. */
#define SPIN_NS INT64_C(1000000)
/* With more threads than processors a spinning worker is in somebody's way; this covers the gaps between the operations of one
 * layer. */
#define SPIN_CROWDED_NS INT64_C(50000)
/* A look that comes later than this after the last one says that this thread did not run (the process was stopped, the machine is
 * crowded), and then the others perhaps did not either: no more than this counts as waiting. */
#define LOOK_MOST_NS INT64_C(100000000)

static void run_item(struct pool *pool, pool_fn *fn, void *context, int item)
{
    if (pool->hook)
        pool->hook(pool->hook_context);
    fn(context, item);
}

static void work_on(struct pool *pool, struct participant *self, uint32_t ticket)
{
    uint64_t claim = atomic_load_explicit(&pool->claim, memory_order_acquire);
    for (;;) {
        uint32_t left = (uint32_t)claim;
        if ((uint32_t)(claim >> 32) != ticket || left == 0)
            break;
        atomic_store_explicit(&self->running, CLAIMING, memory_order_relaxed);
        if (!atomic_compare_exchange_weak_explicit(&pool->claim, &claim, claim - 1, memory_order_acq_rel, memory_order_acquire))
            continue;
        int item = (int)(pool->n_items - left);
        atomic_store_explicit(&self->running, item, memory_order_relaxed);
        run_item(pool, pool->fn, pool->context, item);
        atomic_store_explicit(&self->running, NOTHING, memory_order_relaxed);
        atomic_fetch_add_explicit(&pool->done, 1, memory_order_release);
        claim = atomic_load_explicit(&pool->claim, memory_order_acquire);
    }
    atomic_store_explicit(&self->running, NOTHING, memory_order_relaxed);
}

/* Waits until the ticket is another one than `seen`: awake for a while, then asleep. */
static uint32_t next_ticket(struct pool *pool, uint32_t seen)
{
    int64_t start = 0;
    uint32_t ticket = atomic_load_explicit(&pool->ticket, memory_order_acquire);
    for (unsigned i = 1; ticket == seen; i++) {
        pause_cpu();
        if (i % PAUSES_PER_LOOK == 0) {
            int64_t now = clock_ns();
            if (start && now - start >= pool->spin_ns)
                break;
            start = start ? start : now;
            sched_yield();
        }
        ticket = atomic_load_explicit(&pool->ticket, memory_order_acquire);
    }
    while (ticket == seen) {
        atomic_fetch_add(&pool->sleepers, 1);
        syscall(SYS_futex, &pool->ticket, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
        atomic_fetch_sub(&pool->sleepers, 1);
        ticket = atomic_load_explicit(&pool->ticket, memory_order_acquire);
    }
    return ticket;
}

static void leave(struct pool *pool)
{
    if (atomic_fetch_sub(&pool->users, 1) == 1)
        free(pool);
}

static void *worker_main(void *argument)
{
    struct participant *self = argument;
    struct pool *pool = self->pool;
    for (uint32_t ticket = 0;;) {
        ticket = next_ticket(pool, ticket);
        if (atomic_load(&pool->stopping))
            break;
        work_on(pool, self, ticket);
    }
    leave(pool);
    return NULL;
}

static void publish(struct pool *pool)
{
    atomic_fetch_add(&pool->ticket, 1);
    if (atomic_load(&pool->sleepers))
        syscall(SYS_futex, &pool->ticket, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

static int item_of_a_worker(const struct pool *pool)
{
    int item = NOTHING;
    for (int i = 1; i < pool->n_threads && item < 0; i++)
        item = atomic_load_explicit(&pool->participants[i].running, memory_order_relaxed);
    return item;
}

/* Returns -1 when all items are done, or an item that hangs. */
static int wait_for_workers(struct pool *pool, uint32_t n_items, double timeout_s)
{
    uint32_t done, seen = 0;
    int64_t last_look = 0, waited_ns = 0;
    for (unsigned i = 1; (done = atomic_load_explicit(&pool->done, memory_order_acquire)) < n_items; i++) {
        pause_cpu();
        if (i % PAUSES_PER_LOOK)
            continue;
        sched_yield();
        if (!(timeout_s > 0))
            continue;
        int64_t now = clock_ns(), passed = last_look ? now - last_look : 0;
        waited_ns = done == seen ? waited_ns + (passed < LOOK_MOST_NS ? passed : LOOK_MOST_NS) : 0;
        last_look = now;
        seen = done;
        if ((double)waited_ns * 1e-9 < timeout_s)
            continue;
        int item = item_of_a_worker(pool);
        if (item >= 0) /* otherwise the last one is ending now, or just claimed: neither hangs */
            return item;
    }
    return -1;
}

int pool_run_within(struct pool *pool, int n_items, pool_fn *fn, void *context, double timeout_s)
{
    int stalled = atomic_load_explicit(&pool->stalled_item, memory_order_relaxed);
    if (stalled >= 0)
        return stalled;
    if (pool->n_threads == 1 || n_items <= 1) {
        for (int i = 0; i < n_items; i++)
            run_item(pool, fn, context, i);
        return -1;
    }
    uint32_t ticket = atomic_load_explicit(&pool->ticket, memory_order_relaxed) + 1;
    pool->fn = fn;
    pool->context = context;
    pool->n_items = (uint32_t)n_items;
    atomic_store_explicit(&pool->done, 0, memory_order_relaxed);
    atomic_store_explicit(&pool->claim, (uint64_t)ticket << 32 | (uint32_t)n_items, memory_order_release);
    publish(pool);
    work_on(pool, &pool->participants[0], ticket);
    stalled = wait_for_workers(pool, (uint32_t)n_items, timeout_s);
    if (stalled >= 0)
        atomic_store_explicit(&pool->stalled_item, stalled, memory_order_relaxed);
    return stalled;
}

void pool_run(struct pool *pool, int n_items, pool_fn *fn, void *context) { pool_run_within(pool, n_items, fn, context, 0); }

bool pool_is_stalled(const struct pool *pool) { return atomic_load_explicit(&pool->stalled_item, memory_order_relaxed) >= 0; }

void pool_hook(struct pool *pool, void (*hook)(void *context), void *context)
{
    pool->hook = hook;
    pool->hook_context = context;
}

void pool_pin_caller(struct pool *pool)
{
    if (!pool->placed || pool->caller_pinned ||
        pthread_getaffinity_np(pthread_self(), sizeof pool->caller_mask, &pool->caller_mask))
        return;
    pool->caller_pinned = pthread_setaffinity_np(pthread_self(), sizeof(cpu_set_t), &pool->participants[0].place) == 0;
    pool->participants[0].thread = pthread_self();
}

void pool_unpin_caller(struct pool *pool)
{
    if (!pool->caller_pinned || !pthread_equal(pool->participants[0].thread, pthread_self()))
        return;
    pthread_setaffinity_np(pthread_self(), sizeof pool->caller_mask, &pool->caller_mask);
    pool->caller_pinned = false;
}

int pool_threads(const struct pool *pool) { return pool->n_threads; }

int pool_create(struct pool **out, int n_threads, struct strata_error *error)
{
    if (n_threads < 1 || n_threads > 1024)
        return error_set(error, STRATA_E_ARGUMENT, "%d threads: wanted 1 to 1024", n_threads);
    size_t bytes = sizeof(struct pool) + (size_t)n_threads * sizeof(struct participant);
    struct pool *pool = aligned_alloc(64, bytes);
    struct topology *topology = malloc(sizeof *topology);
    if (!pool || !topology) {
        free(pool);
        free(topology);
        return error_set(error, STRATA_E_MEMORY, "out of memory for the thread pool");
    }
    memset(pool, 0, bytes);
    pool->n_threads = n_threads;
    pool->stalled_item = NOTHING;
    pool->users = 1;
    if (n_threads > 1) { /* reading it takes some milliseconds */
        topology_read(topology);
        int at_once = topology->quota && topology->quota < topology->n_cpus ? topology->quota : topology->n_cpus;
        pool->spin_ns = n_threads > at_once ? SPIN_CROWDED_NS : SPIN_NS;
    }
    for (int i = 0; i < n_threads; i++) {
        pool->participants[i].pool = pool;
        pool->participants[i].running = NOTHING;
        pool->placed = n_threads > 1 && topology_place(topology, n_threads, i, &pool->participants[i].place);
    }
    free(topology);
    for (int i = 1; i < n_threads; i++) {
        struct participant *worker = &pool->participants[i];
        atomic_fetch_add(&pool->users, 1);
        int failed = pthread_create(&worker->thread, NULL, worker_main, worker);
        if (failed) {
            atomic_fetch_sub(&pool->users, 1);
            pool_destroy(pool);
            return error_set(error, STRATA_E_MEMORY, "cannot start worker thread %d of %d: %s", i, n_threads - 1, strerror(failed));
        }
        pool->n_started++;
        if (pool->placed) /* only faster: if the system refuses, the scheduler decides */
            pthread_setaffinity_np(worker->thread, sizeof worker->place, &worker->place);
    }
    *out = pool;
    return 0;
}

void pool_destroy(struct pool *pool)
{
    if (!pool)
        return;
    pool_unpin_caller(pool);
    atomic_store(&pool->stopping, true);
    publish(pool);
    for (int i = 1; i <= pool->n_started; i++) {
        struct participant *worker = &pool->participants[i];
        if (!pool_is_stalled(pool) || atomic_load_explicit(&worker->running, memory_order_relaxed) == NOTHING)
            pthread_join(worker->thread, NULL);
        else
            pthread_detach(worker->thread);
    }
    leave(pool);
}

int pool_default_threads(void)
{
    struct topology *topology = malloc(sizeof *topology);
    if (!topology)
        return 1;
    topology_read(topology);
    int threads = topology->quota && topology->quota < topology->n_cores ? topology->quota : topology->n_cores;
    free(topology);
    return threads;
}
