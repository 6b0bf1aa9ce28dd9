#define _GNU_SOURCE
#include "base/arena.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { HUGE_PAGE = 2 << 20 };

int arena_create(struct arena *arena, size_t size, const char *what, struct strata_error *error)
{
    *arena = (struct arena){ 0 };
    size = (size + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    /* One huge page more, so that the arena can begin on a huge page's border. */
    uint8_t *p = mmap(NULL, size + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return error_set(error, STRATA_E_MEMORY, "cannot reserve %zu MB of memory for %s: %s", size >> 20, what, strerror(errno));
    size_t before = (HUGE_PAGE - (uintptr_t)p % HUGE_PAGE) % HUGE_PAGE;
    if (before)
        munmap(p, before);
    munmap(p + before + size, HUGE_PAGE - before);
    madvise(p + before, size, MADV_HUGEPAGE);
    *arena = (struct arena){ p + before, size, 0 };
    return 0;
}

void arena_destroy(struct arena *arena)
{
    if (arena->base)
        munmap(arena->base, arena->size);
    *arena = (struct arena){ 0 };
}

void *arena_alloc(struct arena *arena, size_t bytes)
{
    size_t at = (arena->used + 63) & ~(size_t)63;
    if (bytes > arena->size || at > arena->size - bytes) {
        fprintf(stderr, "arena: %zu bytes asked, %zu of %zu used\n", bytes, arena->used, arena->size);
        abort();
    }
    arena->used = at + bytes;
    return arena->base + at;
}
