/* attention.cu - keys and values, the indexer's selection, attention over the selected cells (spec/model.md section 3.5; ops/vector.h and
 * ops/cpu.c define the bits).
 *
 * What costs time is reading: all block keys for the selection (a float vector for every 4 tokens), then the keys and values of the selected cells. Both
 * loops give a warp 32 tree-32 sums at once - 4 heads by 8 vectors - and halve them together: 31 shuffles instead of 160 (halve_32).
 */
#include "ops/cuda/vector_text.cuh"

/* ---- Pieces ------------------------------------------------------------------------------------------------------------------------ */

/* One step of halve_32: sums i and i + h, of which the lanes without bit h keep the first and the others the second. */
DEVICE_FN void halve_step(float *sum, const int h)
{
    bool upper = lane_id() & h;
    UNROLL
    for (int i = 0; i < h; i++) {
        float keep = upper ? sum[i + h] : sum[i], give = upper ? sum[i] : sum[i + h];
        sum[i] = keep + __shfl_xor_sync(ALL_LANES, give, h);
    }
}

/* Lane l's sum[i] is partial l of the i-th of 32 tree-32 sums; lane i gets the i-th sum. A lane keeps the half of the sums that it is responsible for
 * and hands over the other half, so each addition is one of the definition's. Written out: a loop over h is not unrolled, and sum must lie in
 * registers. */
DEVICE_FN float halve_32(float *sum)
{
    halve_step(sum, 16);
    halve_step(sum, 8);
    halve_step(sum, 4);
    halve_step(sum, 2);
    halve_step(sum, 1);
    return sum[0];
}

/* kv_store of n values by one warp; n is a multiple of 64 for int8. */
DEVICE_FN void store_cell(const struct kv_plane *plane, int64_t cell, int width, int first, const float *x, int n)
{
    int64_t at = cell * width + first;
    if (plane->type == KV_F16) {
        for (int i = lane_id(); i < n; i += WARP)
            ((uint16_t *)plane->codes)[at + i] = half_from_float(x[i]);
        return;
    }
    for (int g = 0; g < n; g += KV_GROUP) {
        float low = x[g + lane_id()], high = x[g + WARP + lane_id()];
        float amax = fabsf(low) > fabsf(high) ? fabsf(low) : fabsf(high);
        for (int h = 16; h; h >>= 1) {
            float other = __shfl_xor_sync(ALL_LANES, amax, h);
            amax = other > amax ? other : amax;
        }
        float inverse = amax < 1e-30f ? 0.0f : 127.0f / amax;
        int8_t *codes = (int8_t *)plane->codes + at + g + lane_id();
        codes[0] = (int8_t)((low * inverse + 0x1.8p23f) - 0x1.8p23f);
        codes[WARP] = (int8_t)((high * inverse + 0x1.8p23f) - 0x1.8p23f);
        if (lane_id() == 0)
            plane->scales[(at + g) / KV_GROUP] = amax < 1e-30f ? 0.0f : amax / 127.0f;
    }
}

/* Element i (this lane's) of the 32 values from `at` on, which have one scale. */
DEVICE_FN float load_value(const struct kv_plane *plane, int64_t at, int i)
{
    if (plane->type == KV_F16)
        return half_value(((const uint16_t *)plane->codes)[at + i]);
    return (float)((const int8_t *)plane->codes)[at + i] * plane->scales[at / KV_GROUP];
}

/* One head by one warp: norm and rope of x into out; both may be shared memory, and the same. */
DEVICE_FN void head_norm_rope(const float *x, float *out, int dim, const float *gamma, float eps, const float *cosines, const float *sines, int n_pairs)
{
    float scale = norm_scale(warp_dot(x, x, dim), dim, eps);
    for (int i = lane_id(); i < dim; i += WARP)
        out[i] = x[i] * scale * gamma[i];
    __syncwarp();
    for (int i = lane_id(); i < n_pairs; i += WARP) {
        float low = out[i], high = out[i + n_pairs];
        out[i] = fmaf(low, cosines[i], -(high * sines[i]));
        out[i + n_pairs] = fmaf(high, cosines[i], low * sines[i]);
    }
    __syncwarp();
}

DEVICE_FN void warp_copy(float *to, const float *from, int n)
{
    for (int i = lane_id(); i < n; i += WARP)
        to[i] = from[i];
}

