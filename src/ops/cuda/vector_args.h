/* vector_args.h - the arguments and grids of the kernels that are not products with weights: vector.cu, delta.cu, attention.cu.
 *
 * Every pointer is the device's (device memory, or mapped host memory). Launches are recorded in a graph once per window width, so the
 * arguments hold only shapes and fixed places: positions, cells, spans, taps and states are read through pointers. Matrices are rows
 * of a window, ops_padded(width) floats apart, as in ops.h; each kernel gives the bits of the operation it is named after.
 *
 * NAME_launch gives the grid of a kernel. A struct a8 with codes asks for the A8 form of the output too: the same bits as the operation
 * `quantize` after it. The width - of a norm: of each group; of delta_output: of each head - is then a multiple of 32.
 */
#ifndef OPS_CUDA_VECTOR_ARGS_H
#define OPS_CUDA_VECTOR_ARGS_H

#include "base/half.h"
#include "ops/cuda/launch.h"
#include "ops/ops.h"

struct a8 {
    int8_t *codes;   /* [n][width]; NULL: not wanted */
    float *scales;   /* [n][width/32] */
    int32_t *sums;   /* [n][width/16] */
};

static inline unsigned launch_share(size_t items, size_t per_block) { return (unsigned)((items + per_block - 1) / per_block); }
static inline unsigned launch_least(size_t a, size_t b) { return (unsigned)(a < b ? a : b); }

/* ---- vector.cu --------------------------------------------------------------------------------------------------------------------- */

enum { VECTOR_THREADS = 128, TREE_THREADS = 256 };

/* Element by element: blocks of VECTOR_THREADS along the width, rows in y. */
static inline struct launch vector_launch(size_t width, int n)
{
    return (struct launch){ launch_share(width, VECTOR_THREADS), (unsigned)n, 1, VECTOR_THREADS, 0 };
}

struct vector_norm_args {
    int n, groups, dim, gamma_groups, partials; /* partials: 256 or 32 */
    float eps;
    const float *x, *gamma;
    float *out; /* may be x */
    struct a8 a8;
};
static inline struct launch vector_norm_launch(const struct vector_norm_args *a)
{
    if (a->partials == 256)
        return (struct launch){ (unsigned)a->groups, (unsigned)a->n, 1, TREE_THREADS, 0 };
    return (struct launch){ launch_share((size_t)a->groups, VECTOR_THREADS / 32), (unsigned)a->n, 1, VECTOR_THREADS, 0 };
}

/* `write`, then `norm` of the new residual with one group per stream and partials 256: the end of one layer half and the start of the next. */
struct vector_write_norm_args {
    int n, streams, dim;
    float eps;
    const float *inject, *y, *gamma; /* gamma: [streams][dim] */
    float *residual, *out;
    struct a8 a8;
};
static inline struct launch vector_write_norm_launch(const struct vector_write_norm_args *a)
{
    return (struct launch){ (unsigned)a->streams, (unsigned)a->n, 1, TREE_THREADS, 0 };
}

struct vector_quantize_args { int n, width; const float *values; struct a8 a8; };
static inline struct launch vector_quantize_launch(const struct vector_quantize_args *a) { return vector_launch((size_t)a->width, a->n); }

struct vector_gate_input_args { int n, width, streams; const float *x; float *out; struct a8 a8; };
static inline struct launch vector_gate_input_launch(const struct vector_gate_input_args *a) { return vector_launch((size_t)a->width, a->n); }

struct vector_mix_args { int n, streams, dim; const float *gates, *normed; float *out; struct a8 a8; };
static inline struct launch vector_mix_launch(const struct vector_mix_args *a) { return vector_launch((size_t)a->dim, a->n); }

struct vector_write_args { int n, streams, dim; const float *inject, *y; float *residual; };
static inline struct launch vector_write_launch(const struct vector_write_args *a) { return vector_launch((size_t)a->streams * (size_t)a->dim, a->n); }

struct vector_silu_mul_args { int n, width; const float *gate, *up; float *out; struct a8 a8; };
static inline struct launch vector_silu_mul_launch(const struct vector_silu_mul_args *a) { return vector_launch((size_t)a->width, a->n); }

