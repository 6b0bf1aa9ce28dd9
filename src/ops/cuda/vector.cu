/* vector.cu - norms, gates, sums and the router: the small operations between the products (ops/vector.h defines them).
 *
 * One row is 10 KB at most, so these kernels are latency and nothing else: a row is spread over blocks wherever an element needs no other one, and
 * a norm's block leaves the A8 form of its output behind, which would otherwise be a launch of its own. */
#include "ops/cuda/vector_text.cuh"

/* ---- Pieces ------------------------------------------------------------------------------------------------------------------------ */

/* The end of tree-256 in a block of 256: thread j brings partial j, every thread gets the sum. `p` is shared. */
DEVICE_FN float block_halve_256(float partial, float *p)
{
    int j = lane_id();
    p[threadIdx.x] = partial;
    __syncthreads();
    float a = (p[j] + p[j + 128]) + (p[j + 64] + p[j + 192]), b = (p[j + 32] + p[j + 160]) + (p[j + 96] + p[j + 224]);
    return warp_halve(a + b);
}

DEVICE_FN int element_id(void) { return (int)(blockIdx.x * blockDim.x + threadIdx.x); }

/* ---- Norms, A8 --------------------------------------------------------------------------------------------------------------------- */

KERNEL(vector_norm)
{
    __shared__ float p[TREE_THREADS];
    int t = (int)blockIdx.y, step = a.partials, first = step == 256 ? (int)threadIdx.x : lane_id();
    int group = step == 256 ? (int)blockIdx.x : (int)blockIdx.x * (VECTOR_THREADS / WARP) + warp_id();
    if (group >= a.groups)
        return; /* a whole warp, and only of tree-32, which has no barrier */
    size_t at = (size_t)t * row_stride(a.groups * a.dim) + (size_t)group * (size_t)a.dim;
    const float *gamma = a.gamma + (size_t)(group % a.gamma_groups) * (size_t)a.dim;
    float partial = 0;
    for (int i = first; i < a.dim; i += step)
        partial = fmaf(a.x[at + i], a.x[at + i], partial);
    float scale = norm_scale(step == 256 ? block_halve_256(partial, p) : warp_halve(partial), a.dim, a.eps);
    for (int i = first; i < a.dim; i += step) {
        float value = a.x[at + i] * scale * gamma[i];
        a.out[at + i] = value;
        a8_element(&a.a8, t, a.groups * a.dim, group * a.dim + i, value);
    }
}

DEVICE_FN float write_strength(float inject, int streams) { return 2.0f * math_sigmoid(inject / (float)streams); }

KERNEL(vector_write_norm)
{
    __shared__ float p[TREE_THREADS];
    int t = (int)blockIdx.y, stream = (int)blockIdx.x;
    size_t at = (size_t)t * row_stride(a.streams * a.dim) + (size_t)stream * (size_t)a.dim;
    const float *y = a.y + (size_t)t * row_stride(a.dim), *gamma = a.gamma + (size_t)stream * (size_t)a.dim;
    float strength = write_strength(a.inject[(size_t)t * row_stride(a.streams) + stream], a.streams), partial = 0;
    for (int i = (int)threadIdx.x; i < a.dim; i += TREE_THREADS) {
        float value = fmaf(strength, y[i], a.residual[at + i]);
        a.residual[at + i] = value;
        partial = fmaf(value, value, partial);
    }
    float scale = norm_scale(block_halve_256(partial, p), a.dim, a.eps);
    for (int i = (int)threadIdx.x; i < a.dim; i += TREE_THREADS) {
        float value = a.residual[at + i] * scale * gamma[i];
        a.out[at + i] = value;
        a8_element(&a.a8, t, a.streams * a.dim, stream * a.dim + i, value);
    }
}

KERNEL(vector_quantize)
{
    int t = (int)blockIdx.y, i = element_id();
    if (i < a.width)
        a8_element(&a.a8, t, a.width, i, a.values[(size_t)t * row_stride(a.width) + i]);
}

/* ---- Element by element ------------------------------------------------------------------------------------------------------------ */

KERNEL(vector_gate_input)
{
    int t = (int)blockIdx.y, i = element_id();
    if (i >= a.width)
        return;
    size_t at = (size_t)t * row_stride(a.width) + (size_t)i;
    float value = math_silu(a.x[at] / (float)a.streams);
    a.out[at] = value;
    a8_element(&a.a8, t, a.width, i, value);
}

