/* tokenizer.h - text to token numbers and back, as the model file defines it.
 *
 * Owns the vocabulary: bytes and type of every token, the merges, the special tokens. Knows nothing of conversations (a chat
 * template writes those as text) or of models. The invariant: decoding what was encoded gives the text's bytes back, in Unicode
 * normalization form C where they are UTF-8, whatever bytes they are.
 *
 * How a text is encoded (spec/model.md section 2.4): special tokens are cut out, leftmost first and the longest at one place; what
 * is between them is normalized to form C and cut into words by the file's pre-tokenizer; each word's bytes are merged pair by
 * pair. Bytes that are not UTF-8 are words of their own. Time is linear but for a logarithm, whatever the text.
 *
 * Thread rules: a tokenizer does not change after tokenizer_create; any number of threads may use it.
 */
#ifndef TEXT_TOKENIZER_H
#define TEXT_TOKENIZER_H

#include "gguf/gguf.h"
#include "text/utf8.h"

/* As stored in tokenizer.ggml.token_type. */
enum token_type {
    TOKEN_NORMAL = 1,
    TOKEN_UNKNOWN = 2,
    TOKEN_CONTROL = 3,      /* structure, such as <|im_end|>: found in text only when asked for, shown only when asked for */
    TOKEN_USER_DEFINED = 4, /* a marker such as <think>: always found, always shown */
    TOKEN_UNUSED = 5,       /* padding of the vocabulary: never produced, shown as nothing */
    TOKEN_BYTE = 6,
};

enum {
    TOKENIZER_MAX_TEXT = 64 << 20, /* bytes; more than any context takes, and a bound on memory */
    TOKENIZER_MAX_SPECIAL = 512,   /* bytes of one control or user-defined token */
    TOKENIZER_MAX_END = 8,
};

struct tokenizer;

/* What callers ask most, filled once. A token that the file does not name is -1. */
struct tokenizer_info {
    int32_t n_tokens;
    int32_t bos, eos, pad;
    bool add_bos; /* the file wants bos at the start of a text; tokenizer_encode leaves that to the caller */
    int n_end;
    int32_t end[TOKENIZER_MAX_END]; /* the tokens that end a generation, ascending: eos and those known by name */
    size_t max_piece;               /* bytes of the longest token */
};

/* Reads tokenizer.ggml.*; nothing of `gguf` is kept. */
int tokenizer_create(struct tokenizer **out, const struct gguf *gguf, struct strata_error *error);
void tokenizer_destroy(struct tokenizer *tokenizer);
const struct tokenizer_info *tokenizer_info(const struct tokenizer *tokenizer);

/* Encodes `length` bytes. parse_special: control tokens written in the text count as such (a rendered chat template); otherwise
 * they are plain characters (a user's words). Returns the number of tokens and a malloc'd array in *out, or a negative code. */
int64_t tokenizer_encode(const struct tokenizer *tokenizer, const char *text, size_t length, bool parse_special, int32_t **out,
                         struct strata_error *error);

enum token_type tokenizer_type(const struct tokenizer *tokenizer, int32_t id); /* TOKEN_UNUSED outside the vocabulary */
bool tokenizer_is_end(const struct tokenizer *tokenizer, int32_t id);
/* The control or user-defined token written like this, or -1. */
int32_t tokenizer_find(const struct tokenizer *tokenizer, const char *text);

/* The bytes of one token, owned by the tokenizer, not terminated; they need not be whole characters. Control tokens are empty
 * unless `show_special`; unused ones and numbers outside the vocabulary always are. Returns the length. */
size_t tokenizer_piece(const struct tokenizer *tokenizer, int32_t id, bool show_special, const char **data);

/* Whole texts: malloc'd, zero-terminated, valid UTF-8 (what is no character becomes U+FFFD). Returns the length. For a text that
 * grows token by token feed tokenizer_piece to a struct utf8_stream. */
int64_t tokenizer_decode(const struct tokenizer *tokenizer, const int32_t *ids, size_t n, bool show_special, char **out,
                         struct strata_error *error);

#endif
