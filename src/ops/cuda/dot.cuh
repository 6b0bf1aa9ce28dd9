/* dot.cuh - products of tiles with a few rows of activations (rules 2 and 3 of design.md section 2): what one warp does with one strand, and
 * what a block then does with the strands' sums.
 *
 * dot_strands leaves part[tile][strand][row][column] in shared memory, where a column is a row of activations; after a barrier dot_total adds a
 * row's strands left to right. The warp loads the next groups while it multiplies, also across tiles: the loads in flight are what reads memory
 * at its rate.
 */
#ifndef OPS_CUDA_DOT_CUH
#define OPS_CUDA_DOT_CUH

#include "ops/cuda/dot_tile.cuh"

/* Kernels that share a struct of arguments. Two blocks of DOT_MAX_WARPS a multiprocessor. */
#ifdef __CUDACC__
#define DOT_KERNEL(name, args) extern "C" __global__ void __launch_bounds__(32 * DOT_MAX_WARPS, DOT_BLOCKS) name(const struct args a)
#else
#define DOT_KERNEL(name, args)                                                                                                                       \
    static void name##_text(const struct args a);                                                                                                    \
    HOST_UNUSED static void name(const void *given) { name##_text(*(const struct args *)given); }                                                    \
    static void name##_text(const struct args a)
#endif

/* 1.5 * 2^23 as an integer accumulator to start from: plus an integer below 2^22 it is, read as a float, 1.5 * 2^23 plus that integer. So
 * conversion costs one exact subtraction. A group's sum without sub-scales is at most 32 * 127 * 128. */
#define DOT_MAGIC 0x4b400000u

/* ---- Tensor cores ------------------------------------------------------------------------------------------------------------------------ */

#ifndef __CUDACC__
/* The C of a warp's 16 x 8 product: every lane shows its registers, then computes what it owns. */
static uint32_t mma_shown[32][32][6];
DEVICE_FN void mma_host(int32_t *c, const uint32_t *a, uint32_t b0, uint32_t b1, int halves)
{
    int lane = lane_id(), pair = lane >> 2, quad = lane & 3;
    uint32_t(*shown)[6] = mma_shown[warp_id()];
    for (int i = 0; i < 2 * halves; i++)
        shown[lane][i] = a[i];
    shown[lane][4] = b0;
    shown[lane][5] = b1;
    __syncwarp();
    for (int row = 0; row < 2; row++)
        for (int column = 0; column < 2; column++)
            for (int h = 0; h < halves; h++)
                for (int k = 0; k < 4; k++)
                    c[2 * row + column] = __dp4a((int)shown[4 * pair + k][2 * h + row], (int)shown[4 * (2 * quad + column) + k][4 + h], c[2 * row + column]);
    __syncwarp();
}
#endif

/* c += A B. 32 columns: a[0], a[1] with b0, a[2], a[3] with b1. c[2*row + column]. */
DEVICE_FN void mma_32(int32_t *c, const uint32_t *a, uint32_t b0, uint32_t b1)
{
#ifdef __CUDA_ARCH__
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    for (int row = 0; row < 2; row++)
        for (int h = 0; h < 2; h++)
            asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
                : "+r"(c[2 * row]), "+r"(c[2 * row + 1])
                : "r"(a[2 * h + row]), "r"(h ? b1 : b0));
#endif
#elif !defined(__CUDACC__)
    mma_host(c, a, b0, b1, 2);
#endif
}

/* 16 columns. */
DEVICE_FN void mma_16(int32_t *c, const uint32_t *a, uint32_t b)
{
#ifdef __CUDA_ARCH__
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
#else
    for (int row = 0; row < 2; row++)
        asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
            : "+r"(c[2 * row]), "+r"(c[2 * row + 1])
            : "r"(a[row]), "r"(b));
#endif
#elif !defined(__CUDACC__)
    mma_host(c, a, b, 0, 1);
#endif
}

/* ---- Activations --------------------------------------------------------------------------------------------------------------------------- */

/* The tensor core's 8 columns are the rows of activations where there may be 8 (`wide`), and else only its even columns are: then a lane finds two
 * sums instead of four, and the work after the product halves. */

/* A strand's codes as one lane needs them: the B fragment of every group. */
struct dot_codes { uint32_t group[8][2]; };

