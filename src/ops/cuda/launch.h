/* launch.h - the size of a kernel's grid. Plain C, for the host's side and the tests; device code does not need it. */
#ifndef OPS_CUDA_LAUNCH_H
#define OPS_CUDA_LAUNCH_H

/* Blocks in x, y, z; threads of a block (in x); bytes of dynamic shared memory, at most 48 KB. */
struct launch { unsigned x, y, z, threads, shared_bytes; };

#endif
