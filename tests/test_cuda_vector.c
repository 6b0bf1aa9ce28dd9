/* test_cuda_vector.c - the CUDA kernels that are not products give the bits of the plain C operations. They run on the CPU (cuda_host.h), so
 * this proves their arithmetic and their barriers on any machine; what nvcc makes of the text is proved by checkops on a GPU. */
#include "cuda_host.h"

#include "ops/cuda/attention.cu"
#include "ops/cuda/delta.cu"
#include "ops/cuda/vector.cu"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

enum { ROWS = KERNEL_MAX_ROWS, MULTIPROCESSORS = 3 };

static struct ops *cpu;

/* ---- Memory and numbers ------------------------------------------------------------------------------------------------------------ */

static void *taken[1 << 14];
static int n_taken;

/* Memory until the test ends. */
static void *take(size_t bytes)
{
    void *p = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
    assert_non_null(p);
    assert_true(n_taken < (int)(sizeof taken / sizeof *taken));
    memset(p, 0x5c, (bytes + 63) & ~(size_t)63);
    return taken[n_taken++] = p;
}

static int give_back(void **state)
{
    while (n_taken)
        free(taken[--n_taken]);
    return 0;
}

static void *copy_of(const void *from, size_t bytes) { return memcpy(take(bytes), from, bytes); }

static uint64_t seed = 88172645463325252u;
static uint32_t random_bits(void)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (uint32_t)(seed >> 16);
}
static int random_below(int n) { return (int)(random_bits() % (unsigned)n); }

enum numbers { PLAIN, EXTREME, FEW, N_NUMBERS }; /* FEW: a handful of values, so that many are equal */

static float random_float(enum numbers kind)
{
    float x = ((float)random_below(1 << 24) - (1 << 23)) * 0x1p-22f;
    if (kind == FEW)
        return (float)(random_below(5) - 2) * 0.5f;
    if (kind == PLAIN || random_below(3))
        return x;
    switch (random_below(6)) { /* no square of which overflows a sum */
    case 0: return x * 1e14f;
    case 1: return x * 1e-20f;
    case 2: return x * 1e-40f;
    case 3: return x < 0 ? -0.0f : 0.0f;
    case 4: return x * 100;
    default: return x * 1e-31f;
    }
}

