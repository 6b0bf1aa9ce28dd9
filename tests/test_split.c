/* The split: every expert of a window in one lane, in the order of first use, and of all shares the one that ends first. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* A device compiles this text too, and must get the same numbers: without floating-point registers only integers compile. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("general-regs-only")
#include "expert/split.h"
#pragma GCC pop_options
#else
#include "expert/split.h"
#endif

#include <cmocka.h>

enum { EXPERTS = 512, STRIDE = 40 };
/* The most that the controller hands over: a tenth of a second to start, ten milliseconds for an expert. */
static const uint32_t most_start = 100000000, most_each = 10000000;

/* ---- Random windows
 * -------------------------------------------------------------------------------------------------------------- */

static uint64_t random_state = 1;
static uint32_t random_below(uint64_t n)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((random_state >> 33) % n);
}

static int32_t random_between(int32_t least, int32_t most) { return least + (int32_t)random_below((uint64_t)(most - least) + 1); }

struct window {
    int32_t n_rows, n_used, n_experts, stride;
    int32_t ids[SPLIT_ROWS * STRIDE];
    int32_t slot_of[EXPERTS];
    struct split_costs costs;
};

/* Of every share, of every count, and free to choose; what an expert costs is anything from nothing to the most. */
static struct split_costs random_costs(void)
{
    uint32_t each = 1u << random_below(24), start = 1u << random_below(27);
    each = each < most_each ? each : most_each;
    start = start < most_start ? start : most_start;
    struct split_costs c = { random_below(each),      random_below(start + 1u), random_below(each + 1u), random_below(start + 1u),
                             random_below(each + 1u), random_below(start + 1u), random_below(each + 1u), -1 };
    if (c.hit_each > c.link_each) /* a device computes an expert sooner than its link brings one */
        c.hit_each = c.link_each;
    int kind = random_between(0, 5);
    c.share = kind == 0 ? random_between(0, 256) : kind == 1 ? SPLIT_COUNT + random_between(0, SPLIT_MAX + 50) : -1;
    return c;
}

/* Rows of distinct experts, often those of the row before, as texts have it. */
static void random_window(struct window *w, int32_t n_rows, int32_t n_used)
{
    w->n_rows = n_rows;
    w->n_used = n_used;
    w->n_experts = random_between(0, 3) ? random_between(n_used, EXPERTS) : n_used;
    w->stride = random_between(n_used, STRIDE);
    int32_t repeats = random_between(0, 4), resident = random_between(0, 4);
    for (int32_t t = 0; t < n_rows; t++)
        for (int32_t k = 0; k < w->stride; k++) {
            int32_t *row = w->ids + t * w->stride, j;
            if (k >= n_used) {
                row[k] = -7; /* no expert: nobody may look here */
                continue;
            }
            do {
                row[k] = t && random_between(0, 4) < repeats ? row[random_between(0, n_used - 1) - w->stride]
                                                             : random_between(0, w->n_experts - 1);
                for (j = 0; j < k && row[j] != row[k]; j++) {}
            } while (j < k);
        }
    for (int32_t e = 0; e < EXPERTS; e++)
        w->slot_of[e] = random_between(1, 4) > resident ? random_between(-2, -1) : random_between(0, 24575);
    w->costs = random_costs();
}

static void plan(struct split *s, const struct window *w)
{
    memset(s, 0x55, sizeof *s); /* what was planned before must not matter */
    split_plan(s, w->ids, w->stride, w->n_rows, w->n_used, w->slot_of, &w->costs);
}

/* Many windows of every width and number of experts. */
static void for_windows(int repeats, void (*check)(const struct window *w, const struct split *s))
{
    static struct window w;
    static struct split s;
    for (int i = 0; i < repeats; i++)
        for (int32_t n_rows = 1; n_rows <= SPLIT_ROWS; n_rows++)
            for (int32_t n_used = 1; n_used <= SPLIT_USED; n_used++) {
                random_window(&w, n_rows, n_used);
                plan(&s, &w);
                check(&w, &s);
            }
}

/* ---- Who computes what
 * ----------------------------------------------------------------------------------------------------------- */

