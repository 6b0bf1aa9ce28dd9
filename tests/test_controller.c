/* The controller: fed with what lanes of known speed would take, it leads to the split that ends first; one late wake-up moves
 * nothing for long, a lane that has become slower is followed, and what is not known is not guessed. */
#include "expert/controller.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static uint64_t random_state = 1;
static int random_below(int n)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (int)((random_state >> 33) % (uint64_t)n);
}

static double random_part(void) { return random_below(1 << 24) / (double)(1 << 24); }

static struct controller create(int n_classes)
{
    struct controller c;
    assert_int_equal(controller_create(&c, n_classes), 0);
    return c;
}

/* ---- A machine of known speed
 * ---------------------------------------------------------------------------------------------------- */

/* Nanoseconds. A layer of a window has `experts` distinct ones, each of them a hit with probability `hits`. */
struct machine {
    const char *name;
    double hit_each, link_start, link_each, cpu_start, cpu_each, alone_start, alone_each, noise, hits;
    int experts, width;
};

/* When a layer ends with m of its misses on the link: the device computes its hits, then what has come. */
static double end_of(const struct machine *a, int hits, int misses, int m)
{
    double device = hits * a->hit_each, cpu = 0;
    for (int i = 1; i <= m; i++)
        device = fmax(device, a->link_start + i * a->link_each) + a->hit_each;
    if (m < misses)
        cpu = m ? a->cpu_start + (misses - m) * a->cpu_each : a->alone_start + (misses - m) * a->alone_each;
    return fmax(device, cpu);
}

/* The earliest end; that of the CPU alone where the best gains less than the sixteenth that a split must gain. */
static double best_end(const struct machine *a, int hits, int misses)
{
    double none = end_of(a, hits, misses, 0), best = none;
    for (int m = 1; m <= misses; m++)
        best = fmin(best, end_of(a, hits, misses, m));
    return best < none * 15 / 16 ? best : none;
}

static double noisy(const struct machine *a, double ns) { return ns * (1 + a->noise * (2 * random_part() - 1)); }

/* What the lanes report of a layer. */
static void learn_layer(struct controller *c, const struct machine *a, int hits, int misses, int m)
{
    if (hits + m)
        controller_learn(c, 0, a->width, COST_HIT, hits + m, noisy(a, (hits + m) * a->hit_each));
    if (m)
        controller_learn(c, 0, a->width, COST_LINK, m, noisy(a, a->link_start + m * a->link_each));
    if (misses > m && m)
        controller_learn(c, 0, a->width, COST_CPU, misses - m, noisy(a, a->cpu_start + (misses - m) * a->cpu_each));
    else if (misses > m)
        controller_learn(c, 0, a->width, COST_ALONE, misses - m, noisy(a, a->alone_start + (misses - m) * a->alone_each));
}

/* Before the first window: a few layers without hits, split in given ways. */
static void measure(struct controller *c, const struct machine *a)
{
    static const int of_8[] = { 0, 0, 0, 4, 8, -1, 4, 0 };
    for (int i = 0; i < 8; i++)
        learn_layer(c, a, 0, a->experts, of_8[i] < 0 ? 1 : of_8[i] * a->experts / 8);
}

struct ends {
    double chosen, best, alone;
};

/* Windows of 12 layers. In every eighth, one layer is split on purpose as it would not be. Returns the sums of the others' true
 * ends. */
static struct ends serve(struct controller *c, const struct machine *a, int windows)
{
    struct ends sum = { 0 };
    for (int w = 0; w < windows; w++) {
        struct split_costs costs = controller_costs(c, 0, a->width);
        assert_int_equal(costs.share, -1);
        for (int layer = 0; layer < 12; layer++) {
            int hits = 0;
            for (int i = 0; i < a->experts; i++)
                hits += random_part() < a->hits;
            int misses = a->experts - hits, m = split_link_count(&costs, hits, misses);
            if (w % 8 == 0 && layer == w / 8 % 12) {
                m = w / 96 % 2 && misses ? 1 : 0;
            } else {
                sum.chosen += end_of(a, hits, misses, m);
                sum.best += best_end(a, hits, misses);
                sum.alone += end_of(a, hits, misses, 0);
            }
            learn_layer(c, a, hits, misses, m);
        }
    }
    return sum;
}

