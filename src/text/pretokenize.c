#define PCRE2_CODE_UNIT_WIDTH 8
#include "text/pretokenize.h"

#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

#include "text/utf8.h"

/* Unicode's White_Space property. PCRE2's own \s differs by U+180E, and in JavaScript's by U+0085 and U+FEFF. */
#define SPACE "\\t-\\r\\x20\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"

/* The alternatives of Qwen's pre-tokenizers, in order; what counts as a word's letter is where the generations differ: qwen2 knows
 * letters only, qwen35 combining marks too (so that a Thai or Hindi word stays whole). A trailing + after a quantifier forbids
 * to give characters back where that could not help anyway. Contractions are ASCII letters in either case. */
#define QWEN(WORD)                                                                                                                 \
    "'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])" /* English contractions */                                                        \
    "|[^\\r\\n\\p{L}\\p{N}]?[" WORD "]++"        /* a word, with one space or sign before it */                                    \
    "|\\p{N}"                                    /* every digit alone */                                                           \
    "| ?[^" SPACE WORD "\\p{N}]++[\\r\\n]*+"     /* punctuation, with the line ends after it */                                    \
    "|[" SPACE "]*[\\r\\n]++"                    /* white space up to the last line end of its run */                              \
    "|[" SPACE "]+(?![^" SPACE "])"              /* white space, except the last of a run that a word follows */                   \
    "|[" SPACE "]++"

static const struct {
    const char *name, *pattern;
} known[] = {
    { "qwen35", QWEN("\\p{L}\\p{M}") },
    { "qwen2", QWEN("\\p{L}") },
};

struct pretokenizer {
    pcre2_code *code;
    pcre2_match_context *limits;
};

int pretokenizer_create(struct pretokenizer **out, const char *name, struct strata_error *error)
{
    *out = NULL;
    const char *pattern = NULL;
    char names[128] = "";
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strcmp(known[i].name, name) == 0)
            pattern = known[i].pattern;
        if (i)
            strcat(names, ", ");
        strcat(names, known[i].name);
    }
    if (!pattern)
        return error_set(error, STRATA_E_UNSUPPORTED, "tokenizer.ggml.pre is \"%.64s\", which Strata does not know; it knows %s",
                         name, names);
    struct pretokenizer *pretokenizer = calloc(1, sizeof *pretokenizer);
    if (!pretokenizer)
        return error_set(error, STRATA_E_MEMORY, "pre-tokenizer %s: out of memory", name);
    int code;
    PCRE2_SIZE where;
    pretokenizer->code = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF, &code, &where, NULL);
    pretokenizer->limits = pcre2_match_context_create(NULL);
    if (!pretokenizer->code || !pretokenizer->limits) {
        pretokenizer_destroy(pretokenizer);
        return error_set(error, STRATA_E_MEMORY, "pre-tokenizer %s: PCRE2 cannot compile it (error %d at %zu)", name, code,
                         (size_t)where);
    }
    pcre2_jit_compile(pretokenizer->code, PCRE2_JIT_COMPLETE); /* where there is no JIT, matching is slower and gives the same */
    /* The limits guard against patterns that explode. Ours step back through one run at most: a long run is no error. */
    pcre2_set_match_limit(pretokenizer->limits, UINT32_MAX);
    pcre2_set_depth_limit(pretokenizer->limits, UINT32_MAX);
    pcre2_set_heap_limit(pretokenizer->limits, UINT32_MAX);
    *out = pretokenizer;
    return 0;
}

void pretokenizer_destroy(struct pretokenizer *pretokenizer)
{
    if (!pretokenizer)
        return;
    pcre2_code_free(pretokenizer->code);
    pcre2_match_context_free(pretokenizer->limits);
    free(pretokenizer);
}

int pretokenizer_cut_begin(struct pretokenizer_cut *cut, const struct pretokenizer *pretokenizer, struct strata_error *error)
{
    *cut = (struct pretokenizer_cut){ .pretokenizer = pretokenizer, .match = pcre2_match_data_create(1, NULL) };
    return cut->match ? 0 : error_set(error, STRATA_E_MEMORY, "pre-tokenizer: out of memory");
}

void pretokenizer_cut_end(struct pretokenizer_cut *cut)
{
    pcre2_match_data_free(cut->match);
    cut->match = NULL;
}

size_t pretokenizer_cut_next(struct pretokenizer_cut *cut)
{
    if (cut->at >= cut->length)
        return 0;
    /* The text was checked by the caller; letting PCRE2 check it again on each call would make the loop quadratic. */
    uint32_t options = PCRE2_ANCHORED | PCRE2_NO_UTF_CHECK;
    const struct pretokenizer *pretokenizer = cut->pretokenizer;
    int found =
        pcre2_match(pretokenizer->code, (PCRE2_SPTR)cut->text, cut->length, cut->at, options, cut->match, pretokenizer->limits);
    if (found == PCRE2_ERROR_JIT_STACKLIMIT)
        found = pcre2_match(pretokenizer->code, (PCRE2_SPTR)cut->text, cut->length, cut->at, options | PCRE2_NO_JIT, cut->match,
                            pretokenizer->limits);
    size_t end = found > 0 ? pcre2_get_ovector_pointer(cut->match)[1] : cut->at;
    if (end <= cut->at) {
        int n = utf8_look(cut->text + cut->at, cut->length - cut->at);
        end = cut->at + (size_t)(n > 0 ? n : 1);
    }
    size_t length = end - cut->at;
    cut->at = end;
    return length;
}