static void check_places(const struct window *w, const struct split *s)
{
    bool listed[SPLIT_ROWS][SPLIT_USED] = { 0 };
    int32_t places = 0;
    for (int32_t i = 0; i < s->n; i++)
        for (int32_t j = 0; j < s->n_rows[i]; j++, places++) {
            assert_true(s->row[i][j] < w->n_rows && s->rank[i][j] < w->n_used);
            assert_int_equal(w->ids[s->row[i][j] * w->stride + s->rank[i][j]], s->expert[i]);
            assert_false(listed[s->row[i][j]][s->rank[i][j]]);
            listed[s->row[i][j]][s->rank[i][j]] = true;
        }
    assert_int_equal(places, w->n_rows * w->n_used);
}

static void every_choice_of_every_row_is_listed_once(void **state) { for_windows(60, check_places); }

static void check_distinct(const struct window *w, const struct split *s)
{
    bool there[EXPERTS] = { 0 };
    for (int32_t i = 0; i < s->n; i++) {
        assert_true(s->expert[i] < w->n_experts);
        assert_false(there[s->expert[i]]);
        there[s->expert[i]] = true;
        assert_int_equal(s->slot[i], w->slot_of[s->expert[i]]);
    }
}

static void every_expert_is_listed_once_with_its_slot(void **state) { for_windows(60, check_distinct); }

static void check_order(const struct window *w, const struct split *s)
{
    int32_t before = -1;
    for (int32_t i = 0; i < s->n; i++) {
        assert_true(s->row[i][0] * w->n_used + s->rank[i][0] > before);
        before = s->row[i][0] * w->n_used + s->rank[i][0];
        for (int32_t j = 1; j < s->n_rows[i]; j++)
            assert_true(s->row[i][j] > s->row[i][j - 1]);
    }
}

static void experts_stand_in_the_order_of_first_use(void **state) { for_windows(60, check_order); }

static void check_lanes(const struct window *w, const struct split *s)
{
    int32_t n[N_LANES] = { 0 };
    for (int32_t i = 0; i < s->n; i++) {
        assert_true(s->lane[i] < N_LANES);
        assert_int_equal(s->lane[i] == LANE_HIT, s->slot[i] >= 0);
        if (s->lane[i] == LANE_CPU)
            assert_int_equal(n[LANE_LINK], 0); /* the link has the last misses */
        n[s->lane[i]]++;
    }
    assert_int_equal(n[LANE_HIT], s->n_hit);
    assert_int_equal(n[LANE_LINK], s->n_link);
    assert_int_equal(n[LANE_CPU], s->n_cpu);
    assert_int_equal(s->n_hit + s->n_link + s->n_cpu, s->n);
}

static void hits_stay_and_the_last_misses_go_over_the_link(void **state) { for_windows(60, check_lanes); }

static void check_share(const struct window *w, const struct split *s)
{
    int32_t misses = s->n - s->n_hit, count = w->costs.share - SPLIT_COUNT;
    if (count >= 0)
        assert_int_equal(s->n_link, count < misses ? count : misses);
    else if (w->costs.share >= 0)
        assert_int_equal(s->n_link, misses * w->costs.share / 256);
}

static void a_share_that_is_given_is_kept(void **state) { for_windows(60, check_share); }

static void a_share_of_everything_is_everything(void **state)
{
    for (int32_t misses = 0; misses <= SPLIT_MAX; misses++) {
        assert_int_equal(split_link_count(&(struct split_costs){ .share = 256 }, 0, misses), misses);
        assert_int_equal(split_link_count(&(struct split_costs){ .share = 0 }, 0, misses), 0);
        assert_int_equal(split_link_count(&(struct split_costs){ .share = SPLIT_COUNT }, 0, misses), 0);
    }
}

/* ---- The share that ends first
 * --------------------------------------------------------------------------------------------------- */

static uint64_t later(uint64_t a, uint64_t b) { return a > b ? a : b; }

/* When a layer ends with m misses on the link, followed expert by expert: the device computes its hits, then each expert that the
 * link has brought; the CPU computes the others beside it. */
static uint64_t end_of(const struct split_costs *c, int hits, int misses, int m)
{
    uint64_t device = 0, brought = c->link_start, cpu = 0;
    for (int i = 0; i < hits; i++)
        device += c->hit_each;
    for (int i = 0; i < m; i++) {
        brought += c->link_each;
        device = later(device, brought) + c->hit_each;
    }
    if (m < misses)
        cpu = (m ? c->cpu_start : c->alone_start) + (uint64_t)(misses - m) * (m ? c->cpu_each : c->alone_each);
    return later(device, cpu);
}

