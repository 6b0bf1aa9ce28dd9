/* Packing is a permutation of bits, so it is written as data: a table of kinds of section (where a field lies in a tile), a table
 * of formats (where the same field lies in a row of the file), and one loop that moves fields in either direction. Pack and
 * unpack cannot disagree, because they are the same loop over the same places.
 *
 * A field is addressed by digits, of which the column of a strand is made: c = 128*g2 + 64*g1 + 32*g0 + 16*h + 8*i + 4*e + j, where
 * j counts to 4 and the others to 2 (the q of tile.h is 2i + e). A field's place in bits is a sum of digit times stride on
 * both sides. */
#include "quant/tile.h"

#include <assert.h>
#include <string.h>

enum { J, E, I, H, G0, G1, G2, DIGITS };

/* clang-format off */
enum kind {
    NONE, BYTE, NIB4, BIT2, BIT1, IDX4, IDX8, HI4B, HI8B1, HI8B2, HI8B3, SIGN7_LOW, SIGN7_HIGH, SIGN7_FREE,
    NIBS, NIBS_LOW2, NIBS_HIGH2, TWO, S8, NIBSH, TWOH, S8H, MASK3, F16,
};

/* The tile's side. All numbers but counts are bits. */
static const struct {
    uint8_t bits;                 /* of one field */
    uint8_t count[4];             /* values of the digits j, e, i, h */
    uint16_t stride[4];           /* and the distance that one step of each makes */
    uint8_t row, fold, over;      /* row r lies at r % fold * row + r / fold * over */
    uint8_t at;                   /* of the first field */
    uint16_t size;                /* of the section, per group (F16: per block) */
    bool joins;                   /* fills gaps of the section before it */
} kinds[] = {
    [BYTE]       = { 8, { 4, 2, 2, 2 }, { 512, 8, 16, 2048 }, 32, 16, 0, 0, 4096 },
    [NIB4]       = { 4, { 4, 2, 2, 2 }, { 512, 8, 16, 4 }, 32, 16, 0, 0, 2048 },
    [BIT2]       = { 2, { 4, 2, 2, 2 }, { 2, 8, 16, 512 }, 32, 16, 0, 0, 1024 },
    [BIT1]       = { 1, { 4, 2, 2, 2 }, { 1, 8, 16, 4 }, 32, 16, 0, 0, 512 },
    [IDX4]       = { 8, { 1, 2, 2, 2 }, { 0, 8, 16, 512 }, 32, 16, 0, 0, 1024 },
    [IDX8]       = { 8, { 1, 1, 2, 2 }, { 0, 0, 8, 256 }, 16, 16, 0, 0, 512 },
    [HI4B]       = { 1, { 1, 2, 2, 2 }, { 0, 1, 2, 64 }, 4, 16, 0, 0, 128 },
    [HI8B1]      = { 1, { 1, 1, 2, 2 }, { 0, 0, 1, 32 }, 2, 16, 0, 0, 64 },
    [HI8B2]      = { 1, { 2, 1, 2, 2 }, { 32, 0, 1, 64 }, 2, 16, 0, 0, 128 }, /* digit j is the extra bit */
    [HI8B3]      = { 1, { 3, 1, 2, 2 }, { 32, 0, 1, 96 }, 2, 16, 0, 0, 192 },
    [SIGN7_LOW]  = { 1, { 4, 1, 2, 2 }, { 1, 0, 16, 4 }, 32, 16, 0, 0, 512 }, /* signs 0..3 of every 8 columns */
    [SIGN7_HIGH] = { 1, { 3, 1, 2, 2 }, { 1, 0, 16, 4 }, 32, 16, 0, 8, 512, true },   /* signs 4..6 */
    [SIGN7_FREE] = { 1, { 1, 1, 2, 2 }, { 0, 0, 16, 4 }, 32, 16, 0, 11, 512, true },
    [NIBS]       = { 4, { 1, 1, 1, 1 }, { 0 }, 8, 8, 4, 0, 64 },
    [NIBS_LOW2]  = { 2, { 1, 1, 1, 1 }, { 0 }, 8, 8, 4, 0, 64 },
    [NIBS_HIGH2] = { 2, { 1, 1, 1, 1 }, { 0 }, 8, 8, 4, 2, 64, true },
    [TWO]        = { 2, { 1, 1, 1, 1 }, { 0 }, 8, 4, 2, 0, 32 },
    [S8]         = { 8, { 1, 1, 1, 1 }, { 0 }, 8, 16, 0, 0, 128 },
    [NIBSH]      = { 4, { 1, 1, 1, 2 }, { 0, 0, 0, 64 }, 8, 8, 4, 0, 128 },
    [TWOH]       = { 2, { 1, 1, 1, 2 }, { 0, 0, 0, 32 }, 8, 4, 2, 0, 64 },
    [S8H]        = { 8, { 1, 1, 1, 2 }, { 0, 0, 0, 128 }, 8, 16, 0, 0, 256 },
    [MASK3]      = { 1, { 3, 1, 1, 2 }, { 16, 0, 0, 48 }, 1, 16, 0, 0, 96 }, /* IQ1_M's scales: digit j is the bit */
    [F16]        = { 4, { 2, 2, 1, 1 }, { 4, 8, 0, 0 }, 16, 16, 0, 0, 256 }, /* by nibbles, because IQ1_M scatters them */
};
/* clang-format on */

