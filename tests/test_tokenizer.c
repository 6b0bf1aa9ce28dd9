/* test_tokenizer.c - text to tokens and back, on hand-made vocabularies and on pebble's. The same is compared with Hugging Face's
 * library on a large vocabulary in tests/node/tokenizer.mjs. */
#include "text/tokenizer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "text/bpe.h"
#include "text/nfc.h"
#include "text/pretokenize.h"

/* What quadratic time would exceed many times over, also under a sanitizer: a megabyte takes well under a second. */
enum { MEGABYTE = 1 << 20, PATIENCE_S = 20 };

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void *repeat(const char *unit, size_t n_bytes)
{
    char *text = malloc(n_bytes + 1);
    size_t length = strlen(unit);
    for (size_t i = 0; i < n_bytes; i++)
        text[i] = unit[i % length];
    text[n_bytes] = 0;
    return text;
}

/* ---- A hand-made vocabulary -------------------------------------------------------------------------------------------------- */

/* Tokens 0 to 255 are the bytes in ascending order; what a test adds comes after. */

enum { MAX_TOKENS = 300, MAX_MERGES = 16 };

struct vocabulary {
    const char *model, *pre, *without; /* `without`: a key that is left out */
    struct gguf_string tokens[MAX_TOKENS];
    int32_t types[MAX_TOKENS];
    int n_tokens, n_types, n_merges;
    struct gguf_string merges[MAX_MERGES];
    int64_t bos, eos, pad;
    bool tokens_are_numbers;
};

static char byte_texts[256][3];

static struct gguf_string string_of(const char *text) { return (struct gguf_string){ text, strlen(text) }; }

static struct vocabulary bytes_only(void)
{
    struct vocabulary v = { .model = "gpt2", .pre = "qwen35", .n_tokens = 256, .n_types = 256, .bos = -1, .eos = -1, .pad = -1 };
    int n_hidden = 0;
    for (int b = 0; b < 256; b++) {
        bool visible = (b > 0x20 && b < 0x7f) || (b > 0xa0 && b != 0xad);
        int c = visible ? b : 0x100 + n_hidden++;
        snprintf(byte_texts[b], 3, c < 0x80 ? "%c" : "%c%c", c < 0x80 ? c : 0xc0 | c >> 6, 0x80 | (c & 0x3f));
        v.tokens[b] = string_of(byte_texts[b]);
        v.types[b] = TOKEN_NORMAL;
    }
    return v;
}

static int32_t add(struct vocabulary *v, const char *text, int32_t type)
{
    assert_true(v->n_tokens < MAX_TOKENS);
    v->tokens[v->n_tokens] = string_of(text);
    v->types[v->n_tokens] = type;
    v->n_types = v->n_tokens + 1;
    return v->n_tokens++;
}

static void add_merge(struct vocabulary *v, const char *pair) { v->merges[v->n_merges++] = string_of(pair); }

static int open_vocabulary(struct tokenizer **out, const struct vocabulary *v, struct strata_error *error)
{
    char path[] = "/tmp/strata-test-tokenizer-XXXXXX";
    struct gguf_writer *writer;
    struct gguf *gguf;
    int file = mkstemp(path);
    assert_true(file >= 0);
    close(file);
    assert_int_equal(gguf_writer_create(&writer, path, error), 0);
    gguf_put_string(writer, "general.architecture", "vocab");
#define UNLESS_LEFT_OUT(put, key, ...)                                                                                             \
    if (!v->without || strcmp(v->without, key) != 0)                                                                               \
    put(writer, key, __VA_ARGS__)
    UNLESS_LEFT_OUT(gguf_put_string, "tokenizer.ggml.model", v->model);
    UNLESS_LEFT_OUT(gguf_put_string, "tokenizer.ggml.pre", v->pre);
    if (v->tokens_are_numbers)
        gguf_put_array(writer, "tokenizer.ggml.tokens", GGUF_I32, v->types, (uint64_t)v->n_types);
    else
        UNLESS_LEFT_OUT(gguf_put_string_array, "tokenizer.ggml.tokens", v->tokens, (uint64_t)v->n_tokens);
    UNLESS_LEFT_OUT(gguf_put_array, "tokenizer.ggml.token_type", GGUF_I32, v->types, (uint64_t)v->n_types);
    UNLESS_LEFT_OUT(gguf_put_string_array, "tokenizer.ggml.merges", v->merges, (uint64_t)v->n_merges);
    if (v->bos >= 0)
        gguf_put_u32(writer, "tokenizer.ggml.bos_token_id", (uint32_t)v->bos);
    if (v->eos >= 0)
        gguf_put_u32(writer, "tokenizer.ggml.eos_token_id", (uint32_t)v->eos);
    if (v->pad >= 0)
        gguf_put_u32(writer, "tokenizer.ggml.padding_token_id", (uint32_t)v->pad);
    assert_int_equal(gguf_writer_begin_data(writer, error), 0);
    assert_int_equal(gguf_writer_finish(writer, error), 0);
    gguf_writer_destroy(writer);
    assert_int_equal(gguf_open(&gguf, path, error), 0);
    unlink(path);
    int code = tokenizer_create(out, gguf, error);
    gguf_close(gguf); /* the tokenizer must not need it */
    return code;
}

static struct tokenizer *load(const struct vocabulary *v)
{
    struct tokenizer *tokenizer;
    struct strata_error error = { 0 };
    if (open_vocabulary(&tokenizer, v, &error) < 0)
        fail_msg("%s", error.text);
    return tokenizer;
}

