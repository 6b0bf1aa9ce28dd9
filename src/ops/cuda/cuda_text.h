/* cuda_text.h - the words that all kernels are written in. The .cu files are the common subset of C and CUDA: nvcc compiles them for
 * devices, and the tests compile them as C (tests/cuda_host.h defines the same words for that).
 *
 * A kernel is KERNEL(NAME) { ... } and takes one struct NAME_args by value, called `a`. What varies from window to window is read
 * through its pointers. Sums follow design.md section 2; a sum over a warp's lanes by halving is the end of tree-32.
 */
#ifndef OPS_CUDA_CUDA_TEXT_H
#define OPS_CUDA_CUDA_TEXT_H

#include <stdint.h>

#ifdef __CUDACC__
#define KERNEL(name) extern "C" __global__ void name(const struct name##_args a)
/* At most `threads` a block, and registers for `blocks` of them on a multiprocessor. */
#define KERNEL_BOUNDS(name, threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks) name(const struct name##_args a)
#define DEVICE_FN static __device__ __forceinline__
#define DYNAMIC_SHARED(type, name)                                                                                                                   \
    extern __shared__ __align__(16) unsigned char dynamic_shared[];                                                                                  \
    type *name = (type *)(void *)dynamic_shared
#endif

#include "base/half.h"

enum { WARP = 32 };
#define ALL_LANES 0xffffffffu
#ifdef __CUDACC__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL
#endif

DEVICE_FN int lane_id(void) { return (int)(threadIdx.x & 31); }
DEVICE_FN int warp_id(void) { return (int)(threadIdx.x >> 5); }

/* Floats from row to row of a window (ops_padded). */
DEVICE_FN size_t row_stride(int width) { return (size_t)((width + 15) & ~15); }

/* p[j] += p[j + h], h = 16 ... 1; every lane gets the sum, because a + b and b + a are the same bits. */
DEVICE_FN float warp_halve(float p)
{
    for (int h = 16; h; h >>= 1)
        p = p + __shfl_xor_sync(ALL_LANES, p, h);
    return p;
}

/* binary16 to binary32, exact. */
DEVICE_FN float half_value(uint16_t h)
{
#ifdef __CUDACC__
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
#else
    return half_to_float(h);
#endif
}

/* Position of column c of a group in A8 order (quant/tile.h). */
DEVICE_FN int a8_position(int c) { return (c & 16) | (c & 3) << 2 | (c >> 2 & 3); }

/* A8 (rule 2) of one group by one warp: lane c has column c; the pointers are the group's. */
DEVICE_FN void a8_group(float value, int8_t *codes, float *scale, int32_t *sums)
{
    int c = lane_id();
    uint32_t most = float_bits(value) & 0x7fffffffu;
    for (int h = 16; h; h >>= 1) {
        uint32_t other = __shfl_xor_sync(ALL_LANES, most, h);
        most = other > most ? other : most;
    }
    float amax = bits_float(most);
    bool empty = amax < 1e-30f;
    float inverse = empty ? 0.0f : 127.0f / amax;
    float product = empty ? 0.0f : value * inverse;
    int32_t code = (int8_t)((product + 0x1.8p23f) - 0x1.8p23f), sum = code; /* adding 1.5 * 2^23 rounds to even */
    for (int h = 8; h; h >>= 1)
        sum += __shfl_xor_sync(ALL_LANES, sum, h);
    codes[a8_position(c)] = (int8_t)code;
    if (c == 0)
        *scale = empty ? 0.0f : amax / 127.0f;
    if ((c & 15) == 0)
        sums[c >> 4] = sum;
}

#endif