/* The file's side: where in the block the first field lies, and the stride of each digit. The order is the tile's order of
 * sections. */
struct section {
    enum kind kind;
    uint16_t at;
    uint16_t stride[DIGITS]; /* j, e, i, h, g0, g1, g2 */
};

/* clang-format off */
#define D(byte) { F16, 8 * (byte), { 4, 8 } }
#define QS4(byte) { NIB4, 8 * (byte), { 8, 32, 64, 4 } } /* low nibbles are columns 0..15 of the group, high nibbles 16..31 */

static const struct section formats[QUANT_TYPE_LIMIT][9] = { /* up to 8 sections, then NONE */
    [QUANT_Q8_0]    = { { BYTE, 16, { 8, 32, 64, 128 } }, D(0) },
    [QUANT_Q4_0]    = { QS4(2), D(0) },
    [QUANT_Q4_1]    = { QS4(4), D(0), D(2) },
    [QUANT_Q5_0]    = { QS4(6), { BIT1, 16, { 1, 4, 8, 16 } }, D(0) },
    [QUANT_Q5_1]    = { QS4(8), { BIT1, 32, { 1, 4, 8, 16 } }, D(0), D(2) },
    [QUANT_Q1_0]    = { { BIT1, 16, { 1, 4, 8, 16, 32, 64 } }, D(0) },
    [QUANT_Q2_0]    = { { BIT2, 16, { 2, 8, 16, 32, 64 } }, D(0) },
    [QUANT_IQ4_NL]  = { QS4(2), D(0) },
    [QUANT_MXFP4]   = { QS4(1), { S8, 0, { 0 } } },
    [QUANT_NVFP4]   = { { NIB4, 32, { 8, 32, 4, 64, 128 } }, { S8H, 0, { 0, 0, 0, 8, 16 } } },
    [QUANT_IQ4_XS]  = { { NIB4, 64, { 8, 32, 64, 4, 128, 256, 512 } },
                        { NIBS, 32, { 0, 0, 0, 0, 4, 8, 16 } },
                        { TWO, 16, { 0, 0, 0, 0, 2, 4, 8 } },
                        D(0) },
    [QUANT_Q2_K]    = { { BIT2, 128, { 8, 32, 64, 128, 2, 4, 256 } }, { S8H, 0, { 0, 0, 0, 8, 16, 32, 64 } }, D(80), D(82) },
    [QUANT_Q3_K]    = { { BIT2, 256, { 8, 32, 64, 128, 2, 4, 256 } },
                        { BIT1, 0, { 8, 32, 64, 128, 1, 2, 4 } },
                        { NIBSH, 768, { 0, 0, 0, 8, 16, 32, 4 } },
                        { TWOH, 832, { 0, 0, 0, 8, 16, 2, 4 } },
                        D(108) },
    [QUANT_Q4_K]    = { { NIB4, 128, { 8, 32, 64, 128, 4, 256, 512 } },
                        { NIBS, 32, { 0, 0, 0, 0, 8, 16, 64 } },
                        { NIBS, 64, { 0, 0, 0, 0, 8, 16, 36 } },
                        { NIBS_LOW2, 36, { 0, 0, 0, 0, 8, 16, 2 } },
                        { NIBS_HIGH2, 68, { 0, 0, 0, 0, 8, 16, 2 } },
                        D(0),
                        D(2) },
    [QUANT_Q5_K]    = { { NIB4, 384, { 8, 32, 64, 128, 4, 256, 512 } },
                        { BIT1, 128, { 8, 32, 64, 128, 1, 2, 4 } },
                        { NIBS, 32, { 0, 0, 0, 0, 8, 16, 64 } },
                        { NIBS, 64, { 0, 0, 0, 0, 8, 16, 36 } },
                        { NIBS_LOW2, 36, { 0, 0, 0, 0, 8, 16, 2 } },
                        { NIBS_HIGH2, 68, { 0, 0, 0, 0, 8, 16, 2 } },
                        D(0),
                        D(2) },
    [QUANT_Q6_K]    = { { NIB4, 0, { 8, 32, 64, 128, 256, 4, 512 } },
                        { BIT2, 1024, { 8, 32, 64, 128, 2, 4, 256 } },
                        { S8H, 1536, { 0, 0, 0, 8, 16, 32, 64 } },
                        D(208) },
    [QUANT_IQ3_S]   = { { IDX4, 16, { 0, 8, 16, 32, 64, 128, 256 } },
                        { HI4B, 528, { 0, 1, 2, 4, 8, 16, 32 } },
                        { BIT1, 592, { 1, 4, 8, 16, 32, 64, 128 } },
                        { NIBS, 848, { 0, 0, 0, 0, 4, 8, 16 } },
                        D(0) },
    [QUANT_IQ3_XXS] = { { IDX4, 16, { 0, 8, 16, 32, 64, 128, 256 } },
                        { SIGN7_LOW, 528, { 1, 0, 7, 14, 32, 64, 128 } },
                        { SIGN7_HIGH, 532, { 1, 0, 7, 14, 32, 64, 128 } },
                        { SIGN7_FREE, 556, { 0, 0, 2, 1, 32, 64, 128 } },
                        D(0) },
    [QUANT_IQ2_XXS] = { { IDX8, 16, { 0, 0, 8, 16, 64, 128, 256 } },
                        { SIGN7_LOW, 48, { 1, 0, 7, 14, 64, 128, 256 } },
                        { SIGN7_HIGH, 52, { 1, 0, 7, 14, 64, 128, 256 } },
                        { SIGN7_FREE, 76, { 0, 0, 2, 1, 64, 128, 256 } },
                        D(0) },
    [QUANT_IQ2_XS]  = { { IDX8, 16, { 0, 0, 16, 32, 64, 128, 256 } },
                        { SIGN7_LOW, 25, { 1, 0, 16, 32, 64, 128, 256 } },
                        { SIGN7_HIGH, 29, { 1, 0, 16, 32, 64, 128, 256 } },
                        { SIGN7_FREE, 24, { 0, 0, 16, 32, 64, 128, 256 } },
                        { S8, 528, { 0, 0, 0, 0, 8, 16, 32 } },
                        D(0) },
    [QUANT_IQ2_S]   = { { IDX8, 16, { 0, 0, 8, 16, 32, 64, 128 } },
                        { HI8B2, 528, { 1, 0, 2, 4, 8, 16, 32 } },
                        { BIT1, 272, { 1, 4, 8, 16, 32, 64, 128 } },
                        { S8, 592, { 0, 0, 0, 0, 8, 16, 32 } },
                        D(0) },
    [QUANT_IQ1_S]   = { { IDX8, 16, { 0, 0, 8, 16, 32, 64, 128 } },
                        { HI8B3, 272, { 1, 0, 3, 6, 16, 32, 64 } },
                        { NIBS, 284, { 0, 0, 0, 0, 16, 32, 64 } },
                        D(0) },
    [QUANT_IQ1_M]   = { { IDX8, 0, { 0, 0, 8, 16, 32, 64, 128 } },
                        { HI8B3, 256, { 1, 0, 4, 8, 16, 32, 64 } },
                        { HI8B1, 259, { 0, 0, 4, 8, 16, 32, 64 } },
                        { MASK3, 384, { 1, 0, 0, 3, 6, 16, 32 } },
                        { F16, 396, { 16, 32 } } },
};
/* clang-format on */

