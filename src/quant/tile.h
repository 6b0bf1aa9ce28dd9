/* tile.h - matrices in tiles of 16 rows: the layout that RAM, VRAM and the link share.
 *
 * A tile holds 16 consecutive rows of a matrix in exactly the bytes that the file uses (16 * row bytes), re-ordered so that one
 * vector lane (or one GPU thread) owns one row. A row count that is not a multiple of 16 is padded with zero rows (all bytes 0;
 * every format decodes such a row to finite values, and nobody reads the results). This file is the layout's definition; packing
 * and unpacking are exact inverses (tests/test_tile.c).
 *
 * A tile is a sequence of *strands*: 256 columns each, the last may be short. A strand with n groups of 32 columns (n = 1..8) is
 * a sequence of sections, in the order of the table below. Inside a section, things are ordered by group g, then as the section says.
 *
 * Vectors. A group's 32 columns of 16 rows form eight vectors m = 0..7 of 64 bytes: vector m = 4h+j holds at byte 4r+q the code of
 * row r, column 16h + 4q + j (h, q, j: 0..1, 0..3, 0..3). So 32-bit lane r of vector m holds four codes of row r. The activations
 * are stored in the matching order ("A8 order": position 16h + 4j + q of a group holds column 16h + 4q + j), hence dword m of a
 * group's activations, broadcast to all lanes, times vector m gives all 16 rows four products each.
 *
 *   section   bytes a group   content
 *   byte        512   vectors m = 0..7, one byte a code
 *   nib4        256   vectors p = 0..3: low nibble = code of vector m = p, high nibble = code of vector m = p + 4
 *   bit2        128   vectors h = 0..1: bits 2j..2j+1 = code of vector m = 4h + j
 *   bit1         64   one vector: bit m = bit of vector m
 *   idx4        128   vectors h = 0..1: byte 4r+q = low 8 bits of the codebook index of row r, columns 16h+4q .. +3
 *   idx8         64   h = 0..1, 32 bytes each: byte 2r+i = low 8 bits of the codebook index of row r, columns 16h + 8i .. +7
 *   hi4b         16   h = 0..1, a 64-bit mask each: bit 4r+q = ninth bit of the idx4 index
 *   hi8b      8 each  per h = 0..1 and extra bit b = 0..: a 32-bit mask: bit 2r+i = bit 8+b of the idx8 index (so 8 bytes per extra
 *                     bit and group, ordered h, then b)
 *   sign7        64   bit1 layout holding the 7 stored sign bits of every 8 columns; the 8 columns 16h + 8i .. +7 have the bits
 *                     (q = 2i, j = 0..3) and (q = 2i+1, j = 0..2); the eighth (q = 2i+1, j = 3) is their parity and is not stored.
 *                     Its place holds something else: bit f = 2i + h of the four free bits of row r in this group,
 *                     that is bit (4h + 3) of byte 4r + 2i + 1
 *   nibs          8   a 4-bit number per row: byte i (0..7) = row i low nibble, row i + 8 high nibble
 *   two           4   a 2-bit number per row: byte i (0..3), bits 2k..2k+1 = row i + 4k
 *   s8h          32   h = 0..1, 16 bytes each: one byte per row and half
 *   s8           16   one byte per row
 *   nibsh        16   h = 0..1, a nibs section each;   twoh 8: h = 0..1, a two section each
 *   f16          32   one binary16 per row, per group (formats with block 32); f16/64, f16/128, f16/256: one per 64, 128 or 256 columns
 *
 *   format    sections of a strand
 *   F32, F16, BF16: no strands: column k is 16 values (row 0..15) at index 16k
 *   Q8_0      byte, f16                          Q1_0     bit1, f16/128
 *   Q2_0      bit2, f16/64                       MXFP4    nib4, s8 (e)
 *   Q4_0      nib4, f16 (d)                      NVFP4    nib4, s8h (the UE4M3 scales)
 *   Q4_1      nib4, f16 (d), f16 (m)             IQ4_NL   nib4, f16
 *   Q5_0      nib4, bit1 (fifth bit), f16        IQ4_XS   nib4, nibs (low 4 bits of s), two (high 2 bits), f16/256
 *   Q5_1      nib4, bit1, f16 (d), f16 (m)
 *   Q2_K      bit2, s8h (scales byte: scale low nibble, min high), f16/256 (d), f16/256 (dmin)
 *   Q3_K      bit2, bit1 (hmask), nibsh (low 4 bits of s), twoh (high 2 bits of s), f16/256
 *   Q4_K      nib4, nibs (low 4 bits of sc), nibs (low 4 of mn), nibs (sc >> 4 | (mn >> 4) << 2), f16/256 (d), f16/256 (dmin)
 *   Q5_K      nib4, bit1 (fifth bit), then as Q4_K
 *   Q6_K      nib4 (low 4 bits), bit2 (high 2 bits), s8h (int8 scales), f16/256
 *   IQ3_S     idx4, hi4b, bit1 (signs), nibs (scale), f16/256
 *   IQ3_XXS   idx4, sign7 (free bits: bit f of the 4-bit scale), f16/256
 *   IQ2_XXS   idx8, sign7 (free bits: bit f of the 4-bit scale), f16/256
 *   IQ2_XS    idx8, sign7 (free bit (i, h): ninth bit of the index of columns 16h + 8i .. +7), s8 (scales byte: low nibble h = 0), f16/256
 *   IQ2_S     idx8, hi8b (2 extra bits), bit1 (signs), s8 (scales byte: low nibble h = 0), f16/256
 *   IQ1_S     idx8, hi8b (3 extra bits), nibs (3-bit scale | delta sign << 3), f16/256
 *   IQ1_M     idx8, hi8b (3 extra bits), hi8b-like delta masks (h: 32 bits, bit 2r+i = delta sign), then h = 0..1 and b = 0..2: a
 *             16-bit mask, bit r = bit b of the 3-bit scale of half h; f16/256 (the d assembled from the four nibbles)
 */
#ifndef QUANT_TILE_H
#define QUANT_TILE_H

#include "quant/quant.h"

enum { TILE_ROWS = 16, TILE_STRAND = 256 };

/* Position of column c (0..31) of a group in A8 order; its own inverse. */
static inline int tile_a8_position(int c) { return (c & 16) | (c & 3) << 2 | (c >> 2 & 3); }

/* Bytes of one tile = 16 rows of `width` columns. */
size_t tile_bytes(const struct quant_format *format, int64_t width);
static inline int64_t tile_count(int64_t rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }

/* rows: `n_rows` (1..16) rows in file layout, quant_row_bytes apart; missing rows are taken as zero bytes. */
void tile_pack(const struct quant_format *format, int64_t width, const uint8_t *rows, int n_rows, uint8_t *tile);
/* The exact inverse: writes 16 rows. */
void tile_unpack(const struct quant_format *format, int64_t width, const uint8_t *tile, uint8_t *rows);

#endif
