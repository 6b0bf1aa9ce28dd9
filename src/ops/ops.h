/* ops.h - the operations a model is made of: one table per backend, called in order by model/.
 *
 * A model lists calls; a CPU backend computes when called. No call depends on a value that an earlier call computed (a device may run
 * them later, as a graph): what varies from window to window - positions, cells, lengths - sits in small records that the caller
 * fills before the window starts, or that an operation writes for a later one (the selection, the routing).
 *
 * Everything works on a window of n rows (1..KERNEL_MAX_ROWS). Activations are float32 matrices whose rows lie ops_padded(width) floats
 * apart: products come in tiles of 16. Sums follow design.md section 2; the element formulas are those of vector.h and spec/model.md
 * section 3.
 */
#ifndef OPS_OPS_H
#define OPS_OPS_H

#include "base/pool.h"
#include "ops/kernels.h"
#include "ops/vector.h"

enum { OPS_MAX_USED = 32 }; /* experts per row */

static inline int ops_padded(int width) { return (width + 15) & ~15; }

/* A weight matrix in tiles. */
struct matrix {
    const struct quant_format *format;
    int rows, width;       /* y[rows] = W[rows][width] x[width] */
    const uint8_t *tiles;  /* tile_count(rows) tiles, `stride` bytes apart */
    size_t stride;
    float scale;           /* the product is multiplied by it: NVFP4's `.scale` companion; 1 elsewhere */
};

/* Rows of the file's own layout, fetched one at a time: embeddings. */
struct row_table {
    const struct quant_format *format;
    int64_t rows;
    int width;
    const uint8_t *data;   /* mapped file, row_bytes apart */
};

/* One layer's routed experts. An expert is one blob: for every tile i, gate tile i then up tile i; then the tiles of down. */
struct expert_set {
    int layer, n_experts, hidden, width;
    const struct quant_format *gate, *up, *down;
    size_t gate_bytes, up_bytes, down_bytes; /* of one tile */
    size_t blob_bytes, down_offset;
    const uint8_t *blobs;                    /* [n_experts][blob_bytes], in RAM */
    const float *gate_scale, *up_scale, *down_scale; /* [n_experts] or NULL */
};

/* One distinct expert of a window and the (row, rank) pairs that chose it. */
struct expert_job {
    int expert, n_rows;
    uint8_t row[KERNEL_MAX_ROWS], rank[KERNEL_MAX_ROWS];
    const uint8_t *blob; /* where its weights are: the set's blobs, or a copy of them */
};

/* A window's activations: float values and, after `quantize`, their A8 form. */
struct activations {
    int width;
    float *values;   /* [KERNEL_MAX_ROWS][ops_padded(width)] */
    int8_t *codes;   /* [KERNEL_MAX_ROWS][width] */
    float *scales;   /* [KERNEL_MAX_ROWS][width/32] */
    int32_t *sums;   /* [KERNEL_MAX_ROWS][width/16] */
};

/* Rows first .. first+n-1 of the window belong to one sequence, at consecutive positions. The first `keep` of them are certain:
 * their effect on the states is permanent. */
struct row_span { int first, n, keep; };

struct route { int32_t ids[KERNEL_MAX_ROWS][OPS_MAX_USED]; float weights[KERNEL_MAX_ROWS][OPS_MAX_USED]; };

/* The cells a row attends to, ascending. */
struct selection { int32_t *cells; int n; };

/* One row's view of its sequence's attention state in one layer. */
struct attention_row {
    int32_t position;
    const float *cosines, *sines;              /* rope at `position`, [n_pairs] */
    struct kv_plane keys, values;
    float *raw_keys;                           /* ring [ring_rows][index_dim] of un-normed index keys, by position % ring_rows */
    int ring_rows;
    float *block_keys;                         /* [blocks][index_dim]: pooled, normed, rotated */
    const float *block_cosines, *block_sines;  /* rope at the first position of the block this row completes, if it does */
    float *scores;                             /* scratch [blocks] */
    struct selection selection;
};

struct attention_shape {
    int n_heads, kv_heads, dim, n_pairs;
    int index_heads, index_dim, block, budget_blocks; /* block 0: dense attention, no indexer */
    float eps;
};

struct delta_shape { int k_heads, v_heads, dim_k, dim_v; };

struct ops {
    void *backend;

    /* out[i] = row ids[i] of the table, decoded: n vectors of table->width. */
    void (*gather)(struct ops *ops, const struct row_table *table, const uint64_t *ids, int n, float *out);
    /* Every row and group: rms_norm; gamma has `gamma_groups` groups (1: shared). */
    void (*norm)(struct ops *ops, int n, const float *x, int groups, int dim, const float *gamma, int gamma_groups, float eps, int partials, float *out);
    void (*quantize)(struct ops *ops, int n, struct activations *a);
    /* out[i][t] = w[i] * row t of x. Several matrices share one input and one barrier. */
    void (*matmul)(struct ops *ops, int n, const struct activations *x, int n_matrices, const struct matrix *const *w, float *const *out);