static void expect_refusal(const struct vocabulary *v, int code, const char *phrase)
{
    struct tokenizer *tokenizer;
    struct strata_error error = { 0 };
    assert_int_equal(open_vocabulary(&tokenizer, v, &error), code);
    assert_null(tokenizer);
    if (!strstr(error.text, phrase))
        fail_msg("the sentence is \"%s\", wanted \"%s\" in it", error.text, phrase);
}

/* Compares with ids that end in -1. */
static void expect_ids(const struct tokenizer *tokenizer, const char *text, bool parse_special, const int32_t *wanted)
{
    int32_t *ids;
    struct strata_error error = { 0 };
    int64_t n = tokenizer_encode(tokenizer, text, strlen(text), parse_special, &ids, &error);
    assert_true(n >= 0);
    for (int64_t i = 0; i < n; i++)
        if (ids[i] != wanted[i])
            fail_msg("\"%s\": token %lld is %d, wanted %d", text, (long long)i, ids[i], wanted[i]);
    assert_int_equal(wanted[n], -1);
    free(ids);
}

#define IDS(...) ((const int32_t[]){ __VA_ARGS__, -1 })

/* ---- UTF-8 ------------------------------------------------------------------------------------------------------------------ */

static void the_end_of_a_character_is_found(void **state)
{
    static const struct {
        const char *text;
        size_t length;
        int wanted;
    } cases[] = {
        { "a", 1, 1 },
        { "\0", 1, 1 },
        { "\x7f", 1, 1 },
        { "\xc3\xa9!", 3, 2 },
        { "\xe0\xa4\xa6", 3, 3 },
        { "\xed\x9f\xbf", 3, 3 },
        { "\xef\xbf\xbf", 3, 3 },
        { "\xf0\x9f\x8e\x89", 4, 4 },
        { "\xf4\x8f\xbf\xbf", 4, 4 },
        /* cut short */
        { "\xc3", 1, 0 },
        { "\xe0\xa4", 2, 0 },
        { "\xf0\x9f\x8e", 3, 0 },
        /* lone continuation, overlong, surrogate, past U+10FFFF, broken off after n bytes */
        { "\x80", 1, -1 },
        { "\xbf\xbf", 2, -1 },
        { "\xc0\x80", 2, -1 },
        { "\xc1\xbf", 2, -1 },
        { "\xe0\x80\x80", 3, -1 },
        { "\xe0\x9f", 2, -1 },
        { "\xed\xa0\x80", 3, -1 },
        { "\xf0\x8f\xbf\xbf", 4, -1 },
        { "\xf4\x90\x80\x80", 4, -1 },
        { "\xf5\x80", 2, -1 },
        { "\xff", 1, -1 },
        { "\xc3!", 2, -1 },
        { "\xe0\xa4!", 3, -2 },
        { "\xf0\x9f\x8e!", 4, -3 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (utf8_look(cases[i].text, cases[i].length) != cases[i].wanted)
            fail_msg("case %zu: %d, wanted %d", i, utf8_look(cases[i].text, cases[i].length), cases[i].wanted);
}

/* Two whole texts, one with every kind of damage, and what a stream makes of it. */
static const char damaged[] = "a\xc3\xa9\xf0\x9f\x8e\x89|\xf0\x9f\x8e|\xe0\xa4\xe0\xa4\xa6\x80\xff\xed\xa0\x80|\xc3";
static const char mended[] = "aé🎉|\ufffd|\ufffdद\ufffd\ufffd\ufffd\ufffd\ufffd|\ufffd";

static void a_stream_gives_the_same_text_wherever_it_is_cut(void **state)
{
    size_t n = sizeof damaged - 1;
    for (size_t i = 0; i <= n; i++)
        for (size_t j = i; j <= n; j++) {
            struct utf8_stream stream = { 0 };
            char out[256];
            size_t written = utf8_stream_push(&stream, damaged, i, out);
            written += utf8_stream_push(&stream, damaged + i, j - i, out + written);
            written += utf8_stream_push(&stream, damaged + j, n - j, out + written);
            written += utf8_stream_end(&stream, out + written);
            assert_int_equal(written, strlen(mended));
            assert_memory_equal(out, mended, written);
        }
}

static void a_stream_never_gives_out_half_a_character(void **state)
{
    struct utf8_stream stream = { 0 };
    for (size_t i = 0; i < sizeof damaged - 1; i++) {
        char out[UTF8_STREAM_ROOM(1)];
        size_t written = utf8_stream_push(&stream, &damaged[i], 1, out);
        assert_in_range(written, 0, UTF8_STREAM_ROOM(1));
        for (size_t at = 0; at < written;) {
            int length = utf8_look(out + at, written - at);
            assert_in_range(length, 1, 4);
            at += (size_t)length;
        }
    }
}

static void an_ended_stream_can_start_again(void **state)
{
    struct utf8_stream stream = { 0 };
    char out[UTF8_STREAM_ROOM(8)];
    assert_int_equal(utf8_stream_push(&stream, "\xf0\x9f", 2, out), 0);
    assert_int_equal(utf8_stream_end(&stream, out), 3);
    assert_int_equal(utf8_stream_end(&stream, out), 0);
    assert_int_equal(utf8_stream_push(&stream, "ok", 2, out), 2);
}

/* ---- Normalization ---------------------------------------------------------------------------------------------------------- */

static void expect_normal(const char *text, const char *wanted)
{
    char *out;
    size_t length;
    int changed = nfc_normalize(text, strlen(text), &out, &length, NULL);
    assert_int_equal(changed, strcmp(text, wanted) != 0);
    if (changed && (length != strlen(wanted) || memcmp(out, wanted, length) != 0))
        fail_msg("\"%s\" became \"%.*s\", wanted \"%s\"", text, (int)length, out, wanted);
    free(out);
}

static void text_is_composed(void **state)
{
    expect_normal("", "");
    expect_normal("plain", "plain");
    expect_normal("e\u0301", "\u00e9");
    expect_normal("\u00e9", "\u00e9");
    expect_normal("\u212b", "\u00c5");               /* the angstrom sign is a letter with a ring */
    expect_normal("\u1112\u1161\u11ab", "\ud55c");   /* a Korean syllable */
    expect_normal("q\u0307\u0323", "q\u0323\u0307"); /* marks come in the order of their class */
    expect_normal("a\u0301\u0300", "\u00e1\u0300");  /* marks of one class keep their order */
    expect_normal("\u0958", "\u0915\u093c");         /* excluded from composition */
    expect_normal("\ufb01", "\ufb01");               /* a ligature is not canonically equivalent to its letters */
    expect_normal("\u1e0a\u0323", "\u1e0c\u0307");
}

static void long_runs_of_marks_are_sorted_like_short_ones(void **state)
{
    char text[200] = "-", wanted[200] = "-";
    for (int i = 0; i < 20; i++)
        strcat(text, i % 2 ? "\u0323" : "\u0307"); /* above, below, above, ... */
    for (int i = 0; i < 20; i++)
        strcat(wanted, i < 10 ? "\u0323" : "\u0307");
    expect_normal(text, wanted);
}

static void a_megabyte_of_marks_is_normalized_in_time(void **state)
{
    char *text = repeat("\u0307\u0323", MEGABYTE), *out;
    size_t length;
    double start = seconds();
    assert_int_equal(nfc_normalize(text, MEGABYTE, &out, &length, NULL), 1);
    assert_true(seconds() - start < PATIENCE_S);
    assert_int_equal(length, MEGABYTE);
    assert_memory_equal(out, "\u0323\u0323", 4);
    free(text);
    free(out);
}

/* ---- Words ------------------------------------------------------------------------------------------------------------------ */

/* `wanted` shows the pieces with a bar between them. */
static void expect_pieces(const char *name, const char *text, const char *wanted)
{
    struct pretokenizer *pretokenizer;
    struct pretokenizer_cut cut;
    char pieces[512] = "";
    assert_int_equal(pretokenizer_create(&pretokenizer, name, NULL), 0);
    assert_int_equal(pretokenizer_cut_begin(&cut, pretokenizer, NULL), 0);
    cut.text = text;
    cut.length = strlen(text);
    for (size_t n; (n = pretokenizer_cut_next(&cut)) > 0;) {
        if (*pieces)
            strcat(pieces, "|");
        strncat(pieces, text + cut.at - n, n);
    }
    pretokenizer_cut_end(&cut);
    pretokenizer_destroy(pretokenizer);
    assert_string_equal(pieces, wanted);
}

static void words_keep_the_space_before_them(void **state)
{
    expect_pieces("qwen35", "The quick (brown) fox", "The| quick| (|brown|)| fox");
}
static void digits_stand_alone(void **state) { expect_pieces("qwen35", "in 2026, ½ Ⅷ", "in| |2|0|2|6|,| |½| |Ⅷ"); }
static void contractions_are_cut_off_in_either_case(void **state)
{
    expect_pieces("qwen35", "I'm we'LL o'clock 'Re", "I|'m| we|'LL| o|'clock| '|Re");
}
static void punctuation_takes_the_line_ends_after_it(void **state)
{
    expect_pieces("qwen35", "end.\r\n\n x !\n", "end|.\r\n\n| x| !\n");
}
static void white_space_leaves_its_last_character_to_a_word(void **state)
{
    expect_pieces("qwen35", "a   b  1\t\tc", "a|  | b| | |1|\t|\tc");
}
static void white_space_ends_at_its_last_line_end(void **state) { expect_pieces("qwen35", "a \n \n  b \n", "a| \n \n| | b| \n"); }
static void white_space_is_that_of_unicode(void **state)
{
    expect_pieces("qwen35", "a\xc2\x85\u3000\u2028b", "a|\xc2\x85\u3000|\u2028b");
}
static void a_zero_width_space_is_no_white_space(void **state)
{
    expect_pieces("qwen35", "  \u200b\u180e\ufeff", " | \u200b\u180e\ufeff");
}
static void combining_marks_belong_to_words_in_qwen35(void **state) { expect_pieces("qwen35", "สวัสดี हिन्दी", "สวัสดี| हिन्दी"); }
static void combining_marks_end_words_in_qwen2(void **state) { expect_pieces("qwen2", "हिन्दी", "ह|िन|्द|ी"); }

static void a_megabyte_without_a_word_is_cut_in_time(void **state)
{
    static const char *const units[] = { " ", "\n ", "a", "\u0301", ".", " \t\u3000", "'" };
    struct pretokenizer *pretokenizer;
    struct pretokenizer_cut cut;
    assert_int_equal(pretokenizer_create(&pretokenizer, "qwen35", NULL), 0);
    assert_int_equal(pretokenizer_cut_begin(&cut, pretokenizer, NULL), 0);
    double start = seconds();
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        size_t unit = strlen(units[i]), length = MEGABYTE / unit * unit, longest = 0;
        char *text = repeat(units[i], length);
        cut.text = text;
        cut.length = length;
        cut.at = 0;
        for (size_t n; (n = pretokenizer_cut_next(&cut)) > 0;)
            longest = n > longest ? n : longest;
        assert_int_equal(cut.at, length);
        assert_true(longest >= length - unit); /* the run is one piece: no limit of the library broke it up */
        free(text);
    }
    assert_true(seconds() - start < PATIENCE_S);
    pretokenizer_cut_end(&cut);
    pretokenizer_destroy(pretokenizer);
}

/* ---- Merging ---------------------------------------------------------------------------------------------------------------- */

static void the_lowest_rank_merges_first(void **state)
{
    struct vocabulary v = bytes_only();
    int32_t bc = add(&v, "bc", TOKEN_NORMAL), ab = add(&v, "ab", TOKEN_NORMAL);
    add_merge(&v, "b c");
    add_merge(&v, "a b");
    struct tokenizer *tokenizer = load(&v);
    expect_ids(tokenizer, "abc", false, IDS('a', bc));
    expect_ids(tokenizer, "abab", false, IDS(ab, ab));
    tokenizer_destroy(tokenizer);
}

static void the_leftmost_of_equal_pairs_merges_first(void **state)
{
    struct vocabulary v = bytes_only();
    int32_t aa = add(&v, "aa", TOKEN_NORMAL), aaa = add(&v, "aaa", TOKEN_NORMAL);
    add_merge(&v, "a a");
    add_merge(&v, "aa a");
    struct tokenizer *tokenizer = load(&v);
    expect_ids(tokenizer, "aaa", false, IDS(aaa));
    expect_ids(tokenizer, "aaaaa", false, IDS(aa, aaa));
    tokenizer_destroy(tokenizer);
}

static void a_merged_token_merges_on_either_side(void **state)
{
    struct vocabulary v = bytes_only();
    int32_t all = (add(&v, "bc", TOKEN_NORMAL), add(&v, "abc", TOKEN_NORMAL), add(&v, "abcd", TOKEN_NORMAL));
    add_merge(&v, "b c");
    add_merge(&v, "abc d");
    add_merge(&v, "a bc");
    struct tokenizer *tokenizer = load(&v);
    expect_ids(tokenizer, "abcd", false, IDS(all));
    tokenizer_destroy(tokenizer);
}

static void merging_stops_at_the_end_of_a_word(void **state)
{
    struct vocabulary v = bytes_only();
    int32_t space_b = add(&v, "\u0120b", TOKEN_NORMAL);
    add(&v, "a\u0120", TOKEN_NORMAL);
    add_merge(&v, "a \u0120");
    add_merge(&v, "\u0120 b");
    struct tokenizer *tokenizer = load(&v);
    expect_ids(tokenizer, "a b", false, IDS('a', space_b));
    tokenizer_destroy(tokenizer);
}

static void a_megabyte_without_a_space_is_encoded_in_time(void **state)
{
    struct vocabulary v = bytes_only();
    int32_t a64 = 0;
    static char doubles[6][65], pairs[6][66];
    for (int i = 0; i < 6; i++) { /* aa, aaaa, ... 64 letters */
        int half = 1 << i;
        memset(doubles[i], 'a', 2 * (size_t)half);
        memset(pairs[i], 'a', 2 * (size_t)half + 1);
        pairs[i][half] = ' ';
        a64 = add(&v, doubles[i], TOKEN_NORMAL);
        add_merge(&v, pairs[i]);
    }
    struct tokenizer *tokenizer = load(&v);
    char *text = repeat("a", MEGABYTE);
    int32_t *ids;
    double start = seconds();
    assert_int_equal(tokenizer_encode(tokenizer, text, MEGABYTE, true, &ids, NULL), MEGABYTE / 64);
    assert_true(seconds() - start < PATIENCE_S);
    assert_int_equal(ids[0], a64);
    free(ids);
    free(text);
    tokenizer_destroy(tokenizer);
}

/* ---- Special tokens --------------------------------------------------------------------------------------------------------- */

static void control_tokens_are_parsed_only_when_asked(void **state)
{
    struct vocabulary v = bytes_only();
    int32_t end = add(&v, "<end>", TOKEN_CONTROL);
    struct tokenizer *tokenizer = load(&v);
    expect_ids(tokenizer, "a<end>b", true, IDS('a', end, 'b'));
    expect_ids(tokenizer, "a<end>b", false, IDS('a', '<', 'e', 'n', 'd', '>', 'b'));
    tokenizer_destroy(tokenizer);
}

static void user_defined_tokens_are_always_parsed(void **state)
{
    struct vocabulary v = bytes_only();
    int32_t think = add(&v, "<think>", TOKEN_USER_DEFINED);
    struct tokenizer *tokenizer = load(&v);
    expect_ids(tokenizer, "<think>", true, IDS(think));
    expect_ids(tokenizer, "<think><think>", false, IDS(think, think));
    tokenizer_destroy(tokenizer);
}

static void unused_tokens_are_never_parsed(void **state)
{
    struct vocabulary v = bytes_only();
    add(&v, "[P]", TOKEN_UNUSED);
    struct tokenizer *tokenizer = load(&v);
    expect_ids(tokenizer, "[P]", true, IDS('[', 'P', ']'));
    tokenizer_destroy(tokenizer);
}

static void the_longest_special_token_at_a_place_wins(void **state)
{
    struct vocabulary v = bytes_only();
    int32_t s = add(&v, "<s", TOKEN_CONTROL), longest = add(&v, "<s>>", TOKEN_CONTROL), sx = add(&v, "<sx>", TOKEN_USER_DEFINED);
    struct tokenizer *tokenizer = load(&v);
    expect_ids(tokenizer, "<s>><s><sx>", true, IDS(longest, s, '>', sx));
    expect_ids(tokenizer, "<s>><sx>", false, IDS('<', 's', '>', '>', sx));
    tokenizer_destroy(tokenizer);
}

static void the_leftmost_special_token_wins_over_a_longer_one(void **state)
{
    struct vocabulary v = bytes_only();
    int32_t ab = add(&v, "ab", TOKEN_CONTROL);
    add(&v, "bcdef", TOKEN_CONTROL);
    struct tokenizer *tokenizer = load(&v);
    expect_ids(tokenizer, "abcdef", true, IDS(ab, 'c', 'd', 'e', 'f'));
    tokenizer_destroy(tokenizer);
}

static void a_special_token_cut_short_is_plain_text(void **state)
{
    struct vocabulary v = bytes_only();
    add(&v, "<end>", TOKEN_CONTROL);
    struct tokenizer *tokenizer = load(&v);
    expect_ids(tokenizer, "<end", true, IDS('<', 'e', 'n', 'd'));
    tokenizer_destroy(tokenizer);
}

static void special_tokens_are_found_by_their_text(void **state)
{
    struct vocabulary v = bytes_only();
    int32_t call = add(&v, "<call>", TOKEN_USER_DEFINED), end = add(&v, "<end>", TOKEN_CONTROL);
    struct tokenizer *tokenizer = load(&v);
    assert_int_equal(tokenizer_find(tokenizer, "<call>"), call);
    assert_int_equal(tokenizer_find(tokenizer, "<end>"), end);
    assert_int_equal(tokenizer_find(tokenizer, "<en"), -1);
    assert_int_equal(tokenizer_find(tokenizer, "a"), -1);
    assert_int_equal(tokenizer_find(tokenizer, ""), -1);
    tokenizer_destroy(tokenizer);
}

/* ---- Any text and any bytes ------------------------------------------------------------------------------------------------- */

static void text_is_normalized_before_it_is_encoded(void **state)
{
    struct vocabulary v = bytes_only();
    struct tokenizer *tokenizer = load(&v);
    expect_ids(tokenizer, "e\u0301", false, IDS(0xc3, 0xa9));
    tokenizer_destroy(tokenizer);
}

static void special_tokens_are_found_before_normalization(void **state)
{
    struct vocabulary v = bytes_only();
    int32_t e = add(&v, "<e", TOKEN_USER_DEFINED);
    struct tokenizer *tokenizer = load(&v);
    expect_ids(tokenizer, "<e\u0301", false, IDS(e, 0xcc, 0x81));
    tokenizer_destroy(tokenizer);
}

static void bytes_that_are_not_text_come_back(void **state)
{
    struct vocabulary v = bytes_only();
    add(&v, "\u00ff\u00ff", TOKEN_NORMAL);
    add_merge(&v, "\u00ff \u00ff");
    struct tokenizer *tokenizer = load(&v);
    char text[4096];
    uint32_t random = 1;
    for (size_t i = 0; i < sizeof text; i++) {
        random = random * 1664525 + 1013904223;
        text[i] = (char)(random >> 28 < 4 ? 0xff : random >> 24); /* bytes of all values, and runs of 0xff */
        if ((uint8_t)text[i] >= 0xcc && (uint8_t)text[i] < 0xf0)
            text[i] = (char)0xff; /* nothing that normalizing would change */
    }
    int32_t *ids;
    int64_t n = tokenizer_encode(tokenizer, text, sizeof text, true, &ids, NULL);
    size_t at = 0;
    for (int64_t i = 0; i < n; i++) {
        const char *piece;
        size_t length = tokenizer_piece(tokenizer, ids[i], true, &piece);
        assert_true(length <= sizeof text - at);
        assert_memory_equal(text + at, piece, length);
        at += length;
    }
    assert_int_equal(at, sizeof text);
    free(ids);
    tokenizer_destroy(tokenizer);
}

static void an_empty_text_has_no_tokens(void **state)
{
    struct vocabulary v = bytes_only();
    struct tokenizer *tokenizer = load(&v);
    int32_t *ids;
    char *text;
    assert_int_equal(tokenizer_encode(tokenizer, "", 0, true, &ids, NULL), 0);
    assert_int_equal(tokenizer_decode(tokenizer, ids, 0, true, &text, NULL), 0);
    assert_string_equal(text, "");
    free(text);
    free(ids);
    tokenizer_destroy(tokenizer);
}

static void a_text_beyond_the_limit_is_refused(void **state)
{
    struct vocabulary v = bytes_only();
    struct tokenizer *tokenizer = load(&v);
    struct strata_error error = { 0 };
    int32_t *ids;
    assert_int_equal(tokenizer_encode(tokenizer, "", (size_t)TOKENIZER_MAX_TEXT + 1, true, &ids, &error), STRATA_E_ARGUMENT);
    assert_null(ids);
    assert_non_null(strstr(error.text, "a text of 67108865 bytes is too long"));
    tokenizer_destroy(tokenizer);
}

/* ---- Decoding --------------------------------------------------------------------------------------------------------------- */

static void expect_text(const struct tokenizer *tokenizer, const int32_t *ids, bool show_special, const char *wanted)
{
    char *text;
    size_t n = 0;
    while (ids[n] != -1)
        n++;
    assert_int_equal(tokenizer_decode(tokenizer, ids, n, show_special, &text, NULL), strlen(wanted));
    assert_string_equal(text, wanted);
    free(text);
}

static void control_tokens_are_shown_only_when_asked(void **state)
{
    struct vocabulary v = bytes_only();
    int32_t end = add(&v, "<end>", TOKEN_CONTROL), think = add(&v, "<think>", TOKEN_USER_DEFINED);
    struct tokenizer *tokenizer = load(&v);
    expect_text(tokenizer, IDS('a', end, think), true, "a<end><think>");
    expect_text(tokenizer, IDS('a', end, think), false, "a<think>");
    tokenizer_destroy(tokenizer);
}

static void unused_tokens_and_numbers_outside_decode_to_nothing(void **state)
{
    struct vocabulary v = bytes_only();
    int32_t unused = add(&v, "[P]", TOKEN_UNUSED);
    struct tokenizer *tokenizer = load(&v);
    expect_text(tokenizer, IDS('a', unused, unused + 1, INT32_MAX, INT32_MIN, 'b'), true, "ab");
    assert_int_equal(tokenizer_type(tokenizer, unused + 1), TOKEN_UNUSED);
    assert_int_equal(tokenizer_type(tokenizer, -1), TOKEN_UNUSED);
    tokenizer_destroy(tokenizer);
}

static void a_special_token_is_shown_as_it_is_written(void **state)
{
    struct vocabulary v = bytes_only();
    int32_t special = add(&v, "\u0120\u4e2d", TOKEN_USER_DEFINED); /* U+0120 would be a space in an ordinary token */
    struct tokenizer *tokenizer = load(&v);
    expect_text(tokenizer, IDS(special), true, "\u0120\u4e2d");
    expect_ids(tokenizer, "\u0120\u4e2d", false, IDS(special));
    tokenizer_destroy(tokenizer);
}

static void a_character_spread_over_tokens_is_put_together(void **state)
{
    struct vocabulary v = bytes_only();
    struct tokenizer *tokenizer = load(&v);
    expect_text(tokenizer, IDS(0xf0, 0x9f, 0x8e, 0x89, 0xe4, 'x'), true, "🎉\ufffdx");
    tokenizer_destroy(tokenizer);
}

/* ---- What the file says ----------------------------------------------------------------------------------------------------- */

static void the_named_tokens_are_read(void **state)
{
    struct vocabulary v = bytes_only();
    v.bos = 1, v.eos = 2, v.pad = 3;
    struct tokenizer *tokenizer = load(&v);
    const struct tokenizer_info *info = tokenizer_info(tokenizer);
    assert_int_equal(info->n_tokens, 256);
    assert_int_equal(info->bos, 1);
    assert_int_equal(info->eos, 2);
    assert_int_equal(info->pad, 3);
    assert_false(info->add_bos);
    tokenizer_destroy(tokenizer);
}

static void tokens_that_the_file_does_not_name_are_minus_one(void **state)
{
    struct vocabulary v = bytes_only();
    struct tokenizer *tokenizer = load(&v);
    assert_int_equal(tokenizer_info(tokenizer)->bos, -1);
    assert_int_equal(tokenizer_info(tokenizer)->eos, -1);
    assert_int_equal(tokenizer_info(tokenizer)->pad, -1);
    assert_int_equal(tokenizer_info(tokenizer)->n_end, 0);
    tokenizer_destroy(tokenizer);
}

static void a_generation_ends_at_eos_and_at_the_known_stops(void **state)
{
    struct vocabulary v = bytes_only();
    int32_t stops[6];
    static const char *const names[] = { "<|file_sep|>", "<|endoftext|>", "<stop>", "<|im_end|>", "<|fim_pad|>", "<|repo_name|>" };
    int32_t start = add(&v, "<|im_start|>", TOKEN_CONTROL);
    for (int i = 0; i < 6; i++)
        stops[i] = add(&v, names[i], TOKEN_CONTROL);
    v.eos = stops[2];
    struct tokenizer *tokenizer = load(&v);
    const struct tokenizer_info *info = tokenizer_info(tokenizer);
    assert_int_equal(info->n_end, 6);
    for (int i = 0; i < 6; i++) {
        assert_int_equal(info->end[i], stops[i]);
        assert_true(tokenizer_is_end(tokenizer, stops[i]));
    }
    assert_false(tokenizer_is_end(tokenizer, start));
    assert_false(tokenizer_is_end(tokenizer, -1));
    tokenizer_destroy(tokenizer);
}

static void a_stop_named_twice_counts_once(void **state)
{
    struct vocabulary v = bytes_only();
    v.eos = add(&v, "<|im_end|>", TOKEN_CONTROL);
    struct tokenizer *tokenizer = load(&v);
    assert_int_equal(tokenizer_info(tokenizer)->n_end, 1);
    tokenizer_destroy(tokenizer);
}

/* ---- Files that are refused ------------------------------------------------------------------------------------------------- */

static void a_missing_key_is_named(void **state)
{
    static const char *const keys[] = { "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens",
                                        "tokenizer.ggml.token_type", "tokenizer.ggml.merges" };
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        char phrase[80];
        struct vocabulary v = bytes_only();
        v.without = keys[i];
        snprintf(phrase, sizeof phrase, "the file has no %s", keys[i]);
        expect_refusal(&v, STRATA_E_FORMAT, phrase);
    }
}

