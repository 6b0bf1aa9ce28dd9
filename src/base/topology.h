/* topology.h - the processors of this process: which cores its threads should take, in which order, and how many at once.
 *
 * The order holds physical cores only, each as its first allowed hardware thread: a second thread on a core adds nothing to work
 * that waits for memory and takes from the first one's caches. Faster kinds of core come first, and among cores of one kind a NUMA
 * node is filled before the next, and in it one L3 group before the next. Nothing here changes a thread's affinity; pool.c does.
 */
#ifndef BASE_TOPOLOGY_H
#define BASE_TOPOLOGY_H

#include <hwloc.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>

enum { TOPOLOGY_MAX_CORES = 1024 }; /* what a cpu_set_t holds; further ones are left out */

struct topology_core {
    int cpu;  /* the system's number of its first allowed hardware thread */
    int kind; /* higher is faster: hwloc's efficiency; 0 for all if the system does not say */
    int node; /* the system's number of its NUMA node */
    int l3;   /* hwloc's number of its L3 cache; -1: none */
};

struct topology {
    int n_cores;                                    /* in the affinity mask; at least 1 after topology_read */
    int n_cpus;                                     /* hardware threads in the affinity mask */
    int quota;                                      /* processors that cgroup CPU quotas grant, rounded up; 0: no limit */
    struct topology_core cores[TOPOLOGY_MAX_CORES]; /* [n_cores], in the order of use */
};

/* Never fails: what the system does not say is taken to be simple (every processor is a core, one node). The mask is what the
 * process's threads may use together, so read it before the only thread is pinned. */
void topology_read(struct topology *out);
/* Where participant i of n_threads should run. False: leave all of them alone. */
bool topology_place(const struct topology *topology, int n_threads, int i, cpu_set_t *place);

/* For tests: the order in any hwloc topology for any mask (sets n_cores, n_cpus and cores), and the quota below another root than
 * "/". */
void topology_order(struct topology *out, hwloc_topology_t hwloc, hwloc_const_cpuset_t mask);
int topology_quota(const char *root);

/* Calls `visit` with the directory of this process's cgroup for a controller ("cpu", "memory") and with every directory above it:
 * the limit of any of them holds. `v2`: which generation's files the directory has. Directories need not exist. */
void topology_cgroups(const char *root, const char *controller, void (*visit)(void *context, const char *directory, bool v2),
                      void *context);
/* Up to `n` numbers separated by blanks: those that a file begins with ("100000 50000"), or those behind `key` in the line that
 * begins with it
 * ("anon 4096", "MemTotal:  1024 kB"). Returns how many there are: a word such as "max", a sign, a number beyond 64 bits or a
 * missing file end them. */
int topology_numbers(const char *directory, const char *file, const char *key, uint64_t *numbers, int n);

#endif
