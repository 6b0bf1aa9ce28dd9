/* The CUDA kernels with weights, run by tests/cuda_host.h: the same bits as the definition (src/ops/ref/), in every format and for every number of
 * rows; the plan equals split_plan; experts equal the CPU backend's. */
#include "cuda_host.h"
#include "quant_random.h"

#include "../src/ops/cuda/dot_any.cu"
#include "../src/ops/cuda/dot_experts.cu"
#include "../src/ops/cuda/dot_gather.cu"
#include "../src/ops/cuda/dot_plan.cu"

#include "ops/ops.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

enum { MULTIPROCESSORS = 3 }; /* few, so that blocks take several items */

static uint64_t state = 7;
static uint8_t codebooks[DOT_CODEBOOKS_BYTES] __attribute__((aligned(16)));

static void *room(size_t bytes)
{
    void *p = aligned_alloc(64, (bytes + 63) / 64 * 64);
    assert_non_null(p);
    memset(p, 0xa5, bytes);
    return p;
}

static void launch(void (*kernel)(const void *), const void *args, struct launch l)
{
    const char *error = cuda_host_launch(kernel, args, (struct cuda_host_dim3){ l.x, l.y, l.z }, (struct cuda_host_dim3){ l.threads, 1, 1 }, l.shared_bytes);
    if (error)
        fail_msg("%s", error);
}

/* One row in the file's layout. Floats are ordinary numbers: a sum of random bit patterns would be NaN. */
static void row_random(const struct quant_format *format, int width, uint8_t *row)
{
    if (format->is_float) {
        float values[4096];
        for (int i = 0; i < width; i++)
            values[i] = quant_random_normal(&state);
        quant_encode(format, values, NULL, width, row);
        return;
    }
    for (int k = 0; k < QUANT_LAYOUTS; k++)
        if (quant_layouts[k].type == (uint32_t)format->type)
            for (int b = 0; b < width / format->block; b++)
                quant_random_block(&quant_layouts[k], &state, row + (size_t)b * (size_t)format->bytes);
}

static void tiles_random(const struct quant_format *format, int rows, int width, uint8_t *tiles, size_t stride)
{
    size_t row_bytes = quant_row_bytes(format, width);
    uint8_t *some = room(TILE_ROWS * row_bytes);
    for (int i = 0; i < (int)tile_count(rows); i++) {
        int n = rows - i * TILE_ROWS < TILE_ROWS ? rows - i * TILE_ROWS : TILE_ROWS;
        for (int r = 0; r < n; r++)
            row_random(format, width, some + (size_t)r * row_bytes);
        tile_pack(format, width, some, n, tiles + (size_t)i * stride);
    }
    free(some);
}

/* Activations of 8 rows: the last one as large as A8 allows, with codes of -127 and 127 only. */
static struct activations activations_random(int width)
{
    size_t w = (size_t)width, padded = (size_t)ops_padded(width);
    struct activations a = { width, room(8 * padded * 4), room(8 * w), room(8 * w / 8), room(8 * w / 4) };
    for (int t = 0; t < 8; t++) {
        float *values = a.values + (size_t)t * padded;
        for (int i = 0; i < width; i++)
            values[i] = t < 7 ? quant_random_normal(&state) : quant_random(&state) & 1 ? 3.0f : -3.0f;
        if (width % 32 == 0)
            kernels_get(ISA_REF)->quantize(values, width, a.codes + (size_t)t * w, a.scales + (size_t)t * (w / 32), a.sums + (size_t)t * (w / 16));
    }
    return a;
}

static void activations_free(struct activations *a)
{
    free(a->values);
    free(a->codes);
    free(a->scales);
    free(a->sums);
}

static struct dot_rows rows_of(const struct activations *a)
{
    return (struct dot_rows){ a->values, a->codes, a->scales, a->sums, a->width, ops_padded(a->width) };
}

static struct dot_input input_of(const struct activations *a, int t)
{
    size_t w = (size_t)a->width, row = (size_t)t;
    return (struct dot_input){ a->values + row * (size_t)ops_padded(a->width), a->codes + row * w, a->scales + row * (w / 32), a->sums + row * (w / 16) };
}

static bool same_bits(const float *a, const float *b, size_t n) { return memcmp(a, b, n * sizeof *a) == 0; }

/* ---- matmul ---------------------------------------------------------------------------------------------------------------------------- */