static void another_kind_of_vocabulary_is_refused(void **state)
{
    struct vocabulary v = bytes_only();
    v.model = "llama";
    expect_refusal(&v, STRATA_E_UNSUPPORTED, "tokenizer.ggml.model is \"llama\"; Strata knows gpt2");
}

static void an_unknown_pre_tokenizer_is_refused_with_the_known_ones(void **state)
{
    struct vocabulary v = bytes_only();
    v.pre = "llama-bpe";
    expect_refusal(&v, STRATA_E_UNSUPPORTED,
                   "tokenizer.ggml.pre is \"llama-bpe\", which Strata does not know; it knows qwen35, qwen2");
}

static void tokens_that_are_no_strings_are_refused(void **state)
{
    struct vocabulary v = bytes_only();
    v.tokens_are_numbers = true;
    expect_refusal(&v, STRATA_E_FORMAT, "tokenizer.ggml.tokens is not an array of strings");
}

static void fewer_types_than_tokens_are_refused(void **state)
{
    struct vocabulary v = bytes_only();
    v.n_types = 255;
    expect_refusal(&v, STRATA_E_FORMAT, "tokenizer.ggml.token_type has 255 entries, tokenizer.ggml.tokens has 256");
}

static void a_type_outside_the_list_is_refused(void **state)
{
    struct vocabulary v = bytes_only();
    v.types[7] = 9;
    expect_refusal(&v, STRATA_E_FORMAT, "token 7 has type 9; types are 1 to 6");
}

