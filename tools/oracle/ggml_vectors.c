/* ggml_vectors.c - asks ggml's own library what the block formats mean, and records the answers.
 *
 *     ggml_vectors LIBGGML_BASE.so grids   > src/quant/grid.c
 *     ggml_vectors LIBGGML_BASE.so vectors > tests/data/quant_vectors.h
 *
 * The library is only ever called through its exported functions: dequantize_row_TYPE for every format, ggml_quantize_chunk for its
 * encoders. The codebooks are read off the decoders by decoding one block per index. Stands alone: needs nothing of src/. */
#include "../../tests/quant_random.h"

#include <dlfcn.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

typedef void decode_fn(const void *block, float *out, int64_t n);
typedef size_t quantize_fn(int type, const float *in, void *out, int64_t start, int64_t n_rows, int64_t width,
                           const float *importance);
typedef bool requires_fn(int type);

static void *library;

static void *must_find(const char *symbol)
{
    void *found = dlsym(library, symbol);
    if (!found) {
        fprintf(stderr, "ggml_vectors: the library has no %s\n", symbol);
        exit(1);
    }
    return found;
}

static decode_fn *decoder(const char *type)
{
    char symbol[64];
    snprintf(symbol, sizeof symbol, "dequantize_row_%s", type);
    return (decode_fn *)must_find(symbol);
}

/* ---- Codebooks ---- */

struct grid {
    const char *name, *decoder, *type, *macro, *what;
    int entries, width; /* values an entry */
    int bytes;          /* of a block */
    float factor;       /* decoded value * factor = codebook value, for the blocks made here */
    int alphabet[8];
    int bits; /* per alphabet index in the literal */
};

static const struct grid grids[] = {
    { "iq2xxs", "iq2_xxs", "uint8_t", "E2", "IQ2_XXS", 256, 8, 66, 8, { 8, 25, 43 }, 2 },
    { "iq2xs", "iq2_xs", "uint8_t", "E2", "IQ2_XS", 512, 8, 74, 8, { 8, 25, 43 }, 2 },
    { "iq2s", "iq2_s", "uint8_t", "E2", "IQ2_S", 1024, 8, 82, 8, { 8, 25, 43 }, 2 },
    { "iq3xxs", "iq3_xxs", "uint8_t", "E3", "IQ3_XXS", 256, 4, 98, 4, { 4, 12, 20, 28, 36, 44, 52, 62 }, 4 },
    { "iq3s", "iq3_s", "uint8_t", "E3S", "IQ3_S", 512, 4, 110, 1, { 1, 3, 5, 7, 9, 11, 13, 15 }, 4 },
    { "iq1s", "iq1_s", "int8_t", "E1", "IQ1_S and IQ1_M", 2048, 8, 50, 1, { -1, 0, 1 }, 2 },
};

/* A block with scale 1, all signs positive, smallest sub-scales, whose first index is `index`. */
static void grid_block(const struct grid *g, int index, uint8_t *block)
{
    memset(block, 0, (size_t)g->bytes);
    block[1] = 0x3c; /* 1.0 */
    block[2] = (uint8_t)index;
    if (!strcmp(g->name, "iq2xs"))
        block[3] = (uint8_t)(index >> 8);
    else if (!strcmp(g->name, "iq2s") || !strcmp(g->name, "iq3s"))
        block[66] = (uint8_t)(index >> 8);
    else if (!strcmp(g->name, "iq1s"))
        block[34] = (uint8_t)(index >> 8);
}

static int alphabet_index(const struct grid *g, float decoded)
{
    float value = decoded * g->factor;
    if (g->alphabet[0] < 0) /* the positive shift of 1/8 */
        value -= 0.125f;
    for (int a = 0; a < 8; a++)
        if ((float)g->alphabet[a] == value)
            return a;
    fprintf(stderr, "ggml_vectors: %s decodes to %g, which is not in its alphabet\n", g->name, (double)decoded);
    exit(1);
}

static void print_grids(void)
{
    puts("/* grid.c - the codebooks. Written by tools/oracle/ggml_vectors.c, which reads them off a decoder.\n"
         " * tests/test_quant.c holds their SHA-256.\n"
         " *\n"
         " * A literal packs one entry, first weight in the lowest bits: 2 bits a weight (E1, E2) or 4 (E3, E3S), each the number "
         "of a value\n"
         " * in the codebook's alphabet. */\n"
         "#include \"quant/quant.h\"\n"
         "\n"
         "/* clang-format off */\n"
         "\n"
         "#define A1(w, j) (((w) >> 2 * (j) & 3) - 1)                                   /* -1 0 1 */\n"
         "#define A2(w, j) (8 + 17 * ((w) >> 2 * (j) & 3) + ((w) >> (2 * (j) + 1) & 1)) /* 8 25 43 */\n"
         "#define A3(w, j) (4 + 8 * ((w) >> 4 * (j) & 7) + 2 * (((w) >> 4 * (j) & 7) == 7)) /* 4 12 20 28 36 44 52 62 */\n"
         "#define A3S(w, j) (1 + 2 * ((w) >> 4 * (j) & 7))                              /* 1 3 5 7 9 11 13 15 */\n"
         "#define FOUR(a, w, j) a(w, j), a(w, j + 1), a(w, j + 2), a(w, j + 3)\n"
         "#define E1(w) { FOUR(A1, w, 0), FOUR(A1, w, 4) }\n"
         "#define E2(w) { FOUR(A2, w, 0), FOUR(A2, w, 4) }\n"
         "#define E3(w) { FOUR(A3, w, 0) }\n"
         "#define E3S(w) { FOUR(A3S, w, 0) }");
    for (size_t k = 0; k < sizeof grids / sizeof *grids; k++) {
        const struct grid *g = &grids[k];
        decode_fn *decode = decoder(g->decoder);
        printf("\n/* %s */\nconst %s quant_grid_%s[%d][%d] = {", g->what, g->type, g->name, g->entries, g->width);
        for (int index = 0; index < g->entries; index++) {
            uint8_t block[128];
            float out[256];
            unsigned packed = 0;
            grid_block(g, index, block);
            decode(block, out, 256);
            for (int j = 0; j < g->width; j++)
                packed |= (unsigned)alphabet_index(g, out[j]) << g->bits * j;
            printf("%s%s(0x%04x),", index % 8 ? " " : "\n    ", g->macro, packed);
        }
        puts("\n};");
    }
}