static float *random_floats(size_t n, enum numbers kind)
{
    float *x = take(n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = random_float(kind);
    return x;
}

static size_t rows_floats(int width) { return (size_t)ROWS * (size_t)ops_padded(width); }
static size_t rows_bytes(int width) { return rows_floats(width) * sizeof(float); }
static float *random_rows(int width, enum numbers kind) { return random_floats(rows_floats(width), kind); }

static void expect_bytes(const char *what, const void *got, const void *wanted, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        if (((const uint8_t *)got)[i] != ((const uint8_t *)wanted)[i])
            fail_msg("%s: byte %zu of %zu is %02x, wanted %02x", what, i, bytes, ((const uint8_t *)got)[i], ((const uint8_t *)wanted)[i]);
}

static void expect_rows(const char *what, const float *got, const float *wanted, int width) { expect_bytes(what, got, wanted, rows_bytes(width)); }

static void launch(void (*kernel)(const void *), const void *args, struct launch l)
{
    assert_true(l.shared_bytes <= 48 << 10);
    const char *error = cuda_host_launch(kernel, args, (struct cuda_host_dim3){ l.x, l.y, l.z }, (struct cuda_host_dim3){ l.threads, 1, 1 }, l.shared_bytes);
    if (error)
        fail_msg("%s", error);
}
#define LAUNCH(kernel, ...) launch(kernel, &args, kernel##_launch(&args, ##__VA_ARGS__))

/* A8 places for the kernel and for the operation; `values` is the operation's input. */
struct a8_pair { struct a8 device; struct activations host; };

static struct a8_pair a8_pair(int width, float *values)
{
    size_t cells = (size_t)ROWS * (size_t)width;
    return (struct a8_pair){ { take(cells), take(cells / 8), take(cells / 4) }, { width, values, take(cells), take(cells / 8), take(cells / 4) } };
}

static void expect_a8(const char *what, int n, struct a8_pair *p)
{
    size_t cells = (size_t)ROWS * (size_t)p->host.width;
    cpu->quantize(cpu, n, &p->host);
    expect_bytes(what, p->device.codes, p->host.codes, cells);
    expect_bytes(what, p->device.scales, p->host.scales, cells / 8);
    expect_bytes(what, p->device.sums, p->host.sums, cells / 4);
}

/* ---- The emulator itself ----------------------------------------------------------------------------------------------------------- */

struct faulty_args { int fault; float *out; };
enum { FINE, HALF_AT_BARRIER, TWO_BARRIERS, LANE_GONE, LANE_OUTSIDE, NO_BARRIER };

KERNEL(faulty)
{
    __shared__ float x[64];
    int i = (int)threadIdx.x;
    if (a.fault == HALF_AT_BARRIER && i < 32)
        return;
    if (a.fault == TWO_BARRIERS && i < 32)
        __syncthreads();
    x[i] = (float)i;
    if (a.fault != NO_BARRIER)
        __syncthreads();
    if (a.fault == LANE_GONE && i == 5)
        return;
    float sum = x[63 - i] + __shfl_xor_sync(0xffffffffu, x[i], 1);
    if (a.fault == LANE_OUTSIDE)
        sum += __shfl_sync(0x0000ffffu << (i & 16), sum, 17);
    a.out[i] = sum;
}

static const char *run_faulty(int fault, float *out)
{
    struct faulty_args args = { fault, out };
    return cuda_host_launch(faulty, &args, (struct cuda_host_dim3){ 1, 1, 1 }, (struct cuda_host_dim3){ 64, 1, 1 }, 0);
}

static void the_emulator_finds_threads_that_wait_forever(void **state)
{
    float out[64];
    assert_null(run_faulty(FINE, out));
    for (int i = 0; i < 64; i++)
        assert_true(out[i] == (float)(63 - i + (i ^ 1)));
    for (int fault = HALF_AT_BARRIER; fault <= LANE_OUTSIDE; fault++)
        assert_non_null(run_faulty(fault, out));
}

static void the_emulator_shows_a_missing_barrier(void **state)
{
    int wrong = 0;
    for (int run = 0; run < 20; run++) {
        float out[64];
        assert_null(run_faulty(NO_BARRIER, out));
        for (int i = 0; i < 64; i++)
            wrong += out[i] != (float)(63 - i + (i ^ 1));
    }
    assert_true(wrong > 0);
}

/* ---- vector.cu --------------------------------------------------------------------------------------------------------------------- */

static void norms_are_the_operation(void **state)
{
    static const struct { int groups, dim, gamma_groups, partials; bool a8; } shapes[] = {
        { 4, 320, 4, 256, true }, { 1, 2560, 1, 256, true }, { 2, 100, 1, 256, false }, { 5, 128, 1, 32, true }, { 3, 50, 3, 32, false },
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int n = 1; n <= ROWS; n++) {
            int groups = shapes[i].groups, dim = shapes[i].dim, width = groups * dim;
            float *x = random_rows(width, n % 2 ? PLAIN : EXTREME), *gamma = random_floats((size_t)width, PLAIN), *got = take(rows_bytes(width)), *wanted = take(rows_bytes(width));
            struct a8_pair a8 = a8_pair(width, wanted);
            struct vector_norm_args args = { n, groups, dim, shapes[i].gamma_groups, shapes[i].partials, 1e-6f, x, gamma, got,
                                             shapes[i].a8 ? a8.device : (struct a8){ 0 } };
            LAUNCH(vector_norm);
            cpu->norm(cpu, n, x, groups, dim, gamma, shapes[i].gamma_groups, 1e-6f, shapes[i].partials, wanted);
            expect_rows("norm", got, wanted, width);
            if (shapes[i].a8)
                expect_a8("norm's A8", n, &a8);
            args.x = args.out = copy_of(x, rows_bytes(width));
            args.a8.codes = NULL;
            LAUNCH(vector_norm);
            cpu->norm(cpu, n, x, groups, dim, gamma, shapes[i].gamma_groups, 1e-6f, shapes[i].partials, x);
            expect_rows("norm in place", args.out, x, width);
        }
}

static void write_norm_is_write_then_norm(void **state)
{
    int streams = 3, dim = 352, wide = streams * dim;
    for (int n = 1; n <= ROWS; n++) {
        float *residual = random_rows(wide, n % 2 ? PLAIN : EXTREME), *mine = copy_of(residual, rows_bytes(wide)), *inject = random_rows(streams, EXTREME);
        float *y = random_rows(dim, PLAIN), *gamma = random_floats((size_t)wide, PLAIN), *got = take(rows_bytes(wide)), *wanted = take(rows_bytes(wide));
        struct a8_pair a8 = a8_pair(wide, wanted);
        struct vector_write_norm_args args = { n, streams, dim, 1e-6f, inject, y, gamma, mine, got, a8.device };
        LAUNCH(vector_write_norm);
        cpu->write(cpu, n, streams, dim, inject, y, residual);
        cpu->norm(cpu, n, residual, streams, dim, gamma, streams, 1e-6f, 256, wanted);
        expect_rows("the residual", mine, residual, wide);
        expect_rows("its norm", got, wanted, wide);
        expect_a8("the norm's A8", n, &a8);
    }
}

static void a8_is_the_operation(void **state)
{
    for (int kind = 0; kind < N_NUMBERS; kind++)
        for (int n = 1; n <= ROWS; n++) {
            int width = 32 * (1 + random_below(12));
            float *x = random_rows(width, kind);
            memset(x, 0, 32 * sizeof *x); /* an empty group */
            struct a8_pair a8 = a8_pair(width, x);
            struct vector_quantize_args args = { n, width, x, a8.device };
            LAUNCH(vector_quantize);
            expect_a8("quantize", n, &a8);
        }
}

static void gates_are_the_operation(void **state)
{
    for (int kind = 0; kind < FEW; kind++)
        for (int n = 1; n <= ROWS; n++) {
            int streams = 1 + random_below(5), dim = 32 * (1 + random_below(9)), wide = streams * dim;
            float *x = random_rows(dim, kind), *got = take(rows_bytes(dim)), *wanted = take(rows_bytes(dim)), *up = random_rows(dim, kind);
            float *gates = random_rows(wide, kind), *normed = random_rows(wide, kind), *inject = random_rows(streams, kind);
            struct a8_pair a8 = a8_pair(dim, wanted);
            {
                struct vector_gate_input_args args = { n, dim, streams, x, got, a8.device };
                LAUNCH(vector_gate_input);
                cpu->gate_input(cpu, n, dim, streams, x, wanted);
                expect_rows("gate_input", got, wanted, dim);
                expect_a8("gate_input's A8", n, &a8);
            }
            {
                struct vector_silu_mul_args args = { n, dim, x, up, got, a8.device };
                LAUNCH(vector_silu_mul);
                cpu->silu_mul(cpu, n, dim, x, up, wanted);
                expect_rows("silu_mul", got, wanted, dim);
                expect_a8("silu_mul's A8", n, &a8);
            }
            {
                struct vector_mix_args args = { n, streams, dim, gates, normed, got, a8.device };
                LAUNCH(vector_mix);
                cpu->mix(cpu, n, streams, dim, gates, normed, wanted);
                expect_rows("mix", got, wanted, dim);
                expect_a8("mix's A8", n, &a8);
            }
            {
                float *mine = copy_of(normed, rows_bytes(wide));
                struct vector_write_args args = { n, streams, dim, inject, x, mine };
                LAUNCH(vector_write);
                cpu->write(cpu, n, streams, dim, inject, x, normed);
                expect_rows("write", mine, normed, wide);
            }
            {
                float *mine = copy_of(x, rows_bytes(dim));
                struct vector_add2_args args = { (size_t)n * (size_t)dim, mine, up, wanted };
                LAUNCH(vector_add2);
                cpu->add2(cpu, (size_t)n * (size_t)dim, x, up, wanted);
                expect_rows("add2", mine, x, dim);
            }
        }
}

static void widths_that_are_no_multiple_of_32_work_without_a8(void **state)
{
    int width = 137;
    float *x = random_rows(width, PLAIN), *up = random_rows(width, PLAIN), *got = take(rows_bytes(width)), *wanted = take(rows_bytes(width));
    struct vector_silu_mul_args args = { ROWS, width, x, up, got, { 0 } };
    LAUNCH(vector_silu_mul);
    cpu->silu_mul(cpu, ROWS, width, x, up, wanted);
    expect_rows("silu_mul", got, wanted, width);
    struct vector_gate_input_args gate = { ROWS, width, 4, x, got, { 0 } };
    launch(vector_gate_input, &gate, vector_gate_input_launch(&gate));
    cpu->gate_input(cpu, ROWS, width, 4, x, wanted);
    expect_rows("gate_input", got, wanted, width);
}

/* Two sequences with rings, as model/ has them: the kernel stores this window's rows itself. */
static void convolution_stores_its_rows_and_reads_its_own_window(void **state)
{
    for (int n_taps = 1; n_taps <= 8; n_taps++)
        for (int n = 1; n <= ROWS; n++) {
            int channels = 200, ring = ROWS + (n_taps - 1) * 3, distance = 1 + random_below(3), split = random_below(n + 1);
            size_t ring_floats = (size_t)ring * (size_t)channels;
            float *x = random_rows(channels, PLAIN), *kernel = random_floats((size_t)(n_taps * channels), PLAIN), *zeros = memset(take(1024), 0, 1024);
            float *mine = random_floats(2 * ring_floats, PLAIN), *theirs = copy_of(mine, 2 * ring_floats * sizeof *mine);
            const float *(*my_taps)[8] = take(sizeof(const float *[ROWS][8])), *(*their_taps)[8] = take(sizeof(const float *[ROWS][8]));
            int start[2] = { random_below(40), random_below(3) };
            for (int t = 0; t < n; t++) {
                int sequence = t >= split, position = start[sequence] + (sequence ? t - split : t);
                size_t at = (size_t)sequence * ring_floats;
                for (int j = 0; j < n_taps; j++) {
                    int p = position - distance * (n_taps - 1 - j);
                    my_taps[t][j] = p < 0 ? zeros : mine + at + (size_t)(p % ring) * (size_t)channels;
                    their_taps[t][j] = p < 0 ? zeros : theirs + at + (size_t)(p % ring) * (size_t)channels;
                }
                memcpy(theirs + at + (size_t)(position % ring) * (size_t)channels, x + (size_t)t * (size_t)ops_padded(channels), (size_t)channels * sizeof *x);
            }
            float *got = take(rows_bytes(channels)), *wanted = take(rows_bytes(channels));
            cpu->conv_silu(cpu, n, n_taps, channels, (const float *const(*)[8])their_taps, kernel, wanted);
            struct vector_conv_args args = { n, n_taps, channels, (const float *const(*)[8])my_taps, kernel, x, got };
            LAUNCH(vector_conv);
            expect_rows("conv_silu", got, wanted, channels);
            expect_bytes("the rings", mine, theirs, 2 * ring_floats * sizeof *mine);
            args.x = NULL; /* the rows are in the ring now */
            LAUNCH(vector_conv);
            expect_rows("conv_silu of stored rows", got, wanted, channels);
        }
}

static void copies_go_where_the_pointers_say(void **state)
{
    int width = 150, copies = 3;
    float *x = random_rows(width, PLAIN), *got = take((size_t)(ROWS * copies * width) * sizeof(float)), *to[ROWS];
    const float *from[ROWS];
    for (int t = 0; t < ROWS; t++) {
        from[t] = x + (size_t)(ROWS - 1 - t) * (size_t)ops_padded(width);
        to[t] = got + t * copies * width;
    }
    struct vector_copy_args args = { ROWS, width, copies, from, to };
    LAUNCH(vector_copy);
    for (int t = 0; t < ROWS; t++)
        for (int i = 0; i < copies; i++)
            expect_bytes("a copy", to[t] + i * width, from[t], (size_t)width * sizeof(float));
}

static void the_ngram_gate_is_the_operation(void **state)
{
    int streams = 3, dim = 304, wide = streams * dim;
    for (int n = 1; n <= ROWS; n++) {
        float *k = random_rows(wide, n % 2 ? PLAIN : EXTREME), *q = random_rows(wide, PLAIN), *v = random_rows(dim, PLAIN), *got = take(rows_bytes(wide)),
              *wanted = take(rows_bytes(wide));
        memset(k, 0, (size_t)dim * sizeof *k); /* <k, q> is exactly 0 */
        struct vector_ngram_gate_args args = { n, streams, dim, k, q, v, got };
        LAUNCH(vector_ngram_gate);
        cpu->ngram_gate(cpu, n, streams, dim, k, q, v, wanted);
        expect_rows("ngram_gate", got, wanted, wide);
    }
}

static void routing_is_the_operation_also_for_equal_logits(void **state)
{
    static const struct { int experts, used; } shapes[] = { { 512, 10 }, { 32, 32 }, { 1, 1 }, { 50, 7 }, { 1000, 32 } };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int kind = 0; kind < N_NUMBERS; kind++)
            for (int n = 1; n <= ROWS; n++) {
                float *logits = random_rows(shapes[i].experts, kind);
                if (kind == FEW)
                    logits[random_below(shapes[i].experts)] = -0.0f;
                struct route *got = take(sizeof *got), *wanted = copy_of(got, sizeof *got);
                struct vector_route_args args = { n, shapes[i].experts, shapes[i].used, logits, got };
                LAUNCH(vector_route);
                cpu->route(cpu, n, shapes[i].experts, shapes[i].used, logits, wanted);
                expect_bytes("route", got, wanted, sizeof *got);
            }
}

