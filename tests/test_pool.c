/* The thread pool: every item once, whatever the number of threads and however short the jobs; what happens when an item hangs;
 * where threads are bound, and how long they stay awake. */
/* threads: the pool is what all threads meet in. */
#define _GNU_SOURCE /* CPU_SET */
#include "base/pool.h"
#include "base/topology.h"

#include <dirent.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

enum { MAX_ITEMS = 300 };
static _Atomic int runs[MAX_ITEMS + 64];
static int jobs_context[8];            /* job j gets the address of entry j % 8 ... */
static _Atomic int strangers, current; /* ... and no item may see that of another */

static void count_run(void *context, int item)
{
    atomic_fetch_add(&runs[item], 1);
    atomic_fetch_add(&strangers, (int *)context != &jobs_context[atomic_load(&current) % 8]);
}

static void run_jobs(int threads, int jobs)
{
    struct pool *pool;
    assert_int_equal(pool_create(&pool, threads, NULL), 0);
    assert_int_equal(pool_threads(pool), threads);
    for (int job = 0; job < jobs; job++) {
        int n = job * 37 % MAX_ITEMS; /* growing and shrinking jobs: a late worker must not take an item of the next one */
        memset(runs, 0, sizeof runs);
        current = job;
        pool_run(pool, n, count_run, &jobs_context[job % 8]);
        for (int i = 0; i < MAX_ITEMS + 64; i++)
            assert_int_equal(runs[i], i < n);
        assert_int_equal(strangers, 0);
    }
    pool_destroy(pool);
}

static void one_thread_runs_every_item_once(void **state) { run_jobs(1, 300); }
static void two_threads_run_every_item_once(void **state) { run_jobs(2, 20000); }
static void more_threads_than_cores_run_every_item_once(void **state) { run_jobs(7, 1000); }

static void workers_sleep_when_there_is_nothing_to_do(void **state)
{
    struct pool *pool;
    assert_int_equal(pool_create(&pool, 4, NULL), 0);
    pool_run(pool, 8, count_run, &jobs_context[current % 8]);
    usleep(100 * 1000); /* longer than they spin */
    clock_t before = clock();
    usleep(300 * 1000);
    assert_true((double)(clock() - before) / CLOCKS_PER_SEC < 0.03);
    pool_destroy(pool);
}

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void do_nothing(void *context, int item) {}

static void an_idle_gap_costs_a_millisecond_or_so(void **state)
{
    struct pool *pool;
    assert_int_equal(pool_create(&pool, 2, NULL), 0);
    clock_t before = clock();
    for (int i = 0; i < 20; i++) {
        pool_run(pool, 8, do_nothing, NULL);
        usleep(20 * 1000);
    }
    assert_true((double)(clock() - before) / CLOCKS_PER_SEC < 20 * 0.004);
    pool_destroy(pool);
}

/* A thread that goes to sleep gives up its core of its own will, which the system counts. */
static void a_worker_stays_awake_while_a_gpu_works_on_a_layer(void **state)
{
    enum { GAPS = 200 };
    struct pool *pool;
    int slept = 0;
    if (pool_default_threads() < 2)
        skip(); /* with more threads than processors it must not */
    assert_int_equal(pool_create(&pool, 2, NULL), 0);
    pool_pin_caller(pool); /* or the two could meet on one core */
    for (int i = 0; i < GAPS; i++) {
        struct rusage before, after;
        pool_run(pool, 8, do_nothing, NULL);
        getrusage(RUSAGE_SELF, &before);
        for (double end = now_s() + 300e-6; now_s() < end;)
            ;
        getrusage(RUSAGE_SELF, &after);
        slept += after.ru_nvcsw > before.ru_nvcsw;
    }
    pool_unpin_caller(pool);
    pool_destroy(pool);
    assert_true(slept < GAPS / 2); /* other programs may take the core now and then */
}

/* ---- Items that hang
 * ------------------------------------------------------------------------------------------------------------------ */

static pthread_t caller;                          /* of every job: main's thread */
static _Atomic int hanging, released, ended, ran; /* hanging: the item, -1 before */
static _Atomic int workers_in;

static void reset(void)
{
    hanging = -1;
    released = ended = ran = workers_in = 0;
}

static int n_process_threads(void)
{
    int n = 0;
    DIR *tasks = opendir("/proc/self/task");
    assert_non_null(tasks);
    for (struct dirent *entry; (entry = readdir(tasks));)
        n += entry->d_name[0] != '.';
    closedir(tasks);
    return n;
}

