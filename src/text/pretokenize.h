/* pretokenize.h - cuts text into the pieces that byte-pair encoding never merges across: words, digits, punctuation, white space.
 *
 * Owns one compiled regular expression. A cut is linear in the text's length and cannot fail: whatever the patterns do not
 * describe is a piece of one character.
 */
#ifndef TEXT_PRETOKENIZE_H
#define TEXT_PRETOKENIZE_H

#include "base/error.h"

struct pretokenizer;

/* By the name that GGUF stores in tokenizer.ggml.pre; an unknown name's error lists the known ones. */
int pretokenizer_create(struct pretokenizer **out, const char *name, struct strata_error *error);
void pretokenizer_destroy(struct pretokenizer *pretokenizer);

/* A cutter is one thread's place in one text. */
struct pretokenizer_cut {
    const struct pretokenizer *pretokenizer;
    void *match;
    const char *text; /* valid UTF-8 */
    size_t length, at;
};

int pretokenizer_cut_begin(struct pretokenizer_cut *cut, const struct pretokenizer *pretokenizer, struct strata_error *error);
void pretokenizer_cut_end(struct pretokenizer_cut *cut);
/* The next piece: its length, or 0 when the text is used up; it starts at text + (at before the call). */
size_t pretokenizer_cut_next(struct pretokenizer_cut *cut);

#endif
