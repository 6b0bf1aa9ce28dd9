/* utf8.h - where a character ends, and text that arrives in pieces.
 *
 * Owns the only reading of UTF-8 in this room. It never fails: bytes that are no character are counted, not refused. The
 * invariant: what a stream gives out is valid UTF-8 after every call, whatever bytes went in.
 *
 * Ill-formed bytes are grouped as the Unicode standard recommends (section 3.9, "maximal subpart"): the longest beginning of a
 * character that cannot be completed counts as one error. Browsers and Hugging Face's tokenizers do the same.
 */
#ifndef TEXT_UTF8_H
#define TEXT_UTF8_H

#include <stddef.h>
#include <stdint.h>

/* Looks at the first character of text[0 .. length), length >= 1. Returns
 *     n > 0   it is a whole character of n bytes
 *     0       everything up to the end is the beginning of a character: more bytes could complete it
 *     -n      the first n bytes are no character */
int utf8_look(const void *text, size_t length);

/* Gives out what is whole and holds back the beginning of a character, at most 3 bytes. Start from a zeroed struct. */
struct utf8_stream {
    uint8_t held[4];
    uint32_t n_held;
};

/* Bytes that `out` needs for a push of `length` bytes: each may become U+FFFD, and so may the held ones. */
#define UTF8_STREAM_ROOM(length) (3 * ((size_t)(length) + 3))

/* Both return the number of bytes written to `out`. The end turns held bytes into U+FFFD and leaves a fresh stream; it needs room
 * for UTF8_STREAM_ROOM(0). */
size_t utf8_stream_push(struct utf8_stream *stream, const void *bytes, size_t length, char *out);
size_t utf8_stream_end(struct utf8_stream *stream, char *out);

#endif