/* Matrices of these formats and one width in one launch, against the definition. */
static void check_matmul(int n_matrices, const enum quant_type *types, const int *rows, int width, int n)
{
    struct activations x = activations_random(width);
    struct dot_matmul_args a = { .x = rows_of(&x), .codebooks = codebooks, .n = n, .n_matrices = n_matrices };
    uint8_t *tiles[DOT_MAX_MATRICES];
    for (int i = 0; i < n_matrices; i++) {
        const struct quant_format *format = quant_format_find(types[i]);
        size_t stride = tile_bytes(format, width) + (i ? 64 : 0); /* tiles need not touch: gate and up do not */
        int count = (int)tile_count(rows[i]);
        tiles[i] = room((size_t)count * stride);
        tiles_random(format, rows[i], width, tiles[i], stride);
        a.w[i] = (struct dot_matrix){ .tiles = tiles[i], .stride = stride, .out = room((size_t)(n * count * TILE_ROWS) * 4), .type = types[i],
                                      .tiles_count = count, .out_stride = count * TILE_ROWS, .scale = i ? 0.75f : 1.0f };
    }
    struct launch l = dot_matmul_launch(&a, MULTIPROCESSORS);
    launch(n <= 4 ? dot_matmul_4 : dot_matmul_8, &a, l);

    for (int i = 0; i < n_matrices; i++) {
        size_t padded = (size_t)a.w[i].out_stride;
        float *want = room(8 * padded * 4), *out[8];
        struct dot_input in[8];
        for (int t = 0; t < n; t++) {
            in[t] = input_of(&x, t);
            out[t] = want + (size_t)t * padded;
        }
        kernels_get(ISA_REF)->dot[types[i]](tiles[i], (size_t)a.w[i].stride, a.w[i].tiles_count, width, in, n, out);
        for (size_t k = 0; k < (size_t)n * padded; k++)
            want[k] *= a.w[i].scale;
        if (!same_bits(want, a.w[i].out, (size_t)n * padded))
            fail_msg("%s, %d rows of %d columns: %d rows of activations differ from the definition", quant_format_find(types[i])->name, rows[i], width, n);
        free(want);
        free(tiles[i]);
        free(a.w[i].out);
    }
    activations_free(&x);
}

static void every_format_gives_the_bits_of_the_definition(void **unused)
{
    for (uint32_t type = 0; type < QUANT_TYPE_LIMIT; type++) {
        const struct quant_format *format = quant_format_find(type);
        if (!format)
            continue;
        int widths[3] = { 256, 512, 256 };
        if (format->block < 256) {
            widths[1] = 640; /* a short strand */
            widths[2] = format->block;
        }
        for (int i = 0; i < 3; i++)
            for (int n = 1; n <= 8; n += i == 0 ? 1 : 3) {
                enum quant_type types[1] = { (enum quant_type)type };
                check_matmul(1, types, (int[]){ i == 1 ? 70 : 24 }, widths[i] < 32 && !format->is_float ? 32 : widths[i], n);
            }
    }
}

static void matrices_of_different_formats_share_a_launch(void **unused)
{
    const enum quant_type types[8] = { QUANT_IQ3_S, QUANT_F32, QUANT_Q5_K, QUANT_IQ2_XXS, QUANT_BF16, QUANT_IQ1_M, QUANT_Q8_0, QUANT_IQ3_S };
    const int rows[8] = { 100, 3, 160, 16, 17, 48, 64, 100 };
    for (int n = 1; n <= 8; n++)
        check_matmul(8, types, rows, 256, n);
}

static void inputs_wider_than_a_block_has_warps(void **unused)
{
    const enum quant_type types[3] = { QUANT_Q6_K, QUANT_IQ2_S, QUANT_F16 };
    check_matmul(3, types, (int[]){ 32, 16, 16 }, 2816, 1); /* 11 strands */
    check_matmul(3, types, (int[]){ 32, 16, 16 }, 2816, 5);
    check_matmul(1, (const enum quant_type[]){ QUANT_Q2_0 }, (int[]){ 48 }, 4096 - 192, 8); /* 16 strands, the last of two groups */
    check_matmul(1, (const enum quant_type[]){ QUANT_F32 }, (int[]){ 40 }, 2560 + 8, 2);    /* a run of 8 floats */
}

/* ---- plan ------------------------------------------------------------------------------------------------------------------------------ */

