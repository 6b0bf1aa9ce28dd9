/* names.c - names of keys and tensors: finding one, finding duplicates, showing them to a person. */
#include "gguf/private.h"

#include <stdlib.h>
#include <string.h>

static int string_compare(const struct gguf_string *a, const struct gguf_string *b)
{
    int order = memcmp(a->data, b->data, a->length < b->length ? a->length : b->length);
    return order ? order : (a->length > b->length) - (a->length < b->length);
}

static int name_compare(const void *left, const void *right)
{
    const struct gguf_name *a = left, *b = right;
    int order = string_compare(&a->string, &b->string);
    return order ? order : (a->position > b->position) - (a->position < b->position);
}

const struct gguf_name *gguf_names_sort(struct gguf_name *names, uint64_t count)
{
    if (count < 2) /* and an empty list may be NULL, which qsort must not get */
        return NULL;
    qsort(names, count, sizeof *names, name_compare);
    for (uint64_t i = 0; i + 1 < count; i++)
        if (string_compare(&names[i].string, &names[i + 1].string) == 0)
            return &names[i];
    return NULL;
}

uint64_t gguf_names_find(const struct gguf_name *names, uint64_t count, const char *name)
{
    struct gguf_string wanted = { name, strlen(name) };
    uint64_t low = 0, high = count;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        int order = string_compare(&wanted, &names[middle].string);
        if (order == 0)
            return names[middle].position;
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return UINT64_MAX;
}

struct gguf_shown gguf_show(const char *data, uint64_t length)
{
    struct gguf_shown shown;
    bool cut = length >= sizeof shown.text;
    size_t n = cut ? sizeof shown.text - 4 : (size_t)length;
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)data[i];
        shown.text[i] = c < 0x20 || c == 0x7f ? '?' : data[i];
    }
    memcpy(shown.text + n, cut ? "..." : "", cut ? 4 : 1);
    return shown;
}