/* ---- Store ------------------------------------------------------------------------------------------------------------------------- */

/* The key of the block that row t completes. Raw keys of this window's rows are read from ik: another warp is storing them in the ring. */
DEVICE_FN void store_block_key(const struct attention_store_args *a, int t, float *key)
{
    const struct attention_shape *s = &a->shape;
    const struct attention_row *row = &a->rows[t];
    int first = row->position - (s->block - 1);
    for (int d = lane_id(); d < s->index_dim; d += WARP) {
        float sum = 0;
        for (int i = 0; i < s->block; i++) {
            int other = t - (s->block - 1 - i);
            float raw = other >= 0 && a->rows[other].raw_keys == row->raw_keys ? a->ik[(size_t)other * row_stride(s->index_dim) + d]
                                                                              : row->raw_keys[(size_t)((first + i) % row->ring_rows) * (size_t)s->index_dim + d];
            sum = i ? sum + raw : raw;
        }
        key[d] = sum / (float)s->block;
    }
    __syncwarp();
    head_norm_rope(key, key, s->index_dim, a->ik_gamma, s->eps, row->block_cosines, row->block_sines, s->n_pairs);
    warp_copy(row->block_keys + (size_t)(row->position / s->block) * (size_t)s->index_dim, key, s->index_dim);
}

/* A warp a job: each head of q; each unit of k, then of v; each head of iq; the raw index key; the block key. */
KERNEL(attention_store)
{
    __shared__ float buffers[STORE_WARPS][2 * ATTEND_MAX_DIM];
    const struct attention_shape *s = &a.shape;
    int t = (int)blockIdx.y, job = (int)blockIdx.x * STORE_WARPS + warp_id(), unit = attention_unit(s), units = attention_units(s), kv = s->kv_heads * s->dim;
    const struct attention_row *row = &a.rows[t];
    float *buffer = buffers[warp_id()];
    if (job < s->n_heads) {
        float *q = a.q + (size_t)t * row_stride(2 * s->n_heads * s->dim) + (size_t)job * 2 * (size_t)s->dim;
        head_norm_rope(q, buffer, s->dim, a.q_gamma, s->eps, row->cosines, row->sines, s->n_pairs);
        warp_copy(q, buffer, s->dim);
        return;
    }
    job -= s->n_heads;
    if (job < 2 * units) {
        int head = job % units * unit, n = s->kv_heads - head < unit ? s->kv_heads - head : unit, first = head * s->dim;
        size_t at = (size_t)t * row_stride(kv) + (size_t)first;
        if (job >= units) {
            store_cell(&row->values, row->position, kv, first, a.v + at, n * s->dim);
            return;
        }
        for (int i = 0; i < n; i++)
            head_norm_rope(a.k + at + i * s->dim, buffer + i * s->dim, s->dim, a.k_gamma, s->eps, row->cosines, row->sines, s->n_pairs);
        warp_copy(a.k + at, buffer, n * s->dim);
        store_cell(&row->keys, row->position, kv, first, buffer, n * s->dim);
        return;
    }
    job -= 2 * units;
    if (!s->block)
        return;
    const float *ik = a.ik + (size_t)t * row_stride(s->index_dim);
    if (job < s->index_heads) {
        float *iq = a.iq + (size_t)t * row_stride(s->index_heads * s->index_dim) + (size_t)job * (size_t)s->index_dim;
        head_norm_rope(iq, buffer, s->index_dim, a.iq_gamma, s->eps, row->cosines, row->sines, s->n_pairs);
        warp_copy(iq, buffer, s->index_dim);
    } else if (job == s->index_heads) {
        warp_copy(row->raw_keys + (size_t)(row->position % row->ring_rows) * (size_t)s->index_dim, ik, s->index_dim);
    } else if (job == s->index_heads + 1 && (row->position + 1) % s->block == 0) {
        store_block_key(&a, t, buffer);
    }
}

/* ---- Selection --------------------------------------------------------------------------------------------------------------------- */

