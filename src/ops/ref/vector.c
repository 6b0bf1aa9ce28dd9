/* The definition of vector.h. This file is also the text of the AVX2 and AVX-512 versions: src/ops/x86/vector_avx2.c and
 * vector_avx512.c define VECTOR_TABLE and include it. The loops over partial sums and lanes are written so that a compiler can turn
 * them into vector instructions without changing the order of any sum. */
#include "ops/vector.h"

#include "ops/math.h"

#include <string.h>

#ifndef VECTOR_TABLE
#define VECTOR_TABLE vector_kernels_ref
#endif

/* Rule 4: p[j] takes elements j, j+N, j+2N, ...; then p[j] += p[j+h] for h = N/2 ... 1. */
static inline float tree_halve(float *p, int n)
{
    for (int h = n / 2; h; h /= 2)
        for (int j = 0; j < h; j++)
            p[j] += p[j + h];
    return p[0];
}

static inline __attribute__((always_inline)) float tree_dot(const float *a, const float *b, int dim, int n)
{
    float p[256] = { 0 };
    int k = 0;
    for (; k + n <= dim; k += n)
        for (int j = 0; j < n; j++)
            p[j] = fmaf(a[k + j], b[k + j], p[j]);
    for (int j = 0; k + j < dim; j++)
        p[j] = fmaf(a[k + j], b[k + j], p[j]);
    return tree_halve(p, n);
}

static float dot256(const float *a, const float *b, int dim) { return tree_dot(a, b, dim, 256); }

static void rms_norm(const float *x, const float *gamma, int dim, float eps, int partials, float *out)
{
    float sum = partials == 256 ? tree_dot(x, x, dim, 256) : tree_dot(x, x, dim, 32);
    float scale = 1.0f / sqrtf(sum / (float)dim + eps);
    for (int i = 0; i < dim; i++)
        out[i] = x[i] * scale * gamma[i];
}

static void l2_norm(float *x, int dim, float eps, float scale)
{
    float inverse = 1.0f / sqrtf(tree_dot(x, x, dim, 32) + eps);
    for (int i = 0; i < dim; i++)
        x[i] = x[i] * inverse * scale;
}

static void gate_input(const float *x, int n, int streams, float *out)
{
    float divisor = (float)streams;
    for (int i = 0; i < n; i++)
        out[i] = math_silu(x[i] / divisor);
}

static void mix(const float *gates, const float *normed, int streams, int dim, float *out)
{
    for (int d = 0; d < dim; d++)
        out[d] = math_sigmoid(gates[d]) * normed[d];
    for (int s = 1; s < streams; s++) {
        const float *g = gates + (size_t)s * (size_t)dim, *n = normed + (size_t)s * (size_t)dim;
        for (int d = 0; d < dim; d++)
            out[d] = fmaf(math_sigmoid(g[d]), n[d], out[d]);
    }
    float divisor = (float)streams;
    for (int d = 0; d < dim; d++)
        out[d] = out[d] / divisor;
}

static void write_streams(float *residual, const float *inject, const float *y, int streams, int dim)
{
    for (int s = 0; s < streams; s++) {
        float strength = 2.0f * math_sigmoid(inject[s] / (float)streams), *r = residual + (size_t)s * (size_t)dim;
        for (int d = 0; d < dim; d++)
            r[d] = fmaf(strength, y[d], r[d]);
    }
}

static void silu_mul(const float *gate, const float *up, int n, float *out)
{
    for (int i = 0; i < n; i++)
        out[i] = math_silu(gate[i]) * up[i];
}

static void mul_sigmoid(float *x, const float *gate, int n)
{
    for (int i = 0; i < n; i++)
        x[i] = x[i] * math_sigmoid(gate[i]);
}

static void add2(float *x, const float *a, const float *b, int n)
{
    for (int i = 0; i < n; i++)
        x[i] = x[i] + a[i] + b[i];
}

static void conv_silu(const float *const *taps, const float *kernel, int n_taps, int channels, float *out)
{
    for (int c = 0; c < channels; c++)
        out[c] = kernel[c] * taps[0][c];
    for (int j = 1; j < n_taps; j++) {
        const float *tap = taps[j], *weight = kernel + (size_t)j * (size_t)channels;
        for (int c = 0; c < channels; c++)
            out[c] = fmaf(weight[c], tap[c], out[c]);
    }
    for (int c = 0; c < channels; c++)
        out[c] = math_silu(out[c]);
}

