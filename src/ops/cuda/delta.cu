/* delta.cu - the gated delta rule (spec/model.md section 3.4; ops/vector.h defines the bits).
 *
 * The states are the largest thing a token reads and writes besides weights: 3 MB a layer, so delta_rule is bound by their bandwidth if
 * enough loads are under way at once. A thread therefore owns one column of one quarter of the k index and holds all of it in registers
 * (32 floats for dim_k 128): a state is read once and written once, whatever the number of rows. A warp is 8 columns by 4 quarters, so the two sums
 * over k end in shuffles. */
#include "ops/cuda/vector_text.cuh"

DEVICE_FN size_t delta_stride(const struct delta_shape *s) { return row_stride(2 * s->k_heads * s->dim_k + s->v_heads * s->dim_v); }

/* Warps: the heads of q, then of k, by tree-32. The blocks after them: the gates, a thread a value head. */
KERNEL(delta_prepare)
{
    const struct delta_shape *s = &a.shape;
    int t = (int)blockIdx.y, heads = 2 * s->k_heads, head_blocks = (heads + VECTOR_THREADS / WARP - 1) / (VECTOR_THREADS / WARP);
    if ((int)blockIdx.x < head_blocks) {
        int head = (int)blockIdx.x * (VECTOR_THREADS / WARP) + warp_id();
        if (head >= heads)
            return;
        float *x = a.qkv + (size_t)t * delta_stride(s) + (size_t)head * (size_t)s->dim_k;
        float inverse = 1.0f / sqrtf(warp_dot(x, x, s->dim_k) + 1e-6f), scale = head < s->k_heads ? 1.0f / sqrtf((float)s->dim_k) : 1.0f;
        for (int i = lane_id(); i < s->dim_k; i += WARP)
            x[i] = x[i] * inverse * scale;
        return;
    }
    int head = ((int)blockIdx.x - head_blocks) * VECTOR_THREADS + (int)threadIdx.x;
    if (head >= s->v_heads)
        return;
    size_t at = (size_t)t * row_stride(s->v_heads) + (size_t)head;
    a.decay[at] = math_exp(a.a[head] * math_softplus(a.alpha[at] + a.dt[head]));
    a.beta[at] = math_sigmoid(a.b[at]);
}

/* The rows of one span, as one value head's strip sees them. */
struct strip_rows {
    int n, keep, key_head, head, strip;
    size_t first;
    const float *qkv, *decay, *beta;
    float *state;   /* the head's */
    float *out;     /* row 0 of the window; NULL: only the state is wanted */
};

/* Shared memory of a row: quarters of k, quarters of q, v, decay, beta. Quarters begin 4 floats apart modulo the 32 banks, so that a warp's four
 * different addresses do not collide. */
DEVICE_FN void strip_load_rows(const struct delta_shape *s, const struct strip_rows *r, float *shared)
{
    int quarter_stride = DELTA_QUARTER_STRIDE(s->dim_k), quarter = s->dim_k / 4;
    for (int t = 0; t < r->n; t++) {
        const float *row = r->qkv + (r->first + (size_t)t) * delta_stride(s);
        const float *q = row + r->key_head * s->dim_k, *k = q + s->k_heads * s->dim_k;
        const float *v = row + 2 * s->k_heads * s->dim_k + r->head * s->dim_v + r->strip * DELTA_STRIP;
        float *to = shared + t * DELTA_ROW_SHARED(s->dim_k);
        for (int i = (int)threadIdx.x; i < s->dim_k; i += DELTA_THREADS) {
            int at = i / quarter * quarter_stride + i % quarter;
            to[at] = k[i];
            to[4 * quarter_stride + at] = q[i];
        }
        to += 8 * quarter_stride;
        if (threadIdx.x < DELTA_STRIP)
            to[threadIdx.x] = v[threadIdx.x];
        if (threadIdx.x == 0) {
            size_t gate = (r->first + (size_t)t) * row_stride(s->v_heads) + (size_t)r->head;
            to[DELTA_STRIP] = r->decay[gate];
            to[DELTA_STRIP + 1] = r->beta[gate];
        }
    }
}

/* The four quarters' partial sums of this thread's column, in order. */
DEVICE_FN float quarters_sum(float part)
{
    int c = lane_id() & 7;
    float sum = __shfl_sync(ALL_LANES, part, c);
    sum = sum + __shfl_sync(ALL_LANES, part, c + 8);
    sum = sum + __shfl_sync(ALL_LANES, part, c + 16);
    return sum + __shfl_sync(ALL_LANES, part, c + 24);
}