static void assert_best(struct ends e, const char *what)
{
    if (!(e.chosen <= 1.02 * e.best))
        fail_msg("%s: the chosen splits end after %.0f us, the best after %.0f, the CPU alone after %.0f", what, e.chosen / 1e3,
                 e.best / 1e3, e.alone / 1e3);
}

/* Experts of 1.7 MB: over PCIe 4.0 x4, 4.0 x16 and 5.0 x16, on CPUs of one to four times 30 GB/s, in caches of any size; then small
 * ones, and many at once. */
static const struct machine machines[] = {
    { "a slow link", 4e3, 12e3, 283e3, 9e3, 62e3, 6e3, 56e3, 0.03, 0.4, 10, 1 },
    { "a usual link", 4e3, 12e3, 68e3, 9e3, 65e3, 6e3, 56e3, 0.03, 0.4, 10, 1 },
    { "a usual link and a fast CPU", 4e3, 12e3, 68e3, 9e3, 22e3, 6e3, 14e3, 0.03, 0.4, 10, 1 },
    { "a fast link", 3e3, 10e3, 31e3, 9e3, 40e3, 6e3, 28e3, 0.03, 0.4, 10, 1 },
    { "a fast link and a slow CPU", 3e3, 10e3, 31e3, 9e3, 120e3, 6e3, 110e3, 0.03, 0.4, 10, 1 },
    { "an empty cache", 3e3, 10e3, 31e3, 9e3, 60e3, 6e3, 50e3, 0.03, 0, 10, 1 },
    { "few misses", 3e3, 10e3, 31e3, 9e3, 60e3, 6e3, 50e3, 0.03, 0.85, 10, 1 },
    { "hits that take long", 20e3, 10e3, 31e3, 9e3, 60e3, 6e3, 50e3, 0.03, 0.6, 10, 1 },
    { "small experts", 300, 8e3, 1100, 4e3, 2500, 3e3, 1900, 0.03, 0.4, 10, 1 },
    { "eight rows", 4e3, 12e3, 68e3, 9e3, 95e3, 6e3, 90e3, 0.03, 0.5, 60, 8 },
    { "an exact clock", 3e3, 10e3, 31e3, 9e3, 60e3, 6e3, 50e3, 0, 0.5, 10, 1 },
    { "much noise", 3e3, 10e3, 31e3, 9e3, 60e3, 6e3, 50e3, 0.1, 0.5, 10, 1 },
};
enum { MACHINES = sizeof machines / sizeof *machines };

static void on_every_machine_the_lanes_end_within_2_percent_of_the_best(void **state)
{
    for (int i = 0; i < MACHINES; i++) {
        struct controller c = create(1);
        measure(&c, &machines[i]);
        serve(&c, &machines[i], 100);
        assert_best(serve(&c, &machines[i], 2000), machines[i].name);
        controller_destroy(&c);
    }
}

/* Every layer: the measuring errs by the noise, not by more. */
static void no_split_ends_later_than_the_cpu_alone(void **state)
{
    for (int i = 0; i < MACHINES; i++) {
        const struct machine *a = &machines[i];
        struct controller c = create(1);
        measure(&c, a);
        serve(&c, a, 100); /* until then a line may be known of large counts only */
        for (int w = 0; w < 500; w++) {
            serve(&c, a, 1);
            struct split_costs costs = controller_costs(&c, 0, a->width);
            for (int hits = 0; hits <= a->experts; hits++) {
                int misses = a->experts - hits, m = split_link_count(&costs, hits, misses);
                double end = end_of(a, hits, misses, m), alone = end_of(a, hits, misses, 0);
                if (end > alone * (1.001 + a->noise))
                    fail_msg("%s, window %d, %d hits: %d of %d on the link end after %.0f us, the CPU alone after %.0f", a->name, w,
                             hits, m, misses, end / 1e3, alone / 1e3);
            }
        }
        controller_destroy(&c);
    }
}