static void a_text_that_occurs_twice_is_refused(void **state)
{
    struct vocabulary v = bytes_only();
    add(&v, "a", TOKEN_CONTROL);
    expect_refusal(&v, STRATA_E_FORMAT, "tokens 97 and 256 are both \"a\"");
}

static void a_vocabulary_without_a_byte_is_refused(void **state)
{
    struct vocabulary v = bytes_only();
    add(&v, "filler", TOKEN_NORMAL);
    v.tokens[0x41] = string_of("AA");
    expect_refusal(&v, STRATA_E_FORMAT, "no normal token stands for the byte 0x41");
}

static void a_tiny_vocabulary_is_refused(void **state)
{
    struct vocabulary v = bytes_only();
    v.n_tokens = v.n_types = 3;
    expect_refusal(&v, STRATA_E_FORMAT, "tokenizer.ggml.tokens has 3 entries; wanted 256 to");
}

static void a_merge_of_unknown_tokens_is_refused(void **state)
{
    static const struct {
        const char *pair, *phrase;
    } cases[] = {
        { "xy a", "entry 0, \"xy a\": its left side is not a token" },
        { "a xy", "entry 0, \"a xy\": its right side is not a token" },
        { "a b", "entry 0, \"a b\": its two sides together are not a token" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct vocabulary v = bytes_only();
        add_merge(&v, cases[i].pair);
        expect_refusal(&v, STRATA_E_FORMAT, cases[i].phrase);
    }
}

static void a_merge_that_is_no_pair_is_refused(void **state)
{
    static const char *const pairs[] = { "", "ab", " a", "a ", " " };
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        struct vocabulary v = bytes_only();
        add_merge(&v, pairs[i]);
        expect_refusal(&v, STRATA_E_FORMAT, "wanted two tokens and a space between them");
    }
}

