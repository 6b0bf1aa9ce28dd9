/* dot_args.h - what the kernels with weights are told (dot_any.cu, dot_experts.cu, dot_plan.cu, dot_gather.cu), and how to launch them.
 *
 * One struct per kernel, passed by value; C on the host and the kernels read the same text. Pointers are device pointers (device memory, or mapped
 * host memory where that is said). Structs hold shapes and fixed places only, because a launch is recorded in a graph: what varies from window to
 * window lies behind the pointers. Tiles and blobs begin at multiples of 16 bytes, activations at multiples of 64.
 *
 * How a product is cut up: a warp owns one strand (256 columns) of 16 rows and keeps its activations in registers while it walks over the tiles of
 * an item; a block owns an item, a few tiles by all their strands, and adds the strands left to right. Blocks take items until none is left.
 */
#ifndef OPS_CUDA_DOT_ARGS_H
#define OPS_CUDA_DOT_ARGS_H

#include "base/half.h"
#include "expert/split.h"
#include "ops/cuda/launch.h"
#include "quant/quant.h"

#include <stddef.h>
#include <stdint.h>

enum {
    DOT_MAX_ROWS = 8,          /* KERNEL_MAX_ROWS */
    DOT_MAX_MATRICES = 8,
    DOT_MAX_WARPS = 10,        /* 2560 columns: one strand a warp. Two such blocks a multiprocessor leave 96 registers a thread */
    DOT_BLOCKS = 2,            /* per multiprocessor */
    DOT_ROWS_BYTES = 64,       /* dynamic shared memory begins with lists of rows, then the codebook, scales, strands' sums */
    DOT_SCALES_BYTES = 96,     /* a warp and column: the activations' scales and sums */
    DOT_TABLE_BYTES = 32768,   /* a codebook in shared memory, with as many copies as fit: lanes that read different entries then rarely meet in a bank */
    DOT_PARTS_BYTES = 20480,   /* strands' sums of one item in shared memory, if one tile allows it */
    DOT_CODEBOOKS_BYTES = 33792,
    DOT_EXPERT_TILES = 4,      /* an item of gate and up: 32 hidden values, which A8 quantizes together */
};

/* Rows of activations: struct activations of ops.h on the device. */
struct dot_rows {
    float *values;     /* [rows][stride] */
    int8_t *codes;     /* [rows][width], A8 order */
    float *scales;     /* [rows][width/32] */
    int32_t *sums;     /* [rows][width/16] */
    int32_t width, stride;
};

/* ---- matmul: out[t][row] = scale * w[row] x[t] for every matrix ---------------------------------------------------------------------- */

struct dot_matrix {
    const uint8_t *tiles;
    uint64_t stride;         /* bytes from tile to tile */
    float *out;              /* [n][out_stride] */
    int32_t type, tiles_count, out_stride;
    int32_t item_tiles, first_item;
    float scale;
};

struct dot_matmul_args {
    struct dot_rows x;
    struct dot_matrix w[DOT_MAX_MATRICES];
    const uint8_t *codebooks; /* dot_codebooks_fill */
    int32_t n, n_matrices, n_items, has_table;
};

/* ---- plan: split_plan by one block, and the tasks of the device's lanes ---------------------------------------------------------------- */

struct expert_task {
    const uint8_t *blob;
    int32_t expert, n_rows;
    uint8_t row[SPLIT_ROWS], rank[SPLIT_ROWS];
};

struct expert_plan {
    struct split split;
    int32_t n_tasks[2];                      /* LANE_HIT, LANE_LINK */
    struct expert_task tasks[2][SPLIT_MAX];  /* in the split's order */
};

struct dot_plan_args {
    const int32_t *ids;                /* [n_rows][stride] */
    const int32_t *slot_of;            /* [n_experts] */
    const struct split_costs *costs;   /* mapped host memory */
    const uint8_t *slots;
    const uint64_t *offsets;           /* [n_slots], where a slot begins */
    const uint8_t *link;               /* the blobs of the link lane: in mapped host memory [n_experts], or staged [SPLIT_MAX] in task order */
    uint64_t link_stride;
    struct expert_plan *plan;
    uint32_t *sum;                     /* split_sum of the plan, in mapped host memory; NULL: not wanted */
    int32_t stride, n_rows, n_used, link_staged;
};

/* ---- experts: one launch for gate and up of a lane's tasks, one for down --------------------------------------------------------------- */

enum dot_phase { DOT_GATE_UP, DOT_DOWN };

/* Formats that experts usually come in have kernels of their own. */
#define DOT_HOT(X) X(Q2_0) X(IQ2_XXS) X(IQ2_XS) X(IQ2_S) X(IQ3_XXS) X(IQ3_S) X(IQ4_NL) X(IQ4_XS) X(Q4_K) X(Q5_K) X(Q6_K) X(Q8_0) X(MXFP4)

