/* arena.h - one allocation for one lifetime. Memory comes zeroed from the system, in huge pages where it gives them, and only the
 * pages that are written count. */
#ifndef BASE_ARENA_H
#define BASE_ARENA_H

#include "base/error.h"

struct arena { uint8_t *base; size_t size, used; };

/* Reserves address space; an upper bound costs nothing. `what` names the use in the error sentence. */
int arena_create(struct arena *arena, size_t size, const char *what, struct strata_error *error);
void arena_destroy(struct arena *arena);
/* 64-byte aligned, zeroed. The reservation was computed by the caller: running past it is a bug and aborts. */
void *arena_alloc(struct arena *arena, size_t bytes);

#endif