static void routing_of_nan_stays_inside_the_experts(void **state)
{
    float *logits = random_rows(40, PLAIN);
    for (int e = 0; e < 40; e++)
        logits[e] = e % 3 ? -NAN : NAN;
    struct route *got = take(sizeof *got);
    struct vector_route_args args = { 1, 40, 10, logits, got };
    LAUNCH(vector_route);
    for (int i = 0; i < 10; i++) {
        assert_in_range(got->ids[0][i], 0, 39);
        for (int j = 0; j < i; j++)
            assert_int_not_equal(got->ids[0][i], got->ids[0][j]);
    }
}

static void combining_is_the_operation_wherever_the_parts_are(void **state)
{
    int dim = 200;
    for (int used = 1; used <= 10; used += 3)
        for (int n = 1; n <= ROWS; n++) {
            size_t parts_floats = rows_floats(dim) * (size_t)used;
            float *parts = random_floats(parts_floats, EXTREME), *shared = random_rows(dim, PLAIN), *gate = random_rows(1, EXTREME);
            float *got = take(rows_bytes(dim)), *wanted = take(rows_bytes(dim));
            struct route *route = take(sizeof *route);
            for (int t = 0; t < ROWS; t++)
                for (int i = 0; i < OPS_MAX_USED; i++)
                    route->weights[t][i] = random_float(PLAIN);
            struct vector_combine_args args = { n, used, dim, parts, NULL, NULL, route, shared, gate, got };
            LAUNCH(vector_combine);
            cpu->combine(cpu, n, used, dim, parts, route, shared, gate, wanted);
            expect_rows("combine", got, wanted, dim);

            float *on_device = copy_of(parts, parts_floats * sizeof *parts), *on_host = copy_of(parts, parts_floats * sizeof *parts);
            uint8_t(*from_host)[OPS_MAX_USED] = take(ROWS * OPS_MAX_USED);
            for (int t = 0; t < n; t++)
                for (int i = 0; i < used; i++) {
                    from_host[t][i] = (uint8_t)random_below(2);
                    float *other = from_host[t][i] ? on_device : on_host; /* there, it is not */
                    memset(other + (size_t)(t * used + i) * (size_t)ops_padded(dim), 0xff, (size_t)dim * sizeof(float));
                }
            args.parts = on_device;
            args.host_parts = on_host;
            args.from_host = (const uint8_t(*)[OPS_MAX_USED])from_host;
            memset(got, 0x5c, rows_bytes(dim));
            LAUNCH(vector_combine);
            expect_rows("combine of two places", got, wanted, dim);
        }
}