/* The scores of 8 blocks for one row: every lane gets that of block `first + (lane & 7)`. Blocks beyond `last` repeat it. */
DEVICE_FN float score_blocks(const struct attention_shape *s, const float *iq, const float *keys, int first, int last)
{
    float score = 0;
    for (int head = 0; head < s->index_heads; head += 4) {
        float sum[32];
        UNROLL
        for (int i = 0; i < 32; i++)
            sum[i] = 0;
        for (int d = lane_id(); d < s->index_dim; d += WARP) {
            float key[8];
            UNROLL
            for (int b = 0; b < 8; b++)
                key[b] = keys[(size_t)(first + b < last ? first + b : last) * (size_t)s->index_dim + d];
            UNROLL
            for (int h = 0; h < 4; h++) {
                float q = head + h < s->index_heads ? iq[(head + h) * s->index_dim + d] : 0.0f;
                UNROLL
                for (int b = 0; b < 8; b++)
                    sum[8 * h + b] = fmaf(q, key[b], sum[8 * h + b]);
            }
        }
        float dot = halve_32(sum), positive = dot > 0 ? dot : 0.0f; /* a missing head adds 0, which changes no sum of such terms */
        UNROLL
        for (int h = 0; h < 4; h++)
            score = score + __shfl_sync(ALL_LANES, positive, 8 * h + (lane_id() & 7));
    }
    return score;
}

/* A warp takes slices of 32 blocks for all rows of a sequence, since their keys are the same; the blocks of row t do nothing if row t - 1 is of that
 * sequence too. */
KERNEL(attention_scores)
{
    __shared__ float largest[INDEX_WARPS][KERNEL_MAX_ROWS];
    const struct attention_shape *s = &a.shape;
    int t = (int)blockIdx.y, end = t + 1, warp = warp_id();
    const float *keys = a.rows[t].block_keys;
    if (t > 0 && a.rows[t - 1].block_keys == keys)
        return;
    while (end < a.n && a.rows[end].block_keys == keys)
        end++;
    int most = attention_blocks(s, a.rows[end - 1].position);
    if (most <= s->budget_blocks)
        return;
    for (int slice = (int)blockIdx.x * INDEX_WARPS + warp; slice * INDEX_SLICE < most; slice += (int)gridDim.x * INDEX_WARPS) {
        for (int group = 0; group < INDEX_SLICE; group += 8)
            for (int i = t; i < end; i++) {
                int blocks = attention_blocks(s, a.rows[i].position), first = slice * INDEX_SLICE + group, block = first + (lane_id() & 7);
                if (blocks <= s->budget_blocks || first >= blocks)
                    continue;
                float score = score_blocks(s, a.iq + (size_t)i * row_stride(s->index_heads * s->index_dim), keys, first, blocks - 1);
                if (lane_id() < 8 && block < blocks)
                    a.rows[i].scores[block] = score;
                for (int h = 4; h; h >>= 1) { /* repeated blocks do not matter here */
                    float other = __shfl_xor_sync(ALL_LANES, score, h);
                    score = other > score ? other : score;
                }
                if (lane_id() == 0)
                    largest[warp][i] = group && largest[warp][i] > score ? largest[warp][i] : score;
            }
        for (int i = t; lane_id() == 0 && i < end; i++)
            if (slice * INDEX_SLICE < attention_blocks(s, a.rows[i].position))
                a.maxima[(size_t)i * (size_t)a.max_slices + (size_t)slice] = largest[warp][i];
    }
}

/* Values of which the `want` largest are looked for: plain, or the scores of listed slices. Scores are >= 0: their bits order like numbers. */
struct candidates { const float *values; const int32_t *slices; int n, blocks; };

/* Value i, and the block it belongs to; -1: there is none. */
DEVICE_FN int candidate_block(const struct candidates *c, int i)
{
    if (i >= c->n)
        return -1;
    int block = c->slices ? c->slices[i / INDEX_SLICE] * INDEX_SLICE + i % INDEX_SLICE : i;
    return block < c->blocks ? block : -1;
}

struct select_shared {
    int count[256], byte, larger;
    uint32_t totals[2][SELECT_THREADS / WARP];
};

