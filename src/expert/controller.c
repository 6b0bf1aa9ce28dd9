#include "expert/controller.h"

#include <stdlib.h>

/* A point's weight halves every 35 later ones: layers of a class give dozens of points a window, so a change of load (another program, a
 * hotter CPU) is followed within a second, while one late wake-up moves nothing. */
static const double fading = 0.98;

int controller_create(struct controller *c, int n_classes)
{
    c->n_classes = n_classes;
    c->fits = calloc((size_t)n_classes, sizeof *c->fits);
    return c->fits ? 0 : -1;
}

void controller_destroy(struct controller *c)
{
    free(c->fits);
    c->fits = NULL;
}

static double each_of(const struct cost_fit *f)
{
    double spread = f->weight * f->xx - f->x * f->x, mean = f->y / f->x;
    /* Counts that hardly vary say nothing about the slope: then all time counts as the experts' own. */
    double slope = spread > 0.02 * f->weight * f->xx ? (f->weight * f->xy - f->x * f->y) / spread : mean;
    return slope < 0 ? 0 : slope > mean ? mean : slope;
}

static double start_of(const struct cost_fit *f) { return (f->y - each_of(f) * f->x) / f->weight; }

void controller_learn(struct controller *c, int class, int width, enum cost_line line, int count, double ns)
{
    struct cost_fit *f = &c->fits[class][width][line];
    double x = count, expected = f->weight > 4 && f->y > 0 ? start_of(f) + each_of(f) * x : ns;
    if (ns > 4 * expected) /* the thread was taken off its core: not a cost of the lane, unless it stays so */
        ns = 4 * expected;
    f->weight = f->weight * fading + 1;
    f->x = f->x * fading + x;
    f->y = f->y * fading + ns;
    f->xx = f->xx * fading + x * x;
    f->xy = f->xy * fading + x * ns;
}

/* The fit of a line at this width, or at the nearest width that has one; NULL if none has. */
static const struct cost_fit *known(const struct controller *c, int class, int width, enum cost_line line)
{
    for (int away = 0; away <= SPLIT_ROWS; away++) {
        if (width - away >= 1 && c->fits[class][width - away][line].weight > 0)
            return &c->fits[class][width - away][line];
        if (width + away <= SPLIT_ROWS && c->fits[class][width + away][line].weight > 0)
            return &c->fits[class][width + away][line];
    }
    return NULL;
}

/* Limits that keep split.h's sums of up to SPLIT_MAX experts inside 32 bits. */
static uint32_t start_ns(double ns) { return ns < 0 ? 0 : ns > 1e8 ? 100000000 : (uint32_t)ns; }
static uint32_t each_ns(double ns) { return ns < 0 ? 0 : ns > 1e7 ? 10000000 : (uint32_t)ns; }

struct split_costs controller_costs(const struct controller *c, int class, int width)
{
    struct split_costs costs = { .share = 0 };
    const struct cost_fit *hit = known(c, class, width, COST_HIT), *link = known(c, class, width, COST_LINK), *cpu = known(c, class, width, COST_CPU),
                          *alone = known(c, class, width, COST_ALONE);
    if (!hit || !link || !cpu || !alone)
        return costs;
    costs.hit_each = each_ns(hit->y / hit->x); /* the device's start is paid in every split */
    costs.link_start = start_ns(start_of(link));
    costs.link_each = each_ns(each_of(link));
    costs.cpu_start = start_ns(start_of(cpu));
    costs.cpu_each = each_ns(each_of(cpu));
    costs.alone_start = start_ns(start_of(alone));
    costs.alone_each = each_ns(each_of(alone));
    costs.share = -1;
    return costs;
}