static void the_first_layer_with_a_value_that_is_not_finite_is_found(void **state)
{
    float *x = random_floats(5000, EXTREME), *y = random_floats(70, EXTREME);
    uint32_t found = UINT32_MAX;
    struct vector_finite_args args = { .x = { x, NULL, y }, .n = { 5000, 0, 70 }, .layer = 9, .layer_found = &found };
    LAUNCH(vector_finite);
    assert_int_equal(found, UINT32_MAX);
    for (int i = 0; i < 70; i += 23) {
        float kept = y[i];
        y[i] = i % 2 ? NAN : -INFINITY;
        found = UINT32_MAX;
        args.layer = 9;
        LAUNCH(vector_finite);
        assert_int_equal(found, 9);
        args.layer = 11;
        LAUNCH(vector_finite);
        assert_int_equal(found, 9);
        args.layer = 2;
        LAUNCH(vector_finite);
        assert_int_equal(found, 2);
        y[i] = kept;
    }
    x[4999] = INFINITY;
    found = UINT32_MAX;
    LAUNCH(vector_finite);
    assert_int_equal(found, 2);
}

static void the_largest_logit_is_the_first_of_its_equals(void **state)
{
    static const int sizes[] = { 1, 31, 256, 1000, 20000 };
    uint64_t *keys = take(ROWS * ARGMAX_BLOCKS * sizeof *keys);
    uint32_t *tickets = memset(take(ROWS * sizeof *tickets), 0, ROWS * sizeof *tickets);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int kind = 0; kind < N_NUMBERS; kind++)
            for (int n = 1; n <= ROWS; n += 3) {
                float *logits = random_rows(sizes[i], kind);
                logits[0] = NAN;
                int32_t ids[ROWS];
                struct vector_argmax_args args = { n, sizes[i], logits, keys, tickets, ids };
                LAUNCH(vector_argmax);
                for (int t = 0; t < n; t++) {
                    const float *row = logits + (size_t)t * (size_t)ops_padded(sizes[i]);
                    int best = 0;
                    for (int e = 1; e < sizes[i]; e++)
                        best = row[e] > row[best] || row[best] != row[best] ? e : best;
                    assert_int_equal(ids[t], best);
                }
            }
}

