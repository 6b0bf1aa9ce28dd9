/* test_gguf.c - the container: what is written comes back, and every way a file can be broken has its sentence. */
#include "gguf/gguf.h"

#include <dirent.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

/* ---- A directory of its own, emptied after every test ---------------------------------------------------------------------- */

static char directory[256];

static const char *in_directory(const char *name)
{
    static char paths[4][1024];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", directory, name);
    return path;
}

/* Calls `visit` for every file of the directory, returns their number. */
static int each_file(void (*visit)(const char *path))
{
    DIR *list = opendir(directory);
    assert_non_null(list);
    int count = 0;
    for (struct dirent *entry; (entry = readdir(list));) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
            continue;
        if (visit)
            visit(in_directory(entry->d_name));
        count++;
    }
    closedir(list);
    return count;
}

static void remove_file(const char *path) { unlink(path); }

/* The lowest free descriptor: the same before and after a test that closed what it opened. */
static int free_descriptor(void)
{
    int fd = open("/dev/null", O_RDONLY);
    close(fd);
    return fd;
}

static int descriptor_before;

static int make_directory(void **state)
{
    descriptor_before = free_descriptor();
    const char *base = getenv("TMPDIR");
    snprintf(directory, sizeof directory, "%s/strata-gguf-XXXXXX", base ? base : "/tmp");
    return mkdtemp(directory) ? 0 : -1;
}

static int remove_directory(void **state)
{
    each_file(remove_file);
    if (free_descriptor() != descriptor_before) {
        print_error("a descriptor was left open\n");
        return -1;
    }
    return rmdir(directory);
}

/* ---- Files made by hand ---------------------------------------------------------------------------------------------------- */

struct image {
    uint8_t data[8192];
    size_t size;
};

static void add(struct image *image, const void *data, size_t size)
{
    assert_true(image->size + size <= sizeof image->data);
    memcpy(image->data + image->size, data, size);
    image->size += size;
}

static void add_u8(struct image *image, uint8_t value) { add(image, &value, sizeof value); }
static void add_u32(struct image *image, uint32_t value) { add(image, &value, sizeof value); }
static void add_u64(struct image *image, uint64_t value) { add(image, &value, sizeof value); }

static void add_string(struct image *image, const char *text)
{
    add_u64(image, strlen(text));
    add(image, text, strlen(text));
}

static void add_head(struct image *image, uint32_t version, uint64_t tensors, uint64_t keys)
{
    image->size = 0;
    add(image, "GGUF", 4);
    add_u32(image, version);
    add_u64(image, tensors);
    add_u64(image, keys);
}

static void add_key_u32(struct image *image, const char *key, uint32_t value)
{
    add_string(image, key);
    add_u32(image, GGUF_U32);
    add_u32(image, value);
}

static void add_tensor(struct image *image, const char *name, uint32_t n_dims, const int64_t *dims, uint32_t type, uint64_t offset)
{
    add_string(image, name);
    add_u32(image, n_dims);
    for (uint32_t i = 0; i < n_dims; i++)
        add_u64(image, (uint64_t)dims[i]);
    add_u32(image, type);
    add_u64(image, offset);
}

static void add_zeros(struct image *image, size_t size)
{
    while (size--)
        add_u8(image, 0);
}

static void add_padding(struct image *image) { add_zeros(image, (32 - image->size % 32) % 32); }

static const char *save(const char *name, const void *data, size_t size)
{
    const char *path = in_directory(name);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
    return path;
}

static void assert_says(const struct strata_error *error, const char *phrase)
{
    if (!strstr(error->text, phrase))
        fail_msg("the sentence was \"%s\", wanted \"%s\" in it", error->text, phrase);
}

/* The image must be refused with the path, the code and the phrase. */
static void assert_refused(const struct image *image, int code, const char *phrase)
{
    struct strata_error error = { 0 };
    struct gguf *gguf = (struct gguf *)image; /* must become NULL */
    const char *path = save("refused.gguf", image->data, image->size);
    int got = gguf_open_single(&gguf, path, &error);
    if (got == 0)
        fail_msg("the file was opened, wanted \"%s\"", phrase);
    assert_null(gguf);
    assert_says(&error, phrase);
    assert_says(&error, path);
    assert_int_equal(got, code);
    assert_int_equal(error.code, code);
}

static struct gguf *open_image(const struct image *image)
{
    struct strata_error error = { 0 };
    struct gguf *gguf = NULL;
    if (gguf_open_single(&gguf, save("image.gguf", image->data, image->size), &error) != 0)
        fail_msg("%s", error.text);
    return gguf;
}

static struct gguf *open_path(const char *path)
{
    struct strata_error error = { 0 };
    struct gguf *gguf = NULL;
    if (gguf_open(&gguf, path, &error) != 0)
        fail_msg("%s", error.text);
    return gguf;
}

static const int64_t one_row[] = { 32 };

/* ---- Round trips ----------------------------------------------------------------------------------------------------------- */

static struct gguf_writer *create(const char *path)
{
    struct strata_error error = { 0 };
    struct gguf_writer *writer = NULL;
    if (gguf_writer_create(&writer, path, &error) != 0)
        fail_msg("%s", error.text);
    return writer;
}

static void begin(struct gguf_writer *writer)
{
    struct strata_error error = { 0 };
    if (gguf_writer_begin_data(writer, &error) != 0)
        fail_msg("%s", error.text);
}

static void put_data(struct gguf_writer *writer, const void *data, size_t size)
{
    struct strata_error error = { 0 };
    if (gguf_write(writer, data, size, &error) != 0)
        fail_msg("%s", error.text);
}

static void finish(struct gguf_writer *writer)
{
    struct strata_error error = { 0 };
    if (gguf_writer_finish(writer, &error) != 0)
        fail_msg("%s", error.text);
    gguf_writer_destroy(writer);
}

static void scalars_of_every_writer_call_come_back(void **state)
{
    struct gguf_writer *writer = create(in_directory("scalars.gguf"));
    gguf_put_u32(writer, "u32", UINT32_MAX);
    gguf_put_u64(writer, "u64", UINT64_MAX);
    gguf_put_i32(writer, "i32", 7);
    gguf_put_f32(writer, "f32", 0.1f);
    gguf_put_bool(writer, "yes", true);
    gguf_put_bool(writer, "no", false);
    gguf_put_string(writer, "string",
                    "Gr\xc3\xbc\xc3\x9f"
                    "e");
    gguf_put_string(writer, "empty", "");
    gguf_put_string_n(writer, "zeros", "a\0b", 3);
    begin(writer);
    finish(writer);

    struct gguf *gguf = open_path(in_directory("scalars.gguf"));
    assert_int_equal(gguf->version, 3);
    assert_int_equal(gguf->n_entries, 9);
    assert_int_equal(gguf->n_tensors, 0);
    uint32_t u32 = 0;
    uint64_t u64 = 0;
    float f32 = 0;
    bool yes = false, no = true;
    struct gguf_string string;
    struct strata_error error;
    assert_int_equal(gguf_get_u32(gguf, "u32", &u32, &error), 1);
    assert_true(u32 == UINT32_MAX);
    assert_int_equal(gguf_value_u64(gguf_find(gguf, "u64"), "u64", 0, &u64, &error), 0);
    assert_true(u64 == UINT64_MAX);
    assert_int_equal(gguf_get_u32(gguf, "i32", &u32, &error), 1);
    assert_int_equal(u32, 7);
    assert_int_equal(gguf_get_f32(gguf, "f32", &f32, &error), 1);
    assert_true(f32 == 0.1f);
    assert_int_equal(gguf_get_bool(gguf, "yes", &yes, &error), 1);
    assert_true(yes);
    assert_int_equal(gguf_get_bool(gguf, "no", &no, &error), 1);
    assert_false(no);
    assert_int_equal(gguf_get_string(gguf, "string", &string, &error), 1);
    assert_string_equal(string.data, "Gr\xc3\xbc\xc3\x9f"
                                     "e");
    assert_int_equal(gguf_get_string(gguf, "empty", &string, &error), 1);
    assert_int_equal(string.length, 0);
    assert_string_equal(string.data, "");
    assert_int_equal(gguf_get_string(gguf, "zeros", &string, &error), 1);
    assert_int_equal(string.length, 3);
    assert_memory_equal(string.data, "a\0b", 4);
    gguf_close(gguf);
}