struct vector_add2_args { size_t n; float *x; const float *a, *b; };
static inline struct launch vector_add2_launch(const struct vector_add2_args *a) { return vector_launch(a->n, 1); }

/* taps[t][n_taps - 1] is row t's own vector. With `x` ([n][channels]) the kernel first stores row t of x there (the sequence's ring), and taps that
 * are other rows of the window are read from x. */
struct vector_conv_args { int n, n_taps, channels; const float *const (*taps)[8]; const float *kernel, *x; float *out; };
static inline struct launch vector_conv_launch(const struct vector_conv_args *a) { return vector_launch((size_t)a->channels, a->n); }

/* n vectors of `width` floats: from[i] to each of `copies` places, `width` apart, that begin at to[i]. */
struct vector_copy_args { int n, width, copies; const float *const *from; float *const *to; };
static inline struct launch vector_copy_launch(const struct vector_copy_args *a) { return vector_launch((size_t)a->width, a->n); }

struct vector_ngram_gate_args { int n, streams, dim; const float *k, *q, *v; float *p; };
static inline struct launch vector_ngram_gate_launch(const struct vector_ngram_gate_args *a)
{
    return (struct launch){ (unsigned)a->streams, (unsigned)a->n, 1, TREE_THREADS, 0 };
}

struct vector_route_args { int n, n_experts, n_used; const float *logits; struct route *route; };
static inline struct launch vector_route_launch(const struct vector_route_args *a) { return (struct launch){ (unsigned)a->n, 1, 1, 32, 0 }; }

/* Vectors whose from_host[row][rank] is not 0 are in host_parts (the CPU's answers, in mapped memory) instead of parts; from_host may be NULL. */
struct vector_combine_args {
    int n, n_used, dim;
    const float *parts, *host_parts;
    const uint8_t (*from_host)[OPS_MAX_USED];
    const struct route *route;
    const float *shared, *shared_gate;
    float *out;
};
static inline struct launch vector_combine_launch(const struct vector_combine_args *a) { return vector_launch((size_t)a->dim, a->n); }

/* *layer_found becomes the least of itself and `layer` if a value is not finite. It starts a window as UINT32_MAX. Up to 8 arrays (n 0: none). */
enum { FINITE_ARRAYS = 8 };
struct vector_finite_args { const float *x[FINITE_ARRAYS]; size_t n[FINITE_ARRAYS]; uint32_t layer, *layer_found; };
static inline struct launch vector_finite_launch(const struct vector_finite_args *a)
{
    size_t most = 1;
    unsigned used = 1;
    for (unsigned i = 0; i < FINITE_ARRAYS; i++) {
        most = a->n[i] > most ? a->n[i] : most;
        used = a->n[i] ? i + 1 : used;
    }
    return (struct launch){ launch_least(launch_share(most, 4 * TREE_THREADS), 256), used, 1, TREE_THREADS, 0 };
}

/* ids[t]: the index of row t's largest logit; ties: the lowest; NaN counts as -infinity. */
enum { ARGMAX_BLOCKS = 64 };
struct vector_argmax_args {
    int n, n_vocab;
    const float *logits;
    uint64_t *keys;     /* scratch [n][ARGMAX_BLOCKS] */
    uint32_t *tickets;  /* [n]: 0 before the first launch; every launch leaves 0 */
    int32_t *ids;
};
static inline struct launch vector_argmax_launch(const struct vector_argmax_args *a)
{
    return (struct launch){ launch_least(launch_share((size_t)a->n_vocab, TREE_THREADS), ARGMAX_BLOCKS), (unsigned)a->n, 1, TREE_THREADS, 0 };
}

/* ---- delta.cu ---------------------------------------------------------------------------------------------------------------------- */

enum { DELTA_THREADS = 64 }; /* of one strip: 16 columns x 4 quarters of k */

struct delta_prepare_args { int n; struct delta_shape shape; float *qkv; const float *alpha, *b, *a, *dt; float *decay, *beta; };
static inline struct launch delta_prepare_launch(const struct delta_prepare_args *a)
{
    return (struct launch){ launch_share((size_t)(2 * a->shape.k_heads), VECTOR_THREADS / 32) + launch_share((size_t)a->shape.v_heads, VECTOR_THREADS), (unsigned)a->n,
                            1, VECTOR_THREADS, 0 };
}