/* ---- delta.cu ---------------------------------------------------------------------------------------------------------------------- */

static const struct delta_shape delta_shapes[] = { { 2, 6, 128, 32 }, { 1, 3, 32, 48 }, { 2, 2, 64, 64 }, { 1, 2, 256, 16 }, { 3, 3, 96, 16 } };
enum { N_DELTA_SHAPES = sizeof delta_shapes / sizeof *delta_shapes };

static int delta_width(const struct delta_shape *s) { return 2 * s->k_heads * s->dim_k + s->v_heads * s->dim_v; }

static void delta_prepare_and_output_are_the_operations(void **state)
{
    for (int i = 0; i < N_DELTA_SHAPES; i++)
        for (int n = 1; n <= ROWS; n++) {
            struct delta_shape s = delta_shapes[i];
            int width = delta_width(&s), inner = s.v_heads * s.dim_v;
            float *wanted = random_rows(width, n % 2 ? PLAIN : EXTREME), *got = copy_of(wanted, rows_bytes(width)), *alpha = random_rows(s.v_heads, PLAIN),
                  *b = random_rows(s.v_heads, EXTREME), *head_a = random_floats((size_t)s.v_heads, PLAIN), *dt = random_floats((size_t)s.v_heads, EXTREME);
            float *decay[2] = { take(rows_bytes(s.v_heads)), take(rows_bytes(s.v_heads)) }, *beta[2] = { take(rows_bytes(s.v_heads)), take(rows_bytes(s.v_heads)) };
            struct delta_prepare_args args = { n, s, got, alpha, b, head_a, dt, decay[0], beta[0] };
            LAUNCH(delta_prepare);
            cpu->delta_prepare(cpu, n, &s, wanted, alpha, b, head_a, dt, decay[1], beta[1]);
            expect_rows("q, k, v", got, wanted, width);
            expect_rows("decay", decay[0], decay[1], s.v_heads);
            expect_rows("beta", beta[0], beta[1], s.v_heads);

            float *o = random_rows(inner, n % 2 ? PLAIN : EXTREME), *mine = copy_of(o, rows_bytes(inner)), *z = random_rows(inner, PLAIN),
                  *gamma = random_floats((size_t)s.dim_v, PLAIN);
            struct a8_pair a8 = a8_pair(inner, o);
            struct delta_output_args output = { n, s, mine, z, gamma, 1e-6f, s.dim_v % 32 ? (struct a8){ 0 } : a8.device };
            launch(delta_output, &output, delta_output_launch(&output));
            cpu->delta_output(cpu, n, &s, o, z, gamma, 1e-6f);
            expect_rows("delta_output", mine, o, inner);
            if (s.dim_v % 32 == 0)
                expect_a8("delta_output's A8", n, &a8);
        }
}

/* A window of up to three sequences, each with some certain rows, then the commit of some uncertain ones; two layers are committed at once. */
static void delta_rule_and_replay_are_the_operation(void **state)
{
    enum { LAYERS = 2 };
    for (int i = 0; i < N_DELTA_SHAPES; i++)
        for (int n = 1; n <= ROWS; n++) {
            struct delta_shape s = delta_shapes[i];
            int width = delta_width(&s), inner = s.v_heads * s.dim_v, n_spans = 0;
            size_t state_floats = (size_t)inner * (size_t)s.dim_k;
            struct row_span spans[ROWS], replays[ROWS];
            for (int t = 0; t < n; n_spans++) {
                int rows = n_spans == 2 ? n - t : 1 + random_below(n - t), keep = random_below(rows + 1);
                spans[n_spans] = (struct row_span){ t, rows, keep };
                int replay = random_below(rows - keep + 1);
                replays[n_spans] = (struct row_span){ t + keep, replay, replay };
                t += rows;
            }
            float *mine[ROWS * LAYERS], *theirs[ROWS * LAYERS];
            struct delta_trace_rows traces[LAYERS];
            for (int layer = 0; layer < LAYERS; layer++) {
                traces[layer] = (struct delta_trace_rows){ random_rows(width, PLAIN), random_rows(s.v_heads, PLAIN), random_rows(s.v_heads, PLAIN) };
                float *got = take(rows_bytes(inner)), *wanted = take(rows_bytes(inner)), *my_states[ROWS], *their_states[ROWS];
                for (int span = 0; span < n_spans; span++) {
                    my_states[span] = mine[span * LAYERS + layer] = random_floats(state_floats, PLAIN);
                    their_states[span] = theirs[span * LAYERS + layer] = copy_of(my_states[span], state_floats * sizeof(float));
                }
                struct delta_rule_args args = { n, s, &n_spans, spans, my_states, traces[layer].qkv, traces[layer].decay, traces[layer].beta, got };
                LAUNCH(delta_rule);
                cpu->delta_rule(cpu, n_spans, spans, their_states, &s, traces[layer].qkv, traces[layer].decay, traces[layer].beta, wanted);
                expect_rows("delta_rule", got, wanted, inner);
                for (int span = 0; span < n_spans; span++)
                    expect_bytes("the states", my_states[span], their_states[span], state_floats * sizeof(float));
                for (int span = 0; span < n_spans; span++)
                    if (replays[span].n)
                        cpu->delta_rule(cpu, 1, &replays[span], &their_states[span], &s, traces[layer].qkv, traces[layer].decay, traces[layer].beta, wanted);
            }
            struct delta_replay_args args = { LAYERS, ROWS, s, &n_spans, replays, mine, traces };
            LAUNCH(delta_replay);
            for (int span = 0; span < n_spans * LAYERS; span++)
                expect_bytes("the states after the commit", mine[span], theirs[span], state_floats * sizeof(float));
        }
}

