/* fatbin.h - the kernels of src/ops/cuda/NAME.cu as the driver loads them: one fat binary each, embedded in the library when it is built with nvcc. */
#ifndef OPS_CUDA_FATBIN_H
#define OPS_CUDA_FATBIN_H

#include <stddef.h>

struct cuda_fatbin { const void *data; size_t bytes; };

/* Ends with data NULL, which is also the first entry of a build without nvcc. A kernel is in one of them, under its name. */
extern const struct cuda_fatbin cuda_fatbins[];

#endif