/* ---- Test vectors ---- */

static uint64_t hash_floats(float *values, size_t n)
{
    for (size_t i = 0; i < n; i++)
        values[i] += 0.0f; /* -0 becomes 0: which zero a product of factors gives depends on their grouping */
    return XXH64(values, n * sizeof *values, 0);
}

/* Root mean square error of ggml's encoder on the shared weights, weighted by `importance` if not NULL. */
static double encoder_error(const struct quant_layout *layout, const float *weights, const float *importance, const float *ones)
{
    quantize_fn *quantize = (quantize_fn *)must_find("ggml_quantize_chunk");
    requires_fn *requires = (requires_fn *)must_find("ggml_quantize_requires_imatrix");
    static uint8_t encoded[QUANT_VECTOR_WEIGHTS * 2];
    static float decoded[QUANT_VECTOR_WEIGHTS];
    double sum = 0, total = 0;
    /* ggml has one importance per column, so each block of 256 is encoded as a matrix of its own. */
    for (int i = 0; i < QUANT_VECTOR_WEIGHTS; i += 256) {
        const float *imatrix = importance ? importance + i : requires(layout->type) ? ones : NULL;
        quantize((int)layout->type, weights + i, encoded, 0, 1, 256, imatrix);
        decoder(layout->name)(encoded, decoded + i, 256);
    }
    for (int i = 0; i < QUANT_VECTOR_WEIGHTS; i++) {
        double e = decoded[i] - weights[i], w = importance ? importance[i] : 1;
        sum += w * e * e;
        total += w;
    }
    return sqrt(sum / total);
}

static void print_vectors(void)
{
    static float weights[QUANT_VECTOR_WEIGHTS], importance[QUANT_VECTOR_WEIGHTS], ones[256], out[QUANT_VECTOR_BLOCKS * 256];
    static uint8_t blocks[QUANT_VECTOR_BLOCKS * 256];
    quant_random_weights(weights, importance);
    for (int i = 0; i < 256; i++)
        ones[i] = 1;
    puts("/* quant_vectors.h - recorded by tools/oracle/ggml_vectors.c from ggml's library: what the random blocks of "
         "tests/quant_random.h decode to,\n"
         " * and how well ggml's own encoders do on its random weights. */\n"
         "/* clang-format off */\n"
         "static const struct quant_vector {\n"
         "    uint32_t type;\n"
         "    uint64_t hash;      /* xxh64 of the decoded floats, zeros positive */\n"
         "    float first[4];     /* the first of them */\n"
         "    double rmse;        /* ggml's encoder, no importance given */\n"
         "    double weighted;    /* ggml's encoder with importance: root of the importance-weighted mean square */\n"
         "} quant_vectors[] = {");
    for (int k = 0; k < QUANT_LAYOUTS; k++) {
        const struct quant_layout *layout = &quant_layouts[k];
        uint64_t state = layout->type;
        int n = QUANT_VECTOR_BLOCKS * layout->block;
        for (int b = 0; b < QUANT_VECTOR_BLOCKS; b++)
            quant_random_block(layout, &state, blocks + b * layout->bytes);
        decoder(layout->name)(blocks, out, n);
        uint64_t hash = hash_floats(out, (size_t)n);
        printf("    { %u, 0x%016llx, { %a, %a, %a, %a }, %.9g, %.9g }, /* %s */\n", layout->type, (unsigned long long)hash, out[0],
               out[1], out[2], out[3], encoder_error(layout, weights, NULL, ones), encoder_error(layout, weights, importance, ones),
               layout->name);
    }
    puts("};");
}

int main(int argc, char **argv)
{
    bool vectors = argc == 3 && !strcmp(argv[2], "vectors");
    if (!vectors && !(argc == 3 && !strcmp(argv[2], "grids"))) {
        fputs("usage: ggml_vectors LIBGGML_BASE.so grids|vectors\n", stderr);
        return 2;
    }
    library = dlopen(argv[1], RTLD_NOW);
    if (!library) {
        fprintf(stderr, "ggml_vectors: %s\n", dlerror());
        return 1;
    }
    if (vectors)
        print_vectors();
    else
        print_grids();
    return fflush(stdout) ? 1 : 0;
}