/* Floats of shared memory for one row of a strip: k and q, each in quarters that start in different banks; v; decay and beta. */
#define DELTA_QUARTER_STRIDE(dim_k) ((dim_k) / 4 + 4)
#define DELTA_ROW_SHARED(dim_k) (8 * DELTA_QUARTER_STRIDE(dim_k) + DELTA_STRIP + 4)

/* spans[0 .. *n_spans): at most n. state[s] is the span's. */
struct delta_rule_args {
    int n;
    struct delta_shape shape;
    const int32_t *n_spans;
    const struct row_span *spans;
    float *const *state;
    const float *qkv, *decay, *beta;
    float *out;
};
static inline struct launch delta_rule_launch(const struct delta_rule_args *a)
{
    const struct delta_shape *s = &a->shape;
    return (struct launch){ (unsigned)(s->v_heads * (s->dim_v / DELTA_STRIP)), (unsigned)a->n, 1, DELTA_THREADS,
                            (unsigned)(a->n * DELTA_ROW_SHARED(s->dim_k)) * (unsigned)sizeof(float) };
}

/* Commit: rows first .. first+n-1 of each span are applied to its states (keep is not read; a span without rows changes nothing).
 * All delta layers in one launch. */
struct delta_trace_rows { const float *qkv, *decay, *beta; }; /* what the window kept of a layer */
struct delta_replay_args {
    int n_layers, most_spans;          /* most_spans: of grids; spans[0 .. *n_spans) */
    struct delta_shape shape;
    const int32_t *n_spans;
    const struct row_span *spans;
    float *const *state;               /* [span][n_layers] */
    const struct delta_trace_rows *traces; /* [n_layers] */
};
static inline struct launch delta_replay_launch(const struct delta_replay_args *a)
{
    const struct delta_shape *s = &a->shape;
    return (struct launch){ (unsigned)(s->v_heads * (s->dim_v / DELTA_STRIP)), (unsigned)a->most_spans, (unsigned)a->n_layers, DELTA_THREADS,
                            (unsigned)(KERNEL_MAX_ROWS * DELTA_ROW_SHARED(s->dim_k)) * (unsigned)sizeof(float) };
}

struct delta_output_args { int n; struct delta_shape shape; float *o; const float *z, *gamma; float eps; struct a8 a8; };
static inline struct launch delta_output_launch(const struct delta_output_args *a)
{
    return (struct launch){ launch_share((size_t)a->shape.v_heads, VECTOR_THREADS / 32), (unsigned)a->n, 1, VECTOR_THREADS, 0 };
}

/* ---- attention.cu ------------------------------------------------------------------------------------------------------------------
 *
 * rows[t] lies in memory that the device reads. Which cells a row attends to, and how many, follows from its position alone unless it
 * prunes: only then is selection.cells written (budget_blocks * block cells, then the tail). selection.n is left alone. */

HOST_DEVICE int attention_blocks(const struct attention_shape *s, int32_t position) { return s->block ? (position + 1) / s->block : 0; }
HOST_DEVICE bool attention_prunes(const struct attention_shape *s, int32_t position) { return attention_blocks(s, position) > s->budget_blocks; }
HOST_DEVICE int attention_cells(const struct attention_shape *s, int32_t position)
{
    int pruned = attention_blocks(s, position) - s->budget_blocks;
    return position + 1 - (pruned > 0 ? pruned * s->block : 0);
}
/* Heads whose values share int8 scales are stored together: one, or two where a head's width is no multiple of 64. */
HOST_DEVICE int attention_unit(const struct attention_shape *s) { return s->dim % KV_GROUP ? 2 : 1; }
HOST_DEVICE int attention_units(const struct attention_shape *s) { return (s->kv_heads + attention_unit(s) - 1) / attention_unit(s); }