static void a_merge_that_makes_a_control_token_is_refused(void **state)
{
    struct vocabulary v = bytes_only();
    add(&v, "ab", TOKEN_CONTROL);
    add_merge(&v, "a b");
    expect_refusal(&v, STRATA_E_FORMAT, "it makes token 256, whose type is 3; plain text may not become such a token");
}

static void a_merge_that_changes_bytes_is_refused(void **state)
{
    struct vocabulary v = bytes_only();
    add(&v, "\u0120\u0120", TOKEN_USER_DEFINED); /* stands for its letters, not for two spaces */
    add_merge(&v, "\u0120 \u0120");
    expect_refusal(&v, STRATA_E_FORMAT, "it makes token 256, which does not stand for the bytes of its two sides");
}

static void a_token_number_outside_the_vocabulary_is_refused(void **state)
{
    struct vocabulary v = bytes_only();
    v.eos = 256;
    expect_refusal(&v, STRATA_E_FORMAT, "tokenizer.ggml.eos_token_id is 256, but the vocabulary has 256 tokens");
}

static void a_special_token_of_a_novel_s_length_is_refused(void **state)
{
    struct vocabulary v = bytes_only();
    char *text = repeat("x", TOKENIZER_MAX_SPECIAL + 1);
    add(&v, text, TOKEN_USER_DEFINED);
    expect_refusal(&v, STRATA_E_UNSUPPORTED, "is a control or user-defined token of 513 bytes; at most 512 are supported");
    free(text);
}