static void arrays_of_every_type_come_back(void **state)
{
    static const uint8_t size[] = { 1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8 };
    uint8_t numbers[5 * 8];
    for (size_t i = 0; i < sizeof numbers; i++)
        numbers[i] = (uint8_t)(i % 2); /* 0 and 1, so that bools are bools */
    const struct gguf_string strings[] = { { "one", 3 }, { "", 0 }, { "a\0b", 3 } };
    struct gguf_writer *writer = create(in_directory("arrays.gguf"));
    char key[32];
    for (int type = GGUF_U8; type <= GGUF_F64; type++) {
        snprintf(key, sizeof key, "array.%d", type);
        if (size[type])
            gguf_put_array(writer, key, (enum gguf_type)type, numbers, 5);
    }
    gguf_put_string_array(writer, "strings", strings, 3);
    gguf_put_string_array(writer, "no strings", NULL, 0);
    gguf_put_array(writer, "no numbers", GGUF_F32, NULL, 0);
    begin(writer);
    finish(writer);

    struct gguf *gguf = open_path(in_directory("arrays.gguf"));
    assert_int_equal(gguf->n_entries, 11 + 3);
    for (int type = GGUF_U8; type <= GGUF_F64; type++) {
        snprintf(key, sizeof key, "array.%d", type);
        if (!size[type])
            continue;
        const struct gguf_value *value = gguf_find(gguf, key);
        assert_non_null(value);
        assert_int_equal(value->type, GGUF_ARRAY);
        assert_int_equal(value->element, type);
        assert_int_equal(value->count, 5);
        assert_memory_equal(value->data, numbers, 5 * (size_t)size[type]);
    }
    const struct gguf_value *value = gguf_find(gguf, "strings");
    assert_int_equal(value->element, GGUF_STRING);
    assert_int_equal(value->count, 3);
    const struct gguf_string *got = value->data;
    for (int i = 0; i < 3; i++) {
        assert_int_equal(got[i].length, strings[i].length);
        assert_memory_equal(got[i].data, strings[i].data, strings[i].length + 1);
    }
    assert_int_equal(gguf_find(gguf, "no strings")->count, 0);
    assert_int_equal(gguf_find(gguf, "no numbers")->element, GGUF_F32);
    gguf_close(gguf);
}

static void scalars_of_every_type_are_read(void **state)
{
    static const uint8_t size[] = { 1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8 };
    static const uint8_t ones[8] = { 1 };
    struct image image;
    add_head(&image, 2, 0, 11);
    char key[32];
    for (uint32_t type = 0; type <= GGUF_F64; type++)
        if (size[type]) {
            snprintf(key, sizeof key, "scalar.%u", type);
            add_string(&image, key);
            add_u32(&image, type);
            add(&image, ones, size[type]);
        }
    struct gguf *gguf = open_image(&image);
    assert_int_equal(gguf->version, 2);
    for (uint32_t type = 0; type <= GGUF_F64; type++)
        if (size[type]) {
            snprintf(key, sizeof key, "scalar.%u", type);
            const struct gguf_value *value = gguf_find(gguf, key);
            assert_non_null(value);
            assert_int_equal(value->type, type);
            assert_int_equal(value->count, 1);
            assert_memory_equal(value->data, ones, size[type]);
        }
    gguf_close(gguf);
}

static void copied_entries_make_the_same_file(void **state)
{
    static const uint32_t numbers[] = { 11, 11, 10, 0 };
    const struct gguf_string strings[] = { { "a", 1 }, { "bc", 2 } };
    struct gguf_writer *writer = create(in_directory("first.gguf"));
    gguf_put_string(writer, "general.architecture", "qwen4exp");
    gguf_put_u32(writer, "general.alignment", 64);
    gguf_put_array(writer, "numbers", GGUF_U32, numbers, 4);
    gguf_put_string_array(writer, "strings", strings, 2);
    gguf_put_bool(writer, "flag", true);
    begin(writer);
    finish(writer);

    struct gguf *gguf = open_path(in_directory("first.gguf"));
    assert_int_equal(gguf->alignment, 64);
    writer = create(in_directory("second.gguf"));
    for (uint64_t i = 0; i < gguf->n_entries; i++)
        gguf_put_entry(writer, &gguf->entries[i]);
    begin(writer);
    finish(writer);
    gguf_close(gguf);

    uint8_t first[1024], second[1024];
    FILE *a = fopen(in_directory("first.gguf"), "rb"), *b = fopen(in_directory("second.gguf"), "rb");
    size_t a_size = fread(first, 1, sizeof first, a), b_size = fread(second, 1, sizeof second, b);
    fclose(a);
    fclose(b);
    assert_int_equal(a_size, b_size);
    assert_memory_equal(first, second, a_size);
}

static void tensors_come_back_with_shapes_and_bytes(void **state)
{
    static const struct {
        const char *name, *format;
        int n_dims;
        int64_t dims[4];
        uint64_t bytes;
    } cases[] = {
        { "token_embd.weight", "Q8_0", 2, { 64, 3 }, 3 * 2 * 34 },
        { "a", "F32", 1, { 5 }, 20 },
        { "b", "F16", 3, { 3, 2, 2 }, 24 },
        { "experts", "Q2_0", 4, { 128, 2, 3, 2 }, 12 * 36 },
        { "c", "Q4_K", 2, { 256, 2 }, 288 },
    };
    enum { CASES = sizeof cases / sizeof cases[0] };
    struct gguf_writer *writer = create(in_directory("tensors.gguf"));
    gguf_put_u32(writer, "general.alignment", 128);
    for (int i = 0; i < CASES; i++)
        gguf_put_tensor(writer, cases[i].name, quant_format_named(cases[i].format), cases[i].n_dims, cases[i].dims);
    begin(writer);
    uint8_t data[CASES][512];
    for (int i = 0; i < CASES; i++) {
        for (int k = 0; k < 512; k++)
            data[i][k] = (uint8_t)(k * 7 + i * 31);
        put_data(writer, data[i], 7); /* in uneven pieces */
        put_data(writer, data[i] + 7, cases[i].bytes - 7);
    }
    finish(writer);

    struct gguf *gguf = open_path(in_directory("tensors.gguf"));
    assert_int_equal(gguf->n_files, 1);
    assert_int_equal(gguf->n_tensors, CASES);
    assert_int_equal(gguf->alignment, 128);
    for (int i = 0; i < CASES; i++) {
        const struct gguf_tensor *tensor = gguf_tensor_find(gguf, cases[i].name);
        assert_ptr_equal(tensor, &gguf->tensors[i]);
        assert_string_equal(tensor->name, cases[i].name);
        assert_ptr_equal(tensor->format, quant_format_named(cases[i].format));
        assert_int_equal(tensor->type, tensor->format->type);
        assert_int_equal(tensor->n_dims, cases[i].n_dims);
        for (int k = 0; k < 4; k++)
            assert_int_equal(tensor->dims[k], k < cases[i].n_dims ? cases[i].dims[k] : 1);
        assert_int_equal(tensor->bytes, cases[i].bytes);
        assert_int_equal(tensor->offset % 128, 0);
        uint8_t back[512];
        struct strata_error error;
        assert_int_equal(gguf_read(gguf, tensor, 0, back, tensor->bytes, &error), 0);
        assert_memory_equal(back, data[i], tensor->bytes);
        assert_int_equal(gguf_read(gguf, tensor, 9, back, 4, &error), 0);
        assert_memory_equal(back, data[i] + 9, 4);
    }
    gguf_close(gguf);
}

static void names_longer_than_a_read_window_and_many_strings_come_back(void **state)
{
    enum { COUNT = 100000, LONG = 3000000 };
    char *text = malloc(LONG);
    struct gguf_string *strings = malloc(COUNT * sizeof *strings);
    char(*words)[12] = malloc(COUNT * sizeof *words);
    assert_true(text && strings && words);
    for (int i = 0; i < LONG; i++)
        text[i] = (char)('a' + i % 26);
    for (int i = 0; i < COUNT; i++)
        strings[i] = (struct gguf_string){ words[i], (uint64_t)snprintf(words[i], sizeof words[i], "w%d", i) };
    struct gguf_writer *writer = create(in_directory("large.gguf"));
    gguf_put_string_array(writer, "words", strings, COUNT);
    gguf_put_string_n(writer, "long", text, LONG);
    gguf_put_array(writer, "numbers", GGUF_U16, text, LONG / 2);
    gguf_put_u32(writer, "last", 5);
    begin(writer);
    finish(writer);

    struct gguf *gguf = open_path(in_directory("large.gguf"));
    const struct gguf_string *got = gguf_find(gguf, "words")->data;
    for (int i = 0; i < COUNT; i++)
        assert_string_equal(got[i].data, words[i]);
    struct gguf_string back;
    struct strata_error error;
    assert_int_equal(gguf_get_string(gguf, "long", &back, &error), 1);
    assert_int_equal(back.length, LONG);
    assert_memory_equal(back.data, text, LONG);
    assert_int_equal(back.data[LONG], 0);
    assert_memory_equal(gguf_find(gguf, "numbers")->data, text, LONG);
    uint32_t last = 0;
    assert_int_equal(gguf_get_u32(gguf, "last", &last, &error), 1);
    assert_int_equal(last, 5);
    gguf_close(gguf);
    free(text);
    free(strings);
    free(words);
}

/* ---- Reading keys ---------------------------------------------------------------------------------------------------------- */

