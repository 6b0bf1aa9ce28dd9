/* read.h - a plain read of memory, what a product with weights from memory is compared with: 64-byte loads, xor-ed so that none can
 * be left out. Prefetching as far ahead as the kernels do: the ratio must not be flattered by a lazy baseline. */
#ifndef BENCH_READ_H
#define BENCH_READ_H

#include "ops/kernels.h"

#include <stddef.h>
#include <stdint.h>

enum { READ_AHEAD = 8192 };

#define READ_DEFINE(name, bytes, attributes)                                                                                       \
    attributes static inline uint64_t name(const uint8_t *data, size_t n)                                                          \
    {                                                                                                                              \
        typedef uint64_t vec __attribute__((vector_size(bytes), aligned(16), may_alias));                                          \
        vec sum[4] = { { 0 } };                                                                                                    \
        size_t step = sizeof sum;                                                                                                  \
        for (size_t i = 0; i + step <= n; i += step) {                                                                             \
            for (size_t line = 0; line < step; line += 64)                                                                         \
                __builtin_prefetch(data + i + line + READ_AHEAD);                                                                  \
            for (size_t j = 0; j < 4; j++)                                                                                         \
                sum[j] ^= *(const vec *)(data + i + j * sizeof(vec));                                                              \
        }                                                                                                                          \
        vec all = sum[0] ^ sum[1] ^ sum[2] ^ sum[3];                                                                               \
        uint64_t out = 0;                                                                                                          \
        for (size_t j = 0; j < sizeof(vec) / 8; j++)                                                                               \
            out ^= all[j];                                                                                                         \
        return out;                                                                                                                \
    }
#if defined(__x86_64__)
READ_DEFINE(read_512, 64, __attribute__((target("avx512f"))))
READ_DEFINE(read_256, 32, __attribute__((target("avx2"))))
#endif
READ_DEFINE(read_128, 16, )

/* With the widest loads of this instruction set. n: a multiple of 256, a rest is not read. */
static inline uint64_t read_memory(enum isa isa, const uint8_t *data, size_t n)
{
#if defined(__x86_64__)
    if (isa == ISA_AVX512)
        return read_512(data, n);
    if (isa == ISA_AVX2)
        return read_256(data, n);
#endif
    return read_128(data, n);
}

#endif