/* One row's step on one strip: all 16 columns advance together, each in its own order. */
static inline __attribute__((always_inline)) void delta_step(float m[][DELTA_STRIP], int dim_k, const float *q, const float *k, const float *v, float decay,
                                                              float beta, float *out)
{
    float sum[DELTA_STRIP], delta[DELTA_STRIP];
    for (int quarter = 0; quarter < 4; quarter++) {
        float part[DELTA_STRIP] = { 0 };
        for (int i = quarter * dim_k / 4; i < (quarter + 1) * dim_k / 4; i++)
            for (int c = 0; c < DELTA_STRIP; c++)
                part[c] = fmaf(k[i], decay * m[i][c], part[c]);
        for (int c = 0; c < DELTA_STRIP; c++)
            sum[c] = quarter ? sum[c] + part[c] : part[c];
    }
    for (int c = 0; c < DELTA_STRIP; c++)
        delta[c] = beta * (v[c] - sum[c]);
    for (int quarter = 0; quarter < 4; quarter++) {
        float part[DELTA_STRIP] = { 0 };
        for (int i = quarter * dim_k / 4; i < (quarter + 1) * dim_k / 4; i++)
            for (int c = 0; c < DELTA_STRIP; c++) {
                m[i][c] = fmaf(k[i], delta[c], decay * m[i][c]);
                part[c] = fmaf(q[i], m[i][c], part[c]);
            }
        for (int c = 0; c < DELTA_STRIP; c++)
            sum[c] = quarter ? sum[c] + part[c] : part[c];
    }
    memcpy(out, sum, sizeof sum);
}

static void delta_rule(float *state, int dim_k, int dim_v, int n_rows, int keep, const float *const *q, const float *const *k, const float *const *v,
                       const float *decay, const float *beta, float *const *out)
{
    float scratch[DELTA_MAX_KEY][DELTA_STRIP];
    for (int strip = 0; strip < dim_v / DELTA_STRIP; strip++) {
        float(*m)[DELTA_STRIP] = (float(*)[DELTA_STRIP])(state + (size_t)strip * (size_t)dim_k * DELTA_STRIP);
        for (int t = 0; t < n_rows; t++) {
            if (t == keep) {
                memcpy(scratch, m, (size_t)dim_k * sizeof *m);
                m = scratch;
            }
            delta_step(m, dim_k, q[t], k[t], v[t] + strip * DELTA_STRIP, decay[t], beta[t], out[t] + strip * DELTA_STRIP);
        }
    }
}

static void delta_gates(const float *alpha, const float *b, const float *a, const float *dt, int n_heads, float *decay, float *beta)
{
    for (int j = 0; j < n_heads; j++) {
        decay[j] = math_exp(a[j] * math_softplus(alpha[j] + dt[j]));
        beta[j] = math_sigmoid(b[j]);
    }
}

static void rope(float *x, const float *cosines, const float *sines, int n_pairs)
{
    for (int i = 0; i < n_pairs; i++) {
        float a = x[i], b = x[i + n_pairs];
        x[i] = fmaf(a, cosines[i], -(b * sines[i]));
        x[i + n_pairs] = fmaf(b, cosines[i], a * sines[i]);
    }
}

/* Adding 1.5 * 2^23 rounds |x| < 2^22 to the nearest integer, ties to even. */
static inline float round_even(float x) { return (x + 0x1.8p23f) - 0x1.8p23f; }

static void kv_store(const struct kv_plane *plane, int64_t cell, const float *x, int n)
{
    if (plane->type == KV_F16) {
        uint16_t *out = (uint16_t *)plane->codes + cell * n;
        for (int i = 0; i < n; i++)
            out[i] = half_from_float(x[i]);
        return;
    }
    int8_t *codes = (int8_t *)plane->codes + cell * n;
    float *scales = plane->scales + cell * (n / KV_GROUP);
    for (int g = 0; g < n / KV_GROUP; g++) {
        float amax = 0;
        for (int i = 0; i < KV_GROUP; i++)
            amax = fabsf(x[g * KV_GROUP + i]) > amax ? fabsf(x[g * KV_GROUP + i]) : amax;
        float inverse = amax < 1e-30f ? 0.0f : 127.0f / amax;
        scales[g] = amax < 1e-30f ? 0.0f : amax / 127.0f;
        for (int i = 0; i < KV_GROUP; i++)
            codes[g * KV_GROUP + i] = (int8_t)round_even(x[g * KV_GROUP + i] * inverse);
    }
}

static inline void kv_load(const struct kv_plane *plane, int64_t cell, int head, int kv_heads, int dim, float *out)
{
    int64_t at = (cell * kv_heads + head) * dim;
    if (plane->type == KV_F16) {
        const uint16_t *in = (const uint16_t *)plane->codes + at;
#ifdef __F16C__
        for (int i = 0; i < dim; i += 8) /* dim is a multiple of 32; the hardware conversion is exact, as half_to_float is */
            _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(in + i))));
#else
        for (int i = 0; i < dim; i++)
            out[i] = half_to_float(in[i]);
#endif
        return;
    }
    const int8_t *in = (const int8_t *)plane->codes + at;
    for (int i = 0; i < dim; i++)
        out[i] = (float)in[i] * plane->scales[(at + i) / KV_GROUP];
}