static struct gguf *open_keys(void)
{
    static const int16_t shorts[] = { 3, -4, 5 };
    static const int8_t minus[] = { -1 };
    static const double doubles[] = { 0.5 };
    struct gguf_writer *writer = create(in_directory("keys.gguf"));
    gguf_put_u32(writer, "small", 3);
    gguf_put_u64(writer, "big", UINT64_C(1) << 32);
    gguf_put_i32(writer, "negative", -2);
    gguf_put_f32(writer, "float", 1.5f);
    gguf_put_string(writer, "text", "hello");
    gguf_put_array(writer, "shorts", GGUF_I16, shorts, 3);
    gguf_put_array(writer, "bytes", GGUF_I8, minus, 1);
    gguf_put_array(writer, "doubles", GGUF_F64, doubles, 1);
    begin(writer);
    finish(writer);
    return open_path(in_directory("keys.gguf"));
}

static void an_absent_key_leaves_the_default(void **state)
{
    struct gguf *gguf = open_keys();
    uint32_t u32 = 42;
    float f32 = 2;
    bool flag = true;
    struct gguf_string string = { "default", 7 };
    struct strata_error error = { .text = "untouched" };
    assert_int_equal(gguf_get_u32(gguf, "absent", &u32, &error), 0);
    assert_int_equal(gguf_get_f32(gguf, "absent", &f32, &error), 0);
    assert_int_equal(gguf_get_bool(gguf, "absent", &flag, &error), 0);
    assert_int_equal(gguf_get_string(gguf, "absent", &string, &error), 0);
    assert_null(gguf_find(gguf, "absent"));
    assert_null(gguf_tensor_find(gguf, "absent"));
    assert_int_equal(u32, 42);
    assert_true(f32 == 2 && flag);
    assert_string_equal(string.data, "default");
    assert_string_equal(error.text, "untouched");
    gguf_close(gguf);
}

static void a_key_of_the_wrong_type_is_a_sentence(void **state)
{
    struct gguf *gguf = open_keys();
    uint32_t u32 = 42;
    float f32;
    bool flag;
    struct gguf_string string;
    struct strata_error error;
    assert_int_equal(gguf_get_u32(gguf, "text", &u32, &error), STRATA_E_FORMAT);
    assert_says(&error, "keys.gguf: key 'text' holds string, wanted an integer");
    assert_int_equal(gguf_get_u32(gguf, "shorts", &u32, &error), STRATA_E_FORMAT);
    assert_says(&error, "key 'shorts' is an array of 3 i16, wanted an integer");
    assert_int_equal(gguf_get_f32(gguf, "small", &f32, &error), STRATA_E_FORMAT);
    assert_says(&error, "key 'small' holds u32, wanted an f32");
    assert_int_equal(gguf_get_bool(gguf, "small", &flag, &error), STRATA_E_FORMAT);
    assert_says(&error, "key 'small' holds u32, wanted a bool");
    assert_int_equal(gguf_get_string(gguf, "float", &string, &error), STRATA_E_FORMAT);
    assert_says(&error, "key 'float' holds f32, wanted a string");
    assert_int_equal(gguf_get_u32(gguf, "text", &u32, NULL), STRATA_E_FORMAT);
    assert_int_equal(u32, 42);
    gguf_close(gguf);
}

static void an_integer_that_does_not_fit_is_a_sentence(void **state)
{
    struct gguf *gguf = open_keys();
    uint32_t u32 = 42;
    uint64_t u64 = 0;
    struct strata_error error;
    assert_int_equal(gguf_get_u32(gguf, "big", &u32, &error), STRATA_E_FORMAT);
    assert_says(&error, "key 'big' is 4294967296, wanted at most 4294967295");
    assert_int_equal(gguf_get_u32(gguf, "negative", &u32, &error), STRATA_E_FORMAT);
    assert_says(&error, "key 'negative' is -2, wanted 0 or more");
    assert_int_equal(gguf_value_u64(gguf_find(gguf, "shorts"), "shorts", 1, &u64, &error), STRATA_E_FORMAT);
    assert_says(&error, "key 'shorts' is -4, wanted 0 or more");
    assert_int_equal(gguf_value_u64(gguf_find(gguf, "bytes"), "bytes", 0, &u64, &error), STRATA_E_FORMAT);
    assert_says(&error, "key 'bytes' is -1, wanted 0 or more");
    assert_int_equal(gguf_value_u64(gguf_find(gguf, "doubles"), "doubles", 0, &u64, &error), STRATA_E_FORMAT);
    assert_says(&error, "key 'doubles' holds f64, wanted an integer");
    assert_int_equal(gguf_value_u64(gguf_find(gguf, "shorts"), "shorts", 2, &u64, &error), 0);
    assert_int_equal(u64, 5);
    assert_int_equal(u32, 42);
    gguf_close(gguf);
}

static void a_double_is_read_as_a_float_only_where_it_fits(void **state)
{
    static const double half = 0.5, huge = 1e300;
    struct image image;
    add_head(&image, 3, 0, 2);
    add_string(&image, "half");
    add_u32(&image, GGUF_F64);
    add(&image, &half, 8);
    add_string(&image, "huge");
    add_u32(&image, GGUF_F64);
    add(&image, &huge, 8);
    struct gguf *gguf = open_image(&image);
    float value = 0;
    struct strata_error error;
    assert_int_equal(gguf_get_f32(gguf, "half", &value, &error), 1);
    assert_true(value == 0.5f);
    assert_int_equal(gguf_get_f32(gguf, "huge", &value, &error), STRATA_E_FORMAT);
    assert_says(&error, "key 'huge' is 1e+300, wanted a number that fits an f32");
    gguf_close(gguf);
}

/* ---- Files that are something else ----------------------------------------------------------------------------------------- */

static void a_bad_magic_shows_the_bytes(void **state)
{
    struct image image = { .data = "GGJT and more bytes of something", .size = 32 };
    assert_refused(&image, STRATA_E_FORMAT, "not a GGUF file: it starts with the bytes 47 47 4a 54, wanted 47 47 55 46 (\"GGUF\")");
}

