/* The thread pool: every item once, whatever the number of threads and however short the jobs. */
#include "base/pool.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

enum { MAX_ITEMS = 300 };
static _Atomic int runs[MAX_ITEMS + 64];
static int jobs_context[8];           /* job j gets the address of entry j % 8 ... */
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
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_thread_runs_every_item_once),
        cmocka_unit_test(two_threads_run_every_item_once),
        cmocka_unit_test(more_threads_than_cores_run_every_item_once),
        cmocka_unit_test(workers_sleep_when_there_is_nothing_to_do),
        cmocka_unit_test(zero_threads_are_refused),
        cmocka_unit_test(the_default_is_at_least_one_thread),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