static void check_plan(int n_rows, int n_used, int n_experts, const int32_t *slot_of, const struct split_costs *costs, bool staged)
{
    int32_t ids[SPLIT_ROWS][SPLIT_USED];
    static uint8_t slots[64], link[64];
    uint64_t offsets[1024];
    for (int i = 0; i < 1024; i++)
        offsets[i] = (uint64_t)i * 1000;
    for (int t = 0; t < n_rows; t++)
        for (int k = 0; k < n_used; k++) {
            int32_t id;
            bool again;
            do {
                id = (int32_t)(quant_random(&state) % (uint64_t)n_experts);
                again = false;
                for (int j = 0; j < k; j++)
                    again |= ids[t][j] == id;
            } while (again);
            ids[t][k] = id;
        }
    static struct split want;
    static struct expert_plan plan;
    memset(&plan, 0xa5, sizeof plan);
    memset(&want, 0xa5, sizeof want);
    uint32_t sum = 0;
    split_plan(&want, &ids[0][0], SPLIT_USED, n_rows, n_used, slot_of, costs);
    struct dot_plan_args a = { .ids = &ids[0][0], .slot_of = slot_of, .costs = costs, .slots = slots, .offsets = offsets, .link = link, .link_stride = 77,
                               .plan = &plan, .sum = &sum, .stride = SPLIT_USED, .n_rows = n_rows, .n_used = n_used, .link_staged = staged };
    launch(dot_plan, &a, dot_plan_launch(&a));

    assert_int_equal(plan.split.n, want.n);
    assert_int_equal(plan.split.n_hit, want.n_hit);
    assert_int_equal(plan.split.n_link, want.n_link);
    assert_int_equal(plan.split.n_cpu, want.n_cpu);
    assert_int_equal(sum, split_sum(&want));
    int seen[2] = { 0, 0 };
    for (int i = 0; i < want.n; i++) {
        assert_int_equal(plan.split.expert[i], want.expert[i]);
        assert_int_equal(plan.split.slot[i], want.slot[i]);
        assert_int_equal(plan.split.lane[i], want.lane[i]);
        assert_int_equal(plan.split.n_rows[i], want.n_rows[i]);
        assert_memory_equal(plan.split.row[i], want.row[i], want.n_rows[i]);
        assert_memory_equal(plan.split.rank[i], want.rank[i], want.n_rows[i]);
        if (want.lane[i] == LANE_CPU)
            continue;
        int order = seen[want.lane[i]]++;
        const struct expert_task *task = &plan.tasks[want.lane[i]][order];
        assert_ptr_equal(task->blob, want.lane[i] == LANE_HIT ? slots + offsets[want.slot[i]] : link + 77 * (staged ? order : want.expert[i]));
        assert_int_equal(task->expert, want.expert[i]);
        assert_int_equal(task->n_rows, want.n_rows[i]);
        assert_memory_equal(task->row, want.row[i], want.n_rows[i]);
        assert_memory_equal(task->rank, want.rank[i], want.n_rows[i]);
    }
    assert_int_equal(plan.n_tasks[LANE_HIT], seen[LANE_HIT]);
    assert_int_equal(plan.n_tasks[LANE_LINK], seen[LANE_LINK]);
}

static void the_plan_is_split_plan(void **unused)
{
    int32_t slot_of[512];
    for (int round = 0; round < 400; round++) {
        int n_rows = 1 + (int)(quant_random(&state) % 8), n_used = 1 + (int)(quant_random(&state) % SPLIT_USED), resident = (int)(quant_random(&state) % 101);
        int n_experts = n_used + (int)(quant_random(&state) % (uint64_t)(513 - n_used));
        for (int e = 0; e < 512; e++)
            slot_of[e] = (int)(quant_random(&state) % 100) < resident ? (int32_t)(quant_random(&state) % 1024) : -1;
        uint32_t r[7];
        for (int i = 0; i < 7; i++)
            r[i] = (uint32_t)(quant_random(&state) % (i % 3 ? 100000 : 8000));
        struct split_costs costs = { r[0], r[1], r[2], r[3], r[4], r[5], r[6], -1 };
        if (round % 4 == 1)
            costs.share = (int32_t)(quant_random(&state) % 257);
        if (round % 4 == 2)
            costs.share = SPLIT_COUNT + (int32_t)(quant_random(&state) % 100);
        if (round % 8 == 3) /* equal costs: the smallest m of several that end together */
            costs = (struct split_costs){ 0, 1000, 0, 1000, 0, 5000, 0, -1 };
        check_plan(n_rows, n_used, n_experts, slot_of, &costs, round & 1);
    }
}

/* ---- experts --------------------------------------------------------------------------------------------------------------------------- */