static void files_often_taken_for_models_are_recognised(void **state)
{
    static const struct {
        const char *text, *phrase;
    } cases[] = {
        { "version https://git-lfs.github.com/spec/v1\n", "this is a Git LFS pointer, not the model itself" },
        { "<!DOCTYPE html><html>", "this is a web page, not a model" },
        { "tjgg\3\0\0\0", "this is a GGML file from before GGUF" },
        { "PK\3\4 and so on", "this is a zip archive" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct image image = { .size = strlen(cases[i].text) };
        memcpy(image.data, cases[i].text, image.size);
        assert_refused(&image, STRATA_E_FORMAT, cases[i].phrase);
    }
}

static void an_empty_file_is_called_empty(void **state)
{
    struct image image = { .size = 0 };
    assert_refused(&image, STRATA_E_FORMAT, "the file is empty");
}

static void version_1_is_refused(void **state)
{
    struct image image;
    add_head(&image, 1, 0, 0);
    assert_refused(&image, STRATA_E_UNSUPPORTED, "GGUF version 1, wanted 2 or 3");
}

static void version_4_is_refused(void **state)
{
    struct image image;
    add_head(&image, 4, 0, 0);
    assert_refused(&image, STRATA_E_UNSUPPORTED, "GGUF version 4, wanted 2 or 3");
}

static void a_big_endian_file_is_recognised(void **state)
{
    struct image image;
    add_head(&image, 0x03000000, 0, 0);
    assert_refused(&image, STRATA_E_UNSUPPORTED, "a big-endian GGUF file");
}

static void a_directory_is_called_a_directory(void **state)
{
    struct gguf *gguf;
    struct strata_error error;
    assert_int_equal(gguf_open(&gguf, directory, &error), STRATA_E_ARGUMENT);
    assert_says(&error, "this is a directory, wanted a GGUF file");
}

static void a_device_is_not_read(void **state)
{
    struct gguf *gguf;
    struct strata_error error;
    assert_int_equal(gguf_open(&gguf, "/dev/zero", &error), STRATA_E_ARGUMENT);
    assert_says(&error, "/dev/zero: this is not a regular file");
}

static void a_pipe_does_not_block(void **state)
{
    struct gguf *gguf;
    struct strata_error error;
    assert_int_equal(mkfifo(in_directory("pipe"), 0600), 0);
    assert_int_equal(gguf_open(&gguf, in_directory("pipe"), &error), STRATA_E_ARGUMENT);
    assert_says(&error, "not a regular file");
}

static void a_file_that_does_not_exist_is_named(void **state)
{
    struct gguf *gguf;
    struct strata_error error;
    assert_int_equal(gguf_open(&gguf, in_directory("nothing.gguf"), &error), STRATA_E_IO);
    assert_says(&error, "nothing.gguf: cannot open: No such file or directory");
}

/* ---- Broken headers -------------------------------------------------------------------------------------------------------- */

static void a_key_count_beyond_the_file_is_refused(void **state)
{
    struct image image;
    add_head(&image, 3, 0, UINT64_MAX);
    add_zeros(&image, 40);
    assert_refused(&image, STRATA_E_FORMAT,
                   "the count of keys is 18446744073709551615, which cannot fit in the 40 bytes that follow");
}

static void a_tensor_count_beyond_the_file_is_refused(void **state)
{
    struct image image;
    add_head(&image, 3, 1000, 0);
    add_zeros(&image, 40);
    assert_refused(&image, STRATA_E_FORMAT, "the count of tensors is 1000, which cannot fit in the 40 bytes that follow");
}

static void a_key_longer_than_the_file_is_refused(void **state)
{
    struct image image;
    add_head(&image, 3, 0, 1);
    add_u64(&image, UINT64_MAX - 3);
    add_zeros(&image, 20);
    assert_refused(&image, STRATA_E_FORMAT,
                   "key 1 of 1: the key needs 18446744073709551612 bytes, but the file has only 20 more (download cut short?)");
}

static void a_string_longer_than_the_file_is_refused(void **state)
{
    struct image image;
    add_head(&image, 3, 0, 1);
    add_string(&image, "general.name");
    add_u32(&image, GGUF_STRING);
    add_u64(&image, 100);
    add_zeros(&image, 99);
    assert_refused(&image, STRATA_E_FORMAT, "key 1 of 1 ('general.name'): a string needs 100 bytes, but the file has only 99 more");
}

static void an_array_longer_than_the_file_is_refused(void **state)
{
    static const enum gguf_type elements[] = { GGUF_U8, GGUF_F64, GGUF_STRING };
    for (int i = 0; i < 3; i++) {
        struct image image;
        add_head(&image, 3, 0, 1);
        add_string(&image, "array");
        add_u32(&image, GGUF_ARRAY);
        add_u32(&image, elements[i]);
        add_u64(&image, UINT64_C(1) << 61); /* times 8 is 0 in 64 bits */
        add_zeros(&image, 64);
        assert_refused(&image, STRATA_E_FORMAT, "key 1 of 1 ('array'): the count of");
        assert_refused(&image, STRATA_E_FORMAT, "is 2305843009213693952, which cannot fit in the 64 bytes that follow");
    }
}

static void an_empty_key_is_refused(void **state)
{
    struct image image;
    add_head(&image, 3, 0, 1);
    add_key_u32(&image, "", 1);
    assert_refused(&image, STRATA_E_FORMAT, "key 1 of 1: the key is empty");
}

static void a_key_that_occurs_twice_is_refused(void **state)
{
    struct image image;
    add_head(&image, 3, 0, 3);
    add_key_u32(&image, "twin", 1);
    add_key_u32(&image, "other", 1);
    add_key_u32(&image, "twin", 1);
    assert_refused(&image, STRATA_E_FORMAT, "key 'twin' occurs twice (keys 1 and 3 of 3)");
}

static void an_unknown_value_type_is_refused(void **state)
{
    struct image image;
    add_head(&image, 3, 0, 1);
    add_string(&image, "strange");
    add_u32(&image, 13);
    add_u32(&image, 0);
    assert_refused(&image, STRATA_E_FORMAT, "key 1 of 1 ('strange'): the value type is 13, wanted 0 to 12");
}

static void an_unknown_element_type_is_refused(void **state)
{
    struct image image;
    add_head(&image, 3, 0, 1);
    add_string(&image, "strange");
    add_u32(&image, GGUF_ARRAY);
    add_u32(&image, 0x80000001);
    add_u64(&image, 0);
    assert_refused(&image, STRATA_E_FORMAT, "key 1 of 1 ('strange'): the element type is 2147483649, wanted 0 to 12");
}

static void an_array_of_arrays_is_refused(void **state)
{
    struct image image;
    add_head(&image, 3, 0, 1);
    add_string(&image, "nested");
    add_u32(&image, GGUF_ARRAY);
    add_u32(&image, GGUF_ARRAY);
    add_u64(&image, 0);
    assert_refused(&image, STRATA_E_UNSUPPORTED, "key 1 of 1 ('nested'): an array of arrays");
}

static void control_characters_of_a_key_do_not_reach_the_terminal(void **state)
{
    struct image image;
    add_head(&image, 3, 0, 1);
    add_string(&image, "\x1b[31mred");
    add_u32(&image, 13);
    add_u32(&image, 0);
    assert_refused(&image, STRATA_E_FORMAT, "('?[31mred')");
}

static void an_alignment_that_is_no_power_of_two_is_refused(void **state)
{
    static const uint32_t bad[] = { 0, 48, 33 };
    for (int i = 0; i < 3; i++) {
        struct image image;
        char phrase[100];
        add_head(&image, 3, 0, 1);
        add_key_u32(&image, "general.alignment", bad[i]);
        snprintf(phrase, sizeof phrase, "key 'general.alignment' is %u, wanted a power of two", bad[i]);
        assert_refused(&image, STRATA_E_FORMAT, phrase);
    }
}

static void an_alignment_of_another_type_is_refused(void **state)
{
    struct image image;
    add_head(&image, 3, 0, 1);
    add_string(&image, "general.alignment");
    add_u32(&image, GGUF_U64);
    add_u64(&image, 32);
    assert_refused(&image, STRATA_E_FORMAT, "key 'general.alignment' is of type u64, wanted u32");
}

static void a_tensor_name_of_64_bytes_is_refused_and_one_of_63_is_not(void **state)
{
    char name[65];
    memset(name, 'n', sizeof name);
    name[64] = 0;
    struct image image;
    add_head(&image, 3, 1, 0);
    add_tensor(&image, name, 1, one_row, QUANT_F32, 0);
    assert_refused(&image, STRATA_E_FORMAT, "the name has 64 bytes, wanted at most 63");
    add_head(&image, 3, 1, 0);
    add_tensor(&image, name + 1, 1, one_row, QUANT_F32, 0);
    add_padding(&image);
    add_zeros(&image, 128);
    struct gguf *gguf = open_image(&image);
    assert_string_equal(gguf->tensors[0].name, name + 1);
    gguf_close(gguf);
}

static void a_tensor_without_a_name_is_refused(void **state)
{
    struct image image;
    add_head(&image, 3, 1, 0);
    add_tensor(&image, "", 1, one_row, QUANT_F32, 0);
    assert_refused(&image, STRATA_E_FORMAT, "tensor 1 of 1 (''): the name is empty");
}

static void a_tensor_name_with_a_zero_byte_is_refused(void **state)
{
    struct image image;
    add_head(&image, 3, 1, 0);
    add_u64(&image, 3);
    add(&image, "a\0b", 3);
    add_zeros(&image, 40);
    assert_refused(&image, STRATA_E_FORMAT, "the name holds a zero byte");
}

static void a_tensor_that_occurs_twice_is_refused(void **state)
{
    struct image image;
    add_head(&image, 3, 2, 0);
    add_tensor(&image, "twin", 1, one_row, QUANT_F32, 0);
    add_tensor(&image, "twin", 1, one_row, QUANT_F32, 128);
    add_padding(&image);
    add_zeros(&image, 256);
    assert_refused(&image, STRATA_E_FORMAT, "tensor 'twin' occurs twice (tensors 1 and 2 of 2)");
}

static void five_dimensions_are_refused(void **state)
{
    static const int64_t dims[] = { 32, 1, 1, 1, 1 };
    struct image image;
    add_head(&image, 3, 1, 0);
    add_tensor(&image, "deep", 5, dims, QUANT_F32, 0);
    assert_refused(&image, STRATA_E_FORMAT, "tensor 1 of 1 ('deep'): 5 dimensions, wanted at most 4");
}

static void a_dimension_below_one_is_refused(void **state)
{
    static const int64_t negative[] = { 32, -7 }, zero[] = { 0, 1 };
    struct image image;
    add_head(&image, 3, 1, 0);
    add_tensor(&image, "minus", 2, negative, QUANT_F32, 0);
    assert_refused(&image, STRATA_E_FORMAT, "tensor 1 of 1 ('minus'): dimension 1 is -7, wanted at least 1");
    add_head(&image, 3, 1, 0);
    add_tensor(&image, "zero", 2, zero, QUANT_F32, 0);
    assert_refused(&image, STRATA_E_FORMAT, "tensor 1 of 1 ('zero'): dimension 0 is 0, wanted at least 1");
}

static void overflowing_dimensions_are_refused(void **state)
{
    static const int64_t product[] = { 1 << 20, 1 << 20, 1 << 20, 1 << 20 }; /* 2^80 */
    static const int64_t bytes[] = { INT64_MAX };                            /* times 4 */
    struct image image;
    add_head(&image, 3, 1, 0);
    add_tensor(&image, "vast", 4, product, QUANT_F32, 0);
    assert_refused(&image, STRATA_E_FORMAT,
                   "tensor 1 of 1 ('vast'): 1048576 x 1048576 x 1048576 x 1048576 weights are more than a file can hold");
    add_head(&image, 3, 1, 0);
    add_tensor(&image, "vast", 1, bytes, QUANT_F32, 0);
    assert_refused(&image, STRATA_E_FORMAT, "weights are more than a file can hold");
}

static void offsets_that_overflow_together_are_refused(void **state)
{
    static const int64_t dims[] = { INT64_C(1) << 59 }; /* 2^61 bytes each */
    struct image image;
    add_head(&image, 3, 4, 0);
    for (uint64_t i = 0; i < 4; i++)
        add_tensor(&image, (const char *[]){ "a", "b", "c", "d" }[i], 1, dims, QUANT_F32, i << 61);
    assert_refused(&image, STRATA_E_FORMAT, "are more than a file can hold");
}

static void an_unknown_tensor_type_is_refused_by_number(void **state)
{
    struct image image;
    add_head(&image, 3, 1, 0);
    add_tensor(&image, "future", 1, one_row, 77, 0);
    assert_refused(&image, STRATA_E_UNSUPPORTED, "tensor 1 of 1 ('future'): type id 77 is unknown");
}

static void a_withdrawn_tensor_type_is_refused_by_name(void **state)
{
    struct image image;
    add_head(&image, 3, 1, 0);
    add_tensor(&image, "past", 1, one_row, 31, 0);
    assert_refused(&image, STRATA_E_UNSUPPORTED, "tensor 1 of 1 ('past'): type Q4_0_4_4 (id 31) was withdrawn from GGUF");
}

static void types_that_strata_cannot_decode_still_open(void **state)
{
    static const struct {
        uint32_t type, bytes;
    } cases[] = { { 9, 288 },   { 15, 292 },  { 24, 256 }, { 25, 512 }, { 26, 1024 },
                  { 27, 2048 }, { 28, 2048 }, { 34, 54 },  { 35, 66 } };
    static const int64_t dims[] = { 256 };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct image image;
        add_head(&image, 3, 1, 0);
        add_tensor(&image, "foreign", 1, dims, cases[i].type, 0);
        add_padding(&image);
        add_zeros(&image, cases[i].bytes);
        struct gguf *gguf = open_image(&image);
        assert_null(gguf->tensors[0].format);
        assert_int_equal(gguf->tensors[0].type, cases[i].type);
        assert_int_equal(gguf->tensors[0].bytes, cases[i].bytes);
        gguf_close(gguf);
    }
}

