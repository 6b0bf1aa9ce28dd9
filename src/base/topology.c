#define _GNU_SOURCE /* CPU_SET */
#include "base/topology.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- The order of cores
 * ------------------------------------------------------------------------------------------------------------ */

/* A core with what decides its place: how many usable cores of its kind its node and its L3 group hold. */
struct candidate {
    struct topology_core core;
    int node_cores, l3_cores, index;
};

static int by_place(const void *left, const void *right)
{
    const struct candidate *a = left, *b = right;
    int keys[][2] = {
        { b->core.kind, a->core.kind }, /* descending */
        { b->node_cores, a->node_cores }, { a->core.node, b->core.node },
        { b->l3_cores, a->l3_cores },     { a->index, b->index }, /* cores of one L3 are neighbours in hwloc's order */
    };
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
        if (keys[i][0] != keys[i][1])
            return keys[i][0] < keys[i][1] ? -1 : 1;
    return 0;
}

/* How fast a kind of core is among those of the machine: laptops mix P-cores, E-cores and slower ones. */
static int kind_of(hwloc_topology_t hwloc, hwloc_const_cpuset_t cpu)
{
    int efficiency = 0;
    int kind = hwloc_cpukinds_get_by_cpuset(hwloc, cpu, 0);
    if (kind < 0 || hwloc_cpukinds_get_info(hwloc, (unsigned)kind, NULL, &efficiency, NULL, NULL, 0))
        return 0;
    return efficiency < 0 ? 0 : efficiency;
}

void topology_order(struct topology *out, hwloc_topology_t hwloc, hwloc_const_cpuset_t mask)
{
    struct candidate *candidates = calloc(TOPOLOGY_MAX_CORES, sizeof *candidates);
    hwloc_cpuset_t allowed = hwloc_bitmap_alloc();
    int n = 0;
    out->n_cores = out->n_cpus = 0;
    /* Some virtual machines do not say which hardware threads share a core. */
    hwloc_obj_type_t type = hwloc_get_nbobjs_by_type(hwloc, HWLOC_OBJ_CORE) > 0 ? HWLOC_OBJ_CORE : HWLOC_OBJ_PU;
    for (hwloc_obj_t object = NULL; candidates && allowed && (object = hwloc_get_next_obj_by_type(hwloc, type, object));) {
        hwloc_bitmap_and(allowed, object->cpuset, mask);
        int cpu = hwloc_bitmap_first(allowed);
        if (cpu < 0 || cpu >= CPU_SETSIZE || n == TOPOLOGY_MAX_CORES)
            continue;
        out->n_cpus += hwloc_bitmap_weight(allowed);
        hwloc_bitmap_only(allowed, (unsigned)cpu);
        hwloc_obj_t l3 = hwloc_get_ancestor_obj_by_type(hwloc, HWLOC_OBJ_L3CACHE, object);
        int node = object->nodeset ? hwloc_bitmap_first(object->nodeset) : 0;
        candidates[n] =
            (struct candidate){ { cpu, kind_of(hwloc, allowed), node < 0 ? 0 : node, l3 ? (int)l3->logical_index : -1 }, 0, 0, n };
        n++;
    }
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++) {
            const struct topology_core *a = &candidates[i].core, *b = &candidates[j].core;
            bool same_node = a->kind == b->kind && a->node == b->node;
            candidates[i].node_cores += same_node;
            candidates[i].l3_cores += same_node && a->l3 == b->l3;
        }
    if (n)
        qsort(candidates, (size_t)n, sizeof *candidates, by_place);
    for (int i = 0; i < n; i++)
        out->cores[i] = candidates[i].core;
    out->n_cores = n;
    hwloc_bitmap_free(allowed);
    free(candidates);
}

/* What is left to say without hwloc: every allowed processor is a core. */
static void order_by_number(struct topology *out)
{
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    if (sched_getaffinity(0, sizeof allowed, &allowed))
        for (long cpu = 0, n = sysconf(_SC_NPROCESSORS_ONLN); cpu < n && cpu < CPU_SETSIZE; cpu++)
            CPU_SET((size_t)cpu, &allowed);
    out->n_cores = 0;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET((size_t)cpu, &allowed))
            out->cores[out->n_cores++] = (struct topology_core){ cpu, 0, 0, -1 };
    if (out->n_cores == 0)
        out->cores[out->n_cores++] = (struct topology_core){ 0, 0, 0, -1 };
    out->n_cpus = out->n_cores;
}

void topology_read(struct topology *out)
{
    memset(out, 0, sizeof *out);
    hwloc_topology_t hwloc;
    if (hwloc_topology_init(&hwloc) == 0) {
        hwloc_cpuset_t mask = hwloc_bitmap_alloc();
        if (mask && hwloc_topology_load(hwloc) == 0 && hwloc_get_cpubind(hwloc, mask, HWLOC_CPUBIND_PROCESS) == 0)
            topology_order(out, hwloc, mask);
        hwloc_bitmap_free(mask);
        hwloc_topology_destroy(hwloc);
    }
    if (out->n_cores == 0)
        order_by_number(out);
    out->quota = topology_quota("/");
}

/* One thread for every core: each gets its own, because a scheduler that puts two of them together for a moment makes all wait at
 * the next barrier. Fewer threads than cores: a core for each would be the same core for the same thread of every such program, and
 * two small programs would meet on the first cores of an idle machine. So they share all cores of the kinds and nodes that the
 * order begins with: still one hardware thread per core, still near the same memory, and the scheduler keeps programs apart. More
 * threads than cores, or a quota below the number of cores (containers side by side on one large machine): only the scheduler knows
 * who else is there. */