static void (*experts_kernel(const char *name))(const void *)
{
#define NAMED(type)                                                                                                                                  \
    if (strcmp(name, "dot_experts_" #type "_4") == 0)                                                                                                \
        return dot_experts_##type##_4;                                                                                                               \
    if (strcmp(name, "dot_experts_" #type "_8") == 0)                                                                                                \
        return dot_experts_##type##_8;
    DOT_HOT(NAMED)
#undef NAMED
    assert_string_equal(name, "dot_experts_mixed");
    return dot_experts_mixed;
}

enum { EXPERTS = 5 };

/* n rows that choose 3 of 5 experts each, all hits, against ops_cpu_experts. */
static void check_experts(enum quant_type gate, enum quant_type up, enum quant_type down, int hidden, int width, int n, bool scaled)
{
    enum { USED = 3 };
    struct expert_set set = { .n_experts = EXPERTS, .hidden = hidden, .width = width, .gate = quant_format_find(gate), .up = quant_format_find(up),
                              .down = quant_format_find(down) };
    set.gate_bytes = tile_bytes(set.gate, hidden);
    set.up_bytes = tile_bytes(set.up, hidden);
    set.down_bytes = tile_bytes(set.down, width);
    set.down_offset = (size_t)tile_count(width) * (set.gate_bytes + set.up_bytes);
    set.blob_bytes = set.down_offset + (size_t)tile_count(hidden) * set.down_bytes;
    uint8_t *blobs = room(EXPERTS * set.blob_bytes);
    set.blobs = blobs;
    float scales[3][EXPERTS];
    for (int e = 0; e < EXPERTS; e++) {
        tiles_random(set.gate, width, hidden, blobs + (size_t)e * set.blob_bytes, set.gate_bytes + set.up_bytes);
        tiles_random(set.up, width, hidden, blobs + (size_t)e * set.blob_bytes + set.gate_bytes, set.gate_bytes + set.up_bytes);
        tiles_random(set.down, hidden, width, blobs + (size_t)e * set.blob_bytes + set.down_offset, set.down_bytes);
        for (int i = 0; i < 3; i++)
            scales[i][e] = 0x1p-6f * (float)(1 + e + i);
    }
    if (scaled) {
        set.gate_scale = scales[0];
        set.up_scale = scales[1];
        set.down_scale = scales[2];
    }

    struct expert_task tasks[EXPERTS];
    struct expert_job jobs[EXPERTS];
    int32_t n_tasks = 0;
    for (int e = 0; e < EXPERTS; e++) {
        struct expert_task *task = &tasks[n_tasks];
        memset(task, 0xa5, sizeof *task);
        task->blob = blobs + (size_t)e * set.blob_bytes;
        task->expert = e;
        task->n_rows = 0;
        for (int t = 0; t < n; t++)
            for (int k = 0; k < USED; k++)
                if ((t + 2 * k) % EXPERTS == e) {
                    task->row[task->n_rows] = (uint8_t)t;
                    task->rank[task->n_rows++] = (uint8_t)k;
                }
        jobs[n_tasks] = (struct expert_job){ .expert = e, .n_rows = task->n_rows, .blob = task->blob };
        memcpy(jobs[n_tasks].row, task->row, sizeof task->row);
        memcpy(jobs[n_tasks].rank, task->rank, sizeof task->rank);
        n_tasks += task->n_rows > 0;
    }

    struct activations x = activations_random(hidden);
    struct ops *cpu;
    size_t padded = (size_t)ops_padded(hidden), slots = (size_t)(n * USED), w = (size_t)width;
    float *want = room(slots * padded * 4), *parts = room(slots * padded * 4);
    assert_int_equal(ops_cpu_create(&cpu, ISA_REF, 1, NULL), 0);
    assert_int_equal(ops_cpu_reserve_experts(cpu, width, USED, NULL), 0);
    assert_int_equal(ops_cpu_experts(cpu, USED, &set, &x, jobs, n_tasks, want, 60), -1);
    ops_cpu_destroy(cpu);

    struct dot_experts_args a = {
        .x = rows_of(&x),
        .hidden = { room(slots * (w + 32) * 4), room(slots * w), room(slots * w / 8), room(slots * w / 4), width, ops_padded(width) },
        .tasks = tasks, .n_tasks = &n_tasks, .codebooks = codebooks, .gate_scale = set.gate_scale, .up_scale = set.up_scale, .down_scale = set.down_scale,
        .parts = parts, .gate_bytes = set.gate_bytes, .up_bytes = set.up_bytes, .down_bytes = set.down_bytes, .down_offset = set.down_offset,
        .gate_type = gate, .up_type = up, .down_type = down, .n_used = USED, .parts_stride = (int32_t)padded, .down_is_float = set.down->is_float,
    };
    for (int phase = DOT_GATE_UP; phase <= DOT_DOWN; phase++) {
        a.phase = phase;
        struct launch l = dot_experts_launch(&a, n, MULTIPROCESSORS);
        launch(experts_kernel(dot_experts_kernel(&a, n)), &a, l);
    }
    for (size_t i = 0; i < slots; i++)
        if (!same_bits(want + i * padded, parts + i * padded, (size_t)hidden))
            fail_msg("%s/%s/%s, hidden %d, width %d: row %d, rank %d of %d rows differs from the CPU backend", set.gate->name, set.up->name, set.down->name,
                     hidden, width, (int)i / USED, (int)i % USED, n);
    activations_free(&x);
    free(a.hidden.values);
    free(a.hidden.codes);
    free(a.hidden.scales);
    free(a.hidden.sums);
    free(blobs);
    free(want);
    free(parts);
}

static void experts_give_the_bits_of_the_cpu_backend(void **unused)
{
#define CHECK(type) check_experts(QUANT_##type, QUANT_##type, QUANT_##type, 256, 256, 3, false), check_experts(QUANT_##type, QUANT_##type, QUANT_##type, 256, 256, 8, true);
    DOT_HOT(CHECK)
#undef CHECK
    for (int n = 1; n <= 8; n++)
        check_experts(QUANT_IQ3_S, QUANT_IQ3_S, QUANT_IQ4_NL, 512, 96, n, false);
}

static void experts_of_mixed_formats_give_the_bits_of_the_cpu_backend(void **unused)
{
    for (int n = 1; n <= 8; n += 3) {
        check_experts(QUANT_IQ3_S, QUANT_IQ2_XXS, QUANT_Q5_1, 256, 160, n, true); /* two codebooks in one item */
        check_experts(QUANT_Q4_K, QUANT_Q6_K, QUANT_Q8_0, 512, 96, n, false);
        check_experts(QUANT_IQ1_S, QUANT_IQ1_S, QUANT_NVFP4, 256, 64, n, true);
        check_experts(QUANT_F16, QUANT_F16, QUANT_BF16, 96, 48, n, false); /* a hidden width that is no multiple of 32 */
    }
}

static void no_task_writes_nothing(void **unused)
{
    int32_t none = 0;
    float part[16] = { 1 };
    struct dot_experts_args a = { .x.width = 256, .hidden.width = 256, .n_tasks = &none, .parts = part, .gate_type = QUANT_Q2_0, .up_type = QUANT_Q2_0,
                                  .down_type = QUANT_Q2_0, .phase = DOT_DOWN, .n_used = 1, .parts_stride = 256 };
    launch(dot_experts_Q2_0_4, &a, dot_experts_launch(&a, 1, MULTIPROCESSORS));
    assert_true(part[0] == 1);
}

/* ---- gather ---------------------------------------------------------------------------------------------------------------------------- */

static void gathered_rows_are_decoded_rows(void **unused)
{
    for (uint32_t type = 0; type < QUANT_TYPE_LIMIT; type++) {
        const struct quant_format *format = quant_format_find(type);
        if (!format)
            continue;
        int width = format->is_float ? 100 : format->block < 160 && 160 % format->block == 0 ? 160 : 512;
        size_t row_bytes = quant_row_bytes(format, width);
        uint8_t *table = room(9 * row_bytes + 1);
        for (int r = 0; r < 9; r++)
            row_random(format, width, table + 1 + (size_t)r * row_bytes); /* a row may begin anywhere */
        uint64_t ids[5] = { 8, 0, 3, 3, 7 };
        float got[5][512], want[512];
        struct dot_gather_args a = { table + 1, ids, codebooks, &got[0][0], row_bytes, (int32_t)type, width, 5 };
        launch(dot_gather, &a, dot_gather_launch(&a));
        for (int i = 0; i < 5; i++) {
            quant_decode(format, table + 1 + ids[i] * row_bytes, width, want);
            if (!same_bits(want, &got[0][0] + i * width, (size_t)width))
                fail_msg("%s: row %d differs from quant_decode", format->name, (int)ids[i]);
        }
        free(table);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_format_gives_the_bits_of_the_definition),
        cmocka_unit_test(matrices_of_different_formats_share_a_launch),
        cmocka_unit_test(inputs_wider_than_a_block_has_warps),
        cmocka_unit_test(the_plan_is_split_plan),
        cmocka_unit_test(experts_give_the_bits_of_the_cpu_backend),
        cmocka_unit_test(experts_of_mixed_formats_give_the_bits_of_the_cpu_backend),
        cmocka_unit_test(no_task_writes_nothing),
        cmocka_unit_test(gathered_rows_are_decoded_rows),
    };
    dot_codebooks_fill(codebooks);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
