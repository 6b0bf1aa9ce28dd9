#include "text/utf8.h"

#include <string.h>

int utf8_look(const void *text, size_t length)
{
    const uint8_t *s = text;
    uint8_t first = s[0];
    uint8_t low = 0x80, high = 0xbf; /* bounds of the second byte: no overlong forms, no surrogates, nothing past U+10FFFF */
    int n_more;
    if (first < 0x80)
        return 1;
    if (first >= 0xc2 && first <= 0xdf) {
        n_more = 1;
    } else if (first >= 0xe0 && first <= 0xef) {
        n_more = 2;
        low = first == 0xe0 ? 0xa0 : low;
        high = first == 0xed ? 0x9f : high;
    } else if (first >= 0xf0 && first <= 0xf4) {
        n_more = 3;
        low = first == 0xf0 ? 0x90 : low;
        high = first == 0xf4 ? 0x8f : high;
    } else {
        return -1;
    }
    for (int i = 1; i <= n_more; i++) {
        if ((size_t)i == length)
            return 0;
        if (s[i] < low || s[i] > high)
            return -i;
        low = 0x80;
        high = 0xbf;
    }
    return n_more + 1;
}

static size_t write_replacement(char *out)
{
    memcpy(out, "\xef\xbf\xbd", 3);
    return 3;
}

size_t utf8_stream_push(struct utf8_stream *stream, const void *bytes, size_t length, char *out)
{
    const char *text = bytes;
    size_t written = 0, used = 0;
    /* Complete the held character byte by byte. A byte that cannot continue it starts something new, so it is looked at again. */
    while (stream->n_held && used < length) {
        stream->held[stream->n_held] = (uint8_t)text[used];
        int n = utf8_look(stream->held, stream->n_held + 1);
        if (n < 0) {
            written += write_replacement(out + written);
            stream->n_held = 0;
            break;
        }
        used++;
        stream->n_held++;
        if (n > 0) {
            memcpy(out + written, stream->held, (size_t)n);
            written += (size_t)n;
            stream->n_held = 0;
        }
    }
    while (used < length) {
        int n = utf8_look(text + used, length - used);
        if (n > 0) {
            memcpy(out + written, text + used, (size_t)n);
            written += (size_t)n;
            used += (size_t)n;
        } else if (n < 0) {
            written += write_replacement(out + written);
            used += (size_t)-n;
        } else {
            stream->n_held = (uint32_t)(length - used);
            memcpy(stream->held, text + used, length - used);
            used = length;
        }
    }
    return written;
}

size_t utf8_stream_end(struct utf8_stream *stream, char *out)
{
    if (!stream->n_held)
        return 0;
    stream->n_held = 0;
    return write_replacement(out);
}