static void a_link_that_never_pays_is_not_used(void **state)
{
    struct machine a = machines[0];
    a.link_each = 3e6;
    struct controller c = create(1);
    measure(&c, &a);
    struct ends e = serve(&c, &a, 300);
    assert_true(e.chosen == e.alone);
    controller_destroy(&c);
}

/* ---- Changes
 * --------------------------------------------------------------------------------------------------------------------- */

static void a_machine_that_changes_is_followed(void **state)
{
    struct machine a = machines[3], b = a;
    b.cpu_each *= 2;
    b.alone_each *= 2;
    struct controller c = create(1);
    measure(&c, &a);
    serve(&c, &a, 200);
    serve(&c, &b, 20); /* 100 points for the line of the CPU beside the link, and more */
    assert_best(serve(&c, &b, 20), "a CPU that has become slower");
    b.link_each /= 3;
    b.cpu_each = a.cpu_each;
    b.alone_each = a.alone_each;
    serve(&c, &b, 20);
    assert_best(serve(&c, &b, 20), "and then a link that has become faster");
    controller_destroy(&c);
}

/* Points on a line, counts 1 to 10. */
static void learn_line(struct controller *c, enum cost_line line, double start, double each, int points)
{
    for (int i = 0; i < points; i++) {
        int count = 1 + random_below(10);
        controller_learn(c, 0, 1, line, count, start + count * each);
    }
}

static struct controller all_lines(void)
{
    struct controller c = create(1);
    learn_line(&c, COST_HIT, 0, 3000, 300);
    learn_line(&c, COST_LINK, 10000, 30000, 300);
    learn_line(&c, COST_CPU, 9000, 60000, 300);
    learn_line(&c, COST_ALONE, 6000, 50000, 300);
    return c;
}

