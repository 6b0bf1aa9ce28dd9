/* private.h - what the reader, the split loader and the writer of this room share. */
#ifndef GGUF_PRIVATE_H
#define GGUF_PRIVATE_H

#include "gguf/gguf.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "GGUF's numbers are read as they lie in the file");

enum { GGUF_DEFAULT_ALIGNMENT = 32, GGUF_TYPE_COUNT = GGUF_F64 + 1 };

/* Bytes of a scalar; 0 for strings and arrays. */
extern const uint8_t gguf_type_bytes[GGUF_TYPE_COUNT];
extern const char *const gguf_type_names[GGUF_TYPE_COUNT];

/* ---- Names: sorted lists that find a key or a tensor, and duplicates, in n log n whatever a hostile file holds. */
struct gguf_name {
    struct gguf_string string;
    uint64_t position; /* in the list that the names come from */
};

/* Sorts by bytes. Returns the first of two equal neighbours (equal names keep the order of their positions), or NULL. */
const struct gguf_name *gguf_names_sort(struct gguf_name *names, uint64_t count);
/* The position of a name in a sorted list, or UINT64_MAX. */
uint64_t gguf_names_find(const struct gguf_name *names, uint64_t count, const char *name);

/* A name as an error sentence may show it: cut to fit, control characters replaced. Lives until the end of the full expression. */
struct gguf_shown {
    char text[80];
};
struct gguf_shown gguf_show(const char *data, uint64_t length);

/* ---- Memory: everything an open file owns, freed together by gguf_close. */
struct gguf_memory {
    struct gguf_block *blocks;
    struct gguf_name *keys;    /* [n_entries], sorted */
    struct gguf_name *tensors; /* [n_tensors], sorted */
};

/* count * size zeroed bytes, or NULL when there is no memory. */
void *gguf_memory_take(struct gguf_memory *memory, uint64_t count, uint64_t size);
/* Hands all blocks of `from` over to `to`. */
void gguf_memory_move(struct gguf_memory *to, struct gguf_memory *from);

/* Builds memory->tensors from gguf->tensors; a name that occurs twice is an error. */
int gguf_index_tensors(struct gguf *gguf, struct strata_error *error);

/* n rounded up to a multiple of `alignment`, a power of two. The caller knows that the sum does not overflow. */
static inline uint64_t gguf_pad(uint64_t n, uint64_t alignment) { return (n + alignment - 1) & ~(alignment - 1); }

/* Reads exactly `length` bytes of an open file. */
int gguf_read_at(int fd, uint64_t start, void *out, uint64_t length, struct strata_error *error);

#endif