static void every_type_with_a_name_has_a_size(void **state)
{
    static const int64_t dims[] = { 256 };
    for (uint32_t type = 0; type < 100; type++) {
        if (!quant_type_name(type))
            continue;
        struct image image;
        add_head(&image, 3, 1, 0);
        add_tensor(&image, "any", 1, dims, type, 0);
        add_padding(&image);
        add_zeros(&image, 2048);
        gguf_close(open_image(&image));
    }
}

static void a_row_that_is_no_multiple_of_the_block_is_refused(void **state)
{
    static const int64_t dims[] = { 630, 2 };
    struct image image;
    add_head(&image, 3, 1, 0);
    add_tensor(&image, "blk.3.ffn_down_exps.weight", 2, dims, QUANT_Q8_0, 0);
    assert_refused(&image, STRATA_E_FORMAT,
                   "tensor 1 of 1 ('blk.3.ffn_down_exps.weight'): row width 630 is not a multiple of 32, the block of Q8_0");
}

static void an_offset_that_is_not_the_running_sum_is_refused(void **state)
{
    struct image image;
    add_head(&image, 3, 2, 0);
    add_tensor(&image, "a", 1, one_row, QUANT_Q8_0, 0);  /* 34 bytes */
    add_tensor(&image, "b", 1, one_row, QUANT_Q8_0, 32); /* overlaps the first */
    add_padding(&image);
    add_zeros(&image, 256);
    assert_refused(&image, STRATA_E_FORMAT,
                   "tensor 2 of 2 ('b'): its data is at offset 32, wanted 64 (the tensors before it, padded to 32)");
}

static void data_past_the_end_of_the_file_is_refused(void **state)
{
    struct image image;
    add_head(&image, 3, 3, 0);
    add_tensor(&image, "a", 1, one_row, QUANT_F32, 0);
    add_tensor(&image, "b", 1, one_row, QUANT_F32, 128);
    add_tensor(&image, "c", 1, one_row, QUANT_F32, 256);
    add_padding(&image);
    size_t start = image.size;
    add_zeros(&image, 384);
    gguf_close(open_image(&image));
    image.size = start + 255;
    char phrase[200];
    snprintf(phrase, sizeof phrase,
             "data past end of file: tensor 'b' ends at byte %zu and the last one at %zu, but the file has %zu bytes (download cut "
             "short?)",
             start + 256, start + 384, start + 255);
    assert_refused(&image, STRATA_E_FORMAT, phrase);
}

/* A header with every kind of item in it. */
static size_t rich_header(struct image *image)
{
    static const int64_t dims[] = { 64, 2, 3, 1 };
    add_head(image, 3, 2, 5);
    add_string(image, "general.architecture");
    add_u32(image, GGUF_STRING);
    add_string(image, "qwen4exp");
    add_key_u32(image, "general.alignment", 32);
    add_string(image, "flag");
    add_u32(image, GGUF_BOOL);
    add_u8(image, 1);
    add_string(image, "numbers");
    add_u32(image, GGUF_ARRAY);
    add_u32(image, GGUF_U64);
    add_u64(image, 3);
    add_zeros(image, 24);
    add_string(image, "strings");
    add_u32(image, GGUF_ARRAY);
    add_u32(image, GGUF_STRING);
    add_u64(image, 2);
    add_string(image, "one");
    add_string(image, "two");
    add_tensor(image, "a", 1, one_row, QUANT_F32, 0);
    add_tensor(image, "b", 4, dims, QUANT_Q8_0, 128);
    size_t header = image->size;
    add_padding(image);
    add_zeros(image, 128 + 6 * 68);
    return header;
}

static void a_file_cut_at_any_byte_is_refused(void **state)
{
    struct image image;
    rich_header(&image);
    size_t whole = image.size;
    gguf_close(open_image(&image));
    for (size_t size = 0; size < whole; size++) {
        struct gguf *gguf;
        struct strata_error error = { 0 };
        const char *path = save("cut.gguf", image.data, size);
        if (gguf_open_single(&gguf, path, &error) == 0)
            fail_msg("opened with %zu of %zu bytes", size, whole);
        assert_null(gguf);
        if (size > 0 && !strstr(error.text, "download cut short?"))
            fail_msg("cut at %zu: %s", size, error.text);
    }
}

static void a_header_with_any_byte_damaged_is_read_or_refused(void **state)
{
    struct image image;
    size_t header = rich_header(&image);
    for (size_t i = 0; i < header; i++)
        for (int flip = 0; flip < 3; flip++) {
            struct image damaged = image;
            damaged.data[i] ^= (uint8_t)(flip == 0 ? 0xff : flip == 1 ? 0x01 : 0x80);
            struct gguf *gguf;
            struct strata_error error = { 0 };
            int code = gguf_open_single(&gguf, save("damaged.gguf", damaged.data, damaged.size), &error);
            if (code == 0)
                gguf_close(gguf);
            else
                assert_true(error.code == code && error.text[0] != 0);
        }
}

static void a_header_that_goes_on_past_a_gibibyte_is_refused_without_reading_it(void **state)
{
    struct image image;
    add_head(&image, 3, 0, 1);
    add_string(&image, "general.name");
    add_u32(&image, GGUF_STRING);
    add_u64(&image, UINT64_C(1) << 40);
    const char *path = save("vast.gguf", image.data, image.size);
    if (truncate(path, (off_t)1 << 41) != 0) /* a hole: takes no space */
        skip();
    struct gguf *gguf;
    struct strata_error error;
    assert_int_equal(gguf_open_single(&gguf, path, &error), STRATA_E_UNSUPPORTED);
    assert_says(&error, "key 1 of 1 ('general.name'): the header goes on past 1024 MiB");
}

static void a_duplicate_among_a_hundred_thousand_keys_is_found(void **state)
{
    enum { COUNT = 100000 };
    const char *path = in_directory("many.gguf");
    FILE *file = fopen(path, "wb");
    struct image image;
    add_head(&image, 3, 0, COUNT);
    fwrite(image.data, 1, image.size, file);
    for (int i = 0; i < COUNT; i++) {
        char key[32];
        snprintf(key, sizeof key, "key.%06d", i == COUNT - 1 ? 12345 : i);
        image.size = 0;
        add_key_u32(&image, key, 1);
        fwrite(image.data, 1, image.size, file);
    }
    fclose(file);
    struct gguf *gguf;
    struct strata_error error;
    assert_int_equal(gguf_open_single(&gguf, path, &error), STRATA_E_FORMAT);
    assert_says(&error, "key 'key.012345' occurs twice (keys 12346 and 100000 of 100000)");
}

static void a_read_outside_a_tensor_is_refused(void **state)
{
    struct image image;
    rich_header(&image);
    struct gguf *gguf = open_image(&image);
    const struct gguf_tensor *tensor = gguf_tensor_find(gguf, "a");
    uint8_t bytes[256];
    struct strata_error error;
    assert_int_equal(gguf_read(gguf, tensor, 120, bytes, 8, &error), 0);
    assert_int_equal(gguf_read(gguf, tensor, 120, bytes, 9, &error), STRATA_E_ARGUMENT);
    assert_says(&error, "tensor 'a' has 128 bytes, asked for 9 at 120");
    assert_int_equal(gguf_read(gguf, tensor, UINT64_MAX, bytes, 2, &error), STRATA_E_ARGUMENT);
    gguf_close(gguf);
}

