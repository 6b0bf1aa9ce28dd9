/* dot_experts.cu - experts in the formats that experts come in. */
#include "ops/cuda/dot_experts.cuh"

#define EXPERTS(name)                                                                                                                                \
    DOT_KERNEL(dot_experts_##name##_4, dot_experts_args) { experts(&a, QUANT_##name, false, 0); }                                                       \
    DOT_KERNEL(dot_experts_##name##_8, dot_experts_args) { experts(&a, QUANT_##name, true, 0); }
DOT_HOT(EXPERTS)