/* The entry of a thread that was joined may stay for a moment. */
static void assert_threads_become(int n)
{
    for (int i = 0; i < 5000 && n_process_threads() != n; i++)
        usleep(1000);
    assert_int_equal(n_process_threads(), n);
}

/* The first worker that gets an item hangs in it; the caller leaves it one. */
static void hang_in_a_worker(void *context, int item)
{
    int none = -1;
    atomic_fetch_add(&ran, 1);
    if (pthread_equal(caller, pthread_self())) {
        while (atomic_load(&hanging) < 0)
            sched_yield();
    } else if (atomic_compare_exchange_strong(&hanging, &none, item)) {
        while (!atomic_load(&released))
            usleep(1000);
    }
    atomic_fetch_add(&ended, 1);
}

static void stall(struct pool **pool, int threads, int items)
{
    reset();
    assert_int_equal(pool_create(pool, threads, NULL), 0);
    assert_false(pool_is_stalled(*pool));
    double start = now_s();
    int item = pool_run_within(*pool, items, hang_in_a_worker, NULL, 0.1);
    assert_true(now_s() - start >= 0.1);
    assert_in_range(item, 0, items - 1);
    assert_int_equal(item, hanging);
    assert_int_equal(ran, items); /* the others went on */
    assert_int_equal(ended, items - 1);
    assert_true(pool_is_stalled(*pool));
}

/* Also waits for the thread, which looks at `released` now and then. */
static void release_and_destroy(struct pool *pool, int n_threads_before)
{
    released = 1;
    pool_destroy(pool);
    assert_threads_become(n_threads_before);
}

static void an_item_that_hangs_is_named(void **state)
{
    int before = n_process_threads();
    for (int threads = 2; threads <= 5; threads++) {
        struct pool *pool;
        stall(&pool, threads, 40);
        release_and_destroy(pool, before);
    }
}

static void a_stalled_pool_runs_nothing_more(void **state)
{
    struct pool *pool;
    int before = n_process_threads();
    stall(&pool, 3, 8);
    double start = now_s();
    pool_run(pool, 8, hang_in_a_worker, NULL);
    assert_int_equal(pool_run_within(pool, 8, hang_in_a_worker, NULL, 10), hanging);
    assert_int_equal(pool_run_within(pool, 1, hang_in_a_worker, NULL, 10), hanging);
    assert_int_equal(pool_run_within(pool, 0, hang_in_a_worker, NULL, 0), hanging);
    assert_true(now_s() - start < 5);
    assert_int_equal(ran, 8);
    released = 1;
    while (ended < 8)
        usleep(1000);
    assert_int_equal(pool_run_within(pool, 8, hang_in_a_worker, NULL, 10), hanging); /* also when it hangs no longer */
    assert_int_equal(ran, 8);
    release_and_destroy(pool, before);
}

static void a_hanging_thread_is_left_behind_and_ends_when_it_can(void **state)
{
    struct pool *pool;
    int before = n_process_threads();
    stall(&pool, 4, 40);
    pool_destroy(pool);
    assert_threads_become(before + 1);
    assert_int_equal(ended, 39);
    released = 1;
    assert_threads_become(before);
    assert_int_equal(ended, 40);
}

static void a_stall_that_has_passed_leaves_no_thread_behind(void **state)
{
    struct pool *pool;
    int before = n_process_threads();
    stall(&pool, 4, 40);
    released = 1;
    while (ended < 40)
        usleep(1000);
    pool_destroy(pool);
    assert_threads_become(before);
}

/* Workers end their items one by one, 0.2 s apart; the caller leaves one to each. */
static void end_in_turn(void *context, int item)
{
    if (!pthread_equal(caller, pthread_self()))
        usleep((useconds_t)(1 + atomic_fetch_add(&workers_in, 1)) * 200 * 1000);
    while (pthread_equal(caller, pthread_self()) && atomic_load(&workers_in) < 3)
        sched_yield();
}

static void slow_items_that_end_one_by_one_are_no_stall(void **state)
{
    struct pool *pool;
    reset();
    assert_int_equal(pool_create(&pool, 4, NULL), 0);
    double start = now_s();
    assert_int_equal(pool_run_within(pool, 4, end_in_turn, NULL, 0.45), -1);
    assert_true(now_s() - start >= 0.6);
    assert_false(pool_is_stalled(pool));
    pool_destroy(pool);
}

static void without_a_limit_a_job_takes_its_time(void **state)
{
    struct pool *pool;
    reset();
    assert_int_equal(pool_create(&pool, 4, NULL), 0);
    assert_int_equal(pool_run_within(pool, 4, end_in_turn, NULL, 0), -1);
    workers_in = 0;
    assert_int_equal(pool_run_within(pool, 4, end_in_turn, NULL, -1), -1);
    pool_destroy(pool);
}

