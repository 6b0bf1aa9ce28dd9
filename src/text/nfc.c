#include "text/nfc.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

/* No character below U+0300 combines with the one before it, and none of them changes alone, so text made of them is in form C. */
static bool is_plainly_normal(const char *text, size_t length)
{
    for (size_t i = 0; i < length; i++)
        if ((uint8_t)text[i] >= 0xcc) /* the first byte of U+0300 */
            return false;
    return true;
}

/* Fully decomposed text; `out` may be NULL to count only. */
static size_t decompose(const char *text, size_t length, utf8proc_int32_t *out, size_t room)
{
    const utf8proc_uint8_t *bytes = (const utf8proc_uint8_t *)text;
    int boundary = 0; /* asked for by the interface, used for grapheme breaks alone */
    size_t n = 0;
    for (size_t at = 0; at < length;) {
        utf8proc_int32_t c, *to = out ? out + n : NULL;
        at += (size_t)utf8proc_iterate(bytes + at, (utf8proc_ssize_t)(length - at), &c);
        n += (size_t)utf8proc_decompose_char(c, to, to ? (utf8proc_ssize_t)(room - n) : 0, UTF8PROC_DECOMPOSE, &boundary);
    }
    return n;
}

static int mark_class(utf8proc_int32_t c) { return utf8proc_get_property(c)->combining_class; }

/* Stable sort by combining class. Two or three marks in a row are the rule; a long run is an attack, and is counted out. */
static void sort_marks(utf8proc_int32_t *marks, size_t n, utf8proc_int32_t *scratch)
{
    if (n <= 16) {
        for (size_t i = 1; i < n; i++)
            for (size_t j = i; j && mark_class(marks[j - 1]) > mark_class(marks[j]); j--) {
                utf8proc_int32_t mark = marks[j];
                marks[j] = marks[j - 1];
                marks[j - 1] = mark;
            }
        return;
    }
    size_t start[257] = { 0 };
    for (size_t i = 0; i < n; i++)
        start[mark_class(marks[i]) + 1]++;
    for (int i = 0; i < 256; i++)
        start[i + 1] += start[i];
    for (size_t i = 0; i < n; i++)
        scratch[start[mark_class(marks[i])]++] = marks[i];
    memcpy(marks, scratch, n * sizeof *marks);
}

static void sort_all_marks(utf8proc_int32_t *text, size_t n, utf8proc_int32_t *scratch)
{
    for (size_t i = 0; i < n;) {
        size_t start = i;
        while (i < n && mark_class(text[i]))
            i++;
        if (i - start > 1)
            sort_marks(text + start, i - start, scratch);
        i += i == start;
    }
}

int nfc_normalize(const char *text, size_t length, char **out, size_t *out_length, struct strata_error *error)
{
    *out = NULL;
    *out_length = 0;
    if (is_plainly_normal(text, length))
        return 0;
    size_t n = decompose(text, length, NULL, 0);
    utf8proc_int32_t *buffer = malloc((n + 1) * sizeof *buffer); /* utf8proc_reencode ends its text with a zero */
    utf8proc_int32_t *scratch = malloc(n * sizeof *scratch);
    if (!buffer || !scratch) {
        free(buffer);
        free(scratch);
        return error_set(error, STRATA_E_MEMORY, "normalizing a text of %zu bytes: out of memory", length);
    }
    decompose(text, length, buffer, n);
    sort_all_marks(buffer, n, scratch);
    free(scratch);
    /* Composes, then writes UTF-8 over its own input: no character needs more than the four bytes that it had. */
    utf8proc_ssize_t written = utf8proc_reencode(buffer, (utf8proc_ssize_t)n, UTF8PROC_COMPOSE | UTF8PROC_STABLE);
    if (written < 0) {
        free(buffer);
        return error_set(error, STRATA_E_ARGUMENT, "normalizing a text of %zu bytes: %s", length, utf8proc_errmsg(written));
    }
    if ((size_t)written == length && memcmp(buffer, text, length) == 0) {
        free(buffer);
        return 0;
    }
    *out = (char *)buffer;
    *out_length = (size_t)written;
    return 1;
}
