/* kernels.h - the CPU's kernels: one thread's share of each operation, as a table that a ladder of instruction sets fills.
 *
 * `ref` sets every entry in plain C and is the definition of every bit (design.md section 2). AVX2 replaces the entries it has,
 * AVX-512 replaces again; all give the same bits (tests: `checkops`). Kernels know nothing of threads, models or where the memory
 * came from; ops/cpu.c shares an operation out over threads. The table is filled once, at start.
 *
 * A quirk of a processor may choose between versions of one entry, never between results. None does so far: gathers, the usual one, lost
 * to scalar loads even where they are fast (docs/LEARNED.md #8).
 */
#ifndef OPS_KERNELS_H
#define OPS_KERNELS_H

#include "quant/tile.h"

enum { KERNEL_MAX_ROWS = 8 };

/* One row of activations as the dot products read it. Quantized weights read the A8 part (rule 2), float weights read `values`.
 * Rows of a window lie `width` apart: only the first is aligned to more than its elements. */
struct dot_input {
    const float *values;   /* [width] */
    const int8_t *codes;   /* [width], in A8 order (quant/tile.h), -127..127 */
    const float *scales;   /* [width/32] */
    const int32_t *sums;   /* [width/16]: sum of the codes of each half group */
};

enum isa { ISA_REF, ISA_AVX2, ISA_AVX512, ISA_COUNT };

/* Products of `n_tiles` tiles with `n_rows` (1..KERNEL_MAX_ROWS) rows of activations: out[t][16*i + r] = row r of tile i times row t.
 * Tiles are `stride` bytes apart (>= tile_bytes). out[t] has room for 16*n_tiles floats. The order of every sum is rule 2 (quantized) or
 * rule 3 (float). Padding rows of the last tile give values nobody reads. */
typedef void dot_tiles_fn(const uint8_t *tiles, size_t stride, int n_tiles, int width, const struct dot_input *in, int n_rows, float *const *out);

struct kernels {
    const char *name; /* "ref", "avx2", "avx512" */
    dot_tiles_fn *dot[QUANT_TYPE_LIMIT]; /* by quant_type; NULL for ids that do not exist */
    /* A8: `values` [width] -> codes, scales, sums as in struct dot_input; width is a multiple of 32. */
    void (*quantize)(const float *values, int width, int8_t *codes, float *scales, int32_t *sums);
    const struct vector_kernels *vector; /* everything that is not a matrix (ops/vector.h) */
};

/* The best instruction set of this processor, capped by the environment variable STRATA_ISA=ref|avx2|avx512. */
enum isa isa_detect(void);
const struct kernels *kernels_get(enum isa isa); /* NULL if this processor lacks the instruction set */

/* One step of the ladder each (ops/x86/): overwrites the entries it has. */
void kernels_avx2(struct kernels *k);
void kernels_avx512(struct kernels *k);

#endif