/* The fields of one section in one block: `bits` wide each, at these bits of the file's and the tile's block. */
struct fields {
    int bits, n;
    struct {
        uint16_t file, tile;
    } place[TILE_STRAND];
};

static void fields_list(const struct section *s, int block, struct fields *out)
{
    int group_digits = s->kind == F16 ? 0 : block == 256 ? 3 : block == 128 ? 2 : block == 64 ? 1 : 0;
    int count[DIGITS], tile[DIGITS];
    for (int digit = 0; digit < DIGITS; digit++) {
        bool group = digit >= G0;
        count[digit] = !group ? kinds[s->kind].count[digit] : digit - G0 < group_digits ? 2 : 1;
        tile[digit] = group ? kinds[s->kind].size << (digit - G0) : kinds[s->kind].stride[digit];
    }
    out->bits = kinds[s->kind].bits;
    /* Neighbours on both sides move together, as long as the wider field keeps inside a byte. */
    for (int digit = 0; digit < DIGITS; digit++) {
        int wider = out->bits * count[digit];
        bool fits =
            count[digit] % 2 == 0 && wider <= 8 && s->stride[digit] == out->bits && tile[digit] == out->bits && s->at % wider == 0;
        for (int other = 0; other < DIGITS; other++)
            fits = fits && (other == digit || count[other] == 1 || s->stride[other] % wider == 0);
        if (fits) {
            out->bits = wider;
            count[digit] = 1;
        }
    }
    out->n = 1;
    out->place[0].file = s->at;
    out->place[0].tile = kinds[s->kind].at;
    for (int digit = 0; digit < DIGITS; digit++) {
        int n = out->n;
        for (int v = 1; v < count[digit]; v++)
            for (int i = 0; i < n; i++, out->n++) {
                out->place[out->n].file = (uint16_t)(out->place[i].file + v * s->stride[digit]);
                out->place[out->n].tile = (uint16_t)(out->place[i].tile + v * tile[digit]);
            }
    }
}