static void attend(const float *q, int q_stride, int n_heads, int dim, float scale, const struct kv_plane *keys, const struct kv_plane *values, int head,
                   int kv_heads, const int32_t *cells, int n_cells, float *out, int out_stride)
{
    float score[ATTEND_MAX_HEADS][ATTEND_CHUNK], part[ATTEND_MAX_HEADS][ATTEND_MAX_DIM], x[ATTEND_MAX_DIM];
    float maximum[ATTEND_MAX_HEADS], total[ATTEND_MAX_HEADS];

    for (int start = 0; start < n_cells; start += ATTEND_CHUNK) {
        int n = n_cells - start < ATTEND_CHUNK ? n_cells - start : ATTEND_CHUNK;
        for (int i = 0; i < n; i++) {
            kv_load(keys, cells[start + i], head, kv_heads, dim, x);
            for (int h = 0; h < n_heads; h++)
                score[h][i] = tree_dot(q + (size_t)h * (size_t)q_stride, x, dim, 32) * scale;
        }
        float chunk_maximum[ATTEND_MAX_HEADS], chunk_total[ATTEND_MAX_HEADS];
        for (int h = 0; h < n_heads; h++) {
            float m = score[h][0], sum = 0;
            for (int i = 1; i < n; i++)
                m = score[h][i] > m ? score[h][i] : m;
            for (int i = 0; i < n; i++)
                score[h][i] = math_exp(score[h][i] - m);
            for (int i = 0; i < n; i++)
                sum += score[h][i];
            chunk_maximum[h] = m;
            chunk_total[h] = sum;
            memset(part[h], 0, (size_t)dim * sizeof(float));
        }
        for (int i = 0; i < n; i++) {
            kv_load(values, cells[start + i], head, kv_heads, dim, x);
            for (int h = 0; h < n_heads; h++)
                for (int d = 0; d < dim; d++)
                    part[h][d] = fmaf(score[h][i], x[d], part[h][d]);
        }
        for (int h = 0; h < n_heads; h++) {
            float *o = out + (size_t)h * (size_t)out_stride;
            if (start == 0) {
                maximum[h] = chunk_maximum[h];
                total[h] = chunk_total[h];
                memcpy(o, part[h], (size_t)dim * sizeof(float));
                continue;
            }
            float m = chunk_maximum[h] > maximum[h] ? chunk_maximum[h] : maximum[h];
            float before = math_exp(maximum[h] - m), now = math_exp(chunk_maximum[h] - m);
            maximum[h] = m;
            total[h] = fmaf(chunk_total[h], now, total[h] * before);
            for (int d = 0; d < dim; d++)
                o[d] = fmaf(part[h][d], now, o[d] * before);
        }
    }
    for (int h = 0; h < n_heads; h++)
        for (int d = 0; d < dim; d++)
            out[(size_t)h * (size_t)out_stride + (size_t)d] /= total[h];
}

static void index_scores(const float *q, int n_heads, int dim, const float *keys, int first, int last, float *scores)
{
    for (int b = first; b < last; b++) {
        float sum = 0;
        for (int h = 0; h < n_heads; h++) {
            float score = tree_dot(q + h * dim, keys + (size_t)b * (size_t)dim, dim, 32);
            sum += score > 0 ? score : 0;
        }
        scores[b] = sum;
    }
}

static void route(const float *logits, int n_experts, int n_used, int32_t *ids, float *weights)
{
    /* Insertion into a short sorted list; an equal logit stays behind the earlier index. NaN never compares greater: the layer's
     * finite check reports it. */
    int n = 0;
    for (int e = 0; e < n_experts; e++) {
        if (n == n_used && !(logits[e] > weights[n - 1]))
            continue;
        int at = n < n_used ? n++ : n - 1;
        while (at > 0 && logits[e] > weights[at - 1]) {
            weights[at] = weights[at - 1];
            ids[at] = ids[at - 1];
            at--;
        }
        weights[at] = logits[e];
        ids[at] = e;
    }
    float best = weights[0], sum = 0;
    for (int i = 0; i < n; i++) {
        weights[i] = math_exp(weights[i] - best);
        sum += weights[i];
    }
    for (int i = 0; i < n; i++)
        weights[i] /= sum;
}

static void combine(const float *const *parts, const float *weights, int n_used, const float *shared, float shared_gate, int dim, float *out)
{
    for (int d = 0; d < dim; d++)
        out[d] = weights[0] * parts[0][d];
    for (int i = 1; i < n_used; i++)
        for (int d = 0; d < dim; d++)
            out[d] = fmaf(weights[i], parts[i][d], out[d]);
    float strength = math_sigmoid(shared_gate);
    for (int d = 0; d < dim; d++)
        out[d] = fmaf(strength, shared[d], out[d]);
}

static bool all_finite(const float *x, size_t n)
{
    uint32_t bad = 0;
    for (size_t i = 0; i < n; i++)
        bad |= (float_bits(x[i]) & 0x7f800000u) == 0x7f800000u;
    return !bad;
}

const struct vector_kernels VECTOR_TABLE = {
    .rms_norm = rms_norm, .l2_norm = l2_norm, .dot256 = dot256, .gate_input = gate_input, .mix = mix, .write = write_streams,
    .silu_mul = silu_mul, .mul_sigmoid = mul_sigmoid, .add2 = add2, .conv_silu = conv_silu, .delta_rule = delta_rule,
    .delta_gates = delta_gates, .rope = rope, .kv_store = kv_store, .attend = attend, .index_scores = index_scores,
    .route = route, .combine = combine, .all_finite = all_finite,
};
