/* dot_experts.cuh - the routed experts of one lane: items of all tasks in one launch per phase. The text of dot_experts.cu and of
 * dot_any.cu. */
#ifndef OPS_CUDA_DOT_EXPERTS_CUH
#define OPS_CUDA_DOT_EXPERTS_CUH

#include "ops/cuda/dot.cuh"
#include "ops/math.h"

enum { ANY_TYPE = -1 };
typedef void strands_any_fn(int type, bool wide, const struct dot_rows *x, int n_columns, const struct dot_tiles *w);

/* silu(gate)*up of 32 hidden values of each row, a warp a row, and their A8 form: what the down projection reads. */
DEVICE_FN void hidden_write(const struct dot_experts_args *a, const struct expert_task *task, int group, int part, int columns)
{
    DYNAMIC_SHARED(int32_t, shared);
    int strands = dot_strand_count(a->x.width), pair = lane_id() >> 4, row = lane_id() & 15, index = 32 * group + lane_id();
    for (int t = warp_id(); t < task->n_rows; t += (int)(blockDim.x >> 5)) {
        float gate = 0, up = 0;
        if (index < a->hidden.width) {
            gate = dot_total(part, strands, columns, 2 * pair, row, t);
            up = dot_total(part, strands, columns, 2 * pair + 1, row, t);
        }
        if (a->gate_scale)
            gate *= a->gate_scale[task->expert];
        if (a->up_scale)
            up *= a->up_scale[task->expert];
        float value = math_silu(gate) * up;
        size_t at = (size_t)shared[SHARED_HIDDEN_AT + t];
        if (a->down_is_float) {
            if (index < a->hidden.width)
                a->hidden.values[at * (size_t)a->hidden.stride + (size_t)index] = value;
        } else {
            size_t groups = (size_t)(a->hidden.width / 32), k = at * groups + (size_t)group;
            a8_group(value, a->hidden.codes + 32 * k, a->hidden.scales + k, a->hidden.sums + 2 * k);
        }
    }
}

DEVICE_FN void parts_write(const struct dot_experts_args *a, const struct expert_task *task, int first, int n_tiles, int part, int columns)
{
    DYNAMIC_SHARED(int32_t, shared);
    int strands = dot_strand_count(a->hidden.width);
    for (int k = (int)threadIdx.x; k < task->n_rows * n_tiles * 16; k += (int)blockDim.x) {
        int t = k / (n_tiles * 16), row = k % (n_tiles * 16);
        float total = dot_total(part, strands, columns, row / 16, row % 16, t);
        if (a->down_scale)
            total *= a->down_scale[task->expert];
        a->parts[(size_t)shared[SHARED_HIDDEN_AT + t] * (size_t)a->parts_stride + (size_t)(first * 16 + row)] = total;
    }
}

/* Tiles of an item of the down projection: no more than let every block have one, in whole turns of the block's warps. */
DEVICE_FN int down_item_tiles(const struct dot_experts_args *a, int n_tasks, int tiles)
{
    int at_once = dot_place(a->hidden.width).tiles, n = (n_tasks * tiles + (int)gridDim.x - 1) / (int)gridDim.x;
    n = (n + at_once - 1) / at_once * at_once;
    return n < a->max_item_tiles ? n : a->max_item_tiles;
}

/* `type`: of all matrices of the phase, or ANY_TYPE, and then `any` multiplies. */
DEVICE_FN void experts(const struct dot_experts_args *a, int type, bool wide, strands_any_fn *any)
{
    DYNAMIC_SHARED(int32_t, shared);
    bool up = a->phase == DOT_GATE_UP;
    int columns = wide ? 8 : 4, n_tasks = *a->n_tasks, filled = -1; /* the codebook in shared memory */
    if (n_tasks == 0)
        return;
    int tiles = (up ? a->hidden.width + 15 : a->parts_stride) / 16, item_tiles = up ? 2 : down_item_tiles(a, n_tasks, tiles);
    int items_per_task = (tiles + item_tiles - 1) / item_tiles;
    int first_type = type != ANY_TYPE ? type : up ? a->gate_type : a->down_type, second_type = type != ANY_TYPE || !up ? first_type : a->up_type;
    bool table = (dot_codebook_bytes(first_type) | dot_codebook_bytes(second_type)) > 0;
    int part = shared_part(table, columns);
    struct dot_rows x = up ? a->x : a->hidden;

    for (int item = (int)blockIdx.x; item < n_tasks * items_per_task; item += (int)gridDim.x) {
        const struct expert_task *task = &a->tasks[item / items_per_task];
        int first = item % items_per_task * item_tiles, n_tiles = tiles - first < item_tiles ? tiles - first : item_tiles, n_rows = task->n_rows;
        if (threadIdx.x < DOT_MAX_ROWS) {
            int t = (int)threadIdx.x < n_rows ? (int)threadIdx.x : n_rows - 1;
            shared[SHARED_HIDDEN_AT + threadIdx.x] = task->row[t] * a->n_used + task->rank[t];
            shared[SHARED_AT + threadIdx.x] = up ? task->row[t] : task->row[t] * a->n_used + task->rank[t];
        }
        /* Gate and up lie side by side, tile by tile: one pass over both, or two where their formats may differ. */
        uint64_t stride = up ? a->gate_bytes + a->up_bytes : a->down_bytes;
        struct dot_tiles w = { task->blob + (up ? 0 : a->down_offset) + (uint64_t)first * stride, stride, n_tiles, shared_scales(table), part, 1 };
        int passes = 1;
        if (up && type != ANY_TYPE) {
            w.stride = a->gate_bytes;
            w.n = 2 * n_tiles;
        } else if (up) {
            w.part_tiles = passes = 2;
        }
        for (int pass = 0; pass < passes; pass++) {
            int now = pass ? second_type : first_type;
            if (pass) {
                w.tiles += a->gate_bytes;
                w.part += dot_strand_count(x.width) * 16 * columns;
            }
            if (dot_codebook_bytes(now) && filled != dot_codebook_at(now)) {
                if (pass)
                    __syncthreads(); /* the first pass still reads the other one */
                table_fill(now, a->codebooks);
                filled = dot_codebook_at(now);
            }
            __syncthreads();
            if (type == ANY_TYPE)
                any(now, wide, &x, n_rows, &w);
            else
                dot_strands(type, wide, &x, n_rows, &w);
        }
        __syncthreads();
        if (up)
            hidden_write(a, task, first / 2, part, columns);
        else
            parts_write(a, task, first, n_tiles, part, columns);
        __syncthreads();
    }
}

#endif
