/* profile.h - what was learned about which experts a model uses, kept over restarts (docs/FORMAT.md, "Profile"). */
#ifndef EXPERT_PROFILE_H
#define EXPERT_PROFILE_H

#include "base/error.h"

/* Reads a profile [n_layers][n_experts] (residency.h) into the caller's memory. A file of another model's shape, or a damaged one, is refused with a sentence. */
int profile_read(const char *path, int n_layers, int n_experts, float *profile, struct strata_error *error);
/* Writes to a temporary file beside it, then renames: the old profile stays whole whatever happens. */
int profile_write(const char *path, int n_layers, int n_experts, const float *profile, struct strata_error *error);

#endif
