#include "base/memory.h"

#include "base/topology.h"

#include <limits.h>
#include <stdio.h>

struct limits {
    uint64_t total, room;
};

static uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }

static uint64_t number_or(const char *directory, const char *file, const char *key, uint64_t otherwise)
{
    uint64_t number;
    return topology_numbers(directory, file, key, &number, 1) == 1 ? number : otherwise;
}

/* What a cgroup's limit leaves. Its usage counts cached files as well; the system drops those that are not in use (inactive) before
 * it refuses memory. */
static void visit_limit(void *context, const char *directory, bool v2)
{
    struct limits *limits = context;
    uint64_t limit = number_or(directory, v2 ? "memory.max" : "memory.limit_in_bytes", NULL, UINT64_MAX);
    if (v2) /* beyond memory.high nothing fails, but everything crawls */
        limit = smaller(limit, number_or(directory, "memory.high", NULL, UINT64_MAX));
    if (limit == UINT64_MAX)
        return;
    uint64_t used = number_or(directory, v2 ? "memory.current" : "memory.usage_in_bytes", NULL, 0);
    used -= smaller(used, number_or(directory, "memory.stat", v2 ? "inactive_file" : "total_inactive_file", 0));
    limits->total = smaller(limits->total, limit);
    limits->room = smaller(limits->room, limit > used ? limit - used : 0);
}

static uint64_t meminfo_bytes(const char *root, const char *key)
{
    char directory[PATH_MAX];
    if (snprintf(directory, sizeof directory, "%s/proc", root) >= (int)sizeof directory)
        return UINT64_MAX;
    uint64_t kib = number_or(directory, "meminfo", key, UINT64_MAX);
    return kib > UINT64_MAX / 1024 ? UINT64_MAX : kib * 1024;
}

struct memory_room memory_room_at(const char *root)
{
    uint64_t available = meminfo_bytes(root, "MemAvailable");
    struct limits limits = { meminfo_bytes(root, "MemTotal"), UINT64_MAX };
    topology_cgroups(root, "memory", visit_limit, &limits);
    bool limited = limits.room < available;
    return (struct memory_room){ limits.total, limited ? limits.room : available,
                                 limited ? "the container's memory limit" : "free memory" };
}

struct memory_room memory_room(void) { return memory_room_at("/"); }
