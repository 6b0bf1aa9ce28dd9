/* encode_grid.c - writing the codebook formats IQ2 and IQ3: nearest entries, and the scales they want.
 *
 * A *tuple* is the 4 (IQ3) or 8 (IQ2) weights of one entry. Searching all entries for every tuple and scale would take hours a
 * model. So each tuple is first rounded to the lattice of the codebook's alphabet (8^4 or 3^8 points), and only the entries nearest
 * to that point are compared with the true weights. The lists of nearest entries are made once per codebook, on first use. */
#include "quant/fit.h"

#include <math.h>
#include <pthread.h>

enum { NEAR = 16, MAX_POINTS = 6561, MAX_ENTRIES = 1024 }; /* 8 near entries cost 1.3 % in error, 24 gain 0.3 % */

struct book {
    int dims, entries, levels;    /* weights a tuple, tuples in the book, values in the alphabet */
    float first, step;            /* the alphabet, roughly: first + step * level */
    float factor;                 /* weight = d * (2*nib + 1) * factor * entry */
    int sub;                      /* weights that share a 4-bit scale: 16 or 32 */
    bool even;                    /* every 8 weights have an even number of negative ones */
    const uint8_t *grid;          /* [entries][dims] */
    float entry[MAX_ENTRIES * 8]; /* the same in float */
    uint16_t near[MAX_POINTS][NEAR];
};

/* What a format packs. */
struct grid_result {
    uint16_t d;         /* binary16 */
    uint8_t nib[16];    /* per sub-block */
    uint8_t sign[32];   /* per 8 weights, bit j: weight j is negative */
    uint16_t index[64]; /* per tuple */
};

/* ---- Codebooks ---- */

static void book_near(struct book *book, int point)
{
    float at[8], distance[NEAR];
    int found = 0;
    for (int j = 0, rest = point; j < book->dims; j++, rest /= book->levels)
        at[j] = book->first + book->step * (float)(rest % book->levels);
    for (int e = 0; e < book->entries; e++) {
        float sum = 0;
        for (int j = 0; j < book->dims; j++)
            sum += (book->entry[e * book->dims + j] - at[j]) * (book->entry[e * book->dims + j] - at[j]);
        if (found == NEAR && !(sum < distance[NEAR - 1]))
            continue;
        int k = found < NEAR ? found++ : NEAR - 1;
        for (; k > 0 && sum < distance[k - 1]; k--) { /* a sorted list, equal distances in the order of the book */
            distance[k] = distance[k - 1];
            book->near[point][k] = book->near[point][k - 1];
        }
        distance[k] = sum;
        book->near[point][k] = (uint16_t)e;
    }
}

static void book_make(struct book *book)
{
    int points = 1;
    for (int j = 0; j < book->dims; j++)
        points *= book->levels;
    for (int i = 0; i < book->entries * book->dims; i++)
        book->entry[i] = book->grid[i];
    for (int point = 0; point < points; point++)
        book_near(book, point);
}

#define BOOK(name, ...)                                                                                                            \
    static struct book book_##name = { .grid = &quant_grid_##name[0][0],                                                           \
                                       .entries = sizeof quant_grid_##name / sizeof *quant_grid_##name,                            \
                                       .dims = sizeof *quant_grid_##name,                                                          \
                                       __VA_ARGS__ };                                                                              \
    static void make_##name(void) { book_make(&book_##name); }                                                                     \
    static pthread_once_t once_##name = PTHREAD_ONCE_INIT

BOOK(iq2xxs, .levels = 3, .first = 8, .step = 17.5f, .factor = 0.125f, .sub = 32, .even = true);
BOOK(iq2xs, .levels = 3, .first = 8, .step = 17.5f, .factor = 0.125f, .sub = 16, .even = true);
BOOK(iq2s, .levels = 3, .first = 8, .step = 17.5f, .factor = 0.125f, .sub = 16, .even = false);
BOOK(iq3xxs, .levels = 8, .first = 4, .step = 8.2f, .factor = 0.25f, .sub = 32, .even = true);
BOOK(iq3s, .levels = 8, .first = 1, .step = 2, .factor = 1, .sub = 32, .even = false);

/* ---- Search ---- */

/* The entry nearest to target t (already divided by the scale; may be slightly negative), weighted. `dims` is a constant where this
 * is inlined. */
static inline __attribute__((always_inline)) int nearest_entry(const struct book *book, int dims, const float *t, const float *w)
{
    int point = 0, best = 0;
    float inverse_step = 1 / book->step, best_cost = INFINITY, wt[8];
    for (int j = dims - 1; j >= 0; j--) {
        float level = (t[j] - book->first) * inverse_step + 0.5f;
        level = level > 0 ? level : 0;
        point = point * book->levels + (int)(level < (float)book->levels - 0.5f ? level : (float)book->levels - 0.5f);
        wt[j] = 2 * w[j] * t[j];
    }
    for (int k = 0; k < NEAR; k++) {
        const float *entry = book->entry + book->near[point][k] * dims;
        float cost = 0; /* the squared distance without its constant part */
        for (int j = 0; j < dims; j++)
            cost += entry[j] * (w[j] * entry[j] - wt[j]);
        if (cost < best_cost) {
            best_cost = cost;
            best = book->near[point][k];
        }
    }
    return best;
}

