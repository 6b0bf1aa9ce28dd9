/* split.h - which lane computes which expert of a layer: a pure function of the routing, the residency table and the costs.
 *
 * Host and device both call it with the same inputs and get the same answer without talking (design.md section 5), so the text below is
 * compiled for both: integers only, no library. The invariant: every distinct expert of the window is in exactly one lane; the
 * order is first use, row by row, rank by rank; of the misses the last `n_link` go over the link and the others to the CPU.
 */
#ifndef EXPERT_SPLIT_H
#define EXPERT_SPLIT_H

#include <stdint.h>

#ifdef __CUDACC__
#define SPLIT_FN static __host__ __device__ inline
#else
#define SPLIT_FN static inline
#endif

enum { SPLIT_ROWS = 8, SPLIT_USED = 32, SPLIT_MAX = SPLIT_ROWS * SPLIT_USED, SPLIT_COUNT = 1024 };
enum split_lane { LANE_HIT, LANE_LINK, LANE_CPU, N_LANES };

/* What a layer's lanes cost, in nanoseconds: each lane takes start + count * each. With `share` >= 0 the link gets misses * share / 256
 * instead; from SPLIT_COUNT on, exactly share - SPLIT_COUNT (at most all). Costs of one window width; the controller fills them between windows (controller.h). */
struct split_costs {
    uint32_t hit_each, link_start, link_each;
    uint32_t cpu_start, cpu_each;             /* while the link is busy too */
    uint32_t alone_start, alone_each;         /* the CPU alone: m = 0 */
    int32_t share;
};

/* One layer's plan. Entry i is a distinct expert; (row[i][j], rank[i][j]) with j < n_rows[i] are the places that chose it. */
struct split {
    int32_t n, n_hit, n_link, n_cpu;
    uint16_t expert[SPLIT_MAX];
    int32_t slot[SPLIT_MAX];   /* residency table's entry, < 0: a miss */
    uint8_t lane[SPLIT_MAX];
    uint8_t n_rows[SPLIT_MAX];
    uint8_t row[SPLIT_MAX][SPLIT_ROWS], rank[SPLIT_MAX][SPLIT_ROWS];
};

SPLIT_FN uint32_t split_later(uint32_t a, uint32_t b) { return a > b ? a : b; }

/* When all lanes have ended, with m of the misses on the link. */
SPLIT_FN uint32_t split_end(const struct split_costs *c, int32_t hits, int32_t misses, int32_t m)
{
    uint32_t hit = (uint32_t)hits * c->hit_each;
    if (m == 0)
        return misses ? split_later(hit, c->alone_start + (uint32_t)misses * c->alone_each) : hit;
    uint32_t brought = c->link_start + (uint32_t)m * c->link_each, computed = split_later(hit, c->link_start + c->link_each) + (uint32_t)m * c->hit_each;
    uint32_t cpu = m == misses ? 0 : c->cpu_start + (uint32_t)(misses - m) * c->cpu_each;
    return split_later(split_later(split_later(brought, hit) + c->hit_each, computed), cpu);
}

/* How many of the misses go over the link: the m whose lanes end first, the device computing its hits and then what the link brought. The
 * smallest such m, and none unless that ends more than 1/16 earlier than the CPU alone. */
SPLIT_FN int32_t split_link_count(const struct split_costs *c, int32_t hits, int32_t misses)
{
    if (c->share >= SPLIT_COUNT)
        return c->share - SPLIT_COUNT < misses ? c->share - SPLIT_COUNT : misses;
    if (c->share >= 0)
        return misses * c->share >> 8;
    uint32_t alone = split_end(c, hits, misses, 0), best = alone - alone / 16;
    int32_t at = 0;
    for (int32_t m = 1; m <= misses; m++) {
        uint32_t end = split_end(c, hits, misses, m);
        if (end < best) {
            best = end;
            at = m;
        }
    }
    return at;
}

/* ids[t * stride + k]: what row t chose, rank by rank. slot_of[expert]: its place on the device, negative: not there. */
SPLIT_FN void split_plan(struct split *s, const int32_t *ids, int32_t stride, int32_t n_rows, int32_t n_used, const int32_t *slot_of,
                         const struct split_costs *costs)
{
    s->n = s->n_hit = 0;
    for (int32_t t = 0; t < n_rows; t++)
        for (int32_t k = 0; k < n_used; k++) {
            int32_t expert = ids[t * stride + k], i = 0;
            while (i < s->n && s->expert[i] != expert)
                i++;
            if (i == s->n) {
                s->n++;
                s->expert[i] = (uint16_t)expert;
                s->slot[i] = slot_of[expert];
                s->n_rows[i] = 0;
                s->n_hit += s->slot[i] >= 0;
            }
            s->row[i][s->n_rows[i]] = (uint8_t)t;
            s->rank[i][s->n_rows[i]++] = (uint8_t)k;
        }
    int32_t misses = s->n - s->n_hit, seen = 0;
    s->n_link = split_link_count(costs, s->n_hit, misses);
    s->n_cpu = misses - s->n_link;
    for (int32_t i = 0; i < s->n; i++)
        s->lane[i] = s->slot[i] >= 0 ? LANE_HIT : seen++ < s->n_cpu ? LANE_CPU : LANE_LINK;
}

/* A place's part of split_sum; parts are added, so a device may do that in any order. */
SPLIT_FN uint32_t split_place(int32_t expert, int32_t row, int32_t rank)
{
    return (uint32_t)(row * SPLIT_USED + rank + 1) * (2u * (uint32_t)expert + 1) * 2654435761u;
}

/* A number that differs if two plans differ, for the check that both sides agree. */
SPLIT_FN uint32_t split_sum(const struct split *s)
{
    uint32_t sum = 2166136261u, places = 0;
    for (int32_t i = 0; i < s->n; i++) {
        sum = (sum ^ ((uint32_t)s->expert[i] << 8 | (uint32_t)s->lane[i] << 4 | s->n_rows[i])) * 16777619u ^ (uint32_t)s->slot[i];
        for (int32_t j = 0; j < s->n_rows[i]; j++)
            places += split_place(s->expert[i], s->row[i][j], s->rank[i][j]);
    }
    return sum ^ places;
}

#endif
