/* controller.h - what each lane costs, learned from what it took, so that split.h can end all lanes together.
 *
 * Costs are straight lines, start + count * each, fitted by least squares over the recent past, for every class of blob size and every window
 * width. The CPU has two lines: alone, and while the link takes bandwidth from it; a split is only chosen if it beats the CPU alone (never worse
 * than m = 0). A line that is not used any more would grow old, so now and then one layer of a window is split on purpose as it would
 * not be: without the link, or with one expert on it.
 */
#ifndef EXPERT_CONTROLLER_H
#define EXPERT_CONTROLLER_H

#include "expert/split.h"

#include <stdbool.h>

enum cost_line { COST_HIT, COST_LINK, COST_CPU, COST_ALONE, COST_LINES };

/* A line through recent points, older ones fading. */
struct cost_fit { double weight, x, y, xx, xy; };

struct controller {
    int n_classes;
    struct cost_fit (*fits)[SPLIT_ROWS + 1][COST_LINES]; /* [n_classes][width] */
};

int controller_create(struct controller *c, int n_classes); /* 0 or -1: no memory */
void controller_destroy(struct controller *c);
/* `count` experts, at least one, took `ns`. */
void controller_learn(struct controller *c, int class, int width, enum cost_line line, int count, double ns);
/* The costs of a class at a window width; share is -1 (choose) if all lines are known, else 0. A width that was never seen borrows from the nearest. */
struct split_costs controller_costs(const struct controller *c, int class, int width);

#endif
