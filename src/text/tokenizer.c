#include "text/tokenizer.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "text/tokenizer_private.h"

/* The printable alphabet in which vocabularies write bytes: the visible characters of Latin-1 stand for themselves, the other 68
 * bytes, in order, are U+0100, U+0101, ... */
enum { ALPHABET_END = 0x100 + 68 };

static bool byte_is_visible(int b) { return (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae; }

static void fill_alphabet(int16_t byte_of[ALPHABET_END])
{
    int n_hidden = 0;
    memset(byte_of, 0xff, ALPHABET_END * sizeof *byte_of);
    for (int b = 0; b < 256; b++)
        byte_of[byte_is_visible(b) ? b : 0x100 + n_hidden++] = (int16_t)b;
}

/* The bytes that a vocabulary entry stands for, or -1 if it is not written in the alphabet. `out` has room for text.length. */
static int64_t alphabet_to_bytes(const int16_t byte_of[ALPHABET_END], struct gguf_string text, uint8_t *out)
{
    const uint8_t *s = (const uint8_t *)text.data;
    int64_t n = 0;
    for (uint64_t i = 0; i < text.length;) {
        int length = utf8_look(s + i, text.length - i);
        if (length != 1 && length != 2)
            return -1;
        int c = length == 1 ? s[i] : (s[i] & 0x1f) << 6 | (s[i + 1] & 0x3f);
        if (c >= ALPHABET_END || byte_of[c] < 0)
            return -1;
        out[n++] = (uint8_t)byte_of[c];
        i += (uint64_t)length;
    }
    return n;
}

/* Token texts as the file writes them -> token; needed while loading only. */
struct text_index {
    const struct gguf_string *texts; /* [n_tokens] */
    uint32_t *slots;                 /* [mask + 1], token + 1; 0 is free */
    uint32_t mask;
};

static uint32_t *index_slot(const struct text_index *index, const char *text, uint64_t length)
{
    uint32_t i = (uint32_t)XXH3_64bits(text, length) & index->mask;
    for (;; i = (i + 1) & index->mask) {
        const struct gguf_string *found = index->slots[i] ? &index->texts[index->slots[i] - 1] : NULL;
        if (!found || (found->length == length && memcmp(found->data, text, length) == 0))
            return &index->slots[i];
    }
}

static int32_t index_find(const struct text_index *index, const char *text, uint64_t length)
{
    return (int32_t)*index_slot(index, text, length) - 1;
}

static int index_create(struct text_index *index, const struct gguf_string *texts, int32_t n_tokens, struct strata_error *error)
{
    uint64_t n_slots = 16;
    while (n_slots < 2 * (uint64_t)n_tokens)
        n_slots *= 2;
    *index = (struct text_index){ texts, calloc(n_slots, sizeof *index->slots), (uint32_t)(n_slots - 1) };
    if (!index->slots)
        return error_set(error, STRATA_E_MEMORY, "a vocabulary of %d tokens: out of memory", n_tokens);
    for (int32_t id = 0; id < n_tokens; id++) {
        if (!texts[id].length)
            continue;
        uint32_t *slot = index_slot(index, texts[id].data, texts[id].length);
        if (*slot)
            return error_set(error, STRATA_E_FORMAT, "tokenizer.ggml.tokens: tokens %u and %d are both \"%.64s\"", *slot - 1, id,
                             texts[id].data);
        *slot = (uint32_t)id + 1;
    }
    return 0;
}

static int find_array(const struct gguf *gguf, const char *key, bool of_strings, const struct gguf_value **out,
                      struct strata_error *error)
{
    const struct gguf_value *value = gguf_find(gguf, key);
    if (!value)
        return error_set(error, STRATA_E_FORMAT, "the file has no %s; a tokenizer needs it", key);
    if (value->type != GGUF_ARRAY || (value->element == GGUF_STRING) != of_strings)
        return error_set(error, STRATA_E_FORMAT, "%s is not an array of %s", key, of_strings ? "strings" : "numbers");
    *out = value;
    return 0;
}

static int read_name(const struct gguf *gguf, const char *key, struct gguf_string *out, struct strata_error *error)
{
    int found = gguf_get_string(gguf, key, out, error);
    return found == 0 ? error_set(error, STRATA_E_FORMAT, "the file has no %s; a tokenizer needs it", key) : found;
}

static int read_types(struct tokenizer *tokenizer, const struct gguf *gguf, struct strata_error *error)
{
    const char *key = "tokenizer.ggml.token_type";
    const struct gguf_value *value;
    int32_t n_tokens = tokenizer->info.n_tokens;
    int code = find_array(gguf, key, false, &value, error);
    if (code < 0)
        return code;
    if (value->count != (uint64_t)n_tokens)
        return error_set(error, STRATA_E_FORMAT, "%s has %llu entries, tokenizer.ggml.tokens has %d; they must be as many", key,
                         (unsigned long long)value->count, n_tokens);
    for (int32_t id = 0; id < n_tokens; id++) {
        uint64_t type;
        code = gguf_value_u64(value, key, (uint64_t)id, &type, error);
        if (code < 0)
            return code;
        if (type < TOKEN_NORMAL || type > TOKEN_BYTE)
            return error_set(error, STRATA_E_FORMAT, "%s: token %d has type %llu; types are 1 to 6", key, id,
                             (unsigned long long)type);
        tokenizer->types[id] = (uint8_t)type;
    }
    return 0;
}

static bool is_special(int type) { return type == TOKEN_CONTROL || type == TOKEN_USER_DEFINED; }

/* Turns the texts into bytes and notes the token of each single byte. Only ordinary tokens are written in the alphabet; whatever is
 * not written in it stands for its own text. */
static int read_bytes(struct tokenizer *tokenizer, const struct gguf_string *texts, struct strata_error *error)
{
    int16_t byte_of[ALPHABET_END];
    uint64_t used = 0;
    fill_alphabet(byte_of);
    memset(tokenizer->bpe.byte_token, 0xff, sizeof tokenizer->bpe.byte_token);
    for (int32_t id = 0; id < tokenizer->info.n_tokens; id++) {
        uint8_t *out = tokenizer->bytes + used;
        bool ordinary = tokenizer->types[id] == TOKEN_NORMAL || tokenizer->types[id] == TOKEN_BYTE;
        int64_t length = ordinary ? alphabet_to_bytes(byte_of, texts[id], out) : -1;
        if (length == 1)
            tokenizer->bpe.byte_token[*out] = id;
        if (length < 0) {
            length = (int64_t)texts[id].length;
            memcpy(out, texts[id].data, texts[id].length);
        }
        if (is_special(tokenizer->types[id]) && length > TOKENIZER_MAX_SPECIAL)
            return error_set(error, STRATA_E_UNSUPPORTED,
                             "token %d (\"%.32s...\") is a control or user-defined token of %lld bytes; at most %d are supported",
                             id, texts[id].data, (long long)length, TOKENIZER_MAX_SPECIAL);
        if ((size_t)length > tokenizer->info.max_piece)
            tokenizer->info.max_piece = (size_t)length;
        tokenizer->start[id] = used;
        used += (uint64_t)length;
    }
    tokenizer->start[tokenizer->info.n_tokens] = used;
    for (int b = 0; b < 256; b++)
        if (tokenizer->bpe.byte_token[b] < 0)
            return error_set(
                error, STRATA_E_FORMAT,
                "tokenizer.ggml.tokens: no normal token stands for the byte 0x%02x alone; byte-level encoding needs all 256",
                (unsigned)b);
    return 0;
}

static int compare_special(const void *a, const void *b)
{
    const struct special *x = a, *y = b;
    int order = memcmp(x->text, y->text, x->length < y->length ? x->length : y->length);
    return order ? order : (x->length > y->length) - (x->length < y->length);
}

static int collect_special(struct tokenizer *tokenizer, struct strata_error *error)
{
    int32_t n_tokens = tokenizer->info.n_tokens;
    uint32_t n = 0;
    for (int32_t id = 0; id < n_tokens; id++)
        n += is_special(tokenizer->types[id]);
    tokenizer->special = malloc((n + 1) * sizeof *tokenizer->special);
    if (!tokenizer->special)
        return error_set(error, STRATA_E_MEMORY, "a vocabulary of %d tokens: out of memory", n_tokens);
    for (int32_t id = 0; id < n_tokens; id++) {
        uint32_t length = (uint32_t)(tokenizer->start[id + 1] - tokenizer->start[id]);
        if (is_special(tokenizer->types[id]) && length)
            tokenizer->special[tokenizer->n_special++] =
                (struct special){ tokenizer->bytes + tokenizer->start[id], length, id, tokenizer->types[id] == TOKEN_CONTROL };
    }
    qsort(tokenizer->special, tokenizer->n_special, sizeof *tokenizer->special, compare_special);
    for (uint32_t i = 0; i < tokenizer->n_special; i++)
        tokenizer->first[tokenizer->special[i].text[0] + 1]++;
    for (int b = 0; b < 256; b++)
        tokenizer->first[b + 1] += tokenizer->first[b];
    return 0;
}

/* Whether the merged token's bytes are those of its sides. A token that is not written in the alphabet could break this. */
static bool joins(const struct tokenizer *tokenizer, struct bpe_merge merge)
{
    const uint64_t *start = tokenizer->start;
    const uint8_t *bytes = tokenizer->bytes, *result = bytes + start[merge.result];
    size_t n_left = start[merge.left + 1] - start[merge.left], n_right = start[merge.right + 1] - start[merge.right];
    return start[merge.result + 1] - start[merge.result] == n_left + n_right &&
           memcmp(result, bytes + start[merge.left], n_left) == 0 &&
           memcmp(result + n_left, bytes + start[merge.right], n_right) == 0;
}

/* One merge, "left right": the alphabet has no space, so the first one after the first character parts them. `whole` has room for
 * the text without its space. */
static int parse_merge(const struct tokenizer *tokenizer, const struct text_index *index, struct gguf_string text, char *whole,
                       struct bpe_merge *merge, struct strata_error *error)
{
    const char *space = text.length > 2 ? memchr(text.data + 1, ' ', text.length - 2) : NULL;
    if (!space)
        return error_set(error, STRATA_E_FORMAT, "wanted two tokens and a space between them");
    const char *right = space + 1;
    size_t n_left = (size_t)(space - text.data), n_right = text.length - n_left - 1;
    memcpy(whole, text.data, n_left);
    memcpy(whole + n_left, right, n_right);
    merge->left = index_find(index, text.data, n_left);
    merge->right = index_find(index, right, n_right);
    merge->result = index_find(index, whole, n_left + n_right);
    if (merge->left < 0 || merge->right < 0)
        return error_set(error, STRATA_E_FORMAT, "its %s side is not a token of the vocabulary",
                         merge->left < 0 ? "left" : "right");
    if (merge->result < 0)
        return error_set(error, STRATA_E_FORMAT, "its two sides together are not a token of the vocabulary");
    int type = tokenizer->types[merge->result];
    if (type != TOKEN_NORMAL && type != TOKEN_USER_DEFINED)
        return error_set(error, STRATA_E_FORMAT, "it makes token %d, whose type is %d; plain text may not become such a token",
                         merge->result, type);
    if (!joins(tokenizer, *merge))
        return error_set(error, STRATA_E_FORMAT, "it makes token %d, which does not stand for the bytes of its two sides",
                         merge->result);
    return 0;
}

static int read_merges(struct tokenizer *tokenizer, const struct gguf *gguf, const struct text_index *index,
                       struct strata_error *error)
{
    const char *key = "tokenizer.ggml.merges";
    const struct gguf_value *value;
    int code = find_array(gguf, key, true, &value, error);
    if (code < 0)
        return code;
    const struct gguf_string *merges = value->data;
    if (value->count > INT32_MAX / 4)
        return error_set(error, STRATA_E_UNSUPPORTED, "%s has %llu entries; at most %d are supported", key,
                         (unsigned long long)value->count, INT32_MAX / 4);
    uint64_t longest = 0;
    for (uint64_t i = 0; i < value->count; i++)
        longest = merges[i].length > longest ? merges[i].length : longest;
    char *whole = malloc(longest + 1);
    if (!whole)
        return error_set(error, STRATA_E_MEMORY, "%s: out of memory", key);
    code = bpe_create(&tokenizer->bpe, (uint32_t)value->count, error);
    for (uint64_t i = 0; i < value->count && code == 0; i++) {
        struct bpe_merge merge;
        code = parse_merge(tokenizer, index, merges[i], whole, &merge, error);
        if (code == 0)
            bpe_add(&tokenizer->bpe, merge);
        else
            error_prefix(error, code, "%s: entry %llu, \"%.64s\"", key, (unsigned long long)i, merges[i].data);
    }
    free(whole);
    return code;
}

static int read_id(const struct tokenizer *tokenizer, const struct gguf *gguf, const char *key, int32_t *out,
                   struct strata_error *error)
{
    uint32_t id;
    *out = -1;
    int found = gguf_get_u32(gguf, key, &id, error);
    if (found <= 0)
        return found;
    if (id >= (uint32_t)tokenizer->info.n_tokens)
        return error_set(error, STRATA_E_FORMAT, "%s is %u, but the vocabulary has %d tokens", key, id, tokenizer->info.n_tokens);
    *out = (int32_t)id;
    return 0;
}

static void add_end(struct tokenizer_info *info, int32_t id)
{
    int i = info->n_end;
    for (int j = 0; j < info->n_end; j++)
        if (info->end[j] == id)
            return;
    if (id < 0)
        return;
    for (; i && info->end[i - 1] > id; i--)
        info->end[i] = info->end[i - 1];
    info->end[i] = id;
    info->n_end++;
}

/* Files differ in which of the chat's two stops they call eos, so those known by name count too. */
static int read_ids(struct tokenizer *tokenizer, const struct gguf *gguf, const struct text_index *index,
                    struct strata_error *error)
{
    static const char *const ends[] = { "<|endoftext|>", "<|im_end|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>" };
    _Static_assert(sizeof ends / sizeof *ends < TOKENIZER_MAX_END, "room for eos too");
    struct tokenizer_info *info = &tokenizer->info;
    int code = read_id(tokenizer, gguf, "tokenizer.ggml.bos_token_id", &info->bos, error);
    if (code == 0)
        code = read_id(tokenizer, gguf, "tokenizer.ggml.eos_token_id", &info->eos, error);
    if (code == 0)
        code = read_id(tokenizer, gguf, "tokenizer.ggml.padding_token_id", &info->pad, error);
    if (code == 0)
        code = gguf_get_bool(gguf, "tokenizer.ggml.add_bos_token", &info->add_bos, error);
    if (code < 0)
        return code;
    add_end(info, info->eos);
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        add_end(info, index_find(index, ends[i], strlen(ends[i])));
    return 0;
}

int tokenizer_create(struct tokenizer **out, const struct gguf *gguf, struct strata_error *error)
{
    *out = NULL;
    struct gguf_string model, pre;
    const struct gguf_value *tokens;
    int code = read_name(gguf, "tokenizer.ggml.model", &model, error);
    if (code < 0)
        return code;
    if (strcmp(model.data, "gpt2") != 0)
        return error_set(error, STRATA_E_UNSUPPORTED,
                         "tokenizer.ggml.model is \"%.64s\"; Strata knows gpt2 (byte-level byte-pair encoding)", model.data);
    if ((code = read_name(gguf, "tokenizer.ggml.pre", &pre, error)) < 0 ||
        (code = find_array(gguf, "tokenizer.ggml.tokens", true, &tokens, error)) < 0)
        return code;
    if (tokens->count < 256 || tokens->count > INT32_MAX / 4)
        return error_set(error, STRATA_E_FORMAT, "tokenizer.ggml.tokens has %llu entries; wanted 256 to %d",
                         (unsigned long long)tokens->count, INT32_MAX / 4);

    const struct gguf_string *texts = tokens->data;
    int32_t n_tokens = (int32_t)tokens->count;
    uint64_t n_bytes = 0;
    for (int32_t id = 0; id < n_tokens; id++)
        n_bytes += texts[id].length;
    struct text_index index = { 0 };
    struct tokenizer *tokenizer = calloc(1, sizeof *tokenizer);
    if (tokenizer) {
        tokenizer->info.n_tokens = n_tokens;
        tokenizer->bytes = malloc(n_bytes + 1);
        tokenizer->start = malloc(((size_t)n_tokens + 1) * sizeof *tokenizer->start);
        tokenizer->types = malloc((size_t)n_tokens);
    }
    if (!tokenizer || !tokenizer->bytes || !tokenizer->start || !tokenizer->types)
        code = error_set(error, STRATA_E_MEMORY, "a vocabulary of %d tokens: out of memory", n_tokens);
    else if ((code = pretokenizer_create(&tokenizer->pretokenizer, pre.data, error)) == 0 &&
             (code = read_types(tokenizer, gguf, error)) == 0 && (code = index_create(&index, texts, n_tokens, error)) == 0 &&
             (code = read_bytes(tokenizer, texts, error)) == 0 && (code = read_merges(tokenizer, gguf, &index, error)) == 0 &&
             (code = collect_special(tokenizer, error)) == 0)
        code = read_ids(tokenizer, gguf, &index, error);
    free(index.slots);
    if (code < 0) {
        tokenizer_destroy(tokenizer);
        return code;
    }
    *out = tokenizer;
    return 0;
}

void tokenizer_destroy(struct tokenizer *tokenizer)
{
    if (!tokenizer)
        return;
    pretokenizer_destroy(tokenizer->pretokenizer);
    bpe_destroy(&tokenizer->bpe);
    free(tokenizer->special);
    free(tokenizer->bytes);
    free(tokenizer->start);
    free(tokenizer->types);
    free(tokenizer);
}

const struct tokenizer_info *tokenizer_info(const struct tokenizer *tokenizer) { return &tokenizer->info; }

enum token_type tokenizer_type(const struct tokenizer *tokenizer, int32_t id)
{
    return id < 0 || id >= tokenizer->info.n_tokens ? TOKEN_UNUSED : (enum token_type)tokenizer->types[id];
}

bool tokenizer_is_end(const struct tokenizer *tokenizer, int32_t id)
{
    for (int i = 0; i < tokenizer->info.n_end; i++)
        if (tokenizer->info.end[i] == id)
            return true;
    return false;
}

int32_t tokenizer_find(const struct tokenizer *tokenizer, const char *text)
{
    size_t length = strlen(text);
    if (!length || length > TOKENIZER_MAX_SPECIAL)
        return -1;
    struct special wanted = { .text = (const uint8_t *)text, .length = (uint32_t)length };
    const struct special *found =
        bsearch(&wanted, tokenizer->special, tokenizer->n_special, sizeof *tokenizer->special, compare_special);
    return found ? found->id : -1;
}

size_t tokenizer_piece(const struct tokenizer *tokenizer, int32_t id, bool show_special, const char **data)
{
    enum token_type type = tokenizer_type(tokenizer, id);
    *data = "";
    if (type == TOKEN_UNUSED || (!show_special && (type == TOKEN_CONTROL || type == TOKEN_UNKNOWN)))
        return 0;
    *data = (const char *)tokenizer->bytes + tokenizer->start[id];
    return (size_t)(tokenizer->start[id + 1] - tokenizer->start[id]);
}

int64_t tokenizer_decode(const struct tokenizer *tokenizer, const int32_t *ids, size_t n, bool show_special, char **out,
                         struct strata_error *error)
{
    *out = NULL;
    const char *piece;
    size_t room = UTF8_STREAM_ROOM(0) + 1;
    for (size_t i = 0; i < n; i++)
        room += 3 * tokenizer_piece(tokenizer, ids[i], show_special, &piece);
    char *text = malloc(room);
    if (!text)
        return error_set(error, STRATA_E_MEMORY, "decoding %zu tokens: out of memory", n);
    struct utf8_stream stream = { 0 };
    size_t written = 0;
    for (size_t i = 0; i < n; i++) {
        size_t length = tokenizer_piece(tokenizer, ids[i], show_special, &piece);
        written += utf8_stream_push(&stream, piece, length, text + written);
    }
    written += utf8_stream_end(&stream, text + written);
    text[written] = 0;
    *out = text;
    return (int64_t)written;
}
