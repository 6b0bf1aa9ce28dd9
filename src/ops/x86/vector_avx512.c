/* The text of ref/vector.c, compiled for this instruction set (flags by file name, see the Makefile). */
#include <immintrin.h>

#define VECTOR_TABLE vector_kernels_avx512
#include "ops/ref/vector.c"