/* ---- The bundled model ------------------------------------------------------------------------------------------------------ */

static void pebble_s_texts_have_the_tokens_that_transformers_gives(void **state)
{
    const char *path = "models/pebble/pebble.gguf";
    struct strata_error error = { 0 };
    struct gguf *gguf;
    struct tokenizer *tokenizer;
    if (access(path, R_OK) != 0) {
        printf("SKIPPED: %s is not there\n", path);
        skip();
    }
    if (gguf_open(&gguf, path, &error) < 0 || tokenizer_create(&tokenizer, gguf, &error) < 0)
        fail_msg("%s", error.text);
    gguf_close(gguf);
    assert_int_equal(tokenizer_info(tokenizer)->n_tokens, 4096);
    assert_int_equal(tokenizer_find(tokenizer, "<|im_start|>"), 4064);
    assert_true(tokenizer_is_end(tokenizer, 4063));
    assert_true(tokenizer_is_end(tokenizer, 4065));
    expect_ids(tokenizer, "Once upon a time", true, IDS(2683, 324, 656, 258, 563));
    expect_ids(tokenizer,
               "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", true,
               IDS(4064, 377, 198, 600, 340, 262, 1071, 285, 1829, 324, 30, 4065, 198, 4064, 393, 198, 4087, 278, 4088, 278));
    expect_ids(tokenizer, "<|im_start|>", false, IDS(27, 91, 339, 62, 335, 586, 91, 29));
    tokenizer_destroy(tokenizer);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_end_of_a_character_is_found),
        cmocka_unit_test(a_stream_gives_the_same_text_wherever_it_is_cut),
        cmocka_unit_test(a_stream_never_gives_out_half_a_character),
        cmocka_unit_test(an_ended_stream_can_start_again),
        cmocka_unit_test(text_is_composed),
        cmocka_unit_test(long_runs_of_marks_are_sorted_like_short_ones),
        cmocka_unit_test(a_megabyte_of_marks_is_normalized_in_time),
        cmocka_unit_test(words_keep_the_space_before_them),
        cmocka_unit_test(digits_stand_alone),
        cmocka_unit_test(contractions_are_cut_off_in_either_case),
        cmocka_unit_test(punctuation_takes_the_line_ends_after_it),
        cmocka_unit_test(white_space_leaves_its_last_character_to_a_word),
        cmocka_unit_test(white_space_ends_at_its_last_line_end),
        cmocka_unit_test(white_space_is_that_of_unicode),
        cmocka_unit_test(a_zero_width_space_is_no_white_space),
        cmocka_unit_test(combining_marks_belong_to_words_in_qwen35),
        cmocka_unit_test(combining_marks_end_words_in_qwen2),
        cmocka_unit_test(a_megabyte_without_a_word_is_cut_in_time),
        cmocka_unit_test(the_lowest_rank_merges_first),
        cmocka_unit_test(the_leftmost_of_equal_pairs_merges_first),
        cmocka_unit_test(a_merged_token_merges_on_either_side),
        cmocka_unit_test(merging_stops_at_the_end_of_a_word),
        cmocka_unit_test(a_megabyte_without_a_space_is_encoded_in_time),
        cmocka_unit_test(control_tokens_are_parsed_only_when_asked),
        cmocka_unit_test(user_defined_tokens_are_always_parsed),
        cmocka_unit_test(unused_tokens_are_never_parsed),
        cmocka_unit_test(the_longest_special_token_at_a_place_wins),
        cmocka_unit_test(the_leftmost_special_token_wins_over_a_longer_one),
        cmocka_unit_test(a_special_token_cut_short_is_plain_text),
        cmocka_unit_test(special_tokens_are_found_by_their_text),
        cmocka_unit_test(text_is_normalized_before_it_is_encoded),
        cmocka_unit_test(special_tokens_are_found_before_normalization),
        cmocka_unit_test(bytes_that_are_not_text_come_back),
        cmocka_unit_test(an_empty_text_has_no_tokens),
        cmocka_unit_test(a_text_beyond_the_limit_is_refused),
        cmocka_unit_test(control_tokens_are_shown_only_when_asked),
        cmocka_unit_test(unused_tokens_and_numbers_outside_decode_to_nothing),
        cmocka_unit_test(a_special_token_is_shown_as_it_is_written),
        cmocka_unit_test(a_character_spread_over_tokens_is_put_together),
        cmocka_unit_test(the_named_tokens_are_read),
        cmocka_unit_test(tokens_that_the_file_does_not_name_are_minus_one),
        cmocka_unit_test(a_generation_ends_at_eos_and_at_the_known_stops),
        cmocka_unit_test(a_stop_named_twice_counts_once),
        cmocka_unit_test(a_missing_key_is_named),
        cmocka_unit_test(another_kind_of_vocabulary_is_refused),
        cmocka_unit_test(an_unknown_pre_tokenizer_is_refused_with_the_known_ones),
        cmocka_unit_test(tokens_that_are_no_strings_are_refused),
        cmocka_unit_test(fewer_types_than_tokens_are_refused),
        cmocka_unit_test(a_type_outside_the_list_is_refused),
        cmocka_unit_test(a_text_that_occurs_twice_is_refused),
        cmocka_unit_test(a_vocabulary_without_a_byte_is_refused),
        cmocka_unit_test(a_tiny_vocabulary_is_refused),
        cmocka_unit_test(a_merge_of_unknown_tokens_is_refused),
        cmocka_unit_test(a_merge_that_is_no_pair_is_refused),
        cmocka_unit_test(a_merge_that_makes_a_control_token_is_refused),
        cmocka_unit_test(a_merge_that_changes_bytes_is_refused),
        cmocka_unit_test(a_token_number_outside_the_vocabulary_is_refused),
        cmocka_unit_test(a_special_token_of_a_novel_s_length_is_refused),
        cmocka_unit_test(pebble_s_texts_have_the_tokens_that_transformers_gives),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
