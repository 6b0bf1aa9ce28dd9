/* half.h - IEEE binary16 and bfloat16 to and from binary32, exactly, without hardware support. */
#ifndef BASE_HALF_H
#define BASE_HALF_H

#include <stdint.h>
#include <string.h>

/* Device code uses this text too (src/ops/cuda/). */
#ifdef __CUDACC__
#define HOST_DEVICE static __host__ __device__ inline
#else
#define HOST_DEVICE static inline
#endif

HOST_DEVICE float bits_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
HOST_DEVICE uint32_t float_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

HOST_DEVICE float half_to_float(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
    if (exponent == 31) /* infinity or NaN */
        return bits_float(sign | 0x7f800000u | mantissa << 13);
    if (exponent == 0) { /* zero or denormal: mantissa * 2^-24, exact in binary32 */
        float magnitude = (float)mantissa * 0x1p-24f;
        return bits_float(sign | float_bits(magnitude));
    }
    return bits_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

/* Round to nearest, ties to even; overflow gives infinity, NaN stays a (quiet) NaN. */
HOST_DEVICE uint16_t half_from_float(float f)
{
    uint32_t u = float_bits(f), sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00 | ((a >> 13) & 0x3ff)); /* the hardware keeps the payload's top bits too */
    if (a >= 0x477ff000u) /* 65520 and above round to infinity */
        return (uint16_t)(sign | 0x7c00);
    if (a < 0x38800000u) { /* below 2^-14: denormal; adding 2^-1 (ulp 2^-24) rounds the magnitude in place */
        float shifted = bits_float(a) + 0.5f;
        return (uint16_t)(sign | (float_bits(shifted) - 0x3f000000u));
    }
    return (uint16_t)(sign | ((a - 0x38000000u + 0xfff + ((a >> 13) & 1)) >> 13));
}

HOST_DEVICE float bfloat_to_float(uint16_t b) { return bits_float((uint32_t)b << 16); }

HOST_DEVICE uint16_t bfloat_from_float(float f)
{
    uint32_t u = float_bits(f);
    if ((u & 0x7fffffff) > 0x7f800000u)
        return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

#endif