bool topology_place(const struct topology *topology, int n_threads, int i, cpu_set_t *place)
{
    const struct topology_core *cores = topology->cores;
    CPU_ZERO(place);
    if (n_threads < 2 || n_threads > topology->n_cores || i < 0 || i >= n_threads ||
        (topology->quota && topology->quota < topology->n_cores))
        return false;
    if (n_threads == topology->n_cores) {
        CPU_SET((size_t)cores[i].cpu, place);
        return true;
    }
    for (int c = 0; c < topology->n_cores; c++) {
        bool near = false;
        for (int used = 0; used < n_threads && !near; used++)
            near = cores[c].node == cores[used].node;
        if (near && cores[c].kind >= cores[n_threads - 1].kind)
            CPU_SET((size_t)cores[c].cpu, place);
    }
    return true;
}

/* ---- Control groups
 * ---------------------------------------------------------------------------------------------------------------- */

static int parse_numbers(const char *at, uint64_t *numbers, int n)
{
    int got = 0;
    for (; got < n && isdigit((unsigned char)*at); got++) {
        char *end;
        errno = 0;
        unsigned long long value = strtoull(at, &end, 10);
        if (errno || (*end && !isspace((unsigned char)*end)))
            break;
        numbers[got] = value;
        at = end + strspn(end, " \t\n");
    }
    return got;
}

int topology_numbers(const char *directory, const char *file, const char *key, uint64_t *numbers, int n)
{
    char path[PATH_MAX];
    FILE *stream = snprintf(path, sizeof path, "%s/%s", directory, file) < (int)sizeof path ? fopen(path, "re") : NULL;
    if (!stream)
        return 0;
    char *line = NULL;
    size_t capacity = 0, key_length = key ? strlen(key) : 0;
    int got = 0;
    while (getline(&line, &capacity, stream) > 0) {
        const char *at = line;
        if (key) {
            if (strncmp(line, key, key_length))
                continue;
            at += key_length + strspn(line + key_length, ": \t");
            if (at == line + key_length) /* only the beginning of a longer key */
                continue;
        }
        got = parse_numbers(at, numbers, n);
        break;
    }
    free(line);
    fclose(stream);
    return got;
}

/* Visits `mount`/`path` and its parents up to `mount`. In a container `path` may be as the host sees it, and does not exist: the
 * mount itself is then the container's cgroup. */
static void visit_levels(const char *mount, const char *path, bool v2, void (*visit)(void *, const char *, bool), void *context)
{
    char directory[PATH_MAX];
    int mount_length = snprintf(directory, sizeof directory, "%s", mount);
    if (mount_length >= (int)sizeof directory)
        return;
    bool outside = strstr(path, "/..") != NULL; /* above the root of this process's cgroup namespace */
    if (!outside && snprintf(directory + mount_length, sizeof directory - (size_t)mount_length, "%s", path) >=
                        (int)sizeof directory - mount_length)
        directory[mount_length] = 0;
    for (;;) {
        char *last = directory + strlen(directory);
        while (last > directory + mount_length && last[-1] == '/')
            *--last = 0;
        visit(context, directory, v2);
        if (last == directory + mount_length)
            return;
        while (last > directory + mount_length && last[-1] != '/')
            *--last = 0;
    }
}

static bool list_has(const char *list, const char *name)
{
    for (size_t length = strlen(name); *list; list += *list == ',') {
        size_t entry = strcspn(list, ",");
        if (entry == length && memcmp(list, name, length) == 0)
            return true;
        list += entry;
    }
    return false;
}

void topology_cgroups(const char *root, const char *controller, void (*visit)(void *context, const char *directory, bool v2),
                      void *context)
{
    char path[PATH_MAX], mount[PATH_MAX];
    if (snprintf(path, sizeof path, "%s/proc/self/cgroup", root) >= (int)sizeof path)
        return;
    FILE *file = fopen(path, "re");
    if (!file)
        return;
    char *line = NULL;
    size_t capacity = 0;
    for (ssize_t length; (length = getline(&line, &capacity, file)) > 0;) {
        line[strcspn(line, "\n")] = 0;
        char *list = strchr(line, ':'),
             *group = list ? strchr(list + 1, ':') : NULL; /* "number:controllers:/path"; v2: "0::/path" */
        if (!group || group[1] != '/')
            continue;
        *group++ = 0;
        list++;
        bool v2 = *list == 0;
        if (!v2 && !list_has(list, controller))
            continue;
        /* Where systemd and container runtimes mount them; a v1 hierarchy of several controllers has a link of each one's name. */
        const char *places[] = { "", "/unified" };
        for (int i = 0; i < (v2 ? 2 : 1); i++)
            if (snprintf(mount, sizeof mount, "%s/sys/fs/cgroup%s%s", root, v2 ? places[i] : "/", v2 ? "" : controller) <
                (int)sizeof mount)
                visit_levels(mount, group, v2, visit, context);
    }
    free(line);
    fclose(file);
}

static void visit_quota(void *context, const char *directory, bool v2)
{
    int *quota = context;
    uint64_t numbers[2];
    bool limited = v2 ? topology_numbers(directory, "cpu.max", NULL, numbers, 2) == 2
                      : topology_numbers(directory, "cpu.cfs_quota_us", NULL, &numbers[0], 1) == 1 &&
                            topology_numbers(directory, "cpu.cfs_period_us", NULL, &numbers[1], 1) == 1;
    if (!limited || numbers[0] == 0 || numbers[1] == 0)
        return;
    uint64_t cpus = numbers[0] / numbers[1] + (numbers[0] % numbers[1] != 0);
    if (cpus <= INT_MAX && (*quota == 0 || (int)cpus < *quota))
        *quota = (int)cpus;
}

int topology_quota(const char *root)
{
    int quota = 0;
    topology_cgroups(root, "cpu", visit_quota, &quota);
    return quota;
}