/* And the rest of its activations, in the warp's own part of shared memory: scale and `first` of each group and column, then `second`.
 *   first   what the accumulator starts from (of halves: the first one); DOT_MIN: the sum, as a float; DOT_HALVES_MIN: the first half's sum
 *   second  the same of the second half; not used elsewhere */
enum { SCALES_WORDS = 3 * 8 }; /* per column */

struct dot_scales { float scale[2]; uint32_t first[2], second[2]; }; /* of one group; [column] */

/* Four columns side by side from A8 order: byte `which` of four dwords. */
DEVICE_FN uint32_t natural(uint4 v, int which)
{
    uint32_t selector = (uint32_t)(which | (which + 4) << 4);
    return permute(permute(v.x, v.y, selector), permute(v.z, v.w, selector), 0x5410);
}

DEVICE_FN void codes_fragment(int order, const int8_t *group, uint32_t *out)
{
    int quad = lane_id() & 3;
    const uint8_t *bytes = (const uint8_t *)group;
    if (order == DOT_PAIRS) {
        load_64(bytes + 8 * quad, out);
    } else if (order == DOT_SPLIT) {
        out[0] = load_32(bytes + 4 * quad);
        out[1] = load_32(bytes + 16 + 4 * quad);
    } else if (order == DOT_NATURAL_PAIRS) {
        uint4 v = __ldg((const uint4 *)(const void *)bytes + (quad >> 1));
        out[0] = natural(v, 2 * (quad & 1));
        out[1] = natural(v, 2 * (quad & 1) + 1);
    } else {
        out[0] = natural(__ldg((const uint4 *)(const void *)bytes), quad);
        out[1] = natural(__ldg((const uint4 *)(const void *)bytes + 1), quad);
    }
}

/* at[column]: which row of x it is; columns beyond the last repeat it. The strand has n groups. */
DEVICE_FN void activations_load(int type, bool wide, const struct dot_rows *x, const int32_t *at, int strand, int n, struct dot_codes *out, uint32_t *scales)
{
    int shape = dot_shape(type), columns = wide ? 8 : 4, lane = lane_id();
    const int8_t *codes = x->codes + (size_t)at[wide ? lane >> 2 : lane >> 3] * (size_t)x->width + 256 * strand;
    UNROLL for (int g = 0; g < 8; g++)
        codes_fragment(dot_order(type), codes + 32 * (g < n ? g : 0), out->group[g]);
    __syncwarp();
    for (int i = lane; i < 8 * columns; i += 32) {
        int g = i / columns, k = 8 * strand + (g < n ? g : 0);
        size_t row = (size_t)at[i % columns];
        const int32_t *sums = x->sums + row * (size_t)(x->width / 16) + 2 * k;
        uint32_t first = (uint32_t)sums[0], second = (uint32_t)sums[1], bias = (uint32_t)dot_bias(type);
        scales[2 * i] = float_bits(x->scales[row * (size_t)(x->width / 32) + (size_t)k]);
        scales[2 * i + 1] = shape == DOT_PLAIN ? DOT_MAGIC - bias * (first + second)
                          : shape == DOT_MIN   ? float_bits((float)(int32_t)(first + second))
                          : shape == DOT_HALVES ? 0 - bias * first : first;
        scales[16 * columns + i] = shape == DOT_HALVES ? 0 - bias * second : second;
    }
    __syncwarp();
}

DEVICE_FN void scales_read(int type, bool wide, const uint32_t *scales, int g, struct dot_scales *out)
{
    int quad = lane_id() & 3, columns = wide ? 8 : 4, i = g * columns + (wide ? 2 * quad : quad);
    bool second = dot_shape(type) == DOT_HALVES_MIN || (dot_shape(type) == DOT_HALVES && dot_bias(type));
    if (wide) {
        uint4 v = *(const uint4 *)(const void *)(scales + 2 * i);
        out->scale[0] = bits_float(v.x);
        out->first[0] = v.y;
        out->scale[1] = bits_float(v.z);
        out->first[1] = v.w;
    } else {
        uint2 v = *(const uint2 *)(const void *)(scales + 2 * i);
        out->scale[0] = bits_float(v.x);
        out->first[0] = v.y;
    }
    if (dot_shape(type) == DOT_HALVES && !dot_bias(type))
        out->first[0] = out->first[1] = 0;
    for (int column = 0; column < (wide ? 2 : 1); column++)
        out->second[column] = second ? scales[16 * columns + i + column] : 0;
}