/* The first m that ends first; 0 unless that gains more than a sixteenth. */
static int best_of(const struct split_costs *c, int hits, int misses)
{
    uint64_t alone = end_of(c, hits, misses, 0), least = UINT64_MAX;
    int best = 0;
    for (int m = 1; m <= misses; m++)
        if (end_of(c, hits, misses, m) < least) {
            least = end_of(c, hits, misses, m);
            best = m;
        }
    return best && 16 * (alone - (least < alone ? least : alone)) > alone ? best : 0;
}

static void assert_best(const struct split_costs *c, int hits, int misses, int found)
{
    int wanted = best_of(c, hits, misses);
    if (found != wanted)
        fail_msg("%d hits of %u ns, %d misses, link %u + m * %u, cpu %u + n * %u, alone %u + n * %u: m is %d (ends at %llu ns), "
                 "wanted %d (%llu)",
                 hits, c->hit_each, misses, c->link_start, c->link_each, c->cpu_start, c->cpu_each, c->alone_start, c->alone_each,
                 found, (unsigned long long)end_of(c, hits, misses, found), wanted,
                 (unsigned long long)end_of(c, hits, misses, wanted));
}

static int links, chosen;
static void check_best(const struct window *w, const struct split *s)
{
    if (w->costs.share >= 0)
        return;
    assert_best(&w->costs, s->n_hit, s->n - s->n_hit, s->n_link);
    links += s->n_link > 0;
    chosen++;
}

static void the_first_share_that_ends_first_is_chosen(void **state)
{
    links = chosen = 0;
    for_windows(60, check_best);
    assert_true(links > chosen / 10 && links < chosen * 9 / 10); /* both kinds of answer came up */
}

/* A few nanoseconds: many shares end at once. */
static void of_equal_shares_the_smallest_is_chosen(void **state)
{
    for (int i = 0; i < 100000; i++) {
        struct split_costs c = {
            0, random_below(40), random_below(12), random_below(40), random_below(12), random_below(80), random_below(24), -1
        };
        int hits = random_between(0, 12), misses = random_between(0, 20);
        c.hit_each = random_below(c.link_each + 1u);
        assert_best(&c, hits, misses, split_link_count(&c, hits, misses));
    }
}

/* Small experts over a fast link: the device begins with the first that is there, and what it computes after that takes longer than
 * bringing it. */
static void a_device_slower_than_its_link_ends_when_it_has_computed_what_came(void **state)
{
    for (int i = 0; i < 100000; i++) {
        struct split_costs c = { random_below(200), random_below(4000), random_below(100), random_below(400),
                                 random_below(400), random_below(400),  random_below(800), -1 };
        int hits = random_between(0, 12), misses = random_between(0, 60);
        assert_best(&c, hits, misses, split_link_count(&c, hits, misses));
    }
}

static void check_never_later(const struct window *w, const struct split *s)
{
    int misses = s->n - s->n_hit;
    if (w->costs.share < 0)
        assert_true(end_of(&w->costs, s->n_hit, misses, s->n_link) <= end_of(&w->costs, s->n_hit, misses, 0));
}

static void what_is_chosen_never_ends_later_than_the_cpu_alone(void **state) { for_windows(60, check_never_later); }

/* Any of the costs at its limit, or next to nothing, with as many experts as there can be. */
static void the_largest_costs_do_not_overflow(void **state)
{
    for (int i = 0; i < 1 << 10; i++)
        for (int hits = 0; hits <= SPLIT_MAX; hits += hits < 250 ? 50 : 6) {
            struct split_costs c = { i & 1 ? most_each : 0,  i & 2 ? most_start : 1,
                                     i & 4 ? most_each : 1,  i & 8 ? most_start : 1,
                                     i & 16 ? most_each : 1, i & 32 ? most_start : 1,
                                     i & 64 ? most_each : 1, -1 };
            c.link_each -= i & 128 && c.link_each > 1 ? most_each / 3 : 0;
            c.cpu_each -= i & 256 && c.cpu_each > 1 ? most_each / 7 : 0;
            c.alone_each -= i & 512 && c.alone_each > 1 ? most_each / 2 : 0;
            c.hit_each = c.hit_each < c.link_each ? c.hit_each : c.link_each;
            assert_best(&c, hits, SPLIT_MAX - hits, split_link_count(&c, hits, SPLIT_MAX - hits));
        }
}