/* ---- attention.cu ------------------------------------------------------------------------------------------------------------------ */

/* A sequence's memory in one layer, and a window's rows that look at it. */
struct memory { struct attention_shape shape; int context, max_slices; struct attention_row row; };

static size_t kv_values(const struct memory *m) { return (size_t)m->context * (size_t)(m->shape.kv_heads * m->shape.dim); }

static struct kv_plane random_plane(const struct memory *m, enum kv_type type)
{
    size_t n = kv_values(m);
    struct kv_plane plane = { type, take(2 * n), random_floats(n / 32 + 1, PLAIN) };
    for (size_t i = 0; i < n; i++)
        if (type == KV_F16)
            ((uint16_t *)plane.codes)[i] = half_from_float(random_float(random_below(100) ? PLAIN : EXTREME) * 0.25f);
        else
            ((int8_t *)plane.codes)[i] = (int8_t)(random_below(255) - 127);
    return plane;
}

static struct memory random_memory(struct attention_shape shape, int context, enum kv_type type, enum numbers kind)
{
    struct memory m = { shape, context, shape.block ? context / shape.block / INDEX_SLICE + 1 : 1, { 0 } };
    size_t blocks = shape.block ? (size_t)(context / shape.block) + 1 : 1;
    m.row = (struct attention_row){ .keys = random_plane(&m, type), .values = random_plane(&m, type), .ring_rows = ROWS + shape.block,
                                    .raw_keys = random_floats((size_t)((ROWS + shape.block) * shape.index_dim), kind),
                                    .block_keys = random_floats(blocks * (size_t)shape.index_dim, kind) };
    return m;
}

static struct memory copy_memory(const struct memory *m)
{
    struct memory c = *m;
    size_t n = kv_values(m), blocks = m->shape.block ? (size_t)(m->context / m->shape.block) + 1 : 1;
    c.row.keys.codes = copy_of(m->row.keys.codes, 2 * n);
    c.row.values.codes = copy_of(m->row.values.codes, 2 * n);
    c.row.keys.scales = copy_of(m->row.keys.scales, (n / 32 + 1) * sizeof(float));
    c.row.values.scales = copy_of(m->row.values.scales, (n / 32 + 1) * sizeof(float));
    c.row.raw_keys = copy_of(m->row.raw_keys, (size_t)(m->row.ring_rows * m->shape.index_dim) * sizeof(float));
    c.row.block_keys = copy_of(m->row.block_keys, blocks * (size_t)m->shape.index_dim * sizeof(float));
    return c;
}

static void expect_same_memory(const struct memory *got, const struct memory *wanted)
{
    const struct attention_row *a = &got->row, *b = &wanted->row;
    size_t n = kv_values(got), blocks = got->shape.block ? (size_t)(got->context / got->shape.block) + 1 : 1;
    expect_bytes("keys", a->keys.codes, b->keys.codes, 2 * n);
    expect_bytes("values", a->values.codes, b->values.codes, 2 * n);
    expect_bytes("key scales", a->keys.scales, b->keys.scales, (n / 32 + 1) * sizeof(float));
    expect_bytes("value scales", a->values.scales, b->values.scales, (n / 32 + 1) * sizeof(float));
    expect_bytes("raw keys", a->raw_keys, b->raw_keys, (size_t)(a->ring_rows * got->shape.index_dim) * sizeof(float));
    expect_bytes("block keys", a->block_keys, b->block_keys, blocks * (size_t)got->shape.index_dim * sizeof(float));
}

/* Row of `m` at a position, with rope tables and scratch of its own. */
static struct attention_row row_at(const struct memory *m, int position)
{
    struct attention_row row = m->row;
    size_t pairs = (size_t)m->shape.n_pairs;
    row.position = position;
    row.cosines = random_floats(pairs, PLAIN);
    row.sines = random_floats(pairs, PLAIN);
    row.block_cosines = random_floats(pairs, PLAIN);
    row.block_sines = random_floats(pairs, PLAIN);
    row.scores = take((size_t)(m->context + 1) * sizeof(float));
    row.selection.cells = take((size_t)(m->context + 1) * sizeof(int32_t));
    return row;
}

static const struct attention_shape attention_shapes[] = {
    { 24, 2, 256, 32, 4, 128, 4, 3, 1e-6f }, { 6, 3, 32, 16, 5, 32, 3, 2, 1e-6f }, { 4, 1, 96, 5, 1, 64, 1, 40, 1e-6f }, { 7, 1, 64, 32, 9, 96, 0, 0, 1e-6f },
};
enum { N_ATTENTION_SHAPES = sizeof attention_shapes / sizeof *attention_shapes };