    void (*gate_input)(struct ops *ops, int n, int width, int streams, const float *x, float *out);
    void (*mix)(struct ops *ops, int n, int streams, int dim, const float *gates, const float *normed, float *out);
    void (*write)(struct ops *ops, int n, int streams, int dim, const float *inject, const float *y, float *residual);

    /* taps[t][j]: input vectors of row t, oldest first. */
    void (*conv_silu)(struct ops *ops, int n, int n_taps, int channels, const float *const (*taps)[8], const float *kernel, float *out);
    /* Normalises q and k (in place in `qkv`, one row: q heads, k heads, v heads) and computes decay and beta from alpha, b. */
    void (*delta_prepare)(struct ops *ops, int n, const struct delta_shape *shape, float *qkv, const float *alpha, const float *b,
                          const float *a, const float *dt, float *decay, float *beta);
    /* The recurrence of every head over the rows of each span; state[s] is the span's. out: [n][v_heads*dim_v]. */
    void (*delta_rule)(struct ops *ops, int n_spans, const struct row_span *spans, float *const *state, const struct delta_shape *shape, const float *qkv,
                       const float *decay, const float *beta, float *out);
    /* out = norm(o) * gamma * sigmoid(z), per value head, in place. */
    void (*delta_output)(struct ops *ops, int n, const struct delta_shape *shape, float *o, const float *z, const float *gamma, float eps);

    /* q: [n][n_heads][2*dim] (query, then gate, per head); k, v: [n][kv_heads*dim]; iq: [n][index_heads*index_dim]; ik: [n][index_dim].
     * Norms and ropes q, k and iq in place, stores k, v and the raw index key, forms the block key a row completes. */
    void (*attention_store)(struct ops *ops, int n, const struct attention_shape *shape, const struct attention_row *rows, float *q, float *k,
                            const float *v, float *iq, const float *ik, const float *q_gamma, const float *k_gamma,
                            const float *iq_gamma, const float *ik_gamma);
    /* Fills rows[t].selection: the best budget_blocks complete blocks and the tail (spec 3.5), or all cells. */
    void (*attention_select)(struct ops *ops, int n, const struct attention_shape *shape, struct attention_row *rows, const float *iq);
    /* out: [n][n_heads*dim], already multiplied by sigmoid(gate). */
    void (*attend)(struct ops *ops, int n, const struct attention_shape *shape, const struct attention_row *rows, const float *q, float *out);

    void (*route)(struct ops *ops, int n, int n_experts, int n_used, const float *logits, struct route *route);
    /* parts: [n][n_used][hidden], one vector per (row, rank), complete after experts_wait: between the two the caller does what does not
     * need them. Who computes which expert is expert/'s business: it sets both entries. */
    void (*experts)(struct ops *ops, int n, int n_used, const struct expert_set *set, const struct activations *x, const struct route *route, float *parts);
    void (*experts_wait)(struct ops *ops, int n, int n_used, const struct expert_set *set, float *parts);
    void *expert_backend; /* of these two */
    void (*silu_mul)(struct ops *ops, int n, int width, const float *gate, const float *up, float *out);
    void (*combine)(struct ops *ops, int n, int n_used, int dim, const float *parts, const struct route *route, const float *shared,
                    const float *shared_gate, float *out);

    /* N-gram mix (spec 3.2 steps 2-3): p[s] = sigmoid(signed root of <k_s, q_s>/sqrt(dim)) * v. */
    void (*ngram_gate)(struct ops *ops, int n, int streams, int dim, const float *k, const float *q, const float *v, float *p);
    void (*add2)(struct ops *ops, size_t n, float *x, const float *a, const float *b); /* x = (x + a) + b */

    bool (*all_finite)(struct ops *ops, const float *x, size_t n);
};

/* The CPU backend: kernels of one instruction set shared out over a pool. `n_threads` 0: pool_default_threads(). */
int ops_cpu_create(struct ops **out, enum isa isa, int n_threads, struct strata_error *error);
void ops_cpu_destroy(struct ops *ops);
/* Room for ops_cpu_experts on sets of this width with n_used experts a row; once, before the first window. */
int ops_cpu_reserve_experts(struct ops *ops, int width, int n_used, struct strata_error *error);
/* Computes the jobs (at most KERNEL_MAX_ROWS * n_used): for each (row, rank) of each, parts[row][rank] = the expert's answer to row of x.
 * Returns -1, or a job that was not done within `timeout_s` (pool_run_within): the backend must not be used afterwards. */
int ops_cpu_experts(struct ops *ops, int n_used, const struct expert_set *set, const struct activations *x, const struct expert_job *jobs, int n_jobs,
                    float *parts, double timeout_s);
struct pool *ops_cpu_pool(struct ops *ops);
const char *ops_cpu_name(const struct ops *ops);

#endif