/* `most` is a constant where this is called: the loops unroll and m lies in registers. */
DEVICE_FN void strip_run(const struct delta_shape *s, const struct strip_rows *r, const float *shared, const int most)
{
    float m[DELTA_MAX_KEY / 4];
    int n = most == 32 ? 32 : s->dim_k / 4, quarter = lane_id() >> 3, column = warp_id() * 8 + (lane_id() & 7);
    float *state = r->state + ((size_t)r->strip * (size_t)s->dim_k + (size_t)(quarter * n)) * DELTA_STRIP + (size_t)column;
    UNROLL
    for (int i = 0; i < most; i++)
        if (i < n)
            m[i] = state[i * DELTA_STRIP];
    strip_load_rows(s, r, (float *)shared);
    __syncthreads();
    for (int t = 0; t < r->n; t++) {
        if (t == r->keep && t > 0) {
            UNROLL
            for (int i = 0; i < most; i++)
                if (i < n)
                    state[i * DELTA_STRIP] = m[i];
        }
        const float *row = shared + t * DELTA_ROW_SHARED(4 * n), *gates = row + 8 * DELTA_QUARTER_STRIDE(4 * n);
        const float4 *k = (const float4 *)(const void *)(row + quarter * DELTA_QUARTER_STRIDE(4 * n)), *q = k + DELTA_QUARTER_STRIDE(4 * n);
        float decay = gates[DELTA_STRIP], part = 0;
        UNROLL
        for (int i = 0; i < most; i += 4)
            if (i < n) {
                float4 x = k[i / 4];
                m[i] = decay * m[i];
                part = fmaf(x.x, m[i], part);
                m[i + 1] = decay * m[i + 1];
                part = fmaf(x.y, m[i + 1], part);
                m[i + 2] = decay * m[i + 2];
                part = fmaf(x.z, m[i + 2], part);
                m[i + 3] = decay * m[i + 3];
                part = fmaf(x.w, m[i + 3], part);
            }
        float delta = gates[DELTA_STRIP + 1] * (gates[column] - quarters_sum(part));
        part = 0;
        UNROLL
        for (int i = 0; i < most; i += 4)
            if (i < n) {
                float4 x = k[i / 4], y = q[i / 4];
                m[i] = fmaf(x.x, delta, m[i]);
                part = fmaf(y.x, m[i], part);
                m[i + 1] = fmaf(x.y, delta, m[i + 1]);
                part = fmaf(y.y, m[i + 1], part);
                m[i + 2] = fmaf(x.z, delta, m[i + 2]);
                part = fmaf(y.z, m[i + 2], part);
                m[i + 3] = fmaf(x.w, delta, m[i + 3]);
                part = fmaf(y.w, m[i + 3], part);
            }
        float sum = quarters_sum(part);
        if (r->out && quarter == 0)
            r->out[(r->first + (size_t)t) * row_stride(s->v_heads * s->dim_v) + (size_t)(r->head * s->dim_v + r->strip * DELTA_STRIP + column)] = sum;
    }
    if (r->keep != r->n)
        return;
    UNROLL
    for (int i = 0; i < most; i++)
        if (i < n)
            state[i * DELTA_STRIP] = m[i];
}

DEVICE_FN void strip_of_block(const struct delta_shape *s, const float *qkv, const float *decay, const float *beta, float *const state,
                              const struct row_span *span, int keep, float *out, float *shared)
{
    int strips = s->dim_v / DELTA_STRIP, head = (int)blockIdx.x / strips;
    struct strip_rows r = { span->n, keep, head % s->k_heads, head, (int)blockIdx.x % strips, (size_t)span->first, qkv, decay, beta,
                            state + (size_t)head * (size_t)s->dim_k * (size_t)s->dim_v, out };
    if (s->dim_k == 128)
        strip_run(s, &r, shared, 32);
    else
        strip_run(s, &r, shared, DELTA_MAX_KEY / 4);
}

KERNEL_BOUNDS(delta_rule, 64, 8)
{
    DYNAMIC_SHARED(float, shared);
    if ((int)blockIdx.y >= *a.n_spans)
        return;
    const struct row_span span = a.spans[blockIdx.y];
    strip_of_block(&a.shape, a.qkv, a.decay, a.beta, a.state[blockIdx.y], &span, span.keep, a.out, shared);
}

KERNEL_BOUNDS(delta_replay, 64, 8)
{
    DYNAMIC_SHARED(float, shared);
    if ((int)blockIdx.y >= *a.n_spans)
        return;
    const struct row_span span = a.spans[blockIdx.y];
    if (span.n == 0)
        return;
    const struct delta_trace_rows trace = a.traces[blockIdx.z];
    strip_of_block(&a.shape, trace.qkv, trace.decay, trace.beta, a.state[(size_t)blockIdx.y * (size_t)a.n_layers + blockIdx.z], &span, span.n, 0, shared);
}

/* A warp a value head. */
KERNEL(delta_output)
{
    const struct delta_shape *s = &a.shape;
    int t = (int)blockIdx.y, head = (int)blockIdx.x * (VECTOR_THREADS / WARP) + warp_id(), width = s->v_heads * s->dim_v;
    if (head >= s->v_heads)
        return;
    size_t at = (size_t)t * row_stride(width) + (size_t)(head * s->dim_v);
    float *o = a.o + at, scale = norm_scale(warp_dot(o, o, s->dim_v), s->dim_v, a.eps);
    for (int i = lane_id(); i < s->dim_v; i += WARP) {
        float value = o[i] * scale * a.gamma[i] * math_sigmoid(a.z[at + (size_t)i]);
        o[i] = value;
        a8_element(&a.a8, t, width, head * s->dim_v + i, value);
    }
}