/* By hand. 10 misses: the CPU alone ends at 1000. With m on the link: the link has brought the last at 50 + 100 m and the device
 * needs 10 more, the CPU ends at 110 (10 - m): m = 5 ends at 560, m = 4 at 660, m = 6 at 660. */
static void the_lanes_of_an_example_end_together(void **state)
{
    struct split_costs c = { 10, 50, 100, 0, 110, 0, 100, -1 };
    assert_int_equal(split_link_count(&c, 3, 10), 5);
    c.link_each = 2000; /* a link that needs twice as long for one expert as the CPU for all */
    assert_int_equal(split_link_count(&c, 3, 10), 0);
    assert_int_equal(split_link_count(&c, 200, 10), 0); /* the hits alone take longer than the CPU */
    assert_int_equal(split_link_count(&c, 3, 0), 0);
}

/* By hand, one miss: the CPU alone ends at 1600, the link and the device at exactly what is given. */
static void a_gain_of_a_sixteenth_is_not_enough(void **state)
{
    struct split_costs c = { 0, 0, 1500, 0, 0, 0, 1600, -1 };
    assert_int_equal(split_link_count(&c, 0, 1), 0);
    c.link_each = 1499;
    assert_int_equal(split_link_count(&c, 0, 1), 1);
}

/* ---- The number that both sides compare
 * ------------------------------------------------------------------------------------------ */

static void check_sum(const struct window *w, const struct split *s)
{
    static struct split other;
    uint32_t sum = split_sum(s);
    for (int i = 0; i < 4; i++) {
        other = *s;
        int32_t at = random_between(0, s->n - 1);
        if (i == 0)
            other.lane[at] = (uint8_t)((other.lane[at] + random_between(1, N_LANES - 1)) % N_LANES);
        else if (i == 1)
            other.slot[at] ^= random_between(1, 32767);
        else if (i == 2)
            other.expert[at] ^= (uint16_t)random_between(1, 511);
        else
            other.n_rows[at] = (uint8_t)(other.n_rows[at] % SPLIT_ROWS + 1);
        assert_int_not_equal(split_sum(&other), sum);
    }
    memset(&other, 0xaa, sizeof other);
    split_plan(&other, w->ids, w->stride, w->n_rows, w->n_used, w->slot_of, &w->costs);
    assert_int_equal(split_sum(&other), sum); /* what lies behind the plan does not count */
}

static void another_lane_slot_expert_or_count_of_rows_gives_another_sum(void **state) { for_windows(60, check_sum); }

/* Two windows that differ in what a row ranks second and third have other results at those ranks, so they are other plans. */
static void another_rank_gives_another_sum(void **state)
{
    static struct split a, b;
    static const int32_t slots[5] = { -1, -1, -1, -1, -1 }, first[] = { 1, 2, 3, 1, 3, 2 }, second[] = { 1, 2, 3, 1, 2, 3 };
    struct split_costs costs = { .share = 0 };
    split_plan(&a, first, 3, 2, 3, slots, &costs);
    split_plan(&b, second, 3, 2, 3, slots, &costs);
    assert_int_not_equal(split_sum(&a), split_sum(&b));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_choice_of_every_row_is_listed_once),
        cmocka_unit_test(every_expert_is_listed_once_with_its_slot),
        cmocka_unit_test(experts_stand_in_the_order_of_first_use),
        cmocka_unit_test(hits_stay_and_the_last_misses_go_over_the_link),
        cmocka_unit_test(a_share_that_is_given_is_kept),
        cmocka_unit_test(a_share_of_everything_is_everything),
        cmocka_unit_test(the_first_share_that_ends_first_is_chosen),
        cmocka_unit_test(of_equal_shares_the_smallest_is_chosen),
        cmocka_unit_test(a_device_slower_than_its_link_ends_when_it_has_computed_what_came),
        cmocka_unit_test(what_is_chosen_never_ends_later_than_the_cpu_alone),
        cmocka_unit_test(the_largest_costs_do_not_overflow),
        cmocka_unit_test(the_lanes_of_an_example_end_together),
        cmocka_unit_test(a_gain_of_a_sixteenth_is_not_enough),
        cmocka_unit_test(another_lane_slot_expert_or_count_of_rows_gives_another_sum),
        cmocka_unit_test(another_rank_gives_another_sum),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
