/* nfc.h - Unicode normalization form C, in linear time.
 *
 * Hugging Face's Qwen tokenizers normalize text before they split it. utf8proc has the tables and the composition; its own
 * decomposition sorts long runs of combining marks by insertion, so that a hostile megabyte of them would take minutes. Here they
 * are counted.
 */
#ifndef TEXT_NFC_H
#define TEXT_NFC_H

#include "base/error.h"

/* `text` is valid UTF-8. Returns 1 and a malloc'd text in *out if normalizing changed something, 0 (with *out = NULL) if the text
 * is in form C already, or a negative code. */
int nfc_normalize(const char *text, size_t length, char **out, size_t *out_length, struct strata_error *error);

#endif
