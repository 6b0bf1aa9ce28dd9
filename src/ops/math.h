/* math.h - the transcendental functions of the contract: one text for every backend, no libm, no tables.
 *
 * Only +, -, *, /, fused multiply-add and integer operations on bit patterns, so every IEEE machine computes the same bits and
 * every compiler may vectorize them. Errors against the exact value, over all finite inputs (tests/test_math.c): exp, log1p,
 * sigmoid, silu and softplus at most 2 ulp. NaN in, NaN out; results reach infinity and denormals as they should.
 */
#ifndef OPS_MATH_H
#define OPS_MATH_H

#include "base/half.h"

#include <math.h>

/* e^x = *fraction * *scale, both normal numbers. x = n ln2 + r with |r| <= ln2/2; ln2 is split so that n * high is exact; Taylor to r^7 leaves
 * 0.1 ulp; the rounding error of 1 + r is carried into the sum. n is halved between the two results: their product then rounds
 * once even where it is denormal. */
HOST_DEVICE float math_exp_parts(float x, float *scale)
{
    x = x > 89.0f ? 89.0f : x;
    x = x < -120.0f ? -120.0f : x;
    float shifted = x * 1.44269504088896f + 0x1.8p23f; /* adding 1.5 * 2^23 rounds to an integer, kept in the low bits */
    int32_t n = (int32_t)(float_bits(shifted) - float_bits(0x1.8p23f));
    float whole = shifted - 0x1.8p23f;
    float r = fmaf(whole, -0x1.62e4p-1f, x);
    r = fmaf(whole, -0x1.7f7d1cp-20f, r);
    float p = 0x1.a01a02p-13f;
    p = fmaf(p, r, 0x1.6c16c2p-10f);
    p = fmaf(p, r, 0x1.111112p-7f);
    p = fmaf(p, r, 0x1.555556p-5f);
    p = fmaf(p, r, 0x1.555556p-3f);
    p = fmaf(p, r, 0.5f);
    float sum = 1.0f + r, lost = r - (sum - 1.0f);
    p = sum + fmaf(p * r, r, lost);
    int32_t first = n >> 1, second = n - first;
    *scale = bits_float((uint32_t)(second + 127) << 23);
    return p * bits_float((uint32_t)(first + 127) << 23);
}

HOST_DEVICE float math_exp(float x)
{
    float scale, fraction = math_exp_parts(x, &scale);
    return fraction * scale;
}

/* ln(1+x) for x > -1. With u = 1 + x rounded and c its rounding error: ln(u) + c/u; u = 2^e m with m around 1, and ln(m) by the series in
 * s = f/(2+f), f = m - 1 (the coefficients are the minimax ones of FreeBSD's logf). */
HOST_DEVICE float math_log1p(float x)
{
    float u = 1.0f + x;
    float c = x >= 1.0f ? 1.0f - (u - x) : x - (u - 1.0f);
    c = c / u;
    int32_t offset = (int32_t)(float_bits(u) - 0x3f3504f3u); /* sqrt(1/2) */
    float e = (float)(offset >> 23);
    float f = bits_float(((uint32_t)offset & 0x7fffffu) + 0x3f3504f3u) - 1.0f;
    float s = f / (2.0f + f), z = s * s, w = z * z;
    float t1 = w * fmaf(w, 0xf.89e26p-6f, 0xc.ce13p-5f), t2 = z * fmaf(w, 0x9.1e9eep-5f, 0xa.aaaabp-4f);
    float half_square = 0.5f * f * f;
    float low = fmaf(s, half_square + (t1 + t2), fmaf(e, 9.0580006145e-06f, c));
    float result = fmaf(e, 6.9313812256e-01f, f - (half_square - low));
    return u < INFINITY ? result : u; /* +infinity and NaN pass through */
}

/* (numerator + low) / (1+e) where e = e^-|x|; the rounding error of 1+e is corrected to first order (it would cost the second ulp). */
HOST_DEVICE float math_over_one_plus(float numerator, float low, float e)
{
    float sum = 1.0f + e, lost = e - (sum - 1.0f);
    float inverse = 1.0f / sum, quotient = numerator / sum;
    return fmaf(fmaf(-quotient, lost, low), inverse, quotient);
}

/* 1/(1+e^-x), from e^-|x| so that small results keep their precision. */
HOST_DEVICE float math_sigmoid(float x)
{
    float e = math_exp(x < 0.0f ? x : -x);
    return math_over_one_plus(x < 0.0f ? e : 1.0f, 0.0f, e);
}

/* x * sigmoid(x); the last power of two is applied at the end, where x * e^x would lose bits as a denormal. Below -120 it is zero. */
HOST_DEVICE float math_silu(float x)
{
    x = x < -120.0f ? -120.0f : x;
    float scale, e = math_exp_parts(x < 0.0f ? x : -x, &scale);
    float numerator = x < 0.0f ? x * e : x, low = x < 0.0f ? fmaf(x, e, -numerator) : 0.0f;
    float y = math_over_one_plus(numerator, low, e * scale);
    return x < 0.0f ? y * scale : y;
}

/* ln(1+e^x); above 20 the difference to x is below half an ulp. */
HOST_DEVICE float math_softplus(float x)
{
    float y = math_log1p(math_exp(x > 20.0f ? 20.0f : x));
    return x > 20.0f ? x : y;
}

/* ---- Host tables (rope). In double with +, -, *, / and fma only, so that they do not depend on the C library either. ---------------------- */

/* Cosine and sine of x, 0 <= x < 2^30, rounded to float. x = n pi/2 + r with pi/2 in two parts; Taylor to r^17 leaves 1e-17. */
static inline void math_cos_sin(double x, float *cosine, float *sine)
{
    double n = (x * 0x1.45f306dc9c883p-1 + 0x1.8p52) - 0x1.8p52;
    double r = fma(n, -0x1.921fb54442d18p0, x);
    r = fma(n, -0x1.1a62633145c07p-54, r);
    double z = r * r, s = 0, c = 0;
    for (int k = 17; k >= 3; k -= 2) /* 1 - z/(2*3) (1 - z/(4*5) (1 - ... */
        s = (1 - s) * z / (double)(k * (k - 1));
    for (int k = 16; k >= 2; k -= 2)
        c = (1 - c) * z / (double)(k * (k - 1));
    s = r * (1 - s);
    c = 1 - c;
    int quadrant = (int)((int64_t)n & 3);
    *cosine = (float)(quadrant == 0 ? c : quadrant == 1 ? -s : quadrant == 2 ? -c : s);
    *sine = (float)(quadrant == 0 ? s : quadrant == 1 ? c : quadrant == 2 ? -s : -c);
}

/* base^(-1/n) for base >= 1: Newton's method for the root, which falls towards it from above. */
static inline double math_inverse_root(double base, int n)
{
    double root = 1 + (base - 1) / n;
    for (;;) {
        double power = 1;
        for (int i = 1; i < n; i++)
            power *= root;
        double next = ((n - 1) * root + base / power) / n;
        if (!(next < root))
            return 1 / root;
        root = next;
    }
}

#endif
