/* tokenizer_private.h - what loading (tokenizer.c) and encoding (tokenizer_encode.c) share. */
#ifndef TEXT_TOKENIZER_PRIVATE_H
#define TEXT_TOKENIZER_PRIVATE_H

#include "text/bpe.h"
#include "text/pretokenize.h"
#include "text/tokenizer.h"

/* A token that is found in the text by its own letters. */
struct special {
    const uint8_t *text;
    uint32_t length;
    int32_t id;
    bool control;
};

struct tokenizer {
    struct tokenizer_info info;
    uint8_t *bytes;          /* of all tokens, one after the other */
    uint64_t *start;         /* [n_tokens + 1], into bytes */
    uint8_t *types;          /* [n_tokens] enum token_type */
    struct special *special; /* [n_special], sorted by text, a beginning before what it begins */
    uint32_t n_special;
    uint32_t first[257]; /* special[first[b] .. first[b + 1]) start with byte b */
    struct bpe bpe;
    struct pretokenizer *pretokenizer;
};

#endif