static void a_file_that_shrinks_while_open_is_a_sentence(void **state)
{
    struct image image;
    rich_header(&image);
    struct gguf *gguf = open_image(&image);
    assert_int_equal(truncate(gguf->files[0].path, 100), 0);
    uint8_t bytes[128];
    struct strata_error error;
    assert_int_equal(gguf_read(gguf, gguf_tensor_find(gguf, "a"), 0, bytes, sizeof bytes, &error), STRATA_E_IO);
    assert_says(&error, "the file became shorter while it was open");
    gguf_close(gguf);
}

/* ---- Split models ---------------------------------------------------------------------------------------------------------- */

struct shard_plan {
    const char *name;
    uint32_t no, count, total; /* UINT32_MAX: no such key */
    const char *tensors[4];
};

static void put_u16(struct gguf_writer *writer, const char *key, uint32_t value)
{
    uint16_t number = (uint16_t)value;
    struct gguf_entry entry = { { key, strlen(key) }, { GGUF_U16, GGUF_U16, 1, &number } };
    if (value != UINT32_MAX)
        gguf_put_entry(writer, &entry);
}

static void make_shard(const struct shard_plan *plan)
{
    struct gguf_writer *writer = create(in_directory(plan->name));
    if (plan->no == 0)
        gguf_put_string(writer, "general.architecture", "qwen4exp");
    put_u16(writer, "split.no", plan->no);
    put_u16(writer, "split.count", plan->count);
    put_u16(writer, "split.tensors.count", plan->total);
    for (int i = 0; plan->tensors[i]; i++)
        gguf_put_tensor(writer, plan->tensors[i], quant_format_find(QUANT_Q8_0), 1, one_row);
    begin(writer);
    for (int i = 0; plan->tensors[i]; i++) {
        uint8_t data[34];
        memset(data, plan->tensors[i][0], sizeof data);
        put_data(writer, data, sizeof data);
    }
    finish(writer);
}

static const struct shard_plan good[3] = {
    { "m-00001-of-00003.gguf", 0, 3, 3, { NULL } },
    { "m-00002-of-00003.gguf", 1, 3, 3, { "a", "b" } },
    { "m-00003-of-00003.gguf", 2, 3, 3, { "c" } },
};

/* Opens the first shard of what was made and wants this sentence. */
static void assert_split_refused(int code, const char *phrase)
{
    struct gguf *gguf;
    struct strata_error error = { 0 };
    int got = gguf_open(&gguf, in_directory(good[0].name), &error);
    if (got == 0)
        fail_msg("the model was opened, wanted \"%s\"", phrase);
    assert_null(gguf);
    assert_says(&error, phrase);
    assert_int_equal(got, code);
}

static void a_split_model_opens_as_one(void **state)
{
    for (int i = 0; i < 3; i++)
        make_shard(&good[i]);
    struct gguf *gguf = open_path(in_directory(good[0].name));
    assert_int_equal(gguf->n_files, 3);
    assert_int_equal(gguf->n_tensors, 3);
    assert_int_equal(gguf->n_entries, 4);
    static const char *const names[] = { "a", "b", "c" };
    static const int files[] = { 1, 1, 2 };
    for (int i = 0; i < 3; i++) {
        const struct gguf_tensor *tensor = gguf_tensor_find(gguf, names[i]);
        assert_non_null(tensor);
        assert_int_equal(tensor->file, files[i]);
        assert_string_equal(gguf->files[tensor->file].path, in_directory(good[files[i]].name));
        uint8_t back[34], wanted[34];
        struct strata_error error;
        memset(wanted, names[i][0], sizeof wanted);
        assert_int_equal(gguf_read(gguf, tensor, 0, back, sizeof back, &error), 0);
        assert_memory_equal(back, wanted, sizeof back);
    }
    struct gguf_string architecture;
    struct strata_error error;
    assert_int_equal(gguf_get_string(gguf, "general.architecture", &architecture, &error), 1);
    assert_string_equal(architecture.data, "qwen4exp");
    gguf_close(gguf);
}

static void a_shard_opens_alone_for_tools(void **state)
{
    make_shard(&good[1]);
    struct gguf *gguf;
    struct strata_error error;
    assert_int_equal(gguf_open_single(&gguf, in_directory(good[1].name), &error), 0);
    assert_int_equal(gguf->n_tensors, 2);
    gguf_close(gguf);
}

static void a_split_of_one_file_needs_no_special_name(void **state)
{
    const struct shard_plan alone = { "alone.gguf", 0, 1, 1, { "a" } };
    make_shard(&alone);
    struct gguf *gguf = open_path(in_directory("alone.gguf"));
    assert_int_equal(gguf->n_tensors, 1);
    gguf_close(gguf);
}

static void starting_from_a_later_shard_names_the_first(void **state)
{
    struct gguf *gguf;
    struct strata_error error;
    for (int i = 0; i < 3; i++)
        make_shard(&good[i]);
    assert_int_equal(gguf_open(&gguf, in_directory(good[1].name), &error), STRATA_E_ARGUMENT);
    assert_null(gguf);
    assert_says(&error, "this is file 2 of 3 of a split model: open the first one, m-00001-of-00003.gguf");
}

static void a_later_shard_with_another_name_is_recognised_too(void **state)
{
    struct shard_plan renamed = good[2];
    renamed.name = "model.gguf";
    make_shard(&renamed);
    struct gguf *gguf;
    struct strata_error error;
    assert_int_equal(gguf_open(&gguf, in_directory("model.gguf"), &error), STRATA_E_ARGUMENT);
    assert_says(&error, "this is file 3 of 3 of a split model: open the first one, the file whose split.no is 0");
}

static void a_first_shard_with_another_name_cannot_find_the_others(void **state)
{
    struct shard_plan renamed = good[0];
    renamed.name = "model.gguf";
    make_shard(&renamed);
    struct gguf *gguf;
    struct strata_error error;
    assert_int_equal(gguf_open(&gguf, in_directory("model.gguf"), &error), STRATA_E_ARGUMENT);
    assert_says(&error, "this is the first of 3 files, but its name does not end in -00001-of-00003.gguf");
}

static void a_first_shard_with_a_later_name_is_refused(void **state)
{
    struct shard_plan renamed = good[0];
    renamed.name = good[1].name;
    make_shard(&renamed);
    struct gguf *gguf;
    struct strata_error error;
    assert_int_equal(gguf_open(&gguf, in_directory(renamed.name), &error), STRATA_E_FORMAT);
    assert_says(&error, "key 'split.no' is 0, so the name should be m-00001-of-00003.gguf");
}

static void a_missing_shard_is_named(void **state)
{
    make_shard(&good[0]);
    make_shard(&good[1]);
    assert_split_refused(STRATA_E_IO, "the model has 3 files, of which 1 is missing beside this one: m-00003-of-00003.gguf");
}

static void several_missing_shards_are_counted(void **state)
{
    make_shard(&good[0]);
    assert_split_refused(STRATA_E_IO,
                         "the model has 3 files, of which 2 are missing beside this one: m-00002-of-00003.gguf is the first");
}

static void a_shard_of_another_model_is_refused(void **state)
{
    struct shard_plan other = good[2];
    other.count = 4;
    make_shard(&good[0]);
    make_shard(&good[1]);
    make_shard(&other);
    assert_split_refused(STRATA_E_FORMAT, "m-00003-of-00003.gguf: key 'split.count' is 4, wanted 3 as in the first file");
}

static void a_shard_without_split_keys_is_refused(void **state)
{
    struct shard_plan other = good[2];
    other.count = UINT32_MAX;
    make_shard(&good[0]);
    make_shard(&good[1]);
    make_shard(&other);
    assert_split_refused(STRATA_E_FORMAT, "m-00003-of-00003.gguf: key 'split.count' is missing, wanted 3 as in the first file");
}

static void shards_in_each_others_place_are_refused(void **state)
{
    struct shard_plan other = good[1];
    other.no = 2;
    make_shard(&good[0]);
    make_shard(&other);
    make_shard(&good[2]);
    assert_split_refused(STRATA_E_FORMAT, "m-00002-of-00003.gguf: key 'split.no' is 2, wanted 1 as the name says");
}

static void a_broken_shard_is_named(void **state)
{
    for (int i = 0; i < 3; i++)
        make_shard(&good[i]);
    assert_int_equal(truncate(in_directory(good[1].name), 150), 0);
    assert_split_refused(STRATA_E_FORMAT, "m-00002-of-00003.gguf: ");
    assert_split_refused(STRATA_E_FORMAT, "(download cut short?)");
}