static bool can_be_int8(const struct attention_shape *s) { return s->kv_heads * s->dim % KV_GROUP == 0; }

static void attention_store_is_the_operation(void **state)
{
    for (int i = 0; i < N_ATTENTION_SHAPES; i++)
        for (int n = 1; n <= ROWS; n++) {
            struct attention_shape s = attention_shapes[i];
            enum kv_type type = n % 2 && can_be_int8(&s) ? KV_INT8 : KV_F16;
            enum numbers kind = n % 3 ? PLAIN : EXTREME;
            struct memory mine[2] = { random_memory(s, 60, type, kind), random_memory(s, 60, type, kind) };
            struct memory theirs[2] = { copy_memory(&mine[0]), copy_memory(&mine[1]) };
            struct attention_row my_rows[ROWS], their_rows[ROWS];
            int split = random_below(n + 1), start[2] = { random_below(40), random_below(5) }, first = 2 * s.n_heads * s.dim, kv = s.kv_heads * s.dim,
                iq_width = s.index_heads * s.index_dim;
            for (int t = 0; t < n; t++) {
                int sequence = t >= split;
                my_rows[t] = row_at(&mine[sequence], start[sequence] + (sequence ? t - split : t));
                their_rows[t] = my_rows[t];
                their_rows[t].keys = theirs[sequence].row.keys;
                their_rows[t].values = theirs[sequence].row.values;
                their_rows[t].raw_keys = theirs[sequence].row.raw_keys;
                their_rows[t].block_keys = theirs[sequence].row.block_keys;
            }
            float *q = random_rows(first, kind), *k = random_rows(kv, kind), *v = random_rows(kv, kind), *iq = random_rows(iq_width, kind), *ik = random_rows(s.index_dim, kind);
            float *my_q = copy_of(q, rows_bytes(first)), *my_k = copy_of(k, rows_bytes(kv)), *my_iq = copy_of(iq, rows_bytes(iq_width));
            float *gamma = random_floats((size_t)s.dim * 2, PLAIN), *index_gamma = random_floats((size_t)s.index_dim * 2, PLAIN);
            struct attention_store_args args = { n, s, my_rows, my_q, my_k, my_iq, v, ik, gamma, gamma + s.dim, index_gamma, index_gamma + s.index_dim };
            LAUNCH(attention_store);
            cpu->attention_store(cpu, n, &s, their_rows, q, k, v, iq, ik, gamma, gamma + s.dim, index_gamma, index_gamma + s.index_dim);
            expect_rows("q", my_q, q, first);
            expect_rows("k", my_k, k, kv);
            expect_rows("iq", my_iq, iq, iq_width);
            expect_same_memory(&mine[0], &theirs[0]);
            expect_same_memory(&mine[1], &theirs[1]);
        }
}

/* Rows of two sequences at far positions: the operation's cells, and its scores. */
static void expect_selection(struct attention_shape s, int n, int position, int context, enum numbers kind)
{
    struct memory m[2] = { random_memory(s, context, KV_F16, kind), random_memory(s, context, KV_F16, kind) };
    struct attention_row rows[ROWS], theirs[ROWS];
    int split = 1 + random_below(n), width = s.index_heads * s.index_dim;
    for (int t = 0; t < n; t++) {
        rows[t] = row_at(&m[t >= split], position + (t >= split ? t - split : t));
        theirs[t] = row_at(&m[t >= split], rows[t].position);
    }
    float *iq = random_rows(width, kind);
    if (kind == FEW) /* a row whose scores are all zero */
        memset(iq, 0, (size_t)width * sizeof *iq);
    float *maxima = take((size_t)(ROWS * m->max_slices) * sizeof *maxima);
    struct attention_scores_args scores = { n, m->max_slices, s, rows, iq, maxima };
    launch(attention_scores, &scores, attention_scores_launch(&scores, MULTIPROCESSORS));
    struct attention_select_args args = { n, m->max_slices, s, rows, maxima, take((size_t)(ROWS * s.budget_blocks + 1) * sizeof(int32_t)) };
    LAUNCH(attention_select);
    cpu->attention_select(cpu, n, &s, theirs, iq);
    for (int t = 0; t < n; t++) {
        assert_int_equal(theirs[t].selection.n, attention_cells(&s, rows[t].position));
        if (!attention_prunes(&s, rows[t].position))
            continue;
        expect_bytes("scores", rows[t].scores, theirs[t].scores, (size_t)attention_blocks(&s, rows[t].position) * sizeof(float));
        expect_bytes("cells", rows[t].selection.cells, theirs[t].selection.cells, (size_t)theirs[t].selection.n * sizeof(int32_t));
    }
}

static void selection_is_the_operation_also_for_equal_scores(void **state)
{
    for (int i = 0; i < N_ATTENTION_SHAPES; i++)
        for (int kind = 0; kind < N_NUMBERS; kind++)
            for (int n = 1; n <= ROWS; n += i ? 2 : 7)
                if (attention_shapes[i].block) {
                    struct attention_shape s = attention_shapes[i];
                    expect_selection(s, n, random_below(1400), 1500, kind);
                    expect_selection(s, n, s.block * s.budget_blocks - 3 > 0 ? s.block * s.budget_blocks - 3 : 0, 1500, kind); /* where pruning begins */
                    s.budget_blocks = 1 + random_below(300); /* more slices than that, or fewer */
                    expect_selection(s, n, 1200 + random_below(200), 1500, kind);
                }
}