KERNEL(vector_mix)
{
    int t = (int)blockIdx.y, d = element_id();
    if (d >= a.dim)
        return;
    size_t at = (size_t)t * row_stride(a.streams * a.dim) + (size_t)d;
    float sum = math_sigmoid(a.gates[at]) * a.normed[at];
    for (int s = 1; s < a.streams; s++) {
        at += (size_t)a.dim;
        sum = fmaf(math_sigmoid(a.gates[at]), a.normed[at], sum);
    }
    float value = sum / (float)a.streams;
    a.out[(size_t)t * row_stride(a.dim) + d] = value;
    a8_element(&a.a8, t, a.dim, d, value);
}

KERNEL(vector_write)
{
    int t = (int)blockIdx.y, i = element_id();
    if (i >= a.streams * a.dim)
        return;
    float strength = write_strength(a.inject[(size_t)t * row_stride(a.streams) + i / a.dim], a.streams);
    float *r = a.residual + (size_t)t * row_stride(a.streams * a.dim) + i;
    *r = fmaf(strength, a.y[(size_t)t * row_stride(a.dim) + i % a.dim], *r);
}

KERNEL(vector_silu_mul)
{
    int t = (int)blockIdx.y, i = element_id();
    if (i >= a.width)
        return;
    size_t at = (size_t)t * row_stride(a.width) + (size_t)i;
    float value = math_silu(a.gate[at]) * a.up[at];
    a.out[at] = value;
    a8_element(&a.a8, t, a.width, i, value);
}

KERNEL(vector_add2)
{
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < a.n)
        a.x[i] = a.x[i] + a.a[i] + a.b[i];
}

/* The rows of a window run side by side although a tap may be another row's vector: that one is read from x, as its ring slot may not be written yet.
 * The ring has a slot more for every row of a window (model/), so nothing that a row still needs is overwritten. */
KERNEL(vector_conv)
{
    __shared__ const float *tap[8];
    int t = (int)blockIdx.y, c = element_id(), last = a.n_taps - 1;
    if ((int)threadIdx.x < a.n_taps) {
        const float *from = a.taps[t][threadIdx.x];
        for (int i = 0; a.x && i <= t; i++)
            if (from == a.taps[i][last])
                from = a.x + (size_t)i * row_stride(a.channels);
        tap[threadIdx.x] = from;
    }
    __syncthreads();
    if (c >= a.channels)
        return;
    float sum = a.kernel[c] * tap[0][c];
    for (int j = 1; j < a.n_taps; j++)
        sum = fmaf(a.kernel[(size_t)j * (size_t)a.channels + c], tap[j][c], sum);
    if (a.x)
        ((float *)a.taps[t][last])[c] = tap[last][c];
    a.out[(size_t)t * row_stride(a.channels) + c] = math_silu(sum);
}

KERNEL(vector_copy)
{
    int t = (int)blockIdx.y, i = element_id();
    if (i >= a.width)
        return;
    float value = a.from[t][i], *to = a.to[t];
    for (int copy = 0; copy < a.copies; copy++)
        to[(size_t)copy * (size_t)a.width + i] = value;
}

KERNEL(vector_ngram_gate)
{
    __shared__ float p[TREE_THREADS];
    int t = (int)blockIdx.y;
    size_t at = (size_t)t * row_stride(a.streams * a.dim) + (size_t)blockIdx.x * (size_t)a.dim;
    const float *v = a.v + (size_t)t * row_stride(a.dim);
    float partial = 0;
    for (int i = (int)threadIdx.x; i < a.dim; i += TREE_THREADS)
        partial = fmaf(a.k[at + i], a.q[at + i], partial);
    float d = block_halve_256(partial, p) / sqrtf((float)a.dim), size = sqrtf(fabsf(d) > 1e-6f ? fabsf(d) : 1e-6f);
    float gate = math_sigmoid(d > 0 ? size : d < 0 ? -size : 0.0f);
    for (int i = (int)threadIdx.x; i < a.dim; i += TREE_THREADS)
        a.p[at + i] = gate * v[i];
}

/* ---- Mixture of experts ------------------------------------------------------------------------------------------------------------ */

/* Larger value first, then lower index: as one integer to be maximised. -0 and 0 are equal. */
DEVICE_FN uint64_t rank_key(float value, int index)
{
    uint32_t bits = float_bits(value + 0.0f);
    return (uint64_t)(bits >> 31 ? ~bits : bits | 0x80000000u) << 32 | (0xffffffffu - (uint32_t)index);
}

DEVICE_FN int rank_index(uint64_t key) { return (int)(0xffffffffu - (uint32_t)key); }