struct dot_experts_args {
    struct dot_rows x;                 /* the layer's input */
    struct dot_rows hidden;            /* [n * n_used] rows: silu(gate)*up of (row, rank), written by DOT_GATE_UP */
    const struct expert_task *tasks;
    const int32_t *n_tasks;
    const uint8_t *codebooks;
    const float *gate_scale, *up_scale, *down_scale; /* [n_experts] or NULL */
    float *parts;                      /* [n * n_used][parts_stride] */
    uint64_t gate_bytes, up_bytes, down_bytes, down_offset;
    int32_t gate_type, up_type, down_type;
    int32_t phase, n_used, parts_stride;
    int32_t max_item_tiles, down_is_float;
};

/* ---- gather: rows of the file's layout, decoded --------------------------------------------------------------------------------------- */

struct dot_gather_args {
    const uint8_t *table;     /* device memory or mapped host memory */
    const uint64_t *ids;      /* [n] */
    const uint8_t *codebooks;
    float *out;               /* [n][width] */
    uint64_t row_bytes;
    int32_t type, width, n;
};

/* ---- Launching -------------------------------------------------------------------------------------------------------------------------- */

/* shared_bytes may be more than 48 KB, up to about 64: the function attribute must allow it. */

HOST_DEVICE int32_t dot_strand_count(int32_t width) { return (width + 255) / 256; }
/* Kernels exist for up to 4 and for up to 8 rows ("_4", "_8"): the tensor cores' 8 columns hold 4 or 8 of them. */
static inline int32_t dot_columns(int32_t n) { return n <= 4 ? 4 : 8; }

/* One warp a strand, or as many columns of tiles as fit, or the fewest rounds over the strands. */
static inline int32_t dot_warps(int32_t width)
{
    int32_t strands = dot_strand_count(width), rounds = (strands + DOT_MAX_WARPS - 1) / DOT_MAX_WARPS;
    return rounds > 1 ? (strands + rounds - 1) / rounds : DOT_MAX_WARPS / strands * strands;
}

static inline int32_t dot_tile_parts_bytes(int32_t width, int32_t columns) { return dot_strand_count(width) * 16 * columns * 4; }

/* Tiles an item may have. */
static inline int32_t dot_max_item_tiles(int32_t width, int32_t columns)
{
    int32_t tiles = DOT_PARTS_BYTES / dot_tile_parts_bytes(width, columns);
    return tiles < 1 ? 1 : tiles > 16 ? 16 : tiles;
}

/* Bytes of a format's codebook in dot_codebooks_fill's buffer, and where it begins; 0: none. */
HOST_DEVICE int32_t dot_codebook_bytes(int32_t type)
{
    return type == QUANT_IQ2_XXS ? 2048 : type == QUANT_IQ2_XS ? 4096 : type == QUANT_IQ2_S ? 8192 : type == QUANT_IQ3_XXS ? 1024
         : type == QUANT_IQ3_S ? 2048 : type == QUANT_IQ1_S || type == QUANT_IQ1_M ? 16384 : 0;
}

enum { DOT_AT_IQ1 = 0, DOT_AT_IQ2_S = 16384, DOT_AT_IQ2_XS = 24576, DOT_AT_IQ2_XXS = 28672, DOT_AT_IQ3_S = 30720, DOT_AT_IQ3_XXS = 32768 };

HOST_DEVICE int32_t dot_codebook_at(int32_t type)
{
    return type == QUANT_IQ2_XXS ? DOT_AT_IQ2_XXS : type == QUANT_IQ2_XS ? DOT_AT_IQ2_XS : type == QUANT_IQ2_S ? DOT_AT_IQ2_S
         : type == QUANT_IQ3_XXS ? DOT_AT_IQ3_XXS : type == QUANT_IQ3_S ? DOT_AT_IQ3_S : DOT_AT_IQ1;
}

#ifndef __CUDACC__
/* The codebooks as kernels read them, DOT_CODEBOOKS_BYTES: upload once. IQ1's three values are stored as 0, 8, 16: eighths, one up. */
static inline void dot_codebooks_fill(uint8_t *out)
{
    for (int i = 0; i < 2048; i++)
        for (int j = 0; j < 8; j++)
            out[DOT_AT_IQ1 + 8 * i + j] = (uint8_t)(8 * (quant_grid_iq1s[i][j] + 1));
    __builtin_memcpy(out + DOT_AT_IQ2_S, quant_grid_iq2s, sizeof quant_grid_iq2s);
    __builtin_memcpy(out + DOT_AT_IQ2_XS, quant_grid_iq2xs, sizeof quant_grid_iq2xs);
    __builtin_memcpy(out + DOT_AT_IQ2_XXS, quant_grid_iq2xxs, sizeof quant_grid_iq2xxs);
    __builtin_memcpy(out + DOT_AT_IQ3_S, quant_grid_iq3s, sizeof quant_grid_iq3s);
    __builtin_memcpy(out + DOT_AT_IQ3_XXS, quant_grid_iq3xxs, sizeof quant_grid_iq3xxs);
}

