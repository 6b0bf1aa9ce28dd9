/* vector.h - the kernels that are not products with a weight matrix: norms, gates, convolution, delta rule, attention.
 *
 * One text, src/ops/ref/vector.c, defines them; it is compiled once per instruction set (the ladder of kernels.h), and since
 * nothing in it lets the compiler re-associate a sum, all versions give the same bits. Every function is one thread's share.
 * "tree-N" is rule 4 of design.md section 2: N partial sums, then halving.
 */
#ifndef OPS_VECTOR_H
#define OPS_VECTOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    DELTA_STRIP = 16,       /* value columns that one strip of the delta state holds */
    ATTEND_CHUNK = 64,      /* cells per chunk (rule 5) */
    ATTEND_MAX_HEADS = 32,  /* query heads that share a key head */
    ATTEND_MAX_DIM = 256,
    DELTA_MAX_KEY = 256,
    KV_GROUP = 64,          /* int8 KV: values that share a scale */
};

enum kv_type { KV_F16, KV_INT8 };

/* One layer's and one sequence's keys (or values): cell-major. f16: [cell][heads*dim] binary16. int8: codes [cell][heads*dim] and
 * scales [cell][heads*dim/64]. */
struct kv_plane { enum kv_type type; void *codes; float *scales; };

struct vector_kernels {
    /* out = (x * 1/sqrt(mean(x^2) + eps)) * gamma, one group of `dim`; the mean by tree-`partials` (256: hidden-size, 32: head-size). */
    void (*rms_norm)(const float *x, const float *gamma, int dim, float eps, int partials, float *out);
    /* x * (1/sqrt(sum(x^2) + eps)) * scale, tree-32, in place. */
    void (*l2_norm)(float *x, int dim, float eps, float scale);
    /* <a, b> by tree-256. */
    float (*dot256)(const float *a, const float *b, int dim);

    /* Gated Residual (spec 3.1). gate_input: out = silu(x / streams). mix: m[d] = (sum over s, ascending, of sigmoid(g[s][d]) * n[s][d]) / streams,
     * first product plain, then fmaf. write: R[s][d] = fmaf(2*sigmoid(inject[s] / streams), y[d], R[s][d]). */
    void (*gate_input)(const float *x, int n, int streams, float *out);
    void (*mix)(const float *gates, const float *normed, int streams, int dim, float *out);
    void (*write)(float *residual, const float *inject, const float *y, int streams, int dim);

    void (*silu_mul)(const float *gate, const float *up, int n, float *out);      /* silu(gate) * up */
    void (*mul_sigmoid)(float *x, const float *gate, int n);                      /* x *= sigmoid(gate) */
    void (*add2)(float *x, const float *a, const float *b, int n);                /* x = (x + a) + b */

    /* Depthwise causal convolution of one row, then silu: acc = kernel[0]*taps[0], acc = fmaf(kernel[j], taps[j], acc) for j = 1...
     * taps[j]: [channels], the oldest first; kernel: [n_taps][channels]. */
    void (*conv_silu)(const float *const *taps, const float *kernel, int n_taps, int channels, float *out);

    /* Gated delta rule for one value head (spec 3.4 step 6), rows in order. Row t:
     *   m = decay * M;  r = k^T m;  delta = beta * (v - r);  M = m + k delta^T (fmaf);  o = q^T M
     * both k-sums in four quarters of dim_k/4, each by fmaf in order from 0, the four partials added in order (rule 6).
     * state: [dim_v/16][dim_k][16]. The state after the first `keep` rows is stored; later rows work on a copy. */
    void (*delta_rule)(float *state, int dim_k, int dim_v, int n_rows, int keep, const float *const *q, const float *const *k, const float *const *v,
                       const float *decay, const float *beta, float *const *out);
    /* decay = e^(a * softplus(alpha + dt)), beta = sigmoid(b), per value head. */
    void (*delta_gates)(const float *alpha, const float *b, const float *a, const float *dt, int n_heads, float *decay, float *beta);

    /* Rotary embedding in place, NeoX pairs (i, i + n_pairs): x[i] = fmaf(x[i], cos, -(x[j]*sin)), x[j] = fmaf(x[j], cos, x[i]*sin). */
    void (*rope)(float *x, const float *cosines, const float *sines, int n_pairs);
    /* Stores n values (heads*dim, a multiple of 64 for int8) at `cell`: f16 rounds to nearest even; int8: scale = amax/127 and
     * code = round-half-even(x * (127/amax)) per 64, amax below 1e-30 gives zeros. */
    void (*kv_store)(const struct kv_plane *plane, int64_t cell, const float *x, int n);
    /* Attention (rule 5) of one row's n_heads query heads over one key head (`head` of kv_heads) and n_cells ascending cells. q and out:
     * [n_heads], `q_stride` and `out_stride` floats apart. scale multiplies each score after its tree-32 sum. */
    void (*attend)(const float *q, int q_stride, int n_heads, int dim, float scale, const struct kv_plane *keys, const struct kv_plane *values, int head,
                   int kv_heads, const int32_t *cells, int n_cells, float *out, int out_stride);
    /* Indexer scores of blocks [first, last): sum over heads, ascending, of max(0, <q_h, key_b>), tree-32; keys [block][dim]. */
    void (*index_scores)(const float *q, int n_heads, int dim, const float *keys, int first, int last, float *scores);

    /* Top `n_used` of the router's logits, ties to the lower index; weights: softmax over the selected, sum in router order. */
    void (*route)(const float *logits, int n_experts, int n_used, int32_t *ids, float *weights);
    /* y = sum over ranks of weights[i] * parts[i] (first product plain, then fmaf), then fmaf(sigmoid(shared_gate), shared, y). */
    void (*combine)(const float *const *parts, const float *weights, int n_used, const float *shared, float shared_gate, int dim, float *out);

    bool (*all_finite)(const float *x, size_t n);
};

extern const struct vector_kernels vector_kernels_ref, vector_kernels_avx2, vector_kernels_avx512;

#endif
