/* fuzz_tokenizer.c - any additions to a vocabulary and any text: refused with a sentence, or encoded and decoded by the rules.
 *
 * The input: a byte n and n % 32 tokens (type, length, text), a byte n and n % 32 merges (length, text), then the text. */
#define _GNU_SOURCE /* memfd_create */
#include "text/tokenizer.h"

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

struct input {
    const uint8_t *data;
    size_t size;
};

static uint8_t take_byte(struct input *input) { return input->size ? (input->size--, *input->data++) : 0; }

static struct gguf_string take_text(struct input *input)
{
    size_t length = take_byte(input);
    length = length < input->size ? length : input->size;
    struct gguf_string text = { (const char *)input->data, length };
    input->data += length;
    input->size -= length;
    return text;
}

/* ---- A file in memory, written without gguf_writer: that one syncs to disk -------------------------------------------------- */

struct file {
    uint8_t bytes[1 << 15];
    size_t size;
};

static void put(struct file *file, const void *data, size_t size)
{
    check(size <= sizeof file->bytes - file->size);
    memcpy(file->bytes + file->size, data, size);
    file->size += size;
}
static void put_u32(struct file *file, uint32_t value) { put(file, &value, 4); }
static void put_u64(struct file *file, uint64_t value) { put(file, &value, 8); }
static void put_text(struct file *file, struct gguf_string text)
{
    put_u64(file, text.length);
    put(file, text.data, text.length);
}
static void put_key(struct file *file, const char *key, uint32_t type)
{
    put_text(file, (struct gguf_string){ key, strlen(key) });
    put_u32(file, type);
}
static void put_array(struct file *file, const char *key, uint32_t element, uint64_t count)
{
    put_key(file, key, GGUF_ARRAY);
    put_u32(file, element);
    put_u64(file, count);
}

/* The 256 bytes in the vocabulary's alphabet, then what the input adds. */
static void write_vocabulary(struct file *file, struct input *input, bool marks_are_letters)
{
    uint8_t types[256 + 31];
    put(file, "GGUF", 4);
    put_u32(file, 3);
    put_u64(file, 0);
    put_u64(file, 6);
    put_key(file, "tokenizer.ggml.model", GGUF_STRING);
    put_text(file, (struct gguf_string){ "gpt2", 4 });
    put_key(file, "tokenizer.ggml.pre", GGUF_STRING);
    put_text(file, marks_are_letters ? (struct gguf_string){ "qwen35", 6 } : (struct gguf_string){ "qwen2", 5 });
    int n_added = take_byte(input) % 32, n_hidden = 0;
    put_array(file, "tokenizer.ggml.tokens", GGUF_STRING, 256 + (uint64_t)n_added);
    for (int b = 0; b < 256; b++) {
        bool visible = (b > 0x20 && b < 0x7f) || (b > 0xa0 && b != 0xad);
        int c = visible ? b : 0x100 + n_hidden++;
        char text[2] = { (char)(c < 0x80 ? c : 0xc0 | c >> 6), (char)(0x80 | (c & 0x3f)) };
        put_text(file, (struct gguf_string){ text, c < 0x80 ? 1 : 2 });
        types[b] = TOKEN_NORMAL;
    }
    for (int i = 0; i < n_added; i++) {
        types[256 + i] = take_byte(input) % 8;
        put_text(file, take_text(input));
    }
    put_array(file, "tokenizer.ggml.token_type", GGUF_U8, 256 + (uint64_t)n_added);
    put(file, types, 256 + (size_t)n_added);
    int n_merges = take_byte(input) % 32;
    put_array(file, "tokenizer.ggml.merges", GGUF_STRING, (uint64_t)n_merges);
    for (int i = 0; i < n_merges; i++)
        put_text(file, take_text(input));
    put_key(file, "tokenizer.ggml.eos_token_id", GGUF_U32);
    put_u32(file, 256);
}

static struct tokenizer *create(struct input *input)
{
    static struct file bytes;
    static int file = -1;
    static char path[64];
    if (file < 0) {
        file = memfd_create("fuzz_tokenizer", MFD_CLOEXEC);
        check(file >= 0);
        snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    }
    bytes.size = 0;
    bool marks_are_letters = take_byte(input) & 1;
    write_vocabulary(&bytes, input, marks_are_letters);
    check(ftruncate(file, 0) == 0 && pwrite(file, bytes.bytes, bytes.size, 0) == (ssize_t)bytes.size);

    struct gguf *gguf;
    struct tokenizer *tokenizer;
    struct strata_error error = { 0 };
    check(gguf_open_single(&gguf, path, &error) == 0);
    int code = tokenizer_create(&tokenizer, gguf, &error);
    gguf_close(gguf);
    check(code == 0 ? tokenizer != NULL : !tokenizer && error.code == code && error.text[0]);
    return tokenizer;
}

static void check_text(const struct tokenizer *tokenizer, const char *text, size_t length, bool parse_special)
{
    struct strata_error error = { 0 };
    int32_t *ids;
    char *decoded;
    int64_t n = tokenizer_encode(tokenizer, text, length, parse_special, &ids, &error);
    check(n >= 0);
    for (int64_t i = 0; i < n; i++) {
        enum token_type type = tokenizer_type(tokenizer, ids[i]);
        check(type != TOKEN_UNUSED && type != TOKEN_UNKNOWN && (parse_special || type != TOKEN_CONTROL));
    }
    int64_t n_decoded = tokenizer_decode(tokenizer, ids, (size_t)n, true, &decoded, &error);
    check(n_decoded >= 0);
    bool is_ascii = true;
    for (size_t i = 0; i < length; i++)
        is_ascii = is_ascii && (uint8_t)text[i] < 0x80;
    check(!is_ascii || ((size_t)n_decoded == length && memcmp(decoded, text, length) == 0));
    for (int64_t at = 0, step; at < n_decoded; at += step)
        check((step = utf8_look(decoded + at, (size_t)(n_decoded - at))) > 0);
    free(decoded);
    free(ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input input = { data, size };
    struct tokenizer *tokenizer = create(&input);
    if (!tokenizer)
        return 0;
    check_text(tokenizer, (const char *)input.data, input.size, false);
    check_text(tokenizer, (const char *)input.data, input.size, true);
    tokenizer_destroy(tokenizer);
    return 0;
}