/* ---- One warp, one strand of some tiles ------------------------------------------------------------------------------------------------------ */

DEVICE_FN float exact_sum(int32_t magic) { return bits_float((uint32_t)magic) - 0x1.8p23f; }

/* acc[row][column] += a group. `codes`: its B fragment. */
DEVICE_FN void group_add(int type, bool wide, const struct dot_raw *raw, const uint32_t *table, const uint32_t *codes,
                         const struct dot_scales *x, float (*acc)[2])
{
    int shape = dot_shape(type);
    bool halves = shape == DOT_HALVES || shape == DOT_HALVES_MIN || shape == DOT_TWO_SCALES, is_signed = dot_is_signed(type);
    struct dot_group w = { { 0 }, { 0 }, { 0 }, { 0 }, { 0 }, { 0 } };
    int32_t first[4], second[4], negative[4];
    dot_decode(type, raw, table, &w);
    UNROLL for (int i = 0; i < 4; i++) { /* i = 2*row + column: where the product leaves the sums */
        int column = wide ? i & 1 : 0;
        first[i] = shape == DOT_PLAIN || shape == DOT_HALVES ? (int32_t)x->first[column] : shape == DOT_HALVES_MIN ? 0 : (int32_t)DOT_MAGIC;
        second[i] = shape == DOT_HALVES ? (int32_t)x->second[column] : shape == DOT_HALVES_MIN ? 0 : (int32_t)DOT_MAGIC;
        negative[i] = halves ? 0 : (int32_t)DOT_MAGIC;
    }
    if (halves) {
        mma_16(first, w.code, codes[0]);
        mma_16(second, w.code + 2, codes[1]);
        if (is_signed) {
            int32_t second_negative[4] = { 0, 0, 0, 0 };
            mma_16(negative, w.negative, codes[0]);
            mma_16(second_negative, w.negative + 2, codes[1]);
            UNROLL for (int i = 0; i < 4; i++) {
                first[i] -= negative[i];
                second[i] -= second_negative[i];
            }
        }
    } else {
        mma_32(first, w.code, codes[0], codes[1]);
        if (is_signed)
            mma_32(negative, w.negative, codes[0], codes[1]);
    }
    UNROLL for (int row = 0; row < 2; row++) {
        UNROLL for (int column = 0; column < (wide ? 2 : 1); column++) {
            int i = 2 * row + column;
            float scale = x->scale[column], sum;
            if (shape == DOT_TWO_SCALES) {
                acc[row][column] = __fmaf_rn(exact_sum(first[i]), w.d[row] * scale, acc[row][column]);
                acc[row][column] = __fmaf_rn(exact_sum(second[i]), w.other[row] * scale, acc[row][column]);
                continue;
            }
            if (halves)
                sum = (float)(w.scale[row] * first[i] + w.scale[2 + row] * second[i]);
            else if (is_signed) /* ~code = -code - 1: the difference of two such floats is the exact sum */
                sum = bits_float((uint32_t)first[i]) - bits_float((uint32_t)negative[i]);
            else
                sum = exact_sum(first[i]);
            acc[row][column] = __fmaf_rn(sum, w.d[row] * scale, acc[row][column]);
            if (shape == DOT_MIN)
                acc[row][column] = __fmaf_rn(bits_float(x->first[column]), -(w.other[row] * scale), acc[row][column]);
            if (shape == DOT_HALVES_MIN) {
                int32_t minimum = w.min[row] * (int32_t)x->first[column] + w.min[2 + row] * (int32_t)x->second[column];
                acc[row][column] = __fmaf_rn((float)minimum, -(w.other[row] * scale), acc[row][column]);
            }
        }
    }
}

/* Groups loaded ahead: as many as registers allow. */
DEVICE_FN int dot_batch(int type)
{
    switch (type) {
    case QUANT_Q1_0: case QUANT_Q2_0: case QUANT_IQ2_XXS: return 8;
    case QUANT_Q8_0: case QUANT_Q4_0: case QUANT_IQ4_NL: case QUANT_MXFP4: case QUANT_IQ4_XS: case QUANT_IQ3_XXS: case QUANT_IQ2_XS: case QUANT_IQ3_S: return 4;
    default: return 2;
    }
}