/* The want-th largest value's bits, and how many values are larger: four rounds of counting bytes, the highest first. By a whole block. */
DEVICE_FN uint32_t kth_largest(const struct candidates *c, int want, struct select_shared *shared, int *n_larger)
{
    uint32_t prefix = 0, mask = 0;
    int larger = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        if (threadIdx.x < 256)
            shared->count[threadIdx.x] = 0;
        __syncthreads();
        for (int i = (int)threadIdx.x; i - lane_id() < c->n; i += SELECT_THREADS) {
            int block = candidate_block(c, i);
            uint32_t bits = block < 0 ? 0 : float_bits(c->values[block]);
            bool counts = block >= 0 && (bits & mask) == prefix;
            int byte = (int)(bits >> shift & 255);
            uint32_t counting = __ballot_sync(ALL_LANES, counts);
            if (!counting)
                continue;
            /* Neighbours often share the byte: one addition for all of them. */
            int first = __ffs((int)counting) - 1, common = __shfl_sync(ALL_LANES, byte, first);
            if (__all_sync(ALL_LANES, !counts || byte == common)) {
                if (lane_id() == first)
                    atomicAdd(&shared->count[common], __popc(counting));
            } else if (counts) {
                atomicAdd(&shared->count[byte], 1);
            }
        }
        __syncthreads();
        if (warp_id() == 0) { /* lane l has the bytes 255 - 8l ... 248 - 8l */
            int own = 0, top = 255 - 8 * lane_id();
            for (int i = 0; i < 8; i++)
                own += shared->count[top - i];
            int before = own;
            for (int h = 1; h < WARP; h <<= 1) {
                int other = __shfl_up_sync(ALL_LANES, before, h);
                before += lane_id() >= h ? other : 0;
            }
            before += larger - own;
            if (before < want && before + own >= want) {
                int byte = top;
                while (before + shared->count[byte] < want)
                    before += shared->count[byte--];
                shared->byte = byte;
                shared->larger = before;
            }
        }
        __syncthreads();
        prefix |= (uint32_t)shared->byte << shift;
        mask |= 255u << shift;
        larger = shared->larger;
        __syncthreads();
    }
    *n_larger = larger;
    return prefix;
}

/* How many `above` and `equal` there were in earlier rounds and threads, in order; the totals move to after this round. By a whole block; `round`
 * alternates 0 and 1, so that one barrier is enough. */
struct ranks { int above, equal; };
DEVICE_FN struct ranks block_ranks(bool above, bool equal, struct select_shared *shared, int round, struct ranks *total)
{
    uint32_t a = __ballot_sync(ALL_LANES, above), e = __ballot_sync(ALL_LANES, equal), lower = (1u << lane_id()) - 1;
    if (lane_id() == 0)
        shared->totals[round][warp_id()] = (uint32_t)__popc(a) << 16 | (uint32_t)__popc(e); /* at most 1024 each */
    __syncthreads();
    uint32_t sum = shared->totals[round][lane_id()];
    for (int h = 1; h < WARP; h <<= 1) {
        uint32_t other = __shfl_up_sync(ALL_LANES, sum, h);
        sum += lane_id() >= h ? other : 0;
    }
    uint32_t all = __shfl_sync(ALL_LANES, sum, 31), before = __shfl_sync(ALL_LANES, sum, warp_id() ? warp_id() - 1 : 0);
    before = warp_id() ? before : 0;
    struct ranks rank = { total->above + (int)(before >> 16) + __popc(a & lower), total->equal + (int)(before & 0xffff) + __popc(e & lower) };
    total->above += (int)(all >> 16);
    total->equal += (int)(all & 0xffff);
    return rank;
}

/* The `want` largest candidates (ties: the lower block), in order: block b becomes b * copies ... b * copies + copies - 1. */
DEVICE_FN void keep_largest(const struct candidates *c, int want, struct select_shared *shared, int32_t *out, int copies)
{
    int larger;
    uint32_t threshold = kth_largest(c, want, shared, &larger);
    struct ranks total = { 0, 0 };
    for (int i = (int)threadIdx.x, round = 0; i - (int)threadIdx.x < c->n; i += SELECT_THREADS, round ^= 1) {
        int block = candidate_block(c, i);
        uint32_t bits = block < 0 ? 0 : float_bits(c->values[block]);
        bool above = block >= 0 && bits > threshold, equal = block >= 0 && bits == threshold;
        struct ranks rank = block_ranks(above, equal, shared, round, &total);
        int equals_kept = rank.equal < want - larger ? rank.equal : want - larger;
        if (above || (equal && rank.equal < want - larger))
            for (int j = 0; j < copies; j++)
                out[(rank.above + equals_kept) * copies + j] = block * copies + j;
    }
}

