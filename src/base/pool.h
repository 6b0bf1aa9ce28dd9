/* pool.h - a few threads that run one job at a time together with the thread that asks for it.
 *
 * A job is `n_items` independent items; every participant claims the next item by one atomic addition, so uneven items balance
 * themselves. Results must not depend on who runs what (design.md, "Numbers"). Workers spin for about 50 us after a job, because
 * the next one usually follows at once while a token is computed, and then sleep: an idle program uses no CPU.
 */
#ifndef BASE_POOL_H
#define BASE_POOL_H

#include "base/error.h"

struct pool;
typedef void pool_fn(void *context, int item);

/* `n_threads` counts the calling thread: 1 starts no worker. */
int pool_create(struct pool **out, int n_threads, struct strata_error *error);
void pool_destroy(struct pool *pool);
int pool_threads(const struct pool *pool);
/* Runs fn(context, 0 .. n_items-1) and returns when all are done. One caller at a time. */
void pool_run(struct pool *pool, int n_items, pool_fn *fn, void *context);
/* Physical cores this process may use: the default number of threads. Respects the affinity mask and a cgroup CPU quota. */
int pool_default_threads(void);

#endif