static inline __attribute__((always_inline)) void nearest_entries_dims(const struct book *book, int dims, const float *x,
                                                                       const float *w, float inverse, uint16_t *index)
{
    for (int k = 0; k < book->sub / dims; k++) {
        float t[8];
        for (int j = 0; j < dims; j++)
            t[j] = x[k * dims + j] * inverse;
        index[k] = (uint16_t)nearest_entry(book, dims, t, w + k * dims);
    }
}

/* Entries for one sub-block at one scale. */
static void nearest_entries(const struct book *book, const float *x, const float *w, float inverse, uint16_t *index)
{
    if (book->dims == 4)
        nearest_entries_dims(book, 4, x, w, inverse, index);
    else
        nearest_entries_dims(book, 8, x, w, inverse, index);
}

/* Adds the products of one sub-block that decide its best scale: xq / qq. */
static void entry_products(const struct book *book, const float *x, const float *w, const uint16_t *index, float *xq, float *qq)
{
    *xq = *qq = 0;
    for (int i = 0; i < book->sub; i++) {
        float q = book->entry[index[i / book->dims] * book->dims + i % book->dims];
        *xq += w[i] * x[i] * q;
        *qq += w[i] * q * q;
    }
}

/* The scale that one sub-block would choose if it were free to. */
static float fit_entry_scale(const struct book *book, const float *x, const float *w)
{
    /* From "the largest weight is 0.4 of the largest value" to 1.6 times that value. */
    enum { STEPS = 12 };
    float top = book->first + book->step * (float)(book->levels - 1), largest = 0, best = 0, best_gain = 0, xq, qq;
    uint16_t index[8];
    for (int i = 0; i < book->sub; i++)
        largest = fmaxf(largest, x[i]);
    if (!(largest > 0x1p-100f))
        return 0;
    for (int t = 0; t < STEPS + 3; t++) { /* the last three alternate entries and scale */
        float inverse = t < STEPS ? top * (0.4f + 1.2f * (float)t / (STEPS - 1)) / largest : fit_inverse(best);
        nearest_entries(book, x, w, inverse, index);
        entry_products(book, x, w, index, &xq, &qq);
        if (xq > 0 && xq * xq > best_gain * qq) {
            best_gain = xq * xq / qq;
            best = xq / qq;
        }
    }
    return best;
}

/* Splits off the signs: x becomes magnitudes. Where their number must be even, the weight for which the wrong sign costs least
 * gives in: its magnitude becomes negative, so that it is drawn to the smallest value. */
static void take_signs(const struct book *book, struct fit_block *block, uint8_t *sign)
{
    for (int k = 0; k < 32; k++) {
        float *x = block->x + 8 * k, *w = block->w + 8 * k;
        uint32_t bits = 0;
        int cheapest = 0;
        for (int j = 0; j < 8; j++) {
            bits |= (uint32_t)(x[j] < 0) << j;
            x[j] = fabsf(x[j]);
            if (w[j] * x[j] < w[cheapest] * x[cheapest]) /* the extra cost is 4*w*|x|*value */
                cheapest = j;
        }
        if (book->even && __builtin_parity(bits)) {
            bits ^= 1u << cheapest;
            x[cheapest] = -x[cheapest];
        }
        sign[k] = (uint8_t)bits;
    }
}