enum { STORE_WARPS = 4 };
struct attention_store_args {
    int n;
    struct attention_shape shape;
    const struct attention_row *rows;
    float *q, *k, *iq;
    const float *v, *ik, *q_gamma, *k_gamma, *iq_gamma, *ik_gamma;
};
static inline struct launch attention_store_launch(const struct attention_store_args *a)
{
    const struct attention_shape *s = &a->shape;
    int jobs = s->n_heads + 2 * attention_units(s) + (s->block ? s->index_heads + 2 : 0);
    return (struct launch){ launch_share((size_t)jobs, STORE_WARPS), (unsigned)a->n, 1, 32 * STORE_WARPS, 0 };
}

/* The indexer's scores of all blocks, and the largest score of every slice of 32 blocks. */
enum { INDEX_SLICE = 32, INDEX_WARPS = 4 };
struct attention_scores_args {
    int n, max_slices; /* max_slices: of the longest context */
    struct attention_shape shape;
    const struct attention_row *rows;
    const float *iq;
    float *maxima;     /* [n][max_slices] */
};
static inline struct launch attention_scores_launch(const struct attention_scores_args *a, int multiprocessors)
{
    return (struct launch){ launch_least(launch_share((size_t)a->max_slices, INDEX_WARPS), (size_t)multiprocessors * 8), (unsigned)a->n, 1, 32 * INDEX_WARPS, 0 };
}

/* After attention_scores: the cells of every row that prunes. */
enum { SELECT_THREADS = 1024 };
struct attention_select_args {
    int n, max_slices;
    struct attention_shape shape;
    const struct attention_row *rows;
    const float *maxima; /* as above */
    int32_t *slices;     /* scratch [n][budget_blocks] */
};
static inline struct launch attention_select_launch(const struct attention_select_args *a) { return (struct launch){ (unsigned)a->n, 1, 1, SELECT_THREADS, 0 }; }

/* attend is two kernels: chunks of 64 cells in parallel, then their merge in order. Where a context has more chunks than there is scratch for, the
 * pair is launched again with first_chunk further on; carry holds what the merge has so far. */
enum { ATTEND_THREADS = 256, ATTEND_TILE = 4 /* heads */, MERGE_THREADS = 64 };
struct attend_chunks_args {
    int n, heads_per_block;      /* attend_heads_per_block() */
    int first_chunk, max_chunks;
    struct attention_shape shape;
    const struct attention_row *rows;
    const float *q;
    float *parts;                /* [n][n_heads][max_chunks][dim] */
    float *stats;                /* [n][n_heads][max_chunks][2]: maximum, sum */
};
/* Few chunks: the query heads of a key head are shared out too, so that more multiprocessors have work. */
static inline int attend_heads_per_block(const struct attention_shape *s, int n, int max_chunks, int multiprocessors)
{
    int group = s->n_heads / s->kv_heads;
    return (int64_t)n * max_chunks * s->kv_heads < 2 * (int64_t)multiprocessors && group > ATTEND_TILE ? ATTEND_TILE : group;
}
static inline struct launch attend_chunks_launch(const struct attend_chunks_args *a, int multiprocessors)
{
    const struct attention_shape *s = &a->shape;
    unsigned shares = (unsigned)s->kv_heads * launch_share((size_t)(s->n_heads / s->kv_heads), (size_t)a->heads_per_block);
    unsigned heads = (unsigned)(a->heads_per_block + ATTEND_TILE - 1) / ATTEND_TILE * ATTEND_TILE;
    return (struct launch){ launch_least((size_t)a->max_chunks, launch_share((size_t)multiprocessors * 8, (size_t)shares * (size_t)a->n)), shares, (unsigned)a->n,
                            ATTEND_THREADS, heads * (unsigned)(s->dim + ATTEND_CHUNK) * (unsigned)sizeof(float) };
}

struct attend_merge_args {
    int n, first_chunk, max_chunks;
    struct attention_shape shape;
    const struct attention_row *rows;
    const float *q, *parts, *stats;
    float *carry;                /* [n][n_heads][dim/64 rounded up][2] */
    float *out;
    struct a8 a8;
};
static inline struct launch attend_merge_launch(const struct attend_merge_args *a)
{
    return (struct launch){ launch_share((size_t)a->shape.dim, MERGE_THREADS), (unsigned)a->shape.n_heads, (unsigned)a->n, MERGE_THREADS, 0 };
}

#endif
