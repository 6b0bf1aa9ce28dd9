/* model.h - a loaded model and what a sequence leaves behind in it.
 *
 * One file per architecture implements `struct model_arch`. A model owns its weights (read-only after loading); a model_state is one
 * sequence's memory: recurrent states, KV, rings; a model_window is the scratch of one forward pass. The invariant: forward changes
 * nothing in a state that a rejected row would need; commit makes accepted rows permanent (design.md section 6).
 */
#ifndef MODEL_MODEL_H
#define MODEL_MODEL_H

#include "expert/store.h"
#include "gguf/gguf.h"
#include "ops/ops.h"

struct model;
struct model_state;
struct model_window;

/* One row of a window. Rows of one sequence are neighbours, at ascending consecutive positions inside its context; session/ checked that. */
struct model_row {
    struct model_state *state;
    const int32_t *tokens; /* the sequence's tokens, tokens[position] (in the vocabulary: the caller checked) is this row's; earlier ones are the n-gram context */
    int32_t position;
    bool certain;          /* will be kept: a certain row never follows an uncertain one of its sequence */
    bool wants_logits;
};

/* Called by forward after every layer with the wide residual of every row, [n][width]. */
typedef void model_probe_fn(void *context, int layer, int n, const float *residual, int width);

struct load_options {
    const char *pack;                         /* the experts in their tiled form (expert/store.h); NULL: from the GGUF file */
    bool verify;                              /* compare every layer's experts with the pack's hashes */
    bool ignore_memory;                       /* load even if the memory check says that it cannot fit */
    bool (*progress)(void *context, double part); /* 0..1, false stops; NULL: silent */
    void *progress_context;
    int direct;                               /* for tests: 1 reads past the page cache, -1 through it, 0 decides by the sizes */
};

struct model_arch {
    const char *name; /* general.architecture */
    int (*load)(struct model **out, const struct gguf *gguf, struct ops *ops, const struct load_options *options, struct strata_error *error);
    void (*destroy)(struct model *model);
    int (*window_create)(struct model_window **out, const struct model *model, struct strata_error *error);
    void (*window_destroy)(struct model_window *window);
    /* A sequence's memory for `context` tokens; address space only, pages count when they are used. */
    int (*state_create)(struct model_state **out, const struct model *model, int context, enum kv_type kv, struct strata_error *error);
    void (*state_destroy)(struct model_state *state);
    void (*state_reset)(struct model_state *state); /* back to an empty sequence */
    int (*forward)(struct model_window *window, const struct model_row *rows, int n, model_probe_fn *probe, void *probe_context, struct strata_error *error);
    /* Makes the first `n_kept` of the sequence's rows in the last forward permanent (at least its certain rows). Once per sequence and forward. */
    void (*commit)(struct model_window *window, struct model_state *state, int n_kept);
    const float *(*logits)(const struct model_window *window, int row); /* [n_vocab], valid until the next forward */
    uint64_t (*state_hash)(const struct model_state *state, int n_tokens); /* of everything a next token could read */
};

/* The start of every architecture's model struct. */
struct model {
    const struct model_arch *arch;
    struct ops *ops;
    int n_vocab, n_layers, hidden, max_context, n_used; /* n_used: experts per row */
    uint64_t weight_bytes; /* of RAM for weights */
    struct expert_store experts;
};

/* Loads with the architecture that general.architecture names, or says which are known. Without `ops` the model has shapes and sets of
 * experts, but no weights. `options` may be NULL. */
int model_load(struct model **out, const struct gguf *gguf, struct ops *ops, const struct load_options *options, struct strata_error *error);
/* Checks shapes and types without reading weights. */
int model_check(const struct gguf *gguf, struct strata_error *error);

/* Writes the model's experts in their tiled form (load_options.pack), with `threads` threads (0: pool_default_threads()). One layer at a
 * time is in memory; `path` is there when all of it is. */
int model_pack(const struct gguf *gguf, const char *path, int threads, bool (*progress)(void *context, double part), void *progress_context,
               struct strata_error *error);

extern const struct model_arch model_qwen4exp;

#endif