static void selection_reaches_far(void **state)
{
    struct attention_shape s = { 2, 1, 32, 16, 1, 32, 1, 64, 1e-6f };
    for (int kind = 0; kind < N_NUMBERS; kind++)
        expect_selection(s, 2, 70000, 70100, kind); /* 2188 slices: several rounds of a block of 1024 */
    s.budget_blocks = 1;
    expect_selection(s, 1, 40000, 40100, FEW);
}

/* n rows at random positions of one memory; where rows prune, with any ascending cells. */
static void expect_attention(struct attention_shape s, int n, int context, enum kv_type type, int max_chunks, int heads_per_block, int kind)
{
    struct memory m = random_memory(s, context, type, PLAIN);
    struct attention_row rows[ROWS];
    int q_width = 2 * s.n_heads * s.dim, width = s.n_heads * s.dim;
    for (int t = 0; t < n; t++) {
        rows[t] = row_at(&m, t ? random_below(context) : context - 1);
        int position = rows[t].position, cells = attention_cells(&s, position), spare = position + 1 - cells;
        rows[t].selection.n = cells;
        for (int cell = 0, at = 0; at < cells; cell++) { /* leaves out `spare` of them */
            if (spare && random_below(position + 1) < position + 1 - cells) {
                spare--;
                continue;
            }
            rows[t].selection.cells[at++] = cell;
        }
    }
    float *q = random_rows(q_width, kind), *got = take(rows_bytes(width)), *wanted = take(rows_bytes(width));
    struct a8_pair a8 = a8_pair(width, wanted);
    size_t heads = (size_t)(ROWS * s.n_heads);
    float *parts = take(heads * (size_t)(max_chunks * s.dim) * sizeof *parts), *stats = take(heads * (size_t)max_chunks * 2 * sizeof *stats),
          *carry = take(heads * (size_t)(s.dim / MERGE_THREADS + 1) * 2 * sizeof *carry);
    for (int first = 0; first * ATTEND_CHUNK < context; first += max_chunks) {
        struct attend_chunks_args args = { n, heads_per_block, first, max_chunks, s, rows, q, parts, stats };
        LAUNCH(attend_chunks, MULTIPROCESSORS);
        struct attend_merge_args merge = { n, first, max_chunks, s, rows, q, parts, stats, carry, got, a8.device };
        launch(attend_merge, &merge, attend_merge_launch(&merge));
    }
    cpu->attend(cpu, n, &s, rows, q, wanted);
    expect_rows("attend", got, wanted, width);
    expect_a8("attend's A8", n, &a8);
}

static void attention_is_the_operation(void **state)
{
    for (int i = 0; i < N_ATTENTION_SHAPES; i++)
        for (int n = 1; n <= ROWS; n += i ? 1 : 7) {
            struct attention_shape s = attention_shapes[i];
            enum kv_type type = n % 2 && can_be_int8(&s) ? KV_INT8 : KV_F16;
            int context = 1 + random_below(300), group = s.n_heads / s.kv_heads, chunks = context / ATTEND_CHUNK + 1;
            expect_attention(s, n, context, type, chunks, group, PLAIN);
            s.block = 0; /* all cells */
            expect_attention(s, n, context, type, chunks, attend_heads_per_block(&s, n, chunks, MULTIPROCESSORS), EXTREME);
            expect_attention(s, n, context, type, 1 + random_below(3), group > ATTEND_TILE ? ATTEND_TILE : group, PLAIN);
        }
}

static void attention_merges_more_chunks_than_a_block_has_threads(void **state)
{
    struct attention_shape s = { 1, 1, 32, 4, 1, 32, 0, 0, 1e-6f };
    expect_attention(s, 1, 70 * ATTEND_CHUNK + 5, KV_F16, 100, 1, PLAIN);
    expect_attention(s, 1, 140 * ATTEND_CHUNK, KV_F16, 67, 1, PLAIN);
}

static int start(void **state)
{
    struct strata_error error;
    return ops_cpu_create(&cpu, ISA_REF, 1, &error);
}

static int finish(void **state)
{
    ops_cpu_destroy(cpu);
    free(cuda_host.stacks);
    return 0;
}

#define TEST(name) cmocka_unit_test_teardown(name, give_back)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(the_emulator_finds_threads_that_wait_forever),
        TEST(the_emulator_shows_a_missing_barrier),
        TEST(norms_are_the_operation),
        TEST(write_norm_is_write_then_norm),
        TEST(a8_is_the_operation),
        TEST(gates_are_the_operation),
        TEST(widths_that_are_no_multiple_of_32_work_without_a8),
        TEST(convolution_stores_its_rows_and_reads_its_own_window),
        TEST(copies_go_where_the_pointers_say),
        TEST(the_ngram_gate_is_the_operation),
        TEST(routing_is_the_operation_also_for_equal_logits),
        TEST(routing_of_nan_stays_inside_the_experts),
        TEST(combining_is_the_operation_wherever_the_parts_are),
        TEST(the_first_layer_with_a_value_that_is_not_finite_is_found),
        TEST(the_largest_logit_is_the_first_of_its_equals),
        TEST(delta_prepare_and_output_are_the_operations),
        TEST(delta_rule_and_replay_are_the_operation),
        TEST(attention_store_is_the_operation),
        TEST(selection_is_the_operation_also_for_equal_scores),
        TEST(selection_reaches_far),
        TEST(attention_is_the_operation),
        TEST(attention_merges_more_chunks_than_a_block_has_threads),
    };
    return cmocka_run_group_tests(tests, start, finish);
}