/* One block a row. If `want` slices are taken by their largest scores (ties: the lower slice), the want best scores are among them: a slice left
 * out has no score above the want slices' maxima, and one that equals the last of them comes after as many that do. So the search reads the
 * maxima and 32 * want scores, however long the context. */
KERNEL_BOUNDS(attention_select, SELECT_THREADS, 1)
{
    __shared__ struct select_shared shared;
    const struct attention_shape *s = &a.shape;
    int t = (int)blockIdx.x, want = s->budget_blocks;
    const struct attention_row *row = &a.rows[t];
    if (!attention_prunes(s, row->position))
        return;
    int blocks = attention_blocks(s, row->position), n_slices = (blocks + INDEX_SLICE - 1) / INDEX_SLICE;
    int32_t *slices = a.slices + (size_t)t * (size_t)want, *cells = row->selection.cells;
    struct candidates scores = { row->scores, NULL, blocks, blocks };
    if (n_slices > want) {
        struct candidates maxima = { a.maxima + (size_t)t * (size_t)a.max_slices, NULL, n_slices, n_slices };
        keep_largest(&maxima, want, &shared, slices, 1);
        __syncthreads();
        scores.slices = slices;
        scores.n = want * INDEX_SLICE;
    }
    keep_largest(&scores, want, &shared, cells, s->block);
    for (int cell = blocks * s->block + (int)threadIdx.x; cell <= row->position; cell += SELECT_THREADS)
        cells[want * s->block + cell - blocks * s->block] = cell;
}

/* ---- Attention --------------------------------------------------------------------------------------------------------------------- */

/* The scores of 8 cells (the warp's) for `heads` heads: score[head][cell]. */
DEVICE_FN void chunk_scores(const struct kv_plane *keys, const int32_t *cell, int head, int kv_heads, int dim, const float *q, int heads, float scale,
                            float *score)
{
    float key[8][ATTEND_MAX_DIM / WARP];
    UNROLL
    for (int c = 0; c < 8; c++) {
        int64_t at = ((int64_t)cell[c] * kv_heads + head) * dim;
        UNROLL
        for (int k = 0; k < ATTEND_MAX_DIM / WARP; k++)
            if (k * WARP < dim)
                key[c][k] = load_value(keys, at + k * WARP, lane_id());
    }
    for (int tile = 0; tile < heads; tile += ATTEND_TILE) {
        float sum[32];
        UNROLL
        for (int i = 0; i < 32; i++)
            sum[i] = 0;
        UNROLL
        for (int k = 0; k < ATTEND_MAX_DIM / WARP; k++)
            if (k * WARP < dim) {
                UNROLL
                for (int h = 0; h < ATTEND_TILE; h++) {
                    float x = q[(tile + h) * dim + k * WARP + lane_id()];
                    UNROLL
                    for (int c = 0; c < 8; c++)
                        sum[8 * h + c] = fmaf(x, key[c][k], sum[8 * h + c]);
                }
            }
        score[(tile + (lane_id() >> 3)) * ATTEND_CHUNK + (lane_id() & 7)] = halve_32(sum) * scale;
    }
}

/* One warp, one head: maximum, exponentials in place, their sum in order. Scores of cells beyond n become 0. */
DEVICE_FN void chunk_softmax(float *score, int n, float *stats)
{
    int low = lane_id(), high = lane_id() + WARP;
    float a = score[low < n ? low : 0], b = score[high < n ? high : 0], most = b > a ? b : a;
    for (int h = 16; h; h >>= 1) {
        float other = __shfl_xor_sync(ALL_LANES, most, h);
        most = other > most ? other : most;
    }
    __syncwarp();
    score[low] = low < n ? math_exp(a - most) : 0.0f;
    score[high] = high < n ? math_exp(b - most) : 0.0f;
    __syncwarp();
    if (lane_id() != 0)
        return;
    float sum = 0;
    const float4 *s = (const float4 *)(const void *)score;
    UNROLL
    for (int i = 0; i < ATTEND_CHUNK / 4; i++) { /* adding the 0 beyond n changes nothing: the sum is above 0 */
        sum = sum + s[i].x;
        sum = sum + s[i].y;
        sum = sum + s[i].z;
        sum = sum + s[i].w;
    }
    stats[0] = most;
    stats[1] = sum;
}

