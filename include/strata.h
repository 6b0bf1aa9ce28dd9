/* strata.h - the only public header of the Strata inference engine.
 *
 * An *engine* is a loaded model: weights and tokenizer, read-only, shared by any number of sessions. A *session* is one
 * conversation: its tokens and the states they left behind. A *window* is one forward pass over 1 to STRATA_MAX_ROWS rows; a
 * row is one token of one session. The caller decides afterwards how many rows of each session to keep (commit).
 *
 * The invariant: the output depends on weights, prompt and seed alone, bit for bit; not on threads, instruction set, window
 * width, batch, drafts or restarts.
 *
 * Errors: a function returns 0 or a negative STRATA_E... code and leaves a sentence in the caller's struct strata_error
 * (which may be NULL). Nothing here prints or exits. Threads: an engine and its sessions belong to one thread at a time.
 */
#ifndef STRATA_H
#define STRATA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    STRATA_E_IO = -1,          /* the system refused: open, read, write */
    STRATA_E_FORMAT = -2,      /* the file breaks its format */
    STRATA_E_UNSUPPORTED = -3, /* a valid file or request that Strata does not handle */
    STRATA_E_MEMORY = -4,      /* not enough memory */
    STRATA_E_ARGUMENT = -5,    /* the caller asked for something impossible */
    STRATA_E_NUMERIC = -6,     /* a value was not finite; the sentence names the layer */
    STRATA_E_STOPPED = -7,     /* the progress callback asked to stop */
};

/* Filled by the function that failed: one sentence, without a full stop or newline. Owned by the caller. */
struct strata_error {
    int code;
    char text[512];
};

#endif
