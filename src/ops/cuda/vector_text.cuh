/* vector_text.cuh - pieces that vector.cu, delta.cu and attention.cu share. */
#ifndef OPS_CUDA_VECTOR_TEXT_CUH
#define OPS_CUDA_VECTOR_TEXT_CUH

#include "ops/cuda/cuda_text.h"
#include "ops/cuda/vector_args.h"
#include "ops/math.h"

/* A8 of element i of row t, by all lanes of a warp whose elements are one group. */
DEVICE_FN void a8_element(const struct a8 *a8, int t, int width, int i, float value)
{
    if (!a8->codes)
        return;
    size_t group = ((size_t)t * (size_t)width + (size_t)i) / 32;
    a8_group(value, a8->codes + group * 32, a8->scales + group, a8->sums + group * 2);
}

/* What a norm multiplies by, from the sum of squares. */
DEVICE_FN float norm_scale(float sum, int dim, float eps) { return 1.0f / sqrtf(sum / (float)dim + eps); }

/* <x, y> of a head by one warp: tree-32. Every lane gets it. */
DEVICE_FN float warp_dot(const float *x, const float *y, int dim)
{
    float partial = 0;
    for (int i = lane_id(); i < dim; i += WARP)
        partial = fmaf(x[i], y[i], partial);
    return warp_halve(partial);
}

#endif