enum { DOT_MAX_BATCH = 8 };

/* part: of this strand and the first tile; the next tile's is part_step floats on. */
DEVICE_FN void strand_quantized(int type, bool wide, const struct dot_codes *codes, const uint32_t *scales, const uint8_t *strand, uint64_t step,
                                int n_tiles, int n, const uint32_t *table, float *part, int part_step)
{
    int batch = dot_batch(type), pair = lane_id() >> 2, quad = lane_id() & 3, columns = wide ? 8 : 4;
    struct dot_raw now[DOT_MAX_BATCH], next[DOT_MAX_BATCH];
    UNROLL for (int i = 0; i < batch; i++)
        dot_load(type, strand, n, i < n ? i : 0, &now[i]);
    for (int tile = 0; tile < n_tiles; tile++) {
        float acc[2][2] = { { 0, 0 }, { 0, 0 } };
        const uint8_t *following = strand + (tile + 1 < n_tiles ? step : 0);
        UNROLL for (int first = 0; first < 8; first += batch) {
            bool last = first + batch == 8;
            UNROLL for (int i = 0; i < batch; i++) {
                int g = last ? i : first + batch + i;
                dot_load(type, last ? following : strand, n, g < n ? g : 0, &next[i]);
            }
            UNROLL for (int i = 0; i < batch; i++)
                if (first + i < n) {
                    struct dot_scales x;
                    scales_read(type, wide, scales, first + i, &x);
                    group_add(type, wide, &now[i], table, codes->group[first + i], &x, acc);
                }
            UNROLL for (int i = 0; i < batch; i++)
                now[i] = next[i];
        }
        UNROLL for (int row = 0; row < 2; row++)
            UNROLL for (int column = 0; column < (wide ? 2 : 1); column++)
                part[(2 * pair + row) * columns + (wide ? 2 * quad + column : quad)] = acc[row][column];
        strand = following;
        part += part_step;
    }
}

/* ---- Float weights (rule 3) ------------------------------------------------------------------------------------------------------------------- */

DEVICE_FN float float_weight(int type, const uint8_t *strand, int index)
{
    if (type == QUANT_F32)
        return bits_float(load_32(strand + 4 * index));
    return type == QUANT_F16 ? half_value((uint16_t)load_16(strand + 2 * index)) : bfloat_to_float((uint16_t)load_16(strand + 2 * index));
}

enum { FLOAT_RUN = 32 };

/* A lane has one row. The warp's halves hold runs of 32 columns in turn, so that 64 columns are in flight; the sum goes from one to the other. */
DEVICE_FN void strand_float(int type, int columns, const struct dot_rows *x, const int32_t *at, int n_columns, const uint8_t *strand, uint64_t step,
                            int n_tiles, int first, int width, float *part, int part_step)
{
    int row = lane_id() & 15, half = lane_id() >> 4;
    for (int tile = 0; tile < n_tiles; tile++, strand += step, part += part_step) {
        float acc[DOT_MAX_ROWS];
        UNROLL for (int t = 0; t < columns; t++)
            acc[t] = 0;
        for (int k = 0; k < width; k += 2 * FLOAT_RUN) {
            float w[FLOAT_RUN];
            int run = k + FLOAT_RUN * half, count = width - run;
            UNROLL for (int i = 0; i < FLOAT_RUN; i++)
                w[i] = i < count ? float_weight(type, strand, (run + i) * 16 + row) : 0;
            UNROLL for (int t = 0; t < columns; t++) {
                if (t >= n_columns)
                    continue;
                const float *values = x->values + (size_t)at[t] * (size_t)x->stride + first + run;
                for (int turn = 0; turn < 2; turn++) { /* both halves compute, the one whose turn it is counts */
                    float sum = acc[t];
                    UNROLL for (int i = 0; i < FLOAT_RUN; i++)
                        if (i < count)
                            sum = __fmaf_rn(w[i], values[i], sum);
                    acc[t] = __shfl_sync(ALL_LANES, sum, row + 16 * turn);
                }
            }
        }
        UNROLL for (int t = 0; t < columns; t++)
            if (half == 0)
                part[row * columns + t] = acc[t];
    }
}

/* ---- One block, some tiles -------------------------------------------------------------------------------------------------------------------- */

/* Dynamic shared memory, in words: which rows of x (and of hidden, dot_experts.cuh) the columns are, the codebook if there is one, every warp's scales,
 * the sums. */