/* Moves one block's fields of all rows; the destination starts as zeros. Rows are innermost because their fields lie in different
 * bytes, so the read-modify-writes do not wait for each other. */
static inline __attribute__((always_inline)) void fields_move(const struct fields *f, const int *row_at, int n_rows, uint8_t *file,
                                                              size_t row_bytes, uint8_t *tile, bool pack)
{
    int mask = (1 << f->bits) - 1;
    for (int i = 0; i < f->n; i++) {
        uint8_t *from = file + f->place[i].file / 8;
        int shift = f->place[i].file % 8, at = f->place[i].tile;
        for (int r = 0; r < n_rows; r++, from += row_bytes) {
            int bit = at + row_at[r];
            if (pack)
                tile[bit / 8] |= (uint8_t)((*from >> shift & mask) << bit % 8);
            else
                *from |= (uint8_t)((tile[bit / 8] >> bit % 8 & mask) << shift);
        }
    }
}

static inline __attribute__((always_inline)) void quantized_move(const struct quant_format *format, int64_t width, int n_rows,
                                                                 uint8_t *rows, uint8_t *tile, bool pack)
{
    size_t row_bytes = quant_row_bytes(format, width), start = 0, size = 0; /* of the section: bytes of a tile, per block */
    int blocks_a_strand = TILE_STRAND / format->block;
    int64_t n_blocks = width / format->block;
    for (const struct section *s = formats[format->type]; s->kind != NONE; s++) {
        struct fields f;
        int row_at[TILE_ROWS];
        fields_list(s, format->block, &f);
        for (int r = 0; r < TILE_ROWS; r++)
            row_at[r] = r % kinds[s->kind].fold * kinds[s->kind].row + r / kinds[s->kind].fold * kinds[s->kind].over;
        start += kinds[s->kind].joins ? 0 : size;
        size = kinds[s->kind].size / 8u * (s->kind == F16 ? 1u : (unsigned)format->block / 32u);
        for (int64_t b = 0; b < n_blocks; b++) {
            int64_t strand = b / blocks_a_strand * blocks_a_strand; /* its first block */
            size_t in_strand = (size_t)(n_blocks - strand < blocks_a_strand ? n_blocks - strand : blocks_a_strand);
            uint8_t *to =
                tile + (size_t)strand * TILE_ROWS * (size_t)format->bytes + start * in_strand + size * (size_t)(b - strand);
            fields_move(&f, row_at, n_rows, rows + (size_t)b * (size_t)format->bytes, row_bytes, to, pack);
        }
    }
    assert(start + size == TILE_ROWS * (size_t)format->bytes);
}

static inline __attribute__((always_inline)) void float_move(const struct quant_format *format, int64_t width, int n_rows,
                                                             uint8_t *rows, uint8_t *tile, bool pack)
{
    size_t bytes = (size_t)format->bytes;
    for (int64_t k = 0; k < width; k++)
        for (int r = 0; r < n_rows; r++) {
            uint8_t *value = rows + ((size_t)r * (size_t)width + (size_t)k) * bytes,
                    *lane = tile + ((size_t)k * TILE_ROWS + (size_t)r) * bytes;
            memcpy(pack ? lane : value, pack ? value : lane, bytes);
        }
}

size_t tile_bytes(const struct quant_format *format, int64_t width) { return TILE_ROWS * quant_row_bytes(format, width); }

void tile_pack(const struct quant_format *format, int64_t width, const uint8_t *rows, int n_rows, uint8_t *tile)
{
    memset(tile, 0, tile_bytes(format, width));
    if (format->is_float)
        float_move(format, width, n_rows, (uint8_t *)rows, tile, true); /* `rows` is only read */
    else
        quantized_move(format, width, n_rows, (uint8_t *)rows, tile, true);
}

void tile_unpack(const struct quant_format *format, int64_t width, const uint8_t *tile, uint8_t *rows)
{
    memset(rows, 0, tile_bytes(format, width));
    if (format->is_float)
        float_move(format, width, TILE_ROWS, rows, (uint8_t *)tile, false);
    else
        quantized_move(format, width, TILE_ROWS, rows, (uint8_t *)tile, false);
}
