/* ref.h - the plain C kernels: the definition of every bit. They fill the whole table; the ladder starts here. */
#ifndef OPS_REF_REF_H
#define OPS_REF_REF_H

#include "ops/kernels.h"
#include "ops/vector.h"

void kernels_ref(struct kernels *k);

#endif
