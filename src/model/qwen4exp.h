/* qwen4exp.h - Qwen3.8-Flash-Next: shapes and weights. Private to the architecture: qwen4exp_load.c fills it, qwen4exp.c computes.
 *
 * Names and formulas: spec/model.md sections 1 to 3. H = hidden, S = streams, W = S*H.
 */
#ifndef MODEL_QWEN4EXP_H
#define MODEL_QWEN4EXP_H

#include "base/arena.h"
#include "model/loader.h"
#include "model/model.h"

enum { QWEN_MAX_TAPS = 8, QWEN_MAX_NGRAM_HEADS = 32 };

/* Gated Residual (spec 3.1): reads one hidden vector out of S streams and says how strongly each takes the result. */
struct gated_residual {
    const float *norm;    /* [S][H] */
    struct matrix down;   /* [low_rank][W] */
    struct matrix up;     /* [W][low_rank] */
    struct matrix inject; /* [S][W]; absent (rows 0) in the final one */
};

struct delta_layer {
    struct matrix qkv;    /* [2*k_heads*dim_k + v_heads*dim_v][H] */
    struct matrix gate;   /* [v_heads*dim_v][H] */
    struct matrix alpha, beta; /* [v_heads][H] */
    struct matrix out;    /* [H][v_heads*dim_v] */
    const float *a, *dt;  /* [v_heads] */
    const float *conv;    /* [taps][channels] */
    const float *norm;    /* [dim_v] */
};

struct attention_layer {
    struct matrix q;      /* [n_heads * 2*dim][H], per head: query, gate */
    struct matrix k, v;   /* [kv_heads*dim][H] */
    struct matrix out;    /* [H][n_heads*dim] */
    const float *q_norm, *k_norm; /* [dim] */
    struct matrix index_q; /* [index_heads*index_dim][H] */
    struct matrix index_k; /* [index_dim][H] */
    const float *index_q_norm, *index_k_norm; /* [index_dim] */
};

struct ffn_layer {
    struct matrix router;      /* [n_experts][H] */
    struct matrix shared_gate; /* [1][H] */
    struct matrix gate, up;    /* [shared_width][H] */
    struct matrix down;        /* [H][shared_width] */
    struct expert_set experts;
};

struct ngram_layer {
    struct row_table table;    /* [rows][embed] */
    struct matrix key;         /* [W][H] */
    struct matrix value;       /* [H][H] */
    const float *norm_key, *norm_query, *norm_conv; /* [S][H] */
    const float *conv;         /* [taps][W] */
    uint64_t multipliers[3], sizes[QWEN_MAX_NGRAM_HEADS], offsets[QWEN_MAX_NGRAM_HEADS];
    int heads_per_order, n_heads, embed, taps, dilation;
    int32_t eos;
};

struct qwen4exp_layer {
    struct gated_residual attn_mix, ffn_mix;
    bool is_attention;
    int kind_index; /* which of the delta (or attention) layers */
    union { struct delta_layer delta; struct attention_layer attention; };
    struct attention_shape attention_shape;
    struct ffn_layer ffn;
};

struct qwen4exp {
    struct model model;
    int streams, wide, low_rank, n_used, n_experts, shared_width, conv_taps, conv_channels;
    int n_delta, n_attention, ngram_layer;
    float eps;
    double rope_base;
    struct delta_shape delta;
    struct row_table embedding;
    struct matrix output;
    struct gated_residual final_mix;
    struct ngram_layer ngram;
    struct qwen4exp_layer *layers;
    struct arena arena; /* of all weights but the experts */
    struct mapping maps[4];
    int n_maps;
};

int qwen4exp_load(struct model **out, const struct gguf *gguf, struct ops *ops, const struct load_options *options, struct strata_error *error);
void qwen4exp_destroy(struct model *model);

#endif