#define assert_close(found, wanted, part)                                                                                          \
    do {                                                                                                                           \
        double f_ = (double)(found), w_ = (double)(wanted);                                                                        \
        if (!(fabs(f_ - w_) <= (part)*fabs(w_) + 1.01)) /* costs are whole nanoseconds */                                          \
            fail_msg("line %d: %s is %g, wanted %g", __LINE__, #found, f_, w_);                                                    \
    } while (0)

static void assert_costs(const struct controller *c, double part)
{
    struct split_costs costs = controller_costs(c, 0, 1);
    assert_int_equal(costs.share, -1);
    assert_close(costs.hit_each, 3000, part);
    assert_close(costs.link_start, 10000, part);
    assert_close(costs.link_each, 30000, part);
    assert_close(costs.cpu_start, 9000, part);
    assert_close(costs.cpu_each, 60000, part);
    assert_close(costs.alone_start, 6000, part);
    assert_close(costs.alone_each, 50000, part);
}

static void points_on_a_line_give_that_line(void **state)
{
    struct controller c = all_lines();
    assert_costs(&c, 1e-6);
    controller_destroy(&c);
}

/* Of any size: above the limit it counts as four times what was expected. */
static void a_point_far_out_moves_the_line_a_little_and_is_forgotten(void **state)
{
    static const double sizes[] = { 50, 1e3, 1e9 };
    for (int i = 0; i < 3; i++) {
        struct controller c = all_lines();
        controller_learn(&c, 0, 1, COST_CPU, 5, sizes[i] * (9000 + 5 * 60000));
        struct split_costs costs = controller_costs(&c, 0, 1);
        assert_close(costs.cpu_start + 5.0 * costs.cpu_each, 9000 + 5 * 60000.0,
                     0.08); /* three times what was expected, in fifty */
        learn_line(&c, COST_CPU, 9000, 60000, 350);
        assert_costs(&c, 0.01);
        controller_destroy(&c);
    }
}

static void after_a_point_far_out_the_splits_stay_good(void **state)
{
    const struct machine *a = &machines[3];
    struct controller c = create(1);
    measure(&c, a);
    serve(&c, a, 200);
    for (int line = 0; line < COST_LINES; line++) {
        controller_learn(&c, 0, 1, (enum cost_line)line, 4, 50 * 4 * 60e3);
        struct ends at_once = serve(&c, a, 1);
        assert_true(at_once.chosen <= 1.25 * at_once.best);
        serve(&c, a, line == COST_ALONE ? 800 : 25); /* that line is fed by every second eighth window only */
        assert_best(serve(&c, a, 50), "after a point far out");
    }
    controller_destroy(&c);
}

static void a_cost_that_has_doubled_is_known_after_100_points(void **state)
{
    struct controller c = all_lines();
    learn_line(&c, COST_CPU, 18000, 120000, 100);
    struct split_costs costs = controller_costs(&c, 0, 1);
    assert_close(costs.cpu_start + 5.0 * costs.cpu_each, 18000 + 5 * 120000.0, 0.1);
    learn_line(&c, COST_CPU, 4500, 30000, 150);
    costs = controller_costs(&c, 0, 1);
    assert_close(costs.cpu_start + 5.0 * costs.cpu_each, 4500 + 5 * 30000.0, 0.2);
    assert_close(costs.alone_each, 50000, 1e-6);
    controller_destroy(&c);
}

static void what_stays_a_hundred_times_slower_is_believed(void **state)
{
    struct controller c = all_lines();
    learn_line(&c, COST_LINK, 1e6, 3e6, 500);
    struct split_costs costs = controller_costs(&c, 0, 1);
    assert_close(costs.link_start + 5.0 * costs.link_each, 1e6 + 5 * 3e6, 0.05);
    controller_destroy(&c);
}

/* A coarse clock says 0 of a short time; later ones are longer. */
static void a_line_that_began_with_zeros_learns_what_follows(void **state)
{
    struct controller c = all_lines();
    memset(&c.fits[0][1][COST_HIT], 0, sizeof c.fits[0][1][COST_HIT]);
    for (int i = 0; i < 6; i++)
        controller_learn(&c, 0, 1, COST_HIT, 1, 0);
    learn_line(&c, COST_HIT, 0, 3000, 400);
    assert_close(controller_costs(&c, 0, 1).hit_each, 3000, 0.05);
    controller_destroy(&c);
}

/* ---- What is not known
 * ----------------------------------------------------------------------------------------------------------- */

static void without_every_line_nothing_goes_over_the_link(void **state)
{
    for (int known = 0; known < 1 << COST_LINES; known++) {
        struct controller c = create(1);
        for (int line = 0; line < COST_LINES; line++)
            if (known >> line & 1)
                controller_learn(&c, 0, 3, (enum cost_line)line, 4, 1000);
        for (int width = 1; width <= SPLIT_ROWS; width++) {
            struct split_costs costs = controller_costs(&c, 0, width);
            assert_int_equal(costs.share, known == (1 << COST_LINES) - 1 ? -1 : 0);
        }
        controller_destroy(&c);
    }
}

static void classes_do_not_borrow_from_each_other(void **state)
{
    struct controller c = create(3);
    for (int class = 0; class < 2; class ++)
        for (int line = 0; line < COST_LINES; line++)
            controller_learn(&c, class, 1 + class, (enum cost_line)line, 1, 1000 * (1 + class));
    for (int width = 1; width <= 3; width++) {
        assert_int_equal(controller_costs(&c, 0, width).cpu_each, 1000);
        assert_int_equal(controller_costs(&c, 1, width).cpu_each, 2000);
        assert_int_equal(controller_costs(&c, 2, width).share, 0);
    }
    controller_destroy(&c);
}

/* Every set of widths that were seen, each with its own cost. */
static void a_width_that_was_never_seen_borrows_from_the_nearest(void **state)
{
    for (int seen = 1; seen < 1 << SPLIT_ROWS; seen++) {
        struct controller c = create(1);
        for (int width = 1; width <= SPLIT_ROWS; width++)
            for (int line = 0; seen >> (width - 1) & 1 && line < COST_LINES; line++)
                controller_learn(&c, 0, width, (enum cost_line)line, 1, 1000 * width);
        for (int width = 1; width <= SPLIT_ROWS; width++) {
            struct split_costs costs = controller_costs(&c, 0, width);
            int from = (int)costs.cpu_each / 1000, away = SPLIT_ROWS;
            for (int other = 1; other <= SPLIT_ROWS; other++)
                if (seen >> (other - 1) & 1 && abs(other - width) < away)
                    away = abs(other - width);
            assert_in_range(from, 1, SPLIT_ROWS);
            assert_true(seen >> (from - 1) & 1);
            assert_int_equal(abs(from - width), away);
            assert_int_equal(costs.hit_each, costs.cpu_each);
            assert_int_equal(costs.link_each, costs.cpu_each);
            assert_int_equal(costs.alone_each, costs.cpu_each);
        }
        controller_destroy(&c);
    }
}

static void each_line_borrows_for_itself(void **state)
{
    struct controller c = create(1);
    controller_learn(&c, 0, 2, COST_HIT, 1, 100);
    controller_learn(&c, 0, 8, COST_HIT, 1, 200);
    controller_learn(&c, 0, 4, COST_LINK, 1, 300);
    controller_learn(&c, 0, 6, COST_CPU, 1, 400);
    controller_learn(&c, 0, 1, COST_ALONE, 1, 500);
    controller_learn(&c, 0, 7, COST_ALONE, 1, 600);
    struct split_costs costs = controller_costs(&c, 0, 6);
    assert_int_equal(costs.hit_each, 200);
    assert_int_equal(costs.link_each, 300);
    assert_int_equal(costs.cpu_each, 400);
    assert_int_equal(costs.alone_each, 600);
    controller_destroy(&c);
}

/* ---- Lines
 * ----------------------------------------------------------------------------------------------------------------------- */

/* Ten experts, always or one more or less: whether that is a long start or slow experts cannot be known, and all time counts as the
 * experts'. */
static void counts_that_hardly_vary_have_no_start(void **state)
{
    for (int more = 0; more < 2; more++) {
        struct controller c = create(1);
        for (int i = 0; i < 1000; i++)
            for (int line = 0; line < COST_LINES; line++) {
                int count = 10 + more * (random_below(3) - 1);
                controller_learn(&c, 0, 1, (enum cost_line)line, count, (30000 + 2000 * count) * (0.9 + 0.2 * random_part()));
            }
        struct split_costs costs = controller_costs(&c, 0, 1);
        uint32_t each[] = { costs.hit_each, costs.link_each, costs.cpu_each, costs.alone_each };
        for (int i = 0; i < 4; i++)
            assert_close(each[i], 5000, 0.04);
        assert_in_range(costs.link_start + costs.cpu_start + costs.alone_start, 0, 3);
        controller_destroy(&c);
    }
}

/* Least squares, written out: points weigh 0.98 to the power of how many came after. */
static void least_squares(const double *count, const double *ns, int n, double *start, double *each)
{
    double weight = 0, x = 0, y = 0, xx = 0, xy = 0;
    for (int i = 0; i < n; i++) {
        double w = pow(0.98, n - 1 - i);
        weight += w;
        x += w * count[i];
        y += w * ns[i];
    }
    x /= weight;
    y /= weight;
    for (int i = 0; i < n; i++) {
        double w = pow(0.98, n - 1 - i);
        xx += w * (count[i] - x) * (count[i] - x);
        xy += w * (count[i] - x) * (ns[i] - y);
    }
    *each = xy / xx;
    *start = y - *each * x;
    if (*each < 0) { /* neither a start nor an expert takes less than nothing */
        *each = 0;
        *start = y;
    } else if (*start < 0) {
        *each = y / x;
        *start = 0;
    }
}

static void a_line_is_that_of_least_squares(void **state)
{
    double count[400], ns[400], start, each;
    for (int run = 0; run < 300; run++) {
        struct controller c = all_lines();
        memset(&c.fits[0][1][COST_LINK], 0, sizeof c.fits[0][1][COST_LINK]);
        int n = 20 + random_below(380), most = 3 + random_below(60);
        double true_start = 1e5 * random_part(), true_each = random_below(4) ? 1e5 * random_part() : -true_start / (2 * most);
        for (int i = 0; i < n; i++) {
            count[i] = 1 + i % most;
            ns[i] = (true_start + count[i] * true_each) * (0.8 + 0.4 * random_part());
            controller_learn(&c, 0, 1, COST_LINK, (int)count[i], ns[i]);
        }
        least_squares(count, ns, n, &start, &each);
        struct split_costs costs = controller_costs(&c, 0, 1);
        assert_close(costs.link_start, start, 1e-6);
        assert_close(costs.link_each, each, 1e-6);
        controller_destroy(&c);
    }
}

/* Whatever was measured, costs stay where split.h can add them up, and no line is ruined. */
static void costs_keep_their_limits(void **state)
{
    static const double times[] = { 0, 1, 1e3, 1e6, 1e9, 4294967295.0, 1e18 };
    for (int run = 0; run < 2000; run++) {
        struct controller c = create(1);
        for (int i = 0; i < 60; i++)
            for (int line = 0; line < COST_LINES; line++) {
                int count = run % 2 ? 1 + random_below(SPLIT_MAX) : random_below(2) ? 1 : SPLIT_MAX;
                controller_learn(&c, 0, 1, (enum cost_line)line, count, times[random_below(7)]);
                const struct cost_fit *f = &c.fits[0][1][line];
                assert_true(isfinite(f->weight) && isfinite(f->x) && isfinite(f->y) && isfinite(f->xx) && isfinite(f->xy));
            }
        struct split_costs costs = controller_costs(&c, 0, 1);
        assert_int_equal(costs.share, -1);
        assert_true(costs.hit_each <= 10000000 && costs.link_each <= 10000000 && costs.cpu_each <= 10000000 &&
                    costs.alone_each <= 10000000);
        assert_true(costs.link_start <= 100000000 && costs.cpu_start <= 100000000 && costs.alone_start <= 100000000);
        controller_destroy(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(on_every_machine_the_lanes_end_within_2_percent_of_the_best),
        cmocka_unit_test(no_split_ends_later_than_the_cpu_alone),
        cmocka_unit_test(a_link_that_never_pays_is_not_used),
        cmocka_unit_test(a_machine_that_changes_is_followed),
        cmocka_unit_test(points_on_a_line_give_that_line),
        cmocka_unit_test(a_point_far_out_moves_the_line_a_little_and_is_forgotten),
        cmocka_unit_test(after_a_point_far_out_the_splits_stay_good),
        cmocka_unit_test(a_cost_that_has_doubled_is_known_after_100_points),
        cmocka_unit_test(what_stays_a_hundred_times_slower_is_believed),
        cmocka_unit_test(a_line_that_began_with_zeros_learns_what_follows),
        cmocka_unit_test(without_every_line_nothing_goes_over_the_link),
        cmocka_unit_test(classes_do_not_borrow_from_each_other),
        cmocka_unit_test(a_width_that_was_never_seen_borrows_from_the_nearest),
        cmocka_unit_test(each_line_borrows_for_itself),
        cmocka_unit_test(counts_that_hardly_vary_have_no_start),
        cmocka_unit_test(a_line_is_that_of_least_squares),
        cmocka_unit_test(costs_keep_their_limits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
