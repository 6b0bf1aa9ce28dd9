/* pool.h - a few threads that run one job at a time together with the thread that asks for it.
 *
 * A job is `n_items` independent items; every participant claims the next item by one atomic addition, so uneven items balance
 * themselves. Results must not depend on who runs what (design.md, "Numbers"). Workers spin for about a millisecond after a job,
 * because the next one usually follows soon while a token is computed, and then sleep: an idle program uses no CPU.
 *
 * A job can be given up when an item hangs. The hanging thread cannot be ended from outside: it keeps what it was given, so the
 * job's context, whatever its items touch, and the pool itself must then outlive it. The pool takes care of itself; the context is
 * the caller's matter.
 */
#ifndef BASE_POOL_H
#define BASE_POOL_H

#include "base/error.h"

struct pool;
typedef void pool_fn(void *context, int item);

/* `n_threads` counts the calling thread: 1 starts no worker. Workers are bound to cores as topology_place says; the caller is not.
 */
int pool_create(struct pool **out, int n_threads, struct strata_error *error);
/* Waits for the workers to end. One that still hangs in an item is left behind: if it ever returns it ends, and the pool's memory
 * goes with the last such thread. The pool must not be used afterwards in any case. */
void pool_destroy(struct pool *pool);
int pool_threads(const struct pool *pool);
/* Runs fn(context, 0 .. n_items-1) and returns when all are done; on a stalled pool it returns at once and has run nothing. One
 * caller at a time. */
void pool_run(struct pool *pool, int n_items, pool_fn *fn, void *context);
/* The same, but gives up when no item ended for `timeout_s` seconds (<= 0: never): returns an item that is still running, or -1
 * when all are done. After that the pool is stalled: it runs nothing more, and this function returns that item at once. The time
 * counts from when the caller has nothing left to do itself; seconds in which the whole process was stopped do not count. If the
 * caller's own item hangs, this function cannot return: with one thread or one item that is every item. */
int pool_run_within(struct pool *pool, int n_items, pool_fn *fn, void *context, double timeout_s);
/* From any thread. */
bool pool_is_stalled(const struct pool *pool);

/* Binds the calling thread to the pool's first core, or to the same cores as the workers where they share some, until
 * pool_unpin_caller or pool_destroy on the same thread gives it back what it had (on another thread they leave it as it is). An
 * unbound caller can meet a worker on one core for some milliseconds. Threads that a bound thread starts inherit its binding: start
 * them first. */
void pool_pin_caller(struct pool *pool);
void pool_unpin_caller(struct pool *pool);

/* For tests: called by every participant before each item (NULL: not). Not while a job runs. */
void pool_hook(struct pool *pool, void (*hook)(void *context), void *context);
/* Physical cores this process may use: the default number of threads. Respects the affinity mask and a cgroup CPU quota. Slow cores
 * count as well: the work waits for memory, and items are claimed one by one, so a slow core only takes fewer of them. */
int pool_default_threads(void);

#endif
