/* strata.h - the only public header of the Strata inference engine.
 *
 * An *engine* is a loaded model: its weights, read-only, shared by any number of sessions. A *session* is one conversation: its
 * tokens and the states they left behind. A *window* is one forward pass over 1 to STRATA_MAX_ROWS rows; a row is one token of
 * one session. The caller decides afterwards how many rows of each session to keep (commit).
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
    STRATA_E_STALLED = -8,     /* a thread or a device hangs; the engine computes nothing more */
};

/* Filled by the function that failed: one sentence, without a full stop or newline. Owned by the caller. */
struct strata_error {
    int code;
    char text[512];
};

/* ---- Engine ------------------------------------------------------------------------------------------------------------------------ */

enum { STRATA_MAX_ROWS = 8 }; /* rows of a window */

struct strata_engine;
struct strata_session;

/* A simulated device: a thread with memory of its own that does what a graphics card would do. For tests and for studying cache policies; it
 * is no faster than the CPU. */
struct strata_sim {
    uint64_t vram_bytes;      /* for experts */
    double link_bytes_per_s;  /* 0: as fast as memory */
    double latency_s;         /* of a copy */
    unsigned delay_us;        /* random pauses up to this in every lane, to find races */
    const char *stall;        /* "hit", "link" or "cpu": that lane hangs in layer stall_layer from window stall_window on. NULL: none */
    int stall_layer;
    uint64_t stall_window;
};

/* All zero means defaults. */
struct strata_options {
    int threads;                                  /* 0: one per physical core */
    bool (*progress)(void *context, double part); /* loading, 0..1; returns false to stop. NULL: silent */
    void *progress_context;

    const char *pack;                 /* the experts in tiled form, from `strata pack`; NULL: read from the model file */
    bool verify;                      /* compare the pack's hashes with what was read */
    bool ignore_memory;               /* load even if it does not seem to fit into RAM */

    const struct strata_sim *sim;     /* experts are computed by a simulated device and the CPU together; NULL: by the CPU */
    const char *policy;               /* which experts the device keeps: "lfu", "lru", "none", ...; settings after a colon. NULL: the default */
    int max_swaps;                    /* experts exchanged at once, 0: 96; negative: none */
    int swap_period, swap_lag;        /* windows between two plans, and until a plan's experts are used. 0: 4 */
    bool fixed_share; int link_share; /* 0..256: so many 256ths of the misses go over the link. Not fixed: measured and chosen */
    const char *profile;              /* which experts to begin with, from strata_engine_save_profile. NULL: none */
    const char *trace;                /* a file that gets every window's routing (docs/FORMAT.md). NULL: none */
    double watchdog_s;                /* a lane that does nothing for so long is an error; 0: 20 s */
};

/* Opens a GGUF file (the first of a split model) and loads it. Sentences say what is wrong with a file. */
int strata_engine_open(struct strata_engine **out, const char *path, const struct strata_options *options, struct strata_error *error);
/* Sessions must be closed first. NULL is allowed. */
void strata_engine_close(struct strata_engine *engine);

struct strata_info {
    const char *isa;        /* the instruction set in use: "ref", "avx2", "avx512" */
    int threads;
    int n_vocab, n_layers, max_context;
    uint64_t weight_bytes;  /* RAM for weights; embedding tables stay in the file */
    uint64_t expert_bytes;  /* of it for experts */
    const char *device;     /* "cpu" or "sim" */
};
void strata_engine_info(const struct strata_engine *engine, struct strata_info *info);

/* What the experts' lanes did: in device memory (hit), brought over the link, on the CPU. Times are of one layer of one window in which the lane
 * had work, over the last 256 windows. A request is one distinct expert of a layer of a window. */
enum strata_lane { STRATA_LANE_HIT, STRATA_LANE_LINK, STRATA_LANE_CPU, STRATA_LANES };
struct strata_lane_stats { uint64_t experts, bytes; double mean_us, p95_us; };
struct strata_stats {
    uint64_t windows, requests, hits, swaps, swap_bytes; /* of the whole model */
    int slots;                                           /* experts that the device can hold */
    uint64_t slot_bytes;
    struct strata_lane_stats lanes[STRATA_LANES];
    double layer_mean_us, layer_p95_us;                  /* until all lanes were done; 0 without a device */
};
/* `layer`: lanes of that layer alone; -1: of all. */
void strata_engine_stats(const struct strata_engine *engine, int layer, struct strata_stats *stats);
/* Writes which experts this run used most. A failure leaves an older file as it was. */
int strata_engine_save_profile(const struct strata_engine *engine, const char *path, struct strata_error *error);
/* Completes the trace. Closing the engine does so too, but cannot say that the disk was full. */
int strata_engine_end_trace(struct strata_engine *engine, struct strata_error *error);

/* After every layer of every window, one call per row: residual is the wide residual [width] of that row. For hashes and tests. NULL ends it. */
typedef void strata_probe_fn(void *context, const struct strata_session *session, int position, int layer, const float *residual, int width);
void strata_engine_probe(struct strata_engine *engine, strata_probe_fn *probe, void *context);

/* ---- Session ----------------------------------------------------------------------------------------------------------------------- */

enum strata_kv { STRATA_KV_F16, STRATA_KV_INT8 }; /* the one setting that changes the arithmetic */

/* `context`: most tokens it may hold, 1 .. max_context; memory is taken as it fills. */
int strata_session_open(struct strata_session **out, struct strata_engine *engine, int context, enum strata_kv kv, struct strata_error *error);
void strata_session_close(struct strata_session *session);

int strata_session_length(const struct strata_session *session);            /* committed tokens */
const int32_t *strata_session_tokens(const struct strata_session *session); /* [length], the session's memory */

/* Makes the session's tokens equal `tokens` and leaves the logits of the last in strata_session_logits. What is there already is kept if
 * `tokens` continues it; otherwise the session starts anew. `width` rows per window, 1 .. STRATA_MAX_ROWS (any width: the same bits).
 * `progress` as in the options, or NULL. After a failure the session is empty. */
int strata_session_sync(struct strata_session *session, const int32_t *tokens, int n, int width, bool (*progress)(void *, double), void *progress_context,
                        struct strata_error *error);
/* Logits [n_vocab] after the last committed token, valid until the next window of any session; NULL before the first. */
const float *strata_session_logits(const struct strata_session *session);
/* A hash of the state that a next token could read: equal states, equal hashes. */
uint64_t strata_session_hash(const struct strata_session *session);

/* ---- Window ------------------------------------------------------------------------------------------------------------------------ */

/* Rows of one session are neighbours; the first continues the committed tokens. `certain`: will be kept whatever the outcome (its effect on
 * the states is cheaper); certain rows come before the others of a session. */
struct strata_row {
    struct strata_session *session;
    int32_t token;
    bool certain;
    bool wants_logits;
};

/* One forward pass. Nothing is committed; every session in it must be committed (or closed) before the next window, also of other sessions.
 * STRATA_E_ARGUMENT: refused before anything was touched. Any other failure leaves the sessions of the window empty. */
int strata_window_run(struct strata_engine *engine, const struct strata_row *rows, int n, struct strata_error *error);
/* Logits [n_vocab] of a row of the last window, NULL if it did not want them. Valid until the next window. */
const float *strata_window_logits(const struct strata_engine *engine, int row);
/* Keeps the session's first n rows of the last window: at least its certain ones, at most all. The logits of the last kept row become the
 * session's. */
int strata_session_commit(struct strata_session *session, int n, struct strata_error *error);

#endif
