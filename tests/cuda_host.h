/* cuda_host.h - runs CUDA kernels on this machine's CPU, for tests that need no GPU.
 *
 * A test includes this header and then the text of the kernels (src/ops/cuda/NAME.cu), which is the common subset of C and CUDA. A grid runs
 * block by block; inside a block every CUDA thread is a fiber that runs until it waits at a barrier or a warp operation. A warp runs
 * as far as it can before the others move, and the order of blocks, warps and lanes keeps changing, so that a missing barrier
 * shows; shared memory is filled with rubbish before every block. cuda_host_launch says so when threads wait for each other forever: a barrier that not all of a block reach, or a warp operation
 * that not all lanes of its mask reach. Only what the kernels use is here; x86-64 only, as the switch of stacks is by hand.
 */
#ifndef TESTS_CUDA_HOST_H
#define TESTS_CUDA_HOST_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CUDA_HOST 1
#define HOST_UNUSED __attribute__((unused))

/* ---- The words of the language ----------------------------------------------------------------------------------------------------- */

#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __constant__ HOST_UNUSED
#define __shared__ static __attribute__((section("cuda_shared"), aligned(16)))
#define __align__(n) __attribute__((aligned(n)))

/* void NAME(const struct NAME_args a), as cuda_host_launch calls it. */
#define KERNEL(name) KERNEL_BOUNDS(name, 1024, 1)
#define KERNEL_BOUNDS(name, threads, blocks)                                                                                                         \
    static void name##_text(const struct name##_args a);                                                                                             \
    HOST_UNUSED static void name(const void *args) { name##_text(*(const struct name##_args *)args); }                                               \
    static void name##_text(const struct name##_args a)
#define DEVICE_FN HOST_UNUSED static inline
#define DYNAMIC_SHARED(type, name) type *name = (type *)(void *)cuda_host.dynamic

struct cuda_host_dim3 { unsigned x, y, z; };
typedef struct { int x, y; } int2;
typedef struct { unsigned x, y; } uint2;
typedef struct { float x, y; } float2;
typedef struct { int x, y, z, w; } __attribute__((aligned(16), may_alias)) int4;
typedef struct { unsigned x, y, z, w; } __attribute__((aligned(16), may_alias)) uint4;
typedef struct { float x, y, z, w; } __attribute__((aligned(16), may_alias)) float4;

/* ---- Threads as fibers ------------------------------------------------------------------------------------------------------------- */

enum { CUDA_HOST_THREADS = 1024, CUDA_HOST_STACK = 128 << 10, CUDA_HOST_SHARED = 96 << 10 };
enum cuda_host_state { CUDA_HOST_READY, CUDA_HOST_AT_BARRIER, CUDA_HOST_AT_WARP, CUDA_HOST_DONE };

struct cuda_host_thread {
    void *stack_pointer;
    enum cuda_host_state state;
    int line;               /* of the barrier or warp operation it waits at */
    struct cuda_host_dim3 index;
    uint32_t mask;          /* of the warp operation */
    int source;             /* lane whose value it wants; -1: the ballot of all values */
    uint64_t value;         /* in: its own; out: the answer */
};

static struct {
    struct cuda_host_thread threads[CUDA_HOST_THREADS], *current;
    struct cuda_host_dim3 grid, block, block_index;
    void (*body)(const void *args);
    const void *args;
    void *scheduler;
    char *stacks;
    uint32_t random;
    char dynamic[CUDA_HOST_SHARED] __attribute__((aligned(16)));
    char error[256];
} cuda_host = { .random = 1 };

#define threadIdx (cuda_host.current->index)
#define blockIdx (cuda_host.block_index)
#define blockDim (cuda_host.block)
#define gridDim (cuda_host.grid)

/* Saves the callee's registers on this stack and goes on with another. */
__attribute__((naked, noinline)) static void cuda_host_switch(void **from, void *to)
{
    __asm__("push %rbp\n\tpush %rbx\n\tpush %r12\n\tpush %r13\n\tpush %r14\n\tpush %r15\n\tmov %rsp, (%rdi)\n\tmov %rsi, %rsp\n\t"
            "pop %r15\n\tpop %r14\n\tpop %r13\n\tpop %r12\n\tpop %rbx\n\tpop %rbp\n\tret");
}

static void cuda_host_wait(enum cuda_host_state state, int line)
{
    cuda_host.current->state = state;
    cuda_host.current->line = line;
    cuda_host_switch(&cuda_host.current->stack_pointer, cuda_host.scheduler);
}

static void cuda_host_thread_main(void)
{
    cuda_host.body(cuda_host.args);
    cuda_host_wait(CUDA_HOST_DONE, 0);
}

HOST_UNUSED static uint64_t cuda_host_warp(uint32_t mask, uint64_t value, int source, int line)
{
    struct cuda_host_thread *t = cuda_host.current;
    t->mask = mask;
    t->value = value;
    t->source = source;
    cuda_host_wait(CUDA_HOST_AT_WARP, line);
    return t->value;
}

/* Thread t has come to a warp operation: if all lanes of its mask have, each gets its answer. False: a lane asks for one outside. */
static bool cuda_host_warp_meet(int t, int n_threads)
{
    struct cuda_host_thread *warp = &cuda_host.threads[t & ~31], *self = &cuda_host.threads[t];
    uint64_t values[32] = { 0 }, ballot = 0;
    if (!(self->mask >> (t & 31) & 1))
        return false;
    for (int lane = 0; lane < 32; lane++) {
        if (!(self->mask >> lane & 1))
            continue;
        if ((t & ~31) + lane >= n_threads || warp[lane].state != CUDA_HOST_AT_WARP || warp[lane].mask != self->mask || warp[lane].line != self->line)
            return true;
        values[lane] = warp[lane].value;
        ballot |= (uint64_t)(warp[lane].value != 0) << lane;
    }
    for (int lane = 0; lane < 32; lane++) {
        if (!(self->mask >> lane & 1))
            continue;
        if (warp[lane].source >= 0 && !(self->mask >> (warp[lane].source & 31) & 1))
            return false;
        warp[lane].value = warp[lane].source < 0 ? ballot : values[warp[lane].source & 31];
        warp[lane].state = CUDA_HOST_READY;
    }
    return true;
}

/* Runs a warp as far as it comes: the other warps have not moved meanwhile. The number of steps; -1: a lane asks for one outside its mask. */
static int cuda_host_run_warp(int from, int n)
{
    int lanes = n - from < 32 ? n - from : 32, steps = 0;
    for (int before = -1; steps != before;) {
        before = steps;
        cuda_host.random = cuda_host.random * 1664525u + 1013904223u;
        int first = (int)((cuda_host.random >> 8) % (unsigned)lanes), step = cuda_host.random >> 16 & 1 ? 1 : lanes - 1;
        for (int i = 0, lane = first; i < lanes; i++, lane = (lane + step) % lanes) {
            struct cuda_host_thread *thread = &cuda_host.threads[from + lane];
            if (thread->state != CUDA_HOST_READY)
                continue;
            cuda_host.current = thread;
            cuda_host_switch(&cuda_host.scheduler, thread->stack_pointer);
            steps++;
            if (thread->state == CUDA_HOST_AT_WARP && !cuda_host_warp_meet(from + lane, n))
                return -1;
        }
    }
    return steps;
}

static const char *cuda_host_stuck(int n)
{
    char *e = cuda_host.error;
    size_t room = sizeof cuda_host.error;
    int at = snprintf(e, room, "block (%u, %u, %u) is stuck:", cuda_host.block_index.x, cuda_host.block_index.y, cuda_host.block_index.z);
    for (int t = 0, shown = 0; t < n && shown < 4; t++) { /* where a neighbour is somewhere else */
        const struct cuda_host_thread *a = &cuda_host.threads[t];
        if (t && a->state == a[-1].state && a->line == a[-1].line)
            continue;
        static const char *const where[] = { "runs", "waits at the barrier of line", "waits at the warp operation of line", "has ended" };
        at += snprintf(e + at, room - (size_t)at, " thread %d %s %d;", t, where[a->state], a->line);
        shown++;
    }
    return e;
}

static const char *cuda_host_run_block(int n)
{
    extern char __start_cuda_shared[] __attribute__((weak)), __stop_cuda_shared[] __attribute__((weak));
    if (__start_cuda_shared)
        memset(__start_cuda_shared, 0xa5, (size_t)(__stop_cuda_shared - __start_cuda_shared));
    memset(cuda_host.dynamic, 0xa5, sizeof cuda_host.dynamic);
    for (int t = 0; t < n; t++) {
        void **top = (void **)(void *)(cuda_host.stacks + (size_t)(t + 1) * CUDA_HOST_STACK);
        unsigned x = cuda_host.block.x, y = cuda_host.block.y;
        top[-2] = (void *)cuda_host_thread_main; /* where the first switch returns to; below it the six saved registers */
        cuda_host.threads[t] = (struct cuda_host_thread){ .stack_pointer = top - 8, .index = { (unsigned)t % x, (unsigned)t / x % y, (unsigned)t / x / y } };
    }
    for (int done = 0; done < n;) {
        bool moved = false;
        int at_barrier = 0, warps = (n + 31) / 32, first = (int)(cuda_host.random % (unsigned)warps), step = cuda_host.random >> 16 & 1 ? 1 : warps - 1;
        for (int i = 0, warp = first; i < warps; i++, warp = (warp + step) % warps) {
            int ran = cuda_host_run_warp(32 * warp, n);
            if (ran < 0)
                return cuda_host_stuck(n);
            moved = moved || ran > 0;
        }
        done = 0;
        for (int t = 0; t < n; t++) {
            done += cuda_host.threads[t].state == CUDA_HOST_DONE;
            at_barrier += cuda_host.threads[t].state == CUDA_HOST_AT_BARRIER && cuda_host.threads[t].line == cuda_host.threads[0].line;
        }
        if (at_barrier == n)
            for (int t = 0; t < n; t++)
                cuda_host.threads[t].state = CUDA_HOST_READY;
        else if (!moved)
            return cuda_host_stuck(n);
    }
    return NULL;
}

/* Runs a grid; NULL or what is wrong with it. `shared`: bytes of dynamic shared memory. */
HOST_UNUSED static const char *cuda_host_launch(void (*kernel)(const void *args), const void *args, struct cuda_host_dim3 grid, struct cuda_host_dim3 block,
                                                size_t shared)
{
    unsigned n = block.x * block.y * block.z, blocks = grid.x * grid.y * grid.z;
    if (n == 0 || n > CUDA_HOST_THREADS || blocks == 0 || shared > CUDA_HOST_SHARED || grid.y > 65535 || grid.z > 65535)
        return "a grid that no device takes";
    if (!cuda_host.stacks)
        cuda_host.stacks = aligned_alloc(64, (size_t)CUDA_HOST_THREADS * CUDA_HOST_STACK);
    if (!cuda_host.stacks)
        return "out of memory for the stacks of the threads";
    cuda_host.body = kernel;
    cuda_host.args = args;
    cuda_host.grid = grid;
    cuda_host.block = block;
    unsigned first = cuda_host.random % blocks, step = cuda_host.random >> 17 & 1 ? 1 : blocks - 1;
    for (unsigned i = 0, b = first; i < blocks; i++, b = (unsigned)(((uint64_t)b + step) % blocks)) {
        cuda_host.block_index = (struct cuda_host_dim3){ b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y };
        const char *error = cuda_host_run_block((int)n);
        if (error)
            return error;
    }
    return NULL;
}

/* ---- Barriers and warp operations -------------------------------------------------------------------------------------------------- */

#define __syncthreads() cuda_host_wait(CUDA_HOST_AT_BARRIER, __LINE__)
#define __syncwarp() ((void)cuda_host_warp(0xffffffffu, 0, cuda_host_lane(), __LINE__))
#define __ballot_sync(mask, flag) ((uint32_t)cuda_host_warp(mask, (flag) != 0, -1, __LINE__))
#define __any_sync(mask, flag) (__ballot_sync(mask, flag) != 0)
#define __all_sync(mask, flag) (__ballot_sync(mask, flag) == (mask))
#define __shfl_sync(mask, value, lane) CUDA_HOST_SHUFFLE(mask, value, (int)(lane))
#define __shfl_xor_sync(mask, value, lanes) CUDA_HOST_SHUFFLE(mask, value, cuda_host_lane() ^ (int)(lanes))
#define __shfl_up_sync(mask, value, n) CUDA_HOST_SHUFFLE(mask, value, cuda_host_lane() < (int)(n) ? cuda_host_lane() : cuda_host_lane() - (int)(n))
#define __shfl_down_sync(mask, value, n) CUDA_HOST_SHUFFLE(mask, value, cuda_host_lane() + (int)(n) > 31 ? cuda_host_lane() : cuda_host_lane() + (int)(n))
#define CUDA_HOST_SHUFFLE(mask, v, source)                                                                                                           \
    __extension__({                                                                                                                                  \
        __typeof__(v) shuffled_ = (v);                                                                                                               \
        uint64_t bits_ = 0;                                                                                                                          \
        _Static_assert(sizeof shuffled_ == 4 || sizeof shuffled_ == 8, "a warp moves 4 or 8 bytes");                                                 \
        memcpy(&bits_, &shuffled_, sizeof shuffled_);                                                                                                \
        bits_ = cuda_host_warp(mask, bits_, source, __LINE__);                                                                                       \
        memcpy(&shuffled_, &bits_, sizeof shuffled_);                                                                                                \
        shuffled_;                                                                                                                                   \
    })

HOST_UNUSED static inline int cuda_host_lane(void) { return (int)(cuda_host.current - cuda_host.threads) & 31; }

/* ---- Functions of the device ------------------------------------------------------------------------------------------------------- */

#define __ldg(pointer) (*(pointer))
#define __threadfence() ((void)0)
#define __threadfence_system() ((void)0)
#define CUDA_HOST_ATOMIC(pointer, update)                                                                                                            \
    __extension__({                                                                                                                                  \
        __typeof__(pointer) at_ = (pointer);                                                                                                         \
        __typeof__(*at_) was_ = *at_;                                                                                                                \
        *at_ = (update);                                                                                                                             \
        was_;                                                                                                                                        \
    })
#define atomicAdd(pointer, v) CUDA_HOST_ATOMIC(pointer, was_ + (v))
#define atomicOr(pointer, v) CUDA_HOST_ATOMIC(pointer, was_ | (v))
#define atomicMin(pointer, v) CUDA_HOST_ATOMIC(pointer, was_ < (v) ? was_ : (v))
#define atomicMax(pointer, v) CUDA_HOST_ATOMIC(pointer, was_ > (v) ? was_ : (v))
#define atomicExch(pointer, v) CUDA_HOST_ATOMIC(pointer, (v))
#define atomicCAS(pointer, wanted, v) CUDA_HOST_ATOMIC(pointer, was_ == (wanted) ? (v) : was_)

HOST_UNUSED static inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
HOST_UNUSED static inline float __fadd_rn(float x, float y) { return x + y; }
HOST_UNUSED static inline float __fmul_rn(float x, float y) { return x * y; }
HOST_UNUSED static inline int __popc(unsigned x) { return __builtin_popcount(x); }
HOST_UNUSED static inline int __ffs(int x) { return __builtin_ffs(x); }
HOST_UNUSED static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }

HOST_UNUSED static inline int __dp4a(int a, int b, int c)
{
    for (int i = 0; i < 32; i += 8)
        c += (int8_t)(a >> i) * (int8_t)(b >> i);
    return c;
}

HOST_UNUSED static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector)
{
    uint64_t bytes = (uint64_t)y << 32 | x;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) {
        unsigned s = selector >> (4 * i) & 15, byte = (unsigned)(bytes >> (8 * (s & 7))) & 255;
        out |= (s & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * i);
    }
    return out;
}

HOST_UNUSED static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n)
{
    return (unsigned)(((uint64_t)high << 32 | low) >> (n & 31));
}

#endif
