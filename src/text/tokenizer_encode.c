#include <stdlib.h>
#include <string.h>

#include "text/nfc.h"
#include "text/tokenizer_private.h"

struct encoder {
    const struct tokenizer *tokenizer;
    struct strata_error *error;
    struct pretokenizer_cut cut;
    struct bpe_work work;
    int32_t *ids; /* [room] */
    size_t n_ids, room;
};

static int reserve(struct encoder *encoder, size_t n_more)
{
    if (n_more <= encoder->room - encoder->n_ids)
        return 0;
    size_t room = encoder->n_ids + n_more + encoder->room / 2 + 64;
    int32_t *ids = realloc(encoder->ids, room * sizeof *ids);
    if (!ids)
        return error_set(encoder->error, STRATA_E_MEMORY, "encoding a text: out of memory after %zu tokens", encoder->n_ids);
    encoder->ids = ids;
    encoder->room = room;
    return 0;
}

static int encode_piece(struct encoder *encoder, const char *piece, size_t length)
{
    int code = reserve(encoder, length);
    if (code < 0)
        return code;
    int64_t n = bpe_encode(&encoder->tokenizer->bpe, &encoder->work, (const uint8_t *)piece, length, encoder->ids + encoder->n_ids,
                           encoder->error);
    if (n < 0)
        return (int)n;
    encoder->n_ids += (size_t)n;
    return 0;
}

static int encode_utf8(struct encoder *encoder, const char *text, size_t length)
{
    char *normal;
    size_t normal_length;
    int changed = nfc_normalize(text, length, &normal, &normal_length, encoder->error);
    if (changed < 0)
        return changed;
    struct pretokenizer_cut *cut = &encoder->cut;
    cut->text = changed ? normal : text;
    cut->length = changed ? normal_length : length;
    cut->at = 0;
    int code = 0;
    for (size_t n; code == 0 && (n = pretokenizer_cut_next(cut)) > 0;)
        code = encode_piece(encoder, cut->text + cut->at - n, n);
    free(normal);
    return code;
}

/* Text between special tokens: runs of characters and runs of bytes that are none take turns. */
static int encode_plain(struct encoder *encoder, const char *text, size_t length)
{
    int code = 0;
    for (size_t at = 0; at < length && code == 0;) {
        size_t start = at;
        int n = 0;
        while (at < length && (n = utf8_look(text + at, length - at)) > 0)
            at += (size_t)n;
        if (at > start)
            code = encode_utf8(encoder, text + start, at - start);
        for (start = at; at < length && (n = utf8_look(text + at, length - at)) <= 0;)
            at += n < 0 ? (size_t)-n : length - at;
        if (at > start && code == 0)
            code = encode_piece(encoder, text + start, at - start);
    }
    return code;
}

/* First of special[low .. high) whose byte at `depth` is at least `byte`; all are longer than `depth` and equal before it. */
static uint32_t first_at_least(const struct special *special, uint32_t low, uint32_t high, size_t depth, int byte)
{
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (special[middle].text[depth] < byte)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The longest special token that the text begins with, or NULL. The candidates are sorted, so that those which agree with the text
 * so far are always one range. */
static const struct special *match_special(const struct tokenizer *tokenizer, const char *text, size_t length, bool control)
{
    const struct special *special = tokenizer->special, *longest = NULL;
    uint8_t byte = (uint8_t)text[0];
    uint32_t low = tokenizer->first[byte], high = tokenizer->first[byte + 1];
    for (size_t depth = 1; low < high; depth++) {
        if (special[low].length == depth) {
            if (control || !special[low].control)
                longest = &special[low];
            low++;
        }
        if (depth == length)
            break;
        byte = (uint8_t)text[depth];
        low = first_at_least(special, low, high, depth, byte);
        high = first_at_least(special, low, high, depth, byte + 1);
    }
    return longest;
}

static int encode_all(struct encoder *encoder, const char *text, size_t length, bool parse_special)
{
    size_t start = 0, at = 0;
    while (at < length) {
        const struct special *found = match_special(encoder->tokenizer, text + at, length - at, parse_special);
        if (!found) {
            at++;
            continue;
        }
        int code = encode_plain(encoder, text + start, at - start);
        if (code == 0)
            code = reserve(encoder, 1);
        if (code < 0)
            return code;
        encoder->ids[encoder->n_ids++] = found->id;
        at += found->length;
        start = at;
    }
    return encode_plain(encoder, text + start, length - start);
}

int64_t tokenizer_encode(const struct tokenizer *tokenizer, const char *text, size_t length, bool parse_special, int32_t **out,
                         struct strata_error *error)
{
    *out = NULL;
    if (length > TOKENIZER_MAX_TEXT)
        return error_set(error, STRATA_E_ARGUMENT, "a text of %zu bytes is too long to be encoded; at most %d are", length,
                         TOKENIZER_MAX_TEXT);
    struct encoder encoder = { .tokenizer = tokenizer, .error = error };
    int code = pretokenizer_cut_begin(&encoder.cut, tokenizer->pretokenizer, error);
    if (code == 0)
        code = reserve(&encoder, 1); /* an empty text has an array too */
    if (code == 0)
        code = encode_all(&encoder, text, length, parse_special);
    pretokenizer_cut_end(&encoder.cut);
    bpe_work_free(&encoder.work);
    if (code < 0) {
        free(encoder.ids);
        return code;
    }
    *out = encoder.ids;
    return (int64_t)encoder.n_ids;
}