/* Takes 0.2 s of running time however long the process is stopped meanwhile. */
static void sleep_in_steps(void *context, int item)
{
    while (pthread_equal(caller, pthread_self()) && !atomic_load(&workers_in))
        sched_yield();
    if (pthread_equal(caller, pthread_self()))
        return;
    workers_in = 1;
    if (write(*(int *)context, "", 1) != 1)
        abort();
    for (int i = 0; i < 40; i++)
        usleep(5 * 1000);
}

static void a_process_that_was_stopped_has_not_stalled(void **state)
{
    int channel[2], status;
    char byte;
    assert_int_equal(pipe(channel), 0);
    pid_t child = fork();
    if (child == 0) {
        struct pool *pool;
        reset();
        if (pool_create(&pool, 2, NULL))
            _exit(2);
        _exit(pool_run_within(pool, 2, sleep_in_steps, &channel[1], 0.7) == -1 ? 0 : 1);
    }
    assert_true(child > 0);
    assert_int_equal(read(channel[0], &byte, 1), 1);
    usleep(20 * 1000); /* the caller waits by now */
    kill(child, SIGSTOP);
    usleep(1200 * 1000);
    kill(child, SIGCONT);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    close(channel[0]);
    close(channel[1]);
}

static void end_about_when_time_is_up(void *context, int item)
{
    if (!pthread_equal(caller, pthread_self()))
        usleep(1500 + (useconds_t)(item % 4) * 500);
}

static void an_item_that_ends_just_when_time_is_up_is_one_or_the_other(void **state)
{
    int before = n_process_threads();
    reset();
    for (int i = 0; i < 40; i++) {
        struct pool *pool;
        assert_int_equal(pool_create(&pool, 3, NULL), 0);
        for (int j = 0; j < 10; j++) {
            int item = pool_run_within(pool, 8, end_about_when_time_is_up, NULL, 0.002);
            assert_int_equal(item >= 0, pool_is_stalled(pool));
            assert_in_range(item + 1, 0, 8);
        }
        pool_destroy(pool);
    }
    assert_threads_become(before);
}

/* ---- The hook
 * ------------------------------------------------------------------------------------------------------------------------- */

static _Atomic int hooked;

static void count_hook(void *context)
{
    atomic_fetch_add(&hooked, 1);
    atomic_fetch_add(&strangers, (int *)context != &jobs_context[3]);
}

static void the_hook_is_called_before_every_item(void **state)
{
    for (int threads = 1; threads <= 4; threads++) {
        struct pool *pool;
        assert_int_equal(pool_create(&pool, threads, NULL), 0);
        pool_hook(pool, count_hook, &jobs_context[3]);
        for (int items = 0; items <= 20; items++) {
            hooked = 0;
            pool_run(pool, items, do_nothing, NULL);
            assert_int_equal(hooked, items);
        }
        pool_hook(pool, NULL, NULL);
        pool_run(pool, 20, do_nothing, NULL);
        assert_int_equal(hooked, 20);
        pool_destroy(pool);
    }
    assert_int_equal(strangers, 0);
}

static void hang_in_the_hook(void *context) { hang_in_a_worker(context, 7); }

static void a_hook_that_hangs_stalls_the_pool(void **state)
{
    struct pool *pool;
    int before = n_process_threads();
    reset();
    assert_int_equal(pool_create(&pool, 2, NULL), 0);
    pool_hook(pool, hang_in_the_hook, NULL);
    assert_in_range(pool_run_within(pool, 8, do_nothing, NULL, 0.1), 0, 7);
    assert_int_equal(hanging, 7);
    release_and_destroy(pool, before);
}

/* ---- Where threads are bound
 * ---------------------------------------------------------------------------------------------------------- */

enum { MOST_THREADS = 64 };
static struct {
    cpu_set_t caller, workers[MOST_THREADS];
} masks;

/* One item each: nobody ends before all have begun. */
static void note_mask(void *context, int item)
{
    cpu_set_t *mask = pthread_equal(caller, pthread_self()) ? &masks.caller : &masks.workers[item];
    sched_getaffinity(0, sizeof *mask, mask);
    atomic_fetch_add(&ran, 1);
    while (atomic_load(&ran) < *(int *)context)
        sched_yield();
}

static void note_masks(struct pool *pool)
{
    int threads = pool_threads(pool);
    memset(&masks, 0, sizeof masks);
    reset();
    pool_run(pool, threads, note_mask, &threads);
}

