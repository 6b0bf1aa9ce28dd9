/* memory.h - how much RAM a program may still take: what the system has free, and what a container's limit leaves. */
#ifndef BASE_MEMORY_H
#define BASE_MEMORY_H

#include <stdint.h>

struct memory_room {
    uint64_t total_bytes;     /* of the machine, or the container's limit if that is smaller */
    uint64_t available_bytes; /* the smaller of MemAvailable and what the cgroup limits leave */
    const char *limited_by;   /* "free memory" or "the container's memory limit" */
};

/* Both are UINT64_MAX if the system does not say. Reads /proc/meminfo and the limits of every cgroup above this process (v2 and
 * v1). */
struct memory_room memory_room(void);
/* The same with another root directory than "/": for tests. */
struct memory_room memory_room_at(const char *root);

#endif