static void a_total_that_does_not_match_is_refused(void **state)
{
    struct shard_plan first = good[0];
    first.total = 5;
    make_shard(&first);
    make_shard(&good[1]);
    make_shard(&good[2]);
    assert_split_refused(STRATA_E_FORMAT, "the 3 files have 3 tensors together, wanted 5 (split.tensors.count)");
}

static void a_split_model_without_a_total_is_refused(void **state)
{
    struct shard_plan first = good[0];
    first.total = UINT32_MAX;
    make_shard(&first);
    make_shard(&good[1]);
    make_shard(&good[2]);
    assert_split_refused(STRATA_E_FORMAT, "key 'split.tensors.count' is missing");
}

static void a_tensor_in_two_shards_is_refused(void **state)
{
    struct shard_plan last = good[2];
    last.tensors[0] = "a";
    make_shard(&good[0]);
    make_shard(&good[1]);
    make_shard(&last);
    assert_split_refused(STRATA_E_FORMAT, "tensor 'a' occurs twice (tensors 1 and 3 of 3)");
}

static void a_split_number_beyond_the_count_is_refused(void **state)
{
    struct shard_plan first = good[0];
    first.no = 3;
    make_shard(&first);
    assert_split_refused(STRATA_E_FORMAT, "key 'split.no' is 3, wanted less than split.count, 3");
}

static void a_split_count_without_a_number_is_refused(void **state)
{
    struct shard_plan first = good[0];
    first.no = UINT32_MAX;
    make_shard(&first);
    assert_split_refused(STRATA_E_FORMAT, "key 'split.no' is missing");
}

/* ---- The writer's own rules ------------------------------------------------------------------------------------------------ */

static bool exists(const char *name) { return access(in_directory(name), F_OK) == 0; }

static void nothing_has_the_final_name_before_finish(void **state)
{
    struct gguf_writer *writer = create(in_directory("late.gguf"));
    gguf_put_tensor(writer, "a", quant_format_find(QUANT_F32), 1, one_row);
    assert_false(exists("late.gguf"));
    begin(writer);
    float zeros[32] = { 0 };
    put_data(writer, zeros, sizeof zeros);
    assert_false(exists("late.gguf"));
    finish(writer);
    assert_true(exists("late.gguf"));
    assert_int_equal(each_file(NULL), 1);
}

static void destroy_without_finish_leaves_nothing(void **state)
{
    struct gguf_writer *writer = create(in_directory("never.gguf"));
    gguf_put_u32(writer, "key", 1);
    begin(writer);
    assert_int_equal(each_file(NULL), 1);
    gguf_writer_destroy(writer);
    assert_int_equal(each_file(NULL), 0);
}

static void an_old_file_stays_until_finish_and_is_then_replaced(void **state)
{
    save("old.gguf", "old", 3);
    struct gguf_writer *writer = create(in_directory("old.gguf"));
    begin(writer);
    gguf_writer_destroy(writer);
    struct stat status;
    assert_int_equal(stat(in_directory("old.gguf"), &status), 0);
    assert_int_equal(status.st_size, 3);
    writer = create(in_directory("old.gguf"));
    begin(writer);
    finish(writer);
    gguf_close(open_path(in_directory("old.gguf")));
}

static void two_writers_of_one_name_do_not_meet(void **state)
{
    struct gguf_writer *a = create(in_directory("same.gguf")), *b = create(in_directory("same.gguf"));
    gguf_put_u32(a, "who", 1);
    gguf_put_u32(b, "who", 2);
    begin(a);
    begin(b);
    finish(b);
    finish(a);
    struct gguf *gguf = open_path(in_directory("same.gguf"));
    uint32_t who = 0;
    struct strata_error error;
    assert_int_equal(gguf_get_u32(gguf, "who", &who, &error), 1);
    assert_int_equal(who, 1);
    gguf_close(gguf);
    assert_int_equal(each_file(NULL), 1);
}

/* What begin_data says after `put`; the file must not appear. */
static void assert_put_refused(void (*put)(struct gguf_writer *), const char *phrase)
{
    struct strata_error error = { 0 };
    struct gguf_writer *writer = create(in_directory("refused.gguf"));
    put(writer);
    assert_int_equal(gguf_writer_begin_data(writer, &error), STRATA_E_ARGUMENT);
    assert_says(&error, phrase);
    assert_int_equal(gguf_writer_finish(writer, &error), STRATA_E_ARGUMENT);
    assert_says(&error, phrase);
    gguf_writer_destroy(writer);
    assert_int_equal(each_file(NULL), 0);
}

static void put_key_twice(struct gguf_writer *writer)
{
    gguf_put_u32(writer, "twin", 1);
    gguf_put_string(writer, "other", "x");
    gguf_put_string(writer, "twin", "y");
}

static void put_tensor_twice(struct gguf_writer *writer)
{
    gguf_put_tensor(writer, "twin", quant_format_find(QUANT_F32), 1, one_row);
    gguf_put_tensor(writer, "twin", quant_format_find(QUANT_Q8_0), 1, one_row);
}

static void put_empty_key(struct gguf_writer *writer) { gguf_put_u32(writer, "", 1); }
static void put_bad_alignment(struct gguf_writer *writer) { gguf_put_u32(writer, "general.alignment", 24); }

static void put_long_name(struct gguf_writer *writer)
{
    gguf_put_tensor(writer, "0123456789012345678901234567890123456789012345678901234567890123", quant_format_find(QUANT_F32), 1,
                    one_row);
}

static void put_broken_row(struct gguf_writer *writer)
{
    gguf_put_tensor(writer, "a", quant_format_find(QUANT_Q8_0), 1, (int64_t[]){ 33 });
}

static void put_five_dims(struct gguf_writer *writer)
{
    gguf_put_tensor(writer, "a", quant_format_find(QUANT_F32), 5, (int64_t[]){ 32, 1, 1, 1, 1 });
}

static void put_negative_dim(struct gguf_writer *writer)
{
    gguf_put_tensor(writer, "a", quant_format_find(QUANT_F32), 2, (int64_t[]){ 32, -1 });
}

static void put_vast_tensor(struct gguf_writer *writer)
{
    gguf_put_tensor(writer, "a", quant_format_find(QUANT_F32), 3, (int64_t[]){ 1 << 30, 1 << 30, 1 << 30 });
}

static void put_array_of_arrays(struct gguf_writer *writer) { gguf_put_array(writer, "nested", GGUF_ARRAY, NULL, 0); }

static void the_writer_refuses_what_the_reader_would(void **state)
{
    assert_put_refused(put_key_twice, "refused.gguf: key 'twin' was put twice");
    assert_put_refused(put_tensor_twice, "tensor 'twin' was put twice");
    assert_put_refused(put_empty_key, "an empty key was put");
    assert_put_refused(put_bad_alignment, "key 'general.alignment' must be a u32 and a power of two");
    assert_put_refused(put_long_name, "the name has 64 bytes, wanted 1 to 63");
    assert_put_refused(put_broken_row, "tensor 'a': row width 33 is not a multiple of 32, the block of Q8_0");
    assert_put_refused(put_five_dims, "tensor 'a': 5 dimensions, wanted 1 to 4");
    assert_put_refused(put_negative_dim, "tensor 'a': dimension 1 is -1, wanted at least 1");
    assert_put_refused(put_vast_tensor, "tensor 'a' is larger than a file can be");
    assert_put_refused(put_array_of_arrays, "key 'nested': element type 9, wanted a scalar or string");
}

static struct gguf_writer *with_one_tensor(void)
{
    struct gguf_writer *writer = create(in_directory("one.gguf"));
    gguf_put_tensor(writer, "a", quant_format_find(QUANT_F32), 1, one_row);
    return writer;
}

static void an_incomplete_tensor_cannot_be_finished(void **state)
{
    struct gguf_writer *writer = with_one_tensor();
    struct strata_error error;
    begin(writer);
    put_data(writer, "12345678", 8);
    assert_int_equal(gguf_writer_finish(writer, &error), STRATA_E_ARGUMENT);
    assert_says(&error, "tensor 'a' is not complete: 8 of 128 bytes came");
    gguf_writer_destroy(writer);
    assert_int_equal(each_file(NULL), 0);
}

static void bytes_past_the_end_of_a_tensor_are_refused(void **state)
{
    struct gguf_writer *writer = with_one_tensor();
    struct strata_error error;
    uint8_t data[129] = { 0 };
    begin(writer);
    assert_int_equal(gguf_write(writer, data, 129, &error), STRATA_E_ARGUMENT);
    assert_says(&error, "tensor 'a' has 128 bytes, of which 128 are left, but 129 came");
    gguf_writer_destroy(writer);
}

static void bytes_after_the_last_tensor_are_refused(void **state)
{
    struct gguf_writer *writer = with_one_tensor();
    struct strata_error error;
    uint8_t data[128] = { 0 };
    begin(writer);
    put_data(writer, data, 128);
    assert_int_equal(gguf_write(writer, data, 1, &error), STRATA_E_ARGUMENT);
    assert_says(&error, "1 more bytes after the last tensor");
    gguf_writer_destroy(writer);
}