/* Shares the matrices' tiles out (item_tiles, first_item, n_items, has_table of `a`; everything else is set) for `multiprocessors` of them. Kernel
 * "dot_matmul_4" or "dot_matmul_8". */
static inline struct launch dot_matmul_launch(struct dot_matmul_args *a, int32_t multiprocessors)
{
    int32_t columns = dot_columns(a->n), warps = dot_warps(a->x.width), blocks = DOT_BLOCKS * multiprocessors, total = 0, most = 0;
    int32_t at_once = warps >= dot_strand_count(a->x.width) ? warps / dot_strand_count(a->x.width) : 1;
    a->has_table = a->n_items = 0;
    for (int32_t i = 0; i < a->n_matrices; i++)
        total += a->w[i].tiles_count;
    int32_t tiles = (total + blocks - 1) / blocks, limit = dot_max_item_tiles(a->x.width, columns);
    tiles = (tiles + at_once - 1) / at_once * at_once;
    tiles = tiles > limit ? limit : tiles;
    for (int32_t i = 0; i < a->n_matrices; i++) {
        struct dot_matrix *w = &a->w[i];
        w->item_tiles = tiles < w->tiles_count ? tiles : w->tiles_count;
        w->first_item = a->n_items;
        a->n_items += (w->tiles_count + w->item_tiles - 1) / w->item_tiles;
        a->has_table |= dot_codebook_bytes(w->type) > 0;
        most = w->item_tiles > most ? w->item_tiles : most;
    }
    int32_t shared = DOT_ROWS_BYTES + (a->has_table ? DOT_TABLE_BYTES : 0) + warps * columns * DOT_SCALES_BYTES + most * dot_tile_parts_bytes(a->x.width, columns);
    return (struct launch){ (unsigned)(a->n_items < blocks ? a->n_items : blocks), 1, 1, 32u * (unsigned)warps, (unsigned)shared };
}

/* Sets max_item_tiles. `n`: rows of the window. */
static inline struct launch dot_experts_launch(struct dot_experts_args *a, int32_t n, int32_t multiprocessors)
{
    int32_t up = a->phase == DOT_GATE_UP, width = up ? a->x.width : a->hidden.width, columns = dot_columns(n), blocks = DOT_BLOCKS * multiprocessors;
    int32_t tiles_per_task = up ? (a->hidden.width + 31) / 32 : a->parts_stride / 16, items = n * a->n_used * tiles_per_task;
    int32_t table = up ? dot_codebook_bytes(a->gate_type) | dot_codebook_bytes(a->up_type) : dot_codebook_bytes(a->down_type);
    a->max_item_tiles = up ? DOT_EXPERT_TILES : dot_max_item_tiles(width, columns);
    int32_t shared = DOT_ROWS_BYTES + (table ? DOT_TABLE_BYTES : 0) + dot_warps(width) * columns * DOT_SCALES_BYTES + a->max_item_tiles * dot_tile_parts_bytes(width, columns);
    return (struct launch){ (unsigned)(items < blocks ? items : blocks), 1, 1, 32u * (unsigned)dot_warps(width), (unsigned)shared };
}

/* The kernel of a phase: one per hot format, for both phases, and "dot_experts_mixed" for the others and where gate and up differ. */
static inline const char *dot_experts_kernel(const struct dot_experts_args *a, int32_t n)
{
    static const char *const names[QUANT_TYPE_LIMIT][2] = {
#define DOT_NAME(type) [QUANT_##type] = { "dot_experts_" #type "_4", "dot_experts_" #type "_8" },
        DOT_HOT(DOT_NAME)
#undef DOT_NAME
    };
    int32_t type = a->phase == DOT_DOWN ? a->down_type : a->gate_type;
    if ((a->phase == DOT_GATE_UP && a->up_type != a->gate_type) || !names[type][0])
        return "dot_experts_mixed";
    return names[type][n > 4];
}

static inline struct launch dot_plan_launch(const struct dot_plan_args *a) { return (struct launch){ 1, 1, 1, SPLIT_MAX, 0 }; }

/* A thread decodes a group of 32, or one float. Kernel "dot_gather". */
static inline struct launch dot_gather_launch(const struct dot_gather_args *a)
{
    return (struct launch){ (unsigned)(a->n * ((a->width + 31) / 32) + 127) / 128, 1, 1, 128, 0 };
}
#endif

#endif