/* A thread owns a dimension of ATTEND_TILE heads and walks the cells. part: of the tile's first head; heads are `stride` floats apart. */
DEVICE_FN void chunk_values(const struct kv_plane *values, const int32_t *cell, int n, int head, int kv_heads, int dim, int d, const float *score, int heads,
                            float *part, size_t stride)
{
    float sum[ATTEND_TILE] = { 0, 0, 0, 0 };
    for (int c = 0; c < ATTEND_CHUNK; c += 4) {
        if (c >= n)
            break;
        float x[4];
        UNROLL
        for (int i = 0; i < 4; i++) /* cells beyond n repeat the last one, but its 0 must not meet an infinity */
            x[i] = c + i < n ? load_value(values, ((int64_t)cell[c + i] * kv_heads + head) * dim + (d & ~31), d & 31) : 0.0f;
        UNROLL
        for (int h = 0; h < ATTEND_TILE; h++) {
            float4 s = *(const float4 *)(const void *)(score + h * ATTEND_CHUNK + c);
            sum[h] = fmaf(s.x, x[0], sum[h]);
            sum[h] = fmaf(s.y, x[1], sum[h]);
            sum[h] = fmaf(s.z, x[2], sum[h]);
            sum[h] = fmaf(s.w, x[3], sum[h]);
        }
    }
    UNROLL
    for (int h = 0; h < ATTEND_TILE; h++)
        if (h < heads)
            part[(size_t)h * stride + (size_t)d] = sum[h];
}

KERNEL_BOUNDS(attend_chunks, ATTEND_THREADS, 2)
{
    __shared__ int32_t cell[ATTEND_CHUNK];
    DYNAMIC_SHARED(float, shared);
    const struct attention_shape *s = &a.shape;
    int t = (int)blockIdx.z, group = s->n_heads / s->kv_heads, shares = (group + a.heads_per_block - 1) / a.heads_per_block, dim = s->dim;
    int kv_head = (int)blockIdx.y / shares, offset = (int)blockIdx.y % shares * a.heads_per_block;
    int heads = group - offset < a.heads_per_block ? group - offset : a.heads_per_block, first_head = kv_head * group + offset;
    int padded = (heads + ATTEND_TILE - 1) / ATTEND_TILE * ATTEND_TILE;
    const struct attention_row *row = &a.rows[t];
    int n_cells = attention_cells(s, row->position), n_chunks = (n_cells + ATTEND_CHUNK - 1) / ATTEND_CHUNK;
    int end = n_chunks < a.first_chunk + a.max_chunks ? n_chunks : a.first_chunk + a.max_chunks;
    if (a.first_chunk + (int)blockIdx.x >= end)
        return;
    const int32_t *selected = attention_prunes(s, row->position) ? row->selection.cells : NULL;
    float *q = shared, *score = shared + padded * dim, scale = 1.0f / sqrtf((float)dim);
    const float *from = a.q + (size_t)t * row_stride(2 * s->n_heads * dim) + (size_t)first_head * 2 * (size_t)dim;
    for (int i = (int)threadIdx.x; i < padded * dim; i += ATTEND_THREADS)
        q[i] = i < heads * dim ? from[(size_t)(i / dim) * 2 * (size_t)dim + (size_t)(i % dim)] : 0.0f;
    int slot = (int)threadIdx.x / dim, slots = ATTEND_THREADS / dim; /* of chunk_values: narrow heads leave threads for more tiles */

    for (int chunk = a.first_chunk + (int)blockIdx.x; chunk < end; chunk += (int)gridDim.x) {
        int start = chunk * ATTEND_CHUNK, n = n_cells - start < ATTEND_CHUNK ? n_cells - start : ATTEND_CHUNK;
        __syncthreads();
        if (threadIdx.x < ATTEND_CHUNK) {
            int at = start + ((int)threadIdx.x < n ? (int)threadIdx.x : n - 1);
            cell[threadIdx.x] = selected ? selected[at] : at;
        }
        __syncthreads();
        if (warp_id() * 8 < n)
            chunk_scores(&row->keys, cell + warp_id() * 8, kv_head, s->kv_heads, dim, q, heads, scale, score + warp_id() * 8);
        __syncthreads();
        size_t at = (((size_t)t * (size_t)s->n_heads + (size_t)first_head) * (size_t)a.max_chunks + (size_t)(chunk - a.first_chunk));
        for (int h = warp_id(); h < heads; h += ATTEND_THREADS / WARP)
            chunk_softmax(score + h * ATTEND_CHUNK, n, a.stats + (at + (size_t)h * (size_t)a.max_chunks) * 2);
        __syncthreads();
        size_t stride = (size_t)a.max_chunks * (size_t)dim;
        for (int tile = slot * ATTEND_TILE; slot < slots && tile < heads; tile += slots * ATTEND_TILE)
            chunk_values(&row->values, cell, n, kv_head, s->kv_heads, dim, (int)threadIdx.x % dim, score + tile * ATTEND_CHUNK, heads - tile,
                         a.parts + at * (size_t)dim + (size_t)tile * stride, stride);
    }
}

