/* fuzz_gguf.c - any bytes as a GGUF file: opened or refused with a sentence; what opens can be walked to its end. */
#define _GNU_SOURCE /* memfd_create */
#include "gguf/gguf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(bool holds)
{
    if (!holds)
        abort();
}

/* Reads every byte, so that the sanitizer sees one that is not there. */
static unsigned touch(const void *data, uint64_t size)
{
    const uint8_t *bytes = data;
    unsigned sum = 0;
    for (uint64_t i = 0; i < size; i++)
        sum += bytes[i];
    return sum;
}

static unsigned walk_value(const struct gguf_value *value)
{
    static const uint8_t bytes[] = { 1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8 };
    unsigned sum = 0;
    if (value->element == GGUF_STRING) {
        const struct gguf_string *strings = value->data;
        for (uint64_t i = 0; i < value->count; i++) {
            sum += touch(strings[i].data, strings[i].length + 1);
            check(strings[i].data[strings[i].length] == 0);
        }
        return sum;
    }
    struct strata_error error;
    for (uint64_t i = 0; i < value->count; i++) {
        uint64_t number;
        gguf_value_u64(value, "key", i, &number, &error);
    }
    return touch(value->data, value->count * bytes[value->element]);
}

static unsigned walk(const struct gguf *gguf)
{
    unsigned sum = 0;
    struct strata_error error;
    for (uint64_t i = 0; i < gguf->n_entries; i++) {
        const struct gguf_entry *entry = &gguf->entries[i];
        check(entry->key.length > 0 && entry->key.data[entry->key.length] == 0);
        if (strlen(entry->key.data) == entry->key.length)
            check(gguf_find(gguf, entry->key.data) == &entry->value);
        sum += walk_value(&entry->value);

        uint32_t u32;
        float f32;
        bool flag;
        struct gguf_string string;
        gguf_get_u32(gguf, entry->key.data, &u32, &error);
        gguf_get_f32(gguf, entry->key.data, &f32, &error);
        gguf_get_bool(gguf, entry->key.data, &flag, &error);
        gguf_get_string(gguf, entry->key.data, &string, &error);
    }
    for (uint64_t i = 0; i < gguf->n_tensors; i++) {
        const struct gguf_tensor *tensor = &gguf->tensors[i];
        check(gguf_tensor_find(gguf, tensor->name) == tensor);
        check(quant_type_name(tensor->type) != NULL);
        check(tensor->offset + tensor->bytes <= gguf->files[tensor->file].size);
        uint8_t *bytes = malloc(tensor->bytes); /* at most the input's size, as just checked */
        check(bytes && gguf_read(gguf, tensor, 0, bytes, tensor->bytes, &error) == 0);
        sum += touch(bytes, tensor->bytes);
        free(bytes);
    }
    return sum;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int file = -1;
    static char path[64];
    if (file < 0) {
        file = memfd_create("fuzz_gguf", MFD_CLOEXEC);
        check(file >= 0);
        snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    }
    check(ftruncate(file, 0) == 0 && pwrite(file, data, size, 0) == (ssize_t)size);

    struct gguf *gguf;
    struct strata_error error = { 0 };
    int code = gguf_open_single(&gguf, path, &error);
    if (code < 0) {
        check(!gguf && error.code == code && error.text[0]);
        return 0;
    }
    static volatile unsigned keep; /* so that no read is optimised away */
    keep = walk(gguf);
    (void)keep;
    gguf_close(gguf);
    return 0;
}