DEVICE_FN uint64_t warp_largest(uint64_t key)
{
    for (int h = 16; h; h >>= 1) {
        uint64_t other = __shfl_xor_sync(ALL_LANES, key, h);
        key = other > key ? other : key;
    }
    return key;
}

/* One warp a row. The keys differ, so the next best is the largest below the last one and nothing has to be marked as taken. */
KERNEL(vector_route)
{
    int t = (int)blockIdx.x, lane = lane_id();
    const float *logits = a.logits + (size_t)t * row_stride(a.n_experts);
    uint64_t last = ~(uint64_t)0, mine = 0; /* lane i keeps the i-th choice: OPS_MAX_USED is a warp */
    for (int i = 0; i < a.n_used; i++) {
        uint64_t best = 0;
        for (int e = lane; e < a.n_experts; e += WARP) {
            uint64_t key = rank_key(logits[e], e);
            best = key < last && key > best ? key : best;
        }
        last = warp_largest(best);
        mine = lane == i ? last : mine;
    }
    float logit = lane < a.n_used ? logits[rank_index(mine)] : 0.0f;
    float weight = math_exp(logit - __shfl_sync(ALL_LANES, logit, 0)), sum = 0;
    for (int i = 0; i < a.n_used; i++)
        sum += __shfl_sync(ALL_LANES, weight, i);
    if (lane < a.n_used) {
        a.route->ids[t][lane] = rank_index(mine);
        a.route->weights[t][lane] = weight / sum;
    }
}

KERNEL(vector_combine)
{
    int t = (int)blockIdx.y, d = element_id();
    if (d >= a.dim)
        return;
    size_t stride = row_stride(a.dim);
    const float *weights = a.route->weights[t];
    float sum = 0;
    for (int i = 0; i < a.n_used; i++) {
        const float *parts = a.from_host && a.from_host[t][i] ? a.host_parts : a.parts;
        float part = parts[((size_t)t * (size_t)a.n_used + (size_t)i) * stride + (size_t)d];
        sum = i ? fmaf(weights[i], part, sum) : weights[i] * part;
    }
    float strength = math_sigmoid(a.shared_gate[(size_t)t * row_stride(1)]);
    a.out[(size_t)t * stride + (size_t)d] = fmaf(strength, a.shared[(size_t)t * stride + (size_t)d], sum);
}

/* ---- Checks and picks -------------------------------------------------------------------------------------------------------------- */

KERNEL(vector_finite)
{
    const float *x = a.x[blockIdx.y];
    size_t n = a.n[blockIdx.y];
    bool bad = false;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        bad = bad || (float_bits(x[i]) & 0x7f800000u) == 0x7f800000u;
    if (__any_sync(ALL_LANES, bad) && lane_id() == 0)
        atomicMin(a.layer_found, a.layer);
}

/* Every warp brings a key; every thread of the block gets the largest. `keys` is shared, [TREE_THREADS / WARP]. */
DEVICE_FN uint64_t block_largest(uint64_t key, uint64_t *keys)
{
    key = warp_largest(key);
    if (lane_id() == 0)
        keys[warp_id()] = key;
    __syncthreads();
    key = keys[0];
    for (int i = 1; i < TREE_THREADS / WARP; i++)
        key = keys[i] > key ? keys[i] : key;
    __syncthreads();
    return key;
}

/* The block that finishes last compares what all have found. */
KERNEL(vector_argmax)
{
    __shared__ uint64_t keys[TREE_THREADS / WARP];
    __shared__ bool is_last;
    int t = (int)blockIdx.y;
    const float *logits = a.logits + (size_t)t * row_stride(a.n_vocab);
    volatile uint64_t *found = a.keys + (size_t)t * ARGMAX_BLOCKS;
    uint64_t best = 0;
    for (int i = element_id(); i < a.n_vocab; i += (int)(gridDim.x * blockDim.x)) {
        float value = logits[i];
        uint64_t key = rank_key(value == value ? value : -INFINITY, i);
        best = key > best ? key : best;
    }
    best = block_largest(best, keys);
    if (threadIdx.x == 0) {
        found[blockIdx.x] = best;
        __threadfence();
        is_last = atomicAdd(&a.tickets[t], 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!is_last)
        return;
    __threadfence();
    best = block_largest(threadIdx.x < gridDim.x ? found[threadIdx.x] : 0, keys);
    if (threadIdx.x == 0) {
        a.ids[t] = rank_index(best);
        a.tickets[t] = 0;
    }
}