static void as_many_threads_as_cores_are_bound_to_one_each(void **state)
{
    struct pool *pool;
    cpu_set_t before, after, all;
    int threads = pool_default_threads();
    static struct topology topology;
    topology_read(&topology);
    if (threads < topology.n_cores || threads < 2 || threads > MOST_THREADS)
        skip(); /* with a quota they are left alone */
    sched_getaffinity(0, sizeof before, &before);
    assert_int_equal(pool_create(&pool, threads, NULL), 0);
    note_masks(pool);
    int n_bound = 0;
    CPU_ZERO(&all);
    for (int i = 0; i < threads; i++) {
        n_bound += CPU_COUNT(&masks.workers[i]) == 1;
        CPU_OR(&all, &all, &masks.workers[i]);
    }
    assert_int_equal(n_bound, threads - 1);
    assert_int_equal(CPU_COUNT(&all), threads - 1);
    assert_true(CPU_EQUAL(&masks.caller, &before)); /* the caller is left alone ... */

    pool_pin_caller(pool); /* ... until it asks */
    pool_pin_caller(pool);
    note_masks(pool);
    assert_int_equal(CPU_COUNT(&masks.caller), 1);
    CPU_OR(&all, &all, &masks.caller);
    assert_int_equal(CPU_COUNT(&all), threads);
    pool_unpin_caller(pool);
    sched_getaffinity(0, sizeof after, &after);
    assert_true(CPU_EQUAL(&after, &before));

    pool_pin_caller(pool);
    pool_destroy(pool);
    sched_getaffinity(0, sizeof after, &after);
    assert_true(CPU_EQUAL(&after, &before));
}

static void more_threads_than_cores_are_left_alone(void **state)
{
    struct pool *pool;
    cpu_set_t before;
    static struct topology topology;
    topology_read(&topology);
    int threads = topology.n_cores + 1;
    if (threads > MOST_THREADS)
        skip();
    sched_getaffinity(0, sizeof before, &before);
    assert_int_equal(pool_create(&pool, threads, NULL), 0);
    pool_pin_caller(pool);
    note_masks(pool);
    assert_true(CPU_EQUAL(&masks.caller, &before));
    int same = 0;
    for (int i = 0; i < threads; i++)
        same += CPU_EQUAL(&masks.workers[i], &before) != 0;
    assert_int_equal(same, threads - 1);
    pool_unpin_caller(pool);
    pool_destroy(pool);
}

/* ---- Creation
 * ------------------------------------------------------------------------------------------------------------------------- */

static void zero_threads_are_refused(void **state)
{
    struct pool *pool;
    struct strata_error error;
    assert_int_equal(pool_create(&pool, 0, &error), STRATA_E_ARGUMENT);
    assert_string_equal(error.text, "0 threads: wanted 1 to 1024");
}

static void the_default_is_at_least_one_thread(void **state) { assert_in_range(pool_default_threads(), 1, 1024); }

int main(void)
{
    caller = pthread_self();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_thread_runs_every_item_once),
        cmocka_unit_test(two_threads_run_every_item_once),
        cmocka_unit_test(more_threads_than_cores_run_every_item_once),
        cmocka_unit_test(workers_sleep_when_there_is_nothing_to_do),
        cmocka_unit_test(an_idle_gap_costs_a_millisecond_or_so),
        cmocka_unit_test(a_worker_stays_awake_while_a_gpu_works_on_a_layer),
        cmocka_unit_test(an_item_that_hangs_is_named),
        cmocka_unit_test(a_stalled_pool_runs_nothing_more),
        cmocka_unit_test(a_hanging_thread_is_left_behind_and_ends_when_it_can),
        cmocka_unit_test(a_stall_that_has_passed_leaves_no_thread_behind),
        cmocka_unit_test(slow_items_that_end_one_by_one_are_no_stall),
        cmocka_unit_test(without_a_limit_a_job_takes_its_time),
        cmocka_unit_test(a_process_that_was_stopped_has_not_stalled),
        cmocka_unit_test(an_item_that_ends_just_when_time_is_up_is_one_or_the_other),
        cmocka_unit_test(the_hook_is_called_before_every_item),
        cmocka_unit_test(a_hook_that_hangs_stalls_the_pool),
        cmocka_unit_test(as_many_threads_as_cores_are_bound_to_one_each),
        cmocka_unit_test(more_threads_than_cores_are_left_alone),
        cmocka_unit_test(zero_threads_are_refused),
        cmocka_unit_test(the_default_is_at_least_one_thread),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