static void encode_book(struct book *book, pthread_once_t *once, void (*make)(void), const float *weights, const float *importance,
                        struct grid_result *best)
{
    struct fit_block block;
    float wish[16], extreme = 0, best_error = INFINITY, d;
    int n = 256 / book->sub, tuples = book->sub / book->dims;
    pthread_once(once, make);
    fit_prepare(&block, weights, importance, 256);
    memset(best, 0, sizeof *best);
    take_signs(book, &block, best->sign);
    for (int s = 0; s < n; s++) {
        wish[s] = fit_entry_scale(book, block.x + s * book->sub, block.w + s * book->sub);
        extreme = fmaxf(extreme, wish[s]);
    }
    double next = extreme / (31 * book->factor); /* the largest 2*nib + 1 */
    for (int round = 0; round < 2; round++) {    /* the second gains 0.2 % of the error, more nothing */
        struct grid_result try = *best;
        float error = 0;
        double sum_xq = 0, sum_qq = 0;
        try.d = fit_half(&block, next, &d);
        for (int s = 0; s < n; s++) {
            const float *x = block.x + s * book->sub, *w = block.w + s * book->sub;
            float unit = d * book->factor, sub_error = INFINITY, sub_xq = 0, sub_qq = 0;
            int centre = (int)fminf(fmaxf(rintf(0.5f * (wish[s] * fit_inverse(unit) - 1)), 0), 15);
            for (int nib = centre - 1; nib <= centre + 1; nib++) {
                uint16_t index[8];
                float scale = unit * (float)(2 * nib + 1), xq, qq;
                if (nib < 0 || nib > 15)
                    continue;
                nearest_entries(book, x, w, fit_inverse(scale), index);
                entry_products(book, x, w, index, &xq, &qq);
                float e = scale * (scale * qq - 2 * xq); /* less the sum of w*x*x, which is the same for all */
                if (e < sub_error) {
                    sub_error = e;
                    try.nib[s] = (uint8_t)nib;
                    memcpy(try.index + s * tuples, index, (size_t)tuples * sizeof *index);
                    sub_xq = xq * (float)(2 * nib + 1) * book->factor;
                    sub_qq = qq * (float)((2 * nib + 1) * (2 * nib + 1)) * book->factor * book->factor;
                }
            }
            error += sub_error;
            sum_xq += sub_xq;
            sum_qq += sub_qq;
        }
        if (error < best_error) {
            best_error = error;
            *best = try;
        }
        next = sum_qq > 0 ? sum_xq / sum_qq : 0;
        if (!(next > 0))
            break;
    }
}

/* ---- Packing ---- */

void quant_encode_iq2_xxs(const float *weights, const float *importance, uint8_t *out)
{
    struct grid_result r;
    encode_book(&book_iq2xxs, &once_iq2xxs, make_iq2xxs, weights, importance, &r);
    store_u16(out, r.d);
    for (int ib = 0; ib < 8; ib++) {
        uint32_t signs_scale = (uint32_t)r.nib[ib] << 28;
        for (int l = 0; l < 4; l++) {
            out[2 + 8 * ib + l] = (uint8_t)r.index[4 * ib + l];
            signs_scale |= (uint32_t)(r.sign[4 * ib + l] & 127) << 7 * l;
        }
        store_u32(out + 6 + 8 * ib, signs_scale);
    }
}

void quant_encode_iq2_xs(const float *weights, const float *importance, uint8_t *out)
{
    struct grid_result r;
    encode_book(&book_iq2xs, &once_iq2xs, make_iq2xs, weights, importance, &r);
    store_u16(out, r.d);
    for (int k = 0; k < 32; k++)
        store_u16(out + 2 + 2 * k, r.index[k] | (uint32_t)(r.sign[k] & 127) << 9);
    for (int ib = 0; ib < 8; ib++)
        out[66 + ib] = (uint8_t)(r.nib[2 * ib] | r.nib[2 * ib + 1] << 4);
}

void quant_encode_iq2_s(const float *weights, const float *importance, uint8_t *out)
{
    struct grid_result r;
    encode_book(&book_iq2s, &once_iq2s, make_iq2s, weights, importance, &r);
    store_u16(out, r.d);
    for (int ib = 0; ib < 8; ib++) {
        out[66 + ib] = 0;
        for (int l = 0; l < 4; l++) {
            out[2 + 4 * ib + l] = (uint8_t)r.index[4 * ib + l];
            out[34 + 4 * ib + l] = r.sign[4 * ib + l];
            out[66 + ib] |= (uint8_t)(r.index[4 * ib + l] >> 8 << 2 * l);
        }
        out[74 + ib] = (uint8_t)(r.nib[2 * ib] | r.nib[2 * ib + 1] << 4);
    }
}

void quant_encode_iq3_xxs(const float *weights, const float *importance, uint8_t *out)
{
    struct grid_result r;
    encode_book(&book_iq3xxs, &once_iq3xxs, make_iq3xxs, weights, importance, &r);
    store_u16(out, r.d);
    for (int k = 0; k < 64; k++)
        out[2 + k] = (uint8_t)r.index[k];
    for (int ib = 0; ib < 8; ib++) {
        uint32_t signs_scale = (uint32_t)r.nib[ib] << 28;
        for (int l = 0; l < 4; l++)
            signs_scale |= (uint32_t)(r.sign[4 * ib + l] & 127) << 7 * l;
        store_u32(out + 66 + 4 * ib, signs_scale);
    }
}

void quant_encode_iq3_s(const float *weights, const float *importance, uint8_t *out)
{
    struct grid_result r;
    encode_book(&book_iq3s, &once_iq3s, make_iq3s, weights, importance, &r);
    memset(out, 0, 110);
    store_u16(out, r.d);
    for (int k = 0; k < 64; k++) {
        out[2 + k] = (uint8_t)r.index[k];
        out[66 + k / 8] |= (uint8_t)(r.index[k] >> 8 << k % 8);
    }
    memcpy(out + 74, r.sign, 32);
    for (int ib = 0; ib < 8; ib++)
        out[106 + ib / 2] |= (uint8_t)(r.nib[ib] << 4 * (ib % 2));
}