enum { SHARED_AT = 0, SHARED_HIDDEN_AT = 8, SHARED_TABLE = DOT_ROWS_BYTES / 4 };
DEVICE_FN int shared_scales(bool table) { return SHARED_TABLE + (table ? DOT_TABLE_BYTES / 4 : 0); }
DEVICE_FN int shared_part(bool table, int columns) { return shared_scales(table) + (int)(blockDim.x >> 5) * SCALES_WORDS * columns; }

/* Where a warp is: it has strands `strand`, strand + step, ... of tiles `tile`, tile + tiles, ...; a warp that is left over has none. */
struct dot_place { int strands, strand, step, tile, tiles; };

DEVICE_FN struct dot_place dot_place(int width)
{
    struct dot_place p;
    int warps = (int)(blockDim.x >> 5), warp = warp_id();
    p.strands = dot_strand_count(width);
    p.step = warps;
    p.tiles = warps < p.strands ? 1 : warps / p.strands;
    p.tile = warps < p.strands ? 0 : warp / p.strands;
    p.strand = warps < p.strands ? warp : warp % p.strands;
    if (p.tile >= p.tiles)
        p.strand = p.strands;
    return p;
}

/* Some tiles, `stride` bytes apart. `scales` and `part` are words of dynamic shared memory; tile i's sums go to part + i * part_tiles tiles' room. */
struct dot_tiles { const uint8_t *tiles; uint64_t stride; int n, scales, part, part_tiles; };

/* All strands of them times n_columns rows of x. */
DEVICE_FN void dot_strands(int type, bool wide, const struct dot_rows *x, int n_columns, const struct dot_tiles *w)
{
    DYNAMIC_SHARED(uint32_t, shared);
    struct dot_place p = dot_place(x->width);
    int columns = wide ? 8 : 4, size = 16 * columns, mine = (w->n - p.tile + p.tiles - 1) / p.tiles;
    const int32_t *at = (const int32_t *)(const void *)(shared + SHARED_AT);
    if (w->n <= p.tile)
        return;
    for (int strand = p.strand; strand < p.strands; strand += p.step) {
        int width = x->width - 256 * strand < 256 ? x->width - 256 * strand : 256, part_step = p.tiles * w->part_tiles * p.strands * size;
        const uint8_t *first = w->tiles + (uint64_t)p.tile * w->stride + (size_t)strand * 8 * (size_t)dot_group_bytes(type);
        float *part = (float *)(void *)(shared + w->part) + (p.tile * w->part_tiles * p.strands + strand) * size;
        uint64_t step = (uint64_t)p.tiles * w->stride;
        if (dot_is_float(type)) {
            strand_float(type, columns, x, at, n_columns, first, step, mine, 256 * strand, width, part, part_step);
        } else {
            struct dot_codes codes;
            uint32_t *scales = shared + w->scales + warp_id() * SCALES_WORDS * columns;
            int n = dot_full_strands(type) ? 8 : width / 32;
            activations_load(type, wide, x, at, strand, n, &codes, scales);
            strand_quantized(type, wide, &codes, scales, first, step, mine, n, shared + SHARED_TABLE, part, part_step);
        }
    }
}

/* Row `row` of tile `tile`, column `column`: its strands, left to right. */
DEVICE_FN float dot_total(int part, int strands, int columns, int tile, int row, int column)
{
    DYNAMIC_SHARED(float, shared);
    const float *p = shared + part + (tile * strands * 16 + row) * columns + column;
    float total = p[0];
    for (int s = 1; s < strands; s++)
        total = total + p[s * 16 * columns];
    return total;
}

/* The codebook of `type` into shared memory; a barrier must follow. */
DEVICE_FN void table_fill(int type, const uint8_t *codebooks)
{
    DYNAMIC_SHARED(uint32_t, shared);
    const uint32_t *from = (const uint32_t *)(const void *)(codebooks + dot_codebook_at(type));
    int copies = dot_copies(type), words = type == QUANT_IQ3_S || type == QUANT_IQ3_XXS ? 1 : 2;
    for (int i = (int)threadIdx.x; i < DOT_TABLE_BYTES / 4; i += (int)blockDim.x)
        shared[SHARED_TABLE + i] = __ldg(from + i / words / copies * words + i % words);
}

#endif
