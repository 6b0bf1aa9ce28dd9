/* dot_any.cu - products whose formats are known at run time only: matmul, and experts in unusual or mixed formats. */
#include "ops/cuda/dot_experts.cuh"

#define DOT_EVERY(X)                                                                                                                                 \
    X(F32) X(F16) X(BF16) X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) X(IQ2_XXS) X(IQ2_XS) X(IQ3_XXS) X(IQ1_S)   \
    X(IQ4_NL) X(IQ3_S) X(IQ2_S) X(IQ4_XS) X(IQ1_M) X(MXFP4) X(NVFP4) X(Q1_0) X(Q2_0)

/* One function per format and width, really called: inlined into one kernel they were given registers as if all were live at once (1.4 KB of stack). */
#ifdef __CUDACC__
#define CALLED_FN static __device__ __noinline__
#else
#define CALLED_FN HOST_UNUSED static
#endif
#define CALLED(name)                                                                                                                                 \
    CALLED_FN void strands_##name##_4(struct dot_rows x, int n_columns, struct dot_tiles w) { dot_strands(QUANT_##name, false, &x, n_columns, &w); } \
    CALLED_FN void strands_##name##_8(struct dot_rows x, int n_columns, struct dot_tiles w) { dot_strands(QUANT_##name, true, &x, n_columns, &w); }
DOT_EVERY(CALLED)
#undef CALLED

DEVICE_FN void dot_strands_any(int type, bool wide, const struct dot_rows *x, int n_columns, const struct dot_tiles *w)
{
    switch (type) {
#define CASE(name)                                                                                                                                   \
    case QUANT_##name:                                                                                                                               \
        if (wide)                                                                                                                                    \
            strands_##name##_8(*x, n_columns, *w);                                                                                                   \
        else                                                                                                                                         \
            strands_##name##_4(*x, n_columns, *w);                                                                                                   \
        break;
        DOT_EVERY(CASE)
#undef CASE
    }
}

/* ---- Several matrices, each in a format of its own, times the rows of a window -------------------------------------------------------------- */

DEVICE_FN void matmul(const struct dot_matmul_args *a, bool wide)
{
    DYNAMIC_SHARED(int32_t, shared);
    int columns = wide ? 8 : 4, strands = dot_strand_count(a->x.width), part = shared_part(a->has_table, columns), filled = -1; /* the codebook that is there */
    if (threadIdx.x < DOT_MAX_ROWS)
        shared[SHARED_AT + threadIdx.x] = (int)threadIdx.x < a->n ? (int)threadIdx.x : a->n - 1;
    for (int item = (int)blockIdx.x; item < a->n_items; item += (int)gridDim.x) {
        int i = 0;
        while (i + 1 < a->n_matrices && item >= a->w[i + 1].first_item)
            i++;
        int type = a->w[i].type, out_stride = a->w[i].out_stride, first = (item - a->w[i].first_item) * a->w[i].item_tiles;
        int left = a->w[i].tiles_count - first, n_tiles = left < a->w[i].item_tiles ? left : a->w[i].item_tiles;
        float scale = a->w[i].scale, *out = a->w[i].out + first * 16;
        struct dot_tiles tiles = { a->w[i].tiles + (uint64_t)first * a->w[i].stride, a->w[i].stride, n_tiles, shared_scales(a->has_table), part, 1 };
        if (dot_codebook_bytes(type) && filled != dot_codebook_at(type)) {
            table_fill(type, a->codebooks);
            filled = dot_codebook_at(type);
        }
        __syncthreads();
        dot_strands_any(type, wide, &a->x, a->n, &tiles);
        __syncthreads();
        for (int k = (int)threadIdx.x; k < a->n * n_tiles * 16; k += (int)blockDim.x) {
            int t = k / (n_tiles * 16), row = k % (n_tiles * 16);
            float total = dot_total(part, strands, columns, row / 16, row % 16, t);
            out[(size_t)t * (size_t)out_stride + (size_t)row] = scale != 1.0f ? total * scale : total;
        }
        __syncthreads();
    }
}

DOT_KERNEL(dot_matmul_4, dot_matmul_args) { matmul(&a, false); }
DOT_KERNEL(dot_matmul_8, dot_matmul_args) { matmul(&a, true); }

/* ---- Experts ------------------------------------------------------------------------------------------------------------------------------------ */

DOT_KERNEL(dot_experts_mixed, dot_experts_args) { experts(&a, ANY_TYPE, true, dot_strands_any); }