static void data_before_the_header_is_refused(void **state)
{
    struct gguf_writer *writer = with_one_tensor();
    struct strata_error error;
    assert_int_equal(gguf_write(writer, "x", 1, &error), STRATA_E_ARGUMENT);
    assert_says(&error, "tensor data came before the header was written");
    gguf_writer_destroy(writer);
}

static void a_key_after_the_header_is_refused(void **state)
{
    struct gguf_writer *writer = create(in_directory("late.gguf"));
    struct strata_error error;
    begin(writer);
    gguf_put_u32(writer, "late", 1);
    assert_int_equal(gguf_writer_finish(writer, &error), STRATA_E_ARGUMENT);
    assert_says(&error, "'late' was put after the header was written");
    gguf_writer_destroy(writer);
    assert_int_equal(each_file(NULL), 0);
}

static void a_directory_that_does_not_exist_is_an_error(void **state)
{
    struct gguf_writer *writer;
    struct strata_error error;
    assert_int_equal(gguf_writer_create(&writer, in_directory("nowhere/x.gguf"), &error), STRATA_E_IO);
    assert_null(writer);
    assert_says(&error, "cannot create: No such file or directory");
}

static void a_device_is_never_replaced_by_a_file(void **state)
{
    struct gguf_writer *writer;
    struct strata_error error;
    assert_int_equal(gguf_writer_create(&writer, "/dev/full", &error), STRATA_E_ARGUMENT);
    assert_says(&error, "/dev/full: this is not a regular file");
    struct stat status;
    assert_true(stat("/dev/full", &status) == 0 && S_ISCHR(status.st_mode));
}

/* A limit on the size of files stands for a full disk: the kernel refuses the write half way, as it then would. */
static struct rlimit unlimited;

static int limit_files(void **state)
{
    signal(SIGXFSZ, SIG_IGN);
    if (getrlimit(RLIMIT_FSIZE, &unlimited) != 0)
        return -1;
    struct rlimit tight = { .rlim_cur = 4096, .rlim_max = unlimited.rlim_max };
    return make_directory(state) || setrlimit(RLIMIT_FSIZE, &tight);
}

static int unlimit_files(void **state) { return setrlimit(RLIMIT_FSIZE, &unlimited) || remove_directory(state); }

static void a_full_disk_while_data_is_written_is_a_sentence_and_leaves_nothing(void **state)
{
    struct gguf_writer *writer = create(in_directory("full.gguf"));
    gguf_put_tensor(writer, "a", quant_format_find(QUANT_F32), 1, (int64_t[]){ 2048 });
    begin(writer);
    static const uint8_t data[8192];
    struct strata_error error;
    assert_int_equal(gguf_write(writer, data, sizeof data, &error), STRATA_E_IO);
    assert_says(&error, "full.gguf: cannot write ");
    assert_says(&error, ": File too large");
    assert_int_equal(gguf_writer_finish(writer, &error), STRATA_E_IO); /* the first error sticks */
    assert_says(&error, "full.gguf: cannot write ");
    assert_false(exists("full.gguf"));
    gguf_writer_destroy(writer);
    assert_int_equal(each_file(NULL), 0);
}

static void a_full_disk_while_the_header_is_written_is_a_sentence(void **state)
{
    static const uint8_t data[8192];
    struct gguf_writer *writer = create(in_directory("full.gguf"));
    gguf_put_array(writer, "long", GGUF_U8, data, sizeof data);
    struct strata_error error;
    assert_int_equal(gguf_writer_begin_data(writer, &error), STRATA_E_IO);
    assert_says(&error, "full.gguf: cannot write ");
    gguf_writer_destroy(writer);
    assert_int_equal(each_file(NULL), 0);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, make_directory, remove_directory)
#define FULL(name) cmocka_unit_test_setup_teardown(name, limit_files, unlimit_files)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(scalars_of_every_writer_call_come_back),
        TEST(arrays_of_every_type_come_back),
        TEST(scalars_of_every_type_are_read),
        TEST(copied_entries_make_the_same_file),
        TEST(tensors_come_back_with_shapes_and_bytes),
        TEST(names_longer_than_a_read_window_and_many_strings_come_back),
        TEST(an_absent_key_leaves_the_default),
        TEST(a_key_of_the_wrong_type_is_a_sentence),
        TEST(an_integer_that_does_not_fit_is_a_sentence),
        TEST(a_double_is_read_as_a_float_only_where_it_fits),
        TEST(a_bad_magic_shows_the_bytes),
        TEST(files_often_taken_for_models_are_recognised),
        TEST(an_empty_file_is_called_empty),
        TEST(version_1_is_refused),
        TEST(version_4_is_refused),
        TEST(a_big_endian_file_is_recognised),
        TEST(a_directory_is_called_a_directory),
        TEST(a_device_is_not_read),
        TEST(a_pipe_does_not_block),
        TEST(a_file_that_does_not_exist_is_named),
        TEST(a_key_count_beyond_the_file_is_refused),
        TEST(a_tensor_count_beyond_the_file_is_refused),
        TEST(a_key_longer_than_the_file_is_refused),
        TEST(a_string_longer_than_the_file_is_refused),
        TEST(an_array_longer_than_the_file_is_refused),
        TEST(an_empty_key_is_refused),
        TEST(a_key_that_occurs_twice_is_refused),
        TEST(an_unknown_value_type_is_refused),
        TEST(an_unknown_element_type_is_refused),
        TEST(an_array_of_arrays_is_refused),
        TEST(control_characters_of_a_key_do_not_reach_the_terminal),
        TEST(an_alignment_that_is_no_power_of_two_is_refused),
        TEST(an_alignment_of_another_type_is_refused),
        TEST(a_tensor_name_of_64_bytes_is_refused_and_one_of_63_is_not),
        TEST(a_tensor_without_a_name_is_refused),
        TEST(a_tensor_name_with_a_zero_byte_is_refused),
        TEST(a_tensor_that_occurs_twice_is_refused),
        TEST(five_dimensions_are_refused),
        TEST(a_dimension_below_one_is_refused),
        TEST(overflowing_dimensions_are_refused),
        TEST(offsets_that_overflow_together_are_refused),
        TEST(an_unknown_tensor_type_is_refused_by_number),
        TEST(a_withdrawn_tensor_type_is_refused_by_name),
        TEST(types_that_strata_cannot_decode_still_open),
        TEST(every_type_with_a_name_has_a_size),
        TEST(a_row_that_is_no_multiple_of_the_block_is_refused),
        TEST(an_offset_that_is_not_the_running_sum_is_refused),
        TEST(data_past_the_end_of_the_file_is_refused),
        TEST(a_file_cut_at_any_byte_is_refused),
        TEST(a_header_with_any_byte_damaged_is_read_or_refused),
        TEST(a_header_that_goes_on_past_a_gibibyte_is_refused_without_reading_it),
        TEST(a_duplicate_among_a_hundred_thousand_keys_is_found),
        TEST(a_read_outside_a_tensor_is_refused),
        TEST(a_file_that_shrinks_while_open_is_a_sentence),
        TEST(a_split_model_opens_as_one),
        TEST(a_shard_opens_alone_for_tools),
        TEST(a_split_of_one_file_needs_no_special_name),
        TEST(starting_from_a_later_shard_names_the_first),
        TEST(a_later_shard_with_another_name_is_recognised_too),
        TEST(a_first_shard_with_another_name_cannot_find_the_others),
        TEST(a_first_shard_with_a_later_name_is_refused),
        TEST(a_missing_shard_is_named),
        TEST(several_missing_shards_are_counted),
        TEST(a_shard_of_another_model_is_refused),
        TEST(a_shard_without_split_keys_is_refused),
        TEST(shards_in_each_others_place_are_refused),
        TEST(a_broken_shard_is_named),
        TEST(a_total_that_does_not_match_is_refused),
        TEST(a_split_model_without_a_total_is_refused),
        TEST(a_tensor_in_two_shards_is_refused),
        TEST(a_split_number_beyond_the_count_is_refused),
        TEST(a_split_count_without_a_number_is_refused),
        TEST(nothing_has_the_final_name_before_finish),
        TEST(destroy_without_finish_leaves_nothing),
        TEST(an_old_file_stays_until_finish_and_is_then_replaced),
        TEST(two_writers_of_one_name_do_not_meet),
        TEST(the_writer_refuses_what_the_reader_would),
        TEST(an_incomplete_tensor_cannot_be_finished),
        TEST(bytes_past_the_end_of_a_tensor_are_refused),
        TEST(bytes_after_the_last_tensor_are_refused),
        TEST(data_before_the_header_is_refused),
        TEST(a_key_after_the_header_is_refused),
        TEST(a_directory_that_does_not_exist_is_an_error),
        TEST(a_device_is_never_replaced_by_a_file),
        FULL(a_full_disk_while_data_is_written_is_a_sentence_and_leaves_nothing),
        FULL(a_full_disk_while_the_header_is_written_is_a_sentence),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