/* A thread owns a dimension of a head and walks the chunks; their rescaling factors are made 64 at a time, a chunk a thread. */
KERNEL(attend_merge)
{
    __shared__ float maximum[MERGE_THREADS], total[MERGE_THREADS], before[MERGE_THREADS], now[MERGE_THREADS];
    const struct attention_shape *s = &a.shape;
    int t = (int)blockIdx.z, h = (int)blockIdx.y, d = (int)(blockIdx.x * MERGE_THREADS + threadIdx.x), i = (int)threadIdx.x, dim = s->dim;
    int n_chunks = (attention_cells(s, a.rows[t].position) + ATTEND_CHUNK - 1) / ATTEND_CHUNK, n = n_chunks - a.first_chunk;
    if (n <= 0)
        return;
    bool ends = n <= a.max_chunks;
    n = ends ? n : a.max_chunks;
    size_t head = (size_t)t * (size_t)s->n_heads + (size_t)h;
    const float *stats = a.stats + head * (size_t)a.max_chunks * 2, *parts = a.parts + head * (size_t)a.max_chunks * (size_t)dim + d;
    float *carry = a.carry + (head * gridDim.x + blockIdx.x) * 2;
    float *out = a.out + (size_t)t * row_stride(s->n_heads * dim) + (size_t)(h * dim) + d;
    bool begins = a.first_chunk == 0;
    float value = begins || d >= dim ? 0.0f : *out, so_far = begins ? 0.0f : carry[0], sum = begins ? 0.0f : carry[1];
    for (int first = 0; first < n; first += MERGE_THREADS) {
        int count = n - first < MERGE_THREADS ? n - first : MERGE_THREADS;
        __syncthreads();
        if (i < count) {
            maximum[i] = stats[2 * (first + i)];
            total[i] = stats[2 * (first + i) + 1];
        }
        __syncthreads();
        float most = begins && first == 0 ? maximum[0] : so_far; /* chunk 0 has nothing before it: its factors are not used */
        for (int c = 0; c < i && c < count; c++)
            most = maximum[c] > most ? maximum[c] : most;
        if (i < count) {
            float next = maximum[i] > most ? maximum[i] : most;
            before[i] = math_exp(most - next);
            now[i] = math_exp(maximum[i] - next);
        }
        for (int c = i; c < count; c++)
            most = maximum[c] > most ? maximum[c] : most;
        so_far = most;
        __syncthreads();
        for (int c = 0; c < count; c++) {
            float part = d < dim ? parts[(size_t)(first + c) * (size_t)dim] : 0.0f;
            bool start = begins && first + c == 0;
            value = start ? part : fmaf(part, now[c], value * before[c]);
            sum = start ? total[c] : fmaf(total[c], now[c], sum * before[c]);
        }
    }
    if (!ends && i == 0) { /* all have read it: the loop has barriers */
        carry[0] = so_far;
        carry[1] = sum;
    }
    if (d >= dim)
        return;
    if (!ends) {
        *out = value;
        return;
    }
    float gate = a.q[(size_t)t * row_stride(2 * s->n_heads * dim) + (size_t)h * 2 * (size_t)dim + (size_t)(dim + d)];
    value = value / sum * math_sigmoid(gate);
    *out = value;
    a8_element(&a.a8, t, s->n_heads * dim, h * dim + d, value);
}
